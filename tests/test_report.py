"""Tests of the report of sweeps: known answers on hand-made sweeps, Markdown, CSV, and figures."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reported import GOLDEN_FOLDER, golden_summary, make_trial, trial_from_summary, write_sweep
from valkyrie.problems import ProblemRecord
from valkyrie.report import figures, values, words
from valkyrie.report.page import render_page
from valkyrie.report.rank import (
    best_per_workload,
    chip_price,
    compare,
    concordance,
    group_unsuccessful,
    pareto_front,
    peak_memory,
)
from valkyrie.report.records import find_result_folders, read_rows
from valkyrie.report.text import as_csv, as_markdown
from valkyrie.report.trace import read_timeline, read_torus, target_torus
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.sweep.noise import tied_ranks
from valkyrie.sweep.rows import Row, group_by_kind, pair_predictions, sort_by_speed
from valkyrie.sweep.table import sweep_table
from valkyrie.sweep.trial import Status, StepResult, Trial, TrialResult

FSDP = make_trial(
    "8x1x1-fsdp", 1000, peak_gib=4, price=1.2, part_shares={"matmul": 0.7, "exposed x": 0.2, "memory": 0.1}
)
TP = make_trial("2x4x1-2d_tp", 500, peak_gib=2, price=1.2, part_shares={"matmul": 0.4, "exposed x": 0.5, "memory": 0.1})
DP = make_trial("4x2x1-dp", 900, peak_gib=12, price=1.2, part_shares={"matmul": 0.6, "exposed x,y": 0.2, "memory": 0.2})
LARGE = make_trial("1x1x8-dp", None, peak_gib=20, status=Status.does_not_fit)
INDIVISIBLE = (ProblemRecord("batch_not_divisible", "batch", mesh_axes=("x",)),)
REFUSED = replace(
    make_trial("3x1x1-dp", None, status=Status.refused, reason="batch=16 is not divisible by 3"), problems=INDIVISIBLE
)
MEASURED = make_trial("8x1x1-fsdp", 40, stage="measure", target="auto")
MEASURED_TP = make_trial("2x4x1-2d_tp", 50, stage="measure", target="auto")


def sweep_rows(folder: Path, *trials: Trial, timeline_count: int = 0) -> list[Row]:
    return read_rows([write_sweep(folder, trials, timeline_count=timeline_count)])


def layouts(rows: list[Row]) -> list[str]:
    return [row.layout for row in rows]


def page_data(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    return sweep_rows(tmp_path, FSDP, TP, DP, LARGE, REFUSED, MEASURED, MEASURED_TP)


def test_the_memory_front_has_the_layouts_that_none_beats(rows):
    predicted = [row for row in rows if row.speed_kind.stage == "compile"]
    assert layouts(pareto_front(predicted, peak_memory)) == ["2x4x1-2d_tp", "8x1x1-fsdp"]
    assert values.memory(predicted)[0]["usable"] == 16


def test_price_and_its_pareto_front(tmp_path: Path):
    cheap = make_trial("8x1x1-fsdp", 300, target="v5e-8", price=1.2)
    dear = make_trial("8x1x1-fsdp", 900, target="v5p-16", price=4.2)
    worse = make_trial("2x4x1-2d_tp", 200, target="v5p-16", price=4.2)
    rows = sweep_rows(tmp_path, cheap, dear, worse)
    assert [row.speed_kind.target for row in pareto_front(rows, chip_price)] == ["v5e-8", "v5p-16"]
    assert [round(row.price or 0, 6) for row in rows] == [1.2, 4.2, 4.2]
    assert rows[0].dollars_per_million_tokens == pytest.approx(1.2 / 3600 / 300 * 1e6)
    assert [point["front"] for point in values.prices(rows)] == [True, True, False]
    assert values.prices(rows[1:]) == []


def test_the_report_lists_the_best_layout_per_target_and_work(tmp_path: Path):
    rows = sweep_rows(
        tmp_path,
        FSDP,
        TP,
        make_trial("2x4x1-2d_tp", 2000, target="v6e-8"),
        make_trial("8x1x1-fsdp", 1500, target="v6e-8"),
        make_trial("8x1x1-fsdp", 900, target="v6e-8", batch=64),
    )
    best = [(row.speed_kind.target, row.work.batch, row.layout) for row in best_per_workload(rows)]
    assert best == [("v6e-8", 16, "2x4x1-2d_tp"), ("v6e-8", 64, "8x1x1-fsdp"), ("v5e-8", 16, "8x1x1-fsdp")]
    assert rows[0].dollars_per_million_tokens, "the target with the lowest price per token comes first"


def test_heatmap_cells_have_the_best_layout_of_each_split(tmp_path: Path):
    degrees = {"DP": 2, "MP1": 4}
    rows = sweep_rows(
        tmp_path,
        make_trial("4x2x1-a", 100, degrees=degrees),
        make_trial("4x2x1-b", 300, degrees=degrees),
        make_trial("8x1x1-fsdp", 50, degrees={"FSDP": 8}),
        make_trial("2x4x1-d", 70, degrees={"DP": 2, "MP2": 4}),
        make_trial("1x8x1-c", None, degrees={"MP2": 8}, status=Status.refused, reason="heads (4) on y=8"),
    )
    cells = values.cells(sort_by_speed(rows))
    assert {(c["data"], c["mp1"], c["mp2"]): (c["rate"], c["label"], c["tried"]) for c in cells} == {
        (2, 4, 1): (300, "4x2x1-b", "2"),
        (2, 1, 4): (70, "2x4x1-d", "1"),
        (8, 1, 1): (50, "8x1x1-fsdp", "1"),
        (1, 1, 8): (None, "1x8x1-c", "1"),
    }
    assert values.cells(sort_by_speed(rows[:3])) == [], "no number of data splits has two cells to compare"


def test_error_bars_have_the_spread_of_the_steps(tmp_path: Path):
    bars = values.bars(
        sweep_rows(tmp_path, make_trial("8x1x1-fsdp", 100, stage="measure", p90_ratio=1.25, min_ratio=0.8))
    )
    assert [(bar["rate"], bar["low"], bar["high"]) for bar in bars] == [(800, 640, 1000)]
    assert bars[0]["spread"].count("s") == 2


def test_explanations_name_recomputation_and_opposing_effects(tmp_path: Path):
    parts = {"matmul": 0.5, "exposed x": 0.5}
    fast = make_trial("8x1x1-fsdp", 1000, part_shares=parts, executed_flops=1e9, product_rate=0.5)
    slow = make_trial(
        "8x1x1-dp", 500, part_shares={"matmul": 0.9, "exposed x": 0.1}, executed_flops=2e9, product_rate=0.5
    )
    text = words.explain_ratio(*sweep_rows(tmp_path, fast, slow))
    assert text.index("64.0 ms") < text.index("230.4 ms") < text.index("FLOPs") < text.index("partly offset")
    _, _, opposing = text.partition("partly offset by")
    assert re.search(r"25\.6 ms .*\bdp, 64\.0 ms .*\bfsdp\b", opposing)
    fast = make_trial("8x1x1-fsdp", 1000, part_shares={"matmul": 0.5, "compute": 0.2, "exposed x": 0.3})
    slow = make_trial("8x1x1-dp", 900, part_shares={"matmul": 0.45, "compute": 0.37, "exposed x": 0.18})
    main, offset, *_ = words.compare_rows(sweep_rows(tmp_path, fast, slow)).explanations["0,1"][1:]
    assert main.startswith("Other arithmetic") and "offset by waiting" in offset, "the largest cause first"


def test_only_trials_of_the_same_work_are_compared(tmp_path: Path):
    other = make_trial("8x1x1-fsdp", 2000, batch=64)
    rows = sweep_rows(tmp_path, other, FSDP, TP, LARGE)
    answer = words.summarise_kind(rows[0].speed_kind, rows)
    assert rows[0].work.label in answer.sentence and "2,000 tokens/s/chip" in answer.sentence
    assert [line.partition(": ")[0] for line in answer.reasons] == [rows[1].work.label] * 2
    assert "2.0x" in answer.reasons[0] and "does not fit" in answer.reasons[1]


def test_measured_steps_are_explained_by_their_collectives(tmp_path: Path):
    fast = make_trial("8x1x1-fsdp", 1000, stage="measure", collective_shares={"x": 0.5})
    slow = make_trial("2x4x1-2d_tp", 500, stage="measure", collective_shares={"x": 0.25, "y": 0.5})
    rows = sweep_rows(tmp_path, fast, slow)
    whole, parts = 1e3 * (rows[0].step_s or 0), values.parts(rows)
    assert [(p["label"], p["part"]) for p in parts] == [
        ("8x1x1-fsdp", "compute"),
        ("8x1x1-fsdp", "collectives over x"),
        ("2x4x1-2d_tp", "compute"),
        ("2x4x1-2d_tp", "collectives over x"),
        ("2x4x1-2d_tp", "collectives over y"),
    ]
    assert [p["amount"] / whole for p in parts] == pytest.approx([0.5, 0.5, 0.5, 0.5, 1.0], rel=1e-4)
    text = words.explain_ratio(*rows)
    assert f"{1.5 * whole:.1f} ms" in text and f"{whole / 2:.1f} ms" in text and "outside collectives" not in text
    slower = make_trial("4x2x1-dp", 50, stage="measure", collective_shares={"x": 1.5})
    (row,) = sweep_rows(tmp_path / "slow", slower)
    assert [p["part"] for p in values.parts([row])] == ["collectives over x"]
    assert sum(part.seconds for part in row.parts) == pytest.approx(row.step_s), "never above the step"
    trace = replace(slower.results.trace, step_s=None)
    slower = replace(slower, results=replace(slower.results, trace=trace))
    (row,) = sweep_rows(tmp_path / "old", slower)
    assert row.parts == (), "an older record counted what overlaps twice"


NOISY = {"stage": "measure", "target": "auto", "p90_ratio": 1.1, "min_ratio": 0.9}


def test_differences_within_the_spread_have_no_cause_and_share_a_rank(tmp_path: Path):
    trial_rows = sweep_rows(
        tmp_path,
        make_trial("8x1x1-fsdp", 1000, collective_shares={"x": 0.3}, **NOISY),
        make_trial("2x4x1-2d_tp", 900, collective_shares={"x": 0.5}, **NOISY),
        make_trial("4x2x1-dp", 500, collective_shares={"x": 0.5}, **NOISY),
    )
    answer = words.summarise_kind(trial_rows[0].speed_kind, trial_rows)
    assert answer.remarks[0].endswith("step times: 2x4x1-2d_tp.") and trial_rows[0].speed_kind.simulated
    assert re.findall(r"[0-9.]+ ms", answer.reasons[0]) == [
        "128.0 ms",
        "115.2 ms",
        "140.8 ms",
        "142.2 ms",
        "128.0 ms",
        "156.4 ms",
    ]
    assert "2.0x" in answer.reasons[1]
    assert [row[0] for row in page_data(render_page(trial_rows))["rows"]] == [1, 1, 3]
    assert re.findall(r"^\| ([0-9]) ", as_markdown(trial_rows), re.MULTILINE) == ["1", "1", "3"]
    outlier = make_trial("2x2x2-2d_tp", 100, **{**NOISY, "p90_ratio": 9.0})
    assert tied_ranks(
        [row.trial for row in sweep_rows(tmp_path / "more", *(row.trial for row in trial_rows), outlier)]
    ) == [
        1,
        1,
        3,
        4,
    ]
    table = sweep_table([row.trial for row in trial_rows], tmp_path)
    assert [*map(str, table.columns[0].cells)] == ["1", "1", "3"] and "same rank" in str(table.caption)
    assert sweep_table([FSDP, TP], tmp_path).caption is None
    measured = make_trial("2x2x2-2d_tp", 100, stage="measure")
    assert [*map(str, sweep_table([FSDP, TP, measured], tmp_path).columns[0].cells)] == ["1", "2", "1"]


def test_agreement_leaves_out_differences_within_noise(tmp_path: Path):
    rows = sweep_rows(
        tmp_path, FSDP, TP, *(make_trial(f"{t.about.layout}", r, **NOISY) for t, r in ((FSDP, 40), (TP, 41)))
    )
    assert len(pair_predictions(rows)) == 2 and concordance(pair_predictions(rows)) is None


def test_partitions_with_equivalent_layouts_are_not_compared(tmp_path: Path):
    tensor = {"DP": 2, "MP1": 4}
    trial_rows = sweep_rows(
        tmp_path,
        make_trial("1x8x1-1d_tp", 1000, degrees={"DP": 8}, sharding="a"),
        make_trial("8x1x1-dp", 900, degrees={"DP": 8}, sharding="a"),
        make_trial("4x1x2-2d_tp", 400, degrees=tensor, sharding="b"),
        make_trial("4x2x1-1d_tp", 380, degrees=tensor, sharding="b"),
    )
    answer = words.summarise_kind(trial_rows[0].speed_kind, trial_rows)
    assert "data parallel" in answer.remarks[0]
    reason, another = answer.reasons
    assert reason.startswith("dp on 8x1x1") and "2.4x" in reason and "1d_tp on 4x2x1" in reason
    assert another.startswith("2d_tp") and another.endswith("as 1d_tp).")
    column_index = [column["id"] for column in page_data(render_page(trial_rows))["columns"]].index("alike")
    assert [row[column_index] for row in page_data(render_page(trial_rows))["rows"]] == ["dp", "", "1d_tp", ""]


def test_predictions_and_measurements_are_matched_by_layout_and_work(rows, tmp_path: Path):
    pairs = pair_predictions(rows)
    assert [(p.a.layout, p.a.speed_kind.stage, p.b.speed_kind.stage) for p in pairs] == [
        ("8x1x1-fsdp", "compile", "measure"),
        ("2x4x1-2d_tp", "compile", "measure"),
    ]
    assert concordance(pairs) == 0
    turned = make_trial("2x4x1-2d_tp", 30, stage="measure", target="auto")
    other_work = make_trial("4x2x1-dp", 30, stage="measure", target="auto", batch=64)
    other_pairs = pair_predictions(sweep_rows(tmp_path / "other", FSDP, TP, DP, MEASURED, turned, other_work))
    assert len(other_pairs) == 2 and concordance(other_pairs) == 1


def test_refusals_with_the_same_code_and_axes_are_grouped(tmp_path: Path):
    more = replace(REFUSED, key="5x1x1", name="5x1x1-dp", reason="batch=16 is not divisible by 5")
    older = replace(more, key="older", name="older", problems=())
    killed = make_trial("2x2x2-dp", None, status=Status.killed, reason="signal 9 (SIGKILL) ended its process")
    groups_of_reasons = group_unsuccessful(sweep_rows(tmp_path, REFUSED, LARGE, more, older, killed))
    assert [(status, reason, len(members)) for status, reason, members in groups_of_reasons] == [
        (Status.refused, REFUSED.reason, 2),
        (Status.refused, more.reason, 1),
        (Status.does_not_fit, groups_of_reasons[2][2][0].reason, 1),
        (Status.killed, killed.reason, 1),
    ]
    assert groups_of_reasons[2][1].startswith("needs 20.0 GiB")


def test_two_sweeps_can_be_compared(tmp_path: Path):
    before = write_sweep(tmp_path / "before", [FSDP, TP, DP])
    after = write_sweep(tmp_path / "after", [make_trial("8x1x1-fsdp", 1500), make_trial("2x4x1-2d_tp", 1000), LARGE])
    comparison = compare(read_rows([tmp_path]), str(before), str(after))
    assert [(p.a.layout, p.ratio) for p in comparison.pairs] == [("2x4x1-2d_tp", 2.0), ("8x1x1-fsdp", 1.5)]
    assert comparison.median_ratio == 1.75
    assert (layouts(comparison.only_a), layouts(comparison.only_b)) == (["4x2x1-dp"], ["1x1x8-dp"])
    with pytest.raises(ValueError, match="elsewhere .*: hand"):
        compare(read_rows([tmp_path]), "elsewhere", str(before))


def test_row_labels_are_distinct(tmp_path: Path):
    write_sweep(tmp_path / "one", [FSDP, make_trial("8x1x1-fsdp", 10, batch=64)])
    write_sweep(tmp_path / "two", [FSDP])
    labels = list(values.label_rows(read_rows([tmp_path])).values())
    assert len(set(labels)) == 3
    assert "8x1x1-fsdp batch 64" in labels and any("one" in label for label in labels)


def test_a_refused_trial_has_the_kind_of_its_target(tmp_path: Path):
    real = trial_from_summary(golden_summary("measure") | {"simulated": False}, "measure", "hand", "real")
    refused = make_trial("3x1x1-dp", None, stage="measure", target="auto", status=Status.refused, reason="no")
    assert {row.speed_kind.simulated for row in sweep_rows(tmp_path / "real", real, refused)} == {False}
    assert {row.speed_kind.simulated for row in sweep_rows(tmp_path / "sim", MEASURED, refused)} == {True}


def test_figures_of_real_trials_are_drawn(tmp_path: Path):
    import vl_convert

    real = [
        trial_from_summary(golden_summary(stage), stage, "real", f"{stage}-{name}")
        for stage in ("compile", "measure")
        for name in "ab"
    ]
    real = [replace(t, about=replace(t.about, layout=t.name)) for t in real if t.about is not None]
    rows = sweep_rows(tmp_path, *real)
    for members in group_by_kind(rows).values():
        specs = {figure.id: figures.figure_spec(figure, members) for figure in figures.GROUP_FIGURES}
        simulated = members[0].speed_kind.simulated
        assert {name for name, spec in specs.items() if spec is None} == {"heat", *(["parts"] if simulated else [])}
        for spec in specs.values():
            assert spec is None or vl_convert.vegalite_to_svg(spec).startswith("<svg")
        assert all(figures.figure_spec(figure, members[:1]) is None for figure in figures.GROUP_FIGURES)


def test_a_reduced_timeline_has_the_same_total_time(tmp_path: Path):
    row = sweep_rows(tmp_path, FSDP, timeline_count=1)[0]
    events = json.loads((GOLDEN_FOLDER / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    reduced, whole = read_timeline(row, 100), read_timeline(row, len(spans))
    assert reduced is not None and whole is not None
    assert reduced is not None and whole is not None
    assert len(reduced.spans) <= 100 < len(whole.spans) == len(spans)
    assert reduced.step_us == whole.step_us == pytest.approx(max(e["ts"] + e["dur"] for e in spans), abs=0.01)
    assert reduced.tracks == whole.tracks and reduced.tracks[0] == "compute" and "copies" in reduced.tracks
    assert sum(span[5] for span in reduced.spans) == len(spans)
    assert reduced.axes.keys() & set(reduced.names)


def test_the_torus_picture_has_every_device_once(tmp_path: Path):
    row = sweep_rows(
        tmp_path, trial_from_summary(golden_summary("compile"), "compile", "real", "run"), timeline_count=1
    )[0]
    drawing = read_torus(row)
    assert drawing is not None
    assert (drawing.shape, drawing.wrap) == ((2, 4), (False, False))
    assert sorted(drawing.devices_by_chip) == list(range(8))
    assert drawing.axes == [("x", 2), ("y", 4), ("z", 1)]


@pytest.mark.parametrize(
    ("target", "overrides", "shape", "slices", "twisted"),
    [
        ("v4-64", [], (2, 4, 4), 1, False),
        ("v4-512", ["target.topology=4x4x16"], (4, 4, 16), 1, False),
        ("v5e-256", ["target.slices=2"], (16, 16), 2, False),
        ("v4-256", ["target.topology=4x4x8_twisted"], (4, 4, 8), 1, True),
        ("v4-4x4x8_twisted", [], (4, 4, 8), 1, True),
        ("cpu8", [], None, 1, False),
        ("h100-8", [], None, 1, False),
    ],
)
def test_the_torus_of_a_target_is_drawn(target, overrides, shape, slices, twisted):
    drawing = target_torus(make_trial("8x1x1-fsdp", 9, target=target, overrides=overrides).about)
    picture = (None, 1, False) if drawing is None else (drawing.shape, drawing.slices, drawing.twisted)
    assert picture == (shape, slices, twisted)


def test_a_twisted_torus_has_a_picture(tmp_path: Path):
    summary = golden_summary("compile")
    summary["positions"] = [f"0:{a},{b},{c}:0" for a in range(4) for b in range(4) for c in range(8)]
    twisted = make_trial("4x4x8-fsdp", 9, target="v4-256", overrides=["target.topology=4x4x8_twisted"])
    folder = write_sweep(tmp_path / "hand", [twisted], timeline_count=1)
    (folder / twisted.name / "compile.json").write_text(json.dumps(summary))
    (row,) = read_rows([folder])
    drawing = read_torus(row)
    assert drawing is not None and drawing.shape == (4, 4, 8)
    assert drawing.shifts == ((0, 0, 4), (0, 0, 4), (0, 0, 0))


def visible_text(text: str) -> str:
    """Return the text of a page that is visible without JavaScript, line by line."""
    body = re.sub(r"<(script|style).*?</\1>", "", text.partition("<main>")[2].partition("</main>")[0], flags=re.DOTALL)
    lines = (" ".join(html.unescape(line).split()) for line in re.sub(r"<[^>]+>", "\n", body).splitlines())
    return "\n".join(line for line in lines if line)


def test_the_visible_text_of_the_report_equals_the_golden_file(rows):
    """To rewrite the golden file: `UPDATE_GOLDENS=1 pytest tests/test_report.py`."""
    text = f"{as_markdown(rows)}\n# The page\n\n{visible_text(render_page(rows))}\n"
    golden_file = GOLDEN_FOLDER / "report.md"
    if os.environ.get("UPDATE_GOLDENS"):
        golden_file.write_text(text)
    assert text == golden_file.read_text()


def test_csv_has_a_row_for_each_trial(rows):
    records = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert len(records) == 7
    first = records[0]
    assert (first["layout"], first["status"], first["simulated"]) == ("8x1x1-fsdp", "ok", "false")
    assert float(first["tokens_per_second_per_chip"]) == 1000 and float(first["step_s"]) == 0.128
    assert int(first["peak_bytes"]) == 4 * 2**30 and float(first["exposed_s"]) > 0
    assert [r["reason"] for r in records if r["status"] == "refused"] == [REFUSED.reason]
    assert {r["simulated"] for r in records if r["stage"] == "measure"} == {"true"}
    assert set(first) >= {"DP", "FSDP", "MP1", "MP2", "SP"}


def test_sweeps_are_found_at_a_path_and_below_it(tmp_path: Path):
    first, second = write_sweep(tmp_path / "runs" / "one", [FSDP]), write_sweep(tmp_path / "runs" / "two", [TP])
    assert find_result_folders([tmp_path]) == [first, second]
    assert find_result_folders([first, tmp_path / "runs"]) == [first, second]
    assert find_result_folders([second / "trials.jsonl"]) == [second]


def test_a_refused_layout_is_named_by_its_request(tmp_path: Path):
    record = LayoutRecord("m", "3x1x1", "fsdp", "auto", microbatches=2, remat="full")
    trial_rows = sweep_rows(tmp_path, replace(REFUSED, about=record), replace(REFUSED, key="bare", about=None))
    assert layouts(trial_rows) == ["3x1x1-fsdp-mb2-remat_full", "3x1x1-dp"]
    assert page_data(render_page(trial_rows))["rows"][0][5] == "refused"


def test_a_training_has_a_rate_but_no_step_time(tmp_path: Path):
    trained = replace(FSDP, stage="train", results=TrialResult(simulated=True, loss=2.0))
    speed = StepResult(tokens_per_second=800.0, tokens_per_second_per_chip=100.0)
    rated = replace(trained, key="rated", results=replace(trained.results, step=speed))
    trial_rows = sweep_rows(tmp_path, trained, rated)
    assert [row.has_speed for row in trial_rows] == [False, True]
    assert (
        trial_rows[1].step_s == pytest.approx(1.28) and trial_rows[1].speed_kind.devices == "simulated devices (v5e-8)"
    )
    assert page_data(render_page(trial_rows))["rows"][0][3] == pytest.approx(1.28)


def test_trainings_of_equal_names_have_a_loss_curve_each(tmp_path: Path):
    trial = replace(FSDP, stage="train", name="same", folder="same", overrides=[])
    for sweep in ("a", "b"):
        write_sweep(tmp_path / sweep, [trial])
        (tmp_path / sweep / "same").mkdir()
        (tmp_path / sweep / "same" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    rows = read_rows([tmp_path])
    assert [value["label"] for value in values.losses(rows)] == [f"same ({tmp_path / s})" for s in ("a", "b")]
    assert [value["label"] for value in values.losses(rows[:1])] == ["same"]
    assert f"at most {values.MAX_CURVES} training runs" in figures.LOSS.caption
