"""`Run`: the composed and typed configuration behind every command, with its checks. Does not import JAX."""

from __future__ import annotations

import os
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
from valkyrie.buckets import bucket_problems, file_problems
from valkyrie.checkpoint import CheckpointConfig
from valkyrie.code_eval.config import CodeEvalConfig
from valkyrie.config import refusals
from valkyrie.config.modes import MODES, ModeConfig, Needs
from valkyrie.config.schema import merge_into_schema
from valkyrie.data.config import MAX_SEED, SOURCES, DataConfig, full_path
from valkyrie.extensions import Families, add_import_path, remember_modules
from valkyrie.hardware.target import TargetConfig
from valkyrie.models import Model, activation_names, known_axes, sequence_problems
from valkyrie.optim import OptimizerConfig
from valkyrie.parallel.batches import BatchSizes, resolve_batches
from valkyrie.parallel.layout import Layout, derive_layout, layout_with_problems, make_layout
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.parallel.on_target import product_problems, target_problems
from valkyrie.parallel.partition import PartitionConfig, shipped_partitions
from valkyrie.parallel.problems import is_removed_by, nearest_legal
from valkyrie.parallel.remat import RematConfig
from valkyrie.paths import config_names, write_atomic
from valkyrie.precision import PolicyConfig
from valkyrie.problems import Identity, Problem, ProblemCode, ProblemError, check_range, raise_problems
from valkyrie.processes.distributed import DistributedConfig
from valkyrie.runs.columns import html_facts
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.runs.tracking import profile_problems
from valkyrie.runs.wandb_writer import TrackingConfig
from valkyrie.tasks import TASKS, Task
from valkyrie.trees import flatten, get_value, override_text, with_value

HEADER = "# valkyrie-train --config-path "
"""First characters of every `run.yaml`."""
FAMILIES: dict[str, Families] = {
    "mode": MODES,
    "model": models.FAMILIES,
    "data": SOURCES,
    "task": TASKS,
    "optimizer": optim.FAMILIES,
}
"""Config groups with one schema per family. A family may be a module of the user."""
OPTIONAL_GROUPS = frozenset({"task"})
"""Groups that a run may omit. Without `task`, a run uses the task of its model family."""
_MAX_NAME_BYTES = 200
"""Maximum bytes of each part of a new run's name. File systems allow 255, and some files append to the name."""
_LAYOUT_COUNTS = ("microbatches", "partition.rounds")


class Debug(Enum):
    """Extra checks. `nans` turns on `jax_debug_nans`, which is slow and names the operation that made a NaN."""

    none = "none"
    nans = "nans"


@dataclass
class TrialConfig:
    """Settings of each trial of a multirun.

    Args:
        limit_s: time limit of the trial's process in seconds, or None for the limit of its mode (`ModeConfig.limit_s`).
        retry: whether to repeat trials that crashed, were killed or timed out.
    """

    limit_s: float | None = None
    retry: bool = False


