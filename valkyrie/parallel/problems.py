"""Why a layout is refused: each problem, and the values that would remove it. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays, Tensor

if TYPE_CHECKING:
    from valkyrie.parallel.layout import Layout

Nearest = Callable[[str, "Problem"], list[int]]
"""Returns the values of a key of the configuration, next to its own, that remove a problem and make no other."""


@dataclass(frozen=True)
class Problem:
    """One problem of a layout: `statement` says what is wrong, the rest is what values are looked for by.

    `size` of `key` is not divisible by `parts`, those of `mesh_axes`; `noun` is what has this size where no key sets
    it. A problem without `parts` says itself what to do.
    """

    statement: str
    key: str | None = None
    size: int = 0
    parts: int = 0
    mesh_axes: tuple[str, ...] = ()
    noun: str = ""

    @property
    def identity(self) -> str:
        """The problem without its numbers: the same where another value does not remove it."""
        return re.sub("[0-9]+", "#", self.statement)

    def removed_by(self, value: int, arrays: Arrays) -> bool:
        """Return whether all sizes that its key sets are divisible, in a model's arrays under this value of the key."""
        tensors = [*arrays.parameters, *arrays.activations]
        sizes = [n for t in tensors for n, key in zip(t.shape, t.keys, strict=True) if key == self.key]
        return not any(n % self.parts for n in sizes or [value])

    def text(self, nearest: Nearest | None = None, sizes: Callable[[Problem], list[int]] | None = None) -> str:
        """Return the statement with what to change: `sizes` returns those of the one mesh axis that would do."""
        if not self.parts:
            return self.statement
        values = self._near() if nearest is None or self.key is None else nearest(self.key, self)
        if self.key in (BATCH, SEQ):
            return self.statement + (f" Use {_or(self.key, values)}." if values else "")
        advice = []
        if len(self.mesh_axes) == 1 and sizes is not None:
            legal = sizes(self)
            advice += [f"a mesh with {_or(self.mesh_axes[0], legal)}"] if legal else []
        else:
            divisors = [n for n in range(1, 65) if self.size % n == 0]
            advice.append(f"a mesh whose {'·'.join(self.mesh_axes)} divides it ({', '.join(map(str, divisors[:8]))})")
        if values:
            advice.append(_or(self.key, values) if self.key else f"{' or '.join(map(str, values))} for {self.noun}")
        return self.statement + (f" Use {', or '.join(advice)}." if advice else "")

    def _near(self) -> list[int]:
        lower = self.size // self.parts * self.parts
        return [lower, lower + self.parts] if lower else [self.parts]


