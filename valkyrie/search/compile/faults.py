"""Finds faults in the sharding of a JAX program, by comparing the program before and after XLA partitions it.

Each fault has a remedy and, if known, its mesh axes, source line and cost. Faults that cost little are left out: see
`MIN_SHARE`, `MIN_STATE_SHARE` and `MIN_PADDING_SHARE`.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from valkyrie.axes import axes_text
from valkyrie.compiled.collectives import Collective, CollectiveReader, collective_kind, find_cause
from valkyrie.compiled.flops import MatrixProduct
from valkyrie.compiled.hbm import map_users
from valkyrie.compiled.hlo import Instruction, Shape
from valkyrie.compiled.shards import UnsplitDimensions, match_product, match_shard
from valkyrie.compiled.whole import BatchDimension
from valkyrie.parts import PartKind
from valkyrie.search.compile.fault import Fault, FaultCode
from valkyrie.search.compile.fault_texts import (
    batch_spec,
    constraint_remedy,
    describe_replication,
    format_axes,
    format_line,
    list_lines,
)
from valkyrie.search.compile.padding import LANES, find_padding
from valkyrie.search.compile.partitioned import Origin, PartitionedProgram, find_origin, make_origin
from valkyrie.search.compile.prediction import short_cause
from valkyrie.search.compile.repeated import find_repeated_compute, repeated_seconds
from valkyrie.units import decimal_bytes_text, duration_text, gib_text, percent_text

MIN_SHARE = 0.05
"""Faults that cost less than this share of the step time are not reported."""
MIN_STATE_SHARE = 0.15
"""Replicated state is reported if sharding it would save at least this share of the usable memory.

A high share, because plain data parallelism replicates all state.
"""
MIN_PADDING_SHARE = 0.2
"""Padding is reported if products spend at least this share of the step on it: half of the time of products
with one dimension of 64.

More than `MIN_SHARE`, because every model has a few narrow products.
"""
MIN_WHOLE_BATCH_SHARE = 0.25
"""A source line is reported if products of the whole batch have at least this share of the line's FLOPs.

