"""Error messages for unknown keys, wrong types, bad interpolations and huge numbers in a configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from inspect import get_annotations, getsourcefile
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from valkyrie import optim
from valkyrie.config import modes
from valkyrie.config.modes import MODES, get_mode
from valkyrie.data import config as data
from valkyrie.data.config import SOURCES
from valkyrie.foreign_errors import (
    WrongValue,
    interpolation_reason,
    is_recursive_interpolation,
    missing_key,
    missing_variable,
    parse_wrong_value,
    unsupported_type,
)
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.slices import shorten
from valkyrie.paths import config_names
from valkyrie.problems import Problem, ProblemCode, first_line, suggest
from valkyrie.trees import flatten

_SYNONYMS = {
    "lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "warmup": "optimizer.warmup_steps",
    "kind": "optimizer.family",
    "grad_clip": "optimizer.clip_norm",
    "max_steps": "steps",
    "num_steps": "steps",
    "epochs": "steps",
    "bs": "batch",
    "batch_size": "batch",
    "global_batch_size": "batch",
    "grad_accum": "microbatches",
    "accumulation": "microbatches",
    "gradient_accumulation_steps": "microbatches",
    "seq_len": "seq",
    "sequence_length": "seq",
    "max_length": "seq",
    "block_size": "seq",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "d_model": "model.embed",
    "n_embd": "model.embed",
    "hidden_size": "model.embed",
    "n_head": "model.attention.heads",
    "num_heads": "model.attention.heads",
    "dtype": "precision",
    "activation_checkpointing": "remat",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "out_dir": "runs",
    "output_dir": "runs",
    "run_name": "name",
    "project": "tracking.project",
    "wandb": "tracking",
    "devices": "mesh",
    "gpus": "mesh",
    "dataset": "data",
    "tokenizer": "data.tokenizer",
}
"""Maps names of settings in other frameworks to Valkyrie's keys."""
LARGEST_INT = 2**31 - 1
"""Largest value of most integer settings, because JAX uses 32-bit integers."""
_INT64_KEYS = {"data.max_bytes", "data.shard_tokens", "data.generator_seed"}
"""64-bit settings, which are not passed to JAX."""
LAYOUT_SWEEPER_KEYS = ("hydra.sweeper.space", "hydra.sweeper.limit")
"""Keys that only `hydra/sweeper=layouts` has."""
_NESTED_LIST_TEXT = "{key}: the list may not contain lists or mappings. Write {key}=[A,B]."
_COMPILER_PREFIXES = ("target.chip.xla_options.", "target.chip.compiler_options.")


def problem_from_error(error: OmegaConfBaseException, file: str | None = None) -> Problem:
    """Convert an OmegaConf error to a problem that names the key and suggests valid keys or values.

    `file` is the config file that sets the value, or None if the file is unknown or no file sets it.
    """
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return describe_unknown_key(str(error.full_key), error.parent_node)
    cause = error.__cause__ or error.__context__
    if isinstance(error, InterpolationResolutionError) and type(cause) is ValueError:
        return Problem(ProblemCode.malformed, error.full_key, text=str(cause))  # a resolver's message
    text = _wrong_value_text(error, file)
    return Problem(ProblemCode.malformed, error.full_key, text=text)


def _choices(error: OmegaConfBaseException) -> str:
    """Return the allowed values of a key as text, such as `none, nans`, or an empty string if it takes no enum."""
    current = error.parent_node[error.key] if isinstance(error.parent_node, DictConfig) else None
    return ", ".join(member.name for member in type(current)) if isinstance(current, Enum) else ""


def find_wrong_interpolation(config: DictConfig, error: OmegaConfBaseException) -> Problem | None:
    """Return a problem that names the key with the interpolation (`${...}`) that caused `error`, or None if not found.

    OmegaConf's error does not name that key.
    """
    plain_config = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain_config, dict)
    values = flatten({str(key): value for key, value in plain_config.items()})
    texts = {key: value for key, value in values.items() if isinstance(value, str) and "${" in value}
    if missing_name := missing_key(str(error)):
        for key, text in texts.items():
            if re.search(rf"\$\{{{re.escape(missing_name)}}}", text):
                return Problem(
                    ProblemCode.malformed, key, text, f"{key}={text} refers to {missing_name}, which does not exist."
                )
    references = {key: re.findall(r"\$\{(\w[\w.]*)\}", text) for key, text in texts.items()}
    for key in references if is_recursive_interpolation(str(error)) else ():
        chain = [key]
        while next_key := next(
            (reference for reference in references.get(chain[-1], ()) if reference in references), None
        ):
            if next_key in chain:
                cycle = chain[chain.index(next_key) :]
                cycle_text = " and ".join(f"{name}={texts[name]}" for name in cycle)
                verb = "refer to each other" if len(cycle) > 1 else "refers to itself"
                text = f"{cycle_text} {verb}. Write a value for {'one of them' if len(cycle) > 1 else 'it'}."
                return Problem(ProblemCode.malformed, cycle[0], texts[cycle[0]], text)
            chain.append(next_key)
    if not isinstance(error, InterpolationResolutionError) or type(error.__cause__ or error.__context__) is ValueError:
        return None
    variable, reason = missing_variable(str(error)), interpolation_reason(first_line(error))
    for key, text in texts.items():
        if (f"oc.env:{variable}" in text) if variable else _resolution_fails(config, key, first_line(error)):
            message = (
                unset_variable_text(variable) if variable else f"{reason}. Write a value, or refer to a key: ${{KEY}}."
            )
            return Problem(ProblemCode.malformed, key, text, f"{key}={text}: {message}")
    return None


