"""Any two predicted layouts of a page beside each other: their steps part by part, what they send and keep, and why."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from valkyrie.records import decode, encode
from valkyrie.search.compile.prediction import Prediction
from valkyrie.search.compile.upgrade import upgrade_results
from valkyrie.search.explain.difference import difference, sides
from valkyrie.sweep.rows import Row
from valkyrie.sweep.trial import Status, known_values

EXPLAINED = 12
"""Of how many layouts, the best first, every two are compared in sentences too."""


def compared(rows: Sequence[Row]) -> dict[str, Any]:
    """Return `sides`, the seconds and bytes of each predicted row by its place, and `why`, sentences by two places.

    The first of two places is A in their sentences. Sides of equal `work` are compared, whatever their batches. Empty
    where fewer than two rows have parts of a step.
    """
    known = {i: of for i, row in enumerate(rows) if (of := _prediction(row)) is not None}
    if len(known) < 2:
        return {"sides": {}, "why": {}}
    works, why = {i: _work(rows[i]) for i in known}, {}
    for i, j in itertools.permutations(list(known)[:EXPLAINED], 2):
        if works[i] == works[j]:
            with contextlib.suppress(ValueError):  # the same layout twice
                why[f"{i},{j}"] = list(difference(known[i], known[j]).sentences)
    return {"sides": {i: encode(sides(of)) | {"work": works[i]} for i, of in known.items()}, "why": why}


def _work(row: Row) -> str:
    """Return in words what a row's step computes of a token, so that only steps of the same are compared."""
    return ", ".join([" ".join([row.work.model, *row.work.varied]), row.work.precision])


def _prediction(row: Row) -> Prediction | None:
    """Return a row as `compile.json` has it, or None if no replay says what its step consists of."""
    results = row.trial.results
    if row.trial.status is not Status.ok or row.group.stage != "compile" or not results.parts or row.step_s is None:
        return None
    plain = {"about": encode(row.about), "status": "ok", **known_values(encode(results))}
    return decode(Prediction, upgrade_results(plain), row.trial.name)
