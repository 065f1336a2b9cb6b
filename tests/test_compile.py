"""Tests of compiling in a child process: misfits, crashes and timeouts are results, and programs are cached."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import valkyrie
from helpers import compose_run
from machines import needs_libtpu, tpu_mesh
from outcomes import fitting_outcome
from valkyrie.compiled.memory import ProgramMemory
from valkyrie.config.modes import HLO_TEXT_FILE, MODULE_FILE
from valkyrie.config.run import Run
from valkyrie.foreign_errors import Allocation, is_out_of_memory
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.platforms.tpu import OVERLAP_OPTIONS
from valkyrie.hardware.target import ChipConfig
from valkyrie.machine.replay import Replay
from valkyrie.paths import source_digest
from valkyrie.processes.child import ChildProcess
from valkyrie.records import RecordError, decode, encode, read_record, write_record
from valkyrie.search.compile import cache, runner
from valkyrie.search.compile.cache import (
    OUTCOME_FILE,
    PROGRAM_FILE,
    ProgramRecord,
    read_program,
    request_key,
    store_program,
)
from valkyrie.search.compile.child import (
    _MORE_SCRATCH_MEMORY,
    _too_large_outcome,
    compile_for_overlap,
    compile_within_memory,
    explain_scratch_memory,
    parse_shortage,
    peak_without_host,
)
from valkyrie.search.compile.executable import without_cache
from valkyrie.search.compile.prediction import CompileOutcome, CompileStatus, MemoryReport, Prediction
from valkyrie.search.compile.runner import CompiledRun, compile_layout
from valkyrie.search.modes import PREDICTION_FILE, _earlier_predictions, work_key
from valkyrie.train.options import CHIP, TO_FIT, USER, Option, settings_for_training
from valkyrie.units import GIB

OUT_OF_MEMORY = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 37.85G of 30.75G hbm. Exceeded hbm capacity by 7.10G.

Total hbm usage >= 38.10G:
    reserved        258.00M
    program          37.85G
    arguments            0B

Program hbm requirement 37.85G:
    HLO temp         37.85G (100.0% utilization: Unpadded (37.85G) Padded (37.85G), 0.0% fragmentation (0B))

  Largest program allocations in hbm:

  1. Size: 12.00G
     Operator: op_name="jit(step)/while/body/dot_general" source_file="a.py" source_line=3
     Shape: bf16[24,64,2048,5632]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 12.00G
     XLA label: fusion.1 = fusion()
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: f32[64,2048]{1,0}
     Unpadded size: 512.00M
"""


@pytest.fixture
def tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path / "cache"))
    return compose_run("model=s5_tiny", "mesh=2x2x1", "partition=fsdp", "target=cpu", "batch=8", "seq=16")


def test_a_misfit_error_gives_memory_sizes_and_the_largest_arrays():
    shortage = parse_shortage(OUT_OF_MEMORY)
    assert (shortage.needed, shortage.usable) == (int(37.85 * 2**30), int(30.75 * 2**30))
    assert [entry.bytes for entry in shortage.largest] == [12 * 2**30, 512 * 2**20]
    first = shortage.largest[0]
    assert (first.op_name, first.source) == ("jit(step)/while/body/dot_general", "a.py:3")
    assert shortage.largest[1] == Allocation(512 * 2**20, "f32[64,2048]")


def test_the_short_form_of_a_misfit_error_gives_memory_sizes():
    text = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: needs HBM (37.85G) exceeds available HBM (30.75G)"
    shortage = parse_shortage(text)
    assert (shortage.needed, shortage.usable) == (int(37.85 * 2**30), int(30.75 * 2**30))


