"""The page's ranked table, cell by cell, and the details of one layout."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valkyrie.report.alike import counted_as
from valkyrie.report.rank import memory_of, unbeaten
from valkyrie.report.records import Group, Row
from valkyrie.report.values import labels, short
from valkyrie.sweep.names import without_place
from valkyrie.sweep.noise import places
from valkyrie.units import duration, memory, sent


@dataclass(frozen=True)
class Column:
    """A column of the ranked table: `kind` says how a cell is written, `help` is its tooltip."""

    id: str
    label: str
    kind: str
    help: str


COLUMNS = [
    Column("rank", "#", "count", "rank among speeds of the same kind; equal where the difference is within the noise"),
    Column("layout", "layout", "layout", "mesh, partition, microbatches and remat; opens its details"),
    Column("per_chip", "tokens/s/chip", "speed", "tokens a second, divided by the chips"),
    Column("step", "step", "seconds", "seconds of one training step; the median where it was measured"),
    Column("seen", "speed is", "text", "predicted, measured or trained, and on which target"),
    Column("status", "status", "text", "what became of the trial"),
    Column("partition", "partition", "text", "which dimension of the model is split over which mesh axis"),
    Column("mesh", "mesh", "text", "devices along each axis of the mesh"),
    Column("alike", "same as", "text", "a simpler partition that splits every array the same way on this mesh"),
    Column("rate", "tokens/s", "speed", "tokens a second of the whole slice"),
    Column("p90", "p90", "seconds", "nine of ten steps are faster than this"),
    Column("mfu", "MFU", "share", "FLOPs of the model over what the chips could do at most"),
    Column("peak", "peak memory", "bytes", "peak memory of one device in a step, or what it would need"),
    Column("full", "of usable", "share", "peak memory over the memory of a device that a program can use"),
    Column("sent", "sent", "sent", "bytes that one device sends in a step"),
    Column("waiting", "waiting", "share", "share of the step in which a device waits for communication"),
    Column("goodput", "goodput", "share", "share of a training's wall time, restarts included, in steps that count"),
    Column("restarts", "restarts", "count", "how often a training was started again before it had ended"),
    Column("data", "data wait", "share", "share of a training's steps in which devices waited for data"),
    Column("million", "$/Mtok", "dollars", "dollars for a million tokens, on demand"),
    Column("front", "Pareto front", "text", "no other layout of the same work is as fast with less memory"),
    Column("reason", "reason", "text", "why there is no speed"),
]
"""The columns of the ranked table, in order."""
_DIGITS = 6


def cells(kinds: Mapping[Group, Sequence[Row]]) -> list[list[Any]]:
    """Return the ranked rows of all kinds of speed, a cell for each of `COLUMNS`; numbers in seconds and bytes."""
    ranked = []
    for group, rows in kinds.items():
        named = labels(rows)
        light, counted = unbeaten(rows, memory_of), counted_as(rows)
        for place, row in zip(places([row.trial for row in rows]), rows, strict=True):
            alike = counted[row.id]
            ranked.append(
                [
                    place if row.ok else None,
                    named[row.id],
                    short(row.rate_per_chip, _DIGITS),
                    short(row.step_s, _DIGITS),
                    group.label,
                    row.status,
                    row.partition,
                    row.mesh,
                    alike if row.ok and alike != row.partition else "",
                    short(row.rate, _DIGITS),
                    short(row.p90_s, _DIGITS),
                    short(row.mfu, _DIGITS),
                    row.peak,
                    short(row.peak / row.usable if row.peak and row.usable else None, _DIGITS),
                    sum(row.sent.values()) if row.sent else None,
                    short(row.exposed_s / row.step_s if row.exposed_s is not None and row.step_s else None, _DIGITS),
                    short(row.goodput.share if row.goodput else None, _DIGITS),
                    row.goodput.restarts if row.goodput else None,
                    short(row.data_wait, _DIGITS),
                    short(row.per_million, _DIGITS),
                    "memory" if row.id in light else "",
                    row.reason or "",
                ]
            )
    return ranked


def details(row: Row) -> dict[str, Any]:
    """Return what the page shows of one layout beside its row of the table; its command argument by argument."""
    about, results = row.trial.about, row.trial.results
    memory_results = results.get("memory") or {}
    facts = {
        "roles": about and about.roles,
        "on": about and about.described,
        "work": f"{row.work.label}, {row.work.precision}",
        "parameters": f"{count:,}" if (count := results.get("parameters")) else None,
        "command": _arguments(row),
        "folder": row.trial.folder,
        "memory": ", ".join(f"{name} {memory(size)}" for name, size in (memory_results.get("split") or {}).items()),
        "sent": ", ".join(f"{axes} {sent(size)}" for axes, size in row.sent.items() if size),
        "goodput": row.goodput.describe() if row.goodput else None,
        "steps": _steps(results),
        "reported": memory(peak) if (peak := memory_results.get("reported_peak")) else None,
        "compiled": duration(seconds) if (seconds := (results.get("compile") or {}).get("compile_s")) else None,
        "placement": results.get("placement") or None,
        "hints": (results.get("hints") or [])[:3] or None,
    }
    return {name: fact for name, fact in facts.items() if fact}


def _steps(results: Mapping[str, Any]) -> str | None:
    """Return how far a training is; None of what is none."""
    if "finished" not in results:
        return None
    return f"{results['steps']:,}{'' if results['finished'] else ', not finished'}"


def command(row: Row) -> str:
    """Return the command that does a trial again, for a shell: as one run, in a folder that is not the sweep's."""
    return " ".join(_arguments(row))


def _arguments(row: Row) -> list[str]:
    given = (*row.trial.flags, *without_place(row.trial.overrides))
    return [shlex.quote(a) for a in ("valkyrie-train", *given, "hydra.mode=RUN")]
