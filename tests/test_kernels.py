"""Tests of the costs of kernels: splash attention by grid step, block and row of blocks, and products of experts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from machines import CHIPS
from valkyrie.axes import GROUP_PADDING, ROUTED_SHARE
from valkyrie.compiled.hlo import parse_module
from valkyrie.hardware.chips import known_chips
from valkyrie.machine.kernels import kernel_cost
from valkyrie.machine.operations import OpCostModel
from valkyrie.machine.rows import gather_seconds, sort_seconds
from valkyrie.parts import PartKind


def splash_bundles(chip, kind):
    """Return a splash kernel's VLIW bundle counts on a chip (see `SplashBundles`).

    The result is (per grid step, per block, per row of blocks). Each is a list of counts for three block and head
    sizes.
    """
    bundles = known_chips()[chip].splash_bundles[kind]
    return bundles.step, bundles.block, bundles.ends


def splash_instruction(kernel, blocks, body):
    """Return the HLO instruction of a splash kernel.

    Args:
        kernel: Name, result shapes, and operands after the two mask tables.
        blocks: Block sizes, as in the kernel's metadata.
        body: HLO text before the entry computation, and its instructions before the kernel.
    """
    before, entry = body
    call = splash_call(kernel, blocks)
    module = parse_module(f"HloModule m, is_scheduled=true\n{before}ENTRY e {{\n{entry}  ROOT {call}}}\n")
    return module.instructions[kernel[0]]


def splash_call(kernel, blocks, mask="m"):
    """Return HLO text of a splash kernel with this block table. Other arguments are those of `splash_instruction`."""
    name, result, operands = kernel
    metadata = json.dumps({"xprof_metadata": json.dumps(blocks)}).replace("\\", "\\\\").replace('"', r"\"")
    return (
        f'{name} = {result} custom-call({mask}, {mask}, {operands}), custom_call_target="tpu_custom_call", '
        f'frontend_attributes={{kernel_metadata="{metadata}"}}\n'
    )


def causal_table(rows, columns, wider=1):
    """Return HLO text of the block table of a causal mask. A block has `wider` times as many keys as queries."""
    table = [[int(wider * j <= i) for j in range(columns)] for i in range(rows)]
    return f"  m = s8[1,{rows},{columns}] constant({{{{{str(table)[1:-1].replace('[', '{').replace(']', '}')}}}}})\n"


OWN_TABLE = (
    "own {\n  t = s8[2,1,2,2] parameter(0)\n  d = s32[] parameter(1)\n  z = s32[] constant(0)\n"
    "  c = s8[1,1,2,2] dynamic-slice(t, d, z, z, z), dynamic_slice_sizes={1,1,2,2}\n"
    "  ROOT b = s8[1,2,2] bitcast(c)\n}\n"
)
"""HLO text of a fusion that selects a device's own block table."""


def test_a_kernel_with_different_masks_per_device_costs_as_much_as_the_busiest():
    """Each of two devices selects its own table. One skips three of four blocks of a head, the other skips two."""
    entry = (
        "  t = s8[2,1,2,2] constant({{{{1,0},{0,0}}},{{{1,0},{2,0}}}})\n  d = s32[] parameter(0)\n"
        "  q = bf16[3,1024,128] parameter(1)\n  k = bf16[3,1024,128] parameter(2)\n"
        "  m = s8[1,2,2] fusion(t, d), kind=kLoop, calls=own\n"
    )
    forward = ("splash_mha_fwd", "bf16[3,1024,128]", "q, k, k")
    work = kernel_cost(
        splash_instruction(forward, {"block_q": 512, "block_kv": 512}, (OWN_TABLE, entry)), known_chips()["v5e"]
    )
    step, block, ends = (sizes[0] for sizes in splash_bundles("v5e", "forward"))
    assert work.cycles == 3 * (4 * step + 2 * block + 2 * ends)
    assert work.note == ""


