"""The published runs: every row of the table composes to a legal run, of the size and on the chips it states."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers import compose_run, names

TABLE = Path(__file__).parents[1] / "experiments" / "published" / "rows.csv"
ROWS = list(csv.DictReader(TABLE.read_text().splitlines()))
STATED = [row for row in ROWS if row["experiment"]]
PARAMETERS = {
    "llama_8b_v6e": 8_030_261_248,
    "maxtext_128b": 125_079_396_352,
    "maxtext_16b": 15_831_666_688,
    "maxtext_22b": 22_137_083_904,
    "maxtext_32b": 31_663_333_376,
    "pax_16b": 16_504_510_464,
    "pax_32b": 32_475_062_272,
}
"""Parameters of every published model; the sources state 8.03, 125.08, 15.83, 22, 31.66, 16 and 32 billion."""


@pytest.mark.parametrize("row", STATED, ids=lambda row: row["row"])
def test_every_row_is_a_legal_run(row):
    asked = [word for word in row["overrides"].split() if not word.startswith("target")]
    run = compose_run(f"experiment={row['experiment']}", *asked, "target=auto")
    assert run.config.mesh.size == int(row["chips"])
    assert run.config.mesh.slices == int(row["slices"])
    assert run.config.batch == int(row["seqs"])
    assert float(row["step_s"]) > 0 and row["how"] in ("read", "from TFLOP/s", "from MFU")


def test_rows_that_cannot_be_matched_say_why():
    assert len(STATED) == 24
    assert {row["note"] for row in ROWS if not row["experiment"]} == {"batch not stated", "layout not stated"}
    assert len({row["row"] for row in ROWS}) == len(ROWS)


def predict_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predict", TABLE.with_name("predict.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["predict"] = module  # where dataclasses look for the module of a class
    spec.loader.exec_module(module)
    return module


def test_the_trivial_guess_is_the_median_mfu_of_the_other_rows_on_the_chip(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "predict", ModuleType("predict"))
    predict = predict_module()
    rows = [("a", "v4", 1.0, 2.0), ("b", "v4", 3.0, 4.0), ("c", "v4", 1.0, 4.0), ("d", "v5e", 1.0, 9.0)]
    works = [predict.Work(*row) for row in rows]
    assert predict.trivial_guess("b", works) == pytest.approx(3.0 / ((0.5 + 0.25) / 2))
    errors = {"error": -0.1, "guess_error": 0.3, "measured_s": 2.0, "predicted_s": 1.8, "guessed_s": 2.6}
    table = predict.markdown([{"row": "a", "layout": "dp", "status": "ok", "libtpu": "0.0.1"} | errors])
    assert "| a | dp | 2.000 | 1.800 | -10.0% | 2.600 | +30.0% |" in table
    assert "1 rows, libtpu 0.0.1: predicted median absolute error 10.0%" in table


@pytest.mark.parametrize("experiment", names("experiment/published"))
def test_parameters_of_published_models(experiment):
    run = compose_run(f"experiment=published/{experiment}", "target=auto")
    assert run.model.parameter_count() == PARAMETERS[experiment]
