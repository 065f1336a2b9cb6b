"""Tests of predictions of compiled layouts: numbers that add up, hints, and the printed report."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from helpers import compose_run
from outcomes import fitting_outcome
from valkyrie.compiled.collectives import CollectiveUse
from valkyrie.config.run import Run
from valkyrie.foreign_errors import Allocation
from valkyrie.machine.replay import OpTotals, Replay
from valkyrie.parts import PartKind, StepPart
from valkyrie.records import decode, encode
from valkyrie.search.compile import summary
from valkyrie.search.compile.alternatives import memory_savings, other_partitions
from valkyrie.search.compile.correction import held_out_ratio, published_runs
from valkyrie.search.compile.hints import layout_hints
from valkyrie.search.compile.prediction import (
    Alternatives,
    CompileOutcome,
    CompileStatus,
    ForeignProgram,
    FullerRemat,
    Hint,
    HintCode,
    MemoryReport,
    PredictedStep,
    Prediction,
    RematReport,
    Saving,
    StepInterval,
    read_prediction,
    short_cause,
    short_source,
)
from valkyrie.search.compile.runner import CompiledRun
from valkyrie.search.compile.show import describe_interval, make_table, print_record
from valkyrie.search.compile.summary import summarise
from valkyrie.train.options import CHIP, USER, Option
from valkyrie.train.screen import make_console

GOLDENS = Path(__file__).parent / "goldens" / "report"
FITS = fitting_outcome()


@pytest.fixture(scope="module")
def run() -> Run:
    return compose_run("model=gpt_1b", "mesh=4x4x2", "partition=2d_tp", "target=v4-64", "batch=64")


def make_use(axes: tuple[str, ...], sent: float, exposed: float) -> CollectiveUse:
    return CollectiveUse(
        "all-reduce", axes, ("b",), "jit(step)/while/body/a/dot", "/x/valkyrie/models/s5.py:9", 24.0, sent, {"b": sent},
        2 * exposed, exposed,
    )  # fmt: skip


def replay(uses: list[CollectiveUse], step: float = 1.0) -> Replay:
    exposed: dict[tuple[str, ...], float] = {}
    for entry in uses:
        exposed[entry.mesh_axes] = exposed.get(entry.mesh_axes, 0.0) + entry.exposed_s
    rest = step - sum(exposed.values())
    parts = [StepPart(PartKind.matmul, (), rest)]
    parts += [StepPart(PartKind.exposed, axes, seconds) for axes, seconds in exposed.items()]
    costs = [OpTotals(PartKind.matmul, (), f"op{i}", "a.py:1", 1.0, rest / 20) for i in range(20)]
    costs += [OpTotals(PartKind.exposed, u.mesh_axes, u.op_name, u.source, u.calls, u.exposed_s) for u in uses]
    return Replay(step, parts, 1e13, 2 * (step - rest), uses, costs, [], ["a kernel was guessed"])


def predict(run: Run, result: Replay | None, outcome: CompileOutcome = FITS) -> Prediction:
    """Return the prediction of a run, after encoding it as a record and decoding it. It has no hints."""
    compiled = CompiledRun(outcome, Path("cache"), Path("cache"), False, 3.0)
    prediction = summarise(run, compiled, result, result.collectives if result else [])
    return decode(Prediction, encode(prediction), "compile.json")


def find_hint(code: HintCode, prediction: Prediction, *others: Prediction) -> Hint | None:
    return next((hint for hint in layout_hints(prediction, others) if hint.code is code), None)


def test_memory_adds_up_to_the_peak(run: Run):
    memory = predict(run, None).memory
    assert memory is not None and memory.usable is not None
    assert (memory.peak, memory.code, memory.host) == (5100, 80, 70)
    assert memory.reserved == int(32 * 2**30) - memory.usable
    assert sum(memory.split.values()) == memory.peak
    assert memory.headroom == memory.usable - 5100


def test_speed_follows_from_the_seconds_of_a_step(run: Run):
    step = predict(run, replay([], step=2.0)).step
    assert step is not None
    tokens = 64 * 2048
    assert step.tokens_per_second == tokens / 2
    assert step.tokens_per_second_per_chip == tokens / 2 / 32
    flops = 3 * run.model.flops_per_token(2048) * tokens
    assert step.mfu == pytest.approx(flops / (2.0 * 32 * 275e12))
    assert step.tokens_per_dollar["on_demand"] == pytest.approx(tokens / 2 * 3600 / (32 * 3.22))
    assert step.mfu_denominator is not None and step.mfu_denominator.startswith("275 TFLOP/s")


def test_a_prediction_carries_the_interval_of_published_runs(run: Run):
    step = predict(run, replay([], step=2.0)).step
    assert step is not None and step.interval is not None
    interval = step.interval
    on_v4 = [held_out_ratio(published_runs(), row) for row in published_runs() if row.chip == "v4"]
    assert (interval.rows, interval.chip) == (len(on_v4), "v4")
    worst = max(*on_v4, *(1 / ratio for ratio in on_v4))
    assert (interval.low_s, interval.high_s) == pytest.approx((2 / worst, 2 * worst))
    known = StepInterval(low_s=0.42, high_s=0.5, low=0.98, high=1.16, rows=6, models=3, chip="v4")
    text = describe_interval(known)
    assert all(part in text for part in ("420.0 ms", "500.0 ms", "6 published", "3 models", "on v4", "16%"))
    assert "other chips" in describe_interval(replace(known, chip=None))
    assert "mode=calibrate" in describe_interval(None)
    assert "measured_s=" in describe_interval(None, is_program=True), "what a user can do about it"
    assert describe_interval(None, platform="gpu") != describe_interval(None, platform="tpu") == describe_interval(None)


def test_bytes_sent_add_up_in_every_breakdown(run: Run):
    sent = predict(run, replay([make_use(("x",), 7.0, 0.1), make_use(("x", "y"), 5.0, 0.0)])).communication
    assert sent is not None and sent.bytes == 12
    assert sent.by_mesh_axes == {("x",): 7, ("x", "y"): 5}
    assert sent.bytes_by_torus_axis == {"b": 12}
    assert [record.bytes for record in sent.collectives] == [7, 5]


def test_hints_follow_from_the_numbers(run: Run):
    unnamed = replace(make_use(("y",), 3.0, 0.11), op_name="", source="")
    prediction = predict(run, replay([make_use(("y",), 7.0, 0.3), unnamed]))
    first = layout_hints(prediction)[0]
    assert (first.code, first.mesh_axes, first.share) == (HintCode.exposed, ("y",), pytest.approx(0.41))
    assert "30%" in first.text and "a/dot (models/s5.py:9)" in first.text and "y is MP2(embed)" in first.text
    assert find_hint(HintCode.exposed, predict(run, replay([make_use(("y",), 7.0, 0.01)]))) is None
    other = predict(run, replay([], step=0.5))
    other = replace(other, about=replace(prediction.layout, layout="4x4x2-1d_tp"))
    faster = find_hint(HintCode.faster_layout, prediction, other)
    assert faster is not None and faster.changes == ("4x4x2-1d_tp",) and faster.share == pytest.approx(0.5)
    assert find_hint(HintCode.faster_layout, other, prediction) is None


def test_the_hint_on_waiting_names_a_partition_that_fits_and_sends_less(run: Run):
    candidates = other_partitions(run)
    assert {entry.partition for entry in candidates} >= {"dp", "fsdp", "1d_tp"}
    waiting = replay([make_use(("y",), 6e10, 0.5), make_use(("x",), 2e10, 0.2)])
    prediction = predict(run, waiting, fitting_outcome(alternatives=Alternatives(partitions=candidates)))
    over_y, over_x, *_ = layout_hints(prediction)
    assert over_y.changes == ("partition=dp", "partition=fsdp")
    assert "not 80 GB" in over_y.text and "of 30.8 GiB" in over_y.text
    assert over_x.changes == (), "one partition is named once"
    assert prediction.memory is not None
    smaller = replace(prediction, memory=replace(prediction.memory, usable=8 * 2**30))
    assert layout_hints(smaller)[0].changes == ("partition=fsdp",)
    tried = predict(run, replay([], step=0.5))
    tried = replace(tried, about=replace(tried.layout, partition="fsdp", layout="4x4x2-fsdp"))
    assert "partition=fsdp" not in layout_hints(prediction, [tried])[0].changes, "its result is known"
    none = replace(prediction, memory=replace(prediction.memory, usable=2**30))
    assert all(hint.changes == () for hint in layout_hints(none))


def test_the_smallest_sufficient_change_is_listed(run: Run):
    every_change = memory_savings(run, missing_bytes=1, count=99)
    assert len(every_change) > 2 and memory_savings(run, missing_bytes=1, count=2) == (
        every_change[0],
        every_change[-1],
    )


def test_partitions_that_do_not_send_less_are_not_suggested():
    fsdp = compose_run("model=gpt_1b", "mesh=4x4x2", "partition=fsdp", "target=v4-64", "batch=64")
    waiting, candidates = replay([make_use(("x", "y", "z"), 9e9, 0.5)]), Alternatives(partitions=other_partitions(fsdp))
    hint = find_hint(HintCode.exposed, predict(fsdp, waiting, fitting_outcome(alternatives=candidates)))
    assert hint is not None and hint.changes == ()


def parts(**seconds: float) -> tuple[StepPart, ...]:
    return tuple(StepPart(PartKind[kind], (), value) for kind, value in seconds.items())


def with_step(prediction: Prediction, **fields: float) -> Prediction:
    assert prediction.step is not None
    return replace(prediction, step=replace(prediction.step, **fields))


def test_hints_mention_copies_and_narrow_products(run: Run):
    prediction = replace(predict(run, replay([])), parts=parts(matmul=0.6, copies=0.4))
    first = layout_hints(prediction)[0]
    assert (first.code, first.share, first.changes) == (HintCode.copies, 0.4, ()) and "host" not in first.text
    record, remat = replace(prediction.layout, remat="offload"), RematReport(host={"query": 1})
    offloads = with_step(replace(prediction, about=record, remat=remat), executed_flops=2e13, model_flops=1e13)
    assert find_hint(HintCode.recomputation, offloads) is None, "an offload is not blamed for it"
    fuller = (FullerRemat("remat=none", 99 * 2**30), FullerRemat("remat=dots", 2**30))
    copies = find_hint(HintCode.copies, replace(offloads, alternatives=Alternatives(fuller)))
    assert copies is not None and copies.changes == ("remat=dots",) and "about 1.0 of the 30.7 GiB" in copies.text
    full = replace(offloads, alternatives=Alternatives((FullerRemat("remat=full", 1),)))
    copies = find_hint(HintCode.copies, full)
    assert copies is not None and copies.changes == ()
    slow = with_step(replace(prediction, parts=parts(matmul=1.0)), product_rate=0.3)
    narrow = find_hint(HintCode.narrow_products, slow)
    assert narrow is not None and "fewer devices" in narrow.text
    whole = find_hint(HintCode.narrow_products, replace(slow, about=replace(slow.layout, degrees={"MP1": 1, "MP2": 1})))
    assert whole is not None and "no axis splits" in whole.text


def test_a_step_without_other_hints_gets_the_share_of_its_largest_part(run: Run):
    prediction = with_step(predict(run, replay([make_use(("y",), 7.0, 0.1)])), product_rate=0.77)
    (hint,) = layout_hints(prediction)
    assert (hint.code, hint.share) == (HintCode.largest_part, pytest.approx(0.9))
    assert "77% of peak" in hint.text and hint.text.endswith("over y (10%).")
    (hint,) = layout_hints(replace(prediction, parts=parts(matmul=1.0)))
    assert "100%" in hint.text and hint.text.endswith("77% of peak.")


def test_the_hint_on_exposed_gradient_sums_names_the_dtype():
    overrides = ("model=gpt_1b", "mesh=4x4x2", "partition=fsdp", "target=v4-64", "batch=64", "precision=bf16_mixed")
    waited = replay([make_use(("x", "y", "z"), 7.0, 0.29)])
    hint = find_hint(HintCode.reduction, predict(compose_run(*overrides), waited))
    assert hint is not None and hint.share == pytest.approx(0.29)
    assert hint.changes == ("precision.reduction=bfloat16",)
    narrow = predict(compose_run(*overrides, "precision.reduction=bfloat16"), waited)
    assert find_hint(HintCode.reduction, narrow) is None
    gathers = replay([replace(make_use(("x", "y", "z"), 7.0, 0.29), kind="all-gather")])
    assert find_hint(HintCode.reduction, predict(compose_run(*overrides), gathers)) is None


def test_fully_exposed_communication_is_0_percent_hidden(run: Run):
    prediction = predict(run, replay([make_use(("y",), 7e9, 0.41)]))
    assert prediction.communication is not None
    sent = replace(prediction.communication, sending_s=0.41 * (1 - 1e-9))
    assert "\n0% of the" in report_text(replace(prediction, communication=sent))


def test_the_report_of_a_layout_that_does_not_fit(run: Run):
    gib = 2**30
    largest = (Allocation(12 * gib, "bf16[24,64]", "jit(step)/while/body/f/dot"),)
    savings = (Saving("remat=full", 9 * gib),)
    shortage = MemoryReport(needed=int(37.9 * gib), usable=int(30.8 * gib), largest=largest, savings=savings)
    prediction = predict(run, None, CompileOutcome(CompileStatus.does_not_fit, "", shortage=shortage))
    (verdict,) = (line for line in report_text(prediction).splitlines() if "does not fit" in line)
    for words in ("37.9 GiB", "30.8 GiB", "bf16[24,64] 12.0 GiB", "(f/dot)", "remat=full", "-9.0 GiB"):
        assert words in verdict


def test_the_printed_report_equals_the_golden_file(run: Run):
    """To rewrite the golden file: `UPDATE_GOLDENS=1 pytest tests/test_summary.py`."""
    options = (Option("xla_a", "true", CHIP), Option("xla_b", "7", USER), Option("xla_c", None, USER))
    prediction = predict(run, replay([make_use(("y",), 7e9, 0.41)]), fitting_outcome(options=options))
    assert prediction.step is not None
    step = replace(prediction.step, interval=None)  # published runs are added now and then
    hint = Hint(HintCode.largest_part, "do [tpu] this")
    text, golden = report_text(replace(prediction, step=step, hints=(hint,))), GOLDENS / "compile.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_file_of_version_1_is_read():
    prediction = read_prediction(GOLDENS / "compile.json")
    assert (
        prediction.status is CompileStatus.ok
        and prediction.step is not None
        and isinstance(prediction.step, PredictedStep)
    )
    assert sum(part.seconds for part in prediction.parts) == pytest.approx(prediction.step.step_s)
    assert {part.mesh_axes for part in prediction.parts if part.kind is PartKind.exposed} == {("x", "y")}
    assert prediction.communication is not None and prediction.communication.by_mesh_axes == {("x", "y"): 2366336.0}
    assert prediction.communication.collectives[0].kind == "reduce-scatter"
    assert str(prediction.positions[4]) == "0:1,3,0:0" and prediction.costs[0].seconds > 0
    assert decode(Prediction, encode(prediction), "compile.json") == prediction
    first_line = report_text(prediction).splitlines()[0]
    assert all(part in first_line for part in ("valkyrie_tiny", "2x4x1-fsdp", "v5e-8"))


def test_the_error_for_an_unreadable_file_names_the_command(tmp_path: Path):
    (tmp_path / "compile.json").write_text('{"schema": 1, "about": {}, "status": "ok", "seconds": {"weather": 1.0}}')
    with pytest.raises(ValueError, match="valkyrie-train mode=compile"):
        read_prediction(tmp_path / "compile.json")


def test_a_console_prints_texts_as_they_are_also_in_notebooks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    console = make_console(text := io.StringIO())
    (table := make_table("[x]", ["[y]"])).add_row("[z,x]")
    console.print("[x,y] :x:")
    console.print(table)
    assert {"[x,y]", ":x:", "[x]", "[y]", "[z,x]"} <= set(text.getvalue().split())


def test_short_names_are_distinct():
    assert short_cause("jit(step)/while/body/checkpoint/a/b/c/d") == "b/c/d"
    assert short_cause(None) == "unnamed"
    assert short_source("/home/x/valkyrie/models/s5.py:94") == "models/s5.py:94"


def report_text(found: Prediction) -> str:
    console = Console(file=io.StringIO(), width=200, soft_wrap=True, markup=False)
    print_record(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_older_prediction_of_a_foreign_program_is_read(tmp_path: Path):
    record = {"program": "step", "target": "v5e-8", "described": "v5e-8", "chip": "v5e", "axes": {"data": 8}}
    (tmp_path / "old.json").write_text(json.dumps({"schema": 2, "about": record, "status": "ok"}))
    program = read_prediction(tmp_path / "old.json").program
    assert program == ForeignProgram("step", "v5e-8", "v5e-8", "v5e", {"data": 8})


def test_only_lines_of_python_files_are_read():
    """A module from elsewhere may name any file of the user as a source."""
    own_line = summary._read_line(f"{__file__}:1")
    assert own_line is not None and own_line.startswith('"""')
    assert summary._read_line(f"{Path(__file__).with_name('README.md')}:1") is None


def test_long_source_lines_end_in_an_ellipsis(tmp_path: Path):
    file = tmp_path / "step.py"
    file.write_text(f"  y = x @ w\n{'x' * 61}\n")
    costs = (OpTotals(PartKind.matmul, (), "dot_general", f"{file}:{n}", 1, 3.0 - n) for n in (1, 2))
    assert [line.text for line in summary.source_lines(costs)] == ["y = x @ w", "x" * 59 + "…"]
