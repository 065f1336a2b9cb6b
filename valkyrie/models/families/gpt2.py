"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, biases in all layers, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

from valkyrie.axes import Arrays, Parameter, Tensor
from valkyrie.models.attention import Attention
from valkyrie.models.block import Layer, Residual
from valkyrie.models.feed_forward import FeedForward, Nonlinearity
from valkyrie.models.stack import Stack
from valkyrie.ops.choices import Bias
from valkyrie.problems import Problem, ProblemCode


class GPT2Layer(Layer):
    """A layer with norms that have a bias in addition to their scale."""

    def parameters(self) -> dict[str, Parameter]:
        parameters = super().parameters()
        norms = ("norm", "feed_forward_norm")
        return parameters | {f"{n}.bias": parameters[f"{n}.scale"] for n in norms if f"{n}.scale" in parameters}


@dataclass
class Config(Stack):
    """GPT-2. Its table of learned positions limits the sequence length to `context`."""

    family: str = "gpt2"
    name: str = "gpt2"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    feed_forward: Nonlinearity = Nonlinearity.gelu
    attention: Attention = field(default_factory=lambda: Attention(windows=[None], rope_theta=None, bias=Bias.all))

    module_class = "valkyrie.models.gpt2_model:GPT2Model"

    def problems(self) -> list[Problem]:
        if self.residual is Residual.sequential:
            return super().problems()
        text = "model.residual=parallel: in GPT-2, the feed-forward follows attention. Use model.residual=sequential."
        return [Problem(ProblemCode.unsupported, "model.residual", "parallel", text)]

    @property
    def max_seq(self) -> int:
        """Maximum sequence length: the number of learned positions."""
        return self.context

    def make_layers(self) -> list[Layer]:
        return [GPT2Layer(**vars(layer)) for layer in super().make_layers()]

    def parameters(self) -> dict[str, Parameter]:
        parameters = super().parameters()
        extra = {"norm.bias": parameters["norm.scale"], "positions": self._position_table()}
        return dict(sorted((parameters | extra).items(), key=lambda item: item[0].split(".")))

    def arrays(self) -> Arrays:
        arrays, p = super().arrays(), self._position_table()
        arrays.parameters.setdefault(Tensor(p.axes, p.shape, p.config_keys), []).append("positions")
        return arrays

    def _position_table(self) -> Parameter:
        keys = ("model.context", "model.embed")
        return Parameter((None, "embed"), (self.context, self.embed), keys, group="embedding")

    @property
    def _dense_feed_forward(self) -> FeedForward:
        return FeedForward(self.feed_forward, self.mlp, biases=True)
