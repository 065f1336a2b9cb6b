"""Names of implementations and variants for configs. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

CONTEXT, STATES = "context", "states"
"""Checkpoint names of attention outputs with their softmax sums, and of the states of a recurrence.

They are attached inside the custom derivatives, so that a `jax.checkpoint` policy that saves these names saves the
residuals of the backward pass and nothing is computed twice.
"""


class ScanImpl(Enum):
    """Implementation of the S5 recurrence. `auto` depends on the backend; `kernel` is interpreted without a TPU."""

    auto = "auto"
    sequential = "sequential"
    associative = "associative"
    blocked = "blocked"
    kernel = "kernel"


class Discretization(Enum):
    """Method to discretize a continuous-time state space (S5 paper, section 3.1)."""

    zoh = "zoh"
    bilinear = "bilinear"


class CInit(Enum):
    """Initialiser of the S5 output matrix C, with the names in lindermanlab/S5 `ssm_init.py`."""

    trunc_standard_normal = "trunc_standard_normal"
    lecun_normal = "lecun_normal"
    complex_normal = "complex_normal"


class Bias(Enum):
    """Projections of attention with a bias: none; queries, keys and values (Qwen 2); or also the output (GPT-2)."""

    none = "none"
    qkv = "qkv"
    all = "all"


@dataclass
class RopeStretch:
    """Slower rotary frequencies for sequences longer than the `context` a model was first trained on (Llama 3.1).

    Pairs that turn fewer than `low` times over that context turn `factor` times slower. Pairs that turn more than
    `high` times are unchanged, and those in between are interpolated. A `factor` of 1 changes nothing.
    """

    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192


class AttentionImpl(Enum):
    """Implementation of windowed attention. `auto` depends on the backend and the length."""

    auto = "auto"
    dense = "dense"
    chunked = "chunked"
    kernel = "kernel"
