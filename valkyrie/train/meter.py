"""Measures step times, throughput, and the time spent on everything else. Throughput counts only the time of steps."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

TimeKind = Literal["setup", "compile", "restore", "save", "evaluation", "other"]
"""Kinds of time spent outside of steps, a subset of the keys of `goodput.TIME_KINDS`."""


class Meter:
    """Measures step times in seconds: `first_step_s` is the first, which includes warm-up; `step_times` are the others.

    `seconds_by_kind` are totals by kind: `steps`, `data` (waiting for a batch), and the kinds passed to `paused`.
    """

    def __init__(self, tokens: int, chips: float | int, flops: float, peak_flops: float | None) -> None:
        """`tokens` and `flops` are totals per step. `peak_flops` is the FLOP/s of all chips, or None if unknown."""
        self.tokens, self.chips, self.flops, self.peak_flops = tokens, chips, flops, peak_flops
        self.first_step_s: float | None = None
        self.step_times: list[float] = []
        self.data_waits: list[float] = []
        """Seconds during which the devices waited for the batch, for each of `step_times`."""
        self.seconds_by_kind: defaultdict[str, float] = defaultdict(float)
        self._step_start_time = time.perf_counter()
        self._paused_s, self._waited_s = 0.0, 0.0
        # A thread notes when the devices finish a step, because the main loop may be waiting for data then.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="devices")
        self._finish_future: Future[float] | None = None

    def start(self) -> None:
        """Start the clock of the next step. The time since the previous step does not count."""
        self._step_start_time, self._paused_s, self._waited_s = time.perf_counter(), 0.0, 0.0

    def record_step(self) -> float:
        """Record a finished step and return its duration in seconds.

        This is the time since the previous step finished, or since `start`, without the time in `paused`.
        """
        now = time.perf_counter()
        duration, wait = now - self._step_start_time - self._paused_s, self._waited_s
        self._step_start_time, self._paused_s, self._waited_s = now, 0.0, 0.0
        if self.first_step_s is None:
            self.first_step_s = duration
        else:
            self.step_times.append(duration)
            self.data_waits.append(wait)
        self.seconds_by_kind["steps"] += duration - wait
        self.seconds_by_kind["data"] += wait
        return duration

    @contextlib.contextmanager
    def paused(self, kind: TimeKind = "other") -> Iterator[None]:
        """Count the time spent in this context as `kind`, not as part of a step."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            duration = time.perf_counter() - start_time
            self._paused_s += duration
            self.seconds_by_kind[kind] += duration

    def record_dispatch(self, wait: Callable[[], object]) -> None:
        """Record that a step was dispatched. `wait` returns when the devices have finished it."""

        def finish_time() -> float:
            wait()
            return time.perf_counter()

        self._finish_future = self._executor.submit(finish_time)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measure how long the devices wait for the batch that is fetched in this context.

        Time during which they are still running the last dispatched step does not count.
        """
        start_time = time.perf_counter()
        yield
        finish_future = self._finish_future
        if finish_future is None:
            self._waited_s += max(time.perf_counter() - start_time, 0.0)
        elif finish_future.done() and finish_future.exception() is None:
            self._waited_s += max(time.perf_counter() - max(start_time, finish_future.result()), 0.0)

    def close(self) -> None:
        """Let the thread that waits for the devices end after the current step. Does not wait for it."""
        self._executor.shutdown(wait=False)

    def rates(self, window: int | None = None) -> dict[str, float | None]:
        """Return the rates over the last `window` steps (all if None), by name.

        `step_s` is the median step time. `tokens_per_second`, `tokens_per_second_per_chip` and `mfu` (a share of the
        peak) follow from it. `data_wait` is the share of these steps' time during which the devices waited for a batch.
        The first step never counts, so all values are None until the second step has finished. `mfu` is also None if
        the peak FLOP/s is unknown.
        """
        recent_times = self.step_times[-window:] if window else self.step_times
        if not recent_times:
            return dict.fromkeys(("step_s", "tokens_per_second", "tokens_per_second_per_chip", "mfu", "data_wait"))
        median = statistics.median(recent_times)
        rate = self.tokens / median
        mfu = None if self.peak_flops is None else self.flops / median / self.peak_flops
        return {
            "step_s": median,
            "tokens_per_second": rate,
            "tokens_per_second_per_chip": rate / self.chips,
            "mfu": mfu,
            "data_wait": sum(self.data_waits[-len(recent_times) :]) / sum(recent_times),
        }

    def summary(self) -> dict[str, float | None]:
        """Return `first_step_s`, `step_p90_s` (the 90th percentile of the other step times) and `rates()` of all steps.

        Times are in seconds. `first_step_s` is None until the first step has finished, other values until the second.
        """
        sorted_times = sorted(self.step_times)
        p90 = sorted_times[min(len(sorted_times) - 1, math.ceil(0.9 * len(sorted_times)) - 1)] if sorted_times else None
        return {"first_step_s": self.first_step_s, "step_p90_s": p90, **self.rates()}
