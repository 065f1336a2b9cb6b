"""The attention block: windowed or full attention with rotary positions and optional global tokens.

Windows and global tokens follow Longformer (arXiv 2004.05150).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from valkyrie.axes import Size
from valkyrie.models.block import ActivationSpec, Block, BlockContext, SavedActivation, Weight, saved, weight
from valkyrie.ops.choices import (
    ALWAYS_DENSE_LENGTH,
    ATTENTION_OUTPUT,
    MAX_WIDE_HEAD_DIM,
    MIN_WIDE_LENGTH,
    WIDE_BLOCK,
    AttentionImpl,
    Bias,
    NormSpan,
    RopeStretch,
    WindowKind,
    Yarn,
)
from valkyrie.problems import Problem, ProblemCode, check_range, nearest_divisor


@dataclass
class Attention(Block):
    """Windowed or full attention.

    Args:
        windows: Number of keys per window, including the token itself (see `valkyrie.ops.attention.pattern`); null is
            full attention. Attention layers cycle through the list, first layer first.
        window_kind: Keys that a window contains.
        dilations: Distance between the keys of a window. Attention layers cycle through the list.
        global_tokens: Number of leading positions that see all positions and are seen by all, as far as `causal`
            allows. They have separate projections.
        rope_theta: Base of the rotary frequencies; null: queries and keys are not rotated.
        rope_layers: Whether queries and keys are rotated. Attention layers cycle through the list.
        bias: Projections that have a bias.
        rope_stretch: Slows down rotary frequencies for long contexts (Llama 3.1).
        yarn: Slows down rotary frequencies for long contexts (gpt-oss). Only one of the two may be set.
        qk_norm: Normalise queries and keys before rotation, in the layers of `rope_layers`.
        qk_norm_scale: Multiply normalised queries and keys by a learned scale (Llama 4: false).
        qk_norm_span: Channels that the norms average over: of each head (Qwen 3, Gemma 3) or of all heads (OLMo 2,
            OLMoE).
        qk_norm_epsilon: Epsilon of the query and key norms.
        impl: Implementation of attention.
        temperature_slope: Slope s of the factor of queries in layers without rotation. At position p, it is
            1 + s * log(1 + floor((p + 1) / interval)) (Llama 4: 0.1).
        temperature_interval: Number of positions with the same factor.
        soft_cap: Bound c of the logits: c * tanh(logit / c) (Gemma 2: 50); null: no bound.
        sinks: Add a learned logit per query head to its softmax sums, so that a head can ignore all keys (gpt-oss). On
            GPUs, attention is then computed by chunks of queries, which is slower than a kernel.
    """

    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 32
    causal: bool = True
    windows: list[int | None] = field(default_factory=lambda: [128])
    window_kind: WindowKind = WindowKind.sliding
    dilations: list[int] = field(default_factory=lambda: [1])
    global_tokens: int = 0
    rope_theta: float | None = 10000.0
    rope_layers: list[bool] = field(default_factory=lambda: [True])
    rope_stretch: RopeStretch = field(default_factory=RopeStretch)
    yarn: Yarn = field(default_factory=Yarn)
    bias: Bias = Bias.none
    qk_norm: bool = False
    qk_norm_scale: bool = True
    qk_norm_span: NormSpan = NormSpan.head
    qk_norm_epsilon: float = 1e-6
    temperature_slope: float = 0.0
    temperature_interval: int = 8192
    soft_cap: float | None = None
    sinks: bool = False
    impl: AttentionImpl = AttentionImpl.auto

    axes = {
        "heads": "query heads",
        "kv_heads": "key and value heads",
        "head_dim": "channels of one head",
    }
    activations = (("batch", "seq", "heads", "head_dim"), ("batch", "seq", "kv_heads", "head_dim"))
    sharded_like = {"kv_heads": "heads"}
    shards_rows_over_embed = True

    module_class = "valkyrie.models.attention_layer:AttentionLayer"

    @property
    def is_causal(self) -> bool:
        """Whether keys after the query are masked."""
        return self.causal

    def problems(self, key: str) -> list[Problem]:
        problems = [
            problem
            for name in ("heads", "kv_heads", "head_dim")
            for problem in check_range(f"{key}.{name}", getattr(self, name), least=1)
        ]
        if not problems and self.heads % self.kv_heads:
            nearest = nearest_divisor(self.heads, self.kv_heads)
            text = (
                f"{key}.heads={self.heads} must be a multiple of {key}.kv_heads={self.kv_heads}. "
                f"Use {key}.kv_heads={nearest}."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.heads", self.heads, text))
        if self.head_dim > 0 and self.head_dim % 2:
            text = (
                f"{key}.head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of channels. "
                f"Use {key}.head_dim={self.head_dim + 1}."
            )
            problems.append(Problem(ProblemCode.unsupported, f"{key}.head_dim", self.head_dim, text))
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            text = (
                f"{key}.windows={self.windows}: list at least one window. Each must be 1 or more, or null for full "
                "attention."
            )
            problems.append(Problem(ProblemCode.malformed, f"{key}.windows", self.windows, text))
        if not self.dilations or any(d < 1 for d in self.dilations):
            text = f"{key}.dilations={self.dilations}: list at least one dilation, each 1 or more."
            problems.append(Problem(ProblemCode.malformed, f"{key}.dilations", self.dilations, text))
        problems += self._pattern_problems(key)
        problems += check_range(f"{key}.global_tokens", self.global_tokens, least=0)
        problems += check_range(f"{key}.temperature_slope", self.temperature_slope, least=0)
        problems += check_range(f"{key}.temperature_interval", self.temperature_interval, least=1)
        problems += check_range(f"{key}.qk_norm_epsilon", self.qk_norm_epsilon, above=0)
        problems += check_range(f"{key}.rope_theta", self.rope_theta, above=0, otherwise="null for no rotation")
        stretch = self.rope_stretch
        if not (stretch.factor >= 1 and 0 < stretch.low <= stretch.high and stretch.context > 0):
            text = (
                f"{key}.rope_stretch: factor={stretch.factor:g} must be at least 1, context={stretch.context} above 0, "
                f"and low={stretch.low:g} above 0 and at most high={stretch.high:g}."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.rope_stretch", text=text))
        problems += yarn_problems(f"{key}.yarn", self.yarn)
        if self.yarn.factor != 1 and stretch.factor != 1:
            text = (
                f"{key}.yarn.factor={self.yarn.factor:g} and {key}.rope_stretch.factor={stretch.factor:g} both slow "
                f"down rotary frequencies. Use {key}.yarn.factor=1 or {key}.rope_stretch.factor=1."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.yarn.factor", self.yarn.factor, text))
        if self.yarn.factor != 1:
            problems += check_range(f"{key}.rope_theta", self.rope_theta, above=1)
        return problems + check_range(f"{key}.soft_cap", self.soft_cap, above=0, otherwise="null for no cap")

    def _pattern_problems(self, key: str) -> list[Problem]:
        """Return the problems of `rope_layers`, of a temperature that no layer has, and of chunked windows."""
        problems = []
        if not self.rope_layers:
            text = (
                f"{key}.rope_layers=[]: list at least one layer. Use {key}.rope_layers=[true] to rotate in all layers."
            )
            problems.append(Problem(ProblemCode.malformed, f"{key}.rope_layers", [], text))
        elif self.temperature_slope and self.rope_theta is not None and all(self.rope_layers):
            text = (
                f"{key}.temperature_slope={self.temperature_slope:g} changes only layers without rotation, but all "
                f"layers rotate. Use {key}.temperature_slope=0, or false for some layers in {key}.rope_layers."
            )
            problems.append(Problem(ProblemCode.conflict, f"{key}.temperature_slope", self.temperature_slope, text))
        if self.window_kind is WindowKind.chunked:
            for name, default in (("dilations", [1]), ("global_tokens", 0)):
                if (value := getattr(self, name)) != default:
                    text = (
                        f"{key}.{name}={value} is not supported with {key}.window_kind=chunked. Use "
                        f"{key}.{name}={default} or {key}.window_kind=sliding."
                    )
                    problems.append(Problem(ProblemCode.conflict, f"{key}.{name}", value, text))
        return problems

    def sizes(self, context: BlockContext) -> dict[str, Size]:
        return {name: Size(getattr(self, name), f"{context.key}.{name}") for name in self.axes}

    def weights(self, context: BlockContext) -> dict[str, Weight]:
        """Return the query, key, value and output projections, with biases, sinks and QK-norm scales if enabled.

        With `global_tokens`, adds a second set of query, key and value weights.
        """
        query_projection, key_projection = weight("embed", "heads", "head_dim"), weight("embed", "kv_heads", "head_dim")
        weights = {"out": weight("embed", "heads", "head_dim", output_first=True)}
        if self.bias is Bias.all:
            weights["out_bias"] = weight("embed", group="vector")
        if self.sinks:
            weights["sinks"] = weight("heads", group="vector")
        for prefix in ("local", "globals")[: 1 + bool(self.global_tokens)]:
            weights |= {f"{prefix}.query": query_projection}
            weights |= {f"{prefix}.{name}": key_projection for name in ("key", "value")}
            if self.bias is not Bias.none:
                weights |= {f"{prefix}.query_bias": weight("heads", "head_dim", group="vector")}
                key_bias = weight("kv_heads", "head_dim", group="vector")
                weights |= {f"{prefix}.{name}_bias": key_bias for name in ("key", "value")}
            if self.qk_norm and self.qk_norm_scale and self.is_rotated(context):
                for name, heads in (("query", "heads"), ("key", "kv_heads")):
                    axes = ("head_dim",) if self.qk_norm_span is NormSpan.head else (heads, "head_dim")
                    weights[f"{prefix}.{name}_norm.scale"] = weight(*axes, group="vector")
        return weights

    def variant(self, context: BlockContext) -> Hashable:
        return self.window(context), self.dilation(context), self.is_rotated(context)

    def is_rotated(self, context: BlockContext) -> bool:
        """Return whether `rope_layers` rotates queries and keys of this layer. Ignores `rope_theta`."""
        return self.rope_layers[context.number % len(self.rope_layers)]

    def window(self, context: BlockContext) -> int | None:
        """Return the window of this layer, or None for no limit.

        It is the number of keys that a query sees on each side (if causal, only before it), including its own position,
        or the length of a chunk.
        """
        return self.windows[context.number % len(self.windows)]

    def dilation(self, context: BlockContext) -> int:
        """Return the distance between neighbouring keys in this layer's window."""
        return self.dilations[context.number % len(self.dilations)]

    def flops(self, context: BlockContext, seq: int) -> float:
        """Return forward FLOPs per token of the projections, the logits, and the weighted sums of values."""
        key_flops = 4 * context.embed * self.head_dim * self.kv_heads
        projection_flops = 4 * context.embed * self.head_dim * (self.heads + self.kv_heads)
        projection_flops += key_flops * bool(self.global_tokens)
        return projection_flops + 4.0 * self.head_dim * self.scores(context, seq)

    def scores(self, context: BlockContext, seq: int) -> float:
        """Return the number of logits per token: keys per query, times heads."""
        return self.heads * self._mean_keys(context, seq)

    def dense_scores(self, context: BlockContext, seq: int) -> float:
        """Return the number of logits per token of dense attention, which also computes the masked ones."""
        is_dense = self.impl is AttentionImpl.dense or (self.impl is AttentionImpl.auto and seq <= ALWAYS_DENSE_LENGTH)
        return float(self.heads * seq) if is_dense else 0.0

    def uses_wide_blocks(self, context: BlockContext, seq: int) -> bool:
        has_kernel = self.impl in (AttentionImpl.auto, AttentionImpl.kernel)
        is_wide = seq >= MIN_WIDE_LENGTH and seq % WIDE_BLOCK == 0 and self.head_dim <= MAX_WIDE_HEAD_DIM
        return has_kernel and is_wide and self._is_full(context, seq)

    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        """Return the projections, the kernel's output and softmax sums, and the inputs of rotation and norms.

        Compiled steps save one copy of the kernel's output and no inputs of rotation.
        """
        norm_inputs = int(self.qk_norm and self.is_rotated(context))
        return [
            saved("heads", "head_dim", name="query", product=True),
            saved("kv_heads", "head_dim", name="key", product=True),
            saved("kv_heads", "head_dim", name="value", product=True),
            saved("heads", "head_dim", name=ATTENTION_OUTPUT),
            saved("heads", name=ATTENTION_OUTPUT, float32=True),
            saved("embed", name="out", product=True, result=True),
            saved("heads", "head_dim", count=2, saved_ratio=0.5),
            saved("kv_heads", "head_dim", count=2, saved_ratio=0.0),
            saved("embed"),
            saved("embed", count=2, float32=True, saved_ratio=1.25),
            saved("heads", "head_dim", count=norm_inputs, float32=True),
            saved("kv_heads", "head_dim", count=norm_inputs, float32=True),
        ]

    def neighbours(self, context: BlockContext) -> list[tuple[SavedActivation, int | None]]:
        """Return the keys and the values, each with the number of positions read beyond a shard (None: all)."""
        window = self.window(context)
        positions = None if window is None else (window - 1) * self.dilation(context)
        return [
            (activation, positions)
            for activation in self.saved_activations(context)
            if activation.name in ("key", "value")
        ]

    def exchanged_halves(self, context: BlockContext) -> list[SavedActivation]:
        has_kernel = self.impl in (AttentionImpl.auto, AttentionImpl.kernel)
        if not (has_kernel and self.causal and self.window(context) is None and self.dilation(context) == 1):
            return []
        names = ("query", ATTENTION_OUTPUT)
        return [saved for saved in self.saved_activations(context) if saved.name in names and not saved.float32]

    def _is_full(self, context: BlockContext, seq: int) -> bool:
        """Return whether no window is masked: attention covers the sequence, or whole chunks computed one by one."""
        window = self.window(context)
        return window is None or (self.window_kind is WindowKind.chunked and (seq % window == 0 or seq <= window))

    def _mean_keys(self, context: BlockContext, seq: int) -> float:
        """Return the mean number of keys that a query sees, including global tokens.

        Key n of a window is n dilations before the query, if that position exists. A causal window W of dilation d over
        `seq` positions thus has W - d W(W-1)/(2 seq) keys on average.
        """
        dilation = self.dilation(context)
        window = min(self.window(context) or seq, -(-seq // dilation))
        if self.window_kind is WindowKind.chunked:
            lengths = [window] * (seq // window) + [seq % window]
            return sum(n * (n + 1) / 2 if self.causal else n * n for n in lengths) / seq
        one_side = window - dilation * window * (window - 1) / (2 * seq)
        return float(min(seq, (one_side if self.causal else 2 * one_side - 1) + self.global_tokens))


def yarn_problems(key: str, yarn: Yarn) -> list[Problem]:
    """Return the problems of the settings of YaRN. `key` is that of `yarn`."""
    problems = check_range(f"{key}.factor", yarn.factor, least=1, otherwise="1 for unchanged frequencies")
    problems += check_range(f"{key}.context", yarn.context, least=1)
    problems += check_range(f"{key}.low", yarn.low, above=0)
    problems += check_range(f"{key}.mscale", yarn.mscale, least=0)
    problems += check_range(f"{key}.mscale_all_dim", yarn.mscale_all_dim, least=0)
    if yarn.high <= yarn.low:
        text = f"{key}.high={yarn.high:g} must be above {key}.low={yarn.low:g}."
        problems.append(Problem(ProblemCode.conflict, f"{key}.high", yarn.high, text))
    return problems
