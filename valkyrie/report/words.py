"""Sentences about a sweep: which layout is fastest, and why, from the numbers of its trials alone."""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.axes import UNATTRIBUTED
from valkyrie.parts import PartKind, StepPart
from valkyrie.report.alike import counted_as, described, same_layout
from valkyrie.report.rank import UNKNOWN, agreement, predicted_and_measured
from valkyrie.report.values import PART_NAMES
from valkyrie.sweep.noise import has_spread, within_noise
from valkyrie.sweep.rows import Group, Row, Work, groups
from valkyrie.sweep.trial import Status
from valkyrie.units import duration, memory, percent, sent

WORTH_SAYING = 0.15
"""The share of a difference between two steps from which one of its parts is named."""
WORKS = 3
"""Of how many models, batches and lengths the partitions are compared."""
SAME = 1.02
"""Below this ratio two speeds are called the same."""

NEGLIGIBLE = 0.01
"""The share of all bytes below which those over some axes are not named."""

_MANY = (PartKind.matmul, PartKind.kernel)
_NAMES = PART_NAMES | {PartKind.rest: "all else"}


def answer(group: Group, rows: Sequence[Row]) -> list[str]:
    """Return what to say of one kind of speed: the winner, and why it is faster than the best of each other partition.

    `rows` are those of the group, the fastest first.
    """
    fast = next((row for row in rows if row.ok), None)
    if fast is None:
        return [_without_speeds(group, rows)]
    works = list(dict.fromkeys(row.work for row in rows if row.ok))
    lines = [_winner(fast, rows, len(works) > 1)]
    for work in works[:WORKS]:
        head = f"{work.label}: " if len(works) > 1 else ""
        lines += [head + line for line in _of_a_work([row for row in rows if row.work == work])]
    return lines


def _without_speeds(group: Group, rows: Sequence[Row]) -> str:
    """Return what to say where no row has a speed: what is known of those that have a result all the same."""
    done = [row for row in rows if row.trial.status is Status.ok]
    if not done:
        return f"No layout {group.label} has a speed: the reasons are below."
    text = f"No layout {group.label} has a speed: {(done[0].reason or 'no step time is known').rstrip('.')}."
    several = len({row.work for row in done}) > 1
    least_memory = min((row for row in done if row.peak), key=lambda row: row.peak or 0, default=None)
    if least_memory is not None:
        text += f" Least memory: {_named(least_memory, several)}, {memory(least_memory.peak)} a device."
    least = min((row for row in done if row.sent), key=lambda row: sum(row.sent.values()), default=None)
    if least is not None:
        text += f" Least sent: {_named(least, several)}, {sent(sum(least.sent.values()))} by a device in a step."
    return text


def _named(row: Row, several: bool) -> str:
    """Return a row's layout; with its work where there are several works."""
    return f"{row.layout} of {row.work.label}" if several else row.layout


def _of_a_work(rows: Sequence[Row]) -> list[str]:
    """Return why the first row is faster than the best of each other partition, and which partitions have no speed.

    A row whose partition comes to a simpler one on its mesh counts as that one.
    """
    counted, best = counted_as(rows), {}
    for row in sorted((row for row in rows if row.ok), key=lambda row: row.partition != counted[row.id]):
        best.setdefault(counted[row.id], row)
    best = {row.id: row for row in best.values()}
    fast, *others = [row for row in rows if row.id in best]
    if not others:
        others = [row for row in rows if row.ok and not same_layout(row, fast)][-1:]
    lines = [because(fast, row) for row in others]
    for partition in dict.fromkeys(row.partition for row in rows):
        members = [row for row in rows if row.partition == partition]
        timed = [row for row in members if row.ok]
        if not timed and partition != "?":
            lines.append(_without(partition, members))
        elif timed and all(counted[row.id] != partition for row in timed):
            lines.append(_another(partition, timed, counted))
    return lines


def _another(partition: str, rows: Sequence[Row], counted: dict[str, str]) -> str:
    """Return that none of a partition's rows is an example of it."""
    meshes = [f"{row.mesh} ({described(counted[row.id])})" for row in rows]
    return f"{partition} is compared as another partition, for no mesh here uses all its axes: {'; '.join(meshes)}."


def because(fast: Row, slow: Row) -> str:
    """Return how many times as fast the first row is, and the parts of the two steps that make the difference."""
    assert fast.rate_per_chip and slow.rate_per_chip
    ratio, (a, b) = fast.rate_per_chip / slow.rate_per_chip, names(fast, slow)
    simulated = " (simulated)" if fast.group.simulated else ""
    if within_noise(fast.trial, slow.trial) and (noise := _noise(fast, slow)):
        return f"No difference beyond noise between {a} and {b}{simulated}: {noise}."
    if ratio < SAME:
        return f"{a} is as fast as {b}{simulated}, within {percent(SAME - 1)}."
    head = f"{a} is {ratio:.{2 if ratio < 1.1 else 1 if ratio < 10 else 0}f}x as fast as {b}{simulated}"
    reasons, against = _reasons(fast, slow)
    if not reasons:
        return f"{head}{_differs(fast, slow)}."
    although = f", although {' and '.join(against)}" if against else ""
    return f"{head} because {'; '.join(reasons)}{although}."


