"""What makes one compiled layout faster than another: their steps part by part, what they send, redo and keep.

Made of two summaries, as `compile.json` holds them, and of nothing else: what is said was computed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from valkyrie.axes import UNATTRIBUTED
from valkyrie.parallel.partition import recorded_roles
from valkyrie.search.compile.summary import short_cause, short_source
from valkyrie.units import duration, memory, percent, sent

EXPOSED = "exposed "
"""What stands before the mesh axes in the name of a part of a step that waits for communication."""
WAITING = "waiting for communication"
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
class Difference:
    """Two layouts of one model side by side; seconds and bytes of the second are for as many tokens as the first's.

    `parts` sum up to the steps, the one that explains most first. `sent`: bytes by mesh axes. `memory`: bytes at the
    peak by kind, those of whole steps. `dearest`: collectives of each that are waited for longest.
    """

    names: tuple[str, str]
    steps: Pair
    parts: list[Pair]
    sent: list[Pair]
    memory: list[Pair]
    dearest: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    sentences: list[str]


def difference(first: Mapping[str, Any], second: Mapping[str, Any], asked: tuple[str, str] | None = None) -> Difference:
    """Return what two compiled layouts differ in; ValueError, with all reasons, where they cannot be compared.

    They must be of one model, be different programs, fit, and have predicted steps. `asked` is how each was asked for,
    which tells apart what has one name.
    """
    both = (first, second)
    problems = [text for one, letter in zip(both, LETTERS, strict=True) if (text := without_step(one, letter))]
    if problems or (problems := other_models(first, second)):
        raise ValueError("\n".join(problems))
    names = _names(first, second, asked)
    tokens = [one["about"]["batch"] * one["about"]["seq"] for one in both]
    scale = tokens[0] / tokens[1]
    steps = Pair("step", first["step"]["step_s"], scale * second["step"]["step_s"])
    parts = _pairs(_labelled(first), _labelled(second), scale)
    sending = _pairs(_over(first), _over(second), scale)
    memory = _pairs(first["memory"]["split"], second["memory"]["split"], 1.0)
    dearest = (_dearest(first, 1.0), _dearest(second, scale))
    made = Difference(names, steps, parts, sending, memory, dearest, [])
    made.sentences.extend(_sentences(made, first, second, tokens))
    return made


def sides(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `difference` sets side by side of one layout: `seconds`, `sent` and `memory`, and `tokens` a step."""
    about = one["about"]
    parts = {"seconds": _labelled(one), "sent": _over(one), "memory": dict(one["memory"]["split"])}
    return parts | {"tokens": about["batch"] * about["seq"]}


