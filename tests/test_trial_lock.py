"""Tests of locks on trials and run folders: one process holds a lock, and no unrelated process is killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from helpers import compose_run
from runs import ONE_DEVICE_ARGUMENTS, run_train
from sweeps import FakeMultirun
from valkyrie.processes.locks import LockState, TrialLock, lock, write_lock
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.process import TrialProcess

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def test_the_process_id_of_an_earlier_attempt_is_deleted(tmp_path: Path):
    """Otherwise, the old ID remains if a later sweep dies before it records the process of its own trial.

    By then, the old ID may belong to an unrelated process, which the next sweep would kill.
    """
    stranger = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        earlier_lock = TrialLock.acquire(tmp_path)
        assert earlier_lock is not None
        earlier_lock.hand_over(stranger.pid)
        earlier_lock.release()
        next_lock = TrialLock.acquire(tmp_path)
        assert next_lock is not None
        next_lock._sweep_file.close()  # its process is alive and holds the other lock, but its ID is unknown
        assert TrialLock.acquire(tmp_path) is None
        assert stranger.poll() is None
        next_lock.process_file.close()
        last_lock = TrialLock.acquire(tmp_path)
        assert last_lock is not None
        last_lock.release()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_is_ended_if_its_id_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = TrialPlan("k", "trial", "show", tmp_path, (), None, run=compose_run(*ONE_DEVICE_ARGUMENTS))
    monkeypatch.setattr(TrialPlan, "command", SLEEP)
    lock = TrialLock.acquire(plan.trial_folder)
    assert lock is not None
    pids: list[int] = []

    def full(pid: int) -> None:
        pids.append(pid)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "hand_over", full)
    with pytest.raises(OSError, match="No space left"):
        TrialProcess(plan, lock)
    lock.release()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path):
    with (tmp_path / "file").open("w") as first, (tmp_path / "file").open("w") as other:
        assert lock(first) is LockState.acquired
        assert lock(other, wait=False) is LockState.held
        first.close()
        assert lock(other, wait=False) is LockState.acquired


def test_a_file_system_without_locks_does_not_end_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    multirun = FakeMultirun(tmp_path)
    multirun.activate(monkeypatch)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert run_train(*multirun.arguments("partition=dp,fsdp")) == 0
    assert [trial.status.value for trial in multirun.trials().values()] == ["ok", "ok"]
    assert capfd.readouterr().err.count("(flock)") == 1


def test_a_run_folder_has_one_writer_at_a_time(tmp_path: Path):
    refusal = rf"run is in use by process {os.getpid()} on .*Wait for it, or use an"
    with write_lock(tmp_path / "run"), pytest.raises(ValueError, match=refusal), write_lock(tmp_path / "run"):
        pass
    with write_lock(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (None, None),
        ({"host": "elsewhere", "pid": 7}, r"process 7 on elsewhere.* If that process has ended, delete .*\.writer\."),
        ({"host": socket.gethostname(), "pid": os.getppid()}, f"process {os.getppid()} on "),
        ({"host": socket.gethostname(), "pid": 2**22 + 1}, None),
        ({"host": socket.gethostname()}, None),
    ],
)
def test_the_writer_is_looked_up_by_process_id_without_file_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: dict[str, Any] | None, message: str | None
):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    if writer is not None:
        (tmp_path / ".writer").write_text(json.dumps(writer))
    with nullcontext() if message is None else pytest.raises(ValueError, match=message), write_lock(tmp_path):
        assert json.loads((tmp_path / ".writer").read_text())["pid"] == os.getpid()
