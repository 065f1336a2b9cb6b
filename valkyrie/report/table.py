"""Decides what the tables of a page hold: ranked rows as cells, details of one layout, refusals, two sweeps."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valkyrie.report.rank import Comparison, memory_of, price_of, unbeaten
from valkyrie.report.records import Group, Row
from valkyrie.report.values import labels, short
from valkyrie.search.units import duration, memory
from valkyrie.sweep.names import without_place
from valkyrie.sweep.trial import Status


@dataclass(frozen=True)
class Column:
    """A column of the ranked table: `kind` says how a cell is written, `help` what a header tells a newcomer."""

    id: str
    label: str
    kind: str
    help: str


COLUMNS = [
    Column("rank", "#", "count", "place among layouts whose speed was told in the same way"),
    Column("layout", "layout", "layout", "mesh, partition and what else was asked; opens its details"),
    Column("seen", "speed is", "text", "how the speed is known: predicted, measured or trained, and for what"),
    Column("status", "status", "text", "what became of the trial"),
    Column("partition", "partition", "text", "which dimension of the model lies on which mesh axis"),
    Column("mesh", "mesh", "text", "devices along each axis of the mesh"),
    Column("per_chip", "tokens/s/chip", "speed", "tokens a second, divided by the chips"),
    Column("rate", "tokens/s", "speed", "tokens a second of the whole slice"),
    Column("step", "step", "seconds", "seconds of one training step; the median where it was measured"),
    Column("p90", "p90", "seconds", "nine of ten steps are faster than this"),
    Column("mfu", "MFU", "share", "FLOPs of the model over what the chips could do at most"),
    Column("held", "memory", "bytes", "bytes of one device at the peak of a step, or what it would need"),
    Column("full", "full", "share", "that memory over what a device has for a program"),
    Column("sent", "sent", "sent", "bytes that one device sends in a step"),
    Column("waiting", "waiting", "share", "part of the step in which a device waits for others"),
    Column("million", "$/Mtok", "dollars", "dollars for a million tokens, on demand"),
    Column("front", "unbeaten in", "text", "no other layout of the same work is as fast and needs less of this"),
    Column("reason", "reason", "text", "why there is no speed"),
]
"""The columns of the ranked table, in order."""
_DIGITS = 6


def cells(kinds: Mapping[Group, Sequence[Row]]) -> list[list[Any]]:
    """Return the ranked rows of all kinds of speed, a cell for each of `COLUMNS`; numbers in seconds and bytes."""
    found = []
    for group, rows in kinds.items():
        named = labels(rows)
        light, cheap = unbeaten(rows, memory_of), unbeaten(rows, price_of)
        for place, row in enumerate(rows, 1):
            best_in = ["memory"] * (row.id in light) + ["price"] * (row.id in cheap)
            found.append(
                [
                    place if row.ok else None,
                    named[row.id],
                    group.label,
                    row.status,
                    row.partition,
                    row.mesh,
                    short(row.rate_per_chip, _DIGITS),
                    short(row.rate, _DIGITS),
                    short(row.step_s, _DIGITS),
                    short(row.p90_s, _DIGITS),
                    short(row.mfu, _DIGITS),
                    row.held,
                    short(row.held / row.usable if row.held and row.usable else None, _DIGITS),
                    sum(row.sent.values()) if row.sent else None,
                    short(row.exposed_s / row.step_s if row.exposed_s is not None and row.step_s else None, _DIGITS),
                    short(row.per_million, _DIGITS),
                    ", ".join(best_in),
                    row.reason or "",
                ]
            )
    return found


def details(row: Row) -> dict[str, Any]:
    """Return what the page tells of one layout beside its row of the table; its command argument by argument."""
    about, results = row.trial.about, row.trial.results
    held = results.get("memory") or {}
    facts = {
        "roles": about.get("roles"),
        "on": about.get("described"),
        "work": f"{row.work.label}, {row.work.precision}",
        "parameters": f"{count:,}" if (count := results.get("parameters")) else None,
        "command": _arguments(row),
        "folder": row.trial.folder,
        "memory": ", ".join(f"{name} {memory(size)}" for name, size in (held.get("split") or {}).items()),
        "reported": memory(held["reported_peak"]) if held.get("reported_peak") else None,
        "compiled": duration(seconds) if (seconds := (results.get("compile") or {}).get("compile_s")) else None,
        "placement": results.get("placement") or None,
        "hints": (results.get("hints") or [])[:3] or None,
    }
    return {name: fact for name, fact in facts.items() if fact}


def command(row: Row) -> str:
    """Return the command that does a trial again, for a shell: as one run, in a folder that is not the sweep's."""
    return " ".join(_arguments(row))


