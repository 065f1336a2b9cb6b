"""Other ways to compute the same model: which implementations of its blocks may be tried instead of those it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from enum import Enum

from valkyrie.config.run import Run
from valkyrie.models.stack import Stack
from valkyrie.trees import with_value

HOW = frozenset({"model.s5.scan_block", "model.loss_chunk"})
"""Settings beside implementations that say how a model is computed."""


@dataclass(frozen=True)
class Implementation:
    """A setting of a kind of block that changes how it is computed, and not what: `model.s5.scan` is `blocked`."""

    block: str
    setting: str
    value: Enum

    @property
    def key(self) -> str:
        """The setting, as the command line names it."""
        return f"model.{self.block}.{self.setting}"

    def __str__(self) -> str:
        return f"{self.key}={self.value.value}"

    def of(self, run: Run) -> Run:
        """Return a run with this setting."""
        config = with_value(run.config, self.key, self.value)
        return Run(config, config.model, run.arguments)


def implementations(run: Run, given: Collection[str] = ()) -> list[Implementation]:
    """Return what every block of a run may be computed by beside what it is; nothing for the keys that are `given`.

    These are the values of settings that may be `auto`, which takes one of the others by the backend.
    """
    return [
        Implementation(name, setting, value)
        for name, setting, now in _settings(run)
        if f"model.{name}.{setting}" not in given
        for value in type(now)
        if value is not now and value.value != "auto"
    ]


def computed(run: Run) -> dict[str, str]:
    """Return the settings of a model that decide what it computes, by key, without those that say how."""
    how = {f"model.{name}.{setting}" for name, setting, _ in _settings(run)} | HOW
    return {key: value for key, value in run.values().items() if key.startswith("model.") and key not in how}


def _settings(run: Run) -> Iterator[tuple[str, str, Enum]]:
    """Yield block, name and value of the settings that may be `auto`, which takes one of the others by the backend."""
    model = run.model
    for name, block in (model.blocks | model.feed_forwards).items() if isinstance(model, Stack) else ():
        for setting in (field.name for field in fields(block)):
            now = getattr(block, setting)
            if isinstance(now, Enum) and "auto" in [value.value for value in type(now)]:
                yield name, setting, now
