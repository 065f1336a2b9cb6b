"""Reads and writes Hugging Face folders: config.json and safetensors files. Does not import JAX."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from valkyrie.convert.mxfp4 import BLOCKS_SUFFIX, SCALES_SUFFIX, unpack, unpacked_shape
from valkyrie.data.git_lfs import refuse_git_lfs_pointer
from valkyrie.paths import disk_errors, write_atomic
from valkyrie.units import count_text, decimal_bytes_text

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
"""Names of files in a folder. The weights are in a single file, or in several files that the index lists."""
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
)
COPIED_FILES += ("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")
"""Files for the tokenizer and for generation. Conversions copy these unchanged in both directions."""
OTHER_FOLDER_REMEDY = "another FOLDER"
"""Remedy that error messages suggest if the output folder cannot be written."""
_MULTIMODAL, _TEXT_ONLY, _TEXT_PREFIX = "Llama4ForConditionalGeneration", "Llama4ForCausalLM", "language_model."
"""Class of Llama 4 with a vision encoder, class of its language model, and prefix of the latter's tensors."""
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
"""Supported tensor dtypes, by their names in safetensors files."""


class Weights:
    """The tensors of a Hugging Face folder. Opening it reads their shapes and dtypes; `read` reads a tensor.

    If config.json has `quant_method=mxfp4`, two tensors `NAME_blocks` and `NAME_scales` count as one, `NAME`, in
    bfloat16. Of a Llama 4 with a vision encoder, only the language model is visible.

    The constructor raises ValueError if the folder does not exist, or if a file is missing or damaged.

    Attributes:
        folder: The folder.
        config: Contents of config.json (`language_model_config`).
        shapes: Shape of each tensor, by name.
        dtypes: Dtype of each tensor, by name, as in safetensors files, such as `BF16`.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder. Use a folder that has {CONFIG_FILE} and {WEIGHTS_FILE}.")
        self.folder = folder
        config = _read_json(folder / CONFIG_FILE, folder)
        self.config = language_model_config(config)
        self._prefix = "" if self.config is config else _TEXT_PREFIX
        self._file_by_tensor: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for name in _weight_files(folder):
            self._read_header(name)
        self._packed_names: set[str] = set()
        quantization = self.config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
            self._join_packed_tensors()

    def read(self, name: str) -> np.ndarray:
        """Return a tensor. Raises ValueError if its file is damaged, or if it has a NaN or infinity."""
        if name in self._packed_names:
            path = self.folder / self._file_by_tensor[name + BLOCKS_SUFFIX]
            tensor = unpack(*(self._read_stored(name + suffix) for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)))
        else:
            path, tensor = self.folder / self._file_by_tensor[name], self._read_stored(name)
        if non_finite := tensor.size - np.count_nonzero(np.isfinite(tensor)):
            raise ValueError(f"{path}: {name} has NaN or infinite values ({non_finite:,} of {tensor.size:,}).")
        return tensor

    def _read_stored(self, name: str) -> np.ndarray:
        """Return a tensor as it is stored. Raises ValueError if its file is damaged."""
        path = self.folder / self._file_by_tensor[name]
        try:
            with safe_open(path, "np") as file:  # reopened for each read: the pages of an open file count as memory
                return file.get_tensor(self._prefix + name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged at {name} ({error}). Copy it again.") from error

    def _join_packed_tensors(self) -> None:
        """Replace the pairs of tensors that store matrices in MXFP4 by the matrices, in `shapes` and `dtypes`."""
        for blocks_name, shape in list(self.shapes.items()):
            name, scales_name = (blocks_name.removesuffix(BLOCKS_SUFFIX) + suffix for suffix in ("", SCALES_SUFFIX))
            is_pair = name != blocks_name and self.shapes.get(scales_name) == shape[:-1] and len(shape) == 4
            if is_pair and self.dtypes[blocks_name] == self.dtypes[scales_name] == "U8":
                self._packed_names.add(name)
                for stored_name in (blocks_name, scales_name):
                    del self.shapes[stored_name], self.dtypes[stored_name]
                self.shapes[name], self.dtypes[name] = unpacked_shape(shape), "BF16"

    def dtype(self, names: Iterable[str]) -> np.dtype:
        """Return the smallest dtype that represents all of these tensors exactly."""
        return np.result_type(*(DTYPES[self.dtypes[name]] for name in names))

    def check_tensors(
        self,
        expected_shapes: Mapping[str, tuple[int, ...]],
        ignored_suffixes: tuple[str, ...],
        architecture: str,
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        """Raise ValueError unless the tensors have the expected names and shapes, and supported dtypes.

        Additional tensors are allowed if their names end in one of `ignored_suffixes` or begin with one of
        `ignored_prefixes`. `architecture` is the name in the message.
        """
        missing_names = [name for name in expected_shapes if name not in self.shapes]
        misshapen_tensors = [
            f"{n} is {list(self.shapes[n])}, not {list(s)}"
            for n, s in expected_shapes.items()
            if s != self.shapes.get(n, s)
        ]
        unexpected_names = [
            name
            for name in self.shapes
            if not (name in expected_shapes or name.endswith(ignored_suffixes) or name.startswith(ignored_prefixes))
        ]
        unsupported_tensors = [
            f"{name} is {dtype}"
            for name, dtype in self.dtypes.items()
            if dtype not in DTYPES and name in expected_shapes
        ]
        differences = {
            "has no tensor": missing_names,
            "has tensors with shapes that do not match its config.json:": misshapen_tensors,
            f"has tensors that a {architecture} does not have:": unexpected_names,
            f"has tensors that are not {', '.join(DTYPES)}:": unsupported_tensors,
        }
        if problems := [f"{text} {_first_names(names)}" for text, names in differences.items() if names]:
            raise ValueError(f"{self.folder} {'. It '.join(problems)}.")

    def _read_header(self, name: str) -> None:
        """Record the names, shapes and dtypes of a file's tensors from its header."""
        path = self.folder / name
        try:
            with safe_open(path, "np") as file:
                for stored_name in file.offset_keys():
                    if not stored_name.startswith(self._prefix):
                        continue
                    tensor_name, tensor_slice = stored_name.removeprefix(self._prefix), file.get_slice(stored_name)
                    self._file_by_tensor[tensor_name] = name
                    self.shapes[tensor_name], self.dtypes[tensor_name] = (
                        tuple(tensor_slice.get_shape()),
                        tensor_slice.get_dtype(),
                    )
        except (SafetensorError, OSError) as error:
            refuse_git_lfs_pointer(path, "the weights")
            raise ValueError(f"{path} is not a complete safetensors file ({error}). Copy it again.") from error


