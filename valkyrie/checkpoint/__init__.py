"""Checkpoints by Orbax in two tiers: durable ones in the run folder, fast ones on the disk or in the memory of a host.

`config`: what a run asks of them. `place`: where they lie. `steps`: which ones a run has, without JAX. `contents`: what
is in one.
`tier`: saving in the background and checking, the same for both. `durable`, `fast`: the tiers. `tiers`: both together.
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
