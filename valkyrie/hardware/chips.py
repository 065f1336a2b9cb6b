"""The chips that are described in `conf/target/chip`, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache

from valkyrie.hardware.target import ChipConfig
from valkyrie.paths import config_names, read_config

CHIPS = "target/chip"
"""The config group of chips."""


class _Shipped(Mapping[str, ChipConfig]):
    """The chips in `conf/target/chip`. A file is read when its chip is first needed."""

    def __getitem__(self, name: str) -> ChipConfig:
        return _chip(name)

    def __iter__(self) -> Iterator[str]:
        return iter(config_names(CHIPS))

    def __len__(self) -> int:
        return len(config_names(CHIPS))


def known_chips() -> Mapping[str, ChipConfig]:
    """Return all chips in `conf/target/chip` by name. `[]` and `get` also accept aliases."""
    return _Shipped()


def chip_of(device_kind: str) -> ChipConfig | None:
    """Return the chip that JAX reports as this `device_kind`, or None if unknown."""
    for chip in known_chips().values():
        if device_kind in chip.device_kinds:
            return chip
    return None


def chips_rented_as(key: str) -> list[str]:
    """Return the names of the chips with a name at a cloud, that is with this key in `ChipConfig.rented_as`."""
    return [chip.name for chip in known_chips().values() if key in chip.rented_as]


def with_shipped_figures(saved: Mapping[str, object]) -> dict[str, object]:
    """Add figures that chips had no key for when a `run.yaml` was written."""
    name = str(saved.get("name"))
    if name not in config_names(CHIPS):
        return dict(saved)
    shipped = asdict(_chip(name))
    return {key: shipped[key] for key in ("cores", "host_gbs", "splash_bundles")} | dict(saved)


@cache
def _chip(name: str) -> ChipConfig:
    if name in config_names(CHIPS):
        return read_config(CHIPS, name, ChipConfig)
    for chip in known_chips().values():
        if name in chip.aliases:
            return chip
    raise KeyError(name)
