"""Parses the arguments of a command or of the Python API and composes them into a run. Imports no JAX."""

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

from valkyrie.config.composing import composing
from valkyrie.config.explain import explain
from valkyrie.config.run import Run
from valkyrie.config.saved import CONFIG_FLAGS, CONFIG_PATH, config_dirs, primary_of
from valkyrie.config.shorthand import written_out
from valkyrie.extensions import add_import_path
from valkyrie.foreign_errors import is_key_of_null
from valkyrie.runs.folder import key_value, parts_of

_ESCAPED = r"\\[][(){}:=, \t\\]"
"""Regex of a character that is special in Hydra's grammar, escaped with a backslash."""


def read_arguments(arguments: Sequence[str], *, multirun: bool = False) -> list[str]:
    """Return the arguments in Hydra's syntax; ValueError for a mesh of one number.

    `multirun`: the arguments are of a sweep, where a key may have several values.
    """
    typed = _as_typed(_plain(written_out(arguments)), multirun)
    _refuse_unreadable_meshes(typed)
    return typed


@contextmanager
def refuses_keys_of_null(arguments: Sequence[str]) -> Iterator[None]:
    """Raise ValueError for an argument such as `target.chip.hbm_gib=9` where the target has no chip.

    OmegaConf raises an AssertionError for it that does not name the argument.
    """
    try:
        yield
    except AssertionError as error:
        if not is_key_of_null(str(error)):
            raise
        asked = next(a for a in arguments if "target.chip." in a or key_value(a)[0].count(".") > 1)
        parent = key_value(asked)[0].rpartition(".")[0]
        chip = " Name a target with a chip, such as target=v5e-8." if parent.startswith("target.chip") else ""
        raise ValueError(f"{asked}: there is no {parent} to set it in.{chip}") from error


def run_of(arguments: Sequence[str]) -> Run:
    """Return the unchecked run for these arguments; ValueError with the same message as the command."""
    try:
        return _composed(read_arguments(arguments))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, config_dirs(arguments)) from error


def run_in(folder: Path, overrides: Sequence[str]) -> Run:
    """Return the unchecked run that resumes in a run folder, with some keys overridden.

    Raises ValueError with the same message as the command.
    """
    typed = read_arguments(overrides)
    given = {key_value(override)[0] for override in typed}
    if refused := given & {"name", "resume"}:
        raise ValueError(
            f"{refused.pop()}= is not for load: it goes on with the run in {folder}. For another run, compose one: "
            "valkyrie.compose(..., 'name=NAME')."
        )
    try:
        for override in OverridesParser.create().parse_overrides(parts_of(typed)[1]):
            _refuse_what_sets_no_value(override)
        return _composed(typed, folder)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error) from error


def _composed(arguments: Sequence[str], folder: Path | None = None) -> Run:
    """Compose arguments in Hydra's syntax into a run, on top of the settings of `folder` if given.

    Does not catch the errors of Hydra and OmegaConf.
    """
    flags = parts_of(arguments)[0]
    if unknown := [flag for flag in flags if flag.startswith("-") and flag.partition("=")[0] not in CONFIG_FLAGS]:
        raise ValueError(f"{unknown[0]} is a flag of valkyrie-train: here only KEY=VALUE is read.")
    folders = config_dirs(flags)
    add_import_path(folders)
    primary = primary_of(arguments, folder=folder)
    with composing(folders, primary.folder):
        with refuses_keys_of_null(arguments):
            config = compose(primary.name, parts_of(primary.arguments)[1])
        return replace(Run.from_config(config), arguments=tuple(arguments))


def _refuse_what_sets_no_value(override: Override) -> None:
    line, key = override.input_line, override.key_or_group
    if override.is_delete():
        raise ValueError(f"{line} removes a key, which a run cannot do without. Write {key}=null, or leave it out.")
    if override.is_sweep_override():
        raise ValueError(f"{line} names several values, and a run has one. Write {key}=VALUE.")


def _plain(arguments: Sequence[str]) -> list[str]:
    """Accept two spellings that Hydra does not.

    `+experiment=` and `+sweep=` become `experiment=` and `sweep=`, because both are in use. The folder of
    `--config-path` is relative to the working directory, not to one of our source files.
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
    """Quote text values and the paths of `data.paths=`, so that Hydra reads them exactly as typed.

    Text values are `prompt=` and the two layouts of `mode=explain`. Hydra strips the blanks of unquoted text and
    rejects most punctuation. `null`, values already quoted or escaped for Hydra, and the list of prompts of a sweep
    are left unchanged. `${KEY}` is still interpolated.

    Also expands `~` in `runs=` and `resume=`.
    """
    typed = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") in ("prompt", "mode.first", "mode.second") and not _is_for_hydra(value, multirun):
            argument = f"{key}={QuotedString(value, Quote.single).with_quotes()}"
        elif key.lstrip("+") == "data.paths":
            argument = f"{key}={_list_of_paths(value, multirun)}"
        elif key in ("runs", "resume") and value.startswith("~"):  # shells do not expand ~ after =
            argument = f"{key}={os.path.expanduser(value)}"
        typed.append(argument)
    return typed


def _list_of_paths(value: str, multirun: bool) -> str:
    """Write paths as a Hydra list. Its grammar rejects `~/a/*.txt` and `[~/a/*.txt]`, so each path is quoted."""
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
