"""The Flax module of the Tiny Recursive Model (`valkyrie.models.families.trm`)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, Parameter, Shard
from valkyrie.models.block import BLOCK_INPUT
from valkyrie.models.families.trm import Config
from valkyrie.models.layers import Checkpoint, parameter, project
from valkyrie.ops.choices import ATTENTION_OUTPUT
from valkyrie.ops.linear import Numerics, lookup
from valkyrie.ops.rotary import rotate
from valkyrie.ops.ssm import truncated_normal


class LatentStates(NamedTuple):
    """The states of every position: the answer z_H (`high`) and the reasoning z_L (`low`), in the compute dtype."""

    high: Float[Array, "batch seq embed"]
    low: Float[Array, "batch seq embed"]


class StepOutput(NamedTuple):
    """Result of a supervision step: float32 logits of cell values and of halting, and the new states."""

    logits: Float[Array, "batch cells vocab"]
    halt_logits: Float[Array, " batch"]
    states: LatentStates


class RecursiveLayer(nnx.Module):
    """Attention or a gated MLP over positions, then a gated feed-forward.

    The output of each is added to its input, and the sum is normalised without learned parameters.
    """

    def __init__(self, config: Config, specs: dict[str, Parameter], *, numerics: Numerics, key: Array) -> None:
        self.config, self.numerics = config, numerics
        fan_in = {"down": config.mlp, "out": config.heads * config.head_dim}
        fan_in |= dict.fromkeys(("length_gate", "length_up"), config.position_count) | {
            "length_down": config.length_mlp
        }
        for (name, spec), k in zip(specs.items(), jax.random.split(key, len(specs)), strict=True):
            weights = truncated_normal(k, spec.shape, fan_in.get(name, config.embed) ** -0.5)
            setattr(self, name, parameter(spec, weights, numerics))

    def __call__(self, x: Float[Array, "batch seq embed"], shard: Shard) -> Float[Array, "batch seq embed"]:
        x = checkpoint_name(x, BLOCK_INPUT)
        if self.config.has_attention:
            x = self._normalise(x + self._attention(x, shard), -1)
        else:
            mlp_output = self._gated_mlp(x, "length_", "bse,sm->bme", "bme,sm->bse", shard)
            x = self._normalise(x + mlp_output, 1)  # over the length, because the reference transposes before the norm
        mlp_output = self._gated_mlp(x, "", "bse,em->bsm", "bsm,em->bse", shard)
        return shard(self._normalise(x + mlp_output, -1), "batch", "seq", "embed")

    def _normalise(self, x: Array, axis: int) -> Array:
        x_f32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x_f32), axis=axis, keepdims=True)
        return (x_f32 * jax.lax.rsqrt(mean_square + self.config.norm_epsilon)).astype(x.dtype)

    def _gated_mlp(self, x: Array, prefix: str, up_equation: str, down_equation: str, shard: Shard) -> Array:
        def multiply(name: str, equation: str, y: Array) -> Array:
            weights: nnx.Param = getattr(self, f"{prefix}{name}")
            result_name = None if prefix else name
            return project(equation, y, weights, shard=shard, numerics=self.numerics, name=result_name)

        up, gate = multiply("up", up_equation, x), multiply("gate", up_equation, x)
        if not prefix:
            up, gate = shard(up, "batch", "seq", "mlp"), shard(gate, "batch", "seq", "mlp")
        return multiply("down", down_equation, jax.nn.silu(gate) * up)

    def _attention(self, x: Array, shard: Shard) -> Array:
        positions, theta = jnp.arange(x.shape[1]), self.config.rope_theta

        def weights(name: str) -> nnx.Param:
            return getattr(self, name)

        def project_heads(name: str) -> Array:
            y = project("bse,ehd->bshd", x, weights(name), shard=shard, numerics=self.numerics)
            y = y if name == "value" else rotate(y, positions, theta, shard.backend)
            return checkpoint_name(shard(y, "batch", "seq", "heads", "head_dim"), name)

        query, key, value = project_heads("query"), project_heads("key"), project_heads("value")
        with jax.named_scope(ATTENTION_OUTPUT):
            mixed = jax.nn.dot_product_attention(query, key, value, implementation="xla")
        return project("bshd,ehd->bse", mixed, weights("out"), shard=shard, numerics=self.numerics, name="out")


class HaltHead(nnx.Module):
    """Predicts whether a puzzle is solved. Initially (weight 0, bias -5) it predicts that no puzzle is solved."""

    def __init__(self, specs: dict[str, Parameter], numerics: Numerics) -> None:
        weight, bias = specs["halt.weight"], specs["halt.bias"]
        self.weight = parameter(weight, jnp.zeros(weight.shape), numerics)
        self.bias = parameter(bias, jnp.full(bias.shape, -5.0), numerics)
        self.numerics = numerics

    def __call__(self, first_state: Float[Array, "batch embed"]) -> Float[Array, " batch"]:
        """Return the float32 logit of halting, given the answer state at the first position.

        Uses only the first row of the weight and the first entry of the bias.
        """
        weight = self.weight[0].astype(self.numerics.compute)
        logit = jnp.einsum("be,e->b", first_state, weight, preferred_element_type=jnp.float32)
        return logit + self.bias[0].astype(jnp.float32)


class RecursiveModel(nnx.Module):
    """The Tiny Recursive Model. `embed` embeds puzzles, and `__call__` runs one supervision step on their states."""

    def __init__(self, config: Config, *, numerics: Numerics, key: Array) -> None:
        specs, keys = config.parameters(), jax.random.split(key, 4)
        self.config, self.numerics = config, numerics
        deviation = config.embed**-0.5

        def init_parameter(name: str, key: Array, deviation: float) -> nnx.Param:
            return parameter(specs[name], truncated_normal(key, specs[name].shape, deviation), numerics)

        self.embedding = init_parameter("embedding", keys[0], deviation)
        self.head = init_parameter("head", keys[1], deviation)
        self.halt = HaltHead(specs, numerics)
        state_keys = jax.random.split(keys[2])
        self.initial_high, self.initial_low = (
            init_parameter("initial_high", state_keys[0], 1.0),
            init_parameter("initial_low", state_keys[1], 1.0),
        )
        table = specs["puzzle_embedding"]
        self.puzzle_embedding = parameter(table, jnp.zeros(table.shape), numerics)
        for i, k in enumerate(jax.random.split(keys[3], config.layers)):
            prefix = f"layer_{i}."
            layer_specs = {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
            setattr(self, prefix[:-1], RecursiveLayer(config, layer_specs, numerics=numerics, key=k))

    def embed(
        self, inputs: Int[Array, "batch cells"], puzzles: Int[Array, " batch"], *, shard: Shard = UNSHARDED
    ) -> Float[Array, "batch seq embed"]:
        """Return the embeddings of the puzzle identifier (`puzzle_tokens` positions), then of the cells.

        All are multiplied by sqrt(embed). The result is added to the input of every update of z_L.
        """
        c, axes = self.config, (None, "embed")
        cell_embeddings = lookup(self.embedding[...], inputs, axes=axes, shard=shard, numerics=self.numerics)
        puzzle_embeddings = lookup(self.puzzle_embedding[...], puzzles, axes=axes, shard=shard, numerics=self.numerics)
        filled_positions = -(-c.puzzle_embed // c.embed)  # positions filled by the embedding of an identifier
        puzzle_embeddings = jnp.pad(puzzle_embeddings, ((0, 0), (0, filled_positions * c.embed - c.puzzle_embed)))
        puzzle_embeddings = puzzle_embeddings.reshape(-1, filled_positions, c.embed)
        puzzle_embeddings = jnp.pad(puzzle_embeddings, ((0, 0), (0, c.puzzle_tokens - filled_positions), (0, 0)))
        scaled = jnp.asarray(c.embed**0.5, cell_embeddings.dtype) * jnp.concatenate(
            [puzzle_embeddings, cell_embeddings], axis=1
        )
        return shard(scaled, "batch", "seq", "embed")

    def initial_states(self, batch: int, cell_count: int, *, shard: Shard = UNSHARDED) -> LatentStates:
        """Return the initial states of puzzles: two untrained vectors, the same at every position."""
        shape = (batch, self.config.puzzle_tokens + cell_count, self.config.embed)

        def broadcast(vector: nnx.Param) -> Array:
            constant = jax.lax.stop_gradient(vector[...]).astype(self.numerics.compute)
            return shard(jnp.broadcast_to(constant, shape), "batch", "seq", "embed")

        return LatentStates(broadcast(self.initial_high), broadcast(self.initial_low))

    def __call__(
        self,
        states: LatentStates,
        x: Float[Array, "batch seq embed"],
        *,
        shard: Shard = UNSHARDED,
        checkpoint: Checkpoint = lambda block: block,
    ) -> StepOutput:
        """Run one supervision step. Only its last cycle is differentiated.

        The returned states are detached, so that no gradient flows from the next step into this one.
        """
        graph, state = nnx.split(self)
        detached_model = nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))
        states, constant_x = jax.lax.stop_gradient(states), jax.lax.stop_gradient(x)

        def cycle(states: LatentStates, _: None) -> tuple[LatentStates, None]:
            return detached_model._cycle(states, constant_x, shard, lambda block: block), None

        if self.config.high_cycles > 1:
            states, _ = jax.lax.scan(cycle, states, None, length=self.config.high_cycles - 1)
        states = self._cycle(states, x, shard, checkpoint)
        head = self.head[...].astype(self.numerics.compute)
        answer = states.high[:, self.config.puzzle_tokens :]
        logits = jnp.einsum("bse,ve->bsv", answer, head, preferred_element_type=jnp.float32)
        return StepOutput(logits, self.halt(states.high[:, 0]), jax.lax.stop_gradient(states))

    def _cycle(self, states: LatentStates, x: Array, shard: Shard, checkpoint: Checkpoint) -> LatentStates:
        """Return the states after `low_cycles` updates of z_L and one of z_H."""

        def update_low(z: Array, _: None) -> tuple[Array, None]:
            return self._network(z, states.high + x, shard, checkpoint), None

        z_low, _ = jax.lax.scan(update_low, states.low, None, length=self.config.low_cycles)
        return LatentStates(self._network(states.high, z_low, shard, checkpoint), z_low)

    def _network(self, z: Array, injected: Array, shard: Shard, checkpoint: Checkpoint) -> Array:
        z = z + injected
        for i in range(self.config.layers):
            layer: RecursiveLayer = getattr(self, f"layer_{i}")
            z = checkpoint(lambda z, layer=layer: layer(z, shard))(z)
        return z
