"""Tests of predictions for any JAX program, dumped or jitted, and of the messages for invalid input."""

from __future__ import annotations

import gzip
import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import valkyrie
from machines import needs_libtpu
from valkyrie.cli.predict import main, parse_mesh_axes
from valkyrie.compiled.collectives import CollectiveUse
from valkyrie.compiled.dumped import read_dumped_module
from valkyrie.compiled.schema import dump_class
from valkyrie.hardware.position import Position
from valkyrie.machine.replay import OpTotals
from valkyrie.parts import PartKind
from valkyrie.paths import DiskError
from valkyrie.search.compile.executable import device_positions, without_cache
from valkyrie.search.compile.layers import merge_layers
from valkyrie.search.compile.prediction import CompileStatus, MemoryReport
from valkyrie.search.programs import describe_error
from valkyrie.train.program import serialised_module

TILED = "bf16[4096,4096]{1,0:T(8,128)(2,1)}"
STEP = f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{({TILED})->{TILED}}}, num_partitions=8

add {{
  a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT c = bf16[] add(a, b)
}}

ENTRY main {{
  p = {TILED} parameter(0)
  r = {TILED} all-reduce(p), channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=add, METADATA
  k = {TILED} custom-call(r), custom_call_target="OtherKernel", METADATA
  ROOT d = {TILED} dot(r, k), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, METADATA, CYCLES
}}
"""
STEP = STEP.replace("METADATA", 'metadata={op_name="jit(step)/dot" source_file="their/step.py" source_line=7}')
STEP = STEP.replace("CYCLES", 'backend_config={"estimated_cycles":"1200000"}')
MESH = {"data": 2, "model": 4}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    (tmp_path / "step.hlo").write_text(STEP)
    return tmp_path / "step.hlo"


def refusal(path: Path, content: str | bytes, slice: str = "v5e-8", **more: Any) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError) as error:
        valkyrie.predict(path, slice=valkyrie.slice(slice), **{"mesh": MESH, **more})
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_dumped_module_has_the_same_report_as_our_step(step: Path, tmp_path: Path):
    prediction = valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=MESH, tokens=1000)
    record = prediction.record
    parts = {(part.kind, part.mesh_axes): part.seconds for part in record.parts}
    assert prediction.step_s == pytest.approx(sum(parts.values()))
    waited, replay_ratio = parts[PartKind.exposed, ("model",)], record.step.replayed_s / record.step.step_s
    assert parts[PartKind.matmul, ()] * replay_ratio == pytest.approx(1.2e6 / 1.5e9)
    assert waited > 1e-4
    assert prediction.tokens_per_second == pytest.approx(1000 / prediction.step_s) and prediction.mfu is None
    assert record.lines[0].source == "their/step.py:7"
    assert record.lines[0].waiting_s == pytest.approx(waited)
    text = str(prediction)
    for part in ("step on v5e-8 ", "data=2 · model=4", "their/step.py:7", "predicted step"):
        assert part in text, part
    assert "call OtherKernel" in text
    assert "arguments need" in text and prediction.fits is None
    events = json.loads(prediction.timeline(tmp_path / "t.json").read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(1e6 * prediction.step_s, rel=1e-3)
    page = prediction.html(tmp_path / "r.html").read_text()
    assert "<svg" in page and "their/step.py:7" in page and "http" not in page
    assert {"where the step time goes", "communication by cause"} <= set(re.findall("<h2>(.*?)</h2>", page))
    assert "<li><i " in page and "<dt>waiting for communication</dt>" in page
    assert prediction._repr_html_().startswith("<iframe srcdoc=") and len(repr(prediction)) < 80


def test_a_proto_predicts_like_text_and_with_buffers_whether_it_fits(step: Path, tmp_path: Path):
    message = dump_class()()
    proto = parse_to_proto(STEP)
    message.module.ParseFromString(proto)
    for size, kind in ((2**30, "argument"), (3 * 2**30, ""), (2**28, "output")):
        entry = message.memory.allocations.add(size=size)
        if kind:
            setattr(entry, kind, True)
    (tmp_path / "step.hlo.pb").write_bytes(message.SerializeToString())
    (tmp_path / "alone.pb").write_bytes(proto)
    slice = valkyrie.slice("v5e-8")
    text, buffers, alone = (
        valkyrie.predict(tmp_path / name, slice=slice, mesh=MESH) for name in ("step.hlo", "step.hlo.pb", "alone.pb")
    )
    assert text.step_s == buffers.step_s == alone.step_s
    assert buffers.peak_gib == 4.25 and buffers.fits and "fits: 4.2 GiB" in str(buffers)
    message.memory.allocations.add(size=20 * 2**30)
    (tmp_path / "large.hlo.pb").write_bytes(message.SerializeToString())
    large = valkyrie.predict(tmp_path / "large.hlo.pb", slice=slice, mesh=MESH)
    assert large.fits is False and "needs 24.2 GiB" in str(large)


def parse_to_proto(text: str) -> bytes:
    """Parse HLO text and return the module as a serialised `HloModuleProto`."""
    import importlib

    return importlib.import_module("jaxlib._hlo").hlo_module_from_text(text).as_serialized_hlo_module_proto()


def test_a_file_that_is_not_a_module_is_refused_in_one_line(tmp_path: Path):
    file = tmp_path / "step.hlo"
    proto = parse_to_proto(STEP)
    assert "step.hlo is empty" in refusal(file, " \n")
    assert "not HLO text" in refusal(file, STEP[: STEP.index("lhs_contracting")])
    for cut, missing in (
        (STEP[: STEP.index("ENTRY")], "no ENTRY "),
        (STEP[: STEP.index("ROOT d")] + "\n}\n", "no ROOT"),
    ):
        message = refusal(file, cut)
        assert "step.hlo is incomplete" in message and missing in message
    assert f"iconv -f UTF-16 -t UTF-8 {file}." in refusal(file, STEP.encode("utf-16"))
    message = refusal(file, gzip.compress(proto))
    assert "step.hlo " in message and "gunzip" in message
    file.write_text(STEP, encoding="utf-8-sig")
    assert read_dumped_module(file).device_count == 8
    damaged = refusal(file, STEP.replace("all-reduce(p)", "all-redu(p)"))
    assert "expects opcode but sees: all-redu" in damaged and "--xla_dump_to=" in damaged
    assert "complete HloProto" in refusal(file, proto[: len(proto) // 2])
    assert "cannot be read as HLO text" in refusal(file, b"\x00\x01\x02" * 50)
    assert "is StableHLO" in refusal(file, "module @jit_step {}\n")
    assert "is not scheduled" in refusal(file, STEP.replace(", is_scheduled=true", ""))
    assert "8 replicas" in refusal(file, STEP.replace("num_partitions=8", "replica_count=8"))
    assert "compiled for GPUs, but v5e-8 " in refusal(file, STEP.replace("OtherKernel", "__cublas$gemm"))
    with pytest.raises(ValueError, match="does not exist"):
        read_dumped_module(tmp_path / "no.hlo")
    with pytest.raises(ValueError, match="is a folder"):
        read_dumped_module(tmp_path)


def test_a_module_for_cpus_is_refused(tmp_path: Path):
    compiled = jax.jit(lambda x: x @ x).lower(jnp.zeros((8, 8))).compile()
    for slice in ("v5e-1", "h100-1"):
        assert "for neither a TPU nor a GPU" in refusal(
            tmp_path / "cpu.pb", serialised_module(compiled), slice, mesh={"data": 1}
        )


def test_a_module_for_another_chip_or_device_count_is_refused(step: Path):
    assert "8 devices, but v5e-4" in refusal(step, STEP, "v5e-4", mesh={"data": 4})
    assert "4 devices, but v5e-8" in refusal(step, STEP, mesh={"a": 2, "b": 2})
    assert "but on v4" in refusal(step, STEP, "v4-16")
    fast = STEP.replace('"1200000"', '"300000"')
    assert "3.5 times" in refusal(step, fast)
    cmem = STEP.replace("k = bf16[4096,4096]{1,0:T(8,128)(2,1)}", "k = bf16[4096,4096]{1,0:T(8,128)(2,1)S(3)}")
    assert "in CMEM" in refusal(step, cmem)
    split = STEP.replace('"estimated_cycles"', '"megacore_config":{},"estimated_cycles"')
    assert "over two cores" in refusal(step, split)
    step.write_text(STEP)
    prediction = valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=MESH)
    assert "does not record its chip" in prediction.record.notes[-1]
    assert "was compiled for v5e" in str(prediction)
    slow = valkyrie.predict(step, slice=valkyrie.slice("v6e-8"), mesh=MESH)
    assert any("for this chip" in note for note in slow.record.notes)


def test_places_must_be_all_devices_of_the_slice(step: Path):
    slice = valkyrie.slice("v5e-8")
    places = valkyrie.predict(step, slice=slice, mesh=MESH).record.positions
    turned = valkyrie.predict(step, slice=slice, mesh=MESH, places=places[::-1])
    assert turned.record.positions == places[::-1]
    repeated = refusal(step, STEP, places=[places[0]] * 8)
    assert f"places: {places[0]} is listed 8 times; missing: 0:" in repeated and ", .... List each of the 8" in repeated
    assert f"places: missing: {places[-1]}. List each" in refusal(step, STEP, places=places[:-1])
    assert f"places: {places[0]} is listed 2 times. List each" in refusal(step, STEP, places=[*places, places[0]])
    assert "places: missing: 0:0,0,0:0, " in refusal(step, STEP, places=[])
    foreign_position = replace(places[0], slice_index=1)
    assert f"places has {foreign_position}, which is not a device of v5e-8" in refusal(
        step, STEP, places=[foreign_position, *places[1:]]
    )
    assert places[1] == Position.parse(str(places[1]))
    for wrong in ("places.json", [str(places[0])]):
        with pytest.raises(TypeError, match="places= takes a list of positions"):
            valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=MESH, places=wrong)
    for mesh in ("data=2,model=4", (2, 4), 8):
        with pytest.raises(TypeError, match=r'mesh= .*\{"data": 2, "model": 4\}'):
            valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=mesh)
    with pytest.raises(TypeError, match=r"2 x 4\.0: .* 4\.0\b"):
        valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh={"data": 2, "model": 4.0})
    with pytest.raises(ValueError, match="not a device"):
        Position.parse("0,0")


def test_the_command_prints_the_report_and_refuses_in_one_line(step: Path, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as error:
            main([str(step), *arguments])
        return error.value.code, *capsys.readouterr()

    overrides = ("--target", "v5e-8", "--mesh", "data=2,model=4")
    status, out, err = run(*overrides, "--json", str(step.with_name("r.json")), "--html", str(step.with_name("r.html")))
    assert (status, err) == (0, "") and "predicted step" in out
    assert json.loads(step.with_name("r.json").read_text())["program"]["axes"] == MESH
    status, _, err = run("--target", "v5e-8", "--mesh", "8")
    assert status == 2 and err.startswith("valkyrie-predict: --mesh 8: ")
    for more, start in (
        (("--time-limit", "5"), "--time-limit 5: "),
        (("--places", '["0:0,0,0:0"]'), '--places ["0:0,0,0:0"]: write the list to a file'),
    ):
        status, _, err = run(*overrides, *more)
        assert status == 2 and err.startswith(f"valkyrie-predict: {start}") and err.count("\n") == 1
    out = run(*overrides, "--flops", "1e30")[1]
    assert "% of 197 TFLOP/s " in out and "(more than 100%: " in out
    assert run("--target", "v5e-7", "--mesh", "data=7")[0] == 2
    assert parse_mesh_axes("data=8, model=4") == {"data": 8, "model": 4}


BUILDERS = """
import helper_of_the_step

