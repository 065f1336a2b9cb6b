"""Reads the trials of sweeps and training runs at or below a path, and converts them to rows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from valkyrie.config.modes import ANSWER_FILE, COMPILE_FILE, MEASURE_FILE, METRICS_FILE
from valkyrie.processes.locks import is_being_written
from valkyrie.records import RecordError, read_record
from valkyrie.runs.folder import RUN_FILE
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.sweep.results import training_results
from valkyrie.sweep.rows import Row, make_rows
from valkyrie.sweep.trial import MULTIRUN_FILE, TRIALS_FILE, Status, StepResult, Trial, TrialLog, TrialResult

if TYPE_CHECKING:
    from valkyrie.search.answer_record import SearchAnswer

TRAIN_STAGE, _SETTINGS_NAME = "train", "run"
MADE_BY_PREFIX = "# made by: "
"""Start of the comment in `run.yaml` that contains the command that started the training run."""

SEARCH_DEPTH = 2
"""Number of levels of subfolders to search for sweeps and training runs."""


def read_rows(paths: Sequence[Path], say: Callable[[str], object] | None = None) -> list[Row]:
    """Read the trials of sweeps and training runs at or below these paths as rows.

    Raises ValueError if there are none or a `trials.jsonl` is damaged. An incomplete last line of a `trials.jsonl`, and
    damaged lines of the metrics of training runs, are skipped, and `say` is called with a message about them.
    """
    folders = find_result_folders(paths)
    sweeps = {folder: TrialLog(folder).read() for folder in folders if (folder / TRIALS_FILE).exists()}
    trainings = {folder: [read_training(folder, say)] for folder in folders if folder not in sweeps}
    rows = make_rows(sweeps, trainings)
    for folder in sweeps:
        torn_line_note = TrialLog(folder).describe_torn_line()
        if torn_line_note and not rows and read_answer(folder) is not None:
            raise ValueError(f"{_describe_missing_results(folder)}. {_ADVICE}")
        if torn_line_note and not rows:
            raise ValueError(
                f"{folder / TRIALS_FILE}: its only line is incomplete, as after a crash or on a full disk. Run the "
                "sweep command again to repeat its trial."
            )
        if torn_line_note and say is not None:
            say(torn_line_note)
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))}: no trial has ended yet. Try again when the first one has.")
    return rows


def find_result_folders(paths: Sequence[Path]) -> list[Path]:
    """Find the folders of sweeps, and of training runs outside sweeps, at or below these paths. Removes duplicates.

    Raises ValueError if a path has none.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist. {_ADVICE}")
        if path.is_file():
            result_folders = [path.parent] if path.name == TRIALS_FILE else []
        else:
            patterns = ("/".join(["*"] * depth + [TRIALS_FILE]) for depth in range(SEARCH_DEPTH + 1))
            result_folders = sorted(file.parent for pattern in patterns for file in path.glob(pattern))
            result_folders += find_trainings(path, SEARCH_DEPTH, result_folders)
        if not result_folders:
            raise ValueError(f"{_describe_missing_results(path)}. {_ADVICE}")
        folders |= {folder.resolve(): folder for folder in result_folders}
    return list(folders.values())


def _describe_missing_results(path: Path) -> str:
    """Return the reason why there is nothing to report at a path."""
    if path.is_file():
        return f"{path} is a file"
    if is_program_search(path):
        return f"{path} was written by valkyrie.search: its layouts are in report.html and {ANSWER_FILE} there"
    if read_answer(path) is not None:
        return f"{path} is a search that only estimated its layouts: they are in its report.html and {ANSWER_FILE}"
    if (path / ANSWER_FILE).is_file():
        return f"{path / ANSWER_FILE} is damaged, or was written by another version of Valkyrie"
    for file, kind in ((COMPILE_FILE, "compile"), (MEASURE_FILE, "measurement")):
        if (path / file).is_file():
            return f"{path} is the run folder of a {kind}, with its report in {path / file}"
    if (path / RUN_FILE).is_file():
        return f"{path} is a run without {METRICS_FILE}: no training step has finished"
    return f"no {TRIALS_FILE} in {path} or its subfolders"


_ADVICE = (
    "Pass a run folder, a sweep folder, or a parent folder such as runs/. "
    "To start a sweep: valkyrie-train -m mode=measure mesh=2x2x2,8x1x1 partition=fsdp,1d_tp"
)


