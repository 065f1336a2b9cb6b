"""Composes the runs of a multirun: one job of each kind through Hydra, the others by setting values on its result."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from valkyrie.runs.folder import key_value

_LAYOUT_REFERENCE = re.compile(r"\$\{[^}]*\b(mesh|partition)\b")


@dataclass
class _Kind:
    """Configuration of all jobs of a kind, and their runs by values. The layout of those runs is arbitrary."""

    config: DictConfig
    runs: dict[tuple[str, ...], Run] = field(default_factory=dict)


@dataclass
class Composer:
    """Composes runs with the configuration of a multirun and Hydra's loader.

    Jobs that choose the same groups and set the same keys are of one kind. Meshes given by their sizes and shipped
    partitions are set without composing, unless the configuration refers to them or changes them.
    """

    config: DictConfig
    loader: ConfigLoader
    _kinds: dict[tuple[str, ...], _Kind | None] = field(default_factory=dict)
    _options: dict[str, list[str]] = field(default_factory=dict)
    _shipped: dict[str, PartitionConfig | None] = field(default_factory=dict)

    def run(self, overrides: Sequence[str]) -> Run:
        """Return the run of a job. Raises ValueError for a wrong value, and Hydra's exceptions."""
        parsed = self.parse(overrides)
        layout = self._layout(parsed)
        others = [override for override in parsed if override.key_or_group not in layout]
        values = [o for o in others if not o.is_delete() and not self.options(o.key_or_group)]
        chosen = [str(o.input_line) for o in others if o not in values]
        key = (*chosen, "", *(o.key_or_group for o in values), "", *layout)
        if key not in self._kinds:
            config = self.compose(overrides)
            run = Run.from_config(config)
            free = all(getattr(run.config, name) == value for name, value in layout.items())
            free = free and not (layout and _LAYOUT_REFERENCE.search(OmegaConf.to_yaml(config)))
            self._kinds[key] = _Kind(config) if free else None
            return run
        kind = self._kinds[key]
        if kind is None:
            return Run.from_config(self.compose(overrides))
        lines = tuple(str(o.input_line) for o in values)
        if lines not in kind.runs:
            try:
                kind.runs[lines] = Run.from_config(_with_values(kind.config, values))
            except OmegaConfBaseException:  # Hydra has the better message for a wrong value
                return Run.from_config(self.compose(overrides))
        run = kind.runs[lines]
        return run.changed(**layout) if layout else run

    def choice(self, group: str, name: str, fixed: Sequence[str]) -> Any:
        """Return the mesh, partition or remat policy of a name, composed with the fixed overrides."""
        mesh = self._mesh(name) if group == "mesh" else None
        return mesh or getattr(self.run([*fixed, f"{group}={name}"]).config, group)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Return overrides as parsed by Hydra."""
        return OverridesParser.create(config_loader=self.loader).parse_overrides(list(overrides))

    def options(self, group: str) -> list[str]:
        """Return the choices of a group, including those of a user's folder. Empty if there is no such group."""
        if group not in self._options:
            self._options[group] = self.loader.get_group_options(
                group, config_name=self.config.hydra.job.config_name, overrides=search_path(self.config.hydra)
            )
        return self._options[group]

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration of a job without the `hydra` node."""
        config = self.loader.load_sweep_config(self.config, list(overrides))
        return OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])

    def _layout(self, overrides: Sequence[Override]) -> dict[str, MeshConfig | PartitionConfig]:
        """Return the mesh and the partition among overrides that need no composing."""
        known: dict[str, MeshConfig | PartitionConfig | None] = {}
        for override in overrides:
            key, name = override.key_or_group, override.value()
            if override.is_delete() or override.is_add() or override.package is not None:
                continue
            if key == "mesh" and isinstance(name, str):
                known[key] = self._mesh(name)
            elif key == "partition" and isinstance(name, str):
                known[key] = self._partition(name)
        return {key: value for key, value in known.items() if value is not None}

    def _mesh(self, name: str) -> MeshConfig | None:
        return parse_mesh(name) if name[:1].isdigit() and name not in self.options("mesh") else None

    def _partition(self, name: str) -> PartitionConfig | None:
        """Return a shipped partition, or None if a user's folder has one with that name."""
        if name not in self._shipped:
            path = f"partition/{name}.yaml"
            sources = (source for source in self.loader.get_sources() if source.is_config(path))
            first = next(sources, None)
            shipped = first is not None and first.path == str(conf_dir())
            self._shipped[name] = read_config("partition", name, PartitionConfig) if shipped else None
        return self._shipped[name]


def search_path(hydra: Any) -> list[str]:
    """Return the overrides that set Hydra's search path, from the `hydra` node."""
    overrides = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
    assert isinstance(overrides, list)
    return [line for line in map(str, overrides) if key_value(line)[0] == "hydra.searchpath"]


def _with_values(config: DictConfig, overrides: Sequence[Override]) -> DictConfig:
    config = copy.deepcopy(config)
    for override in overrides:
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=override.is_add())
    return config