def as_json(made: Difference) -> dict[str, Any]:
    """Return a difference as plain values."""

    def rows(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
        return [{"name": p.name, "first": p.first, "second": p.second} for p in pairs]

    told: dict[str, Any] = {"names": list(made.names), "step_s": [made.steps.first, made.steps.second]}
    told |= {"seconds": rows(made.parts), "bytes_sent": rows(made.sent), "bytes_at_peak": rows(made.memory)}
    return told | {"collectives": list(made.dearest), "sentences": made.sentences}


def other_models(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return why two layouts are not of one model: another name, or other values of settings that both know of it."""
    models = [one["about"]["model"] for one in (first, second)]
    one, other = first.get("model", {}), second.get("model", {})
    changed = [key for key in one if key in other and one[key] != other[key]]
    if models[0] == models[1] and not changed:
        return []
    told = models
    if models[0] == models[1]:
        told = [" ".join([models[0], *(f"{key}={of[key]}" for key in changed[:DEAREST])]) for of in (one, other)]
    return [f"A is of {told[0]} and B of {told[1]}: only layouts of one model are compared."]


def _names(first: Mapping[str, Any], second: Mapping[str, Any], asked: tuple[str, str] | None) -> tuple[str, str]:
    """Return both layouts by what tells them apart: their own names, what else they were compiled with, or `asked`.

    ValueError where nothing does, and where both are one program that takes as long.
    """
    both = (first, second)
    names = [one["about"]["layout"] for one in both]
    programs = [(one.get("module_sha256"), one["step"]["step_s"]) for one in both]
    if None not in programs[0] and programs[0] == programs[1]:
        told = " and ".join(dict.fromkeys(names))
        raise ValueError(f"A and B are the same program, {told}: name another one in second=.")
    for key in ("target", "batch", "seq", "precision"):
        values = [one["about"][key] for one in both]
        if values[0] != values[1]:
            names = [f"{name} {key}={value}" for name, value in zip(names, values, strict=True)]
    if names[0] != names[1]:
        return names[0], names[1]
    options = [{o["name"]: o["value"] for o in one.get("options", [])} for one in both]
    changed = [name for name in {**options[0], **options[1]} if options[0].get(name) != options[1].get(name)]
    listed = [", ".join(f"{name}={own.get(name) or 'null'}" for name in changed) for own in options]
    if not changed and asked is not None:
        words = [shlex.split(text) for text in asked]
        own = [[w for w in words[i] if w not in words[1 - i]] for i in (0, 1)]
        listed = [" ".join(texts) or "as it is" for texts in own]
    if listed[0] == listed[1]:
        raise ValueError(f"A and B are the same layout, {names[0]}: name another one in second=.")
    return f"{names[0]} {listed[0]}", f"{names[1]} {listed[1]}"


def without_step(one: Mapping[str, Any], letter: str) -> str | None:
    """Return why a summary has no predicted step of a layout; None where it has."""
    name = one["about"].get("layout")
    if name is None:
        return f"{letter} is no layout of a model but another program: {one['about'].get('program')}."
    if one["status"] != "ok":
        why = one.get("reason") or "mode=compile says more"
        return f"{letter}, {name}, has no step: {one['status'].replace('_', ' ')}: {why}"
    if "step" not in one:
        return f"{letter}, {name}, has no predicted step: {NO_STEP}"
    return None


def _pairs(first: Mapping[str, float | int], second: Mapping[str, float | int], scale: float) -> list[Pair]:
    """Return the values of both by name, the largest difference first."""
    pairs = [Pair(name, float(first.get(name, 0)), scale * second.get(name, 0)) for name in {**first, **second}]
    return sorted(pairs, key=lambda pair: -abs(pair.more))


def _labelled(one: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds by what the parts of a step are called; waiting by the mesh axes and their roles."""
    return {
        f"{WAITING} over {_axes(name[len(EXPOSED) :], one['about'])}" if name.startswith(EXPOSED) else name: seconds
        for name, seconds in one["seconds"].items()
    }


def _over(one: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes that a device sends by the mesh axes and their roles."""
    return {_axes(axes, one["about"]): size for axes, size in one["communication"]["bytes_by_mesh_axes"].items()}


def _axes(axes: str, about: Mapping[str, Any]) -> str:
    """Return mesh axes with their roles: `y (MP2)`; the same axis may have another role in the other layout."""
    roles = recorded_roles(about)
    found = dict.fromkeys(roles[axis].kind.value for axis in axes.split(",") if axis in roles)
    if not axes:
        return UNATTRIBUTED
    return f"{axes} ({', '.join(found)})" if found else axes


def _dearest(one: Mapping[str, Any], scale: float) -> list[dict[str, Any]]:
    """Return the collectives waited for longest: kind, axes, what for, its line, calls, bytes and seconds waited.

    Those of one product or parameter, forward and backward, are one.
    """
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for use in one["communication"].get("causes", []):
        cause, source = short_cause(use["cause"]), short_source(use["source"])
        about = {"kind": use["kind"], "over": _axes(",".join(use["mesh_axes"]), one["about"])}
        about |= {"cause": cause, "source": source}
        entry = merged.setdefault(tuple(about.values()), {**about, "calls": 0.0, "bytes": 0.0, "waited_s": 0.0})
        entry["calls"] += use["calls"]
        entry["bytes"] += scale * use["bytes"]
        entry["waited_s"] += scale * use["exposed_s"]
    return sorted(merged.values(), key=lambda entry: -entry["waited_s"])[:DEAREST]


def _sentences(made: Difference, first: Mapping[str, Any], second: Mapping[str, Any], tokens: list[int]) -> list[str]:
    """Return why one of both is faster, in a few sentences made of the numbers alone."""
    fast, slow = (0, 1) if made.steps.more >= 0 else (1, 0)
    both, times = (first, second), (made.steps.first, made.steps.second)
    apart, (a, b) = times[slow] - times[fast], (LETTERS[fast], LETTERS[slow])
    text = f"{a} is {times[slow] / times[fast]:.2f} times as fast as {b}: {duration(times[fast])} a step"
    text += f", not {duration(times[slow])}."
    if tokens[0] != tokens[1]:
        text += f" Seconds and bytes of B are those for {tokens[0]:,} tokens, a step of A."
    lines = [text]
    spans = [one["step"].get("interval") for one in both]
    if all(spans) and spans[slow]["low"] * times[slow] < spans[fast]["high"] * times[fast]:
        lines.append(
            "That is within what predictions have been off for published runs: the order may be the other way round."
        )
    if apart <= 0:
        return lines
    lines += _on_waiting(made, both, fast, slow, apart)
    lines += _on_products(made, both, fast, slow, apart)
    lines += _on_other_parts(made, fast, slow, apart)
    return lines + _on_memory(made, both, fast, slow)


def _of(pair: Pair, which: int) -> float:
    return pair.second if which else pair.first


def _on_waiting(made: Difference, both: tuple[Mapping[str, Any], ...], fast: int, slow: int, apart: float) -> list[str]:
    """Return what is said of communication: seconds waited, bytes sent, and the collective waited for longest."""
    waited = [sum(_of(p, which) for p in made.parts if p.name.startswith(WAITING)) for which in (fast, slow)]
    if abs(waited[1] - waited[0]) < WORTH_SAYING * apart:
        return []
    bytes_ = [sum(_of(p, which) for p in made.sent) for which in (fast, slow)]
    share = (waited[1] - waited[0]) / apart
    what = "More than the whole difference" if share > 1 else f"{percent(share)} of the difference"
    text = f"{what if share > 0 else 'Against it'} is waiting for communication: {LETTERS[slow]} waits "
    text += f"{duration(waited[1])} of a step, {LETTERS[fast]} {duration(waited[0])}; a device sends {sent(bytes_[1])} "
    text += f"and {sent(bytes_[0])}."
    longer = slow if share > 0 else fast
    if found := made.dearest[longer][:1]:
        use = found[0]
        text += f" {LETTERS[longer]} waits longest, {duration(use['waited_s'])} in {use['calls']:,.0f} calls, for the "
        text += f"{use['kind']} over {use['over']} of {use['cause']} ({use['source']})."
    return [text]


def _on_products(
    made: Difference, both: tuple[Mapping[str, Any], ...], fast: int, slow: int, apart: float
) -> list[str]:
    """Return what is said of products: FLOPs executed beside the model's own, and the rate they reach."""
    steps = [both[which]["step"] for which in (fast, slow)]
    seconds = [sum(_of(p, which) for p in made.parts if p.name in ("matmul", "kernel")) for which in (fast, slow)]
    times = [step["executed_flops"] / step["model_flops"] for step in steps if step.get("model_flops")]
    lines, (a, b) = [], (LETTERS[fast], LETTERS[slow])
    if abs(seconds[1] - seconds[0]) >= WORTH_SAYING * apart:
        text = f"Products and kernels take {duration(seconds[0])} under {a} and {duration(seconds[1])} under {b}"
        rates = [step.get("product_rate") for step in steps]
        lines.append(f"{text}, {percent(rates[0])} and {percent(rates[1])} of peak." if all(rates) else f"{text}.")
    if len(times) == 2 and abs(times[1] / times[0] - 1) >= MORE_FLOPS:
        lines.append(
            f"Each device executes {times[0]:.2f} times the FLOPs of the model under {a} and {times[1]:.2f} under {b}: "
            "the rest is computed again for the backward pass, or the same on several devices."
        )
    again = [{e["name"]: e["seconds"] for e in both[which].get("remat", {}).get("again", [])} for which in (fast, slow)]
    only = [name for name in again[1] if name not in again[0]]
    if only:
        listed = ", ".join(sorted(only, key=lambda name: -again[1][name])[:DEAREST])
        lines.append(f"For the backward pass {b} computes again what {a} keeps: {listed}.")
    return lines


def _on_other_parts(made: Difference, fast: int, slow: int, apart: float) -> list[str]:
    """Return what is said of the parts that are neither products nor waiting."""
    lines = []
    for pair in made.parts:
        more = _of(pair, slow) - _of(pair, fast)
        if pair.name in ("matmul", "kernel") or pair.name.startswith(WAITING) or abs(more) < WORTH_SAYING * apart:
            continue
        what = {"memory": "Memory-bound operations", "compute": "Other arithmetic"}.get(
            pair.name, pair.name.capitalize()
        )
        although = "" if more > 0 else "Against it, "
        lines.append(
            f"{although}{what if more > 0 else what.lower()} take{'s' * (pair.name != 'memory')} "
            f"{duration(_of(pair, fast))} under {LETTERS[fast]}, {duration(_of(pair, slow))} under {LETTERS[slow]}."
        )
    return lines


def _on_memory(made: Difference, both: tuple[Mapping[str, Any], ...], fast: int, slow: int) -> list[str]:
    """Return what is said of memory: both peaks, and the kind that most of their difference is, where one is."""
    peaks = [both[which]["memory"]["peak"] for which in (fast, slow)]
    if not made.memory or None in peaks:
        return []
    text = f"Each device needs {memory(peaks[0])} at its peak under {LETTERS[fast]} and {memory(peaks[1])} under "
    text += LETTERS[slow]
    most, apart = made.memory[0], peaks[1] - peaks[0]
    share = (_of(most, slow) - _of(most, fast)) / apart if apart else 0.0
    if share >= MOST:
        text += f"; most of that difference is {most.name}: {memory(int(_of(most, fast)))} and "
        text += memory(int(_of(most, slow)))
    return [f"{text}."]