def unset_variable_text(name: str) -> str:
    """Return the message for `${oc.env:NAME}` with a variable that is not set."""
    return (
        f"the environment variable {name} is not set. Set it, or write a value for this case: ${{oc.env:{name},VALUE}}."
    )


def _resolution_fails(config: DictConfig, key: str, message: str) -> bool:
    """Return whether resolving a key raises an error with this first line."""
    try:
        OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        return first_line(error) == message
    return False


def describe_unknown_key(full_key: str, parent: Any) -> Problem:
    """Return a problem for an unknown key. Its message suggests the key that the user probably meant, if any.

    The message also lists the keys of `parent`, the config that should have contained the key. If no config of the
    group is chosen, as for `task` by default, the message lists the names of its configs instead. If the key belongs to
    some modes, data sources or optimizers, the message names them.
    """
    prefix, _, key_name = full_key.rpartition(".")
    dotted_prefix = f"{prefix}." if prefix else ""
    valid_keys = sorted(_direct_keys(parent))
    candidates = [key for key in valid_keys if sorted(key) == sorted(key_name)]
    candidates = candidates or [key for key in valid_keys if key.lower() == key_name.lower()]
    candidates = [f"{dotted_prefix}{key}" for key in candidates] or _likely_keys(key_name, parent, prefix)
    root, nearest = parent._get_root() if isinstance(parent, DictConfig) else None, suggest(key_name, valid_keys)
    if prefix and not prefix.startswith("hydra."):
        candidates = candidates or _top_level_keys(key_name, root)
    elif not prefix and not candidates:
        mode = get_mode(OmegaConf.select(root, "mode.name")) if isinstance(root, DictConfig) else None
        short_key = None if mode is None else suggest(key_name, mode.short_keys)
        candidates = [short_key] if short_key else _longer_keys(key_name, root)
    candidates = candidates or ([f"{dotted_prefix}{nearest}"] if nearest else _longer_keys(key_name, root))
    hint = f" Did you mean {candidates[0]}?" if candidates else ""
    if modes_with_key := [name for name in MODES.names() if full_key in MODES.config_class(name).short_keys]:
        hint = hint if candidates and "." not in candidates[0] else ""
        hint += f" {full_key}= belongs to {' and '.join(f'mode={name}' for name in modes_with_key)}."
    group, description = prefix.partition(".")[0], "a key"
    families = {families.key.partition(".")[0]: families for families in (MODES, SOURCES, optim.FAMILIES)}.get(group)
    if families is not None:
        if names := families.names_with_key(full_key.removeprefix(f"{group}.")):
            hint += f" It is a key of {', '.join(f'{group}={name}' for name in names)}."
        if prefix == group:
            family = parent.get(families.key.removeprefix(f"{group}."))
            description = f"a key of {group if group == 'mode' else families.key}={family}"
    config_class = OmegaConf.get_type(parent) if isinstance(parent, DictConfig) else dict
    if is_dataclass(config_class) and _lacks_type(config_class, key_name):
        value = vars(config_class)[key_name]
        declaration = f"{key_name}: {type(value).__name__} = {value!r}"
        hint = f" {getsourcefile(config_class)} has {key_name} without a type. Write {declaration}."
    if full_key in LAYOUT_SWEEPER_KEYS:
        hint = " To set it, add hydra/sweeper=layouts."
    in_prefix = f" in {prefix}" if prefix else ""
    valid_keys_text = f"Known{in_prefix}: {', '.join(valid_keys)}."
    if not valid_keys:
        valid_keys_text = f"{prefix} has no keys."
        if config_names(prefix):
            sentence = advise_choice(prefix)
            valid_keys_text = f"{sentence[0].upper()}{sentence[1:]}"
        elif OmegaConf.is_dict(parent):  # a free mapping, such as those of Hydra's plugins
            valid_keys_text += f" To add one: +{full_key}=VALUE."
    text = f"{full_key} is not {description}.{hint} {valid_keys_text}"
    return Problem(ProblemCode.unknown_name, full_key, text=text)


