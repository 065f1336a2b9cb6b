"""Records of compiled and measured layouts: `compile.json`, `measure.json`, and `outcome.json` in the compile cache.

Does not import JAX or NumPy: sweeps and reports read these records. Units are seconds, bytes and FLOPs of one device
and one step, unless a docstring gives others. None means unknown.
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
from valkyrie.parallel.partition import Role
from valkyrie.parts import PartKind, StepPart
from valkyrie.records import RecordError, decode
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.upgrade import upgrade_results
from valkyrie.train.options import Option

SCHEMA = 2
"""Version of `compile.json` and `measure.json`. Version 1 stored parts, mesh axes and positions as text."""
_AROUND_EVERYTHING = {"jit(step)", "while", "body", "closed_call", "checkpoint", "cond", "eval_jaxpr"}


class CompileStatus(Enum):
    """Result of a compile or a measurement."""

    ok = "ok"
    does_not_fit = "does_not_fit"
    refused = "refused"  # this machine cannot compile for the target, or an option is wrong
    failed = "failed"
    timeout = "timeout"


@dataclass(frozen=True)
class CompileTimes:
    """Seconds to lower and compile the step. `cached` if the program had been compiled before."""

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
    """A remat override that saves more activations, and the additional bytes that it needs, estimated."""

    change: str
    needs: int


@dataclass(frozen=True)
class OtherPartition:
    """Another legal partition of a run: roles of mesh axes, estimated memory, and estimated bytes sent.

    `sends` is None if mesh axes shard more than data, because activations are then sent too.
    """

    partition: str
    axis_roles: dict[str, Role]
    needs: int
    sends: int | None


@dataclass(frozen=True)
class Alternatives:
    """Changes to try if a layout fits."""

    remats: tuple[FullerRemat, ...] = ()
    partitions: tuple[OtherPartition, ...] = ()


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one device.

    Args:
        peak: Peak memory of a step.
        usable: Memory that the compiler may use.
        headroom: Usable memory that the peak leaves free.
        split: The peak by what it holds.
        reserved: Memory reserved by the runtime.
        code: Generated code.
        host: Host memory.
        reported_peak: Peak that the devices report after a measurement.
        needed: Memory that a program that does not fit would need.
        largest: Its largest arrays.
        savings: Overrides that save memory, in the order of `cheaper_layouts`.
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
        """The peak, or the memory needed if the program does not fit."""
        return self.needed if self.peak is None else self.peak


@dataclass(frozen=True)
class StepInterval:
    """Range of a predicted step, from ratios of measured to predicted seconds of other runs.

    `low` and `high` are those ratios, `low_s` and `high_s` the seconds. `rows` and `models` are the numbers of runs and
    of their models. `chip` is None for runs on several chips. `yours` if they are the user's own runs instead of
    published ones.
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


@dataclass(frozen=True)
class StepTime:
    """Time of a step and the rates that follow from it. MFU counts the FLOPs of the model, from 0 to 1."""

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
        executed_flops: FLOPs of the products in the program.
        hardware_utilisation: Executed FLOPs as a share of peak, from 0 to 1.
        product_rate: Rate of matrix products and kernels as a share of peak, from 0 to 1.
        replayed_s: Seconds before their correction by measured runs.
        interval: Range of the step time.
        tokens_per_dollar: By kind of price, `on_demand` and `spot`.
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
    """Measured time of a step: `step_s` is the median of `seconds`, the timed steps in order."""

    p90_s: float | None = None
    min_s: float | None = None
    first_step_s: float | None = None
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class OperationCost:
    """Time of all operations with one name in one part of the step. `source` is file and line."""

    kind: PartKind
    mesh_axes: tuple[str, ...]
    op_name: str
    source: str | None
    calls: float
    seconds: float


@dataclass(frozen=True)
class SourceLine:
    """Time of a line of the program's source, and the part of it spent waiting for other devices.

    `text` is the line itself, or None if the file is not on this machine.
    """

    source: str
    seconds: float
    waiting_s: float
    text: str | None = None


