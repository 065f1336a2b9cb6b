"""The module of nanochat (`valkyrie.models.families.nanochat`)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, LossHead, Shard
from valkyrie.models.block import BLOCK_INPUT, Layer
from valkyrie.models.families.nanochat import Config
from valkyrie.models.language_model import BlockGroup, LanguageModel, ResidualBlock, ResidualStream, repeat_keys
from valkyrie.models.layers import Boundaries, Checkpoint, PlainRMSNorm, parameter, uniform
from valkyrie.models.stack import Stack
from valkyrie.ops.linear import Numerics

GATE_INIT = 0.02
"""Upper bound of the initial weights of the smear gate, which are uniform from 0."""


class NanochatBlock(ResidualBlock):
    """A block with norms without parameters. It first scales the residual stream and adds the scaled first stream."""

    norm_kind = PlainRMSNorm
    residual_scale: nnx.Param
    input_scale: nnx.Param

    def __init__(self, config: Config, layer: Layer, *, numerics: Numerics, key: Array) -> None:
        super().__init__(config, layer, numerics=numerics, key=key)
        self.scaled, specs = config.layer_scales, layer.parameters()
        if self.scaled:  # initial values depend on the layer, so `NanochatModel` sets them
            for name in ("residual_scale", "input_scale"):
                setattr(self, name, parameter(specs[name], jnp.zeros(()), numerics))
        up, down = self.feed_forward.up, self.feed_forward.down
        up[...] = uniform(jax.random.fold_in(key, 1), up.shape, 0.4 * config.embed**-0.5).astype(up.dtype)
        down[...] = jnp.zeros_like(down[...])

    def mixed_in(self, x: Float[Array, "*rows embed"], first: Float[Array, "*rows embed"]) -> Array:
        """Return the scaled residual stream plus the scaled first stream, the input of the block."""
        if not self.scaled:
            return x
        scales = (scale[...].astype(x.dtype) for scale in (self.residual_scale, self.input_scale))
        return next(scales) * x + next(scales) * first

    def step_with(
        self, x: Float[Array, "batch embed"], state: Any, first: Float[Array, "batch embed"], tokens: Array
    ) -> tuple[Float[Array, "batch embed"], Any]:
        """Return the stream of the next token, and the mixer's new state."""
        x = self.mixed_in(x, first)
        y, state = self.mixer.step(self.norm(x), state, tokens)
        x = x + y
        return x + self.feed_forward_step(self.feed_forward_norm(x)), state


class _Middle(NamedTuple):
    """Position of the stack's middle in a segment of `repeats` groups: after block `block` of group `repeat`.

    `block` is None if the middle is in another segment.
    """

    repeats: int
    repeat: int
    block: int | None


