"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): keys and values are products of a short latent.

A token has one latent, from which every head computes its key and value, and one rotated key that all heads share.
Generation caches only these two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from valkyrie.axes import BATCH, SEQ, Parameter, Size
from valkyrie.models.attention import yarn_problems
from valkyrie.models.block import ActivationSpec, Block, BlockContext, SavedActivation, Weight, saved, tensor, weight
from valkyrie.ops.choices import (
    ALWAYS_DENSE_LENGTH,
    ATTENTION_OUTPUT,
    MAX_WIDE_HEAD_DIM,
    MIN_WIDE_LENGTH,
    WIDE_BLOCK,
    AttentionImpl,
    Yarn,
)
from valkyrie.problems import Problem, ProblemCode, check_range


@dataclass
class LatentAttention(Block):
    """Causal attention with compressed keys and values.

    A head's query and key have `nope_dim` channels that are not rotated, and `rope_dim` channels that are. Its value
    has `value_dim` channels. All kernels but cuDNN's accept values with other channels than keys, so nothing is padded
    beyond the lanes of a TPU: 192 channels of queries and keys take the time and memory of 256. On GPUs, attention is
    computed by chunks of queries, which is slower than a kernel.

    Args:
        heads: Number of heads.
        nope_dim: Channels of a query or key without rotation, per head.
        rope_dim: Rotated channels of a query, per head, and of the key that all heads share.
        value_dim: Channels of a value, per head.
        latent: Channels of the latent of keys and values.
        query_latent: Channels of the latent of queries; null: queries are a product of the layer's input.
        rope_theta: Base of the rotary frequencies.
        yarn: Slows down rotary frequencies for long contexts.
        impl: Implementation of attention.
    """

    heads: int = 4
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    latent: int = 64
    query_latent: int | None = None
    rope_theta: float = 10000.0
    yarn: Yarn = field(default_factory=Yarn)
    impl: AttentionImpl = AttentionImpl.auto

    axes = {
        "heads": "query heads",
        "head_dim": "channels of one head",
        "nope_dim": "channels of a key that are not rotated",
        "rope_dim": "rotated channels of a key that heads share",
        "value_dim": "channels of a value",
        "latent": "channels of the latent of keys and values",
        "query_latent": "channels of the latent of queries",
    }
    activations = (("batch", "seq", "heads", "head_dim"), ("batch", "seq", "heads", "value_dim"))
    small_axes = ("latent", "query_latent", "rope_dim")
    shards_rows_over_embed = True

    module_class = "valkyrie.models.latent_attention_layer:LatentAttentionLayer"

    @property
    def query_name(self) -> str:
        """Name of the projection to queries: from their latent, or from the layer's input."""
        return "query" if self.query_latent is None else "expanded_query"

    @property
    def head_dim(self) -> int:
        """Channels of a query or key."""
        return self.nope_dim + self.rope_dim

    def problems(self, key: str) -> list[Problem]:
        names = ("heads", "nope_dim", "rope_dim", "value_dim", "latent")
        problems = [p for name in names for p in check_range(f"{key}.{name}", getattr(self, name), least=1)]
        otherwise = "null for queries without a latent"
        problems += check_range(f"{key}.query_latent", self.query_latent, least=1, otherwise=otherwise)
        if self.rope_dim > 0 and self.rope_dim % 2:
            text = (
                f"{key}.rope_dim={self.rope_dim} must be even: rotary embeddings rotate pairs of channels. "
                f"Use {key}.rope_dim={self.rope_dim + 1}."
            )
            problems.append(Problem(ProblemCode.unsupported, f"{key}.rope_dim", self.rope_dim, text))
        problems += check_range(f"{key}.rope_theta", self.rope_theta, above=1)
        return problems + yarn_problems(f"{key}.yarn", self.yarn)

    def sizes(self, context: BlockContext) -> dict[str, Size]:
        """Return the lengths of the axes. That of `query_latent` is 0 without a latent of queries."""
        key = context.key
        lengths = {name: getattr(self, name) or 0 for name in self.axes}
        # Two settings add up to head_dim.
        return {name: Size(n, f"{key}.{'nope_dim' if name == 'head_dim' else name}") for name, n in lengths.items()}

    def weights(self, context: BlockContext) -> dict[str, Weight]:
        """Return the projections to latents, their norms, the projections from latents to heads, and the output's.

        The input of a projection from a latent has the logical axis `embed` (see `parameters`).
        """
        weights = {self.query_name: weight("embed", "heads", "head_dim")}
        if self.query_latent is not None:
            weights |= {
                "query_latent": weight("embed", "query_latent"),
                "query_latent_norm.scale": weight("query_latent", group="vector"),
            }
        return weights | {
            "latent": weight("embed", "latent"),
            "latent_norm.scale": weight("latent", group="vector"),
            "rope_key": weight("embed", "rope_dim"),
            "key": weight("embed", "heads", "nope_dim"),
            "value": weight("embed", "heads", "value_dim"),
            "out": weight("embed", "heads", "value_dim", output_first=True),
        }

    def parameters(self, context: BlockContext) -> dict[str, Parameter]:
        """Return its parameters. Inputs that are latents are sharded like `embed`, so that FSDP splits all matrices."""
        parameters = super().parameters(context)
        inputs = {"key": ("latent", self.latent), "value": ("latent", self.latent)}
        if self.query_latent is not None:
            inputs[self.query_name] = "query_latent", self.query_latent
        for name, (setting, length) in inputs.items():
            parameter = parameters[name]
            parameters[name] = replace(
                parameter,
                shape=(length, *parameter.shape[1:]),
                config_keys=(f"{context.key}.{setting}", *parameter.config_keys[1:]),
            )
        return parameters

    def flops(self, context: BlockContext, seq: int) -> float:
        """Return forward FLOPs per token of the projections, the logits, and the weighted sums of values."""
        products = sum(p.size for p in self.parameters(context).values() if p.group == "matrix")
        return 2.0 * products + 2.0 * (self.head_dim + self.value_dim) * self.scores(context, seq)

    def scores(self, context: BlockContext, seq: int) -> float:
        """Return the number of logits per token: mean number of keys per query, times heads."""
        return self.heads * (seq + 1) / 2

    def dense_scores(self, context: BlockContext, seq: int) -> float:
        """Return the number of logits per token of dense attention, which also computes the masked ones."""
        is_dense = self.impl is AttentionImpl.dense or (self.impl is AttentionImpl.auto and seq <= ALWAYS_DENSE_LENGTH)
        return float(self.heads * seq) if is_dense else 0.0

    def lane_padding(self, context: BlockContext, lanes: int) -> float:
        widths = (self.head_dim, self.value_dim)
        return sum(-(-width // lanes) * lanes for width in widths) / sum(widths)

    def uses_wide_blocks(self, context: BlockContext, seq: int) -> bool:
        is_wide = seq >= MIN_WIDE_LENGTH and seq % WIDE_BLOCK == 0 and self.head_dim <= MAX_WIDE_HEAD_DIM
        return self._may_use_kernel and is_wide

    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        """Return the projections, the kernel's keys, output and softmax sums, and the inputs of rotation and norms."""
        query_latent = []
        if self.query_latent is not None:
            query_latent = [
                saved("query_latent", name="query_latent", product=True),
                saved("query_latent"),
                saved("query_latent", float32=True),
            ]
        return [
            saved("heads", "head_dim", name="query", product=True),
            *query_latent,
            saved("latent", name="latent", product=True),
            saved("rope_dim", name="rope_key", product=True),
            saved("heads", "nope_dim", name="key", product=True),
            saved("heads", "value_dim", name="value", product=True),
            saved("heads", "value_dim", name=ATTENTION_OUTPUT),
            saved("heads", name=ATTENTION_OUTPUT, float32=True),
            saved("embed", name="out", product=True, result=True),
            saved("heads", "head_dim", count=2),
            saved("heads", "value_dim"),
            saved("latent"),
            saved("latent", float32=True),
            saved("embed"),
            saved("embed", count=2, float32=True),
        ]

    def neighbours(self, context: BlockContext) -> list[tuple[SavedActivation, int | None]]:
        """Return the keys and the values of all positions. Shards of the sequence do not gather latents instead."""
        sizes = self._sizes(context)
        dims = {"key": "head_dim", "value": "value_dim"}
        return [
            (SavedActivation(tensor((BATCH, SEQ, "heads", dim), sizes), 1, name=name), None)
            for name, dim in dims.items()
        ]

    def exchanged_halves(self, context: BlockContext) -> list[SavedActivation]:
        if not self._may_use_kernel:
            return []
        names = ("query", ATTENTION_OUTPUT)
        return [saved for saved in self.saved_activations(context) if saved.name in names and not saved.float32]

    @property
    def _may_use_kernel(self) -> bool:
        return self.impl in (AttentionImpl.auto, AttentionImpl.kernel)
