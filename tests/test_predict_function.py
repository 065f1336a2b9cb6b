"""Tests of compiling any JAX function in a child process: the same module, failures, interrupts and the cache."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import valkyrie
import valkyrie.train.options as train_options
from machines import needs_libtpu
from valkyrie.search.compile import lowered as lowered_programs
from valkyrie.search.compile import predict
from valkyrie.search.compile.executable import without_cache
from valkyrie.search.compile.lowered import (
    LOCATIONS_FILE,
    StoredProgram,
    capture_program,
    compile_program,
    has_slice_devices,
    split_locations,
)
from valkyrie.search.compile.predict import predict_function
from valkyrie.search.compile.program_child import compile_request
from valkyrie.train.program import serialised_module

pytestmark = needs_libtpu
PAGE = (Path(__file__).parents[1] / "valkyrie" / "search" / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.split("## Predict any JAX program")[1], re.DOTALL)
ProgramBuilder = Callable[[Mesh], tuple[Any, tuple[Any, ...]]]


def struct(mesh: Mesh, shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def products(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w) @ w.T

    return jax.jit(step), (struct(mesh, (512, 1024), "data", "model"), struct(mesh, (256, 512), "data"))


def donating(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Return a jitted step and its arguments.

    The step donates its first argument, sets compiler options in `jit`, and leaves the result shardings to the
    compiler.
    """
    options = {"xla_tpu_scoped_vmem_limit_kib": "32768"}

    @partial(jax.jit, donate_argnums=0, compiler_options=options)
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.square(x @ w).mean())(w)
        return w - gradient, loss

    return step, (struct(mesh, (512, 1024), "model"), struct(mesh, (256, 512), "data"))


def test_a_program_of_nnx_jit_is_lowered_as_one_of_jax() -> None:
    target = valkyrie.slice("v5e-8")
    mesh = target.mesh((2, 4), ("data", "model"))
    jitted, arguments = products(mesh)
    lowered = nnx.jit(jitted.__wrapped__).lower(*arguments)
    for function, call in ((nnx.jit(jitted.__wrapped__), arguments), (lowered, ())):
        program, _ = predict._lower(function, call, {}, None, target)
        assert isinstance(program, jax.stages.Lowered) and capture_program(program, {}) is not None


