"""Compares two layouts by their predictions: step times by part, bytes sent, recomputed activations and memory.

Reports also use it to compare measured layouts.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from valkyrie.axes import UNATTRIBUTED
from valkyrie.hardware.platforms import replayed_devices
from valkyrie.parts import PartKind, record_name, sum_seconds
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.correction import SHARED_ERRORS
from valkyrie.search.compile.prediction import (
    CompileStatus,
    PredictedStep,
    Prediction,
    short_cause,
    short_source,
)
from valkyrie.units import count_text, decimal_bytes_text, duration_text, memory_text, percent_text

LETTERS = ("A", "B")
"""Labels of the first and the second layout in sentences."""
KEYS = ("first=", "second=")
"""Settings of the first and the second layout, in error messages."""
_MIN_SHARE = 0.1
"""The explanation mentions parts of a step that make up at least this share of the difference in step time.

Other sentences have other thresholds: executed FLOPs have `_MIN_FLOPS_DIFFERENCE`, and recomputed activations and peak
memory have none.
"""
_MAIN_SHARE = 0.5
"""The content of memory that differs most is named if it makes up at least this share of the difference in peaks."""
_MIN_FLOPS_DIFFERENCE = 0.03
"""Smallest relative difference in executed FLOPs that the explanation mentions."""
_MAX_LISTED = 5
"""Maximum length of lists of collectives, recomputed activations and settings."""
_PRODUCTS = (PartKind.matmul, PartKind.kernel)
_COMMUNICATION = {
    PartKind.exposed: "waiting for communication",
    PartKind.collectives: "time in collectives, waiting included",
}
"""Phrase for each kind of communication in an explanation. Measured steps have only `collectives`."""
_OFFSET = "The difference is partly offset by"
_SUBJECTS = {
    PartKind.memory: "Memory-bound operations",
    PartKind.compute: "Other arithmetic",
    PartKind.copies: "Waiting for copies",
    PartKind.rest: "Everything outside collectives",
}


@dataclass(frozen=True)
class Quantity:
    """One quantity of both layouts: seconds or bytes sent per device and step, or bytes of memory per device."""

    name: str
    first: float
    second: float

    @property
    def excess(self) -> float:
        """Second value minus the first."""
        return self.second - self.first


@dataclass(frozen=True)
class WaitedCollective:
    """A collective of one layout, with its calls, bytes sent and seconds waited per step.

    Args:
        kind: Kind of collective.
        over: Mesh axes with their roles, such as `y (MP2)`.
        cause: Name of the operation that requires it.
        source: Source line (`file:line`) of this operation.
        calls: Calls per step.
        bytes: Bytes that a device sends.
        waited_s: Seconds that a device waits.
    """

    kind: str
    over: str
    cause: str
    source: str
    calls: float
    bytes: float
    waited_s: float


@dataclass(frozen=True)
class Difference:
    """Comparison of two layouts of one model: the content of `explain.json`.

    Seconds and bytes sent of the second layout are scaled to the tokens per step of the first.

    Args:
        names: Names of the layouts.
        step_s: Seconds per step.
        seconds: Seconds of the parts of a step, the largest difference first.
        bytes_sent: Bytes that a device sends, by mesh axes.
        bytes_at_peak: Peak memory of a device by content. Not scaled.
        collectives: The collectives of each layout with the longest waits.
        sentences: A headline that names the faster layout, then the reasons.
    """

    names: tuple[str, str]
    step_s: tuple[float, float]
    seconds: tuple[Quantity, ...]
    bytes_sent: tuple[Quantity, ...]
    bytes_at_peak: tuple[Quantity, ...]
    collectives: tuple[tuple[WaitedCollective, ...], tuple[WaitedCollective, ...]]
    sentences: tuple[str, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why one layout is faster, without the headline."""
        return self.sentences[1:]


@dataclass(frozen=True)
class ComparedQuantities:
    """Quantities of one layout that are compared.

    Args:
        seconds: Seconds per step by part, named as in `explain.json`.
        sent: Bytes that a device sends per step, by mesh axes.
        memory: Bytes of a device's peak memory, by content.
        tokens: Tokens per step, or 0 if unknown.
    """

    seconds: dict[str, float]
    sent: dict[str, float]
    memory: dict[str, int]
    tokens: int


