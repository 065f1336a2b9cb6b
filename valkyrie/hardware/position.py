"""The position of a device in a slice. Does not import JAX or NumPy, because reports use this module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Position:
    """The position of a device: its slice, the coordinates of its chip on the torus, and its core on the chip.

    Without a torus, the only coordinate is the device's id.
    """

    slice_index: int
    coords: tuple[int, ...]
    core: int

    @staticmethod
    def parse(text: str) -> Position:
        """Parse `slice:x,y,z:core`, as on the command line. Raises ValueError with this form for other texts."""
        try:
            slice_, coords, core = text.split(":")
            return Position(int(slice_), tuple(int(c) for c in coords.split(",")), int(core))
        except ValueError:
            raise ValueError(f"{text} is not a device position. Write slice:x,y,z:core, such as 0:1,3,0:0.") from None

    def __str__(self) -> str:
        return f"{self.slice_index}:{','.join(map(str, self.coords))}:{self.core}"
