"""Estimates which layout is faster in the two pairs of layouts of the TPU v4 paper (arXiv 2304.01433, table 3).

    python experiments/search/paper.py

The paper's results on 512 v4 chips, as [pipeline, data, model1, model2]: an LLM is 2.3 times faster on 8x8x8 with
[1, 1, 64, 8] than on 4x8x16 with [1, 1, 16, 32]. GPT-3 is 1.2 times faster on 4x8x16 with [16, 4, 1, 8] than on 8x8x8
with [8, 1, 8, 8]. The paper does not give the LLM's shape; this uses a dense decoder with 64 layers of width 16,384.
Each layout has the placement and the microbatches with the shortest estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from valkyrie.config.arguments import parse_run
from valkyrie.search.estimate.rank import rank
from valkyrie.search.request import parse_request

LLM_OVERRIDES = ("model=gpt_1b", "model.name=llm", "model.layers=64", "model.embed=16384", "model.mlp=65536")
LLM_OVERRIDES += ("model.feed_forward=gelu", "model.attention.heads=128", "model.attention.kv_heads=128", "batch=256")
GPT3_OVERRIDES = ("model=gpt3_175b", "batch=1024")


@dataclass(frozen=True)
class Layout:
    """A layout of the paper: the shape of the slice, our partition, and the number of devices along each mesh axis."""

    shape: str
    partition: str
    sizes: Mapping[str, int]


PAIRS: Sequence[tuple[str, Sequence[str], float, Layout, Layout]] = (
    (
        "LLM",
        LLM_OVERRIDES,
        2.3,
        Layout("8x8x8", "2d_tp", {"x": 64, "y": 8, "z": 1}),
        Layout("4x8x16", "2d_tp", {"x": 16, "y": 32, "z": 1}),
    ),
    (
        "GPT-3",
        GPT3_OVERRIDES,
        1.2,
        Layout("4x8x16", "pp_2d_tp", {"z": 16, "w": 4, "x": 1, "y": 8}),
        Layout("8x8x8", "pp_2d_tp", {"z": 8, "w": 1, "x": 8, "y": 8}),
    ),
)


def main() -> None:
    """Print the published and estimated speedup of the first layout of each pair."""
    for name, overrides, published_speedup, fast, slow in PAIRS:
        steps_s = [estimate_step_s(overrides, layout) for layout in (fast, slow)]
        print(
            f"{name}: {fast.shape} {published_speedup} times faster than {slow.shape}, "
            f"estimated {steps_s[1] / steps_s[0]:.2f} ({steps_s[0]:.2f} s and {steps_s[1]:.2f} s a step)"
        )


def estimate_step_s(overrides: Sequence[str], layout: Layout) -> float:
    """Return the shortest estimate of a layout over placements and microbatches, in seconds per step.

    `overrides` select the model. Raises ValueError if the layout is illegal.
    """
    run = parse_run(["mode=search", f"target=v4-{layout.shape}", "precision=bf16_mixed", "remat=full", *overrides])
    space = parse_request(run).space()
    for estimated in rank(run, space).for_partition(layout.partition):
        sizes = estimated.group.candidates.sizes
        if all(int(sizes[axis][estimated.index]) == n for axis, n in layout.sizes.items()):
            return estimated.step_s
    raise ValueError(f"{layout} is no legal layout")


if __name__ == "__main__":
    main()
