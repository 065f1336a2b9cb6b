"""Step times and throughput. Compilation, evaluation, saving and logging stop the clock."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator


class Meter:
    """The durations of finished steps, in seconds. The first is kept apart: it pays for warming up."""

    def __init__(self, tokens: int, chips: float | int, flops: float, peak_flops: float | None) -> None:
        """`tokens` and `flops` are those of one step; `peak_flops` is that of all chips together, None if unknown."""
        self.tokens, self.chips, self.flops, self.peak_flops = tokens, chips, flops, peak_flops
        self.first: float | None = None
        self.steps: list[float] = []
        self._since = time.perf_counter()
        self._paused = 0.0

    def start(self) -> None:
        """Begin to time the next step now."""
        self._since, self._paused = time.perf_counter(), 0.0

    def finished(self) -> float:
        """Record that a step has finished, and return its seconds since the one before it (or since `start`)."""
        now = time.perf_counter()
        taken = now - self._since - self._paused
        self._since, self._paused = now, 0.0
        if self.first is None:
            self.first = taken
        else:
            self.steps.append(taken)
        return taken

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the time of the step around it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def rates(self, window: int | None = None) -> dict[str, float | None]:
        """Return tokens/s, tokens/s/chip and MFU by the median of the last `window` steps (None: all steps)."""
        recent = self.steps[-window:] if window else self.steps
        if not recent:
            return {"step_s": None, "tokens_per_second": None, "tokens_per_second_per_chip": None, "mfu": None}
        median = statistics.median(recent)
        rate = self.tokens / median
        mfu = None if self.peak_flops is None else self.flops / median / self.peak_flops
        return {
            "step_s": median,
            "tokens_per_second": rate,
            "tokens_per_second_per_chip": rate / self.chips,
            "mfu": mfu,
        }

    def summary(self) -> dict[str, float | None]:
        """Return first step, median and 90th percentile of the others, and the rates by the median."""
        ordered = sorted(self.steps)
        p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)] if ordered else None
        return {"first_step_s": self.first, "step_p90_s": p90, **self.rates()}
