"""Decides the Valkyrie language model: S5 and windowed-attention blocks in one stack, scanned where they repeat."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from valkyrie.axes import UNSHARDED, Axis, Shard
from valkyrie.models.base import BLOCK_INPUT, Checkpoint, Losses, normal, parameter
from valkyrie.models.config import BlockKind, Boundary, ValkyrieConfig
from valkyrie.models.layers import MLP, RMSNorm, dropout
from valkyrie.models.longformer import LongformerAttention
from valkyrie.models.s5 import S5
from valkyrie.ops.cross_entropy import cross_entropy
from valkyrie.ops.linear import Numerics, lookup


class BlockSpec(NamedTuple):
    """What distinguishes a block from its neighbours: its kind and, for attention, window and dilation."""

    kind: BlockKind
    window: int | None = None
    dilation: int = 1


class Boundaries(NamedTuple):
    """Where documents begin: `keep` is 0 at their first token (for S5), `segment_ids` number them (for attention)."""

    keep: Float[Array, "batch seq"] | None
    segment_ids: Int[Array, "batch seq"] | None


def block_specs(config: ValkyrieConfig) -> list[BlockSpec]:
    """Return the blocks first to last; attention blocks take windows and dilations in turn."""
    specs, attention = [], 0
    for kind in config.kinds:
        if kind is BlockKind.s5:
            specs.append(BlockSpec(kind))
            continue
        a = config.attention
        specs.append(BlockSpec(kind, a.windows[attention % len(a.windows)], a.dilations[attention % len(a.dilations)]))
        attention += 1
    return specs


def segments(config: ValkyrieConfig) -> list[tuple[tuple[BlockSpec, ...], int]]:
    """Return the stack as runs of equal groups of blocks with their repetitions: each run is one scan.

    A group is one pass over `block_pattern`; a last group may be cut short.
    """
    specs, width = block_specs(config), len(config.block_pattern)
    runs: list[tuple[tuple[BlockSpec, ...], int]] = []
    for start in range(0, len(specs), width):
        group = tuple(specs[start : start + width])
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1] + 1)
        else:
            runs.append((group, 1))
    return runs


class Block(nnx.Module):
    """Norm, mixer and residual sum; then norm, feed-forward and residual sum where the config says so."""

    def __init__(self, config: ValkyrieConfig, spec: BlockSpec, *, numerics: Numerics, key: Array) -> None:
        keys = jax.random.split(key, 2)
        is_s5 = spec.kind is BlockKind.s5
        self.rate = config.dropout
        self.norm = RMSNorm(config.embed, config.norm_epsilon, numerics=numerics, group="ssm" if is_s5 else "vector")
        if is_s5:
            self.mixer = S5(config.s5, config.embed, numerics=numerics, key=keys[0])
        else:
            self.mixer = LongformerAttention(
                config.attention,
                config.embed,
                window=spec.window,
                dilation=spec.dilation,
                depth=config.layers,
                numerics=numerics,
                key=keys[0],
            )
        self.has_feed_forward = spec.kind in config.feed_forward_after
        if self.has_feed_forward:
            self.feed_forward_norm = RMSNorm(config.embed, config.norm_epsilon, numerics=numerics)
            self.feed_forward = MLP(
                config.embed, config.mlp, config.feed_forward, depth=config.layers, numerics=numerics, key=keys[1]
            )

    def __call__(
        self, x: Float[Array, "batch seq embed"], boundaries: Boundaries, shard: Shard, key: Array | None
    ) -> Float[Array, "batch seq embed"]:
        """Return the residual stream after this block."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = checkpoint_name(x, BLOCK_INPUT)
        y = self.norm(x)
        if isinstance(self.mixer, S5):
            y = self.mixer(y, keep=boundaries.keep, shard=shard)
        else:
            y = self.mixer(y, segment_ids=boundaries.segment_ids, shard=shard)
        x = shard(x + dropout(y, self.rate, keys[0]), "batch", "seq", "embed")
        if not self.has_feed_forward:
            return x
        y = self.feed_forward(self.feed_forward_norm(x), shard)
        return shard(x + dropout(y, self.rate, keys[1]), "batch", "seq", "embed")

    def init_state(self, batch: int, max_len: int) -> Any:
        """Return the mixer's state before the first token."""
        return self.mixer.init_state(batch) if isinstance(self.mixer, S5) else self.mixer.init_state(batch, max_len)

    def step(self, x: Float[Array, "batch embed"], state: Any) -> tuple[Float[Array, "batch embed"], Any]:
        """Return the residual stream of one more token and the mixer's state after it."""
        y = self.norm(x)
        if isinstance(self.mixer, S5):
            y, state = self.mixer.step(y, state, UNSHARDED)
        else:
            y, state = self.mixer.step(y, state)
        x = x + y
        if self.has_feed_forward:
            x = x + self.feed_forward(self.feed_forward_norm(x)[:, None], UNSHARDED)[:, 0]
        return x, state


