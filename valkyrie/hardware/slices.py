"""TPU slices: the shapes that exist for each chip, the default shape for a number of chips, hosts, and rings.

Source of the shapes: cloud.google.com/tpu/docs/v4, /v5p and /tpu7x (`4i x 4j x 4k`, and the shapes below a cube), /v5e
and /v6e (2-D). Source of the default shapes: cloud.google.com/tpu/docs/types-topologies, "the default topology
associated with a given chip count is the one that's most similar to a cube".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

TWISTED_SUFFIX = "_twisted"
"""Suffix of the shape of a twisted torus, as Google Cloud writes it."""

SliceShape = tuple[int, ...]
"""Chips along each axis of a slice."""


@dataclass(frozen=True)
class WrapRule:
    """Rule for the shapes of a chip's slices, and for the axes that close into rings.

    The values of `wrap` in `conf/target/chip`:

    `axes_of_16`: Slices are n x n or n x 2n parts of a square pod of 16 x 16 chips. An axis of 16 chips closes.
    `cubes_of_4`: Slices are joined cubes of 4 x 4 x 4 chips, or smaller. All axes close if each is a multiple of 4.
    `none`: Slices have any shape, and no rings.

    Args:
        side: Chips along a side of the pod or of a cube, or None for any shape.
        uses_cubes: Whether slices are built of cubes.
    """

    side: int | None = None
    uses_cubes: bool = False

    @staticmethod
    def parse(text: str) -> WrapRule:
        """Parse `none`, `axes_of_N` or `cubes_of_N`. Raises ValueError for other words."""
        if text == "none":
            return WrapRule()
        match = re.fullmatch(r"(axes|cubes)_of_([1-9][0-9]{0,3})", text)
        if match is None:
            raise ValueError(f"target.chip.wrap={text}: write none, axes_of_N or cubes_of_N, such as axes_of_16.")
        return WrapRule(int(match[2]), match[1] == "cubes")

    @property
    def axis_count(self) -> int | None:
        """Number of torus axes that the rule applies to, or None for any."""
        return None if self.side is None else 3 if self.uses_cubes else 2

    @property
    def max_chips(self) -> int | None:
        """Chips of the largest slice that the rule allows, or None if it has no limit."""
        return None if self.side is None else _LONGEST_AXIS**3 if self.uses_cubes else self.side**2


_SHAPES_BELOW_CUBE = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""Slices smaller than a 4x4x4 cube, the only cube size in use."""
_LONGEST_AXIS = 256
"""Maximum chips along an axis.

Inferred from AXLearn's list of v5p slices. Of the sizes up to 96 cubes, the list omits only those for which every shape
has a longer axis.
"""


