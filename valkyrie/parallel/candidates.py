"""Layouts as arrays: the sizes of mesh axes of thousands of layouts that share a partition's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays, Parameter
from valkyrie.parallel.layout import gathered_axes
from valkyrie.parallel.partition import PartitionConfig, PipelineSchedule, Rules
from valkyrie.parallel.problems import size_checks
from valkyrie.problems import Problem


@dataclass(frozen=True)
class Span:
    """How a mesh axis lies, one entry a layout: devices that fast links join, devices beyond them, and both rates.

    Of a TPU axis `inner` are the devices of a slice, which the torus joins, `outer` the slices; of a GPU axis those of
    a host and the hosts. Rates are bytes a second that one device sends over the axis; `ring_rate` is that of one ring
    through all devices of a slice, which goes at the pace of one axis of the torus.
    """

    inner: np.ndarray
    inner_rate: np.ndarray
    outer: np.ndarray
    outer_rate: np.ndarray
    hops: np.ndarray
    ring_rate: np.ndarray


@dataclass(frozen=True)
class Candidates:
    """Layouts of one partition: arrays with one entry a layout.

    `sizes`: devices along each mesh axis. `spans`: how each axis lies. `microbatches`; `rounds`: stretches of
    layers that each pipeline stage has (circular schedule), else 1. `sums_once`: gradients are summed over
    devices after the last microbatch, as PyTorch does, not after each. `shares_loss`: stages share the logits; else
    the last one has them. `sends_parts`: of devices that have the same activations each sends a part of them to the
    next stage, where they are gathered, as Megatron-LM does (arXiv 2104.04473, section 4.1); else each sends all.
    """

    partition: PartitionConfig
    parameters: Rules
    activations: Rules
    arrays: Arrays
    sizes: Mapping[str, np.ndarray]
    spans: Mapping[str, Span]
    microbatches: np.ndarray
    rounds: np.ndarray
    sums_once: bool = False
    shares_loss: bool = True
    sends_parts: bool = False

    def __len__(self) -> int:
        return len(self.microbatches)

    def take(self, chosen: np.ndarray) -> Candidates:
        """Return the layouts that a mask or a list of numbers chooses."""
        spans = {a: Span(*(getattr(s, f)[chosen] for f in s.__dataclass_fields__)) for a, s in self.spans.items()}
        sizes = {axis: size[chosen] for axis, size in self.sizes.items()}
        changes = {"sizes": sizes, "spans": spans}
        changes |= {"microbatches": self.microbatches[chosen], "rounds": self.rounds[chosen]}
        return Candidates(**{**{f: getattr(self, f) for f in self.__dataclass_fields__}, **changes})

    def parts(self, mesh_axes: Sequence[str]) -> np.ndarray:
        """Return into how many parts these mesh axes split."""
        return self._kept(tuple(mesh_axes), lambda: self._parts(mesh_axes))

    def _parts(self, mesh_axes: Sequence[str]) -> np.ndarray:
        product = np.ones(len(self), np.int64)
        for axis in mesh_axes:
            product = product * self.sizes[axis]
        return product

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], np.ndarray]:
        """What was computed once already, by what it is of: a step asks for the same parts many times."""
        return {}

    def _kept(self, of: tuple[Any, ...], compute: Callable[[], np.ndarray]) -> np.ndarray:
        if of not in self._known:
            self._known[of] = compute()
            self._known[of].flags.writeable = False
        return self._known[of]

    @property
    def devices(self) -> np.ndarray:
        """Devices of the mesh, one entry per layout."""
        return self.parts(tuple(self.sizes))

    @cached_property
    def data(self) -> tuple[str, ...]:
        """The mesh axes that split data."""
        return tuple(dict.fromkeys([*self.activations[BATCH], *self.activations[SEQ]]))

    @cached_property
    def stages(self) -> np.ndarray:
        """How many pipeline stages each layout has."""
        return self.parts(self.parameters.get(LAYERS, ()))

    def stored(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a logical axis of parameters rests split."""
        return () if logical is None else self.parameters[logical]

    def used(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's axis is split while it is used."""
        gathered = self.gathered(logical)
        return tuple(axis for axis in self.stored(logical) if axis not in gathered)

    def gathered(self, logical: str | None) -> tuple[str, ...]:
        """Return the mesh axes over which a parameter's axis is gathered for use."""
        return gathered_axes(logical, self.parameters, self.activations, self.arrays.dispatched)

    def spread(self, axes: Sequence[str | None]) -> tuple[str, ...]:
        """Return over which mesh axes ZeRO-1 spreads the moments of a parameter: data axes on none of which it rests.

        Outside of its stages a pipeline's axis splits data as well.
        """
        data = dict.fromkeys([*self.parameters.get(LAYERS, ()), *self.activations[BATCH]])
        return tuple(a for a in data if not any(a in self.stored(axis) for axis in axes))

    def split(self, logical: str | None, kind: str, length: int) -> np.ndarray:
        """Return into how many parts a logical axis of this length is split: `stored`, `used` or `active`.

        An axis that follows another one is split no further than its length divides.
        """
        return self._kept((logical, kind, length), lambda: self._split(logical, kind, length))

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
        """Return how many numbers of a parameter one device has as it is `stored` or `used`."""
        numbers = np.full(len(self), float(spec.size))
        for axis, length in zip(spec.axes, spec.shape, strict=True):
            numbers = numbers / (self.stages if axis == LAYERS else self.split(axis, kind, length))
        return numbers

    def problems(self, batch: int, seq: int) -> dict[Problem, np.ndarray]:
        """Return the problems of sizes that these layouts have, each with a mask of the layouts that have it."""
        masks: dict[Problem, np.ndarray] = {}
        for check in size_checks(self, self.arrays, batch, seq):
            p = check.problem
            problem = Problem(p.code, partition=p.partition, axes=p.axes, size=p.size)
            masks[problem] = masks.get(problem, np.zeros(len(self), bool)) | check.wrong
        return masks

    @property
    def alternates(self) -> bool:
        """Whether microbatches go back while others still go forward."""
        return self.partition.schedule is PipelineSchedule["1f1b"]

    @property
    def in_flight(self) -> np.ndarray:
        """For how many microbatches a stage keeps its layers' inputs, as `valkyrie.parallel.schedule` counts them."""
        stages, m = self.stages, self.microbatches
        kept = np.minimum(2 * stages - 1, m) if self.alternates else self.rounds * m + stages - 1
        return np.where(stages > 1, kept / self.rounds, 1)