def _arguments(row: Row) -> list[str]:
    given = (*row.trial.flags, *without_place(row.trial.overrides))
    return [shlex.quote(a) for a in ("valkyrie-train", *given, "hydra.mode=RUN")]


def best(rows: Sequence[Row]) -> str:
    """Return the table of the best layout of each target."""
    if not rows:
        return '<p class="empty">No layout here has a speed.</p>'
    body = []
    for row in rows:
        word = ' <span class="word">simulated</span>' if row.group.simulated else ""
        assert row.rate_per_chip is not None and row.step_s is not None
        of = row.work.label
        full = f" of {memory(row.usable)}" if row.usable is not None else ""
        price = f"{row.per_million:.3g} $" if row.per_million else ""
        body.append(
            f'<tr><td>{_text(row.group.label)}</td><td class="work">{_text(of)}</td><td>{_text(row.layout)}</td>'
            f'<td class="number">{row.rate_per_chip:,.0f}{word}</td>'
            f'<td class="number">{duration(row.step_s)}{word}</td>'
            f'<td class="number">{memory(row.held)}{full}</td><td class="number">{price}</td></tr>'
        )
    heads = ("speed is", "work", "best layout", "tokens/s/chip", "step", "memory of a device", "a million tokens")
    return _table("The best layout of each target", heads, body)


def refused(found: Sequence[tuple[Status, str, Sequence[Row]]]) -> str:
    """Return the list of what has no result, a reason at a time."""
    if not found:
        return '<p class="empty">Nothing was refused, and nothing failed.</p>'
    entries = []
    for status, reason, rows in found:
        count = f"{len(rows)} {rows[0].status}"
        listed = "".join(_refused_row(row, reason) for row in rows)
        alike = " <small>(and alike)</small>" if any(row.reason not in (None, reason) for row in rows) else ""
        lines = "<br>".join(_text(line) for line in reason.splitlines())
        entries.append(
            f'<details class="reason"><summary><span class="badge {status.value}">{_text(count)}</span> {lines}{alike}'
            f"</summary><ul>{listed}</ul></details>"
        )
    return "".join(entries)


def _refused_row(row: Row, reason: str) -> str:
    own = f" <small>{_text(row.reason)}</small>" if row.reason not in (None, reason) else ""
    return f"<li>{_text(row.layout)} <small>{_text(row.group.label)}</small>{own}</li>"


def compared(comparison: Comparison) -> str:
    """Return the section of two sweeps side by side."""
    a, b = _text(comparison.a), _text(comparison.b)
    body = []
    named = labels([pair.a for pair in comparison.pairs])
    for pair in comparison.pairs:
        word = ' <span class="word">simulated</span>' if pair.a.group.simulated else ""
        rates = [f"{row.rate_per_chip:,.0f}{word}" if row.ok else _text(row.status) for row in (pair.a, pair.b)]
        ratio = f"{pair.ratio:.2f}x" if pair.ratio else ""
        body.append(
            f"<tr><td>{_text(named[pair.a.id])}</td><td>{_text(pair.a.group.label)}</td>"
            f'<td class="number">{rates[0]}</td><td class="number">{rates[1]}</td><td class="number">{ratio}</td></tr>'
        )
    heads = ("layout", "speed is", f"{comparison.a}, tokens/s/chip", f"{comparison.b}, tokens/s/chip", "ratio")
    shown = _table(f"{comparison.a} against {comparison.b}", heads, body) if body else ""
    return f'<section id="compared"><h2>{a} against {b}</h2><p>{_text(comparison.said)}</p>{shown}</section>'


def _table(caption: str, heads: Sequence[str], body: Sequence[str]) -> str:
    numbers = {place for row in body for place, cell in enumerate(row.split("<td")[1:]) if 'class="number"' in cell}
    kinds = [' class="number"' if place in numbers else "" for place in range(len(heads))]
    top = "".join(f'<th scope="col"{kind}>{_text(head)}</th>' for kind, head in zip(kinds, heads, strict=True))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table>'
        f'<caption class="hidden">{_text(caption)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _text(value: object) -> str:
    return html.escape(str(value))