@dataclass(frozen=True)
class Slices:
    """The slices that exist for a chip.

    Args:
        axis_count: Number of torus axes, or None for chips without a torus, such as GPUs.
        wrap: Rule for shapes and rings.
        max_chips: Chips of the largest slice, or None if unlimited.
        host_bounds: Chips of a host along each axis; empty if one host has all chips.
        single_host_chips: Chips of the largest slice on a single host, if it exceeds `host_bounds` (v5e: 8, not 4).
        twists: Slices of n x n x 2n and n x 2n x 2n chips also come as twisted tori.
    """

    axis_count: int | None
    wrap: WrapRule
    max_chips: int | None
    host_bounds: SliceShape
    single_host_chips: int | None = None
    twists: bool = False

    def default_shape(self, chips: int) -> SliceShape | None:
        """Return the most cube-like shape with this number of chips, or None if there is no such slice."""
        return next(iter(self.shapes(chips)), None)

    def shapes(self, chips: int) -> list[SliceShape]:
        """Return the slice shapes with this number of chips, most cube-like first.

        Lists each shape in one order of its axes. With `wrap=none`, lists only the most even shape.
        """
        shapes = [shape for shape in self._candidate_shapes(chips) if self._fits_hosts(shape)]
        return sorted(shapes, key=lambda shape: (sum(shape), max(shape)))

    def exists(self, shape: SliceShape) -> bool:
        """Return whether a slice of this shape exists, with its axes in this order."""
        if len(shape) != (self.axis_count or 1) or not self._fits_hosts(shape):
            return False
        candidates = self._candidate_shapes(math.prod(shape))
        return bool(candidates) and (
            self.wrap.side is None or tuple(sorted(shape)) in {tuple(sorted(s)) for s in candidates}
        )

    def size_rule(self, chips: int) -> str:
        """Return the allowed shapes as text for an error message, or the largest size if `chips` exceeds it."""
        if self.max_chips is not None and chips > self.max_chips:
            return f"the largest slice has {self.max_chips} chips, and this one would have {chips}"
        side = self.wrap.side
        if side is not None and self.wrap.uses_cubes:
            small = ", ".join(format_shape(s) for s in _shapes_below_cube(side))
            cube = format_shape([side] * 3)
            return f"slices below a {cube} cube are {small}; in larger ones, every axis is a multiple of {side}"
        if side is not None:
            return f"slices have n x n or n x 2n chips, where n is a power of 2 and no side exceeds {side}"
        return f"slices larger than one host of {format_shape(self.host_bounds)} chips consist of whole hosts"

    def topology_error(
        self, topology: str, chip: str, format_slice: Callable[[SliceShape], str], request_prefix: str
    ) -> str | None:
        """Return why a topology is not a slice, with the nearest slices, or None if it is one.

        The text continues a message that begins with the topology as the user typed it.

        Args:
            topology: Chips along each axis, such as `4x4x8_twisted`.
            chip: Name of the chip.
            format_slice: Formats a slice as the user would request it.
            request_prefix: Text before a shape in a request, such as `target.topology=`.
        """
        shape = parse_shape(topology)
        if shape is None or len(shape) != self.axis_count:
            example = format_shape([4] * (self.axis_count or 1))
            return (
                f": a {chip} slice has {self.axis_count} axes. Write the chips along each axis, such as "
                f"{request_prefix}{example}."
            )
        if not self.exists(shape):
            reordered = tuple(sorted(shape, reverse=True))
            if self.exists(reordered):
                hosts = format_shape(self.host_bounds)
                reason = f"hosts of {hosts} chips do not fit into it. Write {format_slice(reordered)}."
            else:
                reason = f"{self.size_rule(math.prod(shape))}. {nearest_hint(self.similar_shapes(shape), format_slice)}"
            return f" is not a slice of {chip}: {reason}"
        if not is_twisted_name(topology) or self.has_twist(shape):
            return None
        if not self.twists:
            return f": {chip} has no twisted slices. Leave out {TWISTED_SUFFIX}."
        return (
            f": twisted slices have n x n x 2n or n x 2n x 2n chips, where n is a multiple of 4. Use a slice "
            f"such as {request_prefix}4x4x8{TWISTED_SUFFIX} or {request_prefix}4x8x8{TWISTED_SUFFIX}, or leave out "
            f"{TWISTED_SUFFIX}."
        )

    def nearest_shapes(self, chips: int | Fraction) -> list[SliceShape]:
        """Return the shapes of the largest slice with fewer chips and of the smallest with more, if they exist."""
        max_chips = self.max_chips or self.wrap.max_chips or math.ceil(chips) + math.prod(self.host_bounds)
        below = (self.default_shape(n) for n in range(min(math.ceil(chips) - 1, max_chips), 0, -1))
        above = (self.default_shape(n) for n in range(math.floor(chips) + 1, max_chips + 1))
        return [shape for shapes in (below, above) if (shape := next(filter(None, shapes), None))]

    def similar_shapes(self, shape: SliceShape) -> list[SliceShape]:
        """Return up to three existing shapes that are similar to `shape`, not counting `shape` in any order.

        One has the same number of chips as `shape`, one the next smaller number, and one the next larger number.
        """
        chips, log_sides = math.prod(shape), [math.log(side) for side in sorted(shape)]

        def distance(other: SliceShape) -> float:
            return sum(abs(math.log(a) - b) for a, b in zip(sorted(other), log_sides, strict=True))

        nearest = []
        for size in (chips, *(math.prod(nearest_shape) for nearest_shape in self.nearest_shapes(chips))):
            other_shapes = [
                s for s in self._candidate_shapes(size) if self._fits_hosts(s) and sorted(s) != sorted(shape)
            ]
            nearest += [min(other_shapes, key=distance)] if other_shapes else []
        return nearest

    def host_shape(self, shape: SliceShape) -> SliceShape:
        """Return the chips of a host along each axis of a slice: the whole slice if it is on a single host."""
        if not self.host_bounds or math.prod(shape) <= (self.single_host_chips or 0):
            return shape
        return tuple(min(bound, side) for bound, side in zip(self.host_bounds, shape, strict=True))

    def host_count(self, shape: SliceShape) -> int:
        """Return the number of hosts of a slice."""
        return -(-math.prod(shape) // math.prod(self.host_shape(shape)))

    def closed_axes(self, shape: SliceShape) -> tuple[bool, ...]:
        """Return for each axis of a slice whether it closes into a ring."""
        if self.wrap.side is not None and self.wrap.uses_cubes:
            return (all(length % self.wrap.side == 0 for length in shape),) * len(shape)
        return tuple(length == self.wrap.side for length in shape)

    def has_twist(self, shape: SliceShape) -> bool:
        """Return whether a slice of this shape also comes as a twisted torus."""
        n = shape[0]
        return self.twists and n % 4 == 0 and shape in ((n, n, 2 * n), (n, 2 * n, 2 * n))

    def _candidate_shapes(self, chips: int) -> list[SliceShape]:
        """Return the shapes with this number of chips that `wrap` allows: only the most even one for `wrap=none`."""
        if chips < 1 or (self.max_chips is not None and chips > self.max_chips):
            return []
        if self.wrap.side is None:
            return self._host_shapes(chips)
        return _cube_shapes(chips, self.wrap.side) if self.wrap.uses_cubes else _square_shapes(chips, self.wrap.side)

    def _host_shapes(self, chips: int) -> list[SliceShape]:
        """Return the most even shape made of whole hosts, or of a part of one host. Empty if there is no such shape."""
        axis_count, bounds = self.axis_count or 1, self.host_bounds or (1,) * (self.axis_count or 1)
        count, remainder = divmod(chips, math.prod(bounds))
        if remainder:
            return [] if count else [even_shape(chips, axis_count)]
        return [tuple(n * bound for n, bound in zip(even_shape(count, axis_count), bounds, strict=True))]

    def _fits_hosts(self, shape: SliceShape) -> bool:
        has_whole_hosts = all(side % bound == 0 for side, bound in zip(shape, self.host_bounds, strict=False))
        return has_whole_hosts or math.prod(shape) < math.prod(self.host_bounds)


def parse_shape(topology: str | None) -> SliceShape | None:
    """Parse the chips along each axis from `8x8x12` or `4x4x8_twisted`. Returns None for other texts."""
    shape = (topology or "").removesuffix(TWISTED_SUFFIX)
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", shape):
        return None
    return tuple(int(n) for n in shape.split("x"))


def is_twisted_name(topology: str | None) -> bool:
    """Return whether a topology names a twisted torus."""
    return (topology or "").endswith(TWISTED_SUFFIX)


def shorten(text: str) -> str:
    """Shorten a text of more than 40 characters, such as a number of hundreds of digits, to its start and length."""
    return text if len(text) <= 40 else f"{text[:12]}... ({len(text)} characters)"


def format_shape(shape: Iterable[int]) -> str:
    """Format a shape: `8x8x12`."""
    return "x".join(str(n) for n in shape)


def even_shape(chips: int, axis_count: int) -> SliceShape:
    """Return nearly equal lengths of `axis_count` axes, ascending, with the product `chips`."""
    if axis_count == 1:
        return (chips,)
    side = next(n for n in range(round(chips ** (1 / axis_count)), 0, -1) if chips % n == 0)
    return tuple(sorted((side, *even_shape(chips // side, axis_count - 1))))


def nearest_hint(shapes: Iterable[SliceShape], format_slice: Callable[[SliceShape], str]) -> str:
    """Return a sentence with the nearest slices and their numbers of chips."""
    descriptions = [
        f"{format_slice(shape)} ({math.prod(shape)} chip{'s' * (math.prod(shape) > 1)})" for shape in shapes
    ]
    return f"Nearest: {', '.join(descriptions)}."


def _shapes_below_cube(side: int) -> list[SliceShape]:
    return [shape for shape in _SHAPES_BELOW_CUBE if max(shape) <= side]


def _cube_shapes(chips: int, side: int) -> list[SliceShape]:
    cube_count, remainder = divmod(chips, side**3)
    if remainder or not cube_count:
        return [shape for shape in _shapes_below_cube(side) if math.prod(shape) == chips]
    longest = _LONGEST_AXIS // side
    sides = [n for n in range(1, min(cube_count, longest) + 1) if cube_count % n == 0]
    pairs = ((i, j) for i in sides for j in sides if i <= j and cube_count % (i * j) == 0)
    return [(side * i, side * j, side * k) for i, j in pairs if j <= (k := cube_count // (i * j)) <= longest]


def _square_shapes(chips: int, longest: int) -> list[SliceShape]:
    sides = [2**i for i in range(longest.bit_length())]
    return [(a, b) for a in sides for b in sides if a * b == chips and b in (a, 2 * a) and (a, b) != (1, 2)]
