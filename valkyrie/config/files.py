"""Checks the user's config files when Hydra loads them. Errors name the file at fault."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource  # Hydra's reader has no public name
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from valkyrie.config.run import FAMILIES
from valkyrie.extensions import Families, module_names
from valkyrie.paths import conf_dir, config_names, read_defaults
from valkyrie.problems import first_line, suggest

MAX_VALUES = 100_000
"""Maximum number of values in a config file after expanding aliases. The shipped files have fewer than 100."""
NAMED_GROUPS = ("model", "partition", "remat", "precision", "data", "optimizer", "mesh", "target", "target/chip")
"""Config groups whose `name` identifies the choice in records.

In the other groups, `name` selects a family or a mode, so several files share one.
"""


class CheckedFiles(FileConfigSource):
    """Hydra's source for config files, which also checks each file that it loads."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        self._included_files: set[Path] = set()
        """Files that a loaded file includes from its own group, and that are not loaded yet."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a config.

        Raises ValueError with the path of the file if it is not valid YAML or fails `check_file`. A user's file must
        also pass `check_name`, `check_schema`, `check_defaults_order` and `check_family`. Skips the first two for a
        file that another file of its group includes. Hydra loads the including file first.
        """
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file():
            check_file(path)
        try:
            result = super().load_config(config_path)
        except yaml.YAMLError as error:
            raise ValueError(yaml_error_text(path, error)) from None
        if isinstance(result.config, DictConfig) and Path(self.path) != conf_dir():
            values = OmegaConf.to_container(result.config, resolve=False)
            assert isinstance(values, dict)
            group = path.parent.relative_to(self.path).as_posix()
            defaults = values.get("defaults")
            defaults = defaults if isinstance(defaults, list) else []
            if path not in self._included_files:
                check_name(path, group, values.get("name"))
                if group in FAMILIES:
                    check_schema(path, FAMILIES[group], defaults, values)
            self._included_files.discard(path)  # the next composition may choose it by name
            check_defaults_order(path, group, defaults)
            entries = [entry for entry in defaults if isinstance(entry, str)]
            if group in FAMILIES:
                check_family(path, FAMILIES[group], entries, values)
            self._included_files |= {
                path.with_name(f"{entry}.yaml") for entry in entries if not re.search("[/@]", entry)
            }
        return result


# Hydra's joblib and submitit workers get a copy of the registry and register their plugins again. The registry then
# compares class names, and raises ValueError where they differ.
CheckedFiles.__name__ = FileConfigSource.__name__


def use_checked_files() -> None:
    """Let Hydra read config files with `CheckedFiles`."""
    # The registry has no public method to replace a source.
    SourcesRegistry.instance().types[CheckedFiles.scheme()] = CheckedFiles


