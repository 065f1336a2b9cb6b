"""What makes one layout faster than another: their steps part by part, what they send, recompute and store.

Uses two predictions and nothing else: every number was computed. Reports compare measured layouts in the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from valkyrie.axes import UNATTRIBUTED
from valkyrie.parallel.partition import recorded_roles
from valkyrie.parts import PartKind, StepPart
from valkyrie.records import encode
from valkyrie.search.compile.prediction import CompileStatus, PredictedStep, Prediction
from valkyrie.search.compile.summary import short_cause, short_source
from valkyrie.units import duration, memory, percent, sent

LETTERS = ("A", "B")
"""What sentences call the first layout and the second."""
WORTH_SAYING = 0.1
"""The share of the difference between two steps from which a sentence is about a part of it."""
MOST = 0.5
"""The share of the difference between two peaks from which a kind of memory is most of it."""
MORE_FLOPS = 0.03
"""From this ratio beyond 1 two counts of executed FLOPs are called different."""
NO_STEP = "compile for a TPU slice, such as target=v4-64."
"""What to do where a layout has no predicted step."""
DEAREST = 5
"""How many collectives of each layout are listed."""
_PRODUCTS = (PartKind.matmul, PartKind.kernel)
_COMMUNICATION = {
    PartKind.exposed: ("waiting for communication", "waits"),
    PartKind.collectives: ("time in collectives, waiting included", "spends"),
}
"""Communication in sentences: what it is, and the verb of a layout. Measured steps have collectives alone."""
_SUBJECTS = {
    PartKind.memory: "Memory-bound operations",
    PartKind.compute: "Other arithmetic",
    PartKind.copies: "Waiting for copies",
    PartKind.rest: "Everything outside collectives",
}


@dataclass(frozen=True)
class Pair:
    """A quantity of both layouts, in seconds or bytes of one device and step."""

    name: str
    first: float
    second: float

    @property
    def more(self) -> float:
        """By how much the second has more."""
        return self.second - self.first


@dataclass(frozen=True)
class PartPair(Pair):
    """Seconds of a part of the step under both layouts."""

    kind: PartKind


@dataclass(frozen=True)
class Waited:
    """A collective with the mesh axes and roles that it runs over: calls, bytes sent and seconds waited in a step."""

    kind: str
    over: str
    cause: str
    source: str
    calls: float
    bytes: float
    waited_s: float


@dataclass(frozen=True)
class Difference:
    """Two layouts of one model side by side; seconds and bytes of the second are for as many tokens as the first's.

    Args:
        names: Both layouts.
        steps: Step times.
        parts: Parts of the steps, which they sum to; the one that explains most first.
        sent: Bytes by mesh axes.
        memory: Bytes at the peak by what they hold, of whole steps.
        dearest: Collectives of each layout that are waited for longest.
        labels: What sentences call the layouts.
        headline: Which of them is faster, in a sentence.
        reasons: Why, in sentences.
    """

    names: tuple[str, str]
    steps: Pair
    parts: list[PartPair]
    sent: list[Pair]
    memory: list[Pair]
    dearest: tuple[list[Waited], list[Waited]]
    labels: tuple[str, str] = LETTERS
    headline: str = ""
    reasons: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """The headline and the reasons."""
        return [self.headline, *self.reasons]


@dataclass(frozen=True)
class Sides:
    """What a page shows of a layout beside another: seconds, bytes sent and memory by name, and tokens of a step."""

    seconds: dict[str, float]
    sent: dict[str, float]
    memory: dict[str, int]
    tokens: int


@dataclass(frozen=True)
class _Side:
    """One of the layouts: its prediction and step, and the factor to as many tokens as the first's."""

    prediction: Prediction
    step: PredictedStep
    scale: float


def difference(
    first: Prediction,
    second: Prediction,
    asked: tuple[str, str] | None = None,
    labels: tuple[str, str] | None = None,
) -> Difference:
    """Compare two layouts. Raises ValueError with all reasons if they cannot be compared.

    They must be of one model, fit, and have step times.

    Args:
        first: A layout.
        second: Another layout of its model.
        asked: The requests for them, which distinguish layouts of the same name.
        labels: What sentences call them instead of A and B. Without labels they must be different programs.
    """
    both = (first, second)
    problems = [text for one, letter in zip(both, LETTERS, strict=True) if (text := without_step(one, letter))]
    if problems or (problems := other_models(first, second)):
        raise ValueError("\n".join(problems))
    assert first.step is not None and second.step is not None
    tokens = [one.about["batch"] * one.about["seq"] for one in both]
    sides = (_Side(first, first.step, 1.0), _Side(second, second.step, tokens[0] / tokens[1]))
    names = labels or _names(*sides, asked)
    made = Difference(
        names=names,
        steps=Pair("step", sides[0].step.step_s, sides[1].scale * sides[1].step.step_s),
        parts=_part_pairs(*sides),
        sent=_pairs(_over(first), _over(second), sides[1].scale),
        memory=_pairs(_split(first), _split(second), 1.0),
        dearest=(_dearest(sides[0]), _dearest(sides[1])),
        labels=labels or LETTERS,
    )
    fast, slow = (0, 1) if made.steps.more >= 0 else (1, 0)
    return replace(made, headline=_headline(made, fast, slow, tokens), reasons=_reasons(made, sides, fast, slow))


