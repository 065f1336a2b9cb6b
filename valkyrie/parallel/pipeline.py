"""Pipeline parallelism: microbatches pass through stages of stacked layers along a mesh axis.

Code here is manual over the pipeline's axis (`jax.shard_map` with `axis_names`) and, if a step sums gradients over
devices once, over the mesh axes that split the batch. Within a stage, the other mesh axes split arrays as they do
without a pipeline, so pipelines compose with data, tensor and fully sharded parallelism.
Outside the stacked layers, each stage computes different rows of the batch, so that all stages share the work of the
embedding and the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.axes import BATCH, LayerFunction, Shard, scan_layers
from valkyrie.parallel.schedule import Pipeline
from valkyrie.precision import ACCUMULATOR_DTYPE

SEND_SCOPE = "sent_on"
"""Named scope of the permutes that send microbatches between stages."""


class StageRegion(NamedTuple):
    """The part of a program that runs in pipeline stages: manual over the pipeline's axis and over `batch_axes`.

    Args:
        pipeline: The pipeline.
        mesh: Mesh that has the pipeline's axis.
        make_shard: Returns the `Shard` within a stage. Called inside the region.
        batch_axes: Mesh axes that split the batch, if each device adds up the gradients of its own rows, and a step
            sums them over these axes once. Empty if the gradients of every microbatch are summed.
        reduction_dtype: Dtype of the sum over `batch_axes`.
    """

    pipeline: Pipeline
    mesh: Any
    make_shard: Callable[[], Shard]
    batch_axes: tuple[str, ...]
    reduction_dtype: str

    @property
    def row_spec(self) -> PartitionSpec:
        """Spec of arrays with one entry per row of the batch."""
        return PartitionSpec((self.pipeline.axis, *self.batch_axes))

    def map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Wrap `f` so that it runs in the region, with the local parts of its arguments."""
        axes = {self.pipeline.axis, *self.batch_axes}
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )

    def copy_parameters(self, tree: Any, *axes: str) -> tuple[Any, Any]:
        """Return a tree of parameters with a copy for each shard of the batch, and the specs of its arrays.

        Copies are stacked on a leading dimension (`drop_copies` removes it), so that each has its own gradient. Arrays
        that have no gradient are not copied. `axes` are the mesh axes of the leading dimensions in `tree`.
        """
        shards = math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

        @jax.custom_vjp
        def copy(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (shards, *x.shape))

        copy.defvjp(lambda x: (copy(x), None), lambda _, g: (self.sum_copies(g),))
        specs = jax.tree.map(lambda x: self.copy_spec(*axes) if is_float(x) else PartitionSpec(*axes), tree)
        return jax.tree.map(lambda x: copy(x) if self.batch_axes and is_float(x) else x, tree), specs

    def copy_spec(self, *axes: str) -> PartitionSpec:
        """Spec of a parameter, or of its gradient, with a copy for each shard of the batch."""
        return PartitionSpec(*((self.batch_axes,) if self.batch_axes else ()), *axes)

    def drop_copies(self, tree: Any) -> Any:
        """Return the parameters of this device, without the dimension of copies. Call it inside the region."""
        return jax.tree.map(lambda x: x[0] if self.batch_axes and is_float(x) else x, tree)

    def add_copies(self, tree: Any) -> Any:
        """Return the gradients of this device with a dimension of copies. Call it inside the region."""
        return jax.tree.map(lambda x: x[None] if self.batch_axes else x, tree)

    def sum_copies(self, gradient: jax.Array) -> jax.Array:
        """Sum a gradient with a dimension of copies over the shards of the batch. Call it outside of the region."""
        return sum_shards(gradient, self.reduction_dtype).astype(gradient.dtype) if self.batch_axes else gradient

    def fold_in_keys(self, layers: Any, microbatch: jax.Array) -> Any:
        """Fold the microbatch into the random keys of layers, so that dropout differs between microbatches.

        Also folds in the shard of the batch, if the region is manual over its mesh axes.
        """
        shards = math.prod(self.mesh.shape[axis] for axis in self.batch_axes)
        number = microbatch * shards + jax.lax.axis_index(self.batch_axes) if self.batch_axes else microbatch

        def fold_in(x: jax.Array) -> jax.Array:
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return jax.vmap(lambda key: jax.random.fold_in(key, number))(x) if is_key else x

        return jax.tree.map(fold_in, layers)


