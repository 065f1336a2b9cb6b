"""Records in `goodput.jsonl` how a run spends its wall time, across restarts. Does not import JAX.

Each start of a run appends a line with its time, and then lines with the seconds spent so far by kind. If a start did
not end as planned (`_PLANNED_ENDS`), the time from its last line to the next start counts as downtime.
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
from valkyrie.units import long_duration_text, share_text

GOODPUT_FILE = "goodput.jsonl"
"""File in a run folder with the JSON lines of all its starts."""

TIME_KINDS = {
    "steps": "steps",
    "redone": "steps repeated after a restart",
    "data": "waiting for data",
    "setup": "startup",
    "compile": "compile",
    "restore": "restore",
    "save": "saving",
    "evaluation": "evaluation",
    "down": "downtime before restarts",
    "other": "other",
}
"""The kinds of wall time, with their labels in output. `steps` excludes steps that were repeated later, and time spent
waiting for data."""

FINISHED, STOPPED, PREEMPTED = "finished", "stopped", "preempted"
"""Values of `Start.end`. If the process crashes or is killed, no end is recorded."""
_PLANNED_ENDS = (FINISHED, STOPPED)
"""Ends that the user planned. The time until the next start does not count, and that start is not a restart."""
_INTERVAL_SHARE, _MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.01, 1.0, 60.0
"""Interval between two lines: a share of the time since the start, but at least a second and at most a minute."""
_MIN_LISTED_SHARE = 0.005
"""`Goodput.describe_other_time` only lists kinds of time with a larger share of the wall time than this."""


class Point(NamedTuple):
    """Progress of a start at a Unix time: the last step done, and the seconds spent so far by kind."""

    time: float
    step: int
    seconds: Mapping[str, float]


@dataclass
class Start:
    """One start of a run, with its progress until it ended.

    Args:
        start_time: Unix time of the start.
        points: Its progress, in order of time.
        end: How it ended, or None if it crashed, was killed or is still running.
    """

    start_time: float
    points: list[Point] = field(default_factory=list)
    end: str | None = None

    @property
    def end_time(self) -> float:
        """Unix time of the last point, or of the start if there are no points."""
        return self.points[-1].time if self.points else self.start_time

    @property
    def ended_as_planned(self) -> bool:
        """Whether the start finished the run or was stopped by the user."""
        return self.end in _PLANNED_ENDS

    def seconds_spent(self, kind: str) -> float:
        """Return the seconds of this start that were spent on `kind`, a key of `TIME_KINDS`, up to its last point."""
        return self.points[-1].seconds.get(kind, 0.0) if self.points else 0.0

    def seconds_after_step(self, step: int) -> float:
        """Return the seconds that this start spent on steps after `step`, interpolated between points."""
        total_s = 0.0
        for point, next_point in itertools.pairwise(self.points):
            if next_point.step > max(step, point.step):
                share = (next_point.step - max(step, point.step)) / (next_point.step - point.step)
                total_s += share * (next_point.seconds.get("steps", 0.0) - point.seconds.get("steps", 0.0))
        return total_s


class Goodput(NamedTuple):
    """The wall time of a run: `seconds` by kind, which sum to `wall_s`, and the number of restarts."""

    wall_s: float
    seconds: dict[str, float]
    restarts: int

    @property
    def share(self) -> float | None:
        """Share of the wall time spent on steps that were not repeated, or None before any time has passed."""
        return self.seconds["steps"] / self.wall_s if self.wall_s > 0 else None

    def summary(self) -> dict[str, float | int | None]:
        """Return flat values for a run's summary: `goodput`, `restarts`, and seconds such as `time/steps`."""
        seconds = {f"time/{kind}": round(value, 4) for kind, value in self.seconds.items()}
        return {"goodput": self.share, "restarts": self.restarts, "time/total": round(self.wall_s, 4), **seconds}

    def describe(self) -> str:
        """Return a line with the goodput, the wall time, the number of restarts, and the other kinds of time."""
        if self.share is None:
            return "goodput: not known yet"
        restarts = [f"{self.restarts} restart{'s' * (self.restarts > 1)}"] if self.restarts else []
        other_time = [f"other time: {other_time}"] if (other_time := self.describe_other_time()) else []
        return "; ".join(
            [f"goodput {share_text(self.share)} of {long_duration_text(self.wall_s)}", *restarts, *other_time]
        )

    def describe_other_time(self) -> str:
        """Describe the kinds of time other than steps, with their shares of the wall time, largest first.

        Leaves out shares of half a percent or less. Empty if none is larger.
        """
        shares = [(s / self.wall_s, TIME_KINDS[kind]) for kind, s in self.seconds.items() if kind != "steps" and s]
        return ", ".join(
            f"{name} {share_text(share)}" for share, name in sorted(shares, reverse=True) if share > _MIN_LISTED_SHARE
        )


def compute_goodput(starts: Sequence[Start]) -> Goodput | None:
    """Sum the wall time of a run by kind, over all its starts. Returns None if there are no starts.

    If a step was repeated, only its last execution counts as `steps`. The time between a planned end and the next start
    does not count at all.
    """
    if not starts:
        return None
    seconds = dict.fromkeys(TIME_KINDS, 0.0)
    for number, start in enumerate(starts):
        spent_by_kind = {kind: start.seconds_spent(kind) for kind in TIME_KINDS}
        first_repeated_step = min(
            (later_start.points[0].step for later_start in starts[number + 1 :] if later_start.points), default=None
        )
        redone_s = 0.0 if first_repeated_step is None else start.seconds_after_step(first_repeated_step)
        for kind, spent_s in (spent_by_kind | {"steps": spent_by_kind["steps"] - redone_s, "redone": redone_s}).items():
            seconds[kind] += spent_s
        seconds["other"] += max(start.end_time - start.start_time - sum(spent_by_kind.values()), 0.0)
    for previous_start, next_start in itertools.pairwise(starts):
        if not previous_start.ended_as_planned:
            seconds["down"] += max(next_start.start_time - previous_start.end_time, 0.0)
    restarts = sum(not previous_start.ended_as_planned for previous_start in starts[:-1])
    return Goodput(sum(seconds.values()), seconds, restarts)


