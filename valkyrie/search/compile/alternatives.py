"""Alternatives to a layout: changes of one or two settings, with the bytes that each should save, need or send."""

from __future__ import annotations

import math

import jax.numpy as jnp

from valkyrie.axes import BATCH
from valkyrie.config.run import Run
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.remat import RematConfig, remat_named
from valkyrie.paths import read_group
from valkyrie.search.compile.prediction import FullerRemat, OtherPartition, Saving
from valkyrie.train.memory import expected_memory
from valkyrie.train.program import StepProgram


def cheaper_layouts(run: Run, missing: int, count: int = 5) -> tuple[Saving, ...]:
    """Return up to `count` legal changes that need less memory, the largest saving first.

    Changes one key at a time: microbatches, partition and remat. Remat policies with and without offload are each
    represented by the one that saves most memory and by the one that saves least but enough. Of all changes, the one
    that saves least but enough is always listed. If no change saves `missing` bytes, the first entry is full remat with
    the number of microbatches that saves least but enough. Savings are the estimates of `mode=show`, which may err by
    a factor of two for activations.
    """
    now = _expected(run)

    def savings(variants: list[tuple[str, Run]]) -> list[Saving]:
        legal = [(change, other) for change, other in variants if not other.problems()]
        listed = [Saving(change, now - _expected(other)) for change, other in legal]
        return sorted((entry for entry in listed if entry.saves > 0), key=lambda entry: -entry.saves)

    remats = [savings(_remats(run, offload)) for offload in (False, True)]
    changes = savings(_variants(run)) + [entry for found in remats for entry in _most_and_least(found, missing)]
    changes.sort(key=lambda entry: -entry.saves)
    enough = [entry for entry in changes if entry.saves >= missing]
    if not enough:
        enough = [entry for entry in savings(_combined(run)) if entry.saves >= missing][-1:]
        changes = enough + changes
    listed = changes[:count]
    if enough and enough[-1] not in listed:
        listed[-1] = enough[-1]
    return tuple(listed)


def fuller_layouts(run: Run) -> tuple[FullerRemat, ...]:
    """Return the remat policies that save more on the device, with the additional bytes they need, the most first."""
    now = _expected(run)
    changes = []
    for remat in read_group("remat", RematConfig):
        other = run.changed(remat=remat)
        if remat.offload or other.layout_problems():
            continue
        if (needs := _expected(other) - now) > 0:
            changes.append(FullerRemat(f"remat={remat.name}", needs))
    return tuple(sorted(changes, key=lambda entry: -entry.needs))


def other_partitions(run: Run) -> tuple[OtherPartition, ...]:
    """Return all other partitions of `conf/partition` that are legal for this run, the least memory first."""
    found = []
    for partition in read_group("partition", PartitionConfig):
        other = run.changed(partition=partition)
        if partition.name == run.config.partition.name or other.problems(advise=False):
            continue
        needs, sends = _expected(other), _sent_for_data(other)
        found.append(OtherPartition(partition.name, other.layout.roles, needs, sends))
    return tuple(sorted(found, key=lambda entry: entry.needs))


def _sent_for_data(run: Run) -> int | None:
    """Return the bytes that one device sends per step if all mesh axes split only data, otherwise None.

    A ring sends (n-1)/n of an array to gather it from n devices, and twice that to sum it on all of them. The TPU
    compiler does the latter for sharded gradients too. Parameters are gathered for the forward and the backward pass of
    every microbatch; gradients are summed after it.
    """
    layout, policy = run.layout, run.config.precision
    if any(layout.degrees[kind] > 1 for kind in ("MP1", "MP2", "SP", "PP")):
        return None
    gathered, summed = (jnp.dtype(kind.value).itemsize for kind in (policy.compute, policy.reduction))
    shards, total = layout.shards(BATCH), 0.0
    for spec in run.model.parameters().values():
        split = math.prod(layout.parts(axes) for axes in layout.stored(spec.axes))
        total += 2 * math.prod(spec.shape) * (gathered * (1 - 1 / split) + summed * (1 - 1 / shards))
    return int(layout.microbatches * total)


def _variants(run: Run) -> list[tuple[str, Run]]:
    config = run.config
    variants = []
    for factor in (2, 4):
        count = config.microbatches * factor
        variants.append((f"microbatches={count}", run.changed(microbatches=count)))
    partitions = read_group("partition", PartitionConfig)
    return variants + [
        (f"partition={partition.name}", run.changed(partition=partition))
        for partition in partitions
        if partition.name != config.partition.name
    ]


def _remats(run: Run, offload: bool) -> list[tuple[str, Run]]:
    """Return the other remat policies: those with offload, or those without."""
    remats = [remat for remat in read_group("remat", RematConfig) if bool(remat.offload) is offload]
    return [(f"remat={r.name}", run.changed(remat=r)) for r in remats if r.name != run.config.remat.label]


def _most_and_least(savings: list[Saving], missing: int) -> list[Saving]:
    """Return the first of these savings, which is the largest, and the last that is still enough."""
    enough = [entry for entry in savings if entry.saves >= missing]
    return savings[:1] + [entry for entry in enough[-1:] if entry is not savings[0]]


def _combined(run: Run) -> list[tuple[str, Run]]:
    """Return full remat with every doubling of the microbatches."""
    variants, count = [], run.config.microbatches * 2
    while count <= run.config.batch:
        changed = run.changed(remat=remat_named("full"), microbatches=count)
        variants.append((f"remat=full microbatches={count}", changed))
        count *= 2
    return variants


def _expected(run: Run) -> int:
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    return expected_memory(run, program.abstract_state).total
