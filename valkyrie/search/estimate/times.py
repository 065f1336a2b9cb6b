"""Estimates the step times of many layouts at once, part by part, in closed form.

FLOPs and bytes are those that the blocks declare. The collectives of a matmul follow from the sharding of its operands
(GSPMD, arXiv 2105.04663). Mesh axes that shard the contracting dimension leave partial sums, which are all-reduced or
reduce-scattered. Mesh axes that shard the activation but not the parameter require an all-gather. A pipeline of p
stages is idle for (p - 1)/(m + p - 1) of a step of m microbatches, and r interleaved rounds divide the idle time by r
(Megatron-LM, arXiv 2104.04473).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from valkyrie.axes import BATCH, LAYERS, SEQ, padding_ratio
from valkyrie.hardware.target import ChipConfig
from valkyrie.models.block import SavedActivation
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.remat import ActivationLocation, RematConfig
from valkyrie.search.estimate.dispatch import gathered_token_bytes, pass_counts, row_seconds
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import CollectiveModel, exposed_seconds, half_exchange_hops
from valkyrie.search.estimate.parameters import ParameterTimes
from valkyrie.search.estimate.work import DENSE_SCORES_PASSES, Mixing, Product, StepWork
from valkyrie.train.memory import MemoryEstimator

BACKWARD_FLOPS_RATIO = 2.0
"""FLOPs of a matmul's backward pass relative to its forward pass: two matmuls of the same size."""
MIXING_BACKWARD_FLOPS_RATIO = 2.5
"""FLOPs of attention's backward pass relative to its forward pass: five matmuls to two (arXiv 2307.08691)."""
COMPUTE_PARTS = ("products", "mixing", "moving", "head", "optimizer", "launching")
"""The parts of `EstimatedTimes.parts` that are neither communication nor idle time."""


@dataclass(frozen=True)
class EstimatedTimes:
    """Estimated seconds per step by part, as arrays over layouts. The parts add up to the step.

    The keys of `parts` for compute:
        products: Matmuls with parameters.
        mixing: Attention scores and scans.
        moving: Moving activations through HBM.
        head: The logits and the loss.
        optimizer: The optimizer's step.
        launching: Time to start the operations, minus the time to run them. 0 if running them takes longer.
        bubble: Idle time of a pipeline.

    The keys for exposed communication:
        weights: Gathering weights.
        gradients: Summing gradients, and gathering ZeRO-1 updates.
        activations: Tensor and sequence parallelism.
        host: Offloading to host memory.
        stages: Sending between pipeline stages, and to and from the pipeline.
    """

    parts: dict[str, np.ndarray]

    @cached_property
    def step_s(self) -> np.ndarray:
        """Estimated seconds per step of each layout."""
        return np.sum(list(self.parts.values()), axis=0)


