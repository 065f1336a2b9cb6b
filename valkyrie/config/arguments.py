"""Parses the arguments of a command or of the Python API and composes them into a run. Does not import JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.config.choices import Chips
from valkyrie.config.compose import GROUPS, initialize_hydra
from valkyrie.config.explain import explain
from valkyrie.config.files import find_inclusion_cycle
from valkyrie.config.mistakes import refuse_typos
from valkyrie.config.modes import get_mode
from valkyrie.config.run import Run
from valkyrie.config.saved import CONFIG_FLAGS, CONFIG_PATH_FLAGS, config_dirs, find_primary_config
from valkyrie.extensions import add_import_path
from valkyrie.foreign_errors import is_key_of_null
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig
from valkyrie.problems import ProblemError
from valkyrie.runs.folder import key_values, split_flags, split_override

_ESCAPED_CHARACTER = r"\\[][(){}:=, \t\\]"
"""Regex that matches a backslash followed by a character that is special in Hydra's grammar."""


def read_arguments(arguments: Sequence[str], *, multirun: bool = False) -> list[str]:
    """Convert arguments of `valkyrie-train` to Hydra's syntax.

    - Expands abbreviations (`expand_shorthand`).
    - Removes the `+` of `+experiment=` and `+sweep=`, because our defaults list already has both groups.
    - Adds a `+` to `mode.vary.KEY=`, because the mapping has no keys by default.
    - Makes the folder of `--config-path` absolute. Hydra would take it relative to a source file.
    - Quotes `prompt=`, the two layouts of `mode=explain` and the paths of `data.paths=`. Hydra strips the spaces around
      unquoted text and rejects most punctuation. Leaves `null`, values that are already quoted or escaped for Hydra,
      and a sweep's list of prompts unchanged. Hydra still interpolates `${KEY}`.
    - Quotes names of runs that look like numbers or booleans.
    - Expands `~` in `runs=` and `resume=`.

    `multirun` is whether the arguments are for a sweep, where a key may have several values. Raises ValueError for
    incomplete abbreviations and for a mesh with one axis, such as `mesh=8`.
    """
    hydra_arguments: list[str] = []
    for argument in expand_shorthand(arguments):
        key, sign, value = argument.partition("=")
        if hydra_arguments and hydra_arguments[-1] in CONFIG_PATH_FLAGS:
            argument = os.path.abspath(argument)
        elif key in CONFIG_PATH_FLAGS and sign:
            argument = f"{key}={os.path.abspath(value)}"
        elif key in ("+experiment", "+sweep") and sign:
            argument = argument[1:]
        elif key.startswith("mode.vary.") and sign:
            argument = f"+{argument}"
        elif key.lstrip("+") in ("prompt", "mode.first", "mode.second") and not _is_hydra_syntax(value, multirun):
            argument = f"{key}={QuotedString(value, Quote.single).with_quotes()}"
        elif key.lstrip("+") == "data.paths":
            argument = f"{key}={_quote_paths(value, multirun)}"
        elif key in ("name", "resume") and re.fullmatch(r"[\d.e_+-]+|true|false|nan|inf", value, re.IGNORECASE):
            argument = f"{key}='{value}'"  # Hydra would read a number or a boolean: 1e3 would become 1000.0
        elif key in ("runs", "resume") and value.startswith("~"):  # shells do not expand ~ after =
            argument = f"{key}={os.path.expanduser(value)}"
        elif key == "mesh" and value.isdecimal():
            raise ValueError(
                f"mesh={value} has 1 axis, but a mesh has three (x, y, z) or four (w, x, y, z). Use mesh={value}x1x1."
            )
        hydra_arguments.append(argument)
    return hydra_arguments


