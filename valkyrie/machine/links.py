"""Fluid model of links: transfers in flight share them fairly, and no link is idle while a transfer could use it.

A transfer that is alone uses each of its links for a known share of the time. Transfers that together exceed the
capacity of a link slow down by the same factor until they fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_NEGLIGIBLE_S = 1e-12
"""Latency and work below this count as zero, in seconds."""


@dataclass(eq=False)
class Transfer:
    """A transfer between devices, or a copy between memories of one device.

    Args:
        latency_s: Remaining seconds before bytes move.
        work_s: Seconds to move all bytes if no other transfer shares the links.
        link_shares: Share of `work_s` during which each link is in use, by name of the link.
        tag: (name, collective), or (name, None) for a copy.
        is_between_devices: False for a copy between memories of one device.
        start_s: Start of the transfer on the clock of `LinkSimulator`, in seconds.
        end_s: Arrival of the last byte on that clock, or None until then.
    """

    latency_s: float
    work_s: float
    link_shares: dict[str, float]
    tag: Any = None
    is_between_devices: bool = True
    start_s: float = 0.0
    end_s: float | None = None
    _remaining_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._remaining_s = self.work_s

    @property
    def is_finished(self) -> bool:
        """Whether all bytes have arrived."""
        return self.latency_s <= _NEGLIGIBLE_S and self._remaining_s <= _NEGLIGIBLE_S

    def advance(self, duration_s: float, rate: float) -> None:
        """Advance the transfer by `duration_s`, which must be at most `remaining_s(rate)`.

        `rate` is the speed relative to an uncontended transfer, from 0 to 1. It has no effect during the latency.
        """
        if self.latency_s > _NEGLIGIBLE_S:
            self.latency_s = max(self.latency_s - duration_s, 0.0)
        else:
            self._remaining_s -= duration_s * rate

    def remaining_s(self, rate: float) -> float:
        """Return the seconds until the latency ends or, if bytes already move, until the last byte arrives.

        `rate` is as in `advance`. At rate 0, moving bytes never arrive: the result is infinite.
        """
        if self.latency_s > _NEGLIGIBLE_S:
            return self.latency_s
        return max(self._remaining_s, 0.0) / rate if rate > 0 else float("inf")


class LinkSimulator:
    """A clock and the transfers in flight. `sending_s`: seconds with at least one transfer between devices."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sending_s = 0.0
        self.active_transfers: list[Transfer] = []

    def start(self, transfer: Transfer) -> None:
        """Start a transfer at the current time. A transfer without latency and work ends immediately."""
        transfer.start_s = self.now_s
        if transfer.is_finished:
            transfer.end_s = self.now_s
        else:
            self.active_transfers.append(transfer)

    def pass_time(self, duration_s: float) -> None:
        """Advance the clock by `duration_s` of compute. Transfers continue."""
        end_s = self.now_s + duration_s
        while self.active_transfers and self.now_s < end_s:
            self._advance_to_change(end_s)
        self.now_s = end_s

    def compute(self, duration_s: float, slowdown: float) -> None:
        """Advance the clock by compute that takes `duration_s` alone, and `slowdown` times as long during transfers."""
        while duration_s > _NEGLIGIBLE_S and slowdown > 1 and any(t.is_between_devices for t in self.active_transfers):
            start_s = self.now_s
            self._advance_to_change(start_s + slowdown * duration_s)
            duration_s -= (self.now_s - start_s) / slowdown
        self.pass_time(max(duration_s, 0.0))

    def wait(self, transfer: Transfer) -> float:
        """Advance the clock until a transfer has arrived. Returns the seconds waited."""
        start_s = self.now_s
        while transfer.end_s is None:
            self._advance_to_change(float("inf"))
        return self.now_s - start_s

    def _advance_to_change(self, end_s: float) -> None:
        """Advance the clock until a latency ends or a transfer arrives, at most to `end_s`."""
        rates = _fair_rates(self.active_transfers)
        until_change_s = min(t.remaining_s(rate) for t, rate in zip(self.active_transfers, rates, strict=True))
        duration_s = min(until_change_s, end_s - self.now_s)
        self.now_s += duration_s
        if any(transfer.is_between_devices for transfer in self.active_transfers):
            self.sending_s += duration_s
        for transfer, rate in zip(self.active_transfers, rates, strict=True):
            transfer.advance(duration_s, rate)
            if transfer.is_finished:
                transfer.end_s = self.now_s
        self.active_transfers = [t for t in self.active_transfers if t.end_s is None]


def _fair_rates(transfers: list[Transfer]) -> list[float]:
    """Return the speed of each transfer relative to an uncontended transfer, from 0 to 1.

    The speed is 0 during the latency. All other speeds rise together from 0 to 1, but the speed of a transfer stops
    rising once one of its links is full (max-min fairness).
    """
    moving_indices = [i for i, t in enumerate(transfers) if t.latency_s <= _NEGLIGIBLE_S]
    rates = [0.0] * len(transfers)
    if len(moving_indices) == 1:
        rates[moving_indices[0]] = 1.0
        return rates
    spare_capacity: dict[str, float] = {link: 1.0 for i in moving_indices for link in transfers[i].link_shares}
    while moving_indices:
        demand_by_link: dict[str, float] = {}
        for i in moving_indices:
            for link, share in transfers[i].link_shares.items():
                demand_by_link[link] = demand_by_link.get(link, 0.0) + share
        rate_increase = min(
            [
                1.0 - rates[moving_indices[0]],
                *(spare_capacity[link] / demand for link, demand in demand_by_link.items() if demand > 0),
            ]
        )
        for i in moving_indices:
            rates[i] += rate_increase
        for link, demand in demand_by_link.items():
            spare_capacity[link] -= rate_increase * demand
        full_links = {link for link in demand_by_link if spare_capacity[link] <= 1e-9}
        rising_indices = [
            i for i in moving_indices if rates[i] < 1.0 - 1e-9 and not full_links & transfers[i].link_shares.keys()
        ]
        if len(rising_indices) == len(moving_indices):
            break
        moving_indices = rising_indices
    return rates
