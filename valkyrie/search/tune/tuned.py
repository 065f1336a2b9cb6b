"""Results of tuning a layout: the attempts, and the best compiler options and implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum

from valkyrie.config.run import Run
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.tune.compiler_options import Options
from valkyrie.train.options import KEY, option_text


class Verdict(Enum):
    """Result of one attempt."""

    start = "as it is"
    kept = "kept"
    not_needed = "taken back"  # no slower without it
    no_gain = "no gain"
    same = "same program"
    changed = "see below"  # several options together; halves are tried next to find those with an effect
    refused = "refused"
    does_not_fit = "does not fit"
    timeout = "too long"
    failed = "failed"


@dataclass(frozen=True)
class Attempt:
    """A program that was compiled.

    Args:
        options: Options that it changes, several if they are tried together.
        verdict: Result of the attempt.
        round: Round of the search, from 1.
        step_s: Predicted seconds per step.
        peak: Peak bytes per device.
        change: Relative difference to the best step before it. Negative if it is shorter.
        reason: Why there is no step.
        seconds: Duration of the attempt in seconds.
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
class TuneResult:
    """Results of a search.

    Args:
        start_s: Seconds per step without them.
        step_s: Seconds per step with them.
        options: Compiler options to set in addition to the run's.
        attempts: All attempts, in order.
        to_fit: Options without which the program does not fit. A compile adds them, a training does not.
        set_by_user: Options that are not varied.
        model: Other implementations of its blocks, such as `model.s5.scan`: `blocked`.
        finished: False while there is more to try.
    """

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


@dataclass(frozen=True, kw_only=True)
class Tuned(TuneResult):
    """State of a search. `run` is the run with the best settings."""

    run: Run


@dataclass(frozen=True, kw_only=True)
class TuneRecord(TuneResult):
    """Content of `tune.json`. `versions` are those of the packages that decide the numbers."""

    about: LayoutRecord
    versions: dict[str, str]
    schema: int = 1

    @staticmethod
    def of(tuned: Tuned, versions: dict[str, str]) -> TuneRecord:
        """Return the record of a search."""
        results = {field.name: getattr(tuned, field.name) for field in fields(TuneResult)}
        return TuneRecord(about=tuned.run.about(), versions=versions, **results)


def assignments(options: Mapping[str, object]) -> list[str]:
    """Return options as written after `target.chip.xla_options.`: `xla_flag=true`, or `null` to remove one."""
    return [f"{name}={'null' if value is None else option_text(value)}" for name, value in options.items()]
