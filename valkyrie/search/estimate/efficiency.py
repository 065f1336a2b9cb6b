"""Efficiency constants of a chip: the shares of its published rates that a training step achieves."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from valkyrie.hardware.target import ChipConfig
from valkyrie.machine import assumptions


@dataclass(frozen=True)
class Efficiency:
    """Efficiency constants of a chip and its compiler. Users can set them as `target.chip.estimate`.

    Args:
        products, mixing: Share of peak FLOP/s that large matmuls and attention achieve.
        half_rate_flops: FLOPs of a matmul that achieves half of the share `products`.
        tile: Side of the matrix unit. The feature dimensions of a matmul are rounded up to multiples of it.
        unhidden_loads: Share of the time to move a matmul's operands and result through HBM that does not overlap with
            its multiplications. From replays of compiled steps on v4 and v5e.
        on_chip_bytes: Operands and results of at most this many bytes stay in the chip's own memory.
        float32_passes: Number of bfloat16 matmuls that one float32 matmul takes.
        hbm: Share of HBM bandwidth that a step achieves.
        passes: Number of times that a step moves each activation through HBM, whether it is saved or recomputed.
        passes_again, passes_kept: Additional times if the activation is recomputed, and if it is saved or offloaded.
        logits_passes: Number of times that a step reads and writes the float32 logits in HBM (8 bytes per logit each
            time).
        scores_passes: Number of times that a forward pass moves attention scores through HBM. 0 if a kernel keeps them
            on the chip.
        launch_s: Fixed cost of an operation, in seconds.
        hidden_*: Largest share of each kind of communication that overlaps with compute: gathering weights, gathering
            ZeRO-1 updates, summing gradients, collectives on activations, sends between pipeline stages, and transfers
            to the host. Each kind overlaps at most for the whole compute time, regardless of the other kinds. For
            ZeRO-1 updates and sends, the compute time is no limit.
        gathers, sums: Share of the fast links' rate (within a torus or host) that all-gathers and all-reduces achieve.
        outside: Share of the slow links' rate (between slices or hosts) that collectives achieve.
        scatters: Time of a reduce-scatter relative to an all-gather. 2 if the compiler implements it as an all-reduce
            and a slice.
        start_s, outer_start_s: Latency of starting a collective, and a message between slices or hosts, in seconds.
        whole_sums: 1 if the compiler sums whole arrays where ZeRO-1 needs only a part.
        whole_batches: Share of the time of batch all-gathers that is exposed. If an axis of a parameter is sharded over
            both data axes and other mesh axes, XLA all-gathers the batch to compute the gradient.
        windowed: 1 if each matmul gathers its own operand (windowed einsums), 0 if matmuls share gathered operands.
        apart: 1 if matmuls that share an input each reduce their part of its gradient, 0 if the parts are added first
            and reduced once.
    """

    products: float = 0.85
    mixing: float = 0.4
    half_rate_flops: float = 0.0
    tile: float = 128.0
    unhidden_loads: float = 0.7
    on_chip_bytes: float = 32e6
    float32_passes: float = 3.0
    hbm: float = 0.8
    passes: float = 1.0
    passes_again: float = 0.7
    passes_kept: float = 4.0
    logits_passes: float = 0.8
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
    whole_sums: float = 0.0
    whole_batches: float = 0.4
    windowed: float = 1.0
    apart: float = 0.0


def chip_efficiency(chip: ChipConfig) -> Efficiency:
    """Return the defaults, updated by the chip's `estimate` settings. Raises ValueError for unknown names."""
    names = [field.name for field in fields(Efficiency)]
    if unknown := [name for name in chip.estimate if name not in names]:
        raise ValueError(
            f"target.chip.estimate.{unknown[0]} is not an efficiency constant. Use one of {', '.join(names)}."
        )
    return replace(Efficiency(), **chip.estimate)
