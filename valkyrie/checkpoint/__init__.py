"""Checkpoints by Orbax in two tiers: durable ones in the run folder, fast ones on the disk or in the memory of a host.

`config`: what a run asks of them. `steps`: which ones a run folder has, without JAX. `contents`: what is in one.
`tier`: saving in the background and checking, the same for both. `durable`, `fast`: the tiers. `tiers`: both together.
"""

from valkyrie.checkpoint.config import CheckpointConfig, FastConfig
from valkyrie.checkpoint.steps import FOLDER, latest_step, saved_steps
from valkyrie.checkpoint.tiers import Checkpoints, kept_checkpoints

__all__ = ["FOLDER", "CheckpointConfig", "Checkpoints", "FastConfig", "kept_checkpoints", "latest_step", "saved_steps"]
