"""Decides what Ctrl-C does: once ends the run after the step in flight, with a save; twice ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

EXIT_STATUS = 130
"""What a shell expects of a command ended by Ctrl-C."""


class Interrupt:
    """A context in which SIGINT and SIGTERM set `requested` instead of raising."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_STATUS)
        self.requested = True
        sys.stderr.write("\nstopping after this step, then saving; once more ends at once without saving\n")
        sys.stderr.flush()
