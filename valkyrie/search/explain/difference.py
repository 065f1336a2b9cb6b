"""Compares two layouts: their step times by part, and what they send, recompute and keep in memory.

Uses their predictions and nothing else, so every number in a sentence was computed. Reports compare measured layouts in
the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

from valkyrie.axes import UNATTRIBUTED
from valkyrie.parts import PartKind, describe_part, seconds_in
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search.compile.prediction import CompileStatus, PredictedStep, Prediction, short_cause, short_source
from valkyrie.units import duration, memory_text, percent, traffic_text

LETTERS = ("A", "B")
"""Names of the first and the second layout in sentences."""
NO_STEP = "compile for a TPU slice, such as target=v4-64."
"""Advice for a layout that has no predicted step."""
_LEAST_SHARE = 0.1
"""Smallest share of the difference between the steps for which a part gets a sentence."""
_MAIN_SHARE = 0.5
"""Smallest share of the difference between two peaks for which a kind of memory is called most of it."""
_MORE_FLOPS = 0.03
"""Smallest relative difference between two counts of executed FLOPs that gets a sentence."""
_LISTED = 5
"""Length of lists: collectives of each layout, recomputed activations, settings."""
_PRODUCTS = (PartKind.matmul, PartKind.kernel)
_COMMUNICATION = {
    PartKind.exposed: ("waiting for communication", "waits"),
    PartKind.collectives: ("time in collectives, waiting included", "spends"),
}
"""Names of communication in sentences, and the verb for a layout. Measured steps have only `collectives`."""
_SUBJECTS = {
    PartKind.memory: "Memory-bound operations",
    PartKind.compute: "Other arithmetic",
    PartKind.copies: "Waiting for copies",
    PartKind.rest: "Everything outside collectives",
}


@dataclass(frozen=True)
class Pair:
    """A quantity of both layouts, in seconds or bytes per device and step."""

    name: str
    first: float
    second: float

    @property
    def more(self) -> float:
        """Excess of the second over the first."""
        return self.second - self.first


@dataclass(frozen=True)
class WaitedCollective:
    """Calls, bytes sent and seconds waited per step for a collective over mesh axes, named with their roles."""

    kind: str
    over: str
    cause: str
    source: str
    calls: float
    bytes: float
    waited_s: float


@dataclass(frozen=True)
class Difference:
    """Two layouts of one model side by side, as `explain.json` stores them.

    Seconds and bytes sent of the second layout are scaled to the tokens of a step of the first.

    Args:
        names: Names of the layouts.
        step_s: Step times.
        seconds: Parts of the steps, the largest difference first.
        bytes_sent: Bytes that a device sends, by mesh axes.
        bytes_at_peak: Peak memory of a device by what it holds, of whole steps.
        collectives: Collectives of each layout with the longest waits.
        sentences: A headline with the faster layout, then the reasons.
    """

    names: tuple[str, str]
    step_s: tuple[float, float]
    seconds: tuple[Pair, ...]
    bytes_sent: tuple[Pair, ...]
    bytes_at_peak: tuple[Pair, ...]
    collectives: tuple[tuple[WaitedCollective, ...], tuple[WaitedCollective, ...]]
    sentences: tuple[str, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why one layout is faster, without the headline."""
        return self.sentences[1:]


@dataclass(frozen=True)
class Sides:
    """Quantities of a layout that are compared: seconds, bytes sent and memory by name, and the tokens of a step."""

    seconds: dict[str, float]
    sent: dict[str, float]
    memory: dict[str, int]
    tokens: int


@dataclass(frozen=True)
class _Side:
    """One of the layouts, and the factor that scales its step to the tokens of the first."""

    label: str
    prediction: Prediction
    step: PredictedStep
    parts: Sides
    scale: float = 1.0

    @property
    def step_s(self) -> float:
        return self.scale * self.step.step_s

    def seconds(self, *kinds: PartKind) -> float:
        return self.scale * seconds_in(self.prediction.parts, *kinds)


