"""Advice after a compile. Each hint follows from numbers of the prediction, and states them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from valkyrie.axes import axes_text
from valkyrie.compiled.communication import CollectiveRecord
from valkyrie.parallel.partition import Role, RoleKind
from valkyrie.parts import PartKind, StepPart, describe_part, seconds_in
from valkyrie.search.compile.prediction import (
    CompileStatus,
    FullerRemat,
    Hint,
    HintCode,
    OtherPartition,
    PredictedStep,
    Prediction,
    short_cause,
    short_source,
)
from valkyrie.units import GIB, duration, gib, memory_text, percent, traffic_text

WORTH_A_HINT = 0.15
"""Smallest share of a step for which a cost gets a hint."""
LOW_PRODUCT_RATE = 0.6
"""Share of peak below which matrix products are called narrow. Large ones reach 0.85 in the compiler's count."""
WORTH_KEEPING = 0.01
"""Smallest share of a step for which an activation is worth saving instead of recomputing."""
MARGIN = 1.2
"""Free memory required for a change, as a multiple of the bytes that it is estimated to need."""
WORTH_SENDING = 0.75
"""Largest share of the bytes sent now for which another partition is suggested."""
_PRODUCTS = (PartKind.matmul, PartKind.kernel)


@dataclass(frozen=True)
class _Facts:
    """A prediction with a step, and quantities that several hints need."""

    prediction: Prediction
    step: PredictedStep
    others: Sequence[Prediction] = ()

    def share(self, *kinds: PartKind) -> float:
        return seconds_in(self.prediction.parts, *kinds) / self.step.step_s

    def degree(self, kind: str) -> int:
        return (self.prediction.layout.degrees or {}).get(kind, 1)

    @property
    def headroom(self) -> int | None:
        memory = self.prediction.memory
        return None if memory is None else memory.headroom

    @property
    def collectives(self) -> Sequence[CollectiveRecord]:
        traffic = self.prediction.communication
        return () if traffic is None else traffic.collectives

    @property
    def roles(self) -> dict[str, Role]:
        about = self.prediction.about  # None for a program that is not a run's step
        return (about and about.axis_roles) or {}

    @property
    def splits_weights(self) -> bool:
        return self.degree("MP1") * self.degree("MP2") > 1

    @property
    def offloads(self) -> bool:
        remat = self.prediction.remat
        return remat is not None and bool(remat.host)

    @property
    def long_waits(self) -> list[StepPart]:
        least = WORTH_A_HINT * self.step.step_s
        waits = [part for part in self.prediction.parts if part.kind is PartKind.exposed and part.seconds >= least]
        return sorted(waits, key=lambda part: -part.seconds)

    def fitting_remats(self) -> list[FullerRemat]:
        remats, headroom = self.prediction.alternatives.remats, self.headroom or 0
        return [remat for remat in remats if remat.needs < headroom]


def hints(prediction: Prediction, others: Sequence[Prediction] = ()) -> tuple[Hint, ...]:
    """Return advice for a compiled layout.

    `others` are predictions of the same model, batch, length and target under other layouts.
    """
    return _collect(
        prediction,
        others,
        (_exposed, _faster, _reduction, _recomputation, _save_activation, _memory_bound, _copies, _narrow),
    )


def program_hints(prediction: Prediction) -> tuple[Hint, ...]:
    """Return advice on any program: the collectives that it waits for, and whether it is memory-bound."""
    return _collect(prediction, (), (_exposed, _memory_bound))


def _collect(
    prediction: Prediction, others: Sequence[Prediction], rules: Sequence[Callable[[_Facts], Iterator[Hint]]]
) -> tuple[Hint, ...]:
    if prediction.status is not CompileStatus.ok or prediction.step is None:
        return ()
    facts = _Facts(prediction, prediction.step, others)
    return tuple(hint for rule in rules for hint in rule(facts)) or (_largest_part(facts),)


def _largest_part(facts: _Facts) -> Hint:
    """Describe a step without any part that is worth a hint."""
    rate = f" at {percent(facts.step.product_rate)} of peak" if facts.step.product_rate else ""
    share = facts.share(*_PRODUCTS)
    text = f"Matrix products and kernels are {percent(share)} of the step{rate}"
    others = [part for part in facts.prediction.parts if part.kind not in _PRODUCTS]
    if others:
        part = max(others, key=lambda part: part.seconds)
        name, share_of_part = describe_part(part.kind, axes_text(part.mesh_axes)), part.seconds / facts.step.step_s
        text += f"; the largest other part is {name}, {percent(share_of_part)}"
    return Hint(HintCode.largest_part, f"{text}.", share)