def expand_shorthand(arguments: Sequence[str]) -> list[str]:
    """Expand the abbreviations in arguments.

    - `target.chip=v4 target.chips=512` becomes `target=v4-1024` (v4 names count two cores per chip). With
      `mode=search`, also sets `mode.shapes=true` to search every shape of that size. Unknown chips stay unchanged.
    - `target=[v4-64,v5e-64]` becomes `target=v4-64 mode.targets=[v4-64,v5e-64]` with `mode=search`.
    - `batch=auto` becomes `mode.search_batch=true`, and `device_batch=[2,4]` becomes `mode.device_batches=[2,4]`, with
      `mode=search`. Other modes refuse `batch=auto`.
    - Keys in the mode's `ModeConfig.short_keys` get the prefix `mode.`, such as `tokens=` with `mode=search`.

    Raises ValueError for `target.chip=` without a legal `target.chips=`, for `target=[]`, and for a key that is set
    both with and without `mode.`.
    """
    values = key_values(arguments)
    mode = get_mode(values.get("mode"))
    short_keys = () if mode is None else mode.short_keys
    is_search = values.get("mode") == "search"
    chip = _find_chip(values["target.chip"], config_dirs(arguments)) if "target.chip" in values else None
    expanded_arguments: list[str] = []
    for argument in arguments:
        key, value = split_override(argument) if "=" in argument else (argument, "")
        if key == "target.chip" and chip is not None:
            expanded_arguments += _slice_arguments(value, chip.units_in_name, values.get("target.chips"), is_search)
        elif key == "target.chips" and chip is not None:
            continue
        elif is_search and key == "target" and value.startswith("[") and value.endswith("]"):
            names = [name.strip() for name in value[1:-1].split(",") if name.strip()]
            if not names:
                raise ValueError(f"{argument} names no slice. Write target=[v4-64,v5e-64].")
            expanded_arguments += [f"target={names[0]}", f"mode.targets=[{','.join(names)}]"]
        elif key == "batch" and value.lower() == "auto":
            if not is_search:
                raise ValueError(
                    f"{argument}: only mode=search finds a batch size. Use a number, such as batch=32, or find one "
                    "with mode=search batch=auto."
                )
            expanded_arguments.append("mode.search_batch=true")
        elif is_search and key == "device_batch" and value.startswith("["):
            expanded_arguments.append(f"mode.device_batches={value}")
        elif key in short_keys and f"mode.{key}" in values:
            raise ValueError(
                f"{argument} and mode.{key}={values[f'mode.{key}']} set the same key. Leave out one of them."
            )
        elif key in short_keys and "=" in argument:
            needs_brackets = key == "paths" and not value.startswith("[")
            expanded_arguments.append(f"mode.{key}={f'[{value}]' if needs_brackets else value}")
        else:
            expanded_arguments.append(argument)
    return expanded_arguments


def abbreviate_search(arguments: Sequence[str]) -> list[str]:
    """Abbreviate the arguments of a search for display. `expand_shorthand` reverses this."""
    values, mode = key_values(arguments), get_mode("search")
    short_keys = {f"mode.{key}": key for key in (() if mode is None else mode.short_keys)}
    short_keys.pop("mode.budget", None)  # messages name it so
    short_keys |= {"mode.targets": "target", "mode.device_batches": "device_batch"}
    words = []
    for argument in arguments:
        key, value = split_override(argument) if "=" in argument else (argument, "")
        if argument == "mode.search_batch=true":
            words.append("batch=auto")
        elif key in short_keys:
            words.append(f"{short_keys[key]}={value}")
        elif key != "target" or "mode.targets" not in values:
            words.append(argument)
    return words


@contextmanager
def composition_errors(arguments: Sequence[str]) -> Iterator[None]:
    """Convert two errors of Hydra and OmegaConf in this context to a ValueError that names the argument or file.

    - AssertionError: an argument sets a key of a group that is null, such as `target.chip.hbm_gib=9` for a target
      without a chip.
    - RecursionError: a config file includes itself.
    """
    try:
        yield
    except RecursionError as error:
        choices = {key: value for key, value in key_values(arguments).items() if re.fullmatch(r"\w+", value)}
        folders = config_dirs(arguments)
        cycles = (find_inclusion_cycle(folders, group, name) for group, name in choices.items())
        file = next(filter(None, cycles), "a file of --config-dir")
        raise ValueError(
            f"{file}: its defaults list includes the file itself, directly or through another file. Delete that entry."
        ) from error
    except AssertionError as error:
        if not is_key_of_null(str(error)):
            raise
        argument = next(a for a in arguments if "target.chip." in a or split_override(a)[0].count(".") > 1)
        parent = split_override(argument)[0].rpartition(".")[0]
        hint = " Name a target with a chip, such as target=v5e-8." if parent.startswith("target.chip") else ""
        raise ValueError(f"{argument}: {parent} is null, so it has no keys.{hint}") from error


def parse_run(arguments: Sequence[str], *, in_python: bool = False, derived_arguments: Sequence[str] = ()) -> Run:
    """Compose arguments of `valkyrie-train` into a run. Does not check the run for problems.

    If the arguments cannot be composed, raises ValueError with the message that `valkyrie-train` would print. With
    `in_python`, the message does not suggest a sweep, which only commands can run. `derived_arguments` precede the
    others and were not written by a user, so they are not checked for typos.
    """
    arguments = expand_shorthand(arguments)
    refuse_typos(arguments, multirun=False, in_python=in_python)
    try:
        return _compose(read_arguments([*derived_arguments, *arguments]))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise add_later_problems(explain(error, config_dirs(arguments)), arguments) from error