def test_a_kernel_without_enough_scratch_memory_is_not_a_misfit():
    assert is_out_of_memory(OUT_OF_MEMORY)
    vmem = OUT_OF_MEMORY.replace("memory space hbm", "memory space vmem").replace(
        "37.85G of 30.75G", "19.55M of 16.00M"
    )
    assert not is_out_of_memory(vmem)


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: XLA:TPU compile error. Ran out of memory in memory space vmem while allocating on "
        "stack for %mha.1 = bf16[8]{0} custom-call(). Used 19.55M of 16.00M vmem. Exceeded vmem capacity by 3.55M.",
        "RESOURCE_EXHAUSTED: E1001: ScopedVmemOom:\nRan out of memory in memory space vmem while allocating on "
        "stack for %mha.1 = (f32[2]{0})\nScoped allocation with size 19.55M and limit 16.00M exceeded scoped vmem",
    ],
)
def test_a_kernel_without_enough_scratch_memory_is_named(text):
    message = explain_scratch_memory(text, _MORE_SCRATCH_MEMORY)
    assert message is not None and all(part in message for part in ("mha.1", "19.55 MiB", "16 MiB"))
    assert explain_scratch_memory(OUT_OF_MEMORY, _MORE_SCRATCH_MEMORY) is None


def test_the_temporaries_of_the_tpu_compiler_include_the_arguments():
    text = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.25G) "
    run = compose_run("model=gpt_tiny", "mesh=2x2x1", "partition=fsdp", "target=v5e-4", "batch=8", "seq=16")
    shortage = _too_large_outcome(run, parse_shortage(f"{text}exceeds available HBM (15.75G)."), "why").shortage
    assert shortage is not None and (shortage.needed, shortage.usable) == (int(16.25 * GIB), 15.75 * GIB)
    assert sum(part.bytes for part in shortage.largest) == shortage.needed


@pytest.mark.parametrize(("backend", "peak"), [("tpu", 700), ("cpu", 100 + 90 - 80 + 900 + 7)])
def test_the_peak_of_a_tpu_is_the_compilers_peak_not_its_temporaries(backend: str, peak: int):
    sizes = {"argument": 100, "output": 90, "alias": 80, "temp": 900, "generated_code": 7, "host_temp": 500}
    analysis = SimpleNamespace(peak_memory_in_bytes=700, **{f"{k}_size_in_bytes": n for k, n in sizes.items()})
    assert get_platform(backend).peak_bytes(analysis) == peak


@needs_libtpu
@pytest.mark.slow  # compiles for a TPU
@pytest.mark.parametrize(("layers", "is_saved"), [(24, False), (24, True), (2, False)])
def test_offloaded_activations_are_not_in_the_peak_of_a_tpu(layers: int, is_saved: bool):
    rows, width = 2**15, 2048
    mesh, _ = tpu_mesh("v5e:2x2")
    policies = jax.checkpoint_policies
    offload = {"offload_src": "device", "offload_dst": "pinned_host"}
    policy = (
        policies.save_only_these_names("kept")
        if is_saved
        else policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], **offload
        )
    )

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.tanh(jax.ad_checkpoint.checkpoint_name(x, "kept") @ w)

        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].astype(jnp.float32))

    replicated = NamedSharding(mesh, PartitionSpec())
    w = jax.ShapeDtypeStruct((layers, width, width), jnp.bfloat16, sharding=replicated)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=replicated)
    lowered = jax.jit(jax.grad(loss)).lower(w, x)
    with without_cache():
        compiled = lowered.compile()
        peak_bytes = peak_without_host(compiled, lowered.compile, [], get_platform("tpu"))
    sizes = compiled.memory_analysis()
    activation, weights = 2 * rows * width, 2 * 2 * layers * width**2
    assert sizes is not None and sizes.host_temp_size_in_bytes == (0 if is_saved else layers * activation)
    offloaded_layers = layers if is_saved else 0
    assert (
        offloaded_layers + 2 <= (get_platform("tpu").peak_bytes(sizes) - weights) / activation <= offloaded_layers + 7
    )
    assert (peak_bytes is None) == is_saved
    assert peak_bytes is None or 2 <= (peak_bytes - weights) / activation <= 5


