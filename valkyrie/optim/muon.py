"""Muon (Jordan 2024), as in nanochat: orthogonalized momentum, so that each step has equal size in every direction.

Matrices of the same shape are stacked over all layers and parameters, the stack is split over all devices, and each
device orthogonalizes whole matrices. Devices communicate only twice per step: they exchange the momentum before the
orthogonalization and the directions after it, both in the compute dtype. Iterating on sharded matrices would instead
all-reduce a square matrix twice in each of five iterations.
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
NORM_MARGIN = 1.01
"""Before the first Polar Express iteration, each matrix is divided by its norm times this margin."""


class StackSharding(NamedTuple):
    """Sharding of stacks of matrices. The default is for a single device.

    Args:
        device_count: Number of devices that a stack is split over.
        sharding_key: Returns a key that is equal for parameters with equally sharded matrices.
        shard_as_stored: Shards a stack (matrices, rows, columns) as the parameter is sharded between steps.
        shard_by_matrix: Shards the first dimension of a stack over all devices.
    """

    device_count: int = 1
    sharding_key: Callable[[Parameter], Hashable] = lambda spec: None
    shard_as_stored: Callable[[Array, Parameter], Array] = lambda stack, spec: stack
    shard_by_matrix: Callable[[Array], Array] = lambda stack: stack


class MuonSettings(NamedTuple):
    """Settings of Muon's update.

    Args:
        rate: Learning rate by step, starting at step 0.
        momentum: Momentum by step.
        decay: Weight decay by step.
        beta2: Decay of NorMuon's mean squares, or None for plain Muon.
        compute_dtype: Dtype of the orthogonalization.
    """

    rate: Callable[[Any], Any]
    momentum: Callable[[Any], Any]
    decay: Callable[[Any], Any]
    beta2: float | None
    compute_dtype: str


class MuonState(NamedTuple):
    """State of Muon.

    Args:
        count: Number of steps so far.
        momentum: Tree with the momentum of each parameter.
        second: Tree with NorMuon's mean squares of each parameter's rows or columns, or None for plain Muon.
    """

    count: Array
    momentum: Any
    second: Any


def muon(settings: MuonSettings, specs: Any, sharding: StackSharding | None = None) -> optax.GradientTransformation:
    """Build the optax transformation for Muon, or for NorMuon if `settings.beta2` is set.

    Its updates include the learning rate and weight decay. `specs` is a tree with the `Parameter` of each matrix and
    `optax.MaskedNode` for all other parameters.

    Rows are a parameter's first dimension after `layers`; columns are all later dimensions, flattened.
    """
    sharding = sharding or StackSharding()

    def init(params: Any) -> MuonState:
        mean_squares = None
        if settings.beta2 is not None:
            mean_squares = jax.tree.map(lambda p, s: jnp.zeros(_second_moment_shape(s), jnp.float32), params, specs)
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), mean_squares)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        beta = settings.momentum(state.count)
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, updates)
        lookahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, momentum, updates)
        leaves, structure = jax.tree.flatten(lookahead)
        leaf_specs = jax.tree.leaves(jax.tree.map(lambda _, s: s, lookahead, specs), is_leaf=is_parameter)
        param_leaves = jax.tree.leaves(params)
        mean_squares = [None] * len(leaves) if state.second is None else jax.tree.leaves(state.second)
        directions: list[Any] = [None] * len(leaves)
        for indices in _group_into_stacks(leaf_specs, sharding):
            stacked = [leaves[i] for i in indices], [mean_squares[i] for i in indices], [leaf_specs[i] for i in indices]
            for i, direction, new_squares in zip(
                indices, *_orthogonal_directions(*stacked, settings, sharding), strict=True
            ):
                directions[i], mean_squares[i] = direction, new_squares
        rate, decay = settings.rate(state.count), settings.decay(state.count)
        new_updates = [
            _leaf_update(d, p, rate * _rate_factor(s), decay)
            for d, p, s in zip(directions, param_leaves, leaf_specs, strict=True)
        ]
        new_mean_squares = None if state.second is None else jax.tree.unflatten(structure, mean_squares)
        return jax.tree.unflatten(structure, new_updates), MuonState(state.count + 1, momentum, new_mean_squares)

    return optax.GradientTransformation(init, update)


def _group_into_stacks(specs: list[Parameter], sharding: StackSharding) -> list[list[int]]:
    """Group parameters into stacks with the same matrix shape, `output_first` and sharding.

    Returns the indices of the parameters in each stack.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, spec in enumerate(specs):
        groups[(*matrix_shape(spec)[1:], spec.output_first, sharding.sharding_key(spec))].append(i)
    return list(groups.values())


