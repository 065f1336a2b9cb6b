"""Muon (Jordan 2024), as in nanochat: orthogonalized momentum, so that each step has equal size in every direction.

Matrices of the same shape are stacked over all layers and parameters, the stack is split over all devices, and each
device orthogonalizes whole matrices. Devices only communicate twice, each time all parameters in the compute dtype.
Iterating on sharded matrices would instead all-reduce a square matrix twice in each of five iterations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from optax.contrib._muon import orthogonalize_via_newton_schulz  # optax has no public name for it

from valkyrie.axes import Parameter
from valkyrie.optim import is_parameter
from valkyrie.optim.families.muon import matrix_shape

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Coefficients of five steps of the Polar Express (arXiv 2505.16932), safety factor 2e-2 and cushion 2."""
MARGIN = 1.01
"""Before the first step, a matrix is divided by its norm times this margin."""


class Spread(NamedTuple):
    """Sharding of stacks of matrices. The default is for a single device.

    Args:
        devices: Number of devices that a stack is split over.
        sharding_key: Returns a key that is equal for parameters with equally sharded matrices.
        as_stored: Shards a stack (matrices, rows, columns) like the parameter is stored between steps.
        by_matrix: Shards the first dimension of a stack over all devices.
    """

    devices: int = 1
    sharding_key: Callable[[Parameter], Hashable] = lambda spec: None
    as_stored: Callable[[Array, Parameter], Array] = lambda stack, spec: stack
    by_matrix: Callable[[Array], Array] = lambda stack: stack


class Recipe(NamedTuple):
    """Settings of an update. `rate`, `momentum` and `decay` are functions of the step, starting at 0."""

    rate: Callable[[Any], Any]
    momentum: Callable[[Any], Any]
    decay: Callable[[Any], Any]
    beta2: float | None
    compute: str


class MuonState(NamedTuple):
    """Number of steps, momentum by parameter, and mean squares of rows or columns (with `beta2`)."""

    count: Array
    momentum: Any
    second: Any


def muon(recipe: Recipe, specs: Any, spread: Spread | None = None) -> optax.GradientTransformation:
    """Build the transformation of the matrices in `specs`, a tree with masked nodes for other parameters.

    Rows are a parameter's first dimension after `layers`; columns are all later dimensions, flattened.
    """
    spread = spread or Spread()

    def init(params: Any) -> MuonState:
        second = None
        if recipe.beta2 is not None:
            second = jax.tree.map(lambda p, s: jnp.zeros(_kept_shape(s), jnp.float32), params, specs)
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), second)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        part = recipe.momentum(state.count)
        momentum = jax.tree.map(lambda m, g: part * m + (1 - part) * g, state.momentum, updates)
        ahead = jax.tree.map(lambda m, g: part * m + (1 - part) * g, momentum, updates)
        leaves, structure = jax.tree.flatten(ahead)
        of_leaves = jax.tree.leaves(jax.tree.map(lambda _, s: s, ahead, specs), is_leaf=is_parameter)
        values = jax.tree.leaves(params)
        second = [None] * len(leaves) if state.second is None else jax.tree.leaves(state.second)
        directions: list[Any] = [None] * len(leaves)
        for members in _stacks(of_leaves, spread):
            stacked = [leaves[i] for i in members], [second[i] for i in members], [of_leaves[i] for i in members]
            for i, direction, new in zip(members, *_directions(*stacked, recipe, spread), strict=True):
                directions[i], second[i] = direction, new
        rate, decay = recipe.rate(state.count), recipe.decay(state.count)
        steps = [_step(o, p, rate * _scale(s), decay) for o, p, s in zip(directions, values, of_leaves, strict=True)]
        kept_second = None if state.second is None else jax.tree.unflatten(structure, second)
        return jax.tree.unflatten(structure, steps), MuonState(state.count + 1, momentum, kept_second)

    return optax.GradientTransformation(init, update)


