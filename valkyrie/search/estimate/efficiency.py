"""Efficiency of a chip: the shares of its published figures that a step achieves, for the estimate."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from valkyrie.hardware.target import ChipConfig
from valkyrie.machine import assumptions


@dataclass(frozen=True)
class Efficiency:
    """Constants of a chip and its compiler: shares of published figures, and of hidden communication.

    Args:
        products, mixing: Share of peak FLOP/s of large products, and of attention.
        half_rate_flops: FLOPs of a product that achieves half of that share.
        tile: Side of the matrix unit.
        float32_passes: Passes of a float32 product.
        hbm: Share of HBM bandwidth.
        passes, passes_again, passes_kept: Moves of a declared activation per step; additional moves if it is
            recomputed, or saved.
        logits_passes: Moves of the logits.
        scores_passes: Moves of attention scores in a forward pass, unless a kernel keeps them on the chip.
        launch_s: Fixed cost of an operation, in seconds.
        hidden_weights, ...: Share of communication that overlaps with compute.
        gathers, sums, outside: Share of link rates (`CollectiveModel`).
        scatters: Time of a reduce-scatter over an all-gather; 2 if the compiler sums whole arrays and takes a part.
        start_s, outer_start_s: Start of a collective, and of a message between hosts, in seconds.
        loop_sums: 1 if the compiler leaves gradient sums in a pipeline's loop.
        whole_sums: 1 if the compiler sums whole arrays where ZeRO-1 needs only a part.
        whole_batches: Exposed share of gathering whole batches for gradients of parameters on two kinds of axes.
        windowed: 1 if each product gathers its own operands (windowed einsums), 0 if products share them.
        apart: 1 if gradients of an array that several products read are summed once per product.
    """

    products: float = 0.85
    mixing: float = 0.4
    half_rate_flops: float = 0.0
    tile: float = 128.0
    float32_passes: float = 3.0
    hbm: float = 0.8
    passes: float = 1.0
    passes_again: float = 0.7
    passes_kept: float = 4.0
    logits_passes: float = 3.0
    scores_passes: float = 0.0
    launch_s: float = 2e-6
    hidden_weights: float = 0.7
    hidden_updates: float = 0.7
    hidden_gradients: float = 0.3
    hidden_activations: float = 0.1
    hidden_stages: float = 0.0
    hidden_host: float = 0.7
    gathers: float = 0.9
    sums: float = 0.65
    outside: float = 0.9
    scatters: float = 1.0
    start_s: float = assumptions.COLLECTIVE_START_S
    outer_start_s: float = assumptions.DCN_LATENCY_S
    loop_sums: float = 0.0
    whole_sums: float = 0.0
    whole_batches: float = 0.4
    windowed: float = 1.0
    apart: float = 0.0


def efficiency_of(chip: ChipConfig) -> Efficiency:
    """Return the constants of a chip's file, with defaults. Raises ValueError for an unknown name."""
    known = [field.name for field in fields(Efficiency)]
    if unknown := [name for name in chip.estimate if name not in known]:
        raise ValueError(
            f"target.chip.estimate.{unknown[0]} is no constant of the estimate: it has {', '.join(known)}."
        )
    return replace(Efficiency(), **chip.estimate)
