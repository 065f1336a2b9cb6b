"""The page's ranked table, cell by cell, and the details of one layout."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from valkyrie.report.rank import counted_as, memory_of, unbeaten
from valkyrie.report.values import labels, short
from valkyrie.sweep.columns import PAGE, Ranked
from valkyrie.sweep.names import without_place
from valkyrie.sweep.rows import Group, Row, ranks
from valkyrie.units import duration, memory, sent

_DIGITS = 6


def compared_rows(rows: Sequence[Row]) -> list[Ranked]:
    """Return ranked rows of one kind of speed with all that tables say of them beside each other."""
    named, light, counted = labels(rows), unbeaten(rows, memory_of), counted_as(rows)
    return [
        Ranked(
            row,
            rank,
            named[row.id],
            counted[row.id] if row.ok and counted[row.id] != row.partition else "",
            row.id in light,
        )
        for rank, row in zip(ranks(rows), rows, strict=True)
    ]


def cells(kinds: Mapping[Group, Sequence[Row]]) -> list[list[Any]]:
    """Return the ranked rows of all kinds of speed, a cell for each of `PAGE`; numbers in seconds and bytes."""
    listed = [one for rows in kinds.values() for one in compared_rows(rows)]
    return [[_cell(column.value(one)) for column in PAGE] for one in listed]


def _cell(value: Any) -> Any:
    return short(value, _DIGITS) if isinstance(value, float) else value


def details(row: Row) -> dict[str, Any]:
    """Return what the page shows of one layout beside its row of the table; its command argument by argument."""
    about, results = row.about, row.trial.results
    compiled, reported = results.compile, results.memory.reported_peak
    unfinished = "" if results.finished else ", not finished"
    facts = {
        "roles": about.roles,
        "on": about.described,
        "work": f"{row.work.label}, {row.work.precision}",
        "parameters": f"{results.parameters:,}" if results.parameters else None,
        "command": _arguments(row),
        "folder": row.trial.folder,
        "memory": ", ".join(f"{name} {memory(size)}" for name, size in (results.memory.split or {}).items()),
        "sent": ", ".join(f"{axes} {sent(size)}" for axes, size in row.sent.items() if size),
        "goodput": row.goodput.describe() if row.goodput else None,
        "steps": None if results.finished is None else f"{results.steps or 0:,}{unfinished}",
        "reported": memory(reported) if reported else None,
        "compiled": duration(compiled.compile_s) if compiled and compiled.compile_s else None,
        "placement": results.placement,
        "hints": (results.hints or ())[:3],
    }
    return {name: fact for name, fact in facts.items() if fact}


def command(row: Row) -> str:
    """Return the command that does a trial again, for a shell: as one run, in a folder that is not the sweep's."""
    return " ".join(_arguments(row))


def _arguments(row: Row) -> list[str]:
    given = (*row.trial.flags, *without_place(row.trial.overrides))
    return [shlex.quote(a) for a in ("valkyrie-train", *given, "hydra.mode=RUN")]
