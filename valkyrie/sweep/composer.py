"""Composes the runs of a multirun. Hydra composes only one job of each kind (see `Composer`).

The other jobs reuse its result, because composing thousands of jobs with Hydra would take too long.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from valkyrie.config.run import Run
from valkyrie.parallel.mesh import MeshConfig, parse_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.paths import conf_dir, read_config
from valkyrie.runs.folder import split_override
from valkyrie.trees import get_value, with_value

_REFERENCE = r"\$\{{[^}}]*\b(?:{key}\b|(?:{nodes})\b(?!\.))"
"""Format string of a regular expression that matches a `${...}` reference to a key or to one of its parent nodes.

`{key}` is the last part of the key, and `{nodes}` are the names of the parent nodes, separated by `|`.
"""
_LAYOUT_REFERENCE = re.compile(r"\$\{[^}]*\b(mesh|partition)\b")


@dataclass
class _JobKind:
    """Jobs that choose the same options of config groups and override the same keys.

    A mesh or partition that is set without composing (see `Composer`) may differ between these jobs. The stored runs
    have that of the first job, and `Composer.compose_run` replaces it.

    Args:
        config: Configuration of the first job, composed by Hydra.
        first_run: Run of the first job.
        runs: Runs built so far, keyed by the job's value overrides, such as `("lr=1e-3",)`.
    """

    config: DictConfig
    first_run: Run
    runs: dict[tuple[str, ...], Run] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The configuration as YAML text, which is searched for `${...}` references."""
        return OmegaConf.to_yaml(self.config)