def _stacks(specs: list[Parameter], spread: Spread) -> list[list[int]]:
    """Group parameters with the same matrix shape and sharding into stacks. Returns the indices of each stack."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, spec in enumerate(specs):
        groups[(*matrix_shape(spec)[1:], spec.output_first, spread.sharding_key(spec))].append(i)
    return list(groups.values())


def _directions(
    leaves: list[Array], second: list[Any], specs: list[Parameter], recipe: Recipe, spread: Spread
) -> tuple[list[Array], list[Any]]:
    """Return the orthogonal directions of a stack's parameters and the new mean squares of their rows or columns."""
    spec, counts = specs[0], [matrix_shape(s)[0] for s in specs]
    _, rows, columns = matrix_shape(spec)
    stack = jnp.concatenate([leaf.astype(recipe.compute).reshape(-1, rows, columns) for leaf in leaves])
    padding = -len(stack) % spread.devices
    stack = jnp.pad(spread.as_stored(stack, spec), ((0, padding), (0, 0), (0, 0)))
    made = orthogonal(spread.by_matrix(stack), spec.output_first)
    if recipe.beta2 is not None:
        before = jnp.pad(jnp.concatenate([s.reshape(-1, s.shape[-1]) for s in second]), ((0, padding), (0, 0)))
        made, after = _evened(made, before, recipe.beta2, _kept_axis(spec))
        after = jnp.split(after[: len(after) - padding], _ends(counts))
        second = [new.reshape(_kept_shape(s)) for new, s in zip(after, specs, strict=True)]
    made = spread.as_stored(spread.by_matrix(made), spec)
    parts = jnp.split(made[: len(made) - padding], _ends(counts))
    return [part.reshape(s.shape).astype(jnp.float32) for part, s in zip(parts, specs, strict=True)], second


def orthogonal(stack: Float[Array, "n rows columns"], output_first: bool) -> Float[Array, "n rows columns"]:
    """Return the nearest orthogonal matrices with norm sqrt(min(rows, columns)), in the dtype of the stack.

    First scales the vectors of the outputs (rows if `output_first`, else columns) to equal norms (MuonEq, arXiv
    2603.28254).
    """
    wide, rows = stack.astype(jnp.float32), stack.shape[-2 if output_first else -1]
    norms = jnp.linalg.norm(wide, axis=-1 if output_first else -2, keepdims=True)
    target = jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) / rows**0.5
    even = stack * (target / jnp.maximum(norms, 1e-6)).astype(stack.dtype)
    made = jax.vmap(lambda x: orthogonalize_via_newton_schulz(x, jnp.asarray(_COEFFICIENTS, x.dtype), eps=1e-6))(even)
    size = jnp.linalg.norm(made.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    return made * (min(stack.shape[-2:]) ** 0.5 / jnp.maximum(size, 1e-6)).astype(made.dtype)


_COEFFICIENTS = np.array([[c / MARGIN ** (2 * i + 1) for i, c in enumerate(POLAR_EXPRESS[0])], *POLAR_EXPRESS[1:]])
"""Coefficients of the Polar Express, with the division by the margin folded into the first step."""


def _evened(
    made: Float[Array, "n rows columns"], before: Float[Array, "n kept"], beta2: float, kept: int
) -> tuple[Float[Array, "n rows columns"], Float[Array, "n kept"]]:
    """Divide rows (or columns) by their running root mean squares, keeping the norm of each matrix.

    NorMuon, arXiv 2510.05491.
    """
    squares = jnp.mean(jnp.square(made.astype(jnp.float32)), axis=3 - kept)
    after = beta2 * before + (1 - beta2) * squares
    scale = jax.lax.rsqrt(jnp.maximum(after, 1e-10))
    norm = jnp.sqrt(jnp.sum(squares, axis=-1, keepdims=True))
    new = jnp.sqrt(jnp.sum(squares * jnp.square(scale), axis=-1, keepdims=True))
    scale = scale * norm / jnp.maximum(new, 1e-10)
    return made * jnp.expand_dims(scale, 3 - kept).astype(made.dtype), after


def _kept_axis(spec: Parameter) -> int:
    """Return the dimension over which NorMuon keeps second moments: the larger of outputs and inputs."""
    _, first, rest = matrix_shape(spec)
    outputs, inputs = (first, rest) if spec.output_first else (rest, first)
    return 1 if spec.output_first == (outputs >= inputs) else 2


def _kept_shape(spec: Parameter) -> tuple[int, ...]:
    shape = matrix_shape(spec)
    return (shape[0], shape[_kept_axis(spec)])


def _scale(spec: Parameter) -> float:
    """Return the learning rate factor of a matrix: sqrt(outputs / inputs), at least 1."""
    _, first, rest = matrix_shape(spec)
    return max(1.0, first / rest if spec.output_first else rest / first) ** 0.5


def _step(direction: Array, value: Array, rate: Any, decay: Any) -> Array:
    """Return the update. Decays only the elements that the step also shrinks (cautious weight decay)."""
    agrees = direction * value >= 0
    return -rate * (direction + decay * jnp.where(agrees, value, 0))


def _ends(counts: list[int]) -> list[int]:
    """Return the split points between parts of these lengths."""
    return [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
