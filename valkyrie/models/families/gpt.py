"""Dense decoders such as Llama and modern GPTs: RMSNorm, rotary positions, no biases.

Grouped heads, gated or plain feed-forward, tied or untied embeddings and window patterns are settings. LayerNorm,
biases and learned positional embeddings, as in GPT-2, are not supported here. They take less than a thousandth of a
step's work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.attention import Attention
from valkyrie.models.stack import Stack


@dataclass
class Config(Stack):
    """A dense decoder. Every block attends to all earlier tokens, unless `attention.windows` limits them."""

    family: str = "gpt"
    name: str = "gpt"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    attention: Attention = field(default_factory=lambda: Attention(windows=[None]))
