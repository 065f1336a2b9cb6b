"""Tests of the published runs: legal rows, tables of errors, corrections of step times, and error intervals."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers import compose_run, config_names
from valkyrie.models import is_dense_transformer
from valkyrie.parts import PartKind, StepPart
from valkyrie.search.compile.correction import (
    PublishedRun,
    published_correction,
    published_interval,
    published_runs,
    step_interval,
)
from valkyrie.search.compile.prediction import CompileStatus, MemoryReport, PredictedStep, Prediction

TABLE_FILE = Path(__file__).parents[1] / "experiments" / "published" / "rows.csv"
ROWS = list(csv.DictReader(TABLE_FILE.read_text().splitlines()))
COMPARABLE_ROWS = [row for row in ROWS if row["experiment"]]
PARAMETERS = {
    "gpt_5b_h100": 5_038_084_096,
    "llama_70b_h100": 70_553_706_496,
    "llama_70b_v6e": 70_553_706_496,
    "llama_7b_h100": 6_738_415_616,
    "llama_8b_v6e": 8_030_261_248,
    "maxtext_128b": 125_079_396_352,
    "maxtext_16b": 15_831_666_688,
    "maxtext_22b": 22_137_083_904,
    "maxtext_32b": 31_663_333_376,
    "pax_16b": 16_504_510_464,
    "pax_32b": 32_475_062_272,
}
"""Parameters of published models. Sources state 5, 70.55, 70.55, 6.74, 8.03, 125.08, 15.83, 22, 31.66, 16, 32e9."""


@pytest.mark.parametrize("row", COMPARABLE_ROWS, ids=lambda row: row["row"])
def test_every_row_is_a_legal_run(row):
    overrides = [word for word in row["overrides"].split() if not word.startswith("target")]
    run = compose_run(f"experiment={row['experiment']}", *overrides, "target=auto")
    assert run.config.mesh.size == int(row["chips"])
    assert run.config.mesh.slices == int(row["slices"])
    assert run.config.batch == int(row["seqs"])
    assert float(row["step_s"]) > 0 and row["how"] in ("read", "from TFLOP/s", "from MFU")


def test_rows_that_cannot_be_matched_have_a_reason():
    assert len(COMPARABLE_ROWS) == 26
    assert {row["note"] for row in ROWS if not row["experiment"]} == {
        "batch not stated",
        "layout not stated",
    }
    assert len({row["row"] for row in ROWS}) == len(ROWS)


@pytest.fixture
def predict(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(TABLE_FILE.parent), *sys.path])
    for name in ("predict", "guesses", "tables"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("predict")


def make_row(predict: ModuleType, name: str, chip: str, ideal_s: float, measured_s: float, **values: Any) -> Any:
    values = {
        "model": "m",
        "family": "f",
        "layout": "dp",
        "slices": 1,
        "executed_ratio": 4 / 3,
        "tokens_per_chip": 100.0,
    } | values
    return sys.modules["guesses"].Row(name, chip=chip, ideal_s=ideal_s, measured_s=measured_s, **values)


def test_guesses_use_the_median_mfu_of_other_rows_and_the_peak(predict: ModuleType):
    guesses = sys.modules["guesses"]
    rows = [("a", "v4", 1.0, 2.0), ("b", "v4", 3.0, 4.0), ("c", "v4", 1.0, 4.0), ("d", "v5e", 1.0, 9.0)]
    rows = [make_row(predict, *values) for values in rows]
    assert guesses.constant_mfu_s(rows[1], rows) == pytest.approx(3.0 / ((0.5 + 0.25) / 2))
    assert guesses.constant_mfu_s(rows[3], rows) is None
    assert guesses.roofline_s(rows[1]) == pytest.approx(4.0)


def test_tables_have_errors_of_prediction_and_guesses_by_chip_and_family(predict: ModuleType):
    tables = sys.modules["tables"]
    rows = [
        make_row(predict, "a", "v4", 1.0, 2.0),
        make_row(predict, "b", "v4", 1.0, 2.5),
        make_row(predict, "c", "v4", 1.5, 2.02),
    ]
    results = [
        {"row": name, "status": "ok", "libtpu": "0.0.1", "replayed_s": replayed}
        for name, replayed in (("a", 1.8), ("b", 1.7), ("c", 1.9))
    ]
    published = [published_run("other", "v4", 1.1), published_run("a", "v4", 9.0, family="f")]
    corrected = tables.add_guesses(results[0], rows[0], rows, published)
    assert corrected["seconds_by"]["predicted"] == pytest.approx(1.8 * 1.1), "its own family is left out"
    results = [tables.add_guesses(result, row, rows, []) for result, row in zip(results, rows, strict=True)]
    table = tables.format_tables([*results, {"row": "x", "status": "failed", "reason": "it crashed"}], [])
    guesses = [("1.800", "-10.0%"), ("1.800", "-10.0%"), ("1.750", "-12.5%"), ("1.333", "-33.3%")]
    assert row_cells(table, "a") == ["dp", "2.000", *(cell for guess in guesses for cell in guess)]
    assert row_cells(table, "x") == ["", "", "failed: it crashed"]
    assert row_cells(table, "v4")[:2] == ["3", "10.0%, 32.0%, 32.0%"]
    assert all(row_cells(table, name)[1].startswith("10.0%") for name in ("f", "all"))
    assert "3 of 4" in table and "libtpu 0.0.1." in table
    on_gpus = tables.format_tables([result | {"chip": "h100"} for result in results], [])
    assert "jaxlib 0.0.1." in on_gpus and "libtpu" not in on_gpus
    pair_table = tables.format_pair_table(results, rows)
    assert row_cells(pair_table, "m on v4") == row_cells(pair_table, "all") == ["0 of 2", "1 of 3"]
    assert "missed: a is" in pair_table


def test_a_users_table_is_predicted_with_failures_reported_and_results_stored(
    predict: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: gpt_tiny\n  - override /target: v5e-4\n"
        "  - override /mesh: 2x2x1\n  - _self_\n"
    )
    (tmp_path / "rows.csv").write_text(
        "row,experiment,overrides,step_s,chips\nfine,mine,batch=8,0.5,4\nworse,mine,batch=16,0.5,4\n"
        "illegal,mine,batch=7,0.5,4\nlacking,none,,0.5,4\ncontrary,mine,,0.5,8\nunstated,,,,\n"
    )
    compiled_batches = []

    def compile_fake(run: Any, console: Any) -> tuple[Any, Prediction, None]:
        compiled_batches.append(run.config.batch)
        if run.config.batch == 16:
            prediction = Prediction(None, CompileStatus.failed, "it crashed")
            return SimpleNamespace(status=prediction.status), prediction, None
        step, parts = PredictedStep(0.4, replayed_s=0.4), (StepPart(PartKind.matmul, (), 0.4),)
        prediction = Prediction(None, CompileStatus.ok, step=step, parts=parts, memory=MemoryReport(peak=2**30))
        return SimpleNamespace(status=prediction.status), prediction, None

    monkeypatch.setattr(predict, "compile_and_summarise", compile_fake)
    monkeypatch.setattr(predict, "program_digest", lambda run: "its program")
    monkeypatch.setattr(predict, "published_runs", tuple)  # nothing to correct a replay by
    table = str(tmp_path / "rows.csv")
    monkeypatch.setattr(sys, "argv", ["predict.py", "--rows", table, "--config-dir", str(tmp_path / "own")])
    predict.main()
    text = capsys.readouterr().out
    assert row_cells(text, "fine")[:4] == ["2x2x1-fsdp", "0.500", "0.400", "-20.0%"]
    reasons = {
        "worse": "failed: it crashed",
        "illegal": "refused: batch=7 is",
        "contrary": "refused: chips=8,",
        "unstated": "not comparable: ",
        "lacking": "refused:",
    }
    assert all(row_cells(text, name)[2].startswith(reason) for name, reason in reasons.items()), text
    predict.main()
    assert compiled_batches == [8, 16, 16]  # what is final is kept, what failed is tried again
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--kept"])
    predict.main()
    assert compiled_batches == [8, 16, 16] and "1 of 6" in capsys.readouterr().out


@pytest.mark.slow
def test_stored_results_of_gpus_print_the_table_of_the_page(
    predict: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = Path(predict.HERE)
    monkeypatch.setattr(sys, "argv", ["predict.py", "--kept", "--rows", str(folder / "gpu" / "rows.csv")])
    predict.main()
    printed = [line.rpartition("|")[0].rpartition("|")[0] for line in capsys.readouterr().out.splitlines()]
    page = (folder.parent / "README.md").read_text().partition("### Compiled steps against GPU runs")[2].splitlines()
    shown = [line for line in page if line.startswith("| all |") or line.startswith(("| MaxText", "| PaxML"))][:6]
    assert len(shown) == 6 and all(line.startswith(("| MaxText", "| PaxML", "| all | 16")) for line in shown)
    assert {line.replace(" (H200)", "").rstrip("|").strip() for line in shown} <= {line.strip() for line in printed}


def test_a_result_stays_valid_if_sources_change_but_the_program_does_not(
    predict: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    programs = sys.modules[predict.is_still_valid.__module__]
    monkeypatch.setattr(programs, "program_digest", lambda run: "this one")
    stored = {"made_by": "sources replay", "libtpu": "1", "program": "this one"}
    assert predict.is_still_valid(stored, "sources replay", "2", None)
    assert predict.is_still_valid(stored, "others replay", "1", None)
    assert not predict.is_still_valid(stored, "others replay", "2", None)
    assert not predict.is_still_valid(stored, "others another", "1", None)
    assert not predict.is_still_valid(stored | {"program": "another"}, "others replay", "1", None)
    assert not predict.is_still_valid({**stored, "program": None}, "others replay", "1", None)


def row_cells(text: str, name: str) -> list[str]:
    """Return the cells of the table row with this name, without the name."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


