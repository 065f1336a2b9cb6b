"""The arguments of a command, or of the Python API: read as they were typed, and composed to a run. Imports no JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.compose import SCHEMAS, explain, register
from valkyrie.models import let_import
from valkyrie.run import Run
from valkyrie.train.composed import (
    CONFIG_FLAGS,
    CONFIG_PATH,
    composed_file,
    config_dirs,
    config_name,
    config_path,
    refuse_choices,
)
from valkyrie.train.folder import (
    COMMAND,
    RUN,
    key_value,
    parts_of,
    resumed_arguments,
    saved_command,
    saved_config,
    with_saved,
)

_ESCAPED = r"\\[][(){}:=, \t\\]"
"""A sign that Hydra's grammar would read, behind the backslash that keeps it from that."""
_CHOICES = {"model", "experiment", "sweep", *SCHEMAS}
"""The keys whose value is the name of a configuration, not a value of their own."""


def read_arguments(arguments: Sequence[str], *, multirun: bool = False, composed: bool = False) -> list[str]:
    """Return the arguments as Hydra takes them, after those of the run that `resume=` names.

    `multirun`: they are a sweep's, which has joined them with those of a run itself. `composed`: they name a
    configuration that is composed already. ValueError for a mesh of one number, and where there is no such run.
    """
    typed = _as_typed(_plain(arguments), multirun)
    _refuse_unreadable_meshes(typed)
    return typed if multirun or composed else resumed_arguments(typed)


def run_of(arguments: Sequence[str]) -> Run:
    """Return the run that the command makes of these arguments, unchecked; ValueError as the command words it."""
    try:
        return _composed(read_arguments(arguments, composed=composed_file(arguments) is not None))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(explain(error)) from error


def run_in(folder: Path, overrides: Sequence[str]) -> Run:
    """Return the run of a run folder with other values of some keys, unchecked, set to go on in that folder.

    Its settings are those of `run.yaml`; where a group is chosen anew, those that its saved command composes to with
    that choice. ValueError as the command words it.
    """
    config, typed = saved_config(folder), read_arguments(overrides, composed=True)
    given = {key_value(override)[0] for override in typed}
    if refused := given & {"name", "resume"}:
        raise ValueError(
            f"{refused.pop()}= is not for load: it goes on with the run in {folder}. For another run, compose one: "
            "valkyrie.compose(..., 'name=NAME')."
        )
    try:
        parsed = OverridesParser.create().parse_overrides(typed)
        for override in parsed:
            _refuse_what_sets_no_value(override)
        chosen = [str(o.input_line) for o in parsed if o.key_or_group in _CHOICES or "/" in o.key_or_group]
        command = _command_of(folder, chosen)
        resume = f"resume={QuotedString(str(folder), Quote.single).with_quotes()}"
        if chosen:
            return _composed(with_saved(command, [*typed, resume]))
        config = OmegaConf.merge(config, {"resume": str(folder), "name": None, "mode": {"name": "train"}})
        for override in parsed:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
        assert isinstance(config, DictConfig)
        return replace(Run.from_config(config), arguments=tuple(with_saved(command, typed)))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(explain(error)) from error


