"""Modes of `valkyrie-train`: the base of their configs, and the files that they write to a run folder.

A mode is a module with a dataclass `Config` derived from `ModeConfig`, in `valkyrie.modes` or in a folder of the user
(`conf/README.md`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from valkyrie.extensions import Families
from valkyrie.hooks import is_exit_status, returns
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.units import parse_seconds

if TYPE_CHECKING:
    from valkyrie.config.run import Run

COMPILE_FILE, MEASURE_FILE, METRICS_FILE = "compile.json", "measure.json", "metrics.jsonl"
"""Files in a run folder with the results of a compile, of a measurement and of a training run."""
TUNED_FILE, ATTEMPTS_FILE = "tuned.yaml", "tune.json"
"""Files in a run folder with the best compiler options, and with all that were tried."""
EXPLAIN_FILE = "explain.json"
"""File in a run folder with the comparison of two layouts."""
ANSWER_FILE = "search.json"
"""File with the result of a search, in the folder of the search."""
CALIBRATED_FILE = "calibrated_{chip}.yaml"
"""File in a run folder with the constants fitted to the chip named `{chip}`."""
FIGURES_FILE, MACHINES_FILE = "figures.json", "machines.json"
"""Files in a run folder: measured speeds of the run's devices, and host names of the machines that have them."""
TIMELINE_FILE = "timeline.json"
"""File in a run folder with the timeline of a predicted step."""
CODE_EVAL_FILE = "code_eval.json"
"""File in a run folder with all completions of the most recent code evaluation and their results."""
MODULE_FILE, HLO_TEXT_FILE, TRACE_FOLDER = "module.hlo.pb", "module.hlo.txt", "trace"
"""Files in a run folder: the optimised module of a compile, serialised and as text. A folder of profiler traces."""

HOUR_S = 3600.0

SHAPING_KEYS = ("target", "mesh", "partition", "model", "precision", "optimizer", "steps", "batch", "seq")
SHAPING_KEYS += ("microbatches", "remat", "task")
"""Keys of a run that change the compiled program."""
SAMPLE_KEYS = frozenset({"prompt", "sample_tokens", "temperature", "top_k"})
"""Keys of a run for sampling text from its model."""
LOOP_KEYS = frozenset({"log_every", "eval_every", "eval_batches", "sample_every", "code_eval_every", "profile"})
"""Keys of a run that only training reads."""
TRAINING_KEYS = LOOP_KEYS | SAMPLE_KEYS | {"code_eval", "checkpoint", "seed"}
"""Settings that are read only by modes that initialise or load weights, such as train, eval and generate."""
NEUTRAL_KEYS = frozenset({"name", "runs", "resume", "force", "trial", "tracking", "distributed"})
"""Keys of a run that never change a result."""

_OLD_DEFAULTS: Mapping[str, object] = {
    "time_limit_s": 1800.0,
    "cache": True,
    "hlo": False,
    "warmup": 2,
    "repeats": 10,
    "data": "random",
    "trace": False,
    "budget": None,
    "targets": [],
    "shapes": False,
    "compiles": 12,
    "measure": 4,
    "tune": None,
    "tokens": None,
    "budget_usd": None,
    "paths": [],
    "first": None,
    "second": None,
    "keep": None,
}
"""Defaults of the keys of `mode` in an old `run.yaml`, which has the keys of all modes."""


class Needs(Enum):
    """Requirements of a mode: only files, the compiler of the target's chips, or the devices of this machine."""

    nothing = "nothing"
    compiler = "compiler"
    devices = "devices"


@dataclass
class ModeConfig(ABC):
    """Base of the config of every mode. The fields of a subclass are the keys `mode.KEY`, and have defaults.

    Args:
        name: the module that defines the mode.
    """

    description: ClassVar[str] = ""
    """One line for `--help`."""
    needs: ClassVar[Needs] = Needs.devices
    """Requirements of the mode on this machine. A trial is refused if they are not met."""
    results: ClassVar[str | None] = None
    """Name of the file in the run folder with a trial's results. If None, a sweep shows what the mode prints."""
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Files that the mode writes to the run folder in addition to `results`, by the `mode.KEY` that requests them."""
    short_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that may be written without `mode.` on the command line."""
    reads_run: ClassVar[bool] = False
    """Whether the mode reads a trained run, which `name` or `resume` selects."""
    predicts: ClassVar[bool] = False
    """Whether the results are predictions. If so, trials are repeated after the code or the compiler has changed."""
    timed: ClassVar[bool] = False
    """Whether other trials on the same machine at the same time would disturb the results."""
    tracked: ClassVar[bool] = False
    """Whether the mode itself reports to W&B."""
    accepts_untrainable_models: ClassVar[bool] = False
    """Whether the mode also accepts models that no task can train."""
    ignores_layout: ClassVar[bool] = False
    """Whether the mode does not need the run's own layout. If so, that layout may be illegal."""
    neutral_keys: ClassVar[frozenset[str]] = NEUTRAL_KEYS
    """Keys of the run that do not change a trial's result. Used only if `result_keys` returns None."""
    unread: ClassVar[frozenset[str]] = frozenset()
    """Keys and groups of the run that the mode does not read. Not needed if `result_keys` returns keys."""
    trial_limit_s: ClassVar[float | None] = HOUR_S
    """Time limit of a trial in seconds, or None for no limit."""
    grace_s: ClassVar[float] = 5.0
    """Seconds that an interrupted trial has to exit before it is killed."""

    name: str

    @abstractmethod
    @returns("an exit status from 0 to 255", is_exit_status)
    def run(self, run: Run) -> int:
        """Execute a run and return the exit status. Import JAX only here, because runs are checked before JAX loads."""

    def problems(self) -> list[Problem]:
        """Return the problems of this mode's settings."""
        return []

    def trial_metrics(self) -> Mapping[str, float]:
        """Return `eval_loss` and `step` after `run`, if known, for the trial of a mode without `results`."""
        return {}

    def requested_files(self) -> tuple[str, ...]:
        """Return the files that a run writes in addition to its results."""
        return tuple(name for key, names in self.files.items() if getattr(self, key) for name in names)

    def result_keys(self) -> Collection[str] | None:
        """Return the keys of the run that change a trial's result, or None for all except `neutral_keys`."""
        return None

    def limit_s(self) -> float | None:
        """Return the time limit of a trial in seconds, or None for no limit.

        Override this if the limit depends on the mode's settings.
        """
        return self.trial_limit_s


