"""Decides what a user may say of a model; imports no JAX, so a wrong word is refused before JAX is loaded.

A config also knows its own arithmetic: the size of every logical axis it puts on a parameter, and its FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from valkyrie.ops.choices import AttentionImpl, CInit, Discretization, ScanImpl


class BlockKind(Enum):
    """What mixes along the sequence in one block."""

    s5 = "s5"
    attention = "attention"


class Activation(Enum):
    """The gate after an S5 layer, by the S5 paper's names (lindermanlab/S5 `layers.py`)."""

    gelu = "gelu"
    half_glu1 = "half_glu1"
    half_glu2 = "half_glu2"
    full_glu = "full_glu"


class FeedForward(Enum):
    """The feed-forward product: gated (`swiglu`, `geglu`: three matrices) or plain (two)."""

    swiglu = "swiglu"
    geglu = "geglu"
    gelu = "gelu"
    relu = "relu"
    relu2 = "relu2"

    @property
    def gated(self) -> bool:
        """Whether a third matrix gates the hidden side."""
        return self in (FeedForward.swiglu, FeedForward.geglu)


class Boundary(Enum):
    """What a packed document sees of the one before it: nothing (`reset`) or everything (`cross`)."""

    reset = "reset"
    cross = "cross"


class Tensor(NamedTuple):
    """One kind of parameter or activation: its name, logical axes, shape, and the config key that sets each axis."""

    name: str
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    keys: tuple[str | None, ...]


@dataclass
class S5Config:
    """An S5 layer; letters and defaults as in the paper (arXiv 2208.04933) and its code."""

    state_size: int = 64
    blocks: int = 4
    conjugate_symmetric: bool = True
    discretization: Discretization = Discretization.zoh
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    step_rescale: float = 1.0
    clip_eigenvalues: bool = True
    c_init: CInit = CInit.trunc_standard_normal
    activation: Activation = Activation.half_glu1
    bidirectional: bool = False
    scan: ScanImpl = ScanImpl.auto
    scan_block: int = 128

    @property
    def states(self) -> int:
        """P, the complex states kept: half of `state_size` under conjugate symmetry."""
        return self.state_size // 2 if self.conjugate_symmetric else self.state_size


@dataclass
class AttentionConfig:
    """Windowed attention. `windows` and `dilations` are taken in turn by the attention layers, first layer first.

    A window counts keys including the token itself (`valkyrie.ops.attention` states it); null is full attention.
    `global_tokens` is how many leading positions of a sequence are global, with projections of their own.
    """

    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    causal: bool = True
    windows: list[int | None] = field(default_factory=lambda: [128])
    dilations: list[int] = field(default_factory=lambda: [1])
    global_tokens: int = 0
    rope_theta: float = 10000.0
    impl: AttentionImpl = AttentionImpl.auto


