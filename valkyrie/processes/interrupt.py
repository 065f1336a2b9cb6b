"""Signal handling. Ctrl-C ends a command immediately; a training run first finishes its step and saves.

A second Ctrl-C ends the run immediately. SIGTERM, Slurm's SIGUSR1 and a closed terminal (SIGHUP) stop a run like the
first Ctrl-C, and have no effect once it is stopping. With several processes, any of them may receive the signal: JAX's
preemption service forwards it and chooses the step after which all of them stop.

By default, Python raises KeyboardInterrupt in the main thread. If that thread is in a garbage collector callback or a
finalizer, both of which JAX has, Python prints the exception and continues. Therefore a separate thread handles signals
here (`signal.set_wakeup_fd`).
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
from types import FrameType

from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_PREEMPTED, end_process

_SHOW_CURSOR = b"\x1b[?25h\n"


@contextlib.contextmanager
def on_signals(react: Callable[[int], None], signals: Sequence[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Call `react(signal)` in a separate thread for each signal, whatever the main thread is doing.

    In nested contexts, only the innermost one handles signals. Does nothing if called outside of the main thread, where
    Python does not allow signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    previous_handlers = {
        signum: signal.signal(signum, _no_op_handler)
        for signum in signals
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN  # nohup ignores SIGHUP
    }

    def listen() -> None:
        while numbers := receiver.recv(64):
            for signum in numbers:
                if signum in previous_handlers:
                    react(signum)

    previous_wakeup_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_wakeup_fd)
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)
        sender.close()
        thread.join()
        receiver.close()


class Interrupt:
    """Stops a training run on SIGINT, SIGTERM, SIGUSR1 or SIGHUP. A second SIGINT ends the process at once.

    Until `has_progress` is set, the first signal also ends the process immediately, except SIGTERM with `multiprocess`,
    which JAX handles. Otherwise, it would not be possible to stop a first step that never finishes because devices wait
    for each other.

    With `multiprocess`, the process sends itself SIGTERM after the first signal, so that JAX's preemption service stops
    all processes after the same step.
    """

    def __init__(self, *, multiprocess: bool = False) -> None:
        self.stop_requested = False
        """Whether this process received a signal to stop.

        With `multiprocess`, `force` in `should_stop` also sets it, but SIGTERM does not, because JAX handles it.
        """
        self.has_progress = False
        """Set by the training loop once a step has finished."""
        self.is_preempted = False
        """Whether SIGTERM or SIGUSR1, the signals of a preemption, caused the stop.

        With `multiprocess`, also true if only other processes received a signal, even if that was SIGINT.
        """
        self._ctrl_c_pressed = False
        self._restored_step: int | None = None
        self._find_newest_step: Callable[[], int | None] | None = None
        self._step = 0
        self._multiprocess = multiprocess
        signals = (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
        self._signals = signals if multiprocess else (*signals, signal.SIGTERM)

    def handle_signals(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that handles the signals. With `multiprocess`, JAX handles SIGTERM."""
        return on_signals(self._stop, self._signals)

    @contextlib.contextmanager
    def clean_up_on_signals(self) -> Iterator[None]:
        """Let the code in this context clean up before a signal ends the process. For code before the first step."""
        try:
            with signals_as_exceptions(self._signals):
                yield
        except KeyboardInterrupt as error:
            self._stop(signal.Signals[str(error) or "SIGINT"])  # Python's own handler names no signal
            raise

    def set_checkpoints(self, restored_step: int | None, find_newest_step: Callable[[], int | None] | None) -> None:
        """Set the checkpoints that the message about an immediate stop mentions.

        Args:
            restored_step: Step of the checkpoint that the training continues from, or None without one.
            find_newest_step: Returns the step of the newest complete checkpoint, or None if there is none. Pass None
                instead of a function if the checkpoints are in a bucket, which may not respond.
        """
        self._restored_step, self._find_newest_step = restored_step, find_newest_step

    def should_stop(self, step: int, *, force: bool = False) -> bool:
        """Return whether to stop after this step. The result is the same on all processes.

        All processes must call this at every step. `force` requests a stop without a signal.
        """
        self._step = step
        if not self._multiprocess:
            return self.stop_requested or force
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        if force and not self.stop_requested:
            self.stop_requested = True
            os.kill(os.getpid(), signal.SIGTERM)
        if not reached_preemption_sync_point(step):
            return False
        self.is_preempted = self.is_preempted or not self.stop_requested
        return True

    def _stop(self, signum: int) -> None:
        is_ctrl_c = signum == signal.SIGINT
        if self.stop_requested and not is_ctrl_c:
            return
        if not self.has_progress or (is_ctrl_c and self._ctrl_c_pressed):
            with contextlib.suppress(OSError):
                os.write(2, f"\nvalkyrie-train: {self._describe_loss()}\n".encode())
            show_cursor()
            is_preempted = signum in (signal.SIGTERM, signal.SIGUSR1)
            end_process(EXIT_PREEMPTED if is_preempted else EXIT_INTERRUPTED, "stopped by a signal")
        self._ctrl_c_pressed = is_ctrl_c
        if not self.stop_requested:
            self.stop_requested, self.is_preempted = True, signum in (signal.SIGTERM, signal.SIGUSR1)
            if self._multiprocess:
                os.kill(os.getpid(), signal.SIGTERM)
        advice = " Press Ctrl-C again to stop immediately without saving." if is_ctrl_c else ""
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write(f"\nstopping after this step, then saving.{advice}\n")
            sys.stderr.flush()

    def _describe_loss(self) -> str:
        """Return the message of an immediate stop: which step is lost, if any, and which checkpoint remains."""
        if not self.stop_requested:
            kept_text = f"; the checkpoint at step {self._restored_step} is kept" if self._restored_step else ""
            return f"stopped before the first step, so there is nothing to save{kept_text}"
        lost_text = f"stopped at once; step {self._step} was not saved."
        if self._find_newest_step is None:
            return lost_text
        newest_step = self._find_newest_step()
        if newest_step == self._step:
            return f"stopped at once; step {self._step} was saved."
        return f"{lost_text} Newest checkpoint: {'none' if newest_step is None else f'step {newest_step}'}"


