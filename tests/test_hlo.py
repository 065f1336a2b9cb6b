"""Tests of parsing compiled modules: schedule, loop counts, replica groups in every spelling, FLOPs and bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.compiled.flops import product_flops
from valkyrie.compiled.groups import permute_pairs, replica_groups
from valkyrie.compiled.hbm import hbm_bytes, is_bandwidth_bound
from valkyrie.compiled.hlo import Module, parse_module
from valkyrie.compiled.loops import constant_value, trip_count
from valkyrie.train.program import serialised_module

HEAD = "HloModule m, is_scheduled=true, entry_computation_layout={(f32[8,128])->f32[8,128]}, num_partitions=8\n"


def compile_module(function, *shapes: tuple[int, ...]) -> Module:
    """Return the module of a function compiled for one CPU device."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*arguments).compile()
    return parse_module(serialised_module(compiled))


def trip_counts(module: Module) -> list[int | None]:
    return [trip_count(i) for i in module.instructions.values() if i.opcode == "while"]


def flops(module: Module) -> float:
    return sum(product_flops(i) for i in module.entry.instructions)


def test_instructions_are_in_execution_order():
    text = HEAD + (
        "ENTRY e {\n  a = f32[8,128] parameter(0)\n  late = f32[8,128] negate(a)\n"
        "  early = f32[8,128] exponential(a)\n  ROOT r = f32[8,128] add(late, early)\n}\n"
    )
    module = parse_module(text)
    assert [i.name for i in module.entry.instructions] == ["a", "late", "early", "r"]
    assert module.is_scheduled and module.num_partitions == 8
    assert module.entry.root is module.instructions["r"]
    assert [o.name for o in module.instructions["r"].operands] == ["late", "early"]


def test_bytes_without_a_computation_are_refused():
    with pytest.raises(ValueError, match=r"\b0 bytes\b"):
        parse_module(b"")


def test_shapes_have_bytes_padding_and_memory_space():
    text = HEAD.replace("f32[8,128]", "bf16[3,5,100]") + (
        "ENTRY e {\n  a = bf16[3,5,100]{2,1,0:T(8,128)S(1)} parameter(0)\n"
        "  ROOT r = (bf16[3,5,100]{2,1,0:T(8,128)S(1)}, s4[7]{0:T(128)}, token[]) custom-call(a),"
        ' custom_call_target="x"\n}\n'
    )
    text = text.replace("->bf16[3,5,100]}", "->(bf16[3,5,100], s4[7], token[])}")
    whole = parse_module(text).instructions["r"].shape
    first, second, token = whole.leaves
    assert (first.bytes, first.padded_bytes, first.memory_space) == (3 * 5 * 100 * 2, 3 * 8 * 128 * 2, 1)
    assert (second.bytes, token.bytes, whole.bytes) == (4, 0, 3004)


def test_an_instruction_has_a_source_line():
    module = compile_module(lambda x: jnp.sin(x) @ x, (8, 8))
    sources = {i.source for i in module.instructions.values() if i.opcode == "dot"}
    assert sources and all("test_hlo.py:" in source for source in sources)


def test_a_constant_loop_is_counted():
    module = compile_module(lambda x: jax.lax.fori_loop(0, 7, lambda i, x: jnp.sin(x @ x), x), (8, 8))
    assert trip_counts(module) == [7]


def test_nested_loops_are_counted():
    def inner(x, _):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=5)[0], None

    assert sorted(trip_counts(compile_module(lambda x: jax.lax.scan(inner, x, length=3)[0], (8, 8)))) == [3, 5]


