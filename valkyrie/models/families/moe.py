"""Decoders with mixtures of experts instead of dense feed-forwards, such as Mixtral.

`feed_forward_pattern` alternates experts (`moe`) with dense feed-forwards (`feed_forward`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.attention import Attention
from valkyrie.models.moe import MoE
from valkyrie.models.stack import Stack


@dataclass
class Config(Stack):
    """A decoder with full causal attention, followed by experts in every layer."""

    family: str = "moe"
    name: str = "moe"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    feed_forward_pattern: list[str] = field(default_factory=lambda: ["moe"])
    attention: Attention = field(default_factory=lambda: Attention(windows=[None]))
    moe: MoE = field(default_factory=MoE)
