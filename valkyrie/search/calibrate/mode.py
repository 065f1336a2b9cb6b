"""`mode=calibrate`: fits the constants of the estimate, and the factor of replays, to the user's own trials.

Estimates are fitted to compiled and measured trials, replays to layouts that were both compiled and measured. Prints
the improvement of each.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from valkyrie.config.modes import CALIBRATED, settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.target import ChipConfig
from valkyrie.modes.calibrate import Config as CalibrateMode
from valkyrie.paths import write_atomic
from valkyrie.report.records import find_sweeps, read_rows
from valkyrie.runs.folder import RUN, run_folder, saved_config, write_about
from valkyrie.search.calibrate.replay_fit import ReplayFit, off, replay_fit, rounded
from valkyrie.search.estimate.efficiency import Efficiency, efficiency_of
from valkyrie.search.estimate.fit import FITTED, fitted, known_of, without_family
from valkyrie.search.folder import ANSWER
from valkyrie.sweep.rows import Row
from valkyrie.train.screen import make_console

_WHAT = "Name folders of searches or sweeps that compiled or measured layouts, as paths=[runs/search-a,runs/sweep-b]."


@dataclass(frozen=True)
class Calibration:
    """The constants of a chip before and after the fit, and the errors of estimates with both.

    Args:
        chip: The chip.
        families: Number of trials by family.
        before: The chip's own constants.
        after: The fitted constants.
        errors: Known over estimated seconds of each trial, by the chip's own constants.
        left_out: The same by constants fitted to the other families, or None if there is only one family.
        replay: Fit of replays to layouts that were measured and compiled, or None if there are none.
        unpaired: Number of measured trials that were not compiled.
    """

    chip: ChipConfig
    families: dict[str, int]
    before: Efficiency
    after: Efficiency
    errors: np.ndarray
    left_out: np.ndarray | None
    replay: ReplayFit | None
    unpaired: int

    @property
    def gains(self) -> bool:
        """Whether the fitted constants are better on families that they were not fitted to."""
        return self.left_out is not None and off(self.left_out)[0] < off(self.errors)[0]


def calibrate_mode(run: Run) -> int:
    """Fit each chip's constants to the trials in `mode.paths`, print and store them, and return the exit status."""
    console, paths = (
        make_console(),
        [Path(path).expanduser() for path in settings_for(CalibrateMode, run.config.mode).paths],
    )
    if not paths:
        raise ValueError("mode=calibrate fits to trials: say where they are, as paths=[runs/search-a,runs/sweep-b].")
    for path in paths:
        _check(path)
    rows = [row for row in read_rows(paths) if row.ok and not row.group.simulated and not row.is_training]
    by_chip: dict[str, list[tuple[Row, Run]]] = defaultdict(list)
    without_settings = 0
    for row in rows:
        trial_run = _saved_run(row)
        if trial_run is None:
            without_settings += 1
        elif (chip := trial_run.config.target.chip) is not None:
            by_chip[chip.name].append((row, trial_run))
    if without_settings:
        left_out = f"left out {without_settings} of {len(rows)} trials: their folders no longer have a {RUN}"
        console.print(left_out, style="yellow", markup=False, soft_wrap=True)
    if not by_chip:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no trial there was compiled or measured for a chip whose figures are known."
        )
    console.print(f"{sum(map(len, by_chip.values()))} trials of {len(rows)} with a step are of a known chip")
    few = [_too_few(chip, len(pairs)) for chip, pairs in by_chip.items() if len(pairs) < len(FITTED)]
    if len(few) == len(by_chip):
        raise ValueError("\n".join(few))
    for sentence in few:
        console.print(sentence, style="yellow", markup=False, soft_wrap=True)
    made = [calibration(pairs) for pairs in by_chip.values() if len(pairs) >= len(FITTED)]
    folder = run_folder(run)
    write_about(run, folder)
    for one in made:
        file = folder / CALIBRATED.format(chip=one.chip.name)
        write_atomic(file, fragment(one))
        show(one, file, console)
    write_atomic(folder / "calibrate.json", json.dumps([as_json(one) for one in made], indent=1) + "\n")
    return 0


def _saved_run(row: Row) -> Run | None:
    """Return the run of a trial from its `run.yaml`, or None if its folder is gone.

    The overrides are not enough: composing them again would use today's defaults for everything that they do not name.
    """
    if row.folder is None or not (row.folder / RUN).is_file():
        return None
    saved = saved_config(row.folder)
    saved.mode = {"name": "train"}  # the mode does not matter here, and its keys may have changed since
    return Run.from_config(saved)


def _check(path: Path) -> None:
    """Raise ValueError if a path has no trials, with a description of its content."""
    if not path.exists():
        raise ValueError(f"paths: {path} does not exist. {_WHAT}")
    try:
        find_sweeps([path])
    except ValueError:
        if not [*path.glob(ANSWER), *path.glob(f"*/{ANSWER}")]:
            raise ValueError(f"paths: {path} has no trials. {_WHAT}") from None
        raise ValueError(
            f"paths: {path} is of a search that kept estimates alone: nothing was compiled or measured there. Search "
            "again without mode.compiles=0, with a longer mode.budget, or where the compiler or the devices are."
        ) from None


