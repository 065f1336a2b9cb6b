"""The published runs: every row of the table composes to a legal run, of the size and on the chips it states."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from helpers import assembly_of, compose_run, names
from valkyrie.models.base import flatten

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


@pytest.mark.parametrize("experiment", names("experiment/published"))
def test_parameters_of_published_models(experiment):
    specs = flatten(assembly_of(compose_run(f"experiment=published/{experiment}", "target=auto")).specs)
    assert sum(spec.size for spec in specs.values()) == PARAMETERS[experiment]
