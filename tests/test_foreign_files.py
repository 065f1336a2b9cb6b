"""Tests of reading damaged data files and files of other programs.

A field is wrong or missing, or the file is cut off. Each reader either returns, or raises ValueError or OSError with
the name of the file or the path of its folder.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from valkyrie.convert.folder import Weights
from valkyrie.convert.settings import model_settings
from valkyrie.data.files import list_paths, read_files
from valkyrie.data.manifest import open_dataset
from valkyrie.data.prepare import prepare
from valkyrie.data.readers import ReadOptions
from valkyrie.data.sources.puzzles.folder import open_puzzles
from valkyrie.data.sources.text import Config
from valkyrie.data.tokenizer import load_tokenizer, read_vocab_size
from valkyrie.data.tokenizer_json import train_tokenizer

GOLDEN = np.load(Path(__file__).parent / "goldens" / "transformers.npz")
VALUES = (None, True, -1, 0, 1.5, 10**30, float("nan"), "x", "", [], [1], ["x"], {}, {"a": 5})
REMOVED = object()


@st.composite
def damaged_json(draw: st.DrawFn, valid: Any) -> bytes:
    """JSON text of `valid`, cut off or with one field replaced or removed."""
    damage = draw(st.sampled_from([*VALUES, REMOVED, "cut"]))
    if damage == "cut":
        text = json.dumps(valid).encode()
        return text[: draw(st.integers(0, len(text) - 1))]
    changed = {"": copy.deepcopy(valid)}
    container, key = changed, ""
    while isinstance(container[key], dict | list) and container[key] and draw(st.booleans() if key else st.just(True)):
        container = container[key]
        key = draw(st.sampled_from(sorted(container) if isinstance(container, dict) else range(len(container))))
    if damage is REMOVED:
        del container[key]
    else:
        container[key] = damage
    return json.dumps(changed.get("")).encode()


def check_damaged_file(data: st.DataObject, path: Path, valid: Any, read: Callable[[], object]) -> None:
    """Write a damaged copy of the JSON value `valid` to `path` and call `read`.

    Asserts that it returns, or raises ValueError or OSError with the name or the folder of the file.
    """
    path.write_bytes(data.draw(damaged_json(valid)))
    message = path.name
    try:
        read()
    except (ValueError, OSError) as error:
        message = str(error)
    assert path.name in message or str(path.parent.resolve()) in message


def fuzz(examples: int = 100) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        suppressed = [HealthCheck.function_scoped_fixture]
        return settings(max_examples=examples, deadline=None, suppress_health_check=suppressed)(
            given(data=st.data())(test)
        )

    return decorate


def write_weights(folder: Path, config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if not (folder / "a.safetensors").exists():
        save_file({"a": np.ones(1, np.float32)}, folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))


@pytest.mark.parametrize("case", ["llama3", "qwen2_windows", "gpt2"])
@fuzz()
def test_a_damaged_config_json_is_reported(tmp_path: Path, case: str, data: st.DataObject) -> None:
    valid_content = json.loads(str(GOLDEN[f"{case}_config"]))
    write_weights(tmp_path, valid_content)
    check_damaged_file(data, tmp_path / "config.json", valid_content, lambda: model_settings(Weights(tmp_path).config))


@fuzz()
def test_a_damaged_safetensors_index_is_reported(tmp_path: Path, data: st.DataObject) -> None:
    write_weights(tmp_path, {})
    valid_content = {"metadata": {"total_size": 4}, "weight_map": {"a": "a.safetensors"}}
    check_damaged_file(data, tmp_path / "model.safetensors.index.json", valid_content, lambda: Weights(tmp_path))


@cache
def trained_tokenizer(folder: Path) -> Any:
    train_tokenizer(["the text of the tokenizer"], 262, "cl100k", folder / "trained.json")
    return json.loads((folder / "trained.json").read_text())


@fuzz()
def test_a_damaged_tokenizer_json_is_reported(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "foreign.json"

    def read() -> None:
        read_vocab_size(str(path))
        tokenizer = load_tokenizer(str(path))
        tokenizer.decode(tokenizer.encode_ordinary("the text"))

    check_damaged_file(data, path, trained_tokenizer(path.parent), read)


@fuzz()
def test_a_damaged_manifest_is_reported(tmp_path: Path, data: st.DataObject) -> None:
    prepared = tmp_path / "prepared"
    if not prepared.is_symlink():
        for name in ("a", "b", "c"):
            (tmp_path / f"{name}.txt").write_text(f"text {name}")
        config = Config(paths=[f"{tmp_path}/*.txt"], cache_dir=str(tmp_path / "cache"))
        prepared.symlink_to(prepare(config, "bytes").path)
        (tmp_path / "valid.json").write_text((prepared / "manifest.json").read_text())
    valid_content = json.loads((tmp_path / "valid.json").read_text())
    check_damaged_file(data, prepared / "manifest.json", valid_content, lambda: open_dataset(prepared))


@fuzz()
def test_a_damaged_line_of_jsonl_is_reported(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.jsonl"
    valid_content = {"text": "a line", "more": {"n": 1}}
    check_damaged_file(
        data, path, valid_content, lambda: [*read_files(list_paths([str(path)], ReadOptions()), ReadOptions())]
    )


@fuzz()
def test_a_damaged_puzzle_dataset_json_is_reported(tmp_path: Path, data: st.DataObject) -> None:
    valid_content = {
        "seq_len": 4,
        "vocab_size": 5,
        "num_puzzle_identifiers": 1,
        "sets": ["all"],
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
    }
    arrays = {
        "inputs": np.ones((2, 4), np.int32),
        "labels": np.ones((2, 4), np.int32),
        "puzzle_identifiers": np.zeros(2, np.int32),
        "puzzle_indices": np.arange(3),
        "group_indices": np.arange(3),
    }
    for name in ("train", "test"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "dataset.json").write_text(json.dumps(valid_content))
        for key, array in arrays.items():
            np.save(tmp_path / name / f"all__{key}.npy", array)
    check_damaged_file(
        data, tmp_path / "train" / "dataset.json", valid_content, lambda: open_puzzles(tmp_path, "puzzles")
    )
