"""Seconds of collectives over mesh axes, for many layouts at once.

In an all-gather or reduce-scatter of B bytes over n devices, each device sends B (n-1)/n bytes; in an all-reduce, twice
that. Several axes of a torus carry parts of an array at the same time (scaling book, sharding:
jax-ml.github.io/scaling-book/sharding). Collectives over several TPU slices are hierarchical: between slices, each
device exchanges only its shard. A ring of GPUs passes through all hosts at the rate of their network cards (NCCL).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import Candidates
from valkyrie.search.estimate.efficiency import Efficiency


@dataclass(frozen=True)
class CollectiveModel:
    """Time model of collectives on the links of a chip.

    Fast links connect the chips of a torus or of a host, slow links the slices or hosts. Methods take and return arrays
    over layouts.

    Args:
        adds_up: Whether the rates of several axes add up (a torus), or the axes share one port (a switch).
        gather_efficiency, all_reduce_efficiency: Share of the rate of fast links that all-gathers and all-reduces
            achieve.
        outer_efficiency: Share of the rate of slow links.
        start_s: Latency of starting a collective, in seconds.
        hop_s: Latency of each hop, in seconds.
        outer_start_s: Latency of starting a message over slow links, in seconds.
        scatter_ratio: Time of a reduce-scatter relative to an all-gather.
        ring_rate: Bytes/s of a ring that passes through neighbours only, or 0 if XLA keeps the order of the devices.
            XLA reorders them on chips whose torus has two axes, but not on v4 and v5p (`has_reordering_map` in HLO).
    """

    adds_up: bool
    gather_efficiency: float
    all_reduce_efficiency: float
    outer_efficiency: float
    start_s: float
    hop_s: float
    outer_start_s: float
    scatter_ratio: float
    ring_rate: float = 0.0

    def all_gather(
        self,
        layouts: Candidates,
        axes: Sequence[str],
        full_bytes: np.ndarray,
        *,
        one_ring: bool = False,
        is_synchronous: bool = False,
    ) -> np.ndarray:
        """Return the seconds of an all-gather to `full_bytes` on each device.

        With `one_ring`, a single ring goes through all devices. XLA uses one ring for activations that it gathers along
        a dimension other than the first (`1DAllGatherNonMajorDim` in HLO). Without it, an axis whose devices are no
        neighbours is as slow as `exchange`.

        With `is_synchronous`, its rings are those of `AxisPlacement.gather_links`.
        """
        # TODO: asynchronous gathers of weights have the same rings. `Efficiency.hidden_weights` was set without them.
        kind = "one_ring" if one_ring else "synchronous" if is_synchronous else "gather"
        return self._seconds(layouts, axes, full_bytes, self.gather_efficiency, kind)

    def reduce_scatter(
        self, layouts: Candidates, axes: Sequence[str], full_bytes: np.ndarray, *, one_ring: bool = False
    ) -> np.ndarray:
        """Return the seconds of a reduce-scatter of `full_bytes` on each device.

        With `one_ring`, a single ring goes through all devices (see `all_gather`).
        """
        return self.scatter_ratio * self._seconds(
            layouts, axes, full_bytes, self.gather_efficiency, "one_ring" if one_ring else "sum"
        )

    def all_reduce(self, layouts: Candidates, axes: Sequence[str], full_bytes: np.ndarray) -> np.ndarray:
        """Return the seconds of an all-reduce of `full_bytes` on each device."""
        return 2 * self._seconds(layouts, axes, full_bytes, self.all_reduce_efficiency)

    def all_to_all(self, layouts: Candidates, axes: Sequence[str], sent_bytes: np.ndarray) -> np.ndarray:
        """Return the seconds of an all-to-all in which each device sends equal parts of `sent_bytes` to all devices.

        On a ring, it takes a quarter of the time to gather the bytes of all devices, because parts travel the shorter
        way. A switch carries only the parts for the devices that it connects, and slow links the others.
        """
        inner, outer = np.ones(len(layouts)), np.ones(len(layouts))
        rate, outer_rate = np.full(len(layouts), np.inf), np.full(len(layouts), np.inf)
        for axis in axes:
            links = layouts.links[axis]
            inner, outer = inner * links.inner_size, outer * links.outer_size
            rate = np.where(links.inner_size > 1, np.minimum(rate, links.inner_rate), rate)
            outer_rate = np.where(links.outer_size > 1, np.minimum(outer_rate, links.outer_rate), outer_rate)
        members = inner * outer
        if self.adds_up:  # an all-gather of `sent_bytes * inner` sends as much between slices, but not on a ring
            outer_s = sent_bytes * (outer - 1) / outer / (outer_rate * self.outer_efficiency)
            return (self.all_gather(layouts, axes, sent_bytes * inner) - outer_s) / 4 + outer_s
        inner_s = sent_bytes * (inner - 1) / members / (rate * self.gather_efficiency)
        outer_s = sent_bytes * (members - inner) / members / (outer_rate * self.outer_efficiency)
        latency = self.start_s * (members > 1) + self.outer_start_s * np.log2(outer)
        return np.maximum(inner_s, outer_s) + latency

    def exchange(self, layouts: Candidates, axes: Sequence[str], sent_bytes: np.ndarray) -> np.ndarray:
        """Return the seconds to send `sent_bytes` per device to its neighbour along each axis, one axis at a time."""
        seconds = np.zeros(len(layouts))
        for axis in axes:
            links, size = layouts.links[axis], layouts.sizes[axis]
            inner_s = sent_bytes / (np.minimum(links.inner_rate, links.exchange_rate) * self.gather_efficiency)
            outer_s = sent_bytes / (links.outer_rate * self.outer_efficiency)
            start = self.start_s + np.where(links.outer_size > 1, self.outer_start_s, 0.0)
            seconds += np.where(size > 1, start + np.where(links.outer_size > 1, outer_s, inner_s), 0.0)
        return seconds

    def _seconds(
        self, layouts: Candidates, axes: Sequence[str], full_bytes: np.ndarray, share: float, kind: str = "sum"
    ) -> np.ndarray:
        if not axes:
            return np.zeros(len(layouts))
        inner, outer = np.ones(len(layouts)), np.ones(len(layouts))
        rate, outer_rate, hops = np.zeros(len(layouts)), np.full(len(layouts), np.inf), np.zeros(len(layouts))
        for axis in axes:
            links = layouts.links[axis]
            inner, outer = inner * links.inner_size, outer * links.outer_size
            is_box = links.exchange_rate >= links.ring_rate
            if kind in ("one_ring", "synchronous"):
                reordered_rate = np.where(is_box, np.minimum(links.inner_rate, self.ring_rate), 0.0)
                axis_rate = np.maximum(links.ring_rate if kind == "one_ring" else links.gather_rate, reordered_rate)
            else:
                is_fast = is_box | (kind == "sum")
                axis_rate = np.where(is_fast, links.inner_rate, links.exchange_rate)
            axis_rate = np.where(links.inner_size > 1, axis_rate, 0.0)
            rate = rate + axis_rate if self.adds_up and kind != "one_ring" else np.maximum(rate, axis_rate)
            outer_rate = np.where(links.outer_size > 1, np.minimum(outer_rate, links.outer_rate), outer_rate)
            hops = hops + links.hops
        members = inner * outer
        latency = self.start_s * (members > 1) + hops * self.hop_s + self.outer_start_s * np.log2(outer)
        inner_s = np.where(inner > 1, full_bytes * (inner - 1) / inner / np.maximum(rate * share, 1.0), 0.0)
        if self.adds_up:
            return inner_s + full_bytes / inner * (outer - 1) / outer / (outer_rate * self.outer_efficiency) + latency
        ring = np.minimum(np.where(inner > 1, rate * share, np.inf), outer_rate * self.outer_efficiency * inner)
        return np.where(outer > 1, full_bytes * (members - 1) / members / ring, inner_s) + latency


def collective_model(chip: ChipConfig, efficiency: Efficiency) -> CollectiveModel:
    """Return the time model of collectives on a chip with these efficiency constants."""
    hop_s = (chip.hop_us or 0.0) * 1e-6
    has_torus = get_platform(chip.platform).has_torus
    e, ring_rate = efficiency, 0.0
    if has_torus and chip.ici_axes == 2:
        ring_rate = 2 * (chip.ici_link_gbs or 0.0) * 1e9 / chip.devices
    return CollectiveModel(
        has_torus, e.gathers, e.sums, e.outside, e.start_s, hop_s, e.outer_start_s, e.scatters, ring_rate
    )


@functools.partial(np.vectorize, otypes=[float])
def half_exchange_hops(shards: float) -> float:
    """Return the load of each link and direction between shards when halves are exchanged, in whole shards.

    Half h of 2n halves moves from shard h // 2 to shard min(h, 2n - 1 - h) (`valkyrie.ops.attention.sharded`).
    """
    n = int(shards)
    hops = sum(abs(min(half, 2 * n - 1 - half) - half // 2) for half in range(2 * n))
    return hops / 2 / (2 * (n - 1)) if n > 1 else 0.0


def exposed_seconds(communication_s: np.ndarray, compute_s: np.ndarray, hidden_share: float) -> np.ndarray:
    """Return the exposed part of `communication_s` seconds of communication.

    The overlapped part is at most the share `hidden_share` of it, and at most `compute_s` seconds.
    """
    return np.maximum((1 - hidden_share) * communication_s, communication_s - compute_s)
