"""Decides what of a run is kept on disk, how often, and how it comes back. Orbax does the work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Saving: every `every` steps and at the end, asynchronously; the newest `keep` are kept. `every` null: only at the end."""

    name: str = "async"
    every: int | None = 100
    keep: int = 2