@dataclass
class CompilingMode(ModeConfig):
    """Base of modes that compile layouts for their target.

    Args:
        time_limit_s: time limit of a compile, in seconds.
        cache: whether to reuse the result of an identical compile.
    """

    time_limit_s: float = 1800.0
    cache: bool = True

    def problems(self) -> list[Problem]:
        """Return the problems of this mode's settings."""
        return [*super().problems(), *check_range("mode.time_limit_s", self.time_limit_s, above=0)]


@dataclass
class MeasuringMode(ModeConfig):
    """Base of modes that time layouts on devices.

    Args:
        warmup: steps before the timed ones.
        repeats: timed steps.
    """

    warmup: int = 2
    repeats: int = 10

    def problems(self) -> list[Problem]:
        """Return the problems of this mode's settings."""
        problems = [*super().problems(), *check_range("mode.repeats", self.repeats, least=1)]
        return [*problems, *check_range("mode.warmup", self.warmup, least=0)]


MODES = Families("mode.name", "valkyrie.modes", ModeConfig)
"""The choices of `mode=`."""

Schema = TypeVar("Schema", bound=ModeConfig)


def run_mode(run: Run) -> int:
    """Execute the mode of a run and return its exit status, 0 if the mode returns None."""
    return run.config.mode.run(run) or 0


def get_mode(name: str | None) -> type[ModeConfig] | None:
    """Return the config class of a mode, or None if there is no such mode or `name` is None."""
    return MODES.config_class(name) if name is not None and name in MODES else None


def reads_run(name: str | None) -> bool:
    """Return whether the mode called `name` reads a trained run, which `resume=` or `name=` then selects.

    Returns False for an unknown mode.
    """
    mode = get_mode(name)
    return mode is not None and mode.reads_run


def has_results(name: str) -> bool:
    """Return whether a mode writes a results file. Returns False for an unknown mode.

    Trials of a mode without a results file are rerun each time they are requested.
    """
    mode = get_mode(name)
    return mode is not None and mode.results is not None


def settings_for(schema: type[Schema], mode: ModeConfig) -> Schema:
    """Return the settings of `mode` as an instance of `schema`.

    Keys that both modes have are copied, and the other keys get their defaults. Returns `mode` itself if it is already
    a `schema`. For example, a search derives the settings of its compiles and measurements this way.
    """
    if isinstance(mode, schema):
        return mode
    shared = {field.name for field in fields(mode)} & {field.name for field in fields(schema)} - {"name"}
    return schema(**{key: getattr(mode, key) for key in shared})


def check_time(key: str, value: str | None) -> list[Problem]:
    """Return a list with a problem if the value of `key` is neither None nor a time above 0 with a unit: `10min`."""
    if value is None or parse_seconds(value) is not None:
        return []
    if re.fullmatch(r"-?\d+(\.\d+)?(s|min|h)", value):
        hint = " For estimates only, use mode.compiles=0." if key == "mode.budget" else ""
        return [Problem(ProblemCode.out_of_range, key, value, f"{key}={value}: must be above 0.{hint}")]
    text = f"{key}={value}: write a time with its unit, such as 90s, 10min or 2h, or null."
    return [Problem(ProblemCode.malformed, key, value, text)]


def without_foreign_keys(mode: Mapping[Any, object]) -> dict[str, object]:
    """Drop the keys of other modes from the `mode` of a `run.yaml` written when all modes shared one config.

    Keeps a key of another mode if its value is not the default. It is rejected later.
    """
    config = get_mode(str(mode.get("name")))
    valid_keys = set() if config is None else {field.name for field in fields(config)}
    return {key: value for key, value in mode.items() if key in valid_keys or _OLD_DEFAULTS.get(key, mode) != value}
