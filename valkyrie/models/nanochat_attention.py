"""The attention block of nanochat (karpathy/nanochat): norms after rotation, and values that are looked up by token."""

# No `from __future__ import annotations` here: annotations of the module are checked in tests, and name local imports.

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from valkyrie.axes import Parameter, Shard
from valkyrie.models.attention import Attention, attention_layer
from valkyrie.models.block import BlockContext, Saved, Weight, saved, weight
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics

GATE_INIT = 0.02
"""Gates begin between 0 and this."""
GATE_CHANNELS = 12
"""How many channels of the block's input the gate of a value embedding reads."""


@dataclass
class NanochatAttention(Attention):
    """Attention whose queries and keys are normalised after rotation, without parameters, and scaled by `qk_gain`.

    `value_embeddings`: every second layer, the last one among them, adds to its values those of a table of its own,
    looked up by token, times 3 sigmoid of a gate per key head (ResFormer, arXiv 2410.17897).
    """

    windows: list[int | None] = field(default_factory=lambda: [None])
    rope_theta: float = 100000.0
    qk_gain: float = 1.2
    qk_norm_epsilon: float = 1.1920929e-07
    value_embeddings: bool = True

    def problems(self, key: str) -> list[Problem]:
        problems = super().problems(key)
        if self.qk_norm:
            text = f"{key}.qk_norm=true: nanochat's norm of queries and keys is another, and always there."
            problems.append(Problem(ProblemCode.unsupported, f"{key}.qk_norm", True, text))
        if self.global_tokens:
            text = f"{key}.global_tokens={self.global_tokens}: nanochat has none. Use 0."
            problems.append(Problem(ProblemCode.unsupported, f"{key}.global_tokens", self.global_tokens, text))
        problems += check_range(f"{key}.qk_gain", self.qk_gain, above=0)
        return problems + check_range(f"{key}.qk_norm_epsilon", self.qk_norm_epsilon, above=0)

    def has_value_embedding(self, site: BlockContext) -> bool:
        """Return whether this layer has a table of values."""
        return self.value_embeddings and site.number % 2 == (site.layers - 1) % 2

    def variant(self, site: BlockContext) -> Hashable:
        return super().variant(site), self.has_value_embedding(site)

    def weights(self, site: BlockContext) -> dict[str, Weight]:
        gate = {"value_gate": weight("kv_heads", gate_channels(site), output_first=True)}
        return super().weights(site) | (gate if self.has_value_embedding(site) else {})

    def parameters(self, site: BlockContext) -> dict[str, Parameter]:
        """Return its parameters; the rows of a table of values lie like those of the token embedding."""
        if not self.has_value_embedding(site):
            return super().parameters(site)
        shape, keys = (site.vocab, self.kv_heads * self.head_dim), ("model.vocab_multiple", f"{site.key}.kv_heads")
        table = Parameter(("vocab", "embed"), shape, keys, group="value_embedding")
        return super().parameters(site) | {"value_embedding": table}

    def flops(self, site: BlockContext, seq: int) -> float:
        return super().flops(site, seq) + 2.0 * gate_channels(site) * self.kv_heads * self.has_value_embedding(site)

    def saves(self, site: BlockContext) -> list[Saved]:
        return [
            *super().saves(site),
            saved("heads", "head_dim", float32=True),
            saved("kv_heads", "head_dim", float32=True),
            saved("kv_heads", "head_dim", count=int(self.has_value_embedding(site))),
        ]

    def build(self, site: BlockContext, *, numerics: "Numerics", key: "Array") -> Any:
        return nanochat_attention_layer()(self, site, numerics=numerics, key=key)


def gate_channels(site: BlockContext) -> int:
    """Return how many channels the gate of a value embedding reads."""
    return min(GATE_CHANNELS, site.embed)


@cache
def nanochat_attention_layer() -> Any:
    """Return the class of the module. It is made here, so that declarations are imported without JAX."""
    import jax
    import jax.numpy as jnp
    from jaxtyping import Array, Float, Int

    from valkyrie.models.layers import parameter, uniform, unit_mean_square
    from valkyrie.ops.linear import Numerics, linear, lookup

    attention: Any = attention_layer()

    class NanochatProjections(attention.projections):
        """Query, key and value projections; queries and keys are rotated, then normalised and scaled.

        nanochat turns them by -p theta at position p, so its weights mean something else than under the usual turn.
        """

        def __init__(self, block: NanochatAttention, specs: dict[str, Parameter], *, numerics: Numerics, key: Array):
            super().__init__(block, specs, numerics=numerics, key=key)
            self.gain, self.epsilon = block.qk_gain, block.qk_norm_epsilon
            keys = jax.random.split(key, 3)
            for of_weights, of_key in zip((self.query, self.key, self.value), keys, strict=True):
                shape = of_weights.shape
                of_weights[...] = uniform(of_key, shape, shape[0] ** -0.5).astype(of_weights.dtype)

        def queries(
            self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
        ) -> Float[Array, "batch seq heads head_dim"]:
            return self._normed(super().queries(x, -positions, shard))

        def keys_values(
            self, x: Float[Array, "batch seq embed"], positions: Int[Array, " seq"], shard: Shard
        ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
            k, v = super().keys_values(x, -positions, shard)
            return self._normed(k), v

        def _normed(self, x: Array) -> Array:
            return (self.gain * unit_mean_square(x, self.epsilon)).astype(x.dtype)

    class NanochatAttentionLayer(attention):
        """Attention whose values are those of the residual stream, and in every second layer of the token too."""

        projections = NanochatProjections

        def __init__(self, block: NanochatAttention, site: BlockContext, *, numerics: Numerics, key: Array) -> None:
            super().__init__(block, site, numerics=numerics, key=key)
            self.out[...] = jnp.zeros_like(self.out[...])
            self.looks_up, self.channels = block.has_value_embedding(site), gate_channels(site)
            if self.looks_up:
                specs, keys = block.parameters(site), jax.random.split(jax.random.fold_in(key, 1))
                gate = jax.random.uniform(keys[0], specs["value_gate"].shape, maxval=GATE_INIT)
                table = uniform(keys[1], specs["value_embedding"].shape, site.embed**-0.5)
                self.value_gate = parameter(specs["value_gate"], gate, numerics)
                self.value_embedding = parameter(specs["value_embedding"], table, numerics)

        def _keys_values(
            self,
            x: Float[Array, "batch seq embed"],
            positions: Int[Array, " seq"],
            tokens: Int[Array, "batch seq"] | None,
            shard: Shard,
        ) -> tuple[Float[Array, "batch seq kv_heads head_dim"], Float[Array, "batch seq kv_heads head_dim"]]:
            """Return keys, and values with those of the tokens among them."""
            k, v = self.local.keys_values(x, positions, shard)
            if not self.looks_up:
                return k, v
            assert tokens is not None, "a model with value embeddings hands its blocks the tokens"
            with jax.named_scope("value_embedding"):
                axes = ("vocab", "embed")
                table = shard.shard_for_storage(self.value_embedding[...], *axes)
                looked_up = lookup(table, tokens, axes=axes, shard=shard, numerics=self.numerics).reshape(v.shape)
                channels = shard(x[..., : self.channels], "batch", "seq", None)
                gate = linear(
                    "bsc,kc->bsk",
                    channels,
                    self.value_gate[...],
                    axes=("kv_heads", None),
                    shard=shard,
                    numerics=self.numerics,
                )
                return k, v + 3 * jax.nn.sigmoid(gate)[..., None] * looked_up

    return NanochatAttentionLayer
