"""Converts a trained run to a Hugging Face folder, keeping about one file of weights in memory."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from valkyrie.checkpoint import checkpoint_root
from valkyrie.checkpoint.contents import PARAMETERS_ONLY, newest_undamaged_step, read_info
from valkyrie.checkpoint.location import all_steps_in
from valkyrie.checkpoint.weights import read_array
from valkyrie.config.arguments import load_run
from valkyrie.config.run import Run
from valkyrie.convert.architectures import find_architecture
from valkyrie.convert.folder import (
    CONFIG_FILE,
    DTYPES,
    OTHER_FOLDER_REMEDY,
    copy_other_files,
    describe_tensors,
    language_model_config,
    write_folder,
)
from valkyrie.convert.load import ORIGINALS_FOLDER, PREFIX_FILE
from valkyrie.convert.names import GPT2_PREFIX, TensorSlice, join_slices, tensor_slices
from valkyrie.convert.settings import model_settings, to_config_json
from valkyrie.data.tokenizer_json import tokenizer_json_path
from valkyrie.models.stack import Stack
from valkyrie.paths import disk_errors
from valkyrie.processes.locks import WRITER_FILE, write_lock

DTYPES_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}
"""Supported dtypes of written weights, by name."""


def export_run(
    run_folder: Path,
    folder: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    file_bytes: int = 5 * 10**9,
    say: Callable[[str], Any] = print,
) -> Path:
    """Write the weights of a run as a Hugging Face folder, and return its path.

    Raises ValueError if the checkpoint is missing or damaged, the model cannot be converted, a number is beyond the
    range of `dtype`, or `folder` is not empty or in use. Raises DiskError if a file cannot be written.

    Args:
        run_folder: the run folder. If its checkpoint has averaged parameters (`ema_decay`), these are written.
        folder: the folder to write.
        step: step of the checkpoint, or None for the newest undamaged one.
        dtype: dtype of the weights, except biases for the choice of experts, which are float32. None for the original
            dtype if the run was converted from a folder (bfloat16 if the weights were quantised), else float32.
        file_bytes: approximate maximum bytes of a file.
        say: called with a message before the tensors are written.
    """
    run = load_run(run_folder, [])
    _refuse_nonempty_folder(folder)
    config = _merge_config(run_folder, run, dtype)  # refuses models that cannot be converted
    weights_dtype = DTYPES_BY_NAME[str(config["dtype"])]
    assert isinstance(run.model, Stack)
    step, path = _find_checkpoint(run_folder, step)  # last, because it reads the whole checkpoint
    field = "ema" if _has_average(run, path) else "parameters"
    slices_by_tensor: dict[str, list[TensorSlice]] = {}
    architecture, prefix = find_architecture(config), _tensor_prefix(run_folder, run)
    parameter_slices = tensor_slices(run.model, architecture.top_level_tensors, architecture.layer_tensors, prefix)
    for slices in parameter_slices.values():
        for tensor_slice in slices:
            slices_by_tensor.setdefault(tensor_slice.name, []).append(tensor_slice)
    shapes = {name: slices[0].tensor_shape for name, slices in slices_by_tensor.items()}
    dtypes = _tensor_dtypes(run.model, slices_by_tensor, weights_dtype)
    say(f"{architecture.name} of step {step}: {describe_tensors(shapes, dtypes)}")
    reader = _ParameterReader(path, field)
    with _lock_empty_folder(folder):
        write_folder(folder, config, shapes, dtypes, lambda name: reader.read(slices_by_tensor[name]), file_bytes)
        if not _copy_tokenizer(run_folder, run, folder):
            say(
                f"note: tokenizer={run.tokenizer} has no tokenizer.json to copy. To convert {folder} back, use "
                f"valkyrie-convert from-hf with --tokenizer {run.tokenizer}."
            )
    return folder


def _tensor_dtypes(
    model: Stack, slices_by_tensor: Mapping[str, list[TensorSlice]], weights_dtype: np.dtype
) -> dict[str, np.dtype]:
    """Return the dtype of each written tensor. Biases for the choice of experts stay float32, as in transformers."""
    parameters = model.parameters()
    float32_names = {name for name, p in parameters.items() if p.group == "balance" and p.float32}
    return {
        name: DTYPES["F32"] if slices[0].parameter in float32_names else weights_dtype
        for name, slices in slices_by_tensor.items()
    }


def _refuse_nonempty_folder(folder: Path) -> None:
    """Raise ValueError if `folder` exists, unless it is a folder with no entries except the lock file."""
    if folder.exists() and (not folder.is_dir() or any(file.name != WRITER_FILE for file in folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder. Use {OTHER_FOLDER_REMEDY}.")


@contextmanager
def _lock_empty_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, which must be empty, creating it if missing.

    If an exception is raised inside this context, delete the files in the folder, and the folder if it is new.
    """
    existed = folder.exists()
    with ExitStack() as stack:
        with disk_errors(folder, OTHER_FOLDER_REMEDY):
            stack.enter_context(write_lock(folder, OTHER_FOLDER_REMEDY))
        stack.callback((folder / WRITER_FILE).unlink, missing_ok=True)
        _refuse_nonempty_folder(folder)  # another process may have finished since the first check
        try:
            yield
        except BaseException:
            with suppress(OSError):
                for file in folder.iterdir():
                    file.unlink()
                if not existed:
                    folder.rmdir()
            raise


