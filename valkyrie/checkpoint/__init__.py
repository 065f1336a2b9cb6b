"""Orbax checkpoints in two tiers: durable ones in the run folder, fast ones on each host's disk or memory.

`config`: the settings. `location`: where durable checkpoints are, and their steps, without JAX. `contents`: metadata.
`tier`: background saving and checks, shared by both tiers. `durable`, `fast`: the tiers. `tiers`: both combined.
"""

from valkyrie.checkpoint.config import CheckpointConfig, FastConfig
from valkyrie.checkpoint.contents import CheckpointInfo
from valkyrie.checkpoint.location import checkpoint_root, is_resumable, latest_step, saved_steps
from valkyrie.checkpoint.tier import NotSavedError
from valkyrie.checkpoint.tiers import Checkpoints, stored_checkpoints

__all__ = [
    "CheckpointConfig",
    "CheckpointInfo",
    "Checkpoints",
    "FastConfig",
    "NotSavedError",
    "checkpoint_root",
    "is_resumable",
    "latest_step",
    "saved_steps",
    "stored_checkpoints",
]
