"""Ranks rows: fastest rows by kind of speed, Pareto fronts, equivalent partitions, and comparisons of two sweeps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from valkyrie.sweep.noise import within_noise
from valkyrie.sweep.rows import Row, RowPair, Workload, group_by_kind, sort_by_speed
from valkyrie.sweep.trial import Status
from valkyrie.units import count_text

UNKNOWN_REASON = "no reason was recorded"
"""Reason shown for a trial without a result if its record has none."""
DATA_PARALLEL = "dp"
"""Name of the partition that shards only the batch."""


def best_per_workload(rows: Iterable[Row]) -> list[Row]:
    """Return the fastest row for each kind of speed and workload, in the order of `group_by_kind`."""
    best: list[Row] = []
    for members in group_by_kind(rows).values():
        seen_workloads = set()
        for row in members:
            if row.has_speed and row.work not in seen_workloads:
                seen_workloads.add(row.work)
                best.append(row)
    return best


def pareto_front(rows: Iterable[Row], cost: Callable[[Row], int | float | None]) -> list[Row]:
    """Return the rows on the Pareto front of speed per chip and `cost`, cheapest first.

    These are the rows that are faster than every other row of the same or a lower cost. Omits rows without a speed or
    cost.
    """
    costs = [(cost(row), row) for row in rows if row.has_speed]
    ordered = sorted(
        ((c, row) for c, row in costs if c is not None), key=lambda p: (p[0], -(p[1].tokens_per_second_per_chip or 0))
    )
    best: list[Row] = []
    for _, row in ordered:
        if not best or (row.tokens_per_second_per_chip or 0) > (best[-1].tokens_per_second_per_chip or 0):
            best.append(row)
    return best


def pareto_ids(rows: Iterable[Row], cost: Callable[[Row], int | float | None]) -> set[str]:
    """Return the ids of the rows on the Pareto front of speed per chip and `cost`, computed for each workload."""
    by_work: dict[Workload, list[Row]] = defaultdict(list)
    for row in rows:
        by_work[row.work].append(row)
    return {row.id for members in by_work.values() for row in pareto_front(members, cost)}


def peak_memory(row: Row) -> int | None:
    """Return the peak memory per device, in bytes, or None if unknown."""
    return row.peak_bytes


def chip_price(row: Row) -> float | None:
    """Return the on-demand price of a chip, in dollars per hour, or None if unknown."""
    return row.price


def simplest_partitions(rows: Sequence[Row]) -> dict[str, str]:
    """Return a dict from row ids to the simplest partition among the rows with the same layout (see `same_layout`).

    The simplest partition is the one with the fewest kinds of roles. A row that only shards the batch gets `dp`, even
    if no row uses that partition. For example, `1d_tp` on a mesh with x=1 is equivalent to `dp`, so its speed says
    nothing about tensor parallelism.
    """
    roles_by_partition: dict[str, set[str]] = defaultdict(set)
    partitions_by_layout: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for row in rows:
        roles_by_partition[row.about.partition] |= _roles(row)
        partitions_by_layout[_layout_key(row)].add(row.about.partition)

    def find_simplest(row: Row) -> str:
        if _roles(row) == {"DP"}:
            return DATA_PARALLEL
        return min(partitions_by_layout[_layout_key(row)], key=lambda name: (len(roles_by_partition[name]), name))

    return {row.id: find_simplest(row) for row in rows}


def same_layout(first: Row, second: Row) -> bool:
    """Return whether two rows have the same workload and shard every array in the same way.

    Their microbatches, remat, placement and pipeline must also be equal. Returns False for different rows if the
    sharding of one was not recorded.
    """
    return _layout_key(first) == _layout_key(second)


def describe_simplest(partition: str) -> str:
    """Return a phrase for layouts that are equivalent to this simpler partition.

    The phrase is `the same layout as fsdp`, or `plain data parallelism, like dp`.
    """
    return "plain data parallelism, like dp" if partition == DATA_PARALLEL else f"the same layout as {partition}"


def _roles(row: Row) -> set[str]:
    return {role for role, size in row.degrees.items() if size > 1}


def _layout_key(row: Row) -> tuple[object, ...]:
    """Return a key that is equal for rows with the same workload and equivalent layouts.

    A row without a recorded sharding has a unique key.
    """
    about = row.about
    if not about.sharding:
        return (row.id,)
    return row.work, about.sharding, about.microbatches, about.remat, about.mesh_placement, str(about.pipeline)


@dataclass(frozen=True)
class SweepComparison:
    """Comparison of two sweeps.

    Args:
        a: Name of the first sweep.
        b: Name of the second sweep.
        pairs: Pairs of rows with the same layout, workload and kind of speed.
        only_a: Rows with no counterpart in `b`.
        only_b: Rows with no counterpart in `a`.
        slower_duplicates: Rows that are not compared, because their sweep has a faster row with the same layout,
            workload and kind of speed.
    """

    a: str
    b: str
    pairs: list[RowPair]
    only_a: list[Row]
    only_b: list[Row]
    slower_duplicates: list[Row]

    @property
    def median_ratio(self) -> float | None:
        """Median, over the pairs, of the speed in `b` divided by the speed in `a`. None if no pair has both speeds."""
        return statistics.median(ratios) if (ratios := [p.ratio for p in self.pairs if p.ratio]) else None

    @property
    def summary(self) -> str:
        """Summary of the comparison: common layouts and their median ratio, other trials, and skipped trials."""
        text = f"Layouts with the same workload in both: {len(self.pairs)}" if self.pairs else self._no_pairs_text
        text += f"; median: {self.b} is {self.median_ratio:.2f}x as fast as {self.a}" if self.median_ratio else ""
        text += f". Trials only in {self.a}: {len(self.only_a)}; only in {self.b}: {len(self.only_b)}."
        if self.slower_duplicates:
            count = len(self.slower_duplicates)
            text += (
                f" {count_text(count, 'trial')} {'is' if count == 1 else 'are'} skipped, because the same sweep has a "
                "faster one with the same layout and workload."
            )
        return text

    @property
    def _no_pairs_text(self) -> str:
        """Sentence that explains why there is nothing to compare."""
        works_a, works_b = ({row.work for row in rows} for rows in (self.only_a, self.only_b))
        text = f"Nothing to compare: {self.a} and {self.b} have "
        if works_a & works_b:
            return f"{text}no layout in common with the same kind of speed (predicted, measured or trained)"
        first, second = (f"{rows[0].work.label}, {rows[0].work.precision}" for rows in (self.only_a, self.only_b))
        return f"{text}no common workload ({self.a}: {first}; {self.b}: {second})"


def compare(rows: Sequence[Row], a: str, b: str) -> SweepComparison:
    """Compare two sweeps, each given by its name or folder. Raises ValueError if there is no such sweep.

    Rows are paired if they have the same layout, workload, stage and target. If a sweep has several such rows, the
    fastest is used.
    """
    by_sweep: list[dict[tuple[object, ...], Row]] = []
    slower_duplicates: list[Row] = []
    for name in (a, b):
        path = Path(name).resolve()  # of a sweep, or of the run folder of a training
        members = [
            row
            for row in rows
            if name == row.trial.sweep or path in (row.source.resolve(), row.folder and row.folder.resolve())
        ]
        if not members:
            choices = ", ".join(dict.fromkeys(f"{row.trial.sweep} ({row.source})" for row in rows))
            raise ValueError(f"--compare {a} {b}: {name} is not one of these sweeps. Choose from: {choices}.")
        best: dict[tuple[object, ...], Row] = {}
        slower_duplicates += [
            row
            for row in sort_by_speed(members)
            if best.setdefault((row.speed_kind, row.layout, row.work), row) is not row
        ]
        by_sweep.append(best)
    rows_a, rows_b = by_sweep
    pairs = [RowPair(row, rows_b[key]) for key, row in rows_a.items() if key in rows_b]
    pairs.sort(key=lambda p: (p.a.speed_kind, p.ratio is None, -(p.ratio or 0.0)))
    only_a = sort_by_speed(row for key, row in rows_a.items() if key not in rows_b)
    only_b = sort_by_speed(row for key, row in rows_b.items() if key not in rows_a)
    return SweepComparison(a, b, pairs, only_a, only_b, slower_duplicates)


def concordance(pairs: Sequence[RowPair]) -> float | None:
    """Return the share of pairs of layouts that predictions rank in the measured order (concordance).

    Each item of `pairs` has the prediction `a` and the measurement `b` of one layout. Compares only layouts with the
    same workload and kinds of speed. Ignores equal predictions, and measurements that differ only by noise. Returns
    None if no two layouts remain.
    """
    agreeing_count = compared_count = 0
    for i, pair in enumerate(pairs):
        for earlier in pairs[:i]:
            predicted_difference = _rate(pair.a) - _rate(earlier.a)
            measured_difference = _rate(pair.b) - _rate(earlier.b)
            if (
                _comparison_key(pair) == _comparison_key(earlier)
                and predicted_difference
                and not within_noise(pair.b.trial, earlier.b.trial)
            ):
                compared_count += 1
                agreeing_count += (predicted_difference > 0) == (measured_difference > 0)
    return agreeing_count / compared_count if compared_count else None


def group_unsuccessful(rows: Iterable[Row]) -> list[tuple[Status, str, list[Row]]]:
    """Group rows without a result by status and kind of reason. Returns (status, first reason, rows).

    Groups are sorted by status, and groups of the same status by their number of rows, largest first.

    Refusals are of one kind if their first problems have the same code, key, logical axes and mesh axes. All layouts
    that do not fit are one kind, and so are all timeouts. Other reasons, and refusals in older files, are compared as
    text.
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
    entries = [(status, members[0].reason or UNKNOWN_REASON, members) for (status, _), members in by_kind.items()]
    return sorted(entries, key=lambda entry: (order.index(entry[0]), -len(entry[2]), entry[1]))


def _comparison_key(pair: RowPair) -> tuple[object, ...]:
    return pair.a.speed_kind, pair.b.speed_kind, pair.a.work, pair.b.work


def _rate(row: Row) -> float:
    return row.tokens_per_second_per_chip or 0.0
