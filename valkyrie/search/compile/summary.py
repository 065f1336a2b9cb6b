"""Builds the predictions that `compile.json` stores: whether a layout fits, its step time, and where the time goes."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from enum import Enum
from typing import TYPE_CHECKING

from valkyrie.compiled.communication import sum_communication
from valkyrie.config.run import Run
from valkyrie.hardware.target import usable_hbm
from valkyrie.models import is_dense_transformer
from valkyrie.models.stack import Stack
from valkyrie.parallel.remat import ActivationLocation, is_not_needed, saved_location
from valkyrie.parts import PartKind, sum_seconds
from valkyrie.runs.folder import package_versions
from valkyrie.search.compile.correction import step_interval
from valkyrie.search.compile.prediction import (
    CompileTimes,
    MemoryReport,
    OperationCost,
    PredictedStep,
    Prediction,
    Recomputed,
    RematReport,
    SourceLine,
)
from valkyrie.search.compile.runner import CompiledRun
from valkyrie.train.memory import MemoryEstimator
from valkyrie.train.run_memory import accumulated_gradients, saved_bytes, to_candidates
from valkyrie.units import GIB

if TYPE_CHECKING:
    from valkyrie.compiled.collectives import CollectiveUse
    from valkyrie.compiled.memory import ProgramMemory
    from valkyrie.hardware.target import ChipConfig
    from valkyrie.machine.replay import OpTotals, Replay
    from valkyrie.train.memory import ExpectedMemory

_MAX_LISTED = 10
"""Number of operations and of source lines to list, the slowest first."""
_LINE_LENGTH = 60
"""Maximum number of characters of a source line."""
_RECOMPUTED_SCOPE = "rematted_computation"
"""Scope in the names of operations that `jax.checkpoint` recomputes."""
_IMPLEMENTATION_KEYS = frozenset({"model.s5.scan_block", "model.loss_chunk"})
"""Settings that do not change the function of a model, in addition to those of `implementation_settings`."""


def summarise(run: Run, compiled: CompiledRun, replay: Replay | None, uses: Iterable[CollectiveUse]) -> Prediction:
    """Return the prediction of a layout from the result of its compile, without hints.

    If the compile failed, the prediction has its status and reason, and the memory of a layout that does not fit.

    Args:
        run: The run.
        compiled: Result of its compile.
        replay: Replay of its step, or None if the compile failed or the target is a CPU. Without a replay, the
            prediction has no step time.
        uses: Collectives of its program, with times only if there is a replay.
    """
    outcome, step = compiled.outcome, compiled.outcome.step
    prediction = Prediction(
        about=run.layout_record(),
        status=outcome.status,
        reason=outcome.reason,
        model=model_settings(run),
        versions=package_versions(),
        compile=CompileTimes(cached=compiled.cached),
        memory=outcome.shortage,
        gradients=accumulated_gradients(run),
    )
    if step is None:
        return prediction
    prediction = replace(
        prediction,
        module_sha256=step.module_sha256,
        compile=CompileTimes(step.lower_s, step.compile_s, compiled.cached),
        placement=step.placement,
        positions=step.positions,
        parameters=step.parameters,
        memory=step.memory,
        alternatives=step.alternatives,
        options=step.options,
        reduction=run.config.precision.reduction.value,
        step=None if replay is None else predicted_step(run, replay),
        remat=remat_report(run, [] if replay is None else replay.costs),
    )
    return with_parts(prediction, replay, uses)


def with_parts(prediction: Prediction, replay: Replay | None, uses: Iterable[CollectiveUse]) -> Prediction:
    """Add communication to a prediction and, with a replay, the time by part, operation and source line."""
    if replay is None:
        return replace(prediction, communication=sum_communication(uses))
    costs = sorted(replay.costs, key=lambda cost: -cost.seconds)[:_MAX_LISTED]
    return replace(
        prediction,
        communication=sum_communication(uses, replay.sending_s),
        parts=tuple(replay.parts),
        costs=tuple(OperationCost(c.kind, c.mesh_axes, c.op_name, c.source, c.calls, c.seconds) for c in costs),
        lines=source_lines(replay.costs),
        notes=tuple(replay.notes),
    )


def source_lines(costs: Iterable[OpTotals]) -> tuple[SourceLine, ...]:
    """Return the `_MAX_LISTED` source lines with the longest total time of operations, the slowest first."""
    seconds_by_line: dict[str, float] = defaultdict(float)
    waiting_s_by_line: dict[str, float] = defaultdict(float)
    for cost in costs:
        seconds_by_line[cost.source] += cost.seconds
        waiting_s_by_line[cost.source] += cost.seconds if cost.kind is PartKind.exposed else 0.0
    slowest = sorted((line for line in seconds_by_line if line), key=lambda line: -seconds_by_line[line])[:_MAX_LISTED]
    return tuple(SourceLine(line, seconds_by_line[line], waiting_s_by_line[line], _read_line(line)) for line in slowest)


def _read_line(location: str) -> str | None:
    """Return the text of a line of Python, or None if unknown. A module from elsewhere may name any file."""
    file, _, number = location.rpartition(":")
    if not number.isdecimal() or not (file.endswith(".py") or file.startswith("<")):
        return None
    code = linecache.getline(file, int(number)).strip()
    return (code if len(code) <= _LINE_LENGTH else code[: _LINE_LENGTH - 1] + "…") or None


def model_settings(run: Run) -> dict[str, str]:
    """Return the settings that determine the function of a model, by key, without implementation choices."""
    implementation_keys = {
        f"model.{block}.{name}" for block, name, _ in implementation_settings(run)
    } | _IMPLEMENTATION_KEYS
    return {
        key: value for key, value in run.values().items() if key.startswith("model.") and key not in implementation_keys
    }


def implementation_settings(run: Run) -> Iterator[tuple[str, str, Enum]]:
    """Yield the block, name and value of each setting that chooses an implementation.

    These are the settings of mixers and feed-forward blocks with an enum type that has a member `auto`. Yields nothing
    if the model is not a `Stack`.
    """
    model = run.model
    for block_name, block in (model.used_mixers | model.used_feed_forwards).items() if isinstance(model, Stack) else ():
        for name in (field.name for field in fields(block)):
            value = getattr(block, name)
            if isinstance(value, Enum) and "auto" in [choice.value for choice in type(value)]:
                yield block_name, name, value


def remat_report(run: Run, costs: Iterable[OpTotals]) -> RematReport:
    """Return the activations that a run saves for its backward pass, and those that it recomputes.

    The time of a recomputed activation is the sum over the recomputed operations in `costs` that have the activation's
    name in their scope. It includes the time of activations that are recomputed only as its inputs.
    """
    saved, remat = saved_bytes(run), run.config.remat
    recomputed_costs = [
        (set(cost.op_name.split("/")), cost.seconds) for cost in costs if _RECOMPUTED_SCOPE in cost.op_name
    ]
    recomputed = [
        Recomputed(
            name, size, sum((s for scopes, s in recomputed_costs if not scopes.isdisjoint((name, *helper_names))), 0.0)
        )
        for name, (size, helper_names) in recomputed_activations(run).items()
    ]
    recomputed.sort(key=lambda entry: -entry.seconds)
    return RematReport(tuple(remat.save), tuple(remat.offload), saved.device, saved.host, tuple(recomputed))


def memory_report(
    chip: ChipConfig | None, memory: ProgramMemory, expected_memory: ExpectedMemory | None = None
) -> MemoryReport:
    """Return the memory of one device at the peak of a step, as counted by XLA.

    For a training step, `expected_memory` is its expected memory by part. The peak is then split into parameters (with
    their average), optimizer state, gradients, activations with temporaries, and batch with results. If
    `expected_memory` is None, the peak is split into arguments, outputs, temporaries and program.
    """
    usable, peak = usable_hbm(chip), memory.peak
    if expected_memory is None:
        split = {
            "arguments": memory.arguments,
            "outputs not aliased to arguments": memory.outputs - memory.aliased,
            "temporaries": memory.temporary,
            "program": peak - memory.arguments_and_outputs - memory.temporary,
        }
    else:
        parameters = expected_memory.parameters + expected_memory.ema
        gradients = min(expected_memory.gradients, memory.temporary)
        split = {
            "parameters": parameters,
            "optimizer": expected_memory.optimizer,
            "gradients": gradients,
            "activations and temporaries": memory.temporary - gradients,
            "batch and results": peak - parameters - expected_memory.optimizer - memory.temporary,
        }
    reserved = None
    if chip is not None and chip.hbm_gib is not None and usable is not None:
        reserved = max(int(chip.hbm_gib * GIB / chip.devices) - usable, 0)
    return MemoryReport(
        peak=peak,
        usable=usable,
        headroom=None if usable is None else usable - peak,
        split=split,
        reserved=reserved,
        code=memory.code,
        host=memory.host,
    )


def predicted_step(run: Run, replay: Replay) -> PredictedStep:
    """Return the predicted time of a run's step, with throughput, MFU and tokens per dollar."""
    config, chip = run.config, run.config.target.chip
    assert chip is not None
    tokens = config.batch * config.seq
    return program_step(
        chip,
        config.mesh.size,
        replay,
        tokens,
        run.step_flops,
        config.precision.compute.value,
        trains_dense_transformer=is_dense_transformer(run.model),
    )


