"""The 1F1B pipeline schedule: stages alternate between forward and backward passes (arXiv 1806.03377).

The pipeline runs in turns and computes losses and gradients together. The backward pass of a microbatch starts as soon
as the microbatch has reached the last stage, so a stage stores the layer inputs of only a few microbatches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from valkyrie.axes import BATCH, LayerFunction, LossHead, Shard
from valkyrie.parallel.pipeline import (
    SEND_SCOPE,
    StageRegion,
    constrain_rows,
    gather_stages,
    index_tree,
    is_float,
    run_pipeline,
    scatter_sum,
    update_slot,
    where_tree,
)
from valkyrie.precision import ACCUMULATOR_DTYPE


def run_1f1b(
    region: StageRegion,
    shard: Shard,
    f: LayerFunction,
    layers: Any,
    x: Any,
    rows: Any,
    head: LossHead,
) -> Any:
    """Apply `f` once per layer, then `head`, in a 1F1B pipeline. Returns the results of `head`.

    Under differentiation, a single pass computes both the results and the gradients (`jax.custom_vjp`). The objective
    is the first leaf of the head's `sums`, and cotangents of all other results are ignored. Without differentiation,
    the layers run in `run_pipeline`.

    Args:
        region: The stages of the 1F1B pipeline.
        shard: The `Shard` outside of the stages. Used by `head` if nothing is differentiated.
        f: Applies one layer, as in `Shard.apply_layers`.
        layers: Parameters, stacked on a leading axis.
        x: Stream that enters the first layer.
        rows: Inputs that every layer gets, with one entry per row of the batch.
        head: The loss head.
    """
    leaves, structure = jax.tree.flatten((layers, x, rows, head.parameters, head.rows))

    @jax.custom_vjp
    def apply(*leaves: Any) -> Any:
        layers, x, rows, parameters, head_rows = jax.tree.unflatten(structure, leaves)
        return head.f(parameters, run_pipeline(region, f, layers, x, rows), head_rows, shard)

    def forward(*primals: Any) -> tuple[Any, Any]:
        has_gradient = jax.tree.unflatten(structure, [primal.perturbed for primal in primals])
        arguments = jax.tree.unflatten(structure, [primal.value for primal in primals])
        stage = _Stage(region, f, head, jax.tree.leaves(has_gradient[2]))
        stage_axis, row_spec = region.pipeline.axis, region.row_spec
        layers, layer_specs = region.copy_parameters(arguments[0], stage_axis)
        parameters, parameter_specs = region.copy_parameters(arguments[3])
        layer_gradient_spec, parameter_gradient_spec = region.copy_spec(stage_axis), region.copy_spec()
        run = region.map(
            stage.run,
            (layer_specs, row_spec, row_spec, parameter_specs, row_spec),
            ((PartitionSpec(), row_spec), (layer_gradient_spec, row_spec, row_spec, parameter_gradient_spec)),
        )
        values, gradients = run(layers, *arguments[1:3], parameters, arguments[4])
        layer_gradients, *row_gradients, parameter_gradients = gradients
        layer_gradients, parameter_gradients = (
            jax.tree.map(region.sum_copies, tree) for tree in (layer_gradients, parameter_gradients)
        )
        return values, (layer_gradients, *row_gradients, parameter_gradients)

    def backward(gradients: Any, cotangents: Any) -> Any:
        cotangent = jax.tree.leaves(cotangents)[0]
        leaf_gradients = [g for tree in gradients for g in tree] + [None] * len(jax.tree.leaves(head.rows))
        scaled = zip(leaf_gradients, leaves, strict=True)
        return tuple(None if g is None else (cotangent.astype(g.dtype) * g).astype(leaf.dtype) for g, leaf in scaled)

    apply.defvjp(forward, backward, symbolic_zeros=True)
    return apply(*leaves)


class _StageState(NamedTuple):
    """State of a stage between turns.

    Args:
        queued_streams: Stream that enters the first layer, by microbatch. On the first stage, the gradient of an entry
            replaces it when the microbatch finishes its backward pass.
        received_stream: Stream from the previous stage.
        received_gradient: Gradient of the stream, from the next stage.
        inputs: Inputs of this stage's layers, of shape (slot, layer, ...). Microbatch m uses slot
            m % `stored_microbatches`.
        layer_gradients: Gradients of the floating-point leaves of the layers, summed over the microbatches so far.
        row_gradients: Gradients of the differentiable leaves of `rows` (the per-sequence inputs of every layer, see
            `Shard.apply_layers`), by microbatch.
        head_gradients: Gradients of the parameters of the head, summed over the microbatches so far.
        sums: Sums that the head returns, such as the loss, over the microbatches so far.
    """

    queued_streams: Any
    received_stream: Any
    received_gradient: Any
    inputs: Any
    layer_gradients: list[jax.Array]
    row_gradients: list[jax.Array]
    head_gradients: Any
    sums: Any


class _Stage:
    """One stage of a 1F1B pipeline. Its methods run inside `jax.shard_map`.

    In turn t, stage s runs microbatch t - s forward and microbatch t - 2 (stages - 1) + s backward. The last stage runs
    a microbatch backward in the turn of its forward pass. The first stages - 1 turns have no backward pass, and the
    last stages - 1 turns have no forward pass.
    """

    def __init__(
        self,
        region: StageRegion,
        f: LayerFunction,
        head: LossHead,
        has_gradient: list[bool],
    ) -> None:
        """`has_gradient`: Whether each leaf of `rows` (the per-sequence inputs of every layer) has a gradient."""
        self._region, self._pipeline, self._f, self._head = region, region.pipeline, f, head
        self._has_gradient = has_gradient

    def run(self, layers: Any, x: Any, rows: Any, parameters: Any, head_rows: Any) -> tuple[Any, Any]:
        """Run all turns. Returns the results of `head`, and the gradients of `layers`, `x`, `rows` and `parameters`.

        The gradients of each argument are a list with one entry per leaf: an array, or None if it has no gradient.
        """
        pipeline = self._pipeline
        stages, microbatches, axis = pipeline.stages, pipeline.microbatches, pipeline.axis
        self._shard, self._stage_index = self._region.make_shard(), jax.lax.axis_index(axis)
        layers, parameters = map(self._region.drop_copies, (layers, parameters))
        self._layers, self._parameters = layers, parameters
        self._head_rows = jax.tree.map(self._split_microbatches, head_rows)
        self._rows = jax.tree.map(self._gather_rows, jax.tree.map(self._split_microbatches, rows))
        state = self._init_state(jax.tree.map(self._gather_rows, jax.tree.map(self._split_microbatches, x)))
        state, _ = jax.lax.scan(lambda state, t: (self._forward(state, t)[0], None), state, jnp.arange(stages - 1))
        state, by_row = jax.lax.scan(self._run_turn, state, jnp.arange(stages - 1, stages - 1 + microbatches))
        zeros, last_turns = _zeros_like(state.received_gradient), jnp.arange(stages - 1 + microbatches, pipeline.turns)
        state, _ = jax.lax.scan(lambda state, t: (self._backward(state, zeros, t), None), state, last_turns)
        is_first = self._stage_index == 0
        stream_gradients = [
            self._scatter_rows(jnp.where(is_first, g, 0)) for g in jax.tree.leaves(state.queued_streams)
        ]
        next_row_gradient, next_layer_gradient = iter(state.row_gradients), iter(state.layer_gradients)
        row_gradients = [
            self._scatter_rows(next(next_row_gradient)) if has_gradient else None for has_gradient in self._has_gradient
        ]
        layer_gradients = [next(next_layer_gradient) if is_float(leaf) else None for leaf in jax.tree.leaves(layers)]
        parameter_gradients = jax.lax.psum(jax.tree.leaves(state.head_gradients), axis)
        layer_gradients, parameter_gradients = map(self._region.add_copies, (layer_gradients, parameter_gradients))
        sums = jax.lax.psum(state.sums, (axis, *self._region.batch_axes))
        values = sums, jax.tree.map(self._join_microbatches, by_row)
        return values, (layer_gradients, stream_gradients, row_gradients, parameter_gradients)

    def _init_state(self, queued_streams: Any) -> _StageState:
        """Return the state before the first turn."""
        pipeline, stream = self._pipeline, _zeros_like(index_tree(queued_streams, 0))
        repeats = jax.tree.leaves(self._layers)[0].shape[0]
        inputs = jax.tree.map(lambda x: jnp.zeros((pipeline.stored_microbatches, repeats, *x.shape), x.dtype), stream)
        local_rows, head_rows = jax.tree.map(self._scatter_microbatch, stream), index_tree(self._head_rows, 0)
        sums, _ = jax.eval_shape(lambda p, x: self._head.f(p, x, head_rows, self._shard), self._parameters, local_rows)
        float_leaves = [leaf for leaf in jax.tree.leaves(self._layers) if is_float(leaf)]
        return _StageState(
            queued_streams,
            stream,
            stream,
            inputs,
            _zero_sums(float_leaves),
            _zero_sums(self._differentiable_rows(self._rows)),
            _zero_sums(self._parameters),
            _zeros_like(sums),
        )

    def _run_turn(self, state: _StageState, t: jax.Array) -> tuple[_StageState, Any]:
        """Run a turn with a forward and a backward pass. Returns the new state, and the row values of `head`."""
        state, output_stream = self._forward(state, t)
        microbatch = t - (self._pipeline.stages - 1)
        is_last = self._stage_index == self._pipeline.stages - 1
        local_rows = jax.tree.map(lambda x: self._scatter_microbatch(jnp.where(is_last, x, 0)), output_stream)

        def head(parameters: Any, x: Any) -> Any:
            return self._head.f(parameters, x, index_tree(self._head_rows, microbatch), self._shard)

        (sums, row_values), vjp = jax.vjp(head, self._parameters, local_rows)
        (objective_sum, *other_leaves), structure = jax.tree.flatten((sums, row_values))
        cotangents = jax.tree.unflatten(structure, [jnp.ones_like(objective_sum), *map(jnp.zeros_like, other_leaves)])
        parameter_gradients, stream_gradient = vjp(cotangents)
        state = state._replace(
            head_gradients=_add_trees(state.head_gradients, parameter_gradients), sums=_add_trees(state.sums, sums)
        )
        return self._backward(state, jax.tree.map(self._gather_microbatch, stream_gradient), t), row_values

    def _forward(self, state: _StageState, t: jax.Array) -> tuple[_StageState, Any]:
        """Run a microbatch forward. Returns the new state and the stream that leaves this stage."""
        unclipped_microbatch = t - self._stage_index
        microbatch, valid = self._clip_microbatch(unclipped_microbatch)
        rows = index_tree(self._rows, microbatch)

        def body(x: Any, layer: Any) -> tuple[Any, Any]:
            return self._f(x, layer, rows, self._shard), x

        input_stream = where_tree(
            self._stage_index == 0, index_tree(state.queued_streams, microbatch), state.received_stream
        )
        output_stream, inputs = jax.lax.scan(body, input_stream, self._region.fold_in_keys(self._layers, microbatch))
        inputs = update_slot(state.inputs, inputs, microbatch % self._pipeline.stored_microbatches, valid)
        return state._replace(inputs=inputs, received_stream=self._exchange(output_stream, 1)), output_stream

    def _backward(self, state: _StageState, head_gradient: Any, t: jax.Array) -> _StageState:
        """Run a microbatch backward. Returns the new state. Only the last stage uses `head_gradient`."""
        stages = self._pipeline.stages
        unclipped_microbatch = t - 2 * (stages - 1) + self._stage_index
        microbatch, valid = self._clip_microbatch(unclipped_microbatch)
        rows = index_tree(self._rows, microbatch)
        differentiable_rows, replace_rows = self._differentiable_rows(rows), self._make_replace_rows(rows)

        def body(carry: tuple[Any, Any], scanned: tuple[Any, Any]) -> tuple[tuple[Any, Any], Any]:
            (g, row_gradients), (layer, x) = carry, scanned
            leaves, structure = jax.tree.flatten(layer)

            def apply_layer(x: Any, float_leaves: list[jax.Array], differentiable_rows: list[jax.Array]) -> Any:
                next_leaf = iter(float_leaves)
                all_leaves = [next(next_leaf) if is_float(leaf) else leaf for leaf in leaves]
                return self._f(
                    x, jax.tree.unflatten(structure, all_leaves), replace_rows(differentiable_rows), self._shard
                )

            _, vjp = jax.vjp(apply_layer, x, [leaf for leaf in leaves if is_float(leaf)], differentiable_rows)
            g, layer_gradients, more_row_gradients = vjp(g)
            return (g, _add_trees(row_gradients, more_row_gradients)), layer_gradients

        g = where_tree(self._stage_index == stages - 1, head_gradient, state.received_gradient)
        inputs = index_tree(state.inputs, microbatch % self._pipeline.stored_microbatches)
        start, scanned = (
            (g, _zero_sums(differentiable_rows)),
            (self._region.fold_in_keys(self._layers, microbatch), inputs),
        )
        (g, row_gradients), stacked_gradients = jax.lax.scan(body, start, scanned, reverse=True)
        earlier_row_gradients = index_tree(state.row_gradients, microbatch)
        return state._replace(
            queued_streams=update_slot(state.queued_streams, g, microbatch, valid & (self._stage_index == 0)),
            received_gradient=self._exchange(g, -1),
            layer_gradients=_add_trees(state.layer_gradients, stacked_gradients, valid),
            row_gradients=update_slot(
                state.row_gradients, _add_trees(earlier_row_gradients, row_gradients), microbatch, valid
            ),
        )

    def _clip_microbatch(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Clip a number to the range of microbatches. Returns the microbatch, and whether the number was in range."""
        microbatch = jnp.clip(number, 0, self._pipeline.microbatches - 1)
        return microbatch, microbatch == number

    def _exchange(self, tree: Any, offset: int) -> Any:
        """Send arrays to the stage `offset` ahead. Returns the received arrays: zeros if no stage sends to this one."""
        stages = range(self._pipeline.stages)
        pairs = [(stage, stage + offset) for stage in stages if stage + offset in stages]
        with jax.named_scope(SEND_SCOPE):
            return jax.tree.map(lambda x: jax.lax.ppermute(x, self._pipeline.axis, pairs), tree)

    def _differentiable_rows(self, rows: Any) -> list[jax.Array]:
        return [
            leaf for leaf, has_gradient in zip(jax.tree.leaves(rows), self._has_gradient, strict=True) if has_gradient
        ]

    def _make_replace_rows(self, rows: Any) -> Any:
        """Return a function that replaces the leaves of `rows` that have a gradient, and returns the new tree."""
        leaves, structure = jax.tree.flatten(rows)

        def replace_rows(differentiable_rows: list[jax.Array]) -> Any:
            next_leaf = iter(differentiable_rows)
            pairs = zip(leaves, self._has_gradient, strict=True)
            return jax.tree.unflatten(
                structure, [next(next_leaf) if has_gradient else leaf for leaf, has_gradient in pairs]
            )

        return replace_rows

    def _split_microbatches(self, x: jax.Array) -> jax.Array:
        """Reshape (rows of a stage, ...) to (microbatch, rows, ...).

        Each device along the other mesh axes gets rows of every microbatch.
        """
        batch_shards, microbatches = self._shard.shard_count(BATCH), self._pipeline.microbatches
        split = (
            x.reshape(batch_shards, microbatches, -1, *x.shape[1:])
            .swapaxes(0, 1)
            .reshape(microbatches, -1, *x.shape[1:])
        )
        return constrain_rows(self._shard, split, 1)

    def _join_microbatches(self, x: jax.Array) -> jax.Array:
        """Reshape (microbatch, rows, ...) to (rows of a stage, ...). Inverts `_split_microbatches`."""
        batch_shards, microbatches = self._shard.shard_count(BATCH), self._pipeline.microbatches
        return x.reshape(microbatches, batch_shards, -1, *x.shape[2:]).swapaxes(0, 1).reshape(-1, *x.shape[2:])

    def _gather_rows(self, x: jax.Array) -> jax.Array:
        """Gather (microbatch, rows of one stage, ...) to (microbatch, rows of all stages, ...) on every stage."""
        return jax.vmap(self._gather_microbatch)(x)

    def _gather_microbatch(self, x: jax.Array) -> jax.Array:
        """Gather the rows of a microbatch from all stages. Devices along other mesh axes keep their rows."""
        batch_shards, shape = self._shard.shard_count(BATCH), x.shape[1:]
        local_rows = constrain_rows(self._shard, x.reshape(batch_shards, -1, *shape), 0)
        stage_rows = gather_stages(self._pipeline, local_rows).swapaxes(0, 1)
        return constrain_rows(self._shard, stage_rows, 0).reshape(-1, *shape)

    def _scatter_microbatch(self, x: jax.Array) -> jax.Array:
        """Sum a microbatch over stages, and return the rows of this stage. The transpose of `_gather_microbatch`."""
        stage_rows = x.reshape(self._shard.shard_count(BATCH), self._pipeline.stages, -1, *x.shape[1:])
        local_rows = scatter_sum(self._pipeline, constrain_rows(self._shard, stage_rows, 0).swapaxes(0, 1))
        return constrain_rows(self._shard, local_rows, 0).reshape(-1, *x.shape[1:])

    def _scatter_rows(self, x: jax.Array) -> jax.Array:
        """Sum an array (microbatch, rows, ...) over stages, and return this stage's part (rows, ...)."""
        return self._join_microbatches(jax.vmap(self._scatter_microbatch)(x))


def _zeros_like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _zero_sums(tree: Any) -> Any:
    """Return zeros in the dtype of sums over microbatches."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, ACCUMULATOR_DTYPE.value), tree)


def _add_trees(total: Any, more: Any, valid: jax.Array | bool = True) -> Any:
    return jax.tree.map(lambda a, b: a + jnp.where(valid, b, 0).astype(a.dtype), total, more)
