"""The summary of a compiled layout as one machine-readable value: fits or not, step time, and why.

`compile.json` is this value; what is printed is made from it alone.
"""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.compiled.communication import communication
from valkyrie.config.run import Run
from valkyrie.hardware.target import usable_hbm
from valkyrie.records import encode
from valkyrie.runs.folder import versions
from valkyrie.search.compile.implementations import computed
from valkyrie.search.compile.recomputed import recomputation
from valkyrie.search.compile.runner import Compiled
from valkyrie.search.compile.trust import trust
from valkyrie.units import GIB

if TYPE_CHECKING:
    from valkyrie.compiled.collectives import CollectiveUse
    from valkyrie.hardware.target import ChipConfig
    from valkyrie.machine.replay import Cost, Replay

SCHEMA = 1
"""The version of `compile.json`; it grows when a key changes its meaning."""

TOP_COSTS = 10
"""How many of a step's slowest operations, and of the dearest lines of its source, are listed."""
LINE = 60
"""Letters of a line of the source that are shown."""

_EVERYWHERE = {"jit(step)", "while", "body", "closed_call", "checkpoint", "cond", "eval_jaxpr"}


def summarise(run: Run, compiled: Compiled, replay: Replay | None, uses: Iterable[CollectiveUse]) -> dict[str, Any]:
    """Return everything known of a compiled layout. Seconds, bytes per device and step, FLOPs per device and step.

    `replay` is None where no time can be told (a CPU target, a layout that was not compiled); `uses` are the
    collectives of its program, with times only if there is a replay.
    """
    outcome = compiled.outcome
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "about": encode(run.about()),
        "status": compiled.status,
        "reason": outcome.get("reason"),
        "model": computed(run),
        "module_sha256": outcome.get("module_sha256"),
        "versions": versions(),
        "compile": {key: outcome.get(key) for key in ("lower_s", "compile_s")} | {"cached": compiled.cached},
        "placement": outcome.get("placement", []),
        "positions": positions(outcome.get("positions", [])),
    }
    if compiled.status == "does_not_fit":
        summary["memory"] = {key: outcome.get(key) for key in ("needed", "usable", "largest", "savings")}
    if compiled.status != "ok":
        return summary
    summary["parameters"] = outcome["parameters"]
    summary["memory"] = memory_split(run, outcome["memory"])
    summary["larger"] = outcome.get("larger", [])
    summary["partitions"] = outcome.get("partitions", [])
    summary["options"] = outcome.get("options", [])
    summary["reduction"] = run.config.precision.reduction.value
    if replay is not None:
        summary["step"] = speed(run, replay)
    summary["remat"] = recomputation(run, replay.costs if replay is not None else [])
    return summary | parts_of_step(replay, uses)


def parts_of_step(replay: Replay | None, uses: Iterable[CollectiveUse]) -> dict[str, Any]:
    """Return what a step of any program sends and, where there is a replay, what its time goes to.

    Keys: `communication`, and with a replay `seconds`, `costs`, `lines` (of the source), `notes`.
    """
    parts: dict[str, Any] = {"communication": communication(uses, replay.sending_s if replay is not None else None)}
    if replay is not None:
        parts["seconds"] = dict(replay.seconds)
        parts["costs"] = [
            {"category": c.category, "op_name": c.op_name, "source": c.source, "calls": c.calls, "seconds": c.seconds}
            for c in sorted(replay.costs, key=lambda c: -c.seconds)[:TOP_COSTS]
        ]
        parts["lines"] = source_lines(replay.costs)
        parts["notes"] = list(replay.notes)
    return parts


def source_lines(costs: Iterable[Cost]) -> list[dict[str, Any]]:
    """Return the dearest lines of the source: seconds of a step, of which waiting for other devices, and their text.

    `text` is None where the file is not on this machine.
    """
    seconds: dict[str, float] = defaultdict(float)
    waiting: dict[str, float] = defaultdict(float)
    for cost in costs:
        seconds[cost.source] += cost.seconds
        waiting[cost.source] += cost.seconds if cost.category.startswith("exposed ") else 0.0
    dearest = sorted((line for line in seconds if line), key=lambda line: -seconds[line])[:TOP_COSTS]
    return [
        {"source": line, "seconds": seconds[line], "waiting_s": waiting[line], "text": _text_of(line)}
        for line in dearest
    ]