def manual(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    specs = PartitionSpec("data", "model")

    def gather(x: jax.Array) -> jax.Array:
        def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.psum(total, "data") / 2, None

        return jax.lax.scan(body, x, None, length=3)[0]

    mapped = jax.shard_map(gather, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    shardings = NamedSharding(mesh, specs)
    return jax.jit(mapped, in_shardings=shardings), (jax.ShapeDtypeStruct((256, 512), jnp.float32),)


@pytest.fixture(scope="module")
def target() -> valkyrie.Slice:
    return valkyrie.slice("v5e-8")


@pytest.fixture(scope="module")
def mesh(target: valkyrie.Slice) -> Mesh:
    return target.mesh((2, 4), ("data", "model"))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compile" / "programs"


def module_text(proto: bytes) -> str:
    """Return a serialised HLO module as text, without the ids that differ between processes."""
    hlo: Any = importlib.import_module("jaxlib._hlo")
    return hlo.XlaComputation(proto).as_hlo_module().to_string()


@pytest.mark.slow  # two compiles for a TPU
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", [products, donating, manual])
def test_a_child_compiles_the_same_module(program: ProgramBuilder, target: valkyrie.Slice, mesh: Mesh):
    function, arguments = program(mesh)
    lowered = function.lower(*arguments)
    captured = capture_program(lowered, {})
    assert captured is not None and has_slice_devices(mesh, target)
    stored = compile_program(captured, mesh, target, [], name="step", time_limit_s=None, progress=lambda line: None)
    assert isinstance(stored, StoredProgram), stored
    with without_cache():
        compiled = lowered.compile()
    assert module_text(stored.module) == module_text(serialised_module(compiled))


def callback(mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: None, x.mean())
        return x * 2

    return jax.jit(step), (struct(mesh, (256, 512), "data"),)


def test_programs_with_python_callbacks_stay_in_this_process(mesh: Mesh):
    function, arguments = callback(mesh)
    assert capture_program(function.lower(*arguments), {}) is None


def test_jax_own_cache_is_not_read(mesh: Mesh, tmp_path: Path):
    function, arguments = products(mesh)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    try:
        assert capture_program(function.lower(*arguments), {}) is not None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert not (tmp_path / "jax").exists() or not [*(tmp_path / "jax").iterdir()]


def test_devices_of_another_topology_are_recognised(mesh: Mesh, target: valkyrie.Slice):
    other = valkyrie.slice("v5p-16")
    assert has_slice_devices(mesh, target)
    assert not has_slice_devices(other.mesh((2, 4), ("data", "model")), target)


def test_locations_depend_neither_on_lines_nor_on_callers():
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        layers = jax.lax.scan(lambda x, _: (jax.nn.relu(x @ w), None), x, None, length=3)
        return jax.checkpoint(lambda x: jnp.sin(x @ w))(layers[0]).sum()

    def lower() -> str:
        return jax.jit(jax.grad(step)).lower(jnp.zeros((8, 8)), jnp.zeros((8, 8))).as_text(debug_info=True)

    direct, called = lower(), (lambda: lower())()
    (first, locations), (second, others) = split_locations(direct), split_locations(called)
    assert direct != called and first == second and "#loc" not in first and "test_predict_function" not in first
    assert (
        "jit(step)/jvp()/while/body/closed_call" in first and len(locations.operations) == len(others.operations) > 50
    )
    assert all(old[0] == new[0] for old, new in locations.map_stacks_to(others).items())
    renamed = split_locations(direct.replace("test_predict_function.py", r"caf\C3\A9.py"))
    assert any("/café.py:" in line for stack in locations.map_stacks_to(renamed[1]).values() for line in stack)
    moved = split_locations(re.sub(r'(test_predict_function.py":)(\d+)', lambda m: f"{m[1]}{int(m[2]) + 5}", direct))
    assert moved[0] == first and locations.map_stacks_to(locations) == {}
    for old, new in locations.map_stacks_to(moved[1]).items():
        is_here = ["test_predict_function.py" in line for line in old]
        assert new == tuple(f"{x[:-3]}{int(x[-3:]) + 5}" if here else x for x, here in zip(old, is_here, strict=True))


@pytest.mark.slow  # compiles for a TPU
@pytest.mark.timeout(300)
def test_a_second_prediction_comes_from_the_cache_with_the_lines_of_now(
    target: valkyrie.Slice, tmp_path: Path, capfd: pytest.CaptureFixture[str], empty_cache: Path
):
    mesh = target.mesh((2, 4), ("data", "model"))
    file, source = tmp_path / "step.py", "def step(w, x):\n    return x @ w @ w.T\n"

    def predict(text: str) -> valkyrie.Result:
        file.write_text(text)
        names: dict[str, Any] = {}
        exec(compile(text, file, "exec"), names)
        arguments = struct(mesh, (512, 1024), "data", "model"), struct(mesh, (256, 512), "data")
        return valkyrie.predict(jax.jit(names["step"]), *arguments, slice=target)

    first, second = predict(source), predict("# moved\n\n" + source)
    assert first.record.compile.cached is False and second.record.compile.cached
    assert second.step_s == first.step_s
    lines = [
        next(r.source for r in result.record.lines if r.source.startswith(str(file))) for result in (first, second)
    ]
    assert lines == [f"{file}:2", f"{file}:4"]
    helper = "def product(x, w):\n    return x @ w\n\ndef step(w, x):\n    return product(product(x, w), w.T)\n"
    third = predict(helper)
    assert third.record.compile.cached, "the same StableHLO with its operations in another function"
    assert {r.source for r in third.record.lines if r.source.startswith(str(file))} == {f"{file}:2"}
    (locations,) = empty_cache.glob(f"*/{LOCATIONS_FILE}")
    locations.write_text("{")
    assert [predict(helper).record.compile.cached for _ in range(2)] == [False, True], "damaged source lines are mended"
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow  # compiles for a TPU
@pytest.mark.timeout(300)
def test_a_function_slightly_over_the_memory_is_compiled_again(monkeypatch: pytest.MonkeyPatch):
    limit = "xla_tpu_max_hbm_size_mib"
    more = train_options.Option(limit, "12000", train_options.TO_FIT)
    monkeypatch.setattr(train_options, "add_options", lambda *_: [more])
    # Compiles in this process, where `add_options` is replaced.
    monkeypatch.setattr(lowered_programs, "ChildProcess", lambda command, *_: compile_request(Path(command[-2])))
    monkeypatch.setattr(lowered_programs, "run_compiler", lambda *_: None)
    slice = valkyrie.slice("v5e-8")
    rows = NamedSharding(slice.mesh((8,), ("data",)), PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8 * 2**17, 16384), jnp.bfloat16, sharding=rows)  # 4 GiB, and as much of the result
    prediction = valkyrie.predict(jax.jit(lambda x: x * 2), x, slice=slice, options={limit: 8000})
    assert prediction.fits and f"{limit}=12000 ({train_options.TO_FIT})" in str(prediction)


@pytest.mark.slow  # several small compiles for a TPU
@pytest.mark.timeout(600)
def test_the_examples_of_several_shardings_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        for large, small in (("2048, 8192", "256, 512"), ("8192, 2048", "128, 256"), ("[(8, 1), (2, 4)]", "[(2, 4)]")):
            example = example.replace(large, small)
        exec(compile(example, "example.py", "exec"), names)
    assert names["step"](valkyrie.slice("v5e-8"))[0].lower
    compared, found = names["compared"], names["found"]
    assert {*compared.results} == {"dp", "fsdp", "tp"} and all(result.fits for result in compared.results.values())
    assert {f"{name} on mesh data=2 model=4" for name in compared.results} == {*found.results}
    assert all(result.record.compile.cached for result in found.results.values()), "the same programs"
    assert (tmp_path / "search" / "report.html").is_file() and found.best in capsys.readouterr().out


def replace_compiler(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make compiler processes run `code` instead. In it, `folder` is the folder of the request.

    The test must use the fixture `pid`, the file to which the process writes its id.
    """
    prefix = "import os, sys, time; folder = sys.argv[1]; open('{pid}', 'w').write(str(os.getpid()));"
    monkeypatch.setattr(
        lowered_programs,
        "module_command",
        lambda name, folder, parent: (sys.executable, "-c", prefix.format(pid=os.environ["PID"]) + code, folder),
    )


@pytest.fixture
def pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    return tmp_path / "pid"


def test_a_crash_of_the_compiler_is_a_status(
    pid: Path, mesh: Mesh, target: valkyrie.Slice, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
):
    replace_compiler(monkeypatch, "print('F1126 check failed', flush=True); os.abort()")
    function, arguments = products(mesh)
    result = valkyrie.predict(function, *arguments, slice=target)
    assert (result.status, result.fits, result.step_s) == ("failed", None, None)
    assert "SIGABRT" in result.reason and result.reason.endswith(": F1126 check failed")
    assert "failed: " in str(result) and not [*empty_cache.iterdir()]


def test_a_compile_that_exceeds_its_time_limit_is_stopped(
    pid: Path, mesh: Mesh, target: valkyrie.Slice, monkeypatch: pytest.MonkeyPatch
):
    replace_compiler(monkeypatch, "time.sleep(600)")
    monkeypatch.setattr(
        predict.UnpartitionedProgram, "from_lowered", lambda lowered: pytest.fail("only a result needs it")
    )
    function, arguments = products(mesh)
    result = valkyrie.predict(function, *arguments, slice=target, time_limit_s=0.5)
    assert result.status == "timeout" and "exceeded time_limit_s=0.5 seconds" in (result.reason or "")


def test_an_interrupt_ends_the_compiler_at_once(
    pid: Path, mesh: Mesh, target: valkyrie.Slice, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
):
    replace_compiler(monkeypatch, "time.sleep(600)")
    function, arguments = products(mesh)
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if pid.is_file() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_function(function, arguments, {}, target, progress=interrupt)
    assert lines[0].startswith("compiling step for v5e-8: ")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not [*empty_cache.iterdir()]


def test_meshes_of_one_slice_have_the_same_devices() -> None:
    first, second = (valkyrie.slice("v5e-4").mesh((4,), ("data",)) for _ in range(2))
    assert all(a is b for a, b in zip(first.devices.flat, second.devices.flat, strict=True))


def test_a_mesh_that_differs_from_the_shardings_is_refused() -> None:
    slice = valkyrie.slice("v5e-8")
    jitted_step, arguments = products(slice.mesh((2, 4), ("data", "model")))
    with pytest.raises(ValueError, match=r"data=8, model=1\b.*data=2, model=4\b.*build\(mesh\)"):
        valkyrie.predict(jitted_step, *arguments, slice=slice, mesh={"data": 8, "model": 1})
