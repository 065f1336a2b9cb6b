"""The table of what was promised: what the script prints of the kept results, of runs that are still the same."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))
promised = import_module("promised")  # a script, found by the line above

KEPT = json.loads(promised.KEPT.read_text())


def test_the_page_has_the_table_that_the_script_prints():
    assert {*KEPT} == {promise.experiment for promise in promised.PROMISES}
    assert promised.table(KEPT) in (ROOT / "experiments" / "README.md").read_text()


@pytest.mark.parametrize("promise", promised.PROMISES, ids=lambda promise: promise.experiment)
def test_the_kept_results_are_of_the_layouts_that_the_experiments_have(promise):
    for overrides, which in ((), "best"), (promise.asked, "asked"):
        if which not in KEPT[promise.experiment]:
            assert not promise.asked
            continue
        kept = KEPT[promise.experiment][which]
        run = promised.composed(promise, kept["overrides"])
        assert tuple(kept["overrides"])[: len(overrides)] == overrides
        assert (kept["layout"], kept["target"]) == (run.layout.name, run.config.target.name)
        assert kept["count"] == run.config.batch * (run.config.seq if kept["unit"] == "tokens/s" else 1)
        assert 0 < kept["mfu"] == pytest.approx(kept["count"] / kept["step_s"] / kept["possible"], rel=1e-6)