LOOP = """HloModule m, is_scheduled=true
body {
  b = (s32[], s32[], f32[4]) parameter(0)
  i = s32[] get-tuple-element(b), index=0
  n = s32[] get-tuple-element(b), index=1
  x = f32[4] get-tuple-element(b), index=2
  by = s32[] constant(STEP)
  next = s32[] add(i, by)
  y = f32[4] add(x, x)
  ROOT t = (s32[], s32[], f32[4]) tuple(next, n, y)
}
condition {
  c = (s32[], s32[], f32[4]) parameter(0)
  ci = s32[] get-tuple-element(c), index=0
  cn = s32[] get-tuple-element(c), index=1
  ROOT less = pred[] compare(LEFT, RIGHT), direction=DIRECTION
}
ENTRY e {
  p = f32[4] parameter(0)
  start = s32[] constant(START)
  limit = s32[] constant(LIMIT)
  copied = s32[] copy(limit)
  all = (s32[], s32[], f32[4]) tuple(start, copied, p)
  ROOT w = (s32[], s32[], f32[4]) while(all), condition=condition, body=body
}
"""


@pytest.mark.parametrize(
    ("start", "limit", "step", "direction", "count"),
    [
        (0, 10, 1, "LT", 10),
        (3, 10, 2, "LT", 4),
        (0, 10, 1, "LE", 11),
        (10, 0, -1, "GT", 10),
        (0, 12, 4, "NE", 3),
        (5, 2, 1, "LT", 0),
        (5, 2, 1, "NE", None),
        (0, 10, -1, "LT", None),
    ],
)
def test_a_loop_bound_hoisted_into_the_tuple_is_found(start, limit, step, direction, count):
    text = LOOP.replace("LEFT", "ci").replace("RIGHT", "cn").replace("DIRECTION", direction)
    text = text.replace("START", str(start)).replace("LIMIT", str(limit)).replace("STEP", str(step))
    assert trip_counts(parse_module(text)) == [count]


def test_a_loop_bound_on_the_left_is_equivalent():
    text = LOOP.replace("LEFT", "cn").replace("RIGHT", "ci").replace("DIRECTION", "GT")
    assert trip_counts(parse_module(text.replace("START", "0").replace("LIMIT", "6").replace("STEP", "1"))) == [6]


def test_a_loop_bound_copied_asynchronously_in_each_iteration_is_found():
    text = LOOP.replace("LEFT", "ci").replace("RIGHT", "cn").replace("DIRECTION", "LT")
    text = text.replace("START", "0").replace("LIMIT", "6").replace("STEP", "1")
    template = "{indent}begun{n} = (s32[], s32[], u32[]) copy-start({source})\n  {name} = s32[] copy-done(begun{n})"
    outside = template.format(indent="", n=1, source="limit", name="copied")
    text = text.replace("copied = s32[] copy(limit)", outside)
    inside = template.format(indent="", n=2, source="n", name="kept")
    text = text.replace("  ROOT t =", f"  {inside}\n  ROOT t =").replace("tuple(next, n,", "tuple(next, kept,")
    assert text.count("copy-done") == 2 and "(next, kept" in text
    assert trip_counts(parse_module(text)) == [6]


@pytest.mark.parametrize(
    ("inner_limit", "inner_result", "counts"),
    [("n", "n", [6, 6]), ("next", "n", [None, None]), ("n", "i", [None, None])],
)
def test_a_loop_bound_that_passes_through_an_inner_loop_is_found(
    inner_limit: str, inner_result: str, counts: list[int | None]
):
    text = LOOP.replace("LEFT", "ci").replace("RIGHT", "cn").replace("DIRECTION", "LT")
    text = text.replace("START", "0").replace("LIMIT", "6").replace("STEP", "1")
    head, loop = text.split("body {", 1)
    body, entry = loop.split("ENTRY", 1)
    inner = "body {" + body
    forwarded = (
        f"  zero = s32[] constant(0)\n  carry = (s32[], s32[], f32[4]) tuple(zero, {inner_limit}, y)\n"
        "  loop = (s32[], s32[], f32[4]) while(carry), condition=condition, body=body\n"
        "  kept = s32[] get-tuple-element(loop), index=1\n  ROOT t ="
    )
    outer = inner.replace("body {", "outer {").replace("condition {", "until {").replace("  ROOT t =", forwarded)
    outer = outer.replace("tuple(next, n, y)", "tuple(next, kept, y)")
    entry = entry.replace("condition=condition, body=body", "condition=until, body=outer")
    inner = inner.replace("tuple(next, n, y)", f"tuple(next, {inner_result}, y)")
    assert trip_counts(parse_module(f"{head}{inner}{outer}ENTRY{entry}")) == counts


