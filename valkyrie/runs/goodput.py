"""Wall time of a run by kind, across its restarts, recorded in `goodput.jsonl`. Imports no JAX.

Every start appends a line with its time, and then lines with the seconds spent so far by kind. If a process is killed,
only the time after its last line is lost; it counts as downtime.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from valkyrie.paths import open_to_append
from valkyrie.runs.tracking import cut_torn_line, read_metrics
from valkyrie.units import long_duration, share_text

FILE = "goodput.jsonl"
"""File name, in the run folder."""

KINDS = {
    "steps": "steps",
    "redone": "steps done again after a restart",
    "data": "waiting for data",
    "setup": "start",
    "compile": "compile",
    "restore": "restore",
    "save": "saving",
    "evaluation": "evaluation",
    "down": "down between starts",
    "other": "other",
}
"""Kinds of wall time, with their labels. `steps` are those that count, without waiting for data."""

FINISHED, STOPPED, PREEMPTED = "finished", "stopped", "preempted"
"""How a start ended, unless its process was killed."""
_PLANNED = (FINISHED, STOPPED)
"""Ends after which the run waits for its user: no time is lost, and the next start is not a restart."""
_SHARE, _LEAST_S, _MOST_S = 0.01, 1.0, 60.0
"""A line is written after this share of the start's time since the last one, from a second to a minute."""
_WORTH_SAYING = 0.005


class Point(NamedTuple):
    """Progress of a start: the last step done and the seconds spent by kind, at a Unix time."""

    time: float
    step: int
    seconds: Mapping[str, float]


@dataclass
class Start:
    """One start of a run. `points` are in order of time. `end` is None if it was killed or is running."""

    began: float
    points: list[Point] = field(default_factory=list)
    end: str | None = None

    @property
    def ended(self) -> float:
        """Time of its last point."""
        return self.points[-1].time if self.points else self.began

    @property
    def planned(self) -> bool:
        """Whether it finished or its user stopped it."""
        return self.end in _PLANNED

    def spent(self, kind: str) -> float:
        """Return the seconds it spent on a kind."""
        return self.points[-1].seconds.get(kind, 0.0) if self.points else 0.0

    def steps_after(self, step: int) -> float:
        """Return the seconds of the steps after `step`, interpolated between points."""
        after = 0.0
        for before, now in itertools.pairwise(self.points):
            if now.step > max(step, before.step):
                share = (now.step - max(step, before.step)) / (now.step - before.step)
                after += share * (now.seconds.get("steps", 0.0) - before.seconds.get("steps", 0.0))
        return after


class Goodput(NamedTuple):
    """Wall time of a run: `seconds` by kind, which sum to `wall_s`, and the number of restarts."""

    wall_s: float
    seconds: dict[str, float]
    restarts: int

    @property
    def share(self) -> float | None:
        """Share of the wall time in steps that count, or None before any time has passed."""
        return self.seconds["steps"] / self.wall_s if self.wall_s > 0 else None

    def summary(self) -> dict[str, float | int | None]:
        """Return flat values for a run's summary: `goodput`, `restarts`, and seconds as `time/steps`, ..."""
        seconds = {f"time/{kind}": round(value, 4) for kind, value in self.seconds.items()}
        return {"goodput": self.share, "restarts": self.restarts, "time/total": round(self.wall_s, 4), **seconds}

    def describe(self) -> str:
        """Return a line with the share, the wall time, and the other kinds of time, the largest first."""
        if self.share is None:
            return "goodput is not known yet"
        restarts = [f"{self.restarts} restart{'s' * (self.restarts > 1)}"] if self.restarts else []
        rest = [f"the rest: {rest}"] if (rest := self.rest()) else []
        return "; ".join([f"goodput {share_text(self.share)} of {long_duration(self.wall_s)}", *restarts, *rest])

    def rest(self) -> str:
        """Return the other kinds of time as shares of the wall time, the largest first."""
        shares = [(s / self.wall_s, KINDS[kind]) for kind, s in self.seconds.items() if kind != "steps" and s]
        return ", ".join(
            f"{name} {share_text(share)}" for share, name in sorted(shares, reverse=True) if share > _WORTH_SAYING
        )