def read_goodput(folder: Path) -> Goodput | None:
    """Read the goodput of the run in a folder. Returns None if it has no record."""
    return compute_goodput(read_starts(folder / GOODPUT_FILE))


def read_starts(file: Path) -> list[Start]:
    """Read the starts recorded in a file, oldest first. Skips damaged and incomplete lines."""
    starts: list[Start] = []
    for line in read_metrics(file) if file.is_file() else []:
        try:
            if "start" in line:
                starts.append(Start(float(line["start"])))
            elif starts:
                seconds = {kind: float(s) for kind, s in line["seconds"].items() if kind in TIME_KINDS}
                starts[-1].points.append(Point(float(line["time"]), int(line["step"]), seconds))
                starts[-1].end = line.get("end")
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return starts


class GoodputRecorder:
    """Records how this start of a run spends its time, and computes the run's goodput so far.

    Args:
        folder: The run folder.
        start_time: Unix time of this start.
        seconds_by_kind: Seconds spent so far by kind, which the caller updates. `count_setup` adds to its `setup`.
        is_writer: Whether to read and write the file. False on processes other than the leader, which then know only
            this start.
    """

    def __init__(
        self, folder: Path, start_time: float, seconds_by_kind: dict[str, float], *, is_writer: bool = True
    ) -> None:
        self._file, self._start_time, self._writes = folder / GOODPUT_FILE, start_time, is_writer
        self._seconds_by_kind = seconds_by_kind
        self._earlier_starts = read_starts(self._file) if is_writer else []
        self._clock_offset = time.perf_counter() - (time.time() - start_time)
        self._earlier_sum: tuple[Point, Goodput] | None = None
        self._last_write_time, self._step = start_time, 0
        if is_writer:
            cut_torn_line(self._file)
        self._append({"start": round(start_time, 3)})

    def count_setup(self, step: int) -> None:
        """Count all time that has no kind yet as setup, and write a line.

        `step` is the step that the run continues from. May be called several times before the first step.
        """
        unattributed_s = self._time() - self._start_time - sum(self._seconds_by_kind.values())
        self._seconds_by_kind["setup"] = self._seconds_by_kind.get("setup", 0.0) + max(unattributed_s, 0.0)
        self.write(step)
        self._earlier_sum = None
        self.goodput()

    @contextlib.contextmanager
    def record_refusal(self) -> Iterator[None]:
        """Record this start as stopped if the code in this context raises ValueError or OSError.

        These are usually mistakes of the user. The next start then does not count as a restart.
        """
        try:
            yield
        except (ValueError, OSError):
            points = self._earlier_starts[-1].points if self._earlier_starts else []
            self.write(points[-1].step if points else 0, STOPPED)
            raise

    def record_step(self, step: int) -> None:
        """Record that a step is done. Writes a line if the last one is old enough (`_INTERVAL_SHARE`)."""
        self._step, now = step, self._time()
        interval_s = min(max(_INTERVAL_SHARE * (now - self._start_time), _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        if now - self._last_write_time >= interval_s:
            self.write(step)

    def write(self, step: int | None = None, end: str | None = None) -> None:
        """Write a line with the time spent so far.

        Args:
            step: The last step done, or None to use the step recorded last.
            end: How this start ended (`FINISHED`, `STOPPED` or `PREEMPTED`), or None if it crashed or is still running.
        """
        self._step = self._step if step is None else step
        point = self._point()
        self._last_write_time = point.time
        self._append({**point._asdict(), **({"end": end} if end else {})})

    def goodput(self) -> Goodput:
        """Return the run's goodput up to now, over this start and all earlier ones that the file records."""
        point = self._point()
        # The sum over earlier starts is computed once: it only depends on the step from which this start continues.
        if self._earlier_sum is None:
            goodput_so_far = compute_goodput([*self._earlier_starts, Start(self._start_time, [point])])
            assert goodput_so_far is not None
            self._earlier_sum = point, goodput_so_far
        earlier_point, earlier_sum = self._earlier_sum
        spent_since = {kind: point.seconds.get(kind, 0.0) - earlier_point.seconds.get(kind, 0.0) for kind in TIME_KINDS}
        seconds = {kind: earlier_sum.seconds[kind] + spent_since[kind] for kind in TIME_KINDS}
        seconds["other"] += max(point.time - earlier_point.time - sum(spent_since.values()), 0.0)
        return Goodput(sum(seconds.values()), seconds, earlier_sum.restarts)

    def _point(self) -> Point:
        seconds_by_kind = {kind: round(seconds, 4) for kind, seconds in self._seconds_by_kind.items() if seconds}
        return Point(round(self._time(), 3), self._step, seconds_by_kind)

    def _time(self) -> float:
        """Return the Unix time, measured with a clock that never goes back."""
        return self._start_time + time.perf_counter() - self._clock_offset

    def _append(self, line: Mapping[str, object]) -> None:
        """Append a line. If the disk refuses it, the line is lost."""
        if not self._writes:
            return
        with contextlib.suppress(OSError), open_to_append(self._file) as file:
            file.write(json.dumps(line).encode() + b"\n")
