"""The chips that are described in `conf/target/chip`, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from valkyrie.hardware.target import ChipConfig
from valkyrie.paths import config_names, read_config

CHIPS = "target/chip"
"""The config group of chips."""


class _Shipped(Mapping[str, ChipConfig]):
    """The chips in `conf/target/chip`; a file is read once, when its chip is first asked for."""

    def __getitem__(self, name: str) -> ChipConfig:
        return _chip(name)

    def __iter__(self) -> Iterator[str]:
        return iter(config_names(CHIPS))

    def __len__(self) -> int:
        return len(config_names(CHIPS))


def known_chips() -> Mapping[str, ChipConfig]:
    """Return every chip described in `conf/target/chip`, by name; `[]` and `get` take its other names as well."""
    return _Shipped()


def chip_of(device_kind: str) -> ChipConfig | None:
    """Return the chip that JAX reports under this `device_kind`, or None when it is not described."""
    for chip in known_chips().values():
        if device_kind in chip.device_kinds:
            return chip
    return None


@cache
def _chip(name: str) -> ChipConfig:
    if name in config_names(CHIPS):
        return read_config(CHIPS, name, ChipConfig)
    for chip in known_chips().values():
        if name in chip.aliases:
            return chip
    raise KeyError(name)
