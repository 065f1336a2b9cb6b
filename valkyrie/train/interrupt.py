"""Ctrl-C: once ends the run after the current step, with a save; twice ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

EXIT_STATUS = 130
"""What a shell expects of a command ended by Ctrl-C."""

_SHOW_CURSOR = b"\x1b[?25h\n"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context in which SIGINT and SIGTERM set `requested` instead of raising.

    A thread hears the signals (`signal.set_wakeup_fd`): the main thread may be inside a long step, where Python runs
    no handler, and the second Ctrl-C must not wait for it. With `signals=False` nothing is taken over and nothing
    is ever requested: a notebook's own handler stays.
    """

    def __init__(self, signals: bool = True) -> None:
        self.requested = False
        self._signals = signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if not self._signals:
            return self
        self._hear, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, _heard_elsewhere)
        self._wakeup = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="interrupt", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._signals:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._tell.close()
        self._thread.join()
        self._hear.close()

    def _listen(self) -> None:
        while numbers := self._hear.recv(64):
            for number in numbers:
                if number in _SIGNALS:
                    self._stop()

    def _stop(self) -> None:
        if self.requested:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)  # the live bar hides it
            os._exit(EXIT_STATUS)
        self.requested = True
        sys.stderr.write("\nstopping after this step, then saving; once more ends at once without saving\n")
        sys.stderr.flush()


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process inside, where nothing can be lost and Python would only act on it minutes later."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """Be a Python handler, without which a signal does not reach the thread."""
