"""Decides what is better: the order of rows, the best of each kind, what no other beats, and two sweeps compared."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from valkyrie.report.records import AT_HAND, Group, Row, Work
from valkyrie.sweep.trial import Status

UNKNOWN = "no reason was recorded"
"""What is said of a trial that has no result and no reason."""


def groups(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    """Return rows by kind of speed: real measurements first, then predictions, then simulated ones; best rows first."""
    found: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.group].append(row)
    order = sorted(found, key=lambda g: (g.simulated, g.stage == "compile", g.stage == "train", g.target))
    return {group: ranked(found[group]) for group in order}


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Return rows with the most tokens/s/chip first; those without a speed last, by status and name."""
    order = list(Status)
    return sorted(rows, key=lambda r: (not r.ok, -(r.rate_per_chip or 0.0), order.index(r.trial.status), r.layout))


def best_per_target(rows: Iterable[Row]) -> list[Row]:
    """Return the fastest row of every kind of speed and every work, in the order of `groups`."""
    found: list[Row] = []
    for members in groups(rows).values():
        seen = set()
        for row in members:
            if row.ok and row.work not in seen:
                seen.add(row.work)
                found.append(row)
    return found


def front(rows: Iterable[Row], cost: Callable[[Row], int | float | None]) -> list[Row]:
    """Return the rows that no other beats: none is as fast a chip for less, or faster for as much; cheapest first."""
    priced = [(cost(row), row) for row in rows if row.ok]
    ordered = sorted(((c, row) for c, row in priced if c is not None), key=lambda p: (p[0], -(p[1].rate_per_chip or 0)))
    found: list[Row] = []
    for _, row in ordered:
        if not found or (row.rate_per_chip or 0) > (found[-1].rate_per_chip or 0):
            found.append(row)
    return found


def unbeaten(rows: Iterable[Row], cost: Callable[[Row], int | float | None]) -> set[str]:
    """Return the ids of the rows that no other of the same work beats."""
    by_work: dict[Work, list[Row]] = defaultdict(list)
    for row in rows:
        by_work[row.work].append(row)
    return {row.id for members in by_work.values() for row in front(members, cost)}


def memory_of(row: Row) -> int | None:
    """Return the bytes of one device at its peak."""
    return row.held


def price_of(row: Row) -> float | None:
    """Return the dollars of a chip in an hour."""
    return row.price


@dataclass(frozen=True)
class Pair:
    """One layout seen twice: `ratio` is the speed of `b` over that of `a`, None where one of them has none."""

    a: Row
    b: Row

    @property
    def ratio(self) -> float | None:
        """Return how many times as fast `b` is."""
        return self.b.rate_per_chip / self.a.rate_per_chip if self.a.rate_per_chip and self.b.rate_per_chip else None


@dataclass(frozen=True)
class Comparison:
    """Two sweeps: the layouts of both, kind by kind, and the rows that only one has. `median` is of the ratios.

    `again` are rows left out because their own sweep has a faster one of the same layout and work.
    """

    a: str
    b: str
    pairs: list[Pair]
    only_a: list[Row]
    only_b: list[Row]
    again: list[Row]

    @property
    def median(self) -> float | None:
        """Return the middle of b's speeds over a's, over layouts that both ran."""
        return statistics.median(ratios) if (ratios := [p.ratio for p in self.pairs if p.ratio]) else None

    @property
    def said(self) -> str:
        """Return in a few sentences what is in both, or why nothing is, what in one alone, and what was left out."""
        found = f"Layouts of one work that are in both: {len(self.pairs)}" if self.pairs else self._unlike
        found += f"; in the middle {self.b} is {self.median:.2f}x as fast as {self.a}" if self.median else ""
        found += f". Only {self.a} has {len(self.only_a)} trials, only {self.b} {len(self.only_b)}."
        if self.again:
            found += (
                f" Left out, because the same sweep has a faster trial of their layout and work: {len(self.again)}."
            )
        return found

    @property
    def _unlike(self) -> str:
        """Return that there is nothing to compare, and what the two sweeps do not share."""
        one, other = ({row.work for row in rows} for rows in (self.only_a, self.only_b))
        said = f"Nothing to compare: {self.a} and {self.b} have "
        if one & other:
            return f"{said}no layout in common whose speed was told in one way"
        first, second = (f"{rows[0].work.label}, {rows[0].work.precision}" for rows in (self.only_a, self.only_b))
        return f"{said}no work in common ({self.a}: {first}; {self.b}: {second})"