@dataclass(frozen=True)
class _Side:
    """One of the two layouts. `scale` is the first layout's number of tokens per step divided by that of this one."""

    label: str
    prediction: Prediction
    step: PredictedStep
    quantities: ComparedQuantities
    scale: float = 1.0

    @property
    def step_s(self) -> float:
        return self.scale * self.step.step_s

    def sum_seconds(self, *kinds: PartKind) -> float:
        return self.scale * sum_seconds(self.prediction.parts, *kinds)


def compare_layouts(
    first: Prediction,
    second: Prediction,
    requests: tuple[str, str] | None = None,
    labels: tuple[str, str] | None = None,
) -> Difference:
    """Compare two layouts of the same model that fit and have step times.

    Raises ValueError if a layout has no step time or if the models differ. Without `labels`, also raises ValueError if
    both are the same layout, or the same program with the same step time.

    Args:
        first: Prediction of a layout.
        second: Prediction of another layout of the same model.
        requests: The user's overrides or folders for both layouts. They distinguish layouts with the same name.
        labels: Names of the layouts, also in sentences. By default, sentences use A and B, and the names are derived
            from the layouts and `requests`.
    """
    pair = (first, second)
    problems = [
        text for prediction, key in zip(pair, KEYS, strict=True) if (text := missing_step_reason(prediction, key))
    ]
    if problems or (problems := model_mismatch(first, second)):
        raise ValueError("\n".join(problems))
    assert first.step is not None and second.step is not None
    side_labels = labels or LETTERS
    a, b = (
        _Side(side_labels[0], first, first.step, compared_quantities(first)),
        _Side(side_labels[1], second, second.step, compared_quantities(second)),
    )
    if a.quantities.tokens and b.quantities.tokens:  # unknown in some old records
        b = replace(b, scale=a.quantities.tokens / b.quantities.tokens)
    return Difference(
        names=labels or _distinct_names(first, second, requests),
        step_s=(a.step_s, b.step_s),
        seconds=_pair_quantities(a.quantities.seconds, b.quantities.seconds, b.scale),
        bytes_sent=_pair_quantities(a.quantities.sent, b.quantities.sent, b.scale),
        bytes_at_peak=_pair_quantities(a.quantities.memory, b.quantities.memory, 1.0),
        collectives=(_longest_waits(a), _longest_waits(b)),
        sentences=tuple(_explain_difference(a, b)),
    )


def compared_quantities(prediction: Prediction) -> ComparedQuantities:
    """Return the seconds by part, bytes sent by mesh axes, bytes of memory by content, and tokens per step.

    Mesh axes are named with their roles, such as `x,y (FSDP)`.
    """
    layout, traffic, memory_report = prediction.layout, prediction.communication, prediction.memory
    seconds = {record_name(part.kind, _format_axes(part.mesh_axes, layout)): part.seconds for part in prediction.parts}
    sent_by_axes = (
        {} if traffic is None else {_format_axes(axes, layout): size for axes, size in traffic.by_mesh_axes.items()}
    )
    tokens = (layout.batch or 0) * (layout.seq or 0)
    return ComparedQuantities(seconds, sent_by_axes, {} if memory_report is None else memory_report.split, tokens)


def model_mismatch(first: Prediction, second: Prediction) -> list[str]:
    """Return a list with an error message if two layouts are of different models, otherwise an empty list.

    Models differ if their names differ, or if a setting that both have differs in value.
    """
    names = [prediction.layout.model for prediction in (first, second)]
    shared = first.model.keys() & second.model.keys()
    changed = [key for key in first.model if key in shared and first.model[key] != second.model[key]]
    if names[0] == names[1]:
        if not changed:
            return []
        values = [first.model, second.model]
        names = [
            " ".join([names[0], *(f"{key}={settings[key]}" for key in changed[:_MAX_LISTED])]) for settings in values
        ]
    return [f"first= is a layout of {names[0]} and second= of {names[1]}. Choose two layouts of the same model."]


