"""Tests of explaining why a function does not fit: its largest arguments, and what would help."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.compiled.hlo import Shape, parse_module
from valkyrie.compiled.whole import Argument, UnpartitionedProgram
from valkyrie.foreign_errors import Allocation
from valkyrie.report.program import program_page
from valkyrie.results import Result
from valkyrie.search.compile.prediction import CompileStatus, ForeignProgram, MemoryReport, Prediction
from valkyrie.search.compile.shortage import ListedArgument, explain_shortage, list_arguments, list_results
from valkyrie.units import GIB

ARGUMENTS = [
    ListedArgument("params['w']", "f32[30,8192,8192]", 8 * GIB, {"data": 2, "model": 4}),
    ListedArgument("x", "bf16[131072,8192]", GIB, {"model": 4}),
    ListedArgument("b", "f32[8192]", 2**15, {"data": 2, "model": 4}),
]


def test_arguments_are_listed_with_the_axes_that_do_not_shard_them():
    mesh = jax.make_mesh((2, 4), ("data", "model"))

    def struct(*spec: str | tuple[str, ...] | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((64, 128), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def step(params: dict[str, jax.Array], unused: jax.Array, x: jax.Array) -> jax.Array:
        return x @ params["w"].T + params["v"].sum()

    parameters = {"w": struct(), "v": struct(("data", "model"))}
    lowered = jax.jit(step).lower(parameters, struct(), struct(None, "model"))
    arguments = list_arguments(UnpartitionedProgram.from_lowered(lowered), mesh.shape)
    assert [(each.name, each.shape, each.bytes) for each in arguments] == [
        ("params['w']", "bf16[64,128]", 2 * 64 * 128),
        ("x", "bf16[64,128]", 2 * 64 * 32),
        ("params['v']", "bf16[64,128]", 2 * 64 * 16),
    ]
    assert [each.replicated_over for each in arguments] == [{"data": 2, "model": 4}, {"data": 2}, {}]
    assert arguments[0].savable_bytes == 7 * arguments[0].bytes / 8
    unsharded = UnpartitionedProgram.from_lowered(jax.jit(lambda x: x).lower(jnp.zeros(8)))
    assert list_arguments(unsharded, mesh.shape) == []


def test_uneven_arguments_and_parts_of_axes_have_the_bytes_of_the_largest_shard():
    whole = UnpartitionedProgram.from_lowered(jax.jit(lambda x: x).lower(jnp.zeros(8)))
    shape, part, rest = Shape("bf16", (9, 128), 16), ("data", 2), ("data", None)
    whole.arguments = tuple(Argument("x", shape, ((axis,), ()), False) for axis in (part, rest))
    arguments = list_arguments(whole, {"data": 4, "model": 2})
    assert [(each.bytes, each.replicated_over) for each in arguments] == [
        (2 * 5 * 128, {"data": 2, "model": 2}),
        (2 * 3 * 128, {"model": 2}),
    ]


def test_hints_name_replicated_arguments_and_temporaries():
    memory = MemoryReport(needed=20 * GIB, usable=16 * GIB)
    explained, hints = explain_shortage(memory, ARGUMENTS)
    assert [(entry.bytes, entry.shape) for entry in explained.largest] == [
        (8 * GIB, "argument params['w'] f32[30,8192,8192]"),
        (GIB, "argument x bf16[131072,8192]"),
    ]
    of_arguments, of_temporaries = (hint.text for hint in hints)
    assert all(part in of_arguments for part in ("params['w'] (8.0 GiB, ", " data and model)", "x (1.0 GiB, "))
    assert "7.8 GiB" in of_arguments and "enough to fit" in of_arguments
    assert "11.0 GiB" in of_temporaries and "jax.checkpoint" in of_temporaries
    _, hints = explain_shortage(replace(memory, needed=47 * GIB), ARGUMENTS[:1])
    assert "7.0 GiB" in hints[0].text and "23%" in hints[0].text and "enough to fit" not in hints[0].text
    _, hints = explain_shortage(
        replace(memory, needed=17 * GIB), [replace(ARGUMENTS[0], bytes=17 * GIB, replicated_over={})]
    )
    assert hints == []
    assert len(explain_shortage(memory, ARGUMENTS, hint_replicated=False)[1]) == 1
    listed = replace(memory, largest=(Allocation(GIB, "f32[8]", "jit(step)/dot", "a.py:3"),))
    assert explain_shortage(listed, ARGUMENTS)[0] == listed


MODULE = """HloModule jit_step, is_scheduled=true

