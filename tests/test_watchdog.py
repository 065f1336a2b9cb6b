"""Tests of the watchdog: it notices a hanging step, prints all processes' stacks, and the training restarts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helpers import compose_run
from processes import free_address, run_teams, wait_for_processes
from runs import TINY_ARGUMENTS, start_python
from valkyrie.processes.ending import EXIT_LOST
from valkyrie.processes.team import ALONE, Team
from valkyrie.runs.tracking import read_metrics
from valkyrie.train.watchdog import FIRST_STEP_LIMIT_S, HANG_FACTOR, Watchdog, make_watchdog


class SimulatedWatchdog:
    """A watchdog on a simulated clock. It checks once per simulated second."""

    def __init__(self, limit_s: float) -> None:
        self.now = 0.0
        self.watchdog = Watchdog(limit_s, clock=lambda: self.now, end=lambda status, reason: None)
        self.watchdog._poll_s = 1.0

    def run_until_hang(self, seconds: float) -> float | None:
        """Advance the clock by up to `seconds`, until the watchdog reports a hang.

        Returns the simulated seconds until then, or None if it reports no hang.
        """
        start = self.now
        while self.now - start < seconds:
            self.now += 1.0
            if self.watchdog.check():
                return self.now - start
        return None

    def take_steps(self, count: int, seconds: float) -> None:
        """Take `count` steps of `seconds` each and begin the next."""
        for step in range(1, count + 2):
            self.watchdog.begin_step(step)
            assert step > count or self.run_until_hang(seconds) is None


def test_a_step_that_takes_longer_than_the_limit_hangs():
    clock = SimulatedWatchdog(60.0)
    clock.take_steps(10, seconds=2.0)
    hung_after = clock.run_until_hang(1000)
    assert hung_after is not None and 60 < hung_after < 65
    line = clock.watchdog.check()
    assert line is not None and line.startswith("step 11 ") and "2 s each" in line


def test_a_step_may_take_twenty_times_the_median():
    clock = SimulatedWatchdog(60.0)
    clock.take_steps(10, seconds=50.0)
    hung_after = clock.run_until_hang(5000)
    assert hung_after is not None and HANG_FACTOR * 50 < hung_after < HANG_FACTOR * 50 + 5


def test_the_first_step_may_take_half_an_hour():
    clock = SimulatedWatchdog(60.0)
    clock.watchdog.begin_step(7)
    hung_after = clock.run_until_hang(2 * FIRST_STEP_LIMIT_S)
    assert hung_after is not None and FIRST_STEP_LIMIT_S < hung_after < FIRST_STEP_LIMIT_S + 5


def test_saving_and_evaluating_have_no_time_limit():
    clock = SimulatedWatchdog(60.0)
    clock.take_steps(10, seconds=2.0)
    with clock.watchdog.paused():
        assert clock.run_until_hang(10_000) is None
    assert clock.run_until_hang(10_000) is None  # the end comes, or the next step
    clock.watchdog.begin_step(12)
    assert clock.run_until_hang(10_000) is not None


def test_time_while_the_process_is_suspended_is_not_counted():
    clock = SimulatedWatchdog(60.0)
    clock.take_steps(10, seconds=2.0)
    assert clock.run_until_hang(30) is None
    clock.now += 100_000
    assert clock.watchdog.check() is None
    assert clock.run_until_hang(100) is not None


def test_notebooks_and_nan_searches_are_never_ended(tmp_path: Path):
    run = compose_run(*TINY_ARGUMENTS, "mesh=1x1x1")
    watchdog = make_watchdog(run, ALONE, tmp_path, True)
    assert watchdog._limit_s == 600 and watchdog._remedy.endswith(f"valkyrie-train resume={tmp_path}")
    assert make_watchdog(run, ALONE, tmp_path, False)._limit_s is None
    assert (
        make_watchdog(compose_run(*TINY_ARGUMENTS, "mesh=1x1x1", "debug=nans"), ALONE, tmp_path, True)._limit_s is None
    )
    assert compose_run(*TINY_ARGUMENTS, "mesh=1x1x1", "distributed.step_timeout_s=null")


def test_a_limit_of_zero_is_refused():
    run = compose_run(*TINY_ARGUMENTS, "mesh=1x1x1")
    run.config.distributed.step_timeout_s = 0.0
    assert [problem.key for problem in run.problems()] == ["distributed.step_timeout_s"]


HANGING_PROGRAM = """
import sys, time
from pathlib import Path
from valkyrie.train.watchdog import Watchdog

