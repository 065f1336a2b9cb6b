"""What was tried on a layout to shorten its step, and the best of it: attempts, compiler options, implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from valkyrie.config.run import Run
from valkyrie.train.options import KEY, option_text

Options = dict[str, Any]
"""Values of compiler options by name, as `target.chip.xla_options` has them; None takes a chip's default away."""


class Verdict(Enum):
    """What became of one attempt."""

    start = "as it is"
    kept = "kept"
    not_needed = "taken back"  # no slower without it
    no_gain = "no gain"
    same = "same program"
    changed = "see below"  # several together: which of them changes it is found out by halves
    refused = "refused"
    does_not_fit = "does not fit"
    timeout = "too long"
    failed = "failed"


@dataclass(frozen=True)
class Attempt:
    """One program that was compiled: `options` are those that it changes, several where they are tried together.

    `step_s` and `peak` are its predicted seconds and bytes of a device; `change` is the share by which its step is
    longer than the best before it (negative: shorter). `reason` says why there is no step. `seconds` it took to find
    out, next to none where the program was compiled before (`cached`).
    """

    options: Options
    verdict: Verdict
    round: int
    step_s: float | None = None
    peak: int | None = None
    change: float | None = None
    reason: str | None = None
    seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Tuned:
    """What is known so far: the attempts in order, the best options, and the step before and with them (seconds).

    `options` are those to set beside the run's own; `to_fit` are those without which the program then does not fit,
    which a compile adds and a training does not. `model` are other implementations of its blocks, by key
    (`model.s5.scan`: `blocked`). `run` has all of them. `set_by_user` are left as they are. `finished` is False while
    there is more to try.
    """

    run: Run
    start_s: float
    step_s: float
    options: Options
    attempts: tuple[Attempt, ...]
    to_fit: Options = field(default_factory=dict)
    set_by_user: Options = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    finished: bool = False

    @property
    def settings(self) -> Options:
        """The options to set for a training: those found, and those that it needs to fit."""
        return self.options | self.to_fit

    @property
    def overrides(self) -> list[str]:
        """What to write for a training, as the command line has it."""
        chosen = [f"{key}={value}" for key, value in self.model.items()]
        return chosen + [f"{KEY}.{assignment}" for assignment in assignments(self.settings)]

    @property
    def gain(self) -> float:
        """The share of the step that the options save."""
        return 1 - self.step_s / self.start_s


@dataclass(frozen=True)
class TuneRecord:
    """What `tune.json` holds: steps in seconds, the options found, and every attempt in order."""

    about: dict[str, Any]
    versions: dict[str, str]
    start_s: float
    step_s: float
    finished: bool
    options: Options
    model: dict[str, str]
    to_fit: Options
    set_by_user: Options
    attempts: tuple[Attempt, ...]
    schema: int = 1
    unknown: dict[str, Any] = field(default_factory=dict)


def assignments(options: Mapping[str, Any]) -> list[str]:
    """Return options as they are written after `target.chip.xla_options.`: `xla_flag=true`; null takes one away."""
    return [f"{name}={'null' if value is None else option_text(value)}" for name, value in options.items()]
