"""Stacked layers as stages along a mesh axis: each device of it holds some of them, and microbatches pass by.

Everything here is manual over the pipeline's axis alone (`jax.shard_map` with `axis_names`): within a stage the other
axes split arrays as they do without a pipeline, so that it composes with data, tensor and fully sharded parallelism.
Outside the stacked layers every stage works on its own rows of the batch: embedding and head are shared by all stages,
rather than repeated on each or waited for on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.axes import BATCH, Repeated, Shard, scan_layers
from valkyrie.parallel.schedule import Pipeline
from valkyrie.precision import ACCUMULATED

SENT_ON = "sent_on"
"""The scope under which a program names the permutes of microbatches from stage to stage."""

InStage = Callable[[], Shard]
"""Returns the `Shard` of what a stage works on; called where the pipeline's axis is manual."""


def pipelined(pipeline: Pipeline, mesh: Any, in_stage: InStage, f: Repeated, layers: Any, x: Any, rows: Any) -> Any:
    """Return the stream after `f` for each of `layers`, as `Shard.repeat` does, by stages along the pipeline's axis.

    In its turn t, stage s takes microbatch t - s through its layers and sends it on (`ppermute`). Under `rounds` above
    1 the last stage sends it to the first again until it has gone round as often (circular). A stage without a
    microbatch works on another one, of which nothing is used. JAX turns the scan over turns round for the backward
    pass, so it keeps what that needs of all microbatches (GPipe).
    """
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, layers)

    def of_layer(x: Any, layer: Any, rows: Any, shard: Shard) -> Any:
        return f(x, jax.tree.map(_as, layer, dtypes), rows, shard)

    def region(layers: Any, x: Any, rows: Any) -> Any:
        shard, place = in_stage(), jax.lax.axis_index(pipeline.axis)
        rows = _microbatches(pipeline, shard, rows)
        stretches = _dealt(pipeline, layers, place)
        last = pipeline.rounds * pipeline.microbatches - 1

        def turn(carry: tuple[Any, Any], t: jax.Array) -> tuple[tuple[Any, Any], None]:
            waiting, received = carry
            back = t - pipeline.stages
            waiting = put(waiting, received, back % pipeline.microbatches, back >= 0)
            number = jnp.clip(t - place, 0, last)
            microbatch, stretch = number % pipeline.microbatches, number // pipeline.microbatches
            entering = chosen(place == 0, at(waiting, microbatch), received)
            own = stretches if pipeline.rounds == 1 else at(stretches, stretch)
            leaving = scan_layers(of_layer, drawn(own, microbatch), entering, at(rows, microbatch), shard)
            return (waiting, _sent(pipeline, leaving)), None

        waiting = _microbatches(pipeline, shard, x)
        (waiting, received), _ = jax.lax.scan(turn, (waiting, at(waiting, 0)), jnp.arange(pipeline.forward_turns))
        waiting = put(waiting, received, last % pipeline.microbatches, True)
        return _own_rows(pipeline, shard, waiting, place == 0)

    along = PartitionSpec(pipeline.axis)
    run = jax.shard_map(region, mesh=mesh, in_specs=along, out_specs=along, axis_names={pipeline.axis}, check_vma=False)
    return run(jax.tree.map(_wide, layers), x, rows)


def without_copies(f: Repeated) -> Repeated:
    """Return what a stack repeats so that its backward pass keeps all activations, but no parameter for each turn.

    JAX would keep what a turn makes of parameters, a cast or a placement, as it does activations: once a turn.
    """

    def of_layer(x: Any, layer: Any, rows: Any, shard: Shard) -> Any:
        def kept(x: Any, layer: Any, rows: Any) -> Any:
            return f(x, layer, rows, shard)

        return jax.checkpoint(kept, policy=_is_kept, prevent_cse=False)(x, layer, rows)

    return of_layer


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("convert_element_type", "sharding_constraint")