class _ParameterReader:
    """Reads tensors from the parameters of a checkpoint.

    Caches the parameters of the last tensor, because the next tensor is usually another layer of them.
    """

    def __init__(self, path: Any, field: str) -> None:
        self._path, self._field = path, field
        self._parameters: dict[str, np.ndarray] = {}

    def read(self, slices: list[TensorSlice]) -> np.ndarray:
        """Return the tensor that stores these slices: one slice or several, such as GPT-2's query, key and value."""
        names = {tensor_slice.parameter for tensor_slice in slices}
        self._parameters = {name: array for name, array in self._parameters.items() if name in names}
        for name in names - self._parameters.keys():
            self._parameters[name] = read_array(self._path, self._field, name)
        parts = [self._parameters[tensor_slice.parameter][tensor_slice.index] for tensor_slice in slices]
        return join_slices(slices, parts)


def _tensor_prefix(run_folder: Path, run: Run) -> str:
    """Return the prefix of GPT-2's tensor names, or an empty string for other models.

    This is the prefix in the original Hugging Face folder, or `GPT2_PREFIX` if the run was not converted from a folder.
    """
    prefix_file = run_folder / ORIGINALS_FOLDER / PREFIX_FILE
    if run.model.family != "gpt2":
        return ""
    return prefix_file.read_text() if prefix_file.is_file() else GPT2_PREFIX


def _find_checkpoint(run_folder: Path, step: int | None) -> tuple[int, Any]:
    """Return the step and path of the checkpoint at `step`, or of the newest undamaged one if `step` is None.

    Prints a note for each newer, damaged checkpoint. Raises ValueError if there is no such undamaged checkpoint.
    """
    root = checkpoint_root(run_folder)
    steps = all_steps_in(root)
    if not steps:
        raise ValueError(f"{run_folder} has no finished checkpoint. Use the folder of a trained run.")
    if step is not None and step not in steps:
        raise ValueError(
            f"--step {step}: {run_folder} has no such checkpoint. Use one of {', '.join(map(str, steps))}."
        )
    undamaged_step, damage_messages = newest_undamaged_step(root, steps if step is None else [step])
    if undamaged_step is None:
        remedy = "There is no other checkpoint." if step is None else "Use another --step."
        raise ValueError(f"{' '.join(damage_messages)} {remedy}")
    for line in damage_messages:
        print(f"{line} Converting step {undamaged_step} instead.", file=sys.stderr)
    return undamaged_step, root / str(undamaged_step)


def _has_average(run: Run, path: Any) -> bool:
    return run.config.optimizer.ema_decay is not None and read_info(path).holds != PARAMETERS_ONLY


def _merge_config(run_folder: Path, run: Run, dtype: str | None) -> Mapping[str, object]:
    """Return the contents of config.json: the original ones, if any, updated with the current settings."""
    original_file = run_folder / ORIGINALS_FOLDER / CONFIG_FILE
    original_config = json.loads(original_file.read_bytes()) if original_file.is_file() else {}
    original_config = dict(language_model_config(original_config))
    default_dtype = "bfloat16" if original_config.pop("quantization_config", None) else "float32"
    old_dtype = original_config.get("dtype") or original_config.get("torch_dtype") or default_dtype
    assert isinstance(run.model, Stack)
    new_config = to_config_json(run.model)
    if original_config.get("architectures") == new_config["architectures"]:
        known_entries = {key: value for key, value in new_config.items() if key in original_config}
        # Keys that the original writes otherwise or omits are changed only if they would give another model.
        for entries in ({}, known_entries):
            if model_settings(original_config | entries) == model_settings(original_config | new_config):
                new_config = entries
                break
    return original_config | new_config | {"dtype": dtype or (old_dtype if old_dtype in DTYPES_BY_NAME else "float32")}


def _copy_tokenizer(run_folder: Path, run: Run, folder: Path) -> bool:
    """Copy tokenizer files to `folder`, and return whether it then has a `tokenizer.json`.

    Copies the files from the Hugging Face folder that the run was converted from. If that folder had no
    `tokenizer.json`, copies the one of the run's tokenizer, if there is one.
    """
    copy_other_files(run_folder / ORIGINALS_FOLDER, folder, OTHER_FOLDER_REMEDY)
    output_file = folder / "tokenizer.json"
    if not output_file.is_file() and (file := tokenizer_json_path(run.tokenizer)) is not None:
        with disk_errors(folder, OTHER_FOLDER_REMEDY):
            shutil.copyfile(file, output_file)
    return output_file.is_file()
