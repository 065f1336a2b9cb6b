"""Exit statuses of `valkyrie-train`, and the one function that ends a process at once.

Python's normal exit may wait for other processes. `records_ending` registers a recorder of the reason, for example for
a trial of a sweep.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

DONE = 0
"""A training that reached its last step."""
REFUSED = 2
"""A mistake of the user. Also the status of the processes that end because one of them found it."""
DOES_NOT_FIT = 3
"""A run that needs more memory than its devices have. Recorders get this status; the process ends with REFUSED."""
LOST = 69
"""A process hangs, or another one hangs or was lost. Start all of them again."""
PREEMPTED = 75
"""A training has saved its state because its machine is being taken away. Start it again (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Ctrl-C. Shells use this status too."""

EXIT_S = 20.0
"""Seconds for the exit of a process that failed."""

_recorders: list[Callable[[int, str], object]] = []


@contextlib.contextmanager
def records_ending(record: Callable[[int, str], object]) -> Iterator[None]:
    """Call `record` with exit status and reason if the process ends itself inside this context."""
    _recorders.append(record)
    try:
        yield
    finally:
        _recorders.remove(record)


def end_process(status: int, reason: str) -> NoReturn:
    """Record the reason and end the process with this exit status, from any thread."""
    for record in _recorders if status else ():
        with contextlib.suppress(OSError):
            record(status, reason)
    os._exit(REFUSED if status == DOES_NOT_FIT else status)


def limit_exit(status: int, seconds: float = EXIT_S) -> None:
    """End the process with this status if its exit takes longer than `seconds` after the main thread has ended.

    Python waits for threads at exit, and those of storage libraries retry for minutes on a bucket that cannot be
    reached or a disk without free inodes.
    """

    def wait() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=wait, name="limit of the exit", daemon=True).start()


def describe_status(status: int) -> str:
    """Describe an exit status as `subprocess` returns it: `with status 1`, `by SIGKILL`."""
    if status >= 0:
        return f"with status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"