@pytest.mark.slow
def test_a_program_whose_peak_exceeds_the_memory_of_its_chip_does_not_fit(tiny_run: Run):
    chip = replace(ChipConfig(), name="small", platform="cpu", usable_hbm_gib=1e-6)
    target = replace(tiny_run.config.target, chip=chip)
    outcome = compile_layout(tiny_run.changed(target=target), 300).outcome
    shortage = outcome.shortage
    assert shortage is not None and (shortage.needed or 0) > (shortage.usable or 0) == int(1e-6 * GIB)
    assert "target.chip.usable_hbm_gib" in (outcome.reason or "")


@pytest.mark.parametrize(
    ("needed", "is_enough", "platform", "calls"),
    [("16.25G", True, "tpu", 2), ("16.25G", False, "tpu", 2), ("17.40G", True, "tpu", 1), ("16.25G", True, "cpu", 1)],
)
def test_a_slight_misfit_is_compiled_again_with_options_that_save_memory(
    needed: str, is_enough: bool, platform: str, calls: int
):
    attempts = []
    options = [Option("a", "1", CHIP), Option("xla_jf_enable_multi_output_fusion", "true", USER)]
    text = f"RESOURCE_EXHAUSTED: memory required for HLO temporaries ({needed}) exceeds available HBM (15.75G)."

    def fake_compile(compiler_options: dict[str, str] | None = None) -> str:
        attempts.append(compiler_options)
        if compiler_options is None or not is_enough:
            raise RuntimeError(text)
        return "compiled"

    if calls == 2 and is_enough:
        compiled, used = compile_within_memory(options, fake_compile, get_platform(platform))
        expected_options = [*options, Option("xla_tpu_order_dot_after_layout", "false", TO_FIT)]
        assert (compiled, used) == ("compiled", expected_options), "what the user set stays"
        assert attempts[1] == {option.name: option.value for option in expected_options}
    else:
        with pytest.raises(RuntimeError, match=needed):
            compile_within_memory(options, fake_compile, get_platform(platform))
    assert len(attempts) == calls


@pytest.mark.parametrize(
    ("peak", "exposed_s", "second_s", "compiles", "is_second"),
    [
        (90, 0.95, 0.8, 1, True),
        (90, 0.95, 1.1, 1, False),
        (50, 0.95, 0.8, 0, False),
        (90, 0.50, 0.8, 0, False),
        (90, 0.95, None, 1, False),
        (90, 0.95, "crash", 1, False),
        (90, 0.95, "too large", 1, False),
    ],
    ids=["faster", "slower", "enough memory", "already overlaps", "does not fit", "crashes", "exceeds usable memory"],
)
def test_a_program_that_overlaps_nothing_near_the_limit_is_compiled_with_other_options(
    peak: int, exposed_s: float, second_s: float | str | None, compiles: int, is_second: bool
):
    def make_program(step_s: float, peak: int) -> Any:
        stats = SimpleNamespace(
            peak_memory_in_bytes=peak,
            argument_size_in_bytes=peak,
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
            temp_size_in_bytes=0,
            host_temp_size_in_bytes=0,
        )
        return SimpleNamespace(step_s=step_s, memory_analysis=lambda: stats)

    def fake_replay(program: Any) -> Any:
        use = SimpleNamespace(busy_s=1.0, exposed_s=exposed_s)
        return SimpleNamespace(step_s=program.step_s, collectives=[use])

    def fake_compile(compiler_options: dict[str, str]) -> Any:
        attempts.append(compiler_options)
        if second_s is None:
            raise RuntimeError("RESOURCE_EXHAUSTED: memory required for HLO temporaries (16G) exceeds available HBM")
        if second_s == "crash":
            raise RuntimeError("INTERNAL: Mosaic failed")
        return make_program(0.8, 110) if isinstance(second_s, str) else make_program(second_s, peak)

    attempts: list[dict[str, str]] = []
    first, platform = make_program(1.0, peak), get_platform("tpu")
    compiled, options = compile_for_overlap(first, [Option("a", "1", CHIP)], fake_compile, platform, 100, fake_replay)
    assert [set(attempt) for attempt in attempts] == compiles * [{"a", *OVERLAP_OPTIONS}]
    assert (compiled is not first) == is_second
    assert bool(settings_for_training(options)) == is_second, "training needs the same options"


