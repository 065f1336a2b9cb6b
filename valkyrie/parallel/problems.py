"""Why a layout is refused, and the values that would remove each problem. Imports no JAX.

The formulas for sizes (`size_checks`) hold for one layout and for the search's arrays of layouts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays
from valkyrie.parallel.partition import PipelineSchedule, RoleKind
from valkyrie.problems import INDIVISIBLE, Problem, ProblemCode

if TYPE_CHECKING:
    from valkyrie.parallel.candidates import Candidates
    from valkyrie.parallel.layout import Layout

Nearest = Callable[[Problem], list[int]]
"""Returns the values of a problem's key, nearest to its own, that remove the problem and cause no other."""


def removes(problem: Problem, value: int, arrays: Arrays) -> bool:
    """Return whether all sizes set by the problem's key are divisible, given the arrays of a model with this value."""
    tensors = [*arrays.parameters, *arrays.activations]
    sizes = [n for t in tensors for n, key in zip(t.shape, t.keys, strict=True) if key == problem.key]
    return not any(n % problem.parts for n in sizes or [value])


def with_advice(problem: Problem, nearest: Nearest | None, sizes: Callable[[Problem], list[int]]) -> Problem:
    """Add the values that remove a problem.

    Args:
        problem: Any problem of a layout. Only problems of sizes get advice.
        nearest: Searches values of its key, or None to take the nearest multiples.
        sizes: Searches sizes of its only mesh axis.
    """
    if problem.code not in INDIVISIBLE:
        return problem
    if nearest is not None and problem.key is not None:
        values = nearest(problem)
    else:
        lower = problem.size // problem.parts * problem.parts
        values = [lower, lower + problem.parts] if lower else [problem.parts]
    if problem.key in (BATCH, SEQ) or len(problem.mesh_axes) != 1:
        return replace(problem, nearest=tuple(values))
    return replace(problem, nearest=tuple(values), legal_sizes=tuple(sizes(problem)))


