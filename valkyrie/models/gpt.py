"""Decides what a dense decoder is: the same stack with attention in every block. Imports no JAX.

Llama, and GPT as it is trained today: RMSNorm, rotary positions, no biases. Grouped heads, a gated or a plain
feed-forward, tied or untied embeddings and window patterns are settings. GPT-2's LayerNorm, biases and learnt positions
cannot be said: they are less than a thousandth of the work of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.config import AttentionConfig, BlockKind, ValkyrieConfig


def _full_attention() -> AttentionConfig:
    return AttentionConfig(windows=[None])


@dataclass
class GPTConfig(ValkyrieConfig):
    """A dense decoder: every block is attention, over all earlier tokens unless `attention.windows` says less."""

    family: str = "gpt"
    name: str = "gpt"
    block_pattern: list[BlockKind] = field(default_factory=lambda: [BlockKind.attention])
    attention: AttentionConfig = field(default_factory=_full_attention)

    def problems(self) -> list[str]:
        """Return every reason why this shape cannot be built, in the words of the command line."""
        found = super().problems()
        if BlockKind.s5 in self.block_pattern:
            found.append("model.block_pattern holds s5, and model.family=gpt is attention alone. Use valkyrie_tiny.")
        return found