def show_cursor() -> None:
    """Show the terminal's cursor again, which a progress bar or spinner hides, for processes that do not clean up."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), _SHOW_CURSOR)


def repair_std_streams() -> None:
    """Make printing safe if a standard stream is closed or cannot encode a character.

    Redirects a closed stream to /dev/null. Otherwise the next file to be opened would get its descriptor, and libraries
    would print into that file. Characters that the terminal cannot encode are printed as `?`.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(descriptor), mode))
    for stream in (sys.stdout, sys.stderr):
        # `surrogateescape` is set by LC_ALL=C.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def exit_on_ctrl_c(command: str) -> contextlib.AbstractContextManager[None]:
    """Return a context where Ctrl-C prints a message that names `command`, and ends the process immediately."""
    return on_signals(lambda _: _end(command))


@contextlib.contextmanager
def clean_up_on_signals(command: str) -> Iterator[None]:
    """Like `exit_on_ctrl_c`, for more signals, but let the code in this context clean up before the process ends."""
    try:
        with signals_as_exceptions():
            yield
    except KeyboardInterrupt:
        _end(command)


def _end(command: str) -> None:
    show_cursor()
    with contextlib.suppress(OSError):  # the terminal, or the reader of a pipe, may be gone
        os.write(2, f"{command}: stopped\n".encode())
    end_process(EXIT_INTERRUPTED, "stopped by a signal")


@contextlib.contextmanager
def signals_as_exceptions(
    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
) -> Iterator[None]:
    """Raise KeyboardInterrupt on these signals, for code that must clean up before it ends.

    The message of the exception is the name of the signal, or empty if Python's own handler raises it for SIGINT.
    Replaces only the system's default handlers and those of `on_signals`. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {n: signal.getsignal(n) for n in signals}
    replaced_handlers = {
        n: handler for n, handler in previous_handlers.items() if handler in (signal.SIG_DFL, _no_op_handler)
    }
    for signum in replaced_handlers:
        signal.signal(signum, _raise_keyboard_interrupt)
    previous_wakeup_fd = signal.set_wakeup_fd(-1) if signal.SIGINT in replaced_handlers else None
    try:
        yield
    finally:
        for signum, handler in replaced_handlers.items():
            signal.signal(signum, handler)
        if previous_wakeup_fd is not None:
            signal.set_wakeup_fd(previous_wakeup_fd)


def _raise_keyboard_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(signum).name)


def _no_op_handler(signum: int, frame: FrameType | None) -> None:
    """Do nothing. Python writes a signal to the wakeup socket only if the signal has a Python handler."""
