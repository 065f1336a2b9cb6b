"""Implementations and variants that a config can select. Does not import JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

ATTENTION_OUTPUT, SCAN_STATES = "context", "states"
"""Checkpoint names of the output and softmax sums of attention, and of the states of a recurrence.

The custom derivatives attach these names to their residuals. A `jax.checkpoint` policy that saves the names thus saves
the residuals, and the forward pass is not computed again.
"""


class ScanImpl(Enum):
    """Implementation of the S5 recurrence. `auto` depends on the backend.

    `sequential`: One position at a time.

    `associative`: `jax.lax.associative_scan`.

    `blocked`: Scans blocks of positions in parallel, then the states between blocks.

    `kernel`: A Pallas TPU kernel. Interpreted, and therefore slow, without a TPU.
    """

    auto = "auto"
    sequential = "sequential"
    associative = "associative"
    blocked = "blocked"
    kernel = "kernel"


class Discretization(Enum):
    """Discretisation of a continuous-time state space: zero-order hold (`zoh`) or bilinear (S5 paper, section 3.1)."""

    zoh = "zoh"
    bilinear = "bilinear"


class CInit(Enum):
    """Initialiser of the S5 output matrix C, named as in lindermanlab/S5 `ssm_init.py` (see `init_C_tilde`)."""

    trunc_standard_normal = "trunc_standard_normal"
    lecun_normal = "lecun_normal"
    complex_normal = "complex_normal"


class Bias(Enum):
    """Attention projections with a bias: none; query, key and value (`qkv`, Qwen 2); also output (`all`, GPT-2)."""

    none = "none"
    qkv = "qkv"
    all = "all"


class NormSpan(Enum):
    """Channels that a query or key norm averages over: those of one head (`head`), or of all heads (`all_heads`)."""

    head = "head"
    all_heads = "all_heads"


class WindowKind(Enum):
    """Keys that a window of W keys contains.

    `sliding`: Those of the last W positions. If not causal, also as many after the query.

    `chunked`: Those of the query's chunk, if the sequence is divided into chunks of W positions (Llama 4).
    """

    sliding = "sliding"
    chunked = "chunked"


class RouterScores(Enum):
    """Function from a token's router logits to its scores: softmax over all experts, or a sigmoid of each logit."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class GroupScore(Enum):
    """Score of a group of experts: its highest score (`max`, DeepSeek-V2), or the sum of its two highest (`top_2`)."""

    max = "max"
    top_2 = "top_2"


@dataclass
class RopeStretch:
    """Lowers rotary frequencies, for contexts longer than the `context` that a model was first trained on (Llama 3.1).

    A pair of channels with fewer than `low` turns over that context rotates `factor` times slower. Pairs with more than
    `high` turns keep their frequency, and those in between are interpolated. A `factor` of 1 changes nothing. If `low`
    and `high` are equal (Llama 4), no pair is interpolated.
    """

    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192


@dataclass
class Yarn:
    """Lowers rotary frequencies, for contexts longer than the `context` that a model was first trained on (YaRN).

    A pair of channels with fewer than `low` turns over that context rotates `factor` times slower. Pairs with more than
    `high` turns keep their frequency, and those in between are interpolated by their number. A `factor` of 1 changes
    nothing (arXiv 2309.00071).

    Args:
        factor: Ratio of the contexts.
        low: Number of turns below which a pair is stretched, `beta_slow` in DeepSeek's code.
        high: Number of turns above which a pair keeps its frequency, `beta_fast` in DeepSeek's code.
        context: Number of positions of the first training.
        mscale: Slope s of the amplitude of rotated channels, relative to that of `mscale_all_dim`. The amplitude is
            1 + 0.1 s ln(factor).
        mscale_all_dim: Slope s of the factor (1 + 0.1 s ln(factor)) ** 2 of all logits.
        truncate: Round the numbers of the first and last interpolated pair to whole numbers, outwards (gpt-oss: false).
    """

    factor: float = 1.0
    low: float = 1.0
    high: float = 32.0
    context: int = 4096
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    truncate: bool = True

    @property
    def amplitude(self) -> float:
        """Factor of the rotated channels of queries and keys."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def logit_scale(self) -> float:
        """Factor of all logits."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, slope: float) -> float:
        return 1.0 + 0.1 * slope * math.log(self.factor)


class AttentionImpl(Enum):
    """Implementation of attention. `auto` is `dense` for short sequences, else `kernel` if supported, else `chunked`.

    If the sequence is split over mesh axes, `auto` is `kernel` on a TPU, else `chunked`, and `dense` is `chunked`.

    `dense`: One matrix of logits per head, quadratic in the length.

    `chunked`: Chunks of queries, one after another, with memory linear in the length.

    `kernel`: The platform's kernel: splash attention on a TPU, cuDNN on a GPU.
    """

    auto = "auto"
    dense = "dense"
    chunked = "chunked"
    kernel = "kernel"


WIDE_BLOCK = 1024
"""Number of queries or keys in a wide block of splash attention.

Attention without a window, or with one of at least `MIN_WIDE_WINDOW` keys, uses wide blocks if this divides the length,
subject to `MIN_WIDE_LENGTH` and `MAX_WIDE_HEAD_DIM`.
"""

MIN_WIDE_WINDOW = 4096
"""Smallest window for wide blocks of splash attention. With smaller ones, too much of a wide block is masked.

By replay of 16,384 tokens with 8 heads of 128, forward and backward, wide blocks take 0.81 of the time of narrow ones
on v6e and 0.94 on v5e with a window of 4,096. On v5e, they take 1.01 with a window of 2,048, and 1.08 with 1,024.
"""

MIN_WIDE_LENGTH = 4096
"""Minimum number of queries and of keys for wide blocks of splash attention, except in the dk and dv pass."""

MAX_WIDE_HEAD_DIM = 128
"""Largest head_dim for which wide blocks of splash attention fit into a core's scratch memory."""

ALWAYS_DENSE_LENGTH = 128
"""Longest sequence for which dense attention is always the fastest."""
