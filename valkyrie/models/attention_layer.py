"""The Flax module of the attention block (`valkyrie.models.attention`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, Axis, CombinedAxes, Parameter, Shard
from valkyrie.models.attention import Attention
from valkyrie.models.block import BlockContext
from valkyrie.models.layers import Boundaries, add_bias, normal, parameter, project, unit_mean_square
from valkyrie.ops.attention import (
    GlobalStep,
    GlobalTokens,
    KVCache,
    attention,
    attention_step,
    attention_within_chunks,
    chunk_segments,
    document_positions,
    init_cache,
    sharded_attention,
)
from valkyrie.ops.choices import ATTENTION_OUTPUT, Bias, NormSpan, WindowKind, Yarn
from valkyrie.ops.linear import Numerics, gather_in_float32
from valkyrie.ops.rotary import rotate


class Projections(nnx.Module):
    """Query, key and value projections. With `qk_norm`, queries and keys are normalised before they are rotated.

    `unnamed` lists the results that do not have a name for `remat` yet.
    """

    unnamed: tuple[str, ...] = ("query", "key", "value")

    def __init__(self, block: Attention, specs: dict[str, Parameter], *, numerics: Numerics, key: Array) -> None:
        init_keys, self.numerics = jax.random.split(key, 3), numerics
        self.theta, self.yarn = block.rope_theta, block.yarn
        self.temperature = block.temperature_slope, block.temperature_interval
        self.stretch = block.rope_stretch if block.yarn.factor == 1 else block.yarn

        def init_weight(name: str, key: Array) -> nnx.Param:
            shape = specs[name].shape
            return parameter(specs[name], normal(key, shape, shape[0] ** -0.5), numerics)

        names = ("query", "key", "value")
        self.query, self.key, self.value = (init_weight(name, key) for name, key in zip(names, init_keys, strict=True))
        self.has_bias, self.has_norm = block.bias is not Bias.none, block.qk_norm
        if self.has_bias:
            self.query_bias, self.key_bias, self.value_bias = (
                parameter(specs[name], jnp.zeros(specs[name].shape), numerics)
                for name in ("query_bias", "key_bias", "value_bias")
            )
        if block.qk_norm and block.qk_norm_scale:
            self.query_norm, self.key_norm = (
                ProjectionNorm(specs[f"{name}_norm.scale"], block.qk_norm_epsilon, numerics=numerics)
                for name in ("query", "key")
            )
        elif block.qk_norm:
            self.query_norm = self.key_norm = UnscaledNorm(block.qk_norm_epsilon, block.qk_norm_span)

    def queries(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, "*batch seq"], shard: Shard
    ) -> Float[Array, "batch seq heads head_dim"]:
        with jax.named_scope("query"):
            q = project("bse,ehd->bshd", x, self.query, shard=shard, numerics=self.numerics)
            q = add_bias(q, self.query_bias, shard) if self.has_bias else q
            q = self.query_norm(q) if self.has_norm else q
            q = scale_logits(self._rotate(q, positions, shard), self.yarn)
            return scale_by_position(q, positions, *self.temperature)

    def keys_values(
        self, x: Float[Array, "batch seq embed"], positions: Int[Array, "*batch seq"], shard: Shard
    ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
        """Return the keys, rotated unless `rope_theta` is None, and the values, which are never rotated."""
        with jax.named_scope("value"):
            v = project("bse,ehd->bshd", x, self.value, shard=shard, numerics=self.numerics)
            v = add_bias(v, self.value_bias, shard) if self.has_bias else v
        with jax.named_scope("key"):
            k = project("bse,ehd->bshd", x, self.key, shard=shard, numerics=self.numerics)
            k = add_bias(k, self.key_bias, shard) if self.has_bias else k
            k = self.key_norm(k) if self.has_norm else k
            return self._rotate(k, positions, shard), v

    def _rotate(self, x: Array, positions: Int[Array, "*batch seq"], shard: Shard) -> Array:
        return x if self.theta is None else rotate(x, positions, self.theta, shard.backend, self.stretch)


def scale_logits(q: Float[Array, "*shape"], yarn: Yarn) -> Float[Array, "*shape"]:
    """Return the queries times `Yarn.logit_scale`, in their dtype."""
    scale = yarn.logit_scale
    return q if scale == 1 else (q.astype(jnp.float32) * scale).astype(q.dtype)


def scale_by_position(
    q: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "*batch seq"], slope: float, interval: int
) -> Float[Array, "batch seq heads head_dim"]:
    """Return the queries times 1 + slope * log(1 + floor((position + 1) / interval)), in their dtype."""
    if slope == 0:
        return q
    factors = 1 + slope * jnp.log1p(jnp.asarray((positions + 1) // interval, jnp.float32))
    return (q.astype(jnp.float32) * factors[..., None, None]).astype(q.dtype)


class UnscaledNorm(nnx.Module):
    """Root-mean-square normalisation of a projection without parameters, in float32."""

    def __init__(self, epsilon: float, span: NormSpan) -> None:
        self.epsilon, self.axes = epsilon, (-1,) if span is NormSpan.head else (-2, -1)

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return unit_mean_square(x, self.epsilon, self.axes).astype(x.dtype)


class ProjectionNorm(nnx.Module):
    """Root-mean-square normalisation of a projection over the axes of `spec`, a learned scale, in float32."""

    def __init__(self, spec: Parameter, epsilon: float, *, numerics: Numerics) -> None:
        self.scale = parameter(spec, jnp.ones(spec.shape), numerics)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        scale = self.scale[...].astype(jnp.float32)
        return (unit_mean_square(x, self.epsilon, tuple(range(-scale.ndim, 0))) * scale).astype(x.dtype)


class AttentionLayer(nnx.Module):
    """The attention layer. Its window and dilation depend on its number among the attention layers of the stack."""

    projections: type[Projections] = Projections

    def __init__(self, block: Attention, context: BlockContext, *, numerics: Numerics, key: Array) -> None:
        init_keys, specs = jax.random.split(key, 3), block.parameters(context)
        if not block.is_rotated(context):
            block = replace(block, rope_theta=None, qk_norm=False)
        if block.rope_theta is not None:
            block = replace(block, temperature_slope=0.0)
        self.config, self.numerics = block, numerics
        self.window, self.dilation = block.window(context), block.dilation(context)
        self.chunk_length = self.window if block.window_kind is WindowKind.chunked else None
        self.local = self.projections(block, _without_prefix("local", specs), numerics=numerics, key=init_keys[0])
        if block.global_tokens:
            self.globals = self.projections(
                block, _without_prefix("globals", specs), numerics=numerics, key=init_keys[1]
            )
        deviation = (2 * context.layers * block.heads * block.head_dim) ** -0.5
        weights = normal(init_keys[2], (block.heads, block.head_dim, context.embed), deviation)
        # Embed first, like the other projections, so that a fully sharded partition gathers contiguous memory.
        self.out = parameter(specs["out"], weights.transpose(2, 0, 1), numerics)
        if block.bias is Bias.all:
            self.out_bias = parameter(specs["out_bias"], jnp.zeros((context.embed,)), numerics)
        if block.sinks:
            self.sinks = parameter(specs["sinks"], jnp.zeros((block.heads,)), numerics)

    def __call__(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
    ) -> Float[Array, "batch seq embed"]:
        """Return the output of the layer, before the residual sum. Attention does not cross segments."""
        positions, segment_ids = jnp.arange(x.shape[1]), boundaries.segment_ids
        if segment_ids is not None and self.config.temperature_slope:
            positions = document_positions(segment_ids)
        if segment_ids is not None and self.chunk_length is not None and self.chunk_length < x.shape[1]:
            segment_ids = chunk_segments(segment_ids, self.chunk_length)
        rows = batch_axes(shard, x.shape[0], "heads", "kv_heads")
        key_axis, _ = _key_head_axes(shard)
        query_axes, key_axes = (rows, "seq", "heads", "head_dim"), (rows, "seq", key_axis, "head_dim")
        q = shard(self.local.queries(x, positions, shard), *query_axes)
        k, v = self._keys_values(x, positions, boundaries.tokens, shard)
        k, v = (shard(y, *key_axes) for y in (k, v))
        projected, unnamed = (("query", q), ("key", k), ("value", v)), self.local.unnamed
        q, k, v = (checkpoint_name(y, name) if name in unnamed else y for name, y in projected)
        inputs: list[Array] = [q, k, v]
        axes: list[CombinedAxes] = [query_axes, key_axes, key_axes]
        if segment_ids is not None:
            inputs, axes = [*inputs, segment_ids], [*axes, (rows, "seq")]
        if self.config.sinks:
            inputs, axes = [*inputs, gather_in_float32(self.sinks[...], ("heads",), shard)], [*axes, ("heads",)]
        if self.config.global_tokens:
            count = min(self.config.global_tokens, x.shape[1])
            q_global = self.globals.queries(x[:, :count], positions[..., :count], shard)
            k_global, v_global = self.globals.keys_values(x, positions, shard)
            inputs += [q_global, k_global, v_global]
            axes += [(rows, None, "heads", "head_dim"), key_axes, key_axes]
        with jax.named_scope(ATTENTION_OUTPUT):
            mixed = shard.map(self._local_attention(segment_ids is not None, shard), axes, query_axes)(*inputs)
        out = project("bshd,ehd->bse", mixed, self.out, shard=shard, numerics=self.numerics, name="out")
        return add_bias(out, self.out_bias, shard) if self.config.bias is Bias.all else out

    def _keys_values(
        self,
        x: Float[Array, "batch seq embed"],
        positions: Int[Array, "*batch seq"],
        tokens: Int[Array, "batch seq"] | None,
        shard: Shard,
    ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
        """Return the keys and values of all positions under the local projections. Subclasses may use `tokens`."""
        return self.local.keys_values(x, positions, shard)

    def _local_attention(self, has_segments: bool, shard: Shard):
        """Return a function that computes attention for one device's sequences, heads and positions.

        It takes q, k and v, then segment ids if `has_segments`, then sinks, then q, k and v of the global tokens, if
        there are any.
        """
        c, sequence_axes, (_, query_only_axes) = self.config, shard.activation_mesh_axes("seq"), _key_head_axes(shard)
        group_size = c.heads // c.kv_heads

        def mix(q: Array, k: Array, v: Array, *rest: Array) -> Array:
            segment_ids, rest = (rest[0], rest[1:]) if has_segments else (None, rest)
            sinks, rest = (rest[0], rest[1:]) if c.sinks else (None, rest)
            select_heads = partial(
                _select_key_heads, heads=q.shape[2], group_size=group_size, query_only_axes=query_only_axes
            )
            global_tokens = _leading_tokens(rest[0], select_heads(rest[1]), select_heads(rest[2])) if rest else None
            options = {
                "causal": c.causal,
                "segment_ids": segment_ids,
                "soft_cap": c.soft_cap,
                "sinks": sinks,
                "impl": c.impl,
                "backend": shard.backend,
            }
            k, v = select_heads(k), select_heads(v)
            if self.chunk_length is not None:
                options |= {"chunk_length": self.chunk_length, "axis_names": sequence_axes}
                return attention_within_chunks(q, k, v, **options)
            options |= {"window": self.window, "dilation": self.dilation, "global_tokens": global_tokens}
            if sequence_axes:
                return sharded_attention(q, k, v, axis_names=sequence_axes, **options)
            return attention(q, k, v, **options)

        return mix

    def init_state(self, batch: int, max_len: int) -> KVCache:
        """Return an empty cache of keys and values, for one window or, without a window, for `max_len` positions."""
        c = self.config
        return init_cache(
            batch,
            c.kv_heads,
            c.head_dim,
            window=self.window,
            max_len=max_len,
            dilation=self.dilation,
            global_tokens=c.global_tokens,
            dtype=self.numerics.compute,
        )

    def step(
        self, x: Float[Array, "batch embed"], state: KVCache, tokens: Int[Array, " batch"] | None = None
    ) -> tuple[Float[Array, "batch embed"], KVCache]:
        """Process one position of each sequence. Returns the output for input `x` and the updated cache.

        `tokens` are the token ids of the position. Only subclasses with value embeddings need these.
        """
        sequence, position = x[:, None], state.position[None]
        q = self.local.queries(sequence, position, UNSHARDED)[:, 0]
        token_ids = None if tokens is None else tokens[:, None]
        k, v = (y[:, 0] for y in self._keys_values(sequence, position, token_ids, UNSHARDED))
        global_step = None
        if self.config.global_tokens:
            k_global, v_global = (y[:, 0] for y in self.globals.keys_values(sequence, position, UNSHARDED))
            global_step = GlobalStep(self.globals.queries(sequence, position, UNSHARDED)[:, 0], k_global, v_global)
        sinks = self.sinks[...].astype(jnp.float32) if self.config.sinks else None
        mixed, state = attention_step(
            *(q, k, v, state),
            global_step=global_step,
            soft_cap=self.config.soft_cap,
            sinks=sinks,
            is_chunked=self.chunk_length is not None,
        )
        out = project("bhd,ehd->be", mixed, self.out, shard=UNSHARDED, numerics=self.numerics)
        return add_bias(out, self.out_bias, UNSHARDED) if self.config.bias is Bias.all else out, state


def _select_key_heads(k: Array, heads: int, group_size: int, query_only_axes: tuple[str, ...]) -> Array:
    """Return the key heads (axis 2) that the query heads of this device use. Call it inside `jax.shard_map`.

    Args:
        k: Keys.
        heads: Number of query heads on this device.
        group_size: Number of query heads that share a key head.
        query_only_axes: Mesh axes that shard query heads but not key heads.
    """
    if not query_only_axes:
        return k
    first = jax.lax.axis_index(query_only_axes) * heads
    if heads % group_size and group_size % heads:  # this device's query heads begin or end in the middle of a group
        return jnp.take(k, (first + jnp.arange(heads)) // group_size, axis=2)
    return jax.lax.dynamic_slice_in_dim(k, first // group_size, max(heads // group_size, 1), axis=2)


def _leading_tokens(q: Array, k: Array, v: Array) -> GlobalTokens:
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return GlobalTokens(positions, jnp.ones(q.shape[:2], bool), q, k, v)


def _without_prefix(prefix: str, specs: dict[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters under a prefix, with the prefix removed from their names."""
    return {name.removeprefix(f"{prefix}."): spec for name, spec in specs.items() if name.startswith(f"{prefix}.")}


