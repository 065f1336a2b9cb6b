"""How mesh axes lie on the links of a target: by a placement that is known, or over hosts in the devices' order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Span
from valkyrie.parallel.placement import DCN, AxisPlacement
from valkyrie.search.estimate.placed import Lying, spans_of

SCATTERED = 0.25
"""Links of an axis whose devices stand in no line of the torus."""


def torus_spans(placed: Sequence[Mapping[str, AxisPlacement]], chip: ChipConfig) -> Mapping[str, Span]:
    """Return the spans of mesh axes of layouts whose axes lie so on the torus."""
    names = list(placed[0])
    return spans_of([[_lying(axes[name]) for name in names] for axes in placed], names, chip)


def _lying(axis: AxisPlacement) -> Lying:
    outer = math.prod(factor.size for factor in axis.factors if factor.on == DCN)
    hops = sum((f.size * f.stride / (2 if f.ring else 1) for f in axis.torus), 0.0)
    links = max(axis.links, SCATTERED) if axis.torus else 0.0
    ring_links = min(links, max((factor.links for factor in axis.torus), default=0.0))
    return Lying(axis.size, axis.size // outer, outer, links, ring_links, hops)


def host_spans(sizes: Mapping[str, np.ndarray], chip: ChipConfig) -> dict[str, Span]:
    """Return the spans of mesh axes over hosts whose devices share a switch; the last axis varies fastest."""
    of_host = int(np.prod(chip.host_bounds or [1]))
    inside, outside = (chip.switch_gbs or 1.0) * 1e9, (chip.dcn_gbs_per_host or 1.0) * 1e9 / of_host
    spans, stride = {}, np.ones(len(next(iter(sizes.values()))))
    for axis in reversed(list(sizes)):
        size = sizes[axis]
        inner = np.clip(of_host / stride, 1, size)
        near = np.full(len(size), inside)
        spans[axis] = Span(inner, near, size / inner, np.full(len(size), outside), np.zeros(len(size)), near)
        stride = stride * size
    return {axis: spans[axis] for axis in sizes}
