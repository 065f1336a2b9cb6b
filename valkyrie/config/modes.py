"""The modes of `valkyrie-train`: one object each, with its keys, its files, its time limit and its function.

To add a mode, add its object to `MODES` (and a key it needs to `ModeConfig`), and write the function that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
CODE_EVAL = "code_eval.json"
"""The file with the last completions of a run's problems, and what became of each."""
MODULE, TEXT, TRACE = "module.hlo.pb", "module.hlo.txt", "trace"
"""The optimised module of a compile, serialised and as text, and the folder of the profiler's trace."""

HOUR_S = 3600.0
COMPILE_MARGIN_S = 300.0
"""The seconds that a compile trial has beyond the compiler's own limit, to start and to report."""

SHAPING_KEYS = ("target", "mesh", "partition", "model", "precision", "optimizer", "steps", "batch", "seq")
SHAPING_KEYS += ("microbatches", "remat", "task")
"""The keys of a run that decide what is compiled."""
_NO_RESULT = frozenset({"name", "runs", "resume", "force", "trial", "tracking", "distributed"})
_NO_TRAINING = frozenset({"mode", "checkpoint", "log_every", "prompt", "sample_tokens", "temperature", "top_k"})


class MeasuredData(Enum):
    """What `mode=measure` feeds a step: random tokens that lie on the devices, or the run's data by its loader."""

    random = "random"
    real = "real"


@dataclass
class ModeConfig:
    """The keys of all modes; `name` chooses one, and each reads its own.

    For `compile`: `time_limit_s` bounds the compiler's seconds, `cache` takes the result of an equal compile, `hlo`
    leaves the optimised module in the run folder. For `measure`: `repeats` steps are timed after `warmup` others;
    `data` is what they are fed, and `trace` leaves the profiler's trace in the run folder.
    For `tune`: after `budget` (`10min`, `90s`, `2h`) no more is tried; null: until all is. The layout as it is is
    compiled whatever it takes.
    For `search`: `targets` are compared, `shapes` says that every shape a slice comes in is. At most `compiles` layouts
    are compiled, for `budget` at most (`10min`, `90s`, `2h`; null: no limit): one under way at its end is ended. For so
    long as `tune` says compiler options and implementations are then tried on the best of them. Where the devices are
    at hand, `measure` layouts are run last, none begun after `budget` again: as the search found them, without what
    `tune` did, which is left out of the answer where another layout is then the fastest. Hours and dollars are told for
    `tokens`, tokens for `budget_usd`.
    For `calibrate`: `paths` are folders of sweeps, searches or runs.
    For `explain`: `first` and `second` are the layouts compared: overrides of the command's own, or a run folder.
    For `generate`: `keep` is the name under which the text and the state after it are kept in the run folder, and go on
    the next time.
    """

    name: str = "train"
    time_limit_s: float = 1800.0
    cache: bool = True
    hlo: bool = False
    warmup: int = 2
    repeats: int = 10
    data: MeasuredData = MeasuredData.random
    trace: bool = False
    budget: str | None = None
    targets: list[str] = field(default_factory=list)
    shapes: bool = False
    compiles: int = 12
    measure: int = 4
    tune: str | None = None
    tokens: float | None = None
    budget_usd: float | None = None
    paths: list[str] = field(default_factory=list)
    first: str | None = None
    second: str | None = None
    keep: str | None = None


class Needs(Enum):
    """What a mode needs of this machine: nothing but files, the compiler of the target's chips, or the devices."""

    nothing = "nothing"
    compiler = "compiler"
    devices = "devices"


