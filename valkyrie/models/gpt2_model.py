"""The module of GPT-2 (`valkyrie.models.families.gpt2`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, LossHead, Shard
from valkyrie.models.families.gpt2 import Config
from valkyrie.models.language_model import Checkpoint, LanguageModel, ResidualBlock
from valkyrie.models.layers import Boundaries, LayerNorm, normal, parameter
from valkyrie.ops.linear import Numerics

DEVIATION = 0.01
"""Standard deviation of positions at first: half of the embedding's."""


class GPT2Block(ResidualBlock):
    """A block of LayerNorms."""

    norm_kind = LayerNorm


class GPT2Model(LanguageModel):
    """Embedding and positions, blocks, norm and head."""

    block_kind = GPT2Block

    def __init__(self, config: Config, *, numerics: Numerics, key: Array) -> None:
        super().__init__(config, numerics=numerics, key=key)
        table = normal(jax.random.fold_in(key, 1), (config.context, config.embed), DEVIATION)
        self.positions = parameter(config.parameters()["positions"], table, numerics)

    def blocks(
        self,
        x: Float[Array, "batch seq embed"],
        boundaries: Boundaries,
        *,
        shard: Shard = UNSHARDED,
        checkpoint: Checkpoint = lambda block: block,
        key: Array | None = None,
        head: LossHead | None = None,
    ) -> Any:
        """Return the residual stream after the last block, or the result of `head`.

        Positions are added before the first block, and count from the start of each document.
        """
        axes = (None, "embed")
        table = shard.gather_for_use(shard.shard_for_storage(self.positions[...], *axes).astype(jnp.float32), *axes)
        added = table[: x.shape[1]] if boundaries.keep is None else table[_since_start(boundaries.keep)]
        x = shard((x.astype(jnp.float32) + added).astype(x.dtype), "batch", "seq", "embed")
        return super().blocks(x, boundaries, shard=shard, checkpoint=checkpoint, key=key, head=head)

    def init_state(self, batch: int, max_len: int) -> Any:
        """Return the state of generation before the first token: that of the blocks, and the position."""
        return super().init_state(batch, max_len), jnp.zeros((), jnp.int32)

    def step(self, tokens: Int[Array, " batch"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        """Return the logits after one more token and the state after it. Positions stop at the last one."""
        of_blocks, position = state
        x = self.embedding[...].astype(self.numerics.compute)[tokens]
        added = self.positions[...].astype(jnp.float32)[position]
        logits, after = self._stepped((self._scaled(x).astype(jnp.float32) + added).astype(x.dtype), of_blocks)
        return logits, (after, position + 1)


def _since_start(keep: Float[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Return each token's position in its document, whose first token has `keep` 0."""
    positions = jnp.arange(keep.shape[1])
    return positions - jax.lax.cummax(jnp.where(keep == 0, positions, 0), axis=1)