def published_run(row: str, chip: str, ratio: float, slices: int = 1, family: str = "") -> PublishedRun:
    return PublishedRun(row, f"m{family}", family or row, chip, slices, ratio, "0.0.1")


PUBLISHED_RUNS = [published_run(f"a{n}", "v4", 1.2 * 1.05**n, slices=2**n, family="a") for n in range(3)]
PUBLISHED_RUNS += [
    published_run("b", "v4", 1.1, family="b"),
    published_run("c", "v6e", 0.9, family="c"),
    published_run("d", "v6e", 0.9, family="c"),
]


def test_a_replay_is_corrected_by_families_on_its_chip_and_by_slices():
    fit = published_correction(PUBLISHED_RUNS, "v4", slices=1)
    assert fit.chip_factor == pytest.approx((1.2 * 1.1) ** 0.5), "recipes count alike, however many rows they have"
    assert (fit.slices_factor, fit.run_count, fit.family_count) == (1.0, 4, 2)
    assert published_correction(PUBLISHED_RUNS, "v4", slices=8).slices_factor == pytest.approx(1.05**3)
    without_family_a = published_correction(PUBLISHED_RUNS, "v4", slices=2, held_out_family="a")
    assert (without_family_a.chip_factor, without_family_a.slices_factor) == (pytest.approx(1.1), 1.0), (
        "no other recipe says what slices lose"
    )
    assert published_correction(PUBLISHED_RUNS, "v6e", slices=1).factor == pytest.approx(0.9)
    assert published_correction(PUBLISHED_RUNS, "v5e", slices=1).factor == 1.0


