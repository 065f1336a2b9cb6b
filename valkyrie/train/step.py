"""The training step and the evaluation step of a `StepProgram`, as functions to trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from valkyrie.axes import BATCH, Shard
from valkyrie.optim import UNAVERAGED_GROUPS
from valkyrie.parallel.pipeline import sum_shards
from valkyrie.parallel.sharding import BatchShard, MeshShard
from valkyrie.precision import ACCUMULATOR_DTYPE
from valkyrie.train.state import TrainState, copy_to_device

if TYPE_CHECKING:
    from valkyrie.train.program import StepProgram

Batch = dict[str, jax.Array]


def train_step(program: StepProgram, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run one optimizer step. Returns (new state, metrics).

    The metrics are the task's (`loss`, `tokens` and others), `grad_norm` (before clipping), `learning_rate`, and
    `squared_grad_norms` (a vector, one per parameter in `program.parameter_names`, before clipping).
    """
    shardings = program.shardings
    parameters = copy_to_device(state.parameters, shardings.parameters)
    optimizer_state = copy_to_device(state.optimizer, shardings.optimizer)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    gradients, sums, carry = _gradients(program, parameters, batch, state.carry, key)
    weight = jnp.maximum(sums["weight"], 1.0)
    gradients = jax.tree.map(lambda g: g.astype(ACCUMULATOR_DTYPE.value) / weight, gradients)
    squared_grad_norms = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)])
    updates, optimizer_state = program.optimizer.update(gradients, optimizer_state, parameters)
    parameters = optax.apply_updates(parameters, updates)
    ema, decay = state.ema, program.run.config.optimizer.ema_decay
    if ema is not None and decay is not None:
        ema = copy_to_device(ema, shardings.ema)
        ema = jax.tree.map(partial(_update_ema, decay), ema, parameters, program.groups)
    metrics = {
        **program.task.metrics(sums),
        "grad_norm": jnp.sqrt(squared_grad_norms.sum()),
        "learning_rate": jnp.asarray(program.schedule(state.step), jnp.float32),
        "squared_grad_norms": squared_grad_norms,
    }
    return TrainState(state.step + 1, parameters, optimizer_state, ema, state.key, carry), metrics


def _update_ema(decay: float, average: jax.Array, parameter: jax.Array, group: str) -> jax.Array:
    if group in UNAVERAGED_GROUPS:
        return parameter.astype(average.dtype)
    return decay * average + (1 - decay) * parameter.astype(average.dtype)


def eval_step(program: StepProgram, parameters: Any, batch: Batch, references: Any) -> dict[str, jax.Array]:
    """Return the task's metrics summed over an evaluation batch, such as the total loss (see `Task.evaluate`).

    `references` is the result of `Task.references`.
    """
    parameters = copy_to_device(parameters, program.shardings.parameters)
    return program.task.evaluate(program.builder.module(parameters), batch, references, shard=program.shard)


def logits_step(program: StepProgram, parameters: Any, tokens: jax.Array) -> jax.Array:
    """Return the float32 logits of a language model at every position, of shape (batch, seq, vocab)."""
    parameters = copy_to_device(parameters, program.shardings.parameters)
    return program.builder.module(parameters).logits(tokens, shard=program.shard)


def _gradients(
    program: StepProgram, parameters: Any, batch: Batch, carry: Any, key: jax.Array
) -> tuple[Any, dict[str, jax.Array], Any]:
    """Return (gradients, metric sums, carry). Gradients and metrics are sums over the batch, not means.

    Without a pipeline, microbatches run one after another: gradients are added in float32, and metric sums in their own
    dtypes. A pipeline splits the batch itself, and its microbatches are differentiated together.
    """
    if program.layout.accumulation_steps > 1:
        return *_accumulate(program, parameters, batch, key), carry
    gradients, (sums, carry) = _differentiate(program, program.shard)(parameters, batch, carry, key)
    return gradients, sums, carry


