"""Work to send tokens to parameters such as experts, besides collectives and products with the parameters."""

from __future__ import annotations

from typing import NamedTuple

from valkyrie.axes import GatheredRows


class DispatchWork(NamedTuple):
    """Work of a forward pass to send tokens to parameters and back, such as experts. All numbers are per token.

    Args:
        rows: Rows that are sorted twice by the numbers of their experts, and gathered by index there and back.
        sent_rows: Rows that are also sorted and gathered on the device that sends them.
        mask_elements: Elements of a one-hot mask, which two products multiply with the stream.
        gathered_rows: How many rows a device has for other devices, or None.
        sends_rows: Whether all-to-alls send `Block.dispatched_activations`. Otherwise, devices gather them, and
            reduce-scatter the results.
    """

    rows: float = 0.0
    sent_rows: float = 0.0
    mask_elements: float = 0.0
    gathered_rows: GatheredRows | None = None
    sends_rows: bool = False
