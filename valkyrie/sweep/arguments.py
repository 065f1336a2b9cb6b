"""The space of a multirun, read from the configuration and the arguments, and the runs of its shapes. No JAX."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from valkyrie.config.refusals import refusal_of, unknown_key
from valkyrie.sweep.composer import Composer
from valkyrie.sweep.space import SPACE, Shape, SpaceConfig

LAYOUT_KEYS = {
    "mesh": "meshes",
    "partition": "partitions",
    "microbatches": "microbatches",
    "remat": "remat",
    "mesh.placement": "placements",
}
"""Keys of the command line that take the place of a key of the space."""


@dataclass(frozen=True)
class Space:
    """The space of a multirun, and the overrides that every trial has beside its cell's."""

    config: SpaceConfig
    fixed: list[str]


def read_space(config: Mapping[str, Any] | DictConfig, arguments: Sequence[str], composer: Composer) -> Space:
    """Return the space of a configuration and the arguments of a multirun; ValueError in the words of these.

    An argument of a layout's key takes the place of the space's. Of another key, a list multiplies with the space, and
    takes the place of an equal key in `vary`; a single value is the same for all.
    """
    typed = OmegaConf.structured(SpaceConfig)
    try:
        typed = OmegaConf.merge(typed, config)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise ValueError(unknown_key(f"{SPACE}.{error.full_key}", error.parent_node)) from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{SPACE}.{refusal_of(error)}") from error
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
    return Space(space, fixed)


def shapes_of(space: Space, composer: Composer) -> list[Shape]:
    """Return every combination of what a space varies beside the layout, composed."""
    choices = [_choices(key, values, composer) for key, values in space.config.vary.items()]
    shapes = []
    for combination in itertools.product(*choices):
        overrides = tuple(itertools.chain.from_iterable(combination))
        try:
            shapes.append(Shape(overrides, composer.run([*space.fixed, *overrides])))
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
