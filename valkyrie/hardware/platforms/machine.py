"""The platform `any`: the accelerators of this machine if there are any, else simulated CPU devices."""

from __future__ import annotations

from valkyrie.hardware.platforms.cpu import Cpu


class AnyPlatform(Cpu):
    """The accelerators of this machine, or simulated CPU devices if it has none.

    Ahead-of-time compiles (`devices_to_compile_for`) always target simulated CPU devices.
    """

    name = "any"
    jax_name = None
    runs_on_host = False

    def is_simulated(self, accelerator_count: int) -> bool:
        """Return whether there are no accelerators."""
        return accelerator_count == 0


PLATFORM = AnyPlatform()