def _exposed(facts: _Facts) -> Iterator[Hint]:
    about = facts.prediction.about
    # Partitions that were compiled for this mesh, or named by an earlier hint, are not named again.
    known = {other.layout.partition for other in facts.others if about and other.layout.mesh == about.mesh}
    for part in facts.long_waits:
        text = f"{_waiting(facts, part)}."
        if roles := [f"{axis} is {facts.roles[axis]}" for axis in part.mesh_axes if axis in facts.roles]:
            text += f" {'; '.join(roles)}."
        if instead := _partitions_without(facts, part.mesh_axes, known):
            these = "These partitions split" if len(instead) > 1 else "This partition splits"
            text += f" {these} the batch over {' and '.join(part.mesh_axes)} instead: {'; '.join(instead.values())}."
        known |= instead.keys()
        changes = tuple(f"partition={name}" for name in instead)
        yield Hint(HintCode.exposed, text, part.seconds / facts.step.step_s, part.mesh_axes, changes)


def _waiting(facts: _Facts, part: StepPart) -> str:
    """Describe the share of the step spent waiting over these mesh axes, and the main cause."""
    step_s = facts.step.step_s
    text = f"{percent(part.seconds / step_s)} of the step waits for communication over {axes_text(part.mesh_axes)}"
    uses = [use for use in facts.collectives if use.mesh_axes == part.mesh_axes and use.exposed_s]
    if not uses:
        return text
    use = max(uses, key=lambda use: use.exposed_s)
    source = f" ({short_source(use.source)})" if use.source else ""
    cause = f"for {short_cause(use.cause)}{source}" if use.cause else "that the compiler does not name"
    return f"{text}. The largest cause, {use.kind} {cause}, is {percent(use.exposed_s / step_s)} of the step"


