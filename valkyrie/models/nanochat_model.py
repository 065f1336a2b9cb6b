"""The Flax module of nanochat. Its config is in `valkyrie.models.families.nanochat`."""

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
from valkyrie.models.language_model import (
    BlockGroup,
    LanguageModel,
    ResidualBlock,
    ResidualStream,
    split_key_over_repeats,
)
from valkyrie.models.layers import Boundaries, Checkpoint, PlainRMSNorm, parameter, uniform
from valkyrie.models.stack import Stack
from valkyrie.ops.linear import Numerics

GATE_INIT_MAX = 0.02
"""Initial weights of the smear gate are uniform between 0 and this value, as in nanochat."""


class NanochatBlock(ResidualBlock):
    """A residual block with parameter-free norms.

    With `layer_scales`, its input is the residual stream plus the stream before the first layer, each multiplied by a
    learned scale.
    """

    norm_kind = PlainRMSNorm
    residual_scale: nnx.Param
    input_scale: nnx.Param

    def __init__(self, config: Config, layer: Layer, *, numerics: Numerics, key: Array) -> None:
        super().__init__(config, layer, numerics=numerics, key=key)
        self.has_scales, specs = config.layer_scales, layer.parameters()
        if self.has_scales:  # initial values depend on the layer, so `NanochatModel` sets them
            for name in ("residual_scale", "input_scale"):
                setattr(self, name, parameter(specs[name], jnp.zeros(()), numerics))
        up, down = self.feed_forward.up, self.feed_forward.down
        up[...] = uniform(jax.random.fold_in(key, 1), up.shape, 0.4 * config.embed**-0.5).astype(up.dtype)
        down[...] = jnp.zeros_like(down[...])

    def add_first_stream(self, x: Float[Array, "*rows embed"], first_stream: Float[Array, "*rows embed"]) -> Array:
        """Return a x + b `first_stream` with the learned scales a and b, or `x` without scales.

        `first_stream` is the residual stream before the first layer.
        """
        if not self.has_scales:
            return x
        scales = (scale[...].astype(x.dtype) for scale in (self.residual_scale, self.input_scale))
        return next(scales) * x + next(scales) * first_stream

    def step_with_first_stream(
        self, x: Float[Array, "batch embed"], state: Any, first_stream: Float[Array, "batch embed"], tokens: Array
    ) -> tuple[Float[Array, "batch embed"], Any]:
        """Return the residual stream after this block at the next position, and the mixer's new state.

        Unlike `step`, applies `add_first_stream` to `x` first, and passes the token ids to the mixer.
        """
        x = self.add_first_stream(x, first_stream)
        y, state = self.mixer.step(self.norm(x), state, tokens)
        x = x + y
        return x + self.feed_forward_step(self.feed_forward_norm(x)), state


class _MiddleLayer(NamedTuple):
    """Position of the middle layer in a segment.

    Args:
        repeats: Number of groups in the segment.
        group_index: Index of the group that contains the middle layer.
        block_index: Index of the middle layer in that group, or None if the segment does not contain the middle layer.
    """

    repeats: int
    group_index: int
    block_index: int | None


