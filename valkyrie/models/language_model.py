"""The Flax module of a language model: an embedding, blocks in scanned segments, and a head for logits or losses.

The three parts are separate methods, because tasks and pipelines call them separately.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, Axis, LossHead, Shard
from valkyrie.extensions import refuse_earlier_names
from valkyrie.models.block import BLOCK_INPUT, AuxiliaryTerm, Boundary, Layer, Residual
from valkyrie.models.layers import (
    AuxiliaryValues,
    Boundaries,
    Checkpoint,
    LayerNorm,
    PlainRMSNorm,
    RMSNorm,
    dropout,
    normal,
    parameter,
)
from valkyrie.models.stack import LOSS_SEQUENCES
from valkyrie.ops.attention.pattern import apply_soft_cap
from valkyrie.ops.cross_entropy import cross_entropy
from valkyrie.ops.linear import Numerics, lookup
from valkyrie.problems import describe_value

if TYPE_CHECKING:
    from valkyrie.models.stack import Stack


class Losses(NamedTuple):
    """Losses of a batch, in nats.

    Args:
        objective_sum: Weighted sum of the token losses, plus z-loss and auxiliary losses.
        loss_sum: Weighted sum of the token losses alone.
        weight_sum: Sum of the token weights.
        per_token: Unweighted loss of each token, for bits per byte; 0 where the weight is 0.
        auxiliary: Auxiliary values of the blocks by name, averaged over layers and summed over sequences. Each sequence
            is weighted by the sum of its token weights.
    """

    objective_sum: Float[Array, ""]
    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    per_token: Float[Array, "batch seq"]
    auxiliary: dict[str, Float[Array, ""]] = {}


class ResidualStream(NamedTuple):
    """Values that each layer passes to the next one.

    Args:
        x: The residual stream.
        auxiliary_sums: Sums of auxiliary values over the layers so far.
        middle_stream: The residual stream after the middle layer, for nanochat's backout, or None for other models.
    """

    x: Float[Array, "batch seq embed"]
    auxiliary_sums: AuxiliaryValues
    middle_stream: Float[Array, "batch seq embed"] | None = None

    def with_output(self, x: Float[Array, "batch seq embed"], auxiliary_values: AuxiliaryValues) -> ResidualStream:
        """Return a copy with `x` as the residual stream and `auxiliary_values` added to their sums."""
        sums = {name: self.auxiliary_sums[name] + value for name, value in auxiliary_values.items()}
        return self._replace(x=x, auxiliary_sums=self.auxiliary_sums | sums)


class ResidualBlock(nnx.Module):
    """Norm, mixer and residual sum, followed by norm, feed-forward and residual sum if the layer has a feed-forward.

    With `residual=parallel`, mixer and feed-forward share the norm and the residual sum.
    """

    norm_kind: type[RMSNorm | PlainRMSNorm | LayerNorm] = RMSNorm

    def __init__(self, config: Stack, layer: Layer, *, numerics: Numerics, key: Array) -> None:
        keys = jax.random.split(key, 2)
        self.dropout_rate = config.dropout
        self.norm = self.norm_kind(config.embed, config.norm_epsilon, numerics=numerics)
        self.mixer = layer.mixer.build(layer.context, numerics=numerics, key=keys[0])
        self.has_feed_forward = layer.feed_forward is not None
        self.kinds, self.auxiliary_names = (layer.kind, layer.feed_forward_kind), tuple(layer.auxiliary)
        self.is_parallel = layer.residual is Residual.parallel
        if layer.feed_forward is not None:
            context = layer.feed_forward_context
            if not self.is_parallel:
                self.feed_forward_norm = self.norm_kind(config.embed, config.norm_epsilon, numerics=numerics)
            self.feed_forward = layer.feed_forward.build(context, numerics=numerics, key=keys[1])

    def __call__(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard, key: Array | None
    ) -> tuple[Float[Array, "batch seq embed"], AuxiliaryValues]:
        """Return the residual stream after this block, and the auxiliary values of its mixer and feed-forward."""
        return self.apply(checkpoint_name(x, BLOCK_INPUT), boundaries, shard, key)

    def apply(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard, key: Array | None
    ) -> tuple[Float[Array, "batch seq embed"], AuxiliaryValues]:
        """Like `__call__`, but does not give the input a checkpoint name."""
        keys = (None, None) if key is None else jax.random.split(key)
        normed, auxiliary_values = self.norm(x), {}
        y = self._run(self.mixer, normed, boundaries, shard, auxiliary_values)
        if self.has_feed_forward and self.is_parallel:
            z = self._run(self.feed_forward, normed, boundaries, shard, auxiliary_values)
            y = dropout(y, self.dropout_rate, keys[0]) + dropout(z, self.dropout_rate, keys[1])
            return shard(x + y, "batch", "seq", "embed"), self._check_values(auxiliary_values)
        x = shard(x + dropout(y, self.dropout_rate, keys[0]), "batch", "seq", "embed")
        if self.has_feed_forward:
            z = self._run(self.feed_forward, self.feed_forward_norm(x), boundaries, shard, auxiliary_values)
            x = shard(x + dropout(z, self.dropout_rate, keys[1]), "batch", "seq", "embed")
        return x, self._check_values(auxiliary_values)

    def _run(
        self,
        module: Any,
        x: Float[Array, "batch seq embed"],
        boundaries: Boundaries,
        shard: Shard,
        values: dict[str, Any],
    ) -> Float[Array, "batch seq embed"]:
        """Return the output of the mixer or the feed-forward, and add its auxiliary values to `values`.

        Raises ValueError if the output has another shape than `x`.
        """
        kind, result = self.kinds[module is not self.mixer], module(x, boundaries, shard)
        output, auxiliary = result if isinstance(result, tuple) else (result, {})
        if (shape := getattr(output, "shape", None)) != x.shape:
            raise ValueError(
                f"block {kind} ({inspect.getfile(type(module))}) returned "
                f"{describe_value(output) if shape is None else shape}. It must return an array of shape (batch, seq, "
                f"embed) = {x.shape}."
            )
        values |= {f"{kind}/{name}": value for name, value in auxiliary.items()}
        return output

    def _check_values(self, auxiliary_values: AuxiliaryValues) -> AuxiliaryValues:
        if set(auxiliary_values) != set(self.auxiliary_names):
            raise ValueError(
                f"the blocks {' and '.join(self.kinds)} return the auxiliary values {sorted(auxiliary_values)}, but "
                f"declare {sorted(self.auxiliary_names)}. Return exactly the values that `auxiliary` declares."
            )
        return auxiliary_values

    def init_state(self, batch: int, max_len: int) -> Any:
        return self.mixer.init_state(batch, max_len)

    def step(self, x: Float[Array, "batch embed"], state: Any) -> tuple[Float[Array, "batch embed"], Any]:
        """Return the residual stream after this block at the next position, and the mixer's new state."""
        normed = self.norm(x)
        y, state = self.mixer.step(normed, state)
        if self.has_feed_forward and self.is_parallel:
            return x + y + self.feed_forward_step(normed), state
        x = x + y
        if self.has_feed_forward:
            x = x + self.feed_forward_step(self.feed_forward_norm(x))
        return x, state

    def feed_forward_step(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        """Return the output of the feed-forward for one position."""
        return self._run(self.feed_forward, x[:, None], Boundaries(), UNSHARDED, {})[:, 0]


class BlockGroup(nnx.Module):
    """The blocks of one repetition of the model's layer pattern, as attributes `block_0`, `block_1`, ..."""

    def __init__(
        self,
        block_class: type[ResidualBlock],
        config: Stack,
        layers: Sequence[Layer],
        *,
        numerics: Numerics,
        key: Array,
    ) -> None:
        self.block_count = len(layers)
        for i, (layer, block_key) in enumerate(zip(layers, jax.random.split(key, len(layers)), strict=True)):
            setattr(self, f"block_{i}", block_class(config, layer, numerics=numerics, key=block_key))

    @property
    def blocks(self) -> list[ResidualBlock]:
        """The blocks in order."""
        return [getattr(self, f"block_{i}") for i in range(self.block_count)]


class LanguageModel(nnx.Module):
    """Token embedding, segments of stacked blocks, a norm, and a head with tied or separate weights."""

    block_kind: type[ResidualBlock] = ResidualBlock

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_earlier_names(cls, {"deviations": "init_deviations", "leaving": "head_input"})

    def __init__(self, config: Stack, *, numerics: Numerics, key: Array) -> None:
        self.config, self.numerics = config, numerics
        segments, specs = config.segments(), config.parameters()
        keys = jax.random.split(key, len(segments) + 2)
        shape = (config.vocab_rows, config.embed)
        embedding_deviation, unembedding_deviation = self.init_deviations(config)
        self.embedding = parameter(specs["embedding"], normal(keys[0], shape, embedding_deviation), numerics)
        self.segment_count = len(segments)
        for i, (layers, repeats) in enumerate(segments):
            setattr(
                self, f"segment_{i}", _stack_groups(self.block_kind, config, layers, repeats, numerics, keys[i + 2])
            )
        self.norm = self.block_kind.norm_kind(config.embed, config.norm_epsilon, numerics=numerics)
        if not config.tie_embeddings:
            table = normal(keys[1], shape, unembedding_deviation)
            self.unembedding = parameter(specs["unembedding"], table, numerics)

    @staticmethod
    def init_deviations(config: Stack) -> tuple[float, float]:
        """Return the initial standard deviations of the embedding and the unembedding."""
        return 0.02, config.embed**-0.5

    @property
    def segments(self) -> list[BlockGroup]:
        """The segments in order. Each parameter has a leading axis, one entry per repetition of the group."""
        return [getattr(self, f"segment_{i}") for i in range(self.segment_count)]

    def boundaries(
        self, segment_ids: Int[Array, "batch seq"] | None, tokens: Int[Array, "batch seq"] | None = None
    ) -> Boundaries:
        """Return the document boundaries. There are none without `segment_ids` or with `document_boundary=cross`.

        `tokens` are the token ids, which only models with value embeddings use.
        """
        if segment_ids is None or self.config.document_boundary is Boundary.cross:
            return Boundaries()
        same = segment_ids[:, 1:] == segment_ids[:, :-1]
        return Boundaries(jnp.pad(same.astype(jnp.float32), ((0, 0), (1, 0))), segment_ids)

    def embed(self, tokens: Int[Array, "batch seq"], *, shard: Shard = UNSHARDED) -> Float[Array, "batch seq embed"]:
        """Return the scaled embeddings of the tokens, which are the input of `blocks`."""
        x = lookup(self.embedding[...], tokens, axes=("vocab", "embed"), shard=shard, numerics=self.numerics)
        return shard(self._scale(x), "batch", "seq", "embed")

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
        """Run all blocks on `x`, the output of `embed`. A random `key` enables dropout.

        Returns the sums and row values of `head` (see `LossHead`). If `head` is None, returns the input of the head,
        with shape (batch, seq, embed).
        """

        def run(stream: Any, layer: tuple[BlockGroup, Array | None], boundaries: Boundaries, shard: Shard) -> Any:
            def run_group(stream: Any, group: BlockGroup, boundaries: Boundaries, key: Array | None) -> Any:
                for i, block in enumerate(group.blocks):
                    block_key = None if key is None else jax.random.fold_in(key, i)
                    stream = stream.with_output(*block(stream.x, boundaries, shard, block_key))
                return stream

            return checkpoint(run_group)(stream, layer[0], boundaries, layer[1])

        stream: Any = ResidualStream(x, self.zero_values(x, shard))
        for i, group in enumerate(self.segments):
            segment_head = head if i == self.segment_count - 1 else None
            stream = shard.apply_layers(
                run, (group, split_key_over_repeats(key, i, group)), stream, boundaries, segment_head
            )
        return stream if head is not None else self.head_input(stream)

    def zero_values(self, x: Float[Array, "batch seq embed"], shard: Shard) -> AuxiliaryValues:
        """Return the initial sums of auxiliary values by name: zeros of shape (batch,)."""
        return {name: shard(jnp.zeros(x.shape[0], jnp.float32), "batch") for name in self.config.auxiliary}

    def losses(
        self,
        x: Float[Array, "batch seq embed"],
        boundaries: Boundaries,
        targets: Int[Array, "batch seq"],
        weights: Float[Array, "batch seq"],
        *,
        shard: Shard = UNSHARDED,
        checkpoint: Checkpoint = lambda block: block,
        key: Array | None = None,
    ) -> Losses:
        """Run the blocks and the loss head on `x`, the output of `embed`. The losses include auxiliary losses."""
        graph, head_state, other_state = nnx.split(self, lambda path, _: path[0] in self.head_parameters, ...)

        def head_losses(
            head_state: Any, stream: Any, targets_and_weights: tuple[Array, Array], shard: Shard
        ) -> tuple[Any, Array]:
            model = nnx.merge(graph, head_state, other_state)
            losses = model.head_loss(model.head_input(stream), *targets_and_weights, shard=shard)
            losses = _add_auxiliary(losses, stream.auxiliary_sums, targets_and_weights[1], self.config.auxiliary)
            return (losses.objective_sum, losses.loss_sum, losses.weight_sum, losses.auxiliary), losses.per_token

        head = LossHead(head_losses, head_state, (targets, weights))
        sums, per_token = self.blocks(x, boundaries, shard=shard, checkpoint=checkpoint, key=key, head=head)
        objective, loss, weight, auxiliary = sums
        return Losses(objective, loss, weight, per_token, auxiliary)

    def head_input(self, stream: ResidualStream) -> Float[Array, "batch seq embed"]:
        """Return the input of the head: the last residual stream, unless a subclass changes it."""
        return stream.x

    @property
    def head_parameters(self) -> set[str]:
        """Names of the top-level parameters that `head_input` and `head_loss` use."""
        return {"norm", "embedding" if self.config.tie_embeddings else "unembedding"}

    def head_loss(
        self,
        x: Float[Array, "batch seq embed"],
        targets: Int[Array, "batch seq"],
        weights: Float[Array, "batch seq"],
        *,
        shard: Shard = UNSHARDED,
    ) -> Losses:
        """Return the losses of a residual stream, without auxiliary losses.

        Logits are computed for `loss_chunk` positions at a time, or more if a device has fewer than `LOSS_SEQUENCES`
        sequences.
        """
        hidden = self.norm(x)
        position_axes, shards, channel_axis = _loss_sharding(shard, hidden.shape[1])
        local_sequences = max(1, hidden.shape[0] // shard.shard_count("batch"))
        sums = cross_entropy(
            shard(hidden, "batch", position_axes, channel_axis),
            shard.shard_for_storage(self._unembedding_table, "vocab", "embed"),
            targets,
            weights,
            vocab_size=self.config.vocab_size,
            chunk=self.config.loss_chunk * max(1, math.ceil(LOSS_SEQUENCES / local_sequences)),
            z_loss=self.config.z_loss,
            soft_cap=self.config.logits_soft_cap,
            seq_shards=shards,
            batch_shards=shard.shard_count("batch"),
            constrain=lambda logits: shard(logits, "batch", position_axes, "vocab"),
            gather=lambda table: shard.gather_for_use(table, "vocab", channel_axis),
            sum_gradient=self._gradient_sum(shard),
            sum_first=shard.sums_head_first,
        )
        return Losses(sums.loss_sum + sums.z_sum, sums.loss_sum, sums.weight_sum, sums.per_token)

    def logits(
        self,
        tokens: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        shard: Shard = UNSHARDED,
    ) -> Float[Array, "batch seq vocab"]:
        """Return float32 logits at every position, without vocabulary padding.

        All logits are in memory at once, so use this only for small inputs.
        """
        x = self.blocks(self.embed(tokens, shard=shard), self.boundaries(segment_ids, tokens), shard=shard)
        return self._unembed(self.norm(x))

    def init_state(self, batch: int, max_len: int) -> Any:
        """Return the generation state before the first token.

        It is a list with an entry for each segment: the list of its blocks' states, stacked over repetitions.
        """
        return [
            jax.vmap(lambda group: [block.init_state(batch, max_len) for block in group.blocks])(group)
            for group in self.segments
        ]

    def step(self, tokens: Int[Array, " batch"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        """Process one token per sequence; return the logits for the following token, and the new state.

        `init_state` returns the state before the first token.
        """
        return self._step_embedded(self._scale(self.embedding[...].astype(self.numerics.compute)[tokens]), state)

    def _step_embedded(self, x: Float[Array, "batch embed"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        """Like `step`, but takes scaled token embeddings instead of tokens."""
        new_state = []

        def body(x: Array, scanned: tuple[BlockGroup, Any]) -> tuple[Array, Any]:
            group, block_states = scanned
            states = []
            for block, block_state in zip(group.blocks, block_states, strict=True):
                x, block_state = block.step(x, block_state)
                states.append(block_state)
            return x, states

        for group, group_state in zip(self.segments, state, strict=True):
            x, states = jax.lax.scan(body, x, (group, group_state))
            new_state.append(states)
        return self._unembed(self.norm(x)), new_state

    def _gradient_sum(self, shard: Shard) -> Callable[[Array], Array]:
        """Return the function that sums the unembedding's gradient over the shards of the batch and the sequence."""

        def sum_shards(shard_gradients: Array) -> Array:
            axes, dtype = ("vocab", "embed"), self.numerics.reduction
            return shard.compute_gradient(
                lambda gradients: gradients.sum((0, 1)), (shard_gradients,), *axes, reduction_dtype=dtype
            )

        return sum_shards

    @property
    def _unembedding_table(self) -> Array:
        return (self.embedding if self.config.tie_embeddings else self.unembedding)[...]

    def _unembed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        table = self._unembedding_table[: self.config.vocab_size].astype(x.dtype)
        logits = jnp.einsum("...e,ve->...v", x, table, preferred_element_type=jnp.float32)
        return apply_soft_cap(logits, self.config.logits_soft_cap)

    def _scale(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)


def _stack_groups(
    block_class: type[ResidualBlock],
    config: Stack,
    layers: Sequence[Layer],
    repeats: int,
    numerics: Numerics,
    key: Array,
) -> BlockGroup:
    """Build `repeats` groups with different weights as one module.

    Every parameter gets a leading axis of size `repeats`, with the logical axis `layers`.
    """
    group = partial(BlockGroup, block_class, config, layers, numerics=numerics)
    return jax.vmap(lambda k: group(key=k))(jax.random.split(key, repeats))


def _add_auxiliary(
    losses: Losses, values: AuxiliaryValues, weights: Float[Array, "batch seq"], terms: dict[str, AuxiliaryTerm]
) -> Losses:
    """Return the losses with the auxiliary values included. `values` are sums over layers.

    Each value is summed over sequences, weighted by the sum of each sequence's token weights. This total, times its
    weight in `terms`, is added to `objective_sum`. The total divided by the number of layers is stored in `auxiliary`.
    """
    for name, term in terms.items():
        total = jnp.sum(values[name] * jnp.sum(weights, axis=1))
        losses = losses._replace(
            objective_sum=losses.objective_sum + term.weight * total,
            auxiliary=losses.auxiliary | {name: total / term.layers},
        )
    return losses


def _loss_sharding(shard: Shard, seq: int) -> tuple[Axis, int, str | None]:
    """Choose how the loss shards the hidden states.

    By default, positions are sharded as the logical axis `seq`, and channels as `embed`. If none of
    the mesh axes of `embed` shards the vocabulary, they shard positions too and channels are not sharded, provided that
    the sequence length `seq` is divisible by the resulting number of shards. Each device then computes complete logits,
    which avoids a sum of partial float32 logits over these mesh axes.

    Returns:
        The logical axes of the positions, the number of shards of the positions, and the logical axis of the channels,
        or None if channels are not sharded.
    """
    embed_axes, vocab_axes = shard.activation_mesh_axes("embed"), shard.activation_mesh_axes("vocab")
    shards = shard.shard_count("seq") * shard.shard_count("embed")
    if embed_axes and not set(embed_axes) & set(vocab_axes) and seq % shards == 0:
        return ("seq", "embed"), shards, None
    return "seq", shard.shard_count("seq"), "embed"


def split_key_over_repeats(key: Array | None, segment: int, group: BlockGroup) -> Array | None:
    """Return an array with a random key for each repetition of a segment, or None if `key` is None."""
    if key is None:
        return None
    repeats = jax.tree.leaves(group)[0].shape[0]
    return jax.random.split(jax.random.fold_in(key, segment), repeats)
