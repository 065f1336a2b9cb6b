"""Metrics: one JSON line per record in the run folder, and W&B if enabled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from valkyrie.paths import error_reason, is_full, open_to_append, write_atomic
from valkyrie.problems import Problem, ProblemCode, ProblemError
from valkyrie.runs.wandb_writer import TrackingConfig, WandbWriter, wandb_summary


def profile_window(window: str) -> tuple[int, int]:
    """Return the first and the last step of `profile=100-105`. Raises ProblemError for any other form."""
    first, dash, last = window.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        text = f"profile={window}: write the first and the last step to trace, such as profile=100-105."
        raise ProblemError([Problem(ProblemCode.malformed, "profile", window, text)])
    return int(first), int(last)


def profile_problems(window: str | None, steps: int) -> list[Problem]:
    """Return the problems of a window of steps to trace in a training of `steps` steps."""
    try:
        last = 0 if window is None else profile_window(window)[1]
    except ProblemError as error:
        return [*error.problems]
    text = f"profile={window}: the training ends with step {steps} (steps={steps})."
    return [Problem(ProblemCode.conflict, "profile", window, text)] if last > steps else []


class Tracker:
    """Writes records to `metrics.jsonl` and to W&B, offline if its server does not answer.

    `note` is a line about a W&B that did not start, or None. `start` is the step from which a run continues: records of
    later steps are removed, because those steps are repeated. With `write=False`, for processes other than the leader,
    nothing is written.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        *,
        run_name: str,
        fields: Mapping[str, object],
        group: str,
        start: int | None = None,
        write: bool = True,
    ):
        self.folder, self.file, self.note = folder, folder / "metrics.jsonl", None
        self._file = self._wandb = None
        self._unwritten = b""
        self._open_step: int | None = None
        if not write:
            return
        open_to_append(self.file).close()  # refuses a link, before a line is removed
        cut_torn_line(self.file)
        if start is not None:
            drop_after(self.file, start)
        self._file = open_to_append(self.file)
        writer = WandbWriter(config, folder)
        run_id = config.id or f"{run_name}-{folder.resolve().stat().st_ino}"
        group = config.group or group
        self._wandb = writer.start(
            name=run_name, run_id=run_id, group=group, job_type="train", fields=fields, resume="allow"
        )
        failed = self._wandb is None and writer.note is not None
        self.note = f"{writer.note}; metrics.jsonl is written all the same." if failed else writer.note

    @property
    def writes(self) -> bool:
        """Whether records are written at all."""
        return self._file is not None

    @property
    def gone(self) -> bool:
        """Whether the file was deleted, with its folder or its disk."""
        return self.writes and not self.file.is_file()

    def log(self, record: Mapping[str, object], step: int) -> str | None:
        """Append a record of scalars with its step.

        Returns a line to print when records can no longer be written, and when the waiting ones have been written.
        """
        line = self._write({"step": step, **record})
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in record.items() if value is not None}, step=step)
            self._open_step = step
        return line

    def summary(self, values: Mapping[str, object]) -> None:
        """Set values of the whole run: in W&B's summary, and as a last JSON line without a step.

        The last step at W&B is closed first. Otherwise closing it later would overwrite equal keys of the summary.
        """
        self._write({"summary": values})
        if self._wandb is not None:
            if self._open_step is not None:
                self._wandb.log({}, step=self._open_step, commit=True)
                self._open_step = None
            self._wandb.summary.update(wandb_summary(values))

    @property
    def lost(self) -> str | None:
        """A line about records that could not be written, or None."""
        lines = self._unwritten.count(b"\n")
        return f"{self.file} lacks its last {lines} lines: the disk did not take them" if lines else None

    def close(self, exit_code: int = 0) -> None:
        """Flush and close both sinks."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)

    def _write(self, values: Mapping[str, object]) -> str | None:
        """Append a line after those that a full disk has delayed, the first of which may be half written."""
        if self._file is None:
            return None
        waited = bool(self._unwritten)
        self._unwritten += json.dumps(values).encode() + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            remedy = "; free some room there" if is_full(error) else ""
            return None if waited else f"{self.file} cannot be written ({error_reason(error)}): its lines wait{remedy}"
        return f"{self.file} is written again, with the lines that waited" if waited else None


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next record begins a line."""
    if not path.is_file():
        return
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)


def drop_after(path: Path, step: int) -> None:
    """Remove the records of steps after `step`, the checkpoint from which a run continues."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    earlier = [line for line in lines if _step_of(line, step) <= step]
    if len(earlier) < len(lines):
        write_atomic(path, b"".join(earlier))


def _step_of(line: bytes, otherwise: int) -> int:
    """Return the step of a record, or `otherwise` if it is missing or damaged."""
    try:
        return int(json.loads(line).get("step", otherwise))
    except (ValueError, AttributeError, TypeError):
        return otherwise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, oldest first. Skips damaged and incomplete lines."""
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