def compare(rows: Sequence[Row], a: str, b: str) -> Comparison:
    """Return two sweeps, by name or by folder, side by side; ValueError names the sweeps that there are.

    A pair has the same layout and work, told by the same stage on the same target. Of several such trials in a sweep
    the fastest is taken.
    """
    found: list[dict[tuple[object, ...], Row]] = []
    again: list[Row] = []
    for name in (a, b):
        members = [row for row in rows if name == row.sweep or Path(name).resolve() == row.source.resolve()]
        if not members:
            known = ", ".join(dict.fromkeys(f"{row.sweep} ({row.source})" for row in rows))
            raise ValueError(f"--compare {a} {b}: there is no sweep {name} here. There are: {known}.")
        best: dict[tuple[object, ...], Row] = {}
        again += [row for row in ranked(members) if best.setdefault((row.group, row.layout, row.work), row) is not row]
        found.append(best)
    left, right = found
    pairs = [Pair(row, right[key]) for key, row in left.items() if key in right]
    pairs.sort(key=lambda p: (p.a.group, p.ratio is None, -(p.ratio or 0.0)))
    only_a = ranked(row for key, row in left.items() if key not in right)
    only_b = ranked(row for key, row in right.items() if key not in left)
    return Comparison(a, b, pairs, only_a, only_b, again)


def predicted_and_measured(rows: Iterable[Row]) -> list[Pair]:
    """Return layouts that were both compiled for a time and run, of one work in whatever precision; predictions first.

    What ran on a named target is held against predictions for that target, what ran on simulated devices or on those
    at hand against all of them.
    """
    told: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    rows = [row for row in rows if row.ok]
    for row in rows:
        if row.group.stage == "compile":
            told[(row.layout, row.work.step)].append(row)
    ran = (row for row in rows if row.group.stage != "compile")
    pairs = [Pair(prediction, row) for row in ran for prediction in told[(row.layout, row.work.step)]]
    return [p for p in pairs if _may_meet(p)]


def agreement(pairs: Sequence[Pair]) -> float | None:
    """Return the share of two layouts of one work that the prediction puts into the order that was measured.

    Kendall's concordance, ties left out; None where no two layouts have the same work.
    """
    agree = total = 0
    for i, one in enumerate(pairs):
        for other in pairs[:i]:
            told = _rate(one.a) - _rate(other.a)
            ran = _rate(one.b) - _rate(other.b)
            if _kind(one) == _kind(other) and told and ran:
                total += 1
                agree += (told > 0) == (ran > 0)
    return agree / total if total else None


def refusals(rows: Iterable[Row]) -> list[tuple[Status, str, list[Row]]]:
    """Return what has no result, by status and reason, those with most rows first.

    Reasons that differ in numbers alone are one; the first of them stands for it.
    """
    found: dict[tuple[Status, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.trial.status is not Status.ok:
            found[(row.trial.status, re.sub(r"[0-9]+(\.[0-9]+)?", "#", row.reason or ""))].append(row)
    order = list(Status)
    listed = sorted(found.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]), item[0][1]))
    return [(status, members[0].reason or UNKNOWN, members) for (status, _), members in listed]


def _may_meet(pair: Pair) -> bool:
    """Return whether what was run says something of what was predicted: the same target, or no one target at all."""
    at_hand = pair.b.trial.about.get("target") == AT_HAND
    return pair.b.group.simulated or at_hand or pair.b.group.target == pair.a.group.target


def _kind(pair: Pair) -> tuple[object, ...]:
    return pair.a.group, pair.b.group, pair.a.work, pair.b.work


def _rate(row: Row) -> float:
    return row.rate_per_chip or 0.0
