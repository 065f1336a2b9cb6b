"""Reads the space of a sweep (the layouts and models to try) from configuration and arguments. Does not import JAX."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from valkyrie.config.explain import unknown_choice_text
from valkyrie.config.refusals import describe_unknown_key, problem_from_error
from valkyrie.config.run import Run
from valkyrie.parallel.mesh import parse_mesh
from valkyrie.problems import Problem, ProblemCode, check_range, first_line, raise_problems
from valkyrie.sweep.composer import Composer
from valkyrie.trees import override_text

ALL_CHOICES, DEFAULT_PLACEMENT = "all", "default"
"""Special values in a space: `all` tries every partition or placement, `default` keeps the placement of the mesh."""
SPACE_KEY = "hydra.sweeper.space"
"""Config key of the space."""
LAYOUT_KEYS = {
    "mesh": "meshes",
    "partition": "partitions",
    "microbatches": "microbatches",
    "remat": "remat",
    "mesh.placement": "placements",
}
"""Keys of a run that set its layout, with the keys of the space that they replace on the command line."""


class MeshEquivalence(Enum):
    """Which meshes count as duplicates of each other under a partition. A sweep tries only the first of them.

    - `none`: no mesh is a duplicate.
    - `sharding`: meshes that give every device the same part of every array. They compile to the same step.
    - `roles`: also meshes from a pattern that give each role (FSDP, MP1, MP2, ...) the same number of devices.
    """

    none = "none"
    sharding = "sharding"
    roles = "roles"


@dataclass
class SpaceConfig:
    """The space of `hydra/sweeper=layouts`. `conf/hydra/sweeper/layouts.yaml` has an example of each key.

    Args:
        meshes: Meshes such as `4x4x2`, or patterns: `AxBxC` is every factorisation of the devices into three axes,
            `2sAxBxC` the same within each of two slices.
        devices: Number of devices to factorise, or None for the target's. With `target=auto`, None means the number of
            devices in the mesh of the run.
        partitions: Names of partitions, or `all`.
        microbatches: Numbers of microbatches, or None to use the run's.
        remat: Names of remat policies, or None to use the run's.
        placements: `default`, `all`, or lists of mesh axes such as `z,x,y`.
        vary: Values of other keys or groups: a list, or a text in command-line syntax (`512,1024`). Keys joined by
            commas vary together.
        parameters: Smallest and largest parameter count of a model, in a list. A bound of None means no limit.
        flops_per_token: Smallest and largest forward FLOPs per token, in a list. A bound of None means no limit.
        same: Which meshes count as duplicates.
    """

    meshes: list[str] = field(default_factory=lambda: ["AxBxC"])
    devices: int | None = None
    partitions: list[str] = field(default_factory=lambda: [ALL_CHOICES])
    microbatches: list[int] | None = None
    remat: list[str] | None = None
    placements: list[str] = field(default_factory=lambda: [DEFAULT_PLACEMENT])
    vary: dict[str, Any] = field(default_factory=dict)
    parameters: list[float | None] | None = None
    flops_per_token: list[float | None] | None = None
    same: MeshEquivalence = MeshEquivalence.sharding

    def problems(self) -> list[Problem]:
        """Return the problems of the space, such as an empty list or an invalid range."""
        problems = []
        for name in LAYOUT_KEYS.values():
            if getattr(self, name) == []:
                text = f"{SPACE_KEY}.{name}=[]: must have at least one value."
                problems.append(Problem(ProblemCode.missing, f"{SPACE_KEY}.{name}", [], text))
        problems += check_range(f"{SPACE_KEY}.devices", self.devices, least=1)
        for key in ("parameters", "flops_per_token"):
            bounds: list[float | None] = getattr(self, key) or [None, None]
            numbers = [bound for bound in bounds if bound is not None]
            if len(bounds) != 2 or numbers != sorted(numbers):
                text = ",".join("null" if bound is None else f"{bound:g}" for bound in bounds)
                text = f"{SPACE_KEY}.{key}=[{text}]: must be a range [least,most], with null for no bound."
                problems.append(Problem(ProblemCode.malformed, f"{SPACE_KEY}.{key}", bounds, text))
        for key, values in self.vary.items():
            problems += _vary_problems(key, values)
        return problems


def _vary_problems(key: str, values: Any) -> Iterator[Problem]:
    """Yield the problems of an entry in `vary`: a key, or several keys joined by commas, and the values."""
    keys, name = key.split(","), f"{SPACE_KEY}.vary.{key}"
    for layout_key in set(keys) & LAYOUT_KEYS.keys():
        text = (
            f"{SPACE_KEY}.vary.{layout_key}: vary cannot set {layout_key}. Use {SPACE_KEY}.{LAYOUT_KEYS[layout_key]}."
        )
        yield Problem(ProblemCode.malformed, name, values, text)
    if len(keys) == 1 and isinstance(values, str | int | float):
        return
    if not isinstance(values, list) or not values:
        example = "[512,1024]" if len(keys) == 1 else f"a list of one value for each of {', '.join(keys)}"
        kind = "value, such as" if len(keys) == 1 else "entry:"
        text = f"{name}={values}: must be a list with at least one {kind} {example}."
        yield Problem(ProblemCode.malformed, name, values, text)
    elif len(keys) > 1:
        for row in values:
            if not isinstance(row, list) or len(row) != len(keys):
                text = f"{name}: {row} must be a list with one value for each of {', '.join(keys)}."
                yield Problem(ProblemCode.malformed, name, row, text)


@dataclass(frozen=True)
class SweepSpace:
    """The space of a sweep, and the overrides that all its trials share."""

    config: SpaceConfig
    fixed_overrides: list[str]


@dataclass(frozen=True)
class RunVariant:
    """A combination of the settings outside the layout: its overrides and the composed run."""

    overrides: tuple[str, ...]
    run: Run


def read_space(config: Mapping[str, Any] | DictConfig, arguments: Sequence[str], composer: Composer) -> SweepSpace:
    """Read the space from a configuration and the arguments of a multirun.

    An argument for the layout, such as `mesh=`, replaces the corresponding key of the space. An argument for any other
    key removes the key from `vary` in the configuration. A list of values is then added to `vary`, and a single value
    applies to all trials.

    Raises ValueError with all invalid keys and values of the space, or with the first argument that is invalid: an
    interval, a value of the wrong type, or one of several keys that vary together.
    """
    config_node, problems = OmegaConf.structured(SpaceConfig), list[Problem]()
    for name, value in config.items():
        try:
            config_node = OmegaConf.merge(config_node, {str(name): value})
        except (ConfigKeyError, ConfigAttributeError) as error:
            problems.append(describe_unknown_key(f"{SPACE_KEY}.{error.full_key}", error.parent_node))
        except OmegaConfBaseException as error:
            problem = problem_from_error(error)
            problems.append(replace(problem, key=f"{SPACE_KEY}.{problem.key}", text=f"{SPACE_KEY}.{problem}"))
    vary: dict[str, object] = {
        str(k): OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for k, v in config_node.vary.items()
    }
    fixed_overrides: list[str] = []
    for override in composer.parse(arguments):
        key, line = override.key_or_group, override.input_line or ""
        values = _values(override)
        if key in LAYOUT_KEYS:
            _set_layout_key(config_node, key, values)
            continue
        if joined_keys := [joined for joined in vary if key in joined.split(",") and joined != key]:
            raise ValueError(
                f"{line}: this sweep varies {joined_keys[0]} together, so {key} cannot be set alone. Omit {key}, or "
                f"replace '{SPACE_KEY}.vary'."
            )
        vary.pop(key, None)
        if override.is_sweep_override():
            vary[override.get_key_element()] = [_OverrideText(value) for value in values]
        else:
            fixed_overrides.append(line)
    config_node.vary = {}
    space = OmegaConf.to_object(config_node)
    assert isinstance(space, SpaceConfig)
    space.vary = vary
    raise_problems([*problems, *space.problems(), *_name_problems(space, composer)])
    return SweepSpace(space, fixed_overrides)


def _name_problems(space: SpaceConfig, composer: Composer) -> Iterator[Problem]:
    """Yield a problem for each partition and remat policy that is not a choice, and for each malformed mesh."""
    sources = composer.config.hydra.runtime.config_sources
    folders = [source.path for source in sources if source.provider == "command-line"]
    for group, names in (("partition", space.partitions), ("remat", space.remat or [])):
        options = composer.group_options(group)
        for name in names:
            if name not in options and not (group == "partition" and name == ALL_CHOICES):
                yield Problem(
                    ProblemCode.unknown_name, group, name, unknown_choice_text(f"{group}/{name}", options, folders)
                )
    for name in space.meshes:
        if re.fullmatch(r"\d[\da-z]*", name) and name not in composer.group_options("mesh"):
            try:
                parse_mesh(name)
            except ValueError as error:
                yield Problem(ProblemCode.malformed, "mesh", name, str(error))


def compose_variants(space: SweepSpace, composer: Composer) -> list[RunVariant]:
    """Compose a run for every combination of the settings that a space varies in addition to the layout."""
    override_choices = [_overrides_per_value(key, values, composer) for key, values in space.config.vary.items()]
    variants = []
    for combination in itertools.product(*override_choices):
        overrides = tuple(itertools.chain.from_iterable(combination))
        try:
            variants.append(RunVariant(overrides, composer.compose_run([*space.fixed_overrides, *overrides])))
        except (ValueError, OmegaConfBaseException) as error:
            if not overrides:
                raise
            raise ValueError(f"{' '.join(overrides)}: {error}") from error
    return variants


class _OverrideText(str):
    """A value that is already in command-line syntax and must not be quoted again."""


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    refuse_interval(override)
    return list(override.sweep_string_iterator())


def refuse_interval(override: Override) -> None:
    """Raise ValueError if an argument sweeps over an interval, which only `hydra/sweeper=optuna` can sample."""
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ValueError(
            f"{override.input_line}: this sweeper takes only discrete values. List the values as "
            f"{override.get_key_element()}=A,B or use range(A,B). For an interval, use hydra/sweeper=optuna."
        )


def _set_layout_key(space: Any, key: str, values: Sequence[str]) -> None:
    name = LAYOUT_KEYS[key]
    unquoted = [re.sub(r"\\(.)", r"\1", value) for value in values]  # Hydra writes x:2 as x\:2
    unquoted = [DEFAULT_PLACEMENT if name == "placements" and v == "null" else v.strip("[]") for v in unquoted]
    try:
        OmegaConf.update(space, name, unquoted, merge=False)
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}={','.join(values)}: {first_line(error).rstrip('.')}.") from error


def _overrides_per_value(key: str, values: Any, composer: Composer) -> list[tuple[str, ...]]:
    """Return the overrides for each value of a key in `vary`. Keys joined by commas have one override each."""
    keys = key.split(",")
    if len(keys) == 1 and isinstance(values, str | int | float):
        (override,) = composer.parse([f"{key}={values}"])
        return [(f"{key}={value}",) for value in _values(override)]
    rows = [[value] for value in values] if len(keys) == 1 else values
    return [tuple(f"{k}={_quoted_override_text(value)}" for k, value in zip(keys, row, strict=True)) for row in rows]


def _quoted_override_text(value: Any) -> str:
    """Return a value in command-line syntax, with quotes where Hydra's grammar needs them."""
    if isinstance(value, list):
        return f"[{','.join(map(_quoted_override_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_quoted_override_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, str) and not isinstance(value, _OverrideText) and not _UNQUOTED.fullmatch(value):
        return QuotedString(value, Quote.single).with_quotes()
    return override_text(value)


_UNQUOTED = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
"""Matches the texts that need no quotes, because Hydra's grammar reads them as the same text."""
