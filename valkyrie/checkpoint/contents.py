"""The contents of a checkpoint: its metadata, its arrays by name, and whether they fit a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from valkyrie.checkpoint.location import CHECKPOINTS_FOLDER, METADATA_FILE, in_bucket
from valkyrie.checksums import folder_problem
from valkyrie.problems import Problem, ProblemCode, first_line
from valkyrie.records import encode, load
from valkyrie.trees import flatten, leaf_names

_INFO_FILE = "about/metadata"
_POSITION_FILE = "data/metadata"
"""The file with a checkpoint's metadata."""
_UNREADABLE_INFO = Problem(ProblemCode.damaged, value=_INFO_FILE, text=f"{_INFO_FILE} cannot be read")
_REQUIRED_FILES = (_INFO_FILE, METADATA_FILE, _POSITION_FILE, "state/_METADATA")
"""Files that every checkpoint has."""
PARAMETERS_ONLY = "parameters"
"""Value of `CheckpointInfo.holds` in checkpoints without optimizer state."""


@dataclass(frozen=True)
class CheckpointInfo:
    """The metadata of a checkpoint, stored as `about/metadata`. Entries that were not recorded are None.

    Args:
        parameters: Shape of every parameter, by dotted name.
        step: Finished optimizer steps.
        saved: Time of the save, such as `2026-01-31 12:00:00 +0000`.
        tier: `durable` or `fast`.
        model: Name of the model.
        layout: Name of the layout, or `converted`.
        mesh: Size of every mesh axis.
        devices_of_process: Device ids of every process, by process index.
        tokenizer: Name and fingerprint of the tokenizer.
        versions: Versions of the packages that affect a run's numerical results.
        converted_from: The Hugging Face folder with the original weights.
        holds: `parameters` if there is no optimizer state.
        process: Index of the process that wrote a fast checkpoint.
        shards: Parts of each array in a fast checkpoint, as `local_shards` returns them.
    """

    parameters: Mapping[str, tuple[int, ...]]
    step: int | None = None
    saved: str | None = None
    tier: str | None = None
    model: str | None = None
    layout: str | None = None
    mesh: Mapping[str, int] | None = None
    devices_of_process: Mapping[str, list[int]] | None = None
    tokenizer: Mapping[str, str] | None = None
    versions: Mapping[str, str] | None = None
    converted_from: str | None = None
    holds: str | None = None
    process: int | None = None
    shards: Mapping[str, list[str]] | None = None

    def as_json(self) -> Mapping[str, object]:
        """Return the recorded entries as JSON values."""
        return {name: value for name, value in encode(self).items() if value is not None}


def read_info(path: Any) -> CheckpointInfo:
    """Return the metadata of a checkpoint. Raises ValueError if it cannot be read."""
    try:
        return load(CheckpointInfo, (path / _INFO_FILE).read_text(), _INFO_FILE)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The checkpoint {path} is damaged ({type(error).__name__}: {first_line(error)[:200]}). Delete that folder "
            "to continue from an older one."
        ) from error


def read_data_position(path: Any) -> Mapping[str, Any]:
    """Return the saved position of the data loader (`Loader.state`). Raises OSError or ValueError if it is damaged."""
    return json.loads((path / _POSITION_FILE).read_text())


def find_damage(path: Any) -> Problem | None:
    """Return a problem if a file of a checkpoint is missing, unreadable or fails its checksum, else None.

    Looks for required files too, because an interrupted copy may lack the checksums. Does not check checkpoints in
    buckets, because buckets verify their objects.
    """
    return None if in_bucket(path) else inspect_checkpoint(path)[1]


def inspect_checkpoint(path: Any) -> tuple[CheckpointInfo | None, Problem | None]:
    """Return (metadata, damage) of a checkpoint.

    The metadata is None if it cannot be read. The damage is the first problem found, or None. In a bucket, only
    unreadable metadata counts as damage, because buckets verify their objects.
    """
    info = None
    with suppress(ValueError):
        info = read_info(path)
    damage = None if in_bucket(path) else folder_problem(path) or _missing_file(path)
    return info, damage or (_UNREADABLE_INFO if info is None else None)


def newest_undamaged_step(root: Any, steps: Iterable[int]) -> tuple[int | None, list[str]]:
    """Return the step of the newest undamaged durable checkpoint, or None, and a message for each newer, damaged one.

    Args:
        root: Folder of the checkpoints.
        steps: Steps to consider, in any order.
    """
    damage_messages = []
    for step in sorted(steps, reverse=True):
        damage = find_damage(root / str(step))
        if damage is None:
            return step, damage_messages
        damage_messages.append(f"The durable checkpoint at step {step} in {root} is damaged: {damage}.")
    return None, damage_messages


def _missing_file(path: Any) -> Problem | None:
    if not any(path.iterdir()):
        return Problem(ProblemCode.missing, text="the folder is empty")
    for name in _REQUIRED_FILES:
        if not (path / name).is_file():
            return Problem(ProblemCode.missing, value=name, text=f"{name} is missing")
    return None


def state_arrays(state: Any) -> Mapping[str, Any]:
    """Return the fields of a train state that are not None, by name."""
    return {key: value for key, value in state._asdict().items() if value is not None}


