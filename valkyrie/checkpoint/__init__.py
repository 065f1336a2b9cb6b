"""Orbax checkpoints in two tiers: durable ones in the run folder, fast ones on each host's disk or memory.

`config`: the settings. `place`: the location of durable checkpoints. `steps`: the steps a run has saved, without JAX.
`contents`: what a checkpoint contains.
`tier`: background saving and checks, shared by both tiers. `durable`, `fast`: the tiers. `tiers`: both combined.
"""

from valkyrie.checkpoint.config import CheckpointConfig, FastConfig
from valkyrie.checkpoint.place import place_of
from valkyrie.checkpoint.steps import has_saved, latest_step, saved_steps
from valkyrie.checkpoint.tier import NotSavedError
from valkyrie.checkpoint.tiers import Checkpoints, kept_checkpoints

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "FastConfig",
    "NotSavedError",
    "has_saved",
    "kept_checkpoints",
    "latest_step",
    "place_of",
    "saved_steps",
]
