"""Results of tuning a layout: what was tried, and the best compiler options and implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from valkyrie.config.run import Run
from valkyrie.train.options import KEY, option_text

Options = dict[str, Any]
"""Values of compiler options by name, as in `target.chip.xla_options`; None removes a chip's default."""


class Verdict(Enum):
    """Result of one attempt."""

    start = "as it is"
    kept = "kept"
    not_needed = "taken back"  # no slower without it
    no_gain = "no gain"
    same = "same program"
    changed = "see below"  # several together; halves are tried next to find which of them changes it
    refused = "refused"
    does_not_fit = "does not fit"
    timeout = "too long"
    failed = "failed"


@dataclass(frozen=True)
class Attempt:
    """A program that was compiled.

    Args:
        options: Options that it changes, several if they are tried together.
        verdict: What follows from it.
        round: Round of the search, from 1.
        step_s: Predicted seconds of a step.
        peak: Bytes of a device.
        change: Relative difference to the best step before it; negative if it is shorter.
        reason: Why there is no step.
        seconds: Seconds that the attempt took.
        cached: Whether the program had been compiled before.
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
    """State of a search.

    Args:
        run: The run with the best settings.
        start_s: Seconds of a step without them.
        step_s: Seconds of a step with them.
        options: Compiler options to set in addition to the run's own.
        attempts: Everything tried, in order.
        to_fit: Options without which the program does not fit; a compile adds them, a training does not.
        set_by_user: Options that are not varied.
        model: Other implementations of its blocks, such as `model.s5.scan`: `blocked`.
        finished: False while there is more to try.
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
        """The options to set for a training, including those that it needs to fit."""
        return self.options | self.to_fit

    @property
    def overrides(self) -> list[str]:
        """Command-line overrides for a training."""
        chosen = [f"{key}={value}" for key, value in self.model.items()]
        return chosen + [f"{KEY}.{assignment}" for assignment in assignments(self.settings)]

    @property
    def gain(self) -> float:
        """Share of the step that the settings save."""
        return 1 - self.step_s / self.start_s


def tune_record(tuned: Tuned, versions: dict[str, str]) -> dict[str, Any]:
    """Return what `tune.json` stores, with the versions of the packages that decide the numbers."""
    known = {field.name: getattr(tuned, field.name) for field in fields(tuned) if field.name != "run"}
    return {"about": tuned.run.about(), "versions": versions, **known, "schema": 1}


def assignments(options: Mapping[str, Any]) -> list[str]:
    """Return options as written after `target.chip.xla_options.`: `xla_flag=true`, or `null` to remove one."""
    return [f"{name}={'null' if value is None else option_text(value)}" for name, value in options.items()]