@pytest.mark.slow
def test_a_layout_is_compiled_once(tiny_run: Run, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    first_run = compile_layout(tiny_run, 300, progress=lines.append)
    step = first_run.outcome.step
    assert step is not None and not first_run.cached, first_run.outcome
    assert step.axes == {"x": 2, "y": 2, "z": 1} and len(step.positions) == 4
    assert step.memory.split["activations and temporaries"] > 0
    assert first_run.module_file.stat().st_size > 1000
    assert lines[0].startswith("compiling for cpu")
    second_run = compile_layout(tiny_run, 300)
    assert (second_run.outcome, second_run.cached) == (first_run.outcome, True)
    (first_run.folder / OUTCOME_FILE).write_text('{"status": "o')  # a disk that was full, say
    repaired_run = compile_layout(tiny_run, 300)
    assert repaired_run.cached and cache.read_outcome(first_run.folder) == repaired_run.outcome, (
        "the program was still there"
    )
    monkeypatch.setattr(runner, "request_key", lambda run: "after an edit that leaves the program as it is")
    edited_run = compile_layout(tiny_run, 300)
    assert edited_run.folder != first_run.folder and edited_run.cached and edited_run.outcome.step is not None
    assert edited_run.program_folder == first_run.program_folder and len(list(cache.programs_folder().iterdir())) == 1
    assert edited_run.outcome.step.compile_s == step.compile_s, "of the one compile"
    assert edited_run.outcome.step.alternatives == step.alternatives and edited_run.outcome.step.memory == step.memory


def test_cached_programs_depend_on_operation_names_but_not_on_source_lines():
    def key(text: str, options: dict[str, str] | None = None) -> str:
        return cache.program_key(text, options or {}, "TPU v4", [])

    text = (
        '%0 = stablehlo.add %a, %b loc(#loc3)\n#loc2 = loc("/x/model.py":7:4 to :19)\n#loc3 = loc("jit(f)/up"(#loc2))'
    )
    assert key(text) == key(text.replace("model.py", "moved.py").replace(":7:4 to :19", ":9:0 to 10:3"))
    other_keys = {key(text.replace("up", "down")), key(text.replace("add", "multiply")), key(text, {"xla_a": "1"})}
    assert len(other_keys | {key(text)}) == 4


MEMORY = ProgramMemory(1, 1, 0, 1, 1, 3)


def write_cache_entry(folder: Path, compile_s: float = 1.0) -> Path:
    """Write an entry of the program cache, with a module of three bytes. `compile_s` is its recorded compile time.

    Returns the folder of the entry.
    """
    folder.mkdir(parents=True)
    (folder / MODULE_FILE).write_bytes(b"hlo")
    record = ProgramRecord(compile_s, (), MEMORY, hashlib.sha256(b"hlo").hexdigest())
    write_record(folder / PROGRAM_FILE, record)
    return folder


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (PROGRAM_FILE, b'{"compile_s": 1.0, "options": []}'),
        (PROGRAM_FILE, b'{"compile_s": ["ok"]}'),
        (PROGRAM_FILE, b"[]"),
        (PROGRAM_FILE, b"\xff\xfe"),
        (MODULE_FILE, b"hl"),
        (MODULE_FILE, None),
    ],
)
def test_a_damaged_cached_program_is_ignored(tmp_path: Path, file: str, damage: bytes | None):
    folder = write_cache_entry(tmp_path / "entry")
    assert read_program(folder) is not None
    assert read_program(folder, needs_hlo_text=True) is None, "the text was not asked for"
    (folder / file).unlink()
    if damage is not None:
        (folder / file).write_bytes(damage)
    assert read_program(folder) is None
    store_program(write_cache_entry(tmp_path / "scratch", compile_s=2.0), folder, overwrite=False)
    cached = read_program(folder)
    assert cached is not None and cached.compile_s == 2.0
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("replace_cached", [False, True])
def test_the_first_of_two_simultaneous_compiles_is_cached_unless_a_new_one_was_requested(
    tmp_path: Path, replace_cached: bool
):
    folder = tmp_path / "entry"
    for compile_s in (1.0, 2.0):
        store_program(write_cache_entry(tmp_path / "scratch", compile_s), folder, overwrite=replace_cached)
    cached = read_program(folder)
    assert cached is not None and cached.compile_s == (2.0 if replace_cached else 1.0)
    with_text = write_cache_entry(tmp_path / "other")
    (with_text / HLO_TEXT_FILE).touch()
    store_program(with_text, folder, overwrite=False)
    assert read_program(folder, needs_hlo_text=True) is not None, "the first had no text"


