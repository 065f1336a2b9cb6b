"""Tests of `valkyrie-launch target=local`: it starts, ends and restarts processes together.

The processes run small scripts instead of a training run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from valkyrie.launch.supervisor import RESTARTS_VARIABLE, Supervisor, local_processes
from valkyrie.processes.team import INDEX_VARIABLE

HEAD = f"""
import os, pathlib, signal, sys, time
index, starts = int(os.environ.get("{INDEX_VARIABLE}", 0)), int(os.environ["{RESTARTS_VARIABLE}"])
def alive(pid=os.getpid()):
    pathlib.Path(f"new-{{starts}}-{{index}}").write_text(str(pid))
    os.rename(f"new-{{starts}}-{{index}}", f"pid-{{starts}}-{{index}}")
def others_alive(count=3):
    while len(list(pathlib.Path().glob(f"pid-{{starts}}-*"))) < count: time.sleep(0.01)
def on(number, status):
    def end(*_): print(f"{{index}} saved", flush=True); os._exit(status)
    signal.signal(number, end)
"""


def child_command(code: str) -> list[str]:
    """Return the command of a child process with this Python code."""
    return [sys.executable, "-S", "-E", "-c", HEAD + code]


def run(code: str, processes: int = 3, restarts: int = 2, **settings: Any) -> int:
    """Run `code` in child processes under a `Supervisor`, and return its exit status.

    `settings` are further arguments of `Supervisor`.
    """
    settings = {"grace_s": 0.1, "notice_s": 10.0, "min_uptime_s": 0.0, **settings}
    return Supervisor(
        lambda starts: local_processes(child_command(code), processes), restarts, Path("logs"), **settings
    ).run()


def is_gone(pid: int) -> bool:
    """Return True if a process has ended. A zombie has ended too: init may not have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def pids() -> list[int]:
    return [int(file.read_text()) for file in Path().glob("pid-*") if file.read_text()]


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    wait_until(lambda: all(is_gone(pid) for pid in pids()))


def test_every_process_gets_the_others_and_each_start_a_new_port(capfd: Any):
    code = """
with open(f"env-{index}", "a") as file:
    print(os.environ["JAX_COORDINATOR_ADDRESS"], os.environ["JAX_PROCESS_COUNT"], file=file)
print("index", index, flush=True)
alive(); others_alive()
sys.exit(0 if starts else 1)
"""
    assert run(code) == 0
    lines = [Path(f"env-{index}").read_text().splitlines() for index in range(3)]
    assert lines[0] == lines[1] == lines[2] and len(set(lines[0])) == 2
    assert all(line.startswith("127.0.0.1:") and line.endswith(" 3") for line in lines[0])
    out = capfd.readouterr().out
    assert out == "index 0\nindex 0\n"
    assert Path("logs/process-2.log").read_text() == "index 2\nindex 2\n"


def test_one_process_gets_no_cluster_settings():
    assert run(f'sys.exit(3 if "{INDEX_VARIABLE}" in os.environ else 0)', processes=1) == 0


def test_a_killed_worker_ends_the_others_and_all_restart(capfd: Any):
    code = """
alive()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
others_alive()
if starts: sys.exit(0)
if index == 1:
    print("the last words of 1", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    assert run(code) == 0
    cause, log, last_line, restart = capfd.readouterr().err.splitlines()
    assert all(part in cause for part in ("process 1 ", "SIGKILL", "processes 0, 2"))
    assert "logs/process-1.log" in log and last_line == "  the last words of 1"
    assert "(1 of 2)" in restart and len(pids()) == 6


def test_a_process_that_fails_in_consequence_is_not_reported_as_the_first(capfd: Any):
    code = """
alive(); others_alive()
if index == 2: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(1)
"""
    assert run(code, restarts=0, grace_s=10.0) in (1, 137)
    err = capfd.readouterr().err
    (cause,) = [line for line in err.splitlines() if "process " in line]
    assert "process 2 " in cause and "SIGKILL" in cause and cause.count("the first of 3") == 1
    assert "the limit of --restarts 0 is reached" in err


def test_a_process_that_lost_a_peer_is_not_reported_as_the_first_to_fail(capfd: Any):
    code = """
