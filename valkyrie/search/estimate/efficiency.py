"""What a chip reaches of its published figures in a step, for the estimate."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from valkyrie.hardware.target import ChipConfig
from valkyrie.machine import assumptions


@dataclass(frozen=True)
class Efficiency:
    """A few constants of a chip: shares of its figures that are reached, and of communication that is hidden.

    `products`, `mixing`: share of peak FLOP/s of large products and of attention; `half_rate_flops`: FLOPs of a product
    that reaches half of that; `tile`: the matrix unit's side; `float32_passes`: passes of a float32 product.
    `hbm`: share of HBM's bandwidth. `passes`: how often an activation that blocks declare is moved in a step, with
    `passes_again` where it is computed again and `passes_kept` where it is kept; `logits_passes`: the logits;
    `scores_passes`: attention's scores in a forward pass, where no kernel keeps them on the chip.
    `launch_s`: what an operation costs beside its work. `hidden_...`: shares of communication beside which something
    is computed. `gathers`, `sums`, `outside`: shares of the links' rates (`Network`). `scatters`: how many times a
    reduce-scatter takes of an all-gather; 2 where the compiler sums whole and takes a part. `start_s`: the start of a
    collective, `outer_start_s` of a message between hosts. `loop_sums`: 1 where the compiler leaves sums of gradients
    in a pipeline's loop, `whole_sums`: 1 where it sums whole what ZeRO-1 needs in parts. `whole_batches`: the share
    that is waited for of gathering whole batches for gradients of parameters split over two kinds of axes. `apart`: 1
    where it sums the gradient of what several products read once for each of them. `windowed`: 1 where products gather
    their operands as they go, each for itself (windowed einsums); 0 where products share what is gathered.
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
    """Return the constants of a chip: those of its file, else the defaults; ValueError for a name that is none."""
    known = [field.name for field in fields(Efficiency)]
    if unknown := [name for name in chip.estimate if name not in known]:
        raise ValueError(
            f"target.chip.estimate.{unknown[0]} is no constant of the estimate: it has {', '.join(known)}."
        )
    return replace(Efficiency(), **chip.estimate)
