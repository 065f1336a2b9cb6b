"""Records of compiled and measured layouts: `compile.json`, `measure.json`, and `outcome.json` in the compile cache.

Does not import JAX or NumPy, because sweeps and reports read these records. Unless stated otherwise, values are
seconds, bytes and FLOPs of one device and one step. None means unknown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from valkyrie.compiled.communication import CollectiveTrace, Communication
from valkyrie.foreign_errors import Allocation
from valkyrie.hardware.position import Position
from valkyrie.parallel.partition import AccumulatedGradients, Role
from valkyrie.parts import PartKind, StepPart
from valkyrie.records import RecordError, decode
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.fault import Fault
from valkyrie.search.compile.upgrade import upgrade_results
from valkyrie.train.options import Option

SCHEMA = 2
"""Version of `compile.json` and `measure.json`. Version 1 stored parts, mesh axes and positions as text."""
_OUTER_SCOPES = {"jit(step)", "while", "body", "closed_call", "checkpoint", "cond", "eval_jaxpr"}


class CompileStatus(Enum):
    """Result of a compile or a measurement."""

    ok = "ok"
    does_not_fit = "does_not_fit"
    refused = "refused"  # this machine cannot compile for the target, or an option is wrong
    failed = "failed"
    timeout = "timeout"


@dataclass(frozen=True)
class CompileTimes:
    """Seconds to lower and to compile the step. `cached` is True if the program came from the cache."""

    lower_s: float | None = None
    compile_s: float | None = None
    cached: bool | None = None


@dataclass(frozen=True)
class Saving:
    """An override that saves memory, such as `remat=full`, and the estimated bytes that it saves."""

    change: str
    saves: int


@dataclass(frozen=True)
class FullerRemat:
    """A remat override that saves more activations, and the estimated additional bytes that it needs."""

    change: str
    needs: int


@dataclass(frozen=True)
class OtherPartition:
    """Another legal partition for a run.

    Args:
        partition: Name of the partition.
        axis_roles: Role of each mesh axis.
        needs: Estimated memory of one device in bytes.
        sends: Estimated bytes that a device sends per step for DP or FSDP. None with tensor, sequence or pipeline
            parallelism, because collectives on activations are not estimated.
    """

    partition: str
    axis_roles: dict[str, Role]
    needs: int
    sends: int | None


@dataclass(frozen=True)
class Alternatives:
    """Alternatives to a layout that fits: fuller remat policies and other partitions."""

    remats: tuple[FullerRemat, ...] = ()
    partitions: tuple[OtherPartition, ...] = ()


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one device.

    Args:
        peak: Peak memory of a step.
        usable: Memory that the compiler may use.
        headroom: Usable memory minus the peak. If the peak is unknown, only set if the arguments alone do not fit.
        split: Bytes of the peak by content, such as `parameters`.
        reserved: Memory reserved by the runtime.
        code: Generated code.
        host: Host memory.
        reported_peak: Peak that the devices report after a measurement.
        needed: Memory that the program needs. For the step of a run, only set if it does not fit. For a dumped module
            of unknown peak, the bytes of its arguments.
        largest: Largest arrays, or totals by content. For the step of a run, only set if it does not fit.
        savings: Overrides that save memory, in the order of `memory_savings`.
    """

    peak: int | None = None
    usable: int | None = None
    headroom: int | None = None
    split: dict[str, int] = field(default_factory=dict)
    reserved: int | None = None
    code: int | None = None
    host: int | None = None
    reported_peak: int | None = None
    needed: int | None = None
    largest: tuple[Allocation, ...] = ()
    savings: tuple[Saving, ...] = ()

    @property
    def required(self) -> int | None:
        """The peak, or `needed` if the peak is unknown."""
        return self.needed if self.peak is None else self.peak


@dataclass(frozen=True)
class StepInterval:
    """Interval of a predicted step time, derived from the prediction errors of measured runs.

    Args:
        low_s, high_s: Ends of the interval in seconds.
        low, high: Ends of the interval relative to the predicted seconds.
        rows: Number of measured runs that the interval is derived from.
        models: Number of different models of these runs. If `yours`, the number of families (model, batch and length).
        chip: Chip of the runs, or None for runs on several chips.
        libtpu: Versions of libtpu that compiled the runs.
        yours: Whether the runs are the user's own instead of published ones.
        is_new: Whether there is no published run on the chip of the prediction.
    """

    low_s: float
    high_s: float
    low: float
    high: float
    rows: int = 0
    models: int = 0
    chip: str | None = None
    libtpu: tuple[str, ...] = ()
    yours: bool = False
    is_new: bool = False


@dataclass(frozen=True)
class StepTime:
    """Time of a step, and rates derived from it.

    `mfu` is the model FLOPs utilisation, from 0 to 1. `mfu_denominator` describes the peak rate that `mfu` refers to.
    """

    step_s: float
    tokens_per_second: float | None = None
    tokens_per_second_per_chip: float | None = None
    mfu: float | None = None
    mfu_denominator: str | None = None


