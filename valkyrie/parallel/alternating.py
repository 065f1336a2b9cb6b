"""The 1F1B pipeline schedule: stages alternate between forward and backward passes (arXiv 1806.03377).

One scan over turns computes losses and gradients, and a microbatch goes backward as soon as it has reached the last
stage. A stage thus stores layer inputs for only a few microbatches, however many there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from valkyrie.axes import BATCH, LayerFunction, LossHead, Shard
from valkyrie.parallel.pipeline import (
    SENT_ON,
    InStage,
    fold_in_keys,
    index_tree,
    of_every_stage,
    pipelined,
    placed,
    sum_for_each_stage,
    update_slot,
    where_tree,
)
from valkyrie.parallel.schedule import Pipeline
from valkyrie.precision import ACCUMULATED


def alternating(
    pipeline: Pipeline,
    mesh: Any,
    in_stage: InStage,
    shard: Shard,
    f: LayerFunction,
    layers: Any,
    x: Any,
    rows: Any,
    head: LossHead,
) -> Any:
    """Apply `f` with each of `layers`, then `head`, as `Shard.repeat` does.

    The gradient is that of the first sum of `head`; cotangents of the other sums are ignored. Without differentiation
    this runs a GPipe pipeline.
    """
    leaves, structure = jax.tree.flatten((layers, x, rows, head.parameters, head.rows))

    @jax.custom_vjp
    def apply(*leaves: Any) -> Any:
        layers, x, rows, parameters, head_rows = jax.tree.unflatten(structure, leaves)
        return head.f(parameters, pipelined(pipeline, mesh, in_stage, f, layers, x, rows), head_rows, shard)

    def forward(*primals: Any) -> tuple[Any, Any]:
        moves = jax.tree.unflatten(structure, [primal.perturbed for primal in primals])
        arguments = jax.tree.unflatten(structure, [primal.value for primal in primals])
        stage = _Stage(pipeline, in_stage, f, head, jax.tree.leaves(moves[2]))
        along, everywhere = PartitionSpec(pipeline.axis), PartitionSpec()
        run = jax.shard_map(
            stage.run,
            mesh=mesh,
            in_specs=(along, along, along, everywhere, along),
            out_specs=((everywhere, along), (along, along, along, everywhere)),
            axis_names={pipeline.axis},
            check_vma=False,
        )
        return run(*arguments)

    def backward(gradients: Any, cotangents: Any) -> Any:
        by = jax.tree.leaves(cotangents)[0]
        of_all = [g for tree in gradients for g in tree] + [None] * len(jax.tree.leaves(head.rows))
        scaled = zip(of_all, leaves, strict=True)
        return tuple(None if g is None else (by.astype(g.dtype) * g).astype(leaf.dtype) for g, leaf in scaled)

    apply.defvjp(forward, backward, symbolic_zeros=True)
    return apply(*leaves)


class _Turns(NamedTuple):
    """State of a stage between turns.

    Args:
        waiting: Stream of every microbatch before the first layer. On the first stage, the gradient of a finished
            microbatch replaces its stream.
        received: Stream from the previous stage.
        returned: Gradient from the next stage.
        inputs: Inputs of layers, by microbatch.
        layers: Gradients of the learned leaves of layers.
        rows: Gradients of the leaves of rows with a gradient.
        head: Gradients of the head's parameters.
        sums: Sums of the head.
    """

    waiting: Any
    received: Any
    returned: Any
    inputs: Any
    layers: list[jax.Array]
    rows: list[jax.Array]
    head: Any
    sums: Any


class _Stage:
    """One stage, inside `jax.shard_map`.

    In turn t, stage s runs microbatch t - s forward and microbatch t - 2 (stages - 1) + s backward. The last stage runs
    a microbatch backward in the turn of its forward pass. The first stages - 1 turns have no backward pass, and the
    last stages - 1 turns have no forward pass.
    """

    def __init__(
        self, pipeline: Pipeline, in_stage: InStage, f: LayerFunction, head: LossHead, moves: list[bool]
    ) -> None:
        """`moves`: whether each leaf of the rows has a gradient."""
        self._pipeline, self._in_stage, self._f, self._head, self._moves = pipeline, in_stage, f, head, moves

    def run(self, layers: Any, x: Any, rows: Any, parameters: Any, head_rows: Any) -> tuple[Any, Any]:
        """Return the values of `head`, and the gradients of layers, stream, rows and parameters of `head`."""
        pipeline = self._pipeline
        stages, count, axis = pipeline.stages, pipeline.microbatches, pipeline.axis
        self._shard, self._place = self._in_stage(), jax.lax.axis_index(axis)
        self._layers, self._parameters = layers, parameters
        self._head_rows = jax.tree.map(self._apart, head_rows)
        self._rows = jax.tree.map(self._gathered, jax.tree.map(self._apart, rows))
        turns = self._start(jax.tree.map(self._gathered, jax.tree.map(self._apart, x)))
        turns, _ = jax.lax.scan(lambda turns, t: (self._forward(turns, t)[0], None), turns, jnp.arange(stages - 1))
        turns, by_row = jax.lax.scan(self._turn, turns, jnp.arange(stages - 1, stages - 1 + count))
        none, rest = _zeros(turns.returned), jnp.arange(stages - 1 + count, pipeline.turns)
        turns, _ = jax.lax.scan(lambda turns, t: (self._backward(turns, none, t), None), turns, rest)
        first = self._place == 0
        of_stream = [self._scattered(jnp.where(first, g, 0)) for g in jax.tree.leaves(turns.waiting)]
        moved = iter(turns.rows)
        of_rows = [self._scattered(next(moved)) if moves else None for moves in self._moves]
        grown = iter(turns.layers)
        of_layers = [next(grown) if _is_learned(leaf) else None for leaf in jax.tree.leaves(layers)]
        of_parameters = jax.lax.psum(jax.tree.leaves(turns.head), axis)
        values = jax.lax.psum(turns.sums, axis), jax.tree.map(self._joined, by_row)
        return values, (of_layers, of_stream, of_rows, of_parameters)

    def _start(self, waiting: Any) -> _Turns:
        """Return the state before the first turn."""
        pipeline, stream = self._pipeline, _zeros(index_tree(waiting, 0))
        repeats = jax.tree.leaves(self._layers)[0].shape[0]
        inputs = jax.tree.map(lambda x: jnp.zeros((pipeline.kept, repeats, *x.shape), x.dtype), stream)
        own, head_rows = jax.tree.map(self._split, stream), index_tree(self._head_rows, 0)
        sums, _ = jax.eval_shape(lambda p, x: self._head.f(p, x, head_rows, self._shard), self._parameters, own)
        learned = [leaf for leaf in jax.tree.leaves(self._layers) if _is_learned(leaf)]
        return _Turns(
            waiting,
            stream,
            stream,
            inputs,
            _sums_of(learned),
            _sums_of(self._moving(self._rows)),
            _sums_of(self._parameters),
            _zeros(sums),
        )

    def _turn(self, turns: _Turns, t: jax.Array) -> tuple[_Turns, Any]:
        """Run a whole turn. Returns the new state, and the values of `head` for each row of its microbatch."""
        turns, leaving = self._forward(turns, t)
        number = t - (self._pipeline.stages - 1)
        last = self._place == self._pipeline.stages - 1
        own = jax.tree.map(lambda x: self._split(jnp.where(last, x, 0)), leaving)

        def head(parameters: Any, x: Any) -> Any:
            return self._head.f(parameters, x, index_tree(self._head_rows, number), self._shard)

        (sums, by_row), back = jax.vjp(head, self._parameters, own)
        (first, *others), structure = jax.tree.flatten((sums, by_row))
        of_parameters, g = back(jax.tree.unflatten(structure, [jnp.ones_like(first), *map(jnp.zeros_like, others)]))
        turns = turns._replace(head=_added(turns.head, of_parameters), sums=_added(turns.sums, sums))
        return self._backward(turns, jax.tree.map(self._merged, g), t), by_row

    def _forward(self, turns: _Turns, t: jax.Array) -> tuple[_Turns, Any]:
        """Run a microbatch forward. Returns the new state and the stream that leaves this stage."""
        number = t - self._place
        microbatch, valid = self._clipped(number)
        rows = index_tree(self._rows, microbatch)

        def body(x: Any, layer: Any) -> tuple[Any, Any]:
            return self._f(x, layer, rows, self._shard), x

        entering = where_tree(self._place == 0, index_tree(turns.waiting, microbatch), turns.received)
        leaving, inputs = jax.lax.scan(body, entering, fold_in_keys(self._layers, microbatch))
        inputs = update_slot(turns.inputs, inputs, microbatch % self._pipeline.kept, valid)
        return turns._replace(inputs=inputs, received=self._exchange(leaving, 1)), leaving

    def _backward(self, turns: _Turns, head_gradient: Any, t: jax.Array) -> _Turns:
        """Run a microbatch backward. Returns the new state. Only the last stage uses `head_gradient`."""
        stages = self._pipeline.stages
        number = t - 2 * (stages - 1) + self._place
        microbatch, valid = self._clipped(number)
        rows = index_tree(self._rows, microbatch)
        moving, rows_of = self._moving(rows), self._rows_with(rows)

        def body(carry: tuple[Any, Any], scanned: tuple[Any, Any]) -> tuple[tuple[Any, Any], Any]:
            (g, of_rows), (layer, x) = carry, scanned
            leaves, structure = jax.tree.flatten(layer)

            def repeated(x: Any, learned: list[jax.Array], moving: list[jax.Array]) -> Any:
                fresh = iter(learned)
                whole = [next(fresh) if _is_learned(leaf) else leaf for leaf in leaves]
                return self._f(x, jax.tree.unflatten(structure, whole), rows_of(moving), self._shard)

            _, back = jax.vjp(repeated, x, [leaf for leaf in leaves if _is_learned(leaf)], moving)
            g, of_layer, more = back(g)
            return (g, _added(of_rows, more)), of_layer

        g = where_tree(self._place == stages - 1, head_gradient, turns.returned)
        inputs = index_tree(turns.inputs, microbatch % self._pipeline.kept)
        start, scanned = (g, _sums_of(moving)), (fold_in_keys(self._layers, microbatch), inputs)
        (g, of_rows), of_layers = jax.lax.scan(body, start, scanned, reverse=True)
        so_far = index_tree(turns.rows, microbatch)
        return turns._replace(
            waiting=update_slot(turns.waiting, g, microbatch, valid & (self._place == 0)),
            returned=self._exchange(g, -1),
            layers=_added(turns.layers, of_layers, valid),
            rows=update_slot(turns.rows, _added(so_far, of_rows), microbatch, valid),
        )

    def _clipped(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Clip a number to the range of microbatches. Returns the microbatch and whether it has this number."""
        microbatch = jnp.clip(number, 0, self._pipeline.microbatches - 1)
        return microbatch, microbatch == number

    def _exchange(self, tree: Any, by: int) -> Any:
        """Send arrays `by` stages ahead. Returns the received ones: zeros if there is no sender."""
        stages = range(self._pipeline.stages)
        pairs = [(stage, stage + by) for stage in stages if stage + by in stages]
        with jax.named_scope(SENT_ON):
            return jax.tree.map(lambda x: jax.lax.ppermute(x, self._pipeline.axis, pairs), tree)

    def _moving(self, rows: Any) -> list[jax.Array]:
        return [leaf for leaf, moves in zip(jax.tree.leaves(rows), self._moves, strict=True) if moves]

    def _rows_with(self, rows: Any) -> Any:
        """Return a function that replaces the leaves with a gradient."""
        leaves, structure = jax.tree.flatten(rows)

        def rows_with(moving: list[jax.Array]) -> Any:
            fresh = iter(moving)
            both = zip(leaves, self._moves, strict=True)
            return jax.tree.unflatten(structure, [next(fresh) if moves else leaf for leaf, moves in both])

        return rows_with

    def _apart(self, x: jax.Array) -> jax.Array:
        """Reshape (rows of a stage, ...) to (microbatch, rows, ...). Devices of the other axes have rows of each."""
        parts, count = self._shard.size(BATCH), self._pipeline.microbatches
        apart = x.reshape(parts, count, -1, *x.shape[1:]).swapaxes(0, 1).reshape(count, -1, *x.shape[1:])
        return placed(self._shard, apart, 1)

    def _joined(self, x: jax.Array) -> jax.Array:
        """Invert `_apart`."""
        parts, count = self._shard.size(BATCH), self._pipeline.microbatches
        return x.reshape(count, parts, -1, *x.shape[2:]).swapaxes(0, 1).reshape(-1, *x.shape[2:])

    def _gathered(self, x: jax.Array) -> jax.Array:
        """Gather (microbatch, rows of one stage, ...) to (microbatch, rows of all stages, ...) on every stage."""
        return jax.vmap(self._merged)(x)

    def _merged(self, x: jax.Array) -> jax.Array:
        """Gather a microbatch's rows of each stage on every stage. Devices of the other axes keep their rows."""
        parts, shape = self._shard.size(BATCH), x.shape[1:]
        own = placed(self._shard, x.reshape(parts, -1, *shape), 0)
        every = of_every_stage(self._pipeline, own).swapaxes(0, 1)
        return placed(self._shard, every, 0).reshape(-1, *shape)

    def _split(self, x: jax.Array) -> jax.Array:
        """Sum all rows of a microbatch over stages, and keep this stage's rows. The transpose of `_merged`."""
        every = x.reshape(self._shard.size(BATCH), self._pipeline.stages, -1, *x.shape[1:])
        own = sum_for_each_stage(self._pipeline, placed(self._shard, every, 0).swapaxes(0, 1))
        return placed(self._shard, own, 0).reshape(-1, *x.shape[1:])

    def _scattered(self, x: jax.Array) -> jax.Array:
        """Sum (microbatch, rows, ...) over stages, and return (rows of this stage, ...)."""
        return self._joined(jax.vmap(self._split)(x))


def _is_learned(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _sums_of(tree: Any) -> Any:
    """Return zeros for gradients, in the dtype in which microbatches are added."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, ACCUMULATED.value), tree)


def _added(total: Any, more: Any, valid: jax.Array | bool = True) -> Any:
    return jax.tree.map(lambda a, b: a + jnp.where(valid, b, 0).astype(a.dtype), total, more)