def difference(
    first: Prediction,
    second: Prediction,
    requests: tuple[str, str] | None = None,
    labels: tuple[str, str] | None = None,
) -> Difference:
    """Compare two layouts. Raises ValueError with all reasons if they cannot be compared.

    Both must be of the same model, fit, and have step times.

    Args:
        first: A layout.
        second: Another layout of its model.
        requests: The overrides or folders that named them, which distinguish layouts of the same name.
        labels: Names of the layouts in sentences instead of A and B. Without labels they must be different programs.
    """
    pair = (first, second)
    problems = [text for one, letter in zip(pair, LETTERS, strict=True) if (text := without_step(one, letter))]
    if problems or (problems := other_models(first, second)):
        raise ValueError("\n".join(problems))
    assert first.step is not None and second.step is not None
    in_text = labels or LETTERS
    a, b = _Side(in_text[0], first, first.step, sides(first)), _Side(in_text[1], second, second.step, sides(second))
    b = replace(b, scale=a.parts.tokens / b.parts.tokens)
    return Difference(
        names=labels or _names(first, second, requests),
        step_s=(a.step_s, b.step_s),
        seconds=_pairs(a.parts.seconds, b.parts.seconds, b.scale),
        bytes_sent=_pairs(a.parts.sent, b.parts.sent, b.scale),
        bytes_at_peak=_pairs(a.parts.memory, b.parts.memory, 1.0),
        collectives=(_longest_waits(a), _longest_waits(b)),
        sentences=tuple(_sentences(a, b)),
    )


def sides(prediction: Prediction) -> Sides:
    """Return the quantities of a layout that are compared. Mesh axes are named with their roles: `x,y (FSDP)`."""
    layout, traffic, held = prediction.layout, prediction.communication, prediction.memory
    seconds = {describe_part(part.kind, _axes(part.mesh_axes, layout)): part.seconds for part in prediction.parts}
    over = {} if traffic is None else {_axes(axes, layout): size for axes, size in traffic.by_mesh_axes.items()}
    tokens = (layout.batch or 0) * (layout.seq or 0)
    return Sides(seconds, over, {} if held is None else held.split, tokens)


def other_models(first: Prediction, second: Prediction) -> list[str]:
    """Return the reasons why two layouts are of different models: their names, or values of settings that both have."""
    models = [prediction.layout.model for prediction in (first, second)]
    shared = first.model.keys() & second.model.keys()
    changed = [key for key in first.model if key in shared and first.model[key] != second.model[key]]
    if models[0] == models[1]:
        if not changed:
            return []
        values = [first.model, second.model]
        models = [" ".join([models[0], *(f"{key}={of[key]}" for key in changed[:_LISTED])]) for of in values]
    return [f"A is of {models[0]} and B of {models[1]}: only layouts of one model are compared."]


def without_step(prediction: Prediction, letter: str) -> str | None:
    """Return the reason why a prediction has no step time of a layout, or None if it has one."""
    if prediction.program is not None:
        return f"{letter} is no layout of a model but another program: {prediction.program.name}."
    name = prediction.layout.name
    if prediction.status is not CompileStatus.ok:
        reason = prediction.reason or "mode=compile says more"
        return f"{letter}, {name}, has no step: {prediction.status.value.replace('_', ' ')}: {reason}"
    if prediction.step is None:
        return f"{letter}, {name}, has no predicted step: {NO_STEP}"
    return None


