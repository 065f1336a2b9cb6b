"""The contents of a checkpoint: its arrays by name, and its metadata (`about`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from valkyrie.checkpoint.place import FOLDER, in_bucket
from valkyrie.checksums import folder_damage
from valkyrie.problems import Problem, first_line
from valkyrie.trees import flat, names_of


def tree_of(state: Any) -> dict[str, Any]:
    """Return a train state as a dict without the entries that are None."""
    return {key: value for key, value in state._asdict().items() if value is not None}


HOLDS, PARAMETERS_ALONE = "holds", "parameters"
"""The metadata entry that marks a checkpoint without optimizer state."""


def holds_parameters_alone(path: Any) -> bool:
    """Return whether a checkpoint has parameters but no optimizer state. ValueError if it cannot be read."""
    return read_about(path).get(HOLDS) == PARAMETERS_ALONE


def parameters_alone(state: Any, parameters: Any) -> Any:
    """Return a train state with these parameters and None in all other fields."""
    return state._replace(**{**dict.fromkeys(state._fields), "parameters": parameters})


def shapes_of(parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by dotted path."""
    return {name: tuple(array.shape) for name, array in flat(parameters).items()}


def read_about(path: Any) -> dict[str, Any]:
    """Return the metadata of a checkpoint. ValueError if it cannot be read."""
    try:
        about = json.loads((path / "about" / "metadata").read_text())
        if not isinstance(about["parameters"], dict):
            raise TypeError("parameters are no table")
        return about
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the checkpoint {path} is damaged ({type(error).__name__}: {first_line(error)[:200]}). Delete that folder "
            "to go on from an older one."
        ) from error


def damage_of(path: Any) -> Problem | None:
    """Return the first file of a checkpoint that fails its checksum, or None. Buckets verify their own objects."""
    return None if in_bucket(path) else folder_damage(path)


def refuse_other_shapes(path: Any, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the differing parameters, if the checkpoint is of another model."""
    saved = {name: tuple(shape) for name, shape in read_about(path)["parameters"].items()}
    built = shapes_of(wanted["parameters"])
    problems = [
        f"{name} is {saved.get(name, 'missing')} in the checkpoint and {built.get(name, 'missing')} in the model"
        for name in sorted({*built, *saved})
        if saved.get(name) != built.get(name)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(
            f"the checkpoint of step {path.name} in {path.parent} is of another model: {problems[0]}{more}. "
            f"Use the model it was trained with (resume={_run_of(path)} takes its settings), or another "
            "name=."
        )


def refuse_other_state(path: Any, wanted: Mapping[str, Any], changed: Mapping[str, tuple[str, str]]) -> None:
    """Raise ValueError if the saved state has other arrays than the run, for example of another optimizer.

    If the saved array names cannot be read, this returns silently; restoring then raises the error. `changed` maps the
    key of each setting that differs from the saved run to (requested, saved).
    """
    saved, wanted_names = _saved_arrays(path), set(names_of(wanted))
    if saved is None or saved == wanted_names:
        return
    # a changed number keeps the arrays; adding or removing an optimizer, average or clipping does not
    options = {
        key: values
        for key, values in changed.items()
        if key == "optimizer.name" or (key.startswith("optimizer.") and "null" in values)
    }
    if options:
        differs = "; ".join(f"{key}={was} was saved, {now} is asked for" for key, (now, was) in options.items())
        again = " ".join(f"{key}={was}" for key, (_, was) in options.items())
    else:
        name, more = min(saved ^ wanted_names), len(saved ^ wanted_names) - 1
        differs = f"{name} is only in the {'checkpoint' if name in saved else 'run'} (and {more} more)"
        again = "the optimizer options it was saved with"
    raise ValueError(
        f"the checkpoint of step {path.name} in {path.parent} is sound, but of another optimizer: {differs}. "
        f"Use {again} (resume={_run_of(path)} takes its settings), or another name=."
    )


def refuse_other_tokenizer(path: Any, wanted: Mapping[str, str] | None) -> None:
    """Raise ValueError if the checkpoint's model was trained with another tokenizer.

    A checkpoint that records no tokenizer is accepted.
    """
    saved = read_about(path).get("tokenizer")
    if wanted is None or saved is None or saved["fingerprint"] == wanted["fingerprint"]:
        return
    if saved["name"] == wanted["name"]:
        raise ValueError(
            f"data.tokenizer={wanted['name']} is not what the checkpoint of step {path.name} in {path.parent} was "
            f"trained with: its file has changed since (fingerprint {saved['fingerprint']}, now "
            f"{wanted['fingerprint']}). Put the file of then back, or use another name=."
        )
    raise ValueError(
        f"the checkpoint of step {path.name} in {path.parent} was trained with tokenizer={saved['name']}, this run has "
        f"tokenizer={wanted['name']}, whose ids mean other text. Use data.tokenizer={saved['name']}, or another name=."
    )


def _run_of(path: Any) -> str:
    """Return the name of the run that a checkpoint belongs to."""
    return (path.parent.parent if path.parent.name == FOLDER else path.parent).name


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


def local_shards(tree: Any) -> dict[str, list[str]]:
    """Return the parts of each array on this process's devices, by dotted name: its dtype, then the slices.

    For an array of shape [8, 4] a slice may be `0:4,0:4`. The tree has arrays, or shapes with their shardings.
    """
    import jax

    def held(array: Any) -> list[str]:
        indices = array.sharding.addressable_devices_indices_map(tuple(array.shape)).values()
        return [str(array.dtype), *sorted({_bounds(index, array.shape) for index in indices})]

    return dict(zip(names_of(tree), map(held, jax.tree.leaves(tree)), strict=True))


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> str:
    slices = index or ()
    return ",".join("{}:{}".format(*part.indices(size)[:2]) for part, size in zip(slices, shape, strict=True))
