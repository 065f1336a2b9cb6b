"""The feed-forward block: a gated or plain MLP on each position."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from valkyrie.axes import Size
from valkyrie.models.block import ActivationSpec, Block, BlockContext, Weight, saved, weight
from valkyrie.problems import Problem, check_range


class Nonlinearity(Enum):
    """The nonlinearity of a feed-forward: gated (three matrices) or plain (two matrices).

    Gated are `swiglu`, `geglu`, and `clamped_swiglu` (gpt-oss): (up + 1) * gate * sigmoid(1.702 gate), with up between
    -7 and 7, and gate at most 7.
    """

    swiglu = "swiglu"
    clamped_swiglu = "clamped_swiglu"
    geglu = "geglu"
    gelu = "gelu"
    relu = "relu"
    relu2 = "relu2"

    @property
    def is_gated(self) -> bool:
        """Whether a third matrix gates the hidden activations."""
        return self in (Nonlinearity.swiglu, Nonlinearity.clamped_swiglu, Nonlinearity.geglu)


_SAVED_RATIOS = {Nonlinearity.swiglu: 2.0, Nonlinearity.gelu: 2.5}
"""`saved_ratio` of the hidden activations: compiled steps save six arrays, of which one or two are products."""


@dataclass
class FeedForward(Block):
    """A projection to `mlp` channels, a nonlinearity, and a projection back. Gated variants follow arXiv 2002.05202.

    `biases` adds a bias to each projection (GPT-2).
    """

    kind: Nonlinearity = Nonlinearity.swiglu
    mlp: int = 512
    biases: bool = False

    axes = {"mlp": "hidden channels of a feed-forward or gate"}
    activations = (("batch", "seq", "mlp"),)
    pointwise = True

    module_class = "valkyrie.models.feed_forward_layer:FeedForwardLayer"

    def problems(self, key: str) -> list[Problem]:
        return check_range(f"{key}.mlp", self.mlp, least=1)

    def sizes(self, context: BlockContext) -> dict[str, Size]:
        return {"mlp": Size(self.mlp, f"{context.key}.mlp")}

    def weights(self, context: BlockContext) -> dict[str, Weight]:
        """Return the matrices, and one bias per matrix if `biases` is set.

        All matrices have `embed` first, so that a fully sharded partition gathers contiguous memory.
        """
        names = ("up", "gate", "down") if self.kind.is_gated else ("up", "down")
        weights = {name: weight("embed", "mlp", output_first=name == "down") for name in names}
        if self.biases:
            bias_axes = {name: "embed" if name == "down" else "mlp" for name in names}
            weights |= {f"{name}_bias": weight(axis, group="vector") for name, axis in bias_axes.items()}
        return weights

    def flops(self, context: BlockContext, seq: int) -> float:
        return 2.0 * context.embed * self.mlp * (3 if self.kind.is_gated else 2)

    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        """Return the activations that the backward pass needs.

        These are the outputs of the matrix products, two hidden arrays for the nonlinearity (for gated kinds, the
        factors of the gate), the input of the first product, and two float32 arrays of the norm before it.
        """
        return [
            saved("mlp", name="up", product=True),
            *([saved("mlp", name="gate", product=True)] if self.kind.is_gated else []),
            saved("embed", name="down", product=True, result=True),
            saved("mlp", count=2, saved_ratio=_SAVED_RATIOS.get(self.kind)),
            saved("embed"),
            saved("embed", count=2, float32=True, saved_ratio=1.25),
        ]
