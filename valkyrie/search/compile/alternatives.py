"""Alternatives to a layout: changes of one or two settings, with estimates of the bytes saved, needed or sent."""

from __future__ import annotations

import math

import jax.numpy as jnp

from valkyrie.axes import BATCH
from valkyrie.config.run import Run
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.remat import RematConfig, load_remat
from valkyrie.paths import read_group
from valkyrie.search.compile.prediction import FullerRemat, OtherPartition, Saving
from valkyrie.train.memory import expected_memory
from valkyrie.train.program import StepProgram


def cheaper_layouts(run: Run, missing: int, count: int = 5) -> tuple[Saving, ...]:
    """Suggest up to `count` legal changes that save memory, sorted by largest saving.

    Each change sets microbatches, partition or remat. A change is sufficient if it saves at least `missing` bytes.

    - If one is sufficient, the list includes the sufficient change with the smallest saving.
    - Otherwise, the list starts with full remat and the smallest sufficient number of microbatches, if there is one.
    - Two changes at most set a remat policy with offload: the one with the largest saving, and the smallest sufficient
      one. The same holds for policies without offload.

    Savings are the estimates of `mode=show`. Those of activations can be off by a factor of two.
    """
    current_bytes = _estimated_bytes(run)

    def savings(variants: list[tuple[str, Run]]) -> list[Saving]:
        legal = [(change, other) for change, other in variants if not other.problems()]
        savings_list = [Saving(change, current_bytes - _estimated_bytes(other)) for change, other in legal]
        return sorted((entry for entry in savings_list if entry.saves > 0), key=lambda entry: -entry.saves)

    remats = [savings(_other_remats(run, offload)) for offload in (False, True)]
    changes = savings(_single_changes(run)) + [
        entry for savings_of_kind in remats for entry in _largest_and_smallest(savings_of_kind, missing)
    ]
    changes.sort(key=lambda entry: -entry.saves)
    sufficient = [entry for entry in changes if entry.saves >= missing]
    if not sufficient:
        sufficient = [entry for entry in savings(_full_remat_changes(run)) if entry.saves >= missing][-1:]
        changes = sufficient + changes
    savings_list = changes[:count]
    if sufficient and sufficient[-1] not in savings_list:
        savings_list[-1] = sufficient[-1]
    return tuple(savings_list)


def fuller_layouts(run: Run) -> tuple[FullerRemat, ...]:
    """Return the remat policies that save more activations on the device, in descending order of additional bytes."""
    current_bytes = _estimated_bytes(run)
    changes = []
    for remat in read_group("remat", RematConfig):
        other = run.changed(remat=remat)
        if remat.offload or other.layout_problem_identities():
            continue
        if (needs := _estimated_bytes(other) - current_bytes) > 0:
            changes.append(FullerRemat(f"remat={remat.name}", needs))
    return tuple(sorted(changes, key=lambda entry: -entry.needs))


def other_partitions(run: Run) -> tuple[OtherPartition, ...]:
    """Return all other partitions in `conf/partition` that are legal for this run, in ascending order of memory."""
    partitions = []
    for partition in read_group("partition", PartitionConfig):
        other = run.changed(partition=partition)
        if partition.name == run.config.partition.name or other.problems(advise=False):
            continue
        needs, sends = _estimated_bytes(other), _bytes_sent_for_data(other)
        partitions.append(OtherPartition(partition.name, other.layout.roles, needs, sends))
    return tuple(sorted(partitions, key=lambda entry: entry.needs))


def _bytes_sent_for_data(run: Run) -> int | None:
    """Return the bytes that one device sends per step, or None if a mesh axis splits weights, sequence or layers.

    On n devices, a ring sends (n-1)/n of an array in an all-gather, and twice that in an all-reduce. In each
    microbatch, parameters are gathered for the forward and for the backward pass, and gradients are all-reduced. The
    TPU compiler uses all-reduces for sharded gradients too.
    """
    layout, policy = run.layout, run.config.precision
    if any(layout.degrees[kind] > 1 for kind in ("MP1", "MP2", "SP", "PP")):
        return None
    gathered, summed = (jnp.dtype(dtype.value).itemsize for dtype in (policy.compute, policy.reduction))
    shards, total = layout.shards(BATCH), 0.0
    for spec in run.model.parameters().values():
        split = math.prod(layout.parts(axes) for axes in layout.stored_axes(spec.axes))
        total += 2 * math.prod(spec.shape) * (gathered * (1 - 1 / split) + summed * (1 - 1 / shards))
    return int(layout.microbatches * total)


def _single_changes(run: Run) -> list[tuple[str, Run]]:
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


def _other_remats(run: Run, offload: bool) -> list[tuple[str, Run]]:
    """Return runs with each other remat policy, either those with offload or those without."""
    remats = [remat for remat in read_group("remat", RematConfig) if bool(remat.offload) is offload]
    return [(f"remat={r.name}", run.changed(remat=r)) for r in remats if r.name != run.config.remat.label]


def _largest_and_smallest(savings: list[Saving], missing: int) -> list[Saving]:
    """Return the largest saving, and the smallest one of at least `missing` bytes if it is a different one.

    `savings` must be sorted, largest first.
    """
    sufficient = [entry for entry in savings if entry.saves >= missing]
    return savings[:1] + [entry for entry in sufficient[-1:] if entry is not savings[0]]


def _full_remat_changes(run: Run) -> list[tuple[str, Run]]:
    """Return runs with full remat and 2, 4, 8, ... times the microbatches."""
    variants, count = [], run.config.microbatches * 2
    while count <= run.config.batch:
        changed = run.changed(remat=load_remat("full"), microbatches=count)
        variants.append((f"remat=full microbatches={count}", changed))
        count *= 2
    return variants


def _estimated_bytes(run: Run) -> int:
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    return expected_memory(run, program.abstract_state).total