def _names(first: Prediction, second: Prediction, requests: tuple[str, str] | None) -> tuple[str, str]:
    """Name both layouts so that they differ: by name, by other settings of the compile, or by `requests`.

    Raises ValueError if they do not differ, or if both are one program with the same step time.
    """
    pair = (first, second)
    names = [prediction.layout.name for prediction in pair]
    programs = [(prediction.module_sha256, prediction.step and prediction.step.step_s) for prediction in pair]
    if first.module_sha256 is not None and programs[0] == programs[1]:
        raise ValueError(
            f"A and B are the same program, {' and '.join(dict.fromkeys(names))}: name another one in second=."
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
        words = [shlex.split(text) for text in requests]
        details = [" ".join(w for w in words[i] if w not in words[1 - i]) or "as it is" for i in (0, 1)]
    if details[0] == details[1]:
        raise ValueError(f"A and B are the same layout, {names[0]}: name another one in second=.")
    return f"{names[0]} {details[0]}", f"{names[1]} {details[1]}"


def _pairs(first: Mapping[str, float | int], second: Mapping[str, float | int], scale: float) -> tuple[Pair, ...]:
    """Return the values of both by name, the largest difference first."""
    pairs = [Pair(name, float(first.get(name, 0)), scale * second.get(name, 0)) for name in {**first, **second}]
    return tuple(sorted(pairs, key=lambda pair: -abs(pair.more)))


def _axes(mesh_axes: tuple[str, ...], layout: LayoutRecord) -> str:
    """Return mesh axes with their roles, `y (MP2)`, because an axis may have another role in the other layout."""
    roles = layout.axis_roles or {}
    kinds = dict.fromkeys(roles[axis].kind.value for axis in mesh_axes if axis in roles)
    if not mesh_axes:
        return UNATTRIBUTED
    return ",".join(mesh_axes) + (f" ({', '.join(kinds)})" if kinds else "")


def _longest_waits(side: _Side) -> tuple[WaitedCollective, ...]:
    """Return the collectives with the longest waits. The forward and backward pass of one operation count as one."""
    merged: dict[tuple[str, str, str, str], tuple[float, float, float]] = {}
    traffic = side.prediction.communication
    for use in () if traffic is None else traffic.collectives:
        key = (use.kind, _axes(use.mesh_axes, side.prediction.layout), short_cause(use.cause), short_source(use.source))
        calls, size, waited = merged.get(key, (0.0, 0.0, 0.0))
        merged[key] = (calls + use.calls, size + side.scale * use.bytes, waited + side.scale * use.exposed_s)
    uses = [WaitedCollective(*key, *numbers) for key, numbers in merged.items()]
    return tuple(sorted(uses, key=lambda use: -use.waited_s)[:_LISTED])


def _sentences(a: _Side, b: _Side) -> list[str]:
    """Explain which of two layouts is faster, and why."""
    fast, slow = (a, b) if a.step_s <= b.step_s else (b, a)
    text = f"{fast.label} is {slow.step_s / fast.step_s:.2f} times as fast as {slow.label}: "
    text += f"{duration(fast.step_s)} a step, not {duration(slow.step_s)}."
    if a.parts.tokens != b.parts.tokens:
        text += f" Seconds and bytes of {b.label} are those for {a.parts.tokens:,} tokens, a step of {a.label}."
    lines = [text]
    shortest, longest = slow.step.interval, fast.step.interval
    if shortest and longest and shortest.low * slow.step_s < longest.high * fast.step_s:
        lines.append(
            "That is within what predictions have been off for published runs: the order may be the other way round."
        )
    if slow.step_s <= fast.step_s:
        return lines
    topics = [_communication, _products, _other_parts, _memory]
    parts = _pairs(a.parts.seconds, b.parts.seconds, b.scale)
    if parts and parts[0].name in [kind.value for kind in _PRODUCTS]:  # the larger difference comes first
        topics[:2] = _products, _communication
    return lines + [line for topic in topics for line in topic(fast, slow)]


def _share(fast: _Side, slow: _Side, *kinds: PartKind) -> float:
    """Return the share of the difference between the steps due to these parts. Negative if they oppose it."""
    return (slow.seconds(*kinds) - fast.seconds(*kinds)) / (slow.step_s - fast.step_s)


def _communication(fast: _Side, slow: _Side) -> list[str]:
    """Compare seconds and bytes of communication, or only the bytes if neither step is split into parts."""
    fast_bytes, slow_bytes = (traffic_text(side.scale * sum(side.parts.sent.values())) for side in (fast, slow))
    if not (fast.parts.seconds or slow.parts.seconds):
        known = fast.parts.sent or slow.parts.sent
        return [f"A device sends {fast_bytes} under {fast.label} and {slow_bytes} under {slow.label}."] if known else []
    for kind, (subject, verb) in _COMMUNICATION.items():
        share = _share(fast, slow, kind)
        if abs(share) < _LEAST_SHARE:
            continue
        amount = "More than the whole difference" if share > 1 else f"{percent(share)} of the difference"
        fast_s, slow_s = (duration(side.seconds(kind)) for side in (fast, slow))
        text = f"{amount if share > 0 else 'Against it'} is {subject}: {slow.label} {verb} {slow_s} of a step, "
        text += f"{fast.label} {fast_s}; a device sends {slow_bytes} and {fast_bytes}."
        longer = slow if share > 0 else fast
        for use in _longest_waits(longer)[:1]:
            text += f" {longer.label} waits longest, {duration(use.waited_s)} in {use.calls:,.0f} calls, for the "
            text += f"{use.kind} over {use.over} of {use.cause} ({use.source})."
        return [text]
    return []


def _products(fast: _Side, slow: _Side) -> list[str]:
    lines, pair = [], (fast, slow)
    if abs(_share(fast, slow, *_PRODUCTS)) >= _LEAST_SHARE:
        times = [f"{duration(side.seconds(*_PRODUCTS))} under {side.label}" for side in pair]
        rates = [percent(side.step.product_rate) for side in pair if side.step.product_rate]
        of_peak = f", {rates[0]} and {rates[1]} of peak" if len(rates) == 2 else ""
        lines.append(f"Products and kernels take {times[0]} and {times[1]}{of_peak}.")
    steps = [side.step for side in pair]
    flops = [s.executed_flops / s.model_flops for s in steps if s.executed_flops is not None and s.model_flops]
    if len(flops) == 2 and abs(flops[1] / flops[0] - 1) >= _MORE_FLOPS:
        lines.append(
            f"Each device executes {flops[0]:.2f} times the FLOPs of the model under {fast.label} and {flops[1]:.2f} "
            f"under {slow.label}: the rest is computed again for the backward pass, or the same on several devices."
        )
    remats = [side.prediction.remat for side in pair]
    again = [{} if remat is None else {entry.name: entry.seconds for entry in remat.again} for remat in remats]
    if only := [name for name in again[1] if name not in again[0]]:
        listed = ", ".join(sorted(only, key=lambda name: -again[1][name])[:_LISTED])
        lines.append(f"For the backward pass {slow.label} computes again what {fast.label} keeps: {listed}.")
    return lines


def _other_parts(fast: _Side, slow: _Side) -> list[str]:
    shares = {kind: _share(fast, slow, kind) for kind in _SUBJECTS}
    lines = []
    for kind, share in sorted(shares.items(), key=lambda item: -abs(item[1])):
        if abs(share) < _LEAST_SHARE:
            continue
        subject = _SUBJECTS[kind] if share > 0 else f"Against it, {_SUBJECTS[kind].lower()}"
        verb = "take" if kind is PartKind.memory else "takes"
        fast_s, slow_s = (f"{duration(side.seconds(kind))} under {side.label}" for side in (fast, slow))
        lines.append(f"{subject} {verb} {fast_s}, {slow_s}.")
    return lines


def _memory(fast: _Side, slow: _Side) -> list[str]:
    reports = [side.prediction.memory for side in (fast, slow)]
    peaks = [report.peak for report in reports if report is not None and report.peak is not None]
    if len(peaks) < 2:
        return []
    text = (
        f"Each device needs {memory_text(peaks[0])} at its peak under {fast.label} and {memory_text(peaks[1])} under "
    )
    text += slow.label
    apart = peaks[1] - peaks[0]
    main = next(iter(_pairs(fast.parts.memory, slow.parts.memory, 1.0)), Pair("", 0.0, 0.0))
    if apart and main.more / apart >= _MAIN_SHARE:
        sizes = f"{memory_text(int(main.first))} and {memory_text(int(main.second))}"
        text += f"; most of that difference is {main.name}: {sizes}"
    return [f"{text}."]
