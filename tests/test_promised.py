"""Tests of the table of claimed and predicted rates: the page shows what experiments/promised.py prints."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))
promised = import_module("promised")  # a script, found by the line above

STORED = json.loads(promised.RESULTS_FILE.read_text())


def test_the_page_has_the_table_that_the_script_prints():
    assert {*STORED} == {claim.experiment for claim in promised.CLAIMS}
    assert promised.format_table(STORED) in (ROOT / "experiments" / "README.md").read_text()


@pytest.mark.parametrize("claim", promised.CLAIMS, ids=lambda claim: claim.experiment)
def test_the_stored_results_are_of_the_current_experiments(claim):
    for expected, key in ((), "best"), (claim.overrides, "asked"):
        if key not in STORED[claim.experiment]:
            assert not claim.overrides
            continue
        stored = STORED[claim.experiment][key]
        run = promised.compose_run(claim, stored["overrides"])
        assert tuple(stored["overrides"])[: len(expected)] == expected
        assert (stored["layout"], stored["target"]) == (run.layout.name, run.config.target.name)
        assert stored["count"] == run.config.batch * (run.config.seq if stored["unit"] == "tokens/s" else 1)
        assert 0 < stored["mfu"] == pytest.approx(stored["count"] / stored["step_s"] / stored["possible"], rel=1e-6)