def program_step(
    chip: ChipConfig,
    devices: int,
    replay: Replay,
    tokens: float | int | None = None,
    model_flops: float | int | None = None,
    compute_dtype: str = "bfloat16",
    *,
    trains_dense_transformer: bool = False,
) -> PredictedStep:
    """Return the predicted time of a step of any program.

    `tokens` and `model_flops` are for one step on all devices. If one is None, the rates that need it are None. Without
    `tokens`, `tokens_per_dollar` is empty. `compute_dtype` is the dtype of matmuls. Only the step of a dense
    transformer has an interval, unless `mode=calibrate` has fitted the chip to the user's own runs.
    """
    chips = devices / chip.devices
    tokens_per_second = tokens / replay.step_s if tokens else None
    # Use the bfloat16 peak for every precision: on a TPU, a float32 product consists of several bfloat16 products.
    peak = max(chip.peak_tflops.get(dtype, 0.0) for dtype in ("bfloat16", compute_dtype))
    product_s = sum_seconds(replay.parts, PartKind.matmul, PartKind.kernel)
    hourly_usd = {"on_demand": chip.usd_per_hour, "spot": chip.spot_usd_per_hour}
    return PredictedStep(
        step_s=replay.step_s,
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_chip=tokens_per_second / chips if tokens_per_second else None,
        mfu=model_flops / (replay.step_s * chips * peak * 1e12) if peak and model_flops else None,
        mfu_denominator=f"{peak:g} TFLOP/s per {chip.name} chip (bfloat16)" if peak else None,
        model_flops=model_flops / devices if model_flops else None,
        executed_flops=replay.flops,
        hardware_utilisation=replay.flops * chip.devices / (replay.step_s * peak * 1e12) if peak else None,
        product_rate=replay.flops * chip.devices / (product_s * peak * 1e12) if product_s and peak else None,
        replayed_s=replay.step_s / replay.correction,
        interval=step_interval(replay.step_s, chip, trains_dense_transformer=trains_dense_transformer),
        tokens_per_dollar={
            k: tokens_per_second * 3600 / (chips * usd) for k, usd in hourly_usd.items() if usd and tokens_per_second
        },
    )


def recomputed_activations(run: Run) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return two values for each named activation that a run recomputes: the cost of saving it, and its prerequisites.

    The cost is the memory to save the activation, in bytes per device. The prerequisites are the names of activations
    that are recomputed only to obtain it, so saving it avoids recomputing them too. Empty under 1F1B, which always
    saves layer inputs only.
    """
    layout, remat = run.layout, run.config.remat
    if layout.pipeline is not None and layout.pipeline.is_1f1b:
        return {}
    sizes: dict[str, float] = defaultdict(float)
    prerequisites: dict[str, dict[str, None]] = defaultdict(dict)
    for activation, bytes_ in MemoryEstimator(run, to_candidates([run])).activations:
        is_recomputed = saved_location(activation, remat) is ActivationLocation.nowhere and not is_not_needed(
            activation, remat
        )
        if is_recomputed and activation.name is not None and activation.count:
            sizes[activation.name] += bytes_.item()
            if activation.needed_for is not None:
                prerequisites[activation.needed_for][activation.name] = None
    return {name: (int(size), tuple(prerequisites[name])) for name, size in sizes.items()}