def sum_shards(x: jax.Array, dtype: str) -> jax.Array:
    """Sum an array of shape (shards of the batch, ...) over the shards, in the dtype that devices should send."""
    terms = x.astype(dtype)
    # Not `jnp.sum`, which adds bfloat16 in float32: the devices would send twice the bytes.
    return jax.lax.reduce(terms, terms.dtype.type(0), jax.lax.add, (0,))


def run_pipeline(region: StageRegion, f: LayerFunction, layers: Any, x: Any, rows: Any) -> Any:
    """Apply `f` once per layer, in stages along the pipeline's axis. Returns the stream after the last layer.

    `f`, `layers`, `x` and `rows` are as in `Shard.apply_layers`. In turn t, stage s computes its layers for microbatch
    t - s and sends the result to the next stage (`ppermute`). With `rounds` above 1, the last stage sends to the first
    until each microbatch has passed all stages `rounds` times (circular schedule). An idle stage computes on an
    arbitrary microbatch, and the result is discarded. JAX reverses the scan over turns for the backward pass, and saves
    its residuals for all microbatches (GPipe).
    """
    pipeline = region.pipeline
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, layers)

    def apply_layer(x: Any, layer: Any, rows: Any, shard: Shard) -> Any:
        return f(x, jax.tree.map(_cast_float, layer, dtypes), rows, shard)

    def run_stage(layers: Any, x: Any, rows: Any) -> Any:
        shard, stage_index = region.make_shard(), jax.lax.axis_index(pipeline.axis)
        rows = _gather_microbatches(pipeline, shard, rows)
        layer_groups = _deal_layers(pipeline, region.drop_copies(layers), stage_index)
        last_index = pipeline.rounds * pipeline.microbatches - 1

        def run_turn(carry: tuple[Any, Any], t: jax.Array) -> tuple[tuple[Any, Any], None]:
            queued_streams, received_stream = carry
            received_turn = t - pipeline.stages
            queued_streams = update_slot(
                queued_streams, received_stream, received_turn % pipeline.microbatches, received_turn >= 0
            )
            work_index = jnp.clip(t - stage_index, 0, last_index)
            microbatch, layer_group = work_index % pipeline.microbatches, work_index // pipeline.microbatches
            input_stream = where_tree(stage_index == 0, index_tree(queued_streams, microbatch), received_stream)
            stage_layers = layer_groups if pipeline.rounds == 1 else index_tree(layer_groups, layer_group)
            stage_layers = region.fold_in_keys(stage_layers, microbatch)
            output_stream = scan_layers(apply_layer, stage_layers, input_stream, index_tree(rows, microbatch), shard)
            return (queued_streams, _send_to_next(pipeline, output_stream)), None

        queued_streams = _gather_microbatches(pipeline, shard, x)
        start, turns = (queued_streams, index_tree(queued_streams, 0)), jnp.arange(pipeline.forward_turns)
        (queued_streams, received_stream), _ = jax.lax.scan(run_turn, start, turns)
        queued_streams = update_slot(queued_streams, received_stream, last_index % pipeline.microbatches, True)
        return _scatter_rows(pipeline, shard, queued_streams, stage_index == 0)

    layers, layer_specs = region.copy_parameters(jax.tree.map(_widen, layers), pipeline.axis)
    return region.map(run_stage, (layer_specs, region.row_spec, region.row_spec), region.row_spec)(layers, x, rows)


