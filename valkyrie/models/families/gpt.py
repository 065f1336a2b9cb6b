"""Dense decoders such as Llama and modern GPTs: RMSNorm, rotary positions, and by default no biases.

Grouped-query attention, attention biases, windows, gated or plain feed-forwards, and tied embeddings are configurable.
For LayerNorm, feed-forward biases and learned positions, use the family `gpt2`.
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