def _lacks_type(cls: type, name: str) -> bool:
    """Return whether `cls` introduces a public value without an annotation, which `dataclass` does not make a field."""
    value = vars(cls).get(name)
    return (
        name in vars(cls)
        and not name.startswith("_")
        and name not in get_annotations(cls)
        and not any(hasattr(base, name) for base in cls.__bases__)
        and not callable(value)
        and not hasattr(value, "__get__")
    )


def advise_choice(group: str) -> str:
    """Return advice to choose a config of `group` before setting its keys. It starts in lower case."""
    return f"no {group} is chosen. Choose one first: {group}=NAME. Known: {', '.join(config_names(group))}."


def _likely_keys(name: str, parent: Any, prefix: str) -> list[str]:
    """Return a list with the key that the user probably meant, or an empty list if there is no single candidate.

    This is Valkyrie's key for a name of another framework, if that key is in the group `prefix`. If `prefix` is empty,
    the key may be in any group; the second choice is then the only key with this name, at any depth, that the mode
    reads.
    """
    synonym = _SYNONYMS.get(name.lower())
    if synonym is not None and (not prefix or synonym.startswith(f"{prefix}.")):
        return [synonym]
    if prefix or not isinstance(parent, DictConfig):
        return []
    unread_keys = _unread_keys(parent)
    matches = [
        key for key in _nested_keys(parent) if key.rpartition(".")[2] == name and key.split(".")[0] not in unread_keys
    ]
    return matches if len(matches) == 1 else []


def _top_level_keys(name: str, root: Any) -> list[str]:
    """Return `[key]` for the top-level key that the user probably meant by the unknown key `GROUP.name`, else [].

    For `optimizer.steps` this is `steps`. Names of other frameworks, such as `max_steps`, are translated.
    """
    return [key for key in (name, _SYNONYMS.get(name.lower())) if key in _direct_keys(root)][:1]


def _longer_keys(name: str, root: Any) -> list[str]:
    """Return `[key]` if exactly one top-level key has `name` as a word, such as `sample_tokens` for `tokens`, else [].

    Only keys that the mode reads count. If some other mode does not read some of the matching keys, only those count.
    """
    unread_keys = _unread_keys(root)
    longer_keys = [key for key in _direct_keys(root) if name in key.split("_") and key not in unread_keys]
    specific_keys = [
        key for key in longer_keys if any(key in MODES.config_class(mode).unread for mode in MODES.names())
    ]
    matches = specific_keys or longer_keys
    return matches if len(matches) == 1 else []


def _direct_keys(root: Any) -> list[str]:
    return [str(key) for key in root if key != "hydra"] if isinstance(root, DictConfig) else []


def _unread_keys(root: Any) -> frozenset[str]:
    """Return the top-level keys and groups that the mode of a config does not read."""
    mode = get_mode(OmegaConf.select(root, "mode.name")) if isinstance(root, DictConfig) else None
    return frozenset() if mode is None else mode.unread


def _nested_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        yield f"{prefix}{key}"
        has_value = not (OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, str(key)))
        if has_value and isinstance(inner := config[key], DictConfig):  # null is None here
            yield from _nested_keys(inner, f"{prefix}{key}.")


def _wrong_value_text(error: OmegaConfBaseException, file: str | None) -> str:
    """Return the message for an illegal value, from OmegaConf's message about it."""
    key, message = error.full_key, interpolation_reason(first_line(error)).rstrip(".")
    if field_and_type := unsupported_type(str(error)):
        field, field_type = field_and_type
        return (
            f"{field or key} has type {field_type}, but the keys of a Config must be bool, int, float, str, an Enum, a "
            "dataclass, a list or dict of these, or one of these with `| None`."
        )
    kind, parts = parse_wrong_value(message) or (None, [])
    value, expected, *_ = [*parts, "", ""]
    match kind:
        case WrongValue.not_a_number if value == "":
            return f"{key}= has no value. Is a shell variable not set?"
        case WrongValue.not_a_number:
            number_kind = {"Integer": "a whole number", "Float": "a number"}.get(expected, expected)
            whole_number = re.fullmatch(r"(\d+)\.0", value)  # 1e6 is a float to YAML
            return f"{key}={value}: must be {number_kind}.{f' Write {key}={whole_number[1]}.' if whole_number else ''}"
        case WrongValue.not_a_bool:
            return f"{key}={value}: must be true or false."
        case WrongValue.null if file is not None:
            return f"{file}: {key} has no value (null). Write {key.rpartition('.')[2] if key else 'KEY'}: VALUE."
        case WrongValue.null:
            return f"{key}=null: must have a value."
        case WrongValue.not_a_choice:
            return f"{key}={value}: must be one of {expected or _choices(error)}."
        case WrongValue.not_an_item:
            return _NESTED_LIST_TEXT.format(key=key)
        case WrongValue.not_a_text:
            return f"{key}={value}: must be text, not a list or mapping: {key}=TEXT."
        case WrongValue.not_a_list if file is not None:
            return f"{file}: {key} must be a list. Write {str(key).rpartition('.')[2]}: [{value or '...'}]."
        case WrongValue.not_a_list:
            return f"{key}: must be a list: {key}=[{value or '...'}]."
        case WrongValue.not_a_group if key == "target.chip":
            return (
                f"{key}={value} is not known. Known chips: {', '.join(known_chips())}. Write {key}=NAME "
                "target.chips=N, or the name of a slice, such as target=v4-64."
            )
        case WrongValue.not_a_group:
            return f"{key}={value}: {key} is a group of settings. Set one of its keys: {key}.KEY=VALUE."
    return f"{key}: {message}." if key else f"{message}."


