"""The durable tier: checkpoints that all processes write together and that can be restored under any layout.

They are stored in the run folder, or in a folder or bucket that all hosts reach.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from valkyrie.checkpoint.config import CheckpointConfig
from valkyrie.checkpoint.contents import CheckpointInfo, newest_undamaged_step
from valkyrie.checkpoint.location import (
    METADATA_FILE,
    POINTER_FILE,
    SAVED_FILE,
    checkpoint_root,
    configured_root,
    in_bucket,
    write_pointer,
)
from valkyrie.checkpoint.tier import Tier
from valkyrie.checksums import CHECKSUMS_FILE
from valkyrie.paths import disk_errors, unused_path
from valkyrie.processes.team import Team

_ENTRY_NAMES = {METADATA_FILE, CHECKSUMS_FILE, "state", "data", "about"}
"""Files and folders in a checkpoint. A damaged checkpoint still has at least one of them."""


class DurableTier(Tier):
    """The durable checkpoints of one run folder. They can be restored under any mesh, partition and process count."""

    label = "durable"

    def __init__(
        self, folder: Path, config: CheckpointConfig, *, read_only: bool, team: Team, info: CheckpointInfo
    ) -> None:
        self._run_folder, self._config, self._read_only = folder, config, read_only
        if team.is_leader and not read_only:
            write_pointer(folder, config.folder)
        path = checkpoint_root(folder) if read_only else configured_root(folder, config.folder)
        if not read_only and not in_bucket(path) and path.is_dir():
            _check_folder(path, run_folder=folder)
        # An error in the run folder is left to the caller, which knows the remedy for it.
        is_elsewhere = config.folder is not None and not read_only and not in_bucket(path)
        with disk_errors(path, "checkpoint.folder=DIR") if is_elsewhere else contextlib.nullcontext():
            super().__init__(
                path if in_bucket(path) else path.resolve(),
                cleans_up=team.is_leader,
                info=replace(info, tier="durable"),
                multiprocess=team.count > 1,
            )

    def _open(self) -> Any:
        import orbax.checkpoint as ocp

        if self._read_only:  # another process may be saving here: do not clean up its unfinished folders
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_preservation_policy(self._config),
                # Without it, Orbax does not store metrics, and a resumed run would delete its best checkpoints.
                best_fn=_metric_getter(self._config) if self._config.keep_best else None,
                create=True,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            )
        return ocp.CheckpointManager(self.path, options=options)

    def _state_args(self, tree: Any) -> Any:
        from orbax.checkpoint import args

        return args.StandardSave(tree)

    def _read_args(self, abstract_arrays: Any) -> Any:
        from orbax.checkpoint import args

        return args.StandardRestore(abstract_arrays)

    def _write_checksums(self) -> None:
        super()._write_checksums()
        if (self._run_folder / POINTER_FILE).is_file():
            with contextlib.suppress(OSError):  # the save itself does not need this disk
                (self._run_folder / SAVED_FILE).touch()

    def newest_undamaged_step(self) -> int:
        """Return the step of the newest undamaged checkpoint.

        Prints a note for each newer, damaged checkpoint and, unless read-only, moves it aside so that its step can be
        saved again. If all checkpoints are damaged, raises ValueError with the damage of each, and moves none.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        step, damage_messages = newest_undamaged_step(self.path, steps)
        if step is None:
            raise ValueError(" ".join(damage_messages))
        for line, damaged_step in zip(damage_messages, steps, strict=False):
            print(f"{line} Continuing from step {step}.", file=sys.stderr)
            self._set_aside(damaged_step)
        if damage_messages and not self._read_only:
            self.reload(step)
        return step

    def set_all_aside(self) -> None:
        """Rename all checkpoints to `damaged-...`, so that their steps can be saved again.

        Call this if all are damaged. Does nothing if read-only.
        """
        for step in self._manager.all_steps():
            self._set_aside(step)

    def _set_aside(self, step: int) -> None:
        if not self._read_only:
            self.folder_of(step).rename(unused_path(self.path.parent / f"damaged-{self.path.name}-{step}"))


def _check_folder(path: Path, run_folder: Path) -> None:
    """Raise ValueError if saving to `path` could delete anything except this run's checkpoints.

    Orbax treats every folder with a numeric name as a checkpoint, and deletes the oldest ones.
    """
    resolved_path = path.resolve()
    if resolved_path.parent != run_folder.resolve() and (resolved_path.parent / "run.yaml").is_file():
        raise ValueError(
            f"{path} is a link into the run folder {resolved_path.parent}, and saving here would delete that run's "
            "checkpoints. Delete the link."
        )
    for entry in resolved_path.iterdir():
        names = {file.name for file in entry.iterdir()} if entry.name.isdigit() and entry.is_dir() else set()
        if names and not names & _ENTRY_NAMES:
            raise ValueError(
                f"{entry} is not a checkpoint, but its name is a step number, so this run would delete it with its old "
                "checkpoints. Move it elsewhere."
            )


def _metric_getter(config: CheckpointConfig) -> Callable[[Any], float]:
    """Return a function of a checkpoint's metrics. Checkpoints of an earlier task may lack the metric: the worst."""
    worst = -math.inf if config.highest_is_best else math.inf
    return lambda metrics: metrics.get(config.best, worst)


def _preservation_policy(config: CheckpointConfig) -> Any:
    """Return Orbax's preservation policy: keep every checkpoint that matches at least one of the settings."""
    from orbax.checkpoint import checkpoint_managers as managers

    policies: list[Any] = [managers.LatestN(config.keep)]
    if config.keep_every_h is not None:
        policies.append(managers.EveryNSeconds(round(timedelta(hours=config.keep_every_h).total_seconds())))
    if config.keep_best:
        policies.append(
            managers.BestN(
                get_metric_fn=_metric_getter(config),
                reverse=not config.highest_is_best,  # Orbax keeps the last ones of its order
                n=config.keep_best,
                keep_checkpoints_without_metrics=False,
            )
        )
    return managers.AnyPreservationPolicy(policies)
