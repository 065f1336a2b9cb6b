"""The prediction of a compiled layout: fits or not, step time, and why. `compile.json` is this record."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from valkyrie.compiled.communication import sum_communication
from valkyrie.config.run import Run
from valkyrie.hardware.target import usable_hbm
from valkyrie.parts import PartKind, seconds_in
from valkyrie.records import encode
from valkyrie.runs.folder import versions
from valkyrie.search.compile.implementations import computed
from valkyrie.search.compile.prediction import (
    CompileTimes,
    MemoryReport,
    OperationCost,
    PredictedStep,
    Prediction,
    SourceLine,
    StepMemory,
)
from valkyrie.search.compile.recomputed import recomputation
from valkyrie.search.compile.runner import Compiled
from valkyrie.search.compile.trust import trust
from valkyrie.units import GIB

if TYPE_CHECKING:
    from valkyrie.compiled.collectives import CollectiveUse
    from valkyrie.hardware.target import ChipConfig
    from valkyrie.machine.replay import Cost, Replay

TOP_COSTS = 10
"""How many of a step's slowest operations, and of the slowest lines of its source, are listed."""
LINE = 60
"""Letters of a line of the source that are shown."""

_EVERYWHERE = {"jit(step)", "while", "body", "closed_call", "checkpoint", "cond", "eval_jaxpr"}


def summarise(run: Run, compiled: Compiled, replay: Replay | None, uses: Iterable[CollectiveUse]) -> Prediction:
    """Return the prediction of a compiled layout, without hints.

    `replay` is None if no time can be predicted (a CPU target, a layout that was not compiled); `uses` are the
    collectives of its program, with times only if there is a replay.
    """
    outcome, step = compiled.outcome, compiled.outcome.step
    prediction = Prediction(
        about=encode(run.about()),
        status=outcome.status,
        reason=outcome.reason,
        model=computed(run),
        versions=versions(),
        compile=CompileTimes(cached=compiled.cached),
    )
    if outcome.shortage is not None:
        short = outcome.shortage
        memory = MemoryReport(needed=short.needed, usable=short.usable, largest=short.largest, savings=short.savings)
        return replace(prediction, memory=memory)
    if step is None:
        return prediction
    prediction = replace(
        prediction,
        module_sha256=step.module_sha256,
        compile=CompileTimes(step.lower_s, step.compile_s, compiled.cached),
        placement=step.placement,
        positions=step.positions,
        parameters=step.parameters,
        memory=memory_report(run, step.memory),
        alternatives=step.alternatives,
        options=step.options,
        reduction=run.config.precision.reduction.value,
        step=None if replay is None else speed(run, replay),
        remat=recomputation(run, [] if replay is None else replay.costs),
    )
    return with_parts(prediction, replay, uses)


def with_parts(prediction: Prediction, replay: Replay | None, uses: Iterable[CollectiveUse]) -> Prediction:
    """Return a prediction with what a step of any program sends and, with a replay, where its time goes."""
    if replay is None:
        return replace(prediction, communication=sum_communication(uses))
    costs = sorted(replay.costs, key=lambda c: -c.seconds)[:TOP_COSTS]
    return replace(
        prediction,
        communication=sum_communication(uses, replay.sending_s),
        parts=tuple(replay.parts),
        costs=tuple(OperationCost(c.kind, c.mesh_axes, c.op_name, c.source, c.calls, c.seconds) for c in costs),
        lines=source_lines(replay.costs),
        notes=tuple(replay.notes),
    )


def source_lines(costs: Iterable[Cost]) -> tuple[SourceLine, ...]:
    """Return the slowest lines of the source."""
    seconds: dict[str, float] = defaultdict(float)
    waiting: dict[str, float] = defaultdict(float)
    for cost in costs:
        seconds[cost.source] += cost.seconds
        waiting[cost.source] += cost.seconds if cost.kind is PartKind.exposed else 0.0
    slowest = sorted((line for line in seconds if line), key=lambda line: -seconds[line])[:TOP_COSTS]
    return tuple(SourceLine(line, seconds[line], waiting[line], _text_of(line)) for line in slowest)


