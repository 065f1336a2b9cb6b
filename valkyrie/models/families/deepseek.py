"""Decoders with latent attention and mixtures of experts, such as DeepSeek-V2 and V3."""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.families import moe
from valkyrie.models.latent_attention import LatentAttention


@dataclass
class Config(moe.Config):
    """A decoder with latent attention. All layers but the first `dense_layers` have experts."""

    family: str = "deepseek"
    name: str = "deepseek"
    attention: LatentAttention = field(default_factory=LatentAttention)  # pyright: ignore[reportIncompatibleVariableOverride]
