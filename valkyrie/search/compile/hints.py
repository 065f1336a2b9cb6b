"""Advice after a compile: only what follows from its numbers, with the number in the sentence."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from valkyrie.axes import axes_text
from valkyrie.compiled.communication import CollectiveRecord
from valkyrie.parallel.partition import RoleKind, recorded_roles
from valkyrie.parts import PartKind, StepPart, seconds_in
from valkyrie.search.compile.prediction import (
    CompileStatus,
    Hint,
    HintCode,
    MemoryReport,
    OtherPartition,
    PredictedStep,
    Prediction,
)
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


def hints(prediction: Prediction, others: Sequence[Prediction] = ()) -> tuple[Hint, ...]:
    """Return advice for a compiled layout; `others` are predictions of the same work.

    The same work is the same model, batch, length and target under another layout, compiled earlier.
    """
    if prediction.status is not CompileStatus.ok or prediction.step is None:
        return ()
    own = (_reduction, _recomputation, keep_next, _memory_bound, _copies, _narrow)
    advice = [*_exposed(prediction, others), *_faster(prediction, others)]
    advice += [hint for find in own for hint in find(prediction)]
    return tuple(advice) or (_largest(prediction),)


def program_hints(prediction: Prediction) -> tuple[Hint, ...]:
    """Return advice on any program, by its own numbers alone: what it waits for, whether it is bound by memory."""
    waits = sorted(_long_waits(prediction), key=lambda part: -part.seconds)
    advice = [_waiting_hint(prediction, part, f"{_waiting(prediction, part)}.") for part in waits]
    return (*advice, *_memory_bound(prediction)) or (_largest(prediction),)


def _step(prediction: Prediction) -> PredictedStep:
    assert prediction.step is not None, "hints are for programs with a predicted step"
    return prediction.step


def _memory(prediction: Prediction) -> MemoryReport:
    assert prediction.memory is not None
    return prediction.memory


def _collectives(prediction: Prediction) -> Sequence[CollectiveRecord]:
    return () if prediction.communication is None else prediction.communication.collectives


def _share(prediction: Prediction, *kinds: PartKind) -> float:
    return seconds_in(prediction.parts, *kinds) / _step(prediction).step_s


def _long_waits(prediction: Prediction) -> list[StepPart]:
    least = WORTH_A_HINT * _step(prediction).step_s
    return [part for part in prediction.parts if part.kind is PartKind.exposed and part.seconds >= least]


def _largest(prediction: Prediction) -> Hint:
    """Return what a step consists of where no part of it is worth a hint of its own."""
    step, products = _step(prediction), (PartKind.matmul, PartKind.kernel)
    share = _share(prediction, *products)
    rate = f" at {percent(step.product_rate)} of peak" if step.product_rate else ""
    text = f"Matrix products and kernels are {percent(share)} of the step{rate}"
    other = max((part for part in prediction.parts if part.kind not in products), key=_seconds, default=None)
    if other is not None:
        name = f"waiting for communication over {axes_text(other.mesh_axes)}"
        name = name if other.kind is PartKind.exposed else other.kind.value
        text += f"; the largest other part is {name}, {percent(other.seconds / step.step_s)}"
    return Hint(HintCode.largest_part, f"{text}.", share)


def _seconds(part: StepPart) -> float:
    return part.seconds


def _reduction(prediction: Prediction) -> list[Hint]:
    """Gradients are summed in float32 by default; where the step waits for that, name the alternative."""
    if prediction.reduction != "float32" or "bf16" not in str(prediction.about["precision"]):
        return []
    roles = recorded_roles(prediction.about)
    data = {axis for axis, role in roles.items() if role.kind in (RoleKind.DP, RoleKind.FSDP)}
    sums = [
        use
        for use in _collectives(prediction)
        if use.kind in ("all-reduce", "reduce-scatter") and data.issuperset(use.mesh_axes)
    ]
    share = sum(use.exposed_s for use in sums) / _step(prediction).step_s
    if share < WORTH_A_HINT:
        return []
    text = (
        f"Waiting for sums over data axes, gradients foremost, is {percent(share)} of the step; gradients are summed "
        "in float32. precision.reduction=bfloat16 sends half the bytes, as MaxText does; float32 is the more accurate, "
        "as Llama 3 and torchtitan have it."
    )
    return [Hint(HintCode.reduction, text, share, changes=("precision.reduction=bfloat16",))]


def _exposed(prediction: Prediction, others: Sequence[Prediction]) -> list[Hint]:
    mesh, advice = prediction.about["mesh"], []
    known = {other.about["partition"] for other in others if other.about["mesh"] == mesh}
    roles = recorded_roles(prediction.about)
    for part in sorted(_long_waits(prediction), key=lambda part: -part.seconds):
        roles_text = "; ".join(f"{a} is {roles[a]}" for a in part.mesh_axes if a in roles)
        without = _partitions_without(prediction, part.mesh_axes, known)
        known |= without.keys()
        text = f"{_waiting(prediction, part)}. {roles_text}."
        text += f" Instead, {'; '.join(without.values())}." if without else ""
        advice.append(_waiting_hint(prediction, part, text, [f"partition={name}" for name in without]))
    return advice


def _waiting_hint(prediction: Prediction, part: StepPart, text: str, changes: Sequence[str] = ()) -> Hint:
    share = part.seconds / _step(prediction).step_s
    return Hint(HintCode.exposed, text, share, part.mesh_axes, tuple(changes))


def _waiting(prediction: Prediction, part: StepPart) -> str:
    """Return how much of the step is waiting over these mesh axes, and for what most."""
    step_s = _step(prediction).step_s
    causes = [use for use in _collectives(prediction) if use.mesh_axes == part.mesh_axes and use.exposed_s]
    worst = max(causes, key=lambda use: use.exposed_s, default=None)
    by = f", {percent(worst.exposed_s / step_s)} for its largest cause, {_cause(worst)}" if worst else ""
    share = percent(part.seconds / step_s)
    return f"Waiting for communication over {axes_text(part.mesh_axes)} is {share} of the step{by}"


def _partitions_without(prediction: Prediction, axes: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Return what to say of partitions that split only data over these axes, fit, and send less, by their names.

    Those that send least come first. Partitions that are `known` for this mesh, compiled or named, are left out.
    """
    usable, degrees = _memory(prediction).usable, prediction.about["degrees"]
    if usable is None or prediction.communication is None:
        return {}
    fitting = [
        entry
        for entry in prediction.alternatives.partitions
        if all(axis in entry.axis_roles and entry.axis_roles[axis].kind.splits_only_data for axis in axes)
        and MARGIN * entry.needs <= usable
    ]
    now, over = prediction.communication.bytes or 0.0, " and ".join(axes)
    less = [entry for entry in fitting if entry.sends is not None and entry.sends <= WORTH_SENDING * now]
    if not less and degrees["MP1"] * degrees["MP2"] * degrees["SP"] > 1:
        less = [entry for entry in fitting if entry.sends is None][:1]

    def describe(entry: OtherPartition) -> str:
        sends = "" if entry.sends is None else f" and sends about {sent(entry.sends)} a step, not {sent(now)}"
        return (
            f"partition={entry.partition} splits the batch over {over}{sends}; it needs about {gib(entry.needs)} "
            f"of {gib(usable)}"
        )

    best = sorted(less, key=lambda entry: entry.sends or 0)[:2]
    return {entry.partition: describe(entry) for entry in best if entry.partition not in known}


