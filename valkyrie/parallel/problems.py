"""Why a layout is refused, and the values that would remove each problem. Imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from valkyrie.axes import BATCH, LAYERS, SEQ, Arrays, Tensor
from valkyrie.parallel.partition import RoleKind
from valkyrie.problems import INDIVISIBLE, Problem, ProblemCode

if TYPE_CHECKING:
    from valkyrie.parallel.layout import Layout

Nearest = Callable[[Problem], list[int]]
"""Returns the values of a problem's key, nearest to its own, that remove the problem and make no other."""


def removes(problem: Problem, value: int, arrays: Arrays) -> bool:
    """Return whether all sizes that the problem's key sets are divisible, in the arrays of this value of the key."""
    tensors = [*arrays.parameters, *arrays.activations]
    sizes = [n for t in tensors for n, key in zip(t.shape, t.keys, strict=True) if key == problem.key]
    return not any(n % problem.parts for n in sizes or [value])


def with_advice(problem: Problem, nearest: Nearest | None, sizes: Callable[[Problem], list[int]]) -> Problem:
    """Return the problem with the values that remove it.

    Args:
        problem: Any problem of a layout; only those of sizes take advice.
        nearest: Searches values of its key, or None to take the nearest multiples.
        sizes: Searches sizes of its one mesh axis.
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
    """Return the nearest legal values below and above one, as far as there are any within some multiples of `parts`.

    A size may be half of its key, or rounded up to a multiple of 128, so that other values are tried too.
    """
    coarse = [unit * (value // unit + i) for unit in (parts, 64 * parts, 128 * parts) for i in range(-16, 18)]
    near = sorted({*coarse, *range(value - 32, value + 33)})
    below = (n for n in reversed(near) if least <= n < value and legal(n))
    above = (n for n in near if n > value and legal(n))
    return [n for n in (next(below, None), next(above, None)) if n is not None]


def layout_problems(layout: Layout, arrays: Arrays, batch: int, seq: int) -> list[Problem]:
    """Return every problem of a layout with a model's arrays, a global batch of sequences, and their length."""
    idle = [
        _at(layout, ProblemCode.idle_mesh_axis, [axis])
        for axis, role in layout.roles.items()
        if role.kind is RoleKind.idle
    ]
    of_axes = _pipeline_problems(layout, arrays) or _spent_twice(layout, arrays)
    return [*of_axes, *_indivisible(layout, arrays), *_batch_problems(layout, batch, seq), *idle]


def _at(layout: Layout, code: ProblemCode, mesh_axes: Sequence[str], key: str | None = None, **fields: Any) -> Problem:
    """Return a problem of the layout's partition on these mesh axes."""
    sizes = tuple(layout.mesh.axes[axis] for axis in mesh_axes)
    return Problem(code, key, partition=layout.partition.name, mesh_axes=tuple(mesh_axes), mesh_sizes=sizes, **fields)


def _pipeline_problems(layout: Layout, arrays: Arrays) -> list[Problem]:
    """Return why the stages of a pipeline and its schedule do not go with the model and the partition."""
    pipeline, partition = layout.pipeline, layout.partition
    if pipeline is None:
        return []
    schedule, rounds, problems = partition.schedule.value, partition.rounds, []
    on_stages = partial(_at, layout, mesh_axes=[pipeline.axis])
    if several := [axis for axis in layout.parameters[LAYERS] if layout.mesh.axes[axis] > 1][1:]:
        also = {"also": layout.sizes(several)}
        problems.append(on_stages(ProblemCode.several_stage_axes, key="partition.parameters.layers", details=also))
    for kind, rules, own in (("parameters", layout.parameters, LAYERS), ("activations", layout.activations, BATCH)):
        if others := tuple(logical for logical, axes in rules.items() if pipeline.axis in axes and logical != own):
            details = {"kind": kind}
            problems.append(
                on_stages(ProblemCode.stage_axis_shared, key=f"partition.{kind}", axes=others, details=details)
            )
    if not arrays.stacked:
        problems.append(on_stages(ProblemCode.no_stack))
    if rounds < 1 or (rounds == 1) == (schedule == "circular"):
        details = {"schedule": schedule}
        problems.append(Problem(ProblemCode.wrong_rounds, "partition.rounds", rounds, details=details))
    elif schedule == "circular" and pipeline.microbatches < pipeline.stages:
        problems.append(
            on_stages(
                ProblemCode.too_few_microbatches,
                key="microbatches",
                value=pipeline.microbatches,
                parts=pipeline.stages,
            )
        )
    if schedule == "1f1b" and len(arrays.stacked) > 1:
        problems.append(on_stages(ProblemCode.several_stacks, key="partition.schedule", size=len(arrays.stacked)))
    if schedule == "1f1b" and (layout.remat.save or layout.remat.offload):
        problems.append(Problem(ProblemCode.remat_with_1f1b, "remat", layout.remat.label))
    parts = pipeline.stages * rounds
    return problems + [
        on_stages(
            ProblemCode.rounds_not_divisible,
            key="model.layers",
            axes=(LAYERS,),
            size=repeats,
            parts=parts,
            details={"rounds": rounds},
        )
        for repeats in dict.fromkeys(arrays.stacked)
        if rounds > 1 and schedule == "circular" and repeats % pipeline.stages == 0 and repeats % parts
    ]


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
        _at(layout, ProblemCode.mesh_axis_used_twice, [mesh_axis], axes=(first, second), names=tuple(names))
        for (mesh_axis, first, second), names in cases.items()
    ]


def _indivisible(layout: Layout, arrays: Arrays) -> list[Problem]:
    cases: dict[tuple[str, int, str | None, tuple[str, ...]], list[str]] = {}
    for names, tensor, split in _split(layout, arrays):
        for logical, size, key, mesh_axes in zip(tensor.axes, tensor.shape, tensor.keys, split, strict=True):
            if logical is not None and size % layout.parts(mesh_axes):
                cases.setdefault((logical, size, key, mesh_axes), []).extend(names)
    code = ProblemCode.not_divisible
    return [
        _at(
            layout,
            code,
            [axis for axis in mesh_axes if layout.mesh.axes[axis] > 1],
            key,
            axes=(logical,),
            size=size,
            parts=layout.parts(mesh_axes),
            names=tuple(names),
        )
        for (logical, size, key, mesh_axes), names in cases.items()
    ]


def _batch_problems(layout: Layout, batch: int, seq: int) -> list[Problem]:
    problems, pipeline = [], layout.pipeline
    own = layout.microbatches if pipeline is None else pipeline.rows // pipeline.stages
    rows = layout.shards(BATCH) * own
    if batch % rows:
        split = [axis for axis in layout.activations[BATCH] if layout.mesh.axes[axis] > 1]
        details = {
            "microbatch_count": layout.microbatches,
            "stage_axis": None if pipeline is None else pipeline.axis,
        }
        code = ProblemCode.batch_not_divisible
        problems.append(_at(layout, code, split, BATCH, size=batch, parts=rows, details=details))
    parts = layout.shards(SEQ)
    if seq % parts:
        code = ProblemCode.seq_not_divisible
        problems.append(_at(layout, code, layout.activations[SEQ], SEQ, size=seq, parts=parts))
    return problems
