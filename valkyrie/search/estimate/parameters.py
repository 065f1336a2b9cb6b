"""Estimates the times to gather parameters, to sum their gradients over devices, and to add those of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from valkyrie.axes import BATCH, LAYERS, Parameter
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.precision import ACCUMULATOR_DTYPE
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import CollectiveModel
from valkyrie.search.estimate.work import StepWork
from valkyrie.train.options import collect_options

_FUSED_COLLECTIVES = "xla_tpu_enable_async_collective_fusion"
"""XLA option that fuses asynchronous collectives with other operations."""
_SPARSE_CORE_GATHERS = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
"""XLA option that runs all-gathers on SparseCores, where they overlap with any operation."""


class ParameterTimes:
    """Estimates times that depend on the sizes of parameters, for all layouts.

    Args:
        work: Work of the step.
        layouts: The layouts. Every returned array has one entry per layout, in seconds.
        efficiency: Constants of the chip.
        network: Model of collectives.
        hbm_bandwidth: Bytes per second that a device achieves.
        chip: The chip.
    """

    def __init__(
        self,
        work: StepWork,
        layouts: Candidates,
        efficiency: Efficiency,
        network: CollectiveModel,
        hbm_bandwidth: float,
        chip: ChipConfig,
    ) -> None:
        self.work, self.layouts, self.efficiency = work, layouts, efficiency
        self.network, self.hbm_bandwidth = network, hbm_bandwidth
        options = {option.name: option.value for option in collect_options(chip, {})}
        fuses_gathers = options.get(_FUSED_COLLECTIVES) == "true" and options.get(_SPARSE_CORE_GATHERS) != "true"
        self._waits_for_stacks = fuses_gathers and any(mixing.dispatch.rows for mixing in work.mixing)
        """Whether the kernels of experts wait until their matrices are gathered.

        XLA fuses the steps of an asynchronous gather with other operations, but not with kernels. In seven compiled
        steps on v5e and v5p (libtpu 0.0.42.1), 55 to 100% of the time of these gathers is exposed. libtpu 0.0.46 fuses
        no gathers on v6e, where all of it is.
        """

    def gather_seconds(self, sums_once: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds of gathering parameters that data axes shard.

        The first two are per microbatch: gathers that can overlap with compute, and others. The third is once, before
        the first microbatch.

        A microbatch gathers them forward and again backward, in the compute dtype. The stages of a pipeline that sums
        gradients once (the mask `sums_once`) gather them once, in float32.
        """
        gathers_once = sums_once & (self.layouts.stages > 1)
        once_s = sum(self._weight_seconds) * (ACCUMULATOR_DTYPE.itemsize / (2 * self.work.itemsize))
        asynchronous_s, synchronous_s = (np.where(gathers_once, 0.0, seconds) for seconds in self._weight_seconds)
        return asynchronous_s, synchronous_s, np.where(gathers_once, once_s, 0.0)

    @cached_property
    def _weight_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of gathering parameters that data axes shard twice, in the compute dtype.

        The first are those of gathers that can overlap with compute, the second those of others.
        """
        asynchronous_s, synchronous_s = np.zeros(len(self.layouts)), np.zeros(len(self.layouts))
        for spec in self.work.parameters.values():
            if not (axes := self.layouts.gathered_mesh_axes(spec)):
                continue
            is_synchronous = self._waits_for_stacks and spec.matrices_per_token is not None
            bytes_ = self.layouts.shard_elements(spec, "used") * self.work.itemsize
            gather_s = self.network.all_gather(self.layouts, axes, bytes_, is_synchronous=is_synchronous)
            seconds = synchronous_s if is_synchronous else asynchronous_s
            seconds += 2 * gather_s
        return asynchronous_s, synchronous_s

    def sum_seconds(self, sums_once: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds per step spent summing gradients over data axes: in the backward passes, and after them.

        Gradients are summed in the backward pass of each microbatch, or of the last one with `Candidates.sums_once`. A
        pipeline also sums those of its idle turns. ZeRO-1 uses reduce-scatters instead of all-reduces, unless
        `whole_sums` is set. For layouts in the mask `sums_once`, only sums over the sequence are in the backward
        passes. Those over the batch follow the last microbatch, where no products overlap with them. Other layouts may
        do this for sums over replicas (`SumGradientsPer.hybrid`).
        """
        over_all, over_sequence, over_batch = self._sum_seconds_by_axes
        in_passes, at_end = self._hybrid_sum_seconds if self.layouts.can_sum_replicas_once.any() else (over_all, 0.0)
        return np.where(sums_once, over_sequence, in_passes), np.where(sums_once, over_batch, at_end)

    @cached_property
    def _hybrid_sum_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of summing gradients in the backward passes, and after them, without `SumGradientsPer.step`."""
        layouts, is_hybrid = self.layouts, self.layouts.can_sum_replicas_once
        other_axes = tuple(axis for axis in layouts.data_axes if axis not in layouts.replica_axes)
        in_passes = np.where(is_hybrid, self._sum_seconds(other_axes), self._sum_seconds_by_axes[0])
        return in_passes, np.where(is_hybrid, self._sum_seconds(layouts.replica_axes, "stored"), 0.0)

    def _count_sums(self, spec: Parameter) -> np.ndarray:
        """Return how often a step sums the gradient of a parameter, if it does so in every backward pass.

        A pipeline computes the gradients of parameters outside of the layers once.
        """
        layouts = self.layouts
        if layouts.sums_once:
            return np.ones(len(layouts))
        return np.where(layouts.stages > 1, self._turns if LAYERS in spec.axes else 1, layouts.microbatches)

    @property
    def _turns(self) -> np.ndarray:
        """Number of turns of a pipeline's stage, each through all of its layers, including idle turns."""
        return self.layouts.microbatches + (self.layouts.stages - 1) / self.layouts.rounds

    @cached_property
    def _sum_seconds_by_axes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of summing all gradients over all data axes, over those of the sequence, and those of the batch.

        The first two are sums in the backward passes (`_count_sums`), the last is a single sum.
        """
        layouts, batch_axes = self.layouts, self.layouts.activations[BATCH]
        over_all = self._sum_seconds(layouts.data_axes)
        if not layouts.can_sum_gradients_once.any():
            return over_all, over_all, over_all
        sequence_axes = tuple(axis for axis in layouts.data_axes if axis not in batch_axes)
        return over_all, self._sum_seconds(sequence_axes), self._sum_seconds(batch_axes, "accumulated")

    def _sum_seconds(self, data_axes: Sequence[str], kind: str = "used") -> np.ndarray:
        """Return the seconds of summing all gradients over these data axes, from shards of a kind of parameter.

        Those of the kinds `accumulated` and `stored` are summed once.
        """
        layouts, seconds = self.layouts, np.zeros(len(self.layouts))
        itemsize = self.work.run.config.precision.reduction.itemsize
        for spec in self.work.parameters.values():
            split = tuple(axis for axis in layouts.gathered_mesh_axes(spec) if axis in data_axes)
            stored = [m for axis in spec.axes for m in layouts.stored_axes(axis)]
            # Data axes that split the parameter are left out: the reduce-scatter covers them, or (experts) the shard
            # has received the tokens of all devices.
            summed_axes = tuple(axis for axis in data_axes if axis not in stored)
            bytes_ = self.layouts.shard_elements(spec, kind) * itemsize
            count = self._count_sums(spec) if kind == "used" else 1
            seconds += count * self.network.reduce_scatter(layouts, split, bytes_)
            scattered = layouts.partition.zero1 and not self.efficiency.whole_sums
            reduce = self.network.reduce_scatter if scattered else self.network.all_reduce
            seconds += count * reduce(layouts, summed_axes, bytes_ / layouts.axes_size(split))
        return seconds

    def accumulation_seconds(self, sums_once: np.ndarray) -> np.ndarray:
        """Return the seconds per microbatch of adding its gradients to float32 arrays: two are read and one written.

        `sums_once` is the mask of `SumGradientsPer.step`, whose arrays are not split over the batch's mesh axes. A step
        of one microbatch adds nothing. A turn of a pipeline writes the gradients of its layers before it adds them.
        """
        layouts, (unsplit, stored, all_unsplit, all_stored) = self.layouts, self._accumulated_elements
        # TODO: a turn of a circular schedule also adds zeros to the layers of the other rounds.
        in_turns = 0.0 if layouts.sums_once else 4 * np.where(sums_once, unsplit, stored)
        alone = np.where(layouts.microbatches > 1, 3 * np.where(sums_once, all_unsplit, all_stored), 0.0)
        elements = np.where(layouts.stages > 1, in_turns, alone)
        return ACCUMULATOR_DTYPE.itemsize * elements / self.hbm_bandwidth

    @cached_property
    def _accumulated_elements(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Elements per device of the layers, split as within a shard of the batch and as stored.

        The third and fourth items are the same of all parameters.
        """
        layouts = self.layouts
        unsplit, stored, all_unsplit, all_stored = (np.zeros(len(layouts)) for _ in range(4))
        for spec in self.work.parameters.values():
            accumulated_elements, stored_elements = (layouts.shard_elements(spec, k) for k in ("accumulated", "stored"))
            all_unsplit, all_stored = all_unsplit + accumulated_elements, all_stored + stored_elements
            if LAYERS in spec.axes:
                unsplit, stored = unsplit + accumulated_elements, stored + stored_elements
        return unsplit, stored, all_unsplit, all_stored

    @cached_property
    def zero1_gather_seconds(self) -> np.ndarray:
        """Seconds of gathering the updated parameters under ZeRO-1, once per step."""
        seconds = np.zeros(len(self.layouts))
        if self.layouts.partition.zero1:
            for spec in self.work.parameters.values():
                gathered_parts = self.layouts.axes_size(self.layouts.gathered_mesh_axes(spec))
                bytes_ = 4 * self.layouts.shard_elements(spec, "used") / gathered_parts
                seconds += self.network.all_gather(
                    self.layouts, self.layouts.zero1_axes(spec.axes), bytes_, one_ring=True
                )
        return seconds
