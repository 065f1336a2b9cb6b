"""Results of tuning a layout: all attempts, and the best compiler options and implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum

from valkyrie.config.run import Run
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.tune.compiler_options import OptionValues
from valkyrie.train.options import OPTIONS_KEY, option_text


class Verdict(Enum):
    """Result of one attempt."""

    start = "as it is"
    kept = "kept"
    not_needed = "taken back"  # a kept option was removed, because the step is no slower without it
    no_gain = "no gain"
    same = "same program"
    changed = "see below"  # several options changed the program together and are bisected next
    refused = "refused"
    does_not_fit = "does not fit"
    timeout = "too long"
    failed = "failed"


@dataclass(frozen=True)
class Attempt:
    """One change that was tried by compiling it.

    Args:
        options: Compiler options and model settings that were changed together, by name.
        verdict: Result of the attempt.
        round: Round of the search, from 1.
        step_s: Predicted seconds per step, or None if the program does not compile or fit.
        peak: Peak bytes per device, or None without a step time.
        change: Relative change of the step time from the best before the attempt. Negative if the step is shorter. None
            for the baseline and without a step time.
        reason: Why there is no step time.
        seconds: Duration of the attempt in seconds.
        cached: Whether the program came from the compile cache.
    """

    options: OptionValues
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
    """Results of tuning a layout.

    Args:
        start_s: Seconds per step of the baseline.
        step_s: Seconds per step with the best settings.
        options: Compiler options to set in addition to the run's.
        attempts: All attempts, in order.
        added: Options that the compile has added so that the step fits or overlaps. `mode=compile` adds them itself,
            training does not.
        set_by_user: Options that the user has set, which are not varied.
        model: Implementations of the model's blocks to set, such as `model.s5.scan`: `blocked`.
        finished: Whether everything was tried.
    """

    start_s: float
    step_s: float
    options: OptionValues
    attempts: tuple[Attempt, ...]
    added: OptionValues = field(default_factory=dict)
    set_by_user: OptionValues = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    finished: bool = False

    @property
    def settings(self) -> OptionValues:
        """Compiler options to set for training, including those that the compile has added."""
        return self.options | self.added

    @property
    def overrides(self) -> list[str]:
        """Command-line overrides that set the best settings for training."""
        model_overrides = [f"{key}={value}" for key, value in self.model.items()]
        return model_overrides + [f"{OPTIONS_KEY}.{assignment}" for assignment in format_options(self.settings)]

    @property
    def gain(self) -> float:
        """Relative reduction of the step time, from 0 to 1."""
        return 1 - self.step_s / self.start_s


@dataclass(frozen=True, kw_only=True)
class TunedRun(TuneResult):
    """Results of tuning a run, final or so far (see `finished`). `run` is the run with the best settings."""

    run: Run


@dataclass(frozen=True, kw_only=True)
class TuneRecord(TuneResult):
    """Content of `tune.json`. `about` is the layout, and `versions` has versions of packages that affect results."""

    about: LayoutRecord
    versions: dict[str, str]
    schema: int = 1

    @staticmethod
    def from_results(tuned_run: TunedRun, versions: dict[str, str]) -> TuneRecord:
        """Build the record of `tuned_run`, with the versions of installed packages."""
        results = {field.name: getattr(tuned_run, field.name) for field in fields(TuneResult)}
        return TuneRecord(about=tuned_run.run.layout_record(), versions=versions, **results)


def format_options(options: Mapping[str, object]) -> list[str]:
    """Format options for the command line, as `xla_flag=true`, or `xla_flag=null` to remove a default."""
    return [f"{name}={'null' if value is None else option_text(value)}" for name, value in options.items()]
