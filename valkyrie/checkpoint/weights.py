"""Saves converted weights as a checkpoint with parameters only, and reads single arrays of any durable checkpoint."""

from __future__ import annotations

from typing import Any

from valkyrie.checkpoint.durable import DurableTier
from valkyrie.checkpoint.location import in_bucket

_CHUNK_BYTES = 64 * 2**20
"""Maximum bytes of a chunk of an array on disk. A restore reads only the chunks that overlap a device's shard."""


class WeightsTier(DurableTier):
    """A durable tier that saves parameters only. At most one gigabyte waits to be written to disk at any time."""

    def _open(self) -> Any:
        import orbax.checkpoint as ocp

        handlers = {"state": ocp.PyTreeCheckpointHandler(save_concurrent_gb=1)}
        handlers |= {name: ocp.JsonCheckpointHandler() for name in ("data", "about")}
        options = ocp.CheckpointManagerOptions(
            create=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        return ocp.CheckpointManager(self.path, options=options, item_handlers=handlers)

    def _state_args(self, tree: Any) -> Any:
        import jax
        import orbax.checkpoint as ocp

        return ocp.args.PyTreeSave(
            tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
        )


def read_array(path: Any, state_field: str, name: str) -> Any:
    """Read one array of a checkpoint, as a NumPy array.

    Args:
        path: Folder of the checkpoint.
        state_field: Field of the train state, such as `parameters`.
        name: Dotted name of the array within the field.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    abstract_arrays: Any = 0
    for key in reversed([state_field, *name.split(".")]):
        abstract_arrays = {key: abstract_arrays}
    folder = path / "state" if in_bucket(path) else (path / "state").resolve()
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored: Any = checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(
                item=abstract_arrays,
                restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract_arrays),
                partial_restore=True,
            ),
        )
    (array,) = jax.tree.leaves(restored)
    return array