def missing_step_reason(prediction: Prediction, key: str) -> str | None:
    """Return an error message if a prediction has no step time or is of a program without a layout, otherwise None.

    `key` is the setting of the layout in the message, from `KEYS`.
    """
    if prediction.program is not None:
        return f"{key} is a prediction of a program, {prediction.program.name}. Choose a layout of a model instead."
    name = prediction.layout.name
    if prediction.status is not CompileStatus.ok:
        reason = prediction.reason or "run mode=compile for the reason"
        return f"{key} ({name}) has no step time ({prediction.status.value.replace('_', ' ')}): {reason}"
    if prediction.step is None:
        kinds = " or ".join(replayed_devices())
        return f"{key} ({name}) has no predicted step time. Compile it for {kinds}, such as target=v4-64."
    return None


def _distinct_names(first: Prediction, second: Prediction, requests: tuple[str, str] | None) -> tuple[str, str]:
    """Return names that distinguish both layouts.

    Adds target, batch, length and precision to the names where they differ. If the names are still equal, adds the
    compiler options that differ or, if none do, the parts of `requests` that differ. Raises ValueError if nothing
    differs, or if both layouts are the same program with the same step time.
    """
    pair = (first, second)
    names = [prediction.layout.name for prediction in pair]
    programs = [(prediction.module_sha256, prediction.step and prediction.step.step_s) for prediction in pair]
    if first.module_sha256 is not None and programs[0] == programs[1]:
        texts = [
            f"{key}={text!r}" if text else key
            for key, text in zip(("first", "second"), requests or ("", ""), strict=True)
        ]
        raise ValueError(
            f"{' and '.join(texts)} compile to the same program, {' and '.join(dict.fromkeys(names))}. "
            "Choose another layout in second=."
        )
    for key in ("target", "batch", "seq", "precision"):
        values = [getattr(prediction.layout, key) for prediction in pair]
        if values[0] != values[1]:
            names = [f"{name} {key}={value}" for name, value in zip(names, values, strict=True)]
    if names[0] != names[1]:
        return names[0], names[1]
    options = [{option.name: option.value for option in prediction.options} for prediction in pair]
    changed = [name for name in {**options[0], **options[1]} if options[0].get(name) != options[1].get(name)]
    details = [", ".join(f"{name}={values.get(name) or 'null'}" for name in changed) for values in options]
    if not changed and requests is not None:
        arguments = [shlex.split(text) for text in requests]
        details = [" ".join(w for w in arguments[i] if w not in arguments[1 - i]) or "unchanged" for i in (0, 1)]
    if details[0] == details[1]:
        raise ValueError(f"first= and second= are the same layout, {names[0]}. Choose another layout in second=.")
    return f"{names[0]} {details[0]}", f"{names[1]} {details[1]}"


def _pair_quantities(
    first: Mapping[str, float | int], second: Mapping[str, float | int], scale: float
) -> tuple[Quantity, ...]:
    """Pair the values of both layouts by name, the largest difference first. Multiplies `second` by `scale`."""
    pairs = [Quantity(name, float(first.get(name, 0)), scale * second.get(name, 0)) for name in {**first, **second}]
    return tuple(sorted(pairs, key=lambda pair: -abs(pair.excess)))


def _format_axes(mesh_axes: tuple[str, ...], layout: LayoutRecord) -> str:
    """Format mesh axes with their roles in a layout, such as `y (MP2)`.

    The role is needed, because a mesh axis can have different roles in the two layouts that are compared.
    """
    roles = layout.axis_roles or {}
    kinds = dict.fromkeys(roles[axis].kind.value for axis in mesh_axes if axis in roles)
    if not mesh_axes:
        return UNATTRIBUTED
    return ",".join(mesh_axes) + (f" ({', '.join(kinds)})" if kinds else "")


def _longest_waits(side: _Side) -> tuple[WaitedCollective, ...]:
    """Return the collectives with the longest waits, the longest first.

    Merges collectives with the same kind, mesh axes, shortened cause and source line, such as those of one operation in
    the forward and the backward pass.
    """
    merged: dict[tuple[str, str, str, str], tuple[float, float, float]] = {}
    traffic = side.prediction.communication
    for use in () if traffic is None else traffic.collectives:
        key = (
            use.kind,
            _format_axes(use.mesh_axes, side.prediction.layout),
            short_cause(use.cause),
            short_source(use.source),
        )
        calls, size, waited = merged.get(key, (0.0, 0.0, 0.0))
        merged[key] = (calls + use.calls, size + side.scale * use.bytes, waited + side.scale * use.exposed_s)
    uses = [WaitedCollective(*key, *numbers) for key, numbers in merged.items()]
    return tuple(sorted(uses, key=lambda use: -use.waited_s)[:_MAX_LISTED])


