"""The Flax module of GPT-2 (`valkyrie.models.families.gpt2`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, LossHead, Shard
from valkyrie.models.families.gpt2 import Config
from valkyrie.models.language_model import Checkpoint, LanguageModel, ResidualBlock
from valkyrie.models.layers import Boundaries, LayerNorm, normal, parameter
from valkyrie.ops.linear import Numerics, gather_in_float32

POSITION_DEVIATION = 0.01
"""Initial standard deviation of the position embeddings, half that of the token embedding."""


class GPT2Block(ResidualBlock):
    """A residual block with LayerNorms."""

    norm_kind = LayerNorm


class GPT2Model(LanguageModel):
    """GPT-2: token embedding plus learned positions, blocks, norm and head."""

    block_kind = GPT2Block

    def __init__(self, config: Config, *, numerics: Numerics, key: Array) -> None:
        super().__init__(config, numerics=numerics, key=key)
        table = normal(jax.random.fold_in(key, 1), (config.context, config.embed), POSITION_DEVIATION)
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
        """Add position embeddings, then run the blocks as in `LanguageModel.blocks`.

        Positions count from the start of each document, or from the start of the row if `boundaries.keep` is None.
        """
        table = gather_in_float32(self.positions[...], (None, "embed"), shard)
        keep = boundaries.keep
        position_embeddings = table[: x.shape[1]] if keep is None else table[_document_positions(keep)]
        x = shard((x.astype(jnp.float32) + position_embeddings).astype(x.dtype), "batch", "seq", "embed")
        return super().blocks(x, boundaries, shard=shard, checkpoint=checkpoint, key=key, head=head)

    def init_state(self, batch: int, max_len: int) -> Any:
        """Return the generation state before the first token: the state of the blocks, and the position."""
        return super().init_state(batch, max_len), jnp.zeros((), jnp.int32)

    def step(self, tokens: Int[Array, " batch"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        """Process one token per sequence; return the logits for the following token, and the new state.

        Positions beyond the position-embedding table use its last row.
        """
        block_states, position = state
        x = self.embedding[...].astype(self.numerics.compute)[tokens]
        position_embedding = self.positions[...].astype(jnp.float32)[position]
        logits, block_states = self._step_embedded(
            (self._scale(x).astype(jnp.float32) + position_embedding).astype(x.dtype), block_states
        )
        return logits, (block_states, position + 1)


def _document_positions(keep: Float[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Return the position of each token in its document. `keep` is 0 at the first token of a document."""
    positions = jnp.arange(keep.shape[1])
    return positions - jax.lax.cummax(jnp.where(keep == 0, positions, 0), axis=1)
