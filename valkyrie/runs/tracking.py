"""Writes the metrics of a run: a JSON line per record to the run folder, and to W&B if enabled."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from valkyrie.config.modes import METRICS_FILE
from valkyrie.paths import error_reason, is_disk_full, open_to_append, write_atomic
from valkyrie.problems import Problem, ProblemCode, ProblemError
from valkyrie.runs.wandb_writer import TrackingConfig, WandbWriter, wandb_summary
from valkyrie.units import count_text


def parse_profile_window(window: str) -> tuple[int, int]:
    """Parse a range of steps such as `100-105` to its first and last step. Raises ProblemError if it is malformed."""
    first, dash, last = window.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        text = f"profile={window}: must be the first and the last step to trace, such as profile=100-105."
        raise ProblemError([Problem(ProblemCode.malformed, "profile", window, text)])
    return int(first), int(last)


def profile_problems(window: str | None, steps: int) -> list[Problem]:
    """Return the problems of `profile=window` in a run of `steps` steps. There are none if `window` is None."""
    if window is None:
        return []
    try:
        last = parse_profile_window(window)[1]
    except ProblemError as error:
        return [*error.problems]
    text = f"profile={window}: the last step to trace must be at most steps={steps}."
    return [Problem(ProblemCode.conflict, "profile", window, text)] if last > steps else []


class Tracker:
    """Writes records to `metrics.jsonl` and to W&B. If W&B's server does not answer, W&B runs offline.

    `note` is a line about W&B if it did not start or is offline, else None.

    Args:
        config: Settings of W&B.
        folder: The run folder.
        run_name: Name of the W&B run.
        fields: Config of the W&B run, see `WandbWriter.start`.
        group: Group of the W&B run if `config` sets none.
        start_step: The step that a run continues from. The records of later steps are removed, because those steps are
            repeated. None removes no records.
        is_writer: Whether to write anything. False on processes other than the leader.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        *,
        run_name: str,
        fields: Mapping[str, object],
        group: str,
        start_step: int | None = None,
        is_writer: bool = True,
    ):
        self.folder, self.file, self.note = folder, folder / METRICS_FILE, None
        self._file = self._wandb = None
        self._pending_bytes = b""
        self._uncommitted_step: int | None = None
        if not is_writer:
            return
        open_to_append(self.file).close()  # raises an error for a link before any line is removed
        cut_torn_line(self.file)
        if start_step is not None:
            drop_records_after(self.file, start_step)
        self._file = open_to_append(self.file)
        writer = WandbWriter(config, folder)
        run_id = config.id or f"{run_name}-{folder.resolve().stat().st_ino}"
        group = config.group or group
        self._wandb = writer.start(
            name=run_name, run_id=run_id, group=group, job_type="train", fields=fields, resume="allow"
        )
        is_off = self._wandb is None and writer.note is not None
        self.note = f"{writer.note}; metrics.jsonl is still written." if is_off else writer.note

    @property
    def writes(self) -> bool:
        """Whether this process writes records. Only the leader does."""
        return self._file is not None

    @property
    def is_gone(self) -> bool:
        """Whether `metrics.jsonl` was deleted or cannot be read. False on processes that do not write it."""
        try:
            return self.writes and not self.file.is_file()
        except OSError:  # EIO or ESTALE, for example from an NFS server that has restarted
            return True

    def log(self, record: Mapping[str, object], step: int) -> str | None:
        """Append a record of scalars for a step.

        While the file cannot be written, records are kept in memory and written with the first one that succeeds.
        Returns a message to print when this starts or ends, else None.
        """
        line = self._write({"step": step, **record})
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in record.items() if value is not None}, step=step)
            self._uncommitted_step = step
        return line

    def write_summary(self, values: Mapping[str, object]) -> None:
        """Record values of the whole run, in W&B's summary and as a JSON line without a step.

        First closes the last step at W&B. If it were closed later, its values would replace those of the summary.
        """
        self._write({"summary": values})
        if self._wandb is not None:
            if self._uncommitted_step is not None:
                self._wandb.log({}, step=self._uncommitted_step, commit=True)
                self._uncommitted_step = None
            self._wandb.summary.update(wandb_summary(values))

    @property
    def lost_records_note(self) -> str | None:
        """A line to print about records that were never written, or None if all were."""
        line_count = self._pending_bytes.count(b"\n")
        records = "the last record" if line_count == 1 else f"the last {line_count} records"
        return f"{self.file} lacks {records}, which could not be written to disk" if line_count else None

    def close(self, exit_code: int = 0) -> None:
        """Close the file and the W&B run, with the exit code that W&B shows."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)

    def _write(self, values: Mapping[str, object]) -> str | None:
        """Append a record, after earlier records that could not be written. Returns a message to print, or None.

        `_pending_bytes` can begin within a record, if a write stopped there.
        """
        if self._file is None:
            return None
        was_delayed = bool(self._pending_bytes)
        self._pending_bytes += json.dumps(values).encode() + b"\n"
        try:
            while self._pending_bytes:
                self._pending_bytes = self._pending_bytes[self._file.write(self._pending_bytes) :]
        except OSError as error:
            if was_delayed:
                return None
            remedy = " Free disk space there." if is_disk_full(error) else ""
            return f"cannot write {self.file} ({error_reason(error)}).{remedy} Records are kept in memory."
        return f"{self.file} can be written again, and now has the delayed records" if was_delayed else None


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next record starts on a new line."""
    if not path.is_file():
        return
    complete_bytes = path.read_bytes().rfind(b"\n") + 1
    if complete_bytes < path.stat().st_size:
        os.truncate(path, complete_bytes)


def drop_records_after(path: Path, step: int) -> None:
    """Remove the records of steps after `step`. A run that continues from `step` writes them again."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept_lines = [line for line in lines if _record_step(line, step) <= step]
    if len(kept_lines) < len(lines):
        write_atomic(path, b"".join(kept_lines))


def _record_step(line: bytes, default: int) -> int:
    """Return the step of a record, or `default` if the line has no step or is damaged."""
    try:
        return int(json.loads(line).get("step", default))
    except (ValueError, AttributeError, TypeError):
        return default


def read_metrics(path: Path, say: Callable[[str], object] | None = None) -> list[dict[str, Any]]:
    """Return the records in a `metrics.jsonl`, oldest first, without damaged lines.

    `say` is called with a message about the damaged lines, and with one about an incomplete last line, if any.
    """
    records, damaged_count, is_incomplete = [], 0, False
    with path.open(errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                records.append(record)
            elif line.strip() and line.endswith("\n"):
                damaged_count += 1
            elif line.strip():
                is_incomplete = True
    if damaged_count and say is not None:
        say(f"{path}: skipped {count_text(damaged_count, 'damaged line')}")
    if is_incomplete and say is not None:
        say(f"{path}: skipped the last line, which is incomplete")
    return records