def step(slice):
    return helper_of_the_step.jitted, (slice.name,), {"scale": 2}

def without_slice():
    return helper_of_the_step.jitted, ()

def failing(slice):
    raise KeyError("weights")

def value_error(slice):
    raise ValueError("no such layer")

def wrong():
    return helper_of_the_step.jitted

def unjitted():
    return len, ()

def two(a, b):
    return a, b

def pmapped():
    import jax
    return jax.pmap(abs), ()

def exiting():
    raise SystemExit

def with_options(slice, *more, **options):
    return step(slice)

def stopped():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ImportError("x") from error

def untraceable():
    return helper_of_the_step.untraceable, ()

without_signature = dict
"""


def test_the_command_predicts_a_function_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: Path
):
    result = valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=MESH)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr("valkyrie.api.predict", lambda *words, **more: calls.append((words, more)) or result)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    (tmp_path / "builders.py").write_text(BUILDERS)
    (tmp_path / "helper_of_the_step.py").write_text(
        "import jax\n\n@jax.jit\ndef jitted(name=None, scale=1):\n    pass\n\n"
        "@jax.jit\ndef untraceable():\n    raise ValueError('no such layer')\n"
    )
    (tmp_path / "damaged.py").write_text("import no_such_library\n")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "stopped.py").write_text(
        "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt as error:\n    raise ImportError('x') from error\n"
    )
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "optax.py").touch()
    (tmp_path / "below" / "step.py").write_text("import optax\noptax.adam\n")
    (tmp_path / "beside" / "flax").mkdir(parents=True)
    (tmp_path / "beside" / "flax" / "__init__.py").touch()
    (tmp_path / "beside" / "step.py").write_text("import no_such_library\n")
    monkeypatch.delitem(sys.modules, "optax", raising=False)

    def run(name: str, *more: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as error:
            main([str(tmp_path / name), "--target", "v5e-8", *more])
        return error.value.code, capsys.readouterr().err

    assert run("builders.py:step", "--tokens", "512", "--unit", "images", "--time-limit", "60") == (0, "")
    (function, name), settings = calls[0]
    assert (function.__name__, name, settings["scale"], settings["name"]) == ("jitted", "v5e-8", 2, "jitted")
    assert (settings["tokens"], settings["unit"], settings["time_limit_s"]) == (512, "images", 60)
    assert run("builders.py:without_slice") == (0, "") and len(calls[1][0]) == 1
    assert run("builders.py:with_options") == (0, "") and calls.pop()[0][1:] == ("v5e-8",)
    for place in ("stopped.py:step", "builders.py:stopped"):
        assert run(place) == (130, "valkyrie-predict: stopped\n")
    for argument, message in (
        ("builders.py", "name the function that returns the step and its arguments: "),
        ("builders.py:nope", "nope. Use step, without_slice, failing, "),
        ("builders.py:failing", "builders.py:failing: KeyError: 'weights' (builders.py:11)"),
        ("builders.py:value_error", "builders.py:value_error: no such layer (builders.py:14)"),
        ("builders.py:wrong", "must return (jitted, arguments) or (jitted, arguments, keywords)"),
        ("builders.py:unjitted", "builders.py:unjitted must return a jitted function"),
        ("builders.py:pmapped", "builders.py:pmapped returns a jax.pmap"),
        ("below/step.py:step", f". {tmp_path}/below/optax.py hides the package optax"),
        ("beside/step.py:step", f". {tmp_path}/beside/flax/__init__.py hides the package flax"),
        ("builders.py:two", "builders.py:two requires the arguments a, b"),
        ("builders.py:without_signature", "builders.py:without_signature must return (jitted, arguments)"),
        ("damaged.py:step", "cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
        ("ends.py:step", "ends.py ended while it was imported (sys.exit(0))"),
        ("builders.py:exiting", "builders.py:exiting ended the process (sys.exit())"),
        ("missing.py:step", "missing.py: no such file or directory."),
        ("folder.py:step", "folder.py: is a directory."),
        ("step.hlo:step", "step.hlo is not a Python file"),
        ("builders:step", "write the name of the file in full: "),
        ("missing.hlo", "missing.hlo: no such file or directory."),
        ("step.hlo", "--mesh: name the mesh axes of a compiled module in order"),
    ):
        status, err = run(argument)
        assert status == 2 and message in err and err.count("\n") == 1, (argument, err)
    assert len(calls) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-builders.py").write_text(BUILDERS)
    with pytest.raises(SystemExit) as error:
        main(["--target", "v5e-8", "--", "-builders.py:without_slice"])
    assert error.value.code == 0 and len(calls) == 3
    status, err = run("builders.py:step", "--quiet")
    assert status == 2 and err.startswith("valkyrie-predict: --quiet ") and "--help" in err
    memory = MemoryReport(needed=3 * 2**30, usable=2**30)
    result = valkyrie.Result(replace(result.record, status=CompileStatus.does_not_fit, step=None, memory=memory))
    page = tmp_path / "big.html"
    with monkeypatch.context() as patch:
        patch.setattr("valkyrie.api.predict", lambda function, **settings: function.lower())
        message = "builders.py:untraceable: no such layer (helper_of_the_step.py:9)\n"
        assert run("builders.py:untraceable") == (2, f"valkyrie-predict: {tmp_path}/{message}")
    with pytest.raises(SystemExit) as error:
        main(
            [
                str(tmp_path / "builders.py:step"),
                "--target",
                "v5e-8",
                "--timeline",
                str(tmp_path / "t.json"),
                "--html",
                str(page),
            ]
        )
    assert error.value.code == 3 and page.is_file() and not (tmp_path / "t.json").exists()
    assert "no timeline" in capsys.readouterr().out


def test_mesh_axes_in_the_wrong_order_are_noted(step: Path):
    for mesh, remedy in (
        ({"model": 4, "data": 2}, "Use the order data=2,model=4"),
        ({"data": 8}, "Check the names and sizes of the axes"),
        ({f"a{i}": 1 for i in range(10)} | {"data": 8}, "Check the names and sizes of the axes"),
        (MESH, None),
        ({"a": 2, "b": 2, "c": 2}, None),
    ):
        notes = valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=mesh).record.notes
        axes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        expected = [f"the mesh {axes} does not match some collectives of the module. {remedy}"] if remedy else []
        assert [note for note in notes if note.startswith("the mesh ")] == expected


@needs_libtpu
def test_running_a_program_on_devices_of_the_slice_is_explained():
    device = valkyrie.slice("v5e-8").mesh((8,), ("data",)).devices.flat[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    for run in (jax.jit(lambda: 0.0, out_shardings=sharding), lambda: jax.device_put(0.0, device)):
        with without_cache(), pytest.raises((AttributeError, RuntimeError)) as error:
            run()
        text = describe_error(error.value)
        assert re.match(r"test_predict\.py:\d+ .*only for compiling", text) and "jax.ShapeDtypeStruct" in text


def test_outputs_that_cannot_be_written_are_named(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = (str(step), "--target", "v5e-8", "--mesh", "data=2,model=4")
    (folder := tmp_path / "folder.html").mkdir()
    (tmp_path / "folder.json").mkdir()
    outputs = [(folder, "is a directory")]
    if (full := Path("/dev/full")).exists():  # only Linux has it
        outputs.append((full, "no space left on device"))
    for path, reason in outputs:
        with pytest.raises(SystemExit) as error:
            main([*arguments, "--html", str(path)])
        assert error.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith(f"valkyrie-predict: {path} cannot be written ({reason}). ") and "another path" in err
    prediction = valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=MESH)
    for write, suffix in ((prediction.html, ".html"), (prediction.timeline, ".json")):
        with pytest.raises(DiskError, match="cannot be written"):
            write(folder.with_suffix(suffix))
        with pytest.raises(ValueError, match=rf"mine\.py: .*\{suffix}"):
            write(tmp_path / "mine.py")
        with pytest.raises(ValueError, match=rf"mine{suffix}\.gz: .* such as mine{suffix}\.$"):
            write(tmp_path / f"mine{suffix}.gz")


HOST = """  t = token[] after-all()
  s = (bf16[4096,4096]{1,0:T(8,128)(2,1)}, u32[], token[]) send(p, t), channel_id=9, is_host_transfer=true
  e = token[] send-done(s), channel_id=9, is_host_transfer=true
