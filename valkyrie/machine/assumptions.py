"""Constants of the replay that come neither from the compiled module nor from a chip's figures.

None is fitted to published runs. Sources: `scaling-book` is jax-ml/scaling-book, `tpu-recipes` is
AI-Hypercomputer/tpu-recipes (microbenchmarks).
"""

COLLECTIVE_START_S = 5e-6
"""Seconds to start any collective and to synchronise its devices. An all-gather of 32 kB shards over 4 v5e chips took
8 us, including 3 us for hops (a worked problem in the sharding chapter of the scaling book)."""

ICI_EFFICIENCY = {"all-reduce": 0.65}
"""Share of `ici_link_gbs` that large transfers of a collective reach. All-reduces are slower than all-gathers because
they also add: 235.8 of 360 GB/s (4 links of 90) for 0.6 GB on a 16x16 v6e (tpu-recipes, psum)."""

DEFAULT_ICI_EFFICIENCY = 0.9
"""Share of `ici_link_gbs` for collectives that are not in `ICI_EFFICIENCY`. Measured for all-gathers: 0.82 for 34 MB
over 4 v5e chips (scaling-book), 0.99 on tpu7x (tpu-recipes)."""

DCN_EFFICIENCY = 1.0
"""Share of `dcn_gbs_per_host` that transfers between slices reach. Network cards are assumed to reach their nominal
rate."""

DCN_LATENCY_S = 50e-6
"""Latency in seconds of a message between hosts of two slices, through the memory of both hosts. Assumed, because no
figure is published."""

CORE_BANDWIDTH_RATIO = 6.0
"""Bandwidth between two devices of one chip, as a multiple of the bandwidth of an ICI link. The link between the two
dies of a tpu7x chip has six times the bandwidth of a torus link (cloud.google.com/tpu/docs/tpu7x). Assumed for
v3 too."""

HBM_EFFICIENCY = 0.8
"""Share of `hbm_gbs` that operations without a compiler estimate reach, as well as copies, kernels and elementwise
operations. The compiler's estimate of a 2.1 GB stream on v4 is 945 of 1200 GB/s."""

ELEMENTWISE_FLOOR = 0.25
"""Minimum time of elementwise operations and sums, as a share of the compiler's estimate.

They take the time to move their bytes at `HBM_EFFICIENCY`, but at least this minimum and at most the estimate. The
estimate is too long, because it counts every element as 4 bytes, and adds the time to compute to the time to move. For
x*2+1 in float32, the estimate implies 0.79, 0.81, 0.72 and 0.81 of the published HBM bandwidth (v4, v5e, v5p and v6e).
In bfloat16, it implies only 0.40 on all of them, because 2.1 GB count as 4.3 GB. For a sum in float32, it implies 0.17
to 0.32."""

GATHER_ROW_CYCLES = 13.0
"""Cycles of one core to gather a row by index, besides its tiles. A loop of libtpu 0.0.42.1 on v5e has 1,717 bundles
for 128 rows of 128 columns."""

GATHER_TILE_S = 4e-9
"""Seconds of one core to copy a tile of 128 bfloat16 columns of a gathered row. A profile of an expert layer on v5p,
with two cores per device (marin-community/marin, grug-moe-ep-ring), has about 1.5 ms for 40,960 rows of 2,048 columns.
HBM bandwidth alone would allow a seventh of that; the compiled loop on v5e takes 2 ns per tile besides its copies."""

SORT_STEP_CYCLES = 0.0062
"""Cycles of one core per number and compare-exchange step of a sort. Sorting 16,384 numbers, with 14 x 15 / 2 steps,
has 10,590 bundles (libtpu 0.0.42.1 on v5e)."""

DMA_START_S = 1e-6
"""Seconds to start an asynchronous copy between memories. Assumed: HBM latency (a few hundred nanoseconds), and reading
a descriptor."""

LOOP_ITERATION_S = 0.3e-6
"""Seconds of branching and scalar work in one iteration of a loop. Assumed."""

KERNEL_EFFICIENCY = 0.6
"""Share of peak FLOP/s that a Pallas kernel is assumed to reach if only its FLOPs are known. Splash attention, whose
compiled instructions are known, reaches 0.25 to 1.0 of the peak, depending on chip and pass."""