@dataclass(frozen=True)
class PredictedStep(StepTime):
    """Predicted time of a step.

    Args:
        model_flops: FLOPs of the model.
        executed_flops: FLOPs of all matrix products in the program.
        hardware_utilisation: Executed FLOPs per second as a share of peak, from 0 to 1.
        product_rate: FLOP/s of matmuls and kernels as a share of peak, from 0 to 1.
        replayed_s: Replayed seconds, before the correction by measured runs.
        interval: Interval of the step time.
        tokens_per_dollar: Tokens per dollar by kind of price, `on_demand` and `spot`.
    """

    model_flops: float | None = None
    executed_flops: float | None = None
    hardware_utilisation: float | None = None
    product_rate: float | None = None
    replayed_s: float | None = None
    interval: StepInterval | None = None
    tokens_per_dollar: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredStep(StepTime):
    """Measured time of a step. `seconds` are the timed steps in order.

    `step_s` is their median, `p90_s` their 90% quantile and `min_s` their minimum. `first_step_s` is the first step
    after the compile, which `seconds` leaves out if there is a warm-up.
    """

    p90_s: float | None = None
    min_s: float | None = None
    first_step_s: float | None = None
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class OperationCost:
    """Calls and seconds per step of the operations with the same kind, mesh axes, name and source (`file:line`)."""

    kind: PartKind
    mesh_axes: tuple[str, ...]
    op_name: str
    source: str | None
    calls: float
    seconds: float


@dataclass(frozen=True)
class SourceLine:
    """Time of the operations from one source line, and the part of it spent waiting for other devices.

    `source` is `file:line`. `text` is the code, or None if the file is not on this machine.
    """

    source: str
    seconds: float
    waiting_s: float
    text: str | None = None


@dataclass(frozen=True)
class Recomputed:
    """An activation that the backward pass recomputes: the bytes to save it, and the seconds of its recomputation."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class RematReport:
    """Activations that a run saves for its backward pass, and those that it recomputes.

    Args:
        save, offload: Names of activations in the remat policy.
        device, host: Bytes of saved activations by name, in device and in host memory.
        again: Recomputed activations, the slowest first.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    again: tuple[Recomputed, ...] = ()


class HintCode(Enum):
    """The subject of a hint."""

    exposed = "exposed"
    faster_layout = "faster_layout"
    reduction = "reduction"
    recomputation = "recomputation"
    save_activation = "save_activation"
    memory_bound = "memory_bound"
    copies = "copies"
    narrow_products = "narrow_products"
    padded_heads = "padded_heads"
    slow_dispatch = "slow_dispatch"
    largest_part = "largest_part"
    shortage = "shortage"


