"""Cost of collectives by NCCL: in an NVLink domain from a table of measured speeds, between domains from the network.

A domain is a node, or several nodes that NVLink joins (NVL72). All its GPUs send over their own network card at the
same time. Within a domain, NVLink carries the same data, so the slower of the two sets the time. Each further domain of
a ring adds a latency. GPUs without NVLink exchange over PCIe, which takes its place.
"""

from __future__ import annotations

import math

import numpy as np

from valkyrie.compiled.collectives import Collective, min_bytes_sent
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.figures import GpuFigures
from valkyrie.machine import gpu_assumptions as assumptions
from valkyrie.machine.gpu_operations import interpolate
from valkyrie.machine.network import CollectiveCost, Machine
from valkyrie.parallel.axis_links import DCN

NVLINK, PCIE = "nvlink", "pcie"
"""The link between the GPUs of a domain, in `CollectiveCost.busy_s`. The network is `DCN`."""
_LIKE_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


class NcclModel:
    """Computes the costs of collectives on GPUs. The keys of `notes` are the assumptions made so far."""

    def __init__(self, machine: Machine, mask: np.ndarray | None = None) -> None:
        """`mask`: True for the devices that the program's replica groups refer to, or None for all devices."""
        self.notes: dict[str, None] = {}
        chip, positions = machine.chip, machine.positions
        figures = chip.gpu
        if figures is None or not figures.collectives:
            figures = known_chips()[assumptions.FALLBACK_CHIP].gpu
        assert figures is not None
        self._figures: GpuFigures = figures
        self._link = NVLINK if chip.gpu is None or chip.gpu.nvlinks else PCIE
        # A described GPU has the coordinates (domain, host, GPU); an attached one only its id.
        host_gpus, self._domain_gpus = math.prod(chip.host_bounds) or 1, machine.topology.domain_chips
        domains = [p.coords[0] // (1 if len(p.coords) > 1 else self._domain_gpus) for p in positions]
        self._domains = np.array([domain for i, domain in enumerate(domains) if mask is None or mask[i]])
        own_switch, table_switch = chip.switch_gbs or 1.0, known_chips()[assumptions.FALLBACK_CHIP].switch_gbs or 1.0
        self._switch_factor = 1.0 if chip.gpu and chip.gpu.collectives else own_switch / table_switch
        self._network_rate = (chip.dcn_gbs_per_host or math.inf) * 1e9 * assumptions.NETWORK_EFFICIENCY / host_gpus
        self._routing_imbalance = machine.routing_imbalance
        self._cache: dict[Collective, CollectiveCost] = {}

    def cost(self, collective: Collective) -> CollectiveCost:
        """Return the cost of one run of a collective, cached by collective."""
        if collective not in self._cache:
            self._cache[collective] = self._cost(collective)
        return self._cache[collective]

    def _cost(self, collective: Collective) -> CollectiveCost:
        if collective.pairs is not None:
            return self._permute_cost(collective.pairs, collective.full_bytes)
        if collective.groups is None or collective.full_bytes <= 0:
            return CollectiveCost()
        counts = [np.unique(group, return_counts=True)[1] for group in self._domains[collective.groups]]
        members, domain_count = collective.groups.shape[1], max(len(count) for count in counts)
        most, fewest = max(int(count.max()) for count in counts), min(int(count.min()) for count in counts)
        if most > fewest:
            self._add_uneven_note(members, domain_count, most, fewest)
        is_ragged = collective.kind == "ragged-all-to-all"
        full_bytes = collective.full_bytes * (self._routing_imbalance if is_ragged else 1.0)
        return self._group_cost(collective.kind, full_bytes, domain_count, members, most, fewest)

    def _group_cost(
        self, kind: str, full_bytes: float, domain_count: int, members: int, most: int, fewest: int
    ) -> CollectiveCost:
        """Return the cost of a collective of `members` GPUs in `domain_count` domains.

        The domain with the `most` members sends the most over NVLink; the one with the `fewest` has the fewest cards.
        """
        bytes_sent = min_bytes_sent(kind, full_bytes, members)
        nvlink_s = self._nvlink_s(kind, full_bytes, most) if most > 1 else 0.0
        if domain_count == 1:
            start_s = min(self._nvlink_s(kind, 1.0, most), nvlink_s)
            return _make_cost(start_s, {self._link: nvlink_s - start_s}, bytes_sent, {self._link: bytes_sent})
        outside_bytes = full_bytes * (members - fewest) / members if kind in _LIKE_ALL_TO_ALL else bytes_sent / fewest
        latency_s = assumptions.NETWORK_START_S + (domain_count - 1) * assumptions.NODE_HOP_S
        busy_s = {DCN: outside_bytes / self._network_rate}
        if nvlink_s:
            busy_s[self._link] = max(nvlink_s - self._nvlink_s(kind, 1.0, most), 0.0)
        return _make_cost(latency_s, busy_s, bytes_sent, {DCN: outside_bytes, self._link: bytes_sent - outside_bytes})

    def _add_uneven_note(self, members: int, domain_count: int, most: int, fewest: int) -> None:
        """Note that groups are split unevenly over domains, and how much longer that takes than an even split."""
        kind, full_bytes = "all-gather", 2.0**28
        even_count = -(-members // self._domain_gpus)
        even_split = (even_count, members, -(-members // even_count), members // even_count)
        even_s = self._group_cost(kind, full_bytes, *even_split).total_s
        uneven_s = self._group_cost(kind, full_bytes, domain_count, members, most, fewest).total_s
        self.notes[
            f"the mesh splits groups of {members} GPUs unevenly over NVLink domains of {self._domain_gpus}: their "
            f"collectives take longer (an all-gather of 256 MiB {uneven_s / even_s:.1f} times as long)"
        ] = None

    def _permute_cost(self, pairs: np.ndarray, message_bytes: float) -> CollectiveCost:
        if not len(pairs) or message_bytes <= 0:
            return CollectiveCost()
        source, target = self._domains[pairs].T
        is_outside = bool((source != target).any())
        start_s = self._nvlink_s("collective-permute", 1.0, 2)
        busy_s = {self._link: max(self._nvlink_s("collective-permute", message_bytes, 2) - start_s, 0.0)}
        link = DCN if is_outside else self._link
        if is_outside:
            start_s = assumptions.NETWORK_START_S + assumptions.NODE_HOP_S
            busy_s[DCN] = message_bytes / self._network_rate
        return _make_cost(start_s, busy_s, message_bytes, {link: message_bytes})

    def _nvlink_s(self, kind: str, full_bytes: float, members: int) -> float:
        """Return the seconds of a collective among `members` GPUs of a domain. Small arrays take a constant time."""
        tables = self._figures.collectives
        table = tables.get("all-to-all" if kind in _LIKE_ALL_TO_ALL else kind) or tables["all-gather"]
        size = min(table, key=lambda members_in_table: abs(math.log(members_in_table / members)))
        if self._switch_factor != 1.0:
            self.notes[
                f"collectives between GPUs of a host take the time measured on {assumptions.FALLBACK_CHIP}, and "
                f"{1 / self._switch_factor:.2g} times its part beyond 64 KiB, the ratio of switch_gbs"
            ] = None
        rates = dict(zip(assumptions.COLLECTIVE_SIZES, table[size], strict=True))
        least_bytes = assumptions.COLLECTIVE_SIZES[0]
        start_s = least_bytes / (rates[least_bytes] * 1e9)
        table_s = max(full_bytes, least_bytes) / (interpolate(rates, full_bytes) * 1e9)
        return start_s + max(table_s - start_s, 0.0) / self._switch_factor


def _make_cost(
    latency_s: float, busy_s: dict[str, float], bytes_sent: float, bytes_by_link: dict[str, float]
) -> CollectiveCost:
    transfer_s = max(busy_s.values(), default=0.0)
    return CollectiveCost(
        total_s=latency_s + transfer_s,
        latency_s=latency_s,
        busy_s={link: seconds for link, seconds in busy_s.items() if seconds > 0},
        bytes_sent=bytes_sent,
        bytes_by_axis={link: sent for link, sent in bytes_by_link.items() if sent > 0},
    )
