"""Rewrites errors of Hydra, OmegaConf and YAML as messages that name the argument at fault and a remedy."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from inspect import getsourcefile, isabstract
from os.path import exists, isdir, isfile, islink  # unlike those of Path, return False for a name that is too long
from pathlib import Path

import yaml
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)
from yaml import YAMLError

from valkyrie.config.compose import GROUPS, SCHEMAS
from valkyrie.config.refusals import LAYOUT_SWEEPER_KEYS, problem_from_error, unset_variable_text
from valkyrie.config.run import FAMILIES, RunConfig
from valkyrie.extensions import module_names
from valkyrie.foreign_errors import (
    ambiguous_argument,
    blocked_target,
    hydra_sweep_argument,
    list_valued_config,
    missing_group,
    missing_variable,
    needs_quotes,
    parse_abstract_class,
    scalar_valued_group,
    twice_chosen_group,
    unexpected_key,
    unmergeable_config,
)
from valkyrie.paths import read_defaults
from valkyrie.problems import Problem, ProblemError, first_line, format_alternatives, suggest
from valkyrie.trees import flatten

_OVERLAYS = ("experiment", "sweep")
"""Groups with YAMLs that set keys of other groups."""
_GROUPS = (*_OVERLAYS, *GROUPS)
_SCALAR_KEYS = {
    field.name: kind
    for field in fields(RunConfig)
    if (kind := {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(str(field.type).split()[0]))
}
"""Maps top-level keys that take a number or boolean to that type in words, such as `a whole number`.

