"""Starts the processes of one run, as threads of this process or as subprocesses that train."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runs import start_training
from valkyrie.processes.hub import free_port
from valkyrie.processes.team import ConnectedTeam, ProcessInfo, Team


def free_address() -> str:
    """Return an unused loopback address, `host:port`."""
    return f"127.0.0.1:{free_port()}"


def run_teams(
    count: int,
    run_process: Callable[[Team], Any],
    *,
    expected_counts: Sequence[int] | None = None,
    timeout_s: float = 5.0,
) -> list[Any]:
    """Connect `count` processes, each simulated by a thread with its own `Team`, and call `run_process` with each team.

    Returns the results of `run_process` by process index. If connecting or `run_process` raises ValueError, the error
    is returned in place of the result. `expected_counts` are the process counts that the teams expect, by default
    `count` for each.
    """
    address, results = free_address(), [None] * count

    def run_team(index: int) -> None:
        process_info = ProcessInfo(address, (expected_counts or [count] * count)[index], index)
        try:
            team = ConnectedTeam(process_info, timeout_s=timeout_s, heartbeat_s=20.0, on_loss=lambda line, status: None)
            results[index] = run_process(team)
            team.fail(1, "the test is over")
        except ValueError as error:
            results[index] = error

    threads = [threading.Thread(target=run_team, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def start_processes(count: int, *overrides: str, cwd: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """Start `count` processes of one training run on this machine, with extra environment variables."""
    cluster = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": str(count)}
    return [
        start_training(*overrides, cwd=cwd, **cluster, JAX_PROCESS_INDEX=str(index), **environment)
        for index in range(count)
    ]


def wait_for_processes(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Return (status, stdout, stderr) of each process.

    If one takes more than 200 s, kills all of them and raises subprocess.TimeoutExpired.
    """
    try:
        return [(p.wait(200), *p.communicate()) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
