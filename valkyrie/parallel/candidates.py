"""Represents thousands of layouts of one partition as arrays with one entry per layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays, GatheredRows, Parameter
from valkyrie.parallel.layout import find_gathered_axes, find_zero1_axes
from valkyrie.parallel.partition import PartitionConfig, PipelineSchedule, Rules, SumGradientsPer
from valkyrie.parallel.problems import size_checks
from valkyrie.problems import Problem


@dataclass(frozen=True)
class AxisLinks:
    """Links of a mesh axis, with one entry per layout.

    Args:
        inner_size: Number of the axis's devices in each group that fast links join: a TPU slice, or a GPU host.
        inner_rate: Bytes per second that a device sends over fast links.
        outer_size: Number of these groups that the axis spans.
        outer_rate: Bytes per second that a device sends between groups.
        hops: Hops until data from one device has reached all others of the axis on the torus (`AxisPlacement.hops`).
        ring_rate: Bytes per second that a device sends in a single ring through all inner devices. It uses the links
            of only one torus axis.
        exchange_rate: Bytes per second that a device sends to the next one of the axis.
        gather_rate: Bytes per second that a device sends in an all-gather of weights (`AxisPlacement.gather_links`).
    """

    inner_size: np.ndarray
    inner_rate: np.ndarray
    outer_size: np.ndarray
    outer_rate: np.ndarray
    hops: np.ndarray
    ring_rate: np.ndarray
    exchange_rate: np.ndarray
    gather_rate: np.ndarray


@dataclass(frozen=True)
class Candidates:
    """Layouts of one partition, as arrays with one entry per layout.

    Args:
        sizes: Devices along each mesh axis.
        links: Links of each mesh axis.
        rounds: Groups of layers per pipeline stage under the circular schedule, else 1.
        batch_sizes: Number of sequences in each layout's global batch, or None if all layouts use the batch of the run.
        sums_once: Gradients are summed over devices once, after the last microbatch (PyTorch), instead of after each.
        shares_loss: Stages share the computation of the logits. Otherwise the last stage does all of it.
        sends_parts: Devices with the same activations each send a part of them to the next stage, which gathers them
            (Megatron-LM, arXiv 2104.04473, section 4.1). Otherwise each device sends all of them.
        separate_stages: Each stage of a pipeline is a program of its own (PyTorch), which reads its input when it needs
            it, and starts a backward pass as soon as it can. Otherwise one program has all stages, in lockstep.
    """

    partition: PartitionConfig
    parameters: Rules
    activations: Rules
    arrays: Arrays
    sizes: Mapping[str, np.ndarray]
    links: Mapping[str, AxisLinks]
    microbatches: np.ndarray
    rounds: np.ndarray
    batch_sizes: np.ndarray | None = None
    sums_once: bool = False
    shares_loss: bool = True
    sends_parts: bool = False
    separate_stages: bool = False

    def __len__(self) -> int:
        return len(self.microbatches)

    def take(self, selection: np.ndarray) -> Candidates:
        """Return the layouts selected by a mask or by indices."""
        selected_links = {}
        for axis, links in self.links.items():
            selected_links[axis] = AxisLinks(
                *(getattr(links, field)[selection] for field in links.__dataclass_fields__)
            )
        sizes = {axis: size[selection] for axis, size in self.sizes.items()}
        microbatches, rounds = self.microbatches[selection], self.rounds[selection]
        batch_sizes = None if self.batch_sizes is None else self.batch_sizes[selection]
        return replace(
            self, sizes=sizes, links=selected_links, microbatches=microbatches, rounds=rounds, batch_sizes=batch_sizes
        )

    def axes_size(self, mesh_axes: Sequence[str]) -> np.ndarray:
        """Return the number of parts into which these mesh axes split an array, for each layout."""

        def product() -> np.ndarray:
            return np.prod([np.ones(len(self), np.int64), *(self.sizes[axis] for axis in mesh_axes)], axis=0)

        return self._cached(tuple(mesh_axes), product)

    @cached_property
    def _cache(self) -> dict[tuple[object, ...], np.ndarray]:
        """Results of `axes_size` and `count_parts` by their arguments. Estimates request the same ones many times."""
        return {}

    def _cached(self, key: tuple[object, ...], compute: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._cache:
            self._cache[key] = compute()
            self._cache[key].flags.writeable = False
        return self._cache[key]

    @property
    def devices(self) -> np.ndarray:
        """Number of devices of each layout."""
        return self.axes_size(tuple(self.sizes))

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch or the sequence."""
        return tuple(dict.fromkeys([*self.activations[BATCH], *self.activations[SEQ]]))

    @cached_property
    def stages(self) -> np.ndarray:
        """Number of pipeline stages of each layout."""
        return self.axes_size(self.parameters.get(LAYERS, ()))

    def stored_axes(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's logical axis is split in storage."""
        return () if logical is None else self.parameters[logical]

    def used_axes(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's logical axis is split while it is used."""
        gathered_axes = self.gathered_axes(logical)
        return tuple(axis for axis in self.stored_axes(logical) if axis not in gathered_axes)

    def accumulated_axes(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which the gradient of a parameter is split within a shard of the batch."""
        return tuple(axis for axis in self.stored_axes(logical) if axis not in self.activations[BATCH])

    def gathered_axes(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's logical axis is gathered for use."""
        return find_gathered_axes(logical, self.parameters, self.activations, self.arrays.dispatched_axes)

    @cached_property
    def can_sum_gradients_once(self) -> np.ndarray:
        """Whether a step can add up gradients per shard of the batch, and sum them over devices once, for each layout.

        The stages of a pipeline do so for the turns of their loop. Axes such as experts that split the batch too are
        never gathered, so their gradients have no part per shard of the batch.
        """
        batch_axes = self.activations[BATCH]
        is_dispatched = any(
            axis in batch_axes for logical in self.arrays.dispatched_axes for axis in self.stored_axes(logical)
        )
        accumulates = ((self.microbatches > 1) | (self.stages > 1)) & (self.axes_size(batch_axes) > 1)
        return accumulates & (not is_dispatched) & (not self.sums_once)

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch, but no parameter, such as the axis between slices."""
        split_axes = {axis for axes in self.parameters.values() for axis in axes}
        return tuple(axis for axis in self.activations[BATCH] if axis not in split_axes)

    @cached_property
    def can_sum_replicas_once(self) -> np.ndarray:
        """Whether a step can sum gradients over `replica_axes` once (`SumGradientsPer.hybrid`), for each layout."""
        is_refused = self.partition.sum_gradients_per is SumGradientsPer.microbatch
        return self.can_sum_gradients_once & (self.axes_size(self.replica_axes) > 1) & (not is_refused)

    def is_split_twice(self, logical: str | None) -> np.ndarray:
        """Return, for each layout, whether both data axes and other mesh axes shard a parameter's logical axis.

        XLA then cannot reduce-scatter the parameter's gradient. It all-gathers the batch of one of its factors instead.
        """
        data_axes = [axis for axis in self.stored_axes(logical) if axis in self.data_axes]
        return (self.axes_size(data_axes) > 1) & (self.axes_size(self.used_axes(logical)) > 1)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the positions of the logits, in addition to the mesh axes of `seq`.

        These are the mesh axes that shard `embed` in other activations, or none if one of them also shards `vocab`.
        """
        embed, vocab = self.activations["embed"], self.activations["vocab"]
        return () if set(embed) & set(vocab) else tuple(embed)

    def zero1_axes(self, axes: Sequence[str | None]) -> tuple[str, ...]:
        """Return the mesh axes over which ZeRO-1 splits the moments of a parameter with these logical axes.

        These are the mesh axes that split the batch, but not the parameter. The pipeline's axis counts as one that
        splits the batch, because it does so outside of the stages.
        """
        data_axes = dict.fromkeys([*self.parameters.get(LAYERS, ()), *self.activations[BATCH]])
        return find_zero1_axes(data_axes, map(self.stored_axes, axes))

    def gathered_mesh_axes(self, spec: Parameter) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter is gathered for use, over all its dimensions."""
        reserved = self._reserved_axes(spec)
        return tuple(m for axis in spec.axes for m in self.gathered_axes(axis) if m not in reserved)

    def member_count(self, dispatched_axes: Sequence[str]) -> np.ndarray:
        """Return the number of devices with different tokens that share parameters with these dispatched axes."""
        axes = dict.fromkeys(m for axis in dispatched_axes for m in self.stored_axes(axis))
        return self.axes_size(tuple(m for m in axes if m in self.data_axes))

    def row_copies(self, rows: GatheredRows | None) -> np.ndarray:
        """Return the rows on a device, relative to those of its own tokens. 1 if rows are not gathered."""
        if rows is None:
            return np.ones(len(self))
        members, shards = self.member_count((rows.axis,)), self.axes_size(self.stored_axes(rows.axis))
        capacity = np.inf if rows.capacity is None else rows.capacity
        return members * np.minimum(np.minimum(1.0, rows.full_shards / shards), capacity / shards)

    def head_row_shards(self, axes: Sequence[str | None], sequences: np.ndarray) -> np.ndarray:
        """Return the number of parts into which attention splits the `sequences` of a microbatch on a device.

        Attention also splits its queries, keys and values over the mesh axes of `embed` in activations, if these split
        no heads and their size divides the number of sequences. 1 for arrays without heads among their logical axes.
        """
        if not {"heads", "kv_heads"} & set(axes):
            return np.ones(len(self))
        embed_axes = self.activations["embed"]
        head_axes = {m for axis in ("heads", "kv_heads") for m in self.activations.get(axis, ())}
        shards, shared = self.axes_size(embed_axes), self.axes_size(tuple(m for m in embed_axes if m in head_axes))
        return np.where((shared == 1) & (sequences % shards == 0), shards, 1)

    def _reserved_axes(self, spec: Parameter) -> frozenset[str]:
        """Return the mesh axes that split a parameter's dispatched axis, and so no other (`reserve_dispatched`)."""
        dispatched = self.arrays.dispatched_axes.intersection(spec.axes)
        return frozenset(m for axis in dispatched for m in self.stored_axes(axis))

    def count_parts(
        self, logical: str | None, kind: str, length: int, reserved: frozenset[str] = frozenset()
    ) -> np.ndarray:
        """Return the number of parts of a logical axis of this length, for each layout.

        If `Arrays.sharded_like` maps the axis to another one, and both have the same rule, the axis is split only over
        the leading mesh axes of the rule that divide its length.

        Args:
            logical: The logical axis, or None for an axis that is never split.
            kind: `stored`, `used` or `accumulated` for parameters, `active` for activations.
            length: Length of the logical axis.
            reserved: Mesh axes that do not split it, because they split a dispatched axis of the same array.
        """
        key = (logical, kind, length, reserved)
        return self._cached(key, lambda: self._count_parts(logical, kind, length, reserved))

    def _count_parts(self, logical: str | None, kind: str, length: int, reserved: frozenset[str]) -> np.ndarray:
        if logical is None:
            return np.ones(len(self), np.int64)
        axes_by_kind = {
            "stored": self.stored_axes,
            "used": self.used_axes,
            "accumulated": self.accumulated_axes,
            "active": self.activations.__getitem__,
        }
        is_reserved = logical not in self.arrays.dispatched_axes
        axes = tuple(axis for axis in axes_by_kind[kind](logical) if not (is_reserved and axis in reserved))
        parts = self.axes_size(axes)
        if logical not in self.arrays.sharded_like:
            return parts
        rules = self.activations if kind == "active" else self.parameters
        if rules[logical] != rules[self.arrays.sharded_like[logical]]:
            return parts
        divisible_parts = np.ones(len(self), np.int64)
        for end in range(1, len(axes) + 1):
            more_parts = self.axes_size(axes[:end])
            divisible_parts = np.where(length % more_parts == 0, more_parts, divisible_parts)
        return divisible_parts

    def shard_elements(self, spec: Parameter, kind: str) -> np.ndarray:
        """Return the number of elements of a parameter on one device, for each layout.

        `kind` is `stored` (between steps), `used` (gathered over data axes), or `accumulated` (its gradient within a
        shard of the batch, see `SumGradientsPer`).
        """
        elements, reserved = np.full(len(self), float(spec.size)), self._reserved_axes(spec)
        for axis, length in zip(spec.axes, spec.shape, strict=True):
            elements = elements / (self.stages if axis == LAYERS else self.count_parts(axis, kind, length, reserved))
        return elements

    def state_shard_elements(self, spec: Parameter) -> np.ndarray:
        """Return, for each layout, the number of a parameter's elements for which one device stores optimizer state.

        ZeRO-1 also splits the state over the mesh axes of `zero1_axes`, one by one, as in `Layout.optimizer_axes`. An
        axis splits the first dimension with a length that the resulting number of parts divides. It never splits
        `layers`, and has no effect if no dimension is divisible.
        """
        elements = self.shard_elements(spec, "stored")
        if not self.partition.zero1:
            return elements
        reserved = self._reserved_axes(spec)
        splits = [self.count_parts(axis, "stored", n, reserved) for axis, n in zip(spec.axes, spec.shape, strict=True)]
        for size in (self.sizes[axis] for axis in self.zero1_axes(spec.axes)):
            is_unsplit = np.ones(len(self), bool)
            for i, (axis, length) in enumerate(zip(spec.axes, spec.shape, strict=True)):
                if axis != LAYERS:
                    divides = is_unsplit & (length % (splits[i] * size) == 0)
                    factor = np.where(divides, size, 1)
                    splits[i], elements, is_unsplit = splits[i] * factor, elements / factor, is_unsplit & ~divides
        return elements

    def problems(self, batch: int, seq: int) -> dict[Problem, np.ndarray]:
        """Return a dict from each problem caused by sizes to a mask of the layouts that have it.

        The problems leave out mesh axes, config keys and array names.
        """
        masks: dict[Problem, np.ndarray] = {}
        for check in size_checks(self, self.arrays, batch, seq):
            p = check.problem
            problem = Problem(p.code, partition=p.partition, axes=p.axes, size=p.size)
            masks[problem] = masks.get(problem, np.zeros(len(self), bool)) | check.has_problem
        return masks

    @property
    def is_1f1b(self) -> bool:
        """Whether backward passes of microbatches start before all forward passes are finished (1f1b)."""
        return self.partition.schedule is PipelineSchedule["1f1b"]

    @property
    def in_flight_microbatches(self) -> np.ndarray:
        """Number of microbatches for which a stage stores the inputs of all its layers. 1 without a pipeline.

        This is `Pipeline.stored_microbatches` divided by the rounds, because each round runs only a part of the layers.
        With `separate_stages`, the first stage of 1F1B starts a backward pass after as many microbatches as stages.
        """
        stages, microbatches = self.stages, self.microbatches
        forward_turns = self.rounds * microbatches + stages - 1
        most_stored = stages if self.separate_stages else 2 * stages - 1
        stored = np.minimum(most_stored, microbatches) if self.is_1f1b else forward_turns
        return np.where(stages > 1, stored / self.rounds, 1)
