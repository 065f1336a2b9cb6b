"""Tests of estimates against published GPU runs.

Each group of runs is estimated with constants that are fitted to the other groups (experiments/search/gpus.py).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.network import collective_model
from valkyrie.search.estimate.times import StepEstimator

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "search"))
gpus = import_module("gpus")  # a script, found by the line above


GROUP_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import gpus
published = gpus.read_rows(gpus.ROWS_FILE)
group_rows = [row for row in published if row.line["group"] == sys.argv[2]]
for pairs in gpus.estimate_by_group(group_rows, published).values():
    for row, estimate in pairs:
        print(row.step_s, estimate)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "min_correlation", "error"), [("vtrain_multi_175B_512", 0.9, 0.05), ("vtrain_multi_3.6B_64", 0.96, 0.105)]
)
def test_a_group_is_estimated_with_constants_of_the_other_groups(
    group: str, min_correlation: float, error: float
) -> None:
    from scipy.stats import spearmanr  # takes 1 s, in every collection if imported above

    # In a new process, because the type checks of this one would take nine tenths of the time of a fit.
    command = [sys.executable, "-c", GROUP_PROGRAM, str(gpus.ROWS_FILE.parent), group]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    measured, estimates = np.array([line.split() for line in result.stdout.splitlines()], float).T
    assert len(measured) > 20 and spearmanr(measured, estimates).statistic >= min_correlation
    assert np.abs(estimates / measured - 1).mean() < error
    assert measured[np.argmin(estimates)] < 1.02 * measured.min()


def sending_seconds(**changes: bool) -> float:
    """Return the estimated seconds that pipeline stages spend sending, in one of vTrain's 175B runs.

    The run has 8-way tensor parallelism. `changes` replaces fields of its `Candidates`.
    """
    rows = [row for row in gpus.read_rows(gpus.ROWS_FILE) if "175B_512" in row.line["group"] and row.line["tp"] == "8"]
    timed_layouts, efficiency = gpus.stack_rows(rows[:1]), Efficiency()
    layouts = replace(timed_layouts.layouts, **changes)
    times = StepEstimator(
        timed_layouts.work, layouts, timed_layouts.chip, efficiency, collective_model(timed_layouts.chip, efficiency)
    ).estimate(timed_layouts.remat)
    return float(times.parts["stages"][0])


def test_devices_with_the_same_activations_each_send_a_part() -> None:
    assert sending_seconds(sends_parts=True) < sending_seconds(sends_parts=False) / 4


def test_attention_scores_go_through_memory_without_a_fused_kernel() -> None:
    rows = [row for row in gpus.read_rows(gpus.ROWS_FILE) if "3.6B_64" in row.line["group"]][:1]
    timed = gpus.stack_rows(rows)
    seconds = [float(timed.estimate(replace(Efficiency(), scores_passes=n))[0]) for n in (0.0, 1.0)]
    layers, heads, seq, tokens = 30, 32, 2048, 512 * 2048 / 64
    moved = 2 * 4 * layers * heads * seq * tokens  # float16; forward, again, and twice backward
    assert seconds[1] - seconds[0] == pytest.approx(moved / (0.8 * 2039e9), rel=1e-6)


def test_host_figures_stated_by_a_source_are_used() -> None:
    (row,) = [r for r in gpus.read_rows(gpus.ROWS_FILE) if r.line["group"] == "tt_8b_8"]
    assert gpus.stack_rows([row]).chip.hbm_gbs == 2400
    assert {
        gpus.stack_rows([r]).chip.dcn_gbs_per_host
        for r in gpus.read_rows(gpus.ROWS_FILE)
        if "3.6B_64" in r.line["group"]
    } == {100}
