"""Tests of `mode=search` on local devices: it measures their speed, times layouts and corrects estimates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from helpers import shared_run
from processes import start_processes, wait_for_processes
from runs import TINY_ARGUMENTS
from valkyrie.config.arguments import parse_run
from valkyrie.config.modes import FIGURES_FILE, MACHINES_FILE
from valkyrie.config.run import Run
from valkyrie.hardware.target import ChipConfig
from valkyrie.precision import DType
from valkyrie.search import local_devices, measuring
from valkyrie.search.answer import rank_layouts
from valkyrie.search.answer_record import Stage
from valkyrie.search.baselines import FSDP_BASELINE, Baseline, format_comparison
from valkyrie.search.compile.prediction import MemoryReport
from valkyrie.search.compiling import CompiledLayout, CompiledLayouts, plan_compile
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.rank import EstimatedLayout, rank
from valkyrie.search.local_devices import add_measured_figures, can_measure
from valkyrie.search.measure.figures_file import describe_figures, has_figures, read_figures
from valkyrie.search.measuring import (
    MeasuredTrial,
    MeasuredTrials,
    measure_best,
    measure_report,
    measurement_summary,
    rank_measured_layouts,
)
from valkyrie.search.request import SearchRequest, parse_request
from valkyrie.search.shortlist import Shortlist, build_shortlist, mesh_partition
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.results import Outcome
from valkyrie.sweep.trial import Status, StepResult, Trial, TrialLog, TrialResult
from valkyrie.units import duration_text

CHIP = ChipConfig("cpu", "cpu", {"float32": 0.02}, hbm_gbs=5.0, host_bounds=[8], switch_gbs=0.5, device_kinds=["cpu"])


def make_request(*arguments: str) -> SearchRequest:
    """Return a search request for eight simulated CPU devices with the rates of `CHIP`, which are not measured."""
    request = parse_request(
        shared_run("mode=search", "target=cpu8", "model=gpt_tiny", "precision=float32", "batch=16", *arguments)
    )
    return replace(request, targets=tuple(replace(target, chip=CHIP) for target in request.targets))


def make_shortlist(request: SearchRequest) -> Shortlist:
    """Return the layouts that a search may measure, with the shortest estimate first."""
    return build_shortlist(rank(request.run, request.space()))


class FakeTrials:
    """A fake `run_trials`. Steps take 2 times their estimate, or 10 times with the `slow` partitions."""

    def __init__(self, request: SearchRequest, slow: Sequence[str] = (), status: Status = Status.ok) -> None:
        self.estimates = {tuple(entry.candidate.overrides): entry.step_s for entry in make_shortlist(request).fitting}
        self.slow, self.status, self.plans = slow, status, list[TrialPlan]()

    def __call__(self, plans: Sequence[TrialPlan], jobs: int) -> dict[str, Trial]:
        (plan,) = plans
        self.plans.append(plan)
        start = next(i for i, o in enumerate(plan.overrides) if o == "mode=measure") + 1
        step_s = self.estimates[plan.overrides[start:]] * (10 if plan.about.partition in self.slow else 2)
        results = TrialResult(step=StepResult(step_s=step_s, min_s=0.9 * step_s, p90_s=1.1 * step_s))
        outcome = Outcome(self.status, None if self.status is Status.ok else "no such devices", results)
        return {plan.key: plan.to_trial(outcome, "", 1.0)}


def measure_shortlist(
    fake_trials: FakeTrials, request: SearchRequest, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> MeasuredTrials:
    """Measure the best layouts with fake trials, and return the measured trials."""
    monkeypatch.setattr(measuring, "run_trials", fake_trials)
    measures = MeasuredTrials()
    measure_best(request, make_shortlist(request), CompiledLayouts(), folder, measures, lambda entry: None)
    return measures


def test_other_meshes_and_partitions_are_measured_before_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    request = make_request("mode.measure=6")
    measures = measure_shortlist(FakeTrials(request), request, monkeypatch, tmp_path)
    assert len(measures.trials) == 6 and len({mesh_partition(entry.estimate) for entry in measures.trials[:3]}) == 3
    assert measures.trials[0].expected_s == min(entry.expected_s for entry in measures.trials)
    assert measures.regret == 0 and measures.rank_correlation == pytest.approx(1.0)
    assert measurement_summary(measures).endswith(" is the fastest")


@pytest.mark.slow
def test_a_slow_partition_is_dropped_in_favour_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    request = make_request("mode.measure=6")
    best = make_shortlist(request).fitting[0].group.candidates.partition.name
    fake_trials = FakeTrials(request, slow=[best])
    measures = measure_shortlist(fake_trials, request, monkeypatch, tmp_path)
    partitions = [plan.about.partition for plan in fake_trials.plans]
    assert partitions[0] == best and best not in partitions[3:]
    assert measures.timed_trials[0].estimate.group.candidates.partition.name != best and (measures.regret or 0) > 1
    assert "% slower than the fastest" in measurement_summary(measures) and "Spearman" in measurement_summary(measures)


def test_searched_batches_are_measured_and_ranked_by_tokens_per_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    limited = replace(CHIP, hbm_gib=0.1)
    request = replace(make_request("mode.measure=4", "partition=fsdp", "mesh=8x1x1"), search_batch=True)
    request = replace(request, targets=tuple(replace(target, chip=limited) for target in request.targets))
    measures = measure_shortlist(FakeTrials(request), request, monkeypatch, tmp_path)
    per_sequence = [(trial.step_s or 0) / (trial.estimate.batch or 0) for trial in measures.timed_trials]
    assert per_sequence == sorted(per_sequence) and measures.regret == 0
    steps = [trial.step_s or 0 for trial in measures.timed_trials]
    assert len({trial.estimate.batch for trial in measures.timed_trials}) > 1 and steps != sorted(steps)
    rows = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    ranked = rank_measured_layouts(request, rows, measures, CompiledLayouts())[:4]
    rates = [row.tokens_per_second_per_chip for row in ranked]
    assert rates == sorted(rates, reverse=True) and all("batch=" in " ".join(row.overrides) for row in ranked)


def test_measurements_run_on_the_devices_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    request = make_request("mode.measure=1")
    fake_trials = FakeTrials(request)
    measure_shortlist(fake_trials, request, monkeypatch, tmp_path)
    run = fake_trials.plans[0].run
    assert run is not None and run.config.mode.name == "measure" and run.config.target == request.run.config.target


@pytest.mark.slow
def test_a_measured_step_has_the_options_that_its_compile_has_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    request = parse_request(
        shared_run("mode=search", "target=v5e-8", "model=gpt_tiny", "batch=16", "mode.measure=1", "mode.compiles=1")
    )
    fake_trials, layout = FakeTrials(request), make_shortlist(request).fitting[0]
    results = TrialResult(step=StepResult(step_s=layout.step_s / 2))
    trial = plan_compile(request, layout, tmp_path).to_trial(Outcome(Status.ok, None, results), "", 1.0)
    added = "target.chip.xla_options.xla_overlaps=2"
    monkeypatch.setattr(measuring, "run_trials", fake_trials)
    compiled_layouts = CompiledLayouts([CompiledLayout(layout, trial, (added,))])
    measure_best(request, make_shortlist(request), compiled_layouts, tmp_path, MeasuredTrials(), lambda measured: None)
    (plan,) = fake_trials.plans
    assert plan.run is not None and plan.run.config.target.chip is not None
    assert plan.run.config.target.chip.xla_options["xla_overlaps"] == "2" and added in plan.overrides


@pytest.mark.slow
def test_a_refused_measurement_ends_the_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    request = make_request()
    measures = measure_shortlist(FakeTrials(request, status=Status.refused), request, monkeypatch, tmp_path)
    assert len(measures.trials) == 1 and measures.stop_reason == "no such devices"
    assert (measures.regret, measures.rank_correlation) == (None, None)
    rows = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    assert rank_measured_layouts(request, rows, measures, CompiledLayouts()) == rows, "the machine is at fault"


def test_the_budget_ends_the_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    request = replace(make_request("mode.budget=90s"), budget_s=-1.0)
    measures = measure_shortlist(FakeTrials(request), request, monkeypatch, tmp_path)
    assert measures.trials == [] and "mode.budget=90s" in measures.stop_reason
    assert measures.stop_reason in measurement_summary(measures)


@pytest.mark.parametrize("stage", [pytest.param(Stage.estimate, marks=pytest.mark.slow), Stage.compile])
def test_measured_rows_come_first_and_rescale_the_others(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    request, listed = make_request("mode.measure=3"), make_shortlist(make_request())
    measures = measure_shortlist(FakeTrials(request), request, monkeypatch, tmp_path)
    plain = [replace(row, stage=stage) for row in rank_layouts(request, listed, CompiledLayouts(), 10)]
    rows = rank_measured_layouts(request, plain, measures, CompiledLayouts())
    assert [row.stage for row in rows[:4]] == [Stage.measure] * 3 + [stage]
    first = next(row for row in plain if row.overrides == rows[0].overrides)
    assert rows[0].step_s == pytest.approx(2 * first.step_s)
    assert rows[0].tokens_per_second_per_chip == pytest.approx(first.tokens_per_second_per_chip / 2)
    other = next(row for row in plain if row.overrides == rows[-1].overrides)
    assert rows[-1].step_s == pytest.approx(2 * other.step_s)
    assert measure_report(measures).regret == 0


@pytest.mark.slow
def test_a_measured_baseline_is_compared_by_its_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = make_request("mode.measure=3")
    measures = measure_shortlist(FakeTrials(request), request, monkeypatch, tmp_path)
    rows = rank_measured_layouts(
        request, rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10), measures, CompiledLayouts()
    )
    baseline_layout = measures.timed_trials[1].estimate
    assert measures.step_s(baseline_layout) == pytest.approx(2 * baseline_layout.step_s)
    line = format_comparison(
        Baseline(FSDP_BASELINE, baseline_layout), CompiledLayouts(), rows[0], measures.step_s(baseline_layout)
    )
    ratio = baseline_layout.step_s / measures.timed_trials[0].estimate.step_s
    assert f"(measured), {ratio:.2f} times as long as the best;" in line
    other = make_shortlist(request).fitting[-1]
    assert measures.step_s(other) is None
    assert "(by estimate)" in format_comparison(
        Baseline(FSDP_BASELINE, other), CompiledLayouts(), rows[0], measures.step_s(other)
    )


@pytest.mark.parametrize(
    ("expected", "agreement"),
    [([1.0, 2.0, 30.0], 1.0), ([3.0, 2.0, 1.0], -1.0), ([1.0, 1.0, 2.0], 0.866), ([1.0, 1.0, 1.0], None)],
)
def test_agreement_is_a_rank_correlation_with_shared_ranks_for_ties(
    expected: list[float], agreement: float | None
) -> None:
    (entry,) = make_shortlist(make_request()).fitting[:1]
    steps = [TrialResult(step=StepResult(step_s=seconds)) for seconds in (1.0, 2.0, 3.0)]
    trials = [Trial("", "", "", "measure", Status.ok, None, [], None, "", 1.0, results=result) for result in steps]
    measures = MeasuredTrials([MeasuredTrial(entry, s, trial) for s, trial in zip(expected, trials, strict=True)])
    assert measures.rank_correlation == (None if agreement is None else pytest.approx(agreement, abs=1e-3))


def make_compiled_layout(request: SearchRequest, entry: EstimatedLayout, factor: float, folder: Path) -> CompiledLayout:
    """Return a compiled layout with a step time of `factor` times its estimate."""
    results = TrialResult(step=StepResult(step_s=factor * entry.step_s), memory=MemoryReport(peak=2**30))
    plan = plan_compile(request, entry, folder)
    return CompiledLayout(entry, plan.to_trial(Outcome(Status.ok, results=results), "", 1.0))


@pytest.mark.slow
def test_a_compiled_baseline_is_compared_with_compiled_layouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = make_request("mode.measure=1")
    measures = measure_shortlist(FakeTrials(request), request, monkeypatch, tmp_path)
    best, baseline_layout = measures.timed_trials[0].estimate, make_shortlist(request).fitting[-1]
    compiles = CompiledLayouts([make_compiled_layout(request, baseline_layout, 5.0, tmp_path)])
    (row, *_) = rank_measured_layouts(
        request, rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10), measures, CompiledLayouts()
    )
    line = format_comparison(Baseline(FSDP_BASELINE, baseline_layout), compiles, row)
    best_s = sum(row.parts_s.values())
    text = f"{baseline_layout.step_s / best_s:.2f} times as long as the best ({duration_text(best_s)} estimated);"
    assert f"(by estimate), {text}" in line
    compiles.layouts.append(make_compiled_layout(request, best, 4.0, tmp_path))
    line = format_comparison(Baseline(FSDP_BASELINE, baseline_layout), compiles, row)
    text = f"{5 * baseline_layout.step_s / (4 * best.step_s):.2f} times as long as the best"
    assert f"(compiled step), {text} ({duration_text(4 * best.step_s)} compiled);" in line
    (row,) = rank_measured_layouts(request, [], measures, compiles)
    assert (row.stage, row.memory) == (Stage.measure, 2**30), "a measured layout without a row keeps its compiled peak"
    failed = MeasuredTrials(
        [replace(measures.trials[0], trial=replace(measures.trials[0].trial, status=Status.failed))]
    )
    assert rank_measured_layouts(request, [row], failed, compiles) == [], "a layout that does not run is no answer"


@pytest.mark.parametrize(
    ("device_count", "target", "expected"), [(0, "h100-8", False), (8, "h100-8", True), (4, "h100-8", False)]
)
def test_accelerators_are_counted_without_jax(
    device_count: int, target: str, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_devices, "count_accelerators", lambda: device_count)
    request = parse_request(parse_run(["mode=search", f"target={target}", "model=gpt_tiny", "batch=16"]))
    assert can_measure(request) is expected


def test_measured_figures_are_read_as_a_chip(tmp_path: Path) -> None:
    file = tmp_path / FIGURES_FILE
    values = {"name": "cpu", "platform": "cpu", "peak_tflops": {"float32": 0.05}, "hbm_gbs": 8.0, "host_bounds": [2]}
    values |= {"switch_gbs": 0.5, "dcn_gbs_per_host": 0.025, "estimate": {"start_s": 1e-4, "outer_start_s": 2e-3}}
    file.write_text(json.dumps(values))
    chip = read_figures(file)
    assert chip.problems() == [] and chip_efficiency(chip).outer_start_s == 2e-3
    figures = ("50 GFLOP/s", "8 GB/s", "0.5 GB/s", "0.1 ms", "0.025 GB/s", "processes of 2", "2 ms")
    assert all(figure in describe_figures(chip) for figure in figures)


@pytest.mark.parametrize(
    ("arguments", "machine", "timing_count"),
    [
        ((), "here", 0),
        (("precision=bf16_mixed",), "here", 1),
        ((), "there", 1),
        (("target=cpu4",), "here", 1),
    ],
)
def test_figures_are_only_used_for_this_machine_and_precision(
    arguments: tuple[str, ...], machine: str, timing_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_runs = list[Run]()

    def fake_trial(plan: TrialPlan) -> Trial:
        assert plan.run is not None
        timed_runs.append(plan.run)
        values = {"name": "cpu", "platform": "cpu", "peak_tflops": {plan.run.config.precision.compute.value: 0.05}}
        values |= {"host_bounds": [plan.run.config.target.chips]}
        plan.trial_folder.mkdir(parents=True, exist_ok=True)
        (plan.trial_folder / FIGURES_FILE).write_text(json.dumps(values))
        (plan.trial_folder / MACHINES_FILE).write_text(json.dumps([machine]))
        return plan.to_trial(Outcome(Status.ok), "", 1.0)

    def add_figures(*arguments: str) -> SearchRequest:
        request = parse_request(
            shared_run("mode=search", "target=cpu8", "model=gpt_tiny", "batch=16", "precision=float32", *arguments)
        )
        return add_measured_figures(request, tmp_path, Console(quiet=True))

    monkeypatch.setattr(local_devices, "_run_trial", fake_trial)
    monkeypatch.setattr(local_devices.socket, "gethostname", lambda: "here")
    add_figures()
    timed_runs.clear()
    (target,) = add_figures(*arguments).targets
    assert len(timed_runs) == timing_count and target.chip is not None
    assert list(target.chip.peak_tflops) == ["bfloat16" if "precision=bf16_mixed" in arguments else "float32"]


def test_damaged_machines_are_named_with_a_remedy(tmp_path: Path) -> None:
    values = {"name": "cpu", "platform": "cpu", "peak_tflops": {"float32": 0.05}, "host_bounds": [1]}
    (tmp_path / FIGURES_FILE).write_text(json.dumps(values))
    (tmp_path / MACHINES_FILE).write_text('["here"')
    with pytest.raises(ValueError, match=rf"^{tmp_path / MACHINES_FILE} is damaged \(is not JSON .*\)\. Delete "):
        has_figures(tmp_path, "here", DType.float32, 1)


def test_the_cost_of_scatters_follows_the_chips_constant() -> None:
    request = make_request()
    halved = replace(CHIP, estimate={"scatters": 2.0})
    more = replace(request, targets=tuple(replace(target, chip=halved) for target in request.targets))
    entry, other = (next(iter(rank(q.run, q.space()).for_partition("fsdp"))) for q in (request, more))
    assert other.parts["gradients"] > entry.parts["gradients"] and other.parts["weights"] == entry.parts["weights"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_on_cpu_devices_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "valkyrie.cli.train", *TINY_ARGUMENTS, "mode=search", "target=cpu4", "batch=12"]
    command += ["mode.measure=3", "mode.repeats=3", "name=found"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads((tmp_path / "runs/found/search.json").read_text())
    assert len(answer["measured"]["layouts"]) == 3 and answer["measured"]["regret"] >= 0
    assert answer["best"][0]["stage"] == "measure" and "predicted to be the fastest" in result.stdout
    assert all(trial.stage == "measure" for trial in TrialLog(tmp_path / "runs/found").read())
    second_result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert second_result.returncode == 0
    assert json.loads((tmp_path / "runs/found/search.json").read_text())["measured"] == answer["measured"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_over_several_processes(tmp_path: Path) -> None:
    arguments = [
        *TINY_ARGUMENTS,
        "mode=search",
        "target=cpu2",
        "batch=12",
        "mode.measure=2",
        "mode.repeats=2",
        "name=found",
    ]
    first, second = wait_for_processes(start_processes(2, *arguments, cwd=tmp_path))
    assert (first[0], second[0], second[1]) == (0, 0, ""), (first, second)
    chip = read_figures(tmp_path / "runs/found/figures-cpu2" / FIGURES_FILE)
    assert chip.host_bounds == [1] and (chip.dcn_gbs_per_host or 0) > 0 and chip.switch_gbs is None
    assert len(json.loads((tmp_path / "runs/found/search.json").read_text())["measured"]["layouts"]) == 2


@pytest.mark.slow
def test_figures_are_measured_once(tmp_path: Path) -> None:
    request = parse_request(shared_run("mode=search", "target=cpu2", "model=gpt_tiny", "precision=float32", "batch=16"))
    (first,) = add_measured_figures(request, tmp_path, Console(quiet=True)).targets
    (again,) = add_measured_figures(request, tmp_path, Console(quiet=True)).targets
    assert first == again and first.chip is not None and first.chip.peak_tflops["float32"] > 0


def test_estimated_rows_are_chosen_by_their_corrected_estimates(tmp_path: Path) -> None:
    request = make_request()
    shortlist = make_shortlist(request)
    first, *others = shortlist.fitting
    compiled_layouts = CompiledLayouts([make_compiled_layout(request, first, 50.0, tmp_path)])
    rows = [row for row in rank_layouts(request, shortlist, compiled_layouts, 9) if row.stage is Stage.estimate]
    times = {e.candidate: time.step_s for e, time in zip(others, compiled_layouts.correct(others), strict=True)}
    ranked_layouts = sorted(others, key=lambda layout: times[layout.candidate])
    chosen = shortlist.select_distinct(ranked_layouts, len(rows))
    assert [row.candidate for row in rows] == [layout.candidate for layout in chosen]
    assert chosen != shortlist.select_distinct(others, len(rows)), "the correction changes the choice"