def _differentiate(program: StepProgram, shard: Shard) -> Callable[..., tuple[Any, tuple[dict[str, jax.Array], Any]]]:
    """Return the function (parameters, rows, carry, key) -> (gradients, (metric sums, carry)) of the objective."""
    needs_key = program.run.model.dropout > 0 or program.task.needs_key

    def objective(
        parameters: Any, rows: Batch, carry: Any, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        module = program.builder.module(parameters)
        batch_loss = program.task.loss(
            module, rows, carry, shard=shard, checkpoint=program.checkpoint(), key=key if needs_key else None
        )
        return batch_loss.objective, (batch_loss.sums, batch_loss.carry)

    return jax.grad(objective, has_aux=True)


def _accumulate(
    program: StepProgram, parameters: Any, batch: Batch, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Return (gradients, metric sums) of a batch whose microbatches run one after another.

    Each shard of the batch along `program.axes_summed_once` adds up its own gradients and metrics, in arrays with a
    leading dimension of shards, and these are summed over those mesh axes after the last microbatch. Over all other
    mesh axes, the gradients of every microbatch are summed.
    """
    shard, once_axes = program.shard, program.axes_summed_once
    if not once_axes:
        return _add_microbatches(program, shard, parameters, batch, key)
    if once_axes == shard.activation_mesh_axes(BATCH):
        gradients, sums = _add_microbatches(program, BatchShard(shard), parameters, batch, key)
    else:
        gradients, sums = _accumulate_locally(program, parameters, batch, key)
    gradients = jax.tree.map(partial(_add_shards, program), gradients)
    gradients = _constrain(gradients, jax.tree.map(_in_device_memory, program.shardings.parameters))
    return gradients, jax.tree.map(lambda x: x.sum(0), sums)


def _accumulate_locally(
    program: StepProgram, parameters: Any, batch: Batch, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Return (gradients, metric sums) of each shard of the batch along `program.axes_summed_once`, which split nothing.

    The program is manual over these mesh axes, so that it is the same within each shard as without them. `jax.vmap`
    would add a dimension to gradients, and XLA would not reduce-scatter them over the other mesh axes.
    """
    once_axes = program.axes_summed_once
    by_shard = PartitionSpec(once_axes)

    def accumulate(parameters: Any, batch: Batch, keys: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        totals = _add_microbatches(program, program.shard.make_local_shard(), parameters, batch, keys[0])
        return jax.tree.map(lambda x: x[None], totals)

    return jax.shard_map(
        accumulate,
        mesh=program.mesh,  # pyright: ignore[reportArgumentType] - both kinds of mesh serve
        in_specs=(PartitionSpec(), by_shard, by_shard),
        out_specs=by_shard,
        axis_names=set(once_axes),
        check_vma=False,
    )(parameters, batch, jax.random.split(key, program.layout.axes_size(once_axes)))


def _add_microbatches(
    program: StepProgram, shard: MeshShard, parameters: Any, batch: Batch, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Return (gradients, metric sums) of a batch. With a `BatchShard`, these have a leading dimension of its shards."""
    steps = program.layout.accumulation_steps
    differentiate = partial(_differentiate_rows, program, shard)
    # Mesh axes and size of the dimension of shards, if there is one.
    leading_axes: tuple[tuple[str, ...], ...] = ()
    leading_shape: tuple[int, ...] = ()
    if isinstance(shard, BatchShard):
        leading_axes, leading_shape = (shard.axes,), (program.layout.axes_size(shard.axes),)
        differentiate = jax.vmap(differentiate, in_axes=(None, 0, 0), spmd_axis_name=shard.axes)

    row_shardings = {
        name: shard.sharding((*leading_axes, *shard.layout.activation_axes(array.axes)))
        for name, array in program.task.batch(1, 1).items()
    }
    gradient_shardings = jax.tree.unflatten(
        jax.tree.structure(parameters),
        [shard.sharding((*leading_axes, *shard.layout.stored_axes(s.axes))) for s in program.builder.specs.values()],
    )

    def add_microbatch(
        totals: tuple[Any, dict[str, jax.Array]], microbatch_and_key: tuple[Batch, jax.Array]
    ) -> tuple[Any, None]:
        microbatch, key = microbatch_and_key
        gradients, sums = differentiate(parameters, _constrain(microbatch, row_shardings), key)
        gradient_sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), totals[0], gradients)
        return (_constrain(gradient_sums, gradient_shardings), jax.tree.map(jnp.add, totals[1], sums)), None

    microbatches = jax.tree.map(partial(_split_rows, steps, leading_shape), batch)
    keys = jax.random.split(key, (steps, *leading_shape))
    first_microbatch = jax.tree.map(lambda x: x[0], (microbatches, keys))
    _, shapes = jax.eval_shape(differentiate, parameters, *first_microbatch)
    zero_gradients = jax.tree.map(lambda p: jnp.zeros((*leading_shape, *p.shape), ACCUMULATOR_DTYPE.value), parameters)
    zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    totals = _constrain(zero_gradients, gradient_shardings), zero_sums
    return jax.lax.scan(add_microbatch, totals, (microbatches, keys))[0]


def _differentiate_rows(
    program: StepProgram, shard: Shard, parameters: Any, rows: Batch, key: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """Return (gradients, metric sums) of the rows of a microbatch, or of one shard of it."""
    gradients, (sums, _) = _differentiate(program, shard)(parameters, rows, None, key)
    return gradients, sums


def _split_rows(steps: int, leading_shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Reshape (rows, ...) to (steps, *leading_shape, rows per shard of a microbatch, ...).

    Row r of the batch goes to microbatch r % steps, so that every device works on its own rows in each.
    """
    by_microbatch = x.reshape(x.shape[0] // steps, steps, *x.shape[1:]).swapaxes(0, 1)
    return by_microbatch.reshape(steps, *leading_shape, -1, *x.shape[1:])


def _constrain(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def _add_shards(program: StepProgram, gradients: jax.Array) -> jax.Array:
    """Add the gradients of all shards of the batch, of shape (shards, ...), in the reduction dtype."""
    return sum_shards(gradients, program.run.config.precision.reduction.value)


def _in_device_memory(sharding: Any) -> Any:
    return sharding.with_memory_kind("device") if sharding.memory_kind == "pinned_host" else sharding
