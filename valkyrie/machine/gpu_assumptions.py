"""Constants of the replay on GPUs that come neither from the compiled module nor from a chip's figures.

None is fitted to published runs. `nccl` is NVIDIA/nccl, `xla` is openxla/xla at 756478bb.
"""

HBM_EFFICIENCY = 0.85
"""Share of `hbm_gbs` that fusions and copies reach. BabelStream's triad reaches 3.3 of 4.0 TB/s on a GH200
(UoB-HPC/BabelStream#194)."""

KERNEL_START_S = 2.5e-6
"""Seconds between the work of two kernels: launching and draining. XLA's model assumes 1 us a launch
(xla gpu_performance_model_base.h), and small kernels take another 1 to 2 us."""

PRODUCT_SIZES = (256, 1024, 4096)
"""Sizes of m, n and k in `GpuFigures.products`."""

FALLBACK_CHIP = "h100"
"""Chip with the table of products and of collectives for chips without their own. A note in the report names it."""

FULL_FLOAT32_EFFICIENCY = 0.85
"""Share of the peak that products in full float32 (not TF32) reach. Assumed."""

GROUPED_EFFICIENCY = 0.9
"""Rate of a Triton kernel that multiplies groups of rows, relative to that of cuBLAS for one product of all rows.
Assumed. With tuned blocks, 0.96: 78% of an H100's peak (marin-community/marin#4297), where cuBLAS reaches 81%."""

CONVOLUTION_EFFICIENCY = 0.5
"""Share of the peak that convolutions reach. Assumed."""

ATTENTION_BACKWARD = 0.8
"""Rate of attention's backward kernel relative to the forward one. FlashAttention 4 on B200: 0.79 to 0.89
(Dao-AILab/flash-attention, PR 2280)."""

ATTENTION_NARROW = 0.66
"""Rate of attention at head size 64 relative to 128. B200, sequences of 8k: 1147 of 1745 TFLOP/s
(Dao-AILab/flash-attention, PR 2605)."""

COLLECTIVE_SIZES = tuple(2**power for power in (16, 20, 22, 24, 26, 28, 30))
"""Bytes of the whole array in `GpuFigures.collectives`: 64 KiB, 1, 4, 16, 64 and 256 MiB, and 1 GiB."""

NETWORK_EFFICIENCY = 0.9
"""Share of `dcn_gbs_per_host` that large collectives reach between nodes. 128 H200s reach 369.9 of 400 GB/s in an
all-reduce of 16 GiB (awslabs/awsome-distributed-training@0edaf152, micro-benchmarks/nccl-tests)."""

NETWORK_START_S = 45e-6
"""Seconds to start a collective between nodes (xla sol_gpu_cost_model.cc, `nccl_op_launch_us` of the H100)."""

NODE_HOP_S = 31e-6
"""Seconds for each further node of a ring (xla sol_gpu_cost_model.cc, `rtt_us` of the H100)."""

COMPUTE_SLOWDOWN = 1.1
"""Factor on the time of kernels while NCCL runs. NCCL's channels take SMs and memory bandwidth: about 16 SMs on a
DGX A100 (nccl#689), 15% of the active SMs (nccl#1432)."""
