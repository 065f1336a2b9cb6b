"""Seconds of collectives over mesh axes, for many layouts at once.

An all-gather or reduce-scatter of B bytes over n devices sends B (n-1)/n from each, an all-reduce twice that. Several
axes of a torus carry parts at the same time (scaling book, sharding: jax-ml.github.io/scaling-book/sharding). TPU
slices exchange arrays that the devices of each slice have already reduced. A ring of GPUs passes through all hosts, as
fast as the network cards of its devices (NCCL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.search.estimate.efficiency import Efficiency


@dataclass(frozen=True)
class CollectiveModel:
    """The links of a chip, and the share of their rates that collectives achieve.

    Args:
        adds_up: Whether the rates of several axes add up (a torus), or the axes share one port (a switch).
        gathers, sums: Shares of the fast links' rate that gathers and all-reduces achieve.
        outside: Share of the slow links' rate.
        start_s: Start of a collective, in seconds.
        hop_s: Latency of each hop, in seconds.
        outer_start_s: Start of a message over slow links, in seconds.
        scatters: Time of a reduce-scatter over an all-gather.
    """

    adds_up: bool
    gathers: float
    sums: float
    outside: float
    start_s: float
    hop_s: float
    outer_start_s: float
    scatters: float

    def gather(
        self, layouts: Candidates, axes: Sequence[str], full: np.ndarray, *, one_ring: bool = False
    ) -> np.ndarray:
        """Return the seconds of an all-gather to `full` bytes on each device.

        With `one_ring`, a single ring goes through all devices. XLA gathers activations like this along any dimension
        but the first.
        """
        return self._seconds(layouts, axes, full, self.gathers, one_ring)

    def scatter(
        self, layouts: Candidates, axes: Sequence[str], full: np.ndarray, *, one_ring: bool = False
    ) -> np.ndarray:
        """Return the seconds of a reduce-scatter of `full` bytes on each device."""
        return self.scatters * self._seconds(layouts, axes, full, self.gathers, one_ring)

    def sum(self, layouts: Candidates, axes: Sequence[str], full: np.ndarray) -> np.ndarray:
        """Return the seconds of an all-reduce of `full` bytes on each device."""
        return 2 * self._seconds(layouts, axes, full, self.sums)

    def exchange(self, layouts: Candidates, axes: Sequence[str], sent: np.ndarray) -> np.ndarray:
        """Return the seconds that a device needs to send `sent` bytes to its neighbour along each of the axes."""
        seconds = np.zeros(len(layouts))
        for axis in axes:
            span, size = layouts.spans[axis], layouts.sizes[axis]
            near, far = sent / (span.inner_rate * self.gathers), sent / (span.outer_rate * self.outside)
            start = self.start_s + np.where(span.outer > 1, self.outer_start_s, 0.0)
            seconds += np.where(size > 1, start + np.where(span.outer > 1, far, near), 0.0)
        return seconds

    def _seconds(
        self, layouts: Candidates, axes: Sequence[str], full: np.ndarray, share: float, one_ring: bool = False
    ) -> np.ndarray:
        inner, outer = np.ones(len(layouts)), np.ones(len(layouts))
        rate, slow, hops = np.zeros(len(layouts)), np.full(len(layouts), np.inf), np.zeros(len(layouts))
        for axis in axes:
            span = layouts.spans[axis]
            inner, outer = inner * span.inner, outer * span.outer
            own = np.where(span.inner > 1, span.ring_rate if one_ring else span.inner_rate, 0.0)
            rate = rate + own if self.adds_up and not one_ring else np.maximum(rate, own)
            slow = np.where(span.outer > 1, np.minimum(slow, span.outer_rate), slow)
            hops = hops + span.hops
        members = inner * outer
        latency = self.start_s * (members > 1) + hops * self.hop_s + self.outer_start_s * np.log2(outer)
        near = np.where(inner > 1, full * (inner - 1) / inner / np.maximum(rate * share, 1.0), 0.0)
        if self.adds_up:
            return near + full / inner * (outer - 1) / outer / (slow * self.outside) + latency
        ring = np.minimum(np.where(inner > 1, rate * share, np.inf), slow * self.outside * inner)
        return np.where(outer > 1, full * (members - 1) / members / ring, near) + latency


def network_of(chip: ChipConfig, efficiency: Efficiency) -> CollectiveModel:
    """Return the links of a chip, with the rates that its efficiency allows."""
    hop = (chip.hop_us or 0.0) * 1e-6
    torus = platform_of(chip.platform).has_torus
    e = efficiency
    return CollectiveModel(torus, e.gathers, e.sums, e.outside, e.start_s, hop, e.outer_start_s, e.scatters)
