"""`mode=search` on the devices at hand: their figures, what is measured, and what it says of its estimates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from processes import ended, several
from runs import TINY
from valkyrie.config.arguments import run_of
from valkyrie.config.modes import FIGURES, MACHINES
from valkyrie.config.run import Run
from valkyrie.hardware.target import ChipConfig
from valkyrie.runs.results import MemoryResult, StepResult, TrialResult
from valkyrie.search import at_hand, measuring
from valkyrie.search.answer import Stage, rank_layouts
from valkyrie.search.at_hand import not_at_hand, with_figures
from valkyrie.search.compiling import CompiledLayout, Compiles, plan_compile
from valkyrie.search.estimate.efficiency import efficiency_of
from valkyrie.search.estimate.rank import Estimated, rank
from valkyrie.search.measure.figures_of import in_words, read_figures
from valkyrie.search.measuring import Measured, Measures, measure_best, measurement_summary, rank_measured, report_of
from valkyrie.search.request import SearchRequest, parse_request
from valkyrie.search.rivals import PLAIN_FSDP, Rival, format_comparison
from valkyrie.search.shortlist import Shortlist, mesh_partition, shortlist
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.trial import Status, Trial, TrialLog

CHIP = ChipConfig("cpu", "cpu", {"float32": 0.02}, hbm_gbs=5.0, host_bounds=[8], switch_gbs=0.5, device_kinds=["cpu"])


def question(*arguments: str) -> SearchRequest:
    """Return the question of a search on eight CPU devices whose figures are known."""
    of = parse_request(
        run_of(["mode=search", "target=cpu8", "model=gpt_tiny", "precision=float32", "batch=16", *arguments])
    )
    return replace(of, targets=tuple(replace(target, chip=CHIP) for target in of.targets))


def listed_of(of: SearchRequest) -> Shortlist:
    """Return the layouts that a search may measure."""
    return shortlist(rank(of.run, of.space()))


class Devices:
    """Stands for `carry_out`: steps take twice their estimate, those of `slow` partitions ten times."""

    def __init__(self, of: SearchRequest, slow: Sequence[str] = (), status: Status = Status.ok) -> None:
        self.estimates = {tuple(one.candidate.overrides): one.step_s for one in listed_of(of).fitting}
        self.slow, self.status, self.plans = slow, status, list[TrialPlan]()

    def __call__(self, plans: Sequence[TrialPlan], jobs: int) -> dict[str, Trial]:
        (plan,) = plans
        self.plans.append(plan)
        start = next(i for i, o in enumerate(plan.overrides) if o == "mode=measure") + 1
        step_s = self.estimates[plan.overrides[start:]] * (10 if plan.about.partition in self.slow else 2)
        results = TrialResult(step=StepResult(step_s=step_s, min_s=0.9 * step_s, p90_s=1.1 * step_s))
        ended = plan.ended(self.status, None if self.status is Status.ok else "no such devices", "", 1.0, results)
        return {plan.key: ended}


def measured_by(devices: Devices, of: SearchRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Measures:
    """Return what a search measures on devices that stand for others."""
    monkeypatch.setattr(measuring, "carry_out", devices)
    measures = Measures()
    measure_best(of, listed_of(of), Compiles(), folder, measures, lambda one: None)
    return measures


def test_other_meshes_and_partitions_are_measured_before_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    of = question("mode.measure=6")
    measures = measured_by(Devices(of), of, monkeypatch, tmp_path)
    assert len(measures.done) == 6 and len({mesh_partition(one.estimate) for one in measures.done[:3]}) == 3
    assert measures.done[0].expected_s == min(one.expected_s for one in measures.done)
    assert measures.regret == 0 and measures.agreement == pytest.approx(1.0)


def test_a_slow_partition_is_left_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    of = question("mode.measure=6")
    best = listed_of(of).fitting[0].group.candidates.partition.name
    devices = Devices(of, slow=[best])
    measures = measured_by(devices, of, monkeypatch, tmp_path)
    partitions = [plan.about.partition for plan in devices.plans]
    assert partitions[0] == best and best not in partitions[3:]
    assert measures.timed[0].estimate.group.candidates.partition.name != best and (measures.regret or 0) > 1
    assert "regret of the expected best" in measurement_summary(measures) and "Spearman" in measurement_summary(
        measures
    )


def test_what_is_measured_runs_on_the_devices_that_the_command_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    of = question("mode.measure=1")
    devices = Devices(of)
    measured_by(devices, of, monkeypatch, tmp_path)
    run = devices.plans[0].run
    assert run is not None and run.config.mode.name == "measure" and run.config.target == of.run.config.target


def test_devices_that_are_others_end_the_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    of = question()
    measures = measured_by(Devices(of, status=Status.refused), of, monkeypatch, tmp_path)
    assert len(measures.done) == 1 and measurement_summary(measures) == "0 measured (no such devices)"
    assert (measures.regret, measures.agreement) == (None, None)


def test_the_budget_ends_the_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    of = replace(question("mode.budget=90s"), budget_s=-1.0)
    measures = measured_by(Devices(of), of, monkeypatch, tmp_path)
    assert measurement_summary(measures) == "0 measured (mode.budget=90s is over)"


def test_measured_rows_stand_first_and_hold_the_others_to_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    of, listed = question("mode.measure=3"), listed_of(question())
    measures = measured_by(Devices(of), of, monkeypatch, tmp_path)
    plain = rank_layouts(of, listed, Compiles(), 10)
    rows = rank_measured(of, plain, measures)
    assert [row.stage.value for row in rows[:4]] == ["measure", "measure", "measure", "estimate"]
    first = next(row for row in plain if row.overrides == rows[0].overrides)
    assert rows[0].step_s == pytest.approx(2 * first.step_s)
    assert rows[0].tokens_per_second_per_chip == pytest.approx(first.tokens_per_second_per_chip / 2)
    other = next(row for row in plain if row.overrides == rows[-1].overrides)
    assert rows[-1].step_s == pytest.approx(2 * other.step_s)
    assert report_of(measures).regret == 0


def test_a_rival_that_was_measured_is_compared_by_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of = question("mode.measure=3")
    measures = measured_by(Devices(of), of, monkeypatch, tmp_path)
    rows = rank_measured(of, rank_layouts(of, listed_of(of), Compiles(), 10), measures)
    rival = measures.timed[1].estimate
    assert measures.step_s(rival) == pytest.approx(2 * rival.step_s)
    line = format_comparison(Rival(PLAIN_FSDP, rival), Compiles(), rows[0], measures.step_s(rival))
    assert f"(measured), {rival.step_s / measures.timed[0].estimate.step_s:.2f} times the best;" in line
    other = listed_of(of).fitting[-1]
    assert measures.step_s(other) is None
    assert "(by estimate)" in format_comparison(Rival(PLAIN_FSDP, other), Compiles(), rows[0], measures.step_s(other))


@pytest.mark.parametrize(
    ("expected", "agreement"),
    [([1.0, 2.0, 30.0], 1.0), ([3.0, 2.0, 1.0], -1.0), ([1.0, 1.0, 2.0], 0.866), ([1.0, 1.0, 1.0], None)],
)
def test_agreement_is_of_ranks_and_equals_share_theirs(expected: list[float], agreement: float | None) -> None:
    (of,) = listed_of(question()).fitting[:1]
    trials = [
        Trial(
            "",
            "",
            "",
            "measure",
            Status.ok,
            None,
            [],
            None,
            "",
            1.0,
            results=TrialResult(step=StepResult(step_s=float(i))),
        )
        for i in (1, 2, 3)
    ]
    found = Measures([Measured(of, s, trial) for s, trial in zip(expected, trials, strict=True)]).agreement
    assert found == (None if agreement is None else pytest.approx(agreement, abs=1e-3))


def test_compiled_rows_beside_measured_ones_are_held_to_them_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    of = question("mode.measure=3")
    measures = measured_by(Devices(of), of, monkeypatch, tmp_path)
    plain = [replace(row, stage=Stage.compile) for row in rank_layouts(of, listed_of(of), Compiles(), 10)]
    last = rank_measured(of, plain, measures)[-1]
    other = next(row for row in plain if row.overrides == last.overrides)
    assert last.stage is Stage.compile and last.step_s == pytest.approx(2 * other.step_s)


def compiled(of: SearchRequest, one: Estimated, factor: float, folder: Path) -> CompiledLayout:
    """Return a layout whose compiled step takes so many times its estimate."""
    results = TrialResult(step=StepResult(step_s=factor * one.step_s), memory=MemoryResult(peak=2**30))
    return CompiledLayout(one, plan_compile(of, one, folder).ended(Status.ok, None, "", 1.0, results))


def test_a_compiled_rival_is_compared_with_what_was_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    of = question("mode.measure=1")
    measures = measured_by(Devices(of), of, monkeypatch, tmp_path)
    best, rival = measures.timed[0].estimate, listed_of(of).fitting[-1]
    compiles = Compiles([compiled(of, rival, 5.0, tmp_path)])
    (row, *_) = rank_measured(of, rank_layouts(of, listed_of(of), Compiles(), 10), measures)
    line = format_comparison(Rival(PLAIN_FSDP, rival), compiles, row)
    times = rival.step_s / sum(row.parts_s.values())
    assert f"(by estimate), {times:.2f} times the best by estimate" in line
    compiles.done.append(compiled(of, best, 4.0, tmp_path))
    line = format_comparison(Rival(PLAIN_FSDP, rival), compiles, row)
    assert f"(by compile), {5 * rival.step_s / (4 * best.step_s):.2f} times the best;" in line


@pytest.mark.parametrize(
    ("here", "wanted", "at_hand_"), [(0, "h100-8", False), (8, "h100-8", True), (4, "h100-8", False)]
)
def test_accelerators_are_counted_without_jax(here: int, wanted: str, at_hand_: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(at_hand, "accelerators", lambda: here)
    of = parse_request(run_of(["mode=search", f"target={wanted}", "model=gpt_tiny", "batch=16"]))
    assert (not_at_hand(of) is None) is at_hand_


def test_figures_are_a_chip(tmp_path: Path) -> None:
    file = tmp_path / FIGURES
    values = {"name": "cpu", "platform": "cpu", "peak_tflops": {"float32": 0.05}, "hbm_gbs": 8.0, "host_bounds": [2]}
    values |= {"switch_gbs": 0.5, "dcn_gbs_per_host": 0.025, "estimate": {"start_s": 1e-4, "outer_start_s": 2e-3}}
    file.write_text(json.dumps(values))
    chip = read_figures(file)
    assert chip.problems() == [] and efficiency_of(chip).outer_start_s == 2e-3
    assert in_words(chip) == (
        "50 GFLOP/s in float32 and 8 GB/s of memory a device; 0.5 GB/s between devices of a process, 0.1 ms to start; "
        "0.025 GB/s out of a process of 2, 2 ms to start"
    )


@pytest.mark.parametrize(
    ("asked_for", "machine", "times"),
    [
        ((), "here", 0),
        (("precision=bf16_mixed",), "here", 1),
        ((), "there", 1),
        (("target=cpu4",), "here", 1),
    ],
)
def test_figures_are_of_this_machine_and_precision(
    asked_for: tuple[str, ...], machine: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = list[Run]()

    def time_them(plan: TrialPlan) -> Trial:
        assert plan.run is not None
        timed.append(plan.run)
        values = {"name": "cpu", "platform": "cpu", "peak_tflops": {plan.run.config.precision.compute.value: 0.05}}
        values |= {"host_bounds": [plan.run.config.target.chips]}
        plan.trial_folder.mkdir(parents=True, exist_ok=True)
        (plan.trial_folder / FIGURES).write_text(json.dumps(values))
        (plan.trial_folder / MACHINES).write_text(json.dumps([machine]))
        return plan.ended(Status.ok, None, "", 1.0)

    def with_them(*arguments: str) -> SearchRequest:
        of = parse_request(
            run_of(["mode=search", "target=cpu8", "model=gpt_tiny", "batch=16", "precision=float32", *arguments])
        )
        return with_figures(of, tmp_path, Console(quiet=True))

    monkeypatch.setattr(at_hand, "_carried_out", time_them)
    monkeypatch.setattr(at_hand.socket, "gethostname", lambda: "here")
    with_them()
    timed.clear()
    (target,) = with_them(*asked_for).targets
    assert len(timed) == times and target.chip is not None
    assert list(target.chip.peak_tflops) == ["bfloat16" if "precision=bf16_mixed" in asked_for else "float32"]


def test_an_own_scatter_costs_as_often_as_the_chip_says() -> None:
    of = question()
    halved = replace(CHIP, estimate={"scatters": 2.0})
    more = replace(of, targets=tuple(replace(target, chip=halved) for target in of.targets))
    one, other = (next(iter(rank(q.run, q.space()).under("fsdp"))) for q in (of, more))
    assert other.parts["gradients"] > one.parts["gradients"] and other.parts["weights"] == one.parts["weights"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_on_cpu_devices_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "valkyrie.cli.train", *TINY, "mode=search", "target=cpu4", "batch=12"]
    command += ["mode.measure=3", "mode.repeats=3", "name=found"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "runs/found/search.json").read_text())
    assert len(answer["measured"]["layouts"]) == 3 and answer["measured"]["regret"] >= 0
    assert answer["best"][0]["stage"] == "measure" and "regret of the expected best" in done.stdout
    assert all(trial.stage == "measure" for trial in TrialLog(tmp_path / "runs/found").read())
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert json.loads((tmp_path / "runs/found/search.json").read_text())["measured"] == answer["measured"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_over_several_processes(tmp_path: Path) -> None:
    asked_for = [*TINY, "mode=search", "target=cpu2", "batch=12", "mode.measure=2", "mode.repeats=2", "name=found"]
    first, second = ended(several(2, *asked_for, cwd=tmp_path))
    assert (first[0], second[0], second[1]) == (0, 0, ""), (first, second)
    chip = read_figures(tmp_path / "runs/found/figures-cpu2" / FIGURES)
    assert chip.host_bounds == [1] and (chip.dcn_gbs_per_host or 0) > 0 and chip.switch_gbs is None
    assert len(json.loads((tmp_path / "runs/found/search.json").read_text())["measured"]["layouts"]) == 2


@pytest.mark.slow
def test_figures_are_timed_once(tmp_path: Path) -> None:
    of = parse_request(run_of(["mode=search", "target=cpu2", "model=gpt_tiny", "precision=float32", "batch=16"]))
    (first,) = with_figures(of, tmp_path, Console(quiet=True)).targets
    (again,) = with_figures(of, tmp_path, Console(quiet=True)).targets
    assert first == again and first.chip is not None and first.chip.peak_tflops["float32"] > 0