def _faster(prediction: Prediction, others: Sequence[Prediction]) -> list[Hint]:
    timed = [(o.step.step_s, o) for o in others if o.status is CompileStatus.ok and o.step is not None]
    step_s, best = min(timed, key=lambda entry: entry[0], default=(0.0, None))
    now = _step(prediction).step_s
    if best is None or step_s >= 0.98 * now:
        return []
    layout, ratio = best.about["layout"], now / step_s
    text = f"{layout}, compiled before for the same work, is {ratio:.2f}x as fast: {1e3 * step_s:.0f} ms a step."
    return [Hint(HintCode.faster_layout, text, 1 - step_s / now, changes=(layout,))]


def _recomputation(prediction: Prediction) -> list[Hint]:
    step, headroom = _step(prediction), _memory(prediction).headroom
    if not step.executed_flops or not step.model_flops:
        return []
    extra = step.executed_flops / step.model_flops - 1
    if extra < WORTH_A_HINT or headroom is None or prediction.about["remat"] == "none" or _offloads(prediction):
        return []
    fitting = [entry for entry in prediction.alternatives.remats if entry.needs < headroom]
    if not fitting:
        return []
    change, needs = fitting[0].change, fitting[0].needs
    text = (
        f"The chip executes {percent(extra)} more FLOPs than the model has, mostly recomputation; {change} needs about "
        f"{needs / GIB:.1f} GiB of the {headroom / GIB:.1f} GiB that are free. Compile it too: what is kept must be "
        "written and read again, which may take longer."
    )
    return [Hint(HintCode.recomputation, text, extra, changes=(change,))]


def _offloads(prediction: Prediction) -> bool:
    return prediction.remat is not None and bool(prediction.remat.host)


def _memory_bound(prediction: Prediction) -> list[Hint]:
    share = _share(prediction, PartKind.memory)
    if share < 2 * WORTH_A_HINT:
        return []
    text = (
        f"Memory-bound operations are {percent(share)} of the step: each chip works on few tokens for the bytes it "
        "moves. A larger batch, or fewer splits of the batch, spreads them."
    )
    return [Hint(HintCode.memory_bound, text, share)]


def _copies(prediction: Prediction) -> list[Hint]:
    share = _share(prediction, PartKind.copies)
    if share < WORTH_A_HINT:
        return []
    text, change = f"Waiting for copies between memories is {percent(share)} of the step", ()
    if not _offloads(prediction):
        text += ": what products need is not on the chip in time."
        return [Hint(HintCode.copies, text, share)]
    text += f": remat={prediction.about['remat']} sends saved activations to the host and back"
    headroom = _memory(prediction).headroom or 0
    fitting = [e for e in prediction.alternatives.remats if e.needs < headroom and e.change != "remat=full"]
    if fitting:
        change, needs = (fitting[0].change,), fitting[0].needs
        text += f". {change[0]} keeps them on the chip: about {needs / GIB:.1f} GiB of {headroom / GIB:.1f} GiB free."
    else:
        text += ". A larger batch gives each copy more products to hide behind."
    return [Hint(HintCode.copies, text, share, changes=change)]


def _narrow(prediction: Prediction) -> list[Hint]:
    rate = _step(prediction).product_rate
    if _share(prediction, PartKind.matmul) < WORTH_A_HINT or not rate or rate >= LOW_PRODUCT_RATE:
        return []
    text, degrees = f"Matrix products and kernels run at {percent(rate)} of peak", prediction.about["degrees"]
    if degrees["MP1"] * degrees["MP2"] == 1:
        text += ", and no axis splits weights: the model's own widths, or the tokens of a chip, are small."
    else:
        text += ": their shards are narrow. Splitting weights over fewer devices makes them wider."
    return [Hint(HintCode.narrow_products, text, rate)]


def _cause(use: CollectiveRecord) -> str:
    if not use.cause:
        return f"{use.kind} that the compiler does not name"
    source = short_source(use.source)
    return f"{use.kind} for {short_cause(use.cause)}" + (f" ({source})" if source else "")
