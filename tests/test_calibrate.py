"""Tests of `mode=calibrate`: it recovers known constants, validates on held-out families, and writes an experiment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers import shared_run
from reported import make_trial, write_sweep
from runs import run_train
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.hardware.target import TargetConfig
from valkyrie.report.records import read_rows
from valkyrie.runs.folder import RUN_FILE
from valkyrie.search.calibrate import mode as calibrate
from valkyrie.search.calibrate.mode import FITTED_CONSTANTS, fit_calibration
from valkyrie.search.calibrate.replay_fit import fit_replays
from valkyrie.search.compile.correction import MIN_RUNS, step_interval, target_correction
from valkyrie.search.compile.show import describe_interval
from valkyrie.search.estimate.efficiency import Efficiency, chip_efficiency
from valkyrie.search.estimate.runs import estimate_runs
from valkyrie.search.folder import ANSWER_FILE
from valkyrie.search.request import parse_request
from valkyrie.sweep.rows import Row
from valkyrie.sweep.trial import TRIALS_FILE, Trial

LAYOUTS = ["8x1x1-fsdp", "8x1x1-dp", "4x2x1-1d_tp", "1x4x2-2d_tp"]
SEQ = 512
SEARCH_ARGUMENTS = ["mode=search", "target=v5e-8", "model=gpt_tiny", "precision=bf16_mixed", "batch=32"]
SLOWDOWN = 1.2
"""Ratio of the trials' step times to their replayed times."""


def make_trials(
    batches: Sequence[int], true_efficiency: Efficiency, *more_overrides: str, slices: int = 1
) -> list[Trial]:
    """Return a compiled trial for each batch size and each of `LAYOUTS`.

    The step time is the one that the estimate computes from the constants `true_efficiency`. It is longer than the
    replayed time by a factor of `SLOWDOWN`. `more_overrides` apply to all trials.
    """
    slice_prefix = "" if slices == 1 else f"{slices}s"
    calibration_trials = []
    for batch in batches:
        for layout in LAYOUTS:
            mesh, _, partition = layout.partition("-")
            overrides = [
                "model=gpt_125m",
                "target=v5e-8",
                f"mesh={slice_prefix}{mesh}",
                f"partition={partition}",
                f"batch={batch}",
            ]
            overrides += [f"seq={SEQ}", "precision=bf16_mixed", "remat=full", *more_overrides]
            step_s = estimate_runs([shared_run(*overrides)], true_efficiency)[0]["step"]
            layout_trial = make_trial(layout, batch * SEQ / step_s / 8, batch=batch, target="v5e-8")
            results = replace(
                layout_trial.results,
                step=replace(layout_trial.results.step, step_s=step_s, replayed_s=step_s / SLOWDOWN),
            )
            record = replace(layout_trial.about, seq=SEQ)
            calibration_trials.append(
                replace(
                    layout_trial, key=" ".join(overrides), overrides=overrides, results=results, about=record, flags=[]
                )
            )
    return calibration_trials


@pytest.fixture(scope="module")
def true_efficiency() -> Efficiency:
    """Efficiency constants of v5e with other values of `products` and `gathers`, for the fit to recover."""
    chip = shared_run("target=v5e-8").config.target.chip
    assert chip is not None
    return replace(chip_efficiency(chip), products=0.6, gathers=0.5)


def with_measured_times(compiled_trials: Sequence[Trial], ratios: Sequence[float]) -> list[Trial]:
    """Return a measured trial on real devices for each compiled trial.

    `ratios` are the ratios of measured to compiled step times.
    """
    measured_trials = []
    for compiled_trial, ratio in zip(compiled_trials, ratios, strict=True):
        step = replace(compiled_trial.results.step, step_s=ratio * compiled_trial.results.step.step_s)
        results = replace(compiled_trial.results, step=step, simulated=False)
        measured_trials.append(
            replace(compiled_trial, key=f"measure {compiled_trial.key}", stage="measure", results=results)
        )
    return measured_trials


def save_sweep(folder: Path, trials: Sequence[Trial]) -> Path:
    """Write a sweep with these trials, each with the `run.yaml` of its overrides, and return its folder."""
    renamed_trials = [replace(trial, name=f"trial-{i}", folder=f"trial-{i}") for i, trial in enumerate(trials)]
    for trial in renamed_trials:
        (folder / trial.name).mkdir(parents=True)
        shared_run(*trial.overrides).save(folder / trial.name / RUN_FILE)
    return write_sweep(folder, renamed_trials)


