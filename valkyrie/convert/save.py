"""From a trained run to a folder of Hugging Face, one parameter in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from valkyrie.checkpoint import place_of, saved_steps
from valkyrie.checkpoint.contents import damage_of, holds_parameters_alone
from valkyrie.checkpoint.weights import read_array
from valkyrie.convert.architectures import config_of
from valkyrie.convert.folder import CONFIG, DTYPES, copy_beside, described, write_folder
from valkyrie.convert.load import THEIRS
from valkyrie.convert.names import Piece, pieces
from valkyrie.data.tokenizer_json import json_path
from valkyrie.models.stack import Stack
from valkyrie.paths import writing
from valkyrie.run import Run
from valkyrie.train.arguments import run_in

NAMES = {dtype.name: dtype for dtype in DTYPES.values()}
"""The dtypes that weights are written in, by name."""


def to_folder(
    trained: Path,
    folder: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
    say: Callable[[str], Any] = print,
) -> Path:
    """Write the weights of a run folder as a folder of Hugging Face, and return it.

    They are the average of the parameters where the run kept one, of the newest checkpoint or of `step`, in the dtype
    that they came in unless another is named. ValueError where the run has no such checkpoint, its model is none that
    transformers has, or the folder is not empty.
    """
    run = run_in(trained, [])
    step, path = _checkpoint(trained, step)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already. Name a new folder.")
    assert isinstance(run.model, Stack)
    config = _config(trained, run, dtype)
    kind = NAMES[config["dtype"]]
    if damage := damage_of(path):
        raise ValueError(f"the checkpoint of step {step} in {path.parent} is damaged: {damage}.")
    field = "ema" if _averages(run, path) else "parameters"
    every = [piece for parts in pieces(run.model).values() for piece in parts]
    every.sort(key=lambda piece: (piece.parameter, piece.layer or 0))
    by_name = {piece.name: piece for piece in every}
    shapes = {name: piece.stored for name, piece in by_name.items()}
    say(f"{config['architectures'][0]} of step {step}: {described(shapes, kind)}")
    reader = _Reader(path, field)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, config, shapes, kind, lambda name: reader.read(by_name[name]), file_bytes)
    _carry(trained, run, folder)
    return folder


class _Reader:
    """Reads parameters of a checkpoint; the one read last is kept, for its other layers."""

    def __init__(self, path: Any, field: str) -> None:
        self._path, self._field = path, field
        self._name, self._array = "", np.zeros(0)

    def read(self, piece: Piece) -> np.ndarray:
        if piece.parameter != self._name:
            self._array = np.zeros(0)  # before the next one comes
            self._array, self._name = read_array(self._path, self._field, piece.parameter), piece.parameter
        return piece.theirs(self._array if piece.layer is None else self._array[piece.layer])


def _checkpoint(trained: Path, step: int | None) -> tuple[int, Any]:
    steps = saved_steps(trained)
    if not steps:
        raise ValueError(f"{trained} holds no finished checkpoint. Name the folder of a trained run.")
    if step is not None and step not in steps:
        raise ValueError(f"--step {step}: {trained} has checkpoints of the steps {', '.join(map(str, steps))}.")
    step = steps[-1] if step is None else step
    return step, place_of(trained) / str(step)


def _averages(run: Run, path: Any) -> bool:
    return run.config.optimizer.ema_decay is not None and not holds_parameters_alone(path)


def _config(trained: Path, run: Run, dtype: str | None) -> dict[str, Any]:
    """Return config.json: what the model came with, and what it is now."""
    came = trained / THEIRS / CONFIG
    before = json.loads(came.read_bytes()) if came.is_file() else {}
    known = before.get("dtype") or before.get("torch_dtype") or "float32"
    assert isinstance(run.model, Stack)
    now = config_of(run.model)
    if before.get("architectures") == now["architectures"]:
        guessed = now["hidden_size"] // now["num_attention_heads"]
        now = {key: value for key, value in now.items() if key in before or (key == "head_dim" and value != guessed)}
    return before | now | {"dtype": dtype or (known if known in NAMES else "float32")}


def _carry(trained: Path, run: Run, folder: Path) -> None:
    """Copy the tokenizer: the files that came with the weights, else the one that the run was trained with."""
    if (trained / THEIRS).is_dir():
        copy_beside(trained / THEIRS, folder)
    elif (file := json_path(run.tokenizer)) is not None:
        with writing(folder):
            shutil.copyfile(file, folder / "tokenizer.json")