def save_without_copies(f: LayerFunction) -> LayerFunction:
    """Wrap a layer so that all its activations are saved for the backward pass, but no copies of parameters.

    Otherwise JAX would save cast or resharded copies of parameters once per turn, like activations.
    """

    def apply_layer(x: Any, layer: Any, rows: Any, shard: Shard) -> Any:
        def apply(x: Any, layer: Any, rows: Any) -> Any:
            return f(x, layer, rows, shard)

        return jax.checkpoint(apply, policy=_saves_all_but_copies, prevent_cse=False)(x, layer, rows)

    return apply_layer


def _saves_all_but_copies(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("convert_element_type", "sharding_constraint")


def _gather_microbatches(pipeline: Pipeline, shard: Shard, tree: Any) -> Any:
    """Gather the batch from all stages and split it into microbatches.

    Arrays (rows of a stage, ...) become (microbatch, rows, ...) on every stage. The rows of each microbatch are spread
    over all batch shards, so that rows move only between stages.
    """
    batch_shards = shard.shard_count(BATCH)

    def split(x: jax.Array) -> jax.Array:
        stage_rows = gather_stages(pipeline, constrain_rows(shard, x, 0))
        stage_rows = stage_rows.reshape(pipeline.stages, batch_shards, -1, *x.shape[1:])
        stage_rows = constrain_rows(shard, stage_rows, 1).swapaxes(0, 1)
        split_rows = stage_rows.reshape(batch_shards, pipeline.microbatches, -1, *x.shape[1:]).swapaxes(0, 1)
        split_rows = split_rows.reshape(pipeline.microbatches, -1, *x.shape[1:])
        return constrain_rows(shard, split_rows, 1)

    return jax.tree.map(split, tree)


def _scatter_rows(pipeline: Pipeline, shard: Shard, tree: Any, has_rows: jax.Array) -> Any:
    """Scatter arrays (microbatch, rows, ...) from one stage to all stages. Returns arrays (rows of a stage, ...).

    `has_rows` is True on the stage that sends.
    """
    batch_shards = shard.shard_count(BATCH)

    def scatter(x: jax.Array) -> jax.Array:
        split_rows = (
            jnp.where(has_rows, x, 0).reshape(pipeline.microbatches, batch_shards, -1, *x.shape[2:]).swapaxes(0, 1)
        )
        stage_rows = constrain_rows(shard, split_rows.reshape(batch_shards, pipeline.stages, -1, *x.shape[2:]), 0)
        local_rows = scatter_sum(pipeline, stage_rows.swapaxes(0, 1))
        return constrain_rows(shard, local_rows, 0).reshape(-1, *x.shape[2:])

    return jax.tree.map(scatter, tree)


def gather_stages(pipeline: Pipeline, x: jax.Array) -> jax.Array:
    """Return the arrays of all stages, stacked in order, on every stage.

    Uses permutes instead of an all-gather. In a region that is manual over one axis, XLA's partitioner first gathers
    the operand of an all-gather or a reduce-scatter over all other axes (experiments/LOG.md).
    """
    stage_index, stages = jax.lax.axis_index(pipeline.axis), range(pipeline.stages)
    received = [x, *(jax.lax.ppermute(x, pipeline.axis, _pairs(np.roll(stages, -k))) for k in stages[1:])]
    return jnp.stack([index_tree(jnp.stack(received), (stage_index - stage) % pipeline.stages) for stage in stages])


def scatter_sum(pipeline: Pipeline, parts: jax.Array) -> jax.Array:
    """Reduce-scatter over stages: sum `parts` (one entry per receiving stage) and return the entry of this stage.

    The transpose of `gather_stages`.
    """
    stage_index, stages = jax.lax.axis_index(pipeline.axis), range(pipeline.stages)
    sent = [index_tree(parts, (stage_index + k) % pipeline.stages) for k in stages]
    return sent[0] + sum(jax.lax.ppermute(sent[k], pipeline.axis, _pairs(np.roll(stages, -k))) for k in stages[1:])


def _deal_layers(pipeline: Pipeline, layers: Any, stage_index: jax.Array) -> Any:
    """Return the layers that a stage runs, of shape (round, layers, ...), or `layers` unchanged for a single round.

    Layers are stored in order, so checkpoints do not depend on the schedule: stage s stores the s-th of `stages` equal
    parts of the stack. The circular schedule divides the stack into `stages * rounds` groups, and stage s runs group
    `v * stages + s` in round v. Each step therefore sends nearly all layers to other stages, and their gradients back,
    with one permute per round.
    """
    stages, rounds = pipeline.stages, pipeline.rounds
    if rounds == 1:
        return layers
    stages_per_shift = stages // math.gcd(rounds, stages)
    sent_round = np.array([[(k + s // stages_per_shift) % rounds for s in range(stages)] for k in range(rounds)])
    layer_group = np.arange(stages) * rounds + sent_round
    arrival_round = np.zeros((stages, rounds), int)
    for k in range(rounds):
        arrival_round[layer_group[k] % stages, layer_group[k] // stages] = k

    def deal(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(deal(jax.random.key_data(x)))
        layer_groups = x.reshape(rounds, -1, *x.shape[1:])
        sent_groups = [index_tree(layer_groups, jnp.asarray(sent_round[k])[stage_index]) for k in range(rounds)]
        received_groups = [
            jax.lax.ppermute(sent_groups[k], pipeline.axis, _pairs(layer_group[k] % stages)) for k in range(rounds)
        ]
        return jnp.stack(received_groups)[jnp.asarray(arrival_round)[stage_index]]

    return jax.tree.map(deal, layers)


def _send_to_next(pipeline: Pipeline, tree: Any) -> Any:
    """Send arrays to the next stage; the last stage sends to the first. Returns the received arrays."""
    pairs = _pairs(np.roll(np.arange(pipeline.stages), -1))
    with jax.named_scope(SEND_SCOPE):
        return jax.tree.map(lambda x: jax.lax.ppermute(x, pipeline.axis, pairs), tree)


def _pairs(targets: Any) -> list[tuple[int, int]]:
    return [(stage, int(target)) for stage, target in enumerate(targets)]


def update_slot(tree: Any, entry: Any, slot: Any, valid: Any) -> Any:
    """Write `entry` to index `slot` of the first dimension of each array if `valid`. Returns the new arrays."""

    def update(x: jax.Array, entry: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, jnp.where(valid, entry, index_tree(x, slot)), slot, 0)

    return jax.tree.map(update, tree, entry)


def constrain_rows(shard: Shard, x: jax.Array, dimension: int) -> jax.Array:
    """Shard dimension `dimension` of `x` over the mesh axes of the batch. Call it inside a stage.

    The dimensions before it are replicated, and those after it unconstrained.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if set(mesh.manual_axes) == set(mesh.axis_names):
        return x  # JAX has no constraints where no axis is left
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - dimension - 1)
    spec = PartitionSpec(*[None] * dimension, shard.activation_mesh_axes(BATCH) or None, *free)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _widen(x: jax.Array) -> jax.Array:
    """Cast a floating-point parameter to at least float32, the dtype for sums of microbatch gradients."""
    return x.astype(jnp.promote_types(x.dtype, ACCUMULATOR_DTYPE.value)) if is_float(x) else x


def is_float(x: jax.Array) -> bool:
    """Whether an array has numbers of floating point, so that it can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def _cast_float(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else x


def index_tree(tree: Any, index: Any) -> Any:
    """Return the entry at `index` of the first dimension of each array in a tree."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def where_tree(condition: jax.Array, if_true: Any, if_false: Any) -> Any:
    """Return the tree `if_true` if `condition` is true, else `if_false`. Both have the same structure and shapes."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)