def run_calibration(folder: Path, trials: Sequence[Trial], capfd: pytest.CaptureFixture[str]) -> str:
    """Calibrate with these trials and return the stdout. The results are written to the folder `found`."""
    sweep = save_sweep(folder / "sweep", trials)
    assert run_train("mode=calibrate", f"paths={sweep}", f"runs={folder}", "name=found") == 0
    return capfd.readouterr().out


def calibrated_target(folder: Path) -> TargetConfig:
    """Copy the experiment in `found` to the config folder `mine`, and return `target=v5e-8` of a run that uses it."""
    file = folder / "mine" / "experiment" / "calibrated_v5e.yaml"
    file.parent.mkdir(parents=True)
    file.write_text((folder / "found" / "calibrated_v5e.yaml").read_text())
    return run_with_experiment(folder, "target=v5e-8").config.target


def run_with_experiment(folder: Path, *arguments: str) -> Run:
    """Return a run with the experiment that `calibrated_target` copied to the config folder `mine`."""
    return parse_run(["--config-dir", str(folder / "mine"), "+experiment=calibrated_v5e", *arguments])


@pytest.mark.slow
def test_calibration_recovers_constants_and_validates_on_held_out_families(
    true_efficiency: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled_trials = make_trials((32, 64), true_efficiency)
    without = [compiled_trial for compiled_trial in compiled_trials if compiled_trial is not compiled_trials[1]]
    measured_trials = with_measured_times(
        [*compiled_trials[:4], compiled_trials[len(LAYOUTS)]], [1.0, 1.0, 1.02, 1.01, 0.98]
    )
    output = run_calibration(tmp_path, [*without, *measured_trials], capfd)
    (result,) = json.loads((tmp_path / "found" / "calibrate.json").read_text())
    assert (result["chip"], sum(result["families"].values()), len(result["families"])) == ("v5e", 12, 2)
    assert result["after"]["products"] == pytest.approx(0.6, abs=0.1) and result["gains"]
    before, after = (
        np.median(100 * np.abs(1 / np.array(result[ratios]) - 1)) for ratios in ("known_over_estimated", "left_out")
    )
    assert after < before / 3 and f"{before:.1f}%" in output and f"{after:.1f}%" in output

    assert len(result["replay"]["steps"]) == 4 and " 1 measured trial " in f" {output}".replace("\n", " ")
    target = calibrated_target(tmp_path)
    assert target.chip is not None
    replay_fit, batch_32_slowdown = target.chip.replay, SLOWDOWN * 1.01
    assert (replay_fit.rows, replay_fit.models) == (4, 2)
    assert replay_fit.factor == pytest.approx((batch_32_slowdown * SLOWDOWN * 0.98) ** 0.5, rel=1e-3)
    assert replay_fit.low == pytest.approx(SLOWDOWN * 0.98 / batch_32_slowdown, rel=1e-3)
    assert replay_fit.high == pytest.approx(1.02 / 0.98, rel=1e-3)
    assert target_correction(target).chip_factor == replay_fit.factor
    interval = step_interval(2.0, target.chip, trains_dense_transformer=False)
    assert interval is not None and interval.low_s == pytest.approx(2.0 * (replay_fit.low or 0))
    assert all(part in describe_interval(interval) for part in (" 4 measured ", "-3% to +4%"))


def write_and_read_rows(made: Sequence[Trial], folder: Path) -> list[tuple[Row, Run]]:
    """Write a sweep with these trials, read it, and return a pair (row, run) per trial, as for `fit_calibration`."""
    rows = read_rows([write_sweep(folder, made)])
    return [(row, shared_run(*row.trial.overrides)) for row in rows]


@pytest.fixture
def without_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the fit, so that the estimate's constants stay unchanged."""
    monkeypatch.setattr(calibrate, "fit_constants", lambda known, start, names: start)


@pytest.mark.usefixtures("without_fit")
def test_compiles_and_measurements_of_a_model_and_batch_are_one_family(
    true_efficiency: Efficiency, tmp_path: Path
) -> None:
    compiled_trials = make_trials((32,), true_efficiency)
    calibration = fit_calibration(
        write_and_read_rows(
            [*compiled_trials, *with_measured_times(compiled_trials, [1.0] * len(compiled_trials))], tmp_path
        )
    )
    assert (
        list(calibration.trial_counts.values()) == [8]
        and calibration.held_out_ratios is None
        and not calibration.is_improvement
    )
    assert (
        calibration.replay is not None
        and calibration.replay.held_out_ratios is None
        and calibration.unpaired_count == 0
    )


@pytest.mark.usefixtures("without_fit")
@pytest.mark.parametrize("override", [pytest.param("precision=float32", marks=pytest.mark.slow), "optimizer=muon"])
def test_each_trial_is_estimated_with_its_own_settings(override: str, tmp_path: Path) -> None:
    chip = shared_run("target=v5e-8").config.target.chip
    assert chip is not None
    efficiency = chip_efficiency(chip)
    calibration = fit_calibration(
        write_and_read_rows([*make_trials((32,), efficiency), *make_trials((32,), efficiency, override)], tmp_path)
    )
    assert calibration.ratios.tolist() == pytest.approx([1.0] * len(calibration.ratios), rel=1e-6)


def test_the_slowdown_of_several_slices_is_applied_once(true_efficiency: Efficiency, tmp_path: Path) -> None:
    compiled_trials = make_trials((32,), true_efficiency, "target.slices=2", slices=2)[:1]
    replay_fit, _ = fit_replays(
        write_and_read_rows([*compiled_trials, *with_measured_times(compiled_trials, [1.0])], tmp_path)
    )
    target = shared_run(*compiled_trials[0].overrides).config.target
    assert replay_fit is not None and target.chip is not None and target_correction(target).slices_factor > 1
    fitted = replace(target, chip=replace(target.chip, replay=replay_fit.replay_config))
    assert target_correction(fitted).factor == pytest.approx(SLOWDOWN, rel=1e-3)


def test_fewer_than_four_steps_give_no_interval(true_efficiency: Efficiency, tmp_path: Path) -> None:
    compiled_trials = make_trials((32, 64), true_efficiency)
    measured_trials = with_measured_times([*compiled_trials[:2], compiled_trials[len(LAYOUTS)]], [1.0, 1.02, 0.98])
    replay_fit, _ = fit_replays(write_and_read_rows([*compiled_trials, *measured_trials], tmp_path))
    assert replay_fit is not None and replay_fit.held_out_ratios is not None and len(replay_fit.held_out_ratios) == 3
    assert (replay_fit.replay_config.low, replay_fit.replay_config.high) == (None, None)
    assert f" {MIN_RUNS} " in replay_fit.sentences[-1]


def test_compiles_with_other_compiler_options_are_not_paired(true_efficiency: Efficiency, tmp_path: Path) -> None:
    compiled_trials = make_trials((32,), true_efficiency)[:1]
    (other,) = make_trials((32,), true_efficiency, "+target.chip.xla_options.xla_flag=true")[:1]
    pairs = write_and_read_rows([*compiled_trials, *with_measured_times([other], [1.0])], tmp_path / "other")
    assert fit_replays(pairs) == (None, 1)
    paired = [
        "target.chip.usd_per_hour=3",
        "target.chip.calibrated=v5e",
        "target.chip.replay.factor=1.1",
        "+target.chip.estimate.hbm=0.5",
    ]
    (priced,) = make_trials((32,), true_efficiency, *paired)[:1]
    fit, unpaired = fit_replays(
        write_and_read_rows([*compiled_trials, *with_measured_times([priced], [1.0])], tmp_path / "priced")
    )
    assert fit is not None and unpaired == 0


@pytest.mark.slow
@pytest.mark.usefixtures("without_fit")
def test_a_calibration_is_named_after_its_chips(true_efficiency: Efficiency, tmp_path: Path) -> None:
    trials = [*make_trials((32,), true_efficiency), *make_trials((32,), true_efficiency, "microbatches=2")]
    sweep = save_sweep(tmp_path / "sweep", trials)
    assert run_train("mode=calibrate", f"paths={sweep}", f"runs={tmp_path / 'runs'}") == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("calibrate-v5e-2") and (folder / "calibrated_v5e.yaml").is_file()


@pytest.mark.slow
def test_calibration_writes_an_experiment(
    true_efficiency: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_calibration(
        tmp_path, [*make_trials((32,), true_efficiency), *make_trials((32,), true_efficiency, "microbatches=2")], capfd
    )
    chip, experiment_text = calibrated_target(tmp_path).chip, (tmp_path / "found" / "calibrated_v5e.yaml").read_text()
    assert chip is not None and chip_efficiency(chip).products == pytest.approx(0.6, abs=0.1)
    assert chip.replay.factor is None and "replay" not in experiment_text
    (problem,) = run_with_experiment(tmp_path, "target=v4-64", "mesh=32x1x1", "batch=32").problems()
    assert (problem.key, problem.value) == ("target.chip.calibrated", "v5e")

    several = [*SEARCH_ARGUMENTS, "mode.targets=[v5e-8,v5e-16]"]
    assert [slice_.chip for slice_ in parse_request(run_with_experiment(tmp_path, *several)).targets] == [chip, chip]
    with pytest.raises(ValueError, match=r"^target=v4-8: .*\bv5e\b"):
        parse_request(run_with_experiment(tmp_path, *SEARCH_ARGUMENTS, "mode.targets=[v5e-8,v4-8]"))
    (result,) = json.loads((tmp_path / "found" / "calibrate.json").read_text())
    assert result["left_out"] is None and not result["gains"]
    assert experiment_text.count("%") == 2, "errors on the fitted family alone: the median and the largest"


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ((), ("mode=calibrate", "paths=[")),
        (("paths=no/such/folder",), ("paths", " no/such/folder ")),
        (("paths=.",), ("paths", " . ")),
        (("paths=runs/estimates",), ("paths", " runs/estimates ", "mode.compiles=0")),
    ],
)
def test_unsuitable_trials_are_refused(
    arguments: tuple[str, ...],
    values: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "paths=runs/estimates" in arguments:
        (tmp_path / "runs" / "estimates").mkdir(parents=True)
        (tmp_path / "runs" / "estimates" / ANSWER_FILE).write_text("{}")
    assert run_train("mode=calibrate", *arguments) == 2
    error = capfd.readouterr().err
    assert all(value in error for value in values)


def test_a_trial_is_fitted_with_the_settings_of_its_run_yaml(true_efficiency: Efficiency, tmp_path: Path) -> None:
    """Settings that a trial's overrides omit are read from its `run.yaml`, not from the current defaults."""
    sweep = save_sweep(tmp_path / "sweep", make_trials((32,), true_efficiency, "model.layers=2")[:1])
    log = sweep / TRIALS_FILE
    log.write_text(log.read_text().replace('"model.layers=2"', '"seed=0"'))
    (row,) = read_rows([sweep])
    saved = calibrate._saved_run(row)
    assert saved is not None and saved.config.model.layers == 2
    (sweep / "trial-0" / RUN_FILE).unlink()
    assert calibrate._saved_run(row) is None


@pytest.mark.slow
def test_skipped_trials_are_named_with_the_reason(
    true_efficiency: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    *usable, trial_without_run = make_trials((32, 64), true_efficiency)
    sweep = save_sweep(tmp_path / "sweep", [*usable, trial_without_run])
    (sweep / "trial-7" / RUN_FILE).unlink()
    assert run_train("mode=calibrate", f"paths={sweep}", f"runs={tmp_path}", "name=found") == 0
    output = capfd.readouterr().out
    (without_run,) = (line for line in output.splitlines() if line.startswith("skipping "))
    assert "1 of 8 trials" in without_run and RUN_FILE in without_run
    assert without_run.endswith(f": {sweep}:{trial_without_run.key}")
    assert "using 7 of 8 trials\n" in output


def test_fewer_trials_than_constants_are_refused(
    true_efficiency: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = save_sweep(tmp_path / "sweep", make_trials((32,), true_efficiency)[:1])
    assert run_train("mode=calibrate", f"paths={sweep}", f"runs={tmp_path}", "name=found") == 2
    error = capfd.readouterr().err
    assert "v5e: 1 " in error and f" {len(FITTED_CONSTANTS)} " in error and "paths=" in error
    assert not (tmp_path / "found").exists()
