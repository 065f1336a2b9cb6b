"""Reads weights in MXFP4 (OCP Microscaling Formats 1.0), as in the published files of gpt-oss. Does not import JAX.

A matrix with inputs first is stored as two tensors of its transpose: `NAME_blocks` has 16 bytes for each 32 consecutive
inputs, two 4-bit floats per byte, the lower bits first. `NAME_scales` has their exponent of 2, plus 127.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
"""Suffixes of the names of the two tensors that store a matrix."""

_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_PAIRS = np.concatenate([_VALUES, -_VALUES])[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]
"""The two numbers of each byte."""


def unpacked_shape(blocks_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a matrix or stack of matrices (..., inputs, outputs), given that of its blocks."""
    *experts, outputs, groups, group_bytes = blocks_shape
    return (*experts, groups * group_bytes * 2, outputs)


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the matrices (experts, inputs, outputs) in bfloat16, which represents them exactly.

    Args:
        blocks: uint8 array (experts, outputs, groups, bytes of a group).
        scales: uint8 array (experts, outputs, groups).
    """
    matrices = np.empty(unpacked_shape(blocks.shape), ml_dtypes.bfloat16)
    for matrix, expert_blocks, expert_scales in zip(matrices, blocks, scales, strict=True):  # limits the float32 copies
        numbers = _PAIRS[expert_blocks].reshape(*expert_scales.shape, -1)
        numbers = np.ldexp(numbers, expert_scales.astype(np.int32)[..., None] - 127)
        matrix[...] = numbers.reshape(len(numbers), -1).T
    return matrices
