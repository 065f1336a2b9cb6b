"""Modes of `valkyrie-train`: the base of their configs, and the files that they leave in a run folder.

A mode is a module with a dataclass `Config` derived from `ModeConfig`, in `valkyrie.modes` or in a folder of the user's
(`conf/README.md`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from valkyrie.extensions import Families
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.units import seconds_of

if TYPE_CHECKING:
    from valkyrie.config.run import Run

SUMMARY, MEASURED, METRICS = "compile.json", "measure.json", "metrics.jsonl"
"""The files of a run folder in which a compile, a measurement and a training leave their numbers."""
TUNED, ATTEMPTS = "tuned.yaml", "tune.json"
"""The files of a run folder with the compiler options found best, and with all that were tried."""
EXPLAINED = "explain.json"
"""The file with what makes one of two layouts faster."""
CALIBRATED = "calibrated_{chip}.yaml"
"""The files of a run folder with the constants fitted for each chip."""
FIGURES, MACHINES = "figures.json", "machines.json"
"""The files of a run folder with what the devices at hand reach, and with the names of the machines that have them."""
TIMELINE = "timeline.json"
"""The file with the timeline of a predicted step."""
CODE_EVAL = "code_eval.json"
"""The file with the last completions of a run's problems, and what became of each."""
MODULE, TEXT, TRACE = "module.hlo.pb", "module.hlo.txt", "trace"
"""The optimised module of a compile, serialised and as text, and the folder of the profiler's trace."""

HOUR_S = 3600.0

SHAPING_KEYS = ("target", "mesh", "partition", "model", "precision", "optimizer", "steps", "batch", "seq")
SHAPING_KEYS += ("microbatches", "remat", "task")
"""The keys of a run that decide what is compiled."""
NO_RESULT = frozenset({"name", "runs", "resume", "force", "trial", "tracking", "distributed"})
"""The keys of a run that decide no result."""

_FLAT_KEYS: dict[str, Any] = {
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
"""The keys that `mode` had when all modes shared one config, with their defaults: each is in every such `run.yaml`."""


class Needs(Enum):
    """What a mode needs of this machine: nothing but files, the compiler of the target's chips, or the devices."""

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
    results: ClassVar[str | None] = None
    """The file of the run folder with its numbers, or None if it only prints."""
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The files that it leaves in the run folder in addition to `results`, by the key that requests them."""
    short_keys: ClassVar[tuple[str, ...]] = ()
    """The keys that may be written without `mode.` on the command line."""
    reads_run: ClassVar[bool] = False
    """Whether `name` and `resume` name a trained run."""
    predicts: ClassVar[bool] = False
    """Whether its numbers come from a compiler, and are computed again with another version of it."""
    timed: ClassVar[bool] = False
    """Whether trials at the same time on one machine disturb its numbers."""
    tracked: ClassVar[bool] = False
    """Whether it reports to W&B itself."""
    any_model: ClassVar[bool] = False
    """Whether it also takes models that no task can train."""
    any_layout: ClassVar[bool] = False
    """Whether it looks for a legal layout itself."""
    not_decided_by: ClassVar[frozenset[str]] = NO_RESULT
    """The keys of the run that do not decide a trial's result, unless `decided_by` lists those that do."""
    trial_limit_s: ClassVar[float | None] = HOUR_S
    """Seconds that a trial may take, or None if it may take any time."""
    grace_s: ClassVar[float] = 5.0
    """Seconds that a trial may take to stop."""

    name: str

    @abstractmethod
    def run(self, run: Run) -> int:
        """Carry out a run and return the exit status. Imports JAX only here: a run is checked before JAX loads."""

    def problems(self) -> list[Problem]:
        """Return the problems of the keys."""
        return []

    def requested_files(self) -> tuple[str, ...]:
        """Return the files, in addition to its results, that a run leaves."""
        return tuple(name for key, names in self.files.items() if getattr(self, key) for name in names)

    def decided_by(self) -> Sequence[str] | None:
        """Return the keys of the run that decide a trial's result, or None for all except `not_decided_by`."""
        return None

    def limit_s(self) -> float | None:
        """Return the seconds that a trial may take, or None if it may take any time."""
        return self.trial_limit_s


@dataclass
class CompilingMode(ModeConfig):
    """Base of modes that compile layouts for their target.

    Args:
        time_limit_s: seconds that the compiler may take.
        cache: whether to take the result of an equal compile.
    """

    time_limit_s: float = 1800.0
    cache: bool = True

    def problems(self) -> list[Problem]:
        """Return the problems of the keys."""
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
        """Return the problems of the keys."""
        problems = [*super().problems(), *check_range("mode.repeats", self.repeats, least=1)]
        return [*problems, *check_range("mode.warmup", self.warmup, least=0)]


MODES = Families("mode.name", "valkyrie.modes", ModeConfig)
"""What `mode=` may name."""

Schema = TypeVar("Schema", bound=ModeConfig)


def mode_named(name: str | None) -> type[ModeConfig] | None:
    """Return the config of a mode, or None if there is no such mode."""
    return MODES.config_class(name) if name is not None and name in MODES else None


def reads_run(name: str | None) -> bool:
    """Return whether a mode looks at a trained run, which `name` and `resume` then name; False for an unknown one."""
    mode = mode_named(name)
    return mode is not None and mode.reads_run


def has_results(name: str) -> bool:
    """Return whether a mode leaves numbers; a trial of another is carried out each time it is requested."""
    mode = mode_named(name)
    return mode is not None and mode.results is not None


def settings_for(schema: type[Schema], mode: ModeConfig) -> Schema:
    """Return the settings with which a run does what another mode does: shared keys, and defaults of the others.

    A search compiles and measures, for example, and `valkyrie.predict` compiles a run of any mode.
    """
    if isinstance(mode, schema):
        return mode
    shared = {field.name for field in fields(mode)} & {field.name for field in fields(schema)} - {"name"}
    return schema(**{key: getattr(mode, key) for key in shared})


def check_time(key: str, value: str | None) -> list[Problem]:
    """Return the problem of a key whose value must be a time with its unit, or null."""
    if value is None or seconds_of(value) is not None:
        return []
    text = f"{key}={value}: write a time with its unit, such as 90s, 10min or 2h, or null."
    return [Problem(ProblemCode.malformed, key, value, text)]


def modes_with(key: str) -> list[str]:
    """Return the names of the modes that have a key."""
    configs = {name: MODES.config_class(name) for name in (*MODES.names(), *MODES.user_names())}
    return [name for name, config in configs.items() if key in {field.name for field in fields(config)}]


def without_foreign_keys(mode: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys of other modes from the `mode` of a `run.yaml` of the time when all modes shared one config.

    Keys whose value is not the default stay, and are then refused.
    """
    config = mode_named(mode.get("name"))
    own = set() if config is None else {field.name for field in fields(config)}
    return {key: value for key, value in mode.items() if key in own or _FLAT_KEYS.get(key, mode) != value}