def _noise(fast: Row, slow: Row) -> str:
    """Return the steps of two rows with the range of each; nothing of predictions, which have none."""
    if fast.p90_s is None or slow.p90_s is None:
        return ""
    of_each = [f"{duration(row.step_s or 0.0)} ({_steps(row)})" for row in (fast, slow)]
    return f"a step takes {of_each[0]} and {of_each[1]}"


def _steps(row: Row) -> str:
    least = row.step_s if row.min_s is None else row.min_s
    return f"from {duration(least or 0.0)} to {duration(row.p90_s or 0.0)}"


def names(one: Row, other: Row) -> tuple[str, str]:
    """Return two rows by partition where those differ, with the mesh where they differ in it."""
    if one.partition == other.partition and one.mesh == other.mesh:
        return one.layout, other.layout
    if one.mesh == other.mesh:
        return one.partition, other.partition
    return f"{one.partition} on {one.mesh}", f"{other.partition} on {other.mesh}"


def price_lines(rows: Sequence[Row]) -> list[str]:
    """Return what a million tokens cost under the cheapest layout of each work, where that is not the fastest one."""
    by_work: dict[Work, list[Row]] = {}
    for row in sorted((row for row in rows if row.ok and row.per_million), key=lambda row: row.per_million or 0.0):
        by_work.setdefault(row.work, []).append(row)
    lines = []
    for members in by_work.values():
        cheapest, fastest = members[0], max(members, key=lambda row: row.rate_per_chip or 0.0)
        if cheapest.price != fastest.price:
            lines.append(
                f"Cheapest: {_named(cheapest, len(by_work) > 1)} on {cheapest.group.target}, "
                f"{cheapest.per_million:.3g} dollars for a million tokens."
            )
    return lines[:WORKS]


def agreement_line(rows: Sequence[Row]) -> str | None:
    """Return how often predictions and measurements agree on the faster of two layouts; None without such pairs."""
    pairs = predicted_and_measured(rows)
    share = agreement(pairs)
    if share is None:
        return None
    simulated = any(pair.b.group.simulated for pair in pairs)
    word = " (simulated)" if simulated else ""
    line = f"Of two of these layouts, predictions name the faster one{word} in {percent(share)} of cases (chance: 50%)."
    if simulated:
        line += " Simulated devices are threads of one processor, without links: expect little of this comparison."
    return line


def _winner(row: Row, rows: Sequence[Row], several: bool) -> str:
    word = " simulated" if row.group.simulated else ""
    assert row.rate_per_chip is not None and row.rate is not None and row.step_s is not None
    timed = sum(r.ok for r in rows)
    head = f"Fastest of {timed} {row.group.label}" if timed > 1 else row.group.label
    text = f"{head}: {_named(row, several)}, "
    text += f"{row.rate_per_chip:,.0f} tokens/s/chip{word}, {duration(row.step_s)} a step{word}"
    if row.peak is not None:
        text += f"; peak memory per device {memory(row.peak)}"
        text += f" of {memory(row.usable)} usable" if row.usable is not None else ""
    if row.per_million:
        text += f"; {row.per_million:.3g} dollars for a million tokens"
    text = text[0].upper() + text[1:] + "."
    partition = counted_as(rows)[row.id]
    if partition != row.partition:
        text += f" On this mesh {row.partition} is {described(partition)}."
    return text + _as_fast(row, rows)


def _as_fast(row: Row, rows: Sequence[Row]) -> str:
    others = [r for r in rows if r.ok and r.work == row.work and r is not row]
    within = f"{percent(SAME - 1)}"
    if has_spread(row.trial):
        others, within = [r for r in others if within_noise(row.trial, r.trial)], "the spread of the timed steps"
    else:
        others = [r for r in others if (r.rate_per_chip or 0.0) >= (row.rate_per_chip or 0.0) / SAME]
    if not others:
        return ""
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f" As fast, within {within}: {', '.join(r.layout for r in others[:3])}{more}."


def _without(partition: str, rows: Sequence[Row]) -> str:
    status = " or ".join(dict.fromkeys("no time" if row.status == "ok" else row.status for row in rows))
    reason = (rows[0].reason or UNKNOWN).splitlines()[0].rstrip(".")
    return f"{partition} has no speed ({status}): {reason}."


