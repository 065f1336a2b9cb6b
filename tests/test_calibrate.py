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
from valkyrie.search.estimate.efficiency import Efficiency, efficiency_of
from valkyrie.search.estimate.runs import estimated
from valkyrie.sweep.trial import Trial
from valkyrie.train.arguments import run_of

LAYOUTS = ["8x1x1-fsdp", "8x1x1-dp", "4x2x1-1d_tp", "1x4x2-2d_tp"]
SEQ = 512


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
            results = one.results | {"step": one.results["step"] | {"step_s": step_s}}
            made.append(replace(one, overrides=asked, results=results, about=one.about | {"seq": SEQ}, flags=[]))
    return made


@pytest.fixture(scope="module")
def truth() -> Efficiency:
    """Constants that no chip has."""
    chip = run_of(["target=v5e-8"]).config.target.chip
    assert chip is not None
    return replace(efficiency_of(chip), products=0.6, gathers=0.5)


def calibrated(folder: Path, made: list[Trial], capfd: pytest.CaptureFixture[str]) -> str:
    """Return what calibrating by these trials prints."""
    sweep = sweep_folder(folder / "sweep", made)
    assert command("mode=calibrate", f"paths={sweep}", f"runs={folder}", "name=found") == 0
    return capfd.readouterr().out


def test_constants_are_found_and_held_to_families_left_out(
    truth: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = calibrated(tmp_path, trials((32, 64), truth), capfd)
    assert "v5e: 8 trials of 2 families." in printed and "Fitted constants are better there." in printed
    before, after = (float(n) for n in re.findall(r"(?:off by|families:) ([\d.]+)%", printed))
    assert after < before / 3
    (told,) = json.loads((tmp_path / "found" / "calibrate.json").read_text())
    assert told["after"]["products"] == pytest.approx(0.6, abs=0.1) and told["gains"]


def test_what_is_written_is_an_experiment(truth: Efficiency, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    calibrated(tmp_path, trials((32,), truth), capfd)
    written = (tmp_path / "found" / "calibrated_v5e.yaml").read_text()
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "calibrated_v5e.yaml").write_text(written)
    run = run_of(["--config-dir", str(tmp_path / "mine"), "+experiment=calibrated_v5e", "target=v5e-8"])
    chip = run.config.target.chip
    assert chip is not None and efficiency_of(chip).products == pytest.approx(0.6, abs=0.1)
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