def nearest_legal(value: int, parts: int, legal: Callable[[int], bool], least: int = 1) -> list[int]:
    """Return the nearest legal values below and above one, as far as there are any within some multiples of `parts`.

    A size may be half of its key, or rounded up to a multiple of 128, so that other values are tried too.
    """
    coarse = [unit * (value // unit + i) for unit in (parts, 64 * parts, 128 * parts) for i in range(-16, 18)]
    near = sorted({*coarse, *range(value - 32, value + 33)})
    below = (n for n in reversed(near) if least <= n < value and legal(n))
    above = (n for n in near if n > value and legal(n))
    return [n for n in (next(below, None), next(above, None)) if n is not None]


def _or(key: str, values: Sequence[int]) -> str:
    """Return `x=1, x=2 or x=4`."""
    texts = [f"{key}={value}" for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]


def layout_problems(layout: Layout, arrays: Arrays, batch: int, seq: int) -> list[Problem]:
    """Return every problem of a layout with a model's arrays, a global batch of sequences, and their length."""
    idle = [
        Problem(
            f"partition={layout.partition.name} leaves mesh axis {axis}={layout.mesh.axes[axis]} idle: its devices "
            f"would repeat each other's work. Use a mesh with {axis}=1, or a partition that uses {axis}."
        )
        for axis, role in layout.roles.items()
        if role == "idle"
    ]
    of_axes = _pipeline_problems(layout, arrays) or _spent_twice(layout, arrays)
    return [*of_axes, *_indivisible(layout, arrays), *_batch_problems(layout, batch, seq), *idle]


def _pipeline_problems(layout: Layout, arrays: Arrays) -> list[Problem]:
    """Return why the stages of a pipeline, and the schedule asked for, do not go with the model and the partition."""
    pipeline, partition = layout.pipeline, layout.partition
    name, schedule, rounds = f"partition={partition.name}", partition.schedule.value, partition.rounds
    if pipeline is None:
        return []
    problems = []
    if several := [axis for axis in layout.parameters[LAYERS] if layout.mesh.axes[axis] > 1][1:]:
        also = layout.sizes(several)
        problems.append(f"{name} puts layers on {pipeline.where} and on {also}: a pipeline lies on one axis. Use one.")
    for kind, rules, own in (("parameters", layout.parameters, LAYERS), ("activations", layout.activations, BATCH)):
        if others := [logical for logical, axes in rules.items() if pipeline.axis in axes and logical != own]:
            problems.append(
                f"{name} puts {kind}.{', '.join(others)} on {pipeline.where}, which holds the stages of a pipeline "
                f"(parameters.layers). Give {'them' if len(others) > 1 else 'it'} another axis."
            )
    if not arrays.stacked:
        problems.append(
            f"{name} puts layers on {pipeline.where}, and this model has no stack of equal layers to make stages of: "
            f"it passes its few layers again and again. Use a mesh with {pipeline.axis}=1, or another partition."
        )
    if rounds < 1 or (rounds == 1) == (schedule == "circular"):
        use = "partition.rounds=2" if schedule == "circular" else "partition.rounds=1, or partition.schedule=circular"
        holds = "a stage holds 2 or more stretches of layers" if schedule == "circular" else "a stage holds one stretch"
        problems.append(f"partition.rounds={rounds}: under schedule={schedule} {holds}. Use {use}.")
    elif schedule == "circular" and pipeline.microbatches < pipeline.stages:
        problems.append(
            f"microbatches={pipeline.microbatches}: under schedule=circular the first stage begins the next round "
            f"when the last one has ended, which takes {pipeline.stages} ({pipeline.where}). Use "
            f"microbatches={pipeline.stages}, or partition.schedule=gpipe."
        )
    if schedule == "1f1b" and len(arrays.stacked) > 1:
        problems.append(
            f"{name} with schedule=1f1b: this model has {len(arrays.stacked)} stacks of equal layers one after the "
            "other, and a microbatch comes back as soon as it has passed one. Use partition.schedule=gpipe."
        )
    if schedule == "1f1b" and (layout.remat.save or layout.remat.offload):
        problems.append(
            f"remat={layout.remat.label}: under schedule=1f1b layers are made again from their inputs: nothing else is "
            "kept. Use remat=full, or partition.schedule=gpipe."
        )
    parts = pipeline.stages * rounds
    of_layers = [
        Problem(
            f"{name} with schedule=circular makes {parts} stretches ({pipeline.where} times rounds={rounds}) of "
            f"layers ({repeats}): {repeats} is not divisible by {parts}.",
            "model.layers",
            repeats,
            parts,
            (pipeline.axis,),
        )
        for repeats in dict.fromkeys(arrays.stacked)
        if rounds > 1 and schedule == "circular" and repeats % pipeline.stages == 0 and repeats % parts
    ]
    return [Problem(text) for text in problems] + of_layers


def _split(layout: Layout, arrays: Arrays) -> Iterator[tuple[list[str], Tensor, tuple[tuple[str, ...], ...]]]:
    """Yield every different array: its names, itself, and the mesh axes of each of its dimensions."""
    for tensor, names in arrays.parameters.items():
        yield names, tensor, layout.stored(tensor.axes)
    for tensor, names in arrays.activations.items():
        yield names, tensor, layout.activation(tensor.axes)


def _spent_twice(layout: Layout, arrays: Arrays) -> list[Problem]:
    cases: dict[tuple[str, str, str], list[str]] = {}
    for names, tensor, split in _split(layout, arrays):
        seen: dict[str, str] = {}
        for logical, mesh_axes in zip(tensor.axes, split, strict=True):
            for mesh_axis in mesh_axes:
                if mesh_axis in seen:
                    cases.setdefault((mesh_axis, seen[mesh_axis], logical or ""), []).extend(names)
                seen[mesh_axis] = logical or ""
    return [
        Problem(
            f"partition={layout.partition.name} spends mesh axis {mesh_axis} twice on {_listed(names)}: on {first} and "
            f"on {second}. Give one of them another axis."
        )
        for (mesh_axis, first, second), names in cases.items()
    ]


def _indivisible(layout: Layout, arrays: Arrays) -> list[Problem]:
    cases: dict[tuple[str, int, str | None, tuple[str, ...]], list[str]] = {}
    for names, tensor, split in _split(layout, arrays):
        for logical, size, key, mesh_axes in zip(tensor.axes, tensor.shape, tensor.keys, split, strict=True):
            if logical is not None and size % layout.parts(mesh_axes):
                cases.setdefault((logical, size, key, mesh_axes), []).extend(names)
    problems = []
    for (logical, size, key, mesh_axes), names in cases.items():
        parts = layout.parts(mesh_axes)
        mesh_axes = tuple(axis for axis in mesh_axes if layout.mesh.axes[axis] > 1)
        statement = (
            f"partition={layout.partition.name} puts {logical} ({size}) of {_listed(names)} on "
            f"{layout.sizes(mesh_axes)}: {size} is not divisible by {parts}."
        )
        problems.append(Problem(statement, key, size, parts, mesh_axes, logical))
    return problems


def _batch_problems(layout: Layout, batch: int, seq: int) -> list[Problem]:
    problems, name = [], layout.partition.name
    pipeline = layout.pipeline
    own = layout.microbatches if pipeline is None else pipeline.rows // pipeline.stages
    rows = layout.shards(BATCH) * own
    if batch % rows:
        split = [axis for axis in layout.activations[BATCH] if layout.mesh.axes[axis] > 1]
        over = layout.sizes(split) or "one shard"
        also = f" times microbatches={layout.microbatches}" if layout.microbatches > 1 else ""
        if pipeline is not None:
            also = f", and each of microbatches={layout.microbatches} over all but {pipeline.axis}"
        statement = f"batch={batch} is not divisible by {rows}: partition={name} splits it over {over}{also}."
        problems.append(Problem(statement, BATCH, batch, rows))
    parts = layout.shards(SEQ)
    if seq % parts:
        over = layout.sizes(layout.activations[SEQ])
        statement = f"seq={seq} is not divisible by {parts}: partition={name} splits it over {over}."
        problems.append(Problem(statement, SEQ, seq, parts))
    return problems


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, parameters alone where there are any."""
    parameters = [name for name in dict.fromkeys(names) if not name.startswith("activation")] or list(names)
    more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    return ", ".join(parameters[:3]) + more
