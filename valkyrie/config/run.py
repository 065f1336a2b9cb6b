"""`Run`: the composed, typed and validated object behind every command. Imports no JAX."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from valkyrie import models, optim
from valkyrie.axes import BATCH, Arrays
from valkyrie.buckets import needs_disk
from valkyrie.checkpoint import CheckpointConfig
from valkyrie.code_eval.config import CodeEvalConfig
from valkyrie.config import modes
from valkyrie.config.modes import MODES, ModeConfig, Needs
from valkyrie.config.refusals import refusal_of, too_large
from valkyrie.data import config as data
from valkyrie.data.config import SEEDS, SOURCES, DataConfig, full_path
from valkyrie.extensions import Families, add_import_path
from valkyrie.hardware.target import TargetConfig
from valkyrie.models import Model, activation_names, known_axes
from valkyrie.optim import OptimizerConfig
from valkyrie.parallel.batches import Batches, batches_of
from valkyrie.parallel.layout import Layout, derive_layout, layout_with_problems, make_layout
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.parallel.on_target import target_problems
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.problems import nearest_legal, removes
from valkyrie.parallel.remat import RematConfig
from valkyrie.paths import read_group, write_whole
from valkyrie.precision import PolicyConfig
from valkyrie.problems import Identity, Problem, ProblemCode, ProblemError, check_range
from valkyrie.processes.distributed import DistributedConfig
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.runs.tracking import profile_problems
from valkyrie.runs.wandb_writer import TrackingConfig
from valkyrie.tasks import TASKS, Task
from valkyrie.trees import as_written, at, flat, with_value

HEADER = "# valkyrie-train --config-path "
"""How every `run.yaml` begins."""
FAMILIES: dict[str, Families] = {
    "mode": MODES,
    "model": models.FAMILIES,
    "data": SOURCES,
    "task": TASKS,
    "optimizer": optim.FAMILIES,
}
"""The config groups whose schema depends on the family that is chosen; such a module may be the user's."""
OPTIONAL_GROUPS = frozenset({"task"})
"""Groups that a run may leave out: without `task` it has the task of its model family."""
_COUNTS_OF_A_LAYOUT = ("microbatches", "partition.rounds")


class Debug(Enum):
    """Extra checks: `nans` turns on `jax_debug_nans`, which names the operation and is slow."""

    none = "none"
    nans = "nans"


@dataclass
class TrialConfig:
    """How one trial of a multirun is run.

    `limit_s`: its process is ended after so many seconds; null: an hour, and none for a training. `retry`: do trials
    again whose process failed, was killed or took too long.
    """

    limit_s: float | None = None
    retry: bool = False