Messages for these keys do not suggest quotes.
"""
_EXTRAS = {
    "hydra/launcher": {"joblib": "launchers", "submitit_local": "launchers", "submitit_slurm": "launchers"},
    "hydra/sweeper": {"optuna": "optuna"},
}
"""Extras of `pyproject.toml` that choices need, by group and choice."""
_HALF_PRECISION = ("bf16", "bf16_mixed")
_SYNONYMS: dict[str, dict[str, tuple[str, ...]]] = {
    "precision": {
        **dict.fromkeys(("bfloat16", "float16", "fp16", "f16", "half", "mixed"), _HALF_PRECISION),
        **dict.fromkeys(("fp32", "f32", "float", "full", "single"), ("float32",)),
        **dict.fromkeys(("float8", "float8_e4m3fn", "f8", "e4m3"), ("fp8",)),
    }
}
"""Choices to suggest for the names that other libraries use, by group."""


def explain(error: Exception, folders: Sequence[str] = ()) -> ValueError:
    """Convert an error of Hydra, OmegaConf or YAML to a ValueError: a ProblemError if it is about keys or their values.

    `folders` are the user's config folders.
    """
    if isinstance(error, ProblemError):
        return error
    problems_or_text = _rewrite(error, folders)
    return ValueError(problems_or_text) if isinstance(problems_or_text, str) else ProblemError(problems_or_text)


def unknown_choice_text(missing_file: str, options: Sequence[str], folders: Sequence[str]) -> str:
    """Return the message for a choice that does not exist. It names the mistake if known, or else the valid choices.

    Args:
        missing_file: The config that Hydra did not find, `GROUP/NAME` with or without `.yaml`.
        options: The valid choices of the group.
        folders: The user's config folders.
    """
    group, _, name = missing_file.removesuffix(".yaml").rpartition("/")
    if not group:
        return f"--config-name {name}: {name}.yaml was not found. Set --config-path to the folder that contains it."
    extra = _EXTRAS.get(group, {}).get(name)
    if extra:
        return f"{group}={name} needs the extra {extra}. Install it in your clone: uv sync --extra {extra}."
    top_group, _, subfolder = group.partition("/")
    if top_group == "data" and exists(path := f"{subfolder}/{name}" if subfolder else name):
        kind = "folder" if isdir(path) else "file"
        return f"data={path} is a {kind}, but a choice is a name. To train on your files: data=text data.paths=[{path}]"
    if top_group in ("experiment", "sweep") and subfolder in _GROUPS:
        return (
            f"{top_group} has no {subfolder}/{name}. In the defaults list of an experiment or sweep, write "
            f"'override /{subfolder}: {name}' instead of '{subfolder}: {name}'."
        )
    if top_group in _GROUPS and subfolder and group != "target/chip":
        path = Path(subfolder) / f"{name}.yaml"
        folder = path.parent.parent if path.parent.name == top_group else Path("FOLDER")
        return (
            f"{top_group}={path} is a path, but a choice is a name. To use {folder / top_group / name}.yaml, write "
            f"--config-dir {folder} {top_group}={name}."
        )
    if group in FAMILIES and name == f"{group}_schema":
        schemas = ", ".join(f"{family}_schema" for family in FAMILIES[group].names())
        return f"{group}/{name}: the schema depends on the family. Write one of {schemas} in `defaults:`."
    if group in FAMILIES and name.endswith("_schema"):
        return _missing_module_text(group, name, folders)
    yml_file = next((f for folder in folders if isfile(f := Path(folder) / group / f"{name}.yml")), None)
    if yml_file is not None:
        return f"{group}={name}: {yml_file} is not read, because its name ends in .yml. Rename it to {name}.yaml."
    for path in (Path(folder) / group / f"{name}{suffix}" for folder in folders for suffix in (".yaml", "")):
        if islink(path) and not exists(path):
            return f"{group}={name}: {path} is a link to {path.readlink()}, which does not exist."
        if isdir(path):
            return f"{group}={name}: {path} is a folder, but a choice is a file {name}.yaml."
    for folder in folders:
        if isfile(file := Path(folder) / f"{name}.yaml"):
            is_group_folder = Path(folder).name == group
            remedy = f"Use --config-dir {Path(folder).parent}." if is_group_folder else f"Move it to {folder}/{group}."
            return f"{group}={name}: {file} is not read. Files of {group} belong in {group}/ of --config-dir. {remedy}"
        for file in sorted(Path(folder).glob(f"*/{name}.yaml")):
            if file.parent.name not in _GROUPS and suggest(file.parent.name, [group]):
                return f"{group}={name}: {file} is not read. Rename the folder {file.parent.name} to {group}."
        for file in sorted(Path(folder).glob(f"*/{group}/{name}.yaml")):
            inner_folder = str(file).removesuffix(f"/{group}/{name}.yaml")
            return f"{group}={name}: {file} is not read. Use --config-dir {inner_folder}."
    completion = next((option for option in options if name and option.startswith(name)), None)
    nearest = suggest(name, options) or completion
    suggestions = _SYNONYMS.get(group, {}).get(name.lower()) or ((nearest,) if nearest else ())
    hint = f" Did you mean {format_alternatives(group, suggestions)}?" if suggestions else ""
    mesh_hint = " A mesh is written as its sizes, such as mesh=4x4x2 or mesh=2s4x4x2." if group == "mesh" else ""
    return f"{group}={name} is not a choice.{hint}{mesh_hint} Choices: {', '.join(options) or 'none'}."


def _rewrite(error: Exception, folders: Sequence[str]) -> list[Problem] | str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return unknown_choice_text(str(error.missing_cfg_file), list(error.options or ()), folders)
    if isinstance(error, OverrideParseException):
        return _unparsable_argument_text(error, folders)
    if isinstance(error, ConfigCompositionException) and (argument := ambiguous_argument(str(error))):
        key, _, value = argument.partition("=")
        quoted_value = value.replace('"', '\\"')
        remedy = "Add -m for a sweep over them, or, for one text with commas, add quotes: "
        remedy += shlex.quote(f'{key}="{quoted_value}"')
        return f"{argument} has several values, but a run takes one. {remedy}"
    if not isinstance(error, HydraException | OmegaConfBaseException | YAMLError):
        return str(error)
    resolver_error = _resolver_error(error)
    if resolver_error is not None:
        return str(resolver_error)
    cause = error.__cause__ or error.__context__
    if variable := missing_variable(f"{error} {cause}"):  # of a choice such as mesh=${oc.env:MESH}
        return f"${{oc.env:{variable}}}: {unset_variable_text(variable)}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return (
            _missing_package_line_text(cause.full_key) if cause.full_key in _OVERLAYS else [problem_from_error(cause)]
        )
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        config = unmergeable_config(str(error))
        return [problem_from_error(cause)] if config is None else _file_problems(cause, config, folders)
    if isinstance(error, HydraException) and (message := _user_file_error_text(str(error))):
        return message
    if blocked := blocked_target(str(error)):
        return f"{blocked[0]}._target_={blocked[1]}: a config must not call this function. Leave it out."
    if message := _missing_members_text(error):
        return message
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "https://" not in line]
    return "; ".join(lines) or type(error).__name__


def _file_problems(cause: OmegaConfBaseException, config: str, folders: Sequence[str]) -> list[Problem]:
    """Return a problem for each invalid value in the file of a config such as `partition/mine`.

    The first is `cause`, the error that OmegaConf raised.
    """
    file, group = _config_path(config, folders), config.rpartition("/")[0].replace("/", ".")
    root = cause.parent_node._get_root() if isinstance(cause.parent_node, DictConfig) else None
    problems = [problem_from_error(cause, file)]
    if not isinstance(root, DictConfig) or not str(cause.full_key).startswith(f"{group}.") or not isfile(file):
        return problems
    values = yaml.safe_load(Path(file).read_text())
    for key, value in flatten({key: values[key] for key in values if key != "defaults"}).items():
        leaf = OmegaConf.create()
        OmegaConf.update(leaf, f"{group}.{key}", value)
        try:
            root.merge_with(leaf)
        except OmegaConfBaseException as error:
            problems.append(problem_from_error(error, file))
    return list({problem.key: problem for problem in problems}.values())


def _config_path(config: str, folders: Sequence[str]) -> str:
    """Return the path of a config such as `experiment/mine` in the user's folders, or else `experiment/mine.yaml`."""
    files = (Path(folder) / f"{config}.yaml" for folder in folders)
    return str(next(filter(isfile, files), f"{config}.yaml"))


