"""The training step and the evaluation step of a `StepProgram`, as functions to trace."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from valkyrie.optim import UNAVERAGED_GROUPS
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
    needs_key = program.run.model.dropout > 0 or program.task.needs_key

    def objective(
        parameters: Any, microbatch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        module = program.builder.module(parameters)
        batch_loss = program.task.loss(
            module,
            microbatch,
            carry,
            shard=program.shard,
            checkpoint=program.checkpoint(),
            key=key if needs_key else None,
        )
        return batch_loss.objective, (batch_loss.sums, batch_loss.carry)

    grad_fn = jax.grad(objective, has_aux=True)
    accumulation_steps = program.layout.accumulation_steps
    if accumulation_steps == 1:
        gradients, (sums, carry) = grad_fn(parameters, batch, key)
        return gradients, sums, carry

    def add_microbatch(
        totals: tuple[Any, dict[str, jax.Array]], microbatch_and_key: tuple[Batch, jax.Array]
    ) -> tuple[Any, None]:
        microbatch = {name: program.shard(x, *axes[name]) for name, x in microbatch_and_key[0].items()}
        gradients, (sums, _) = grad_fn(parameters, microbatch, microbatch_and_key[1])
        gradient_sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), totals[0], gradients)
        return (gradient_sums, jax.tree.map(jnp.add, totals[1], sums)), None

    axes = {name: array.axes for name, array in program.task.batch(1, 1).items()}
    zero_gradients = jax.tree.map(
        lambda p, s: jax.lax.with_sharding_constraint(jnp.zeros(p.shape, ACCUMULATOR_DTYPE.value), s),
        parameters,
        jax.tree.map(_in_device_memory, program.shardings.parameters),
    )
    # Row r of the batch goes to microbatch r % accumulation_steps, so that every device works on its own rows in each.
    microbatches = jax.tree.map(
        lambda x: x.reshape(x.shape[0] // accumulation_steps, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), batch
    )
    _, (shapes, _) = jax.eval_shape(grad_fn, parameters, jax.tree.map(lambda x: x[0], microbatches), key)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (gradients, sums), _ = jax.lax.scan(
        add_microbatch, (zero_gradients, sums), (microbatches, jax.random.split(key, accumulation_steps))
    )
    return gradients, sums, carry


def _in_device_memory(sharding: Any) -> Any:
    return sharding.with_memory_kind("device") if sharding.memory_kind == "pinned_host" else sharding
