"""The attention block of nanochat (karpathy/nanochat): norms after rotation, and value embeddings by token."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from valkyrie.axes import Parameter
from valkyrie.models.attention import Attention
from valkyrie.models.block import ActivationSpec, BlockContext, Weight, saved, weight
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.trees import override_text

GATE_CHANNELS = 12
"""Maximum number of input channels that the gate of a value embedding reads, as in nanochat."""


@dataclass
class NanochatAttention(Attention):
    """Attention that normalises queries and keys after rotation, without parameters, and scales them by `qk_gain`.

    With `value_embeddings`, every second layer, counted back from the last one, has a table with a value vector for
    each token. The layer multiplies these vectors by 3 * sigmoid(gate), with one gate per key head, and adds them to
    the projected values (ResFormer, arXiv 2410.17897).
    """

    windows: list[int | None] = field(default_factory=lambda: [None])
    rope_theta: float | None = 100000.0
    qk_gain: float = 1.2
    qk_norm_epsilon: float = 1.1920929e-07
    value_embeddings: bool = True

    module_class = "valkyrie.models.nanochat_attention_layer:NanochatAttentionLayer"

    def problems(self, key: str) -> list[Problem]:
        problems = super().problems(key)
        if self.qk_norm:
            text = (
                f"{key}.qk_norm=true: nanochat already normalises queries and keys, without parameters. "
                f"Use {key}.qk_norm=false."
            )
            problems.append(Problem(ProblemCode.unsupported, f"{key}.qk_norm", True, text))
        if self.global_tokens:
            text = (
                f"{key}.global_tokens={self.global_tokens}: nanochat has no global tokens. Use {key}.global_tokens=0."
            )
            problems.append(Problem(ProblemCode.unsupported, f"{key}.global_tokens", self.global_tokens, text))
        if not all(self.rope_layers):
            text = (
                f"{key}.rope_layers={override_text(self.rope_layers)}: nanochat rotates in all layers. "
                f"Use {key}.rope_layers=[true]."
            )
            problems.append(Problem(ProblemCode.unsupported, f"{key}.rope_layers", self.rope_layers, text))
        for name, scale, neutral in (
            ("yarn.factor", self.yarn.factor, 1),
            ("temperature_slope", self.temperature_slope, 0),
        ):
            if scale != neutral:
                text = (
                    f"{key}.{name}={scale:g} scales queries, but nanochat normalises them afterwards. "
                    f"Use {key}.{name}={neutral}."
                )
                problems.append(Problem(ProblemCode.unsupported, f"{key}.{name}", scale, text))
        return problems + check_range(f"{key}.qk_gain", self.qk_gain, above=0)

    def has_value_embedding(self, context: BlockContext) -> bool:
        """Return whether this layer has a table of value embeddings.

        With `value_embeddings`, every second layer has one, counted back from the last one. Otherwise none has.
        """
        return self.value_embeddings and context.number % 2 == (context.layers - 1) % 2

    def variant(self, context: BlockContext) -> Hashable:
        return super().variant(context), self.has_value_embedding(context)

    def weights(self, context: BlockContext) -> dict[str, Weight]:
        gate = {"value_gate": weight("kv_heads", gate_channels(context), output_first=True)}
        return super().weights(context) | (gate if self.has_value_embedding(context) else {})

    def parameters(self, context: BlockContext) -> dict[str, Parameter]:
        """Return its parameters. The table of value embeddings is sharded like the token embedding."""
        if not self.has_value_embedding(context):
            return super().parameters(context)
        shape, config_keys = (
            (context.vocab, self.kv_heads * self.head_dim),
            ("model.vocab_multiple", f"{context.key}.kv_heads"),
        )
        table = Parameter(("vocab", "embed"), shape, config_keys, group="value_embedding")
        return super().parameters(context) | {"value_embedding": table}

    def flops(self, context: BlockContext, seq: int) -> float:
        return super().flops(context, seq) + 2.0 * gate_channels(context) * self.kv_heads * self.has_value_embedding(
            context
        )

    def saves(self, context: BlockContext) -> list[ActivationSpec]:
        return [
            *super().saves(context),
            saved("heads", name="query", float32=True),
            saved("kv_heads", name="key", float32=True),
            saved("kv_heads", "head_dim", name="value", count=int(self.has_value_embedding(context))),
        ]


def gate_channels(context: BlockContext) -> int:
    """Return the number of channels that the gate of a value embedding reads: `GATE_CHANNELS`, but at most `embed`."""
    return min(GATE_CHANNELS, context.embed)