def sides(one: Prediction) -> Sides:
    """Return what a page shows of one layout beside another."""
    seconds = {name: part.seconds for name, part in _labelled(one).items()}
    return Sides(seconds, _over(one), _split(one), one.about["batch"] * one.about["seq"])


def as_json(made: Difference) -> dict[str, Any]:
    """Return a difference as plain values for `explain.json`."""

    def rows(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
        return [{"name": p.name, "first": p.first, "second": p.second} for p in pairs]

    told: dict[str, Any] = {"names": list(made.names), "step_s": [made.steps.first, made.steps.second]}
    told |= {"seconds": rows(made.parts), "bytes_sent": rows(made.sent), "bytes_at_peak": rows(made.memory)}
    return told | {"collectives": encode(made.dearest), "sentences": made.sentences}


def other_models(first: Prediction, second: Prediction) -> list[str]:
    """Return why two layouts are not of one model: another name, or other values of settings that both have."""
    models = [one.about["model"] for one in (first, second)]
    one, other = first.model, second.model
    changed = [key for key in one if key in other and one[key] != other[key]]
    if models[0] == models[1] and not changed:
        return []
    told = models
    if models[0] == models[1]:
        told = [" ".join([models[0], *(f"{key}={of[key]}" for key in changed[:DEAREST])]) for of in (one, other)]
    return [f"A is of {told[0]} and B of {told[1]}: only layouts of one model are compared."]


def _names(first: _Side, second: _Side, asked: tuple[str, str] | None) -> tuple[str, str]:
    """Return both layouts by what distinguishes them: their names, what else they were compiled with, or `asked`.

    Raises ValueError if nothing does, or if both are one program that takes as long.
    """
    both = (first.prediction, second.prediction)
    names = [one.about["layout"] for one in both]
    programs = [(one.prediction.module_sha256, one.step.step_s) for one in (first, second)]
    if None not in programs[0] and programs[0] == programs[1]:
        told = " and ".join(dict.fromkeys(names))
        raise ValueError(f"A and B are the same program, {told}: name another one in second=.")
    for key in ("target", "batch", "seq", "precision"):
        values = [one.about[key] for one in both]
        if values[0] != values[1]:
            names = [f"{name} {key}={value}" for name, value in zip(names, values, strict=True)]
    if names[0] != names[1]:
        return names[0], names[1]
    options = [{o.name: o.value for o in one.options} for one in both]
    changed = [name for name in {**options[0], **options[1]} if options[0].get(name) != options[1].get(name)]
    listed = [", ".join(f"{name}={own.get(name) or 'null'}" for name in changed) for own in options]
    if not changed and asked is not None:
        words = [shlex.split(text) for text in asked]
        own = [[w for w in words[i] if w not in words[1 - i]] for i in (0, 1)]
        listed = [" ".join(texts) or "as it is" for texts in own]
    if listed[0] == listed[1]:
        raise ValueError(f"A and B are the same layout, {names[0]}: name another one in second=.")
    return f"{names[0]} {listed[0]}", f"{names[1]} {listed[1]}"


def without_step(one: Prediction, letter: str) -> str | None:
    """Return why a prediction has no step of a layout, or None if it has one."""
    name = one.about.get("layout")
    if name is None:
        return f"{letter} is no layout of a model but another program: {one.about.get('program')}."
    if one.status is not CompileStatus.ok:
        why = one.reason or "mode=compile says more"
        return f"{letter}, {name}, has no step: {one.status.value.replace('_', ' ')}: {why}"
    if one.step is None:
        return f"{letter}, {name}, has no predicted step: {NO_STEP}"
    return None


def _pairs(first: Mapping[str, float | int], second: Mapping[str, float | int], scale: float) -> list[Pair]:
    """Return the values of both by name, the largest difference first."""
    pairs = [Pair(name, float(first.get(name, 0)), scale * second.get(name, 0)) for name in {**first, **second}]
    return sorted(pairs, key=lambda pair: -abs(pair.more))


def _part_pairs(first: _Side, second: _Side) -> list[PartPair]:
    """Return the parts of both steps, the largest difference first."""
    one, other = _labelled(first.prediction), _labelled(second.prediction)
    pairs = [
        PartPair(
            name,
            one[name].seconds if name in one else 0.0,
            second.scale * (other[name].seconds if name in other else 0.0),
            (one.get(name) or other[name]).kind,
        )
        for name in {**one, **other}
    ]
    return sorted(pairs, key=lambda pair: -abs(pair.more))


def _labelled(one: Prediction) -> dict[str, StepPart]:
    """Return the parts of a step by their names; communication is named by the mesh axes and their roles."""
    words = {PartKind.exposed: "waiting for communication", PartKind.collectives: "collectives"}
    return {
        f"{words[part.kind]} over {_axes(part.mesh_axes, one.about)}" if part.kind.by_axes else part.kind.value: part
        for part in one.parts
    }


def _over(one: Prediction) -> dict[str, float]:
    """Return the bytes that a device sends by the mesh axes and their roles."""
    sent = one.communication
    return {} if sent is None else {_axes(over.mesh_axes, one.about): over.bytes for over in sent.bytes_by_mesh_axes}


def _split(one: Prediction) -> dict[str, int]:
    return {} if one.memory is None else one.memory.split


def _axes(mesh_axes: tuple[str, ...], about: Mapping[str, Any]) -> str:
    """Return mesh axes with their roles: `y (MP2)`; the same axis may have another role in the other layout."""
    roles = recorded_roles(about)
    found = dict.fromkeys(roles[axis].kind.value for axis in mesh_axes if axis in roles)
    if not mesh_axes:
        return UNATTRIBUTED
    return ",".join(mesh_axes) + (f" ({', '.join(found)})" if found else "")


def _dearest(side: _Side) -> list[Waited]:
    """Return the collectives waited for longest; those of one product or parameter, forward and backward, are one."""
    merged: dict[tuple[str, str, str, str], tuple[float, float, float]] = {}
    sent = side.prediction.communication
    for use in () if sent is None else sent.collectives:
        over = _axes(use.mesh_axes, side.prediction.about)
        key = (use.kind, over, short_cause(use.cause), short_source(use.source))
        calls, size, waited = merged.get(key, (0.0, 0.0, 0.0))
        merged[key] = (calls + use.calls, size + side.scale * use.bytes, waited + side.scale * use.exposed_s)
    uses = [Waited(*key, *numbers) for key, numbers in merged.items()]
    return sorted(uses, key=lambda use: -use.waited_s)[:DEAREST]


def _headline(made: Difference, fast: int, slow: int, tokens: list[int]) -> str:
    times, (a, b) = (made.steps.first, made.steps.second), (made.labels[fast], made.labels[slow])
    text = f"{a} is {times[slow] / times[fast]:.2f} times as fast as {b}: {duration(times[fast])} a step"
    text += f", not {duration(times[slow])}."
    if tokens[0] != tokens[1]:
        one, other = made.labels
        text += f" Seconds and bytes of {other} are those for {tokens[0]:,} tokens, a step of {one}."
    return text


def _reasons(made: Difference, both: tuple[_Side, _Side], fast: int, slow: int) -> tuple[str, ...]:
    """Return why one of two layouts is faster, in sentences that follow from the numbers alone."""
    times = (made.steps.first, made.steps.second)
    apart, lines = times[slow] - times[fast], []
    shortest, longest = both[slow].step.interval, both[fast].step.interval
    if shortest and longest and shortest.low * times[slow] < longest.high * times[fast]:
        lines.append(
            "That is within what predictions have been off for published runs: the order may be the other way round."
        )
    if apart <= 0:
        return tuple(lines)
    on_two = [_on_communication(made, fast, slow, apart), _on_products(made, both, fast, slow, apart)]
    if made.parts and made.parts[0].kind in _PRODUCTS:  # the larger difference comes first
        on_two.reverse()
    lines += [line for sentences in on_two for line in sentences]
    lines += _on_other_parts(made, fast, slow, apart)
    return (*lines, *_on_memory(made, both, fast, slow))


def _of(pair: Pair, which: int) -> float:
    return pair.second if which else pair.first


def _on_communication(made: Difference, fast: int, slow: int, apart: float) -> list[str]:
    """Return sentences on communication: its seconds, the bytes sent, and the collective waited for longest.

    If no step has known parts, the bytes alone.
    """
    a, b = made.labels[fast], made.labels[slow]
    bytes_ = [sent(sum(_of(pair, which) for pair in made.sent)) for which in (fast, slow)]
    if not made.parts:
        return [f"A device sends {bytes_[0]} under {a} and {bytes_[1]} under {b}."] if made.sent else []
    for kind, (what, verb) in _COMMUNICATION.items():
        seconds = [sum(_of(p, which) for p in made.parts if p.kind is kind) for which in (fast, slow)]
        if abs(seconds[1] - seconds[0]) < WORTH_SAYING * apart:
            continue
        share = (seconds[1] - seconds[0]) / apart
        much = "More than the whole difference" if share > 1 else f"{percent(share)} of the difference"
        text = f"{much if share > 0 else 'Against it'} is {what}: {b} {verb} {duration(seconds[1])} of a step, "
        text += f"{a} {duration(seconds[0])}; a device sends {bytes_[1]} and {bytes_[0]}."
        longer = slow if share > 0 else fast
        if uses := made.dearest[longer]:
            use = uses[0]
            text += f" {made.labels[longer]} waits longest, {duration(use.waited_s)} in {use.calls:,.0f} calls, for "
            text += f"the {use.kind} over {use.over} of {use.cause} ({use.source})."
        return [text]
    return []


def _on_products(made: Difference, both: tuple[_Side, _Side], fast: int, slow: int, apart: float) -> list[str]:
    """Return sentences on products: their seconds and rate, the FLOPs executed, and what is computed again."""
    steps = [both[which].step for which in (fast, slow)]
    seconds = [sum(_of(p, which) for p in made.parts if p.kind in _PRODUCTS) for which in (fast, slow)]
    times = [s.executed_flops / s.model_flops for s in steps if s.executed_flops is not None and s.model_flops]
    lines, (a, b) = [], (made.labels[fast], made.labels[slow])
    if abs(seconds[1] - seconds[0]) >= WORTH_SAYING * apart:
        text = f"Products and kernels take {duration(seconds[0])} under {a} and {duration(seconds[1])} under {b}"
        rates = [percent(step.product_rate) for step in steps if step.product_rate]
        lines.append(f"{text}, {rates[0]} and {rates[1]} of peak." if len(rates) == 2 else f"{text}.")
    if len(times) == 2 and abs(times[1] / times[0] - 1) >= MORE_FLOPS:
        lines.append(
            f"Each device executes {times[0]:.2f} times the FLOPs of the model under {a} and {times[1]:.2f} under {b}: "
            "the rest is computed again for the backward pass, or the same on several devices."
        )
    remats = [both[which].prediction.remat for which in (fast, slow)]
    again = [{} if remat is None else {e.name: e.seconds for e in remat.again} for remat in remats]
    only = [name for name in again[1] if name not in again[0]]
    if only:
        listed = ", ".join(sorted(only, key=lambda name: -again[1][name])[:DEAREST])
        lines.append(f"For the backward pass {b} computes again what {a} keeps: {listed}.")
    return lines


def _on_other_parts(made: Difference, fast: int, slow: int, apart: float) -> list[str]:
    """Return sentences on the parts that are neither products nor communication."""
    lines, (a, b) = [], (made.labels[fast], made.labels[slow])
    for pair in made.parts:
        more = _of(pair, slow) - _of(pair, fast)
        if pair.kind in (*_PRODUCTS, *_COMMUNICATION) or abs(more) < WORTH_SAYING * apart:
            continue
        what = _SUBJECTS[pair.kind]
        although = "" if more > 0 else "Against it, "
        lines.append(
            f"{although}{what if more > 0 else what.lower()} take{'s' * (pair.kind is not PartKind.memory)} "
            f"{duration(_of(pair, fast))} under {a}, {duration(_of(pair, slow))} under {b}."
        )
    return lines


def _on_memory(made: Difference, both: tuple[_Side, _Side], fast: int, slow: int) -> list[str]:
    """Return a sentence on memory: both peaks, and the kind of memory that makes most of their difference."""
    memories = [both[which].prediction.memory for which in (fast, slow)]
    peaks = [of.peak for of in memories if of is not None and of.peak is not None]
    if len(peaks) < 2:
        return []
    text = f"Each device needs {memory(peaks[0])} at its peak under {made.labels[fast]} and {memory(peaks[1])} under "
    text += made.labels[slow]
    most, apart = next(iter(made.memory), Pair("", 0.0, 0.0)), peaks[1] - peaks[0]
    if apart and (_of(most, slow) - _of(most, fast)) / apart >= MOST:
        text += f"; most of that difference is {most.name}: {memory(int(_of(most, fast)))} and "
        text += memory(int(_of(most, slow)))
    return [f"{text}."]
