"""The memory of many layouts at once: what `valkyrie.train.memory` expects of one, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from valkyrie.axes import BATCH, LAYERS, SEQ, Parameter
from valkyrie.hardware.platforms import platform_of
from valkyrie.models.block import BLOCK_INPUT, SavedActivation
from valkyrie.parallel.partition import Memory
from valkyrie.parallel.remat import Place, RematConfig
from valkyrie.precision import ACCUMULATED
from valkyrie.search.estimate.candidates import Candidates
from valkyrie.search.estimate.work import Work, size_of
from valkyrie.train.kept import place_of


@dataclass(frozen=True)
class ExpectedBytes:
    """Bytes of one device at the peak of a step by part, one entry a layout."""

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    average: np.ndarray
    activations: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The sum, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.average + self.activations


class Need:
    """The memory of a step of each layout; what no remat policy changes is computed once for all of them."""

    def __init__(self, work: Work, layouts: Candidates) -> None:
        self.work, self.layouts = work, layouts

    def under(self, remat: RematConfig) -> ExpectedBytes:
        """Return what a step needs on one device; arrays that rest in host memory are not counted."""
        partition, (parameters, gradients, moments, average) = self.layouts.partition, self._at_rest
        on_device = partition.parameter_memory is Memory.device
        return ExpectedBytes(
            parameters=parameters * on_device,
            gradients=gradients,
            optimizer=moments * (partition.optimizer_memory is Memory.device),
            average=average * on_device,
            activations=self._activations(remat, gradients),
        )

    @cached_property
    def _at_rest(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The bytes of parameters, gradients, the optimizer's moments and the average of parameters."""
        layouts, config = self.layouts, self.work.run.config
        stored, sums = size_of(config.precision.parameter), size_of(config.precision.reduction)
        parameters, reduced, added, moments, average = (np.zeros(len(layouts)) for _ in range(5))
        for spec in self.work.parameters.values():
            numbers = _shard(spec, layouts, "stored")
            parameters += numbers * (4 if spec.float32 else stored)
            reduced += numbers * sums
            added += numbers * size_of(ACCUMULATED)
            zero1 = layouts.parts(layouts.spread(spec.axes)) if layouts.partition.zero1 else 1
            moments += config.optimizer.state_bytes(spec) * numbers / zero1
            average += numbers * 4 * (config.optimizer.ema_decay is not None)
        gradients = np.minimum(parameters, reduced) + np.where(layouts.microbatches > 1, added, 0)
        return parameters, gradients, moments, average

    def _activations(self, remat: RematConfig, gradients: np.ndarray) -> np.ndarray:
        """Return the bytes kept for the backward pass, and those of the working set of a group and of the loss."""
        kept, unnamed = np.zeros(len(self.layouts)), np.zeros(len(self.layouts))
        for entry, bytes_ in self._kept:
            if place_of(entry, remat) is Place.device:
                kept = kept + bytes_
                unnamed = unnamed + (bytes_ if entry.name is None else 0.0)
        loss, group = self._working
        platform = platform_of(self.work.run.config.target.platform)
        return platform.activation_bytes(kept, unnamed, loss, group, gradients, self._gathered)

    @cached_property
    def _kept(self) -> list[tuple[SavedActivation, np.ndarray]]:
        """What backward passes may find, with the bytes of all microbatches that wait for theirs at once."""
        layouts = self.layouts
        waiting = layouts.in_flight / layouts.stages
        return [(kept, _bytes(kept, self.work, layouts) * waiting) for kept in self.work.run.model.kept()]

    @cached_property
    def _working(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of the logits of a part of the loss, and of a group of blocks that is worked on."""
        loss, group = np.zeros(len(self.layouts)), np.zeros(len(self.layouts))
        for entry in self.work.run.model.working():
            bytes_ = _bytes(entry, self.work, self.layouts)
            group, loss = (group + bytes_, loss) if entry.positions is None else (group, loss + bytes_)
        layouts = self.layouts
        piped, m = layouts.stages > 1, layouts.microbatches
        stream = next(kept for kept in self.work.run.model.kept() if kept.name == BLOCK_INPUT)
        group = group + np.where(piped, m * _bytes(replace(stream, count=1), self.work, layouts), 0.0)
        return loss / layouts.stages * np.where(piped & (not layouts.alternates), m, 1), group

    @cached_property
    def _gathered(self) -> np.ndarray:
        """The bytes of one layer's weights gathered for use, and of their gradients before the reduction."""
        layouts, total = self.layouts, np.zeros(len(self.layouts))
        itemsize = self.work.itemsize + size_of(self.work.run.config.precision.reduction)
        for spec in self.work.parameters.values():
            data = [m for axis in spec.axes for m in layouts.gathered(axis)]
            if LAYERS in spec.axes and data:
                one = _shard(spec, layouts, "used") / (spec.shape[spec.axes.index(LAYERS)] / layouts.stages)
                total = total + itemsize * one * (layouts.parts(data) > 1)
        return total


def _bytes(kept: SavedActivation, work: Work, layouts: Candidates) -> np.ndarray:
    """Return the bytes of activations of a microbatch on one device."""
    config = work.run.config
    rows = config.batch / layouts.microbatches / layouts.parts(layouts.activations[BATCH])
    of_shard = config.seq / layouts.parts(layouts.activations[SEQ])
    numbers = rows * (of_shard if kept.positions is None else np.minimum(of_shard, kept.positions))
    for axis, length in zip(kept.tensor.axes[2:], kept.tensor.shape[2:], strict=True):
        numbers = numbers * length / layouts.split(axis, "active", length)
    return kept.count * numbers * (4 if kept.float32 else work.itemsize)


def _shard(spec: Parameter, layouts: Candidates, kind: str) -> np.ndarray:
    """Return how many numbers of a parameter one device has, as it rests (`stored`) or as it is used."""
    numbers = np.full(len(layouts), float(spec.size))
    for axis, length in zip(spec.axes, spec.shape, strict=True):
        numbers = numbers / (layouts.stages if axis == LAYERS else layouts.split(axis, kind, length))
    return numbers