alive(); others_alive()
if index == 0: sys.exit(69)
time.sleep(0.05)
sys.exit(3 if index == 2 else 69)
"""
    assert run(code, restarts=0, grace_s=10.0) == 3
    (cause,) = [line for line in capfd.readouterr().err.splitlines() if "process " in line]
    assert "process 2 " in cause and "status 3" in cause


def test_launching_stops_after_the_allowed_crashes(capfd: Any):
    assert run("alive(); others_alive(); sys.exit(7)") == 7
    assert len(pids()) == 9
    assert "--restarts 2" in capfd.readouterr().err


@pytest.mark.parametrize("status", [pytest.param(2, marks=pytest.mark.slow), 130])
def test_a_mistake_or_ctrl_c_causes_no_restart(status: int, capfd: Any):
    assert run(f'alive(); others_alive(); print("why", file=sys.stderr); sys.exit({status})', grace_s=10.0) == status
    assert len(pids()) == 3
    assert capfd.readouterr().err.count("why") == 1


def test_a_mistake_that_only_one_process_reports_is_shown(capfd: Any):
    code = """
alive(); others_alive()
if index == 2: print("data.paths=missing"); sys.exit(2)
time.sleep(60)
"""
    assert run(code) == 2
    cause, log, last_line = capfd.readouterr().err.splitlines()
    assert all(part in cause for part in ("process 2 ", "status 2", "processes 0, 1"))
    assert "logs/process-2.log" in log and last_line == "  data.paths=missing"


def test_a_preemption_does_not_count_as_a_crash(capfd: Any):
    code = "alive(); others_alive(); time.sleep(0.02 * index); sys.exit(0 if starts == 3 else 75)"
    assert run(code, restarts=0) == 0
    assert capfd.readouterr().err.count("preempted") == 3 and len(pids()) == 4 * 3
    assert run("sys.exit(75)", restarts=1, min_uptime_s=5.0) == 75


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[Any]:
    """A function that starts `valkyrie-launch target=local` with children that run the given code.

    It returns the launcher's process once every child has called `alive`.
    """
    with contextlib.ExitStack() as stack:

        def start(code: str, processes: int = 3, *flags: str) -> subprocess.Popen[str]:
            program = f"from valkyrie.cli.launch import main; main(command={child_command(code)!r})"
            words = ["target=local", f"processes={processes}", *flags, "--", "name=mine"]
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True, start_new_session=True
                )
            )
            stack.callback(process.kill)
            wait_until(lambda: len(pids()) == processes)
            return process

        yield start


SAVE_ON_SIGNAL = "on(signal.SIGINT, 130); on(signal.SIGTERM, 75); alive(); time.sleep(60)"
IGNORE_SIGNALS = """
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
alive()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 75)]
)
def test_a_signal_is_forwarded_and_all_processes_save(start_launcher: Any, number: int, status: int):
    process = start_launcher(SAVE_ON_SIGNAL)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == status
    assert "processes 0, 1, 2 " in err and len(pids()) == 3
    assert Path("runs/mine.launch/process-1.log").read_text() == "1 saved\n"


@pytest.mark.slow
def test_a_second_ctrl_c_kills_processes_that_ignored_the_first(start_launcher: Any):
    process = start_launcher(IGNORE_SIGNALS)
    os.kill(process.pid, signal.SIGINT)
    for line in process.stderr:
        if "processes 0, 1, 2 " in line:
            break
    assert process.poll() is None and not any(is_gone(pid) for pid in pids())
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "processes 0, 1, 2 " in err


# Only Linux can end a process together with its parent (PR_SET_PDEATHSIG), and the launcher promises it only there.
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed process")
def test_children_end_if_the_launcher_is_killed(start_launcher: Any):
    process = start_launcher(IGNORE_SIGNALS)
    process.kill()
    wait_until(lambda: all(is_gone(pid) for pid in pids()))


def test_processes_started_by_a_child_end_with_it():
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
alive(child.pid); others_alive(2)
sys.exit(1)
"""
    assert run(code, processes=2, restarts=0) == 1
    assert len(pids()) == 2
