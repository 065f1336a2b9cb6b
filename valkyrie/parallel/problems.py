"""Finds problems of layouts, and values of settings that remove them. Does not import JAX.

`size_checks` works on one layout, or on all candidates of a search at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays
from valkyrie.parallel.partition import PipelineSchedule, RoleKind
from valkyrie.problems import DIVISIBILITY_CODES, Problem, ProblemCode

if TYPE_CHECKING:
    from valkyrie.parallel.candidates import Candidates
    from valkyrie.parallel.layout import Layout

FindNearest = Callable[[Problem], list[int]]
"""Returns values of a problem's config key, near the current one, that remove the problem and cause no other."""


def is_removed_by(problem: Problem, value: int, arrays: Arrays) -> bool:
    """Return whether a new value of a problem's config key makes the sizes that depend on it divisible.

    All these sizes must be divisible by `problem.parts`. If no size of an array depends on the key, the value itself
    must be.

    Args:
        problem: A divisibility problem.
        value: New value of the key.
        arrays: Arrays of the model with this value.
    """
    tensors = [*arrays.parameters, *arrays.activations]
    sizes = [n for t in tensors for n, key in zip(t.shape, t.config_keys, strict=True) if key == problem.key]
    return not any(n % problem.parts for n in sizes or [value])


def add_advice(
    problem: Problem, find_nearest: FindNearest | None, find_sizes: Callable[[Problem], list[int]]
) -> Problem:
    """Return a copy of a divisibility problem, with values of its config key and sizes of its mesh axis that remove it.

    Args:
        problem: Problem of a layout. Returned unchanged unless it is about divisibility.
        find_nearest: Searches values of the problem's key. If it is None or the problem has no key, the nearest
            multiples of `problem.parts` are suggested.
        find_sizes: Searches sizes of the problem's mesh axis. Used only if there is exactly one such axis, and the key
            is neither the batch nor the sequence length.
    """
    if problem.code not in DIVISIBILITY_CODES:
        return problem
    if find_nearest is not None and problem.key is not None:
        values = find_nearest(problem)
    else:
        lower = problem.size // problem.parts * problem.parts
        values = [lower, lower + problem.parts] if lower else [problem.parts]
    if problem.key in (BATCH, SEQ) or len(problem.mesh_axes) != 1:
        return replace(problem, nearest=tuple(values))
    return replace(problem, nearest=tuple(values), legal_sizes=tuple(find_sizes(problem)))


