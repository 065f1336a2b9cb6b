"""What a search found, as a table on the screen and as `search.json`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from valkyrie.hardware.target import usable_hbm
from valkyrie.search.compiling import Compiled, Compiles
from valkyrie.search.estimate.rank import Estimated
from valkyrie.search.question import Question, affordable, dollars, tokens_of
from valkyrie.search.shortlist import Shortlist, chips_of, elsewhere, errors, place_of
from valkyrie.units import duration, memory, percent

TIGHT = 0.95
"""From this share of the memory a layout is said to be bound by memory."""
_BINDING = {
    "products": "compute",
    "mixing": "compute",
    "head": "compute",
    "launching": "compute",
    "moving": "HBM bandwidth",
    "optimizer": "HBM bandwidth",
    "bubble": "pipeline bubble",
    "weights": "gathering weights",
    "gradients": "summing gradients",
    "activations": "communication of activations",
    "stages": "communication between stages",
    "host": "host memory",
}
"""What a part of a step's estimate binds by."""
_OF_COMPILED: dict[str, str] = {"matmul": "compute", "kernel": "compute", "memory": "HBM bandwidth"}


def rows_of(question: Question, listed: Shortlist, compiles: Compiles, count: int) -> list[dict[str, Any]]:
    """Return the best layouts as plain values, by what they are chosen by: compiled ones by their replay, then others.

    Slices of other chips, or of another number of them, have a share of the rows each, and the best of each is listed.
    An estimate stands with the compiled ones where it is better than the best of them even at the end of its interval.
    """
    places = list(dict.fromkeys(map(chips_of, question.targets)))
    share = max(-(-count // len(places)), 2)
    of_places = [_of_place(question, chips, listed, compiles, share) for chips in places]

    def cost(one: Estimated, row: dict[str, Any], key: str) -> float:
        return question.cost(one.group.target, row[key])

    pairs = [pair for some in of_places for pair in some]
    best = min((cost(one, row, "step_s") for one, row in pairs if row["stage"] == "compile"), default=0.0)

    def standing(pair: tuple[Estimated, dict[str, Any]]) -> tuple[bool, float]:
        one, row = pair
        return row["stage"] == "estimate" and cost(one, row, "high_s") >= best, cost(one, row, "step_s")

    firsts = [min(some, key=standing) for some in of_places if some]
    others = sorted((pair for pair in pairs if not any(pair is first for first in firsts)), key=standing)
    shown = sorted([*firsts, *others[: max(count - len(firsts), 0)]], key=standing)
    return [row | {"as_fast_on": listed.as_fast_on(one)} for one, row in shown]


def _of_place(
    question: Question, chips: str, listed: Shortlist, compiles: Compiles, count: int
) -> list[tuple[Estimated, dict[str, Any]]]:
    """Return the best layouts on so many chips with their rows, the compiled ones first."""
    done = {tuple(one.estimate.overrides) for one in compiles.done}
    compiled = [c for c in compiles.done if c.step_s is not None and chips_of(c.target) == chips]
    compiled.sort(key=lambda one: one.step_s or 0.0)
    others = [one for one in listed.best(chips, 2 * count) if tuple(one.overrides) not in done]
    known = {elsewhere(one.estimate): one.estimate.step_s for one in compiled}
    others = [one for one in others if one.step_s < known.get(elsewhere(one), math.inf)]
    made = [(one.estimate, row_of(question, one.estimate, one)) for one in compiled[:count]]
    return made + [
        (one, row_of(question, one, ratio=compiles.ratio(place_of(one)))) for one in others[: count - len(made)]
    ]


def row_of(
    question: Question, one: Estimated, compiled: Compiled | None = None, ratio: float | None = None
) -> dict[str, Any]:
    """Return a layout as plain values: seconds, their interval, bytes, tokens, hours and dollars.

    `ratio`: what the compiled step of another layout on the same mesh and partition took of its estimate.
    """
    target, tokens = one.group.target, tokens_of(question.run)
    step_s = one.step_s * (ratio or 1.0) if compiled is None else compiled.step_s or one.step_s
    low, high = errors()["low"] * step_s, errors()["high"] * step_s
    interval = None if compiled is None else compiled.trial.results.get("step", {}).get("interval")
    if compiled is not None:
        low, high = (interval["low_s"], interval["high_s"]) if interval else (step_s, step_s)
    rate = tokens / step_s
    row = {
        "overrides": one.overrides,
        "stage": "estimate" if compiled is None else "compile",
        "step_s": step_s,
        "low_s": low,
        "high_s": high,
        "memory": one.bytes if compiled is None else compiled.peak,
        "usable": usable_hbm(target.chip),
        "tokens_per_second_per_chip": rate / ((target.chips or 1) * target.slices),
        "mfu": _mfu(question, one, step_s),
        "usd_per_million_tokens": dollars(target, 1e6 / rate),
        "bound_by": _bound_by(one, compiled),
        "parts_s": one.parts,
    }
    if question.tokens is not None:
        row |= {"hours": question.tokens / rate / 3600, "dollars": dollars(target, question.tokens / rate)}
    if question.budget_usd is not None:
        seconds = affordable(target, question.budget_usd)
        row["tokens_for_budget"] = None if seconds is None else rate * seconds
    return row


def _mfu(question: Question, one: Estimated, step_s: float) -> float | None:
    """Return the share of the chips' peak that the model's FLOPs reach; None where no peak is known."""
    target, run = one.group.target, question.run
    peak = None if target.chip is None else target.chip.peak_flops(run.config.precision.compute)
    return run.step_flops / (step_s * peak * (target.chips or 1) * target.slices) if peak else None


def _bound_by(one: Estimated, compiled: Compiled | None) -> str:
    """Return what takes most of a step, with its share; of a compiled one by its replay."""
    usable = usable_hbm(one.group.target.chip)
    shares: dict[str, float] = {}
    if compiled is not None and compiled.trial.results.get("seconds"):
        for name, seconds in compiled.trial.results["seconds"].items():
            what = (
                f"communication over {name[8:]}" if name.startswith("exposed ") else _OF_COMPILED.get(name, str(name))
            )
            shares[what] = shares.get(what, 0.0) + seconds
    else:
        for name, seconds in one.parts.items():
            shares[_BINDING[name]] = shares.get(_BINDING[name], 0.0) + seconds
    what, seconds = max(shares.items(), key=lambda item: item[1])
    text = f"{what} {100 * seconds / sum(shares.values()):.0f}%"
    peak = one.bytes if compiled is None else compiled.peak or one.bytes
    return f"{text}, memory" if usable and peak > TIGHT * usable else text


def show(question: Question, rows: list[dict[str, Any]], console: Console) -> None:
    """Print the best layouts, one a row: seconds, bytes, tokens, what it costs and what binds it."""
    config, several = question.run.config, len(question.targets) > 1
    table = Table(box=SIMPLE, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = f"{question.run.model.name}, batch {config.batch} x {config.seq:,} tokens, {config.precision.name}"
    table.add_column("#", justify="right")
    for name in [*(["slice"] if several else []), "layout"]:
        table.add_column(name, overflow="fold", min_width=8 if name == "slice" else 16)
    for name in _numbers(question, rows[0]):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("bound by", "by"):
        table.add_column(name)
    for place, row in enumerate(rows, 1):
        slices = [row["overrides"][0].partition("=")[2], *row.get("as_fast_on", [])]
        values = [str(place), *([" or ".join(slices)] if several else []), " ".join(row["overrides"][1:])]
        table.add_row(*map(Text, [*values, *_numbers(question, row).values(), row["bound_by"], row["stage"]]))
    console.print(table)


def _numbers(question: Question, row: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of a row as they are printed, by the head of their column."""
    low, high = (100 * (row[f"{end}_s"] / row["step_s"] - 1) for end in ("low", "high"))
    numbers = {"step": duration(row["step_s"]), "interval": "" if low == high else f"{low:+.0f} to {high:+.0f}%"}
    numbers |= {"peak": memory(row["memory"]), "tokens/s\na chip": f"{row['tokens_per_second_per_chip']:,.0f}"}
    numbers["MFU"] = "?" if row["mfu"] is None else percent(row["mfu"])
    if question.tokens is not None:
        numbers |= {"hours": _short(row["hours"]), "dollars": _short(row["dollars"])}
    if question.budget_usd is not None:
        tokens = row["tokens_for_budget"]
        head = f"billion\ntokens for\n${_short(question.budget_usd)}"
        numbers[head] = _short(None if tokens is None else tokens / 1e9)
    return numbers


def _short(number: float | None) -> str:
    """Return a number by three digits, a larger one whole; `?` where it is not known."""
    if number is None:
        return "?"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def command_of(question: Question, row: dict[str, Any], tuned: Sequence[str] = ()) -> str:
    """Return the command that trains a layout; `tuned` are overrides that shorten its step."""
    arguments = [a for a in row["overrides"] if not a.startswith("target=")] + list(tuned)
    return "valkyrie-train " + shlex.join([*question.command, row["overrides"][0], *arguments])
