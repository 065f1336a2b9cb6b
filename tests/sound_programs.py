"""Ten steps of other programs with sound shardings, for which `valkyrie.check` finds no fault.

Each function takes a mesh with the axes `data` and `model`, and returns a jitted step and the shapes of its arguments.
The sizes are large enough that each step computes longer than it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Program = tuple[Any, tuple[Any, ...]]
OPTIMIZER = optax.adamw(1e-3)


def struct(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def training_step(
    mesh: Mesh, loss: Callable[..., jax.Array], parameters: Any, *batch: jax.ShapeDtypeStruct, spec: Any = None
) -> Program:
    """Return a step of AdamW.

    Args:
        loss: Function of the parameters and the batch.
        parameters: Shapes of the parameters.
        batch: Shapes of the other arguments of `loss`.
        spec: Function from the shape of a parameter or moment to its `PartitionSpec`. None replicates all.
    """

    def shard(array: Any) -> jax.ShapeDtypeStruct:
        return struct(mesh, array.shape, P() if spec is None else spec(array.shape), array.dtype)

    parameters = jax.tree.map(shard, parameters)
    state = jax.tree.map(shard, jax.eval_shape(OPTIMIZER.init, parameters))

    def step(parameters: Any, state: Any, *batch: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        updates, state = OPTIMIZER.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    shardings = jax.tree.map(lambda array: array.sharding, (parameters, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, NamedSharding(mesh, P())))
    return jitted, (parameters, state, *batch)


def flax_shapes(module: nn.Module, *inputs: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)


def mlp_dp(mesh: Mesh) -> Program:
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(3):
                x = nn.relu(nn.Dense(2048, dtype=jnp.bfloat16)(x))
            return nn.Dense(128)(x)

    module, x = Mlp(), struct(mesh, (16384, 1024), P(("data", "model")))
    labels = struct(mesh, (16384,), P(("data", "model")), jnp.int32)

    def loss(parameters: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = module.apply(parameters, x)
        assert isinstance(logits, jax.Array)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return training_step(mesh, loss, flax_shapes(module, x), x, labels)


EMBED, HEADS, MLP, LAYERS, VOCAB = 1024, 8, 4096, 2, 8192


def transformer_parameters(stacked: bool = False) -> Any:
    """Return the shapes of a transformer, with one array for all layers if `stacked`."""
    shapes = {"qkv": (EMBED, 3, EMBED), "out": (EMBED, EMBED), "up": (EMBED, MLP), "down": (MLP, EMBED)}
    leading = (LAYERS,) if stacked else ()
    layer = {name: jax.ShapeDtypeStruct(leading + shape, jnp.float32) for name, shape in shapes.items()}
    return {
        "embed": jax.ShapeDtypeStruct((VOCAB, EMBED), jnp.float32),
        "layers": layer if stacked else [layer] * LAYERS,
    }


def transformer_layer(x: jax.Array, w: Any) -> jax.Array:
    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6).astype(x.dtype)

    w = jax.tree.map(lambda array: array.astype(x.dtype), w)
    qkv = jnp.einsum("bse,ekd->kbsd", norm(x), w["qkv"])
    q, k, v = qkv.reshape(3, *x.shape[:2], HEADS, EMBED // HEADS)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def language_loss(constrain: Callable[[jax.Array], jax.Array], scanned: bool = False) -> Callable[..., jax.Array]:
    """Return the loss of the transformer. `constrain` is applied to the input of each layer."""

    def layer(x: jax.Array, w: Any) -> jax.Array:
        return constrain(transformer_layer(constrain(x), w))

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        table = parameters["embed"].astype(jnp.bfloat16)
        x = constrain(table[tokens])
        if scanned:
            x = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, parameters["layers"])[0]
        else:
            for w in parameters["layers"]:
                x = layer(x, w)
        logits = (x @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return loss


def transformer_fsdp(mesh: Mesh) -> Program:
    axes = ("data", "model")
    loss = language_loss(lambda x: with_sharding_constraint(x, NamedSharding(mesh, P(axes))))
    tokens = struct(mesh, (32, 1024), P(axes), jnp.int32)
    return training_step(mesh, loss, transformer_parameters(), tokens, spec=lambda shape: P(axes) if shape else P())


def tensor_parallel_spec(shape: tuple[int, ...]) -> P:
    """Return the sharding of a transformer's weight over `data`, and over `model` as in Megatron."""
    specs = {
        (EMBED, 3, EMBED): P("data", None, "model"),
        (EMBED, EMBED): P("model", "data"),
        (EMBED, MLP): P("data", "model"),
        (MLP, EMBED): P("model", "data"),
        (VOCAB, EMBED): P("model", "data"),
    }
    return specs.get(shape, P())


