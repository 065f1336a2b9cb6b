"""Step times, throughput, and what else time is spent on. Only steps are on the clock of the rates."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

Spent = Literal["setup", "compile", "restore", "save", "evaluation", "other"]
"""What time is spent on beside steps: kinds of `goodput.KINDS`."""


class Meter:
    """The durations of finished steps, in seconds. The first is kept apart: it pays for warming up.

    `spent` are the seconds since the beginning by kind: `steps`, `data` (waiting for it), and those of `paused`.
    """

    def __init__(self, tokens: int, chips: float | int, flops: float, peak_flops: float | None) -> None:
        """`tokens` and `flops` are those of one step; `peak_flops` is that of all chips together, None if unknown."""
        self.tokens, self.chips, self.flops, self.peak_flops = tokens, chips, flops, peak_flops
        self.first: float | None = None
        self.steps: list[float] = []
        self.waits: list[float] = []
        """Seconds of each of `steps` in which the devices had nothing to do, for its batch was not there."""
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()
        self._paused, self._waited = 0.0, 0.0
        self._devices = Devices()

    def start(self) -> None:
        """Begin to time the next step now."""
        self._since, self._paused, self._waited = time.perf_counter(), 0.0, 0.0

    def finished(self) -> float:
        """Record that a step has finished, and return its seconds since the one before it (or since `start`)."""
        now = time.perf_counter()
        taken, waited = now - self._since - self._paused, self._waited
        self._since, self._paused, self._waited = now, 0.0, 0.0
        if self.first is None:
            self.first = taken
        else:
            self.steps.append(taken)
            self.waits.append(waited)
        self.spent["steps"] += taken - waited
        self.spent["data"] += waited
        return taken

    @contextlib.contextmanager
    def paused(self, kind: Spent = "other") -> Iterator[None]:
        """Leave what happens inside out of the time of the step around it; it is spent on this kind."""
        began = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - began
            self._paused += taken
            self.spent[kind] += taken

    def given(self, wait: Callable[[], object]) -> None:
        """Note that the devices were given a step; `wait` returns when they have done it."""
        self._devices.given(wait)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Get the next batch inside. As long as the devices are still at work on the step before, none of it counts."""
        began = time.perf_counter()
        yield
        idle_since = self._devices.idle_since()
        if idle_since is not None:
            self._waited += max(time.perf_counter() - max(began, idle_since), 0.0)

    def close(self) -> None:
        """Let go of the thread that waits for the devices."""
        self._devices.close()

    def rates(self, window: int | None = None) -> dict[str, float | None]:
        """Return tokens/s, tokens/s/chip and MFU by the median of the last `window` steps (None: all steps).

        `data_wait` is the share of their time in which the devices waited for a batch.
        """
        recent = self.steps[-window:] if window else self.steps
        if not recent:
            return dict.fromkeys(("step_s", "tokens_per_second", "tokens_per_second_per_chip", "mfu", "data_wait"))
        median = statistics.median(recent)
        rate = self.tokens / median
        mfu = None if self.peak_flops is None else self.flops / median / self.peak_flops
        return {
            "step_s": median,
            "tokens_per_second": rate,
            "tokens_per_second_per_chip": rate / self.chips,
            "mfu": mfu,
            "data_wait": sum(self.waits[-len(recent) :]) / sum(recent),
        }

    def summary(self) -> dict[str, float | None]:
        """Return first step, median and 90th percentile of the others, and the rates by the median."""
        ordered = sorted(self.steps)
        p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)] if ordered else None
        return {"first_step_s": self.first, "step_p90_s": p90, **self.rates()}


class Devices:
    """When the devices have done what they were given: a thread waits for it, for the loop may be waiting for data."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="devices")
        self._done: Future[float] | None = None

    def given(self, wait: Callable[[], object]) -> None:
        """Note that they were given work; `wait` returns when it is done."""

        def done() -> float:
            wait()
            return time.perf_counter()

        self._done = self._thread.submit(done)

    def idle_since(self) -> float | None:
        """Return the time since when they have nothing to do (minus infinity: always); None while they work."""
        if self._done is None:
            return -math.inf
        return self._done.result() if self._done.done() and self._done.exception() is None else None

    def close(self) -> None:
        """Let the thread end once what it waits for is done."""
        self._thread.shutdown(wait=False)
