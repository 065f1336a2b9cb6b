"""Several processes of one run: teams that meet in threads, and trainings started side by side."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runs import start
from valkyrie.processes.hub import free_port
from valkyrie.processes.team import Connected, Place, Team


def free_address() -> str:
    """Return an unused address of this machine."""
    return f"127.0.0.1:{free_port()}"


def meet(
    count: int, of: Callable[[Team], Any], *, counts: Sequence[int] | None = None, timeout_s: float = 5.0
) -> list[Any]:
    """Return the results or ValueErrors of `of` for each of `count` teams that meet in threads.

    `counts` has the number of processes that each thread expects, if they differ.
    """
    address, results = free_address(), [None] * count

    def one(index: int) -> None:
        place = Place(address, (counts or [count] * count)[index], index)
        try:
            team = Connected(place, timeout_s=timeout_s, heartbeat_s=20.0, on_loss=lambda line, status: None)
            results[index] = of(team)
            team.fail(1, "the test is over")
        except ValueError as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def several(count: int, *overrides: str, cwd: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """Start the processes of one training."""
    given = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": str(count)}
    return [start(*overrides, cwd=cwd, **given, JAX_PROCESS_INDEX=str(index), **environment) for index in range(count)]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for processes and return (status, stdout, stderr) of each. Kill them if one does not end."""
    try:
        return [(p.wait(200), *p.communicate()) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
