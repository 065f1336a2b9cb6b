"""`mode=calibrate`: constants are found again from trials, held to families left out, and written as an experiment."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from reported import sweep_folder, trial
from runs import command
from valkyrie.hardware import TargetConfig
from valkyrie.search.estimate.efficiency import Efficiency, efficiency_of
from valkyrie.search.estimate.runs import estimated
from valkyrie.search.show import how_far
from valkyrie.search.trust import correction_of, trust
from valkyrie.sweep.trial import Trial
from valkyrie.train.arguments import run_of

LAYOUTS = ["8x1x1-fsdp", "8x1x1-dp", "4x2x1-1d_tp", "1x4x2-2d_tp"]
SEQ = 512
SLOWER = 1.2
"""What a step takes of its replay."""


def trials(batches: Sequence[int], truth: Efficiency) -> list[Trial]:
    """Return trials whose steps take what the estimate says with these constants."""
    made = []
    for batch in batches:
        for layout in LAYOUTS:
            mesh, _, partition = layout.partition("-")
            asked = ["model=gpt_125m", "target=v5e-8", f"mesh={mesh}", f"partition={partition}", f"batch={batch}"]
            asked += [f"seq={SEQ}", "precision=bf16_mixed", "remat=full"]
            step_s = estimated([run_of(asked)], truth)[0]["step"]
            one = trial(layout, batch * SEQ / step_s / 8, batch=batch, target="v5e-8")
            results = one.results | {"step": one.results["step"] | {"step_s": step_s, "replayed_s": step_s / SLOWER}}
            made.append(replace(one, overrides=asked, results=results, about=one.about | {"seq": SEQ}, flags=[]))
    return made


@pytest.fixture(scope="module")
def truth() -> Efficiency:
    """Constants that no chip has."""
    chip = run_of(["target=v5e-8"]).config.target.chip
    assert chip is not None
    return replace(efficiency_of(chip), products=0.6, gathers=0.5)


def measured(compiled: Sequence[Trial], ratios: Sequence[float]) -> list[Trial]:
    """Return trials that took so many times the steps of compiled ones, on devices that are no simulated ones."""
    made = []
    for one, ratio in zip(compiled, ratios, strict=True):
        step = one.results["step"] | {"step_s": ratio * one.results["step"]["step_s"]}
        results = one.results | {"step": step, "simulated": False}
        made.append(replace(one, key=f"measure {one.key}", stage="measure", results=results))
    return made


def calibrated(folder: Path, made: Sequence[Trial], capfd: pytest.CaptureFixture[str]) -> str:
    """Return what calibrating by these trials prints."""
    sweep = sweep_folder(folder / "sweep", made)
    assert command("mode=calibrate", f"paths={sweep}", f"runs={folder}", "name=found") == 0
    return capfd.readouterr().out


def used(folder: Path) -> TargetConfig:
    """Return the slice as a run has it that uses what was written."""
    file = folder / "mine" / "experiment" / "calibrated_v5e.yaml"
    file.parent.mkdir(parents=True)
    file.write_text((folder / "found" / "calibrated_v5e.yaml").read_text())
    return run_of(["--config-dir", str(folder / "mine"), "+experiment=calibrated_v5e", "target=v5e-8"]).config.target


def test_constants_are_found_and_held_to_families_left_out(
    truth: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled = trials((32, 64), truth)
    without = [one for one in compiled if one is not compiled[1]]
    pairs = measured([compiled[0], compiled[1], compiled[2], compiled[len(LAYOUTS)]], [1.0, 1.0, 1.02, 0.98])
    printed = calibrated(tmp_path, [*without, *pairs], capfd)
    assert "v5e: 11 trials of 4 families." in printed and "Fitted constants are better there." in printed
    before, after = (float(n) for n in re.findall(r"(?:off by|families:) ([\d.]+)%", printed)[:2])
    assert after < before / 3
    (told,) = json.loads((tmp_path / "found" / "calibrate.json").read_text())
    assert told["after"]["products"] == pytest.approx(0.6, abs=0.1) and told["gains"]

    assert "Replays: 3 measured steps of 2 families have a compile of the same layout beside them." in printed
    assert "1 measured trial has no compile of the same layout in these folders" in printed
    target = used(tmp_path)
    assert target.chip is not None
    fitted, of_32 = target.chip.replay, SLOWER * 1.02**0.5
    assert (fitted.factor, fitted.rows, fitted.models) == (
        pytest.approx((of_32 * SLOWER * 0.98) ** 0.5, rel=1e-3),
        3,
        2,
    )
    assert fitted.low == pytest.approx(SLOWER * 0.98 / of_32, rel=1e-3)
    assert fitted.high == pytest.approx(1.02 / 0.98, rel=1e-3)
    assert correction_of(target).of_chip == fitted.factor
    span = trust(2.0, target.chip)
    assert span is not None and span["low_s"] == pytest.approx(2.0 * (fitted.low or 0))
    assert "your 3 measured steps on v5e, predicted by other models and batches, took -3% to +4% of it" in how_far(span)


def test_what_is_written_is_an_experiment(truth: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    calibrated(tmp_path, trials((32,), truth), capfd)
    chip, written = used(tmp_path).chip, (tmp_path / "found" / "calibrated_v5e.yaml").read_text()
    assert chip is not None and efficiency_of(chip).products == pytest.approx(0.6, abs=0.1)
    assert chip.replay.factor is None and "replay" not in written
    assert "All are of one family, so nothing says how good fitted constants are on another." in written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "mode=calibrate fits to trials: say where they are, as paths=[runs/search-a,runs/sweep-b]."),
        (("paths=no/such/folder",), "no/such/folder does not exist."),
    ],
)
def test_what_cannot_be_fitted_to(arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("mode=calibrate", *arguments) == 2
    assert message in capfd.readouterr().err