def batch_axes(shard: Shard, batch: int, *head_axes: str) -> Axis:
    """Return the logical axes that shard the batch dimension during attention: `batch`, or `batch` and `embed`.

    If the residual stream is sharded, the projections are summed over the mesh axes of `embed`, and all devices along
    these axes would compute the same attention. Sharding the batch over these axes divides the work among them. This
    requires that the mesh axes of `embed` shard no heads (the logical axes `head_axes`), and that the batch is
    divisible.
    """
    free = not set(shard.activation_mesh_axes("embed")) & {m for a in head_axes for m in shard.activation_mesh_axes(a)}
    divisible = (
        free
        and shard.shard_count("embed") > 1
        and batch % (shard.shard_count("batch") * shard.shard_count("embed")) == 0
    )
    return ("batch", "embed") if divisible else "batch"


def _key_head_axes(shard: Shard) -> tuple[str | None, tuple[str, ...]]:
    """Return the logical axis of key heads during attention, and the mesh axes that shard only query heads.

    Query heads and key heads are sharded by separate rules. If the mesh axes of key heads are a prefix of those of
    query heads, key heads stay sharded. Otherwise, all key heads are gathered, and the logical axis is None. In both
    cases, each device then selects the key heads that its query heads use (`_select_key_heads`).
    """
    heads, key_heads = shard.activation_mesh_axes("heads"), shard.activation_mesh_axes("kv_heads")
    if heads[: len(key_heads)] == key_heads:
        return "kv_heads", heads[len(key_heads) :]
    return None, heads