def _too_few(chip: str, count: int) -> str:
    few = f"{count} trial{'s are' if count > 1 else ' is'} too few"
    return (
        f"{chip}: {few} to fit {len(FITTED)} constants to: at least as many are needed, of several models or batches "
        "best. Name more folders in paths=, or let mode=search compile more (mode.compiles=12)."
    )


def calibration(pairs: Sequence[tuple[Row, Run]]) -> Calibration:
    """Fit constants to the trials of a chip. A family is one model, batch and length."""
    alike: dict[str, list[tuple[float, Run]]] = defaultdict(list)
    family: dict[str, str] = {}
    for row, run in pairs:
        config = run.config
        work = (config.model, config.batch, config.seq, config.precision, config.optimizer)
        key = repr((row.work.label, row.group.target, work, config.partition, config.remat, list(config.mesh.axes)))
        alike[key].append((row.step_s or 0.0, run))
        family[key] = row.work.label
    known = [known_of([run for _, run in some], [s for s, _ in some], family[key]) for key, some in alike.items()]
    chip, counts = known[0].chip, dict[str, int]()
    for one in known:
        counts[one.family] = counts.get(one.family, 0) + len(one.step_s)
    before = efficiency_of(chip)
    errors = np.concatenate([one.step_s / one.estimate(before) for one in known])
    left_out = None
    if len(counts) > 1:
        estimates = without_family(known, before, FITTED)
        left_out = np.concatenate([one.step_s / estimate for one, estimate in estimates])
    after = fitted(known, before, FITTED)
    return Calibration(chip, counts, before, after, errors, left_out, *replay_fit(pairs))


def fragment(one: Calibration) -> str:
    """Return the fitted constants as an experiment, with comments on the trials and the errors."""
    told = [f"# {line}" for line in sentences(one)]
    constants = [f"      {name}: {rounded(getattr(one.after, name)):g}" for name in FITTED]
    name = CALIBRATED.format(chip=one.chip.name)
    use = f"# Copy this file to FOLDER/experiment/{name} and write --config-dir FOLDER +experiment={Path(name).stem}."
    lines = ["# @package _global_", use, *told, "target:", "  chip:", f"    calibrated: {one.chip.name}"]
    lines += ["    estimate:", *constants]
    if one.replay is not None:
        lines += [
            "    replay:",
            *(f"      {k}: {'null' if v is None else v}" for k, v in asdict(one.replay.fitted).items()),
        ]
    return "\n".join(lines) + "\n"


def sentences(one: Calibration) -> list[str]:
    """Describe the fit, and its errors on families that it was not fitted to."""
    lines = [*_on_estimates(one), *(one.replay.sentences if one.replay else [])]
    if one.unpaired:
        lines.append(
            f"{one.unpaired} measured trial{'s have' if one.unpaired > 1 else ' has'} no compile of the same layout "
            "in these folders: replays are fitted to what both mode=measure and mode=compile ran."
        )
    return lines


def _on_estimates(one: Calibration) -> list[str]:
    rows, families, (middle, worst) = len(one.errors), len(one.families), off(one.errors)
    lines = [
        f"{one.chip.name}: {rows} trials of {families} famil{'y' if families == 1 else 'ies'}. As they are, estimates "
        f"are off by {middle:.1f}% in the median and {worst:.1f}% at worst."
    ]
    if one.left_out is None:
        return [*lines, "All are of one family, so nothing says how good fitted constants are on another."]
    middle, worst = off(one.left_out)
    low, high = np.quantile(one.left_out, [0.05, 0.95])
    lines.append(
        f"By constants fitted to the other families: {middle:.1f}% and {worst:.1f}%; nine of "
        f"ten trials took {low:.2f} to {high:.2f} of their estimate."
    )
    better = "Fitted constants are better there." if one.gains else "They are no better there: keep those of the chip."
    return [*lines, better]


def as_json(one: Calibration) -> dict[str, Any]:
    """Return a calibration as plain values."""
    told: dict[str, Any] = {"chip": one.chip.name, "families": one.families, "fitted": list(FITTED)}
    told |= {"before": asdict(one.before), "after": asdict(one.after), "known_over_estimated": one.errors.tolist()}
    told |= {"left_out": None if one.left_out is None else one.left_out.tolist(), "gains": one.gains}
    return told | {"replay": one.replay.as_json() if one.replay else None}


def show(one: Calibration, file: Path, console: Console) -> None:
    """Print a chip's constants before and after the fit, and the improvement."""
    table = Table(title=f"constants of {one.chip.name}", title_justify="left", header_style="bold", box=SIMPLE)
    for name in ("constant", "as it is", "fitted"):
        table.add_column(name, justify="left" if name == "constant" else "right")
    for name in FITTED:
        table.add_row(name, *(f"{rounded(getattr(of, name)):g}" for of in (one.before, one.after)))
    console.print(table)
    for sentence in sentences(one):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(f"written: {file}", soft_wrap=True)