def nearest_legal(value: int, parts: int, legal: Callable[[int], bool], least: int = 1) -> list[int]:
    """Return the nearest legal values below and above `value`, searched within some multiples of `parts`."""
    # Sizes may be half of their key, or rounded up to a multiple of 128, so multiples of `parts` alone miss some.
    coarse = [unit * (value // unit + i) for unit in (parts, 64 * parts, 128 * parts) for i in range(-16, 18)]
    near = sorted({*coarse, *range(value - 32, value + 33)})
    below = (n for n in reversed(near) if least <= n < value and legal(n))
    above = (n for n in near if n > value and legal(n))
    return [n for n in (next(below, None), next(above, None)) if n is not None]


Sizes = Any
"""An int of one layout, or an array with one entry per layout."""


@dataclass(frozen=True)
class SizeCheck:
    """A problem that depends on sizes of mesh axes (which it lacks), the layouts that have it, and their parts."""

    problem: Problem
    wrong: Sizes
    parts: Sizes


def size_checks(layouts: Layout | Candidates, arrays: Arrays, batch: int, seq: int) -> Iterator[SizeCheck]:
    """Yield all problems that layouts may have because of the sizes of their mesh axes."""
    partition, microbatches, rounds = layouts.partition, layouts.microbatches, layouts.partition.rounds
    of_batch, of_seq = layouts.activations[BATCH], layouts.activations[SEQ]
    of_layers = layouts.parameters.get(LAYERS, ())
    stages, in_sequence = layouts.parts(of_layers), layouts.parts(of_seq)
    shards = layouts.parts([axis for axis in of_batch if axis not in of_layers])

    def check(
        code: ProblemCode, key: str | None, rule: Sequence[str], wrong: Sizes, parts: Sizes = 0, **fields: Any
    ) -> SizeCheck:
        problem = Problem(code, key, partition=partition.name, mesh_axes=tuple(rule), **fields)
        return SizeCheck(problem, wrong, parts)

    # Stages and microbatches both split the rows of a device. Under 1f1b, stages share the losses of each microbatch,
    # otherwise those of the whole batch.
    alternates = partition.schedule is PipelineSchedule["1f1b"]
    rows = shards * (stages * microbatches if alternates else _least_common_multiple(stages, microbatches))
    details = {"microbatch_count": microbatches, "stage_axes": of_layers}
    code = ProblemCode.batch_not_divisible
    yield check(code, BATCH, of_batch, batch % rows != 0, rows, size=batch, details=details)
    circular = partition.schedule is PipelineSchedule.circular and rounds > 1
    if circular:
        code, key = ProblemCode.too_few_microbatches, "microbatches"
        yield check(code, key, of_layers, microbatches < stages, stages, value=microbatches)
    if not arrays.stacked:
        yield check(ProblemCode.no_stack, None, of_layers, stages > 1)
    yield check(ProblemCode.seq_not_divisible, SEQ, of_seq, seq % in_sequence != 0, in_sequence, size=seq)
    for repeats in dict.fromkeys(arrays.stacked) if circular else ():
        stretches = stages * rounds
        wrong = (repeats % stages == 0) & (repeats % stretches != 0) & (stages > 1)
        fields = {"axes": (LAYERS,), "size": repeats, "details": {"rounds": rounds}}
        yield check(ProblemCode.rounds_not_divisible, "model.layers", of_layers, wrong, stretches, **fields)
    for (logical, size, key, rule), (kinds, names) in _split_dimensions(layouts, arrays).items():
        each = [layouts.split(logical, kind, size) for kind in dict.fromkeys(kinds)]
        wrong = (size % each[0] != 0) | (size % each[-1] != 0)
        fields = {"axes": (logical,), "size": size, "names": tuple(names)}
        yield check(ProblemCode.not_divisible, key, rule, wrong, each[0], **fields)


def _split_dimensions(
    layouts: Layout | Candidates, arrays: Arrays
) -> dict[tuple[str, int, str | None, tuple[str, ...]], tuple[list[str], list[str]]]:
    """Return the kinds and names of the arrays with a split dimension: by logical axis, size, config key and rule."""
    dimensions: dict[tuple[str, int, str | None, tuple[str, ...]], tuple[list[str], list[str]]] = {}
    stored = ("stored", arrays.parameters, layouts.parameters)
    for kind, tensors, rules in (stored, ("active", arrays.activations, layouts.activations)):
        for tensor, names in tensors.items():
            for logical, size, key in zip(tensor.axes, tensor.shape, tensor.keys, strict=True):
                if logical is not None and rules[logical]:
                    kinds, several = dimensions.setdefault((logical, size, key, rules[logical]), ([], []))
                    kinds.append(kind)
                    several += names
    return dimensions


def _least_common_multiple(a: Sizes, b: Sizes) -> Sizes:
    if isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    import numpy as np

    return np.lcm(a, b)


def layout_problems(layout: Layout, arrays: Arrays, batch: int, seq: int) -> list[Problem]:
    """Return all problems of a layout with a model's arrays, a global batch of sequences, and their length."""
    of_sizes: dict[ProblemCode, list[Problem]] = defaultdict(list)
    for check in size_checks(layout, arrays, batch, seq):
        if check.wrong:
            several = [axis for axis in check.problem.mesh_axes if layout.mesh.axes[axis] > 1]
            of_sizes[check.problem.code].append(_on_axes(layout, check.problem, several, check.parts))
    idle = [axis for axis, role in layout.roles.items() if role.kind is RoleKind.idle]
    code = ProblemCode
    return [
        *(_pipeline_problems(layout, arrays, of_sizes) or _axes_used_twice(layout, arrays)),
        *of_sizes[code.not_divisible],
        *of_sizes[code.batch_not_divisible],
        *of_sizes[code.seq_not_divisible],
        *(_on_axes(layout, Problem(code.idle_mesh_axis, partition=layout.partition.name), [axis]) for axis in idle),
    ]


def _on_axes(layout: Layout, problem: Problem, mesh_axes: Sequence[str], parts: int = 0) -> Problem:
    """Set the mesh axes of a problem, with their sizes in the layout."""
    sizes = tuple(layout.mesh.axes[axis] for axis in mesh_axes)
    return replace(problem, mesh_axes=tuple(mesh_axes), mesh_sizes=sizes, parts=parts)


def _pipeline_problems(layout: Layout, arrays: Arrays, of_sizes: dict[ProblemCode, list[Problem]]) -> list[Problem]:
    """Return the problems of a pipeline's stages and schedule with the model and the partition."""
    pipeline, partition = layout.pipeline, layout.partition
    if pipeline is None:
        return []
    schedule, rounds, problems, code = partition.schedule.value, partition.rounds, [], ProblemCode

    def on_stages(code: ProblemCode, key: str, **fields: Any) -> Problem:
        return _on_axes(layout, Problem(code, key, partition=partition.name, **fields), [pipeline.axis])

    if several := [axis for axis in layout.parameters[LAYERS] if layout.mesh.axes[axis] > 1][1:]:
        also = {"also": layout.sizes(several)}
        problems.append(on_stages(code.several_stage_axes, "partition.parameters.layers", details=also))
    for kind, rules, own in (("parameters", layout.parameters, LAYERS), ("activations", layout.activations, BATCH)):
        if others := tuple(logical for logical, axes in rules.items() if pipeline.axis in axes and logical != own):
            details = {"kind": kind}
            problems.append(on_stages(code.stage_axis_shared, f"partition.{kind}", axes=others, details=details))
    problems += of_sizes[code.no_stack]
    if rounds < 1 or (rounds == 1) == (schedule == "circular"):
        problems.append(Problem(code.wrong_rounds, "partition.rounds", rounds, details={"schedule": schedule}))
    problems += of_sizes[code.too_few_microbatches]
    if pipeline.alternates and len(arrays.stacked) > 1:
        problems.append(on_stages(code.several_stacks, "partition.schedule", size=len(arrays.stacked)))
    if pipeline.alternates and (layout.remat.save or layout.remat.offload):
        problems.append(Problem(code.remat_with_1f1b, "remat", layout.remat.label))
    return problems + of_sizes[code.rounds_not_divisible]


def _axes_used_twice(layout: Layout, arrays: Arrays) -> list[Problem]:
    """Return the problem of each mesh axis that splits two dimensions of an array."""
    cases: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    tensors = [(tensor, layout.stored(tensor.axes), names) for tensor, names in arrays.parameters.items()]
    tensors += [(tensor, layout.activation(tensor.axes), names) for tensor, names in arrays.activations.items()]
    for tensor, split, names in tensors:
        seen: dict[str, str] = {}
        for logical, mesh_axes in zip(tensor.axes, split, strict=True):
            for mesh_axis in mesh_axes:
                if mesh_axis in seen:
                    cases[mesh_axis, seen[mesh_axis], logical or ""] += names
                seen[mesh_axis] = logical or ""
    code, name = ProblemCode.mesh_axis_used_twice, layout.partition.name
    return [
        _on_axes(layout, Problem(code, partition=name, axes=(first, second), names=tuple(names)), [mesh_axis])
        for (mesh_axis, first, second), names in cases.items()
    ]