def _explain_difference(a: _Side, b: _Side) -> list[str]:
    """Return sentences about which of two layouts is faster, and why. The first is the headline."""
    faster, slower = (a, b) if a.step_s <= b.step_s else (b, a)
    text = f"{faster.label} is {slower.step_s / faster.step_s:.2f} times as fast as {slower.label}: "
    text += f"{duration_text(faster.step_s)} a step, not {duration_text(slower.step_s)}."
    if b.scale != 1.0:
        text += (
            f" {b.label} has another number of tokens per step, so its times and bytes are scaled to the "
            f"{a.quantities.tokens:,} tokens of {a.label}."
        )
    lines = [text]
    slow_range, fast_range = slower.step.interval, faster.step.interval
    if slow_range and fast_range and slow_range.low * slower.step_s < fast_range.high * faster.step_s:
        chips = [side.prediction.layout.chip for side in (faster, slower)]
        lines.append(
            f"Their intervals overlap, but {SHARED_ERRORS}, so the order is surer than the intervals."
            if chips[0] == chips[1] and chips[0] is not None
            else "The difference is within the intervals of the predictions, so the order may be the other way round."
        )
    if slower.step_s <= faster.step_s:
        return lines
    causes = [  # the largest first, then those that favour the slower layout
        (
            _share_of_difference(faster, slower, *_COMMUNICATION),
            [*_explain_communication(faster, slower), *_explain_gradient_sums(faster, slower)],
        ),
        (_share_of_difference(faster, slower, *_PRODUCTS), _explain_products(faster, slower)),
        *_explain_other_parts(faster, slower),
    ]
    causes.sort(key=lambda cause: -cause[0])
    return [*lines, *(line for _, cause_lines in causes for line in cause_lines), *_explain_memory(faster, slower)]


def _share_of_difference(faster: _Side, slower: _Side, *kinds: PartKind) -> float:
    """Return the share of the difference in step time due to these parts. Negative if they favour the slower layout."""
    return (slower.sum_seconds(*kinds) - faster.sum_seconds(*kinds)) / (slower.step_s - faster.step_s)


def _explain_communication(faster: _Side, slower: _Side) -> list[str]:
    """Return a list with a sentence that compares the seconds and bytes of communication.

    The list is empty if communication is less than `_MIN_SHARE` of the difference in step time. If neither step is
    split into parts, the sentence compares only the bytes, and the list is empty if no bytes are known.
    """
    fast_bytes, slow_bytes = (
        decimal_bytes_text(side.scale * sum(side.quantities.sent.values())) for side in (faster, slower)
    )
    if not (faster.quantities.seconds or slower.quantities.seconds):
        sends_anything = faster.quantities.sent or slower.quantities.sent
        return (
            [f"Each device sends {fast_bytes} under {faster.label} and {slow_bytes} under {slower.label}."]
            if sends_anything
            else []
        )
    for kind, subject in _COMMUNICATION.items():
        share = _share_of_difference(faster, slower, kind)
        if abs(share) < _MIN_SHARE:
            continue
        amount = "More than the whole difference" if share > 1 else f"{percent_text(share)} of the difference"
        fast_s, slow_s = (duration_text(side.sum_seconds(kind)) for side in (faster, slower))
        start = f"{amount} is {subject}" if share > 0 else f"{_OFFSET} {subject}"
        text = (
            f"{start}: {slow_s} per step under {slower.label}, {fast_s} under {faster.label}. Each device sends "
            f"{slow_bytes} under {slower.label}, {fast_bytes} under {faster.label}."
        )
        longer = slower if share > 0 else faster
        for use in _longest_waits(longer)[:1]:
            text += f" The longest wait of {longer.label} is for the {use.kind} over {use.over} of {use.cause} "
            text += f"({use.source}): {duration_text(use.waited_s)} in {count_text(round(use.calls), 'call')}."
        return [text]
    return []


