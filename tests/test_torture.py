"""Tests of a training run whose processes are killed at random moments: it ends like an undisturbed one.

`VALKYRIE_KILLS=50 VALKYRIE_SEED=3 pytest -m slow tests/test_torture.py` kills more often, with another seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import TINY_ARGUMENTS, assert_same_bits, saved_arrays, training_records
from valkyrie.runs.tracking import read_metrics

KILLS = int(os.environ.get("VALKYRIE_KILLS", "4"))
SEED = int(os.environ.get("VALKYRIE_SEED", "0"))
PROCESSES = 2
FAST_INTERVAL = 4
"""Steps between fast checkpoints."""
LAUNCHED_S = 12.0
"""Approximate seconds from a launch to its first step. Half of the kills happen in this time."""


def launch(folder: Path, steps: int, *saving: str) -> subprocess.Popen[bytes]:
    """Start the training run `run` in `folder` under the launcher, with its output in `output.txt`.

    `saving` are overrides that set when checkpoints are saved.
    """
    training = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", f"steps={steps}", "name=run", *saving]
    command = [sys.executable, "-m", "valkyrie.cli.launch", "target=local", f"processes={PROCESSES}"]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [*command, "--restarts", "1000", "--", *training], cwd=folder, stdout=output, stderr=output
        )


def workers(launcher: int) -> dict[int, int]:
    """Return the process IDs of the launcher's workers by process index."""
    parents, indices = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                variables = dict(v.partition("=")[::2] for v in (entry / "environ").read_text().split("\0"))
                if "-m\0valkyrie.cli.train" in (entry / "cmdline").read_text():
                    indices[int(entry.name)] = int(variables["JAX_PROCESS_INDEX"])
        except (OSError, KeyError, ValueError, IndexError):  # it ended meanwhile, or is none of ours
            continue
    return {index: pid for pid, index in indices.items() if _descends(pid, launcher, parents)}


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        pid = parents.get(pid, 0)
        if pid == ancestor:
            return True
    return False


def last_step(folder: Path) -> int:
    """Return the last step in the log of a training run, or 0 if there is none yet."""
    file = folder / "runs" / "run" / "metrics.jsonl"
    return max((r.get("step", 0) for r in read_metrics(file)), default=0) if file.is_file() else 0


def lost_steps(output: str) -> list[int]:
    """Return how many finished steps each restart repeats, from the launcher's output."""
    lost, logged_step = [], 0
    for line in output.splitlines():
        if logged := re.match(r"step (\d+)/", line):
            logged_step = int(logged[1])
        elif line.startswith("continuing run") and (restart := re.search(r"from step (\d+)", line)):
            lost.append(logged_step - int(restart[1]))
    return lost


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * KILLS)
def test_random_kills_do_not_change_the_result(tmp_path: Path):
    steps, rng = 30 * KILLS + 30, random.Random(SEED)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = launch(tmp_path / "whole", steps, "checkpoint=final")
    assert undisturbed.wait(200 + 2 * KILLS) == 0, (tmp_path / "whole/output.txt").read_text()
    saving = (f"checkpoint.every={5 * FAST_INTERVAL - 1}", f"checkpoint.fast.every={FAST_INTERVAL}")
    launcher = launch(tmp_path / "killed", steps, *saving, f"checkpoint.fast.folder={tmp_path / 'fast'}")
    kills = []
    try:
        for _ in range(KILLS):
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, LAUNCHED_S))
            else:
                goal, deadline = last_step(tmp_path / "killed") + rng.randint(1, 12), time.monotonic() + 120
                while last_step(tmp_path / "killed") < goal and time.monotonic() < deadline and launcher.poll() is None:
                    time.sleep(0.02)
            index = rng.randrange(PROCESSES)
            kill_signal = rng.choice([signal.SIGKILL, signal.SIGTERM])
            deadline = time.monotonic() + 60
            while index not in (pids := workers(launcher.pid)) and time.monotonic() < deadline:
                if launcher.poll() is not None:
                    break
                time.sleep(0.05)
            if launcher.poll() is not None:  # a fast machine is done before the last kill
                break
            with contextlib.suppress(ProcessLookupError):  # it ended in this moment
                os.kill(pids[index], kill_signal)
                kills.append((index, kill_signal.name, last_step(tmp_path / "killed")))
        assert launcher.wait(300) == 0, (kills, (tmp_path / "killed/output.txt").read_text()[-3000:])
    finally:
        launcher.kill()
        launcher.wait()
    assert kills, "nothing was killed"
    lost = lost_steps((tmp_path / "killed/output.txt").read_text())
    assert lost and max(lost) <= 2 * FAST_INTERVAL + 1, (lost, kills)  # one may be killed in the middle of a save
    whole_run, killed_run = (tmp_path / name / "runs" / "run" for name in ("whole", "killed"))
    whole_records, killed_records = training_records(whole_run), training_records(killed_run)
    assert whole_records.keys() == killed_records.keys() == set(range(1, steps + 1)), kills
    assert all(whole_records[step]["loss"] == killed_records[step]["loss"] for step in whole_records), kills
    assert_same_bits(saved_arrays(whole_run), saved_arrays(killed_run))
