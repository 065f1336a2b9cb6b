"""Decides how a space is read from the configuration and the command line, and what its shapes compose to. No JAX."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.paths import conf_dir, read_group
from valkyrie.run import Run, unknown_key
from valkyrie.sweep.space import ALL, SPACE, Named, Shape, SpaceConfig

LAYOUT_KEYS = {
    "mesh": "meshes",
    "partition": "partitions",
    "microbatches": "microbatches",
    "remat": "remat",
    "mesh.placement": "placements",
}
"""Keys of the command line that take the place of a key of the space."""


def changes_layouts(key: str) -> bool:
    """Return whether a key may change what is in a mesh or a partition beside its name."""
    return key.startswith(("mesh.", "partition.")) or key == "experiment"


@dataclass(frozen=True)
class Asked:
    """What a multirun asks for: a space, and the overrides that every trial has beside its cell's."""

    space: SpaceConfig
    fixed: list[str]


@dataclass
class Composer:
    """Composes runs as the jobs of a multirun are composed; each choice of groups once."""

    config: DictConfig
    loader: ConfigLoader
    _composed: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)
    _options: dict[str, list[str]] = field(default_factory=dict)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Return overrides as Hydra reads them."""
        return OverridesParser.create(config_loader=self.loader).parse_overrides(list(overrides))

    def options(self, group: str) -> list[str]:
        """Return the choices of a group, those of a user's folder among them; none for what is no group."""
        if group not in self._options:
            self._options[group] = self.loader.get_group_options(group)
        return self._options[group]

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration of a job with these overrides."""
        return self.loader.load_sweep_config(self.config, list(overrides))

    def run(self, fixed: Sequence[str], varied: Sequence[str]) -> Run:
        """Return the run of a job; values are set on what their groups have composed to, which takes milliseconds."""
        parsed = self.parse(varied)
        groups = [o.input_line or "" for o in parsed if self.options(o.key_or_group)]
        values = [o for o in parsed if not self.options(o.key_or_group)]
        key = (*groups, *(o.key_or_group for o in values))
        if key not in self._composed:
            # The first of its kind is composed by Hydra with its values too, which refuses a key that is none.
            composed = self.compose([*fixed, *varied])
            self._composed[key] = OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"])
        config = copy.deepcopy(self._composed[key])
        for override in values:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=override.is_add())
        return Run.from_config(config)

    def partitions(self, names: Sequence[str], asked: Sequence[str]) -> list[Named[PartitionConfig]]:
        """Return partitions by name; `all` are those of the group.

        Those that ship with the package and are not overridden are read as they stand, which takes milliseconds.
        """
        found = dict.fromkeys(n for name in names for n in (self.options("partition") if name == ALL else [name]))
        main = any(source.provider == "main" and source.path == str(conf_dir()) for source in self.loader.get_sources())
        as_shipped = main and not any(changes_layouts(o.key_or_group) for o in self.parse(asked))
        shipped = {p.name: p for p, _ in read_group("partition", PartitionConfig)} if as_shipped else {}
        return [
            Named(
                name, shipped.get(name) or Run.from_config(self.compose([*asked, f"partition={name}"])).config.partition
            )
            for name in found
        ]

    def mesh(self, name: str, asked: Sequence[str]) -> MeshConfig:
        """Return the mesh of a name: sizes, or a choice of the group."""
        if name[:1].isdigit() and name not in self.options("mesh"):
            return parse_mesh(name)
        return Run.from_config(self.compose([*asked, f"mesh={name}"])).config.mesh


def read_asked(given: Mapping[str, Any] | DictConfig, arguments: Sequence[str], composer: Composer) -> Asked:
    """Return the space that a configuration and the arguments of a multirun ask for; ValueError in their words.

    An argument of a layout's key takes the place of the space's. Of another key, a list multiplies with the space, and
    takes the place of an equal key in `vary`; a single value is fixed for all.
    """
    typed = OmegaConf.structured(SpaceConfig)
    try:
        typed = OmegaConf.merge(typed, given)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise ValueError(unknown_key(f"{SPACE}.{error.full_key}", error.parent_node)) from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{SPACE}.{error.full_key}: {str(error).splitlines()[0].rstrip('.')}.") from error
    vary: dict[str, Any] = {
        str(k): OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for k, v in typed.vary.items()
    }
    fixed: list[str] = []
    for override in composer.parse(arguments):
        key, line = override.key_or_group, override.input_line or ""
        values = _values(override)
        if key in LAYOUT_KEYS:
            _set(typed, key, values)
            continue
        together = [joined for joined in vary if key in joined.split(",") and joined != key]
        if together:
            raise ValueError(
                f"{line}: this sweep varies {together[0]} together. Give '{SPACE}.vary' of your own, or leave it out."
            )
        if override.is_sweep_override():
            vary.pop(key, None)
            vary[override.get_key_element()] = [_Written(value) for value in values]
        else:
            vary.pop(key, None)
            fixed.append(line)
    wrong = [k for joined in vary for k in joined.split(",") if k in LAYOUT_KEYS]
    if wrong:
        raise ValueError(f"{SPACE}.vary.{wrong[0]}: a layout's own key. Write {SPACE}.{LAYOUT_KEYS[wrong[0]]}.")
    typed.vary = {}
    space = OmegaConf.to_object(typed)
    assert isinstance(space, SpaceConfig)
    space.vary = vary
    return Asked(space, fixed)


def shapes_of(asked: Asked, composer: Composer) -> list[Shape]:
    """Return every combination of what a space varies beside the layout, composed."""
    choices = [_choices(key, values, composer) for key, values in asked.space.vary.items()]
    shapes = []
    for combination in itertools.product(*choices):
        overrides = tuple(itertools.chain.from_iterable(combination))
        try:
            shapes.append(Shape(overrides, composer.run(asked.fixed, overrides)))
        except (ValueError, OmegaConfBaseException) as error:
            if not overrides:
                raise
            raise ValueError(f"{' '.join(overrides)}: {error}") from error
    return shapes


class _Written(str):
    """A value as the command line has it, quoted where it has to be."""


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not override.is_discrete_sweep():
        raise ValueError(
            f"{override.input_line}: a space is made of single values. Write a list (a,b) or range(a,b), or take "
            "hydra/sweeper=optuna for an interval."
        )
    return list(override.sweep_string_iterator())


def _set(space: Any, key: str, values: Sequence[str]) -> None:
    name = LAYOUT_KEYS[key]
    plain = [re.sub(r"\\(.)", r"\1", value) for value in values]  # Hydra writes x:2 as x\:2
    plain = ["default" if name == "placements" and v == "null" else v.strip("[]") for v in plain]
    try:
        OmegaConf.update(space, name, plain, merge=False)
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}={','.join(values)}: {str(error).splitlines()[0].rstrip('.')}.") from error


def _choices(key: str, values: Any, composer: Composer) -> list[tuple[str, ...]]:
    """Return what a key of `vary` may be, as overrides; keys joined by commas vary together."""
    keys = key.split(",")
    if len(keys) == 1 and isinstance(values, str | int | float):
        (override,) = composer.parse([f"{key}={values}"])
        return [(f"{key}={value}",) for value in _values(override)]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{SPACE}.vary.{key}={values}: name at least one value, as [512,1024].")
    if len(keys) == 1:
        return [(f"{key}={_text(value)}",) for value in values]
    uneven = [row for row in values if not isinstance(row, list) or len(row) != len(keys)]
    if uneven:
        raise ValueError(f"{SPACE}.vary.{key}: {uneven[0]} is no value for each of {', '.join(keys)}.")
    return [tuple(f"{k}={_text(value)}" for k, value in zip(keys, row, strict=True)) for row in values]


def _text(value: Any) -> str:
    """Return a value as the command line has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(_text(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, str) and not isinstance(value, _Written):
        return value if _PLAIN.fullmatch(value) else QuotedString(value, Quote.single).with_quotes()
    return str(value)


_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
"""A text that Hydra reads as itself without quotes."""