def _microbatches(pipeline: Pipeline, shard: Shard, tree: Any) -> Any:
    """Return arrays (rows of a stage, ...) as (microbatch, its rows, ...) on every stage: they are gathered.

    Each device of the other axes has rows of its own in all microbatches: (stage, device, row) is taken as (device,
    microbatch, row of it).
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
    """Return arrays (microbatch, its rows, ...) as (rows of a stage, ...), from the one stage that `has` them."""
    parts = shard.size(BATCH)

    def of(x: jax.Array) -> jax.Array:
        apart = jnp.where(has, x, 0).reshape(pipeline.microbatches, parts, -1, *x.shape[2:]).swapaxes(0, 1)
        every = placed(shard, apart.reshape(parts, pipeline.stages, -1, *x.shape[2:]), 0)
        own = sum_for_each_stage(pipeline, every.swapaxes(0, 1))
        return placed(shard, own, 0).reshape(-1, *x.shape[2:])

    return jax.tree.map(of, tree)


def of_every_stage(pipeline: Pipeline, x: jax.Array) -> jax.Array:
    """Return an array of every stage, stacked in their order, on all of them.

    By permutes: within a region that is manual over one axis, XLA's partitioner first gathers the operand of an
    all-gather or a reduce-scatter over all other axes (experiments/LOG.md).
    """
    place, stages = jax.lax.axis_index(pipeline.axis), range(pipeline.stages)
    behind = [x, *(jax.lax.ppermute(x, pipeline.axis, _pairs(np.roll(stages, -k))) for k in stages[1:])]
    return jnp.stack([at(jnp.stack(behind), (place - stage) % pipeline.stages) for stage in stages])


def sum_for_each_stage(pipeline: Pipeline, parts: jax.Array) -> jax.Array:
    """Return the sum over stages of this one's part: `parts` has one for each. The transpose of `of_every_stage`."""
    place, stages = jax.lax.axis_index(pipeline.axis), range(pipeline.stages)
    ahead = [at(parts, (place + k) % pipeline.stages) for k in stages]
    return ahead[0] + sum(jax.lax.ppermute(ahead[k], pipeline.axis, _pairs(np.roll(stages, -k))) for k in stages[1:])


def _dealt(pipeline: Pipeline, layers: Any, place: jax.Array) -> Any:
    """Return a stage's layers as it takes them, in stretches: (round, layers of it, ...); as they are of one round.

    Layers rest in order: stage s holds the s-th part of them. Under the circular schedule its stretch of round v is the
    (v * stages + s)-th, so that each step sends nearly all layers to another stage, and their gradients back: as many
    permutes as rounds, each of one stretch from every stage. Checkpoints do not know of it.
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
        leaving = [at(own, jnp.asarray(sent[k])[place]) for k in range(rounds)]
        received = [jax.lax.ppermute(leaving[k], pipeline.axis, _pairs(stretch[k] % stages)) for k in range(rounds)]
        return jnp.stack(received)[jnp.asarray(arrives)[place]]

    return jax.tree.map(of, layers)


def _sent(pipeline: Pipeline, tree: Any) -> Any:
    """Return what the stage before sent; the last one sends to the first."""
    pairs = _pairs(np.roll(np.arange(pipeline.stages), -1))
    with jax.named_scope(SENT_ON):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, pipeline.axis, pairs), tree)


def _pairs(to: Any) -> list[tuple[int, int]]:
    return [(stage, int(other)) for stage, other in enumerate(to)]


def put(waiting: Any, new: Any, slot: Any, valid: Any) -> Any:
    """Return arrays with others in their place at `slot` of the first dimension, where those are valid."""

    def of(x: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(valid, new, at(x, slot)), slot, 0)

    return jax.tree.map(of, waiting, new)


def placed(shard: Shard, x: jax.Array, dimension: int) -> jax.Array:
    """Return an array whose rows, in this dimension, lie on the axes of the batch. Inside a stage."""
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - dimension - 1)
    spec = PartitionSpec(*[None] * dimension, shard.mesh_axes_of(BATCH) or None, *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))


def drawn(layers: Any, microbatch: jax.Array) -> Any:
    """Return layers with random keys of their own for this microbatch."""

    def of(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.vmap(lambda key: jax.random.fold_in(key, microbatch))(x) if is_key else x

    return jax.tree.map(of, layers)


def _wide(x: jax.Array) -> jax.Array:
    """Return a parameter in the dtype in which gradients of microbatches are added; what is no float as it is."""
    return x.astype(jnp.promote_types(x.dtype, ACCUMULATED.value)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else x


def at(tree: Any, index: Any) -> Any:
    """Return arrays at an index of their first dimension."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def chosen(here: jax.Array, yes: Any, no: Any) -> Any:
    """Return one tree of arrays here, elsewhere another."""
    return jax.tree.map(lambda a, b: jnp.where(here, a, b), yes, no)