def test_an_incomplete_cache_folder_is_repaired(tmp_path: Path):
    folder = write_cache_entry(tmp_path / "entry")
    (folder / PROGRAM_FILE).unlink()  # its deletion was cut short
    store_program(write_cache_entry(tmp_path / "scratch"), folder, overwrite=False)
    assert read_program(folder) is not None
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("status", list(CompileStatus))
def test_an_outcome_has_the_fields_that_its_status_needs(status: CompileStatus):
    step, shortage = fitting_outcome().step, MemoryReport(needed=2, usable=1)
    fields = {"step": step if status is CompileStatus.ok else None}
    fields["shortage"] = shortage if status is CompileStatus.does_not_fit else None
    outcome = CompileOutcome(status, "why", **fields)
    assert decode(CompileOutcome, encode(outcome), OUTCOME_FILE) == outcome
    wrong = {"step": None} if fields["step"] else {"step": encode(step)}
    with pytest.raises(RecordError):
        decode(CompileOutcome, encode(outcome) | wrong, OUTCOME_FILE)


@pytest.mark.parametrize("damaged", [b"\xff", b"[]", b"{}", b"3", b'{"collectives": [1]}'])
def test_a_damaged_replay_is_not_read(damaged: bytes, tmp_path: Path):
    (tmp_path / "replay.json").write_bytes(damaged)
    with pytest.raises(RecordError):
        read_record(Replay, tmp_path / "replay.json")


def test_damaged_predictions_of_other_layouts_are_ignored(tiny_run: Run, tmp_path: Path):
    valid_prediction = Prediction(None, CompileStatus.ok, work=work_key(tiny_run))
    text = json.dumps(encode(valid_prediction))
    for number, damaged in enumerate([text, f'["{valid_prediction.work}"]', f'{{"work": "{valid_prediction.work}"']):
        (cache.requests_folder() / str(number)).mkdir(parents=True)
        (cache.requests_folder() / str(number) / PREDICTION_FILE).write_text(damaged)
    (cache.requests_folder() / "5" / PREDICTION_FILE).mkdir(parents=True)
    assert _earlier_predictions(tiny_run, CompiledRun(fitting_outcome(), tmp_path, tmp_path, False, 0.0)) == [
        valid_prediction
    ]


def test_the_name_of_a_result_depends_on_what_is_compiled(tiny_run: Run, monkeypatch: pytest.MonkeyPatch):
    def change_run(**keys: Any) -> Run:
        return Run(replace(tiny_run.config, **keys), tiny_run.model)

    keys = [
        request_key(run) for run in (tiny_run, change_run(batch=16), change_run(seq=32), change_run(microbatches=2))
    ]
    assert len(set(keys)) == len(keys)
    assert request_key(change_run(prompt="x", runs="elsewhere", seed=3)) == keys[0]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_enable_async_all_gather=true")
    assert request_key(tiny_run) != keys[0]


