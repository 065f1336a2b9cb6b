"""Advice after a compile: only what follows from its numbers, with the number in the sentence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from valkyrie.machine.timeline import COPIES
from valkyrie.parallel.partition import RoleKind, recorded_roles
from valkyrie.search.compile.recomputed import keep_next
from valkyrie.search.compile.summary import short_cause, short_source
from valkyrie.units import GIB, gib, percent, sent

WORTH_A_HINT = 0.15
"""The share of a step from which a cost is pointed out."""
LOW_PRODUCT_RATE = 0.6
"""Below this share of peak, matrix products are called narrow; large ones reach 0.85 in the compiler's count."""

MARGIN = 1.2
"""How many times the estimated memory of another partition must be free: it is an estimate, by formulas."""
WORTH_SENDING = 0.75
"""Up to this share of the bytes that are sent now, another partition is named."""


def hints(summary: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Return advice for a compiled layout: `summary` and `others` are summaries, the others of the same work.

    The same work is the same model, batch, length and target under another layout, compiled earlier.
    """
    if summary["status"] != "ok" or "step" not in summary:
        return []
    own = (_reduction, _recomputation, keep_next, _memory_bound, _copies, _narrow)
    lines = [*_exposed(summary, others), *_faster(summary, others), *(line for about in own for line in about(summary))]
    return lines or [_largest(summary)]


def program_hints(summary: dict[str, Any]) -> list[str]:
    """Return advice on any program, by its own numbers alone: what it waits for, whether it is bound by memory."""
    step = summary["step"]["step_s"]
    waits = [(name, seconds) for name, seconds in summary["seconds"].items() if name.startswith("exposed ")]
    long = sorted((entry for entry in waits if entry[1] >= WORTH_A_HINT * step), key=lambda entry: -entry[1])
    lines = [f"{_waiting(summary, name.removeprefix('exposed '), seconds)}." for name, seconds in long]
    return [*lines, *_memory_bound(summary)] or [_largest(summary)]


def _largest(summary: dict[str, Any]) -> str:
    """Return what a step consists of where no part of it is worth a hint of its own."""
    step = summary["step"]
    products = summary["seconds"].get("matmul", 0.0) + summary["seconds"].get("kernel", 0.0)
    rate = f" at {percent(step['product_rate'])} of peak" if step["product_rate"] else ""
    text = f"Matrix products and kernels are {percent(products / step['step_s'])} of the step{rate}"
    others = {name: seconds for name, seconds in summary["seconds"].items() if name not in ("matmul", "kernel")}
    if not others:
        return f"{text}."
    name, seconds = max(others.items(), key=lambda item: item[1])
    return f"{text}; the largest other part is {_part(name)}, {percent(seconds / step['step_s'])}."


def _part(bucket: str) -> str:
    """Return the name of a part of the step as a sentence has it."""
    axes = bucket.removeprefix("exposed ")
    return bucket if axes == bucket else f"waiting for communication over {axes}"


def _reduction(summary: dict[str, Any]) -> list[str]:
    """Gradients are summed in float32 unless asked otherwise; where the step waits for that, name the alternative."""
    if summary.get("reduction") != "float32" or "bf16" not in str(summary["about"]["precision"]):
        return []
    roles = recorded_roles(summary["about"])
    data = {axis for axis, role in roles.items() if role.kind in (RoleKind.DP, RoleKind.FSDP)}
    sums = [
        c
        for c in summary["communication"]["causes"]
        if c["kind"] in ("all-reduce", "reduce-scatter") and data.issuperset(c["mesh_axes"])
    ]
    share = sum(c["exposed_s"] for c in sums) / summary["step"]["step_s"]
    if share < WORTH_A_HINT:
        return []
    return [
        f"Waiting for sums over data axes, gradients foremost, is {percent(share)} of the step; gradients are summed "
        "in float32. precision.reduction=bfloat16 sends half the bytes, as MaxText does; float32 is the more accurate, "
        "as Llama 3 and torchtitan have it."
    ]


def _exposed(summary: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
    step, lines = summary["step"]["step_s"], []
    mesh = summary["about"]["mesh"]
    known = {other["about"]["partition"] for other in others if other["about"]["mesh"] == mesh}
    roles = recorded_roles(summary["about"])
    for bucket, seconds in sorted(summary["seconds"].items(), key=lambda item: -item[1]):
        axes = bucket.removeprefix("exposed ")
        if axes == bucket or seconds < WORTH_A_HINT * step:
            continue
        roles_text = "; ".join(f"{a} is {roles[a]}" for a in axes.split(",") if a in roles)
        without = _partitions_without(summary, axes.split(","), known)
        known |= without.keys()
        text = f"{_waiting(summary, axes, seconds)}. {roles_text}."
        lines.append(text + (f" Instead, {'; '.join(without.values())}." if without else ""))
    return lines


def _waiting(summary: dict[str, Any], axes: str, seconds: float) -> str:
    """Return how much of the step is waiting over these mesh axes, and for what most."""
    step = summary["step"]["step_s"]
    causes = [c for c in summary["communication"]["causes"] if ",".join(c["mesh_axes"]) == axes and c["exposed_s"]]
    worst = max(causes, key=lambda c: c["exposed_s"], default=None)
    by = f", {percent(worst['exposed_s'] / step)} for its largest cause, {_cause(worst)}" if worst else ""
    return f"Waiting for communication over {axes} is {percent(seconds / step)} of the step{by}"


def _partitions_without(summary: dict[str, Any], axes: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Return what to say of partitions that split only data over these axes, fit, and send less, by their names.

    Those that send least come first. Partitions that are `known` for this mesh, compiled or named, are left out.
    """
    usable, degrees = summary["memory"]["usable"], summary["about"]["degrees"]
    fitting = [
        entry
        for entry in summary.get("partitions", [])
        for roles in [recorded_roles(entry)]
        if all(axis in roles and roles[axis].kind.splits_only_data for axis in axes)
        and usable is not None
        and MARGIN * entry["needs"] <= usable
    ]
    now, over = summary["communication"]["bytes"], " and ".join(axes)
    less = [entry for entry in fitting if entry["sends"] is not None and entry["sends"] <= WORTH_SENDING * now]
    if not less and degrees["MP1"] * degrees["MP2"] * degrees["SP"] > 1:
        less = [entry for entry in fitting if entry["sends"] is None][:1]
    told = {}
    for entry in sorted(less, key=lambda entry: entry["sends"] or 0)[:2]:
        if entry["partition"] in known:
            continue
        sends = "" if entry["sends"] is None else f" and sends about {sent(entry['sends'])} a step, not {sent(now)}"
        told[entry["partition"]] = (
            f"partition={entry['partition']} splits the batch over {over}{sends}; it needs about {gib(entry['needs'])} "
            f"of {gib(usable)}"
        )
    return told


def _faster(summary: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
    timed = [other for other in others if other["status"] == "ok" and "step" in other]
    best = min(timed, key=lambda other: other["step"]["step_s"], default=None)
    if best is None or best["step"]["step_s"] >= 0.98 * summary["step"]["step_s"]:
        return []
    ratio = summary["step"]["step_s"] / best["step"]["step_s"]
    return [
        f"{best['about']['layout']}, compiled before for the same work, is {ratio:.2f}x as fast: "
        f"{1e3 * best['step']['step_s']:.0f} ms a step."
    ]


def _recomputation(summary: dict[str, Any]) -> list[str]:
    extra = summary["step"]["executed_flops"] / summary["step"]["model_flops"] - 1
    headroom = summary["memory"]["headroom"]
    offloads = bool(summary.get("remat", {}).get("host"))
    if extra < WORTH_A_HINT or headroom is None or summary["about"]["remat"] == "none" or offloads:
        return []
    fitting = [entry for entry in summary["larger"] if entry["needs"] < headroom]
    if not fitting:
        return []
    change, needs = fitting[0]["change"], fitting[0]["needs"]
    return [
        f"The chip executes {percent(extra)} more FLOPs than the model has, mostly recomputation; {change} needs about "
        f"{needs / GIB:.1f} GiB of the {headroom / GIB:.1f} GiB that are free. Compile it too: what is kept must be "
        "written and read again, which may take longer."
    ]


def _memory_bound(summary: dict[str, Any]) -> list[str]:
    share = summary["seconds"].get("memory", 0.0) / summary["step"]["step_s"]
    if share < 2 * WORTH_A_HINT:
        return []
    return [
        f"Memory-bound operations are {percent(share)} of the step: each chip works on few tokens for the bytes it "
        "moves. A larger batch, or fewer splits of the batch, spreads them."
    ]


def _copies(summary: dict[str, Any]) -> list[str]:
    share = summary["seconds"].get(COPIES, 0.0) / summary["step"]["step_s"]
    if share < WORTH_A_HINT:
        return []
    text = f"Waiting for copies between memories is {percent(share)} of the step"
    if not summary.get("remat", {}).get("host"):
        return [f"{text}: what products need is not on the chip in time."]
    text += f": remat={summary['about']['remat']} sends saved activations to the host and back"
    headroom = summary["memory"]["headroom"] or 0
    fitting = [e for e in summary["larger"] if e["needs"] < headroom and e["change"] != "remat=full"]
    if not fitting:
        return [f"{text}. A larger batch gives each copy more products to hide behind."]
    change, needs = fitting[0]["change"], fitting[0]["needs"]
    return [f"{text}. {change} keeps them on the chip: about {needs / GIB:.1f} GiB of {headroom / GIB:.1f} GiB free."]


def _narrow(summary: dict[str, Any]) -> list[str]:
    products, step = summary["seconds"].get("matmul", 0.0), summary["step"]
    if products < WORTH_A_HINT * step["step_s"] or not step["product_rate"] or step["product_rate"] >= LOW_PRODUCT_RATE:
        return []
    text = f"Matrix products and kernels run at {percent(step['product_rate'])} of peak"
    degrees = summary["about"]["degrees"]
    if degrees["MP1"] * degrees["MP2"] == 1:
        return [f"{text}, and no axis splits weights: the model's own widths, or the tokens of a chip, are small."]
    return [f"{text}: their shards are narrow. Splitting weights over fewer devices makes them wider."]


def _cause(use: dict[str, Any]) -> str:
    if not use["cause"]:
        return f"{use['kind']} that the compiler does not name"
    source = short_source(use["source"])
    return f"{use['kind']} for {short_cause(use['cause'])}" + (f" ({source})" if source else "")