@dataclass
class ValkyrieConfig:
    """A stack of S5 and windowed-attention blocks, each followed by a feed-forward where `feed_forward_after` says so.

    `block_pattern` repeats until `layers` blocks are made. `vocab_size` counts real tokens; the embedding has
    that rounded up to `vocab_multiple` rows, so that it splits evenly. `context` is the length it is trained on unless
    `seq` says otherwise.
    """

    family: str = "valkyrie"
    name: str = "valkyrie"
    context: int = 128
    tokenizer: str = "bytes"
    vocab_size: int = 257
    vocab_multiple: int = 128
    embed: int = 128
    layers: int = 4
    block_pattern: list[BlockKind] = field(default_factory=lambda: [BlockKind.s5, BlockKind.attention])
    feed_forward: FeedForward = FeedForward.swiglu
    feed_forward_after: list[BlockKind] = field(default_factory=lambda: [BlockKind.s5, BlockKind.attention])
    mlp: int = 512
    norm_epsilon: float = 1e-5
    dropout: float = 0.0
    tie_embeddings: bool = True
    document_boundary: Boundary = Boundary.reset
    loss_chunk: int = 512
    z_loss: float = 0.0
    s5: S5Config = field(default_factory=S5Config)
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def kinds(self) -> list[BlockKind]:
        """The kind of every block, first to last."""
        return [self.block_pattern[i % len(self.block_pattern)] for i in range(self.layers)]

    @property
    def causal(self) -> bool:
        """Whether a position sees none after it: what a next-token loss needs."""
        kinds = set(self.kinds)
        return not (
            (BlockKind.attention in kinds and not self.attention.causal)
            or (BlockKind.s5 in kinds and self.s5.bidirectional)
        )

    def problems(self) -> list[str]:
        """Return every reason why this shape cannot be built, in the words of the command line."""
        found = []
        if not self.block_pattern:
            found.append("model.block_pattern is empty: name at least one of s5, attention.")
        if self.layers < 1:
            found.append(f"model.layers={self.layers}: at least 1 is needed.")
        s5, attention = self.s5, self.attention
        if BlockKind.s5 in self.kinds:
            per_block, pairs = s5.state_size // max(s5.blocks, 1), 2 * max(s5.blocks, 1)
            if s5.blocks < 1 or s5.state_size % s5.blocks or (s5.conjugate_symmetric and per_block % 2):
                found.append(
                    f"model.s5.state_size={s5.state_size} does not split into model.s5.blocks={s5.blocks} blocks"
                    f"{' of an even size (conjugate pairs)' if s5.conjugate_symmetric else ''}. "
                    f"Nearest: state_size={max(1, round(s5.state_size / pairs)) * pairs}."
                )
            if not 0 < s5.dt_min <= s5.dt_max:
                found.append(f"model.s5 needs 0 < dt_min <= dt_max; got dt_min={s5.dt_min}, dt_max={s5.dt_max}.")
        if BlockKind.attention in self.kinds:
            if attention.heads % attention.kv_heads:
                found.append(
                    f"model.attention.heads={attention.heads} is not a multiple of kv_heads={attention.kv_heads}."
                )
            if attention.head_dim % 2:
                found.append(f"model.attention.head_dim={attention.head_dim} is odd: rotary positions need pairs.")
            if not attention.windows or any(w is not None and w < 1 for w in attention.windows):
                found.append(
                    f"model.attention.windows={attention.windows}: name windows of at least 1, or null for full."
                )
            if not attention.dilations or any(d < 1 for d in attention.dilations):
                found.append(f"model.attention.dilations={attention.dilations}: each must be at least 1.")
        if not 0 <= self.dropout < 1:
            found.append(f"model.dropout={self.dropout}: must be in [0, 1).")
        return found

    def tensors(self) -> list[Tensor]:
        """Return every kind of split parameter with its shape; a test holds the list against the built model.

        This is what lets a layout be refused before JAX is imported. Leading `layers` axes are left out.
        """
        width = {"embed": (self.embed, "model.embed"), "vocab": (self.vocab_rows, "model.vocab_multiple")}
        rows = [_tensor("embedding", ("vocab", "embed"), width)]
        if BlockKind.s5 in self.kinds:
            s5 = width | {"state": (self.s5.states, "model.s5.state_size"), "mlp": (self.embed, "model.embed")}
            rows += [_tensor("s5.B", ("state", "embed", None), s5), _tensor("s5.C", ("embed", "state", None), s5)]
            if self.s5.activation is not Activation.gelu:
                rows.append(_tensor("s5.gate", ("embed", "mlp"), s5))
        if BlockKind.attention in self.kinds:
            a = self.attention
            heads = width | {
                "heads": (a.heads, "model.attention.heads"),
                "kv_heads": (a.kv_heads, "model.attention.kv_heads"),
                "head_dim": (a.head_dim, "model.attention.head_dim"),
            }
            rows += [
                _tensor("attention.query", ("embed", "heads", "head_dim"), heads),
                _tensor("attention.key", ("embed", "kv_heads", "head_dim"), heads),
            ]
        if set(self.kinds) & set(self.feed_forward_after):
            rows.append(_tensor("feed_forward.up", ("embed", "mlp"), width | {"mlp": (self.mlp, "model.mlp")}))
        return rows

    def flops_per_token(self, seq: int) -> float:
        """Return forward FLOPs per token: 2 per weight of every product, the keys a query really sees, 8 P per scan.

        Keys of a causal window W of dilation d over `seq` positions average W - d W(W-1)/(2 seq). Backward is counted
        as twice the forward by the caller, and nothing is added for rematerialisation: model FLOPs (PaLM, app. B).
        """
        a, s5, total = self.attention, self.s5, 0.0
        attention_layer = 0
        for kind in self.kinds:
            if kind is BlockKind.s5:
                directions = 2 if s5.bidirectional else 1
                total += 4 * s5.states * self.embed * (1 + directions) + 8 * s5.states * directions
                total += 2 * _GATES[s5.activation] * self.embed**2
            else:
                total += 4 * self.embed * a.head_dim * (a.heads + a.kv_heads)
                if a.global_tokens:
                    total += 4 * self.embed * a.head_dim * a.kv_heads
                total += 4 * a.heads * a.head_dim * self._mean_keys(attention_layer, seq)
                attention_layer += 1
            if kind in self.feed_forward_after:
                total += 2 * self.embed * self.mlp * (3 if self.feed_forward.gated else 2)
        return total + 2 * self.embed * self.vocab_rows

    def parameter_count(self) -> int:
        """Return how many numbers the model learns; a test holds it against the built model."""
        a, s5, embed = self.attention, self.s5, self.embed
        directions = 2 if s5.bidirectional else 1
        mixers = {
            BlockKind.s5: 3 * s5.states
            + 2 * s5.states * embed * (1 + directions)
            + embed
            + _GATES[s5.activation] * embed**2,
            BlockKind.attention: embed * a.head_dim * a.heads
            + embed * a.head_dim * (a.heads + 2 * a.kv_heads) * (2 if a.global_tokens else 1),
        }
        total = embed + (1 if self.tie_embeddings else 2) * self.vocab_rows * embed
        for kind in self.kinds:
            total += embed + mixers[kind]
            if kind in self.feed_forward_after:
                total += embed + (3 if self.feed_forward.gated else 2) * embed * self.mlp
        return total

    def activation_sizes(self) -> dict[str, int]:
        """Return the length of every logical axis of an activation but batch and seq; `heads` counts head_dim too."""
        a = self.attention
        return {
            "embed": self.embed,
            "mlp": self.mlp,
            "state": self.s5.states,
            "heads": a.heads * a.head_dim,
            "kv_heads": a.kv_heads * a.head_dim,
            "vocab": self.vocab_rows,
        }

    def kept_activations(self, kind: BlockKind, remat: str) -> list[tuple[tuple[str, str, str], float, bool]]:
        """Return what one block keeps for its backward pass: (logical axes, how many such arrays, float32 or compute).

        An estimate, counted from the operations of the block: norms keep their input in float32, products their
        input, gates both factors. `full` keeps the block's input alone, `dots` the results of matrix products too,
        `offload` nothing on the device.
        """

        def of(axis: str, count: float | int, wide: bool = False) -> tuple[tuple[str, str, str], float, bool]:
            return ("batch", "seq", axis), float(count), wide

        kept = [of("embed", 1)]
        if remat == "offload":
            return []
        if remat == "full":
            return kept
        none = remat == "none"
        if kind is BlockKind.s5:
            directions = 2 if self.s5.bidirectional else 1
            kept += [of("state", 2 + 2 * directions * none, True)]
            kept += [of("embed", 1 + 3 * none, True), of("embed", 1 + 3 * none)]
        else:
            kept += [of("heads", 2 + 2 * none), of("kv_heads", 2 + 2 * none)]
            kept += [of("embed", 1 + none), of("embed", 2 * none, True)]
        if kind in self.feed_forward_after:
            gated = self.feed_forward.gated
            kept += [of("mlp", (2 if gated else 1) + 2 * none), of("embed", 1 + none), of("embed", 2 * none, True)]
        return [entry for entry in kept if entry[1]]

    def _mean_keys(self, attention_layer: int, seq: int) -> float:
        """Return how many keys a query sees on average: key n of a window lies n dilations back, if there at all."""
        a = self.attention
        dilation = a.dilations[attention_layer % len(a.dilations)]
        window = min(a.windows[attention_layer % len(a.windows)] or seq, -(-seq // dilation))
        one_side = window - dilation * window * (window - 1) / (2 * seq)
        return float(min(seq, (one_side if a.causal else 2 * one_side - 1) + a.global_tokens))


_GATES = {Activation.gelu: 0, Activation.half_glu1: 1, Activation.half_glu2: 1, Activation.full_glu: 2}
"""Square matrices of an S5 layer's gate."""


def _tensor(name: str, axes: tuple[str | None, ...], sizes: dict[str, tuple[int, str]]) -> Tensor:
    found = [sizes[axis] if axis is not None else (2, None) for axis in axes]
    return Tensor(name, axes, tuple(size for size, _ in found), tuple(key for _, key in found))
