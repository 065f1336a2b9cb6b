"""Rejects common typing mistakes that Hydra reports unclearly or not at all, before Hydra parses the arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence, Set
from dataclasses import fields
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

from hydra._internal.utils import get_args_parser  # the flags have no public list

from valkyrie.config.choices import get_target
from valkyrie.config.compose import ENVIRONMENT_MESH, GROUPS
from valkyrie.config.explain import unknown_choice_text
from valkyrie.config.modes import MODES, get_mode
from valkyrie.config.run import RunConfig
from valkyrie.config.saved import CONFIG_DIR_FLAGS, config_dirs, config_path
from valkyrie.parallel.mesh import parse_mesh
from valkyrie.paths import config_names
from valkyrie.problems import format_alternatives, suggest
from valkyrie.runs.folder import key_values, split_flags, split_override

_GROUPS = set(GROUPS)
_OVERLAYS = ("sweep", "experiment")
_KEYS = {field.name for field in fields(RunConfig)} | {*_OVERLAYS}
_FLAG = re.compile(r"--?[A-Za-z]")


def version_text() -> str:
    """Return the versions of Valkyrie and of JAX in one line."""
    return f"valkyrie {version('valkyrie-jax')}, jax {version('jax')}"


def bytes_not_utf8(text: str) -> str:
    """Return the bytes of an argument or path that are invalid UTF-8, as hexadecimal text such as `ff fe`, or ""."""
    return " ".join(f"{ord(letter) - 0xDC00:02x}" for letter in text if "\udc80" <= letter <= "\udcff")


def refuse_unknown_flags(arguments: Sequence[str]) -> None:
    """Raise ValueError for a flag that Hydra does not have. Suggests the nearest one."""
    known_flags = [name for action in get_args_parser()._actions for name in action.option_strings]
    for flag in filter(_FLAG.match, arguments):
        name = flag.partition("=")[0]
        # argparse accepts the beginning of a long flag, and a value directly after a short one.
        if any(known.startswith(name) if name.startswith("--") else name.startswith(known) for known in known_flags):
            continue
        nearest = suggest(name, known_flags)
        raise ValueError(f"{flag} is not a flag. {f'Did you mean {nearest}?' if nearest else 'See --help.'}")


def refuse_unquoted_layouts(arguments: Sequence[str]) -> None:
    """Raise ValueError for `first=partition=fsdp mesh=8x1x1 second=partition=dp mesh=4x2x1`, which needs quotes.

    That is, a key has different values after `first=` and after `second=`. In other commands, the last value of a key
    counts, as everywhere in Hydra: scripts append values to their defaults.
    """
    layout, values_by_key = None, dict[str, tuple[str, str]]()
    overrides = [argument for argument in split_flags(arguments)[1] if "=" in argument and argument[0] != "~"]
    for key, value in map(split_override, overrides):
        if key.removeprefix("mode.") in ("first", "second"):
            layout = f"{key}={value}" if "=" in value and " " not in value else None
        elif layout is not None:
            first_layout, first_value = values_by_key.setdefault(key, (layout, value))
            if first_layout != layout and first_value != value:
                first_key, _, text = first_layout.partition("=")
                remedy = f"Quote each layout: {first_key}={shlex.quote(f'{text} {key}={first_value}')}."
                raise ValueError(f"{key}={first_value} and {key}={value} set the same key. {remedy}")


def refuse_typos(arguments: Sequence[str], multirun: bool, *, in_python: bool = False) -> None:
    """Raise ValueError for `--steps=5`, `steps 5`, `mesh=2,2,2`, `batch=8 batch_tokens=1024` and similar mistakes.

    The message contains the correct form. If `multirun` is true, the arguments are for a sweep, and keys may have
    several values. With `in_python`, messages about several values suggest several runs, because only commands run
    sweeps.
    """
    if sum(argument.partition("=")[0] in CONFIG_DIR_FLAGS for argument in arguments) > 1:
        raise ValueError("--config-dir can be given only once. Put the files of all your folders into one folder.")
    for argument in arguments:
        if bad_bytes := bytes_not_utf8(argument):
            key, sign, _ = argument.partition("=")
            raise ValueError(
                f"{key.encode(errors='replace').decode()}{sign} has bytes that are not UTF-8 ({bad_bytes}). Type the "
                "argument in a UTF-8 terminal, or remove these bytes."
            )
    flags, overrides = split_flags(arguments)
    folders = [*config_dirs(arguments), *filter(None, [config_path(flags)])]
    mode = get_mode(key_values(overrides).get("mode"))
    keys = _KEYS | {*(() if mode is None else mode.short_keys)}
    for argument, next_argument in zip_longest(arguments, arguments[1:], fillvalue=""):
        if _FLAG.match(argument):
            _refuse_dashes(argument, next_argument, keys)
    if multirun:
        _refuse_search_in_sweep(overrides)
    for argument in overrides:
        _refuse_joined_settings(argument, in_python)
    for argument, next_argument in zip_longest(overrides, overrides[1:], fillvalue=""):
        _refuse_missing_value(argument, next_argument, keys)
    for argument in overrides:
        key, _, value = argument.partition("=")
        _refuse_list_of_choices(argument, key.lstrip("+"), value, multirun, in_python)
        _refuse_wrong_choice(argument, key.lstrip("+"), value)
        _refuse_arguments_hydra_reports_poorly(argument, key, value)
        if not multirun:
            _refuse_several_values(argument, key.lstrip("+"), value, in_python, "mode=search" in overrides, folders)
    values = key_values([argument for argument in overrides if argument[:1] not in ("~", "+")])
    for argument in overrides:
        key = argument[1:].partition("=")[0]
        if argument[:1] == "~" and key in values:
            raise ValueError(f"{argument} removes {key}, but {key}={values[key]} sets it. Leave out {argument}.")
    values = key_values(overrides)
    batch, batch_tokens = values.get("batch", "null"), values.get("batch_tokens", "null")
    if not re.search(r"\bnull\b", f"{batch} {batch_tokens}"):  # a sweep may vary which of them is set
        raise ValueError(f"batch={batch} and batch_tokens={batch_tokens} are both set. Leave one out.")


def _refuse_dashes(flag: str, next_argument: str, keys: Set[str]) -> None:
    key, sign, value = flag.lstrip("-").partition("=")
    if key.partition(".")[0].partition("/")[0] in keys:
        if not sign:
            value = (
                "VALUE" if "=" in next_argument or next_argument.startswith("-") or not next_argument else next_argument
            )
        raise ValueError(f"{flag}: write settings without dashes: {key}={value}.")


def _refuse_joined_settings(argument: str, in_python: bool) -> None:
    """Raise ValueError for several settings in one argument, except in a prompt or a layout of `mode=explain`."""
    words = argument.split()
    if words[:1] == ["valkyrie-train"]:
        remedy = (
            "pass its settings one by one, such as compose(*answer.overrides)" if in_python else "remove the quotes"
        )
        raise ValueError(f"{argument} is a whole command: {remedy}.")
    keys = [word.partition("=")[0].partition(".")[0] if "=" in word else None for word in words]
    is_text = argument.partition("=")[0] in ("prompt", "mode.first", "mode.second")
    if len(words) > 1 and _KEYS.issuperset(keys) and not is_text:
        separate_arguments = (", " if in_python else " ").join(f'"{word}"' for word in words)
        raise ValueError(f"{argument}: {len(words)} settings in one argument. Write {separate_arguments}.")


def _refuse_missing_value(argument: str, next_argument: str, keys: Set[str]) -> None:
    match = re.fullmatch(r"(?!prompt=)([\w.]+)(\s*(?:==|:=|:|=)\s*)(\S.*)", argument)  # a prompt may begin with spaces
    if match and match[2] != "=" and match[1].partition(".")[0] in keys:
        raise ValueError(f"{argument}: write settings as KEY=VALUE, without spaces: {match[1]}={match[3]}.")
    has_empty_value = re.fullmatch(r"[\w.]+=", argument) is not None and argument.rstrip("=").partition(".")[0] in keys
    if has_empty_value and re.match(r"[\w.]", next_argument) and "=" not in next_argument:
        raise ValueError(f"{argument} {next_argument}: write {argument}{next_argument}, without a space after =.")
    if argument in MODES.names():
        raise ValueError(f"{argument}: write mode={argument}.")
    if "=" not in argument and (group := next((g for g in _OVERLAYS if argument in config_names(g)), None)):
        raise ValueError(f"{argument}: write +{group}={argument}.")
    if argument.partition(".")[0] in keys and "=" not in argument:
        value = "VALUE" if "=" in next_argument or not next_argument else next_argument
        raise ValueError(f"{argument} has no value. Write {argument}={value}, with no spaces around =.")


def _refuse_arguments_hydra_reports_poorly(argument: str, key: str, value: str) -> None:
    """Raise ValueError for arguments for which Hydra would report an unclear error.

    These are a `hydra.searchpath` without Valkyrie's configs, the class of a launcher or sweeper, a `name` with quotes,
    a mesh such as `4*4*2`, a function without values such as `choice()`, and a value that ends with a comma.
    """
    if key == "hydra.searchpath" and "valkyrie://groups" not in value:
        raise ValueError(
            f"{argument} removes the configs that ship with Valkyrie. To add your own, use --config-dir FOLDER."
        )
    if plugin := re.fullmatch(r"\+*hydra\.(launcher|sweeper)\._target_", key):
        raise ValueError(f"{argument}: choose it by its name, such as hydra/{plugin[1]}=basic.")
    if key == "name" and (quote := re.search("[\"']", split_override(argument)[1])):
        raise ValueError(f"{argument}: {quote[0]} is not allowed in a name. Use letters, digits, ., _ or -.")
    if key == "mesh" and re.fullmatch(r"(\d+s)?\d+([^\w.,:+-]\d+)+", value):
        sizes = re.sub(r"[^\w]", "x", value)
        raise ValueError(f"{argument}: join the sizes of a mesh with the letter x: mesh={sizes}.")
    if re.fullmatch(r"(choice|range|glob|interval|shuffle|sort)\(\s*\)", value):
        raise ValueError(f"{argument} lists no values. Write {key}=1,2,3.")
    if key.partition(".")[0] in _KEYS and re.fullmatch(r"[\w.+-]+,", value):
        raise ValueError(f"{argument} ends with a comma. Write {argument.rstrip(',')}.")


def _refuse_search_in_sweep(overrides: Sequence[str]) -> None:
    values = key_values(overrides)
    if values.get("mode") == "search":
        targets = values.get("target", "v4-8,v5e-8").strip("[]")
        targets = targets if "," in targets else "v4-8,v5e-8"
        raise ValueError(
            f"mode=search cannot be part of a sweep. To compare slices, write target=[{targets}] without -m. To "
            "vary other keys, run one search for each value."
        )


def _refuse_wrong_choice(argument: str, key: str, value: str) -> None:
    """Raise ValueError for a group set to a number, a boolean or null, and for keys such as `model.name=NAME`.

    Does not refuse a number for `mesh`, or null for `task`. Refuses `model.name=NAME` if NAME is a choice of `model`,
    because it would change the name in records but not the settings. Always refuses `mesh.name` and `target.name`.
    """
    group = key.partition(".")[0]
    is_name_key = group in _GROUPS and key == f"{group}.name"
    if is_name_key and (group in ("mesh", "target") or value in config_names(group)):
        raise ValueError(f"{argument} changes only the name, not the settings. Write {group}={value}.")
    if key != "mesh" and re.fullmatch(r"[+-]?[\d.]+(e\d+)?|true|false", value) and (names := config_names(key)):
        examples = "target=v5e-8" if key == "target" else f"{key}={names[0]}. Names: {', '.join(names)}"
        raise ValueError(f"{argument}: {key}= takes a name, such as {examples}.")
    if key in _GROUPS and key != "task" and value == "null":
        raise ValueError(f"{argument}: {key} cannot be null. Leave it out for the default, or choose one.")


def _refuse_list_of_choices(argument: str, key: str, value: str, multirun: bool, in_python: bool) -> None:
    """Raise ValueError for a group set to a list. The message states how to choose one of its choices or to run all."""
    if key not in _GROUPS or not value.startswith("["):
        return
    if not value.endswith("]"):
        raise ValueError(f"{argument}: the ] at the end is missing. Write {argument}].")
    choices = [choice for choice in value.strip("[]").replace(" ", "").split(",") if choice]
    if key == "mesh" and choices and all(choice.isdecimal() for choice in choices):
        choices = ["x".join(choices)]
    if len(choices) < 2:
        raise ValueError(f"{argument}: {key}= takes one choice, not a list: {key}={choices[0] if choices else 'NAME'}.")
    sweep_argument = f"{key}={','.join(choices)}"
    if multirun:
        raise ValueError(f"{argument}: write the values of a sweep without brackets: -m {sweep_argument}")
    remedy = (
        ", or make a run for each." if in_python else f", or run a sweep over them: valkyrie-train -m {sweep_argument}"
    )
    alternatives = format_alternatives(key, choices)
    raise ValueError(f"{argument}: {key}= takes one choice, not a list. Use {alternatives}{remedy}")


def _refuse_several_values(
    argument: str, key: str, value: str, in_python: bool, is_search: bool, folders: Sequence[str]
) -> None:
    """Raise ValueError for several values, with those of a group that are not choices as the first reason."""
    if re.fullmatch(r"\d+(s?,\d+)+", value) and key == "mesh":
        raise ValueError(f"{argument}: join the sizes of a mesh with the letter x: mesh={value.replace(',', 'x')}.")
    is_text = key in ("prompt", "data.paths")  # a comma is part of it
    several_values = r"[\w.:+-]+(,[\w.:+-]+)+|(choice|range|glob|interval)\(.*\)"
    if key.partition(".")[0] in _KEYS and not is_text and re.fullmatch(several_values, value):
        if key in _GROUPS and "(" not in value:
            for choice in value.split(","):
                _refuse_unknown_choice(key, choice, folders)
        remedy = f"Add -m for a sweep over them: valkyrie-train -m {shlex.quote(argument)}"
        if is_search and key == "target":
            remedy = f"Search several slices with target=[{value}]."
        elif in_python:
            remedy = "Make a run for each."
        raise ValueError(f"{argument} has several values, but a run takes one. {remedy}")


def _refuse_unknown_choice(group: str, choice: str, folders: Sequence[str]) -> None:
    """Raise ValueError if a group has no such choice, in the package or in the user's config `folders`."""
    user_names = {path.stem for folder in folders for path in (Path(folder) / group).glob("*.yaml")}
    names = sorted({*config_names(group), *user_names})
    if choice in names or (group == "mesh" and choice == ENVIRONMENT_MESH):
        return
    if group == "target":
        get_target(choice)
    elif group == "mesh" and choice[:1].isdigit():
        parse_mesh(choice)
    else:
        raise ValueError(unknown_choice_text(f"{group}/{choice}", names, folders))
