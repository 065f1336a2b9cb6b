"""The attention block: rotary, windowed (Longformer, arXiv 2004.05150) or full, with optional global tokens."""

# No `from __future__ import annotations` here: annotations of the module are checked in tests, and name local imports.

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from valkyrie.axes import UNSHARDED, Axis, Parameter, Placed, Shard, Size
from valkyrie.models.block import Block, BlockContext, Saved, SavedActivation, Weight, saved, weight
from valkyrie.ops.choices import CONTEXT, AttentionImpl, Bias, RopeStretch
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics


QK_NORM_EPSILON = 1e-6
"""Of the norms of queries and keys, as in Qwen 3, OLMo 2 and Gemma 3."""


@dataclass
class Attention(Block):
    """Windowed attention. `windows` and `dilations` are taken in turn by the attention layers, first layer first.

    A window counts keys including the token itself (`valkyrie.ops.attention` defines it); null is full attention.
    `global_tokens` is how many leading positions of a sequence are global, with projections of their own. `qk_norm`
    normalises each query and key before rotation, with a learned scale (Qwen 3, OLMo 2 and Gemma 3 do); `soft_cap` c
    replaces logits l by c * tanh(l / c) (Gemma 2: 50). `rope_theta` null: queries and keys are not rotated. `bias`
    says which products have one.
    """

    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    causal: bool = True
    windows: list[int | None] = field(default_factory=lambda: [128])
    dilations: list[int] = field(default_factory=lambda: [1])
    global_tokens: int = 0
    rope_theta: float | None = 10000.0
    rope_stretch: RopeStretch = field(default_factory=RopeStretch)
    bias: Bias = Bias.none
    qk_norm: bool = False
    soft_cap: float | None = None
    impl: AttentionImpl = AttentionImpl.auto

    axes = {
        "heads": "query heads",
        "kv_heads": "key and value heads",
        "head_dim": "the width of one head",
    }
    activations = (("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim"))
    follows = {"kv_heads": "heads"}
    over_rows = True

    @property
    def is_causal(self) -> bool:
        """Whether keys after the query are masked."""
        return self.causal

    def problems(self, key: str) -> list[Problem]:
        problems = [
            problem
            for name in ("heads", "kv_heads", "head_dim")
            for problem in check_range(f"{key}.{name}", getattr(self, name), least=1)
        ]
        if not problems and self.heads % self.kv_heads:
            text = f"{key}.heads={self.heads} is not a multiple of kv_heads={self.kv_heads}."
            problems.append(Problem(ProblemCode.conflict, f"{key}.heads", self.heads, text))
        if self.head_dim % 2:
            text = f"{key}.head_dim={self.head_dim} is odd: rotary positions need pairs."
            problems.append(Problem(ProblemCode.unsupported, f"{key}.head_dim", self.head_dim, text))
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            text = f"{key}.windows={self.windows}: name windows of at least 1, or null for full."
            problems.append(Problem(ProblemCode.malformed, f"{key}.windows", self.windows, text))
        if not self.dilations or any(d < 1 for d in self.dilations):
            text = f"{key}.dilations={self.dilations}: each must be at least 1."
            problems.append(Problem(ProblemCode.malformed, f"{key}.dilations", self.dilations, text))
        problems += check_range(f"{key}.global_tokens", self.global_tokens, least=0)
        problems += check_range(f"{key}.rope_theta", self.rope_theta, above=0, otherwise="null for no rotation")
        stretch = self.rope_stretch
        if not (stretch.factor >= 1 and 0 < stretch.low < stretch.high and stretch.context > 0):
            text = (
                f"{key}.rope_stretch: factor={stretch.factor:g} must be at least 1, context={stretch.context} above 0, "
                f"and low={stretch.low:g} above 0 and below high={stretch.high:g}."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.rope_stretch", text=text))
        return problems + check_range(f"{key}.soft_cap", self.soft_cap, above=0, otherwise="null for none")

    def sizes(self, site: BlockContext) -> dict[str, Size]:
        return {name: Size(getattr(self, name), f"{site.key}.{name}") for name in self.axes}

    def weights(self, site: BlockContext) -> dict[str, Weight]:
        """Return the projections, a second set of them where there are global tokens, and that of the output."""
        query, of_key = weight("embed", "heads", "head_dim"), weight("embed", "kv_heads", "head_dim")
        weights = {"out": weight("embed", "heads", "head_dim", output_first=True)}
        if self.bias is Bias.all:
            weights["out_bias"] = weight("embed", group="vector")
        for projections in ("local", "globals")[: 1 + bool(self.global_tokens)]:
            weights |= {f"{projections}.query": query}
            weights |= {f"{projections}.{name}": of_key for name in ("key", "value")}
            if self.bias is not Bias.none:
                weights |= {f"{projections}.query_bias": weight("heads", "head_dim", group="vector")}
                of_keys = weight("kv_heads", "head_dim", group="vector")
                weights |= {f"{projections}.{name}_bias": of_keys for name in ("key", "value")}
            if self.qk_norm:
                scale = weight("head_dim", group="vector")
                weights |= {f"{projections}.{name}_norm.scale": scale for name in ("query", "key")}
        return weights

    def variant(self, site: BlockContext) -> Hashable:
        return self.window(site), self.dilation(site)

    def window(self, site: BlockContext) -> int | None:
        """Return how many keys this layer sees, the token's own included; None for all."""
        return self.windows[site.number % len(self.windows)]

    def dilation(self, site: BlockContext) -> int:
        """Return how far apart the keys are that this layer sees."""
        return self.dilations[site.number % len(self.dilations)]

    def flops(self, site: BlockContext, seq: int) -> float:
        """Return forward FLOPs per token: its projections, and logits and values over the keys a query really sees."""
        keys = 4 * site.embed * self.head_dim * self.kv_heads
        projections = 4 * site.embed * self.head_dim * (self.heads + self.kv_heads) + keys * bool(self.global_tokens)
        return projections + 4.0 * self.head_dim * self.scores(site, seq)

    def scores(self, site: BlockContext, seq: int) -> float:
        """Return the logits of a token: the keys that it really sees, for every head."""
        return self.heads * self._mean_keys(site, seq)

    def saves(self, site: BlockContext) -> list[Saved]:
        """Return its products, what the kernel gives and its softmax's sums, and what rotation and norm need."""
        return [
            saved("heads", "head_dim", name="query", product=True),
            saved("kv_heads", "head_dim", name="key", product=True),
            saved("kv_heads", "head_dim", name="value", product=True),
            saved("heads", "head_dim", name=CONTEXT),
            saved("heads", name=CONTEXT, float32=True),
            saved("embed", name="out", product=True, result=True),
            saved("heads", "head_dim", count=2),
            saved("kv_heads", "head_dim", count=2),
            saved("embed"),
            saved("embed", count=2, float32=True),
            saved("heads", "head_dim", count=int(self.qk_norm), float32=True),
            saved("kv_heads", "head_dim", count=int(self.qk_norm), float32=True),
        ]

    def neighbours(self, site: BlockContext) -> list[tuple[SavedActivation, int | None]]:
        """Return keys and values: those of a window before the token, or all."""
        window = self.window(site)
        positions = None if window is None else (window - 1) * self.dilation(site)
        return [(kept, positions) for kept in self.kept(site) if kept.name in ("key", "value")]

    def build(self, site: BlockContext, *, numerics: "Numerics", key: "Array") -> Any:
        return attention_layer()(self, site, numerics=numerics, key=key)

    def _mean_keys(self, site: BlockContext, seq: int) -> float:
        """Return how many keys a query sees on average: key n of a window lies n dilations back, if there at all.

        Keys of a causal window W of dilation d over `seq` positions average W - d W(W-1)/(2 seq).
        """
        dilation = self.dilation(site)
        window = min(self.window(site) or seq, -(-seq // dilation))
        one_side = window - dilation * window * (window - 1) / (2 * seq)
        return float(min(seq, (one_side if self.causal else 2 * one_side - 1) + self.global_tokens))


@cache
def attention_layer() -> Any:
    """Return the class of the module. It is made here, so that declarations are imported without JAX."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.ad_checkpoint import checkpoint_name
    from jaxtyping import Array, Float, Int

    from valkyrie.models.layers import Boundaries, RMSNorm, biased, normal, parameter, project
    from valkyrie.ops.attention import (
        GlobalStep,
        GlobalTokens,
        KVCache,
        attention,
        attention_step,
        init_cache,
        sharded_attention,
    )
    from valkyrie.ops.linear import Numerics
    from valkyrie.ops.rotary import rotate

    class Projections(nnx.Module):
        """Query, key and value projections; queries and keys are normalised where the block says so, and rotated."""

        def __init__(self, block: Attention, specs: dict[str, Parameter], *, numerics: Numerics, key: Array) -> None:
            keys, self.numerics = jax.random.split(key, 3), numerics
            self.theta, self.stretch = block.rope_theta, block.rope_stretch

            def made(name: str, key: Array) -> nnx.Param:
                shape = specs[name].shape
                return parameter(specs[name], normal(key, shape, shape[0] ** -0.5), numerics)

            self.query, self.key, self.value = made("query", keys[0]), made("key", keys[1]), made("value", keys[2])
            self.biased, self.normalised = block.bias is not Bias.none, block.qk_norm
            if self.biased:
                self.query_bias, self.key_bias, self.value_bias = (
                    parameter(specs[name], jnp.zeros(specs[name].shape), numerics)
                    for name in ("query_bias", "key_bias", "value_bias")
                )
            if block.qk_norm:
                norm = partial(RMSNorm, block.head_dim, QK_NORM_EPSILON, numerics=numerics, axis="head_dim")
                self.query_norm, self.key_norm = norm(), norm()

        def queries(
            self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
        ) -> Float[Array, "batch seq heads head_dim"]:
            with jax.named_scope("query"):
                q = project("bse,ehd->bshd", x, self.query, shard=shard, numerics=self.numerics)
                q = biased(q, self.query_bias, shard) if self.biased else q
                q = self.query_norm(q) if self.normalised else q
                return self._rotated(q, positions, shard)

        def keys_values(
            self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
        ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
            """Return rotated keys, and values."""
            with jax.named_scope("value"):
                v = project("bse,ehd->bshd", x, self.value, shard=shard, numerics=self.numerics)
                v = biased(v, self.value_bias, shard) if self.biased else v
            with jax.named_scope("key"):
                k = project("bse,ehd->bshd", x, self.key, shard=shard, numerics=self.numerics)
                k = biased(k, self.key_bias, shard) if self.biased else k
                k = self.key_norm(k) if self.normalised else k
                return self._rotated(k, positions, shard), v

        def _rotated(self, x: Array, positions: Int[Array, " seq"], shard: Shard) -> Array:
            return x if self.theta is None else rotate(x, positions, self.theta, shard.backend, self.stretch)

    class AttentionLayer(nnx.Module):
        """Attention within a window and dilation that are fixed for this layer; leading tokens may be global."""

        projections: type[Projections] = Projections

        def __init__(self, block: Attention, site: BlockContext, *, numerics: Numerics, key: Array) -> None:
            keys, specs = jax.random.split(key, 3), block.parameters(site)
            self.config, self.numerics = block, numerics
            self.window, self.dilation = block.window(site), block.dilation(site)
            self.local = self.projections(block, _within("local", specs), numerics=numerics, key=keys[0])
            if block.global_tokens:
                self.globals = self.projections(block, _within("globals", specs), numerics=numerics, key=keys[1])
            deviation = (2 * site.layers * block.heads * block.head_dim) ** -0.5
            weights = normal(keys[2], (block.heads, block.head_dim, site.embed), deviation)
            # Embed first, as in the others: what a fully sharded partition gathers is then contiguous.
            self.out = parameter(specs["out"], weights.transpose(2, 0, 1), numerics)
            if block.bias is Bias.all:
                self.out_bias = parameter(specs["out_bias"], jnp.zeros((site.embed,)), numerics)

        def __call__(
            self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard
        ) -> Float[Array, "batch seq embed"]:
            """Return the layer's output before the residual sum; unequal segments do not see each other."""
            positions, rows, segment_ids = jnp.arange(x.shape[1]), _rows(shard, x.shape[0]), boundaries.segment_ids
            key_axis, _ = _key_heads(shard)
            of_heads, of_kv_heads = (rows, "seq", "heads", "head_dim"), (rows, "seq", key_axis, "head_dim")
            q = shard(self.local.queries(x, positions, shard), *of_heads)
            k, v = self._keys_values(x, positions, boundaries.tokens, shard)
            k, v = (shard(y, *of_kv_heads) for y in (k, v))
            q, k, v = (checkpoint_name(y, name) for y, name in ((q, "query"), (k, "key"), (v, "value")))
            inputs: list[Array] = [q, k, v]
            axes: list[Placed] = [of_heads, of_kv_heads, of_kv_heads]
            if segment_ids is not None:
                inputs, axes = [*inputs, segment_ids], [*axes, (rows, "seq")]
            if self.config.global_tokens:
                first = min(self.config.global_tokens, x.shape[1])
                q_global = self.globals.queries(x[:, :first], positions[:first], shard)
                k_global, v_global = self.globals.keys_values(x, positions, shard)
                inputs += [q_global, k_global, v_global]
                axes += [(rows, None, "heads", "head_dim"), of_kv_heads, of_kv_heads]
            with jax.named_scope(CONTEXT):
                mixed = shard.map(self._local(segment_ids is not None, shard), axes, of_heads)(*inputs)
            out = project("bshd,ehd->bse", mixed, self.out, shard=shard, numerics=self.numerics, name="out")
            return biased(out, self.out_bias, shard) if self.config.bias is Bias.all else out

        def _keys_values(
            self,
            x: Float[Array, "batch seq embed"],
            positions: Int[Array, " seq"],
            tokens: Int[Array, "batch seq"] | None,
            shard: Shard,
        ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
            """Return the keys and values of a layer's own window."""
            return self.local.keys_values(x, positions, shard)

        def _local(self, segmented: bool, shard: Shard):
            """Return what each device does with its heads, rows and, under a sequence split, positions."""
            c, sequence_axes, (_, split_further) = self.config, shard.mesh_axes_of("seq"), _key_heads(shard)
            group = c.heads // c.kv_heads

            def mix(q: Array, k: Array, v: Array, *rest: Array) -> Array:
                segment_ids, rest = (rest[0], rest[1:]) if segmented else (None, rest)
                own = partial(_key_heads_of, heads=q.shape[2], group=group, split_further=split_further)
                options = {
                    "window": self.window,
                    "causal": c.causal,
                    "dilation": self.dilation,
                    "segment_ids": segment_ids,
                    "soft_cap": c.soft_cap,
                    "global_tokens": _leading(rest[0], own(rest[1]), own(rest[2])) if rest else None,
                    "backend": shard.backend,
                }
                if sequence_axes:
                    return sharded_attention(q, own(k), own(v), axis_names=sequence_axes, **options)
                return attention(q, own(k), own(v), impl=c.impl, **options)

            return mix

        def init_state(self, batch: int, max_len: int) -> KVCache:
            """Return an empty cache: one window of keys, or `max_len` of them without a window."""
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
            """Return the output of one more position and the cache after it: the streaming form."""
            wide, position = x[:, None], state.position[None]
            q = self.local.queries(wide, position, UNSHARDED)[:, 0]
            beside_x = None if tokens is None else tokens[:, None]
            k, v = (y[:, 0] for y in self._keys_values(wide, position, beside_x, UNSHARDED))
            beside = None
            if self.config.global_tokens:
                k_global, v_global = (y[:, 0] for y in self.globals.keys_values(wide, position, UNSHARDED))
                beside = GlobalStep(self.globals.queries(wide, position, UNSHARDED)[:, 0], k_global, v_global)
            mixed, state = attention_step(q, k, v, state, global_step=beside, soft_cap=self.config.soft_cap)
            out = project("bhd,ehd->be", mixed, self.out, shard=UNSHARDED, numerics=self.numerics)
            return biased(out, self.out_bias, UNSHARDED) if self.config.bias is Bias.all else out, state

    def _key_heads_of(k: Array, heads: int, group: int, split_further: tuple[str, ...]) -> Array:
        """Return the key heads (axis 2) that this device's `heads` query heads use; `group` query heads share one.

        Inside `jax.shard_map`. Query heads are split over `split_further` beyond what key heads are.
        """
        if not split_further:
            return k
        first = jax.lax.axis_index(split_further) * heads
        if heads % group and group % heads:  # the queries of a device begin or end in the middle of a group
            return jnp.take(k, (first + jnp.arange(heads)) // group, axis=2)
        return jax.lax.dynamic_slice_in_dim(k, first // group, max(heads // group, 1), axis=2)

    def _leading(q: Array, k: Array, v: Array) -> GlobalTokens:
        positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
        return GlobalTokens(positions, jnp.ones(q.shape[:2], bool), q, k, v)

    return AttentionLayer


def _within(prefix: str, specs: dict[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters whose names begin with a prefix, without it."""
    return {name.removeprefix(f"{prefix}."): spec for name, spec in specs.items() if name.startswith(f"{prefix}.")}


def _rows(shard: Shard, batch: int) -> Axis:
    """Return what splits the rows of attention: the batch's axes, and those of the residual stream that are free.

    Products over a split residual stream leave sums over its axes: each of their devices then takes its own rows of the
    sum, where otherwise all of them would take all rows and attend to the same.
    """
    free = not set(shard.mesh_axes_of("embed")) & {*shard.mesh_axes_of("heads"), *shard.mesh_axes_of("kv_heads")}
    split = free and shard.size("embed") > 1 and batch % (shard.size("batch") * shard.size("embed")) == 0
    return ("batch", "embed") if split else "batch"


def _key_heads(shard: Shard) -> tuple[str | None, tuple[str, ...]]:
    """Return the axis that splits key heads while attention is computed, and the mesh axes that split heads further.

    Heads and key heads are split by rules of their own. Where key heads lie on the first of the axes that heads lie on
    (or on none), each device picks those of its queries; where they lie otherwise, they are gathered.
    """
    heads, key_heads = shard.mesh_axes_of("heads"), shard.mesh_axes_of("kv_heads")
    if heads[: len(key_heads)] == key_heads:
        return "kv_heads", heads[len(key_heads) :]
    return None, heads
