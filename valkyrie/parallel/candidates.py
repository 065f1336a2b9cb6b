"""Layouts as arrays: the sizes of mesh axes of thousands of layouts that share a partition's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays, Parameter
from valkyrie.parallel.layout import gathered_axes, zero1_axes
from valkyrie.parallel.partition import PartitionConfig, PipelineSchedule, Rules
from valkyrie.parallel.problems import size_checks
from valkyrie.problems import Problem


@dataclass(frozen=True)
class AxisLinks:
    """Links of a mesh axis, with one entry per layout.

    Args:
        inner: Devices that fast links join: those of a TPU slice, or of a GPU host.
        inner_rate: Bytes per second that a device sends over them.
        outer: Groups of such devices: slices, or hosts.
        outer_rate: Bytes per second that a device sends between them.
        hops: Links around the axis on the torus.
        ring_rate: Rate of a single ring through all inner devices, which one axis of the torus limits.
    """

    inner: np.ndarray
    inner_rate: np.ndarray
    outer: np.ndarray
    outer_rate: np.ndarray
    hops: np.ndarray
    ring_rate: np.ndarray


@dataclass(frozen=True)
class Candidates:
    """Layouts of one partition, as arrays with one entry per layout.

    Args:
        sizes: Devices along each mesh axis.
        spans: Links of each mesh axis.
        rounds: Stretches of layers per pipeline stage (circular schedule), else 1.
        sums_once: Gradients are summed over devices after the last microbatch, as in PyTorch, not after each.
        shares_loss: Stages share the logits; otherwise the last one has them.
        sends_parts: Devices with the same activations each send a part of them to the next stage, which gathers them,
            as in Megatron-LM (arXiv 2104.04473, section 4.1); otherwise each sends all.
    """

    partition: PartitionConfig
    parameters: Rules
    activations: Rules
    arrays: Arrays
    sizes: Mapping[str, np.ndarray]
    spans: Mapping[str, AxisLinks]
    microbatches: np.ndarray
    rounds: np.ndarray
    sums_once: bool = False
    shares_loss: bool = True
    sends_parts: bool = False

    def __len__(self) -> int:
        return len(self.microbatches)

    def take(self, chosen: np.ndarray) -> Candidates:
        """Return the layouts selected by a mask or by indices."""
        spans = {a: AxisLinks(*(getattr(s, f)[chosen] for f in s.__dataclass_fields__)) for a, s in self.spans.items()}
        sizes = {axis: size[chosen] for axis, size in self.sizes.items()}
        microbatches, rounds = self.microbatches[chosen], self.rounds[chosen]
        return replace(self, sizes=sizes, spans=spans, microbatches=microbatches, rounds=rounds)

    def parts(self, mesh_axes: Sequence[str]) -> np.ndarray:
        """Return the number of parts into which these mesh axes split."""

        def product() -> np.ndarray:
            return np.prod([np.ones(len(self), np.int64), *(self.sizes[axis] for axis in mesh_axes)], axis=0)

        return self._cached(tuple(mesh_axes), product)

    @cached_property
    def _cache(self) -> dict[tuple[object, ...], np.ndarray]:
        """Cached products: a step needs the same parts many times."""
        return {}

    def _cached(self, key: tuple[object, ...], compute: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self._cache:
            self._cache[key] = compute()
            self._cache[key].flags.writeable = False
        return self._cache[key]

    @property
    def devices(self) -> np.ndarray:
        """Devices of the mesh, one entry per layout."""
        return self.parts(tuple(self.sizes))

    @cached_property
    def data(self) -> tuple[str, ...]:
        """Mesh axes that split data."""
        return tuple(dict.fromkeys([*self.activations[BATCH], *self.activations[SEQ]]))

    @cached_property
    def stages(self) -> np.ndarray:
        """Pipeline stages of each layout."""
        return self.parts(self.parameters.get(LAYERS, ()))

    def stored(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's logical axis is split in storage."""
        return () if logical is None else self.parameters[logical]

    def used(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's logical axis is split while it is used."""
        gathered = self.gathered(logical)
        return tuple(axis for axis in self.stored(logical) if axis not in gathered)

    def gathered(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's logical axis is gathered for use."""
        return gathered_axes(logical, self.parameters, self.activations, self.arrays.dispatched)

    def spread(self, axes: Sequence[str | None]) -> tuple[str, ...]:
        """Return the mesh axes over which ZeRO-1 spreads a parameter's moments: data axes that do not split it.

        Outside of its stages, a pipeline's axis splits data as well.
        """
        data = dict.fromkeys([*self.parameters.get(LAYERS, ()), *self.activations[BATCH]])
        return zero1_axes(data, map(self.stored, axes))

    def split(self, logical: str | None, kind: str, length: int) -> np.ndarray:
        """Return the number of parts of a logical axis of this length as it is `stored`, `used` or `active`.

        An axis that follows another one is split only as far as its length divides.
        """
        return self._cached((logical, kind, length), lambda: self._split(logical, kind, length))

    def _split(self, logical: str | None, kind: str, length: int) -> np.ndarray:
        if logical is None:
            return np.ones(len(self), np.int64)
        axes = self.activations[logical] if kind == "active" else getattr(self, kind)(logical)
        whole = self.parts(axes)
        if logical not in self.arrays.follows:
            return whole
        rules = self.activations if kind == "active" else self.parameters
        if rules[logical] != rules[self.arrays.follows[logical]]:
            return whole
        limited = np.ones(len(self), np.int64)
        for end in range(1, len(axes) + 1):
            further = self.parts(axes[:end])
            limited = np.where(length % further == 0, further, limited)
        return limited

    def shard(self, spec: Parameter, kind: str) -> np.ndarray:
        """Return the elements of a parameter on one device as it is `stored` or `used`."""
        numbers = np.full(len(self), float(spec.size))
        for axis, length in zip(spec.axes, spec.shape, strict=True):
            numbers = numbers / (self.stages if axis == LAYERS else self.split(axis, kind, length))
        return numbers

    def state_shard(self, spec: Parameter) -> np.ndarray:
        """Return the elements of a parameter for which one device has optimizer state, as `Layout.optimizer` splits it.

        ZeRO-1 spreads it over each free data axis, along the first dimension that the axis divides.
        """
        numbers = self.shard(spec, "stored")
        if not self.partition.zero1:
            return numbers
        splits = [self.split(axis, "stored", n) for axis, n in zip(spec.axes, spec.shape, strict=True)]
        for size in (self.sizes[axis] for axis in self.spread(spec.axes)):
            whole = np.ones(len(self), bool)
            for i, (axis, length) in enumerate(zip(spec.axes, spec.shape, strict=True)):
                if axis != LAYERS:
                    divides = whole & (length % (splits[i] * size) == 0)
                    by = np.where(divides, size, 1)
                    splits[i], numbers, whole = splits[i] * by, numbers / by, whole & ~divides
        return numbers

    def problems(self, batch: int, seq: int) -> dict[Problem, np.ndarray]:
        """Return the problems of sizes, each with a mask of the layouts that have it."""
        masks: dict[Problem, np.ndarray] = {}
        for check in size_checks(self, self.arrays, batch, seq):
            p = check.problem
            problem = Problem(p.code, partition=p.partition, axes=p.axes, size=p.size)
            masks[problem] = masks.get(problem, np.zeros(len(self), bool)) | check.wrong
        return masks

    @property
    def alternates(self) -> bool:
        """Whether microbatches go backward while others still go forward."""
        return self.partition.schedule is PipelineSchedule["1f1b"]

    @property
    def in_flight(self) -> np.ndarray:
        """Microbatches for which a stage stores layer inputs, as in `valkyrie.parallel.schedule.Pipeline.kept`."""
        stages, m = self.stages, self.microbatches
        kept = np.minimum(2 * stages - 1, m) if self.alternates else self.rounds * m + stages - 1
        return np.where(stages > 1, kept / self.rounds, 1)
