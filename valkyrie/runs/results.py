"""What runs result in, as `trials.jsonl`, `outcome.json` and `metrics.jsonl` keep it. Imports no JAX.

Seconds are of one training step, bytes of one device. Every field is None if it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from valkyrie.compiled.communication import CollectiveTrace, Communication, upgrade_communication
from valkyrie.parts import StepPart, upgrade_part
from valkyrie.runs.wandb_writer import TRAFFIC

_OLD_NAMES, _OLD_TOTAL = "comm_bytes/", "comm_bytes/total"


@dataclass(frozen=True)
class StepResult:
    """Speed of a step. `p90_s` and `min_s` are known if steps were timed one by one; the FLOPs are of one device.

    `product_rate` is the share of the peak that matrix products reach, `interval` the trust in a prediction, and
    `replayed_s` the predicted step before its correction by measured runs.
    """

    step_s: float | None = None
    p90_s: float | None = None
    min_s: float | None = None
    first_step_s: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_chip: float | None = None
    mfu: float | None = None
    mfu_denominator: str | None = None
    model_flops: float | None = None
    executed_flops: float | None = None
    hardware_utilisation: float | None = None
    product_rate: float | None = None
    replayed_s: float | None = None
    interval: dict[str, Any] | None = None
    tokens_per_dollar: dict[str, float | None] | None = None
    seconds: tuple[float, ...] | None = None


@dataclass(frozen=True)
class MemoryResult:
    """Memory of a device at its peak. Of a layout that does not fit only `needed` and what would help are known."""

    peak: int | None = None
    needed: int | None = None
    usable: int | None = None
    headroom: int | None = None
    split: dict[str, int] | None = None
    reserved: int | None = None
    code: int | None = None
    host: int | None = None
    reported_peak: int | None = None
    largest: list[Any] | None = None
    savings: list[Any] | None = None

    @property
    def required(self) -> int | None:
        """The peak, or what the layout needs if it does not fit."""
        return self.needed if self.peak is None else self.peak


@dataclass(frozen=True)
class CompileResult:
    """Seconds of lowering and compiling. `cached`: whether they were spent by an earlier compile."""

    lower_s: float | None = None
    compile_s: float | None = None
    cached: bool | None = None


@dataclass(frozen=True)
class GoodputResult:
    """Wall time of a training by kind, its share in steps that count, and the share of steps that wait for data."""

    wall_s: float
    seconds: dict[str, float]
    restarts: int
    share: float | None = None
    data_wait: float | None = None


@dataclass(frozen=True)
class TrialResult:
    """Numbers of a trial: of a prediction, a measurement, or a training.

    Args:
        parts: Where the time of a predicted step goes.
        communication: What a device sends, without the single collectives.
        trace: Time in collectives of a measured step.
        placement: Where each mesh axis lies on the torus, for display.
        simulated: Whether no time is real.
        devices: What a measurement ran on, such as `8 x NVIDIA H100`.
        hints: What to try next, for display.
        steps: Last step of a training.
        finished: Whether that is the last one requested.
    """

    parameters: int | None = None
    memory: MemoryResult = MemoryResult()
    step: StepResult = StepResult()
    parts: tuple[StepPart, ...] | None = None
    communication: Communication | None = None
    trace: CollectiveTrace | None = None
    placement: tuple[str, ...] | None = None
    compile: CompileResult | None = None
    simulated: bool | None = None
    loss: float | None = None
    hints: tuple[str, ...] | None = None
    devices: str | None = None
    eval_loss: float | None = None
    steps: int | None = None
    finished: bool | None = None
    goodput: GoodputResult | None = None

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a device sends in a step by mesh axes."""
        return {} if self.communication is None else self.communication.by_label

    @property
    def objective(self) -> float:
        """Tokens/s/chip, which a sweeper may maximise; 0.0 if unknown."""
        return self.step.tokens_per_second_per_chip or 0.0


def upgrade_results(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Convert plain values of a `TrialResult` as version 1.0 and earlier wrote them, in which texts name the parts.

    Newer values come back as they are. Raises ValueError if the parts are malformed.
    """
    new = dict(plain)
    if (seconds := new.pop("seconds", None)) is not None:
        if not isinstance(seconds, Mapping):
            raise ValueError("expected `object`")
        new["parts"] = [upgrade_part(name) | {"seconds": value} for name, value in seconds.items()]
    return upgrade_communication(new)


def training_traffic(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the traffic in a training's summary, as plain values; None if its program could not be read.

    Version 1.0 and earlier kept it under the names that it has at W&B, `comm_bytes/x,y`.
    """
    if TRAFFIC in summary:
        return upgrade_communication(summary)[TRAFFIC]
    if _OLD_TOTAL not in summary:
        return None
    by_axes = {key.removeprefix(_OLD_NAMES): size for key, size in summary.items() if key.startswith(_OLD_NAMES)}
    traffic = {"bytes": by_axes.pop("total"), "bytes_by_mesh_axes": by_axes}
    return upgrade_communication({TRAFFIC: traffic})[TRAFFIC]