def test_a_loop_with_a_data_dependent_bound_has_no_count():
    module = compile_module(
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.sin(x @ x) + 1, x), (8, 8)
    )
    assert trip_counts(module) == [None]


def test_a_constant_is_found_through_tuples_and_copies():
    module = parse_module(
        LOOP.replace("LEFT", "ci")
        .replace("RIGHT", "cn")
        .replace("DIRECTION", "LT")
        .replace("START", "0")
        .replace("LIMIT", "6")
        .replace("STEP", "1")
    )
    assert constant_value(module.instructions["cn"]) == 6
    assert constant_value(module.instructions["ci"]) is None


GROUPS = {
    "{{0,4},{1,5},{2,6},{3,7}}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "[4,2]<=[2,4]T(1,0)": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "[4,2]<=[2,2,2]T(0,2,1)": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "{}": [[0, 1, 2, 3, 4, 5, 6, 7]],
}


def all_reduce_module(groups: str) -> Module:
    return parse_module(
        HEAD + "add {\n  l = f32[] parameter(0)\n  r = f32[] parameter(1)\n  ROOT s = f32[] add(l, r)\n}\n"
        "ENTRY e {\n  a = f32[8,128] parameter(0)\n  ROOT g = f32[8,128] all-reduce(a), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=add\n}}\n"
    )