def _missing_module_text(group: str, schema: str, folders: Sequence[str]) -> str:
    """Return the message for a user's YAML that includes `NAME_schema` when there is no module `NAME`."""
    files = [file for folder in folders for file in sorted((Path(folder) / group).glob("*.yaml"))]
    file = next((file for file in files if schema in read_defaults(file)), None)
    name, folder = schema.removesuffix("_schema"), file.parent.parent if file else Path("FOLDER")
    try:
        FAMILIES[group].refuse_ignored_module(name)
    except ValueError as error:  # a module such as my-mode.py
        return str(error)
    nearest_name = suggest(name, [*(module_names(folder) if file else ()), *FAMILIES[group].names()])
    hint = f" Did you mean {nearest_name}_schema?" if nearest_name else ""
    return f"{file or group} needs {schema}, but there is no {folder / name}.py with a class Config.{hint}"


def _missing_package_line_text(overlay: str) -> str:
    """Return the message for an experiment or sweep file that lacks its first line, `# @package _global_`.

    `overlay` is the group (`experiment`), or the group and the name of the file (`experiment/mine`).
    """
    group, _, name = overlay.partition("/")
    file = f"{overlay}.yaml" if name else f"the file of {group}="
    return (
        f"{file} must begin with the line '# @package _global_'. Otherwise, Hydra reads the keys of the file as "
        f"{group}.KEY, and there are no such keys."
    )