def read_json(row: Row, name: str) -> Mapping[str, Any] | None:
    """Read the JSON object in a file of the row's run folder.

    Returns None if there is no such folder or file, or if the file does not contain a JSON object.
    """
    if row.folder is None:
        return None
    try:
        value = json.loads((row.folder / name).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_answer(folder: Path) -> SearchAnswer | None:
    """Read the answer of a search from its folder. Returns None if it is missing or this version cannot read it."""
    if not (folder / ANSWER_FILE).is_file():
        return None
    # Imported here, because it needs NumPy, which other reports do not.
    from valkyrie.search.answer_record import SearchAnswer

    try:
        return read_record(SearchAnswer, folder / ANSWER_FILE)
    except (OSError, RecordError):
        return None


def is_program_search(folder: Path) -> bool:
    """Return whether the `search.json` of a folder was written by any version of `valkyrie.search`, for a program.

    Returns False if `mode=search` wrote it, or if it cannot be read.
    """
    try:
        return "rows" in read_record(dict, folder / ANSWER_FILE)
    except (OSError, RecordError):
        return False


def read_command(folder: Path) -> str | None:
    """Return the command that created the folder of a search, sweep or training run, or None if it is not recorded."""
    answer, run_file, multirun_file = read_answer(folder), folder / RUN_FILE, folder / MULTIRUN_FILE
    if answer is not None:
        return f"valkyrie-train {shlex.join(answer.command)}"
    if multirun_file.is_file():
        try:
            overrides = yaml.safe_load(multirun_file.read_text())["hydra"]["overrides"]["task"]
            return f"valkyrie-train -m {shlex.join(overrides)}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
            return None
    if run_file.is_file():
        comments = [line for line in run_file.read_text().splitlines()[:3] if line.startswith(MADE_BY_PREFIX)]
        return comments[0].removeprefix(MADE_BY_PREFIX) if comments else None
    return None


def find_trainings(path: Path, depth: int, sweeps: Iterable[Path]) -> list[Path]:
    """Find the run folders of training runs at a path or up to `depth` levels below it. Omits those inside `sweeps`."""
    sweep_folders = {folder.resolve() for folder in sweeps}
    patterns = ("/".join(["*"] * below + [METRICS_FILE]) for below in range(depth + 1))
    folders = (file.parent for pattern in patterns for file in sorted(path.glob(pattern)))
    return [
        f
        for f in folders
        if (f / f"{_SETTINGS_NAME}.yaml").is_file() and not sweep_folders & {f.resolve(), *f.resolve().parents}
    ]


def read_training(folder: Path, say: Callable[[str], object] | None = None) -> Trial:
    """Read the training run in a folder as a trial.

    The trial's status is `failed` if the settings or the metrics cannot be read, `killed` if no step has finished, and
    `interrupted` if the run stopped before its last step. `say` is called with the reason for `failed`, or with a
    message about damaged lines of the metrics, if any.
    """
    from valkyrie.runs.folder import saved_run

    about, values = None, {}
    try:
        run = saved_run(folder)
        about, values = run.layout_record(), run.values()
        results = training_results(folder / METRICS_FILE, run, say)
    except ValueError as error:
        if say is not None:
            say(str(error))
        return _trial(folder, Status.failed, str(error), about, values, TrialResult())
    status, reason = Status.ok, None
    if results.step == StepResult():
        status, reason = Status.killed, "no step has finished yet"
    elif not results.finished and (results.steps or 0) < run.config.steps and not is_being_written(folder):
        status, reason = Status.interrupted, f"stopped after {results.steps:,} of {run.config.steps:,} steps"
    if reason is not None and not is_being_written(folder) and _is_sweep(sweep := folder.resolve().parent):
        command = read_command(sweep)
        reason += ". To continue it, run the sweep again (with trial.retry=true if it had failed)"
        reason += "" if command is None else f": {command}"
    return _trial(folder, status, reason, about, values, results)


def _is_sweep(folder: Path) -> bool:
    return (folder / MULTIRUN_FILE).is_file() or (folder / TRIALS_FILE).is_file()


def _trial(
    folder: Path,
    status: Status,
    reason: str | None,
    about: LayoutRecord | None,
    values: dict[str, str],
    results: TrialResult,
) -> Trial:
    resolved, run_file = folder.resolve(), folder / RUN_FILE
    started = datetime.fromtimestamp(run_file.stat().st_mtime, UTC).isoformat() if run_file.is_file() else ""
    return Trial(
        key=f"{TRAIN_STAGE}:{resolved}",
        name=resolved.name,
        sweep=(resolved.parent if _is_sweep(resolved.parent) else resolved).name,
        stage=TRAIN_STAGE,
        status=status,
        reason=reason,
        overrides=[],
        about=about,
        started=started,
        wall_s=results.goodput.wall_s if results.goodput else 0.0,
        folder=resolved.name,
        results=results,
        values=values,
        flags=["--config-path", str(resolved), "--config-name", _SETTINGS_NAME],
    )
