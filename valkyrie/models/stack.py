"""The config of a language model made of layers. Computes parameters, FLOPs and activations from those of its blocks.

A family derives from `Stack` and has a field for each of its blocks. `block_pattern` and `feed_forward_pattern` contain
the names of these fields.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from valkyrie.axes import LAYERS, SHARED_AXES, Arrays, Parameter, Size, Tensor
from valkyrie.extensions import refuse_earlier_names
from valkyrie.models.block import (
    BLOCK_INPUT,
    DENSE,
    AuxiliaryTerm,
    Block,
    BlockContext,
    Boundary,
    Layer,
    Residual,
    SavedActivation,
    add_prefix,
    tensor,
    vector_parameter,
)
from valkyrie.models.feed_forward import FeedForward, Nonlinearity
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics


_EARLIER_NAMES = {
    "stack": "make_layers",
    "known_blocks": "mixer_blocks",
    "known_feed_forwards": "feed_forward_blocks",
    "kept": "saved_activations",
    "working": "working_activations",
    "longest": "max_seq",
}

LOSS_SEQUENCES = 4
"""A device that computes the loss of fewer sequences takes more positions at a time: 4 times as many for 1.

Each chunk of positions reads and writes the whole float32 gradient of the unembedding. With 512 tokens per chunk, this
takes half as long as the chunk's matmuls on v5e, and longer than them on v6e. With 2,048, most of it overlaps.
"""
MAX_LAYERS = 4096
"""Maximum number of layers, above that of any real model. It bounds the time to build the list of layers."""


@dataclass
class Stack:
    """A language model: a token embedding, layers with a mixer and a feed-forward each, and a head.

    Args:
        context: Sequence length in training, unless `seq` is set.
        vocab_size: Number of tokens.
        vocab_multiple: The embedding has `vocab_size` rows, rounded up to a multiple of this, to split evenly.
        block_pattern: Names of the mixers, which are fields of the family's config, repeated for `layers` layers.
        feed_forward: Nonlinearity of the dense feed-forward, with `mlp` hidden channels.
        feed_forward_after: Names of the mixers whose layers have a feed-forward; null: all.
        feed_forward_pattern: Names of the feed-forwards, repeated like `block_pattern`: `feed_forward` (the dense one),
            or fields of the family's config.
        residual: `parallel` applies mixer and feed-forward to the same normed input and adds their outputs (GPT-J,
            PaLM).
        embedding_scale: Factor applied to the embeddings (Gemma: the square root of `embed`).
        logits_soft_cap: Bound c of the logits: c * tanh(logit / c) (Gemma 2: 30); null: no bound.
        loss_chunk: The loss computes logits for this many positions of each sequence shard at a time: twice as many if
            a device has two or three sequences at that time, four times as many if it has one (`LOSS_SEQUENCES`).
        z_loss: Weight of the squared log-sum-exp of the logits in the loss.
    """

    task: ClassVar[str] = "next_token"
    module_class: ClassVar[str] = "valkyrie.models.language_model:LanguageModel"
    family: str = "stack"
    name: str = "stack"
    context: int = 128
    tokenizer: str = "bytes"
    vocab_size: int = 257
    vocab_multiple: int = 128
    embed: int = 128
    layers: int = 4
    block_pattern: list[str] = field(default_factory=list)
    feed_forward: Nonlinearity = Nonlinearity.swiglu
    feed_forward_after: list[str] | None = None
    feed_forward_pattern: list[str] = field(default_factory=lambda: [DENSE])
    mlp: int = 512
    norm_epsilon: float = 1e-5
    residual: Residual = Residual.sequential
    embedding_scale: float = 1.0
    logits_soft_cap: float | None = None
    dropout: float = 0.0
    tie_embeddings: bool = True
    document_boundary: Boundary = Boundary.reset
    loss_chunk: int = 512
    z_loss: float = 0.0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_earlier_names(cls, _EARLIER_NAMES)

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        multiple = max(self.vocab_multiple, 1)  # `problems` reports values below 1
        return -(-self.vocab_size // multiple) * multiple

    @property
    def mixer_blocks(self) -> dict[str, Block]:
        """The mixers that `block_pattern` can refer to, by name."""
        return {name: block for name, block in self._block_fields().items() if not block.pointwise}

    @property
    def feed_forward_blocks(self) -> dict[str, Block]:
        """The feed-forwards that `feed_forward_pattern` can refer to, by name."""
        pointwise = {name: block for name, block in self._block_fields().items() if block.pointwise}
        return {DENSE: self._dense_feed_forward} | pointwise

    @property
    def mixer_kinds(self) -> list[str]:
        """Name of the mixer in every layer, first to last."""
        return [self.block_pattern[i % len(self.block_pattern)] for i in range(self.layers) if self.block_pattern]

    @property
    def feed_forward_kinds(self) -> list[str]:
        """Name of the feed-forward of every layer, first to last. Unused in layers without a feed-forward."""
        pattern = self.feed_forward_pattern
        return [pattern[i % len(pattern)] for i in range(self.layers) if pattern]

    @property
    def used_mixers(self) -> dict[str, Block]:
        """The mixers that the layers use, by name."""
        mixers = self.mixer_blocks
        return {kind: mixers[kind] for kind in self.block_pattern[: max(self.layers, 0)] if kind in mixers}

    @property
    def used_feed_forwards(self) -> dict[str, Block]:
        """The feed-forwards that the layers use, by name."""
        feed_forwards = self.feed_forward_blocks
        return {kind: feed_forwards[kind] for kind in self.feed_forward_kinds if kind in feed_forwards}

    @property
    def period(self) -> int:
        """Number of layers after which the patterns repeat."""
        feed_forward_period = len(self.feed_forward_pattern)
        # A pattern with an entry for every layer, such as a few dense layers before experts, does not repeat.
        if feed_forward_period >= self.layers:
            feed_forward_period = 1
        return max(1, math.lcm(len(self.block_pattern), feed_forward_period))

    @property
    def causal(self) -> bool:
        """Whether no position depends on later ones. A next-token loss requires this."""
        return all(block.is_causal for block in self.used_mixers.values())

    def problems(self) -> list[Problem]:
        """Return the reasons why this model cannot be built.

        Checks the blocks only if the other settings are valid, and the axes of blocks only if their settings are valid.
        """

        def check(name: str, otherwise: str = "", **bounds: int | float) -> list[Problem]:
            return check_range(f"model.{name}", getattr(self, name), otherwise=otherwise, **bounds)

        positive = ("context", "vocab_size", "vocab_multiple", "embed", "layers", "loss_chunk")
        problems = [problem for name in positive for problem in check(name, least=1)]
        problems += check("layers", most=MAX_LAYERS)
        names = ", ".join(self.mixer_blocks)
        if not self.block_pattern:
            text = f"model.block_pattern is empty. List at least one of {names}."
            problems.append(Problem(ProblemCode.missing, "model.block_pattern", [], text))
        for name in ("block_pattern", "feed_forward_after"):
            unknown_kinds = [kind for kind in dict.fromkeys(getattr(self, name) or []) if kind not in self.mixer_blocks]
            if unknown_kinds:
                unknown_names = ", ".join(unknown_kinds)
                blocks = f"block{'s' * (len(unknown_kinds) > 1)} {unknown_names}"
                text = f"model.{name}: model.family={self.family} has no {blocks}. Choose from {names}."
                problems.append(Problem(ProblemCode.unknown_name, f"model.{name}", unknown_kinds, text))
        unknown_kinds = [
            kind for kind in dict.fromkeys(self.feed_forward_pattern) if kind not in self.feed_forward_blocks
        ]
        if unknown_kinds or not self.feed_forward_pattern:
            key, value = "model.feed_forward_pattern", self.feed_forward_pattern
            names = ", ".join(self.feed_forward_blocks)
            text = f"{key}={value}: list one or more of {names} (the feed-forwards of model.family={self.family})."
            problems.append(Problem(ProblemCode.unknown_name, key, value, text))
        problems += [*check("dropout", least=0, below=1), *check("norm_epsilon", least=0), *check("z_loss", least=0)]
        problems += [*check("embedding_scale", above=0), *check("logits_soft_cap", "null for no cap", above=0)]
        if not problems:
            for kind, block in self.used_mixers.items():
                problems += block.problems(f"model.{kind}")
            layers = self.make_layers()
            for kind, block in self.used_feed_forwards.items():
                if any(kind in layer.blocks for layer in layers):
                    problems += block.problems("model" if kind == DENSE else f"model.{kind}")
        if not problems:
            known_axes, blocks = self._axes(), {kind: pair for layer in layers for kind, pair in layer.blocks.items()}
            for block, context in blocks.values():
                problems += block.axis_problems(context, known_axes)
                block.flops(context, self.context)  # so that a user's block with a wrong result is refused before a run
        return problems

    def make_layers(self) -> list[Layer]:
        """Return the layers, first to last.

        Mixers of the same kind are numbered, so that they can cycle through settings such as windows.
        """
        mixers, feed_forwards, mixer_counts = self.mixer_blocks, self.feed_forward_blocks, Counter[str]()
        layers = []
        for kind, feed_forward_kind in zip(self.mixer_kinds, self.feed_forward_kinds, strict=True):
            context = BlockContext(self.embed, self.layers, mixer_counts[kind], f"model.{kind}", self.vocab_rows)
            has_feed_forward = self.feed_forward_after is None or kind in self.feed_forward_after
            feed_forward = feed_forwards[feed_forward_kind] if has_feed_forward else None
            layers.append(Layer(kind, context, mixers[kind], feed_forward, self.residual, feed_forward_kind))
            mixer_counts[kind] += 1
        return layers

    def segments(self) -> list[tuple[list[Layer], int]]:
        """Return the stack as (group of layers, number of repetitions) pairs, first to last. Each becomes one scan.

        A group has `period` layers. The last group may have fewer.
        """
        layers, period = self.make_layers(), self.period
        groups = [layers[start : start + period] for start in range(0, len(layers), period)]
        equal_groups = groupby(groups, key=lambda group: [layer.variant for layer in group])
        return [(first, 1 + len(rest)) for _, (first, *rest) in equal_groups]

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter by dotted name. Parameters of segments have a leading `layers` axis."""
        parameters = {
            "embedding": self._embedding_table(),
            "norm.scale": vector_parameter("embed", self.embed, "vector"),
        }
        if not self.tie_embeddings:
            parameters["unembedding"] = replace(self._embedding_table(), group="unembedding", output_first=True)
        for i, (group, repeats) in enumerate(self.segments()):
            for j, layer in enumerate(group):
                stacked = {name: _stack_parameter(parameter, repeats) for name, parameter in layer.parameters().items()}
                parameters |= add_prefix(f"segment_{i}.block_{j}", stacked)
        return dict(sorted(parameters.items(), key=lambda item: item[0].split(".")))

    def arrays(self) -> Arrays:
        """Return the arrays that a layout shards. Parameters are named after their block, such as `attention.out`."""
        blocks: list[Block] = [*self.used_mixers.values(), *self.used_feed_forwards.values()]
        sizes = {"embed": Size(self.embed, "model.embed"), "vocab": Size(self.vocab_rows, "model.vocab_multiple")}
        parameters: dict[Tensor, list[str]] = {_as_tensor(self._embedding_table()): ["embedding"]}
        activations = {tensor(("batch", "seq", axis), sizes): [f"activation (batch, seq, {axis})"] for axis in sizes}
        for group, repeats in self.segments():
            for layer in group:
                for name, parameter in layer.parameters().items():
                    names = parameters.setdefault(_as_tensor(_stack_parameter(parameter, repeats)), [])
                    short_name = name.replace("mixer.", f"{layer.kind}.", 1)
                    short_name = short_name.replace("feed_forward.", f"{layer.feed_forward_kind}.", 1)
                    names += [] if short_name in names else [short_name]
                for activation in layer.activations():
                    activations.setdefault(activation, [f"activation ({', '.join(map(str, activation.axes))})"])
        sharded_like = {a: b for block in blocks for a, b in block.sharded_like.items()}
        stack_lengths = tuple(repeats for _, repeats in self.segments())
        dispatched_axes = frozenset(axis for block in blocks for axis in block.dispatches)
        return Arrays(self._axes(), parameters, activations, sharded_like, stack_lengths, dispatched_axes)

    def parameter_count(self) -> int:
        """Return the number of learned parameters."""
        return sum(parameter.size for parameter in self.parameters().values())

    def flops_per_token(self, seq: int) -> float:
        """Return forward FLOPs per token over sequences of `seq` tokens, for all blocks and the logits.

        These are model FLOPs (PaLM, arXiv 2204.02311, appendix B): they do not include rematerialisation, and callers
        count the backward pass as twice the forward pass.
        """
        return sum(layer.flops(seq) for layer in self.make_layers()) + 2.0 * self.embed * self.vocab_rows

    def step_flops_per_token(self, seq: int) -> float:
        """Return FLOPs per token of a training step: the forward pass, plus twice as many for the backward pass."""
        return 3.0 * self.flops_per_token(seq)

    def saved_activations(self) -> list[SavedActivation]:
        """Estimate the activations that the backward pass needs, over all blocks."""
        return [
            replace(
                activation,
                count=0 if activation.needed_for == BLOCK_INPUT and layer is group[-1] else activation.count * repeats,
            )
            for group, repeats in self.segments()
            for i, layer in enumerate(group)
            for activation in layer.saved_activations(is_first=i == 0)
        ]

    def working_activations(self) -> list[SavedActivation]:
        """Estimate the activations that exist while the first group of layers runs, and the logits of a loss chunk."""
        vocab = {"vocab": Size(self.vocab_rows, "model.vocab_multiple")}
        logits = SavedActivation(tensor(("batch", "seq", "vocab"), vocab), 2, float32=True, positions=self.loss_chunk)
        group, _ = self.segments()[0]
        return [*(activation for layer in group for activation in layer.saved_activations(is_first=False)), logits]

    @property
    def auxiliary(self) -> dict[str, AuxiliaryTerm]:
        """Weight of each auxiliary value, and number of layers that return it, by `KIND/NAME`."""
        layers = [layer.auxiliary for layer in self.make_layers()]
        counts = Counter(name for values in layers for name in values)
        return {name: AuxiliaryTerm(values[name], counts[name]) for values in layers for name in values}

    def build(self, *, numerics: Numerics, key: Array) -> Any:
        """Build the module, an instance of `module_class`; imports JAX."""
        return resolve_name(self.module_class)(self, numerics=numerics, key=key)

    @property
    def _dense_feed_forward(self) -> FeedForward:
        return FeedForward(self.feed_forward, self.mlp)

    def _axes(self) -> dict[str, str]:
        """Return the logical axes of the model with their descriptions."""
        axes = {**SHARED_AXES, "embed": "the residual stream", "vocab": "rows of the token embedding"}
        for block in (*self.used_mixers.values(), *self.used_feed_forwards.values()):
            axes |= block.axes
        return axes

    def _block_fields(self) -> dict[str, Block]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Block)}

    def _embedding_table(self) -> Parameter:
        axes, shape = ("vocab", "embed"), (self.vocab_rows, self.embed)
        return Parameter(axes, shape, ("model.vocab_multiple", "model.embed"), group="embedding")


def _as_tensor(parameter: Parameter) -> Tensor:
    return Tensor(parameter.axes, parameter.shape, parameter.config_keys)


def _stack_parameter(parameter: Parameter, repeats: int) -> Parameter:
    return replace(
        parameter,
        axes=(LAYERS, *parameter.axes),
        shape=(repeats, *parameter.shape),
        config_keys=("model.layers", *parameter.config_keys),
    )