def _user_file_error_text(message: str) -> str | None:
    """Return the message for a mistake in a user's YAML that Hydra reports, or None if it is not recognised."""
    if file_and_group := missing_group(message):
        file, group = file_and_group
        if (overlay := group.partition(".")[0]) in _OVERLAYS and overlay != group:
            return _missing_package_line_text(file)
        nearest_group = suggest(group, _GROUPS)
        hint = f" Did you mean {nearest_group}?" if nearest_group and nearest_group != group else ""
        if group in _GROUPS:
            return f"{file}.yaml: write 'override /{group}: NAME' in its defaults list, with the slash."
        groups = ", ".join(_GROUPS)
        return f"{file}.yaml: its defaults list overrides {group}, which is not a group.{hint} Groups: {groups}."
    if group := twice_chosen_group(message):
        return (
            f"{group} is chosen twice. In the defaults list of an experiment or sweep, write 'override /{group}: NAME' "
            f"instead of '/{group}: NAME'."
        )
    if config := list_valued_config(message):
        schema = SCHEMAS.get(config.partition("/")[0])
        keys = f" Keys: {', '.join(field.name for field in fields(schema))}." if schema else ""
        return f"{config}.yaml holds a list, but a config has keys. Write one KEY: VALUE per line.{keys}"
    if argument := hydra_sweep_argument(message):
        return f"{argument}: a sweep cannot vary Hydra's own settings. Vary keys of a run, such as seed=1,2."
    if unexpected_name := unexpected_key(message):
        if unexpected_name in LAYOUT_SWEEPER_KEYS:
            return (
                f"{unexpected_name} needs hydra/sweeper=layouts. Add it to the command, or add "
                "'- override /hydra/sweeper: layouts' to the defaults list of the sweep."
            )
        group = unexpected_name.rpartition(".")[0].replace(".", "/")
        return f"{unexpected_name}: the chosen {group} has no such key. Leave it out, or choose another {group}=."
    if file_and_value := scalar_valued_group(message):
        file, value = file_and_value
        return (
            f"{file}.yaml sets a group to the name {value}. Choose it in the defaults list instead: "
            f"defaults: ['override /GROUP: {value}']."
        )
    return None


def _missing_members_text(error: BaseException) -> str | None:
    """Return the message for a class in a user's module that lacks abstract methods of its base class, or None."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if not (name_and_members := parse_abstract_class(str(error))):
        return None
    name, members = name_and_members
    classes = [getattr(module, "__dict__", {}).get(name) for module in [*sys.modules.values()]]  # no lazy imports
    file = next((getsourcefile(c) for c in classes if isinstance(c, type) and isabstract(c)), None)
    return f"{file or 'a module'}: {name} has no {', '.join(f'`{member}`' for member in members)}."


def _unparsable_argument_text(error: OverrideParseException, folders: Sequence[str]) -> str:
    """Return the message for an argument that Hydra cannot parse. It states how to write the argument if known."""
    key, sign, value = error.override.partition("=")
    reason = first_line(error)
    if not sign:
        return f"{key if key.strip() else repr(key)} is not of the form KEY=VALUE. See valkyrie-train --help."
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) != value.count(closing):
            return f"{error.override}: {opening} and {closing} do not match."
    group = key.lstrip("+").partition(".")[0]
    if key in _GROUPS:
        files = (Path(folder) / key / f"{value.strip()}.yaml" for folder in folders)
        if file := next(filter(isfile, files), None):
            name = re.sub(r"[^\w.-]+", "_", value, flags=re.ASCII).strip("_") or "mine"
            return (
                f"{error.override}: the name of a choice has only letters a-z and A-Z, digits, _, - and ., without "
                f"spaces. Rename {file} to {name}.yaml and write {key}={name}."
            )
        return f"{error.override}: write one name, without spaces. valkyrie-train --help lists the choices of {group}."
    if key in _SCALAR_KEYS:
        return f"{error.override}: {key} takes {_SCALAR_KEYS[key]}. Write nothing else after =."
    if needs_quotes(reason) or " " in value:
        quoted_form = "['...']" if value.startswith("[") else "'...'"
        return f'{error.override} has characters that need quotes. Write {key}="{quoted_form}".'
    return f"{error.override} cannot be parsed as KEY=VALUE: {reason.partition(' expecting ')[0]}."


def _resolver_error(error: BaseException | None) -> ValueError | None:
    """Return the ValueError that one of our resolvers raised, found in the causes of `error`. None if there is none."""
    while error is not None:
        cause = error.__cause__ or error.__context__
        if isinstance(error, InterpolationResolutionError) and type(cause) is ValueError:
            return cause
        error = cause
    return None
