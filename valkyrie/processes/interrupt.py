"""Ctrl-C: ends a command at once; a training after its step, with a save, and at once when pressed again.

SIGTERM, Slurm's SIGUSR1 and a terminal that is gone (SIGHUP) end a training as Ctrl-C does. Of several processes each
may be the one that hears it: JAX's preemption service hands it on, and names the step after which all of them stop.

Python would raise KeyboardInterrupt wherever the main thread is. Raised inside a callback of the garbage collector or a
finaliser it is printed and lost, and JAX has both: here a thread hears the signals (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from valkyrie.processes.ending import INTERRUPTED, PREEMPTED, end_process

_SHOW_CURSOR = b"\x1b[?25h\n"


class Listener:
    """A context in which a thread calls `react` for each of the signals, whatever the main thread is doing.

    Listeners nest: the inner one hears. Outside the main thread, where Python takes no handlers, it does nothing.
    """

    def __init__(self, react: Callable[[int], None], signals: Sequence[int] = (signal.SIGINT,)) -> None:
        self._react = react
        self._signals = signals
        self._before: dict[int, Any] = {}
        self._listening = False

    def __enter__(self) -> Listener:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._hear, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        for number in self._signals:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                self._before[number] = signal.signal(number, _heard_elsewhere)
        self._wakeup = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="interrupt", daemon=True)
        self._thread.start()
        self._listening = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._listening:
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
                if number in self._before:
                    self._react(number)


class Interrupt:
    """A context in which SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask a training to stop; the second ends the process.

    Until `worth_saving` is set, the first one ends it: a first step that never ends, as where devices wait for each
    other, could not be stopped otherwise.
    With `signals=False` nothing is taken over and nothing is ever requested: a notebook's own handler stays.
    With `several` processes the first is handed to JAX's preemption service, which takes SIGTERM itself.
    """

    def __init__(self, signals: bool = True, *, several: bool = False) -> None:
        self.requested = False
        self.worth_saving = False
        self.preempted = False
        """Whether the machine is taken away, rather than that a user stops the training."""
        self._several = several
        heard = [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
        self._listener = Listener(self._stop, heard if several else [*heard, signal.SIGTERM]) if signals else None

    def __enter__(self) -> Interrupt:
        if self._listener is not None:
            self._listener.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.__exit__(kind, error, trace)

    def stops_at(self, step: int, *, also: bool = False) -> bool:
        """Return whether the training stops after this step: all processes get the same answer, at every step.

        `also` asks for it on this process, without a signal.
        """
        if not self._several:
            return self.requested or also
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        if also and not self.requested:
            self.requested = True
            os.kill(os.getpid(), signal.SIGTERM)
        if not reached_preemption_sync_point(step):
            return False
        self.preempted = self.preempted or not self.requested
        return True

    def _stop(self, number: int) -> None:
        preempted = number in (signal.SIGTERM, signal.SIGUSR1)
        if self.requested or not self.worth_saving:
            if not self.requested:
                with contextlib.suppress(OSError):
                    os.write(2, b"\nvalkyrie-train: stopped before a step was done: there is nothing to save\n")
            show_cursor()
            end_process(PREEMPTED if preempted else INTERRUPTED, "stopped by a signal")
        self.requested, self.preempted = True, preempted
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write("\nstopping after this step, then saving; once more ends at once without saving\n")
            sys.stderr.flush()


def show_cursor() -> None:
    """Show the cursor of a terminal again, which a live bar hides, before the process is ended as it is."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)


def usable_streams() -> None:
    """Make the standard streams such that printing cannot fail for their sake.

    A closed one becomes /dev/null: else the next file that is opened takes its number, and what libraries print goes
    into that file. What the encoding of a terminal lacks is printed as `?`.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(number), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def ends_at_once(command: str) -> Listener:
    """Return a context in which Ctrl-C says that the command stopped and ends the process."""

    def end(number: int) -> None:
        os.write(2, f"{command}: stopped\n".encode())
        end_process(INTERRUPTED, "stopped by a signal")

    return Listener(end)


@contextlib.contextmanager
def raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt inside, for what has to be put in order first; SIGTERM and SIGHUP too.

    Signals that somebody else handles are left to them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    ours = {n: h for n, h in before.items() if h in (signal.SIG_DFL, _heard_elsewhere)}
    for number in ours:
        signal.signal(number, _raise)
    wakeup = signal.set_wakeup_fd(-1) if signal.SIGINT in ours else None
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        if wakeup is not None:
            signal.set_wakeup_fd(wakeup)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _heard_elsewhere(number: int, frame: FrameType | None) -> None:
    """Be a Python handler, without which a signal does not reach the thread."""
