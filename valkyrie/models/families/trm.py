"""The Tiny Recursive Model (arXiv 2510.04871), which applies a small network many times to improve an answer.

Every position has two states, z_H (the answer) and z_L (the reasoning). By default, they pass through the same two
layers 21 times per supervision step, and the gradient flows through the last seven passes. It is not a language model:
its task is `puzzles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from valkyrie.axes import SHARED_AXES, Arrays, Parameter, Size, Tensor
from valkyrie.models.block import BLOCK_INPUT, SavedActivation, tensor
from valkyrie.ops.choices import ATTENTION_OUTPUT
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics


class MixerKind(Enum):
    """Mixer of positions: full attention with rotary positions, or a gated MLP over the length."""

    attention = "attention"
    mlp = "mlp"


@dataclass
class Config:
    """A recursive model for puzzles of `context` cells.

    A supervision step runs `high_cycles` cycles. Each cycle has `low_cycles` updates of z_L and one of z_H. Only the
    last cycle is differentiated.

    Args:
        vocab_size: Number of values of a cell, including 0 (padding).
        embed: Width of the network.
        layers: Number of layers of the network.
        mlp: Hidden channels of the gated MLP over the width.
        length_mlp: Hidden channels of the gated MLP over the length, with `mixer: mlp`.
        puzzles: Number of puzzle identifiers, each with a learned embedding.
        puzzle_embed: Length of the embedding of an identifier.
        puzzle_tokens: Number of positions for the embedding of the identifier, before the cells.
        max_steps: Maximum supervision steps per puzzle.
        exploration: Probability, in each step, that a puzzle may not halt before a random step from 2 to `max_steps`.
    """

    task: ClassVar[str] = "puzzles"
    family: str = "trm"
    name: str = "trm"
    context: int = 81
    tokenizer: str = "none"
    vocab_size: int = 11
    embed: int = 512
    layers: int = 2
    mixer: MixerKind = MixerKind.attention
    heads: int = 8
    head_dim: int = 64
    mlp: int = 1536
    length_mlp: int = 512
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    puzzles: int = 1
    puzzle_embed: int = 512
    puzzle_tokens: int = 16
    high_cycles: int = 3
    low_cycles: int = 6
    max_steps: int = 16
    exploration: float = 0.1
    dropout: float = 0.0

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding of cell values, which has no padding: `vocab_size`."""
        return self.vocab_size

    @property
    def has_attention(self) -> bool:
        """Whether attention mixes positions, not an MLP over the length. `seq` may then differ from `context`."""
        return self.mixer is MixerKind.attention

    @property
    def causal(self) -> bool:
        """Whether no position depends on later ones: always False."""
        return False

    @property
    def position_count(self) -> int:
        """Number of positions of the states: the puzzle identifier, then the cells."""
        return self.puzzle_tokens + self.context

    @property
    def forward_passes(self) -> int:
        """Number of forward passes of the network per supervision step."""
        return self.high_cycles * (self.low_cycles + 1)

    def problems(self) -> list[Problem]:
        minimums = dict.fromkeys(("context", "embed", "layers", "mlp", "puzzles", "high_cycles", "low_cycles"), 1)
        minimums |= {"max_steps": 1, "vocab_size": 2, "puzzle_tokens": 1, "puzzle_embed": 1}
        minimums |= {"heads": 1, "head_dim": 1} if self.has_attention else {"length_mlp": 1}
        problems = [
            problem
            for name, number in minimums.items()
            for problem in check_range(f"model.{name}", getattr(self, name), least=number)
        ]
        if self.has_attention and self.head_dim > 0 and self.head_dim % 2:
            text = (
                f"model.head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of channels. "
                f"Use model.head_dim={self.head_dim + 1}."
            )
            problems.append(Problem(ProblemCode.unsupported, "model.head_dim", self.head_dim, text))
        if self.puzzle_embed > self.puzzle_tokens * self.embed:
            capacity = self.puzzle_tokens * self.embed
            text = (
                f"model.puzzle_embed={self.puzzle_embed} must be at most model.puzzle_tokens={self.puzzle_tokens} "
                f"times model.embed={self.embed}. Use model.puzzle_embed={capacity} or below."
            )
            problems.append(Problem(ProblemCode.conflict, "model.puzzle_embed", self.puzzle_embed, text))
        problems += check_range("model.exploration", self.exploration, least=0, most=1)
        if self.dropout:
            text = f"model.dropout={self.dropout}: recursive models do not support dropout. Use model.dropout=0."
            problems.append(Problem(ProblemCode.unsupported, "model.dropout", self.dropout, text))
        problems += check_range("model.norm_epsilon", self.norm_epsilon, least=0)
        return problems + check_range("model.rope_theta", self.rope_theta, above=0)

    def parameters(self) -> dict[str, Parameter]:
        sizes = self._sizes
        dimensions: dict[str, tuple[str | int, ...]] = {
            "embedding": (self.vocab_size, "embed"),
            "head": (self.vocab_size, "embed"),
            "halt.weight": (2, "embed"),
            "halt.bias": (2,),
        }
        for i in range(self.layers):
            dimensions |= {f"layer_{i}.{name}": dims for name, dims in self._layer_dimensions().items()}
        parameters = {name: _parameter(dims, sizes) for name, dims in dimensions.items()}
        for name in ("initial_high", "initial_low"):
            parameters[name] = _parameter(("embed",), sizes, group="fixed")
        table = Tensor((None, "embed"), (self.puzzles, self.puzzle_embed), ("model.puzzles", "model.puzzle_embed"))
        parameters["puzzle_embedding"] = Parameter(**vars(table), group="puzzle", float32=True)
        return dict(sorted(parameters.items(), key=lambda item: item[0].split(".")))

    def arrays(self) -> Arrays:
        """Return the arrays that a layout shards.

        The rows of tables and the `length_*` parameters (the MLP over the length) are never sharded. All layers have
        the same shapes, so the parameters of the first one represent all, with names such as `layer.up`.
        """
        parameters: dict[Tensor, list[str]] = {}
        for name, parameter in self.parameters().items():
            short_name = name.replace("layer_0.", "layer.", 1)
            if not name.startswith("layer_") or short_name != name:
                parameters.setdefault(Tensor(parameter.axes, parameter.shape, parameter.config_keys), []).append(
                    short_name
                )
        axes = {**SHARED_AXES, "embed": "channels of a position", "mlp": "hidden channels of a feed-forward or gate"}
        constrained: list[tuple[str, ...]] = [("embed",), ("mlp",)]
        if self.has_attention:
            axes |= {"heads": "attention heads", "head_dim": "channels of one head"}
            constrained.append(("heads", "head_dim"))
        activations = {}
        for dims in constrained:
            activation = tensor(("batch", "seq", *dims), self._sizes)
            full_length = replace(activation, shape=(0, self.position_count, *activation.shape[2:]))
            keyed_tensor = replace(full_length, config_keys=(None, "model.puzzle_tokens", *activation.config_keys[2:]))
            activations[keyed_tensor] = [f"activation (batch, seq, {', '.join(dims)})"]
        return Arrays(axes, parameters, activations)

    def parameter_count(self) -> int:
        """Return the number of learned parameters, without the initial states and the puzzle embeddings."""
        return sum(p.size for p in self.parameters().values() if p.group == "matrix")

    def flops_per_token(self, seq: int) -> float:
        """Return forward FLOPs per cell of a supervision step, for all passes of the network and the logits."""
        per_position = self._network_flops(seq + self.puzzle_tokens)
        return self.forward_passes * per_position * self._positions_per_cell(seq) + 2.0 * self.embed * self.vocab_size

    def step_flops_per_token(self, seq: int) -> float:
        """Return FLOPs per cell of a training step, forward and backward.

        The backward pass covers only the last cycle and the logits, and costs twice their forward FLOPs.
        """
        backward = (self.low_cycles + 1) * self._network_flops(seq + self.puzzle_tokens) * self._positions_per_cell(seq)
        return self.flops_per_token(seq) + 2.0 * (backward + 2.0 * self.embed * self.vocab_size)

    def saved_activations(self) -> list[SavedActivation]:
        """Estimate the activations of the last cycle that the backward pass needs."""
        count = (self.low_cycles + 1) * self.layers
        return [replace(activation, count=activation.count * count) for activation in self._layer_activations()]

    def working_activations(self) -> list[SavedActivation]:
        """Estimate the activations that exist while one layer runs, and the logits."""
        logits = SavedActivation(tensor(("batch", "seq", self.vocab_size), self._sizes), 4, float32=True)
        return [*self._layer_activations(), logits]

    def build(self, *, numerics: Numerics, key: Array) -> Any:
        """Build the module, an instance of `RecursiveModel`; imports JAX."""
        return resolve_name("valkyrie.models.recursive_model:RecursiveModel")(self, numerics=numerics, key=key)

    @property
    def _sizes(self) -> dict[str, Size]:
        names = ("embed", "mlp", "heads", "head_dim")
        return {name: Size(getattr(self, name), f"model.{name}") for name in names}

    def _layer_dimensions(self) -> dict[str, tuple[str | int, ...]]:
        """Return the logical axis or length of each dimension of a layer's matrices."""
        mlp_dims = dict.fromkeys(("down", "gate", "up"), ("embed", "mlp"))
        if self.has_attention:
            return {**mlp_dims, **dict.fromkeys(("key", "out", "query", "value"), ("embed", "heads", "head_dim"))}
        length_mlp_dims = (self.position_count, self.length_mlp)
        return {**mlp_dims, **{f"length_{name}": length_mlp_dims for name in ("down", "gate", "up")}}

    def _network_flops(self, position_count: int) -> float:
        """Return forward FLOPs per position of one pass of the network over `position_count` positions."""
        feed_forward_flops = 6.0 * self.embed * self.mlp
        head_channels = self.heads * self.head_dim
        attention_flops = 8.0 * self.embed * head_channels + 4.0 * head_channels * position_count
        length_mlp_flops = 6.0 * self.embed * self.length_mlp
        return self.layers * (feed_forward_flops + (attention_flops if self.has_attention else length_mlp_flops))

    def _positions_per_cell(self, seq: int) -> float:
        """Return the ratio of positions to cells, above 1 because of the puzzle identifier."""
        return (seq + self.puzzle_tokens) / seq

    def _layer_activations(self) -> list[SavedActivation]:
        """Return the activations that the backward pass of one layer needs. Norms keep their input in float32."""

        def saved(*dims: str | int, count: int = 1, float32: bool = False, name: str | None = None) -> SavedActivation:
            is_product = name is not None and name not in (BLOCK_INPUT, ATTENTION_OUTPUT)
            activation = tensor(("batch", "seq", *dims), self._sizes)
            return SavedActivation(activation, count, float32, name=name, product=is_product)

        activations = [saved("embed", name=BLOCK_INPUT), saved("embed", count=4, float32=True), saved("embed", count=2)]
        activations += [
            saved("mlp", name="up"),
            saved("mlp", name="gate"),
            saved("mlp", count=2),
            saved("embed", name="down"),
        ]
        if self.has_attention:
            activations += [saved("heads", "head_dim", name=name) for name in ("query", "key", "value")]
            activations += [
                saved("heads", "head_dim", count=3),
                saved("heads", self.position_count, count=2, float32=True),
            ]
            return [*activations, saved("embed", name="out")]
        # The MLP over the length has `length_mlp` hidden values per channel, instead of one per position.
        hidden_per_position = self.length_mlp / self.position_count
        return [*activations, replace(saved("embed", count=4), count=4 * hidden_per_position)]


def _parameter(dims: tuple[str | int, ...], sizes: Mapping[str, Size], group: str = "matrix") -> Parameter:
    return Parameter(**vars(tensor(dims, sizes)), group=group)