class NanochatModel(LanguageModel):
    """nanochat: embedding, norm, smear, blocks, backout, norm and head.

    Smear adds the previous token's embedding, times a gate, to each embedding. Backout subtracts the residual stream
    after the middle layer (index `layers // 2`), times a learned factor, from the stream after the last layer.
    """

    block_kind = NanochatBlock

    def __init__(self, config: Config, *, numerics: Numerics, key: Array) -> None:
        super().__init__(config, numerics=numerics, key=key)
        self.nanochat_config, specs = config, config.parameters()
        if config.layer_scales:
            _set_scales(self.segments, config)
        if config.smear:
            gate = jax.random.uniform(jax.random.fold_in(key, 1), specs["smear_gate"].shape, maxval=GATE_INIT_MAX)
            self.smear_gate = parameter(specs["smear_gate"], gate, numerics)
            self.smear_scale = parameter(specs["smear_scale"], jnp.zeros(()), numerics)
        if config.backout is not None:
            self.backout_scale = parameter(specs["backout_scale"], jnp.full((), config.backout), numerics)

    @staticmethod
    def init_deviations(config: Stack) -> tuple[float, float]:
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
        first_stream = shard(self._smear(x, _shift_right(x, boundaries), shard), "batch", "seq", "embed")

        def run(
            shard: Shard,
            middle_block: int | None,
            stream: Any,
            first_stream: Array,
            group: Any,
            boundaries: Boundaries,
            key: Any,
        ) -> tuple[Any, Array | None]:
            middle = None
            for i, block in enumerate(group.blocks):
                x = block.add_first_stream(checkpoint_name(stream.x, BLOCK_INPUT), first_stream)
                block_key = None if key is None else jax.random.fold_in(key, i)
                stream = stream.with_output(*block.apply(x, boundaries, shard, block_key))
                middle = stream.x if i == middle_block else middle
            return stream, middle

        stream: Any = ResidualStream(first_stream, self.zero_values(first_stream, shard), jnp.zeros_like(first_stream))
        for i, group in enumerate(self.segments):
            middle_layer, keys = self._find_middle_layer(i), split_key_over_repeats(key, i, group)

            def body(
                stream: Any,
                layer: tuple[BlockGroup, Array | None, Array],
                boundaries_and_stream: tuple[Boundaries, Array],
                shard: Shard,
                middle_layer: _MiddleLayer = middle_layer,
            ) -> Any:
                (group, key, group_index), (boundaries, first_stream) = layer, boundaries_and_stream
                old_middle, without_middle = stream.middle_stream, stream._replace(middle_stream=None)
                stream, new_middle = checkpoint(partial(run, shard, middle_layer.block_index))(
                    without_middle, first_stream, group, boundaries, key
                )
                return stream._replace(
                    middle_stream=old_middle
                    if new_middle is None
                    else jnp.where(group_index == middle_layer.group_index, new_middle, old_middle)
                )

            scan_inputs = (group, keys, jnp.arange(middle_layer.repeats))
            segment_head = head if i == self.segment_count - 1 else None
            stream = shard.apply_layers(body, scan_inputs, stream, (boundaries, first_stream), segment_head)
        return stream if head is not None else self.head_input(stream)

    def head_input(self, stream: ResidualStream) -> Float[Array, "batch seq embed"]:
        """Return the last residual stream, minus the scaled stream after the middle layer if `backout` is set."""
        return self._back_out(stream.x, stream.middle_stream)

    @property
    def head_parameters(self) -> set[str]:
        return super().head_parameters | {"backout_scale"}

    def init_state(self, batch: int, max_len: int) -> Any:
        block_states = super().init_state(batch, max_len)
        return block_states, jnp.zeros((batch, self.config.embed), self.numerics.compute)

    def step(self, tokens: Int[Array, " batch"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        block_states, previous_embedding = state
        token_embedding = self.norm(self._scale(self.embedding[...].astype(self.numerics.compute)[tokens]))
        first_stream = self._smear(token_embedding, previous_embedding, UNSHARDED)
        x, middle_stream, new_states = first_stream, jnp.zeros_like(first_stream), []
        for i, (group, group_state) in enumerate(zip(self.segments, block_states, strict=True)):
            middle_layer = self._find_middle_layer(i)

            def body(
                carry: tuple[Array, Array], scanned: tuple[Any, Any, Array], middle_layer: _MiddleLayer = middle_layer
            ) -> tuple[tuple[Array, Array], Any]:
                (x, middle_x), (group, old_states, group_index), states = carry, scanned, []
                for j, (block, block_state) in enumerate(zip(group.blocks, old_states, strict=True)):
                    x, block_state = block.step_with_first_stream(x, block_state, first_stream, tokens)
                    states.append(block_state)
                    middle_x = (
                        jnp.where(group_index == middle_layer.group_index, x, middle_x)
                        if j == middle_layer.block_index
                        else middle_x
                    )
                return (x, middle_x), states

            scanned = (group, group_state, jnp.arange(middle_layer.repeats))
            (x, middle_stream), states = jax.lax.scan(body, (x, middle_stream), scanned)
            new_states.append(states)
        return self._unembed(self.norm(self._back_out(x, middle_stream))), (new_states, token_embedding)

    def _smear(
        self, x: Float[Array, "*rows embed"], previous_embedding: Float[Array, "*rows embed"], shard: Shard
    ) -> Float[Array, "*rows embed"]:
        """Add the embedding of the previous token to `x`, multiplied by a gate and a learned scale.

        The gate is computed from the first channels of `x`. Without smear, returns `x` unchanged.
        """
        if not self.nanochat_config.smear:
            return x
        with jax.named_scope("smear"):
            channels = x[..., : self.nanochat_config.smear_channels]
            channels = shard(channels, "batch", "seq", None) if x.ndim == 3 else channels
            gate = jax.nn.sigmoid(channels @ self.smear_gate[...].astype(x.dtype))
            return x + (self.smear_scale[...].astype(x.dtype) * gate)[..., None] * previous_embedding

    def _back_out(self, x: Array, middle: Array | None) -> Array:
        return x if self.nanochat_config.backout is None else x - self.backout_scale[...].astype(x.dtype) * middle

    def _find_middle_layer(self, segment: int) -> _MiddleLayer:
        """Locate the middle layer in a segment. Without backout, `block_index` is None for all segments."""
        segments = self.config.segments()
        offset = self.config.layers // 2 - sum(len(layers) * repeats for layers, repeats in segments[:segment])
        layers, repeats = segments[segment]
        if self.nanochat_config.backout is None or not 0 <= offset < len(layers) * repeats:
            return _MiddleLayer(repeats, 0, None)
        return _MiddleLayer(repeats, *divmod(offset, len(layers)))


def _shift_right(x: Float[Array, "batch seq embed"], boundaries: Boundaries) -> Float[Array, "batch seq embed"]:
    """Shift `x` by one position. The result is zero at the first position, and where `boundaries.keep` is 0."""
    previous = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return previous if boundaries.keep is None else previous * boundaries.keep[..., None].astype(x.dtype)


def _set_scales(segments: list[BlockGroup], config: Config) -> None:
    """Set the residual scales to fall from 1.15 to 1.05 over the layers, and the input scales from 0.2 to 0.05."""
    first_layer, last_layer = 0, max(config.layers - 1, 1)
    for group, (layers, repeats) in zip(segments, config.segments(), strict=True):
        for i, block in enumerate(group.blocks):
            depth_fraction = (first_layer + i + len(layers) * jnp.arange(repeats)) / last_layer
            for name, first_value, decrease in (("residual_scale", 1.15, 0.10), ("input_scale", 0.20, 0.15)):
                scale = getattr(block, name)
                scale[...] = (first_value - decrease * depth_fraction).astype(scale.dtype)
        first_layer += len(layers) * repeats