def language_model_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the language model of a Llama 4 with a vision encoder, and others unchanged."""
    text_config = config.get("text_config")
    if config.get("architectures") != [_MULTIMODAL] or not isinstance(text_config, dict):
        return config
    shared_entries = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    return {**shared_entries, **text_config, "architectures": [_TEXT_ONLY]}


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files of a folder.

    Raises ValueError if there are none, if the index is damaged, or if a file in the index is missing or is outside of
    the folder.
    """
    if (folder / INDEX_FILE).is_file():
        index = _read_json(folder / INDEX_FILE, folder)
        file_by_tensor = index.get("weight_map", {})
        if not isinstance(file_by_tensor, dict) or not all(isinstance(file, str) for file in file_by_tensor.values()):
            raise ValueError(f"{folder / INDEX_FILE} is damaged (weight_map must name files). Copy it again.")
        files = sorted({*file_by_tensor.values()})
        if outside_files := [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]:
            raise ValueError(
                f"{folder / INDEX_FILE} lists {_first_names(outside_files)}, outside of the folder. Copy the weights "
                "into the folder, and correct the index."
            )
        if missing_files := [file for file in files if not (folder / file).is_file()]:
            alternative = f", or delete {INDEX_FILE} to use {WEIGHTS_FILE}" if (folder / WEIGHTS_FILE).is_file() else ""
            raise ValueError(
                f"{folder} has no {_first_names(missing_files)}, listed in {INDEX_FILE}. Copy all files of the model "
                f"there{alternative}."
            )
        if files:
            return files
    if (folder / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE]
    for file in folder.glob("*.bin"):
        refuse_git_lfs_pointer(file, "the weights")
    other_files = sorted(file.name for file in folder.glob("*.bin")) + sorted(
        file.name for file in folder.glob("*.pt*")
    )
    remedy = (
        f" Load the model ({_first_names(other_files)}) with transformers and save it again with save_pretrained."
        if other_files
        else ""
    )
    raise ValueError(f"{folder} has no {WEIGHTS_FILE} and no {INDEX_FILE}.{remedy}")


def _read_json(path: Path, folder: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"{folder} has no {path.name}, so it is not a folder of a Hugging Face model.")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        refuse_git_lfs_pointer(path, "the file")
        raise ValueError(f"{path} is damaged ({error}). Copy it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged (not a JSON object). Copy it again.")
    return values


