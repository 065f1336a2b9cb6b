"""A training step of a transformer in plain JAX, with and without a fault in its sharding.

valkyrie-predict experiments/foreign/plain_step.py:faulty --target v5e-8
valkyrie-predict experiments/foreign/plain_step.py:step --target v5e-8
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import valkyrie

EMBED, HEADS, MLP, LAYERS, VOCAB, BATCH, SEQ = 1024, 8, 4096, 4, 32000, 64, 1024


def argument_shapes(mesh: Mesh) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Return the parameters, sharded over both axes, and the tokens, sharded over `data`."""

    def shape(sizes: tuple[int, ...], *spec: str, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    layer = {
        "qkv": shape((EMBED, 3 * EMBED), "data", "model"),
        "out": shape((EMBED, EMBED), "model", "data"),
        "up": shape((EMBED, MLP), "data", "model"),
        "down": shape((MLP, EMBED), "model", "data"),
    }
    parameters = {"embed": shape((VOCAB, EMBED), "model", "data"), "layers": [layer] * LAYERS}
    return parameters, shape((BATCH, SEQ), "data", dtype=jnp.int32)


def build_step(mesh: Mesh, hidden_spec: P) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted step and the shapes of its arguments. The input of each MLP has the sharding `hidden_spec`."""

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)

    def attention(x: jax.Array, w: Any) -> jax.Array:
        q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in jnp.split(x @ w["qkv"], 3, axis=-1))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]

    def layer(x: jax.Array, w: Any) -> jax.Array:
        x = x + attention(norm(x), w)
        h = norm(x)
        h = with_sharding_constraint(h, NamedSharding(mesh, hidden_spec))
        h = jax.nn.gelu(h @ w["up"])
        return x + h @ w["down"]

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        x = parameters["embed"][tokens]
        x = with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        for w in parameters["layers"]:
            x = layer(x, w)
        logits = (norm(x) @ parameters["embed"].T)[:, :-1].astype(jnp.float32)
        target_logits = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - target_logits).mean()

    def step(parameters: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        return jax.tree.map(lambda p, g: (p - 1e-3 * g).astype(p.dtype), parameters, gradients), value

    parameters, tokens = argument_shapes(mesh)
    shardings = jax.tree.map(lambda array: array.sharding, parameters), NamedSharding(mesh, P())
    return jax.jit(step, donate_argnums=0, out_shardings=shardings), (parameters, tokens)


def faulty(slice: valkyrie.Slice) -> tuple[Any, tuple[Any, ...]]:
    """Return the step with a constraint that replicates the batch in each MLP."""
    return build_step(slice.mesh((4, 2), ("data", "model")), P())


def step(slice: valkyrie.Slice) -> tuple[Any, tuple[Any, ...]]:
    """Return the step with a constraint that splits the batch."""
    return build_step(slice.mesh((4, 2), ("data", "model")), P("data"))