def _explain_gradient_sums(faster: _Side, slower: _Side) -> list[str]:
    """Return a list with a sentence on how often the layouts that accumulate microbatches sum gradients."""
    labels_by_count: dict[str, list[str]] = defaultdict(list)
    for side in (faster, slower):
        if side.prediction.gradients is not None:
            labels_by_count[side.prediction.gradients.frequency_text].append(side.label)
    texts = [f"{count} under {' and '.join(labels)}" for count, labels in labels_by_count.items()]
    return [f"Gradients are summed over devices {' and '.join(texts)}."] if texts else []


def _explain_products(faster: _Side, slower: _Side) -> list[str]:
    lines, pair = [], (faster, slower)
    share = _share_of_difference(faster, slower, *_PRODUCTS)
    if abs(share) >= _MIN_SHARE:
        subject = "Matrix products and kernels" if share > 0 else f"{_OFFSET} matrix products and kernels, which"
        times = [f"{duration_text(side.sum_seconds(*_PRODUCTS))} under {side.label}" for side in pair]
        rates = [percent_text(side.step.product_rate) for side in pair if side.step.product_rate]
        rate_text = f", at {rates[0]} and {rates[1]} of peak FLOP/s" if len(rates) == 2 else ""
        lines.append(f"{subject} take {times[0]} and {times[1]}{rate_text}.")
    steps = [side.step for side in pair]
    flops_ratios = [s.executed_flops / s.model_flops for s in steps if s.executed_flops is not None and s.model_flops]
    if len(flops_ratios) == 2 and abs(flops_ratios[1] / flops_ratios[0] - 1) >= _MIN_FLOPS_DIFFERENCE:
        lines.append(
            f"Each device executes {flops_ratios[0]:.2f} times the FLOPs of the model under {faster.label} and "
            f"{flops_ratios[1]:.2f} under {slower.label}. The excess is recomputation, or work that several devices "
            "repeat."
        )
    remats = [side.prediction.remat for side in pair]
    recomputed_s = [{} if remat is None else {entry.name: entry.seconds for entry in remat.again} for remat in remats]
    if slow_only := [name for name in recomputed_s[1] if name not in recomputed_s[0]]:
        listed = ", ".join(sorted(slow_only, key=lambda name: -recomputed_s[1][name])[:_MAX_LISTED])
        lines.append(
            f"For the backward pass, {slower.label} recomputes activations that {faster.label} saves: {listed}."
        )
    return lines


def _explain_other_parts(faster: _Side, slower: _Side) -> list[tuple[float, list[str]]]:
    """Return the share of the difference of each kind in `_SUBJECTS`, with a sentence if it is large enough."""
    causes = []
    for kind, subject in _SUBJECTS.items():
        share = _share_of_difference(faster, slower, kind)
        if abs(share) < _MIN_SHARE:
            continue
        subject = subject if share > 0 else f"{_OFFSET} {subject[0].lower()}{subject[1:]}, which"
        verb = "take" if kind is PartKind.memory else "takes"
        fast_s, slow_s = (f"{duration_text(side.sum_seconds(kind))} under {side.label}" for side in (faster, slower))
        causes.append((share, [f"{subject} {verb} {fast_s} and {slow_s}."]))
    return causes


def _explain_memory(faster: _Side, slower: _Side) -> list[str]:
    reports = [side.prediction.memory for side in (faster, slower)]
    peaks = [report.peak for report in reports if report is not None and report.peak is not None]
    if len(peaks) < 2:
        return []
    texts = _memory_texts(*peaks)
    text = f"Each device needs {texts[0]} at its peak under {faster.label} and {texts[1]} under {slower.label}"
    peak_difference = peaks[1] - peaks[0]
    largest = next(
        iter(_pair_quantities(faster.quantities.memory, slower.quantities.memory, 1.0)), Quantity("", 0.0, 0.0)
    )
    if peak_difference and largest.excess / peak_difference >= _MAIN_SHARE:
        sizes = " and ".join(_memory_texts(largest.first, largest.second))
        text += f". Most of the difference is {largest.name}: {sizes}"
    return [f"{text}."]


def _memory_texts(first: float, second: float) -> tuple[str, str]:
    """Format two sizes in bytes, in MiB if they would look equal otherwise."""
    texts = memory_text(int(first)), memory_text(int(second))
    if first == second or texts[0] != texts[1]:
        return texts
    return f"{first / 2**20:,.1f} MiB", f"{second / 2**20:,.1f} MiB"