def where_it_hangs():
    time.sleep(60)

with Watchdog(0.3, log=Path(sys.argv[1])) as watchdog:
    for step in range(1, 4):
        watchdog.begin_step(step)
    where_it_hangs()
"""


def test_a_hanging_process_prints_its_stacks_and_ends(tmp_path: Path):
    log = tmp_path / "logs" / "process-0.log"
    start = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", HANGING_PROGRAM, str(log)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == EXIT_LOST and time.monotonic() - start < 30
    for text in (result.stderr, log.read_text()):
        assert "step 3 or" in text and "in where_it_hangs" in text
    assert "distributed.step_timeout_s" in result.stderr.splitlines()[-1]


def test_a_hang_is_announced_to_the_others_who_check_first():
    reports: dict[int, str] = {}

    def hang(team: Team) -> None:
        team.on_hang = lambda line: reports.update({team.index: line})
        team.wait("a step")
        if team.index == 1:
            team.fail(EXIT_LOST, "step 3 hangs")
        deadline = time.monotonic() + 10
        while len(reports) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)

    run_teams(3, hang)
    assert set(reports) == {0, 2}
    assert reports[2].startswith("process 2: ") and "process 1" in reports[2] and reports[2].endswith("step 3 hangs")


HANGING_TRAINING = textwrap.dedent("""
    import os, sys, time
    from valkyrie.train.program import StepProgram

    place, calls = StepProgram.place, []

    def place_or_hang(self, batch):
        calls.append(1)
        hangs = os.environ.get("JAX_PROCESS_INDEX") == "1" and os.environ.get("VALKYRIE_LAUNCH_RESTARTS", "0") == "0"
        if len(calls) == 30 and hangs:
            time.sleep(600)
        return place(self, batch)

    StepProgram.place = place_or_hang
    from valkyrie.cli.train import main
    main()
""")
TRAINING = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "name=run", "distributed.step_timeout_s=15"]


@pytest.mark.slow
def test_all_processes_print_their_stacks_and_end_if_one_hangs(tmp_path: Path):
    variables = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": "2"}
    script = tmp_path / "hangs.py"
    script.write_text(HANGING_TRAINING)
    processes = [
        start_python(str(script), *TRAINING, "steps=60", cwd=tmp_path, JAX_PROCESS_INDEX=str(index), **variables)
        for index in range(2)
    ]
    first, second = wait_for_processes(processes)
    assert (first[0], second[0]) == (EXIT_LOST, EXIT_LOST), (first, second)
    logs = tmp_path / "runs/run/logs"
    for text in (first[2], (logs / "process-0.log").read_text(), (logs / "process-1.log").read_text()):
        assert " hangs: " in text and "in fit" in text, text
    assert "in place_or_hang" in (logs / "process-1.log").read_text()
    assert "in place_or_hang" not in first[2]


@pytest.mark.slow
def test_the_launcher_restarts_a_hanging_training(tmp_path: Path):
    script = tmp_path / "hangs.py"
    script.write_text(HANGING_TRAINING)
    words = ["target=local", "processes=2", "--restarts", "1", "--", *TRAINING, "checkpoint.every=10", "steps=60"]
    launch = f"from valkyrie.cli.launch import main; main({words!r}, command=({sys.executable!r}, {str(script)!r}))"
    ((status, out, err),) = wait_for_processes([start_python("-c", launch, cwd=tmp_path)])
    assert status == 0, err
    assert "status 69" in err and "(1 of 1)" in err and "from step 20" in out
    steps = [record["step"] for record in read_metrics(tmp_path / "runs/run/metrics.jsonl") if "loss" in record]
    assert sorted(set(steps)) == list(range(1, 61))