@dataclass
class Composer:
    """Composes the runs of a multirun, given its configuration and Hydra's config loader.

    Jobs are of one kind if they choose the same options of config groups and override the same keys. A mesh given by
    its sizes (`mesh=2x2x2`) and a partition shipped with Valkyrie are set without composing, unless the configuration
    refers to them or modifies them.
    """

    config: DictConfig
    loader: ConfigLoader
    _job_kinds: dict[tuple[str, ...], _JobKind | None] = field(default_factory=dict)
    _parsed_overrides: dict[str, Override] = field(default_factory=dict)
    _options: dict[str, list[str]] = field(default_factory=dict)
    _shipped_partitions: dict[str, PartitionConfig | None] = field(default_factory=dict)

    def compose_run(self, overrides: Sequence[str]) -> Run:
        """Return the run of one job of a sweep, given the job's overrides.

        Composes the first job of each kind with Hydra. For later jobs, sets the overridden values in the config of the
        first job. Raises ValueError for an invalid value. Hydra's exceptions propagate.
        """
        parsed = self.parse(overrides)
        layout_choices = self._layout(parsed)
        other_overrides = [override for override in parsed if override.key_or_group not in layout_choices]
        value_overrides = [o for o in other_overrides if not o.is_delete() and not self.group_options(o.key_or_group)]
        group_choices = [str(o.input_line) for o in other_overrides if o not in value_overrides]
        key = (*group_choices, "", *(o.key_or_group for o in value_overrides), "", *layout_choices)
        if key not in self._job_kinds:
            config = self.compose_config(overrides)
            run = Run.from_config(config)
            is_replaceable = all(getattr(run.config, name) == value for name, value in layout_choices.items())
            is_replaceable = is_replaceable and not (
                layout_choices and _LAYOUT_REFERENCE.search(OmegaConf.to_yaml(config))
            )
            self._job_kinds[key] = _JobKind(config, run) if is_replaceable else None
            return run
        job_kind = self._job_kinds[key]
        if job_kind is None:
            return Run.from_config(self.compose_config(overrides))
        value_lines = tuple(str(o.input_line) for o in value_overrides)
        if value_lines not in job_kind.runs:
            try:
                changed = _with_numbers(job_kind, value_overrides)
                changed = changed or Run.from_config(_with_values(job_kind.config, value_overrides))
                job_kind.runs[value_lines] = changed
            except OmegaConfBaseException:  # let Hydra report the value: its message is better
                return Run.from_config(self.compose_config(overrides))
        run = job_kind.runs[value_lines]
        return run.changed(**layout_choices) if layout_choices else run

    def compose_choice(self, group: str, name: str, fixed_overrides: Sequence[str]) -> Any:
        """Return the config of the choice `name` of `group` (mesh, partition or remat).

        It is composed together with `fixed_overrides`, unless it is a mesh given by its sizes.
        """
        mesh = self._mesh(name) if group == "mesh" else None
        return mesh or getattr(self.compose_run([*fixed_overrides, f"{group}={name}"]).config, group)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Parse overrides with Hydra's grammar. Caches the results, because most jobs share most overrides."""
        if new_lines := [line for line in dict.fromkeys(overrides) if line not in self._parsed_overrides]:
            parser = OverridesParser.create(config_loader=self.loader)  # the loader lists the choices of a glob
            self._parsed_overrides |= zip(new_lines, parser.parse_overrides(new_lines), strict=True)
        return [self._parsed_overrides[line] for line in overrides]

    def group_options(self, group: str) -> list[str]:
        """Return the choices of a config group, including the user's. Empty if there is no such group."""
        if group not in self._options:
            self._options[group] = self.loader.get_group_options(
                group, config_name=self.config.hydra.job.config_name, overrides=search_path(self.config.hydra)
            )
        return self._options[group]

    def compose_config(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration of a job with Hydra. Omits the `hydra` node."""
        config = self.loader.load_sweep_config(self.config, list(overrides))
        return OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])

    def _layout(self, overrides: Sequence[Override]) -> dict[str, MeshConfig | PartitionConfig]:
        """Return the mesh and partition that the overrides choose, under the keys `mesh` and `partition`.

        Omits a key if the overrides do not set it, or if Hydra must compose its value.
        """
        layout_values: dict[str, MeshConfig | PartitionConfig | None] = {}
        for override in overrides:
            key, name = override.key_or_group, override.value()
            if override.is_delete() or override.is_add() or override.package is not None:
                continue
            if key == "mesh" and isinstance(name, str):
                layout_values[key] = self._mesh(name)
            elif key == "partition" and isinstance(name, str):
                layout_values[key] = self._partition(name)
        return {key: value for key, value in layout_values.items() if value is not None}

    def _mesh(self, name: str) -> MeshConfig | None:
        return parse_mesh(name) if name[:1].isdigit() and name not in self.group_options("mesh") else None

    def _partition(self, name: str) -> PartitionConfig | None:
        """Return the shipped partition `name`, or None if there is none or a user's file overrides it."""
        if name not in self._shipped_partitions:
            path = f"partition/{name}.yaml"
            sources = (source for source in self.loader.get_sources() if source.is_config(path))
            source_in_use = next(sources, None)
            is_shipped = source_in_use is not None and source_in_use.path == str(conf_dir())
            self._shipped_partitions[name] = read_config("partition", name, PartitionConfig) if is_shipped else None
        return self._shipped_partitions[name]


def search_path(hydra: Any) -> list[str]:
    """Return the `hydra.searchpath` overrides in the `hydra` node of a configuration."""
    overrides = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
    assert isinstance(overrides, list)
    return [line for line in map(str, overrides) if split_override(line)[0] == "hydra.searchpath"]


def _with_numbers(job_kind: _JobKind, overrides: Sequence[Override]) -> Run | None:
    """Return the first job's run with its numbers replaced by those in `overrides`.

    This avoids `Run.from_config`, which takes up to 0.1 s per job. That adds up in a sweep over seeds or learning
    rates. Returns None if the run must be built from its config, for example because another key depends on an
    overridden one.
    """
    config = job_kind.first_run.config
    if (config.batch_tokens, config.device_batch) != (None, None):  # other keys depend on them
        return None
    for override in overrides:
        key, value = override.key_or_group, override.value()
        try:
            before = get_value(config, key)
        except (AttributeError, KeyError, TypeError):
            return None
        if before == value and type(before) is type(value):
            continue
        if override.is_add() or type(value) not in (int, float) or type(before) is not type(value):
            return None
        *nodes, name = map(re.escape, key.split("."))
        if re.search(_REFERENCE.format(key=name, nodes="|".join(nodes) or name), job_kind.text):
            return None
        config = with_value(config, key, value)
    return Run(config, config.model)


def _with_values(config: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    config = copy.deepcopy(config)
    for override in overrides:
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=override.is_add())
    return config