@dataclass(frozen=True)
class Recomputed:
    """A named activation that the backward pass recomputes: bytes to save it, and seconds that this would avoid."""

    name: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class RematReport:
    """Activations that a run saves for its backward pass, and those that it recomputes.

    `save` and `offload` are the lists of its remat policy. `device` and `host` are bytes by activation. `again` is
    ordered by seconds.
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
    largest_part = "largest_part"


@dataclass(frozen=True)
class Hint:
    """Advice that follows from a prediction's numbers.

    Args:
        code: Subject, or None in files of version 1.
        text: The advice as it is printed.
        share: Share of the step that it is about, from 0 to 1.
        mesh_axes: Mesh axes that it is about.
        changes: Overrides or layouts that it suggests.
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
        versions: Versions of the packages that decide the numbers.
        compile: Times of lowering and compiling.
        options: Compiler options.
        memory: Memory of one device.
        communication: Bytes that the device sends.
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
    def layout(self) -> LayoutRecord:
        """The layout of a run's step."""
        assert self.about is not None, "only a run's step has a layout"
        return self.about


@dataclass(frozen=True)
class ForeignProgram:
    """A program that is not a run's step: its name, its slice, and the names and sizes of its mesh axes."""

    name: str
    target: str
    described: str
    chip: str | None
    axes: dict[str, int]


@dataclass(frozen=True)
class Prediction(LayoutResult):
    """A compiled layout, or another compiled program: whether it fits, its step time, and why.

    Args:
        program: The program if it is not a run's step, otherwise None.
        model: Settings that decide what the model computes.
        module_sha256: Digest of the optimised module.
        placement: A line for each mesh axis about its place on the torus.
        positions: Positions of the mesh's devices, flattened.
        parameters: Number of parameters of the model.
        alternatives: Changes to try.
        reduction: Dtype in which gradients are summed.
        step: Predicted time, or None for a target without a schedule, such as a CPU.
        parts: Time of the step by part.
        costs: The slowest operations.
        lines: The slowest lines of the program's source.
        remat: Activations saved and recomputed for the backward pass.
        notes: Assumptions of the replay.
        hints: Advice.
        work: Digest of the work, the same for all layouts of it.
    """

    program: ForeignProgram | None = None
    model: dict[str, str] = field(default_factory=dict)
    module_sha256: str | None = None
    placement: tuple[str, ...] = ()
    positions: tuple[Position, ...] = ()
    parameters: int | None = None
    alternatives: Alternatives = Alternatives()
    reduction: str | None = None
    step: PredictedStep | None = None
    parts: tuple[StepPart, ...] = ()
    costs: tuple[OperationCost, ...] = ()
    lines: tuple[SourceLine, ...] = ()
    remat: RematReport | None = None
    notes: tuple[str, ...] = ()
    hints: tuple[Hint, ...] = ()
    work: str | None = None


@dataclass(frozen=True)
class Measurement(LayoutResult):
    """Result of timing a layout's step on devices.

    Args:
        simulated: Whether the devices are simulated, so that no time is real.
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

    `program` is the key of the optimised module in the cache. `axes` are the names and sizes of the mesh's axes. The
    other fields are those of `Prediction`.
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
    """Result of a compile.

    Has a `step` exactly if it is `ok`, a `shortage` exactly if it does not fit, and otherwise a reason.
    """

    status: CompileStatus
    reason: str | None = None
    step: CompiledStep | None = None
    shortage: MemoryReport | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if (self.step is not None) != (self.status is CompileStatus.ok):
            raise ValueError(f"step does not agree with status {self.status.value}")
        if (self.shortage is not None) != (self.status is CompileStatus.does_not_fit):
            raise ValueError(f"shortage does not agree with status {self.status.value}")


def read_prediction(path: Path) -> Prediction:
    """Read a `compile.json` of any version.

    Raises RecordError if its content is malformed, and OSError if it cannot be read.
    """
    content = path.read_bytes()
    try:
        return decode(Prediction, upgrade_results(json.loads(content)), str(path))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", f"cannot be read ({error})")
        reason += ". Write the file again with valkyrie-train mode=compile"
        raise RecordError(str(path), getattr(error, "field", ""), reason) from error


def short_cause(op_name: str | None) -> str:
    """Return the last three parts of an operation's name, without the functions that enclose all operations."""
    parts = [part for part in (op_name or "unnamed").split("/") if part not in _AROUND_EVERYTHING]
    return "/".join(parts[-3:])


def short_source(source: str | None) -> str:
    """Return a source line with a path relative to this package, `site-packages` or the working directory.

    Of other paths only the last three components are returned.
    """
    if not source:
        return ""
    ours = source.rsplit("valkyrie/", 1)[-1]
    short = ours.rsplit("site-packages/", 1)[-1].removeprefix(f"{Path.cwd()}/")
    return "/".join(short.split("/")[-3:]) if short.startswith("/") else short
