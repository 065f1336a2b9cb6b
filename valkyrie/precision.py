"""Decides in which dtype parameters are kept, products are computed and sums are taken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """The dtypes a policy may name; the value is NumPy's name."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class PolicyConfig:
    """A precision policy. S5 parameters and every softmax, norm and loss stay in float32 under all of them.

    `parameter`: dtype of stored (master) parameters and optimizer state; `compute`: dtype of activations and
    of the operands of matrix products; `reduction`: dtype in which gradients are accumulated and summed
    over devices and microbatches.
    """

    name: str = "float32"
    parameter: DType = DType.float32
    compute: DType = DType.float32
    reduction: DType = DType.float32