@dataclass
class RunConfig:
    """The schema of `conf/train.yaml`. `batch` counts sequences of the global batch, `seq` tokens of a sequence.

    `task` None is the task of the model family.
    `modules` are folders with the user's own modules (models, data sources, tasks, optimizers, modes), which a run in
    another process imports too.
    `batch_tokens` and `device_batch` are put as `batch` and `microbatches` (`valkyrie.parallel.batches`).
    `force` goes on where this machine's memory or cores cannot be enough. `profile`: the steps to trace (`100-105`).
    """

    mode: ModeConfig = MISSING
    target: TargetConfig = field(default_factory=TargetConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    remat: RematConfig = field(default_factory=RematConfig)
    model: Any = MISSING
    data: DataConfig = MISSING
    task: Any = None
    precision: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    code_eval: CodeEvalConfig = field(default_factory=CodeEvalConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    name: str | None = None
    runs: str = "runs"
    modules: list[str] = field(default_factory=list)
    resume: str | None = None
    force: bool = False
    seed: int = 0
    steps: int = 200
    batch: int = 32
    seq: int = 128
    microbatches: int = 1
    batch_tokens: int | None = None
    device_batch: int | None = None
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    prompt: str = "def "
    sample_tokens: int = 200
    sample_every: int | None = None
    code_eval_every: int | None = None
    temperature: float = 0.8
    top_k: int | None = 40
    debug: Debug = Debug.none
    profile: str | None = None
    trial: TrialConfig = field(default_factory=TrialConfig)


@dataclass(frozen=True)
class Run:
    """One run, as asked: every group typed, every word known. What follows from it (layout, shardings) is derived.

    `arguments` are those it was composed from; `run.yaml` says them to its reader.
    """

    config: RunConfig
    model: Model
    arguments: tuple[str, ...] = field(default=(), compare=False)
    batch_note: str | None = field(default=None, compare=False)
    """What was made of `batch_tokens` and `device_batch`, as it is printed; None where neither was given."""

    @property
    def layout(self) -> Layout:
        """The legal layout of this run; ValueError lists all of its problems."""
        layout, problems = self._layout()
        if problems or layout is None:
            raise ProblemError(problems)
        return layout

    @cached_property
    def arrays(self) -> Arrays:
        """What a layout splits of the model."""
        return self.model.arrays()

    def changed(self, **values: Any) -> Run:
        """Return this run with other values of its keys (`mesh`, `partition`, ...), of the same model."""
        other = Run(replace(self.config, **values), self.model, self.arguments)
        other.__dict__["arrays"] = self.arrays
        return other

    def layout_on(self, mesh: MeshConfig, partition: PartitionConfig) -> Layout:
        """Return what a partition's rules make of a mesh with this model, legal or not, whatever the batch."""
        return derive_layout(mesh, partition, self.arrays, known_axes=known_axes())[0]

    @property
    def tokenizer(self) -> str:
        """The name of the tokenizer: the data's if it names one, else the model's."""
        return self.config.data.tokenizer_for(self.model.tokenizer)

    @cached_property
    def task(self) -> Task:
        """The task: that of `task=`, else the one of the model family. ValueError if there is no such task."""
        return self.config.task or TASKS.config_class(self.model.task)()

    @property
    def step_flops(self) -> float:
        """FLOPs of the model in one training step."""
        return self.model.step_flops_per_token(self.config.seq) * self.config.batch * self.config.seq

    @property
    def order_seed(self) -> int:
        """The seed of the order in which documents are read: the data's own, else the run's."""
        own = self.config.data.shuffle_seed
        return self.config.seed if own is None else own

    def asked(self) -> LayoutRecord:
        """Return the record of what was requested, also of a run whose layout is illegal."""
        c = self.config
        return LayoutRecord(
            model=self.model.name,
            mesh=c.mesh.name,
            axes=dict(c.mesh.axes),
            mesh_placement=None if c.mesh.placement is None else tuple(c.mesh.placement),
            partition=c.partition.name,
            microbatches=c.microbatches,
            remat=c.remat.label,
            target=c.target.name,
            described=c.target.describe(),
            chip=None if c.target.chip is None else c.target.chip.name,
            chips=None if c.target.chips is None else c.target.chips * c.target.slices,
            batch=c.batch,
            seq=c.seq,
            precision=c.precision.name,
            hardware=c.target.record(),
        )

    def about(self) -> LayoutRecord:
        """Return the record of what was requested and of its layout; ValueError if that is illegal."""
        layout = self.layout
        return replace(
            self.asked(),
            layout=layout.name,
            roles=layout.describe_roles(),
            axis_roles=layout.roles,
            degrees=layout.degrees,
            sharding=layout.sharding,
            pipeline=None if layout.pipeline is None else layout.pipeline.record(),
        )

    def values(self) -> dict[str, str]:
        """Return what decides what a step computes, by its key on the command line: `model.layers`: `4`."""
        groups = {"model": self.config.model, "precision": self.config.precision, "optimizer": self.config.optimizer}
        values = flat({name: asdict(group) for name, group in groups.items()})
        return {key: as_written(value) for key, value in values.items()}

    @staticmethod
    def from_config(config: DictConfig) -> Run:
        """Return the typed run of a composed config or a `run.yaml`; ValueError names unknown keys with the choices."""
        composed = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        add_import_path(OmegaConf.select(composed, "modules") or [])
        schema, folders = OmegaConf.structured(RunConfig), []
        for group, families in FAMILIES.items():
            family = OmegaConf.select(composed, families.key)
            if family is None and group in OPTIONAL_GROUPS:
                continue
            if family is None:
                raise ValueError(f"{families.key} is missing. Known: {', '.join(families.names())}.")
            drop_foreign_keys(composed, group)
            known_types = (dict, families.config_class(family))
            if group == "data" and OmegaConf.get_type(composed.data) not in known_types:
                raise ValueError(
                    f"data.source={family} changes the source and none of the settings. Write data={family}."
                )
            schema[group] = OmegaConf.structured(families.config_class(family))
            folders.append(families.user_folder(family))
        try:
            merged = OmegaConf.merge(schema, composed)
            OmegaConf.resolve(merged)
            typed = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise ProblemError([refusal_of(error)]) from error
        assert isinstance(typed, RunConfig)
        if typed.task is None:
            folders.append(TASKS.user_folder(typed.model.task))
        user_folders = dict.fromkeys(str(folder) for folder in folders if folder is not None)
        typed.modules += [folder for folder in user_folders if folder not in typed.modules]
        return Run(typed, typed.model)._with_batches()

    def _with_batches(self) -> Run:
        """Return the run with the batch and microbatches that `batch_tokens` and `device_batch` ask for.

        A trial or a continued run then changes those; what cannot be had stays, and is refused.
        """
        c, found = self.config, self._batches()
        if found.problems or (c.batch_tokens, c.device_batch) == (None, None):
            return self
        own = replace(c, batch=found.batch, microbatches=found.microbatches, batch_tokens=None, device_batch=None)
        if self.config.mode.any_layout:  # each has microbatches of its own
            return replace(self, config=replace(own, microbatches=c.microbatches, device_batch=c.device_batch))
        return replace(self, config=own, batch_note=found.describe(c.seq, c.device_batch))

    def _batches(self) -> Batches:
        c = self.config
        known = c.device_batch is not None and not c.mesh.problems() and not self.config.mode.any_layout
        shards = self.layout_on(c.mesh, c.partition).shards(BATCH) if known else 1
        return batches_of(c.batch, c.microbatches, c.seq, shards, c.batch_tokens, c.device_batch)

    def problems(self, *, advise: bool = True) -> list[Problem]:
        """Return everything wrong with this run that can be known without JAX and without a device.

        `advise` looks for the values that would do, which takes longer than finding the problems.
        """
        c = self.config
        if huge := too_large(asdict(c)):
            return huge
        problems = [*self.model.problems(), *c.optimizer.problems(), *c.checkpoint.problems(), *c.data.problems()]
        problems += [*c.distributed.problems(), *self._batches().problems, *c.code_eval.refusals(c.code_eval_every)]
        searches = c.mode.any_layout and c.mode.needs is Needs.nothing
        of_target = c.target.problems() if searches else target_problems(c.target, c.mesh)
        for key in ("steps", "batch", "seq", "log_every", "eval_every", "eval_batches", *_COUNTS_OF_A_LAYOUT):
            problems += check_range(key, at(c, key), least=1)
        problems += [*needs_disk("runs", c.runs), *profile_problems(c.profile, c.steps)]
        problems += c.mode.problems()
        problems += check_range("trial.limit_s", c.trial.limit_s, above=0, otherwise="null")
        problems += check_range("temperature", c.temperature, least=0)
        problems += check_range("top_k", c.top_k, least=1, otherwise="null to sample among all tokens")
        problems += check_range("sample_every", c.sample_every, least=1, otherwise="null for no samples on the way")
        problems += check_range("sample_tokens", c.sample_tokens, least=0)
        problems += check_range("seed", c.seed, least=0, most=SEEDS - 1)
        problems += self._name_problems()
        if not c.mode.any_model:
            problems += self._task_problems()
        keys = {problem.key for problem in (*problems, *of_target)}
        for key, value in flat(asdict(c)).items():
            if key not in keys and isinstance(value, float) and not math.isfinite(value):
                problems.append(Problem(ProblemCode.not_finite, key, value))
        if not problems:
            problems += c.remat.problems(partial(activation_names, self.model))
            problems += [] if self.config.mode.any_layout else self._layout(advise)[1]
        return problems + of_target

    def _name_problems(self) -> list[Problem]:
        name, text = self.config.name, ""
        if name is None:
            return []
        if not name.strip() or {".", ".."} & {name, *Path(name).parts}:
            text = f"name={name!r} names no folder under runs={self.config.runs}. Use a word, or null."
        elif strange := re.search(r"[^\w .+@/-]", name):
            text = f"name={name}: a name with {strange[0]} could not be typed after resume=. Use letters, digits, ., _ "
            text += "or -."
        elif name == "latest" and not self.config.mode.reads_run:
            text = "name=latest could never be resumed: resume=latest means the newest run. Use another name."
        return [Problem(ProblemCode.malformed, "name", name, text)] if text else []

    def legal_partitions(self) -> list[str]:
        """Return the names of the partitions in `conf/partition` that would be legal for this mesh, model and batch."""
        partitions = read_group("partition", PartitionConfig)
        runs = [self.changed(partition=partition) for partition in partitions]
        return [run.config.partition.name for run in runs if not run.layout_problems()]

    def record(self) -> dict[str, Any]:
        """Return every setting as plain values, paths of what the run reads in full, without which process this is."""
        anyone = replace(self.config.distributed, coordinator=None, processes=None, process=None)
        config = replace(
            self.config,
            distributed=anyone,
            data=self.config.data.with_full_paths(),
            code_eval=self.config.code_eval.anywhere(),
            modules=list(map(full_path, self.config.modules)),
        )
        values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def save(self, path: Path) -> None:
        """Write `run.yaml`: resolved, complete, and enough to repeat the run (`--config-path`) from any directory."""
        silent = {"root": None}
        hydra = {"run": {"dir": "."}, "output_subdir": None, "job": {"chdir": False}}
        hydra |= {"job_logging": silent, "hydra_logging": silent}
        body = OmegaConf.merge(self.record(), {"hydra": hydra})
        head = f"{HEADER}{shlex.quote(str(path.resolve().parent))} --config-name {shlex.quote(path.stem)}\n"
        if self.arguments:
            head += f"# made by: valkyrie-train {' '.join(shlex.join(self.arguments).splitlines())}\n"
        write_whole(path, head + OmegaConf.to_yaml(body))

    def _layout(self, advise: bool = True) -> tuple[Layout | None, list[Problem]]:
        return make_layout(**self._laid_out, nearest=self._nearest, advise=advise)

    @property
    def _laid_out(self) -> dict[str, Any]:
        c = self.config
        asked = {key: getattr(c, key) for key in ("mesh", "partition", "microbatches", "remat", "batch", "seq")}
        return asked | {"arrays": self.arrays, "known_axes": known_axes()}

    def layout_problems(self) -> set[Identity]:
        """Return the identities of the layout's problems: what is wrong, whatever the sizes."""
        problems = self.config.mesh.problems() or layout_with_problems(**self._laid_out)[1]
        return {problem.identity for problem in problems}

    def _nearest(self, problem: Problem) -> list[int]:
        """Return the values of the problem's key, nearest to its own, that remove it and make no other problem."""
        key, known = problem.key, self.layout_problems() - {problem.identity}
        assert key is not None

        def legal(value: int) -> bool:
            other = Run(config := with_value(self.config, key, value), config.model)
            return (
                not config.model.problems()
                and removes(problem, value, other.arrays)
                and (other.layout_problems() <= known)
            )

        value = at(self.config, key)
        least = value if key == "model.vocab_size" else 1  # the tokenizer's ids are not fewer
        return nearest_legal(value, problem.parts, legal, least)

    def _writes(self) -> tuple[str, object] | None:
        """Return the key and value for which the model must write text, or None if there is none."""
        mode, every = self.config.mode.name, self.config.code_eval_every
        every = every if mode == "train" else None
        if mode in ("generate", "code_eval"):
            return "mode", mode
        return None if every is None else ("code_eval_every", every)

    def _task_problems(self) -> list[Problem]:
        """Return why its task cannot train its model with these settings."""
        try:
            task = self.task
        except ValueError as error:
            return [Problem(ProblemCode.unknown_name, "task", text=str(error))]
        c, problems = self.config, task.problems(self.model, self.config.seq)
        if (setting := self._writes()) and not task.is_text:
            key, value = setting
            text = (
                f"{key}={value} continues a text, and model={self.model.name} answers puzzles. Use mode=eval to see "
                "how many it solves."
            )
            problems.append(Problem(ProblemCode.unsupported, key, value, text))
        if not problems and c.microbatches > 1 and task.carry(self.model, c.precision.compute.value, c.batch, c.seq):
            text = (
                f"microbatches={c.microbatches}: the task {task.name} of model={self.model.name} hands state from each "
                "step to the next, for the whole batch at once. Use microbatches=1."
            )
            problems.append(Problem(ProblemCode.unsupported, "microbatches", c.microbatches, text))
        return problems


def drop_foreign_keys(values: DictConfig, group: str) -> None:
    """Drop the keys of other modes or data sources that a `run.yaml` of an earlier version has."""
    own_keys = {"mode": modes.without_foreign_keys, "data": data.without_foreign_keys}.get(group)
    settings = OmegaConf.to_container(values[group])
    if own_keys is not None and isinstance(settings, dict) and (own := own_keys(settings)) != settings:
        values[group] = own
