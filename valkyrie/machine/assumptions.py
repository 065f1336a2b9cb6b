"""Every constant of the replay that is neither in the compiled module nor among a chip's figures.

None is fitted to a single published row. Sources: `scaling-book` is jax-ml/scaling-book, `tpu-recipes` is
AI-Hypercomputer/tpu-recipes (microbenchmarks).
"""

from typing import NamedTuple

COLLECTIVE_START_S = 5e-6
"""Start and barrier of any collective. An all-gather of 32 kB shards over 4 v5e chips took 8 us of which 3 are hops
(scaling-book, sharding, worked problem)."""

ICI_EFFICIENCY = {"all-reduce": 0.65}
ICI_EFFICIENCY_OTHERWISE = 0.9
"""Share of `ici_link_gbs` that large transfers reach. All-gathers: 0.82 for 34 MB over 4 v5e chips (scaling-book),
0.99 on tpu7x (tpu-recipes). All-reduce, which also adds: 235.8 GB/s of 4 x 90 for 0.6 GB on 16x16 v6e (tpu-recipes,
psum)."""

DCN_EFFICIENCY = 1.0
"""Share of `dcn_gbs_per_host` that transfers between slices reach; a host's network cards at their nominal rate."""

DCN_LATENCY_S = 50e-6
"""A message between hosts of two slices, through both hosts' memories. Assumed; no published figure."""

CORE_LINKS = 6.0
"""Bandwidth between two devices of one chip, in ICI links: tpu7x's die-to-die link is six times a link of its torus
(cloud.google.com/tpu/docs/tpu7x). Assumed for v3 too."""

HBM_EFFICIENCY = 0.8
"""Share of `hbm_gbs` for operations without the compiler's estimate. Its own estimate of a 2.1 GB stream on v4 is 945
of 1200 GB/s."""

ELEMENTWISE_FLOOR = 0.25
"""Elementwise operations and sums take their bytes at the rate above, at least this share of the compiler's estimate.
Its estimate counts every number as 4 bytes and adds computing to moving: x*2+1 on 2.1 GB of bfloat16 is given the
cycles of 4.3 GB (0.40 of HBM's rate on v4, v5e, v5p and v6e alike; float32 0.79, 0.81, 0.72, 0.81), a sum of float32
0.32 to 0.17 of it."""

HOST_GBS = {"v6e": 32.0}
HOST_GBS_OTHERWISE = 16.0
"""GB/s one way between a chip's memory and its host's, over PCIe; gen 4 x8 up to v5p, gen 4 x16 on v6e
(scaling-book)."""

DMA_START_S = 1e-6
"""Start of an asynchronous copy between memories. Assumed: a few hundred nanoseconds of HBM latency and a
descriptor."""

LOOP_ITERATION_S = 0.3e-6
"""Branch and scalar work of one iteration of a loop. Assumed."""

KERNEL_EFFICIENCY = 0.6
"""Share of peak FLOP/s a Pallas kernel reaches where it states its FLOPs alone. Splash, whose bundles are known,
reaches 0.25 to 1.0 of it, by chip and pass."""

CORES = {"v4": 2, "v5p": 2}
"""TensorCores behind one JAX device (megacore): the grid of a Pallas kernel is split between them. Elsewhere 1."""


class SplashBundles(NamedTuple):
    """VLIW bundles of a splash attention kernel on one core, bfloat16, causal.

    Each for a block of 512x512 at head size 128, of 1024x1024 at 128, and of 512x512 at 256.
    """

    step: tuple[int, int, int]
    """Every step of the grid takes these, also one at a block that the mask skips: fetching, index arithmetic, and in
    the fused backward pass clearing dq."""
    block: tuple[int, int, int]
    """A block that the mask does not skip."""
    ends: tuple[int, int, int]
    """Beginning and ending a row of blocks (dkv: a column): clearing the sums, then normalising and writing them."""


SPLASH_BUNDLES = {
    "v4": {
        "forward": SplashBundles((398, 398, 397), (1569, 6611, 2882), (973, 1958, 1149)),
        "dkv_dq": SplashBundles((632, 698, 631), (2837, 11259, 5020), (365, 749, 749)),
        "dkv": SplashBundles((537, 540, 535), (2368, 10266, 4089), (365, 749, 749)),
        "dq": SplashBundles((409, 409, 407), (1687, 6697, 3176), (173, 365, 365)),
    },
    "v5e": {
        "forward": SplashBundles((336, 336, 337), (1192, 4886, 2179), (688, 1369, 841)),
        "dkv_dq": SplashBundles((412, 476, 413), (2312, 9222, 4545), (324, 644, 644)),
        "dkv": SplashBundles((347, 350, 350), (1918, 7270, 3741), (324, 644, 644)),
        "dq": SplashBundles((315, 315, 319), (1488, 5701, 2917), (162, 324, 324)),
    },
    "v5p": {
        "forward": SplashBundles((419, 419, 421), (1163, 4935, 2130), (691, 1371, 844)),
        "dkv_dq": SplashBundles((662, 725, 660), (2347, 9238, 4501), (324, 644, 644)),
        "dkv": SplashBundles((559, 557, 557), (1899, 7377, 3216), (324, 644, 644)),
        "dq": SplashBundles((435, 435, 434), (1447, 5707, 2964), (162, 324, 324)),
    },
    "v6e": {
        "forward": SplashBundles((384, 384, 379), (895, 3260, 948), (338, 694, 418)),
        "dkv_dq": SplashBundles((443, 475, 443), (1507, 5734, 1597), (163, 323, 323)),
        "dkv": SplashBundles((407, 413, 407), (1275, 4519, 1311), (163, 323, 323)),
        "dq": SplashBundles((349, 353, 353), (1011, 3612, 1062), (83, 163, 163)),
    },
    "tpu7x": {
        "forward": SplashBundles((235, 299, 350), (904, 3361, 1296), (317, 679, 403)),
        "dkv_dq": SplashBundles((303, 439, 412), (1424, 5315, 1497), (151, 309, 311)),
        "dkv": SplashBundles((241, 337, 339), (1291, 4353, 1374), (151, 309, 310)),
        "dq": SplashBundles((184, 276, 275), (976, 3793, 1185), (71, 151, 151)),
    },
}
"""What libtpu 0.0.42.1 makes of splash attention with a batch and residuals, each kernel compiled alone. Read off its
dumps (`LIBTPU_INIT_ARGS=--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true`): in `*-final_bundles.txt` the loop over the
grid begins at `LB:`, and in it the last three branches ahead (`sbr.rel`) pass over the beginning of a row, the block
and the end of a row; the bundles between a branch and its region are theirs, and a step has the rest of the loop. A
bundle is a cycle at best. Longer grids, grouped heads and a kernel without a batch move a step by up to 80 bundles;
segment ids and local masks add up to 8% to a block. Chips that are not listed are taken for a v5p, which a note of the
report says."""
