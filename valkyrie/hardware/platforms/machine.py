"""The platform `any`: the accelerators of this machine if there are any, else simulated CPU devices."""

from __future__ import annotations

from valkyrie.hardware.platforms.cpu import Cpu


class AnyPlatform(Cpu):
    """The devices of this machine. Programs are compiled for it as for a CPU."""

    name = "any"
    jax_name = None
    runs_on_host = False

    def is_simulated(self, accelerators: int) -> bool:
        """Return whether there are no accelerators."""
        return accelerators == 0


PLATFORM = AnyPlatform()
