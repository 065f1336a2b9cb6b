"""Fluid model of links: transfers in flight share them fairly, and no link is idle while a transfer could use it.

While it is the only one in flight, a transfer uses each of its links for a known share of the time. Transfers that
together exceed the capacity of a link slow down by the same factor until they fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_NEGLIGIBLE_S = 1e-12
"""Latency and work below this count as zero, in seconds."""


@dataclass(eq=False)
class Transfer:
    """A transfer in flight.

    Args:
        latency: Seconds before bytes move.
        work: Seconds to move the bytes if no other transfer shares the links.
        link_shares: Share of that time during which each link is in use.
        tag: (name, collective), or (name, None) for a copy.
        between_devices: False for a copy between memories of one device.
        started: Time on the clock of `Links` at which it started, in seconds.
        ended: Time at which all bytes had arrived, or None while it is in flight.
    """

    latency: float
    work: float
    link_shares: dict[str, float]
    tag: Any = None
    between_devices: bool = True
    started: float = 0.0
    ended: float | None = None
    _remaining_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._remaining_s = self.work

    @property
    def finished(self) -> bool:
        """Whether all bytes have arrived."""
        return self.latency <= _NEGLIGIBLE_S and self._remaining_s <= _NEGLIGIBLE_S

    def advance(self, seconds: float, rate: float) -> None:
        """Advance the transfer by `seconds`. `rate` is its speed relative to an uncontended transfer, from 0 to 1."""
        if self.latency > _NEGLIGIBLE_S:
            self.latency = max(self.latency - seconds, 0.0)
        else:
            self._remaining_s -= seconds * rate

    def remaining(self, rate: float) -> float:
        """Return the seconds until the latency ends or, after that, until all bytes have arrived at this rate."""
        if self.latency > _NEGLIGIBLE_S:
            return self.latency
        return max(self._remaining_s, 0.0) / rate if rate > 0 else float("inf")


class Links:
    """A clock and the transfers in flight. `sending_s`: seconds with at least one transfer between devices."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sending_s = 0.0
        self.active: list[Transfer] = []

    def start(self, transfer: Transfer) -> None:
        """Start a transfer at the current time. A transfer without latency and work ends immediately."""
        transfer.started = self.now
        if transfer.finished:
            transfer.ended = self.now
        else:
            self.active.append(transfer)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock by `seconds` of compute. Transfers continue."""
        end = self.now + seconds
        while self.active and self.now < end:
            self._step(end)
        self.now = end

    def wait(self, transfer: Transfer) -> float:
        """Advance the clock until a transfer has arrived. Returns the seconds waited."""
        before = self.now
        while transfer.ended is None:
            self._step(float("inf"))
        return self.now - before

    def _step(self, end: float) -> None:
        """Advance the clock to the next change of a transfer, at most to `end`."""
        rates = _fair_rates(self.active)
        until_change = min(t.remaining(rate) for t, rate in zip(self.active, rates, strict=True))
        seconds = min(until_change, end - self.now)
        self.now += seconds
        if any(transfer.between_devices for transfer in self.active):
            self.sending_s += seconds
        for transfer, rate in zip(self.active, rates, strict=True):
            transfer.advance(seconds, rate)
            if transfer.finished:
                transfer.ended = self.now
        self.active = [t for t in self.active if t.ended is None]


def _fair_rates(transfers: list[Transfer]) -> list[float]:
    """Return each transfer's speed relative to an uncontended transfer, from 0 (also during its latency) to 1.

    All speeds rise together. The speed of a transfer stops rising once one of its links is full.
    """
    moving = [i for i, t in enumerate(transfers) if t.latency <= _NEGLIGIBLE_S]
    rates = [0.0] * len(transfers)
    if len(moving) == 1:
        rates[moving[0]] = 1.0
        return rates
    spare: dict[str, float] = {link: 1.0 for i in moving for link in transfers[i].link_shares}
    while moving:
        demand: dict[str, float] = {}
        for i in moving:
            for link, share in transfers[i].link_shares.items():
                demand[link] = demand.get(link, 0.0) + share
        rise = min([1.0 - rates[moving[0]], *(spare[link] / needed for link, needed in demand.items() if needed > 0)])
        for i in moving:
            rates[i] += rise
        for link, needed in demand.items():
            spare[link] -= rise * needed
        full = {link for link in demand if spare[link] <= 1e-9}
        rising = [i for i in moving if rates[i] < 1.0 - 1e-9 and not full & transfers[i].link_shares.keys()]
        if len(rising) == len(moving):
            break
        moving = rising
    return rates
