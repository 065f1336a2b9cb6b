"""Decides what to propose where a layout does not fit: changes of the layout, with the bytes each should save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import PartitionConfig, Remat
from valkyrie.paths import read_group
from valkyrie.run import Run
from valkyrie.train.memory import expected_memory
from valkyrie.train.program import StepProgram


def cheaper_layouts(run: Run, count: int = 5) -> list[dict[str, Any]]:
    """Return up to `count` legal changes of one key that need less memory, the largest saving first.

    Each is {"change": "remat=full", "saves": bytes on one device}, by the estimate of `mode=show`.
    """
    now = _expected(run)
    found = []
    for change, other in _variants(run):
        if other.problems():
            continue
        saves = now - _expected(other)
        if saves > 0:
            found.append({"change": change, "saves": saves})
    return sorted(found, key=lambda entry: -entry["saves"])[:count]


def fuller_layouts(run: Run) -> list[dict[str, Any]]:
    """Return the rematerialisations that keep more than this run's, the fullest first, with the bytes each needs.

    Each is {"change": "remat=none", "needs": further bytes on one device}.
    """
    now = _expected(run)
    found = []
    for remat in Remat:
        other = Run(replace(run.config, remat=remat), run.model)
        needs = _expected(other) - now if remat is not run.config.remat else 0
        if needs > 0:
            found.append({"change": f"remat={remat.value}", "needs": needs})
    return sorted(found, key=lambda entry: -entry["needs"])


def _variants(run: Run) -> list[tuple[str, Run]]:
    config = run.config
    variants = [(f"remat={r.value}", replace(config, remat=r)) for r in Remat if r is not config.remat]
    for factor in (2, 4):
        count = config.microbatches * factor
        variants.append((f"microbatches={count}", replace(config, microbatches=count)))
    partitions = [partition for partition, _ in read_group("partition", PartitionConfig)]
    variants += [
        (f"partition={partition.name}", replace(config, partition=partition))
        for partition in partitions
        if partition.name != config.partition.name
    ]
    return [(change, Run(changed, run.model)) for change, changed in variants]


def _expected(run: Run) -> int:
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    return expected_memory(run, program.abstract_state, program.assembly.specs).total
