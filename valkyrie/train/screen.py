"""Progress output of a run: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from valkyrie.paths import is_disk_full


def make_console(file: TextIO | None = None) -> Console:
    """Return the console of a command, or a console that writes to `file`.

    Prints texts as they are: rich would remove `[x,y]` and replace `:x:`. Output to a file or a pipe is 140 columns
    wide. That of a command is flushed after every line.
    """
    is_terminal = file is None and sys.stdout.isatty()
    if file is None and not is_terminal and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return _Console(
        file=file,
        width=None if is_terminal else 140,
        soft_wrap=True,
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=None if file is None else False,  # in a notebook, rich would not write to the file
    )


class _Console(Console):
    """A console that raises BrokenPipeError for a closed pipe instead of exiting."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Screen:
    """A progress bar with loss, rate, MFU and time left.

    In a file or a pipe: one line for each logged step (`StepMetrics.is_logged`), without a bar.

    `is_closed`: whether the terminal or the reader of the output (such as `head`) is gone. Further output is dropped.

    Args:
        console: Where to print.
        steps: Number of steps of the whole run.
        start_step: Number of steps that are finished at the start.
        simulated: Whether to mark rates as simulated.
    """

    def __init__(self, console: Console, steps: int, start_step: int, simulated: bool) -> None:
        self.console, self._steps, self._simulated = console, steps, simulated
        self.is_closed, self._disk_full = False, False
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=start_step, text="")

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show_step(self, step: int, record: Mapping[str, float | None], *, print_line: bool) -> None:
        """Show a finished step in the bar. Without a terminal, print it if `print_line` is true."""
        text = self.describe(record)
        with self._detecting_closed_output():
            self._bar.update(self._task, completed=step, text=text)
            if print_line and not self.console.is_terminal:
                self.console.print(f"step {step}/{self._steps}  {text}")

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line above the bar, in a style of rich such as `yellow`."""
        with self._detecting_closed_output():
            self.console.print(text, style=style, soft_wrap=True)

    @contextlib.contextmanager
    def _detecting_closed_output(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_disk_full(error):  # stdout is a file on a full disk: training is worth more than its output
                if not self._disk_full:
                    _warn("cannot write to stdout (no space left on device); training continues without printing")
                self._disk_full = True
                return
            # A closed pipe (EPIPE) or a terminal that is gone (EIO): the trainer saves before it stops.
            self.is_closed = True
            _warn("stdout is closed: saving and stopping after this step")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def describe(self, record: Mapping[str, float | None]) -> str:
        """Format a record, such as `loss 3.2145  12,000 tokens/s  MFU 41.2%`. Leaves out unknown rates."""
        parts = [f"loss {record['loss']:.4f}"]
        rate, mfu = record.get("tokens_per_second"), record.get("mfu")
        if rate is not None:
            parts.append(f"{rate:,.0f} tokens/s{' simulated' if self._simulated else ''}")
        if mfu is not None:
            parts.append(f"MFU {100 * mfu:.1f}%")
        return "  ".join(parts)


def _warn(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
