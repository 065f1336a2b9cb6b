"""Alternatives to a layout: changes of one or two settings, with estimates of the bytes saved, needed or sent."""

from __future__ import annotations

import math

import jax.numpy as jnp

from valkyrie.axes import BATCH
from valkyrie.config.run import Run
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import shipped_partitions
from valkyrie.parallel.remat import RematConfig, load_remat
from valkyrie.paths import read_group
from valkyrie.search.compile.prediction import FullerRemat, OtherPartition, Saving
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import expected_memory


def memory_savings(run: Run, missing_bytes: int, count: int = 5) -> tuple[Saving, ...]:
    """Suggest up to `count` legal changes that save memory, the largest saving first.

    The candidates are more microbatches, other partitions, and up to four other remat policies: with and without
    offload, the one that saves most and the sufficient one that saves least. A change is sufficient if it saves at
    least `missing_bytes`.

    - If a candidate is sufficient, the list includes the sufficient one with the smallest saving.
    - Otherwise, the list starts with full remat and just enough more microbatches, if that is sufficient.

    Savings are the estimates of `mode=show`, in which activations can be off by a factor of two.
    """
    current_bytes = _estimated_bytes(run)

    def positive_savings(variants: list[tuple[str, Run]]) -> list[Saving]:
        legal = [(change, variant) for change, variant in variants if not variant.problems()]
        variant_savings = [Saving(change, current_bytes - _estimated_bytes(variant)) for change, variant in legal]
        return sorted((saving for saving in variant_savings if saving.saves > 0), key=lambda saving: -saving.saves)

    remat_savings = [positive_savings(_other_remats(run, offload)) for offload in (False, True)]
    savings = positive_savings(_microbatch_and_partition_changes(run)) + [
        entry for savings_of_kind in remat_savings for entry in _largest_and_smallest(savings_of_kind, missing_bytes)
    ]
    savings.sort(key=lambda entry: -entry.saves)
    sufficient = [entry for entry in savings if entry.saves >= missing_bytes]
    if not sufficient:
        full_remat_savings = positive_savings(_full_remat_changes(run))
        sufficient = [entry for entry in full_remat_savings if entry.saves >= missing_bytes][-1:]
        savings = sufficient + savings
    suggestions = savings[:count]
    if sufficient and sufficient[-1] not in suggestions:
        suggestions[-1] = sufficient[-1]
    return tuple(suggestions)


def fuller_remats(run: Run) -> tuple[FullerRemat, ...]:
    """Return the legal remat policies without offload that need more memory than the run's, the largest first."""
    current_bytes = _estimated_bytes(run)
    changes = []
    for remat in read_group("remat", RematConfig):
        variant = run.changed(remat=remat)
        if remat.offload or variant.layout_problem_identities():
            continue
        if (needs := _estimated_bytes(variant) - current_bytes) > 0:
            changes.append(FullerRemat(f"remat={remat.name}", needs))
    return tuple(sorted(changes, key=lambda entry: -entry.needs))


def other_partitions(run: Run) -> tuple[OtherPartition, ...]:
    """Return all other partitions in `conf/partition` that are legal for this run, in ascending order of memory."""
    partitions = []
    for partition in shipped_partitions(run.arrays.axes):
        variant = run.changed(partition=partition)
        if partition.name == run.config.partition.name or variant.problems(advise=False):
            continue
        needs, sends = _estimated_bytes(variant), _bytes_sent_for_data(variant)
        partitions.append(OtherPartition(partition.name, variant.layout.roles, needs, sends))
    return tuple(sorted(partitions, key=lambda entry: entry.needs))


def _bytes_sent_for_data(run: Run) -> int | None:
    """Return the bytes that one device sends per step of data parallelism (DP or FSDP).

    Returns None if the layout also has expert (EP), tensor (MP1, MP2), sequence (SP) or pipeline (PP) parallelism.

    On n devices, a ring sends (n-1)/n of an array in an all-gather, and twice that in an all-reduce. In each
    microbatch, parameters are gathered for the forward and for the backward pass, and gradients are all-reduced. The
    TPU compiler uses all-reduces for sharded gradients too.
    """
    layout, policy = run.layout, run.config.precision
    if any(layout.degrees.get(kind, 1) > 1 for kind in ("EP", "MP1", "MP2", "SP", "PP")):
        return None
    compute_itemsize, reduction_itemsize = (
        jnp.dtype(dtype.value).itemsize for dtype in (policy.compute, policy.reduction)
    )
    batch_shards, bytes_sent = layout.shard_count(BATCH), 0.0
    for spec in run.model.parameters().values():
        stored_shards = math.prod(layout.axes_size(axes) for axes in layout.stored_axes(spec.axes))
        gathered = compute_itemsize * (1 - 1 / stored_shards)
        reduced = reduction_itemsize * (1 - 1 / batch_shards)
        bytes_sent += 2 * math.prod(spec.shape) * (gathered + reduced)
    return int(layout.microbatches * bytes_sent)


def _microbatch_and_partition_changes(run: Run) -> list[tuple[str, Run]]:
    config = run.config
    variants = []
    for factor in (2, 4):
        count = config.microbatches * factor
        variants.append((f"microbatches={count}", run.changed(microbatches=count)))
    partitions = shipped_partitions(run.arrays.axes)
    return variants + [
        (f"partition={partition.name}", run.changed(partition=partition))
        for partition in partitions
        if partition.name != config.partition.name
    ]


def _other_remats(run: Run, offload: bool) -> list[tuple[str, Run]]:
    """Return (override, run) pairs for all other remat policies with offload or, if `offload` is False, without it."""
    remats = [remat for remat in read_group("remat", RematConfig) if bool(remat.offload) is offload]
    return [(f"remat={r.name}", run.changed(remat=r)) for r in remats if r.name != run.config.remat.label]


def _largest_and_smallest(savings: list[Saving], missing_bytes: int) -> list[Saving]:
    """Return the largest saving, and the smallest one of at least `missing_bytes` if it is a different one.

    `savings` must be sorted, largest first.
    """
    sufficient = [entry for entry in savings if entry.saves >= missing_bytes]
    return savings[:1] + [entry for entry in sufficient[-1:] if entry is not savings[0]]


def _full_remat_changes(run: Run) -> list[tuple[str, Run]]:
    """Return (overrides, run) pairs with full remat and 2, 4, 8, ... times the microbatches, up to the batch size."""
    variants, count = [], run.config.microbatches * 2
    while count <= run.config.batch:
        changed = run.changed(remat=load_remat("full"), microbatches=count)
        variants.append((f"remat=full microbatches={count}", changed))
        count *= 2
    return variants


def _estimated_bytes(run: Run) -> int:
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    return expected_memory(run, program.abstract_state).total
