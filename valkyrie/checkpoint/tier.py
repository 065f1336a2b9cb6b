"""What both tiers of checkpoints do: save in the background, check what was saved, and go on where a save fails."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from valkyrie.checkpoint.contents import shapes_of, tree_of
from valkyrie.checkpoint.place import in_bucket
from valkyrie.checkpoint.steps import METADATA, newest_in
from valkyrie.checksums import write_checksums
from valkyrie.paths import is_full, why
from valkyrie.problems import first_line

_LOOK_S = 0.02
"""A save of several processes is looked at so often while it is waited for."""


class NotSavedError(RuntimeError):
    """A state could not be saved, and the training cannot go on: the message names the newest good checkpoint."""


class Tier(ABC):
    """The checkpoints in one folder: each a train state, the position of its data, and what is needed to judge both.

    Saving returns as soon as the arrays are copied off the devices; `wait` and `close` see it through. A save that
    was interrupted leaves nothing that is taken for a checkpoint. Every checkpoint has the checksums of its files.
    """

    def __init__(self, path: Any, *, cleans: bool, about: Mapping[str, Any], together: bool = False) -> None:
        """`cleans`: whether this process removes what a failed save left. `about` is said in every checkpoint.

        `together`: several processes write each checkpoint, and wait for each other. A save that fails on one of them
        ends it by NotSavedError, and with it the others, which would wait for ever.
        """
        for name in ("asyncio", "gcsfs"):  # every part of a failure is reported at length
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _drop_late_callbacks()
        _reported_errors()
        self.path, self._cleans, self._about, self._together, self._broken = path, cleans, about, together, False
        self._manager = self._open()
        self.last_saved: int | None = self._manager.latest_step()

    label = ""
    """What comes before `checkpoint` in messages."""

    @abstractmethod
    def _open(self) -> Any:
        """Return Orbax's manager of the folder."""

    @abstractmethod
    def _state_args(self, tree: Any) -> Any:
        """Return Orbax's arguments to save the arrays of a state."""

    @abstractmethod
    def _read_args(self, wanted: Any) -> Any:
        """Return Orbax's arguments to read arrays of these shapes and shardings."""

    def _describe(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is said of a state beside its parameters."""
        return {}

    def folder_of(self, step: int) -> Any:
        """Return the folder of a checkpoint."""
        return self.path / str(step)

    def save(
        self, step: int, state: Any, data: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> str | None:
        """Begin to save the state after `step` steps with the position of its data; once a step.

        Returns why a save failed, this one or the one before it; None where none has. A failed save leaves nothing,
        and the next one tries again. `metrics` are those of an evaluation after the same step.
        """
        failed = self.wait()
        if step == self.last_saved:
            return failed
        from orbax.checkpoint import args

        tree = tree_of(state)
        about = {"step": step, "saved": time.strftime("%Y-%m-%d %H:%M:%S %z"), **self._about, **self._describe(tree)}
        about["parameters"] = {path: list(shape) for path, shape in shapes_of(tree["parameters"]).items()}
        content = args.Composite(
            state=self._state_args(tree), data=args.JsonSave(dict(data)), about=args.JsonSave(about)
        )
        self.last_saved = step
        try:
            self._manager.save(step, args=content, metrics=None if metrics is None else dict(metrics))
        except Exception as error:  # Orbax and TensorStore raise many kinds for a disk that is full or gone
            return self._failed(error)
        return failed

    def read(self, step: int, wanted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (arrays by field, data position) of a checkpoint; ValueError where it cannot be read."""
        from orbax.checkpoint import args

        try:
            restored = self._manager.restore(
                step, args=args.Composite(state=self._read_args(wanted), data=args.JsonRestore())
            )
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
            raise ValueError(
                f"the {self.label}checkpoint of step {step} in {self.path} cannot be read ({type(error).__name__}: "
                f"{first_line(error)[:200]}). Delete {self.folder_of(step)} to go on from an older one."
            ) from error
        return restored["state"], dict(restored["data"])

    def reload(self, newest: int | None) -> None:
        """Read the folder anew, of which `newest` is the newest checkpoint to go on from."""
        self._manager.reload()
        self.last_saved = newest

    def wait(self) -> str | None:
        """Return when the save begun is on disk: None, or why it failed."""
        try:
            while self._together and self._manager.is_saving_in_progress():
                self._raise_reported()
                time.sleep(_LOOK_S)
            self._manager.wait_until_finished()
        except Exception as error:  # as in save
            return self._failed(error)
        return None

    def poll(self) -> str | None:
        """Return why a save failed that has ended by now, without waiting for one that has not."""
        if not self._manager.is_saving_in_progress():
            return self.wait()
        if self._together:
            try:
                self._raise_reported()
            except Exception as error:  # as in save
                return self._failed(error)
        return None

    def _raise_reported(self) -> None:
        """Raise the error of a write in the background that failed on this process.

        Orbax itself raises it when the save has ended on all processes, which wait for this one.
        """
        for text, error in _reported_errors():
            if f"{self.path}/" in text:
                raise error

    def close(self) -> None:
        """See saves through and let go of the folder."""
        if self._broken:
            return
        try:
            self._manager.close()
        except Exception as error:  # as in save
            print(self._failed(error), file=sys.stderr)
            self._manager.close()

    def _unfinished(self) -> list[Path]:
        """Return the folders of saves that have not ended; in a bucket Orbax knows them."""
        return [] if in_bucket(self.path) else list(self.path.glob("*.orbax-checkpoint-tmp*"))

    def _write_checksums(self) -> None:
        """Write the checksums of the checkpoint that is about to get its name: Orbax calls this, in its own thread."""
        for unfinished in self._unfinished():
            write_checksums(unfinished, without=(METADATA,))

    def _failed(self, error: Exception) -> str:
        """Return the line about a save that failed, with its unfinished folder removed and Orbax ready for another."""
        step = self.last_saved
        what = f"the {self.label}checkpoint of step {step} could not be saved in {self.path} ({why(error)})"
        if self._together:
            self._broken = True
            raise NotSavedError(f"{what}. All processes end: started again, they go on from the one before.") from error
        _reported_errors().clear()  # they hold the arrays that were not written
        with contextlib.suppress(Exception):  # it raises the same error again
            self._manager.close()
        for unfinished in self._unfinished() if self._cleans else ():
            shutil.rmtree(unfinished, ignore_errors=True)
        self.last_saved = None
        with contextlib.suppress(Exception):  # a bucket that cannot be reached raises many kinds
            self.last_saved = newest_in(self.path)
            if in_bucket(self.path) or self.path.parent.is_dir():
                self._manager = self._open()
        newest = "no good one yet" if self.last_saved is None else f"the newest good one is of step {self.last_saved}"
        remedy = " Free some room there." if is_full(error) else ""
        return f"{what}; {newest}.{remedy}"


@cache
def _reported_errors() -> list[tuple[str, Exception]]:
    """Return the errors that Orbax reports from its threads, as they come, with their texts; none is printed."""
    errors: list[tuple[str, Exception]] = []

    def keep(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, Exception):
            errors.append((record.getMessage(), error))
        return record.levelno >= logging.CRITICAL

    logger = logging.getLogger("absl")
    logger.setLevel(logging.ERROR)
    logger.disabled = False  # Hydra disables the loggers that were there before it
    logger.addFilter(keep)
    return errors


@cache
def _drop_late_callbacks() -> None:
    """Keep off the screen that the loop to which the other writes of a failed save report is gone."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook
