"""Ends this process at once, without Python's own end, which may wait for other processes.

A process with somebody who waits for its reason, as a sweep does for its trials, registers a recorder first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

_recorders: list[Callable[[int, str], object]] = []


@contextlib.contextmanager
def records_ending(record: Callable[[int, str], object]) -> Iterator[None]:
    """Call `record` with exit status and reason where the process ends itself inside this context."""
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
    os._exit(status)
