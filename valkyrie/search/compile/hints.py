"""Hints after a compile: what slows the step down, and which setting to change.

Each hint quotes the predicted numbers that it is based on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkyrie.axes import axes_text
from valkyrie.compiled.communication import CollectiveRecord
from valkyrie.parallel.partition import Role, RoleKind
from valkyrie.parts import PartKind, StepPart, describe_part, sum_seconds
from valkyrie.search.compile.padding import LANES, find_padding
from valkyrie.search.compile.partitioned import PartitionedProgram
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
from valkyrie.units import GIB, decimal_bytes_text, duration_text, gib_text, memory_text, percent_text

if TYPE_CHECKING:
    from valkyrie.search.estimate.runs import UnpaddedHeads

MIN_HINT_SHARE = 0.15
"""Smallest share of a step for which most hints are given. Memory-bound operations need twice this share."""
MIN_PADDING_HINT_SHARE = 0.05
"""The hint on the largest part of a step mentions padding that takes at least this share of the step."""
MIN_DATA_PARALLEL_SHARE = 0.25
"""Waits over a mesh axis of at least this share of the step lead to the suggestion to split the batch over it."""
LOW_PRODUCT_RATE = 0.6
"""Matrix products below this share of peak FLOP/s get a hint. The compiler estimates 0.85 for large products."""
MIN_RECOMPUTATION_SHARE = 0.01
"""An activation is worth saving if its recomputation takes at least this share of a step."""
MARGIN = 1.2
"""Safety factor for estimated memory.