def transformer_2d_tensor_parallel(mesh: Mesh) -> Program:
    loss = language_loss(lambda x: with_sharding_constraint(x, NamedSharding(mesh, P("data"))))
    tokens = struct(mesh, (32, 1024), P("data"), jnp.int32)
    return training_step(mesh, loss, transformer_parameters(), tokens, spec=tensor_parallel_spec)


def scanned_layers_with_remat(mesh: Mesh) -> Program:
    loss = language_loss(lambda x: with_sharding_constraint(x, NamedSharding(mesh, P("data"))), scanned=True)
    tokens = struct(mesh, (32, 1024), P("data"), jnp.int32)

    def spec(shape: tuple[int, ...]) -> P:
        return tensor_parallel_spec(shape) if shape[:1] != (LAYERS,) else P(None, *tensor_parallel_spec(shape[1:]))

    return training_step(mesh, loss, transformer_parameters(stacked=True), tokens, spec=spec)


def conv_net_dp(mesh: Mesh) -> Program:
    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(128, (4, 4), (4, 4), dtype=jnp.bfloat16)(x)
            for width in (128, 256, 512):
                x = nn.Conv(width, (3, 3), (2, 2), dtype=jnp.bfloat16)(x)
                h = nn.relu(nn.GroupNorm(32, dtype=jnp.bfloat16)(x))
                x = x + nn.Conv(width, (3, 3), dtype=jnp.bfloat16)(h)
            return nn.Dense(1024)(x.mean((1, 2)))

    module, batch = ResNet(), P(("data", "model"))
    images = struct(mesh, (256, 224, 224, 3), batch)

    def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = module.apply(parameters, images)
        assert isinstance(logits, jax.Array)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return training_step(mesh, loss, flax_shapes(module, images), images, struct(mesh, (256,), batch, jnp.int32))


def graph_network_replicated(mesh: Mesh) -> Program:
    """A batch of dense graphs with message passing, as a graph network of replicated weights."""
    batch, width = P(("data", "model")), 512

    def loss(parameters: Any, nodes: jax.Array, edges: jax.Array, targets: jax.Array) -> jax.Array:
        for message, update in parameters:
            messages = jnp.einsum("gij,gjf->gif", edges, jax.nn.relu(nodes @ message))
            nodes = nodes + jax.nn.relu(jnp.concatenate([nodes, messages], -1) @ update)
        return jnp.square(nodes.mean(1) - targets).mean()

    layer = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((width, width), (2 * width, width)))
    nodes, edges = struct(mesh, (256, 256, width), batch), struct(mesh, (256, 256, 256), batch)
    return training_step(mesh, loss, [layer] * 3, nodes, edges, struct(mesh, (256, width), batch))


def diffusion_unet_dp(mesh: Mesh) -> Program:
    class UNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
            def block(x: jax.Array, width: int) -> jax.Array:
                h = nn.Conv(width, (3, 3), dtype=jnp.bfloat16)(nn.silu(nn.GroupNorm(32, dtype=jnp.bfloat16)(x)))
                return h + nn.Dense(width, dtype=jnp.bfloat16)(time)[:, None, None]

            time = nn.silu(nn.Dense(256, dtype=jnp.bfloat16)(time))
            x = nn.Conv(128, (3, 3), dtype=jnp.bfloat16)(x)
            fine = block(x, 128)
            coarse = block(nn.avg_pool(fine, (2, 2), (2, 2)), 256)
            coarse = coarse + nn.MultiHeadDotProductAttention(2, dtype=jnp.bfloat16)(
                coarse.reshape(x.shape[0], -1, 256)
            ).reshape(coarse.shape)
            up = jax.image.resize(coarse, (*fine.shape[:3], 256), "nearest")
            return nn.Conv(4, (3, 3))(block(jnp.concatenate([fine, up], -1), 128))

    module, batch = UNet(), P(("data", "model"))
    images, time = struct(mesh, (64, 64, 64, 4), batch), struct(mesh, (64, 128), batch)

    def loss(parameters: Any, images: jax.Array, time: jax.Array, noise: jax.Array) -> jax.Array:
        predicted = module.apply(parameters, images + noise, time)
        assert isinstance(predicted, jax.Array)
        return jnp.square(predicted - noise).mean()

    return training_step(mesh, loss, flax_shapes(module, images, time), images, time, images)


