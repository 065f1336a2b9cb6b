"""The fast tier: each process saves its own devices' arrays on its host, to restart under the same layout."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from valkyrie.checkpoint.config import FastConfig
from valkyrie.checkpoint.contents import CheckpointInfo, inspect_checkpoint, local_shards
from valkyrie.checkpoint.location import finished_steps_in
from valkyrie.checkpoint.tier import Tier
from valkyrie.checksums import digest
from valkyrie.paths import disk_errors

_DISK_ALTERNATIVE = "checkpoint.fast.folder=DIR, or turn fast checkpoints off: checkpoint.fast.every=null"


class FastTier(Tier):
    """The fast checkpoints of one process. Saving does not wait for other processes.

    Only a run with the same shards of the same arrays on each process can restore them.
    """

    label = "fast"

    def __init__(self, path: Path, config: FastConfig, index: int, *, info: CheckpointInfo) -> None:
        """Open `path`, which only this process uses. `index` is the index of the process."""
        self._keep, self._index = config.keep, index
        with disk_errors(path, alternative=_DISK_ALTERNATIVE):
            path.mkdir(parents=True, exist_ok=True)
        super().__init__(path.resolve(), cleans_up=True, info=replace(info, tier="fast", process=index))

    def _open(self) -> Any:
        """Return an Orbax manager for this process alone, which never waits for other processes."""
        import jax
        import orbax.checkpoint as ocp
        from orbax.checkpoint import type_handlers

        this_process = ocp.options.MultiprocessingOptions(
            primary_host=self._index, active_processes={self._index}, barrier_sync_key_prefix=f"fast-{self._index}"
        )
        array_handler = type_handlers.ArrayHandler(
            primary_host=self._index, replica_id=None, use_replica_parallel=False
        )
        registry = type_handlers.create_type_handler_registry((jax.Array, array_handler))
        state_handler = ocp.PyTreeCheckpointHandler(
            multiprocessing_options=this_process, type_handler_registry=registry
        )
        json_handler = partial(ocp.JsonCheckpointHandler, multiprocessing_options=this_process)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=False,
            cleanup_tmp_directories=True,
            multiprocessing_options=this_process,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._write_checksums,
                create_directories_asynchronously=False,  # that would signal under a name shared by all processes
            ),
        )
        handlers = {"state": state_handler, "data": json_handler(), "about": json_handler()}
        return ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)

    def _state_args(self, tree: Any) -> Any:
        from orbax.checkpoint import args

        return args.PyTreeSave(tree)

    def _read_args(self, abstract_arrays: Any) -> Any:
        from orbax.checkpoint import args
        from orbax.checkpoint.checkpoint_utils import construct_restore_args

        return args.PyTreeRestore(abstract_arrays, restore_args=construct_restore_args(abstract_arrays))

    def _make_info(self, arrays: Mapping[str, Any]) -> CheckpointInfo:
        return replace(super()._make_info(arrays), shards=local_shards(arrays))

    def restorable_steps(self, abstract_arrays: Mapping[str, Any]) -> tuple[list[int], list[str]]:
        """Return the steps that this process can restore, newest first, and the reasons why it cannot restore the rest.

        Deletes damaged checkpoints. `abstract_arrays` has the arrays that the run needs, or their shapes with
        shardings, by field of the train state.
        """
        steps, reasons, shards = [], [], local_shards(abstract_arrays)
        for step in sorted(self._manager.all_steps(), reverse=True):
            info, damage = inspect_checkpoint(self.folder_of(step))
            if info is None or damage is not None:
                print(f"Deleting the damaged fast checkpoint at step {step} in {self.path}: {damage}", file=sys.stderr)
                reasons.append(f"the checkpoint at step {step} is damaged")
                self._delete(step)
            elif _covers(info.shards, shards):
                steps.append(step)
            else:
                reasons.append(f"the checkpoint at step {step} has another layout or model")
        return steps, reasons

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of steps after `step`. The run continues from `step` and will save them again."""
        self._delete(*(other for other in finished_steps_in(self.path) if other > step))

    def _delete(self, *steps: int) -> None:
        for step in steps:
            shutil.rmtree(self.folder_of(step), ignore_errors=True)
        self.reload(max(finished_steps_in(self.path), default=None))

    def remove(self) -> None:
        """Delete this process's folder with all its checkpoints. Call this after the last save has finished."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes of this host may still have folders here
            self.path.parent.rmdir()


def fast_folder(config: FastConfig, run_folder: Path, identity: str) -> Path:
    """Return this host's folder for the fast checkpoints of a run, with a sub-folder `process-N` for each process.

    The name depends on the run folder's path and identity, so a run folder that was moved, or recreated under the same
    name, does not reuse older fast checkpoints.
    """
    base_folder = Path(config.folder) if config.folder else Path(tempfile.gettempdir()) / f"valkyrie-{os.getuid()}"
    run_digest = digest(f"{run_folder.resolve()} {identity}")[:12]
    return base_folder.expanduser().absolute() / f"{run_folder.name}-{run_digest}"


def _covers(saved_shards: Mapping[str, list[str]] | None, needed_shards: Mapping[str, list[str]]) -> bool:
    """Return whether a checkpoint has the needed arrays, no others, with the same dtypes and all needed shards.

    Both arguments are from `local_shards`. `saved_shards` is None if they were not recorded.
    """
    if saved_shards is None or saved_shards.keys() != needed_shards.keys():
        return False
    return all(
        saved_shards[name][0] == parts[0] and {*parts} <= {*saved_shards[name]} for name, parts in needed_shards.items()
    )
