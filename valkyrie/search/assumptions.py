"""Decides every constant of the replay that is neither in the compiled module nor among a chip's figures.

None is fitted to a single published row. Sources: `scaling-book` is jax-ml/scaling-book, `tpu-recipes` is
AI-Hypercomputer/tpu-recipes (microbenchmarks).
"""

COLLECTIVE_START_S = 5e-6
"""Start and barrier of any collective. An all-gather of 32 kB shards over 4 v5e chips took 8 us of which 3 are hops
(scaling-book, sharding, worked problem)."""

ICI_EFFICIENCY = 1.0
"""Share of `ici_link_gbs` that large transfers reach. Chips state the rate measured one way (scaling-book), about 90%
of the link's nominal rate; tpu7x all-gathers fit 99% of it (tpu-recipes)."""

DCN_EFFICIENCY = 1.0
"""Share of `dcn_gbs_per_host` that transfers between slices reach; a host's network cards at their nominal rate."""

DCN_LATENCY_S = 50e-6
"""A message between hosts of two slices, through both hosts' memories. Assumed; no published figure."""

CORE_LINKS = 6.0
"""Bandwidth between two devices of one chip, in ICI links: tpu7x's die-to-die link is six times a link of its torus
(cloud.google.com/tpu/docs/tpu7x). Assumed for v3 too."""

HBM_EFFICIENCY = 0.8
"""Share of `hbm_gbs` for operations without the compiler's estimate. Its own estimate of a 2.1 GB stream on v4 is
945 of 1200 GB/s (MODELS.md 3.2)."""

HOST_GBS = {"v6e": 32.0}
HOST_GBS_OTHERWISE = 16.0
"""GB/s one way between a chip's memory and its host's, over PCIe; gen 4 x8 up to v5p, gen 4 x16 on v6e (scaling-book)."""

DMA_START_S = 1e-6
"""Start of an asynchronous copy between memories. Assumed: a few hundred nanoseconds of HBM latency and a descriptor."""

LOOP_ITERATION_S = 0.3e-6
"""Branch and scalar work of one iteration of a loop. Assumed."""

KERNEL_EFFICIENCY = 0.6
"""Share of peak FLOP/s a Pallas kernel reaches where nothing better is known."""

CORES = {"v4": 2, "v5p": 2}
"""TensorCores behind one JAX device (megacore): the grid of a Pallas kernel is split between them. Elsewhere 1."""

SPLASH_BUNDLES = {
    "v4": {
        "forward": (2765, 8601, 4220),
        "dkv_dq": (3676, 12459, 6175),
        "dkv": (3126, 10595, 5250),
        "dq": (2269, 7690, 3810),
    },
    "v5e": {
        "forward": (1885, 6069, 2856),
        "dkv_dq": (2827, 9934, 5185),
        "dkv": (2245, 7890, 4120),
        "dq": (1703, 5980, 3120),
    },
    "v5p": {
        "forward": (2078, 6364, 3236),
        "dkv_dq": (2954, 9948, 5383),
        "dkv": (2346, 7900, 4275),
        "dq": (1780, 5990, 3240),
    },
    "v6e": {
        "forward": (1398, 4081, 1483),
        "dkv_dq": (1858, 6221, 2113),
        "dkv": (1475, 4940, 1680),
        "dq": (1120, 3750, 1270),
    },
}
"""VLIW bundles that libtpu 0.0.50.1 makes of one block of splash attention, bfloat16, causal, on one core: for a block of
512x512 at head size 128, of 1024x1024 at 128, and of 512x512 at 256. Read off its dumps (`LIBTPU_INIT_ARGS=
--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true`, `*-schedule-analysis_final_bundles.txt`); a bundle is a cycle at best.
Chips that are not listed are taken for a v5p. Segment ids and local masks add up to 8%."""
