"""Exclusive locks of open files, which end with the processes that have them; some file systems have none."""

from __future__ import annotations

import fcntl
from enum import Enum
from typing import IO, Any


class Lock(Enum):
    """What asking for a lock comes to: it is ours, another process has it, or the file system has no locks."""

    ours = "ours"
    another = "another"
    unsupported = "unsupported"


def lock(file: IO[Any], *, wait: bool = True) -> Lock:
    """Lock an open file until it is closed here and in every process that inherited it.

    With `wait` the answer is never `another`. On network file systems without locks (Lustre without `-o flock`, NFS
    without a lock daemon) it is `unsupported`: callers go on without, and say so where that matters.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return Lock.another
    except OSError:
        return Lock.unsupported
    return Lock.ours