def copy_other_files(source: Path, target: Path, alternative: str | None = None) -> list[str]:
    """Copy each of `COPIED_FILES` from `source` to `target` if it exists, and return the names of the copied files.

    Raises DiskError if a file cannot be written, for example on a full disk. `alternative` is the setting for another
    location that the error message suggests, or None for the default of `disk_errors`.
    """
    names = [name for name in COPIED_FILES if (source / name).is_file()]
    with disk_errors(target, alternative):
        for name in names:
            shutil.copyfile(source / name, target / name)
    return names


def write_folder(
    folder: Path,
    config: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, np.dtype],
    read_tensor: Callable[[str], np.ndarray],
    file_bytes: int,
) -> list[str]:
    """Write config.json and the tensors, and return the names of the safetensors files.

    Writes an index if there are several files. Raises DiskError if a file cannot be written, for example on a full
    disk, and ValueError if a number is beyond the range of its dtype.

    Args:
        folder: the folder to write.
        config: contents of config.json.
        shapes: shape of each tensor, by name.
        dtypes: dtype of each written tensor, by name.
        read_tensor: returns a tensor by name. The tensors of one file are in memory at once.
        file_bytes: approximate maximum bytes of a file.
    """
    sizes = {name: int(np.prod(shape)) * dtypes[name].itemsize for name, shape in shapes.items()}
    tensor_groups = _split_into_files(sizes, file_bytes)
    is_single = len(tensor_groups) == 1
    names = [
        WEIGHTS_FILE if is_single else f"model-{i:05d}-of-{len(tensor_groups):05d}.safetensors"
        for i in range(1, len(tensor_groups) + 1)
    ]
    with disk_errors(folder, OTHER_FOLDER_REMEDY):
        for file, tensor_names in zip(names, tensor_groups, strict=True):
            _write_file(folder / file, {name: _cast(name, read_tensor(name), dtypes[name]) for name in tensor_names})
        if not is_single:
            total = sum(int(np.prod(shape)) for shape in shapes.values())
            index = {
                "metadata": {"total_parameters": total, "total_size": sum(sizes.values())},
                "weight_map": {
                    name: file for file, tensor_names in zip(names, tensor_groups, strict=True) for name in tensor_names
                },
            }
            write_atomic(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n", OTHER_FOLDER_REMEDY)
        write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n", OTHER_FOLDER_REMEDY)
    return names


def _cast(name: str, tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a contiguous tensor of `dtype`. Raises ValueError if a finite number would become infinite."""
    with np.errstate(over="ignore"):
        cast_tensor = np.ascontiguousarray(tensor, dtype)
    if count := int(np.count_nonzero(np.isinf(cast_tensor) & np.isfinite(tensor))):
        largest = float(ml_dtypes.finfo(dtype).max)
        limit = f"{largest:,.0f}" if largest < 1e6 else f"{largest:.3g}"
        wider_dtypes = "bfloat16 or float32" if dtype == DTYPES["F16"] else "float32"
        raise ValueError(
            f"{name} has {count_text(count, 'number')} beyond the range of {dtype.name} (up to {limit}). "
            f"Use --dtype {wider_dtypes}."
        )
    return cast_tensor


def _write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    specs = {
        name: TensorSpec(dtype=a.dtype.name, shape=a.shape, data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, a in tensors.items()
    }
    try:
        serialize_file(specs, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(0o644)  # safetensors makes it readable by its owner only


def _split_into_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Group tensor names into files of at most `limit` bytes. A larger tensor is alone in its file."""
    tensor_groups: list[list[str]] = [[]]
    free_bytes = limit
    for name, size in sizes.items():
        if tensor_groups[-1] and size > free_bytes:
            tensor_groups.append([])
            free_bytes = limit
        tensor_groups[-1].append(name)
        free_bytes -= size
    return tensor_groups


def describe_tensors(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype]) -> str:
    """Return a text with the number of tensors, of parameters, and of bytes. `dtypes` is by name of the tensor."""
    counts = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    size = sum(count * dtypes[name].itemsize for name, count in counts.items())
    dtype_text = " and ".join(sorted({dtypes[name].name for name in shapes}))
    return f"{len(shapes)} tensors, {sum(counts.values()):,} parameters in {dtype_text}, {decimal_bytes_text(size)}"


def _first_names(names: list[str]) -> str:
    more_text = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more_text}"
