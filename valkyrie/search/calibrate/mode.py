"""`mode=calibrate`: fits the efficiency constants and the replay factor of each chip to the user's own trials.

The efficiency constants of the estimate are fitted to compiled and measured step times. The replay factor is fitted to
layouts that were both compiled and measured. Prints the errors before and after the fit.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from valkyrie.config.modes import ANSWER_FILE, CALIBRATED_FILE, settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.target import ChipConfig
from valkyrie.modes.calibrate import Config as CalibrateMode
from valkyrie.paths import write_atomic
from valkyrie.report.records import find_result_folders, read_rows
from valkyrie.runs.folder import RUN_FILE, choose_run_folder, saved_run, write_run_files
from valkyrie.search.calibrate.replay_fit import ReplayFit, fit_replays, percent_errors, round_digits
from valkyrie.search.estimate.efficiency import Efficiency, chip_efficiency
from valkyrie.search.estimate.fit import FITTED_CONSTANTS, cross_validate, fit_constants, timed_layouts
from valkyrie.sweep.rows import Row
from valkyrie.train.screen import make_console
from valkyrie.units import count_text

_PATHS_HINT = "Use folders of searches or sweeps that compiled or measured layouts: paths=[runs/search-a,runs/sweep-b]."
_MAX_LISTED = 3
"""Number of skipped trials to name."""


@dataclass(frozen=True)
class Calibration:
    """Efficiency constants of a chip before and after a fit to known step times, with the errors of the estimates.

    Args:
        chip: The chip.
        trial_counts: Number of trials by family (model, batch and sequence length).
        initial: Constants before the fit.
        fitted: Fitted constants.
        ratios: Ratio of known (compiled or measured) to estimated seconds of each trial, with the constants before the
            fit.
        held_out_ratios: The same ratios with constants fitted to the other families, or None if there is only one
            family.
        replay: Replay factor, fitted to layouts that were both compiled and measured, or None if there are none.
        unpaired_count: Number of measured trials without a compile of the same layout.
    """

    chip: ChipConfig
    trial_counts: dict[str, int]
    initial: Efficiency
    fitted: Efficiency
    ratios: np.ndarray
    held_out_ratios: np.ndarray | None
    replay: ReplayFit | None
    unpaired_count: int

    @property
    def is_improvement(self) -> bool:
        """Whether fitted constants lower the median error for families that were left out of the fit.

        False if there is only one family.
        """
        return (
            self.held_out_ratios is not None
            and percent_errors(self.held_out_ratios)[0] < percent_errors(self.ratios)[0]
        )


def calibrate_mode(run: Run) -> int:
    """Fit the constants of each chip to the trials in `mode.paths`, print them and write them to the run folder.

    Trials that cannot be used, and chips with too few trials, are skipped with a message. Trials without a step time,
    on simulated devices or of training runs are ignored. Returns exit status 0. Raises ValueError if there are no
    paths, if a path does not exist or has no trials, or if all chips are skipped.
    """
    console, paths = (
        make_console(),
        [Path(path).expanduser() for path in settings_for(CalibrateMode, run.config.mode).paths],
    )
    if not paths:
        raise ValueError(f"mode=calibrate needs trials to fit to. {_PATHS_HINT}")
    for path in paths:
        _check_path(path)
    rows = [row for row in read_rows(paths) if row.has_speed and not row.speed_kind.simulated and not row.is_training]
    by_chip: dict[str, list[tuple[Row, Run]]] = defaultdict(list)
    rows_by_skip_reason: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if (trial_run := _saved_run(row)) is None:
            rows_by_skip_reason[f"the folder has no {RUN_FILE}"].append(row)
        elif (chip := trial_run.config.target.chip) is None:
            rows_by_skip_reason["the chip is not known"].append(row)
        else:
            by_chip[chip.name].append((row, trial_run))
    for reason, skipped_rows in rows_by_skip_reason.items():
        message = f"skipping {len(skipped_rows)} of {len(rows)} trials, because {reason}: {_list_rows(skipped_rows)}"
        console.print(message, style="yellow", soft_wrap=True)
    if not by_chip:
        raise ValueError(
            f"paths: no trial in {', '.join(map(str, paths))} can be used. A trial needs a step time, its {RUN_FILE}, "
            f"and a target whose chip is known (conf/target/chip). {_PATHS_HINT}"
        )
    console.print(f"using {sum(map(len, by_chip.values()))} of {len(rows)} trials")
    too_few_messages = [
        _too_few_message(chip, len(pairs)) for chip, pairs in by_chip.items() if len(pairs) < len(FITTED_CONSTANTS)
    ]
    if len(too_few_messages) == len(by_chip):
        raise ValueError("\n".join(too_few_messages))
    for message in too_few_messages:
        console.print(message, style="yellow", soft_wrap=True)
    calibrations = [fit_calibration(pairs) for pairs in by_chip.values() if len(pairs) >= len(FITTED_CONSTANTS)]
    title = "-".join(
        ["calibrate", *(calibration.chip.name for calibration in calibrations), time.strftime("%Y%m%d-%H%M%S")]
    )
    folder = choose_run_folder(run, title)
    write_run_files(run, folder)
    for calibration in calibrations:
        file = folder / CALIBRATED_FILE.format(chip=calibration.chip.name)
        write_atomic(file, experiment_yaml(calibration))
        print_calibration(calibration, file, console)
    write_atomic(
        folder / "calibrate.json", json.dumps([as_json(calibration) for calibration in calibrations], indent=1) + "\n"
    )
    return 0


def _list_rows(rows: Sequence[Row]) -> str:
    """List the ids of the first `_MAX_LISTED` rows, followed by the number of remaining ones."""
    more = f" and {len(rows) - _MAX_LISTED} more" if len(rows) > _MAX_LISTED else ""
    return ", ".join(row.id for row in rows[:_MAX_LISTED]) + more


def _saved_run(row: Row) -> Run | None:
    """Return the run of a trial from its `run.yaml`, or None if there is no such file.

    Composing the trial's overrides again would not be enough: other settings would take today's defaults.
    """
    if row.folder is None or not (row.folder / RUN_FILE).is_file():
        return None
    return saved_run(row.folder)


def _check_path(path: Path) -> None:
    """Raise ValueError if a path does not exist or has no trials."""
    if not path.exists():
        raise ValueError(f"paths: {path} does not exist. {_PATHS_HINT}")
    try:
        find_result_folders([path])
    except ValueError:
        if not [*path.glob(ANSWER_FILE), *path.glob(f"*/{ANSWER_FILE}")]:
            raise ValueError(f"paths: {path} has no trials. {_PATHS_HINT}") from None
        raise ValueError(
            f"paths: {path} is a search with only estimates: nothing was compiled or measured. Search again "
            "without mode.compiles=0, with a longer mode.budget, or on a machine with the compiler or the devices."
        ) from None


def _too_few_message(chip: str, count: int) -> str:
    trials = f"{count} trial{'s are' if count > 1 else ' is'}"
    return (
        f"{chip}: {trials} too few to fit {len(FITTED_CONSTANTS)} constants. Use at least {len(FITTED_CONSTANTS)} "
        "trials, preferably of several models and batch sizes: add folders to paths=, "
        "or let mode=search compile more layouts (mode.compiles=12)."
    )


def fit_calibration(pairs: Sequence[tuple[Row, Run]]) -> Calibration:
    """Fit the constants of a chip to trials. `pairs` has the row and the run of each trial, all on the same chip.

    Trials with the same model, batch and sequence length form a family. If there are several families, the fit is
    cross-validated over them.
    """
    step_times: dict[str, list[tuple[float, Run]]] = defaultdict(list)
    family_by_key: dict[str, str] = {}
    for row, run in pairs:
        config = run.config
        work = (config.model, config.batch, config.seq, config.precision, config.optimizer)
        key = repr(
            (row.work.label, row.speed_kind.target, work, config.partition, config.remat, list(config.mesh.axes))
        )
        step_times[key].append((row.step_s or 0.0, run))
        family_by_key[key] = row.work.label
    timed = [
        timed_layouts([run for _, run in group], [s for s, _ in group], family_by_key[key])
        for key, group in step_times.items()
    ]
    chip, trial_counts = timed[0].chip, dict[str, int]()
    for layouts in timed:
        trial_counts[layouts.family] = trial_counts.get(layouts.family, 0) + len(layouts.step_s)
    initial = chip_efficiency(chip)
    ratios = np.concatenate([layouts.step_s / layouts.estimate(initial) for layouts in timed])
    held_out_ratios = None
    if len(trial_counts) > 1:
        estimates = cross_validate(timed, initial, FITTED_CONSTANTS)
        held_out_ratios = np.concatenate([layouts.step_s / estimate for layouts, estimate in estimates])
    fitted = fit_constants(timed, initial, FITTED_CONSTANTS)
    return Calibration(chip, trial_counts, initial, fitted, ratios, held_out_ratios, *fit_replays(pairs))


def experiment_yaml(calibration: Calibration) -> str:
    """Return an experiment config (YAML) that sets the fitted constants and the replay factor, if there is one.

    Comments describe the trials and the errors.
    """
    comments = [f"# {line}" for line in describe(calibration)]
    constants = [f"      {name}: {round_digits(getattr(calibration.fitted, name)):g}" for name in FITTED_CONSTANTS]
    name = CALIBRATED_FILE.format(chip=calibration.chip.name)
    use = (
        f"# Copy this file to FOLDER/experiment/{name}, and add to your command: --config-dir FOLDER "
        f"+experiment={Path(name).stem}"
    )
    lines = ["# @package _global_", use, *comments, "target:", "  chip:", f"    calibrated: {calibration.chip.name}"]
    lines += ["    estimate:", *constants]
    if calibration.replay is not None:
        lines += [
            "    replay:",
            *(f"      {k}: {'null' if v is None else v}" for k, v in asdict(calibration.replay.replay_config).items()),
        ]
    return "\n".join(lines) + "\n"


def describe(calibration: Calibration) -> list[str]:
    """Return sentences that describe the fit, its cross-validated errors, and measured trials that it could not use."""
    lines = [*_describe_estimates(calibration), *(calibration.replay.sentences if calibration.replay else [])]
    if calibration.unpaired_count:
        trials = count_text(calibration.unpaired_count, "measured trial")
        lines.append(
            f"{trials} cannot be used for the replay factor, because these folders have no compiled trial of the same "
            "layout. Add the folders of such trials to paths=."
        )
    return lines


def _describe_estimates(calibration: Calibration) -> list[str]:
    trial_count, family_count, (median, worst) = (
        len(calibration.ratios),
        len(calibration.trial_counts),
        percent_errors(calibration.ratios),
    )
    names = f"{family_count} famil{'y' if family_count == 1 else 'ies'}"
    lines = [
        f"{calibration.chip.name}: {trial_count} trials of {names} (model, batch and length). Errors of estimates with "
        f"the chip's own constants: median {median:.1f}%, worst {worst:.1f}%."
    ]
    if calibration.held_out_ratios is None:
        return [*lines, "All trials are of one family, so the fitted constants cannot be validated on another one."]
    median, worst = percent_errors(calibration.held_out_ratios)
    low, high = np.quantile(calibration.held_out_ratios, [0.05, 0.95])
    lines.append(
        f"Errors with constants fitted to the other families: median {median:.1f}%, worst {worst:.1f}%. Nine of ten "
        f"trials took {low:.2f} to {high:.2f} times their estimate."
    )
    verdict = (
        "The fit is an improvement."
        if calibration.is_improvement
        else "The fit is no improvement: keep the chip's own constants."
    )
    return [*lines, verdict]


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Return the content of `calibrate.json` for one chip.

    `known_over_estimated`, `left_out` and `gains` are the fields `ratios`, `held_out_ratios` and `is_improvement`.
    """
    record: dict[str, Any] = {
        "chip": calibration.chip.name,
        "families": calibration.trial_counts,
        "fitted": list(FITTED_CONSTANTS),
    }
    record |= {
        "before": asdict(calibration.initial),
        "after": asdict(calibration.fitted),
        "known_over_estimated": calibration.ratios.tolist(),
    }
    record |= {
        "left_out": None if calibration.held_out_ratios is None else calibration.held_out_ratios.tolist(),
        "gains": calibration.is_improvement,
    }
    return record | {"replay": calibration.replay.as_json() if calibration.replay else None}


def print_calibration(calibration: Calibration, file: Path, console: Console) -> None:
    """Print the constants of a chip before and after the fit, and the errors."""
    table = Table(title=f"constants of {calibration.chip.name}", title_justify="left", header_style="bold", box=SIMPLE)
    for name in ("constant", "before", "fitted"):
        table.add_column(name, justify="left" if name == "constant" else "right")
    for name in FITTED_CONSTANTS:
        table.add_row(
            name,
            *(f"{round_digits(getattr(constants, name)):g}" for constants in (calibration.initial, calibration.fitted)),
        )
    console.print(table)
    for sentence in describe(calibration):
        console.print(sentence, soft_wrap=True)
    console.print(f"written: {file}", soft_wrap=True)
