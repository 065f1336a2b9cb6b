"""Transfers in flight share links fairly, and no link is idle while a transfer could use it.

A fluid model: on its own, a transfer uses each of its links for a known share of its time. Transfers that together need
more than all of a link slow down by the same factor until it suffices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_DONE = 1e-12


@dataclass(eq=False)
class Transfer:
    """A transfer in flight.

    Args:
        latency: Seconds before bytes move.
        work: Seconds to move the bytes if no other transfer shares the links.
        needs: Share of each link in use during that time.
        about: Name, and collective or None for a copy.
        between_devices: False for a copy between memories of one device.
    """

    latency: float
    work: float
    needs: dict[str, float]
    about: Any = None
    between_devices: bool = True
    started: float = 0.0
    ended: float | None = None
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.work

    @property
    def finished(self) -> bool:
        """Whether all bytes have arrived."""
        return self.latency <= _DONE and self._left <= _DONE

    def advance(self, seconds: float, rate: float) -> None:
        """Advance the transfer; `rate` is its speed as a share of its speed without others."""
        if self.latency > _DONE:
            self.latency = max(self.latency - seconds, 0.0)
        else:
            self._left -= seconds * rate

    def remaining(self, rate: float) -> float:
        """Return the seconds until its latency ends, or until its bytes have arrived at this rate."""
        if self.latency > _DONE:
            return self.latency
        return max(self._left, 0.0) / rate if rate > 0 else float("inf")


class Links:
    """A clock with the transfers in flight. `sending_s`: seconds during which any was between devices."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sending_s = 0.0
        self.active: list[Transfer] = []

    def start(self, transfer: Transfer) -> None:
        """Start a transfer now."""
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
        rates = _shares(self.active)
        pause = min(t.remaining(rate) for t, rate in zip(self.active, rates, strict=True))
        seconds = min(pause, end - self.now)
        self.now += seconds
        if any(transfer.between_devices for transfer in self.active):
            self.sending_s += seconds
        for transfer, rate in zip(self.active, rates, strict=True):
            transfer.advance(seconds, rate)
            if transfer.finished:
                transfer.ended = self.now
        self.active = [t for t in self.active if t.ended is None]


def _shares(transfers: list[Transfer]) -> list[float]:
    """Return each transfer's speed as a share of its speed without others.

    All speeds rise together; a transfer stops rising once one of its links is full.
    """
    moving = [i for i, t in enumerate(transfers) if t.latency <= _DONE]
    rates = [0.0] * len(transfers)
    if len(moving) == 1:
        rates[moving[0]] = 1.0
        return rates
    room: dict[str, float] = {link: 1.0 for i in moving for link in transfers[i].needs}
    while moving:
        wanted: dict[str, float] = {}
        for i in moving:
            for link, share in transfers[i].needs.items():
                wanted[link] = wanted.get(link, 0.0) + share
        rise = min([1.0 - rates[moving[0]], *(room[link] / want for link, want in wanted.items() if want > 0)])
        for i in moving:
            rates[i] += rise
        for link, want in wanted.items():
            room[link] -= rise * want
        full = {link for link in wanted if room[link] <= 1e-9}
        stay = [i for i in moving if rates[i] < 1.0 - 1e-9 and not full & transfers[i].needs.keys()]
        if len(stay) == len(moving):
            break
        moving = stay
    return rates