@dataclass(frozen=True)
class Mode:
    """What a command does with a run.

    `function` is `MODULE:NAME`: called with the run, it returns the exit status.
    `keys` are those of `ModeConfig` that it reads, `files` what it leaves in the run folder where such a key is true.
    `results` is the file of the run folder with its numbers; None where it only prints. `reads_run`: `name` and
    `resume` name a trained run. `predicts`: its numbers come from a compiler and are computed again with another
    version of it. `timed`: trials at the same time on one machine disturb its numbers. `tracked`: it
    reports to W&B itself. `any_model`: it also takes models that no task can train. `any_layout`: it looks for a legal
    layout itself. `defaults`: values of its keys where they are other than those of all modes.

    Of a trial: `decided_by` returns the keys of the run that decide its result, None meaning all but `not_decided_by`;
    `limit_s` returns the seconds it may take, None meaning any; `grace_s` is how long it may take to stop.
    """

    name: str
    description: str
    function: str
    needs: Needs = Needs.devices
    keys: tuple[str, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    results: str | None = None
    reads_run: bool = False
    predicts: bool = False
    timed: bool = False
    tracked: bool = False
    any_model: bool = False
    any_layout: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    decided_by: Callable[[ModeConfig], Sequence[str]] | None = None
    not_decided_by: frozenset[str] = _NO_RESULT
    limit_s: Callable[[ModeConfig], float | None] = lambda config: HOUR_S
    grace_s: float = 5.0

    def __call__(self, run: Run) -> int:
        """Carry out a run and return the exit status."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(module), name)(run)

    def asked_files(self, config: ModeConfig) -> tuple[str, ...]:
        """Return the files, beside its results, that a run is asked to leave."""
        return tuple(name for key, names in self.files.items() if getattr(config, key) for name in names)


def _decides_a_measurement(config: ModeConfig) -> Sequence[str]:
    data = ["data"] if config.data is MeasuredData.real else []
    return [*SHAPING_KEYS, "seed", "debug", *data, "mode.warmup", "mode.repeats", "mode.data"]


MODES = {
    mode.name: mode
    for mode in (
        Mode(
            name="train",
            description="train, evaluate, print a sample",
            function="valkyrie.train.modes:train",
            results=METRICS,
            tracked=True,
            not_decided_by=_NO_RESULT | _NO_TRAINING,
            limit_s=lambda config: None,
            grace_s=60.0,  # it saves its state
        ),
        Mode(
            name="show",
            description="every parameter with its placement and bytes; stops there",
            function="valkyrie.train.modes:show",
            needs=Needs.nothing,
            any_model=True,
        ),
        Mode(
            name="compile",
            description="compile the step for its target, without the target: does it fit, and how long is a step",
            function="valkyrie.search.modes:compile_mode",
            needs=Needs.compiler,
            keys=("time_limit_s", "cache", "hlo"),
            files={"hlo": (MODULE, TEXT)},
            results=SUMMARY,
            predicts=True,
            decided_by=lambda config: SHAPING_KEYS,
            limit_s=lambda config: max(HOUR_S, config.time_limit_s + COMPILE_MARGIN_S),
        ),
        Mode(
            name="search",
            description="find the fastest layout on a slice: estimate all, compile the best, measure where it can",
            function="valkyrie.search.mode:search",
            needs=Needs.nothing,
            keys=(
                "budget",
                "targets",
                "shapes",
                "compiles",
                "measure",
                "tune",
                "tokens",
                "budget_usd",
                "time_limit_s",
                "cache",
            ),
            any_layout=True,
            defaults={"budget": "8min"},
            limit_s=lambda config: None,
        ),
        Mode(
            name="explain",
            description="say why one of two layouts is faster: what each waits for, computes twice and keeps",
            function="valkyrie.search.explain.mode:explain_mode",
            needs=Needs.nothing,
            keys=("first", "second", "time_limit_s", "cache"),
            any_layout=True,
            limit_s=lambda config: None,
        ),
        Mode(
            name="calibrate",
            description="fit the constants of the estimate, and the factor of replays, to compiled or measured trials",
            function="valkyrie.search.calibrate.mode:calibrate_mode",
            needs=Needs.nothing,
            keys=("paths",),
            any_layout=True,
            limit_s=lambda config: None,
        ),
        Mode(
            name="measure",
            description="time the step on the devices of this machine",
            function="valkyrie.search.modes:measure_mode",
            keys=("warmup", "repeats", "data", "trace"),
            files={"trace": (TRACE,)},
            results=MEASURED,
            timed=True,
            decided_by=_decides_a_measurement,
        ),
        Mode(
            name="figures",
            description="time products, memory and collectives of the devices of this machine, as figures of a chip",
            function="valkyrie.search.measure.figures:figures_mode",
            timed=True,
            any_model=True,
            any_layout=True,
            limit_s=lambda config: 600.0,
        ),
        Mode(
            name="tune",
            description="find the compiler options with which the step is shortest, by compile alone",
            function="valkyrie.search.tune.mode:tune_mode",
            needs=Needs.compiler,
            keys=("budget", "time_limit_s", "cache"),
            predicts=True,
            limit_s=lambda config: None,
        ),
        Mode(
            name="eval",
            description="evaluate a trained run on its whole validation split",
            function="valkyrie.train.modes:evaluate",
            reads_run=True,
        ),
        Mode(
            name="checkpoints",
            description="list the checkpoints of a trained run and compare their files with their checksums",
            function="valkyrie.train.modes:list_checkpoints",
            needs=Needs.nothing,
            reads_run=True,
            any_model=True,
        ),
        Mode(
            name="generate",
            description="print the prompt and what a trained run makes of it",
            function="valkyrie.train.modes:generate",
            keys=("keep",),
            reads_run=True,
        ),
        Mode(
            name="code_eval",
            description="let a trained run complete functions, compile and test them in a sandbox",
            function="valkyrie.train.modes:code_eval",
            reads_run=True,
        ),
    )
}
"""What `mode=` may name."""


def reads_run(name: str | None) -> bool:
    """Return whether a mode looks at a trained run, which `name` and `resume` then name; False for an unknown one."""
    return name in MODES and MODES[name].reads_run


def has_results(name: str) -> bool:
    """Return whether a mode leaves numbers; a trial of another is carried out each time it is asked for."""
    return name in MODES and MODES[name].results is not None
