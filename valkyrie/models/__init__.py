"""The interface of models (`Model`), and the registry of model families.

A family is a Python module with a class `Config` that derives from `Stack` or implements `Model`. Built-in families are
modules of `valkyrie.models.families`. Any other family name is the name of a module to import.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from valkyrie.axes import Arrays, Parameter
from valkyrie.extensions import Families
from valkyrie.models.attention import Attention
from valkyrie.models.block import SavedActivation
from valkyrie.models.feed_forward import FeedForward
from valkyrie.problems import Problem

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.models.block import Block, BlockContext, Layer
    from valkyrie.ops.linear import Numerics


@runtime_checkable
class Model(Protocol):
    """Interface of a model config. Only `build` imports JAX.

    Attributes:
        family: Name of the family, such as `gpt`.
        name: Name of the model, usually that of its YAML file in `conf/model`.
        task: Name of the default task.
        context: Sequence length in training, unless `seq` is set.
        tokenizer: Name of the tokenizer, or `none`.
        vocab_size: Number of tokens, or of values of a puzzle cell.
        dropout: Probability of dropout.
    """

    family: str
    name: str
    task: ClassVar[str]
    context: int
    tokenizer: str
    vocab_size: int
    dropout: float

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the token embedding, at least `vocab_size`."""
        ...

    @property
    def causal(self) -> bool:
        """Whether no position depends on later ones."""
        ...

    def problems(self) -> list[Problem]:
        """Return every reason why the model cannot be built, with the keys to change."""
        ...

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter by dotted name, in the order of the leaves of the built module."""
        ...

    def arrays(self) -> Arrays:
        """Return the parameters and activations that a layout shards, with their logical axes."""
        ...

    def parameter_count(self) -> int:
        """Return the number of learned parameters."""
        ...

    def flops_per_token(self, seq: int) -> float:
        """Return forward FLOPs per token over sequences of `seq` tokens."""
        ...

    def step_flops_per_token(self, seq: int) -> float:
        """Return forward and backward FLOPs per token of a training step, over sequences of `seq` tokens."""
        ...

    def saved_activations(self) -> list[SavedActivation]:
        """Estimate the activations that are saved for the backward pass if nothing is recomputed."""
        ...

    def working_activations(self) -> list[SavedActivation]:
        """Estimate the activations that exist only temporarily, while one group of layers or the loss runs."""
        ...

    def build(self, *, numerics: Numerics, key: Array) -> Any:
        """Build the Flax module, with parameters initialised from `key`. Imports JAX."""
        ...


FAMILIES = Families("model.family", "valkyrie.models.families", interface=Model)


@runtime_checkable
class LayeredModel(Model, Protocol):
    """A model with layers that run one after another, such as a `Stack`."""

    embed: int

    def segments(self) -> list[tuple[list[Layer], int]]:
        """Return groups of layers, first to last, each with its number of repetitions."""
        ...


def layer_blocks(model: Model) -> list[tuple[Block, BlockContext]]:
    """Return the blocks of one repetition of each group of layers, with their contexts. Empty for other models."""
    groups = model.segments() if isinstance(model, LayeredModel) else []
    return [pair for layers, _ in groups for layer in layers for pair in layer.blocks.values()]


def sequence_problems(model: Model, seq: int) -> list[Problem]:
    """Return the problems of a model's blocks with sequences of `seq` tokens, without repetitions."""
    problems = (block.sequence_problems(context, seq) for block, context in layer_blocks(model))
    return list(dict.fromkeys(itertools.chain.from_iterable(problems)))


def is_dense_transformer(model: Model) -> bool:
    """Return whether every layer of a model is attention, with a dense feed-forward or none."""
    return isinstance(model, LayeredModel) and all(
        isinstance(layer.mixer, Attention) and isinstance(layer.feed_forward, FeedForward | None)
        for layers, _ in model.segments()
        for layer in layers
    )


def activation_names(model: Model) -> list[str]:
    """Return the names of the activations that `remat` may save."""
    names = (activation.name for activation in model.saved_activations())
    return list(dict.fromkeys(name for name in names if name is not None))


def known_axes() -> dict[str, str]:
    """Return a dict from the logical axes of all families, including the user's, to their descriptions."""
    return _axis_descriptions((*FAMILIES.names(), *FAMILIES.user_names()))


@cache
def _axis_descriptions(families: tuple[str, ...]) -> dict[str, str]:
    classes = map(FAMILIES.config_class, families)
    return {axis: description for config in classes for axis, description in config().arrays().axes.items()}