def test_an_edit_of_a_users_module_takes_effect_in_the_same_process(tmp_path: Path):
    deep = tmp_path / "blocks" / "inner" / "deep"
    deep.mkdir(parents=True)
    (deep / "mine.py").write_text("rate = 1\n")
    (tmp_path / "linked").symlink_to(tmp_path / "blocks")
    (tmp_path / "round").symlink_to(tmp_path)
    original_digest = source_digest("axes.py", str(tmp_path))
    (tmp_path / "notes.txt").write_text("not a module")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.py").touch()  # no import can name it
    assert source_digest("axes.py", str(tmp_path)) == original_digest
    (deep / "mine.py").write_text("rate = 2\n")
    edited_digest = source_digest("axes.py", str(tmp_path))
    (deep / "mine.py").rename(deep.parent / "mine.py")
    assert len({original_digest, edited_digest, source_digest("axes.py", str(tmp_path))}) == 3


def test_a_compile_over_its_time_limit_is_a_result(tiny_run: Run):
    result = compile_layout(tiny_run, 0.3)
    assert result.status is CompileStatus.timeout
    assert "mode.time_limit_s=0.3" in (result.outcome.reason or "")
    assert not compile_layout(tiny_run, 0.3).cached


@pytest.mark.parametrize(
    ("program", "phrase"),
    [
        ("import os; os.abort()", "by SIGABRT"),
        pytest.param("import sys; print('a last word'); sys.exit(3)", "3: a last", marks=pytest.mark.slow),
    ],
)
def test_a_crash_of_the_compiler_does_not_end_the_command(
    tiny_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, phrase: str
):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    compiled_run = compile_layout(tiny_run, 60)
    assert (compiled_run.status, compiled_run.cached) == (CompileStatus.failed, False)
    assert [file for file in (tmp_path / "cache" / "compile").rglob("*") if file.is_file()] == []
    assert phrase in (compiled_run.outcome.reason or "")


@pytest.mark.parametrize("lifetime_s", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_command_ends_its_compiler(tmp_path: Path, lifetime_s: int):
    """The command may die while its compiler is still importing. The compiler then starts with another parent."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = (
        "import os, subprocess, sys, time\n"
        "child = 'import time; from valkyrie.search.compile import child; '\n"
        "child += 'child._compile_run = lambda f, ignore_cache: time.sleep(60); child.main()'\n"
        "command = [sys.executable, '-c', child, 'scratch', str(os.getpid())]\n"
        "print(subprocess.Popen(command, start_new_session=True).pid, flush=True)\n"
        f"time.sleep({lifetime_s})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    child = Path("/proc") / result.stdout.strip()
    deadline = time.monotonic() + 20
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not child.exists()
    assert not scratch.exists()


def test_a_flag_that_libtpu_refuses_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_foo=1")
    command = [sys.executable, "-c", "print(\"ERROR: Unknown command line flag 'xla_foo'\\nmore\")"]
    child = ChildProcess(command, {}, tmp_path / "compiler.log")
    outcome = runner.run_compiler(child, get_platform("tpu"), 60, "mode.time_limit_s", lambda _: None, lambda: False)
    assert outcome is not None and outcome.status is CompileStatus.refused and outcome.variable == "LIBTPU_INIT_ARGS"
    assert outcome.reason.startswith("LIBTPU_INIT_ARGS=--xla_foo=1: ") and "no flag xla_foo" in outcome.reason


def test_a_flag_that_libtpu_refuses_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_foo=1")
    printed = subprocess.CompletedProcess([], 1, b"", b"WARNING\nERROR: Unknown command line flag 'xla_foo'\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: printed)
    with pytest.raises(ValueError, match="^LIBTPU_INIT_ARGS=--xla_foo=1: .* flag "):
        valkyrie.slice("v5e-4").mesh((4,), ("data",))