def _composed(arguments: Sequence[str]) -> Run:
    """Return the run of arguments as Hydra takes them; what Hydra and OmegaConf raise is not caught."""
    flags, overrides = parts_of(arguments)
    if unknown := [flag for flag in flags if flag.startswith("-") and flag.partition("=")[0] not in CONFIG_FLAGS]:
        raise ValueError(f"{unknown[0]} is a flag of valkyrie-train: here only KEY=VALUE is read.")
    folders = config_dirs(flags)
    let_import(folders)
    with initialize_config_dir(config_path(flags) or str(register()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        for folder in folders:
            if not Path(folder).is_dir():
                raise ValueError(f"--config-dir {folder} is not a folder.")
            loader.config_search_path.prepend(
                "command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema")
            )
        loader.repository.initialize_sources(loader.config_search_path)
        config = compose(config_name(flags), overrides)
        refuse_choices(config, composed_file(flags))
        return replace(Run.from_config(config), arguments=tuple(arguments))


def _command_of(folder: Path, chosen: Sequence[str]) -> list[str]:
    """Return the arguments that make the run of a folder: its saved command, or where that is damaged its `run.yaml`.

    ValueError where groups are chosen anew, for which only a saved command will do, and there is none.
    """
    if chosen and not (folder / COMMAND).is_file():
        raise ValueError(
            f"{folder} has no {COMMAND}, so groups cannot be chosen anew ({', '.join(chosen)}). Write "
            f"{chosen[0].partition('=')[0]}.KEY=VALUE, or compose the run: valkyrie.compose(...)."
        )
    try:
        return saved_command(folder)
    except ValueError:
        if chosen:
            raise
        return ["--config-path", str(folder.resolve()), "--config-name", Path(RUN).stem]


def _refuse_what_sets_no_value(override: Override) -> None:
    line, key = override.input_line, override.key_or_group
    if override.is_delete():
        raise ValueError(f"{line} removes a key, which a run cannot do without. Write {key}=null, or leave it out.")
    if override.is_sweep_override():
        raise ValueError(f"{line} names several values, and a run has one. Write {key}=VALUE.")


def _plain(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra wants them.

    `+experiment=` and `+sweep=` become `experiment=` and `sweep=`: both ways are in use. A folder given by
    `--config-path` is looked for here, not beside a file of ours.
    """
    plain = [a[1:] if a.startswith(("+experiment=", "+sweep=")) else a for a in arguments]
    for i, argument in enumerate(plain):
        flag, joined, folder = argument.partition("=")
        if flag not in CONFIG_PATH:
            continue
        if joined:
            plain[i] = f"{flag}={os.path.abspath(folder)}"
        elif i + 1 < len(plain):
            plain[i + 1] = os.path.abspath(plain[i + 1])
    return plain


def _as_typed(arguments: Sequence[str], multirun: bool) -> list[str]:
    """Return the arguments with `prompt=` and the paths of `data.paths=` in quotes, so that Hydra takes them as typed.

    Unquoted, Hydra strips its blanks and refuses most signs. `null`, what is quoted or escaped for Hydra already, and
    in a multirun the several prompts of a sweep, stay as they are. `${KEY}` means in it what it does in any value.
    """
    typed = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "prompt" and not _is_for_hydra(value, multirun):
            argument = f"{key}={QuotedString(value, Quote.single).with_quotes()}"
        elif key.lstrip("+") == "data.paths":
            argument = f"{key}={_list_of_paths(value, multirun)}"
        typed.append(argument)
    return typed


def _list_of_paths(value: str, multirun: bool) -> str:
    """Return paths as a list of Hydra's: `~/a/*.txt` or `[~/a/*.txt]`, which its grammar refuses, become one."""
    try:
        read = OverridesParser.create().parse_override(f"data.paths={value}")
        if (read.is_sweep_override() and multirun) or read.value() is None or isinstance(read.value(), list):
            return value
    except HydraException:
        pass
    paths = value.removeprefix("[").removesuffix("]").split(",")
    quoted = (QuotedString(path.strip().strip("'\""), Quote.single).with_quotes() for path in paths)
    return f"[{','.join(quoted)}]"


def _is_for_hydra(value: str, multirun: bool) -> bool:
    try:
        read = OverridesParser.create().parse_override(f"prompt={value}")
    except HydraException:
        return False
    if read.is_sweep_override() and multirun:
        return True
    return value.startswith(("'", '"')) or value.lower() == "null" or re.search(_ESCAPED, value) is not None


def _refuse_unreadable_meshes(arguments: Sequence[str]) -> None:
    for argument in arguments:
        match = re.fullmatch(r"mesh=(\d+)", argument)
        if match:
            raise ValueError(
                f"mesh={match[1]} has 1 axis; a mesh has three (x, y, z) or four (w, x, y, z). "
                f"Write mesh={match[1]}x1x1."
            )
