"""Finds faults in the sharding of a JAX program, by comparing it before and after XLA partitions it.

Each finding names the mesh axes, the source line, its cost, and a remedy. A finding that costs less than `MIN_SHARE` of
the step, or of the usable memory, is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from valkyrie.axes import axes_text
from valkyrie.compiled.collectives import CollectiveReader, cause, collective_kind
from valkyrie.compiled.flops import Product, product_flops, products
from valkyrie.compiled.hlo import HBM, Instruction, Module
from valkyrie.compiled.lowered import Argument, BatchDimension, LoweredProgram
from valkyrie.machine.replay import Replay
from valkyrie.parts import PartKind
from valkyrie.search.compile.prediction import Finding, FindingCode, MemoryReport, short_cause, short_source
from valkyrie.units import count_text, decimal_bytes_text, duration, gib, percent

MIN_SHARE = 0.05
"""Smallest share of the step time that a finding costs."""
MIN_STATE_SHARE = 0.15
"""Smallest share of usable memory that replicated state must save to be a finding. Data parallelism replicates it."""
MIN_PADDING_SHARE = 0.1
"""Smallest share of the step that products must spend on padding. A few narrow products are in every model."""
REPEATED = 1.25
"""Products at a source line are repeated if all devices together compute this multiple of their FLOPs."""
LANES = 128
"""Width of a TPU's matrix unit and vector registers. Smaller dimensions are padded to it."""
MAX_LINES = 3
"""Number of source lines that a finding lists."""


@dataclass(frozen=True)
class CheckedProgram:
    """A program before and after partitioning.

    Args:
        lowered: The program before partitioning.
        module: The compiled program of one device, or None if it does not fit.
        mesh_axes: Names and sizes of the mesh's axes.
        replay: Replay of the compiled program, or None if it does not fit.
        memory: Memory of one device.
    """

    lowered: LoweredProgram
    module: Module | None
    mesh_axes: Mapping[str, int]
    replay: Replay | None
    memory: MemoryReport

    @property
    def step_s(self) -> float:
        return self.replay.step_s if self.replay else 0.0

    @cached_property
    def devices(self) -> int:
        return math.prod(self.mesh_axes.values())

    @cached_property
    def whole_products(self) -> list[Product]:
        """Products of the program before partitioning, in order."""
        return products(self.lowered.module, self.mesh_axes)

    @cached_property
    def local_products(self) -> list[Product]:
        """Products of the compiled program of one device."""
        return products(self.module, self.mesh_axes) if self.module else []

    @cached_property
    def flops_ratios(self) -> dict[str, float]:
        """FLOPs of all devices over those of the program before partitioning, by source line."""
        whole, local = (_flops_by_source(group) for group in (self.whole_products, self.local_products))
        return {line: self.devices * flops / whole[line] for line, flops in local.items() if whole.get(line)}

    def seconds(self, lines: Iterable[str], *kinds: PartKind, mesh_axes: Sequence[str] = ()) -> float:
        """Sum the seconds of operations from these source lines, of these kinds. Waits must be over one of `mesh_axes`."""
        lines, costs = set(lines), self.replay.costs if self.replay else []
        return sum(
            cost.seconds
            for cost in costs
            if cost.source in lines
            and cost.kind in kinds
            and (not cost.kind.has_mesh_axes or set(mesh_axes) & set(cost.mesh_axes))
        )


def find_faults(program: CheckedProgram) -> tuple[Finding, ...]:
    """Return the faults of a program's sharding, the most expensive first."""
    whole, lines = _find_whole_batches(program)
    findings = [
        *whole,
        *_find_unused_axes(program),
        *_find_replicated_state(program),
        *_find_gathers(program, lines),
        *_find_all_reduces(program),
        *_find_padding(program),
    ]
    if not any(finding.code is FindingCode.unused_axis for finding in findings):
        findings += _find_repeated_compute(program, lines)
    return tuple(sorted(findings, key=lambda finding: -(finding.seconds or 0.0)))