def test_kernels_that_share_the_work_differently_on_each_device_cost_as_much_as_on_one_of_them():
    """Two kernels visit 1 and 4 blocks of a head on the first device, and 3 and 1 on the second, which ends earlier."""
    blocks, result = {"block_q": 512, "block_kv": 512}, "bf16[3,1024,128]"
    entry = (
        "  t = s8[2,1,2,2] constant({{{{1,0},{0,0}}},{{{1,1},{1,0}}}})\n  d = s32[] parameter(0)\n"
        "  u = s8[2,1,2,2] constant({{{{1,1},{1,1}}},{{{1,0},{0,0}}}})\n"
        "  q = bf16[3,1024,128] parameter(1)\n  k = bf16[3,1024,128] parameter(2)\n"
        "  n = s8[1,2,2] fusion(t, d), kind=kLoop, calls=other\n  m = s8[1,2,2] fusion(u, d), kind=kLoop, calls=own\n"
        f"  {splash_call(('splash_mha_fwd.1', result, 'q, k, k'), blocks, mask='n')}"
    )
    tables = OWN_TABLE + OWN_TABLE.replace("own", "other", 1)
    second = splash_instruction(("splash_mha_fwd.2", result, "q, k, k"), blocks, (tables, entry))
    first = next(each for each in second.computation.instructions if each.name == "splash_mha_fwd.1")
    step, block, ends = (sizes[0] for sizes in splash_bundles("v5e", "forward"))
    for kernel, visited in ((first, 1), (second, 4)):
        assert kernel_cost(kernel, known_chips()["v5e"]).cycles == 3 * (4 * step + visited * block + 2 * ends)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_forward_kernel_pays_for_the_ends_of_every_row_of_blocks(head_dim):
    """2 sequences with 4 heads, each head with 4 rows of 4 blocks. 10 blocks of a head are visible, 16 are iterated."""
    entry = (
        causal_table(4, 4)
        + f"  q = bf16[2,4,2048,{head_dim}] parameter(0)\n  k = bf16[2,2,2048,{head_dim}] parameter(1)\n"
    )
    forward = ("splash_mha_fwd", f"bf16[2,4,2048,{head_dim}]", "q, k, k")
    work = kernel_cost(
        splash_instruction(forward, {"block_q": 512, "block_kv": 512}, ("", entry)), known_chips()["v6e"]
    )
    size = 0 if head_dim == 128 else 2
    step, block, ends = (sizes[size] for sizes in splash_bundles("v6e", "forward"))
    assert work.cycles == 8 * (16 * step + 10 * block + 4 * ends)
    assert work.flops == 8 * 10 * 2 * 2 * 512 * 512 * head_dim


@pytest.mark.parametrize("kind", ["dkv", "dkv_dq"])
def test_a_backward_kernel_pays_for_the_ends_of_columns_once_per_group_of_heads(kind):
    """The kernel has the outputs of JAX 0.10, in this order.

    Float32 sums of dk and of dv; if the kernel is fused, dq of each column of blocks; dk and dv.
    """
    entry = causal_table(4, 4) + "  q = bf16[2,8,4096,128] parameter(0)\n  k = bf16[2,2,4096,128] parameter(1)\n"
    dq = "bf16[2,4,8,4096,128], " if kind == "dkv_dq" else ""
    result = f"(f32[2,1024,128], f32[2,1024,128], {dq}bf16[2,2,4096,128], bf16[2,2,4096,128])"
    blocks = {"block_q_dkv": 1024, "block_kv_dkv": 1024}
    work = kernel_cost(
        splash_instruction(("splash_mha_dkv", result, "q, k, k"), blocks, ("", entry)), known_chips()["v5p"]
    )
    step, block, ends = (sizes[1] for sizes in splash_bundles("v5p", kind))
    assert work.cycles == 16 * (16 * step + 10 * block) + 4 * 4 * ends
    assert work.flops == 16 * 10 * 2 * (5 if kind == "dkv_dq" else 4) * 1024 * 1024 * 128


def test_interpolated_block_sizes_are_close_to_the_compiled_kernel():
    """The compiled fused backward kernel on v6e, with 1024 x 2048 blocks, takes 538 cycles per grid step.

    It takes 11,345 more per block that the mask does not skip, and 724 per column of blocks.
    """
    entry = causal_table(8, 4, 2) + "  q = bf16[1,8192,128] parameter(0)\n  k = bf16[1,8192,128] parameter(1)\n"
    sums = "f32[1024,128], f32[2048,128], f32[2048,128]"  # dq's too, as dq is summed over halves of a block
    result = f"({sums}, bf16[4,1,8192,128], bf16[1,8192,128], bf16[1,8192,128])"
    blocks = {"block_q_dkv": 1024, "block_kv_dkv": 2048}
    work = kernel_cost(
        splash_instruction(("splash_mha_dkv", result, "q, k, k"), blocks, ("", entry)), known_chips()["v6e"]
    )
    assert work.cycles == pytest.approx(32 * 538 + 20 * 11345 + 4 * 724, rel=0.02)


