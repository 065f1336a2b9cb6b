"""Seconds to sort and move the rows of tokens that are sent to parameters such as experts (`DispatchWork`)."""

from __future__ import annotations

import numpy as np

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig
from valkyrie.machine.rows import gather_seconds, sort_seconds
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.remat import ActivationLocation, RematConfig
from valkyrie.search.estimate.work import Mixing


def pass_counts(mixing: Mixing, remat: RematConfig) -> tuple[int, int]:
    """Return how often a microbatch sends tokens to the parameters of a layer, and how often it sends results back.

    Both happen in the forward and in the backward pass. Recomputation sends the tokens again, and results only if the
    backward pass needs their sums.
    """
    is_recomputed = remat.location(mixing.name) is ActivationLocation.nowhere
    return 2 + is_recomputed, 2 + (is_recomputed and mixing.is_result_needed)


def row_seconds(
    mixing: Mixing,
    layouts: Candidates,
    tokens: np.ndarray,
    width: np.ndarray,
    itemsize: int,
    chip: ChipConfig,
    on_chip_bytes: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the seconds to move rows to the parameters, to move them back, and to sort their numbers once, in a layer.

    Rows of a limited buffer are added to float32 sums. If these are in HBM, XLA for TPUs first gathers the rows in the
    order of their tokens.

    Args:
        mixing: The block, with a single dispatched axis.
        layouts: The layouts.
        tokens: Tokens per device and microbatch, for each layout.
        width: Channels per device, for each layout.
        itemsize: Bytes of a number in the compute dtype.
        chip: The chip.
        on_chip_bytes: Size of the largest array that stays on the chip.
    """
    work = mixing.dispatch
    sent_rows = np.where(layouts.member_count(mixing.dispatched_axes) > 1, work.sent_rows, 0.0)
    rows = tokens * (work.rows * layouts.row_copies(work.gathered_rows) + sent_rows)
    gather_s = gather_seconds(rows, width, itemsize, chip)
    if work.gathered_rows is None or work.sends_rows:
        return gather_s, gather_s, sort_seconds(rows, chip)
    # Devices sort the assignments of all tokens that they gather.
    all_copies = layouts.row_copies(work.gathered_rows._replace(full_shards=np.inf, capacity=None))
    is_limited = layouts.row_copies(work.gathered_rows) < layouts.row_copies(work.gathered_rows._replace(capacity=None))
    in_hbm = 4 * tokens * layouts.member_count(mixing.dispatched_axes) * width > on_chip_bytes
    orders_rows = is_limited & in_hbm & get_platform(chip.platform).runs_pallas_tpu
    ordering_s = np.where(orders_rows, gather_seconds(rows, width, 4, chip), 0.0)
    return gather_s, gather_s + ordering_s, sort_seconds(tokens * work.rows * all_copies, chip)


def gathered_token_bytes(
    mixing: Mixing, layouts: Candidates, tokens: np.ndarray, width: np.ndarray, itemsize: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that gathered tokens, and their sums, move through HBM in a layer.

    Gathered tokens are written. Sums are written as zeros, and read and converted before the reduce-scatter. Moving
    rows to and from both is in `row_seconds`, which has the same arguments.
    """
    members = layouts.member_count(mixing.dispatched_axes)
    gathers_tokens = (members > 1) & (not mixing.dispatch.sends_rows)
    gathered = np.where(gathers_tokens, tokens * members * width, 0.0)
    return itemsize * gathered, (2 * 4 + itemsize) * gathered