def _reasons(fast: Row, slow: Row) -> tuple[list[str], list[str]]:
    """Return the parts in which the slow step takes longer, largest first, and those in which the fast one does."""
    assert fast.step_s is not None and slow.step_s is not None
    if not fast.parts or not slow.parts or slow.step_s <= fast.step_s:
        return [], []
    a, b = _by_kind(fast.parts), _by_kind(slow.parts)
    more = {kind: b.get(kind, 0.0) - a.get(kind, 0.0) for kind in {**a, **b}}
    least = WORTH_SAYING * (slow.step_s - fast.step_s)
    ordered = sorted(more.items(), key=lambda item: -item[1])
    reasons = [_part(kind, fast, slow, a, b) for kind, seconds in ordered if seconds >= least]
    against = [_part(kind, fast, slow, a, b) for kind, seconds in reversed(ordered) if seconds <= -least]
    return reasons, against


def _part(kind: PartKind, fast: Row, slow: Row, a: dict[PartKind, float], b: dict[PartKind, float]) -> str:
    took, takes = duration(a.get(kind, 0.0)), duration(b.get(kind, 0.0))
    over = f" (a device sends {_over(fast)}, against {_over(slow)})"
    if kind is PartKind.exposed:
        return f"it waits {took} of a step for communication, not {takes}{over}"
    if kind is PartKind.collectives:
        return f"it spends {took} of a step in collectives, waiting included, not {takes}{over}"
    if kind is PartKind.memory:
        shares = percent(a.get(kind, 0.0) / (fast.step_s or 1)), percent(b.get(kind, 0.0) / (slow.step_s or 1))
        return f"memory-bound operations take {took} ({shares[0]} of the step), not {takes} ({shares[1]})"
    text = f"{_NAMES[kind]} take{'s' * (kind not in _MANY)} {took}, not {takes}"
    return text + _products(fast, slow) if kind in _MANY else text


def _products(fast: Row, slow: Row) -> str:
    """Return what explains slower products: FLOPs done again, or narrow shards."""
    done, again = fast.step.executed_flops, slow.step.executed_flops
    if done and again and again / done >= 1 + WORTH_SAYING:
        cause = "mostly recomputation" if _recomputes(slow) and not _recomputes(fast) else "not split over all devices"
        return f" (the slower one executes {percent(again / done - 1)} more FLOPs on a device, {cause})"
    rates = fast.step.product_rate, slow.step.product_rate
    if rates[0] and rates[1] and rates[0] >= (1 + WORTH_SAYING) * rates[1]:
        return f" ({percent(rates[0])} of peak, not {percent(rates[1])})"
    return ""


def _recomputes(row: Row) -> bool:
    return row.about.remat != "none"


def _differs(fast: Row, slow: Row) -> str:
    """Return what else is known of two steps whose parts are not known: bytes sent and peak memory."""
    differences = []
    if fast.sent or slow.sent:
        differences.append(f"a device sends {_over(fast)}, against {_over(slow)}")
    if fast.peak and slow.peak:
        differences.append(f"its peak memory is {memory(fast.peak)}, against {memory(slow.peak)}")
    return f"; other differences: {'; '.join(differences)}" if differences else ""


def _over(row: Row) -> str:
    whole = sum(row.sent.values())
    parts = sorted(((a, s) for a, s in row.sent.items() if s >= NEGLIGIBLE * whole), key=lambda item: -item[1])
    listed = [f"{sent(size)} {'' if axes == UNATTRIBUTED else 'over '}{axes}" for axes, size in parts[:2]]
    rest = sum(size for _, size in parts[2:])
    listed += [f"{sent(rest)} over others"] if rest else []
    return " and ".join([", ".join(listed[:-1]), listed[-1]]) if len(listed) > 1 else "".join(listed) or "nothing"


def _by_kind(parts: Sequence[StepPart]) -> dict[PartKind, float]:
    """Sum the seconds of a step by kind of part, over all mesh axes."""
    seconds: dict[PartKind, float] = {}
    for part in parts:
        seconds[part.kind] = seconds.get(part.kind, 0.0) + part.seconds
    return seconds


def summary(rows: Sequence[Row]) -> str:
    """Return in one sentence how many trials there are and what became of them."""
    counts: dict[str, int] = {}
    for row in rows:
        word = row.status
        counts[word] = counts.get(word, 0) + 1
    parts = [f"{count} {word}" for word, count in counts.items()]
    kinds = [f"{sum(r.ok for r in members)} {group.label}" for group, members in groups(rows).items()]
    trials = f"{len(rows)} trial{'s' * (len(rows) != 1)}"
    return f"{trials} ({', '.join(parts)}); with a speed: {', '.join(kinds)}."