def model_flops(program: LoweredProgram, mesh_axes: Mapping[str, int]) -> float | None:
    """Return the FLOPs of a program's products without recomputation, or None if it has kernels, which are not counted."""
    kernels = {"tpu_custom_call", "Mosaic"}
    if any(i.target in kernels for c in program.module.computations for i in c.instructions):
        return None
    counted = products(program.module, mesh_axes)
    return sum(product.flops for product in counted if "rematted_computation" not in product.instruction.op_name)


def _flops_by_source(group: Iterable[Product]) -> dict[str, float]:
    flops: dict[str, float] = defaultdict(float)
    for product in group:
        flops[cause(product.instruction)[1]] += product.flops
    return flops


def _dims(instruction: Instruction) -> list[tuple[int, ...]]:
    """Return the dimensions larger than 1 of the result and the operands of a product."""
    arrays = (instruction, *instruction.operands[:2])
    return [tuple(size for size in array.shape.dims if size > 1) for array in arrays]


def _is_shard(local: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether an array with dimensions `local`, in any order, may be a shard of one with dimensions `whole`."""
    rest_local, rest_whole = list((Counter(local) - Counter(whole)).elements()), list((Counter(whole) - Counter(local)).elements())
    rest_local += [1] * (len(rest_whole) - len(rest_local))
    if len(rest_local) != len(rest_whole) or len(rest_local) > 4:
        return False
    return any(
        all(size % part == 0 for size, part in zip(rest_whole, parts, strict=True)) for parts in permutations(rest_local)
    )


def _is_shard_of_product(local: Instruction, whole: Instruction) -> bool:
    (out, *factors), (whole_out, *whole_factors) = _dims(local), _dims(whole)
    return _is_shard(out, whole_out) and any(
        all(_is_shard(a, b) for a, b in zip(order, whole_factors, strict=True)) for order in permutations(factors)
    )


class _Origin(NamedTuple):
    """What identifies the products of one JAX operation before and after partitioning: source line and name."""

    source: str
    name: str


def _origin(instruction: Instruction) -> _Origin:
    op_name, source = cause(instruction)
    return _Origin(source, "/".join(op_name.split("/")[-2:]))


def _find_whole_batches(program: CheckedProgram) -> tuple[list[Finding], set[str]]:
    """Return findings for batches that are not split where they should be, and the source lines of these products."""
    flagged: dict[BatchDimension, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_origin: dict[_Origin, list[Product]] = defaultdict(list)
    for product in program.whole_products:
        by_origin[_origin(product.instruction)].append(product)
    total: dict[str, float] = defaultdict(float)
    for product in program.local_products:
        origin = _origin(product.instruction)
        total[origin.source] += product.flops
        matches = [p for p in by_origin.get(origin, ()) if _is_shard_of_product(product.instruction, p.instruction)]
        whole = {_whole_batch(program, product.instruction, match.instruction) for match in matches}
        if len(whole) == 1 and (dimension := whole.pop()) is not None:
            flagged[dimension][origin.source] += product.flops
    findings, lines = [], set[str]()
    for dimension, flops in flagged.items():
        sources = {source for source, count in flops.items() if count >= 0.5 * total[source]}
        seconds = _whole_batch_seconds(program, dimension, sources)
        if sources and seconds >= MIN_SHARE * program.step_s:
            findings.append(_whole_batch_finding(program, dimension, sources, seconds))
            lines |= sources
    return findings, lines


def _whole_batch(program: CheckedProgram, local: Instruction, whole: Instruction) -> BatchDimension | None:
    """Return the batch dimension of a product that a device computes for the whole batch, or None if it is split."""
    dimensions = [
        dimension
        for array in (whole, *whole.operands[:2])
        for dimension in program.lowered.batch_dimensions(array).values()
        if math.prod(program.mesh_axes.get(axis, 1) for axis in dimension.mesh_axes) > 1
    ]
    for dimension in dict.fromkeys(dimensions):
        whole_count, local_count = (
            sum(dims.count(dimension.size) for dims in _dims(instruction)) for instruction in (whole, local)
        )
        if local_count >= whole_count > 0:
            return dimension
    return None


def _whole_batch_seconds(program: CheckedProgram, dimension: BatchDimension, lines: set[str]) -> float:
    """Estimate the seconds that are saved if a batch is split at these source lines."""
    parts = math.prod(program.mesh_axes.get(axis, 1) for axis in dimension.mesh_axes)
    waits = program.seconds(lines, PartKind.exposed, mesh_axes=dimension.mesh_axes)
    other = program.seconds(lines, PartKind.memory, PartKind.compute) * (1 - 1 / parts)
    return waits + other + _repeated_seconds(program, lines)


def _repeated_seconds(program: CheckedProgram, lines: Iterable[str]) -> float:
    ratios = ((line, max(program.flops_ratios.get(line, 1.0), 1.0)) for line in lines)
    return sum(program.seconds([line], PartKind.matmul) * (1 - 1 / ratio) for line, ratio in ratios)


def _whole_batch_finding(
    program: CheckedProgram, dimension: BatchDimension, lines: set[str], seconds: float
) -> Finding:
    ordered = [p.instruction for p in program.whole_products if _origin(p.instruction).source in lines]
    first = next((i for i in ordered if "transpose(" not in i.op_name), ordered[0])
    axes = _axes(program, dimension.mesh_axes)
    text = (
        f"The batch is split over {axes} in {dimension.argument} but not in {_list_lines(program, lines)}: each device "
        f"computes all {dimension.size:,} there. {_describe_ratio(program)} This costs about "
        f"{duration(seconds)} of {duration(program.step_s)} a step."
    )
    operand = next((a for a in (*first.operands[:2], first) if dimension in program.lowered.batch_dimensions(a).values()), first)
    position = next(d for d, found in program.lowered.batch_dimensions(operand).items() if found == dimension)
    names = [repr(axis) for axis in dimension.mesh_axes]
    split = names[0] if len(names) == 1 else f"({', '.join(names)})"
    spec = ", ".join(["None"] * position + [split])
    remedy = (
        f"Constrain the activations before {short_source(_origin(first).source)} ({short_cause(first.op_name)}): "
        f"x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec({spec})))."
    )
    if not any(i.target == "Sharding" for c in program.lowered.module.computations for i in c.instructions):
        remedy += (
            " The lowered program has no sharding constraint. If your code has some, they were dropped: those of Flax "
            "are only applied under jax.set_mesh(mesh)."
        )
    return Finding(
        FindingCode.whole_batch, text, remedy, _origin(first).source, dimension.mesh_axes, seconds, None
    )


def _describe_ratio(program: CheckedProgram) -> str:
    whole, local = (sum(p.flops for p in group) for group in (program.whole_products, program.local_products))
    ratio = program.devices * local / whole if whole else 1.0
    if ratio < 1.05:
        return "No product is repeated, because the weights are split instead, and partial results are sent."
    return f"The devices together compute {ratio:.1f} times the FLOPs of one copy of the program."


def _axes(program: CheckedProgram, mesh_axes: Iterable[str]) -> str:
    return ",".join(f"{axis}={program.mesh_axes.get(axis, 1)}" for axis in mesh_axes)


def _list_lines(program: CheckedProgram, lines: Iterable[str]) -> str:
    """List source lines, the slowest first."""
    ordered = sorted(lines, key=lambda line: (-program.seconds([line], *PartKind, mesh_axes=[*program.mesh_axes]), line))
    shown = ", ".join(short_source(line) for line in ordered[:MAX_LINES])
    more = len(ordered) - MAX_LINES
    return f"{shown} and {count_text(more, 'more line')}" if more > 0 else shown


def _find_repeated_compute(program: CheckedProgram, known_lines: set[str]) -> Iterator[Finding]:
    lines = {line for line, ratio in program.flops_ratios.items() if ratio >= REPEATED} - known_lines
    seconds = _repeated_seconds(program, lines)
    if not lines or seconds < MIN_SHARE * program.step_s:
        return
    slowest = max(lines, key=lambda line: program.seconds([line], PartKind.matmul))
    text = (
        f"Several devices compute the same products in {_list_lines(program, lines)}: the products of "
        f"{short_source(slowest)} are computed {program.flops_ratios[slowest]:.1f} times. This costs about "
        f"{duration(seconds)} of {duration(program.step_s)} a step."
    )
    remedy = "Shard an operand of these products over the mesh axes that do not split them yet."
    yield Finding(FindingCode.repeated_compute, text, remedy, slowest, (), seconds)


def _find_unused_axes(program: CheckedProgram) -> Iterator[Finding]:
    module = program.module
    if module is None:
        return
    used = {axis for argument in program.lowered.arguments for axes in argument.mesh_axes for axis in axes}
    attributes = [
        value for c in program.lowered.module.computations for i in c.instructions for value in i.attributes.values()
    ]
    used |= {axis for use in (program.replay.collectives if program.replay else ()) for axis in use.mesh_axes}
    for axis, size in program.mesh_axes.items():
        if size > 1 and axis not in used and not any(f'"{axis}"' in value for value in attributes):
            text = (
                f"Nothing is sharded over {axis}={size}: every device along this axis does the same work, so "
                f"{program.devices // size} of the {program.devices} devices would be as fast."
            )
            remedy = f"Shard the batch or the weights over {axis}, or leave it out of the mesh."
            yield Finding(
                FindingCode.unused_axis, text, remedy, "", (axis,), program.step_s * (1 - 1 / size)
            )


def _find_replicated_state(program: CheckedProgram) -> Iterator[Finding]:
    replicated = [a for a in program.lowered.arguments if a.is_state and not _shards(program, a)]
    size, usable = sum(a.shape.bytes for a in replicated), program.memory.usable
    saved = size * (1 - 1 / program.devices)
    if usable is None or saved < MIN_STATE_SHARE * usable:
        return
    largest = max(replicated, key=lambda argument: argument.shape.bytes)
    axes = [axis for axis, count in program.mesh_axes.items() if count > 1]
    needed = program.memory.required
    text = (
        f"{gib(size)} of state is replicated on all {program.devices} devices, {percent(size / usable)} of the usable "
        f"memory; the largest array is {largest.name} ({gib(largest.shape.bytes)})."
    )
    if needed is not None and needed > usable:
        text += f" The step needs {gib(needed)} of {gib(usable)} usable."
    remedy = f"Shard the parameters and the optimizer state over {axes_text(axes)}, which saves up to {gib(saved)} per device."
    yield Finding(FindingCode.replicated_state, text, remedy, "", tuple(axes), None, saved)


def _shards(program: CheckedProgram, argument: Argument) -> int:
    """Return the number of parts into which the mesh splits an argument, minus 1."""
    return math.prod(program.mesh_axes.get(axis, 1) for axes in argument.mesh_axes for axis in axes) - 1


class _Gather(NamedTuple):
    """All-gathers from one source line: the compiled operations, and the lines' bytes and waits."""

    sent: float
    exposed_s: float


def _find_gathers(program: CheckedProgram, known_lines: set[str]) -> Iterator[Finding]:
    """Find all-gathers of a batch, and of float32 arrays that are converted to bfloat16 right after."""
    module = program.module
    if module is None or program.replay is None:
        return
    marked, unmarked = _dims_by_line(program)
    whole: dict[BatchDimension, set[str]] = defaultdict(set)
    wide: set[str] = set()
    users = {}
    for computation in module.computations:
        for instruction in computation.instructions:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
    for computation in module.computations:
        for instruction in computation.instructions:
            if collective_kind(instruction.opcode) != "all-gather":
                continue
            source = cause(instruction)[1]
            result = instruction.shape.leaves[-1]
            dims = tuple(sorted(size for size in result.dims if size > 1))
            dimension = marked[source].get(dims)
            if dimension is not None and dims not in unmarked[source] and source not in known_lines:
                whole[dimension].add(source)
            if result.dtype == "f32" and _only_converted(instruction, users):
                wide.add(source)
    uses = [use for use in program.replay.collectives if use.kind == "all-gather"]
    for dimension, lines in whole.items():
        gather = _sum_gathers(use for use in uses if use.source in lines)
        if gather.exposed_s < MIN_SHARE * program.step_s:
            continue
        slowest = max(lines, key=lambda line: sum(use.exposed_s for use in uses if use.source == line))
        text = (
            f"The batch, which is split over {_axes(program, dimension.mesh_axes)} in {dimension.argument}, is gathered "
            f"on every device in {_list_lines(program, lines)}: {decimal_bytes_text(gather.sent)} are sent, and the step waits "
            f"{duration(gather.exposed_s)} of {duration(program.step_s)}."
        )
        remedy = "Constrain the gathered array to the sharding of the batch with jax.lax.with_sharding_constraint."
        yield Finding(
            FindingCode.gathered_batch, text, remedy, slowest, dimension.mesh_axes, gather.exposed_s, gather.sent
        )
    gather = _sum_gathers(use for use in uses if use.source in wide)
    if gather.exposed_s / 2 >= MIN_SHARE * program.step_s:
        slowest = max(wide, key=lambda line: sum(use.exposed_s for use in uses if use.source == line))
        text = (
            f"Arrays are gathered in float32 and then converted to bfloat16 in {_list_lines(program, wide)}: "
            f"{decimal_bytes_text(gather.sent)} are sent, and half would do. This costs about "
            f"{duration(gather.exposed_s / 2)} of {duration(program.step_s)} a step."
        )
        remedy = "Convert the weights to bfloat16 before they are used, with their sharding: w = with_sharding_constraint(w.astype(jnp.bfloat16), sharding)."
        yield Finding(FindingCode.float32_gather, text, remedy, slowest, (), gather.exposed_s / 2, gather.sent / 2)


def _sum_gathers(uses: Iterable[object]) -> _Gather:
    listed = list(uses)
    return _Gather(sum(use.bytes_sent for use in listed), sum(use.exposed_s for use in listed))


def _dims_by_line(
    program: CheckedProgram,
) -> tuple[dict[str, dict[tuple[int, ...], BatchDimension]], dict[str, set[tuple[int, ...]]]]:
    """Return the sorted dimensions of arrays with and without a batch dimension, by source line."""
    marked: dict[str, dict[tuple[int, ...], BatchDimension]] = defaultdict(dict)
    unmarked: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for computation in program.lowered.module.computations:
        for instruction in computation.instructions:
            for array in (instruction, *instruction.operands):
                dims = tuple(sorted(size for size in array.shape.dims if size > 1))
                if found := program.lowered.batch_dimensions(array):
                    marked[instruction.source][dims] = next(iter(found.values()))
                else:
                    unmarked[instruction.source].add(dims)
    return marked, unmarked


def _only_converted(gather: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> bool:
    """Return whether every use of a gathered array converts it to bfloat16."""
    ends, queue = [], list(users.get(gather, ()))
    while queue:
        user = queue.pop()
        if user.opcode in ("all-gather-done", "bitcast", "copy", "reshape", "transpose", "get-tuple-element"):
            queue += users.get(user, ())
        elif user.opcode == "fusion":
            ends.append(bool(user.called[0].instructions) and _fusion_converts(user))
        else:
            ends.append(user.opcode == "convert" and user.shape.dtype == "bf16")
    return bool(ends) and all(ends)


def _fusion_converts(fusion: Instruction) -> bool:
    instructions = fusion.called[0].instructions
    return any(
        i.opcode == "convert" and i.shape.dtype == "bf16" and i.operands[0].opcode == "parameter" for i in instructions
    ) and all(i.opcode in ("parameter", "convert", "bitcast", "copy", "transpose", "reshape", "convolution", "dot") for i in instructions)


def _find_all_reduces(program: CheckedProgram) -> Iterator[Finding]:
    """Find all-reduces of which each device uses only a part."""
    module = program.module
    if module is None or program.replay is None:
        return
    reader = CollectiveReader(module, dict(program.mesh_axes))
    lines: set[str] = set()
    for computation in module.computations:
        users: dict[Instruction, list[Instruction]] = defaultdict(list)
        for instruction in computation.instructions:
            for operand in instruction.operands:
                users[operand].append(instruction)
        for instruction in computation.instructions:
            if instruction.opcode == "all-reduce" and not instruction.shape.parts:
                groups = reader.read(instruction).groups
                members = 1 if groups is None else groups.shape[1]
                if members > 1 and _used_part(instruction, users) * members <= 1.01:
                    lines.add(cause(instruction)[1])
    uses = [use for use in program.replay.collectives if use.kind == "all-reduce" and use.source in lines]
    gather = _sum_gathers(uses)
    if gather.exposed_s / 2 < MIN_SHARE * program.step_s:
        return
    slowest = max(lines, key=lambda line: sum(use.exposed_s for use in uses if use.source == line))
    text = (
        f"All-reduces in {_list_lines(program, lines)} send {decimal_bytes_text(gather.sent)}, but each device uses only its "
        f"part: reduce-scatters would send half, and save about {duration(gather.exposed_s / 2)} of "
        f"{duration(program.step_s)} a step."
    )
    remedy = "Constrain the sum to the sharding of its use with jax.lax.with_sharding_constraint."
    yield Finding(FindingCode.all_reduce, text, remedy, slowest, (), gather.exposed_s / 2, gather.sent / 2)


def _used_part(reduced: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> float:
    """Return the share of an array that its uses read, or 1 if it is unknown."""
    parts, queue = [], list(users.get(reduced, ()))
    while queue:
        user = queue.pop()
        if user.opcode in ("bitcast", "copy", "reshape"):
            queue += users.get(user, ())
        else:
            sliced = user.opcode == "dynamic-slice" or (
                user.opcode == "fusion" and any(i.opcode == "dynamic-slice" for i in user.called[0].instructions)
            )
            parts.append(user.shape.elements / reduced.shape.elements if sliced and not user.shape.parts else 1.0)
    return max(parts, default=1.0)


def _find_padding(program: CheckedProgram) -> Iterator[Finding]:
    """Find products with a dimension below the width of the matrix unit, which is padded."""
    used: dict[str, float] = defaultdict(float)
    padded: dict[str, float] = defaultdict(float)
    narrow: dict[str, Counter[int]] = defaultdict(Counter)
    for product in program.local_products:
        source, flops = cause(product.instruction)[1], product.flops
        sizes = _product_widths(product.instruction)
        factor = math.prod(-(-size // LANES) * LANES / size for size in sizes)
        used[source] += flops
        padded[source] += flops * factor
        narrow[source].update({size: int(flops) for size in sizes if size < LANES})
    waste = {
        line: program.seconds([line], PartKind.matmul) * (1 - used[line] / padded[line])
        for line in used
        if padded[line] > 1.2 * used[line]
    }
    seconds = sum(waste.values())
    if not waste or seconds < MIN_PADDING_SHARE * program.step_s:
        return
    slowest = max(waste, key=lambda line: waste[line])
    sizes = sorted({counts.most_common(1)[0][0] for line, counts in narrow.items() if line in waste and counts})
    text = (
        f"Products in {_list_lines(program, waste)} have dimensions of {' and '.join(str(size) for size in sizes[-2:])}, which the "
        f"{LANES} x {LANES} matrix unit pads to {LANES}: about {duration(seconds)} of {duration(program.step_s)} a step is "
        "spent on padding."
    )
    remedy = f"Use dimensions that are multiples of {LANES}, such as heads of {LANES}, or shard another dimension."
    yield Finding(FindingCode.padding, text, remedy, slowest, (), seconds)


def _product_widths(instruction: Instruction) -> list[int]:
    """Return the contracted and the output feature dimension of a product, which the matrix unit pads."""
    message = instruction.message
    if instruction.opcode == "convolution":
        numbers, kernel = message.convolution, instruction.operands[1].shape.dims
        window = math.prod(kernel[d] for d in numbers.kernel_spatial) if len(numbers.kernel_spatial) else 1
        contracted = kernel[numbers.kernel_input_feature] * (window if not _is_batched(instruction) else 1)
        return [size for size in (contracted, kernel[numbers.kernel_output_feature]) if size > 0]
    contracted = math.prod(instruction.operands[0].shape.dims[d] for d in message.dot.lhs_contracting)
    used = {*message.dot.rhs_batch, *message.dot.rhs_contracting}
    features = math.prod(size for d, size in enumerate(instruction.operands[1].shape.dims) if d not in used)
    return [contracted, features]


def _is_batched(instruction: Instruction) -> bool:
    """Return whether a convolution is a batched product, written with a window over the batch (`base_dilation`)."""
    return any(window.base_dilation > 1 or window.window_dilation > 1 or window.stride > 1 for window in instruction.message.window.dimensions)