def parameter_shapes(parameters: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter by dotted path."""
    return {name: tuple(array.shape) for name, array in flatten(parameters).items()}


def refuse_other_model(
    path: Any, saved_shapes: Mapping[str, tuple[int, ...]], expected_shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError, naming the first differing parameter, if the saved and the expected shapes differ."""
    problems = [
        f"{name} is {saved_shapes.get(name, 'missing')} in the checkpoint and {expected_shapes.get(name, 'missing')} "
        "in the model"
        for name in sorted({*expected_shapes, *saved_shapes})
        if saved_shapes.get(name) != expected_shapes.get(name)
    ]
    if problems:
        raise ValueError(
            f"The durable checkpoint at step {path.name} in {path.parent} is of a different model: {problems[0]}"
            f"{_more_differ(len(problems) - 1)}. To continue it, use resume={_run_name(path)} without other model "
            "settings. To start a new run, use another name=."
        )


def refuse_other_state(
    path: Any, expected_arrays: Mapping[str, Any], changed_settings: Mapping[str, tuple[str, str]]
) -> None:
    """Raise ValueError if the names of the saved arrays differ from the run's, such as after a change of optimizer.

    If the saved names cannot be read, this returns silently; restoring then raises the error.

    Args:
        path: Folder of the checkpoint.
        expected_arrays: Arrays of the run's train state, by field.
        changed_settings: (requested, saved) value of each setting that differs from the saved run, by key.
    """
    saved_names, expected_names = _saved_arrays(path), set(leaf_names(expected_arrays))
    if saved_names is None or saved_names == expected_names:
        return
    # a changed number keeps the arrays; adding or removing an optimizer, average or clipping does not
    optimizer_changes = {
        key.removesuffix(".name"): values  # the choice of the optimizer
        for key, values in changed_settings.items()
        if key == "optimizer.name" or (key.startswith("optimizer.") and "null" in values)
    }
    if optimizer_changes:
        difference = "; ".join(
            f"{key} is {saved_value} in the checkpoint and {requested} in this run"
            for key, (requested, saved_value) in optimizer_changes.items()
        )
        remedy = " ".join(f"{key}={saved_value}" for key, (_, saved_value) in optimizer_changes.items())
    else:
        name, other_count = min(saved_names ^ expected_names), len(saved_names ^ expected_names) - 1
        difference = f"{name} is only in the {'checkpoint' if name in saved_names else 'run'}"
        difference += _more_differ(other_count)
        remedy = "its optimizer settings"
    raise ValueError(
        f"The durable checkpoint at step {path.name} in {path.parent} was saved with a different optimizer: "
        f"{difference}. To continue it, use {remedy}, or resume={_run_name(path)} without other optimizer settings. To "
        "start a new run, use another name=."
    )


def refuse_other_tokenizer(
    path: Any,
    saved_tokenizer: Mapping[str, str] | None,
    run_tokenizer: Mapping[str, str] | None,
    tier: str = "durable",
    key: str = "data.tokenizer",
) -> None:
    """Raise ValueError if the tokenizers of a checkpoint and of the run have different fingerprints.

    `saved_tokenizer` and `run_tokenizer` are their `name` and `fingerprint`. Does nothing if one of them is None
    (unknown). `tier` is the tier of the checkpoint, and `key` the setting with the run's tokenizer, for the message.
    """
    if (
        run_tokenizer is None
        or saved_tokenizer is None
        or saved_tokenizer["fingerprint"] == run_tokenizer["fingerprint"]
    ):
        return
    if saved_tokenizer["name"] == run_tokenizer["name"]:
        raise ValueError(
            f"{key}={run_tokenizer['name']} has changed since the {tier} checkpoint at step {path.name} in "
            f"{path.parent} was saved (fingerprint {saved_tokenizer['fingerprint']}, now "
            f"{run_tokenizer['fingerprint']}). Restore the old file, or use another name=."
        )
    raise ValueError(
        f"{key}={run_tokenizer['name']} assigns other ids than {saved_tokenizer['name']}, with which the "
        f"{tier} checkpoint at step {path.name} in {path.parent} was trained. To continue it, use "
        f"{key}={saved_tokenizer['name']}. To start a new run, use another name=, without resume=."
    )


def _more_differ(count: int) -> str:
    return f" ({count} more {'differs' if count == 1 else 'differ'})" if count else ""


def _run_name(path: Any) -> str:
    """Return the name of the run that the checkpoint folder `path` belongs to."""
    return (path.parent.parent if path.parent.name == CHECKPOINTS_FOLDER else path.parent).name


def _saved_arrays(path: Any) -> set[str] | None:
    """Return the dotted name of every array of a saved state, or None if the metadata cannot be read."""
    try:
        entries = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values()
        return {
            ".".join(str(part["key"]) for part in entry["key_metadata"])
            for entry in entries
            if entry["value_metadata"]["value_type"] != "None"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def local_shards(tree: Any) -> Mapping[str, list[str]]:
    """Describe the shards of each array on this process's devices, by dotted name.

    A description is the dtype, followed by the slices of each distinct shard, such as `0:4,0:4` of an array of shape
    [8, 4]. The leaves of `tree` are arrays, or ShapeDtypeStructs with shardings.
    """
    import jax

    def describe(array: Any) -> list[str]:
        indices = array.sharding.addressable_devices_indices_map(tuple(array.shape)).values()
        return [str(array.dtype), *sorted({_slices_text(index, array.shape) for index in indices})]

    return dict(zip(leaf_names(tree), map(describe, jax.tree.leaves(tree)), strict=True))


def _slices_text(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> str:
    slices = index or ()
    return ",".join("{}:{}".format(*part.indices(size)[:2]) for part, size in zip(slices, shape, strict=True))
