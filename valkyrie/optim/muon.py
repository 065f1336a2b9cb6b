"""Muon (Jordan 2024), as in nanochat: orthogonalized momentum, so that each step has equal size in every direction.

Matrices of the same shape are stacked over all layers and parameters, the stack is split over all devices, and each
device orthogonalizes whole matrices. Devices communicate only twice per step: they exchange the momentum before the
orthogonalization and the directions after it, both in the compute dtype. Iterating on sharded matrices would instead
all-reduce a square matrix twice in each of five iterations. Devices that split the experts of a layer exchange nothing:
the matrices of an expert stay on the devices that have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import partial
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
        part_count: Returns the number of parts into which devices split the experts of a parameter, 1 without experts.
        shard_as_stored: Shards a stack (parts, matrices, rows, columns) as the parameter is sharded between steps.
        shard_by_matrix: Shards the first two dimensions of a stack over all devices.
    """

    device_count: int = 1
    sharding_key: Callable[[Parameter], Hashable] = lambda spec: None
    part_count: Callable[[Parameter], int] = lambda spec: 1
    shard_as_stored: Callable[[Array, Parameter], Array] = lambda stack, spec: stack
    shard_by_matrix: Callable[[Array, Parameter], Array] = lambda stack, spec: stack


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
        key = *matrix_shape(spec)[1:], spec.output_first, sharding.part_count(spec), sharding.sharding_key(spec)
        groups[key].append(i)
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
    spec, parts = specs[0], sharding.part_count(specs[0])
    counts = [matrix_shape(s)[0] // parts for s in specs]
    padding = -sum(counts) % (sharding.device_count // parts)

    def stack(arrays: list[Array]) -> Array:
        return jnp.concatenate([_to_parts(x, s, parts) for x, s in zip(arrays, specs, strict=True)], axis=1)

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])))

    def unstack(x: Array) -> list[Array]:
        split = jnp.split(x[:, : sum(counts)], _split_points(counts), axis=1)
        return [_from_parts(part, s) for part, s in zip(split, specs, strict=True)]

    _, rows, columns = matrix_shape(spec)
    matrices = stack([leaf.astype(settings.compute_dtype).reshape(-1, rows, columns) for leaf in leaves])
    matrices = pad(sharding.shard_as_stored(matrices, spec))
    directions = orthogonalize(sharding.shard_by_matrix(matrices, spec), spec.output_first)
    if settings.beta2 is not None:
        old_squares = pad(stack(mean_squares))
        directions, new_squares = _normalise(directions, old_squares, settings.beta2, _second_moment_axis(spec))
        mean_squares = unstack(new_squares)
    directions = sharding.shard_as_stored(sharding.shard_by_matrix(directions, spec), spec)
    shaped = zip(unstack(directions), specs, strict=True)
    return [part.reshape(s.shape).astype(jnp.float32) for part, s in shaped], mean_squares


def _to_parts(x: Float[Array, "matrices *shape"], spec: Parameter, parts: int) -> Float[Array, "parts count *shape"]:
    """Split the matrices of a parameter into parts with different experts. Each part has those of all layers."""
    experts = _expert_count(spec)
    by_expert = x.reshape(-1, experts, *x.shape[1:]).swapaxes(0, 1)
    return by_expert.reshape(parts, -1, *x.shape[1:])


def _from_parts(x: Float[Array, "parts count *shape"], spec: Parameter) -> Float[Array, "matrices *shape"]:
    """Undo `_to_parts`."""
    by_expert = x.reshape(_expert_count(spec), -1, *x.shape[2:])
    return by_expert.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def _expert_count(spec: Parameter) -> int:
    return 1 if spec.matrices_per_token is None else spec.shape[spec.stack_dims - 1]


def orthogonalize(
    stack: Float[Array, "*stack rows columns"], output_first: bool
) -> Float[Array, "*stack rows columns"]:
    """Orthogonalize each matrix approximately, in the stack's dtype.

    First scales the output vectors (rows if `output_first`, else columns) to equal norms (MuonEq, arXiv 2603.28254).
    The results have the Frobenius norm sqrt(min(rows, columns)).
    """
    stack_f32, output_count = stack.astype(jnp.float32), stack.shape[-2 if output_first else -1]
    norms = jnp.linalg.norm(stack_f32, axis=-1 if output_first else -2, keepdims=True)
    target_norm = jnp.linalg.norm(stack_f32, axis=(-2, -1), keepdims=True) / output_count**0.5
    balanced = stack * (target_norm / jnp.maximum(norms, 1e-6)).astype(stack.dtype)
    iterate = partial(orthogonalize_via_newton_schulz, ns_coeffs=jnp.asarray(_COEFFICIENTS, stack.dtype), eps=1e-6)
    result = jnp.vectorize(iterate, signature="(r,c)->(r,c)")(balanced)
    norm = jnp.linalg.norm(result.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    return result * (min(stack.shape[-2:]) ** 0.5 / jnp.maximum(norm, 1e-6)).astype(result.dtype)


_COEFFICIENTS = np.array([[c / NORM_MARGIN ** (2 * i + 1) for i, c in enumerate(POLAR_EXPRESS[0])], *POLAR_EXPRESS[1:]])
"""Coefficients of the Polar Express, with the division by the margin folded into the first step."""


def _normalise(
    directions: Float[Array, "*stack rows columns"], old_squares: Float[Array, "*stack length"], beta2: float, axis: int
) -> tuple[Float[Array, "*stack rows columns"], Float[Array, "*stack length"]]:
    """Divide rows (axis 1) or columns (axis 2) by the roots of their running mean squares (NorMuon, arXiv 2510.05491).

    Returns the directions, rescaled so that each matrix keeps its norm, and the new mean squares.
    """
    squares = jnp.mean(jnp.square(directions.astype(jnp.float32)), axis=-axis)
    new_squares = beta2 * old_squares + (1 - beta2) * squares
    scale = jax.lax.rsqrt(jnp.maximum(new_squares, 1e-10))
    norm = jnp.sqrt(jnp.sum(squares, axis=-1, keepdims=True))
    new_norm = jnp.sqrt(jnp.sum(squares * jnp.square(scale), axis=-1, keepdims=True))
    scale = scale * norm / jnp.maximum(new_norm, 1e-10)
    return directions * jnp.expand_dims(scale, -axis).astype(directions.dtype), new_squares


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