def unknown_key_problems(values: DictConfig, prefix: str = "") -> list[Problem]:
    """Return a problem for each key, at any depth, that is not a field of its config class. `++KEY=` adds such keys."""
    config_class, known_values = OmegaConf.get_type(values), values
    known_names = {field.name for field in fields(config_class)} if is_dataclass(config_class) else set(values)
    if unknown_keys := [str(key) for key in values if key not in known_names]:
        known_values = values.copy()
        with open_dict(known_values):
            for key in unknown_keys:
                del known_values[key]
    problems = [describe_unknown_key(f"{prefix}{key}", known_values) for key in unknown_keys]
    for key in known_values:
        if not OmegaConf.is_missing(known_values, key) and isinstance(child := values[key], DictConfig):
            problems += unknown_key_problems(child, f"{prefix}{key}.")
    return problems


def drop_foreign_keys(values: DictConfig, group: str) -> None:
    """Drop the keys that earlier versions saved in a group: those of other modes in `mode`, of other sources in `data`.

    Modifies `values` in place. Keeps a key of another mode if its value is not the default. For any other `group`, does
    nothing.
    """
    without_foreign_keys = {"mode": modes.without_foreign_keys, "data": data.without_foreign_keys}.get(group)
    settings = OmegaConf.to_container(values[group])
    valid_settings = without_foreign_keys(settings) if without_foreign_keys and isinstance(settings, dict) else settings
    if valid_settings != settings:
        values[group] = valid_settings


def nested_value_problems(values: DictConfig, prefix: str = "", value_type: Any = None) -> list[Problem]:
    """Return a problem for each list setting of strings, numbers or booleans with an item that is a list or mapping.

    OmegaConf does not reject such items. `value_type` is the type of the values of a mapping, or None if unknown.
    """
    config_class, problems = OmegaConf.get_type(values), []
    hints = _field_types(config_class) if is_dataclass(config_class) else dict.fromkeys(map(str, values), value_type)
    for name in values:
        if OmegaConf.is_missing(values, name):
            continue
        key, value = f"{prefix}{name}", values[name]
        if isinstance(value, DictConfig):
            problems += nested_value_problems(value, f"{key}.", next(iter(get_args(hints.get(str(name)))[1:]), None))
        elif isinstance(value, ListConfig) and set(get_args(hints.get(str(name)))) & {str, int, float, bool}:
            items = OmegaConf.to_container(value)
            if isinstance(items, list) and any(isinstance(item, list | dict) for item in items):
                problems.append(Problem(ProblemCode.malformed, key, items, _NESTED_LIST_TEXT.format(key=key)))
    return problems


@cache
def _field_types(config_class: type) -> dict[str, Any]:
    return get_type_hints(config_class)


def empty_text_problems(arguments: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each argument without a value, such as `runs=$UNSET`. A prompt may be empty.

    In a YAML file, or written as `KEY=''` with the quotes, an empty text is meant.
    """
    for argument in arguments:
        key = argument.lstrip("+").removesuffix("=")
        if argument.endswith("=") and "=" not in key and key != "prompt":
            text = f"{key}= has no value. Is a shell variable not set? Write a value, or leave it out."
            yield Problem(ProblemCode.missing, key, "", text)


def infinite_number_problems(values: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for each number that is infinite or NaN."""
    for key, value in flatten(values).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(ProblemCode.not_finite, key, value)


def integer_size_problems(values: Mapping[str, object]) -> list[Problem]:
    """Return a problem for each integer that is too large for its type. If there are any, other checks must not run."""
    problems = []
    for key, value in flatten(values).items():
        largest = 2**63 - 1 if key in _INT64_KEYS or key.startswith(_COMPILER_PREFIXES) else LARGEST_INT
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > largest:
                details = {"bound": f"most {largest}" if number > 0 else f"least {-largest}"}
                problems.append(Problem(ProblemCode.too_large, key, shorten(str(number)), details=details))
    return problems
