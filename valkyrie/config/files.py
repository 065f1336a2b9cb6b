"""Checks the user's config files before Hydra reads them, and names the file at fault."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource  # Hydra's reader has no public name
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from valkyrie.paths import conf_dir, config_names, read_defaults
from valkyrie.problems import first_line

MOST_VALUES = 100_000
"""Maximum number of values in a config file after expanding aliases. The shipped files have fewer than 100."""
NAMED_GROUPS = ("model", "partition", "remat", "precision", "data", "optimizer", "mesh", "target", "target/chip")
"""Config groups whose `name` identifies the choice in records.

In the other groups, `name` selects a family or a mode, so several files share one.
"""

DefaultName = Callable[[str, str], str | None]
"""Function that returns the default `name` of a schema, given its group and its entry in a defaults list."""


class CheckedFiles(FileConfigSource):
    """Hydra's source of config files, with checks of each file."""

    default_name: DefaultName = staticmethod(lambda group, schema: None)

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a config. Raises ValueError with the path of the file if it is unreadable or has a shipped name."""
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file():
            check_file(path)
        try:
            result = super().load_config(config_path)
        except yaml.YAMLError as error:
            raise ValueError(yaml_error_text(path, error)) from None
        if isinstance(result.config, DictConfig) and Path(self.path) != conf_dir():
            refuse_shipped_name(path, path.parent.relative_to(self.path).as_posix(), self.default_name)
        return result


def use_checked_files(default_name: DefaultName) -> None:
    """Let Hydra read config files with `CheckedFiles`. Its registry has no method to replace a source."""
    CheckedFiles.default_name = staticmethod(default_name)
    SourcesRegistry.instance().types[CheckedFiles.scheme()] = CheckedFiles


def yaml_error_text(path: Path, error: yaml.YAMLError) -> str:
    """Return the message for a file that is not valid YAML: its path, the line and the cause."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return f"{path} is not valid YAML: {first_line(error)}."
    cause = "a tab; YAML indents with spaces" if r"'\t'" in problem else f"not valid YAML: {problem}"
    return f"{path}, line {mark.line + 1}: {cause}."


def refuse_shipped_name(path: Path, group: str, default_name: DefaultName) -> None:
    """Raise ValueError if a user's config of `NAMED_GROUPS` has the `name` of a shipped choice.

    Records would not distinguish the two. An identical copy of the shipped file is allowed.
    """
    if group not in NAMED_GROUPS:
        return
    name, is_own = _config_name(path, group, default_name)
    shipped = conf_dir() / group / f"{name}.yaml"
    if name is None or name == path.stem or (shipped.is_file() and shipped.read_bytes() == path.read_bytes()):
        return
    if name in config_names(group):
        verb = "has" if is_own else "inherits"
        raise ValueError(
            f"{path} {verb} name: {name}, but Valkyrie ships another {group} of that name. Write name: {path.stem}."
        )
    if group == "mesh" and not is_own and name == default_name(group, "mesh_schema"):
        raise ValueError(f"{path} has no name, so its runs would be named {name}. Write name: {path.stem}.")


def _config_name(path: Path, group: str, default_name: DefaultName) -> tuple[str | None, bool]:
    """Return the `name` of a config, and whether its own file sets it. None if it is unknown or an interpolation.

    Otherwise it is that of the last entry of the defaults list that has a name.
    """
    values = _read_mapping(path)
    if (name := values.get("name")) is not None:
        return (name if isinstance(name, str) and "${" not in name else None), True
    defaults = values.get("defaults")
    for entry in reversed(defaults if isinstance(defaults, list) else []):
        if not isinstance(entry, str) or entry == "_self_" or "@" in entry:
            continue
        if entry.endswith("_schema"):
            inherited = default_name(group, entry)
        else:
            bases = (folder / f"{entry}.yaml" for folder in (path.parent, conf_dir() / group))
            base = next((base for base in bases if base.is_file() and base != path), None)
            inherited = None if base is None else _config_name(base, group, default_name)[0]
        if inherited is not None:
            return inherited, False
    return None, False


def _read_mapping(path: Path) -> dict[Any, Any]:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.YAMLError:  # reported when Hydra loads it
        return {}
    return values if isinstance(values, dict) else {}


def check_file(path: Path) -> None:
    """Raise ValueError for a file that is not UTF-8, or has aliases that expand to too many values.

    Only a file that may have aliases is parsed, and rejected if it is not YAML. Hydra reports that for other files.
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
    if count > MOST_VALUES:
        size = "infinitely" if math.isinf(count) else f"to {count:,.0f} values"
        raise ValueError(f"{path}: its aliases (*NAME) expand {size}. At most {MOST_VALUES:,} values are allowed.")


def check_folder(folder: str) -> None:
    """Raise ValueError if `folder` cannot be the folder of `--config-dir`.

    It must exist, and must not have a file with the name of a shipped one, because Hydra would ignore that file.
    Identical copies of shipped files are allowed.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"--config-dir {folder} is not a folder.")
    shipped_files = conf_dir()
    for shipped in sorted([*shipped_files.glob("*/*.yaml"), *shipped_files.glob("*/*/*.yaml")]):
        path = shipped.relative_to(shipped_files)
        user_file = Path(folder) / path
        if user_file.is_file() and user_file.read_bytes() != shipped.read_bytes():
            group, name = path.parent.as_posix(), f"my_{path.stem}"
            named = f", set name: {name} in it" if group in NAMED_GROUPS else ""
            raise ValueError(
                f"{user_file} would be ignored, because {group}={path.stem} ships with Valkyrie. Rename your file to "
                f"{name}.yaml{named} and write {group}={name}."
            )


def find_inclusion_cycle(folders: Sequence[str], group: str, name: str) -> str | None:
    """Return the path of the config in `folders` that includes the choice `name` of a group again, or None.

    Starts at that choice, and follows the entries of its defaults list that are in the same group.
    """
    paths = {path.stem: path for folder in folders for path in Path(folder, group).glob("*.yaml")}
    names = [name]
    for current in names:
        for included in _included_configs(paths.get(current)):
            if included == name:
                return str(paths[current])
            if included in paths and included not in names:
                names.append(included)
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
