"""Bandwidth and latency of mesh axes, from their placement on a torus or the order of devices over hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.machine import assumptions
from valkyrie.parallel.axis_links import AxisPlacement
from valkyrie.parallel.candidates import AxisLinks

MIN_LINKS = 0.25
"""Lower bound on the number of links of a mesh axis on a torus, for estimates of given runs.

A mesh axis has a fraction of a link if several groups of devices share the link. Searches use no bound, so that
placements with more groups per link get slower estimates.
"""
_LINK_COUNTS = ("ring_links", "exchange_links", "gather_links")
"""Links per chip of an `AxisPlacement`, in the order of the last fields of `AxisLinks`."""


def axis_links(
    placements: Sequence[Sequence[AxisPlacement]], names: Sequence[str], chip: ChipConfig, *, min_links: float = 0.0
) -> Mapping[str, AxisLinks]:
    """Return the links of each mesh axis, by name of the axis. Their values are arrays with an entry per layout.

    Args:
        placements: For each layout, the placements of its axes in the order of `names`.
        names: Names of the mesh axes.
        chip: Chip of the target.
        min_links: Lower bound on the number of links of an axis on the torus.
    """
    chips_per_host = max(math.prod(chip.host_bounds or [1]), 1)
    host_rate = (chip.dcn_gbs_per_host or 1.0) * 1e9 / chips_per_host / chip.devices
    has_torus, links_by_axis = get_platform(chip.platform).has_torus, {}
    link_rate = (chip.ici_link_gbs or 0.0) * 1e9 / chip.devices if has_torus else (chip.switch_gbs or 1.0) * 1e9
    for index, name in enumerate(names):
        column = [axes[index] for axes in placements]
        link_counts = [max(axis.links_per_chip, min_links) if axis.torus_factors else 0.0 for axis in column]
        rates, ring_rates, exchange_rates, gather_rates = (
            np.array([link_rate * (n or assumptions.CORE_BANDWIDTH_RATIO) if has_torus else link_rate for n in counts])
            for counts in (link_counts, *([getattr(axis, kind) for axis in column] for kind in _LINK_COUNTS))
        )
        outer = np.array([axis.outer_size for axis in column], float)
        inner = np.array([axis.size // axis.outer_size for axis in column], float)
        hops = np.array([axis.hops for axis in column], float)
        outer_rates = np.full(len(column), host_rate)
        other_rates = ring_rates, exchange_rates, gather_rates
        links_by_axis[name] = AxisLinks(inner, rates, outer, outer_rates, hops, *other_rates)
    return links_by_axis


def slice_axis_links(count: int, target: TargetConfig) -> AxisLinks:
    """Return the links of the mesh axis `s`, which connects slices, as arrays with `count` equal entries."""
    chip, ones = target.chip, np.ones(count)
    assert chip is not None
    devices_per_host = max(math.prod(chip.host_bounds or [1]), 1) * chip.devices
    rate = (chip.dcn_gbs_per_host or 1.0) * 1e9 / devices_per_host
    return AxisLinks(ones, ones, ones * target.slices, ones * rate, 0 * ones, ones, ones, ones)


def host_axis_links(
    sizes: Mapping[str, np.ndarray], chip: ChipConfig, *, domain_hosts: int = 1
) -> dict[str, AxisLinks]:
    """Return the links of each mesh axis, by name of the axis, for hosts that connect their devices by a switch.

    The last axis varies fastest over the devices, so it is the first to be placed within a host.

    Args:
        sizes: Sizes of each axis, as an array with an entry per layout.
        chip: Chip of the target.
        domain_hosts: Hosts whose devices one switch joins.
    """
    devices_per_host = math.prod(chip.host_bounds or [1])
    devices_per_domain = devices_per_host * domain_hosts
    switch_rate, host_rate = (chip.switch_gbs or 1.0) * 1e9, (chip.dcn_gbs_per_host or 1.0) * 1e9 / devices_per_host
    links_by_axis, stride = {}, np.ones(len(next(iter(sizes.values()))))
    for axis in reversed(list(sizes)):
        size = sizes[axis]
        inner = np.clip(devices_per_domain / stride, 1, size)
        inner_rate, outer_rate = np.full(len(size), switch_rate), np.full(len(size), host_rate)
        links_by_axis[axis] = AxisLinks(
            inner, inner_rate, size / inner, outer_rate, np.zeros(len(size)), inner_rate, inner_rate, inner_rate
        )
        stride = stride * size
    return {axis: links_by_axis[axis] for axis in sizes}
