"""Precision policies: the dtypes of parameters, products and sums over devices; what steps add up is float32."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DType(Enum):
    """The dtypes a policy may name; the value is NumPy's name."""

    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self is DType.float32 else 2


class ProductDType(Enum):
    """The narrow dtypes that products may take their operands in; the value is NumPy's name."""

    int8 = "int8"
    float8_e4m3fn = "float8_e4m3fn"


ACCUMULATED = DType.float32
"""The dtype of whatever is added to in small parts, under every policy: moments, averages, gradients of microbatches.

A bfloat16 number does not change by less than 0.4% of itself: an average that moves by a thousandth a step would stay
where it began.
"""


@dataclass
class PolicyConfig:
    """A precision policy. S5 parameters and every softmax, norm and loss stay in float32 under all of them.

    `parameter`: dtype of stored parameters; `compute`: dtype of activations and of the operands of matrix products;
    `products`: narrow dtype of the operands of blocks' products with parameters, forward and by the activations
    backward (null: `compute`); each row and column is scaled to it anew. Gradients of parameters are products in
    `compute`, as are attention and logits. `reduction`: dtype in which gradients are summed over devices. Optimizer
    moments, the average of the parameters and sums over microbatches are float32 (`ACCUMULATED`).
    """

    name: str = "float32"
    parameter: DType = DType.float32
    compute: DType = DType.float32
    products: ProductDType | None = None
    reduction: DType = DType.float32