def _text_of(line: str) -> str | None:
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip()[:LINE] or None if number.isdecimal() else None


def positions(places: Sequence[Sequence[Any]]) -> list[str]:
    """Return where each device of the mesh lies, in the mesh's order: `slice:chip coordinates:core`, as `0:1,3,0:0`."""
    return [f"{slice_}:{','.join(str(c) for c in coords)}:{core}" for slice_, coords, core in places]


def memory_split(run: Run, memory: dict[str, int]) -> dict[str, Any]:
    """Return the bytes of one device at the peak of a step: XLA's total, gradients by their shapes.

    Parameters and optimizer state are arguments of known shape, and gradients are temporaries of known shape. What is
    left of the temporaries are activations and working space. `usable` is the compiler's limit, `reserved` what the
    runtime keeps of the memory, `host` the bytes in host memory.
    """
    usable, peak = usable_hbm(run.config.target.chip), memory["peak"]
    gradients = min(memory["gradients"], memory["temporary"])
    split = {
        "parameters": memory["parameters"],
        "optimizer": memory["optimizer"],
        "gradients": gradients,
        "activations and temporaries": memory["temporary"] - gradients,
        "batch and results": peak - memory["parameters"] - memory["optimizer"] - memory["temporary"],
    }
    headroom = None if usable is None else usable - peak
    beside = beside_peak(run.config.target.chip, memory)
    return {"peak": peak, "usable": usable, "headroom": headroom, "split": split} | beside


def beside_peak(chip: ChipConfig | None, memory: Mapping[str, int]) -> dict[str, int | None]:
    """Return the bytes of one device that are not in the peak: `reserved` by the runtime, `code`, `host` memory."""
    usable, reserved = usable_hbm(chip), None
    if chip is not None and chip.hbm_gib is not None and usable is not None:
        reserved = max(int(chip.hbm_gib * GIB / chip.devices) - usable, 0)
    return {"reserved": reserved, "code": memory.get("code"), "host": memory.get("host")}


def speed(run: Run, replay: Replay) -> dict[str, Any]:
    """Return what the predicted seconds of a step mean: throughput, MFU with its denominator, tokens per dollar."""
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
) -> dict[str, Any]:
    """Return what the predicted seconds of a step of any program mean; None what needs `tokens` or `model_flops`.

    Both are of one step of all devices. MFU counts the FLOPs of the model, `hardware_utilisation` those executed.
    `replayed_s` is the step before its correction by measured runs.
    """
    chips = devices / chip.devices
    per_second = tokens / replay.step_s if tokens else None
    # The peak of the matrix unit, whatever the policy: float32 products are made of bfloat16 ones on a TPU.
    peak = max(chip.peak_tflops.get(dtype, 0.0) for dtype in ("bfloat16", compute))
    products = replay.seconds.get("matmul", 0.0) + replay.seconds.get("kernel", 0.0)
    hourly = {"on_demand": chip.usd_per_hour, "spot": chip.spot_usd_per_hour}
    return {
        "step_s": replay.step_s,
        "tokens_per_second": per_second,
        "tokens_per_second_per_chip": per_second / chips if per_second else None,
        "mfu": model_flops / (replay.step_s * chips * peak * 1e12) if peak and model_flops else None,
        "mfu_denominator": f"{peak:g} TFLOP/s of a {chip.name} chip (bfloat16)" if peak else None,
        "model_flops": model_flops / devices if model_flops else None,
        "executed_flops": replay.flops,
        "hardware_utilisation": replay.flops * chip.devices / (replay.step_s * peak * 1e12) if peak else None,
        "product_rate": replay.flops * chip.devices / (products * peak * 1e12) if products and peak else None,
        "replayed_s": replay.step_s / replay.correction,
        "interval": trust(replay.step_s, chip),
        "tokens_per_dollar": {k: per_second * 3600 / (chips * usd) for k, usd in hourly.items() if usd and per_second},
    }


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
