"""Tests of predicting several layouts of a program and of searching them: ranking, correction, failures and budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import valkyrie
from valkyrie.parts import PartKind, StepPart
from valkyrie.records import read_record
from valkyrie.search import programs
from valkyrie.search.comparison import PAGE_FILE, SEARCH_FILE, ComparisonRecord, comparison_columns
from valkyrie.search.compile.fault import Fault, FaultCode
from valkyrie.search.compile.partitioner import ProgramEstimate
from valkyrie.search.compile.predict import PredictedProgram, ProgramWork, foreign_program
from valkyrie.search.compile.prediction import (
    CompileStatus,
    CompileTimes,
    Hint,
    HintCode,
    MemoryReport,
    PredictedStep,
    Prediction,
)
from valkyrie.search.program_order import CompileOrder, ProgramLayout
from valkyrie.search.programs import divide_devices
from wandb_files import wandb_logs

GIB = 2**30
SLICE = valkyrie.slice("v5e-8")


def fake_predict(
    function: Any,
    arguments: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: valkyrie.Slice,
    *,
    work: ProgramWork,
    **settings: Any,
) -> PredictedProgram:
    """Predict a step of `arguments[0]` seconds. A step of 0 seconds does not fit, and text raises KeyError."""
    (seconds,) = arguments
    if isinstance(seconds, str):
        raise KeyError(seconds)
    program = foreign_program(work, work.name or "step", target, {"data": 8})
    if not seconds:
        memory = MemoryReport(needed=20 * GIB, usable=16 * GIB)
        return PredictedProgram(
            Prediction(None, CompileStatus.does_not_fit, "too large", program=program, memory=memory), None
        )
    rate = work.tokens and work.tokens / seconds
    prediction = Prediction(
        None,
        CompileStatus.ok,
        compile=CompileTimes(cached=False),
        program=program,
        memory=MemoryReport(peak=2 * GIB, usable=16 * GIB, headroom=14 * GIB, split={"arguments": 2 * GIB}),
        step=PredictedStep(seconds, rate, rate and rate / 8),
        parts=(StepPart(PartKind.exposed, ("data",), seconds / 4),),
        hints=(Hint(HintCode.exposed, "a quarter of the step waits"),),
        faults=(Fault(FaultCode.unused_axis, "an axis is unused", "use it"),) * (seconds > 0.3),
    )
    return PredictedProgram(prediction, None)


@pytest.fixture(autouse=True)
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "predict_function", fake_predict)
    mesh = SimpleNamespace(shape={"data": 8})
    monkeypatch.setattr(valkyrie.Slice, "mesh", lambda self, shape, names: mesh)


@jax.jit
def step() -> None:
    """Placeholder for a jitted function."""


LAYOUTS = {"slow": (0.4,), "large": (0,), "fast": {"args": (0.1,)}, "broken": ("x",)}


def test_layouts_are_ranked_and_printed():
    comparison = valkyrie.predict(step, layouts=LAYOUTS, slice=SLICE, tokens=512, unit="images")
    assert [*comparison.results] == ["fast", "slow", "large", "broken"]
    assert comparison.best == "fast" and comparison["fast"].step_s == 0.1 and comparison.ratio is None
    lines = str(comparison).splitlines()
    assert lines[1].split() == ["layout", "fits", "step", "interval", "images/s", "peak", "waiting", "faults"]
    assert [line.split()[:3] for line in lines[3:7]] == [
        ["fast", "yes", "100.0"],
        ["slow", "yes", "400.0"],
        ["large", "no", "20.0"],
        ["broken", "failed"],
    ]
    assert "25%" in lines[3] and "5,120" in lines[3] and "unknown" in lines[3]
    assert "interval: unknown" in lines[-1] and "mode=calibrate" in lines[-1]
    assert lines[-2].startswith("faults: slow: unused_axis")
    assert lines[-3].startswith("broken: failed: KeyError: 'x' (test_predict_layouts.py:")
    assert comparison._repr_html_().startswith("<iframe") and "best: fast" in repr(comparison)
    page = comparison._page()
    assert "<h1>Fastest of 3 compiled layouts (of 4)" in page and "a quarter" in page and "What to change" not in page
    page = comparison["slow"]._repr_html_()
    advice, _, report = page.partition("memory per device at the peak")
    assert advice.index("Faults in the sharding") < advice.index("an axis is unused") < advice.index("a quarter")
    assert "an axis is unused" not in report, "the report does not repeat it"
    assert "5,120 images/s" in str(comparison["fast"]) and "step (fast) on v5e-8" in str(comparison["fast"])


def test_a_layout_may_be_a_lowered_or_compiled_function():
    lowered = jax.jit(lambda x: x).lower(1.0)
    layouts = {"jitted": (0.4,), "lowered": {"function": lowered}, "compiled": {"function": lowered.compile()}}
    assert [*valkyrie.predict(step, layouts=layouts, slice=SLICE).results][0] == "jitted"


def test_a_measured_step_corrects_the_other_layouts(tmp_path: Path):
    comparison = valkyrie.predict(
        step, layouts=LAYOUTS, slice=SLICE, tokens=512, measured_s={"fast": 0.6, "slow": 0.48}
    )
    assert comparison.ratio == pytest.approx((6 + 1.2) / 2)
    assert comparison.best == "slow" and comparison.step_s("slow") == 0.48
    larger_comparison = valkyrie.predict(
        step, layouts=LAYOUTS | {"other": (0.2,)}, slice=SLICE, measured_s={"fast": 0.12}
    )
    assert "within 2%" not in str(larger_comparison)
    near_comparison = valkyrie.predict(step, layouts={"a": (0.1,), "b": (0.1015,), "c": (0.103,)}, slice=SLICE)
    assert "as fast as a (within 2%): b\n" in str(near_comparison)
    assert larger_comparison.step_s("other") == pytest.approx(0.24) and larger_comparison["other"].step_s == 0.2
    assert "multiplied by 1.200" in str(larger_comparison)
    assert "measured_s= " not in str(larger_comparison), "the ratio is plausible"
    wrong_unit_comparison = valkyrie.predict(step, layouts=LAYOUTS, slice=SLICE, measured_s={"fast": 120})
    assert "measured_s= " in str(wrong_unit_comparison)
    page = larger_comparison.html(tmp_path / "r.html").read_text()
    assert "240.0 ms" in page and "predicted step: 100.0 ms" in page


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"layouts": {}}, ValueError, "layouts= is empty"),
        ({"layouts": [1]}, TypeError, "layouts= takes {name: arguments}"),
        ({"layouts": {"dp": 0.1}}, TypeError, r'layouts\["dp"\] takes .*, not float'),
        ({"layouts": {"dp": {"w": 1}}}, ValueError, r'layouts\["dp"\] has the unknown key .w.'),
        ({"layouts": {"dp": {"function": len}}}, TypeError, r'layouts\["dp"\] needs .*, not <built-in'),
        (
            {"layouts": {"dp": {"function": "step"}}},
            TypeError,
            r"layouts\[\"dp\"\] needs .*, not 'step'",
        ),
        ({"layouts": {"dp": {"mesh": 8}}}, TypeError, r'layouts\["dp"\]\["mesh"\] takes sizes by axis name'),
        ({"token": 512}, TypeError, r"^token= is not an argument .* tokens=\?"),
        ({f"wrong{i}": 1 for i in range(9)}, TypeError, "^wrong0= is not an argument"),
        ({"mesh": (2, 4)}, TypeError, r"mesh= takes .*, not \(2, 4\)"),
        ({"layouts": LAYOUTS, "measured_s": {"dp": 1}}, ValueError, "slow, large, fast, broken"),
        ({"layouts": LAYOUTS, "measured_s": {"fast": 0}}, ValueError, r'measured_s\["fast"\]'),
        ({"tokens": 1e300}, ValueError, r"^tokens=1e\+300 is too large"),
        ({"measured_s": {"dp": 1}}, ValueError, "^measured_s= needs layouts="),
        ({"unit": "images"}, ValueError, "must name what tokens= counts"),
        ({"time_limit_s": 0}, ValueError, "time_limit_s=0"),
    ],
)
def test_illegal_arguments_are_refused(more: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        valkyrie.predict(step, slice=SLICE, **more)


@pytest.mark.parametrize(
    ("program", "more", "message"),
    [
        (valkyrie.compose("model=gpt_tiny", "mesh=2x2x2"), {}, "not a Run"),
        ("step.hlo", {}, "not a str"),
        (step, {"layouts": LAYOUTS}, "Check each layout by itself"),
    ],
)
def test_programs_without_shardings_are_not_checked(program: Any, more: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        valkyrie.check(program, slice=SLICE, **more)


def test_a_program_that_left_no_module_is_not_called_sound(monkeypatch: pytest.MonkeyPatch):
    large = SimpleNamespace(status="does_not_fit", reason="21 GiB of 16 GiB", replay=None, faults=())
    monkeypatch.setattr("valkyrie.api_programs.predict", lambda *_, **__: large)
    with pytest.raises(RuntimeError, match="does not fit.* 21 GiB"):
        valkyrie.check(step, slice=SLICE)


def test_arguments_belong_into_the_layouts():
    with pytest.raises(ValueError, match="pass the arguments there"):
        valkyrie.predict(step, 0.1, layouts=LAYOUTS, slice=SLICE)
    with pytest.raises(ValueError, match="Leave out layouts"):
        valkyrie.predict(valkyrie.compose("model=gpt_tiny", "mesh=2x2x2"), layouts=LAYOUTS)


def test_a_search_covers_meshes_and_rules(tmp_path: Path):
    def build(mesh: Any, rule: float | str) -> tuple[Any, tuple[Any, ...]]:
        if rule == "raise":
            raise RuntimeError("no such partition")
        return step, (rule,)

    rules = {"a": 0.2, "b": 0.1, "c": "raise"}
    search_result = valkyrie.search(
        build, slice=SLICE, meshes=[(2, 4), {"data": 8}], rules=rules, folder=tmp_path / "out", quiet=True
    )
    assert len(search_result.results) == 6 and search_result.best == "b on mesh data=8"
    assert "RuntimeError: no such partition (test_" in str(search_result)
    search_result.save(tmp_path / "out")
    record = read_record(ComparisonRecord, tmp_path / "out" / SEARCH_FILE)
    assert record.best == search_result.best and [row.name for row in record.rows] == [*search_result.results]
    assert "b on mesh data=8" in (tmp_path / "out" / "report.html").read_text()
    for more, message in (
        ({"meshes": [(2, 4)], "rules": rules}, "search.json has b on mesh data=8, .*earlier version"),
        ({"meshes": [(2, 4), (8, 1)], "rules": rules, "slice": valkyrie.slice("v6e-8")}, "is for v5e-8 .*, not v6e-8"),
    ):
        with pytest.raises(ValueError, match=message):
            valkyrie.search(build, **{"slice": SLICE, "folder": tmp_path / "out", "quiet": True, **more})
    assert read_record(ComparisonRecord, tmp_path / "out" / SEARCH_FILE) == record
    alone = valkyrie.search(lambda mesh: (step, (0.1,)), slice=SLICE, axes=("data",), quiet=True)
    assert [*alone.results] == ["mesh data=8"]
    wrong = valkyrie.search(lambda mesh: step, slice=SLICE, axes=("data",), quiet=True)
    assert "build must return (jitted, arguments) or" in str(wrong)
    unjitted = valkyrie.search(lambda mesh: (len, ()), slice=SLICE, axes=("data",), quiet=True)
    assert "mesh data=8: failed: " in str(unjitted) and "<built-in function len>" in str(unjitted)
    ended = valkyrie.search(lambda mesh: sys.exit(3), slice=SLICE, axes=("data",), quiet=True)
    assert "mesh data=8: failed: " in str(ended) and "(sys.exit(3))" in str(ended)


def test_a_search_is_one_run_at_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    search_result = valkyrie.search(lambda mesh: (step, (0.1,)), slice=SLICE, axes=("data",), tokens=1024, quiet=True)
    for _ in range(2):  # the second report updates the run of the first
        note = search_result.log_to_wandb("sharding", tmp_path, name="mine")
        command, _, path = str(note).rpartition(" ")
        assert command.endswith("wandb sync") and [*Path(path).glob("*.wandb")], "the run is offline"
        assert note in capsys.readouterr().err
    log = wandb_logs(tmp_path)[-1]
    assert (log["run"].project, log["run"].display_name, log["run"].job_type) == ("sharding", "mine", "search")
    assert log["summary"]["best/name"] == search_result.best == "mesh data=8"
    assert log["summary"]["best/step_ms"] == pytest.approx(1e3 * (search_result.step_s("mesh data=8") or 0))
    assert len({log["run"].run_id for log in wandb_logs(tmp_path)}) == 1
    assert {"layouts", "page"} <= {key.partition("/")[0] for key in log["history"][-1]}
    with pytest.raises(ValueError, match="^project=a/b"):
        search_result.log_to_wandb("a/b", tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("search.json", "search.json was not written by valkyrie.search"),
        ("run.yaml", r"is the folder of a run \(run.yaml\)"),
        ("multirun.yaml", r"is the folder of a sweep \(multirun.yaml\)"),
        ("trials.jsonl", r"is the folder of a sweep or a search of layouts \(trials.jsonl\)"),
        ("report.html", "report.html was not written by valkyrie.search"),
    ],
)
def test_a_search_does_not_replace_other_files(tmp_path: Path, name: str, reason: str):
    (tmp_path / name).write_text('{"target": "v5e-8"}')
    with pytest.raises(ValueError, match=reason):
        valkyrie.search(lambda mesh: (step, (0.1,)), slice=SLICE, folder=tmp_path, quiet=True)
    assert [file.name for file in tmp_path.iterdir()] == [name] and "v5e-8" in (tmp_path / name).read_text()


def test_a_search_continues_in_a_folder_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / SEARCH_FILE).write_text('{"schema": 99, "rows": []}')
    checks = []
    monkeypatch.setattr("valkyrie.search.folder.refuse_other_folder", checks.append)
    valkyrie.search(lambda mesh: (step, (0.1,)), slice=SLICE, folder=tmp_path, quiet=True)
    assert len(read_record(ComparisonRecord, tmp_path / SEARCH_FILE).rows) == 4
    assert checks == [], "the search checks the folder before it begins, and not its own files"


def test_all_divisions_of_the_devices():
    assert len(divide_devices(8, ("data", "model"), 1)) == 4
    assert [mesh["data"] for mesh in divide_devices(8, ("data", "model"), 4)] == [4, 8]


def test_a_search_ends_before_it_would_exceed_its_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = iter_seconds(4.0)
    monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    search_result = valkyrie.search(lambda mesh: (step, (0.1,)), slice=SLICE, budget="20s")
    assert len(search_result.results) == 1 and len(search_result.untried) == 3
    page, text = search_result._page(), str(search_result)
    assert "exceed the budget" in text and "compiled 1 of 4 layouts within" in text
    assert all(name in text for name in search_result.untried)
    assert "1 of 4 layouts" in repr(search_result) and "1 of 4 layouts compiled; the fastest so far" in page
    assert "<h1>The only compiled layout (of 4) on v5e-8" in page
    assert "untried" in capsys.readouterr().err, "a script that prints only the best layout warns, too"


def test_a_search_reads_intact_cached_programs_after_the_end_of_its_budget(monkeypatch: pytest.MonkeyPatch):
    def read_cache(*arguments: Any, work: ProgramWork, **settings: Any) -> PredictedProgram:
        predicted = fake_predict(*arguments, work=work, **settings)
        is_damaged = "data=1" in (work.name or "")
        status = CompileStatus.timeout if is_damaged else CompileStatus.ok
        return replace(predicted, prediction=replace(predicted.prediction, status=status))

    def estimate_layouts(layouts: list[ProgramLayout], *more: Any) -> dict[str, ProgramEstimate]:
        for layout in layouts:
            layout.is_cached = layout.axes["data"] < 4
        return {layout.name: ProgramEstimate(dict(layout.axes), layout.axes["data"]) for layout in layouts}

    clock = iter_seconds(60.0)
    monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(programs, "estimate_layouts", estimate_layouts)
    monkeypatch.setattr(programs, "predict_function", read_cache)
    search: Callable[..., valkyrie.Comparison] = valkyrie.search
    search_result = search(lambda mesh: (step, (0.1,)), slice=SLICE, budget=60, quiet=True)
    assert {*search_result.results} == {"mesh data=2 model=4"}, "read after the damaged one"
    assert {*search_result.untried} == {"mesh data=1 model=8", "mesh data=4 model=2", "mesh data=8 model=1"}


def test_a_search_compiles_the_most_different_layouts_first(monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []

    def predict_any(function: Any, arguments: Any, *more: Any, work: ProgramWork, **settings: Any) -> PredictedProgram:
        compiled.append(work.name or "")
        return fake_predict(function, (0.1,), *more, work=work, **settings)

    def make_mesh(self: valkyrie.Slice, shape: list[int], names: list[str]) -> jax.sharding.AbstractMesh:
        return jax.sharding.AbstractMesh(tuple(shape), tuple(names))

    def build(mesh: jax.sharding.AbstractMesh, spec: P) -> tuple[Any, tuple[Any, ...]]:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return step, (jax.ShapeDtypeStruct((1024, 1024), "float32", sharding=sharding),)

    monkeypatch.setattr(programs, "predict_function", predict_any)
    monkeypatch.setattr(valkyrie.Slice, "mesh", make_mesh)
    rules = {"dp": P(), "fsdp": P("data"), "both": P("data", "model")}
    result = valkyrie.search(build, slice=SLICE, meshes=[(8, 1), (2, 4)], rules=rules, name="mine", quiet=True)
    assert not result.untried and not result.notes
    assert compiled[:3] == [
        "mine (fsdp on mesh data=8 model=1)",  # the fewest bytes per device
        "mine (both on mesh data=2 model=4)",
        "mine (dp on mesh data=8 model=1)",
    ]
    assert len(set(compiled)) == 6


def test_a_search_compiles_in_the_order_of_estimates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    compiled: list[str] = []

    def record_predict(*arguments: Any, work: ProgramWork, **settings: Any) -> PredictedProgram:
        predicted = fake_predict(*arguments, work=work, **settings)
        if len(compiled) == 2:
            return replace(predicted, prediction=replace(predicted.prediction, status=CompileStatus.timeout))
        compiled.append(str(work.name))
        return predicted

    def estimate_layouts(layouts: list[ProgramLayout], *more: Any) -> dict[str, ProgramEstimate]:
        steps_s = {"a": 0.8, "b": 0.5, "c": 0.3, "same": 0.3, "large": 0.1}
        return {
            layout.name: ProgramEstimate(
                dict(layout.axes),
                steps_s[str(layout.rule)],
                waiting_s=steps_s[str(layout.rule)] / 4,
                is_too_large=layout.rule == "large",
                program={"same": "c"}.get(str(layout.rule), str(layout.rule)),
            )
            for layout in layouts
        }

    monkeypatch.setattr(programs, "predict_function", record_predict)
    monkeypatch.setattr(programs, "estimate_layouts", estimate_layouts)
    rules = {"a": 0.4, "b": 0.2, "large": 0.3, "c": 0.1, "same": 0.1}
    search: Callable[..., valkyrie.Comparison] = valkyrie.search
    search_result = search(
        lambda mesh, rule: (step, (rule,)),
        slice=SLICE,
        axes=("data",),
        rules=rules,
        budget=60,
        folder=tmp_path,
        tokens=80,
    )
    names = {rule: f"{rule} on mesh data=8" for rule in rules}
    assert compiled == [f"step ({names[rule]})" for rule in "cb"], "the same program is not compiled twice"
    assert search_result.best == names["c"] and search_result.untried == (names["a"], names["large"])
    rows = {row.name: row for row in search_result.record.rows}
    assert [*rows] == [names[rule] for rule in ("c", "same", "b", "a", "large")]
    assert rows[names["a"]].status is None and rows[names["a"]].waiting == 0.25 and rows[names["a"]].axes == {"data": 8}
    assert rows[names["same"]].step_s == 0.1 and f"({names['same']})" in str(search_result[names["same"]])
    assert rows[names["a"]].step_s == search_result.step_s(names["a"]) == 0.8 and search_result.step_s(None) is None
    assert rows[names["same"]].same_as == names["c"] and rows[names["c"]].estimated_s == 0.3
    assert [row.name for row in search_result.record.table_rows] == [names[rule] for rule in ("c", "b", "a", "large")]
    assert f"untried: {names['large']}, {names['a']}" in search_result.notes[0]
    assert "estimated" in str(search_result) and "probably slower" in str(search_result)
    assert f"the same program: {names['c']}, {names['same']}" in str(search_result)
    assert search_result.notes[0].startswith("compiled 2 of 4 distinct programs (3 of 5 layouts) within")
    page = (tmp_path / PAGE_FILE).read_text()
    assert (
        "<h1>Fastest of 2 compiled programs (of 4 distinct ones, for 5 layouts)" in page
        and "(3 of 5 layouts) compiled; the" in page
    )
    record = read_record(ComparisonRecord, tmp_path / SEARCH_FILE)
    columns = {column.key: column.wandb_value(rows[names["a"]]) for column in comparison_columns(record)}
    assert (
        columns["by"] == "estimated"
        and columns["tokens_per_second"] == pytest.approx(100)
        and columns["step_ms"] == pytest.approx(800)
    )
    assert record.rows == search_result.record.rows and names["a"] in (tmp_path / PAGE_FILE).read_text()


def test_layouts_with_as_many_bytes_as_a_slower_compiled_one_are_compiled_later():
    steps_s = {"fsdp": 1.0, "same": 1.0, "fsdp_tp": 1.1, "dp": 1.2}
    layouts = [ProgramLayout(name, {"data": 8}, name, lambda: None, 20.0 if name == "dp" else 10.0) for name in steps_s]
    programs = {"same": "fsdp"}
    estimates = {name: ProgramEstimate({"data": 8}, s, program=programs.get(name, name)) for name, s in steps_s.items()}
    order = CompileOrder(layouts, estimates)
    first = order.pop()
    assert first.name == "fsdp"
    order.add(first, fake_predict(step, (1.3,), {}, SLICE, work=ProgramWork()))
    ((same, predicted),) = order.pop_equal("fsdp")
    assert same.name == "same" and predicted.prediction.step is not None and predicted.prediction.step.step_s == 1.3
    assert [order.pop().name, order.pop().name] == ["dp", "fsdp_tp"]


def test_the_page_names_a_layout_that_is_estimated_to_be_faster_than_the_best_compiled_one():
    compiled = fake_predict(step, (1.3,), {}, SLICE, work=ProgramWork())
    result = valkyrie.Comparison(
        {"fsdp": valkyrie.Result(compiled.prediction)},
        untried=("dp", "tp"),
        estimates={n: ProgramEstimate({"data": 8}, 1.2, program="p") for n in ("dp", "tp")},
    )
    assert (
        result.best == "fsdp" and "fastest so far is fsdp, but dp is estimated to be faster: 1.200 s" in result._page()
    )
    assert "may be faster than fsdp: dp. Before" in str(result), "tp is the same program as dp"
    large = replace(result, estimates={n: replace(e, is_too_large=True) for n, e in result.estimates.items()})
    assert "estimated to be faster" not in large._page() and "slower" not in str(large)
    assert "estimated to need too much memory: dp" in str(large)


def test_a_search_without_estimates_names_the_reason(monkeypatch: pytest.MonkeyPatch):
    failed = ProgramEstimate(reason="XLA's partitioner took too long")
    monkeypatch.setattr(programs, "estimate_layouts", lambda layouts, *_: {x.name: failed for x in layouts})
    search: Callable[..., valkyrie.Comparison] = valkyrie.search
    search_result = search(lambda mesh: (step, (0.1,)), slice=SLICE, quiet=True)
    assert len(search_result.results) == 4 and "took too long" in search_result.notes[0]


def test_a_mesh_that_does_not_divide_an_argument_fails_and_the_search_continues(monkeypatch: pytest.MonkeyPatch):
    def make_mesh(self: valkyrie.Slice, shape: list[int], names: list[str]) -> jax.sharding.AbstractMesh:
        return jax.sharding.AbstractMesh(tuple(shape), tuple(names))

    def predict_divisible(function: Any, arguments: Any, *more: Any, **settings: Any) -> PredictedProgram:
        (array,) = arguments
        array.sharding.shard_shape(array.shape)
        return fake_predict(function, (0.1,), *more, **settings)

    def build(mesh: jax.sharding.AbstractMesh) -> tuple[Any, tuple[Any, ...]]:
        sharding = jax.sharding.NamedSharding(mesh, P("data"))
        return step, (jax.ShapeDtypeStruct((1001, 256), "float32", sharding=sharding),)

    monkeypatch.setattr(programs, "predict_function", predict_divisible)
    monkeypatch.setattr(valkyrie.Slice, "mesh", make_mesh)
    result = valkyrie.search(build, slice=SLICE, meshes=[(8, 1), (1, 8)], quiet=True)
    statuses = {row.name: row.status for row in result.record.rows}
    assert statuses == {"mesh data=8 model=1": CompileStatus.failed, "mesh data=1 model=8": CompileStatus.ok}


def iter_seconds(stride: float) -> Iterator[float]:
    seconds = 0.0
    while True:
        yield seconds
        seconds += stride


def test_a_compile_at_the_end_of_the_budget_is_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    limits: list[float] = []

    def time_out(*arguments: Any, time_limit_s: float, **settings: Any) -> PredictedProgram:
        limits.append(time_limit_s)
        predicted = fake_predict(*arguments, **settings)
        return replace(predicted, prediction=replace(predicted.prediction, status=CompileStatus.timeout))

    monkeypatch.setattr(programs, "predict_function", time_out)
    search: Callable[..., valkyrie.Comparison] = valkyrie.search
    search_result = search(lambda mesh: (step, (0.1,)), slice=SLICE, budget=60, folder=tmp_path, quiet=True)
    assert not search_result.results and len(search_result.untried) == 4
    record = read_record(ComparisonRecord, tmp_path / SEARCH_FILE)
    assert len(record.untried) == 4 and record.target == SLICE.describe()
    assert all(part in str(search_result) for part in ("2 times the budget", "mesh data=1 model=8", "0 of 4 layouts"))
    assert "longer budget=" in str(search_result), "the same call would compile nothing again"
    page = (tmp_path / PAGE_FILE).read_text()
    assert (
        "<h1>4 layouts, none compiled" in page
        and "0 of 4 layouts compiled" in page
        and "fits" not in repr(search_result)
    )
    assert 119 < limits[0] <= 120, "twice the budget until a layout has a step time"
    search_result = search(lambda mesh: (step, (0.1,)), slice=SLICE, budget=60, time_limit_s=5, quiet=True)
    assert len(search_result.results) == 4 and limits[1] == 5
    search_result.write(tmp_path)
    search(lambda mesh: (step, (0.1,)), slice=SLICE, budget=60, folder=tmp_path, quiet=True)
    assert len(read_record(ComparisonRecord, tmp_path / SEARCH_FILE).rows) == 4, "an empty result replaces no other"


@pytest.mark.parametrize(("cached", "first_s", "factor"), [(True, 0.1, 1), (False, 0, 2)])
def test_the_budget_is_twice_as_long_until_a_program_has_a_step_time(
    cached: bool, first_s: float, factor: int, monkeypatch: pytest.MonkeyPatch
):
    limits: list[float] = []

    def end_first_compile(function: Any, arguments: Any, *more: Any, time_limit_s: float, **settings: Any):
        limits.append(time_limit_s)
        predicted = fake_predict(function, (first_s,), *more, **settings)
        changes: dict[str, Any] = {"compile": CompileTimes(cached=cached)}
        if len(limits) == 2:
            changes = {"status": CompileStatus.timeout, "step": None}
        return replace(predicted, prediction=replace(predicted.prediction, **changes))

    monkeypatch.setattr(programs, "predict_function", end_first_compile)
    search: Callable[..., valkyrie.Comparison] = valkyrie.search
    search_result = search(lambda mesh: (step, (0.1,)), slice=SLICE, budget=60, quiet=True)
    assert len(search_result.results) == 1 and len(limits) == 2
    assert 119 < limits[0] <= 120 and factor * 60 - 1 < limits[1] <= factor * 60
    assert "longer budget=" in str(search_result), "the same call would compile nothing again"


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"meshes": [(2, 2)]}, ValueError, "has 4 devices, but v5e-8"),
        ({"meshes": [(8,)]}, ValueError, "with another number of axes than axes="),
        ({"meshes": []}, ValueError, "meshes= is empty"),
        ({"meshes": "2x4"}, TypeError, "meshes= takes a list of meshes"),
        ({"rules": ["dp"]}, TypeError, "rules= takes"),
        ({"rules": {}}, ValueError, "rules= is empty"),
        ({"budget": "5 minutes"}, ValueError, "budget=5 minutes is not a time"),
        ({"budget": -1}, ValueError, "budget=-1"),
        ({"axes": "data"}, TypeError, "axes= takes names"),
        ({"meshes": [("2", 4)]}, TypeError, "a mesh of 2 x 4: .*'2'"),
    ],
)
def test_illegal_searches_are_refused(more: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        valkyrie.search(lambda mesh: (step, (0.1,)), slice=SLICE, **more)


@pytest.mark.parametrize(
    ("build", "rules", "message"),
    [
        (step, None, r"^build is a jitted function"),
        (
            lambda mesh: None,
            {"dp": 1},
            r"^build .*\(mesh\), .*build\(mesh, rule\)",
        ),
        (
            lambda mesh, rule: None,
            None,
            r"^build .*\(mesh, rule\), .*build\(mesh\)",
        ),
    ],
)
def test_functions_that_cannot_build_a_step_are_refused(build: Any, rules: dict[str, int] | None, message: str):
    with pytest.raises(TypeError, match=message):
        valkyrie.search(build, slice=SLICE, rules=rules)
