"""valkyrie-launch target=local with real trainings: a worker killed by hand costs nothing but time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import TINY
from valkyrie.tracking import read_metrics

TRAINING = [*TINY, "mesh=2x1x1", "partition=dp", "steps=200", "checkpoint.every=20", "name=mine"]


def launched(folder: Path) -> subprocess.Popen[str]:
    """The command with two processes, in a folder of its own."""
    folder.mkdir()
    words = ["target=local", "processes=2", "--restarts", "1", "--", *TRAINING]
    return subprocess.Popen(
        [sys.executable, "-m", "valkyrie.cli.launch", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step, the last one that was done where a step was done twice."""
    metrics = read_metrics(folder / "runs" / "mine" / "metrics.jsonl")
    return {int(row["step"]): row["loss"] for row in metrics if "loss" in row}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_worker_killed_by_hand_costs_nothing_but_time(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = launched(whole)
    assert (undisturbed.communicate(timeout=180), undisturbed.returncode)[1] == 0

    running = launched(killed)
    until = time.monotonic() + 120
    while not list((killed / "runs" / "mine" / "checkpoints").glob("20")):
        assert time.monotonic() < until and running.poll() is None
        time.sleep(0.05)
    _, worker = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    out, _ = running.communicate(timeout=180)
    assert running.returncode == 0, out
    assert "process 1 ended by SIGKILL, first of 2" in out and "starting again (1 of 1)" in out
    (went_on,) = re.findall(r"continuing mine from step (\d+) to step 200", out)
    assert int(went_on) >= 20
    assert losses(killed) == losses(whole) and len(losses(whole)) == 200
