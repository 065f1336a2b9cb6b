"""Ranks rows: the best of each kind, Pareto fronts, and comparisons of two sweeps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from valkyrie.sweep.noise import within_noise
from valkyrie.sweep.rows import Row, RowPair, Workload, groups, ranked
from valkyrie.sweep.trial import Status

UNKNOWN = "no reason was recorded"
"""Reason of a trial without a result that recorded none."""
DATA_PARALLEL = "dp"
"""Name of the partition of layouts that shard only the batch."""


def best_per_target(rows: Iterable[Row]) -> list[Row]:
    """Return the fastest row of every kind of speed and every work, in the order of `groups`."""
    best: list[Row] = []
    for members in groups(rows).values():
        seen = set()
        for row in members:
            if row.ok and row.work not in seen:
                seen.add(row.work)
                best.append(row)
    return best


def front(rows: Iterable[Row], cost: Callable[[Row], int | float | None]) -> list[Row]:
    """Return the Pareto front of speed per chip and cost, the cheapest row first."""
    priced = [(cost(row), row) for row in rows if row.ok]
    ordered = sorted(((c, row) for c, row in priced if c is not None), key=lambda p: (p[0], -(p[1].rate_per_chip or 0)))
    best: list[Row] = []
    for _, row in ordered:
        if not best or (row.rate_per_chip or 0) > (best[-1].rate_per_chip or 0):
            best.append(row)
    return best


def pareto_ids(rows: Iterable[Row], cost: Callable[[Row], int | float | None]) -> set[str]:
    """Return the ids of the rows on the Pareto fronts of their works."""
    by_work: dict[Workload, list[Row]] = defaultdict(list)
    for row in rows:
        by_work[row.work].append(row)
    return {row.id for members in by_work.values() for row in front(members, cost)}


def peak_memory(row: Row) -> int | None:
    """Peak memory per device, in bytes."""
    return row.peak


def chip_price(row: Row) -> float | None:
    """Price of a chip, in dollars per hour."""
    return row.price


def simplest_partitions(rows: Sequence[Row]) -> dict[str, str]:
    """Return by row id the simplest partition that shards every array in the same way, usually the row's own.

    On a mesh with x=1, `1d_tp` is data parallel, so it says nothing about `1d_tp`. The simplest partition is the one
    that uses the fewest kinds of roles.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    alike: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for row in rows:
        kinds[row.about.partition] |= _roles(row)
        alike[_layout(row)].add(row.about.partition)

    def simplest(row: Row) -> str:
        if _roles(row) == {"DP"}:
            return DATA_PARALLEL
        return min(alike[_layout(row)], key=lambda name: (len(kinds[name]), name))

    return {row.id: simplest(row) for row in rows}


def same_layout(one: Row, other: Row) -> bool:
    """Return whether two rows shard every array alike, with the same microbatches, remat and placement."""
    return _layout(one) == _layout(other)


def describe_simplest(partition: str) -> str:
    """Describe the simpler partition that a layout is equivalent to."""
    return "data parallel, as dp" if partition == DATA_PARALLEL else f"the same layout as {partition}"


def _roles(row: Row) -> set[str]:
    return {role for role, size in row.degrees.items() if size > 1}


def _layout(row: Row) -> tuple[object, ...]:
    """Return a key that rows share if they shard every array alike; the row's own if its record lacks the sharding."""
    about = row.about
    if not about.sharding:
        return (row.id,)
    return row.work, about.sharding, about.microbatches, about.remat, about.mesh_placement, str(about.pipeline)


