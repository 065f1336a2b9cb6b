"""The attention block of nanochat (karpathy/nanochat): Attention with norms after rotation, and value embeddings."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from valkyrie.axes import Parameter
from valkyrie.models.attention import Attention
from valkyrie.models.block import Saved, Site, Weight, saved, weight

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics

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

    def problems(self, key: str) -> list[str]:
        """Return every reason why it cannot be built."""
        refusals = super().problems(key)
        if self.qk_norm:
            refusals.append(f"{key}.qk_norm=true: nanochat's norm of queries and keys is another, and always there.")
        if self.global_tokens:
            refusals.append(f"{key}.global_tokens={self.global_tokens}: nanochat has none. Use 0.")
        for name in ("qk_gain", "qk_norm_epsilon"):
            if not getattr(self, name) > 0:
                refusals.append(f"{key}.{name}={getattr(self, name):g}: must be above 0.")
        return refusals

    def has_value_embedding(self, site: Site) -> bool:
        """Return whether this layer has a table of values."""
        return self.value_embeddings and site.number % 2 == (site.layers - 1) % 2

    def variant(self, site: Site) -> Hashable:
        """Return this layer's window and dilation, and whether it has a table of values."""
        return super().variant(site), self.has_value_embedding(site)

    def weights(self, site: Site) -> dict[str, Weight]:
        """Return those of attention, and the gate of the value embedding."""
        gate = {"value_gate": weight("kv_heads", gate_channels(site), output_first=True)}
        return super().weights(site) | (gate if self.has_value_embedding(site) else {})

    def parameters(self, site: Site) -> dict[str, Parameter]:
        """Return its parameters; the rows of a table of values lie like those of the token embedding."""
        if not self.has_value_embedding(site):
            return super().parameters(site)
        shape, keys = (site.vocab, self.kv_heads * self.head_dim), ("model.vocab_multiple", f"{site.key}.kv_heads")
        table = Parameter(("vocab", "embed"), shape, keys, group="value_embedding")
        return super().parameters(site) | {"value_embedding": table}

    def flops(self, site: Site, seq: int) -> float:
        """Return forward FLOPs per token: those of attention and of the gate."""
        return super().flops(site, seq) + 2.0 * gate_channels(site) * self.kv_heads * self.has_value_embedding(site)

    def saves(self, site: Site) -> list[Saved]:
        """Return what attention keeps, the inputs of its norms, and the values added with their gate."""
        return [
            *super().saves(site),
            saved("heads", "head_dim", float32=True),
            saved("kv_heads", "head_dim", float32=True),
            saved("kv_heads", "head_dim", count=int(self.has_value_embedding(site))),
        ]

    def build(self, site: Site, *, numerics: Numerics, key: Array) -> Any:
        """Return the module."""
        from valkyrie.models.nanochat_attention_layer import NanochatAttentionLayer

        return NanochatAttentionLayer(self, site, numerics=numerics, key=key)


def gate_channels(site: Site) -> int:
    """Return how many channels the gate of a value embedding reads."""
    return min(GATE_CHANNELS, site.embed)
