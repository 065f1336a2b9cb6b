"""The names of the implementations and variants that a config may choose; imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CONTEXT, STATES = "context", "states"
"""The names of what attention's kernel gives with its softmax's sums, and of the states of a recurrence.

They are given where these are computed, so that a policy that keeps them (`jax.checkpoint`) keeps what the derivative
that is written out there needs, and nothing runs twice.
"""


class ScanImpl(Enum):
    """How an S5 recurrence is evaluated; `auto` chooses by backend, `kernel` is interpreted where there is no TPU."""

    auto = "auto"
    sequential = "sequential"
    associative = "associative"
    blocked = "blocked"
    kernel = "kernel"


class Discretization(Enum):
    """How a continuous-time state space becomes a recurrence (S5 paper, section 3.1)."""

    zoh = "zoh"
    bilinear = "bilinear"


class CInit(Enum):
    """The initialiser of the S5 output matrix C, by the names of lindermanlab/S5 `ssm_init.py`."""

    trunc_standard_normal = "trunc_standard_normal"
    lecun_normal = "lecun_normal"
    complex_normal = "complex_normal"


class Bias(Enum):
    """Which products of attention have a bias: none, queries, keys and values (Qwen 2), or the output too (GPT-2)."""

    none = "none"
    qkv = "qkv"
    all = "all"


@dataclass
class RopeStretch:
    """Slower rotary frequencies for contexts longer than the `context` that a model was first trained on (Llama 3.1).

    With a `factor` of 1 they are as they were. A pair that turns less than `low` times over that context turns `factor`
    times slower, one that turns more than `high` times as before, and those between by parts of both.
    """

    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192


class AttentionImpl(Enum):
    """How windowed attention is evaluated; `auto` chooses by backend and length."""

    auto = "auto"
    dense = "dense"
    chunked = "chunked"
    kernel = "kernel"
