"""Pipeline parallelism: stages of stacked layers along a mesh axis, which microbatches pass through.

Code here is manual over the pipeline's axis only (`jax.shard_map` with `axis_names`). Within a stage, the other axes
split arrays as they do without a pipeline, so it composes with data, tensor and fully sharded parallelism. Outside the
stacked layers, every stage computes different rows of the batch, so that embedding and head are shared by all stages
instead of being repeated on each or computed by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.axes import BATCH, LayerFunction, Shard, scan_layers
from valkyrie.parallel.schedule import Pipeline
from valkyrie.precision import ACCUMULATED

SENT_ON = "sent_on"
"""Named scope of the permutes that send microbatches between stages."""

InStage = Callable[[], Shard]
"""Returns the `Shard` within a stage. Called where the pipeline's axis is manual."""


def pipelined(
    pipeline: Pipeline, mesh: Any, in_stage: InStage, f: LayerFunction, layers: Any, x: Any, rows: Any
) -> Any:
    """Apply `f` with each of `layers`, as `Shard.repeat` does, in stages along the pipeline's axis.

    In turn t, stage s computes its layers for microbatch t - s and sends the result to the next stage (`ppermute`).
    With `rounds` above 1, the last stage sends to the first until a microbatch has passed `rounds` times (circular). An
    idle stage computes on some microbatch and the result is discarded. JAX reverses the scan over turns for the
    backward pass, and saves its residuals for all microbatches (GPipe).
    """
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, layers)

    def of_layer(x: Any, layer: Any, rows: Any, shard: Shard) -> Any:
        return f(x, jax.tree.map(_as, layer, dtypes), rows, shard)

    def region(layers: Any, x: Any, rows: Any) -> Any:
        shard, place = in_stage(), jax.lax.axis_index(pipeline.axis)
        rows = _microbatches(pipeline, shard, rows)
        stretches = _deal_layers(pipeline, layers, place)
        last = pipeline.rounds * pipeline.microbatches - 1

        def turn(carry: tuple[Any, Any], t: jax.Array) -> tuple[tuple[Any, Any], None]:
            waiting, received = carry
            back = t - pipeline.stages
            waiting = update_slot(waiting, received, back % pipeline.microbatches, back >= 0)
            number = jnp.clip(t - place, 0, last)
            microbatch, stretch = number % pipeline.microbatches, number // pipeline.microbatches
            entering = where_tree(place == 0, index_tree(waiting, microbatch), received)
            own = stretches if pipeline.rounds == 1 else index_tree(stretches, stretch)
            own = fold_in_keys(own, microbatch)
            leaving = scan_layers(of_layer, own, entering, index_tree(rows, microbatch), shard)
            return (waiting, _send_on(pipeline, leaving)), None

        waiting = _microbatches(pipeline, shard, x)
        start, turns = (waiting, index_tree(waiting, 0)), jnp.arange(pipeline.forward_turns)
        (waiting, received), _ = jax.lax.scan(turn, start, turns)
        waiting = update_slot(waiting, received, last % pipeline.microbatches, True)
        return _own_rows(pipeline, shard, waiting, place == 0)

    along = PartitionSpec(pipeline.axis)
    run = jax.shard_map(region, mesh=mesh, in_specs=along, out_specs=along, axis_names={pipeline.axis}, check_vma=False)
    return run(jax.tree.map(_wide, layers), x, rows)


def without_copies(f: LayerFunction) -> LayerFunction:
    """Wrap a layer so that its backward pass saves all activations, but no copies of parameters.

    Otherwise JAX would save cast or resharded parameters like activations, once per turn.
    """

    def of_layer(x: Any, layer: Any, rows: Any, shard: Shard) -> Any:
        def apply(x: Any, layer: Any, rows: Any) -> Any:
            return f(x, layer, rows, shard)

        return jax.checkpoint(apply, policy=_saves, prevent_cse=False)(x, layer, rows)

    return of_layer


