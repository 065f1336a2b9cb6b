"""Chips described in `conf/target/chip`, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache

from valkyrie.hardware.target import ChipConfig
from valkyrie.paths import config_names, read_config

CHIP_GROUP = "target/chip"
"""Config group of chips: the folder in `conf` with one file per chip."""


class _ShippedChips(Mapping[str, ChipConfig]):
    """Chips in `conf/target/chip`. Reads the file of a chip when the chip is first used."""

    def __getitem__(self, name: str) -> ChipConfig:
        return _load_chip(name)

    def __iter__(self) -> Iterator[str]:
        return iter(config_names(CHIP_GROUP))

    def __len__(self) -> int:
        return len(config_names(CHIP_GROUP))


def known_chips() -> Mapping[str, ChipConfig]:
    """Return all chips in `conf/target/chip` by name. `[]` and `get` also accept aliases."""
    return _ShippedChips()


def chip_for_device_kind(device_kind: str) -> ChipConfig | None:
    """Return the chip that JAX reports as this `device_kind`, or None if unknown."""
    for chip in known_chips().values():
        if device_kind in chip.device_kinds:
            return chip
    return None


def describe_price(chip: ChipConfig) -> str:
    """Return the on-demand price of a chip-hour and its source, or "" if the price is unknown.

    Shipped sources have the region and date, as far as they are known. A price that differs from the shipped one has
    the name of its key as source.
    """
    if chip.usd_per_hour is None:
        return ""
    price = (chip.usd_per_hour, chip.usd_per_hour_source)
    is_shipped = any(price == (shipped.usd_per_hour, shipped.usd_per_hour_source) for shipped in known_chips().values())
    source = chip.usd_per_hour_source if is_shipped else "set by target.chip.usd_per_hour"
    return f"${chip.usd_per_hour:,.2f} per chip-hour on demand ({source})"


def chips_rented_as(key: str) -> list[str]:
    """Return the names of the chips that have this key, such as `gke`, in `ChipConfig.rented_as`."""
    return [chip.name for chip in known_chips().values() if key in chip.rented_as]


def fill_missing_chip_fields(record: Mapping[str, object]) -> dict[str, object]:
    """Return the chip of a `run.yaml` with missing `cores`, `host_gbs`, `splash_bundles` and `gpu` added.

    Older files lack these keys. Their values come from the chip's file in `conf/target/chip`; without such a file,
    nothing is added.
    """
    name = str(record.get("name"))
    if name not in config_names(CHIP_GROUP):
        return dict(record)
    figures = asdict(_load_chip(name))
    return {key: figures[key] for key in ("cores", "host_gbs", "splash_bundles", "gpu")} | dict(record)


@cache
def _load_chip(name: str) -> ChipConfig:
    if name in config_names(CHIP_GROUP):
        return read_config(CHIP_GROUP, name, ChipConfig)
    for chip in known_chips().values():
        if name in chip.aliases:
            return chip
    raise KeyError(name)