class Group(nnx.Module):
    """The blocks of one pass over the pattern, under the names `block_0`, `block_1`, ..."""

    def __init__(self, config: ValkyrieConfig, specs: tuple[BlockSpec, ...], *, numerics: Numerics, key: Array) -> None:
        self.count = len(specs)
        for i, (spec, block_key) in enumerate(zip(specs, jax.random.split(key, len(specs)), strict=True)):
            setattr(self, f"block_{i}", Block(config, spec, numerics=numerics, key=block_key))

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order."""
        return [getattr(self, f"block_{i}") for i in range(self.count)]


class Valkyrie(nnx.Module):
    """Token embedding, scanned segments of blocks, a norm, and logits by the embedding or a matrix of their own."""

    def __init__(self, config: ValkyrieConfig, *, numerics: Numerics, key: Array) -> None:
        self.config, self.numerics = config, numerics
        runs = segments(config)
        keys = jax.random.split(key, len(runs) + 2)
        shape, dtype = (config.vocab_rows, config.embed), numerics.parameter
        self.embedding = parameter(normal(keys[0], shape, 0.02, dtype), ("vocab", "embed"))
        self.count = len(runs)
        for i, (specs, repeats) in enumerate(runs):
            setattr(self, f"segment_{i}", _stack(config, specs, repeats, numerics, keys[i + 2]))
        self.norm = RMSNorm(config.embed, config.norm_epsilon, numerics=numerics)
        if not config.tie_embeddings:
            self.unembedding = parameter(normal(keys[1], shape, config.embed**-0.5, dtype), ("vocab", "embed"))

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        *,
        shard: Shard = UNSHARDED,
        checkpoint: Checkpoint = lambda block: block,
        key: Array | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """Return the normalised residual stream after the last block; `key` turns dropout on.

        `segment_ids` number the documents packed into a row; under `document_boundary=reset` none sees another.
        """
        reset = self.config.document_boundary is Boundary.reset and segment_ids is not None
        boundaries = Boundaries(_keep(segment_ids), segment_ids) if reset else Boundaries(None, None)
        x = lookup(self.embedding[...], tokens, axes=("vocab", "embed"), shard=shard, numerics=self.numerics)
        x = shard(x, "batch", "seq", "embed")

        def run(x: Array, group: Group, boundaries: Boundaries, key: Array | None) -> Array:
            for i, block in enumerate(group.blocks):
                x = block(x, boundaries, shard, None if key is None else jax.random.fold_in(key, i))
            return x

        run = checkpoint(run)
        for i in range(self.count):
            group = getattr(self, f"segment_{i}")
            keys = _repeat_keys(key, i, group)

            def body(x: Array, scanned: tuple[Group, Array | None]) -> tuple[Array, None]:
                return run(x, scanned[0], boundaries, scanned[1]), None

            x, _ = jax.lax.scan(body, x, (group, keys))
        return self.norm(x)

    def logits(
        self, tokens: Int[Array, "batch seq"], segment_ids: Int[Array, "batch seq"] | None = None
    ) -> Float[Array, "batch seq vocab"]:
        """Return float32 logits of the real vocabulary at every position; for tests and small inputs."""
        return self._unembed(self(tokens, segment_ids))

    def losses(
        self,
        batch: dict[str, Array],
        *,
        shard: Shard = UNSHARDED,
        checkpoint: Checkpoint = lambda block: block,
        key: Array | None = None,
    ) -> Losses:
        """Return the loss sums of a batch; logits are made `loss_chunk` positions at a time."""
        hidden = self(batch["tokens"], batch["segment_ids"], shard=shard, checkpoint=checkpoint, key=key)
        positions, shards, width = _loss_positions(shard, hidden.shape[1])
        sums = cross_entropy(
            shard(hidden, "batch", positions, width),
            shard.stored(self._table, "vocab", "embed"),
            batch["targets"],
            batch["weights"],
            vocab_size=self.config.vocab_size,
            chunk=self.config.loss_chunk,
            z_loss=self.config.z_loss,
            shards=shards,
            batch_shards=shard.size("batch"),
            constrain=lambda logits: shard(logits, "batch", positions, "vocab"),
            place=lambda table: shard.computed(table, "vocab", width),
        )
        return Losses(sums.loss_sum + sums.z_sum, sums.loss_sum, sums.weight_sum, sums.per_token)

    def init_state(self, batch: int, max_len: int) -> Any:
        """Return the state of generation before the first token, one stack per segment."""
        return [
            jax.vmap(lambda group: [block.init_state(batch, max_len) for block in group.blocks])(
                getattr(self, f"segment_{i}")
            )
            for i in range(self.count)
        ]

    def step(self, tokens: Int[Array, " batch"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        """Return the logits after one more token and the state that follows it."""
        x = self.embedding[...].astype(self.numerics.compute)[tokens]
        after = []
        for i in range(self.count):

            def body(x: Array, scanned: tuple[Group, Any]) -> tuple[Array, Any]:
                group, states = scanned
                new = []
                for block, held in zip(group.blocks, states, strict=True):
                    x, held = block.step(x, held)
                    new.append(held)
                return x, new

            x, new = jax.lax.scan(body, x, (getattr(self, f"segment_{i}"), state[i]))
            after.append(new)
        return self._unembed(self.norm(x)), after

    @property
    def _table(self) -> Array:
        return (self.embedding if self.config.tie_embeddings else self.unembedding)[...]

    def _unembed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        table = self._table[: self.config.vocab_size].astype(x.dtype)
        return jnp.einsum("...e,ve->...v", x, table, preferred_element_type=jnp.float32)


def _stack(config: ValkyrieConfig, specs: tuple[BlockSpec, ...], repeats: int, numerics: Numerics, key: Array) -> Group:
    """Return `repeats` groups as one, every parameter stacked on a leading `layers` axis."""
    return jax.vmap(lambda k: Group(config, specs, numerics=numerics, key=k))(jax.random.split(key, repeats))


def _loss_positions(shard: Shard, seq: int) -> tuple[Axis, int, str | None]:
    """Return over what the loss splits positions, into how many parts, and the axis of the hidden states' width.

    Where the residual stream lies split over axes that split no vocabulary, positions take those axes: logits are then
    whole where they are made, not sums of float32 parts of the vocabulary's size over those axes.
    """
    width, free = shard.mesh_axes("embed"), not set(shard.mesh_axes("embed")) & set(shard.mesh_axes("vocab"))
    shards = shard.size("seq") * shard.size("embed")
    if width and free and seq % shards == 0:
        return ("seq", "embed"), shards, None
    return "seq", shard.size("seq"), "embed"


def _keep(segment_ids: Int[Array, "batch seq"] | None) -> Float[Array, "batch seq"] | None:
    if segment_ids is None:
        return None
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.pad(same.astype(jnp.float32), ((0, 0), (1, 0)))


def _repeat_keys(key: Array | None, segment: int, group: Group) -> Array | None:
    if key is None:
        return None
    repeats = jax.tree.leaves(group)[0].shape[0]
    return jax.random.split(jax.random.fold_in(key, segment), repeats)
