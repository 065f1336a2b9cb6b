"""Matches arrays of a compiled program with those of the program before partitioning, by their dimensions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations

from valkyrie.compiled.hlo import Instruction

_MAX_RANK = 6
"""Maximum number of dimensions larger than 1 of an array to match.

The limit is small because all ways to merge the dimensions are tried.
"""

UnsplitDimensions = frozenset[int]
"""Indices of an array's dimensions that are not split, so that each shard has their full size."""


def match_product(local_product: Instruction, full_product: Instruction) -> tuple[UnsplitDimensions, ...] | None:
    """Match a matrix product of the compiled program with one of the program before partitioning.

    Returns the dimensions that are not split, for the result and each of the two operands of `full_product`, or None if
    `local_product` cannot be one device's part of `full_product`.
    """
    (result_dims, *factor_dims), (full_result_dims, *full_factor_dims) = (
        [array.shape.dims for array in (product, *product.operands[:2])] for product in (local_product, full_product)
    )
    for order in permutations(factor_dims):
        pairs = [(result_dims, full_result_dims), *zip(order, full_factor_dims, strict=True)]
        unsplit = [match_shard(shard_dims, full_dims) for shard_dims, full_dims in pairs]
        if all(dimensions is not None for dimensions in unsplit):
            return tuple(dimensions for dimensions in unsplit if dimensions is not None)
    return None


@cache
def match_shard(shard_dims: tuple[int, ...], full_dims: tuple[int, ...]) -> UnsplitDimensions | None:
    """Return the dimensions of an array that are not split in its shard, or None if `shard_dims` cannot be a shard.

    The shard may have its dimensions in another order, with adjacent dimensions of `full_dims` merged, and with
    additional dimensions of size 1. A dimension of the same size as a split one counts as split. Returns None if more
    than `_MAX_RANK` dimensions of `full_dims` are larger than 1.
    """
    shard_dims = tuple(size for size in shard_dims if size > 1)
    dimensions = [dimension for dimension, size in enumerate(full_dims) if size > 1]
    if len(dimensions) > _MAX_RANK:
        return None
    unit_dimensions = frozenset(range(len(full_dims))) - set(dimensions)
    best_score: tuple[int, int] | None = None
    unsplit_dimensions: UnsplitDimensions | None = None
    for groups in _iterate_merges(dimensions):
        sizes = [math.prod(full_dims[dimension] for dimension in group) for group in groups]
        equal_sizes = Counter(shard_dims) & Counter(sizes)
        shard_sizes, split_sizes = (
            list((Counter(shard_dims) - equal_sizes).elements()),
            list((Counter(sizes) - equal_sizes).elements()),
        )
        shard_sizes += [1] * (len(split_sizes) - len(shard_sizes))
        score = len(groups), equal_sizes.total()  # few merges and many unsplit dimensions are the likeliest explanation
        if (
            (best_score is None or score > best_score)
            and len(shard_sizes) == len(split_sizes)
            and _can_divide(split_sizes, shard_sizes)
        ):
            best_score = score
            unsplit_groups = (group for group, size in zip(groups, sizes, strict=True) if size not in split_sizes)
            unsplit_dimensions = unit_dimensions.union(*unsplit_groups)
    return unsplit_dimensions


def _can_divide(sizes: list[int], shard_sizes: list[int]) -> bool:
    """Return whether some order of `shard_sizes` divides `sizes`, entry by entry."""
    return any(
        all(size % shard_size == 0 for size, shard_size in zip(sizes, order, strict=True))
        for order in permutations(shard_sizes)
    )


def _iterate_merges(dimensions: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to merge adjacent dimensions."""
    gaps = range(1, len(dimensions))
    for count in range(len(dimensions)):
        for cuts in combinations(gaps, count):
            edges = [0, *cuts, len(dimensions)]
            yield [dimensions[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    if not dimensions:
        yield []
