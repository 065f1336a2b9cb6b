"""The base class of both checkpoint tiers: saves in the background, checks saves and recovers from failed ones."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from valkyrie.checkpoint.contents import CheckpointInfo, parameter_shapes, state_arrays
from valkyrie.checkpoint.location import METADATA_FILE, bucket_errors, finished_steps_in, in_bucket
from valkyrie.checksums import write_checksums
from valkyrie.paths import error_reason, is_disk_full
from valkyrie.problems import first_line

_POLL_S = 0.02
"""Seconds between two polls while waiting for a save by several processes."""


class NotSavedError(RuntimeError):
    """A state could not be saved, so training cannot continue. The message names the checkpoint and its folder."""


class Tier(ABC):
    """The checkpoints in one folder. Each has a train state, its data position, and the metadata to check both.

    `save` returns as soon as the arrays are copied off the devices; `wait` and `close` wait until they are stored. An
    interrupted save is never mistaken for a checkpoint. A checkpoint on a disk has checksums of its files. One in a
    bucket has none, because buckets verify their objects.
    """

    def __init__(self, path: Any, *, cleans_up: bool, info: CheckpointInfo, multiprocess: bool = False) -> None:
        """Open the checkpoint folder.

        Args:
            path: The folder or bucket.
            cleans_up: Whether this process removes the remains of a failed save.
            info: Metadata of the run, stored in every checkpoint.
            multiprocess: Whether each checkpoint is written by several processes, which wait for each other. If a save
                fails on one of them, that process raises NotSavedError and the whole run is aborted, because the others
                would wait forever.

        Raises:
            DiskError: The bucket cannot be reached.
        """
        for name in ("asyncio", "gcsfs"):  # these loggers report every part of a failure at length
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _silence_closed_loop_errors()
        _capture_logged_errors()
        self.path, self._info, self._broken = path, info, False
        self._cleans_up, self._multiprocess = cleans_up, multiprocess
        with bucket_errors(path):
            self._manager = self._open()
            self.last_saved_step: int | None = self._manager.latest_step()

    label: ClassVar[str]
    """Name of the tier in messages: `durable` or `fast`."""

    @abstractmethod
    def _open(self) -> Any:
        """Return the Orbax checkpoint manager of the folder."""

    @abstractmethod
    def _state_args(self, tree: Any) -> Any:
        """Return the Orbax arguments that save the arrays of a state."""

    @abstractmethod
    def _read_args(self, abstract_arrays: Any) -> Any:
        """Return the Orbax arguments that read arrays with the shapes and shardings of `abstract_arrays`."""

    def _make_info(self, arrays: Mapping[str, Any]) -> CheckpointInfo:
        """Return the metadata for a checkpoint of these arrays, with the current time."""
        return replace(
            self._info, saved=time.strftime("%Y-%m-%d %H:%M:%S %z"), parameters=parameter_shapes(arrays["parameters"])
        )

    def folder_of(self, step: int) -> Any:
        """Return the folder of the checkpoint at `step`, which need not exist."""
        return self.path / str(step)

    def save(
        self, step: int, state: Any, data: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> str | None:
        """Start saving the state after `step` steps and its data position, unless that step is already saved.

        Returns an error message if the previous save failed or this one could not be started, else None. `wait` and
        `poll` return later errors of this save. A failed save leaves no files behind, and later saves are attempted as
        usual. With `multiprocess`, raises NotSavedError instead of returning a message.

        Args:
            step: Number of finished steps.
            state: The train state.
            data: Position in the data, from `Loader.state`.
            metrics: Results of an evaluation after the same step, for `keep_best`, or None.
        """
        error_message = self.wait()
        if step == self.last_saved_step:
            return error_message
        from orbax.checkpoint import args

        arrays = state_arrays(state)
        info = replace(self._make_info(arrays), step=step).as_json()
        content = args.Composite(
            state=self._state_args(arrays), data=args.JsonSave(dict(data)), about=args.JsonSave(dict(info))
        )
        self.last_saved_step = step
        try:
            self._manager.save(step, args=content, metrics=None if metrics is None else dict(metrics))
        except Exception as error:  # Orbax and TensorStore raise many kinds of errors if a disk is full or gone
            return self._recover(error)
        return error_message

    def read(self, step: int, abstract_arrays: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, object]]:
        """Return (arrays by field of the train state, data position) of a checkpoint.

        `abstract_arrays` has the shapes and shardings of the arrays to read. Raises ValueError if they cannot be read.
        """
        from orbax.checkpoint import args

        try:
            restored = self._manager.restore(
                step, args=args.Composite(state=self._read_args(abstract_arrays), data=args.JsonRestore())
            )
        except Exception as error:  # Orbax and TensorStore raise many kinds of errors for damaged files
            raise ValueError(
                f"The {self.label} checkpoint at step {step} in {self.path} cannot be read ({type(error).__name__}: "
                f"{first_line(error)[:200]}). Delete {self.folder_of(step)} to continue from an older one."
            ) from error
        return restored["state"], dict(restored["data"])

    def reload(self, newest_step: int | None) -> None:
        """Rescan the folder after checkpoints were moved or deleted on disk.

        Sets `last_saved_step` to the step `newest_step` (None if no checkpoint is left).
        """
        self._manager.reload()
        self.last_saved_step = newest_step

    def wait(self) -> str | None:
        """Wait until the current save is on disk. Returns the error message if it failed, or None."""
        try:
            while self._multiprocess and self._manager.is_saving_in_progress():
                self._raise_reported_error()
                time.sleep(_POLL_S)
            self._manager.wait_until_finished()
        except Exception as error:  # as in save
            return self._recover(error)
        return None

    def poll(self) -> str | None:
        """Return the error message of a save that has failed, or None. Does not wait for a save in progress."""
        if not self._manager.is_saving_in_progress():
            return self.wait()
        if self._multiprocess:
            try:
                self._raise_reported_error()
            except Exception as error:  # as in save
                return self._recover(error)
        return None

    def _raise_reported_error(self) -> None:
        """Raise the error of a background write that failed on this process.

        Orbax itself raises it only after the save has ended on all processes, and the others wait for this one.
        """
        for text, error in _capture_logged_errors():
            if f"{self.path}/" in text:
                raise error

    def close(self) -> None:
        """Wait for saves to finish, then release the folder. Prints the error message of a save that failed."""
        if self._broken:
            return
        try:
            self._manager.close()
        except Exception as error:  # as in save
            print(self._recover(error), file=sys.stderr)
            self._manager.close()

    def _unfinished_folders(self) -> list[Path]:
        """Return the folders of unfinished saves. Empty for a bucket, where Orbax itself tracks them."""
        return [] if in_bucket(self.path) else list(self.path.glob("*.orbax-checkpoint-tmp*"))

    def _write_checksums(self) -> None:
        """Write the checksums of a checkpoint just before Orbax renames its temporary folder to the step.

        Orbax calls this in its own thread.
        """
        for folder in self._unfinished_folders():
            write_checksums(folder, excluded=(METADATA_FILE,))

    def _recover(self, error: Exception) -> str:
        """Remove the remains of a failed save, reopen Orbax for the next save, and return the error message.

        With `multiprocess`, only raises NotSavedError.
        """
        step = self.last_saved_step
        name = f"The {self.label} checkpoint at step {step}"
        failure = f"{name} could not be saved in {self.path} ({error_reason(error)})"
        if self._multiprocess:
            self._broken = True
            raise NotSavedError(
                f"{failure}. All processes stop. Start them again to continue from the previous checkpoint, if there "
                "is one."
            ) from error
        _capture_logged_errors().clear()  # they hold the arrays that were not written
        with contextlib.suppress(Exception):  # it raises the same error again
            self._manager.close()
        with contextlib.suppress(OSError):  # the disk may be gone
            for folder in self._unfinished_folders() if self._cleans_up else ():
                shutil.rmtree(folder, ignore_errors=True)
        self.last_saved_step, newest_note = None, "earlier checkpoints cannot be listed"
        with contextlib.suppress(Exception):  # an unreachable bucket raises many kinds of errors
            self.last_saved_step = max(finished_steps_in(self.path), default=None)
            newest_note = "there is no earlier checkpoint"
            if self.last_saved_step is not None:
                newest_note = f"the newest saved checkpoint is at step {self.last_saved_step}"
            if in_bucket(self.path) or self.path.parent.is_dir():
                self._manager = self._open()
        remedy = " Free some space there." if is_disk_full(error) else ""
        return f"{failure}; {newest_note}.{remedy}"


@cache
def _capture_logged_errors() -> list[tuple[str, Exception]]:
    """Return the list of errors that Orbax's threads have logged, as (message, error).

    The first call installs a log filter that adds them to this list and hides their messages.
    """
    errors: list[tuple[str, Exception]] = []

    def collect(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, Exception):
            errors.append((record.getMessage(), error))
        return record.levelno >= logging.CRITICAL

    logger = logging.getLogger("absl")
    logger.setLevel(logging.ERROR)
    logger.disabled = False  # Hydra disables loggers that were created before it
    logger.addFilter(collect)
    return errors


@cache
def _silence_closed_loop_errors() -> None:
    """Silence the error "Event loop is closed", which the remaining writes of a failed save raise."""
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous_hook(unraisable)

    sys.unraisablehook = hook