def nearest_legal(value: int, parts: int, is_legal: Callable[[int], bool], least: int = 1) -> list[int]:
    """Return the nearest legal value below `value` and the nearest one above it.

    Tries values within 32 of `value`, and 16 multiples of `parts`, `64 * parts` and `128 * parts` on each side. A side
    without a legal value among these is left out. Values below `least` are not tried.
    """
    # Sizes may be half of their key, or rounded up to a multiple of 128, so multiples of `parts` alone miss some.
    coarse = [unit * (value // unit + i) for unit in (parts, 64 * parts, 128 * parts) for i in range(-16, 18)]
    candidate_values = sorted({*coarse, *range(value - 32, value + 33)})
    below = (n for n in reversed(candidate_values) if least <= n < value and is_legal(n))
    above = (n for n in candidate_values if n > value and is_legal(n))
    return [n for n in (next(below, None), next(above, None)) if n is not None]


PerLayout = Any
"""An int or bool for one layout, or an array with one entry per layout."""


@dataclass(frozen=True)
class SizeCheck:
    """A check of layouts for one problem that the sizes of mesh axes can cause.

    Args:
        problem: The problem, without sizes of mesh axes.
        has_problem: Whether each layout has the problem.
        parts: For each layout, the required divisor of the size, or the minimum number of microbatches. 0 for problems
            without such a number.
    """

    problem: Problem
    has_problem: PerLayout
    parts: PerLayout


def size_checks(layouts: Layout | Candidates, arrays: Arrays, batch: int, seq: int) -> Iterator[SizeCheck]:
    """Yield a check for each problem that the sizes of mesh axes can cause, with the layouts that have the problem.

    Args:
        layouts: A single layout, or all candidates of a search.
        arrays: Arrays of the model.
        batch: Number of sequences in the global batch.
        seq: Number of tokens per sequence.
    """
    partition, microbatches, rounds = layouts.partition, layouts.microbatches, layouts.partition.rounds
    batch_axes, seq_axes = layouts.activations[BATCH], layouts.activations[SEQ]
    layer_axes = layouts.parameters.get(LAYERS, ())
    stages, seq_parts = layouts.axes_size(layer_axes), layouts.axes_size(seq_axes)
    row_axes = [axis for axis in batch_axes if axis not in layer_axes]
    shards = layouts.axes_size(row_axes)

    def check(
        code: ProblemCode,
        key: str | None,
        rule: Sequence[str],
        has_problem: PerLayout,
        parts: PerLayout = 0,
        **fields: Any,
    ) -> SizeCheck:
        problem = Problem(code, key, partition=partition.name, mesh_axes=tuple(rule), **fields)
        return SizeCheck(problem, has_problem, parts)

    # Stages and microbatches both split the rows of a device. Under 1f1b, stages share the losses of each microbatch,
    # otherwise those of the whole batch.
    is_1f1b = partition.schedule is PipelineSchedule["1f1b"]
    batch_parts = shards * (stages * microbatches if is_1f1b else _least_common_multiple(stages, microbatches))
    microbatch_axes = batch_axes if is_1f1b else row_axes
    details = {"microbatch_count": microbatches, "stage_axes": layer_axes, "microbatch_axes": microbatch_axes}
    code = ProblemCode.batch_not_divisible
    yield check(code, BATCH, batch_axes, batch % batch_parts != 0, batch_parts, size=batch, details=details)
    is_circular = partition.schedule is PipelineSchedule.circular and rounds > 1
    if is_circular:
        code, key = ProblemCode.too_few_microbatches, "microbatches"
        yield check(code, key, layer_axes, microbatches < stages, stages, value=microbatches)
    if not arrays.stack_lengths:
        yield check(ProblemCode.no_stack, None, layer_axes, stages > 1)
    yield check(ProblemCode.seq_not_divisible, SEQ, seq_axes, seq % seq_parts != 0, seq_parts, size=seq)
    for repeats in dict.fromkeys(arrays.stack_lengths) if is_circular else ():
        group_count = stages * rounds
        has_problem = (repeats % stages == 0) & (repeats % group_count != 0) & (stages > 1)
        fields = {"axes": (LAYERS,), "size": repeats, "details": {"rounds": rounds}}
        yield check(ProblemCode.rounds_not_divisible, "model.layers", layer_axes, has_problem, group_count, **fields)
    for (logical, size, key, rule), (kinds, names) in _split_dimensions(layouts, arrays).items():
        kind_parts = [layouts.count_parts(logical, kind, size) for kind in dict.fromkeys(kinds)]
        has_problem = (size % kind_parts[0] != 0) | (size % kind_parts[-1] != 0)
        fields = {"axes": (logical,), "size": size, "names": tuple(names)}
        yield check(ProblemCode.not_divisible, key, rule, has_problem, kind_parts[0], **fields)


def _split_dimensions(
    layouts: Layout | Candidates, arrays: Arrays
) -> dict[tuple[str, int, str | None, tuple[str, ...]], tuple[list[str], list[str]]]:
    """Group the array dimensions that mesh axes split.

    Returns a dict from (logical axis, size, config key, mesh axes) to two lists for the arrays with such a dimension:
    their kinds (`stored` for a parameter, `active` for an activation) and their names.
    """
    dimensions: dict[tuple[str, int, str | None, tuple[str, ...]], tuple[list[str], list[str]]] = {}
    stored = ("stored", arrays.parameters, layouts.parameters)
    for kind, tensors, rules in (stored, ("active", arrays.activations, layouts.activations)):
        for tensor, names in tensors.items():
            for logical, size, key in zip(tensor.axes, tensor.shape, tensor.config_keys, strict=True):
                if logical is not None and rules[logical]:
                    kinds, array_names = dimensions.setdefault((logical, size, key, rules[logical]), ([], []))
                    kinds.append(kind)
                    array_names += names
    return dimensions


def _least_common_multiple(a: PerLayout, b: PerLayout) -> PerLayout:
    if isinstance(a, int) and isinstance(b, int):
        return math.lcm(a, b)
    import numpy as np

    return np.lcm(a, b)


def layout_problems(layout: Layout, arrays: Arrays, batch: int, seq: int) -> list[Problem]:
    """Return all problems of a layout for a model's arrays and a global batch of `batch` sequences of `seq` tokens."""
    size_problems: dict[ProblemCode, list[Problem]] = defaultdict(list)
    for check in size_checks(layout, arrays, batch, seq):
        if check.has_problem:
            split_axes = [axis for axis in check.problem.mesh_axes if layout.mesh.axes[axis] > 1]
            size_problems[check.problem.code].append(_with_mesh_axes(layout, check.problem, split_axes, check.parts))
    idle = [axis for axis, role in layout.roles.items() if role.kind is RoleKind.idle]
    partition = layout.partition.name
    return [
        *(_pipeline_problems(layout, arrays, size_problems) or _axes_used_twice(layout, arrays)),
        *size_problems[ProblemCode.not_divisible],
        *size_problems[ProblemCode.batch_not_divisible],
        *size_problems[ProblemCode.seq_not_divisible],
        *(_with_mesh_axes(layout, Problem(ProblemCode.idle_mesh_axis, partition=partition), [axis]) for axis in idle),
    ]


def _with_mesh_axes(layout: Layout, problem: Problem, mesh_axes: Sequence[str], parts: int = 0) -> Problem:
    """Return a copy of a problem with these mesh axes, their sizes in the layout, and `parts`."""
    sizes = tuple(layout.mesh.axes[axis] for axis in mesh_axes)
    return replace(problem, mesh_axes=tuple(mesh_axes), mesh_sizes=sizes, parts=parts)


def _pipeline_problems(
    layout: Layout, arrays: Arrays, size_problems: dict[ProblemCode, list[Problem]]
) -> list[Problem]:
    """Return the problems of a pipeline: of its stages, its schedule, and a model or remat policy that it cannot run.

    Returns an empty list without a pipeline. `size_problems` are the layout's problems from `size_checks`, by code.
    """
    pipeline, partition = layout.pipeline, layout.partition
    if pipeline is None:
        return []
    schedule, rounds, problems = partition.schedule.value, partition.rounds, []

    def stage_problem(code: ProblemCode, key: str, **fields: Any) -> Problem:
        return _with_mesh_axes(layout, Problem(code, key, partition=partition.name, **fields), [pipeline.axis])

    if other_axes := [axis for axis in layout.parameters[LAYERS] if layout.mesh.axes[axis] > 1][1:]:
        details = {"also": layout.format_axes(other_axes)}
        problems.append(stage_problem(ProblemCode.several_stage_axes, "partition.parameters.layers", details=details))
    for kind, rules, expected_axis in (
        ("parameters", layout.parameters, LAYERS),
        ("activations", layout.activations, BATCH),
    ):
        if other_logical := tuple(
            logical for logical, axes in rules.items() if pipeline.axis in axes and logical != expected_axis
        ):
            details = {"kind": kind}
            problems.append(
                stage_problem(ProblemCode.stage_axis_shared, f"partition.{kind}", axes=other_logical, details=details)
            )
    problems += size_problems[ProblemCode.no_stack]
    if rounds < 1 or (rounds == 1) == (schedule == "circular"):
        problems.append(Problem(ProblemCode.wrong_rounds, "partition.rounds", rounds, details={"schedule": schedule}))
    problems += size_problems[ProblemCode.too_few_microbatches]
    if pipeline.is_1f1b and len(arrays.stack_lengths) > 1:
        problems.append(stage_problem(ProblemCode.several_stacks, "partition.schedule", size=len(arrays.stack_lengths)))
    if pipeline.is_1f1b and (layout.remat.save or layout.remat.offload):
        problems.append(Problem(ProblemCode.remat_with_1f1b, "remat", layout.remat.label))
    return problems + size_problems[ProblemCode.rounds_not_divisible]


def _axes_used_twice(layout: Layout, arrays: Arrays) -> list[Problem]:
    """Return a problem for each mesh axis that splits two dimensions of an array."""
    array_names: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    tensors = [(tensor, layout.stored_axes(tensor.axes), names) for tensor, names in arrays.parameters.items()]
    tensors += [(tensor, layout.activation_axes(tensor.axes), names) for tensor, names in arrays.activations.items()]
    for tensor, split, names in tensors:
        logical_by_mesh_axis: dict[str, str] = {}
        for logical, mesh_axes in zip(tensor.axes, split, strict=True):
            for mesh_axis in mesh_axes:
                if mesh_axis in logical_by_mesh_axis:
                    array_names[mesh_axis, logical_by_mesh_axis[mesh_axis], logical or ""] += names
                logical_by_mesh_axis[mesh_axis] = logical or ""
    code, name = ProblemCode.mesh_axis_used_twice, layout.partition.name
    return [
        _with_mesh_axes(layout, Problem(code, partition=name, axes=(first, second), names=tuple(names)), [mesh_axis])
        for (mesh_axis, first, second), names in array_names.items()
    ]
