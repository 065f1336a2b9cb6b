"""nanochat (karpathy/nanochat), following its `gpt.py` of July 2026. The depth determines the shape.

Every part that was not in the version of October 2025 is an option: windows, value embeddings, smear, layer scales,
backout, and the gain of queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from valkyrie.axes import Arrays, Parameter, Tensor
from valkyrie.models.block import DENSE, Block, Layer, Residual
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.models.nanochat_attention import NanochatAttention
from valkyrie.models.stack import Stack
from valkyrie.problems import Problem, ProblemCode, check_range

SMEAR_CHANNELS = 24
"""Maximum number of channels of each embedding that the smear gate reads, as in nanochat."""


@dataclass(frozen=True)
class NanochatLayer(Layer):
    """A layer with parameter-free norms.

    With `has_scales`, the layer replaces its input `x` with `residual_scale * x + input_scale * x0`, where `x0` is the
    residual stream before the first layer. Both scales are learned scalars.
    """

    has_scales: bool = True

    def parameters(self) -> dict[str, Parameter]:
        parameters = {
            n: p for n, p in super().parameters().items() if n not in ("norm.scale", "feed_forward_norm.scale")
        }
        scales = {"residual_scale": "residual_scale", "input_scale": "input_scale"} if self.has_scales else {}
        return parameters | {name: _scalar(group) for name, group in scales.items()}


@dataclass
class Config(Stack):
    """A nanochat model.

    Args:
        depth: Number of layers. `conf/model/nanochat.yaml` derives the other sizes from it: `embed` is 64 times the
            depth, rounded up to a multiple of 128.
        window_pattern: Windows of the layers, one letter each, repeated. `S`: each token attends to itself and to the
            previous `context / 4` tokens, rounded up to a multiple of 128. `L` or `G`: to itself and all earlier
            tokens, as the last layer always does. null: use `attention.windows`.
        layer_scales: Replace the input `x` of each layer with `a * x + b * x0`, where `x0` is the residual stream
            before the first layer, and `a` and `b` are learned scalars of the layer.
        smear: Add the embedding of the previous token, times a learned gate, to each embedding.
        backout: Initial value of a learned factor. The residual stream after the middle layer, times this factor, is
            subtracted from the last residual stream; null: nothing is subtracted.
    """

    family: str = "nanochat"
    name: str = "nanochat"
    depth: int = 4
    vocab_multiple: int = 64
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    feed_forward: Nonlinearity = Nonlinearity.relu2
    norm_epsilon: float = 1.1920929e-07
    logits_soft_cap: float | None = 15.0
    tie_embeddings: bool = False
    window_pattern: str | None = "SSSL"
    layer_scales: bool = True
    smear: bool = True
    backout: float | None = 0.2
    attention: NanochatAttention = field(default_factory=NanochatAttention)

    module_class = "valkyrie.models.nanochat_model:NanochatModel"

    @property
    def smear_channels(self) -> int:
        """Number of channels of each embedding that the smear gate reads: `SMEAR_CHANNELS`, but at most `embed`."""
        return min(SMEAR_CHANNELS, self.embed)

    @property
    def period(self) -> int:
        """Number of layers after which the patterns of windows, dilations and value embeddings repeat."""
        windows = self.window_pattern or self.attention.windows
        return math.lcm(len(windows), len(self.attention.dilations), 1 + self.attention.value_embeddings)

    @property
    def mixer_blocks(self) -> dict[str, Block]:
        """The attention block by name, with the windows of `window_pattern` unless it is None."""
        if self.window_pattern is None:
            return {"attention": self.attention}
        short = -(-self.context // 512) * 128 + 1  # a quarter, in whole tiles of 128 keys, plus the token itself
        letters = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.layers - 1)]
        windows = [short if letter == "S" else None for letter in letters]
        return {"attention": replace(self.attention, windows=[*windows, None])}

    def problems(self) -> list[Problem]:
        problems = []
        pattern, unknown_letters = self.window_pattern, sorted({*(self.window_pattern or "")} - {*"SLG"})
        if pattern == "" or unknown_letters:
            reason = f"{unknown_letters[0]!r} is not a window" if unknown_letters else "it is empty"
            text = (
                f"model.window_pattern={pattern}: {reason}. Write letters such as SSSL (S: a quarter of the context; "
                "L or G: all earlier tokens), or null to use model.attention.windows."
            )
            problems.append(Problem(ProblemCode.malformed, "model.window_pattern", pattern, text))
        problems += check_range("model.depth", self.depth, least=1)
        if self.residual is not Residual.sequential:
            text = (
                "model.residual=parallel: in nanochat, the feed-forward follows attention. "
                "Use model.residual=sequential."
            )
            problems.append(Problem(ProblemCode.unsupported, "model.residual", "parallel", text))
        if self.feed_forward_after is not None and "attention" not in self.feed_forward_after:
            key, value = "model.feed_forward_after", self.feed_forward_after
            text = f"{key}={value}: in nanochat, a feed-forward follows every attention block. Use {key}=null."
            problems.append(Problem(ProblemCode.unsupported, key, value, text))
        if self.feed_forward_pattern != [DENSE]:
            key, value = "model.feed_forward_pattern", self.feed_forward_pattern
            text = f"{key}={value}: nanochat has only the dense feed-forward. Use {key}=[{DENSE}]."
            problems.append(Problem(ProblemCode.unsupported, key, value, text))
        if self.feed_forward.is_gated:
            kind = self.feed_forward.value
            text = f"model.feed_forward={kind}: nanochat's feed-forward has no gate. Use relu2, relu or gelu."
            problems.append(Problem(ProblemCode.unsupported, "model.feed_forward", kind, text))
        return problems or super().problems()

    def make_layers(self) -> list[Layer]:
        return [NanochatLayer(**vars(layer), has_scales=self.layer_scales) for layer in super().make_layers()]

    def parameters(self) -> dict[str, Parameter]:
        parameters = {name: p for name, p in super().parameters().items() if name != "norm.scale"}
        parameters |= self._extra_parameters()
        return dict(sorted(parameters.items(), key=lambda item: item[0].split(".")))

    def arrays(self) -> Arrays:
        arrays = super().arrays()
        for name, p in self._extra_parameters().items():
            arrays.parameters.setdefault(Tensor(p.axes, p.shape, p.config_keys), []).append(name)
        return arrays

    def _extra_parameters(self) -> dict[str, Parameter]:
        """Return the parameters of smear and backout by name, if they are enabled."""
        extra = {}
        if self.smear:
            channels = self.smear_channels
            extra["smear_gate"] = Parameter((None,), (channels,), (None,), group="scalar", float32=True)
            extra["smear_scale"] = _scalar("scalar")
        if self.backout is not None:
            extra["backout_scale"] = _scalar("scalar")
        return extra


def _scalar(group: str) -> Parameter:
    return Parameter((), (), (), group=group, float32=True)
