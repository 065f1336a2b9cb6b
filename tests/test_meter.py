"""Tests of measuring the speed of steps: medians, pauses, and rates."""

from __future__ import annotations

import contextlib

import pytest

from valkyrie.train import meter as module
from valkyrie.train.meter import Meter


class Clock:
    """A fake clock, which tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def finish_steps(meter: Meter, clock: Clock, *seconds: float, pause_s: float = 0.0) -> None:
    for duration in seconds:
        clock.now += duration
        with meter.paused() if pause_s else contextlib.nullcontext():
            clock.now += pause_s
        meter.record_step()


def test_the_first_step_is_separate_and_the_others_are_summarised_by_their_median(clock: Clock) -> None:
    meter = Meter(tokens=1000, chips=4, flops=8e6, peak_flops=1e9)
    meter.start()
    finish_steps(meter, clock, 50.0, 0.1, 0.3, 0.1)
    summary = meter.summary()
    assert summary["first_step_s"] == pytest.approx(50.0)
    assert summary["step_s"] == pytest.approx(0.1)
    assert summary["tokens_per_second"] == pytest.approx(10_000)
    assert summary["tokens_per_second_per_chip"] == pytest.approx(2_500)
    assert summary["mfu"] == pytest.approx(8e6 / 0.1 / 1e9)


def test_a_pause_is_not_part_of_a_step(clock: Clock) -> None:
    meter = Meter(1, 1, 1.0, None)
    meter.start()
    finish_steps(meter, clock, 1.0, 1.0, pause_s=7.0)
    finish_steps(meter, clock, 2.0)
    assert meter.first_step_s == pytest.approx(1.0)
    assert meter.step_times == pytest.approx([1.0, 2.0])


def test_what_happens_before_the_start_is_not_timed(clock: Clock) -> None:
    meter = Meter(1, 1, 1.0, None)
    with meter.paused():
        clock.now += 1000.0
    meter.start()
    finish_steps(meter, clock, 1.0)
    assert meter.first_step_s == pytest.approx(1.0)


def test_p90_is_the_smallest_time_that_90_percent_of_steps_do_not_exceed(clock: Clock) -> None:
    meter = Meter(1, 1, 1.0, None)
    meter.start()
    finish_steps(meter, clock, 99.0, *(0.01 * i for i in range(10, 0, -1)))
    assert meter.summary()["step_p90_s"] == pytest.approx(0.09)


def test_rates_are_computed_from_recent_steps(clock: Clock) -> None:
    meter = Meter(10, 1, 1.0, None)
    meter.start()
    finish_steps(meter, clock, 9.0, 5.0, 5.0, 5.0, 0.5, 0.5)
    assert meter.rates(2)["tokens_per_second"] == pytest.approx(20.0)
    assert meter.rates()["tokens_per_second"] == pytest.approx(2.0)


def test_rates_are_unknown_without_steps_or_peak(clock: Clock) -> None:
    meter = Meter(10, 1, 1.0, None)
    meter.start()
    finish_steps(meter, clock, 1.0)
    assert set(meter.rates().values()) == {None}
    assert meter.summary()["step_p90_s"] is None
    finish_steps(meter, clock, 1.0)
    assert meter.rates()["mfu"] is None