@dataclass
class RunConfig:
    """The schema of `conf/train.yaml`, whose comments describe more keys.

    Args:
        task: the task, or None for the task of the model family.
        batch: sequences in the global batch.
        seq: tokens in a sequence.
        batch_tokens: tokens in the global batch, to compute `batch` from, or None.
        device_batch: sequences per device and pipeline stage at a time, to compute `microbatches` from, or None.
        modules: folders with the user's modules (models, data sources, tasks, optimizers, modes). Child processes of
            the run import them too.
        force: continue even if this machine has too little memory or too few cores.
        profile: the steps to trace, such as `100-105`.
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
    """A requested run: its settings, as nested dataclasses, and its model. The layout is derived from them.

    `arguments` are the command-line arguments of the run, which `run.yaml` records in a comment.
    """

    config: RunConfig
    model: Model
    arguments: tuple[str, ...] = field(default=(), compare=False)
    batch_note: str | None = field(default=None, compare=False)
    """Describes how `batch_tokens` and `device_batch` were converted. None if unset or the mode ignores the layout."""

    def __repr__(self) -> str:
        record, mode = self.request_record(), self.config.mode
        layout = f"mode={mode.name}" if mode.ignores_layout else f"mesh={record.mesh} partition={record.partition}"
        targets = ",".join(getattr(mode, "targets", ())) or record.target  # only mode=search compares several
        return (
            f"<Run {record.model}, {layout} target={targets}, {record.batch} x {record.seq} tokens, {record.precision}>"
        )

    def _repr_html_(self) -> str:
        record = self.request_record()
        layout = None if self.config.mode.ignores_layout else self._layout(advise=False)[0]
        facts = {"model": f"{record.model}, {self.model.parameter_count():,} parameters", "target": record.described}
        layout_facts = {} if layout is None else {"layout": layout.name, "roles": layout.describe_roles()}
        return html_facts(
            facts | layout_facts | {"batch": f"{record.batch} x {record.seq}", "mode": self.config.mode.name}
        )

    @property
    def layout(self) -> Layout:
        """The layout of this run. Raises ProblemError with all of its problems if it is illegal."""
        layout, problems = self._layout()
        if problems or layout is None:
            raise ProblemError(problems)
        return layout

    @cached_property
    def arrays(self) -> Arrays:
        """The arrays of the model that a layout shards."""
        return self.model.arrays()

    def changed(self, **values: Any) -> Run:
        """Return a copy with other values of some keys (`mesh`, `partition`, ...) and the same model."""
        copy = Run(replace(self.config, **values), self.model, self.arguments)
        copy.__dict__["arrays"] = self.arrays
        return copy

    def layout_on(self, mesh: MeshConfig, partition: PartitionConfig) -> Layout:
        """Return the layout of this model on a mesh under a partition, ignoring the batch. It may be illegal."""
        return derive_layout(mesh, partition, self.arrays, known_axes=known_axes())[0]

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer: that of the data if set, else that of the model."""
        return self.config.data.tokenizer_for(self.model.tokenizer)

    @cached_property
    def task(self) -> Task:
        """The task set by `task=`, else the model's default task. Raises ValueError if that task does not exist."""
        return self.config.task or TASKS.config_class(self.model.task)()

    @property
    def step_flops(self) -> float:
        """Model FLOPs of one training step on the global batch."""
        return self.model.step_flops_per_token(self.config.seq) * self.config.batch * self.config.seq

    @property
    def order_seed(self) -> int:
        """Seed of the document order: `data.shuffle_seed` if set, else the seed of the run."""
        shuffle_seed = self.config.data.shuffle_seed
        return self.config.seed if shuffle_seed is None else shuffle_seed

    def request_record(self) -> LayoutRecord:
        """Return the record of the requested settings. Also works if the layout is illegal."""
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

    def layout_record(self) -> LayoutRecord:
        """Return the record of the requested settings and the layout. Raises ValueError if the layout is illegal."""
        layout = self.layout
        return replace(
            self.request_record(),
            layout=layout.name,
            roles=layout.describe_roles(),
            axis_roles=layout.roles,
            degrees=layout.degrees,
            sharding=layout.sharding_hash,
            pipeline=None if layout.pipeline is None else layout.pipeline.to_record(),
        )

    def values(self) -> dict[str, str]:
        """Return the settings of model, precision and optimizer as text, by key: `{"model.layers": "4"}`."""
        groups = {"model": self.config.model, "precision": self.config.precision, "optimizer": self.config.optimizer}
        values = flatten({name: asdict(group) for name, group in groups.items()})
        return {key: override_text(value) for key, value in values.items()}

    @staticmethod
    def from_config(config: DictConfig) -> Run:
        """Build a run from a composed config or the content of a `run.yaml`.

        Raises ValueError for unknown keys or families, listing the valid ones, and for values of a wrong type.
        """
        composed_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        add_import_path(OmegaConf.select(composed_config, "modules") or [])
        classes, folders = dict[str, type](), []
        for group, families in FAMILIES.items():
            if not isinstance(settings := composed_config.get(group), DictConfig | None):
                raise ValueError(f"{group}={override_text(settings)} must be a mapping of settings.")
            family = OmegaConf.select(composed_config, families.key)
            if family is None and group in OPTIONAL_GROUPS:
                if settings:  # keys such as +task.foo=1, without a choice of the group
                    raise ValueError(f"{group}.{next(iter(settings))} is set, but {refusals.advise_choice(group)}")
                continue
            if family is None:
                raise ValueError(f"{families.key} is missing. Known: {', '.join(families.names())}.")
            refusals.drop_foreign_keys(composed_config, group)
            classes[group] = families.config_class(family)
            if OmegaConf.get_type(composed_config[group]) not in (dict, classes[group]):
                choice = family if family in config_names(group) else "NAME"
                kind = families.field_name
                raise ValueError(
                    f"{families.key}={family} changes the {kind} but not its settings. Write {group}={choice}."
                )
            folders.append(families.user_folder(family))
        try:
            full_config = merge_into_schema(RunConfig, classes, composed_config)
            OmegaConf.resolve(full_config)
            raise_problems(refusals.unknown_key_problems(full_config) or refusals.nested_value_problems(full_config))
            typed_config = OmegaConf.to_object(full_config)
        except OmegaConfBaseException as error:
            raise ProblemError(
                [refusals.find_wrong_interpolation(composed_config, error) or refusals.problem_from_error(error)]
            ) from None
        assert isinstance(typed_config, RunConfig)
        if typed_config.task is None:
            folders.append(TASKS.user_folder(typed_config.model.task))
        user_folders = dict.fromkeys(str(folder) for folder in folders if folder is not None)
        typed_config.modules += [folder for folder in user_folders if folder not in typed_config.modules]
        return Run(typed_config, typed_config.model)._resolve_batch_shape()

    def _resolve_batch_shape(self) -> Run:
        """Return the run with `batch` and `microbatches` computed from `batch_tokens` and `device_batch`.

        Resets `batch_tokens` and `device_batch` to None, so that a trial or a resumed run can override `batch` and
        `microbatches`. Modes that ignore the layout keep `microbatches` and `device_batch`, because each layout that
        they try has its own number of microbatches. If the batch cannot be divided as requested, returns the run
        unchanged; `problems` reports the error.
        """
        c, batch_sizes = self.config, self._batch_sizes()
        if batch_sizes.problems or (c.batch_tokens, c.device_batch) == (None, None):
            return self
        counts = {"batch": batch_sizes.batch, "microbatches": batch_sizes.microbatches}
        config = replace(c, **counts, batch_tokens=None, device_batch=None)
        if self.config.mode.ignores_layout:  # each layout has its own number of microbatches
            return replace(self, config=replace(config, microbatches=c.microbatches, device_batch=c.device_batch))
        return replace(self, config=config, batch_note=batch_sizes.describe(c.seq, c.device_batch))

    def _batch_sizes(self) -> BatchSizes:
        c = self.config
        has_shards = c.device_batch is not None and not c.mesh.problems() and not self.config.mode.ignores_layout
        shards = self.layout_on(c.mesh, c.partition).shard_count(BATCH) if has_shards else 1
        return resolve_batches(c.batch, c.microbatches, c.seq, shards, c.batch_tokens, c.device_batch)

    def problems(self, *, advise: bool = True) -> list[Problem]:
        """Return all problems of this run that can be found without JAX and without a device.

        With `advise`, messages suggest legal values. Searching for them takes longer than finding the problems.
        """
        c = self.config
        if size_problems := refusals.integer_size_problems(asdict(c)):
            return size_problems
        problems = [*self.model.problems(), *c.optimizer.problems()]
        problems += [*c.checkpoint.problems(), *c.data.problems()]
        problems += [*c.distributed.problems(), *self._batch_sizes().problems, *c.code_eval.refusals(c.code_eval_every)]
        is_search = c.mode.ignores_layout and c.mode.needs is Needs.nothing
        hardware_problems = c.target.problems() if is_search else target_problems(c.target, c.mesh)
        for key in ("steps", "batch", "seq", "log_every", "eval_every", "eval_batches", *_LAYOUT_COUNTS):
            problems += check_range(key, get_value(c, key), least=1)
        problems += bucket_problems("runs", c.runs) or file_problems("runs", c.runs)
        problems += [*profile_problems(c.profile, c.steps), *c.tracking.problems(), *c.mode.problems()]
        problems += c.tracking.environment_problems() if c.mode.tracked else []
        problems += check_range("trial.limit_s", c.trial.limit_s, above=0, otherwise="null")
        problems += check_range("temperature", c.temperature, least=0)
        problems += check_range("top_k", c.top_k, least=1, otherwise="null to sample from all tokens")
        problems += check_range("sample_every", c.sample_every, least=1, otherwise="null for no samples")
        problems += check_range("sample_tokens", c.sample_tokens, least=0)
        problems += [*check_range("seed", c.seed, least=0, most=MAX_SEED), *self._name_problems()]
        problems += [] if c.mode.accepts_untrainable_models else self._task_problems()
        keys = {problem.key for problem in (*problems, *hardware_problems)}
        problems += product_problems(c.target, c.precision)
        value_problems = (*refusals.empty_text_problems(self.arguments), *refusals.infinite_number_problems(asdict(c)))
        problems += [problem for problem in value_problems if problem.key not in keys]
        if not problems:
            if c.optimizer.family not in optim.FAMILIES.names():
                optim.check_bytes(c.optimizer, self.model.parameters().values())
            problems += sequence_problems(self.model, c.seq)
            problems += c.remat.problems(partial(activation_names, self.model))
            problems += [] if self.config.mode.ignores_layout else self._layout(advise)[1]
        return problems + hardware_problems

    def _name_problems(self) -> list[Problem]:
        name, text = self.config.name, ""
        if name is None:
            return []
        is_saved = self.config.resume is not None or self.config.mode.reads_run  # older runs may have longer names
        if not name.strip() or {".", ".."} & {name, *Path(name).parts}:
            text = f"name={name!r} cannot be the name of a folder in runs={self.config.runs}. Use a word, or null."
        elif forbidden_character := re.search(r"[^\w .+@/-]", name):
            text = f"name={name}: {forbidden_character[0]} is not allowed in a name. Use letters, digits, ., _ or -."
        elif not is_saved and (length := max(len(os.fsencode(part)) for part in Path(name).parts)) > _MAX_NAME_BYTES:
            text = (
                f"name={name[:12]}... is too long: at most {_MAX_NAME_BYTES} bytes are allowed between slashes, but "
                f"it has {length}. Use a shorter name."
            )
        elif name == "latest" and not self.config.mode.reads_run:
            text = "name=latest is not allowed, because resume=latest means the newest run. Use another name."
        return [Problem(ProblemCode.malformed, "name", name, text)] if text else []

    def legal_partitions(self) -> list[str]:
        """Return the names of the partitions in `conf/partition` that are legal for this mesh, model and batch."""
        runs = [self.changed(partition=partition) for partition in shipped_partitions(self.arrays.axes)]
        return [run.config.partition.name for run in runs if not run.layout_problem_identities()]

    def record(self) -> dict[str, Any]:
        """Return every setting as plain values, for `run.yaml`.

        Paths of inputs are absolute. The coordinator, process count and process index are None, because they may change
        from one start to the next.
        """
        distributed_config = replace(self.config.distributed, coordinator=None, processes=None, process=None)
        config = replace(
            self.config,
            distributed=distributed_config,
            data=self.config.data.with_full_paths(),
            code_eval=self.config.code_eval.with_absolute_path(),
            modules=list(map(full_path, self.config.modules)),
        )
        values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def save(self, path: Path) -> None:
        """Write `run.yaml` with every setting resolved, so that `--config-path` repeats the run from any directory.

        Also calls `remember_modules`, so that later commands may import the run's modules.
        """
        silent_logger = {"root": None}
        hydra = {"run": {"dir": "."}, "output_subdir": None, "job": {"chdir": False}}
        hydra |= {"job_logging": silent_logger, "hydra_logging": silent_logger}
        content = OmegaConf.merge(self.record(), {"hydra": hydra})
        remember_modules(self.config.modules)
        header = f"{HEADER}{shlex.quote(str(path.resolve().parent))} --config-name {shlex.quote(path.stem)}\n"
        if self.arguments:
            header += f"# made by: valkyrie-train {' '.join(shlex.join(self.arguments).splitlines())}\n"
        write_atomic(path, header + OmegaConf.to_yaml(content))

    def _layout(self, advise: bool = True) -> tuple[Layout | None, list[Problem]]:
        c = self.config
        return make_layout(
            c.mesh,
            c.partition,
            self.arrays,
            microbatches=c.microbatches,
            remat=c.remat,
            batch=c.batch,
            seq=c.seq,
            known_axes=known_axes(),
            find_nearest=self._nearest_legal_values,
            advise=advise,
        )

    def layout_problem_identities(self) -> set[Identity]:
        """Return the identities (`Problem.identity`) of the mesh's problems or, if it has none, of the layout's."""
        c = self.config
        sizes = (c.microbatches, c.remat, c.batch, c.seq)
        problems = c.mesh.problems() or layout_with_problems(c.mesh, c.partition, self.arrays, *sizes, known_axes())[1]
        return {problem.identity for problem in problems}

    def _nearest_legal_values(self, problem: Problem) -> list[int]:
        """Return the nearest values of the problem's key that solve the problem without causing another."""
        key, other_problems = problem.key, self.layout_problem_identities() - {problem.identity}
        assert key is not None

        def is_legal(value: int) -> bool:
            changed_run = Run(config := with_value(self.config, key, value), config.model)
            return (
                not config.model.problems()
                and is_removed_by(problem, value, changed_run.arrays)
                and (changed_run.layout_problem_identities() <= other_problems)
            )

        value = get_value(self.config, key)
        least = value if key == "model.vocab_size" else 1  # it must cover the ids of the tokenizer
        return nearest_legal(value, problem.parts, is_legal, least)

    def _generation_setting(self) -> tuple[str, object] | None:
        """Return the key and value that require the model to generate text, or None if no setting does."""
        mode, interval = self.config.mode.name, self.config.code_eval_every
        interval = interval if mode == "train" else None
        if mode in ("generate", "code_eval"):
            return "mode", mode
        return None if interval is None else ("code_eval_every", interval)

    def _task_problems(self) -> list[Problem]:
        """Return the problems of the task alone and in combination with the model, the mode and other settings."""
        try:
            task = self.task
        except ValueError as error:
            return [Problem(ProblemCode.unknown_name, "task", text=str(error))]
        c, problems = self.config, task.problems(self.model, self.config.seq)
        if (setting := self._generation_setting()) and not task.is_text:
            key, value = setting
            text = (
                f"{key}={value} needs a model that generates text, but model={self.model.name} solves puzzles. Use "
                "mode=eval to see how many it solves."
            )
            problems.append(Problem(ProblemCode.unsupported, key, value, text))
        if not problems and c.microbatches > 1 and task.carry(self.model, c.precision.compute.value, c.batch, c.seq):
            text = (
                f"microbatches={c.microbatches}: the task {task.name} of model={self.model.name} carries state from "
                "step to step for the whole batch. Use microbatches=1."
            )
            problems.append(Problem(ProblemCode.unsupported, "microbatches", c.microbatches, text))
        return problems