def _text_of(line: str) -> str | None:
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip()[:LINE] or None if number.isdecimal() else None


def memory_report(run: Run, memory: StepMemory) -> MemoryReport:
    """Return the memory of one device at the peak of a step: XLA's total, split by the shapes of the state.

    Parameters and optimizer state are arguments of known shape, and gradients are temporaries of known shape. The rest
    of the temporaries are activations and working space.
    """
    chip, program = run.config.target.chip, memory.program
    usable, peak = usable_hbm(chip), program.peak
    gradients = min(memory.gradients, program.temporary)
    split = {
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "gradients": gradients,
        "activations and temporaries": program.temporary - gradients,
        "batch and results": peak - memory.parameters - memory.optimizer - program.temporary,
    }
    return MemoryReport(
        peak=peak,
        usable=usable,
        headroom=None if usable is None else usable - peak,
        split=split,
        reserved=reserved_memory(chip),
        code=program.code,
        host=program.host,
    )


def reserved_memory(chip: ChipConfig | None) -> int | None:
    """Return the bytes of a device that the runtime keeps for itself, or None if unknown."""
    usable = usable_hbm(chip)
    if chip is None or chip.hbm_gib is None or usable is None:
        return None
    return max(int(chip.hbm_gib * GIB / chip.devices) - usable, 0)


def speed(run: Run, replay: Replay) -> PredictedStep:
    """Return the predicted time of a run's step: throughput, MFU with its denominator, tokens per dollar."""
    config, chip = run.config, run.config.target.chip
    assert chip is not None
    compute = config.precision.compute.value
    tokens = config.batch * config.seq
    return speed_on(chip, config.mesh.size, replay, tokens, run.step_flops, compute)


def speed_on(
    chip: ChipConfig,
    devices: int,
    replay: Replay,
    tokens: float | int | None = None,
    model_flops: float | int | None = None,
    compute: str = "bfloat16",
) -> PredictedStep:
    """Return the predicted time of a step of any program; None for what needs `tokens` or `model_flops`.

    Both are of one step of all devices.
    """
    chips = devices / chip.devices
    per_second = tokens / replay.step_s if tokens else None
    # The peak of the matrix unit, whatever the policy: float32 products are made of bfloat16 ones on a TPU.
    peak = max(chip.peak_tflops.get(dtype, 0.0) for dtype in ("bfloat16", compute))
    products = seconds_in(replay.parts, PartKind.matmul, PartKind.kernel)
    hourly = {"on_demand": chip.usd_per_hour, "spot": chip.spot_usd_per_hour}
    return PredictedStep(
        step_s=replay.step_s,
        tokens_per_second=per_second,
        tokens_per_second_per_chip=per_second / chips if per_second else None,
        mfu=model_flops / (replay.step_s * chips * peak * 1e12) if peak and model_flops else None,
        mfu_denominator=f"{peak:g} TFLOP/s of a {chip.name} chip (bfloat16)" if peak else None,
        model_flops=model_flops / devices if model_flops else None,
        executed_flops=replay.flops,
        hardware_utilisation=replay.flops * chip.devices / (replay.step_s * peak * 1e12) if peak else None,
        product_rate=replay.flops * chip.devices / (products * peak * 1e12) if products and peak else None,
        replayed_s=replay.step_s / replay.correction,
        interval=trust(replay.step_s, chip),
        tokens_per_dollar={k: per_second * 3600 / (chips * usd) for k, usd in hourly.items() if usd and per_second},
    )


def short_cause(op_name: str | None) -> str:
    """Return the part of an operation's name that tells it from others, without the functions around all of them."""
    parts = [part for part in (op_name or "unnamed").split("/") if part not in _EVERYWHERE]
    return "/".join(parts[-3:])


def short_source(source: str | None) -> str:
    """Return `models/layers.py:57` for a line of this package, others from the folder or the packages they lie in."""
    if not source:
        return ""
    ours = source.rsplit("valkyrie/", 1)[-1]
    return ours.rsplit("site-packages/", 1)[-1].removeprefix(f"{Path.cwd()}/")