The forward pass has 1/3 of them, so a line is also reported if only its forward pass computes the whole batch.
"""
_PASS_THROUGH = ("bitcast", "copy", "reshape")
"""Operations that forward an array."""
_FILLED = ("broadcast", "constant", "iota")
"""Operations that fill an array with constants, indices, or copies of a smaller array."""
_CONVERSION_FUSION = ("parameter", "convert", "convolution", "dot", "transpose", *_PASS_THROUGH)
"""Operations allowed in a fusion that converts an array and may use the result in a matrix product."""


def find_faults(program: PartitionedProgram) -> tuple[Fault, ...]:
    """Return the faults of a program's sharding, the most expensive first.

    Does not report repeated products if a mesh axis is unused, because the unused axis is their cause.
    """
    whole_batch_faults, lines = _find_whole_batches(program)
    faults = [
        *whole_batch_faults,
        *_find_unused_axes(program),
        *_find_replicated_state(program),
        *_find_collectives(program, lines),
        *_find_padding(program),
    ]
    if not any(fault.code is FaultCode.unused_axis for fault in faults):
        faults += find_repeated_compute(program, lines, MIN_SHARE)
    return tuple(sorted(faults, key=lambda fault: -(fault.seconds or 0.0)))


def _find_whole_batches(program: PartitionedProgram) -> tuple[list[Fault], set[str]]:
    """Find products for which each device computes the whole batch, although the batch argument is split.

    Returns the faults and the source lines of these products. A batch dimension has up to two faults: one for the lines
    where sharding constraints replicate it, and one for the others.
    """
    whole_flops: dict[BatchDimension, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    matched_products: dict[BatchDimension, set[Instruction]] = defaultdict(set)
    by_origin: dict[Origin, list[MatrixProduct]] = defaultdict(list)
    for product in program.unpartitioned_products:
        by_origin[find_origin(product.instruction)].append(product)
    total_flops: dict[str, float] = defaultdict(float)
    for product in program.local_products:
        origin = find_origin(product.instruction)
        total_flops[origin.source] += product.flops
        matches = [
            (candidate.instruction, unsplit)
            for candidate in by_origin.get(origin, ())
            if (unsplit := match_product(product.instruction, candidate.instruction)) is not None
        ]
        whole_dimensions = {_find_whole_dimension(program, instruction, unsplit) for instruction, unsplit in matches}
        # Several operations may share a line and name. If they disagree, the product is not reported.
        if len(whole_dimensions) == 1 and (dimension := whole_dimensions.pop()) is not None:
            whole_flops[dimension][origin.source] += product.flops
            matched_products[dimension] |= {instruction for instruction, _ in matches}
    faults, lines = [], set[str]()
    for dimension, flops in whole_flops.items():
        sources = {source for source, count in flops.items() if count >= MIN_WHOLE_BATCH_SHARE * total_flops[source]}
        replicated = {source for source in sources if program.unpartitioned.find_replications(dimension, [source])}
        for group in filter(None, (replicated, sources - replicated)):
            constraints = program.unpartitioned.find_replications(dimension, group)
            seconds = _whole_batch_seconds(program, dimension, group, constraints)
            if seconds >= MIN_SHARE * program.step_s:
                products = {p for p in matched_products[dimension] if find_origin(p).source in group}
                faults.append(_whole_batch_fault(program, dimension, group, products, constraints, seconds))
                lines |= group
    return faults, lines


def _find_whole_dimension(
    program: PartitionedProgram, product: Instruction, unsplit: Sequence[UnsplitDimensions]
) -> BatchDimension | None:
    """Return a batch dimension that each device computes completely in this product, or None if there is none.

    `unsplit` has the dimensions that are not split, for the result and each operand of the product.
    """
    whole_by_dimension: dict[BatchDimension, bool] = {}
    for array, dimensions in zip((product, *product.operands[:2]), unsplit, strict=True):
        for number, dimension in program.unpartitioned.batch_dimensions(array).items():
            if program.count_parts(dimension.mesh_axes) > 1:
                whole_by_dimension[dimension] = whole_by_dimension.get(dimension, True) and number in dimensions
    return next((dimension for dimension, whole in whole_by_dimension.items() if whole), None)


def _whole_batch_seconds(
    program: PartitionedProgram, dimension: BatchDimension, lines: set[str], constraints: Sequence[Instruction]
) -> float:
    """Estimate the seconds that splitting a batch at these source lines would save.

    No device would send anything over the batch's mesh axes for these lines, or for sharding constraints that replicate
    the batch. Over other axes, it would send only its part of the batch.
    """
    part = 1 / program.count_parts(dimension.mesh_axes)
    gather_lines = {i.source for constraint in constraints for i in (constraint, constraint.operands[0])}
    gather_lines -= {""}  # program arguments have no line

    def share(collective: Collective) -> float:
        if collective.kind == "all-gather" and collective.source in gather_lines:
            return 0.0
        if collective.source not in lines:
            return 1.0
        if set(collective.mesh_axes) & set(dimension.mesh_axes):
            return 0.0
        return part if _has_whole_batch(program, dimension, collective) else 1.0

    smaller_s = program.sum_seconds(lines, PartKind.memory, PartKind.compute) * (1 - part)
    return program.saved_seconds(share) + smaller_s + repeated_seconds(program, lines)


def _has_whole_batch(program: PartitionedProgram, dimension: BatchDimension, collective: Collective) -> bool:
    """Return whether each device sends or receives an array with the whole batch in a collective."""
    for instruction in program.unpartitioned_by_origin.get(make_origin(collective.op_name, collective.source), ()):
        for array in (instruction, *instruction.operands):
            positions = program.unpartitioned.find_positions(array, dimension)
            if positions and {*positions} <= (match_shard(collective.dims, array.shape.dims) or set()):
                return True
    return False


def _whole_batch_fault(
    program: PartitionedProgram,
    dimension: BatchDimension,
    lines: set[str],
    matched_products: set[Instruction],
    constraints: Sequence[Instruction],
    seconds: float,
) -> Fault:
    first = next(p.instruction for p in program.unpartitioned_products if p.instruction in matched_products)
    consequence = (
        f"each device computes the whole batch of {dimension.size:,}{_describe_ratio(program, dimension, lines)} "
        f"This costs about {duration_text(seconds)} of the {duration_text(program.step_s)} step."
    )
    split = f"The batch is split over {format_axes(program, dimension.mesh_axes)} in {dimension.argument}"
    if constraints:
        text = f"{split}, but {describe_replication(constraints)}. In {list_lines(program, lines)}, {consequence}"
        remedy = constraint_remedy(program, dimension, constraints)
        return Fault(FaultCode.whole_batch, text, remedy, constraints[0].source, dimension.mesh_axes, seconds)
    text = f"{split} but not in {list_lines(program, lines)}, where {consequence}"
    operand = next(
        (a for a in (*first.operands[:2], first) if dimension in program.unpartitioned.batch_dimensions(a).values()),
        first,
    )
    remedy = (
        f"Constrain the activations before {format_line(find_origin(first).source)} ({short_cause(first.op_name)}): "
        f"x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, {batch_spec(program, dimension, operand)}))."
    )
    if not any(
        i.custom_call_target == "Sharding" for c in program.unpartitioned.module.computations for i in c.instructions
    ):
        remedy += (
            " The lowered program has no sharding constraint. If your code has some, they were dropped: those of Flax "
            "are only applied under jax.set_mesh(mesh)."
        )
    return Fault(FaultCode.whole_batch, text, remedy, find_origin(first).source, dimension.mesh_axes, seconds)


def _describe_ratio(program: PartitionedProgram, dimension: BatchDimension, lines: set[str]) -> str:
    """Return the end of a sentence about products of a whole batch: how often they repeat FLOPs."""
    whole_flops = sum(product.flops for product in program.unpartitioned_products)
    local_flops = sum(product.flops for product in program.local_products)
    ratio = program.device_count * local_flops / whole_flops if whole_flops else 1.0
    if ratio < 1.05:
        return " with its part of the weights. No product is computed twice, but the devices exchange activations."
    compute = f"compute {ratio:.1f} times the FLOPs of one copy of the program"
    repeats = statistics.fmean(program.flops_ratios.get(line, 1.0) for line in lines)
    if repeats < (1 + program.count_parts(dimension.mesh_axes)) / 2:
        return (
            " with a part of the weights. XLA splits most of these products over another dimension: the devices "
            f"together {compute}, and exchange activations."
        )
    return f". The devices together {compute}."


def _find_unused_axes(program: PartitionedProgram) -> Iterator[Fault]:
    module = program.module
    if module is None:
        return
    used = {axis for argument in program.unpartitioned.arguments for axes in argument.mesh_axes for axis in axes}
    attributes = [
        value
        for c in program.unpartitioned.module.computations
        for i in c.instructions
        for value in i.attributes.values()
    ]
    used |= {axis for use in (program.replay.collectives if program.replay else ()) for axis in use.mesh_axes}
    for axis, size in program.mesh_axes.items():
        if size > 1 and axis not in used and not any(f'"{axis}"' in value for value in attributes):
            text = (
                f"Nothing is sharded over {axis}={size}: every device along this axis does the same work, so "
                f"{program.device_count // size} of the {program.device_count} devices would be as fast."
            )
            remedy = f"Shard the batch or the weights over {axis}, or leave it out of the mesh."
            yield Fault(FaultCode.unused_axis, text, remedy, "", (axis,), program.step_s * (1 - 1 / size))


def _find_replicated_state(program: PartitionedProgram) -> Iterator[Fault]:
    replicated = [
        a for a in program.unpartitioned.arguments if a.is_state and program.count_parts(sum(a.mesh_axes, ())) == 1
    ]
    size, usable = sum(a.shape.bytes for a in replicated), program.memory.usable
    saved = size * (1 - 1 / program.device_count)
    if usable is None or saved < MIN_STATE_SHARE * usable:
        return
    largest = max(replicated, key=lambda argument: argument.shape.bytes)
    axes = [axis for axis, count in program.mesh_axes.items() if count > 1]
    needed = program.memory.required
    text = (
        f"{gib_text(size)} of state is replicated on all {program.device_count} devices, {percent_text(size / usable)} "
        f"of the usable memory; the largest array is {largest.name} ({gib_text(largest.shape.bytes)})."
    )
    if needed is not None and needed > usable:
        text += f" The step needs {gib_text(needed)} of {gib_text(usable)} usable."
    remedy = (
        f"Shard parameters and optimizer state over {axes_text(axes)}, which saves up to {gib_text(saved)} per device."
    )
    yield Fault(FaultCode.replicated_state, text, remedy, "", tuple(axes), None, saved)


class _CollectiveCost(NamedTuple):
    """Bytes that a device sends in a group of collectives per step.

    `superfluous_bytes` are the part that it need not send, and `saved_s` the seconds that this would save. `source` is
    the source line with the longest wait, or empty if the group is empty.
    """

    bytes: float
    superfluous_bytes: float
    saved_s: float
    source: str


def _sum_collectives(
    program: PartitionedProgram, kind: str, lines: set[str], necessary_share: float = 0.0
) -> _CollectiveCost:
    """Sum the collectives of a kind from these source lines, of which a share of the bytes is necessary."""
    uses = [use for use in (program.replay.collectives if program.replay else ()) if use.kind == kind]
    uses = [use for use in uses if use.source in lines]
    if not uses:
        return _CollectiveCost(0.0, 0.0, 0.0, "")
    waits: Counter[str] = Counter()
    for use in uses:
        waits[use.source] += use.exposed_s  # pyright: ignore[reportArgumentType]  # a counter of seconds
    sent = sum(use.bytes_sent for use in uses)
    saved_s = program.saved_seconds(lambda c: necessary_share if c.kind == kind and c.source in lines else 1.0)
    return _CollectiveCost(sent, (1 - necessary_share) * sent, saved_s, waits.most_common(1)[0][0])


def _find_collectives(program: PartitionedProgram, whole_lines: set[str]) -> Iterator[Fault]:
    """Find collectives that send more than necessary.

    These are all-gathers of a batch, all-gathers of float32 arrays that are then converted to bfloat16, and all-reduces
    of which each device uses only a part. `whole_lines` are the lines that compute a whole batch, which explains their
    all-reduces and all all-gathers of a batch.
    """
    if program.module is None:
        return
    reader = CollectiveReader(program.module, dict(program.mesh_axes))
    batch_dims_by_line, other_dims_by_line = _dims_by_line(program)
    gather_lines: dict[BatchDimension, set[str]] = defaultdict(set)
    gather_readers: dict[BatchDimension, set[tuple[str, str]]] = defaultdict(set)
    float32_gathers, partly_used_all_reduces = set[str](), set[str]()
    for computation in program.module.computations:
        users = map_users(computation)
        for instruction in computation.instructions:
            kind, source = collective_kind(instruction.opcode), find_cause(instruction)[1]
            if kind == "all-gather":
                result = instruction.shape.leaves[-1]
                dims = _sorted_dims(result)
                dimension = batch_dims_by_line[source].get(dims)
                if source and dimension is not None and dims not in other_dims_by_line[source]:
                    gather_lines[dimension].add(source)
                    # Token ids are gathered to look them up in a table split over features, which repeats no work.
                    if result.dtype not in ("s32", "u32", "s64", "u64"):
                        gather_readers[dimension] |= {
                            find_cause(user)
                            for user, share in _list_readers(instruction, users)
                            if share == 1 and user.opcode != "tuple"
                        }
                if result.dtype == "f32" and _is_only_converted(instruction, users):
                    float32_gathers.add(source)
            elif instruction.opcode == "all-reduce" and not instruction.shape.tuple_shapes:
                groups = reader.read(instruction).groups
                members = 1 if groups is None else groups.shape[1]
                used_share = max((share for _, share in _list_readers(instruction, users)), default=1.0)
                if members > 1 and used_share * members <= 1.01:
                    partly_used_all_reduces.add(source)
    for dimension, lines in gather_lines.items() if not whole_lines else ():
        cost = _sum_collectives(program, "all-gather", lines)
        cost = cost._replace(saved_s=cost.saved_s + _reading_seconds(program, dimension, gather_readers[dimension]))
        text = f"The batch is split over {format_axes(program, dimension.mesh_axes)} in {dimension.argument}, but "
        remedy = "Constrain the gathered array to the sharding of the batch: jax.lax.with_sharding_constraint(...)."
        if constraints := program.unpartitioned.find_replications(dimension, lines):
            text += f"{describe_replication(constraints)}: "
            remedy = constraint_remedy(program, dimension, constraints)
            cost = cost._replace(source=constraints[0].source)
        text += f"every device gathers it in {list_lines(program, lines)}. {decimal_bytes_text(cost.bytes)} are sent"
        yield from _collective_fault(program, FaultCode.gathered_batch, cost, text, remedy, dimension.mesh_axes)
    cost = _sum_collectives(program, "all-gather", float32_gathers, 0.5)
    text = (
        f"Arrays are gathered in float32 and then converted to bfloat16 in {list_lines(program, float32_gathers)}. "
        f"{decimal_bytes_text(cost.bytes)} are sent, and half would do"
    )
    remedy = (
        "Convert the weights to bfloat16 before their use, and constrain the result to the sharding of the weights."
    )
    yield from _collective_fault(program, FaultCode.float32_gather, cost, text, remedy)
    partly_used_all_reduces -= whole_lines
    cost = _sum_collectives(program, "all-reduce", partly_used_all_reduces, 0.5)
    text = (
        f"All-reduces in {list_lines(program, partly_used_all_reduces)} send {decimal_bytes_text(cost.bytes)}, but "
        "each device uses only its part of the sum. Reduce-scatters would send half"
    )
    remedy = "Constrain the sum to the sharding that the next operation needs: jax.lax.with_sharding_constraint(...)."
    yield from _collective_fault(program, FaultCode.all_reduce, cost, text, remedy)


def _collective_fault(
    program: PartitionedProgram,
    code: FaultCode,
    cost: _CollectiveCost,
    text: str,
    remedy: str,
    mesh_axes: tuple[str, ...] = (),
) -> Iterator[Fault]:
    """Yield a fault about collectives if it costs enough."""
    if program.step_s and cost.saved_s >= MIN_SHARE * program.step_s:
        text += f". This costs about {duration_text(cost.saved_s)} of the {duration_text(program.step_s)} step."
        yield Fault(code, text, remedy, cost.source, mesh_axes, cost.saved_s, cost.superfluous_bytes)


def _reading_seconds(program: PartitionedProgram, dimension: BatchDimension, causes: set[tuple[str, str]]) -> float:
    """Estimate the seconds that operations with these causes would save if they read a part of a batch, not all of it.

    A cause is an `op_name` and a source line.
    """
    seconds = sum(
        cost.seconds
        for cost in (program.replay.costs if program.replay else ())
        if cost.kind in (PartKind.memory, PartKind.compute) and (cost.op_name, cost.source) in causes
    )
    return seconds * (1 - 1 / program.count_parts(dimension.mesh_axes))


def _sorted_dims(array: Shape) -> tuple[int, ...]:
    return tuple(sorted(size for size in array.dims if size > 1))


def _dims_by_line(
    program: PartitionedProgram,
) -> tuple[dict[str, dict[tuple[int, ...], BatchDimension]], dict[str, set[tuple[int, ...]]]]:
    """Return the shapes of arrays with and without a batch dimension, as two dicts with source lines as keys.

    The arrays are the operands and results of the operations before partitioning. Those of `_FILLED` operations are
    left out unless they have a batch dimension. The first dict has, for each line, a dict from shapes to batch
    dimensions. A shape is the sorted tuple of the sizes above 1.
    """
    batch_dims_by_line: dict[str, dict[tuple[int, ...], BatchDimension]] = defaultdict(dict)
    other_dims_by_line: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for computation in program.unpartitioned.module.computations:
        for instruction in computation.instructions:
            for array in (instruction, *instruction.operands):
                if dimensions := program.unpartitioned.batch_dimensions(array):
                    batch_dims_by_line[instruction.source][_sorted_dims(array.shape)] = next(iter(dimensions.values()))
                elif array.opcode not in _FILLED:  # such as the 2 in `x * 2`, as an array of the shape of x
                    other_dims_by_line[instruction.source].add(_sorted_dims(array.shape))
    return batch_dims_by_line, other_dims_by_line


def _is_only_converted(gather: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> bool:
    """Return whether every use of a gathered array converts it to bfloat16. False if it has no use."""
    are_conversions, queue = [], list(users.get(gather, ()))
    while queue:
        user = queue.pop()
        if user.opcode in (*_PASS_THROUGH, "all-gather-done", "transpose", "get-tuple-element"):
            queue += users.get(user, ())
        elif user.opcode == "fusion":
            fused = user.called_computations[0].instructions
            converts = any(
                i.opcode == "convert" and i.shape.dtype == "bf16" and i.operands[0].opcode == "parameter" for i in fused
            )
            are_conversions.append(converts and all(i.opcode in _CONVERSION_FUSION for i in fused))
        else:
            are_conversions.append(user.opcode == "convert" and user.shape.dtype == "bf16")
    return bool(are_conversions) and all(are_conversions)


def _list_readers(
    array: Instruction, users: Mapping[Instruction, Sequence[Instruction]]
) -> list[tuple[Instruction, float]]:
    """Return the operations that read the result of a collective, and the share of it that each reads, 1 if unknown."""
    readers, queue, size = [], list(users.get(array, ())), array.shape.leaves[-1].element_count
    while queue:
        user = queue.pop()
        if user.opcode in (*_PASS_THROUGH, "all-gather-done"):
            queue += users.get(user, ())
            continue
        executed = user.called_computations[0].instructions if user.opcode == "fusion" else [user]
        is_slicing = any(i.opcode == "dynamic-slice" for i in executed) and not user.shape.tuple_shapes
        readers.append((user, user.shape.element_count / size if is_slicing else 1.0))
    return readers


def _find_padding(program: PartitionedProgram) -> Iterator[Fault]:
    padding = find_padding(program)
    if padding is None or padding.seconds < MIN_PADDING_SHARE * program.step_s:
        return
    text = (
        f"Products in {padding.lines} have dimensions of {padding.sizes}, which the {LANES} x {LANES} matrix unit pads "
        f"to {LANES}. Padding takes about {duration_text(padding.seconds)} of the {duration_text(program.step_s)} step."
    )
    remedy = f"Use dimensions that are multiples of {LANES}, such as heads of {LANES}, or shard another dimension."
    yield Fault(FaultCode.padding, text, remedy, padding.source, (), padding.seconds)
