"""The dense decoders: GPT as it is trained today, and Llama. RMSNorm, rotary positions, no biases.

Grouped heads, a gated or a plain feed-forward, tied or untied embeddings and window patterns are settings. GPT-2's
LayerNorm, biases and learned positional embeddings are not supported: they are less than a thousandth of a step's work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.attention import Attention
from valkyrie.models.stack import Stack


@dataclass
class Config(Stack):
    """A dense decoder: every block is attention, over all earlier tokens unless `attention.windows` says less."""

    family: str = "gpt"
    name: str = "gpt"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    attention: Attention = field(default_factory=lambda: Attention(windows=[None]))
