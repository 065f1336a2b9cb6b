"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, biases everywhere, the embedding as its head."""

# No `from __future__ import annotations` here: annotations of the module are checked in tests, and name local imports.

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from valkyrie.axes import UNSHARDED, Arrays, LossHead, Parameter, Shard, Tensor
from valkyrie.models.attention import Attention
from valkyrie.models.block import Layer, Residual
from valkyrie.models.feed_forward import FeedForward, Nonlinearity
from valkyrie.models.stack import Stack
from valkyrie.ops.choices import Bias
from valkyrie.problems import Problem, ProblemCode

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics

DEVIATION = 0.01
"""Standard deviation of positions at first: half of the embedding's."""


class GPT2Layer(Layer):
    """A layer whose norms have a bias in addition to their scale."""

    def parameters(self) -> dict[str, Parameter]:
        parameters = super().parameters()
        norms = ("norm", "feed_forward_norm")
        return parameters | {f"{n}.bias": parameters[f"{n}.scale"] for n in norms if f"{n}.scale" in parameters}


@dataclass
class Config(Stack):
    """GPT-2, with a table of `context` positions, the most of a sequence."""

    family: str = "gpt2"
    name: str = "gpt2"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    feed_forward: Nonlinearity = Nonlinearity.gelu
    attention: Attention = field(default_factory=lambda: Attention(windows=[None], rope_theta=None, bias=Bias.all))

    def problems(self) -> list[Problem]:
        if self.residual is Residual.sequential:
            return super().problems()
        text = "model.residual=parallel: GPT-2's feed-forward follows its attention. Use model.residual=sequential."
        return [Problem(ProblemCode.unsupported, "model.residual", "parallel", text)]

    @property
    def longest(self) -> int:
        """The most tokens of a sequence: the number of positions."""
        return self.context

    def stack(self) -> list[Layer]:
        return [GPT2Layer(**vars(layer)) for layer in super().stack()]

    def parameters(self) -> dict[str, Parameter]:
        parameters = super().parameters()
        own = {"norm.bias": parameters["norm.scale"], "positions": self._positions()}
        return dict(sorted((parameters | own).items(), key=lambda item: item[0].split(".")))

    def arrays(self) -> Arrays:
        arrays, p = super().arrays(), self._positions()
        arrays.parameters.setdefault(Tensor(p.axes, p.shape, p.keys), []).append("positions")
        return arrays

    def build(self, *, numerics: "Numerics", key: "Array") -> Any:
        return gpt2_model()(self, numerics=numerics, key=key)

    def _positions(self) -> Parameter:
        keys = ("model.context", "model.embed")
        return Parameter((None, "embed"), (self.context, self.embed), keys, group="embedding")

    @property
    def _dense(self) -> FeedForward:
        return FeedForward(self.feed_forward, self.mlp, biases=True)


@cache
def gpt2_model() -> Any:
    """Return the class of the module. It is made here, so that declarations are imported without JAX."""
    import jax
    import jax.numpy as jnp
    from jaxtyping import Array, Float, Int

    from valkyrie.models.language_model import Checkpoint, LanguageModel, ResidualBlock
    from valkyrie.models.layers import Boundaries, LayerNorm, normal, parameter
    from valkyrie.ops.linear import Numerics

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

    return GPT2Model