def test_a_kernel_is_never_faster_than_the_peak():
    """By its bundles alone, v5e's fused backward kernel takes less time than its matrix products at the peak.

    Its cost is therefore the time of the products.
    """
    entry = causal_table(8, 8) + "  q = bf16[1,8192,128] parameter(0)\n  k = bf16[1,8192,128] parameter(1)\n"
    result = "(f32[1024,128], f32[1024,128], bf16[8,1,8192,128], bf16[1,8192,128], bf16[1,8192,128])"
    blocks = {"block_q_dkv": 1024, "block_kv_dkv": 1024}
    kernel = splash_instruction(("splash_mha_dkv", result, "q, k, k"), blocks, ("", entry))
    chip = replace(CHIPS["v5e"], splash_bundles=known_chips()["v5e"].splash_bundles)
    work = kernel_cost(kernel, chip)
    assert work.cycles is not None and chip.clock_ghz is not None
    at_peak = work.flops / (chip.peak_tflops["bfloat16"] * 1e12)
    assert work.cycles / (chip.clock_ghz * 1e9) < at_peak
    assert OpCostModel(chip).cost(kernel).duration_s == pytest.approx(at_peak)


GROUPED_PRODUCT = """HloModule m, is_scheduled=true
ENTRY e {
  x = bf16[4096,256] parameter(0)
  w = bf16[8,256,512] parameter(1)
  ROOT k = bf16[4096,512] custom-call(x, w), custom_call_target="tpu_custom_call"ATTRIBUTES, backend_config=CONFIG
}
"""


@pytest.mark.parametrize(
    ("attributes", "imbalance", "share"),
    [
        ({}, 1.2, 1.0),
        ({ROUTED_SHARE: "1", GROUP_PADDING: "0.125"}, 1.2, 1.125),
        ({ROUTED_SHARE: "0.5", GROUP_PADDING: "0.125"}, 1.0, 0.625),
        ({ROUTED_SHARE: "0.5"}, 1.2, 0.6),
        ({ROUTED_SHARE: "0.5"}, 4.0, 1.0),
    ],
)
def test_a_product_of_experts_costs_the_rows_routed_to_the_device(attributes, imbalance, share):
    config = json.dumps({"custom_call_config": {"cost_estimate": {"flops": "1000", "bytes_accessed": "200"}}})
    text = ",".join(f'{key}="{value}"' for key, value in attributes.items())
    text = GROUPED_PRODUCT.replace("ATTRIBUTES", f", frontend_attributes={{{text}}}" if text else "")
    kernel = parse_module(text.replace("CONFIG", config)).instructions["k"]
    cost = kernel_cost(kernel, CHIPS["v5e"], imbalance)
    assert (cost.flops, cost.bytes_accessed) == pytest.approx((1000 * share, 200 * share))
    assert bool(cost.note) == bool(attributes)
    model = OpCostModel(CHIPS["v5e"], imbalance)
    model.cost(kernel)
    assert [*model.notes] == [cost.note] * bool(attributes)


NATIVE_PRODUCT = """HloModule m, is_scheduled=true
repeat { x = bf16[1024,256] parameter(0)
  ROOT r = bf16[8,1024,256] broadcast(x), dimensions={1,2} }
sum { a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT s = bf16[] add(a, b) }
product { w = bf16[8,256,512] parameter(0)
  x = bf16[1024,256] parameter(1)
  rows = bf16[8,1024,256] fusion(x), kind=kLoop, calls=repeat
  y = bf16[8,1024,512] convolution(rows, w), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
  zero = bf16[] constant(0)
  ROOT z = bf16[1024,512] reduce(y, zero), dimensions={0}, to_apply=sum }
ENTRY e { x = bf16[1024,256] parameter(0)
  w = bf16[8,256,512] parameter(1)
  ROOT f = bf16[1024,512] fusion(w, x), kind=kOutput, calls=product, frontend_attributes={ATTRIBUTES},
    backend_config={"window_config":{"estimated_cycles":"9000000"}} }
"""
"""A `jax.lax.ragged_dot` as compiled for v6e (libtpu 0.0.46): each step of the convolution has a group's rows only."""


def test_a_fusion_that_multiplies_groups_takes_the_time_of_its_rows_not_its_cycles():
    attributes = f'{ROUTED_SHARE}="0.5",{GROUP_PADDING}="0.25"'
    product = parse_module(NATIVE_PRODUCT.replace("ATTRIBUTES", attributes)).instructions["f"]
    model, chip = OpCostModel(CHIPS["v6e"]), CHIPS["v6e"]
    cost = model.cost(product)
    assert cost.kind is PartKind.matmul and cost.flops == 0.75 * 2 * 1024 * 256 * 512
    assert cost.flops / (chip.peak_tflops["bfloat16"] * 1e12) < cost.duration_s < 20e-6
    assert len(model.notes) == 1