def goodput(starts: Sequence[Start]) -> Goodput | None:
    """Sum the time of a run's starts by kind, or return None without starts.

    A step counts once, the last time it was done. Time after a start that finished or that its user stopped does not
    count.
    """
    if not starts:
        return None
    seconds = dict.fromkeys(KINDS, 0.0)
    for number, start in enumerate(starts):
        known = {kind: start.spent(kind) for kind in KINDS}
        again = min((later.points[0].step for later in starts[number + 1 :] if later.points), default=None)
        redone = 0.0 if again is None else start.steps_after(again)
        for kind, spent in (known | {"steps": known["steps"] - redone, "redone": redone}).items():
            seconds[kind] += spent
        seconds["other"] += max(start.ended - start.began - sum(known.values()), 0.0)
    for before, after in itertools.pairwise(starts):
        if not before.planned:
            seconds["down"] += max(after.began - before.ended, 0.0)
    restarts = sum(not before.planned for before in starts[:-1])
    return Goodput(sum(seconds.values()), seconds, restarts)


def read_goodput(folder: Path) -> Goodput | None:
    """Return the goodput of the run in a folder, or None if it has no record."""
    return goodput(read_starts(folder / FILE))


def read_starts(file: Path) -> list[Start]:
    """Return the starts in a file, oldest first, without damaged and incomplete lines."""
    starts: list[Start] = []
    for line in read_metrics(file) if file.is_file() else []:
        try:
            if "start" in line:
                starts.append(Start(float(line["start"])))
            elif starts:
                seconds = {kind: float(s) for kind, s in line["seconds"].items() if kind in KINDS}
                starts[-1].points.append(Point(float(line["time"]), int(line["step"]), seconds))
                starts[-1].end = line.get("end")
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return starts


class Ledger:
    """Records how a start spends its time, and sums the run's time so far.

    `began` is the beginning of this start in Unix seconds. `spent` are its seconds by kind, updated by the owner. With
    `write=False`, for processes other than the leader, it writes nothing and knows only this start.
    """

    def __init__(self, folder: Path, began: float, spent: dict[str, float], *, write: bool = True) -> None:
        self._file, self._began, self._spent, self._writes = folder / FILE, began, spent, write
        self._earlier = read_starts(self._file) if write else []
        self._clock = time.perf_counter() - (time.time() - began)
        self._until: tuple[Point, Goodput] | None = None
        self._written, self._step = began, 0
        if write:
            cut_torn_line(self._file)
        self._append({"start": round(began, 3)})

    def prepared(self, step: int) -> None:
        """Count the time not spent on other kinds so far as setup, and write a line.

        `step` is the step from which the run continues. May be called several times before the first step.
        """
        rest = self._time() - self._began - sum(self._spent.values())
        self._spent["setup"] = self._spent.get("setup", 0.0) + max(rest, 0.0)
        self.write(step)
        self._until = None
        self.goodput()

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Record a start that is refused because of the user's settings as stopped, so that no restart is counted."""
        try:
            yield
        except (ValueError, OSError):
            self.write(self._earlier[-1].points[-1].step if self._earlier and self._earlier[-1].points else 0, STOPPED)
            raise

    def at(self, step: int) -> None:
        """Record that a step is done. Writes a line if one is due."""
        self._step, now = step, self._time()
        if now - self._written >= min(max(_SHARE * (now - self._began), _LEAST_S), _MOST_S):
            self.write(step)

    def write(self, step: int | None = None, end: str | None = None) -> None:
        """Write a line with the time spent after `step`, or the last step recorded. `end` is how the start ends."""
        self._step = self._step if step is None else step
        now = self._point()
        self._written = now.time
        self._append({**now._asdict(), **({"end": end} if end else {})})

    def goodput(self) -> Goodput:
        """Return the run's goodput until now."""
        now = self._point()
        if self._until is None:  # what is redone of earlier starts is known with the step from which this one goes on
            so_far = goodput([*self._earlier, Start(self._began, [now])])
            assert so_far is not None
            self._until = now, so_far
        before, until = self._until
        spent = {kind: now.seconds.get(kind, 0.0) - before.seconds.get(kind, 0.0) for kind in KINDS}
        seconds = {kind: until.seconds[kind] + spent[kind] for kind in KINDS}
        seconds["other"] += max(now.time - before.time - sum(spent.values()), 0.0)
        return Goodput(sum(seconds.values()), seconds, until.restarts)

    def _point(self) -> Point:
        spent = {kind: round(seconds, 4) for kind, seconds in self._spent.items() if seconds}
        return Point(round(self._time(), 3), self._step, spent)

    def _time(self) -> float:
        """Return Unix seconds that never go back within a start."""
        return self._began + time.perf_counter() - self._clock

    def _append(self, line: Mapping[str, object]) -> None:
        """Append a line. Lines that cannot be written are lost."""
        if not self._writes:
            return
        with contextlib.suppress(OSError), open_to_append(self._file) as file:
            file.write(json.dumps(line).encode() + b"\n")