A partition is suggested only if the usable memory is at least this multiple of its estimate. Saving an activation
or using another remat policy is suggested only if the free memory is at least this multiple of the additional bytes.
"""
MAX_SENT_RATIO = 0.75
"""A partition with known bytes is suggested only if it sends at most this share of the current bytes."""
_PRODUCTS = (PartKind.matmul, PartKind.kernel)


@dataclass(frozen=True)
class _Facts:
    """A prediction with a step time, and quantities derived from it that several hints need."""

    prediction: Prediction
    step: PredictedStep
    other_layouts: Sequence[Prediction] = ()
    unpadded_heads: UnpaddedHeads | None = None
    program: PartitionedProgram | None = None

    def share(self, *kinds: PartKind) -> float:
        return sum_seconds(self.prediction.parts, *kinds) / self.step.step_s

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
        layout = self.prediction.about  # None for a program that is not a run's step
        return (layout and layout.axis_roles) or {}

    @property
    def splits_weights(self) -> bool:
        return self.degree("MP1") * self.degree("MP2") > 1

    @property
    def offloads(self) -> bool:
        remat = self.prediction.remat
        return remat is not None and bool(remat.host)

    @property
    def long_waits(self) -> list[StepPart]:
        min_seconds = MIN_HINT_SHARE * self.step.step_s
        waits = [
            part for part in self.prediction.parts if part.kind is PartKind.exposed and part.seconds >= min_seconds
        ]
        return sorted(waits, key=lambda part: -part.seconds)

    def fitting_remats(self) -> list[FullerRemat]:
        remats, headroom = self.prediction.alternatives.remats, self.headroom or 0
        return [remat for remat in remats if MARGIN * remat.needs <= headroom]


def layout_hints(
    prediction: Prediction, other_layouts: Sequence[Prediction] = (), unpadded_heads: UnpaddedHeads | None = None
) -> tuple[Hint, ...]:
    """Return the hints for a compiled layout. Empty if the layout does not fit or has no predicted step time.

    If there is nothing to change, the only hint describes the largest part of the step.

    Args:
        prediction: The compiled layout.
        other_layouts: Predictions of the same model, batch, length and target under other layouts.
        unpadded_heads: Attention heads that would not be padded, or None.
    """
    return _collect_hints(
        prediction,
        other_layouts,
        (
            _exposed_hints,
            _faster_layout_hints,
            _padded_heads_hints,
            _reduction_hints,
            _recomputation_hints,
            _save_activation_hints,
            _memory_bound_hints,
            _copy_hints,
            _narrow_product_hints,
        ),
        unpadded_heads,
    )


def program_hints(prediction: Prediction, program: PartitionedProgram | None = None) -> tuple[Hint, ...]:
    """Return the hints for a program that is not a run's step, on exposed communication and memory-bound operations.

    Empty without a predicted step time. If neither takes long, the only hint describes the largest part of the step,
    and the padding of narrow products. `program` is the program before and after partitioning, or None if unknown.
    """
    return _collect_hints(prediction, (), (_exposed_hints, _memory_bound_hints), program=program)


def _collect_hints(
    prediction: Prediction,
    other_layouts: Sequence[Prediction],
    rules: Sequence[Callable[[_Facts], Iterator[Hint]]],
    unpadded_heads: UnpaddedHeads | None = None,
    program: PartitionedProgram | None = None,
) -> tuple[Hint, ...]:
    if prediction.status is not CompileStatus.ok or prediction.step is None:
        return ()
    facts = _Facts(prediction, prediction.step, other_layouts, unpadded_heads, program)
    return tuple(hint for rule in rules for hint in rule(facts)) or (_largest_part_hint(facts),)


def _largest_part_hint(facts: _Facts) -> Hint:
    """Return the hint for a step without other hints: the share of matmuls and kernels, and the largest other part."""
    rate = f" at {percent_text(facts.step.product_rate)} of peak" if facts.step.product_rate else ""
    share = facts.share(*_PRODUCTS)
    text = f"Matrix products and kernels are {percent_text(share)} of the step{rate}"
    padding = None if facts.program is None else find_padding(facts.program)
    if padding is not None and padding.seconds >= MIN_PADDING_HINT_SHARE * facts.step.step_s:
        text += (
            f"; products with dimensions of {padding.sizes}, which the matrix unit pads to {LANES}, take "
            f"{percent_text(padding.product_seconds / facts.step.step_s)} of it in {padding.lines} (the padding "
            f"{percent_text(padding.seconds / facts.step.step_s)})"
        )
    other_parts = [part for part in facts.prediction.parts if part.kind not in _PRODUCTS]
    if other_parts:
        part = max(other_parts, key=lambda part: part.seconds)
        name, share_of_part = describe_part(part.kind, axes_text(part.mesh_axes)), part.seconds / facts.step.step_s
        text += f"; next largest part: {name} ({percent_text(share_of_part)})"
    return Hint(HintCode.largest_part, f"{text}.", share)


def _padded_heads_hints(facts: _Facts) -> Iterator[Hint]:
    if (unpadded := facts.unpadded_heads) is not None:
        memory = facts.prediction.memory
        unpadded = unpadded.scaled_to(facts.step.step_s, None if memory is None else memory.required, "compiled")
        yield Hint(HintCode.padded_heads, str(unpadded), 1 - 1 / unpadded.speedup, changes=unpadded.changes)


def _exposed_hints(facts: _Facts) -> Iterator[Hint]:
    layout = facts.prediction.about
    # Do not suggest partitions that were already compiled for this mesh or suggested by an earlier hint.
    named_partitions = {
        other.layout.partition for other in facts.other_layouts if layout and other.layout.mesh == layout.mesh
    }
    for part in facts.long_waits:
        text = f"{_describe_wait(facts, part)}."
        if roles := [f"{axis} is {facts.roles[axis]}" for axis in part.mesh_axes if axis in facts.roles]:
            text += f" {'; '.join(roles)}."
        if alternatives := _suggest_partitions(facts, part.mesh_axes, named_partitions):
            subject = "These partitions split" if len(alternatives) > 1 else "This partition splits"
            text += (
                f" {subject} the batch over {' and '.join(part.mesh_axes)} instead: {'; '.join(alternatives.values())}."
            )
        text += _describe_data_parallel(facts, part)
        named_partitions |= alternatives.keys()
        changes = tuple(f"partition={name}" for name in alternatives)
        yield Hint(HintCode.exposed, text, part.seconds / facts.step.step_s, part.mesh_axes, changes)


def _describe_wait(facts: _Facts, part: StepPart) -> str:
    """Describe the share of the step that waits for communication over the mesh axes of `part`, and its main cause."""
    step_s = facts.step.step_s
    text = f"{percent_text(part.seconds / step_s)} of the step waits for communication over {axes_text(part.mesh_axes)}"
    uses = [use for use in facts.collectives if use.mesh_axes == part.mesh_axes and use.exposed_s]
    if not uses:
        return text
    use = max(uses, key=lambda use: use.exposed_s)
    source = f" ({short_source(use.source)})" if use.source else ""
    cause = f"for {short_cause(use.cause)}{source}" if use.cause else "for an operation that the compiler does not name"
    return f"{text}. The largest cause, {use.kind} {cause}, is {percent_text(use.exposed_s / step_s)} of the step"


def _describe_data_parallel(facts: _Facts, part: StepPart) -> str:
    """Suggest splitting the batch of a program, instead of weights, over the mesh axis of a wait.

    Empty if this may not fit or not send much less. The bounds assume that all arrays, and all bytes sent over other
    axes, grow by the size of the axis, and that all-reduces of gradients send twice the bytes of the weights.
    """
    program, traffic = facts.program, facts.prediction.communication
    if program is None or traffic is None or traffic.bytes is None or len(part.mesh_axes) != 1:
        return ""
    (axis,), size = part.mesh_axes, program.count_parts(part.mesh_axes)
    weights = program.unpartitioned.weights
    batch_dimensions = {
        (length, axes)
        for argument in program.unpartitioned.arguments
        for length, axes in zip(argument.shape.dims, argument.mesh_axes, strict=False)
        if axes and not argument.is_state
    }
    splits_weights = any(axis in axes for argument in weights for axes in argument.mesh_axes)
    is_divisible = batch_dimensions and all(
        axis not in axes and length % (program.count_parts(axes) * size) == 0 for length, axes in batch_dimensions
    )
    axis_bytes = sum(entry.bytes for entry in traffic.bytes_by_mesh_axes if entry.mesh_axes == part.mesh_axes)
    max_bytes = size * (traffic.bytes - axis_bytes) + 2 * sum(argument.shape.bytes for argument in weights)
    needs, usable = program.memory.required, program.memory.usable
    if (
        part.seconds < MIN_DATA_PARALLEL_SHARE * facts.step.step_s
        or not splits_weights
        or not is_divisible
        or needs is None
        or usable is None
        or size * needs > usable
        or max_bytes > MAX_SENT_RATIO * traffic.bytes
    ):
        return ""
    return (
        f" Splitting the batch over {axis}, instead of weights, would send at most about "
        f"{decimal_bytes_text(max_bytes)}, not {decimal_bytes_text(traffic.bytes)}, and need at most "
        f"{gib_text(size * needs)} of {gib_text(usable)}."
    )


def _suggest_partitions(facts: _Facts, axes: Sequence[str], excluded: Collection[str]) -> dict[str, str]:
    """Return up to two partitions that fit, split only data over `axes`, and send fewer bytes (`MAX_SENT_RATIO`).

    The result maps names to descriptions. The partition that sends the fewest bytes comes first. If no fitting
    partition is known to send fewer bytes, and the layout splits weights or the sequence, the result is the partition
    that needs the least memory of those that send an unknown number of bytes. Partitions in `excluded` are then dropped
    without replacement. Empty if the usable memory or the communication of the layout is unknown.
    """
    prediction = facts.prediction
    usable, traffic = prediction.memory and prediction.memory.usable, prediction.communication
    if usable is None or traffic is None:
        return {}
    fitting_partitions = [
        entry
        for entry in prediction.alternatives.partitions
        if all(axis in entry.axis_roles and entry.axis_roles[axis].kind.splits_only_data for axis in axes)
        and MARGIN * entry.needs <= usable
    ]
    current_bytes = traffic.bytes or 0.0
    candidates = [
        entry
        for entry in fitting_partitions
        if entry.sends is not None and entry.sends <= MAX_SENT_RATIO * current_bytes
    ]
    if fitting_partitions and not candidates and (facts.splits_weights or facts.degree("SP") > 1):
        candidates = [entry for entry in fitting_partitions if entry.sends is None][:1]

    def describe(entry: OtherPartition) -> str:
        sends = (
            ""
            if entry.sends is None
            else f"sends about {decimal_bytes_text(entry.sends)} a step, not {decimal_bytes_text(current_bytes)}, and "
        )
        return f"partition={entry.partition} {sends}needs about {gib_text(entry.needs)} of {gib_text(usable)}"

    best = sorted(candidates, key=lambda entry: entry.sends or 0)[:2]
    return {entry.partition: describe(entry) for entry in best if entry.partition not in excluded}


def _faster_layout_hints(facts: _Facts) -> Iterator[Hint]:
    timed_layouts = [
        (o.step.step_s, o) for o in facts.other_layouts if o.status is CompileStatus.ok and o.step is not None
    ]
    if not timed_layouts:
        return
    (best_s, best), current_s = min(timed_layouts, key=lambda entry: entry[0]), facts.step.step_s
    if best_s < 0.98 * current_s:
        layout = best.layout.name
        text = (
            f"{layout}, which you compiled earlier for the same model and batch, is {current_s / best_s:.2f}x as fast "
            f"({1e3 * best_s:.0f} ms per step)."
        )
        yield Hint(HintCode.faster_layout, text, 1 - best_s / current_s, changes=(layout,))


def _reduction_hints(facts: _Facts) -> Iterator[Hint]:
    """Suggest summing gradients in bfloat16 if a bfloat16 run sums them in float32, and its step waits for the sums."""
    if facts.prediction.reduction != "float32" or "bf16" not in str(facts.prediction.layout.precision):
        return
    data_axes = {axis for axis, role in facts.roles.items() if role.kind in (RoleKind.DP, RoleKind.FSDP)}
    sums = [use for use in facts.collectives if use.kind in ("all-reduce", "reduce-scatter")]
    waited = sum(use.exposed_s for use in sums if data_axes.issuperset(use.mesh_axes))
    if (share := waited / facts.step.step_s) >= MIN_HINT_SHARE:
        text = (
            f"{percent_text(share)} of the step waits for sums over data axes, mainly of gradients, which are in "
            "float32. precision.reduction=bfloat16 sends half the bytes, as MaxText does, but is less accurate. "
            "Llama 3 and torchtitan use float32."
        )
        yield Hint(HintCode.reduction, text, share, changes=("precision.reduction=bfloat16",))


def _recomputation_hints(facts: _Facts) -> Iterator[Hint]:
    step = facts.step
    if not step.executed_flops or not step.model_flops or facts.headroom is None or facts.offloads:
        return
    excess_ratio, fitting_remats = step.executed_flops / step.model_flops - 1, facts.fitting_remats()
    if excess_ratio >= MIN_HINT_SHARE and facts.prediction.layout.remat != "none" and fitting_remats:
        change, needs = fitting_remats[0].change, fitting_remats[0].needs
        text = (
            f"The chip executes {percent_text(excess_ratio)} more FLOPs than the model has, mostly for recomputation. "
            f"Try {change}, which needs about {needs / GIB:.1f} of the {facts.headroom / GIB:.1f} free GiB. It may "
            "also be slower, because saved activations are written to memory and read again."
        )
        yield Hint(HintCode.recomputation, text, excess_ratio, changes=(change,))


def _save_activation_hints(facts: _Facts) -> Iterator[Hint]:
    """Suggest saving one more activation: of those that fit on the device, the slowest to recompute.

    If none fits, suggests offloading the slowest one to the host.
    """
    report, headroom, step_s = facts.prediction.remat, facts.headroom, facts.step.step_s
    if report is None or headroom is None:
        return
    slow_activations = [entry for entry in report.again if entry.seconds >= MIN_RECOMPUTATION_SHARE * step_s]
    if not slow_activations:
        return
    fitting_activations = [entry for entry in slow_activations if MARGIN * entry.bytes <= headroom]
    best, key, names = (
        (fitting_activations[0], "save", report.save)
        if fitting_activations
        else (slow_activations[0], "offload", report.offload)
    )
    share = best.seconds / step_s
    change = f"remat.{key}=[{','.join((*names, best.name))}]"
    benefit = f"avoids {duration_text(best.seconds)} of recomputation ({percent_text(share)} of the step)"
    if fitting_activations:
        text = (
            f"Set {change} to also save {best.name}. This takes about {memory_text(best.bytes)} of the "
            f"{memory_text(headroom)} of free memory, and {benefit}"
        )
    else:
        text = (
            f"No activation that is slow to recompute fits on the device ({memory_text(headroom)} free). Set {change} "
            f"to offload {best.name}. This sends about {memory_text(best.bytes)} to the host and back, and {benefit}"
        )
    text += "."
    yield Hint(HintCode.save_activation, text, share, changes=(change,))


def _memory_bound_hints(facts: _Facts) -> Iterator[Hint]:
    if (share := facts.share(PartKind.memory)) >= 2 * MIN_HINT_SHARE:
        text = (
            f"Memory-bound operations are {percent_text(share)} of the step, because each chip moves many bytes for "
            "few tokens. Use a larger batch, or split the batch over fewer devices."
        )
        yield Hint(HintCode.memory_bound, text, share)


def _copy_hints(facts: _Facts) -> Iterator[Hint]:
    share, change = facts.share(PartKind.copies), ()
    if share < MIN_HINT_SHARE:
        return
    text = f"Waiting for copies between memories is {percent_text(share)} of the step"
    fitting_remats = [remat for remat in facts.fitting_remats() if remat.change != "remat=full"]
    if not facts.offloads:
        text += ": matrix products wait for their operands."
    else:
        text += f": remat={facts.prediction.layout.remat} sends saved activations to the host and back"
        if fitting_remats:
            change, needs, free = (fitting_remats[0].change,), fitting_remats[0].needs, facts.headroom or 0
            text += f". {change[0]} keeps them on the device, and needs about {needs / GIB:.1f} of the "
            text += f"{free / GIB:.1f} GiB that are free."
        else:
            text += ". With a larger batch, more compute overlaps with each copy."
    yield Hint(HintCode.copies, text, share, changes=change)


def _narrow_product_hints(facts: _Facts) -> Iterator[Hint]:
    rate = facts.step.product_rate
    if rate and rate < LOW_PRODUCT_RATE and facts.share(PartKind.matmul) >= MIN_HINT_SHARE:
        text = f"Matrix products and kernels run at {percent_text(rate)} of peak"
        if facts.splits_weights:
            text += ", because the shards of weights are narrow. Split weights over fewer devices."
        else:
            text += ", although no axis splits weights: the model is narrow, or a chip has few tokens."
        yield Hint(HintCode.narrow_products, text, rate)