body {
  c = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  g = f32[8,128]{1,0:T(8,128)} get-tuple-element(c), index=1
  d = f32[8,128]{1,0:T(8,128)} negate(g), metadata={op_name="jit(step)/neg" source_file="a.py" source_line=3}
  e = f32[8,128]{1,0:T(8,128)} negate(d), metadata={op_name="jit(step)/neg" source_file="a.py" source_line=3}
  i = s32[] get-tuple-element(c), index=0
  ROOT t = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(i, e)
}

cond {
  c = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  ROOT p = pred[] constant(false)
}

ENTRY main {
  p = f32[4,128]{1,0:T(8,128)} parameter(0)
  v = f32[64,128]{1,0:T(8,128)S(1)} custom-call(p), custom_call_target="AllocateBuffer"
  b = f32[4,128]{1,0:T(8,128)} negate(p), metadata={op_name="jit(step)/b" source_file="a.py" source_line=2}
  z = s32[] constant(0)
  i = f32[8,128]{1,0:T(8,128)} concatenate(b, b), dimensions={0}
  a = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(z, i)
  ROOT w = (s32[], f32[8,128]{1,0:T(8,128)}) while(a), condition=cond, body=body
}
"""


def test_results_of_loops_are_listed_with_their_padded_size():
    entries = list_results(parse_module(MODULE))
    assert {entry.shape for entry in entries} == {"f32[8,128]", "f32[4,128]"}, "the array in VMEM is left out"
    assert Allocation(4096, "f32[4,128]", "jit(step)/b", "a.py:2") in entries
    assert entries.count(Allocation(4096, "f32[8,128]", "jit(step)/neg", "a.py:3")) == 1
    memory, _ = explain_shortage(MemoryReport(needed=8192, usable=4096), [], entries)
    assert len(memory.largest) == 3 and all(entry.bytes == 4096 for entry in memory.largest)


def test_a_report_lists_allocations_with_their_sources():
    memory = MemoryReport(
        needed=20 * GIB,
        usable=16 * GIB,
        largest=(
            Allocation(12 * GIB, "bf16[24,64]", "jit(step)/while/body/f/dot", "their/step.py:7"),
            *[Allocation(GIB, "f32[8]", "f/add", "their/step.py:9")] * 3,  # of equal layers
        ),
    )
    program = ForeignProgram("step", "v5e-8", "v5e-8 (8 chips)", "v5e", {"data": 8})
    _, hints = explain_shortage(memory, ARGUMENTS)
    record = Prediction(
        None, CompileStatus.does_not_fit, "too large", memory=memory, program=program, hints=tuple(hints)
    )
    lines = [line.rstrip() for line in str(Result(record)).splitlines()]
    assert any(re.match(r"does not fit: .*\b20\.0 GiB .*\b16\.0 GiB\b", line) for line in lines)
    assert "the largest arrays on a device" in lines
    assert [line.split() for line in lines if "their/step.py" in line] == [
        ["12.00", "1", "bf16[24,64]", "f/dot", "their/step.py:7"],
        ["1.00", "3", "f32[8]", "f/add", "their/step.py:9"],
    ]
    assert any(line.startswith("hint: shard params['w']") for line in lines)
    page = program_page(record, "step", [])
    assert "What to change" in page and "their/step.py:7" in page