def yaml_error_text(path: Path, error: yaml.YAMLError) -> str:
    """Return the message for a file that is not valid YAML: its path, the line and the cause."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return f"{path} is not valid YAML: {first_line(error)}."
    cause = "a tab; YAML indents with spaces" if r"'\t'" in problem else f"not valid YAML: {problem}"
    return f"{path}, line {mark.line + 1}: {cause}."


def check_name(path: Path, group: str, name: object) -> None:
    """Raise ValueError if a user's config in `NAMED_GROUPS` has no `name`, or one that differs from its file's name.

    Records and messages identify configs by this name. Identical copies of shipped files are allowed. `CheckedFiles`
    does not check files that only other files of their group include.
    """
    if group not in NAMED_GROUPS or name == path.stem:
        return
    if name is None:
        raise ValueError(f"{path} has no name. Write name: {path.stem}.")
    shipped_file = conf_dir() / group / f"{name}.yaml"
    if shipped_file.is_file() and shipped_file.read_bytes() == path.read_bytes():
        return
    reason = f", but Valkyrie ships another {group} of that name" if name in config_names(group) else ""
    raise ValueError(f"{path} has name: {name}{reason}. Write name: {path.stem}.")


def check_schema(path: Path, families: Families, defaults: Sequence[object], values: Mapping[Any, object]) -> None:
    """Raise ValueError if the defaults list of a user's config has neither a schema nor another config.

    The message suggests the schema of the family that the file sets, or of the module with the most similar name, or
    else lists the modules.
    `CheckedFiles` does not check files that only other files of their group include.
    """
    if any(entry != "_self_" for entry in defaults):
        return
    names = [*module_names(path.parent.parent), *families.names()]
    family = values.get(families.field_name) or suggest(path.stem, names)
    choices = "" if family else f" NAME is one of {', '.join(names)}."
    remedy = f"Begin it with defaults: [{family or 'NAME'}_schema, _self_].{choices}"
    raise ValueError(f"{path} includes no schema. {remedy}")


def check_defaults_order(path: Path, group: str, defaults: Sequence[object]) -> None:
    """Raise ValueError if the defaults list of a user's config has `_self_` before a schema or a shipped config.

    Only shipped configs of the same group count, and only in `NAMED_GROUPS`. Entries after `_self_` replace the values
    of the file. Before Hydra 1.1, `_self_` came first by default.
    """
    if "_self_" not in defaults:
        return
    shipped_names = config_names(group) if group in NAMED_GROUPS else []
    for entry in defaults[defaults.index("_self_") :]:
        if entry in shipped_names or str(entry).partition("@")[0].endswith("_schema"):
            ordered = [*(other for other in defaults if other != "_self_"), "_self_"]
            remedy = yaml.safe_dump({"defaults": ordered}, default_flow_style=None, width=math.inf).strip()
            raise ValueError(
                f"{path}: defaults has _self_ before {entry}, whose values would replace those of this file. "
                f"Write {remedy}."
            )


def check_family(path: Path, families: Families, entries: Sequence[str], values: Mapping[Any, object]) -> None:
    """Raise ValueError if a user's config lists `NAME_schema` in its defaults but selects a family other than NAME.

    Also raises ValueError if the module NAME exists but has no usable `Config`. Hydra reports a missing module.
    """
    key = families.field_name
    for name in (entry.removesuffix("_schema") for entry in entries if entry.endswith("_schema")):
        family = values.get(key, getattr(families.config_class(name), key, None) if name in families else name)
        if family != name:
            fact = f"has {key}: {family}" if key in values else f"does not set {key}"
            raise ValueError(f"{path} {fact}, but {name}_schema is the Config of {name}.py. Write {key}: {name}.")


def check_file(path: Path) -> None:
    """Raise ValueError if a file is not UTF-8, has a byte order mark, or expands to more than `MAX_VALUES` values.

    Parses the file only if it may have aliases, and then also raises ValueError for invalid YAML. For other files,
    Hydra reports invalid YAML itself.
    """
    body = path.read_bytes()
    if body.startswith(codecs.BOM_UTF8):
        raise ValueError(f"{path} starts with a byte order mark. Save it as UTF-8 without one.")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}, is not UTF-8. Save it as UTF-8.") from None
    if "&" not in text or "*" not in text:
        return
    try:
        count = _count_values(yaml.compose(text, yaml.SafeLoader), {})
    except yaml.YAMLError as error:
        raise ValueError(yaml_error_text(path, error)) from None
    if count > MAX_VALUES:
        size = "infinitely" if math.isinf(count) else f"to {count:,.0f} values"
        raise ValueError(f"{path}: its aliases (*NAME) expand {size}. At most {MAX_VALUES:,} values are allowed.")


def check_folder(folder: str) -> None:
    """Raise ValueError if `folder` cannot be used with `--config-dir`.

    The folder must exist. None of its files may have the group and name of a shipped file, because Hydra would read the
    shipped file instead. Identical copies are allowed.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"--config-dir {folder} is not a folder.")
    conf_folder = conf_dir()
    for shipped_file in sorted([*conf_folder.glob("*/*.yaml"), *conf_folder.glob("*/*/*.yaml")]):
        path = shipped_file.relative_to(conf_folder)
        user_file = Path(folder) / path
        if user_file.is_file() and user_file.read_bytes() != shipped_file.read_bytes():
            group, name = path.parent.as_posix(), f"my_{path.stem}"
            name_hint = f", set name: {name} in it" if group in NAMED_GROUPS else ""
            raise ValueError(
                f"{user_file} would be ignored, because {group}={path.stem} ships with Valkyrie. Rename your file to "
                f"{name}.yaml{name_hint} and write {group}={name}."
            )


def find_inclusion_cycle(folders: Sequence[str], group: str, name: str) -> str | None:
    """Return the path of the config file that closes an inclusion cycle through `group/name`, or None if there is none.

    Follows the entries of defaults lists that are in the same group.
    """
    paths = {path.stem: path for folder in folders for path in Path(folder, group).glob("*.yaml")}
    names = [name]
    for current_name in names:
        for included_name in _included_configs(paths.get(current_name)):
            if included_name == name:
                return str(paths[current_name])
            if included_name in paths and included_name not in names:
                names.append(included_name)
    return None


def _included_configs(path: Path | None) -> Iterator[str]:
    yield from (entry for entry in ([] if path is None else read_defaults(path)) if isinstance(entry, str))


def _count_values(node: yaml.Node | None, counts: dict[int, float]) -> float:
    """Return the number of values of a node with its aliases expanded, infinite if it contains itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf  # the value of an alias inside the node itself
        children = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
        pairs = ([child] if isinstance(child, yaml.Node) else child for child in children)
        counts[id(node)] = 1.0 + sum(_count_values(value, counts) for values in pairs for value in values)
    return counts[id(node)]