class NanochatModel(LanguageModel):
    """nanochat: embedding, norm, smear, blocks, backout, norm and head."""

    block_kind = NanochatBlock

    def __init__(self, config: Config, *, numerics: Numerics, key: Array) -> None:
        super().__init__(config, numerics=numerics, key=key)
        self.own, specs = config, config.parameters()
        if config.layer_scales:
            _set_scales(self.segments, config)
        if config.smear:
            gate = jax.random.uniform(jax.random.fold_in(key, 1), specs["smear_gate"].shape, maxval=GATE_INIT)
            self.smear_gate = parameter(specs["smear_gate"], gate, numerics)
            self.smear_scale = parameter(specs["smear_scale"], jnp.zeros(()), numerics)
        if config.backout is not None:
            self.backout_scale = parameter(specs["backout_scale"], jnp.full((), config.backout), numerics)

    @staticmethod
    def deviations(config: Stack) -> tuple[float, float]:
        return 0.8, 0.001

    def boundaries(
        self, segment_ids: Int[Array, "batch seq"] | None, tokens: Int[Array, "batch seq"] | None = None
    ) -> Boundaries:
        return super().boundaries(segment_ids)._replace(tokens=tokens)

    def embed(self, tokens: Int[Array, "batch seq"], *, shard: Shard = UNSHARDED) -> Float[Array, "batch seq embed"]:
        return shard(self.norm(super().embed(tokens, shard=shard)), "batch", "seq", "embed")

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
        first = shard(self._smeared(x, _before(x, boundaries), shard), "batch", "seq", "embed")

        def run(
            shard: Shard, last: int | None, stream: Any, first: Array, group: Any, boundaries: Boundaries, key: Any
        ) -> tuple[Any, Array | None]:
            middle = None
            for i, block in enumerate(group.blocks):
                x = block.mixed_in(checkpoint_name(stream.x, BLOCK_INPUT), first)
                of_block = None if key is None else jax.random.fold_in(key, i)
                stream = stream.plus(*block.after(x, boundaries, shard, of_block))
                middle = stream.x if i == last else middle
            return stream, middle

        stream: Any = ResidualStream(first, self.no_values(first, shard), jnp.zeros_like(first))
        for i, group in enumerate(self.segments):
            middle, keys = self._middle(i), repeat_keys(key, i, group)

            def body(
                stream: Any,
                layer: tuple[BlockGroup, Array | None, Array],
                rows: tuple[Boundaries, Array],
                shard: Shard,
                middle: _Middle = middle,
            ) -> Any:
                old, (group, key, repeat), (boundaries, first) = stream.middle, layer, rows
                before = stream._replace(middle=None)
                stream, new = checkpoint(partial(run, shard, middle.block))(before, first, group, boundaries, key)
                return stream._replace(middle=old if new is None else jnp.where(repeat == middle.repeat, new, old))

            layers = (group, keys, jnp.arange(middle.repeats))
            last = head if i == self.count - 1 else None
            stream = shard.repeat(body, layers, stream, (boundaries, first), last)
        return stream if head is not None else self.leaving(stream)

    def leaving(self, stream: ResidualStream) -> Float[Array, "batch seq embed"]:
        """Return the input of the head: the last residual stream minus a part of the stream after the middle layer."""
        return self._backed_out(stream.x, stream.middle)

    @property
    def head_parameters(self) -> set[str]:
        return super().head_parameters | {"backout_scale"}

    def init_state(self, batch: int, max_len: int) -> Any:
        of_blocks = super().init_state(batch, max_len)
        return of_blocks, jnp.zeros((batch, self.config.embed), self.numerics.compute)

    def step(self, tokens: Int[Array, " batch"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        of_blocks, before = state
        embedded = self.norm(self._scaled(self.embedding[...].astype(self.numerics.compute)[tokens]))
        first = self._smeared(embedded, before, UNSHARDED)
        x, stream_in_middle, after = first, jnp.zeros_like(first), []
        for i, (group, of_group) in enumerate(zip(self.segments, of_blocks, strict=True)):
            middle = self._middle(i)

            def body(
                carry: tuple[Array, Array], scanned: tuple[Any, Any, Array], middle: _Middle = middle
            ) -> tuple[tuple[Array, Array], Any]:
                (x, saved), (group, before, repeat), states = carry, scanned, []
                for j, (block, of_block) in enumerate(zip(group.blocks, before, strict=True)):
                    x, of_block = block.step_with(x, of_block, first, tokens)
                    states.append(of_block)
                    saved = jnp.where(repeat == middle.repeat, x, saved) if j == middle.block else saved
                return (x, saved), states

            scanned = (group, of_group, jnp.arange(middle.repeats))
            (x, stream_in_middle), states = jax.lax.scan(body, (x, stream_in_middle), scanned)
            after.append(states)
        return self._unembed(self.norm(self._backed_out(x, stream_in_middle))), (after, embedded)

    def _smeared(
        self, x: Float[Array, "*rows embed"], before: Float[Array, "*rows embed"], shard: Shard
    ) -> Float[Array, "*rows embed"]:
        """Add a part of the previous token's embedding to each embedding. The gate reads the first channels."""
        if not self.own.smear:
            return x
        with jax.named_scope("smear"):
            channels = x[..., : self.own.smear_channels]
            channels = shard(channels, "batch", "seq", None) if x.ndim == 3 else channels
            gate = jax.nn.sigmoid(channels @ self.smear_gate[...].astype(x.dtype))
            return x + (self.smear_scale[...].astype(x.dtype) * gate)[..., None] * before

    def _backed_out(self, x: Array, middle: Array | None) -> Array:
        return x if self.own.backout is None else x - self.backout_scale[...].astype(x.dtype) * middle

    def _middle(self, segment: int) -> _Middle:
        """Return the position of the stack's middle in a segment. `block` is None if elsewhere, or without backout."""
        runs = self.config.segments()
        behind = self.config.layers // 2 - sum(len(layers) * repeats for layers, repeats in runs[:segment])
        layers, repeats = runs[segment]
        if self.own.backout is None or not 0 <= behind < len(layers) * repeats:
            return _Middle(repeats, 0, None)
        return _Middle(repeats, *divmod(behind, len(layers)))


def _before(x: Float[Array, "batch seq embed"], boundaries: Boundaries) -> Float[Array, "batch seq embed"]:
    """Return the entry before each position, or zeros at the start of a document."""
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return before if boundaries.keep is None else before * boundaries.keep[..., None].astype(x.dtype)


def _set_scales(segments: list[BlockGroup], config: Config) -> None:
    """Set the residual scales to fall from 1.15 to 1.05 over the layers, and the input scales from 0.2 to 0.05."""
    start, last = 0, max(config.layers - 1, 1)
    for group, (layers, repeats) in zip(segments, config.segments(), strict=True):
        for i, block in enumerate(group.blocks):
            depth = (start + i + len(layers) * jnp.arange(repeats)) / last
            for name, begin, fall in (("residual_scale", 1.15, 0.10), ("input_scale", 0.20, 0.15)):
                scale = getattr(block, name)
                scale[...] = (begin - fall * depth).astype(scale.dtype)
        start += len(layers) * repeats
