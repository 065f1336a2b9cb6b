"""Precision policies: the dtypes of parameters, products and sums over devices; what steps add up is float32."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """The dtypes a policy may name; the value is NumPy's name."""

    float32 = "float32"
    bfloat16 = "bfloat16"


ACCUMULATED = DType.float32
"""The dtype of whatever is added to in small parts, under every policy: moments, averages, gradients of microbatches.

A bfloat16 number does not change by less than 0.4% of itself: an average that moves by a thousandth a step would stay
where it began.
"""


@dataclass
class PolicyConfig:
    """A precision policy. S5 parameters and every softmax, norm and loss stay in float32 under all of them.

    `parameter`: dtype of stored parameters; `compute`: dtype of activations and of the operands of matrix products;
    `reduction`: dtype in which gradients are summed over devices. Optimizer moments, the average of the parameters and
    sums over microbatches are float32 (`ACCUMULATED`).
    """

    name: str = "float32"
    parameter: DType = DType.float32
    compute: DType = DType.float32
    reduction: DType = DType.float32
