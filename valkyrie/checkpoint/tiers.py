"""Saves and restores the checkpoints of a run in two tiers, durable and (if configured) fast."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from valkyrie.checkpoint.config import CheckpointConfig
from valkyrie.checkpoint.contents import (
    PARAMETERS_ONLY,
    CheckpointInfo,
    inspect_checkpoint,
    parameter_shapes,
    read_info,
    refuse_other_model,
    refuse_other_state,
    refuse_other_tokenizer,
    state_arrays,
)
from valkyrie.checkpoint.durable import DurableTier
from valkyrie.checkpoint.fast import FastTier, fast_folder
from valkyrie.checkpoint.location import (
    IDENTITY_FILE,
    all_steps_in,
    checkpoint_root,
    finished_steps_in,
    in_bucket,
    missing_remedy,
)
from valkyrie.checksums import CHECKSUMS_FILE
from valkyrie.paths import write_atomic
from valkyrie.problems import Problem
from valkyrie.processes.team import ALONE, Team


class RestoredCheckpoint(NamedTuple):
    """A restored checkpoint.

    Args:
        step: Number of finished steps.
        state: The train state. If `valkyrie-convert` wrote the checkpoint, all fields except `parameters` are None.
        data: Position in the data, for `Loader.restore`.
        source: Text that names the checkpoint and says why it was used.
    """

    step: int
    state: Any
    data: Mapping[str, object]
    source: str


class Checkpoints:
    """The checkpoints of one run folder: durable ones and, if configured, fast ones.

    All processes call the same methods. With `read_only`, only durable checkpoints are opened and nothing is changed.
    `info` is the metadata that all checkpoints of the run share. Checkpoints with a tokenizer other than
    `info.tokenizer` are refused.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        read_only: bool = False,
        team: Team = ALONE,
        info: CheckpointInfo | None = None,
    ) -> None:
        self._folder, self._team, self._read_only, self._complete = folder, team, read_only, False
        self._info = info = info or CheckpointInfo({})
        self.durable = DurableTier(folder, config, read_only=read_only, team=team, info=info)
        self.fast: FastTier | None = None
        if config.fast.every is None and not read_only and team.is_leader:
            (folder / IDENTITY_FILE).unlink(missing_ok=True)  # older fast checkpoints become stale from here on
        if config.fast.every is not None and not read_only:
            identity = team.broadcast_from_leader("run identity", lambda: _ensure_identity(folder))
            path = fast_folder(config.fast, folder, identity)
            self.fast = FastTier(path / f"process-{team.index}", config.fast, team.index, info=info)

    @property
    def last_durable_step(self) -> int | None:
        """The step of the newest durable checkpoint, saved or being saved, or None if there is none."""
        return self.durable.last_saved_step

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint of either tier, saved or being saved, or None if this process has none."""
        steps = [tier.last_saved_step for tier in (self.durable, self.fast) if tier is not None]
        return max((step for step in steps if step is not None), default=None)

    def newest_complete_step(self) -> int | None:
        """Return the step of the newest checkpoint that either tier has finished saving, or None if there is none."""
        paths = [tier.path for tier in (self.durable, self.fast) if tier is not None]
        return max((step for path in paths for step in finished_steps_in(path)), default=None)

    def save(
        self, step: int, state: Any, data: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> str | None:
        """Start saving a durable checkpoint. Returns an error message or None (see `Tier.save`)."""
        return self.durable.save(step, state, data, metrics)

    def save_fast(self, step: int, state: Any, data: Mapping[str, Any]) -> str | None:
        """Start saving a fast checkpoint. Returns an error message, or None (also if the run has no fast tier)."""
        return None if self.fast is None else self.fast.save(step, state, data)

    def restore(
        self, abstract_state: Any, *, changed_settings: Mapping[str, tuple[str, str]] | None = None
    ) -> RestoredCheckpoint:
        """Restore a checkpoint like `try_restore`, but raise ValueError instead of returning None."""
        restored = self.try_restore(abstract_state, changed_settings=changed_settings)
        if restored is None:
            raise ValueError(f"{self.durable.path} has no finished checkpoint. {missing_remedy(self._folder)}")
        return restored

    def try_restore(
        self, abstract_state: Any, *, changed_settings: Mapping[str, tuple[str, str]] | None = None
    ) -> RestoredCheckpoint | None:
        """Restore the newest undamaged checkpoint that all processes can read.

        Returns None if there is no durable checkpoint and no usable fast one. Fast checkpoints of another layout or
        model are skipped. Unless read-only, moves the damaged durable checkpoints that it finds aside, and deletes
        fast checkpoints that are damaged or of a later step than the restored one.

        Raises ValueError if all durable checkpoints are damaged and no fast one is usable, if the chosen checkpoint
        cannot be read or has another tokenizer, or if it is durable and does not fit the model or optimizer. The
        message says what to change.

        Args:
            abstract_state: Shapes and shardings of the train state.
            changed_settings: (requested, saved) value of each setting that differs from the saved run, by key.
        """
        abstract_arrays = state_arrays(abstract_state)
        fast_step, reason = self._newest_common_fast_step(abstract_arrays)
        durable_step = self._newest_undamaged_durable_step(needed=fast_step is None)
        restored = None
        if self.fast is not None and fast_step is not None and (durable_step is None or fast_step > durable_step):
            path = self.fast.folder_of(fast_step)
            refuse_other_tokenizer(path, read_info(path).tokenizer, self._info.tokenizer, self.fast.label)
            arrays, data = self.fast.read(fast_step, abstract_arrays)
            durable_note = (
                "there is no durable one"
                if durable_step is None
                else f"the newest durable one is at step {durable_step}"
            )
            source = f"the fast checkpoint at step {fast_step} in {self.fast.path}; {durable_note}"
            restored = RestoredCheckpoint(fast_step, abstract_state._replace(**arrays), data, source)
        elif durable_step is not None:
            restored = self._read_durable(durable_step, abstract_state, changed_settings or {}, reason)
        elif reason and self._team.is_leader:
            print(f"Starting at step 0: there is no durable checkpoint yet{reason}", file=sys.stderr)
        if self.fast is not None:
            self.fast.delete_after(0 if restored is None else restored.step)
        return restored

    def _read_durable(
        self, step: int, abstract_state: Any, changed_settings: Mapping[str, tuple[str, str]], reason: str
    ) -> RestoredCheckpoint:
        """Read a durable checkpoint. `reason` is appended to `RestoredCheckpoint.source`.

        Raises ValueError if the checkpoint cannot be read, if it was saved at another step, or if its model, tokenizer
        or optimizer differs from the run's.
        """
        abstract_arrays, path = state_arrays(abstract_state), self.durable.folder_of(step)
        info = read_info(path)
        if info.step not in (None, step):
            raise ValueError(
                f"The durable checkpoint at step {step} in {path.parent} was saved at step {info.step}, so its folder "
                f"has been renamed. Rename {path} to {info.step}."
            )
        refuse_other_tokenizer(path, info.tokenizer, self._info.tokenizer)  # first, because it may set the vocabulary
        refuse_other_model(path, info.parameters, parameter_shapes(abstract_arrays["parameters"]))
        if info.holds == PARAMETERS_ONLY:
            abstract_arrays = {"parameters": abstract_arrays["parameters"]}
            abstract_state = abstract_state._replace(**dict.fromkeys(abstract_state._fields))
        else:
            refuse_other_state(path, abstract_arrays, changed_settings)
        arrays, data = self.durable.read(step, abstract_arrays)
        source = f"the durable checkpoint at step {step} in {self.durable.path}{reason}"
        return RestoredCheckpoint(step, abstract_state._replace(**arrays), data, source)

    def _newest_undamaged_durable_step(self, *, needed: bool) -> int | None:
        """Return the step of the newest undamaged durable checkpoint, or None if there is none.

        Only process 0 checks the files. Unless read-only, it moves newer, damaged checkpoints aside. If all checkpoints
        are damaged, raises ValueError if one is `needed`, else moves all aside and returns None.
        """
        if self._team.broadcast_from_leader("durable checkpoint", lambda: self.last_durable_step) is None:
            return None
        try:
            step = self._team.broadcast_from_leader("sound checkpoint", self.durable.newest_undamaged_step)
        except ValueError as error:
            if needed:
                raise ValueError(
                    f"{error} There is no other checkpoint. To start over, delete {self._folder}, or use another name=."
                ) from error
            if self._team.is_leader:
                print(f"{error} Continuing from a fast checkpoint.", file=sys.stderr)
            self._team.broadcast_from_leader("damaged ones set aside", self.durable.set_all_aside)
            self.durable.reload(None)
            return None
        if not self._team.is_leader and not self._read_only and step != self.last_durable_step:
            self.durable.reload(step)
        return step

    def _newest_common_fast_step(self, abstract_arrays: Mapping[str, Any]) -> tuple[int | None, str]:
        """Return (step, reason): the newest fast checkpoint that all processes can read, or None and the reason.

        The reason is empty if there is such a checkpoint, or if there are no fast checkpoints.
        """
        if self.fast is None:
            return None, ""
        steps, refusal_reasons = self.fast.restorable_steps(abstract_arrays)
        answers = self._team.exchange("fast checkpoints", {"steps": steps, "refused": refusal_reasons})
        if shared_steps := set.intersection(*({*answer["steps"]} for answer in answers)):
            return max(shared_steps), ""
        for process, answer in enumerate(answers):
            if answer["refused"]:
                return None, f"; no fast checkpoint is used (process {process}: {answer['refused'][0]})"
        incomplete = any(answer["steps"] for answer in answers)
        return None, "; no fast checkpoint is complete on all processes" if incomplete else ""

    def wait(self) -> str | None:
        """Wait until all current saves are on disk. Returns the error message if one failed, or None."""
        fast_error = None if self.fast is None else self.fast.wait()
        return self.durable.wait() or fast_error

    def poll(self) -> str | None:
        """Return the error message of a save that has failed, or None. Does not wait for a save in progress."""
        return self.durable.poll() or (None if self.fast is None else self.fast.poll())

    def close(self) -> None:
        """Wait for saves to finish and release the folders. Deletes the fast checkpoints of a run that is complete."""
        self.durable.close()
        if self.fast is not None:
            self.fast.close()
            if self._complete:
                self.fast.remove()

    def mark_complete(self) -> None:
        """Mark the run as complete and durably saved: `close` then deletes its fast checkpoints."""
        self._complete = True


class StoredCheckpoint(NamedTuple):
    """A checkpoint on disk.

    Args:
        tier: `durable`, or `fast process N`.
        step: Number of finished steps.
        size: Bytes on disk.
        description: Layout and time of the save, as text.
        damage: The first damage that was found, or None.
        check_result: Result of the check, as text: `as saved`, `damaged: REASON`, or why the files were not checked.
    """

    tier: str
    step: int
    size: int
    description: str
    damage: Problem | None
    check_result: str


def stored_checkpoints(folder: Path, config: CheckpointConfig) -> list[StoredCheckpoint]:
    """Return the checkpoints of a run, sorted by step: durable ones, and those in this host's fast folder."""
    root = checkpoint_root(folder)
    checkpoints = [_examine("durable", root / str(step)) for step in all_steps_in(root)]
    if (folder / IDENTITY_FILE).is_file():
        fast_root = fast_folder(config.fast, folder, _ensure_identity(folder))
        for path in sorted(fast_root.glob("process-*")):
            checkpoints += [
                _examine(f"fast {path.name.replace('-', ' ')}", path / str(step)) for step in all_steps_in(path)
            ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _examine(tier: str, path: Any) -> StoredCheckpoint:
    from etils import epath

    info, damage = inspect_checkpoint(path)
    unchecked_result = (
        "complete, contents not verified (the bucket verifies its own objects)" if in_bucket(path) else "no checksums"
    )
    description = "" if info is None else f"{info.layout or ''} {info.saved or ''}".strip()
    check_result = (
        f"damaged: {damage}" if damage else "as saved" if (path / CHECKSUMS_FILE).is_file() else unchecked_result
    )
    return StoredCheckpoint(tier, int(path.name), _bytes_in(epath.Path(path)), description, damage, check_result)


def _bytes_in(path: Any) -> int:
    """Return the total bytes of the files under a folder. epath has no recursive glob in a bucket."""
    return sum(_bytes_in(entry) if entry.is_dir() else entry.stat().length for entry in path.iterdir())


def _ensure_identity(folder: Path) -> str:
    """Return the identity of a run folder: a random ID in `IDENTITY_FILE`, created if missing.

    A new run at the same path gets a different ID.
    """
    file = folder / IDENTITY_FILE
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, f"{uuid.uuid4().hex[:12]}\n")
    return file.read_text().strip()
