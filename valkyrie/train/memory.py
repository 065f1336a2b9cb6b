"""Memory of a training step on one device, for one layout or for thousands at once.

The sizes of parameters, gradients, optimizer state and the EMA of the parameters follow from shapes. Sizes of
activations are estimated from the `SavedActivation`s that the model's blocks declare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from valkyrie.axes import BATCH, LAYERS, SEQ, Parameter, padding_ratio
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig, usable_hbm
from valkyrie.models import LayeredModel, layer_blocks
from valkyrie.models.block import BLOCK_INPUT, SavedActivation
from valkyrie.models.stack import LOSS_SEQUENCES
from valkyrie.ops.choices import ATTENTION_OUTPUT
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.partition import MemoryKind, SumGradientsPer
from valkyrie.parallel.remat import ActivationLocation, RematConfig, saved_location
from valkyrie.precision import ACCUMULATOR_DTYPE
from valkyrie.train.memory_errors import UNKNOWN_ERROR, memory_estimate_errors

UNNAMED = "everything else"
"""Key for the saved bytes of activations without a name."""

_KERNEL_ARRAYS = ("query", "key", "value", ATTENTION_OUTPUT)
"""Names of the activations that attention kernels read and write."""

GATHERED_LOGITS = 0.8 / 0.65
"""Memory of the loss relative to that of other layouts if the gradient of the unembedding all-gathers the batch (seven
layouts of gpt_125m, experiments/search/compiled.json)."""

Bytes = TypeVar("Bytes", int, np.ndarray)


@dataclass(frozen=True)
class ExpectedMemory(Generic[Bytes]):
    """Peak memory of a step by part, in bytes per device: numbers for one layout, or arrays for several.

    `ema` is the EMA (exponential moving average) of the parameters, 0 if the run has none.
    """

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    ema: Bytes
    activations: Bytes

    @property
    def persistent(self) -> Bytes:
        """Bytes per device in use between steps: parameters, optimizer state and the EMA of the parameters."""
        return self.parameters + self.optimizer + self.ema

    @property
    def total(self) -> Bytes:
        """Sum of all parts, in bytes per device."""
        return self.parameters + self.gradients + self.optimizer + self.ema + self.activations


class MemoryEstimator:
    """Estimates the memory of a step under several layouts. Parts that do not depend on remat are computed only once.

    Args:
        run: Model, batch, precision and optimizer.
        layouts: The layouts. Every returned array has one entry per layout, in bytes per device.
        chip: The chip that limits the memory, or None for that of the run's target.
    """

    def __init__(self, run: Run, layouts: Candidates, chip: ChipConfig | None = None) -> None:
        self.run, self.layouts, self.chip = run, layouts, chip or run.config.target.chip

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The model's parameters."""
        return tuple(self.run.model.parameters().values())

    def estimate(self, remat: RematConfig) -> ExpectedMemory[np.ndarray]:
        """Return the device memory under a remat policy. Omits arrays that the partition keeps in host memory."""
        return self._choose(remat)[1]

    def sums_gradients_once(self, remat: RematConfig) -> np.ndarray:
        """Return, for each layout, whether a step sums gradients over the shards of the batch only once.

        This implements `SumGradientsPer`. The step, its estimates and reports all use this function.
        """
        # Without a choice, estimates of the time alone need no estimate of the memory, which takes longer.
        return self._choose(remat)[0] if self._may_sum_once else np.zeros(len(self.layouts), bool)

    @cached_property
    def _may_sum_once(self) -> bool:
        """Whether a step under any of the layouts can sum gradients once, and the partition permits it."""
        is_refused = self.layouts.partition.sum_gradients_per in (SumGradientsPer.microbatch, SumGradientsPer.hybrid)
        return not is_refused and bool(self.layouts.can_sum_gradients_once.any())

    def _choose(self, remat: RematConfig) -> tuple[np.ndarray, ExpectedMemory[np.ndarray]]:
        """Return the results of `sums_gradients_once` and `estimate`."""
        key = (*remat.save, None, *remat.offload)
        if key not in self._choices:
            can_sum_once, setting = self.layouts.can_sum_gradients_once, self.layouts.partition.sum_gradients_per
            if not self._may_sum_once:
                self._choices[key] = np.zeros(len(self.layouts), bool), self._estimate(remat, "stored")
            else:
                once, other = (self._estimate(remat, kind) for kind in ("accumulated", "stored"))
                sums_once = can_sum_once & (self._fits(once) | (setting is SumGradientsPer.step))
                parts = {name: np.where(sums_once, bytes_, vars(other)[name]) for name, bytes_ in vars(once).items()}
                self._choices[key] = sums_once, ExpectedMemory(**parts)
        return self._choices[key]

    @cached_property
    def _choices(self) -> dict[tuple[str | None, ...], tuple[np.ndarray, ExpectedMemory[np.ndarray]]]:
        """Results of `_choose` by the lists of the remat policy. The estimate of step times needs them too."""
        return {}

    def _fits(self, once: ExpectedMemory[np.ndarray]) -> np.ndarray:
        """Return whether `auto` sums gradients once per step, for each layout. A step then needs the memory `once`."""
        is_no_larger = self._gradient_bytes["accumulated"] <= self._gradient_bytes["stored"]
        usable = usable_hbm(self.chip)
        if usable is None:
            return is_no_larger
        has_errors = get_platform(self.run.config.target.platform).has_estimate_errors
        error = memory_estimate_errors(has_pipeline=False).high if has_errors else UNKNOWN_ERROR
        return is_no_larger | (once.total * error <= usable)

    def _estimate(self, remat: RematConfig, gradients_kind: str) -> ExpectedMemory[np.ndarray]:
        """Return the estimate if gradients of microbatches are split like `gradients_kind`, `stored` or `accumulated`.

        The kinds are those of `Candidates.shard_elements`.
        """
        partition, (parameters, optimizer_state, ema) = self.layouts.partition, self._array_bytes
        gradients = self._gradient_bytes[gradients_kind]
        on_device = partition.parameter_memory is MemoryKind.device
        return ExpectedMemory(
            parameters=parameters * on_device,
            gradients=gradients,
            optimizer=optimizer_state * (partition.optimizer_memory is MemoryKind.device),
            ema=ema * on_device,
            activations=self._activations(remat, gradients, gradients_kind) + self._stage_copies(gradients_kind),
        )

    def _stage_copies(self, gradients_kind: str) -> np.ndarray:
        """Return the bytes of copies of a pipeline stage's parameters, or 0 without a pipeline.

        XLA casts them to the compute dtype once, before the loop over turns. A pipeline that sums gradients once also
        gathers them there. A circular schedule has three more, in float32: the layers from other stages, and two of
        their gradients.
        """
        layouts, policy = self.layouts, self.run.config.precision
        if not (layouts.stages > 1).any():
            return np.zeros(len(layouts))
        elements = sum(layouts.shard_elements(spec, gradients_kind) for spec in self.parameters if LAYERS in spec.axes)
        cast = 0 if policy.parameter == policy.compute else policy.compute.itemsize
        dealt = np.where(layouts.rounds > 1, 3 * ACCUMULATOR_DTYPE.itemsize, 0)
        return np.where(layouts.stages > 1, (cast + dealt) * elements, 0.0)

    def saved_by_location(self, remat: RematConfig) -> dict[ActivationLocation, dict[str, np.ndarray]]:
        """Return the bytes saved for the backward pass, by location and activation name (`UNNAMED` if it has none)."""
        sizes: dict[ActivationLocation, dict[str, np.ndarray]] = {location: {} for location in ActivationLocation}
        for activation, bytes_ in self.activations:
            by_name, name = sizes[saved_location(activation, remat)], activation.name or UNNAMED
            by_name[name] = by_name[name] + bytes_ if name in by_name else bytes_
        return sizes

    @cached_property
    def activations(self) -> list[tuple[SavedActivation, np.ndarray]]:
        """Activations that a backward pass may read, with their bytes per device for all microbatches in flight."""
        microbatches = self.layouts.in_flight_microbatches / self.layouts.stages
        return [
            (activation, self._saved_bytes(activation) * microbatches)
            for activation in self.run.model.saved_activations()
        ]

    @cached_property
    def gathered_bytes(self) -> np.ndarray:
        """Bytes per device of one layer's gathered weights and of their gradients before the reduction."""
        layouts, total, policy = self.layouts, np.zeros(len(self.layouts)), self.run.config.precision
        itemsize = policy.compute.itemsize + policy.reduction.itemsize
        for spec in self.parameters:
            data_axes = layouts.gathered_mesh_axes(spec)
            if LAYERS in spec.axes and data_axes:
                layers = spec.shape[spec.axes.index(LAYERS)] / layouts.stages
                total = total + itemsize * (layouts.shard_elements(spec, "used") / layers) * (
                    layouts.axes_size(data_axes) > 1
                )
        return total

    @cached_property
    def _array_bytes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes per device of parameters, optimizer state and the EMA of the parameters."""
        layouts, config = self.layouts, self.run.config
        parameters, optimizer_state, ema = (np.zeros(len(layouts)) for _ in range(3))
        for spec in self.parameters:
            elements = layouts.shard_elements(spec, "stored")
            parameters += elements * (4 if spec.float32 else config.precision.parameter.itemsize)
            optimizer_state += config.optimizer.state_bytes(spec) * layouts.state_shard_elements(spec)
            ema += elements * ACCUMULATOR_DTYPE.itemsize * (config.optimizer.ema_decay is not None)
        return parameters, optimizer_state, ema

    @cached_property
    def _gradient_bytes(self) -> dict[str, np.ndarray]:
        """Bytes per device of gradients, by how those of microbatches are split (see `Candidates.shard_elements`)."""
        layouts, config, bytes_by_kind = self.layouts, self.run.config, {}
        is_pipelined = layouts.stages > 1
        for kind in ("stored", "accumulated"):
            parameters, reduced_gradients, accumulators = (np.zeros(len(layouts)) for _ in range(3))
            for spec in self.parameters:
                elements = layouts.shard_elements(spec, kind)
                parameters += elements * (4 if spec.float32 else config.precision.parameter.itemsize)
                reduced_gradients += elements * config.precision.reduction.itemsize
                accumulates = np.where(is_pipelined, LAYERS in spec.axes, layouts.microbatches > 1)
                accumulators += elements * ACCUMULATOR_DTYPE.itemsize * accumulates
            # XLA converts gradients to the parameters' dtype as they are produced, if that is smaller. Microbatches,
            # also the turns of a pipeline, add up in float32.
            bytes_by_kind[kind] = np.minimum(parameters, reduced_gradients) + accumulators
        return bytes_by_kind

    def _activations(self, remat: RematConfig, gradients: np.ndarray, gradients_kind: str) -> np.ndarray:
        """Return the bytes of activations at the peak of a step, from the saved activations and `_working_sets`."""
        saved_total, unnamed_total = np.zeros(len(self.layouts)), np.zeros(len(self.layouts))
        for activation, bytes_ in self.activations:
            if saved_location(activation, remat) is ActivationLocation.device:
                saved_total = saved_total + bytes_
                is_counted = activation.name is not None or activation.saved_ratio is not None
                unnamed_total = unnamed_total + (0.0 if is_counted else bytes_)
        gathered_activations, gathered_group_bytes = self._gathered_activations
        for activation, bytes_ in gathered_activations:
            if saved_location(activation, remat) is ActivationLocation.device:
                saved_total = saved_total + bytes_
        # A stage has the activations of its current turn twice: in the loop over layers, and in the stack of all turns.
        layouts = self.layouts
        turns = layouts.rounds * layouts.microbatches + layouts.stages - 1
        copies = np.where((layouts.stages > 1) & (not layouts.is_1f1b), 1 + 1 / turns, 1)
        saved_total, unnamed_total = copies * saved_total, copies * unnamed_total
        group_bytes, recomputed_bytes = self._working_sets(remat)
        # In the backward pass of a group: gathered keys and values with their gradients, the gathered inputs of a mixer
        # and a feed-forward with theirs, the gathered tokens of experts, and the weights cast before the loop.
        gathers_layers = (layouts.stages == 1) | (gradients_kind == "stored")
        gathered_bytes = self.gathered_bytes * gathers_layers
        gathered_bytes = gathered_bytes + 2 * gathered_group_bytes + 4 * self._gathered_stream_bytes
        gathered_bytes = gathered_bytes + self._gathered_batch_bytes + self._dispatched_bytes + self._cast_bytes
        platform = get_platform(self.run.config.target.platform)
        inputs = self._logits_bytes, group_bytes, self._kernel_bytes, recomputed_bytes, gradients
        return platform.activation_bytes(saved_total, unnamed_total, *inputs, gathered_bytes=gathered_bytes)

    @cached_property
    def _gathered_activations(self) -> tuple[list[tuple[SavedActivation, np.ndarray]], np.ndarray]:
        """Activations that a device gathers from other shards of the sequence, such as keys and values.

        A pair. Its first item lists (activation, bytes) for each layer of each group. The activations have no name, and
        the bytes count all repetitions of the group and all microbatches in flight. The second item is the bytes of
        the first group of layers, for one microbatch. All sizes are per device.
        """
        layouts, model, activations, group_bytes = self.layouts, self.run.model, [], np.zeros(len(self.layouts))
        local_positions = self.run.config.seq / layouts.axes_size(layouts.activations[SEQ])
        for number, (group, repeats) in enumerate(model.segments() if isinstance(model, LayeredModel) else ()):
            for layer in group:
                for activation, window in layer.mixer.neighbours(layer.context):
                    positions = self.run.config.seq - local_positions
                    positions = positions if window is None else np.minimum(positions, window)
                    bytes_ = self._bytes(activation) * positions / local_positions
                    unnamed = replace(activation, name=None, product=False)
                    activations.append((unnamed, repeats * bytes_ * layouts.in_flight_microbatches / layouts.stages))
                    group_bytes = group_bytes + bytes_ * (number == 0)
        return activations, group_bytes

    @cached_property
    def _gathered_stream_bytes(self) -> np.ndarray:
        """Bytes per device of a layer's residual stream if matrix products gather it, otherwise 0."""
        layouts = self.layouts
        axes = [axis for axis in layouts.activations["embed"] if axis not in layouts.used_axes("embed")]
        stream = next((a for a in self.run.model.saved_activations() if a.name == BLOCK_INPUT), None)
        if stream is None or not axes:
            return np.zeros(len(layouts))
        return self._bytes(replace(stream, count=1)) * np.where(layouts.axes_size(axes) > 1, layouts.axes_size(axes), 0)

    @cached_property
    def _gathered_batch_bytes(self) -> np.ndarray:
        """Bytes per device of a layer group's gathered query, key and value gradients, or 0 if none are gathered."""
        layouts, total = self.layouts, np.zeros(len(self.layouts))
        data_axes = [axis for axis in layouts.stored_axes("embed") if axis in layouts.data_axes]
        for activation in self.run.model.working_activations():
            if activation.product and {"heads", "kv_heads"} & {*activation.tensor.axes}:
                total = total + self._bytes(replace(activation, name=None))
        return total * np.where(layouts.is_split_twice("embed"), layouts.axes_size(data_axes), 0)

    @cached_property
    def _logits_bytes(self) -> np.ndarray:
        """Bytes per device of the logits in memory at the same time."""
        layouts, logits = self.layouts, np.zeros(len(self.layouts))
        for activation in self.run.model.working_activations():
            logits = logits + (self._bytes(activation) if activation.positions is not None else 0.0)
        logits = logits * np.where(layouts.is_split_twice("embed"), GATHERED_LOGITS, 1.0)
        return logits / layouts.stages * self._microbatches_per_loss

    def _working_sets(self, remat: RematConfig) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per device of the activations in the backward pass of a group of layers, beside those saved for it.

        The group is that with the largest sum of both items, such as the layers with experts after dense ones. The
        first item is all activations of the group's largest layer: the backward pass has the temporaries of one layer
        at a time. With a pipeline that is one program, it includes the residual stream of all microbatches. The second
        item is what the group's other layers recompute.
        """
        group, others = (np.zeros(len(self.layouts)) for _ in range(2))
        if self._layer_bytes:
            groups = [self._group_bytes(totals, layers, remat) for totals, layers in self._layer_bytes]
            largest = np.array([largest_layer + rest for largest_layer, rest in groups]).argmax(axis=0)[None]
            group, others = (
                np.take_along_axis(np.array(items), largest, axis=0)[0] for items in zip(*groups, strict=True)
            )
        else:
            for activation in self.run.model.working_activations():
                group = group + (self._bytes(activation) if activation.positions is None else 0.0)
        return group + self._stream_bytes, others

    @cached_property
    def _stream_bytes(self) -> np.ndarray:
        """Bytes per device of the residual stream of all microbatches, which the first stage of a pipeline holds.

        0 for stages that are separate programs.
        """
        is_pipelined = self.layouts.stages > 1
        if not is_pipelined.any() or self.layouts.separate_stages:
            return np.zeros(len(self.layouts))
        stream = next(a for a in self.run.model.saved_activations() if a.name == BLOCK_INPUT)
        return np.where(is_pipelined, self.layouts.microbatches * self._bytes(replace(stream, count=1)), 0.0)

    @cached_property
    def _layer_bytes(self) -> list[tuple[np.ndarray, list[list[tuple[SavedActivation, np.ndarray]]]]]:
        """For each group of layers: the bytes per device of each layer's activations, and its `_recomputed_bytes`."""
        groups = []
        for group, _ in self.run.model.segments() if isinstance(self.run.model, LayeredModel) else ():
            layers = [layer.saved_activations(is_first=False) for layer in group]
            totals = np.array([sum(map(self._bytes, activations)) for activations in layers])
            groups.append((totals, [self._recomputed_bytes(activations) for activations in layers]))
        return groups

    def _group_bytes(
        self, totals: np.ndarray, layers: list[list[tuple[SavedActivation, np.ndarray]]], remat: RematConfig
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes per device of all activations of a group's largest layer, and those the others recompute."""
        zero, device = np.zeros(len(self.layouts)), ActivationLocation.device
        recomputed = np.array(
            [sum((n for a, n in layer if saved_location(a, remat) is not device), zero) for layer in layers]
        )
        largest = totals.argmax(axis=0)[None]
        others = recomputed.sum(axis=0) - np.take_along_axis(recomputed, largest, axis=0)[0]
        return np.take_along_axis(totals, largest, axis=0)[0], others

    def _recomputed_bytes(self, layer: Sequence[SavedActivation]) -> list[tuple[SavedActivation, np.ndarray]]:
        """Return what a layer keeps in its group's backward pass under full remat, with the bytes per device.

        These are its named activations, except those needed only to recompute others, and half of its unnamed arrays
        in the compute dtype. XLA fuses the other half with their readers, and also arrays that follow from a single
        product (buffers of nanochat and of valkyrie_125m with embed=640, experiments/LOG.md).
        """
        sizes = []
        for activation in layer:
            products = sum(other.product and other.tensor.axes == activation.tensor.axes for other in layer)
            if activation.name is None and products > 1 and not activation.float32:
                sizes.append((activation, self._saved_bytes(replace(activation, saved_ratio=0.5))))
            elif activation.name is not None and activation.needed_for is None:
                sizes.append((activation, self._saved_bytes(activation)))
        return sizes

    @cached_property
    def _kernel_bytes(self) -> np.ndarray:
        """Bytes per device that the attention kernel of a layer reads and writes, or 0 if no layer uses it.

        Splash attention writes its softmax sums to all lanes, in float32. XLA transposes them before it takes one lane.
        """
        total = np.zeros(len(self.layouts))
        lanes = get_platform(self.run.config.target.platform).lanes
        for group, _ in self.run.model.segments() if isinstance(self.run.model, LayeredModel) else ():
            for layer in group:
                if layer.mixer.dense_scores(layer.context, self.run.config.seq):
                    continue
                arrays = [a for a in layer.saved_activations(is_first=False) if a.name in _KERNEL_ARRAYS]
                copies = [2 * lanes if a.tensor.axes[2:] == ("heads",) else 1 for a in arrays]
                bytes_ = sum(n * self._saved_bytes(a) for n, a in zip(copies, arrays, strict=True))
                total = np.maximum(total, bytes_)
        return total

    @cached_property
    def _cast_bytes(self) -> np.ndarray:
        """Bytes per device of all layers' weights in the compute dtype. XLA casts them before the loop over layers.

        0 with a pipeline, for which `_stage_copies` counts them, and without a loop.
        """
        layouts, policy, model = self.layouts, self.run.config.precision, self.run.model
        if policy.parameter == policy.compute or not isinstance(model, LayeredModel):
            return np.zeros(len(layouts))
        weights = [spec for spec in self.parameters if LAYERS in spec.axes and not spec.float32]
        elements = sum(layouts.shard_elements(spec, "stored") for spec in weights)
        is_loop = max(repeats for _, repeats in model.segments()) > 1
        return np.where(layouts.stages > 1, 0.0, is_loop * policy.compute.itemsize * elements)

    @cached_property
    def _dispatched_bytes(self) -> np.ndarray:
        """Bytes per device of the tokens that a layer gathers for experts, and of its sums in float32, or 0."""
        layouts, total = self.layouts, np.zeros(len(self.layouts))
        for block, context in layer_blocks(self.run.model):
            if not block.dispatch_work(context, self.run.config.seq).sends_rows:
                members = layouts.member_count(block.dispatches)
                gathered = block.dispatched_activations(context)
                bytes_ = sum(self._bytes(a) + self._bytes(replace(a, float32=True)) for a in gathered)
                total = np.maximum(total, np.where(members > 1, members, 0) * bytes_)
        return total

    @property
    def _local_sequences(self) -> np.ndarray:
        layouts = self.layouts
        batch = self.run.config.batch if layouts.batch_sizes is None else layouts.batch_sizes
        return batch / layouts.microbatches / layouts.axes_size(layouts.activations[BATCH])

    @property
    def _microbatches_per_loss(self) -> np.ndarray:
        is_pipelined = (self.layouts.stages > 1) & (not self.layouts.is_1f1b)
        return np.where(is_pipelined, self.layouts.microbatches, 1)

    def loss_chunks(self, loss_chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of chunks of a microbatch's loss, and the positions of a chunk, given `model.loss_chunk`.

        Pipelines other than 1F1B compute the loss of all microbatches at once, so a microbatch may have half a chunk.
        """
        layouts = self.layouts
        shards, sequences = layouts.axes_size(layouts.loss_axes), self._local_sequences * self._microbatches_per_loss
        positions = self.run.config.seq / layouts.axes_size(layouts.activations[SEQ])
        positions = np.where(positions % shards == 0, positions / shards, positions)
        chunk = loss_chunk * np.maximum(1.0, np.ceil(LOSS_SEQUENCES * layouts.stages / sequences))
        chunk = np.minimum(positions, chunk)
        return np.ceil(positions / chunk) / self._microbatches_per_loss, chunk

    def _saved_bytes(self, activation: SavedActivation) -> np.ndarray:
        """Like `_bytes`, but of the arrays that a compiled step saves, with attention's sequences split."""
        ratio = 1 if activation.saved_ratio is None else activation.saved_ratio
        if not self._shards_rows_over_embed:
            return self._bytes(activation) * ratio
        shards = self.layouts.head_row_shards(activation.tensor.axes, self._local_sequences)
        return self._bytes(activation) * ratio / shards

    @cached_property
    def _shards_rows_over_embed(self) -> bool:
        model = self.run.model
        groups = [group for group, _ in model.segments()] if isinstance(model, LayeredModel) else []
        return any(layer.mixer.shards_rows_over_embed for group in groups for layer in group)

    def _bytes(self, activation: SavedActivation) -> np.ndarray:
        """Return the bytes per device of an activation's arrays for one microbatch, as if one stage had all layers."""
        config, layouts, axes = self.run.config, self.layouts, activation.tensor.axes
        assert axes[:2] == (BATCH, SEQ), axes
        positions = config.seq / layouts.axes_size(layouts.activations[SEQ])
        if activation.positions is not None:
            _, positions = self.loss_chunks(activation.positions)
        elements = self._local_sequences * positions
        for axis, length in zip(axes[2:], activation.tensor.shape[2:], strict=True):
            elements = elements * length / layouts.count_parts(axis, "active", length)
        elements = elements * layouts.row_copies(activation.gathered_rows)
        if activation.name is not None:
            elements = elements * padding_ratio(activation.tensor.shape, get_platform(config.target.platform).lanes)
        return activation.count * elements * (4 if activation.float32 else config.precision.compute.itemsize)
