"""Decoders with latent attention and mixtures of experts, such as DeepSeek-V2 and V3.

`feed_forward_pattern` lists the first, dense layers (`feed_forward`) before those with experts (`moe`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.latent_attention import LatentAttention
from valkyrie.models.moe import MoE
from valkyrie.models.stack import Stack


@dataclass
class Config(Stack):
    """A decoder with latent attention, followed by experts in every layer, unless `feed_forward_pattern` says other."""

    family: str = "deepseek"
    name: str = "deepseek"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    feed_forward_pattern: list[str] = field(default_factory=lambda: ["moe"])
    attention: LatentAttention = field(default_factory=LatentAttention)
    moe: MoE = field(default_factory=MoE)
