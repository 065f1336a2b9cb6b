"""Converts a trained run to a Hugging Face folder, with one parameter in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from valkyrie.checkpoint import checkpoint_root, saved_steps
from valkyrie.checkpoint.contents import PARAMETERS_ONLY, find_damage, read_info
from valkyrie.checkpoint.weights import read_array
from valkyrie.config.arguments import load_run
from valkyrie.config.run import Run
from valkyrie.convert.architectures import architecture_of, config_of
from valkyrie.convert.folder import ANOTHER, CONFIG, DTYPES, copy_beside, described, write_folder
from valkyrie.convert.load import PREFIX, THEIRS
from valkyrie.convert.names import GPT2_PREFIX, TensorSlice, tensor_slices
from valkyrie.data.tokenizer_json import json_path
from valkyrie.models.stack import Stack
from valkyrie.paths import disk_errors
from valkyrie.trees import get_value

NAMES = {dtype.name: dtype for dtype in DTYPES.values()}
"""Supported dtypes of the written weights, by name."""


def to_folder(
    trained: Path,
    folder: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
    say: Callable[[str], Any] = print,
) -> Path:
    """Write the weights of a run folder as a Hugging Face folder, and return its path.

    Uses the newest checkpoint or the one of `step`, and the averaged parameters if the run kept an average. Unless
    `dtype` is given, weights keep the dtype they were converted from. ValueError if there is no such checkpoint,
    transformers has no such model, or the folder is not empty.
    """
    run = load_run(trained, [])
    step, path = _checkpoint(trained, step)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already. Name a new folder.")
    assert isinstance(run.model, Stack)
    config = _config(trained, run, dtype)
    kind = NAMES[str(config["dtype"])]
    if damage := find_damage(path):
        raise ValueError(f"the checkpoint of step {step} in {path.parent} is damaged: {damage}.")
    field = "ema" if _averages(run, path) else "parameters"
    by_name: dict[str, list[TensorSlice]] = {}
    for piece in (piece for parts in tensor_slices(run.model, _prefix(trained, run)).values() for piece in parts):
        by_name.setdefault(piece.name, []).append(piece)
    shapes = {name: thirds[0].stored for name, thirds in by_name.items()}
    say(f"{architecture_of(config).name} of step {step}: {described(shapes, kind)}")
    reader = _ParameterReader(path, field)
    with disk_errors(folder, ANOTHER):
        folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, config, shapes, kind, lambda name: reader.read(by_name[name]), file_bytes)
    _copy_tokenizer(trained, run, folder)
    return folder


class _ParameterReader:
    """Reads parameters of a checkpoint and caches the last ones, because their other layers are needed next."""

    def __init__(self, path: Any, field: str) -> None:
        self._path, self._field = path, field
        self._parameters: dict[str, np.ndarray] = {}

    def read(self, thirds: list[TensorSlice]) -> np.ndarray:
        """Return the tensor made of these pieces: one piece, or three thirds."""
        thirds = sorted(thirds, key=lambda piece: piece.place.third or 0)
        names = {piece.parameter for piece in thirds}
        self._parameters = {name: array for name, array in self._parameters.items() if name in names}
        for name in names - self._parameters.keys():
            self._parameters[name] = read_array(self._path, self._field, name)
        parts = [piece.theirs(_part(self._parameters[piece.parameter], piece)) for piece in thirds]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _part(array: np.ndarray, piece: TensorSlice) -> np.ndarray:
    return array if piece.layer is None else array[piece.layer]


def _prefix(trained: Path, run: Run) -> str:
    """Return the prefix of GPT-2's tensor names in the folder that the run was converted from."""
    prefix = trained / THEIRS / PREFIX
    if run.model.family != "gpt2":
        return ""
    return prefix.read_text() if prefix.is_file() else GPT2_PREFIX


def _checkpoint(trained: Path, step: int | None) -> tuple[int, Any]:
    steps = saved_steps(trained)
    if not steps:
        raise ValueError(f"{trained} has no finished checkpoint. Name the folder of a trained run.")
    if step is not None and step not in steps:
        raise ValueError(f"--step {step}: {trained} has checkpoints of steps {', '.join(map(str, steps))}.")
    step = steps[-1] if step is None else step
    return step, checkpoint_root(trained) / str(step)


def _averages(run: Run, path: Any) -> bool:
    return run.config.optimizer.ema_decay is not None and read_info(path).holds != PARAMETERS_ONLY


def _config(trained: Path, run: Run, dtype: str | None) -> Mapping[str, object]:
    """Return config.json: the original one, if any, updated with the current settings."""
    original = trained / THEIRS / CONFIG
    before = json.loads(original.read_bytes()) if original.is_file() else {}
    known = before.get("dtype") or before.get("torch_dtype") or "float32"
    assert isinstance(run.model, Stack)
    now = config_of(run.model)
    if before.get("architectures") == now["architectures"]:
        default = run.model.embed // get_value(run.model, "attention.heads")
        now = {key: value for key, value in now.items() if key in before or (key == "head_dim" and value != default)}
    return before | now | {"dtype": dtype or (known if known in NAMES else "float32")}


def _copy_tokenizer(trained: Path, run: Run, folder: Path) -> None:
    """Copy the tokenizer: the original files, or else the tokenizer that the run was trained with."""
    if (trained / THEIRS).is_dir():
        copy_beside(trained / THEIRS, folder, ANOTHER)
    elif (file := json_path(run.tokenizer)) is not None:
        with disk_errors(folder, ANOTHER):
            shutil.copyfile(file, folder / "tokenizer.json")
