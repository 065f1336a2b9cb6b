"""Memory of a step of one run: its parts, what it saves for the backward pass, and how it sums gradients.

Only `expected_memory` imports JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from valkyrie.axes import BATCH
from valkyrie.config.run import Run, known_axes
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.partition import AccumulatedGradients, MemoryKind, SumGradientsPer, resolve_rules
from valkyrie.parallel.remat import ActivationLocation, RematConfig
from valkyrie.train.memory import ExpectedMemory, MemoryEstimator


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per device saved for the backward pass in device and in host memory, by activation name (or `UNNAMED`)."""

    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_total(self) -> int:
        """Bytes per device saved in device memory, over all activations."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """Bytes per device saved in host memory, over all activations."""
        return sum(self.host.values())


def to_candidates(runs: Sequence[Run]) -> Candidates:
    """Return the layouts of runs as `Candidates`, with one entry per run and with empty `links`.

    The runs must have the same partition and the same names of mesh axes.
    """
    config, layouts = runs[0].config, [run.layout for run in runs]
    parameters, activations, _ = resolve_rules(config.partition, config.mesh, runs[0].arrays.axes, known_axes())
    return Candidates(
        config.partition,
        parameters,
        activations,
        runs[0].arrays,
        {axis: np.array([layout.mesh.axes[axis] for layout in layouts]) for axis in layouts[0].mesh.axes},
        {},
        np.array([layout.microbatches for layout in layouts]),
        np.full(len(runs), float(config.partition.rounds)),
    )


def expected_memory(run: Run, abstract_state: Any, remat: RematConfig | None = None) -> ExpectedMemory[int]:
    """Return the device memory of a run under `remat`, or under its own policy if None.

    The size of the optimizer state comes from `abstract_state`, which has shapes and shardings. Arrays that the
    partition keeps in host memory are omitted.
    """
    on_device = run.layout.partition.optimizer_memory is MemoryKind.device
    optimizer = _shard_bytes(abstract_state.optimizer) if on_device else 0
    return replace(estimated_memory(run, remat), optimizer=optimizer)


def estimated_memory(run: Run, remat: RematConfig | None = None) -> ExpectedMemory[int]:
    """Return the device memory of a run like `expected_memory`, but estimate the size of the optimizer state, too."""
    memory = MemoryEstimator(run, to_candidates([run])).estimate(remat or run.config.remat)
    return ExpectedMemory(**{name: int(bytes_.item()) for name, bytes_ in vars(memory).items()})


def _shard_bytes(abstract: Any) -> int:
    """Return the bytes that a tree of shapes with shardings takes on one device."""
    import jax

    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(abstract))


def saved_bytes(run: Run, remat: RematConfig | None = None) -> SavedBytes:
    """Return the bytes that a run saves for the backward pass under `remat`, or under its own policy if None."""
    sizes_by_location = MemoryEstimator(run, to_candidates([run])).saved_by_location(remat or run.config.remat)
    locations = sizes_by_location[ActivationLocation.device], sizes_by_location[ActivationLocation.host]
    return SavedBytes(
        *({name: size for name, n in by_name.items() if (size := int(n.item()))} for by_name in locations)
    )


def accumulated_gradients(run: Run, chip: ChipConfig | None = None) -> AccumulatedGradients | None:
    """Return how often a step of a run sums gradients over devices, and the memory for them.

    Returns None if the run has no choice: without microbatches or a pipeline, or if no mesh axis splits the batch.
    `chip` limits the memory if the run's target has no chip.
    """
    estimator = MemoryEstimator(run, to_candidates([run]), run.config.target.chip or chip)
    if not estimator.layouts.can_sum_gradients_once.item():
        return None
    remat, layouts = run.config.remat, estimator.layouts
    per, axes = SumGradientsPer.microbatch, ()
    if estimator.sums_gradients_once(remat).item():
        per, axes = SumGradientsPer.step, layouts.activations[BATCH]
    elif layouts.can_sum_replicas_once.item():
        per, axes = SumGradientsPer.hybrid, layouts.replica_axes
    once_axes = tuple(axis for axis in axes if layouts.sizes[axis].item() > 1)
    return AccumulatedGradients(per, int(estimator.estimate(remat).gradients.item()), once_axes)
