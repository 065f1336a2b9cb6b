"""Decides one optimizer step and one evaluation step: losses averaged over tokens, gradients over microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from valkyrie.train.state import TrainState, on_device

if TYPE_CHECKING:
    from valkyrie.train.program import StepProgram

Batch = dict[str, jax.Array]


def train_step(program: StepProgram, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Return the state after one optimizer step and its metrics.

    Metrics: `loss` (nats per token, without z-loss), `tokens`, `grad_norm` (before clipping), `learning_rate`, and
    `leaf_norms` (squared gradient norms by parameter, in the order of `program.parameter_names`).
    """
    shardings = program.shardings
    parameters = on_device(state.parameters, shardings.parameters)
    moments = on_device(state.optimizer, shardings.optimizer)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    gradients, sums = _gradients(program, parameters, batch, key)
    weight = jnp.maximum(sums["weight"], 1.0)
    gradients = jax.tree.map(lambda g: (g / weight).astype(g.dtype), gradients)
    leaf_norms = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in _leaves(gradients)])
    updates, moments = program.optimizer.update(gradients, moments, parameters)
    parameters = optax.apply_updates(parameters, updates)
    ema = state.ema
    decay = program.run.config.optimizer.ema_decay
    if ema is not None and decay is not None:
        ema = jax.tree.map(lambda a, p: (decay * a + (1 - decay) * p).astype(a.dtype), ema, parameters)
    metrics = {
        "loss": sums["loss"] / weight,
        "tokens": sums["weight"],
        "grad_norm": jnp.sqrt(leaf_norms.sum()),
        "learning_rate": jnp.asarray(program.schedule(state.step), jnp.float32),
        "leaf_norms": leaf_norms,
    }
    return TrainState(state.step + 1, parameters, moments, ema, state.key), metrics


def eval_step(program: StepProgram, parameters: Any, batch: Batch, token_bytes: jax.Array) -> dict[str, jax.Array]:
    """Return sums over a batch: `loss` and `weight` over all targets, `nats` and `bytes` over those that are text.

    `token_bytes` is the length of each token in bytes, 0 for special tokens.
    """
    parameters = on_device(parameters, program.shardings.parameters)
    losses = program.assembly.module(parameters).losses(batch, shard=program.shard)
    length = token_bytes[batch["targets"]] * batch["weights"]
    return {
        "loss": losses.loss_sum,
        "weight": losses.weight_sum,
        "nats": jnp.sum(losses.per_token * (length > 0)),
        "bytes": jnp.sum(length),
    }


def _gradients(program: StepProgram, parameters: Any, batch: Batch, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """Return gradients and sums of the losses of all tokens, accumulated over microbatches in the reduction dtype."""
    dropping = program.run.model.dropout > 0
    reduction = jnp.dtype(program.run.config.precision.reduction.value)

    def objective(parameters: Any, part: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses = program.assembly.module(parameters).losses(
            part, shard=program.shard, checkpoint=program.checkpoint(), key=key if dropping else None
        )
        return losses.objective_sum, {"loss": losses.loss_sum, "weight": losses.weight_sum}

    gradient = jax.grad(objective, has_aux=True)
    count = program.layout.microbatches
    if count == 1:
        return gradient(parameters, batch, key)

    def one(carry: tuple[Any, dict[str, jax.Array]], scanned: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        part = jax.tree.map(lambda x: program.shard(x, "batch", "seq"), scanned[0])
        new, sums = gradient(parameters, part, scanned[1])
        total = jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[0], new)
        return (total, jax.tree.map(jnp.add, carry[1], sums)), None

    start = jax.tree.map(
        lambda p, s: jax.lax.with_sharding_constraint(jnp.zeros(p.shape, reduction), s),
        parameters,
        jax.tree.map(_in_device_memory, program.shardings.parameters),
    )
    sums = {"loss": jnp.zeros((), jnp.float32), "weight": jnp.zeros((), jnp.float32)}
    # Row r of the batch goes to microbatch r % count, so that every device works on its own rows in each of them.
    parts = jax.tree.map(lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), batch)
    total, _ = jax.lax.scan(one, (start, sums), (parts, jax.random.split(key, count)))
    return total


def _in_device_memory(sharding: Any) -> Any:
    return sharding.with_memory_kind("device") if sharding.memory_kind == "pinned_host" else sharding


def _leaves(tree: Any) -> list[jax.Array]:
    """Return the leaves of a nested dict in the order of `models.base.flatten`."""
    out: list[jax.Array] = []
    for value in tree.values():
        out += _leaves(value) if isinstance(value, dict) else [value]
    return out
