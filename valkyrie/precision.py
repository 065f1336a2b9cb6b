"""Precision policies: the dtypes of parameters, matrix products and sums over devices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """Dtypes of a policy, with NumPy's names as values."""

    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.float32 else 2


class ProductDType(Enum):
    """Narrow dtypes for operands of matrix products, with NumPy's names as values."""

    int8 = "int8"
    float8_e4m3fn = "float8_e4m3fn"


ACCUMULATOR_DTYPE = DType.float32
"""Dtype of accumulators under every policy: moments, moving averages, gradients of microbatches.

A bfloat16 value cannot change by less than 0.4% of itself, so an average that moves by a thousandth per step would
never change.
"""


@dataclass
class PolicyConfig:
    """A precision policy.

    S5 parameters and every softmax, norm and loss are float32 under all policies. So are optimizer moments, the moving
    average of the parameters, and sums over microbatches (`ACCUMULATOR_DTYPE`).

    Args:
        parameter: dtype of stored parameters.
        compute: dtype of activations and of the operands of matrix products, including those of attention, of the
            logits and of the gradients of parameters.
        products: narrow dtype of both operands in the blocks' matmuls with parameters, or null to use `compute`. Used
            in the forward pass and for the gradients of activations, not for those of parameters. At every matmul, each
            row or column that is summed over is scaled by its largest magnitude.
        reduction: dtype for summing gradients over devices.
    """

    name: str = "float32"
    parameter: DType = DType.float32
    compute: DType = DType.float32
    products: ProductDType | None = None
    reduction: DType = DType.float32