@pytest.mark.parametrize("spelling", GROUPS)
def test_replica_groups_are_parsed_in_every_spelling(spelling: str):
    (groups,) = replica_groups(all_reduce_module(spelling).instructions["g"], 8)
    assert groups.tolist() == GROUPS[spelling]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"y": None}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"x": None}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"x": None, "y": None}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"y": (1, 2)}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ({"y": (2, 2)}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_replica_groups_are_parsed_from_mesh_axes_and_parts_of_them(axes, expected):
    """Tests the form `mesh['x'=2,'y'=4] {'y'}`. It is set in the proto, because older text parsers reject it."""
    instruction = all_reduce_module("{}").instructions["g"]
    spelt = instruction.message.mesh_groups
    for name, size in (("x", 2), ("y", 4)):
        spelt.mesh.axes.add(name=name, size=size)
    for name, part in axes.items():
        reference = spelt.axes.add(axis="xy".index(name))
        if part is not None:
            reference.sub_axis.pre_size, reference.sub_axis.size = part
    (groups,) = replica_groups(instruction, 8)
    assert groups.tolist() == expected


def test_replica_groups_are_parsed_from_a_transposed_mesh():
    """Tests the form `mesh['x'=2,'y'=4, device_ids=([4,2]T(1,0))] {'x'}`."""
    instruction = all_reduce_module("{}").instructions["g"]
    spelt = instruction.message.mesh_groups
    for name, size in (("x", 2), ("y", 4)):
        spelt.mesh.axes.add(name=name, size=size)
    spelt.mesh.iota.dimensions.extend((4, 2))
    spelt.mesh.iota.transpose.extend((1, 0))
    spelt.axes.add(axis=0)
    assert replica_groups(instruction, 8)[0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_groups_of_different_sizes_are_separate():
    groups = replica_groups(all_reduce_module("{{0,1,2},{3,4,5},{6,7}}").instructions["g"], 8)
    assert [g.tolist() for g in groups] == [[[6, 7]], [[0, 1, 2], [3, 4, 5]]]


def test_a_permute_keeps_the_pairs_that_leave_their_device():
    module = parse_module(
        HEAD + "ENTRY e {\n  a = f32[8,128] parameter(0)\n  ROOT g = f32[8,128] collective-permute(a), channel_id=1, "
        "source_target_pairs={{0,1},{1,0},{2,2}}\n}\n"
    )
    assert permute_pairs(module.instructions["g"]).tolist() == [[0, 1], [1, 0]]


def test_matrix_products_count_two_flops_per_multiply_add():
    assert flops(compile_module(lambda a, b: a @ b, (16, 32), (32, 8))) == 2 * 16 * 32 * 8
    batched = compile_module(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (3, 16, 32), (3, 32, 8))
    assert flops(batched) == 2 * 3 * 16 * 32 * 8


@pytest.mark.parametrize(
    ("stride", "padding", "window_dilation", "base_dilation"),
    [(1, (0, 0), 1, 1), (1, (2, 2), 1, 1), (2, (1, 1), 1, 1), (1, (3, 1), 2, 1), (1, (2, 2), 1, 2), (2, (2, 1), 1, 3)],
)
def test_a_convolution_counts_only_positions_inside_the_input(stride, padding, window_dilation, base_dilation):
    rows, taps, channels, features, batch = 11, 3, 4, 5, 2
    dilated = np.zeros((rows - 1) * base_dilation + 1)
    dilated[::base_dilation] = 1
    padded = np.pad(dilated, padding)
    out = (len(padded) - (taps - 1) * window_dilation - 1) // stride + 1
    valid_products = sum(padded[o * stride + t * window_dilation] for o in range(out) for t in range(taps))
    text = (
        f"HloModule m\nENTRY e {{\n  a = f32[{batch},{rows},{channels}] parameter(0)\n"
        f"  k = f32[{taps},{channels},{features}] parameter(1)\n"
        f"  ROOT c = f32[{batch},{out},{features}] convolution(a, k), window={{size={taps} stride={stride} "
        f"pad={padding[0]}_{padding[1]} rhs_dilate={window_dilation} lhs_dilate={base_dilation}}}, "
        "dim_labels=b0f_0io->b0f\n}\n"
    )
    counted = flops(parse_module(text))
    assert counted == 2 * batch * channels * features * valid_products


FUSED = """HloModule m, is_scheduled=true
update {
  whole = f32[64,128] parameter(0)
  part = f32[1,128] parameter(1)
  at = s32[] parameter(2)
  zero = s32[] constant(0)
  doubled = f32[1,128] add(part, part)
  ROOT u = f32[64,128] dynamic-update-slice(whole, doubled, at, zero)
}
pick {
  from = f32[64,128] parameter(0)
  where = s32[] parameter(1)
  none = s32[] constant(0)
  ROOT s = f32[2,128] dynamic-slice(from, where, none), dynamic_slice_sizes={2,128}
}
ENTRY e {
  a = f32[64,128] parameter(0)
  b = f32[1,128] parameter(1)
  i = s32[] parameter(2)
  in_place = f32[64,128] fusion(a, b, i), kind=kLoop, calls=update
  sliced = f32[2,128] fusion(a, i), kind=kLoop, calls=pick
  turned = f32[128,64] transpose(a), dimensions={1,0}
  plain = f32[64,128] add(a, in_place)
  ROOT t = (f32[64,128], f32[2,128], f32[128,64]) tuple(plain, sliced, turned)
}
"""


def test_a_fusion_moves_the_bytes_it_accesses_not_all_of_its_operands():
    instructions = parse_module(FUSED).instructions
    row = 128 * 4
    index = 4
    assert hbm_bytes(instructions["in_place"]) == 2 * row + index
    assert hbm_bytes(instructions["sliced"]) == 2 * row + 2 * row + index
    assert hbm_bytes(instructions["plain"]) == 3 * 64 * row


def test_operations_that_move_data_between_lanes_are_not_elementwise():
    instructions = parse_module(FUSED).instructions
    assert is_bandwidth_bound(instructions["plain"]) and is_bandwidth_bound(instructions["in_place"])
    assert not is_bandwidth_bound(instructions["turned"])