def test_sorts_gathers_and_sums_of_rows_take_time():
    text = """HloModule m, is_scheduled=true
less { a = s32[] parameter(0)
  b = s32[] parameter(1)
  c = s32[] parameter(2)
  d = s32[] parameter(3)
  ROOT l = pred[] compare(a, b), direction=LT }
take { x = bf16[4096,256]{1,0:S(1)} parameter(0)
  i = s32[8192]{0:S(1)} parameter(1)
  ROOT g = bf16[8192,256]{1,0:S(1)} gather(x, i), offset_dims={1}, collapsed_slice_dims={0},
    start_index_map={0}, index_vector_dim=1, slice_sizes={1,256} }
sum { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
put { y = f32[4096,256]{1,0:S(1)} parameter(0)
  i = s32[8192]{0:S(1)} parameter(1)
  u = f32[8192,256]{1,0:S(1)} parameter(2)
  ROOT p = f32[4096,256]{1,0:S(1)} scatter(y, i, u), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=sum }
scale { y = f32[4096,256]{1,0:S(1)} parameter(0)
  i = s32[8192]{0:S(1)} parameter(1)
  u = f32[8192,256]{1,0:S(1)} parameter(2)
  ROOT q = f32[4096,256]{1,0:S(1)} fusion(y, i, u), kind=kCustom, calls=put }
ENTRY e {
  x = bf16[4096,256]{1,0:S(1)} parameter(0)
  i = s32[8192]{0:S(1)} parameter(1)
  j = s32[8192]{0:S(1)} parameter(2)
  s = (s32[8192]{0:S(1)}, s32[8192]{0:S(1)}) sort(i, j), dimensions={0}, to_apply=less
  f = bf16[8192,256]{1,0:S(1)} fusion(x, i), kind=kCustom, calls=take
  y = f32[4096,256]{1,0:S(1)} parameter(3)
  u = f32[8192,256]{1,0:S(1)} parameter(4)
  ROOT t = f32[4096,256]{1,0:S(1)} fusion(y, i, u), kind=kCustom, calls=scale
}
"""
    chip = known_chips()["v5e"]
    instructions, model = parse_module(text).instructions, OpCostModel(chip)
    assert model.cost(instructions["s"]).duration_s == pytest.approx(sort_seconds(8192.0, chip))
    assert model.cost(instructions["f"]).duration_s == pytest.approx(gather_seconds(8192.0, 256.0, 2, chip))
    assert model.cost(instructions["t"]).duration_s == pytest.approx(gather_seconds(8192.0, 256.0, 2, chip))


def test_seconds_of_sorts_and_gathers_are_those_of_compiled_loops_and_a_profile():
    """The measured figures are in `assumptions.GATHER_TILE_S` and `assumptions.SORT_STEP_CYCLES`."""
    v5e, v5p = known_chips()["v5e"], known_chips()["v5p"]
    assert sort_seconds(16384.0, v5e) == pytest.approx(10_590 / 1.5e9, rel=0.05)
    assert gather_seconds(40960.0, 2048.0, 2, v5p) == pytest.approx(1.5e-3, rel=0.15)


def test_a_fusion_with_a_small_gather_still_takes_the_time_of_its_traffic():
    text = """HloModule m, is_scheduled=true
mixed { x = bf16[4096,256]{1,0} parameter(0)
  i = s32[8]{0} parameter(1)
  y = bf16[1048576,1024]{1,0} parameter(2)
  g = bf16[8,256]{1,0} gather(x, i), offset_dims={1}, collapsed_slice_dims={0},
    start_index_map={0}, index_vector_dim=1, slice_sizes={1,256}
  n = bf16[1048576,1024]{1,0} negate(y)
  ROOT t = (bf16[8,256]{1,0}, bf16[1048576,1024]{1,0}) tuple(g, n) }
ENTRY e {
  x = bf16[4096,256]{1,0} parameter(0)
  i = s32[8]{0} parameter(1)
  y = bf16[1048576,1024]{1,0} parameter(2)
  ROOT f = (bf16[8,256]{1,0}, bf16[1048576,1024]{1,0}) fusion(x, i, y), kind=kLoop, calls=mixed
}
"""
    chip = known_chips()["v5e"]
    seconds = OpCostModel(chip).cost(parse_module(text).instructions["f"]).duration_s
    assert seconds > 2 * 2 * 1048576 * 1024 / 819e9
