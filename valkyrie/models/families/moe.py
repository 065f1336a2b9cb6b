"""Decoders with mixtures of experts instead of dense feed-forwards, such as Mixtral.

`feed_forward_pattern` alternates experts (`moe`) with dense feed-forwards (`feed_forward`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.attention import Attention
from valkyrie.models.block import DENSE
from valkyrie.models.moe import MoE
from valkyrie.models.stack import Stack
from valkyrie.problems import Problem, check_range


@dataclass
class Config(Stack):
    """A decoder with full causal attention, followed by experts in every layer.

    Args:
        dense_layers: Number of first layers with a dense feed-forward, whatever `feed_forward_pattern` says.
    """

    family: str = "moe"
    name: str = "moe"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    feed_forward_pattern: list[str] = field(default_factory=lambda: ["moe"])
    dense_layers: int = 0
    attention: Attention = field(default_factory=lambda: Attention(windows=[None]))
    moe: MoE = field(default_factory=MoE)

    @property
    def feed_forward_kinds(self) -> list[str]:
        dense_layers = max(self.dense_layers, 0)
        return [DENSE if i < dense_layers else kind for i, kind in enumerate(super().feed_forward_kinds)]

    def problems(self) -> list[Problem]:
        problems = check_range("model.dense_layers", self.dense_layers, least=0, most=max(self.layers, 0))
        return [*super().problems(), *problems]
