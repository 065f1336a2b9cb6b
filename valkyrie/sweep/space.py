"""Spaces of layouts and models, read from the configuration and arguments of a multirun. No JAX."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from valkyrie.config.refusals import problem_from_error, unknown_key
from valkyrie.config.run import Run
from valkyrie.problems import Problem, ProblemCode, ProblemError, check_range, first_line
from valkyrie.sweep.composer import Composer
from valkyrie.trees import override_text

ALL, DEFAULT = "all", "default"
"""Words of a space: all partitions or placements, and the placement of a mesh that names none."""
SPACE = "hydra.sweeper.space"
"""The key of the space on the command line."""
LAYOUT_KEYS = {
    "mesh": "meshes",
    "partition": "partitions",
    "microbatches": "microbatches",
    "remat": "remat",
    "mesh.placement": "placements",
}
"""Keys of the command line that replace a key of the space."""


class Same(Enum):
    """How duplicate meshes of a partition are removed.

    `none`: each mesh is a cell. `sharding`: meshes are equal if every device holds the same part of every array, so
    that the same step is compiled. `roles`: meshes are equal if every role has the same number of devices.
    """

    none = "none"
    sharding = "sharding"
    roles = "roles"


@dataclass
class SpaceConfig:
    """The space of `hydra/sweeper=layouts`. `conf/hydra/sweeper/layouts.yaml` explains each key with an example.

    `meshes`: sizes joined by x, with letters for every factorisation of the devices (`AxBxC`, `2sAxBxC`).
    `devices`: for those; null takes the target's, or the mesh's if the target is `auto`. `partitions`: names, or
    `all`. `microbatches`, `remat`: null leaves them as they are. `placements`: `default`, `all`, or lists such as
    `z,x,y`. `vary`: further keys or groups, with a list of values or a text as on the command line (`512,1024`); keys
    joined by commas vary together. `parameters`, `flops_per_token` (forward): the range of a model, null for no bound.
    """

    meshes: list[str] = field(default_factory=lambda: ["AxBxC"])
    devices: int | None = None
    partitions: list[str] = field(default_factory=lambda: [ALL])
    microbatches: list[int] | None = None
    remat: list[str] | None = None
    placements: list[str] = field(default_factory=lambda: [DEFAULT])
    vary: dict[str, Any] = field(default_factory=dict)
    parameters: list[float | None] | None = None
    flops_per_token: list[float | None] | None = None
    same: Same = Same.sharding

    def problems(self) -> list[Problem]:
        """Return all problems of these settings."""
        problems = []
        for name in LAYOUT_KEYS.values():
            if getattr(self, name) == []:
                text = f"{SPACE}.{name}=[] leaves no cell: name at least one."
                problems.append(Problem(ProblemCode.missing, f"{SPACE}.{name}", [], text))
        problems += check_range(f"{SPACE}.devices", self.devices, least=1)
        for key in ("parameters", "flops_per_token"):
            bounds: list[float | None] = getattr(self, key) or [None, None]
            numbers = [bound for bound in bounds if bound is not None]
            if len(bounds) != 2 or numbers != sorted(numbers):
                text = ",".join("null" if bound is None else f"{bound:g}" for bound in bounds)
                text = f"{SPACE}.{key}=[{text}] is no range: write [least, most], with null for no bound."
                problems.append(Problem(ProblemCode.malformed, f"{SPACE}.{key}", bounds, text))
        return problems


@dataclass(frozen=True)
class SweepSpace:
    """The space of a multirun, and the overrides that all of its trials share."""

    config: SpaceConfig
    fixed: list[str]


@dataclass(frozen=True)
class ModelVariant:
    """One combination of the settings outside the layout, with its overrides and composed run."""

    overrides: tuple[str, ...]
    run: Run


def read_space(config: Mapping[str, Any] | DictConfig, arguments: Sequence[str], composer: Composer) -> SweepSpace:
    """Read the space from a configuration and the arguments of a multirun. Raises ValueError with a remedy.

    An argument with a key of the layout replaces that key of the space. A list for another key multiplies the space,
    and replaces an equal key in `vary`. A single value is the same for all trials.
    """
    typed = OmegaConf.structured(SpaceConfig)
    try:
        typed = OmegaConf.merge(typed, config)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise ProblemError([unknown_key(f"{SPACE}.{error.full_key}", error.parent_node)]) from error
    except OmegaConfBaseException as error:
        raise ValueError(f"{SPACE}.{problem_from_error(error)}") from error
    vary: dict[str, object] = {
        str(k): OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for k, v in typed.vary.items()
    }
    fixed: list[str] = []
    for override in composer.parse(arguments):
        key, line = override.key_or_group, override.input_line or ""
        values = _values(override)
        if key in LAYOUT_KEYS:
            _set(typed, key, values)
            continue
        if together := [joined for joined in vary if key in joined.split(",") and joined != key]:
            raise ValueError(
                f"{line}: this sweep varies {together[0]} together. Give '{SPACE}.vary' of your own, or leave it out."
            )
        vary.pop(key, None)
        if override.is_sweep_override():
            vary[override.get_key_element()] = [_Written(value) for value in values]
        else:
            fixed.append(line)
    if wrong := [k for joined in vary for k in joined.split(",") if k in LAYOUT_KEYS]:
        raise ValueError(f"{SPACE}.vary.{wrong[0]}: a layout's own key. Write {SPACE}.{LAYOUT_KEYS[wrong[0]]}.")
    typed.vary = {}
    space = OmegaConf.to_object(typed)
    assert isinstance(space, SpaceConfig)
    space.vary = vary
    return SweepSpace(space, fixed)


def compose_variants(space: SweepSpace, composer: Composer) -> list[ModelVariant]:
    """Compose every combination of the settings that a space varies in addition to the layout."""
    choices = [_choices(key, values, composer) for key, values in space.config.vary.items()]
    variants = []
    for combination in itertools.product(*choices):
        overrides = tuple(itertools.chain.from_iterable(combination))
        try:
            variants.append(ModelVariant(overrides, composer.run([*space.fixed, *overrides])))
        except (ValueError, OmegaConfBaseException) as error:
            if not overrides:
                raise
            raise ValueError(f"{' '.join(overrides)}: {error}") from error
    return variants


class _Written(str):
    """A value in the grammar of the command line, quoted if necessary."""


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
    plain = [DEFAULT if name == "placements" and v == "null" else v.strip("[]") for v in plain]
    try:
        OmegaConf.update(space, name, plain, merge=False)
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}={','.join(values)}: {first_line(error).rstrip('.')}.") from error


def _choices(key: str, values: Any, composer: Composer) -> list[tuple[str, ...]]:
    """Return the overrides for each value of a key of `vary`; keys joined by commas vary together."""
    keys = key.split(",")
    if len(keys) == 1 and isinstance(values, str | int | float):
        (override,) = composer.parse([f"{key}={values}"])
        return [(f"{key}={value}",) for value in _values(override)]
    if not isinstance(values, list) or not values:
        raise ValueError(f"{SPACE}.vary.{key}={values}: name at least one value, as [512,1024].")
    rows = [[value] for value in values] if len(keys) == 1 else values
    if uneven := [row for row in rows if not isinstance(row, list) or len(row) != len(keys)]:
        raise ValueError(f"{SPACE}.vary.{key}: {uneven[0]} is no value for each of {', '.join(keys)}.")
    return [tuple(f"{k}={_text(value)}" for k, value in zip(keys, row, strict=True)) for row in rows]


def _text(value: Any) -> str:
    """Return a value in the grammar of the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, str) and not isinstance(value, _Written) and not _PLAIN.fullmatch(value):
        return QuotedString(value, Quote.single).with_quotes()
    return override_text(value)


_PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
"""A text that Hydra reads as itself without quotes."""
