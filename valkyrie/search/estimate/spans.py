"""Bandwidth and latency of mesh axes on a target: by their placement, or over hosts in the order of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.machine import assumptions
from valkyrie.parallel.axis_links import AxisPlacement
from valkyrie.parallel.candidates import AxisLinks

LEAST_LINKS = 0.25
"""Lower bound on the links of a torus axis in a run's placement. A search tries placements that share links further."""


def spans_of(
    placed: Sequence[Sequence[AxisPlacement]], names: Sequence[str], chip: ChipConfig, *, least_links: float = 0.0
) -> Mapping[str, AxisLinks]:
    """Return the links of mesh axes by name, with one entry per layout.

    Args:
        placed: Placements of the axes of each layout, in the order of `names`.
        names: Names of the axes.
        chip: The chip.
        least_links: Lower bound on the links of an axis on the torus.
    """
    of_host = max(math.prod(chip.host_bounds or [1]), 1)
    outside = (chip.dcn_gbs_per_host or 1.0) * 1e9 / of_host / chip.devices
    torus, spans = platform_of(chip.platform).has_torus, {}
    link = (chip.ici_link_gbs or 0.0) * 1e9 / chip.devices if torus else (chip.switch_gbs or 1.0) * 1e9
    for number, name in enumerate(names):
        column = [axes[number] for axes in placed]
        links = [max(axis.links, least_links) if axis.torus else 0.0 for axis in column]
        rates, ring_rates = (
            np.array([link * (n or assumptions.CORE_LINKS) if torus else link for n in each])
            for each in (links, [axis.ring_links for axis in column])
        )
        outer = np.array([axis.outer for axis in column], float)
        inner = np.array([axis.size // axis.outer for axis in column], float)
        hops = np.array([axis.hops for axis in column], float)
        spans[name] = AxisLinks(inner, rates, outer, np.full(len(column), outside), hops, ring_rates)
    return spans


def between_slices(count: int, target: TargetConfig) -> AxisLinks:
    """Return the links of the axis between slices, with one entry for each of `count` layouts."""
    chip, one = target.chip, np.ones(count)
    assert chip is not None
    of_host = max(math.prod(chip.host_bounds or [1]), 1) * chip.devices
    rate = (chip.dcn_gbs_per_host or 1.0) * 1e9 / of_host
    return AxisLinks(one, one, one * target.slices, one * rate, 0 * one, one)


def host_spans(sizes: Mapping[str, np.ndarray], chip: ChipConfig) -> dict[str, AxisLinks]:
    """Return the links of mesh axes over hosts, each with one switch for its devices. The last axis varies fastest."""
    of_host = int(np.prod(chip.host_bounds or [1]))
    inside, outside = (chip.switch_gbs or 1.0) * 1e9, (chip.dcn_gbs_per_host or 1.0) * 1e9 / of_host
    spans, stride = {}, np.ones(len(next(iter(sizes.values()))))
    for axis in reversed(list(sizes)):
        size = sizes[axis]
        inner = np.clip(of_host / stride, 1, size)
        near = np.full(len(size), inside)
        spans[axis] = AxisLinks(inner, near, size / inner, np.full(len(size), outside), np.zeros(len(size)), near)
        stride = stride * size
    return {axis: spans[axis] for axis in sizes}
