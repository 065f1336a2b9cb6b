"""Tests of estimates against published GPU runs.

Each group of runs is estimated with constants that are fitted to the other groups (experiments/search/gpus.py).
"""

from __future__ import annotations

import csv
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
from valkyrie.train.memory import MemoryEstimator

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "search"))
gpus, gpu_layouts = map(import_module, ("gpus", "gpu_layouts"))  # scripts, found by the line above


GROUP_PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import gpus
timed_groups = gpus.published_groups()
group_rows = [row for row in gpus.read_rows(gpus.ROWS_FILE) if row.line["group"] == sys.argv[2]]
for pairs in gpus.estimate_by_group(group_rows, timed_groups, gpus.fit_by_chip(timed_groups)).values():
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


def measured_layouts(tmp_path: Path, *groups: str) -> Path:
    """Write the rows of these groups of measured_gpu_layouts.csv to a file and return it."""
    header, *lines = gpu_layouts.ROWS_FILE.read_text().splitlines(keepends=True)
    path = tmp_path / "rows.csv"
    path.write_text(header + "".join(line for line in lines if line.split(",")[0] in groups))
    return path


def test_choices_among_measured_layouts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = measured_layouts(tmp_path, "nanotron_1.34B_8", "nanotron_1.34B_256", "alpa_8")
    monkeypatch.setattr(sys, "argv", ["gpu_layouts.py", "--rows", str(rows_file)])
    gpu_layouts.main()
    lines = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    # Two of the 32 rows have other batches. The estimate chooses the fastest layout.
    assert cells["nanotron_1.34B_8"][:4] == ["30", "40,149", "1.00", "1.00"]
    # With H100's constants instead of nanotron's, 0.48 and 0.59; with plain bfloat16, 0.66 and 0.80.
    assert cells["nanotron_1.34B_256"][:4] == ["93", "23,772", "0.80", "0.80"]
    assert "Alpa's pairs of layouts with the same model and GPUs: 6 of 6 in order" in cells
    assert int(cells["nanotron"][0]) == 128 and cells["nanotron"][1:4] == ["0", "0", "0"]


def test_stages_of_separate_programs_store_as_many_microbatches_as_there_are_stages(tmp_path: Path) -> None:
    with measured_layouts(tmp_path, "nanotron_8.86B_8").open() as lines:
        rows = [gpu_layouts._parse_row(line) for line in csv.DictReader(lines) if line["pp"] != "1"]
    layouts = [gpus.stack_rows(group).layouts for group in gpus.group_rows(rows)]
    for group in layouts:
        assert np.array_equal(group.in_flight_microbatches, np.minimum(group.stages, group.microbatches))
    assert any((replace(group, separate_stages=False).in_flight_microbatches > group.stages).any() for group in layouts)


def test_time_estimates_need_the_memory_only_to_choose_when_gradients_are_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [row for row in gpus.read_rows(gpus.ROWS_FILE) if "3.6B_64" in row.line["group"]][:1]
    monkeypatch.delattr(MemoryEstimator, "_estimate")
    assert gpus.stack_rows(rows).estimate(Efficiency())[0] > 0