def shard_map_step(mesh: Mesh) -> Program:
    batch = P(("data", "model"))

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for matrix in w:
            x = jnp.tanh(x @ matrix)
        return jnp.square(x).mean()

    def step(w: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, x)
        value, gradients = jax.lax.pmean((value, gradients), ("data", "model"))
        return jax.tree.map(lambda a, g: (a - 0.1 * g).astype(a.dtype), w, gradients), value

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), batch), out_specs=P(), check_vma=False)
    w = [struct(mesh, (1024, 1024), P())] * 3
    return jax.jit(mapped, donate_argnums=0), (w, struct(mesh, (32768, 1024), batch))


def decoder_with_cache(mesh: Mesh) -> Program:
    """A decoding step: tokens of one position attend to a cache, which is updated in place. Trains nothing."""
    batch, positions, head_dim = 128, 2048, EMBED // HEADS

    def decode(parameters: Any, cache: Any, tokens: jax.Array, position: jax.Array) -> Any:
        def split(x: jax.Array, *spec: str | None) -> jax.Array:
            return with_sharding_constraint(x, NamedSharding(mesh, P("data", *spec)))

        x, new_cache = split(parameters["embed"][tokens]), []
        for w, (keys, values) in zip(parameters["layers"], cache, strict=True):
            q, k, v = jnp.moveaxis(jnp.einsum("be,ekd->bkd", x, w["qkv"]), 1, 0).reshape(3, batch, HEADS, head_dim)
            keys = jax.lax.dynamic_update_slice(keys, k[:, None], (0, position, 0, 0))
            values = jax.lax.dynamic_update_slice(values, v[:, None], (0, position, 0, 0))
            scores = jnp.einsum("bhd,bshd->bhs", q, keys) / head_dim**0.5
            weights = jax.nn.softmax(jnp.where(jnp.arange(positions) <= position, scores, -1e9))
            context = jnp.einsum("bhs,bshd->bhd", weights, values).reshape(batch, EMBED)
            x = split(x + context @ w["out"])
            x = split(x + jax.nn.gelu(split(x @ w["up"], "model")) @ w["down"])
            new_cache.append((keys, values))
        return split(x @ parameters["embed"].T, "model").argmax(-1), new_cache

    def shard(array: Any) -> jax.ShapeDtypeStruct:  # over `model` alone, because a step reads all weights
        spec = [axis if axis == "model" else None for axis in tensor_parallel_spec(array.shape)]
        return struct(mesh, array.shape, P(*spec))

    cache = [(struct(mesh, (batch, positions, HEADS, head_dim), P("data", None, "model")),) * 2] * LAYERS
    tokens, position = struct(mesh, (batch,), P("data"), jnp.int32), struct(mesh, (), P(), jnp.int32)
    return jax.jit(decode, donate_argnums=1), (jax.tree.map(shard, transformer_parameters()), cache, tokens, position)


def sparse_graph_network_dp(mesh: Mesh) -> Program:
    """Message passing along lists of edges, in a batch of graphs."""
    batch, width, edges = P(("data", "model")), 512, 2048

    def loss(
        parameters: Any, nodes: jax.Array, senders: jax.Array, receivers: jax.Array, targets: jax.Array
    ) -> jax.Array:
        def pass_messages(nodes: jax.Array, senders: jax.Array, receivers: jax.Array, message: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(jax.nn.relu(nodes[senders] @ message), receivers, nodes.shape[0])

        for message, update in parameters:
            messages = jax.vmap(pass_messages, (0, 0, 0, None))(nodes, senders, receivers, message)
            nodes = nodes + jax.nn.relu(jnp.concatenate([nodes, messages], -1) @ update)
        return jnp.square(nodes.mean(1) - targets).mean()

    layer = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((width, width), (2 * width, width)))
    lists = struct(mesh, (64, edges), batch, jnp.int32)
    nodes, targets = struct(mesh, (64, 512, width), batch), struct(mesh, (64, width), batch)
    return training_step(mesh, loss, [layer] * 3, nodes, lists, lists, targets)


SOUND_PROGRAMS = (
    mlp_dp,
    transformer_fsdp,
    transformer_2d_tensor_parallel,
    scanned_layers_with_remat,
    conv_net_dp,
    graph_network_replicated,
    diffusion_unet_dp,
    shard_map_step,
    decoder_with_cache,
    sparse_graph_network_dp,
)
