"""Trainings that belong to no sweep, as trials, from their run folders alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from valkyrie.config.modes import MODES
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.runs.results import StepResult, TrialResult
from valkyrie.sweep.results import training_results
from valkyrie.sweep.trial import Status, Trial

TRAIN, _SETTINGS = "train", "run"
_METRICS = MODES[TRAIN].results or ""


def find_trainings(path: Path, depth: int, sweeps: Iterable[Path]) -> list[Path]:
    """Return the run folders of trainings that a path is or holds, up to so many folders below, not in these sweeps."""
    own = {folder.resolve() for folder in sweeps}
    patterns = ("/".join(["*"] * below + [_METRICS]) for below in range(depth + 1))
    folders = (file.parent for pattern in patterns for file in sorted(path.glob(pattern)))
    return [f for f in folders if (f / f"{_SETTINGS}.yaml").is_file() and not own & {f.resolve(), *f.resolve().parents}]


def training(folder: Path) -> Trial:
    """Return the training of a run folder as a trial of its own; of one whose settings cannot be read, why."""
    from valkyrie.config.run import Run  # a report of sweeps alone composes nothing
    from valkyrie.runs.folder import saved_config

    try:
        run = Run.from_config(saved_config(folder))
        about, values = run.about(), run.values()
    except ValueError as error:
        return _trial(folder, Status.failed, str(error), None, {}, TrialResult())
    results = training_results(folder / _METRICS)
    reason = "it has no finished step yet" if results.step == StepResult() else None
    return _trial(folder, Status.killed if reason else Status.ok, reason, about, values, results)


def _trial(
    folder: Path,
    status: Status,
    reason: str | None,
    about: LayoutRecord | None,
    values: dict[str, str],
    results: TrialResult,
) -> Trial:
    place = folder.resolve()
    return Trial(
        key=f"{TRAIN}:{place}",
        name=place.name,
        sweep=place.name,
        stage=TRAIN,
        status=status,
        reason=reason,
        overrides=[],
        about=about,
        started="",
        wall_s=results.goodput.wall_s if results.goodput else 0.0,
        folder=place.name,
        results=results,
        values=values,
        flags=["--config-path", str(place), "--config-name", _SETTINGS],
    )
