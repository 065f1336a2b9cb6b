"""The sweeps and trainings under a path as rows, from `trials.jsonl` and run folders alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from valkyrie.report.trainings import find_trainings, training
from valkyrie.sweep.rows import Row, rows_of
from valkyrie.sweep.trial import TRIALS, TrialLog

DEPTH = 2
"""How many folders below a given path a sweep is looked for."""


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the trials under these paths, sweep by sweep; ValueError where there is none, or a file is damaged."""
    folders = find_sweeps(paths)
    sweeps = {folder: TrialLog(folder).read() for folder in folders if (folder / TRIALS).is_file()}
    trainings = {folder: [training(folder)] for folder in folders if folder not in sweeps}
    rows = rows_of(sweeps, trainings)
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))}: there is no trial yet. Wait until the first one has ended.")
    return rows


def find_sweeps(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of sweeps, and of trainings beside them, that these paths are or hold, each once.

    ValueError says where there is none.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist. {_ADVICE}")
        if path.is_file():
            sweeps = [path.parent] if path.name == TRIALS else []
        else:
            patterns = ("/".join(["*"] * depth + [TRIALS]) for depth in range(DEPTH + 1))
            sweeps = sorted(file.parent for pattern in patterns for file in path.glob(pattern))
            sweeps += find_trainings(path, DEPTH, sweeps)
        if not sweeps:
            where = f"{path} is a file" if path.is_file() else f"no {TRIALS} in {path} or the folders in it"
            raise ValueError(f"{where}. {_ADVICE}")
        folders |= {folder.resolve(): folder for folder in sweeps}
    return list(folders.values())


_ADVICE = (
    "A report is made of a training's or a sweep's folder, or of a folder of them, such as runs. "
    "A sweep writes it: valkyrie-train -m mode=measure mesh=2x2x2,8x1x1 partition=fsdp,1d_tp"
)


def read_json(row: Row, name: str) -> dict[str, Any] | None:
    """Return a JSON file of the row's run folder; None where there is none, or only a part of one."""
    if row.folder is None:
        return None
    try:
        value = json.loads((row.folder / name).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None