class StepEstimator:
    """Estimates the step times of layouts on a chip. Caches everything that does not depend on the remat policy."""

    def __init__(
        self, work: StepWork, layouts: Candidates, chip: ChipConfig, efficiency: Efficiency, network: CollectiveModel
    ) -> None:
        self.work, self.layouts = work, layouts
        self.efficiency, self.network, self.chip = efficiency, network, chip
        self.memory = MemoryEstimator(work.run, layouts, chip)
        peak = max(chip.peak_tflops.get(name, 0.0) for name in ("bfloat16", work.run.config.precision.compute.value))
        self.peak_flops = peak * 1e12 / chip.devices
        self.hbm_bandwidth = (chip.hbm_gbs or 1.0) * 1e9 / chip.devices * efficiency.hbm
        self.host_bandwidth = chip.host_gbs * 1e9
        tokens = work.tokens if layouts.batch_sizes is None else layouts.batch_sizes * work.run.config.seq
        self.local_tokens = tokens / (
            layouts.axes_size(layouts.activations[BATCH]) * layouts.axes_size(layouts.activations[SEQ])
        )
        self.local_tokens = self.local_tokens / layouts.microbatches
        """Tokens per device and microbatch."""
        self._parameter_times = ParameterTimes(work, layouts, efficiency, network, self.hbm_bandwidth, chip)
        self.layer_share = work.passes / layouts.stages
        """Share of the model's layers that a device runs, times the passes through the stack of layers per step."""

    def estimate(self, remat: RematConfig) -> EstimatedTimes:
        """Return the estimated times of all layouts with a remat policy."""
        layouts, e = self.layouts, self.efficiency
        m, stages = layouts.microbatches, layouts.stages
        recompute_flags = [product.is_recomputed(remat) for product in self.work.products]
        products = self.layer_share * _sum_arrays(
            (1 + BACKWARD_FLOPS_RATIO + a) * s for a, s in zip(recompute_flags, self._product_seconds, strict=True)
        )
        mixing, (hbm_bytes, host_bytes) = self._mixing_seconds(remat), self._moved_bytes(remat)
        moving = hbm_bytes / self.hbm_bandwidth * self.layer_share
        moving = moving + self.layer_share * self._dispatch_work_seconds(remat)
        compute_s = products + mixing + moving
        launches = [
            (1 + BACKWARD_FLOPS_RATIO + a) * p.count for a, p in zip(recompute_flags, self.work.products, strict=True)
        ]
        launch_s = e.launch_s * sum(launches) * self.layer_share
        activations = self._activation_collectives(remat, recompute_flags)
        sums_once = self.memory.sums_gradients_once(remat)
        (loop_gather_s, waited_gather_s, first_gather_s), (loop_sum_s, last_sum_s) = (
            self._parameter_times.gather_seconds(sums_once),
            self._parameter_times.sum_seconds(sums_once),
        )
        exposed_s = {
            "activations": exposed_seconds(activations, compute_s, e.hidden_activations),
            "weights": waited_gather_s + exposed_seconds(loop_gather_s, compute_s, e.hidden_weights),
            "gradients": exposed_seconds(loop_sum_s / m, compute_s, e.hidden_gradients),
            "host": exposed_seconds(2 * host_bytes * self.layer_share / self.host_bandwidth, compute_s, e.hidden_host),
        }
        accumulation_s = self._parameter_times.accumulation_seconds(sums_once)
        stage_s = compute_s + exposed_s["activations"] + exposed_s["weights"] + accumulation_s
        parts = {name: m * seconds for name, seconds in {"products": products, "mixing": mixing}.items()}
        parts |= {"moving": m * (moving + accumulation_s), "head": m * self._head_seconds}
        parts |= {name: m * seconds for name, seconds in exposed_s.items()}
        parts["weights"] = parts["weights"] + first_gather_s
        parts["gradients"] = parts["gradients"] + last_sum_s
        parts["gradients"] = parts["gradients"] + self._parameter_times.zero1_gather_seconds * (1 - e.hidden_updates)
        parts["launching"] = m * np.maximum(launch_s - stage_s, 0.0)
        idle = (stages - 1) / layouts.rounds
        parts["bubble"] = idle * np.maximum(stage_s, launch_s)
        parts["stages"] = np.where(stages > 1, (m + stages - 1) * self._stage_send_seconds * (1 - e.hidden_stages), 0.0)
        if layouts.shares_loss:
            parts["stages"] = parts["stages"] + np.where(stages > 1, self._pipeline_ends, 0.0)
        parts["optimizer"] = self._optimizer_seconds
        return EstimatedTimes(parts)

    @cached_property
    def _product_seconds(self) -> list[np.ndarray]:
        """Seconds of the forward pass of each product in one microbatch, over all its layers."""
        return [product.count * self._forward_seconds(product) for product in self.work.products]

    def _forward_seconds(self, product: Product) -> np.ndarray:
        k, n, matrices = float(product.k), float(product.n), self._local_matrices(product)
        for axis, length in product.input_axes:
            k = k / self.layouts.count_parts(axis, "used", length)
        for axis, length in product.output_axes:
            n = n / self.layouts.count_parts(axis, "used", length)
        passes = self.efficiency.float32_passes if product.float32 else 1.0
        rows = self._local_rows(product)
        if product.stack[0] is not None:  # the rows of each matrix fill whole tiles
            rows = rows + matrices * self.efficiency.tile / 2
        return product.components * passes * self._matmul_seconds(rows, np.asarray(k), np.asarray(n), matrices)

    def _local_matrices(self, product: Product) -> np.ndarray:
        """Return the number of matrices of a stack on a device, or 1 for a single matrix."""
        axis, count = product.stack
        return count / self.layouts.count_parts(axis, "used", count)

    def _local_rows(self, product: Product) -> np.ndarray:
        """Return the rows that the busiest device multiplies in a microbatch."""
        layouts, rows = self.layouts, self.local_tokens * product.rows_per_token
        most_rows = rows * layouts.row_copies(product.gathered_rows)
        rows = rows / layouts.axes_size([m for m in layouts.used_axes(product.stack[0]) if m not in layouts.data_axes])
        imbalance = 1.0 if product.gathered_rows is None else self.work.run.config.target.routing_imbalance
        return np.minimum(imbalance * rows, most_rows)

    def _matmul_seconds(
        self, rows: np.ndarray, k: np.ndarray, n: np.ndarray, matrices: np.ndarray | float = 1.0
    ) -> np.ndarray:
        """Return the seconds of a [rows, k] x [k, n] matmul, or of groups of rows with `matrices` such matrices.

        The matrix unit works on whole tiles. Operands and results of more than `Efficiency.on_chip_bytes` move through
        HBM, and the share `Efficiency.unhidden_loads` of that time does not overlap with the multiplications.
        """
        e, flops = self.efficiency, 2.0 * rows * k * n
        padded = _tile_utilisation(k, e.tile) * _tile_utilisation(n, e.tile)
        multiply_s = (flops + e.half_rate_flops) / (self.peak_flops * e.products * padded)
        lanes, itemsize = self.work.lanes, self.work.itemsize
        array_bytes = (
            itemsize * rows * _round_up(k, lanes),
            itemsize * k * n * matrices,
            itemsize * rows * _round_up(n, lanes),
        )
        hbm_bytes = _sum_arrays(np.where(size > e.on_chip_bytes, size, 0.0) for size in array_bytes)
        load_s = hbm_bytes / self.hbm_bandwidth
        return np.maximum(multiply_s + e.unhidden_loads * load_s, load_s)

    @cached_property
    def _head_seconds(self) -> np.ndarray:
        """Seconds of the forward and backward pass of the logits in one microbatch.

        The loss computes the logits of a chunk of positions at a time, and again in the backward pass. Each chunk adds
        its part of the unembedding's gradient to a float32 array in HBM, while its last matmul runs.
        The stages of a pipeline share this work if `Candidates.shares_loss` is set.
        """
        model, layouts = self.work.run.model, self.layouts
        rows = self.local_tokens / layouts.axes_size(layouts.loss_axes) / (layouts.stages if layouts.shares_loss else 1)
        n = np.asarray(model.vocab_rows / layouts.count_parts("vocab", "used", model.vocab_rows))
        k = np.full(len(layouts), float(self.work.embed))
        chunks, matmuls = np.ones(len(layouts)), 1 + BACKWARD_FLOPS_RATIO
        if self.work.loss_chunk is not None:
            chunks, matmuls = self.memory.loss_chunks(self.work.loss_chunk)[0], matmuls + 1
        matmul_s = self._matmul_seconds(rows / chunks, k, n)
        addition_s = 2 * 4.0 * k * n / self.hbm_bandwidth
        logits_s = self.efficiency.logits_passes * 2 * 4.0 * rows * n / self.hbm_bandwidth
        return chunks * (matmuls * matmul_s + np.maximum(addition_s - matmul_s, 0.0)) + logits_s

    def _mixing_seconds(self, remat: RematConfig) -> np.ndarray:
        """Return the seconds of attention scores and scans in a microbatch: forward, recomputation and backward."""
        recompute_flags = [remat.location(mixing.name) is ActivationLocation.nowhere for mixing in self.work.mixing]

        def total(name: str, backward_ratio: float) -> np.ndarray:
            amounts = zip(recompute_flags, self._mixing_amounts[name], strict=True)
            return _sum_arrays((1 + backward_ratio + again) * amount for again, amount in amounts)

        hbm_bytes = self.work.itemsize * self.efficiency.scores_passes * total("scores", BACKWARD_FLOPS_RATIO)
        # Also if the sequence is split, where a kernel runs: at lengths where `auto` is dense, no kernel is faster.
        hbm_bytes = hbm_bytes + 4 * DENSE_SCORES_PASSES * total("dense_scores", BACKWARD_FLOPS_RATIO)
        flops = total("flops", MIXING_BACKWARD_FLOPS_RATIO)
        return self.layer_share * (flops / (self.peak_flops * self.efficiency.mixing) + hbm_bytes / self.hbm_bandwidth)

    @cached_property
    def _mixing_amounts(self) -> dict[str, list[np.ndarray]]:
        """Forward work of each entry in `work.mixing`, per device and microbatch, by field of `Mixing`."""
        amounts = {
            name: [m.count * getattr(m, name) * self.local_tokens / self._mixing_parts(m) for m in self.work.mixing]
            for name in ("flops", "scores", "dense_scores")
        }
        excess = [self._sequence_excess(mixing) for mixing in self.work.mixing]
        return amounts | {"flops": [n * factor for n, factor in zip(amounts["flops"], excess, strict=True)]}

    def _dispatch_work_seconds(self, remat: RematConfig) -> np.ndarray:
        """Return the seconds of sorts, moved rows and products with masks in a microbatch (`DispatchWork`).

        The forward and the recomputed pass sort three times, and the backward pass twice.
        """
        layouts, e, seconds = self.layouts, self.efficiency, np.zeros(len(self.layouts))
        width = self.work.embed / layouts.count_parts("embed", "used", self.work.embed)
        for mixing in self.work.mixing:
            work, passes = mixing.dispatch, pass_counts(mixing, remat)
            if work.rows:
                sizes = mixing, layouts, self.local_tokens, width, self.work.itemsize
                *move_seconds, sort_s = row_seconds(*sizes, self.chip, e.on_chip_bytes)
                for n, move_s, bytes_ in zip(passes, move_seconds, gathered_token_bytes(*sizes), strict=True):
                    seconds += mixing.count * n * (move_s + bytes_ / self.hbm_bandwidth)
                seconds += mixing.count * (3 * passes[0] - 1) * sort_s
            mask_flops = 2.0 * self.local_tokens * work.mask_elements * width
            mask_s = mask_flops / (self.peak_flops * e.products) / _tile_utilisation(width, e.tile)
            seconds += mixing.count * sum(passes) * mask_s
        return seconds

    def _sequence_excess(self, mixing: Mixing) -> np.ndarray:
        """Return the attention scores of the slowest shard of a causal sequence, relative to an equal share of them.

        Queries are padded to whole lanes. Shards too short to exchange halves keep their positions, so the last shard
        sees almost all keys.
        """
        shards = self.layouts.axes_size(self.layouts.activations[SEQ])
        if not mixing.exchanged_halves:
            return np.ones(len(self.layouts))
        positions = self.work.run.config.seq / shards
        padding = _round_up(positions, self.work.lanes) / positions
        return padding * np.where(self._exchanges_halves, 1.0, 2 - 1 / shards)

    @cached_property
    def _exchanges_halves(self) -> np.ndarray:
        """Whether causal attention exchanges halves of its queries between the shards of the sequence."""
        positions = self.work.run.config.seq / self.layouts.axes_size(self.layouts.activations[SEQ])
        return positions % (2 * self.work.lanes) == 0

    def _mixing_parts(self, mixing: Mixing) -> np.ndarray:
        activations = self.layouts.activations
        split = [a for axis in mixing.axes for a in activations[axis]]
        free = [a for a in activations["embed"] if a not in split] if mixing.shards_rows_over_embed else []
        return self.layouts.axes_size(tuple(dict.fromkeys([*split, *free])))

    def _moved_bytes(self, remat: RematConfig) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of activations that a microbatch moves through HBM, and the bytes offloaded to the host."""
        e, hbm_bytes, host_bytes = self.efficiency, np.zeros(len(self.layouts)), np.zeros(len(self.layouts))
        for (activation, _), bytes_ in zip(self.work.activations, self._activation_bytes, strict=True):
            location = remat.location(activation.name, product=activation.product)
            hbm_bytes = hbm_bytes + bytes_ * (
                e.passes + (e.passes_again if location is ActivationLocation.nowhere else e.passes_kept)
            )
            host_bytes = host_bytes + (bytes_ if location is ActivationLocation.host else 0.0)
        return hbm_bytes, host_bytes

    @cached_property
    def _activation_bytes(self) -> list[np.ndarray]:
        """Bytes of each activation in `work.activations`, per device and microbatch, summed over its layers.

        One array per activation, with an element per layout.
        """
        bytes_by_activation = []
        for activation, count in self.work.activations:
            elements = activation.count * count * self.local_tokens
            for axis, length in zip(activation.tensor.axes[2:], activation.tensor.shape[2:], strict=True):
                elements = elements * length / self.layouts.count_parts(axis, "active", length)
            elements = elements * self.layouts.row_copies(activation.gathered_rows)
            elements = elements * padding_ratio(activation.tensor.shape, self.work.lanes)
            bytes_by_activation.append(elements * (4 if activation.float32 else self.work.itemsize))
        return bytes_by_activation

    def _activation_collectives(self, remat: RematConfig, recompute_flags: Sequence[bool]) -> np.ndarray:
        """Return the seconds of collectives on activations in a microbatch, including those hidden by compute."""
        seconds = _sum_arrays(
            (1 + again) * forward + backward + (0 if again else regather)
            for again, (forward, backward, regather) in zip(recompute_flags, self._product_collectives, strict=True)
        )
        for mixing, exchange_s in zip(self.work.mixing, self._mixing_collectives, strict=True):
            passes = pass_counts(mixing, remat)
            dispatch_s = sum(n * s for n, s in zip(passes, self.dispatch_seconds(mixing), strict=True))
            seconds = seconds + mixing.count * (passes[0] * exchange_s + dispatch_s)
        return seconds * self.layer_share + self._table_collectives

    @cached_property
    def _product_collectives(self) -> list[tuple[np.ndarray, ...]]:
        operands, collectives = set[tuple[object, ...]](), []
        for product in self.work.products:
            seconds = self._matmul_collectives(product, product.operand_key not in operands)
            operands.add(product.operand_key)
            collectives.append(tuple(product.count * part for part in seconds))
        return collectives

    @cached_property
    def _mixing_collectives(self) -> list[np.ndarray]:
        return [self._sequence_exchange(mixing) for mixing in self.work.mixing]

    def dispatch_seconds(self, mixing: Mixing) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds to send tokens to the shards of dispatched axes, and back, in one layer and one pass."""
        layouts, rows = self.layouts, mixing.dispatch.gathered_rows
        there, back = np.zeros(len(layouts)), np.zeros(len(layouts))
        imbalance = self.work.run.config.target.routing_imbalance  # buffers of a fixed size have none
        imbalance = 1.0 if rows is None else min(imbalance, rows.capacity or np.inf)
        axes = tuple(dict.fromkeys(m for logical in mixing.dispatched_axes for m in layouts.stored_axes(logical)))
        for activation in mixing.dispatched if axes else ():
            bytes_ = self._bytes_per_token(activation) * self.local_tokens
            if mixing.dispatch.sends_rows:
                exchange_s = self.network.all_to_all(layouts, axes, imbalance * bytes_)
                there, back = there + exchange_s, back + exchange_s
                continue
            bytes_ = bytes_ * layouts.axes_size(axes)
            there = there + self.network.all_gather(layouts, axes, bytes_)
            back = back + self.network.reduce_scatter(layouts, axes, bytes_)
        return there, back

    def _matmul_collectives(self, product: Product, gathers_operand: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds of the collectives of a matmul: forward, backward, and gathering its operand again.

        If the forward pass reduce-scatters the result, the backward pass gathers the gradient of the result. Windowed
        einsums gather it twice: for the gradient of the operand, and for the gradient of the parameter.

        The gradient of the parameter also needs the gathered operand. The third value is the time to gather the operand
        again, or 0 without windowed einsums. Callers add it unless the matmul is recomputed, which gathers the operand
        anyway.

        `gathers_operand` is True if no earlier matmul has gathered the same operand. Otherwise, the third value is 0.
        """
        layouts, network = self.layouts, self.network
        inputs = [(a, n, layouts.activations[a], layouts.used_axes(a)) for a, n in product.input_axes]
        outputs = [(a, n, layouts.activations[a], layouts.used_axes(a)) for a, n in product.output_axes]
        itemsize = 4 if product.float32 else self.work.itemsize
        rows = self.local_tokens * product.rows_per_token * layouts.row_copies(product.gathered_rows)
        operand_bytes = rows * itemsize * product.components
        for axis, n, _, _ in inputs:
            operand_bytes = operand_bytes * n / layouts.count_parts(axis, "used", n)
        result_bytes = rows * itemsize * product.components
        for axis, n, _, _ in outputs:
            result_bytes = result_bytes * n / layouts.count_parts(axis, "used", n)
        gather_axes = [m for _, _, active, used in inputs for m in active if m not in used]
        sum_axes = [m for _, _, _, used in inputs for m in used]
        scatter_axes = [m for _, _, active, used in outputs for m in active if m in sum_axes]
        sum_axes = [m for m in sum_axes if m not in scatter_axes]
        backward_sum_axes = [m for _, _, _, used in outputs for m in used]
        backward_scatter_axes = [m for m in gather_axes if m in backward_sum_axes]
        backward_sum_axes = [m for m in backward_sum_axes if m not in backward_scatter_axes]
        forward = network.all_reduce(layouts, sum_axes, result_bytes) + network.reduce_scatter(
            layouts, scatter_axes, result_bytes, one_ring=True
        )
        windowed = self.efficiency.windowed
        backward = (1 + windowed) * network.all_gather(layouts, scatter_axes, result_bytes, one_ring=True)
        regather = np.zeros(len(layouts))
        if gathers_operand:
            gather_s = network.all_gather(layouts, gather_axes, operand_bytes, one_ring=True)
            forward, regather = forward + gather_s, windowed * gather_s
        if gathers_operand or self.efficiency.apart > 0:
            backward = backward + network.all_reduce(layouts, backward_sum_axes, operand_bytes)
            backward = backward + network.reduce_scatter(layouts, backward_scatter_axes, operand_bytes, one_ring=True)
        for axes, factor_bytes in ((product.input_axes, result_bytes), (product.output_axes, operand_bytes)):
            backward = backward + sum(self._batch_gathers(axis, factor_bytes) for axis, _ in axes)
        return forward, backward, regather

    def _batch_gathers(self, logical: str, factor_bytes: np.ndarray) -> np.ndarray:
        """Return the exposed seconds, for each layout, of all-gathering a batch to compute a parameter's gradient.

        The gradient is the matmul of the layer's input with the gradient of its output. XLA all-gathers one of the two
        factors, the one that does not have this axis, over the data axes. `Efficiency.whole_batches` is the share of
        this time that is exposed. Layouts that do not need this (`Candidates.is_split_twice`) get 0.

        Args:
            logical: A logical axis of the parameter.
            factor_bytes: Bytes per device of the factor that does not have this axis.
        """
        layouts, stored = self.layouts, self.layouts.stored_axes(logical)
        data_axes = tuple(axis for axis in stored if axis in layouts.data_axes)
        if not data_axes:
            return np.zeros(len(layouts))
        parts = layouts.axes_size(data_axes)
        seconds = self.network.all_gather(layouts, data_axes, factor_bytes * parts)
        return np.where(layouts.is_split_twice(logical), self.efficiency.whole_batches * seconds, 0.0)

    def _sequence_exchange(self, mixing: Mixing) -> np.ndarray:
        """Return the seconds to fetch activations from other shards of the sequence, in one layer and one pass."""
        layouts, axes = self.layouts, self.layouts.activations[SEQ]
        seconds, seq = np.zeros(len(layouts)), self.work.run.config.seq
        shards = layouts.axes_size(axes)
        for activation, positions in mixing.neighbours:
            per_position = self._bytes_per_token(activation) * self.local_tokens / (seq / shards)
            if positions is None:
                seconds += self.network.all_gather(layouts, axes, per_position * seq)
            else:
                seconds += self.network.exchange(layouts, axes, per_position * min(positions, seq))
        for activation in mixing.exchanged_halves:
            bytes_ = self._bytes_per_token(activation) * self.local_tokens * half_exchange_hops(shards)
            seconds += np.where(self._exchanges_halves, self.network.exchange(layouts, axes, bytes_), 0.0)
        return seconds

    def _bytes_per_token(self, activation: SavedActivation) -> np.ndarray:
        bytes_ = np.full(len(self.layouts), activation.count * (4.0 if activation.float32 else self.work.itemsize))
        for axis, n in zip(activation.tensor.axes[2:], activation.tensor.shape[2:], strict=True):
            bytes_ = bytes_ * n / self.layouts.count_parts(axis, "active", n)
        return bytes_

    @cached_property
    def _table_collectives(self) -> np.ndarray:
        """Seconds of the all-reduces over mesh axes that shard the vocabulary, in one microbatch.

        One sums the embeddings, the other the gradients of the last hidden states.
        """
        layouts, vocab = self.layouts, self.layouts.used_axes("vocab")
        stream = self.local_tokens * self.work.embed * self.work.itemsize
        rows = stream / layouts.axes_size(layouts.loss_axes)
        return 2 * self.network.all_reduce(layouts, vocab, rows)

    @cached_property
    def _pipeline_ends(self) -> np.ndarray:
        """Seconds of communication at both ends of a pipeline, once per step.

        The residual streams of all microbatches are sent to the first stage, and from the last stage to all stages; the
        backward pass repeats this. Gradients of parameters outside the layers are summed over the stages.
        """
        layouts, axes = self.layouts, self.layouts.parameters.get(LAYERS, ())
        width = self.work.embed / layouts.count_parts("embed", "active", self.work.embed)
        stream = self.local_tokens * layouts.microbatches * width * self.work.itemsize
        seconds = 4 * (layouts.stages - 1) * self.network.exchange(layouts, axes, stream / layouts.stages)
        itemsize = self.work.run.config.precision.reduction.itemsize
        outside_layers = [spec for spec in self.work.parameters.values() if LAYERS not in spec.axes]
        return seconds + self.network.all_reduce(
            layouts, axes, itemsize * _sum_arrays(self.layouts.shard_elements(spec, "used") for spec in outside_layers)
        )

    @cached_property
    def _stage_send_seconds(self) -> np.ndarray:
        """Seconds to send a microbatch from one stage to the next, forward and backward.

        Summed over the rounds of a circular schedule.
        """
        layouts = self.layouts
        width = self.work.embed / layouts.count_parts("embed", "active", self.work.embed)
        bytes_, axes = self.local_tokens * width * self.work.itemsize, layouts.parameters.get(LAYERS, ())
        if layouts.sends_parts:
            split = (*axes, *layouts.data_axes, *layouts.activations["embed"])
            replicated = [axis for axis in layouts.sizes if axis not in split]
            send_s = self.network.exchange(layouts, axes, bytes_ / layouts.axes_size(replicated))
            return 2 * layouts.rounds * (send_s + self.network.all_gather(layouts, replicated, bytes_))
        return 2 * layouts.rounds * self.network.exchange(layouts, axes, bytes_)

    @cached_property
    def _optimizer_seconds(self) -> np.ndarray:
        """Seconds of the optimizer's step: moving its state through HBM, and its matrix products."""
        # TODO: count Muon's two exchanges of matrices in the compute dtype. XLA implements each as an all-to-all, a
        # gather or a slice, depending on the sharding, and we have no verified formula for that choice.
        config = self.work.run.config.optimizer
        bytes_ = np.zeros(len(self.layouts))
        for spec in self.work.parameters.values():
            bytes_ += config.update_bytes(spec) * self.layouts.state_shard_elements(spec)
        flops = config.update_flops(self.work.parameters.values(), self.layouts.devices)
        return bytes_ / self.hbm_bandwidth + flops / (self.peak_flops * self.efficiency.products)


def _sum_arrays(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, arrays)


def _tile_utilisation(length: np.ndarray, tile: float) -> np.ndarray:
    """Return the ratio of a length to the length rounded up to whole tiles."""
    return length / _round_up(length, tile)


def _round_up(length: np.ndarray, multiple: float) -> np.ndarray:
    return np.ceil(length / multiple) * multiple