def test_error_intervals_are_cross_validated_over_families():
    bounds = published_interval(PUBLISHED_RUNS, "v4", 1.0)
    assert bounds is not None and (bounds.rows, bounds.models, bounds.chip) == (4, 2, "v4")
    worst = 1.2 * 1.05**2 / 1.1
    assert (bounds.low, bounds.high) == (pytest.approx(1 / worst), pytest.approx(worst)), "either direction"
    other_chip = published_interval(PUBLISHED_RUNS, "v6e", 1.0)
    assert other_chip is not None and (other_chip.rows, other_chip.chip) == (6, None), "v6e's have no other recipe"
    assert other_chip.high == pytest.approx(worst)
    uncorrected = [*PUBLISHED_RUNS, published_run("e", "v6e", 0.7, family="c")]
    wide = published_interval(uncorrected, "v6e", 1.0)
    assert wide is not None and (wide.low, wide.high) == (pytest.approx(0.7), pytest.approx(1 / 0.7)), (
        "as wide as the errors of its own runs without a factor for the chip"
    )
    assert published_interval(PUBLISHED_RUNS[1:], "v4", 1.0) is None
    new_chip = published_interval(PUBLISHED_RUNS, "v5e", 1.0)
    assert new_chip is not None and new_chip.is_new and new_chip.chip is None
    assert new_chip.high == pytest.approx(1.2) and new_chip.low == pytest.approx(1 / 1.2), "either direction"


def test_most_published_runs_of_each_chip_are_within_the_interval_of_the_other_recipes(predict: ModuleType):
    coverage = sys.modules["tables"].interval_coverage(published_runs())
    assert {chip for chip, _, _ in coverage} == {run.chip for run in published_runs()}
    assert all(inside >= 0.8 * count for _, inside, count in coverage), coverage


def test_only_dense_transformers_have_the_error_interval_of_published_runs():
    chip = compose_run("target=v4-8", "mesh=4x1x1").config.target.chip
    assert chip is not None
    assert step_interval(1.0, chip, trains_dense_transformer=True) is not None
    assert step_interval(1.0, chip, trains_dense_transformer=False) is None
    models = {name: compose_run(f"model={name}").model for name in config_names("model") if name.endswith("_tiny")}
    dense = {name for name, model in models.items() if is_dense_transformer(model)}
    assert dense == {"gpt_tiny", "gpt2_tiny", "nanochat_tiny", "longformer_tiny"}


def test_shipped_error_intervals_equal_those_of_the_script(predict: ModuleType):
    results = {r["row"]: r for r in json.loads(TABLE_FILE.with_name("results.json").read_text())}
    measured = {line["row"]: float(line["step_s"]) for line in COMPARABLE_ROWS}
    for row in published_runs():
        assert row.ratio == pytest.approx(measured[row.row] / results[row.row]["replayed_s"])
    assert {row.family for row in published_runs()} == {line["family"] for line in COMPARABLE_ROWS}


def test_new_rows_of_a_family_replace_its_shipped_rows(predict: ModuleType, monkeypatch: Any):
    monkeypatch.setattr(predict, "published_runs", lambda: tuple(PUBLISHED_RUNS))
    replayed_runs = [published_run("d", "v6e", 1.0, family="c")]
    assert predict.replace_published_runs(SimpleNamespace(rows=TABLE_FILE), replayed_runs) == [
        *PUBLISHED_RUNS[:4],
        *replayed_runs,
    ]
    assert predict.replace_published_runs(SimpleNamespace(rows=Path("others.csv")), replayed_runs) == PUBLISHED_RUNS


@pytest.mark.parametrize("experiment", config_names("experiment/published"))
def test_parameter_counts_of_published_models(experiment):
    run = compose_run(f"experiment=published/{experiment}", "target=auto")
    assert run.model.parameter_count() == PARAMETERS[experiment]
