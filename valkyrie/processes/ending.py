"""Exit statuses of `valkyrie-train`, and functions that end a process without Python's normal exit.

Python's normal exit may wait for other processes or for threads. `on_process_end` registers a function that
`end_process` calls with the reason, for example to write it to the record of a trial.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

EXIT_DONE = 0
"""The training reached its last step."""
USER_CODE_FAILED = 1
"""A user's module raised an error. The other processes of the run exit with `EXIT_LOST`."""
EXIT_REFUSED = 2
"""A setting or argument is wrong, or a file cannot be read or written. All processes of the run exit with this
status."""
OUT_OF_MEMORY = 3
"""The run does not fit into device memory. Not an exit status: `end_process` passes it to the functions registered with
`on_process_end`, then exits with `EXIT_REFUSED`."""
EXIT_LOST = 69
"""A process hangs, or another process of the run failed. Start all processes again."""
EXIT_PREEMPTED = 75
"""The machine is being preempted (EX_TEMPFAIL). The training stopped, after saving if a step had finished. Start it
again."""
EXIT_INTERRUPTED = 130
"""The user stopped the process with Ctrl-C or closed its terminal, or SIGTERM ended a command that does not train.
Shells report Ctrl-C with the same status."""

EXIT_LIMIT_S = 20.0
"""Seconds that a failed process may take for Python's normal exit. Then `limit_exit` ends it."""

_end_callbacks: list[Callable[[int, str], object]] = []


@contextlib.contextmanager
def on_process_end(callback: Callable[[int, str], object]) -> Iterator[None]:
    """Call `callback(status, reason)` if `end_process` ends the process inside this context."""
    _end_callbacks.append(callback)
    try:
        yield
    finally:
        _end_callbacks.remove(callback)


def end_process(status: int, reason: str) -> NoReturn:
    """End the process immediately, without cleaning up. May be called from any thread.

    First calls the functions registered with `on_process_end`, unless `status` is 0. The exit status is `status`,
    except that `OUT_OF_MEMORY` becomes `EXIT_REFUSED`.
    """
    for callback in _end_callbacks if status else ():
        with contextlib.suppress(OSError):
            callback(status, reason)
    os._exit(EXIT_REFUSED if status == OUT_OF_MEMORY else status)


def limit_exit(status: int, limit_s: float = EXIT_LIMIT_S) -> None:
    """End the process with this status if its exit takes longer than `limit_s` seconds.

    Python waits for threads and thread pools at exit, and those of storage libraries retry for minutes on a bucket that
    cannot be reached or a disk without free inodes.
    """
    # The main thread counts as alive until all thread pools have finished. The idle worker of a pool ends earlier: when
    # Python begins to exit.
    pool = ThreadPoolExecutor(1)
    idle_worker = pool.submit(threading.current_thread).result()

    def wait(pool: ThreadPoolExecutor = pool) -> None:  # holds the pool, whose worker ends with it
        idle_worker.join()
        time.sleep(limit_s)
        os._exit(status)

    threading.Thread(target=wait, name="limit of the exit", daemon=True).start()


@contextlib.contextmanager
def limit_failed_exit() -> Iterator[None]:
    """Call `limit_exit` if the code in this context raises SystemExit with a nonzero status, or another exception.

    Use it only in the entry points of processes. It would also end a test that calls a command as a function.
    """
    try:
        yield
    except BaseException as error:
        status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status:
            limit_exit(status)
        raise


def describe_status(status: int) -> str:
    """Describe an exit status of `subprocess`, such as `with status 1` or `by SIGKILL`."""
    if status >= 0:
        return f"with status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"