def _partitions_without(facts: _Facts, axes: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Describe up to two partitions, by name, that split only data over these axes, fit, and send less.

    The one that sends least comes first. Those in `known` are left out.
    """
    prediction = facts.prediction
    usable, traffic = prediction.memory and prediction.memory.usable, prediction.communication
    if usable is None or traffic is None:
        return {}
    fitting = [
        entry
        for entry in prediction.alternatives.partitions
        if all(axis in entry.axis_roles and entry.axis_roles[axis].kind.splits_only_data for axis in axes)
        and MARGIN * entry.needs <= usable
    ]
    now = traffic.bytes or 0.0
    less = [entry for entry in fitting if entry.sends is not None and entry.sends <= WORTH_SENDING * now]
    if fitting and not less and (facts.splits_weights or facts.degree("SP") > 1):
        less = [entry for entry in fitting if entry.sends is None][:1]

    def describe(entry: OtherPartition) -> str:
        sends = (
            ""
            if entry.sends is None
            else f"sends about {traffic_text(entry.sends)} a step, not {traffic_text(now)}, and "
        )
        return f"partition={entry.partition} {sends}needs about {gib(entry.needs)} of {gib(usable)}"

    best = sorted(less, key=lambda entry: entry.sends or 0)[:2]
    return {entry.partition: describe(entry) for entry in best if entry.partition not in known}


def _faster(facts: _Facts) -> Iterator[Hint]:
    timed = [(o.step.step_s, o) for o in facts.others if o.status is CompileStatus.ok and o.step is not None]
    if not timed:
        return
    (step_s, best), now = min(timed, key=lambda entry: entry[0]), facts.step.step_s
    if step_s < 0.98 * now:
        layout = best.layout.name
        text = f"{layout}, compiled before for the same work, is {now / step_s:.2f}x as fast: "
        text += f"{1e3 * step_s:.0f} ms a step."
        yield Hint(HintCode.faster_layout, text, 1 - step_s / now, changes=(layout,))


def _reduction(facts: _Facts) -> Iterator[Hint]:
    """Suggest summing gradients in bfloat16 if the step waits for their sums in float32, the default."""
    if facts.prediction.reduction != "float32" or "bf16" not in str(facts.prediction.layout.precision):
        return
    data_axes = {axis for axis, role in facts.roles.items() if role.kind in (RoleKind.DP, RoleKind.FSDP)}
    sums = [use for use in facts.collectives if use.kind in ("all-reduce", "reduce-scatter")]
    waited = sum(use.exposed_s for use in sums if data_axes.issuperset(use.mesh_axes))
    if (share := waited / facts.step.step_s) >= WORTH_A_HINT:
        text = (
            f"Waiting for sums over data axes, gradients foremost, is {percent(share)} of the step; gradients are "
            "summed in float32. precision.reduction=bfloat16 sends half the bytes, as MaxText does; float32 is the "
            "more accurate, as Llama 3 and torchtitan have it."
        )
        yield Hint(HintCode.reduction, text, share, changes=("precision.reduction=bfloat16",))


def _recomputation(facts: _Facts) -> Iterator[Hint]:
    step = facts.step
    if not step.executed_flops or not step.model_flops or facts.headroom is None or facts.offloads:
        return
    extra, fitting = step.executed_flops / step.model_flops - 1, facts.fitting_remats()
    if extra >= WORTH_A_HINT and facts.prediction.layout.remat != "none" and fitting:
        change, needs = fitting[0].change, fitting[0].needs
        text = (
            f"The chip executes {percent(extra)} more FLOPs than the model has, mostly recomputation; {change} needs "
            f"about {needs / GIB:.1f} GiB of the {facts.headroom / GIB:.1f} GiB that are free. Compile it too: what is "
            "kept must be written and read again, which may take longer."
        )
        yield Hint(HintCode.recomputation, text, extra, changes=(change,))


def _save_activation(facts: _Facts) -> Iterator[Hint]:
    """Suggest the activation to save next: the slowest to recompute that fits on the device, else one to offload."""
    report, headroom, step_s = facts.prediction.remat, facts.headroom, facts.step.step_s
    if report is None or headroom is None:
        return
    expensive = [entry for entry in report.again if entry.seconds >= WORTH_KEEPING * step_s]
    if not expensive:
        return
    fitting = [entry for entry in expensive if MARGIN * entry.bytes <= headroom]
    best, key, names = (fitting[0], "save", report.save) if fitting else (expensive[0], "offload", report.offload)
    share = best.seconds / step_s
    change = f"remat.{key}=[{','.join((*names, best.name))}]"
    spares = f"spares {duration(best.seconds)} ({percent(share)} of the step) of computing it again"
    if fitting:
        text = (
            f"Keep {best.name} next: {change} takes about {memory_text(best.bytes)} more of the "
            f"{memory_text(headroom)} that are free and {spares}"
        )
    else:
        text = (
            f"No dear activation has room on the device ({memory_text(headroom)} free). Offload {best.name} next: "
            f"{change} sends about {memory_text(best.bytes)} to the host and back, and {spares}"
        )
    text += ", by the replay of the operations that bear its name."
    yield Hint(HintCode.save_activation, text, share, changes=(change,))


def _memory_bound(facts: _Facts) -> Iterator[Hint]:
    if (share := facts.share(PartKind.memory)) >= 2 * WORTH_A_HINT:
        text = (
            f"Memory-bound operations are {percent(share)} of the step: each chip works on few tokens for the bytes "
            "it moves. A larger batch, or fewer splits of the batch, spreads them."
        )
        yield Hint(HintCode.memory_bound, text, share)


def _copies(facts: _Facts) -> Iterator[Hint]:
    share, change = facts.share(PartKind.copies), ()
    if share < WORTH_A_HINT:
        return
    text = f"Waiting for copies between memories is {percent(share)} of the step"
    fitting = [remat for remat in facts.fitting_remats() if remat.change != "remat=full"]
    if not facts.offloads:
        text += ": what products need is not on the chip in time."
    else:
        text += f": remat={facts.prediction.layout.remat} sends saved activations to the host and back"
        if fitting:
            change, needs, free = (fitting[0].change,), fitting[0].needs, facts.headroom or 0
            text += f". {change[0]} keeps them on the chip: about {needs / GIB:.1f} GiB of {free / GIB:.1f} GiB free."
        else:
            text += ". A larger batch gives each copy more products to hide behind."
    yield Hint(HintCode.copies, text, share, changes=change)


def _narrow(facts: _Facts) -> Iterator[Hint]:
    rate = facts.step.product_rate
    if rate and rate < LOW_PRODUCT_RATE and facts.share(PartKind.matmul) >= WORTH_A_HINT:
        text = f"Matrix products and kernels run at {percent(rate)} of peak"
        if facts.splits_weights:
            text += ": their shards are narrow. Splitting weights over fewer devices makes them wider."
        else:
            text += ", and no axis splits weights: the model's own widths, or the tokens of a chip, are small."
        yield Hint(HintCode.narrow_products, text, rate)