def _saves(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("convert_element_type", "sharding_constraint")


def _microbatches(pipeline: Pipeline, shard: Shard, tree: Any) -> Any:
    """Gather arrays (rows of a stage, ...) to (microbatch, rows, ...) on every stage.

    Each device of the other axes gets rows in all microbatches: (stage, device, row) becomes (device, microbatch, row).
    """
    parts = shard.size(BATCH)

    def of(x: jax.Array) -> jax.Array:
        every = of_every_stage(pipeline, placed(shard, x, 0))
        every = every.reshape(pipeline.stages, parts, -1, *x.shape[1:])
        every = placed(shard, every, 1).swapaxes(0, 1)
        apart = every.reshape(parts, pipeline.microbatches, -1, *x.shape[1:]).swapaxes(0, 1)
        apart = apart.reshape(pipeline.microbatches, -1, *x.shape[1:])
        return placed(shard, apart, 1)

    return jax.tree.map(of, tree)


def _own_rows(pipeline: Pipeline, shard: Shard, tree: Any, has: jax.Array) -> Any:
    """Scatter arrays (microbatch, rows, ...) from the one stage that `has` them to (rows of a stage, ...)."""
    parts = shard.size(BATCH)

    def of(x: jax.Array) -> jax.Array:
        apart = jnp.where(has, x, 0).reshape(pipeline.microbatches, parts, -1, *x.shape[2:]).swapaxes(0, 1)
        every = placed(shard, apart.reshape(parts, pipeline.stages, -1, *x.shape[2:]), 0)
        own = sum_for_each_stage(pipeline, every.swapaxes(0, 1))
        return placed(shard, own, 0).reshape(-1, *x.shape[2:])

    return jax.tree.map(of, tree)


def of_every_stage(pipeline: Pipeline, x: jax.Array) -> jax.Array:
    """Return the arrays of all stages, stacked in order, on every stage.

    Uses permutes: in a region that is manual over one axis, XLA's partitioner first gathers the operand of an
    all-gather or a reduce-scatter over all other axes (experiments/LOG.md).
    """
    place, stages = jax.lax.axis_index(pipeline.axis), range(pipeline.stages)
    behind = [x, *(jax.lax.ppermute(x, pipeline.axis, _pairs(np.roll(stages, -k))) for k in stages[1:])]
    return jnp.stack([index_tree(jnp.stack(behind), (place - stage) % pipeline.stages) for stage in stages])


def sum_for_each_stage(pipeline: Pipeline, parts: jax.Array) -> jax.Array:
    """Sum `parts`, one per stage, over stages, and return this stage's. The transpose of `of_every_stage`."""
    place, stages = jax.lax.axis_index(pipeline.axis), range(pipeline.stages)
    ahead = [index_tree(parts, (place + k) % pipeline.stages) for k in stages]
    return ahead[0] + sum(jax.lax.ppermute(ahead[k], pipeline.axis, _pairs(np.roll(stages, -k))) for k in stages[1:])


def _deal_layers(pipeline: Pipeline, layers: Any, place: jax.Array) -> Any:
    """Return a stage's layers by round: (round, layers, ...), or unchanged for a single round.

    Layers are stored in order: stage s has the s-th part. Under the circular schedule, its layers of round v are the
    (v * stages + s)-th part. So each step sends nearly all layers to other stages, and gradients back, in one permute
    per round. Checkpoints are independent of this.
    """
    stages, rounds = pipeline.stages, pipeline.rounds
    if rounds == 1:
        return layers
    common = stages // math.gcd(rounds, stages)
    sent = np.array([[(k + s // common) % rounds for s in range(stages)] for k in range(rounds)])
    stretch = np.arange(stages) * rounds + sent
    arrives = np.zeros((stages, rounds), int)
    for k in range(rounds):
        arrives[stretch[k] % stages, stretch[k] // stages] = k

    def of(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(of(jax.random.key_data(x)))
        own = x.reshape(rounds, -1, *x.shape[1:])
        leaving = [index_tree(own, jnp.asarray(sent[k])[place]) for k in range(rounds)]
        received = [jax.lax.ppermute(leaving[k], pipeline.axis, _pairs(stretch[k] % stages)) for k in range(rounds)]
        return jnp.stack(received)[jnp.asarray(arrives)[place]]

    return jax.tree.map(of, layers)


def _send_on(pipeline: Pipeline, tree: Any) -> Any:
    """Send arrays to the next stage, from the last to the first. Returns the received ones."""
    pairs = _pairs(np.roll(np.arange(pipeline.stages), -1))
    with jax.named_scope(SENT_ON):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, pipeline.axis, pairs), tree)


def _pairs(to: Any) -> list[tuple[int, int]]:
    return [(stage, int(other)) for stage, other in enumerate(to)]


def update_slot(waiting: Any, new: Any, slot: Any, valid: Any) -> Any:
    """Replace arrays at index `slot` of the first dimension by new ones, if `valid`."""

    def of(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(valid, new, index_tree(x, slot)), slot, 0)

    return jax.tree.map(of, waiting, new)


def placed(shard: Shard, x: jax.Array, dimension: int) -> jax.Array:
    """Constrain rows, in this dimension, to the mesh axes of the batch. Call it inside a stage."""
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - dimension - 1)
    spec = PartitionSpec(*[None] * dimension, shard.mesh_axes_of(BATCH) or None, *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))


def fold_in_keys(layers: Any, microbatch: jax.Array) -> Any:
    """Return layers with random keys for this microbatch."""

    def of(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.vmap(lambda key: jax.random.fold_in(key, microbatch))(x) if is_key else x

    return jax.tree.map(of, layers)


def _wide(x: jax.Array) -> jax.Array:
    """Cast a floating-point parameter to the dtype in which gradients of microbatches are added."""
    return x.astype(jnp.promote_types(x.dtype, ACCUMULATED.value)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else x


def index_tree(tree: Any, index: Any) -> Any:
    """Index the first dimension of arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def where_tree(here: jax.Array, yes: Any, no: Any) -> Any:
    """Select between two trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(here, a, b), yes, no)