"""
RAGGED = """  o = s32[4]{0:T(128)} constant({0,1,2,3})
  g = TILED ragged-all-to-all(p, p, o, o, o, o), channel_id=8, replica_groups=[2,4]<=[8]
"""


@pytest.mark.parametrize(
    ("added", "note"),
    [
        (HOST, "messages to the host, such as callbacks"),
        (RAGGED, "a ragged-all-to-all is assumed to send its whole operand"),
    ],
)
def test_notes_name_unsupported_parts_of_foreign_programs(step: Path, added: str, note: str):
    step.write_text(STEP.replace("  ROOT d", added.replace("TILED", TILED) + "  ROOT d"))
    prediction = valkyrie.predict(step, slice=valkyrie.slice("v5e-8"), mesh=MESH)
    assert any(line.startswith(note) for line in prediction.record.notes), prediction.record.notes


def test_objects_that_are_not_programs_are_refused(tmp_path: Path):
    (tmp_path / "step.hlo").touch()
    slice = valkyrie.slice("v5e-4")
    with pytest.raises(TypeError, match="jitted function, .*<built-in function len>"):
        valkyrie.predict(len, slice=slice)
    for program, more, words in (
        (jax.jit(jnp.sin), {}, "Name the slice"),
        (tmp_path / "step.hlo", {"slice": slice}, "mesh axes"),
        (tmp_path / "nothing.hlo", {"slice": slice}, "nothing.hlo does not exist"),
    ):
        with pytest.raises(ValueError, match=words):
            valkyrie.predict(program, **more)
    with pytest.raises(ValueError, match="Leave out slice"):
        valkyrie.predict(valkyrie.compose("model=gpt_tiny", "mesh=2x2x2"), slice=slice)
    for shape, names, words in (
        ((4, 4), ("a", "b"), "has 16 devices, but v5e-4 .* or v5e-16"),
        ((4,), ("a", "b"), r"a mesh of 4 needs 1 axis name, not \(a, b\)"),
        ((2, 2), ("a", "a"), r"a mesh of 2 x 2 needs 2 different axis names, not \(a, a\)"),
        ((), (), "at least one axis"),
        ((2, 0), ("a", "b"), "at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            slice.mesh(shape, names)
    with pytest.raises(ValueError, match="has no compiler"):
        valkyrie.slice("cpu8").mesh((8,), ("a",))


def test_values_mistaken_for_programs_are_refused():
    target, step = valkyrie.slice("v5e-8"), jax.jit(lambda x: x @ x)
    lowered = step.lower(jnp.zeros((8, 8)))
    text = lowered.compile().as_text()
    for program, kind, reason in (
        (text, ValueError, "text of a module"),
        (text.encode(), TypeError, "not a bytes"),
        ([step], TypeError, "not a list"),
        ("model=gpt_tiny", ValueError, "Compose a run first"),
    ):
        with pytest.raises(kind, match=reason):
            valkyrie.predict(program, slice=target, mesh={"data": 8})
    with pytest.raises(ValueError, match=r"^nothere\.hlo "):
        valkyrie.predict("nothere.hlo", slice=target)
    unset: dict[str, Any] = {field.name: None for field in fields(valkyrie.FoundLayout)}
    best = valkyrie.FoundLayout(**unset)
    with pytest.raises(TypeError, match=r"answer\.run\(row\)"):
        valkyrie.predict(best)
    with pytest.raises(ValueError, match="takes no arguments of the function"):
        valkyrie.predict(lowered, jnp.zeros((16, 16)), slice=target)
    with pytest.raises(ValueError, match="has no compiler"):
        valkyrie.predict(step, jnp.zeros((8, 8)), slice=valkyrie.slice("cpu4"))


def test_a_function_on_this_machines_devices_is_refused():
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    with pytest.raises(ValueError, match="cpu devices"):
        valkyrie.predict(jax.jit(jnp.sin), x, slice=valkyrie.slice("v5e-8"))
    with pytest.raises(ValueError, match="no argument"):
        valkyrie.predict(jax.jit(jnp.sin), jnp.zeros(8), slice=valkyrie.slice("v5e-8"))


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "shape"),
    [("v4-64", (8, 4)), ("v5e-8", (2, 4)), ("v6e-16", (4, 4)), ("tpu7x-16", (4, 4)), ("v3-32", (8, 4))],
)
def test_places_without_libtpu_equal_those_of_its_devices(name: str, shape: tuple[int, ...]):
    slice = valkyrie.slice(name)
    mesh = slice.mesh(shape, ("a", "b"))
    assert device_positions(mesh) == slice.positions(shape, ("a", "b"))


@needs_libtpu
@pytest.mark.slow  # two small compiles for a TPU
@pytest.mark.timeout(300)
def test_a_jitted_function_is_predicted_unchanged(tmp_path: Path):
    slice = valkyrie.slice("v5e-8")
    mesh = slice.mesh((2, 4), ("data", "model"))
    w = jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data", "model")))
    x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w) @ w.T

    jitted_step = jax.jit(step)
    prediction = valkyrie.predict(jitted_step, w, x, slice=slice, options={"xla_tpu_scoped_vmem_limit_kib": 32768})
    assert prediction.fits and prediction.record.program.name == "step"
    assert prediction.record.memory.split["arguments"] == 2048 * 8192 * 2 // 8 + 4096 * 2048 * 2 // 2
    assert {"data", "model"} & {axis for use in prediction.replay.collectives for axis in use.mesh_axes}
    assert "test_predict.py" in prediction.record.lines[0].source
    assert "jax.nn.relu(x @ w)" in str(prediction) and "xla_tpu_scoped_vmem_limit_kib=32768 (you)" in str(prediction)
    with without_cache():
        compiled = jitted_step.lower(w, x).compile()
    whole = valkyrie.predict(compiled, slice=slice)
    (tmp_path / "step.hlo").write_text(compiled.as_text())
    dumped = valkyrie.predict(tmp_path / "step.hlo", slice=slice, mesh=dict(mesh.shape))
    assert dumped.step_s == pytest.approx(whole.step_s, rel=1e-9)
    with pytest.raises(ValueError, match="has no such option"):
        valkyrie.predict(jitted_step, w, x, slice=slice, options={"xla_no_such_option": 1})
    with pytest.raises(ValueError, match="8 devices, but v5e-16"):
        valkyrie.predict(compiled, slice=valkyrie.slice("v5e-16"))
    with pytest.raises(ValueError, match="v5 lite devices"):
        valkyrie.predict(compiled, slice=valkyrie.slice("v6e-8"))
    large = jax.ShapeDtypeStruct((2**21, 16384), jnp.bfloat16, sharding=x.sharding)
    misfit = valkyrie.predict(jax.jit(lambda x: x * 2), large, slice=slice)
    assert misfit.fits is False and str(misfit).count("fit: needs") == 1


def test_operations_of_unrolled_layers_share_a_row():
    names = [f"jit(step)/blocks_{i}/Dense_{j}/dot_general" for i in range(4) for j in range(2)]
    costs = [OpTotals(PartKind.matmul, (), name, "model.py:7", calls=1.0, seconds=0.5) for name in [*names, "head/dot"]]
    merged = {cost.op_name: (cost.calls, cost.seconds) for cost in merge_layers(costs)}
    layers = {f"jit(step)/blocks_*/Dense_{j}/dot_general": (4.0, 2.0) for j in range(2)}
    assert merged == {**layers, "head/dot": (1.0, 0.5)}
    sent = [CollectiveUse("all-reduce", ("x",), (), name, "model.py:7", 1.0, 8.0, {"a": 8.0}) for name in names]
    assert [use.bytes_by_torus_axis for use in merge_layers(sent)] == [{"a": 32.0}, {"a": 32.0}]
    assert {cost.op_name for cost in merge_layers(costs[:4])} == {*names[:4]}, "two layers stay apart"