def _orthogonal_directions(
    leaves: list[Array],
    mean_squares: list[Any],
    specs: list[Parameter],
    settings: MuonSettings,
    sharding: StackSharding,
) -> tuple[list[Array], list[Any]]:
    """Return the orthogonalized direction of each parameter in a stack and its new mean squares (None for plain Muon).

    `leaves` are the Nesterov momenta of the parameters, and `mean_squares` their old mean squares of rows or columns.
    """
    spec, counts = specs[0], [matrix_shape(s)[0] for s in specs]
    _, rows, columns = matrix_shape(spec)
    stack = jnp.concatenate([leaf.astype(settings.compute_dtype).reshape(-1, rows, columns) for leaf in leaves])
    padding = -len(stack) % sharding.device_count
    stack = jnp.pad(sharding.shard_as_stored(stack, spec), ((0, padding), (0, 0), (0, 0)))
    directions = orthogonalize(sharding.shard_by_matrix(stack), spec.output_first)
    if settings.beta2 is not None:
        old_squares = jnp.pad(
            jnp.concatenate([s.reshape(-1, s.shape[-1]) for s in mean_squares]), ((0, padding), (0, 0))
        )
        directions, new_squares = _normalise(directions, old_squares, settings.beta2, _second_moment_axis(spec))
        new_squares = jnp.split(new_squares[: len(new_squares) - padding], _split_points(counts))
        mean_squares = [squares.reshape(_second_moment_shape(s)) for squares, s in zip(new_squares, specs, strict=True)]
    directions = sharding.shard_as_stored(sharding.shard_by_matrix(directions), spec)
    parts = jnp.split(directions[: len(directions) - padding], _split_points(counts))
    return [part.reshape(s.shape).astype(jnp.float32) for part, s in zip(parts, specs, strict=True)], mean_squares


def orthogonalize(stack: Float[Array, "n rows columns"], output_first: bool) -> Float[Array, "n rows columns"]:
    """Orthogonalize each matrix approximately, in the stack's dtype.

    First scales the output vectors (rows if `output_first`, else columns) to equal norms (MuonEq, arXiv 2603.28254).
    The results have the Frobenius norm sqrt(min(rows, columns)).
    """
    stack_f32, output_count = stack.astype(jnp.float32), stack.shape[-2 if output_first else -1]
    norms = jnp.linalg.norm(stack_f32, axis=-1 if output_first else -2, keepdims=True)
    target_norm = jnp.linalg.norm(stack_f32, axis=(-2, -1), keepdims=True) / output_count**0.5
    balanced = stack * (target_norm / jnp.maximum(norms, 1e-6)).astype(stack.dtype)
    result = jax.vmap(lambda x: orthogonalize_via_newton_schulz(x, jnp.asarray(_COEFFICIENTS, x.dtype), eps=1e-6))(
        balanced
    )
    norm = jnp.linalg.norm(result.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    return result * (min(stack.shape[-2:]) ** 0.5 / jnp.maximum(norm, 1e-6)).astype(result.dtype)


_COEFFICIENTS = np.array([[c / NORM_MARGIN ** (2 * i + 1) for i, c in enumerate(POLAR_EXPRESS[0])], *POLAR_EXPRESS[1:]])
"""Coefficients of the Polar Express, with the division by the margin folded into the first step."""


def _normalise(
    directions: Float[Array, "n rows columns"], old_squares: Float[Array, "n length"], beta2: float, axis: int
) -> tuple[Float[Array, "n rows columns"], Float[Array, "n length"]]:
    """Divide rows (axis 1) or columns (axis 2) by the roots of their running mean squares (NorMuon, arXiv 2510.05491).

    Returns the directions, rescaled so that each matrix keeps its norm, and the new mean squares.
    """
    squares = jnp.mean(jnp.square(directions.astype(jnp.float32)), axis=3 - axis)
    new_squares = beta2 * old_squares + (1 - beta2) * squares
    scale = jax.lax.rsqrt(jnp.maximum(new_squares, 1e-10))
    norm = jnp.sqrt(jnp.sum(squares, axis=-1, keepdims=True))
    new_norm = jnp.sqrt(jnp.sum(squares * jnp.square(scale), axis=-1, keepdims=True))
    scale = scale * norm / jnp.maximum(new_norm, 1e-10)
    return directions * jnp.expand_dims(scale, 3 - axis).astype(directions.dtype), new_squares


def _second_moment_axis(spec: Parameter) -> int:
    """Return the dimension of a stack along which NorMuon stores second moments: 1 for rows or 2 for columns.

    This is the longer of the output and input dimensions, or the output dimension if both have the same length.
    """
    _, rows, columns = matrix_shape(spec)
    outputs, inputs = (rows, columns) if spec.output_first else (columns, rows)
    return 1 if spec.output_first == (outputs >= inputs) else 2


def _second_moment_shape(spec: Parameter) -> tuple[int, ...]:
    shape = matrix_shape(spec)
    return (shape[0], shape[_second_moment_axis(spec)])


def _rate_factor(spec: Parameter) -> float:
    """Return the learning rate factor of a matrix: sqrt(outputs / inputs), at least 1."""
    _, rows, columns = matrix_shape(spec)
    return max(1.0, rows / columns if spec.output_first else columns / rows) ** 0.5


def _leaf_update(direction: Array, value: Array, rate: Any, decay: Any) -> Array:
    """Return the update of a parameter. Decays only elements that the step also shrinks (cautious weight decay)."""
    agrees = direction * value >= 0
    return -rate * (direction + decay * jnp.where(agrees, value, 0))


def _split_points(counts: list[int]) -> list[int]:
    """Return the indices at which `jnp.split` separates parts of these lengths."""
    return [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