def add_later_problems(error: ValueError, arguments: Sequence[str]) -> ValueError:
    """Return `error` together with the problems of later arguments, which Hydra does not reach.

    Removes the arguments whose keys are at fault and composes the rest, until no key is at fault. Returns `error`
    itself if it names no key, or only config groups. Groups are not removed, because other keys may be valid only for
    the chosen config.
    """
    keys = {problem.key for problem in error.problems} if isinstance(error, ProblemError) else set[str | None]()
    remaining_arguments = [argument for argument in arguments if split_override(argument)[0] not in keys - {*GROUPS}]
    if len(remaining_arguments) == len(arguments):
        return error
    try:
        parse_run(remaining_arguments)
    except ProblemError as later_error:
        assert isinstance(error, ProblemError)
        return ProblemError([*error.problems, *later_error.problems])
    except (ValueError, OSError):
        pass
    return error


def load_run(folder: Path, overrides: Sequence[str]) -> Run:
    """Load the settings of a run folder, with overrides, as a run that resumes there. Does not check it for problems.

    If the settings or overrides are invalid, raises ValueError with the message that `valkyrie-train` would print.
    Also raises ValueError for overrides that set `name` or `resume`, remove a setting, or have several values.
    """
    refuse_typos(overrides, multirun=False, in_python=True)
    hydra_arguments = read_arguments(overrides)
    if refused_keys := {"name", "resume"} & {split_override(override)[0] for override in hydra_arguments}:
        raise ValueError(
            f"{refused_keys.pop()}= cannot be passed to load, which continues the run in {folder}. To start another "
            "run, use valkyrie.compose(..., 'name=NAME')."
        )
    try:
        for override in OverridesParser.create().parse_overrides(split_flags(hydra_arguments)[1]):
            _refuse_deletion_or_sweep(override)
        return _compose(hydra_arguments, folder)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error) from error


def _compose(arguments: Sequence[str], folder: Path | None = None) -> Run:
    """Compose arguments in Hydra's syntax into a run, on top of the settings of `folder` if given.

    Does not catch the errors of Hydra and OmegaConf.
    """
    flags = split_flags(arguments)[0]
    if unknown_flags := [flag for flag in flags if flag.startswith("-") and flag.partition("=")[0] not in CONFIG_FLAGS]:
        raise ValueError(f"{unknown_flags[0]} is a flag of valkyrie-train. Only KEY=VALUE is supported here.")
    folders = config_dirs(flags)
    add_import_path(folders)
    primary_config = find_primary_config(arguments, folder=folder)
    with initialize_hydra(folders, primary_config.folder):
        with composition_errors(arguments):
            config = compose(primary_config.name, split_flags(primary_config.arguments)[1])
        return replace(Run.from_config(config), arguments=tuple(arguments))


def _refuse_deletion_or_sweep(override: Override) -> None:
    argument, key = override.input_line, override.key_or_group
    if override.is_delete():
        raise ValueError(
            f"{argument}: settings cannot be removed. Drop this argument to keep the saved value, or set {key}=VALUE."
        )
    if override.is_sweep_override():
        raise ValueError(f"{argument} has several values, but a run takes one. Write {key}=VALUE.")


def _quote_paths(value: str, multirun: bool) -> str:
    """Convert comma-separated paths to a Hydra list of quoted strings. Hydra's grammar rejects unquoted `~/a/*.txt`.

    Returns `value` unchanged if Hydra already parses it as a list, as null or, in a multirun, as several values.
    """
    try:
        override = OverridesParser.create().parse_override(f"data.paths={value}")
        if (
            (override.is_sweep_override() and multirun)
            or override.value() is None
            or isinstance(override.value(), list)
        ):
            return value
    except HydraException:
        pass
    paths = value.removeprefix("[").removesuffix("]").split(",")
    quoted_paths = (QuotedString(path.strip().strip("'\""), Quote.single).with_quotes() for path in paths)
    return f"[{','.join(quoted_paths)}]"


def _is_hydra_syntax(value: str, multirun: bool) -> bool:
    try:
        override = OverridesParser.create().parse_override(f"prompt={value}")
    except HydraException:
        return False
    if override.is_sweep_override() and multirun:
        return True
    return value.startswith(("'", '"')) or value.lower() == "null" or re.search(_ESCAPED_CHARACTER, value) is not None


def _find_chip(name: str, folders: Sequence[str]) -> ChipConfig | None:
    """Return a chip of the package or of the user by name, or None if unknown."""
    if name in known_chips() or not folders:
        return known_chips().get(name)
    with initialize_hydra(folders):
        return Chips().get(name)


def _slice_arguments(chip: str, units: int, chip_count: str | None, is_search: bool) -> list[str]:
    if chip_count is None:
        raise ValueError(f"target.chip={chip} needs a number of chips. Add target.chips=N, such as target.chips=8.")
    if not chip_count.isdecimal() or int(chip_count) < 1:
        raise ValueError(f"target.chips={chip_count}: must be a whole number, at least 1.")
    return [f"target={chip}-{int(chip_count) * units}", *(["mode.shapes=true"] if is_search else [])]