@dataclass(frozen=True)
class Hint:
    """Advice that follows from a prediction's numbers.

    Args:
        code: Subject of the hint, or None in files of version 1.
        text: Advice to print.
        share: Number that the hint is based on, usually the share of a step from 0 to 1.
        mesh_axes: Mesh axes that the hint is about.
        changes: Suggested overrides or layouts.
    """

    code: HintCode | None
    text: str
    share: float | None = None
    mesh_axes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutResult:
    """Fields that a prediction and a measurement have in common.

    Args:
        about: The layout, or None for a program that is not a run's step.
        status: Result of the compile or measurement.
        reason: Why the status is not `ok`.
        versions: Versions of the packages that affect the result.
        compile: Times of lowering and compiling.
        options: Compiler options.
        memory: Memory of one device.
        communication: Collectives and bytes sent.
        schema: Version of the file format.
        unknown: Entries of the file with keys that this version does not know.
    """

    about: LayoutRecord | None
    status: CompileStatus
    reason: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    compile: CompileTimes = CompileTimes()
    options: tuple[Option, ...] = ()
    memory: MemoryReport | None = None
    communication: Communication | None = None
    schema: int = SCHEMA
    unknown: dict[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """Unit of the throughput: `tokens`, unless a subclass overrides it."""
        return "tokens"

    @property
    def layout(self) -> LayoutRecord:
        """The layout. Only available for the step of a run."""
        assert self.about is not None, "only a run's step has a layout"
        return self.about


@dataclass(frozen=True)
class ForeignProgram:
    """A program that is not the step of a run.

    Args:
        name: Name of the program.
        target, described: Name and description of the slice that it was compiled for.
        chip: Name of the chip, or None if unknown.
        axes: Names and sizes of the mesh axes.
        unit: Unit of the program's throughput, such as `images` for images per second.
    """

    name: str
    target: str
    described: str
    chip: str | None
    axes: dict[str, int]
    unit: str = "tokens"


@dataclass(frozen=True)
class Prediction(LayoutResult):
    """Result of compiling a layout or another program: whether it fits, its predicted step time, and what limits it.

    Args:
        program: The program, or None for the step of a run.
        model: Settings that determine the function that the model computes, by key.
        module_sha256: Digest of the optimised module.
        placement: Lines that describe where each mesh axis is on the torus.
        positions: Positions of the mesh's devices, in the order of `mesh.devices.flat`.
        parameters: Number of parameters of the model.
        alternatives: Other layouts or settings to try, with their estimated effect.
        reduction: Dtype of gradient sums.
        gradients: How a step that accumulates microbatches sums gradients. None if it has no choice, or in older files.
        step: Predicted time, or None if unknown, for example because the compiler for CPUs writes no schedule.
        parts: Time of the step by part.
        costs: The slowest operations.
        lines: The slowest lines of the program's source.
        remat: Activations saved and recomputed for the backward pass.
        notes: Assumptions of the replay, which simulates the compiled schedule.
        hints: What limits the step, and what would help.
        faults: Faults in the sharding, the most expensive first. Only for programs that are not a run's step.
        work: Digest of model, batch, length, precision, target and source code (`work_key`).
    """

    program: ForeignProgram | None = None
    model: dict[str, str] = field(default_factory=dict)
    module_sha256: str | None = None
    placement: tuple[str, ...] = ()
    positions: tuple[Position, ...] = ()
    parameters: int | None = None
    alternatives: Alternatives = Alternatives()
    reduction: str | None = None
    gradients: AccumulatedGradients | None = None
    step: PredictedStep | None = None
    parts: tuple[StepPart, ...] = ()
    costs: tuple[OperationCost, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    remat: RematReport | None = None
    notes: tuple[str, ...] = ()
    hints: tuple[Hint, ...] = ()
    faults: tuple[Fault, ...] = ()
    work: str | None = None

    @property
    def unit(self) -> str:
        """Unit of the throughput: `tokens` for the step of a run, else the unit of the program."""
        return "tokens" if self.program is None else self.program.unit


@dataclass(frozen=True)
class Measurement(LayoutResult):
    """Result of timing a layout's step on devices.

    Args:
        simulated: Whether the devices are simulated. Times are then not those of real devices.
        devices: The devices, such as `8 x TPU v4`.
        data: Dataset that fed the step, or `random`.
        step: Measured time.
        trace: Time in collectives.
        loss: Loss of the last step.
    """

    simulated: bool = False
    devices: str | None = None
    data: str | None = None
    step: MeasuredStep | None = None
    trace: CollectiveTrace | None = None
    loss: float | None = None


@dataclass(frozen=True)
class CompiledStep:
    """A training step that was compiled and fits.

    `program` is the key of the program in the cache. `axes` are the names and sizes of the mesh's axes. The times are
    as in `CompileTimes`, and the other fields as in `Prediction`.
    """

    program: str
    module_sha256: str
    lower_s: float
    compile_s: float
    options: tuple[Option, ...]
    memory: MemoryReport
    parameters: int
    alternatives: Alternatives
    placement: tuple[str, ...]
    positions: tuple[Position, ...]
    axes: dict[str, int]


@dataclass(frozen=True)
class CompileOutcome:
    """Result of a compile, as the child process writes it.

    Has a `step` if and only if the status is `ok`, and a `shortage` if and only if the layout does not fit. `variable`
    is the environment variable that makes the compiler refuse every program, or None.
    """

    status: CompileStatus
    reason: str | None = None
    step: CompiledStep | None = None
    shortage: MemoryReport | None = None
    variable: str | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if (self.step is not None) != (self.status is CompileStatus.ok):
            raise ValueError(f"step is inconsistent with status={self.status.value}")
        if (self.shortage is not None) != (self.status is CompileStatus.does_not_fit):
            raise ValueError(f"shortage is inconsistent with status={self.status.value}")


def read_prediction(path: Path) -> Prediction:
    """Read a `compile.json` of any version.

    Raises RecordError if its content is malformed, and OSError if it cannot be read.
    """
    content = path.read_bytes()
    try:
        return decode(Prediction, upgrade_results(json.loads(content)), str(path))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", f"cannot be read ({error})")
        place = f" at {error.field}" if isinstance(error, RecordError) and error.field else ""
        reason += f"{place}. Recreate the file with valkyrie-train mode=compile"
        raise RecordError(str(path), "", reason) from error


def short_cause(op_name: str | None) -> str:
    """Return the last three parts of an operation's name, not counting scopes such as `jit(step)`, `while` and `body`.

    Returns `unnamed` for an operation without a name.
    """
    parts = [part for part in (op_name or "unnamed").split("/") if part not in _OUTER_SCOPES]
    return "/".join(parts[-3:])


def short_source(source: str | None) -> str:
    """Shorten the path of a source line: relative to this package, `site-packages` or the working directory.

    Other paths are cut to their last three components. Returns an empty string for None.
    """
    if not source:
        return ""
    short = source.rsplit("valkyrie/", 1)[-1].rsplit("site-packages/", 1)[-1].removeprefix(f"{Path.cwd()}/")
    return "/".join(short.split("/")[-3:]) if short.startswith("/") else short