@dataclass(frozen=True)
class Comparison:
    """Comparison of two sweeps: pairs of rows with the same layout, by kind of speed, and the rows of one sweep only.

    `again` has the rows that are skipped because the same sweep has a faster row for the same layout and work.
    """

    a: str
    b: str
    pairs: list[RowPair]
    only_a: list[Row]
    only_b: list[Row]
    again: list[Row]

    @property
    def median(self) -> float | None:
        """Median of the ratios of the pairs, or None without a pair."""
        return statistics.median(ratios) if (ratios := [p.ratio for p in self.pairs if p.ratio]) else None

    @property
    def summary(self) -> str:
        """Summarise what both sweeps have, or why that is nothing, what only one has, and what was skipped."""
        text = f"Layouts of the same work in both: {len(self.pairs)}" if self.pairs else self._unlike
        text += f"; median: {self.b} is {self.median:.2f}x as fast as {self.a}" if self.median else ""
        text += f". Only {self.a} has {len(self.only_a)} trials, only {self.b} {len(self.only_b)}."
        if self.again:
            text += f" Skipped, because the same sweep has a faster trial of that layout and work: {len(self.again)}."
        return text

    @property
    def _unlike(self) -> str:
        """Explain why there is nothing to compare."""
        one, other = ({row.work for row in rows} for rows in (self.only_a, self.only_b))
        text = f"Nothing to compare: {self.a} and {self.b} have "
        if one & other:
            return f"{text}no layout in common with the same kind of speed"
        first, second = (f"{rows[0].work.label}, {rows[0].work.precision}" for rows in (self.only_a, self.only_b))
        return f"{text}no work in common ({self.a}: {first}; {self.b}: {second})"


def compare(rows: Sequence[Row], a: str, b: str) -> Comparison:
    """Compare two sweeps, given by name or folder. Raises ValueError with the known sweeps.

    A pair has the same layout and work, from the same stage on the same target. Of several such trials in a sweep
    the fastest counts.
    """
    by_sweep: list[dict[tuple[object, ...], Row]] = []
    again: list[Row] = []
    for name in (a, b):
        members = [row for row in rows if name == row.trial.sweep or Path(name).resolve() == row.source.resolve()]
        if not members:
            known = ", ".join(dict.fromkeys(f"{row.trial.sweep} ({row.source})" for row in rows))
            raise ValueError(f"--compare {a} {b}: {name} is not a sweep here. Sweeps: {known}.")
        best: dict[tuple[object, ...], Row] = {}
        again += [row for row in ranked(members) if best.setdefault((row.group, row.layout, row.work), row) is not row]
        by_sweep.append(best)
    left, right = by_sweep
    pairs = [RowPair(row, right[key]) for key, row in left.items() if key in right]
    pairs.sort(key=lambda p: (p.a.group, p.ratio is None, -(p.ratio or 0.0)))
    only_a = ranked(row for key, row in left.items() if key not in right)
    only_b = ranked(row for key, row in right.items() if key not in left)
    return Comparison(a, b, pairs, only_a, only_b, again)


def agreement(pairs: Sequence[RowPair]) -> float | None:
    """Return the share of pairs of layouts of one work that the prediction ranks in the measured order.

    Kendall's concordance without ties and differences within noise; None if no two layouts of a work remain.
    """
    agree = total = 0
    for i, one in enumerate(pairs):
        for other in pairs[:i]:
            predicted = _rate(one.a) - _rate(other.a)
            measured = _rate(one.b) - _rate(other.b)
            if _kind(one) == _kind(other) and predicted and not within_noise(one.b.trial, other.b.trial):
                total += 1
                agree += (predicted > 0) == (measured > 0)
    return agree / total if total else None


def refusals(rows: Iterable[Row]) -> list[tuple[Status, str, list[Row]]]:
    """Group rows without a result by status and kind of reason, the largest group first, each with its first reason.

    Refusals are of one kind if their first problems have the same code and axes. Layouts that do not fit or take too
    long are one kind each. Other reasons, and refusals of older files, are of one kind if they are equal.
    """
    by_kind: dict[tuple[Status, object], list[Row]] = defaultdict(list)
    for row in rows:
        trial = row.trial
        kind: object = row.reason
        if trial.status is Status.refused and trial.problems:
            kind = trial.problems[0]
        elif trial.status in (Status.does_not_fit, Status.timeout):
            kind = None
        if trial.status is not Status.ok:
            by_kind[trial.status, kind].append(row)
    order = list(Status)
    listed = [(status, members[0].reason or UNKNOWN, members) for (status, _), members in by_kind.items()]
    return sorted(listed, key=lambda entry: (order.index(entry[0]), -len(entry[2]), entry[1]))


def _kind(pair: RowPair) -> tuple[object, ...]:
    return pair.a.group, pair.b.group, pair.a.work, pair.b.work


def _rate(row: Row) -> float:
    return row.rate_per_chip or 0.0
