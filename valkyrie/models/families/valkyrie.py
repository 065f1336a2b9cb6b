"""The Valkyrie family: S5 and windowed attention blocks in one stack, or either alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.models.attention import Attention
from valkyrie.models.s5 import S5
from valkyrie.models.stack import Stack


@dataclass
class Config(Stack):
    """A stack of S5 and windowed-attention blocks."""

    family: str = "valkyrie"
    name: str = "valkyrie"
    block_pattern: list[str] = field(default_factory=lambda: ["s5", "attention"])
    s5: S5 = field(default_factory=S5)
    attention: Attention = field(default_factory=Attention)
