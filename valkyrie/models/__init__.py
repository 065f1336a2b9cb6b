"""Models: kinds of blocks, the stack they stand in, and the families, each a module of its own with a `Config`.

A family of this package is a module of `valkyrie.models.families`; any other name is a module of the user's that can be
imported. Its `Config` derives from `Stack`, or has the methods of `Model`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from valkyrie.axes import Arrays, Parameter
from valkyrie.extensions import Families
from valkyrie.models.block import Kept

if TYPE_CHECKING:
    from jaxtyping import Array

    from valkyrie.ops.linear import Numerics

FAMILIES = Families("model.family", "valkyrie.models.families")


@runtime_checkable
class Model(Protocol):
    """What a run asks of its model's configuration, whichever family it is. Nothing here needs JAX but `build`."""

    family: str
    name: str
    task: ClassVar[str]
    context: int
    tokenizer: str
    vocab_size: int
    dropout: float

    @property
    def vocab_rows(self) -> int:
        """Rows of the token embedding."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a position sees none after it."""
        ...

    def problems(self) -> list[str]:
        """Return every reason why it cannot be built, in the words of the command line."""
        ...

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter by dotted name, in the order of the built model's."""
        ...

    def arrays(self) -> Arrays:
        """Return what a layout splits of it."""
        ...

    def parameter_count(self) -> int:
        """Return how many numbers it learns."""
        ...

    def flops_per_token(self, seq: int) -> float:
        """Return forward FLOPs per token over sequences of `seq` tokens."""
        ...

    def step_flops_per_token(self, seq: int) -> float:
        """Return FLOPs per token of a training step, forward and backward, over sequences of `seq` tokens."""
        ...

    def kept(self) -> list[Kept]:
        """Return what the backward pass needs from the forward pass, by name where it has one; an estimate."""
        ...

    def working(self) -> list[Kept]:
        """Return what exists beside that while a part of the model is worked on; an estimate."""
        ...

    def build(self, *, numerics: Numerics, key: Array) -> Any:
        """Return the module; imports JAX."""
        ...


def activation_names(model: Model) -> list[str]:
    """Return the names of the activations that `remat` may keep of a model."""
    return list(dict.fromkeys(kept.name for kept in model.kept() if kept.name is not None))


@cache
def known_axes() -> dict[str, str]:
    """Return the logical axes of all families of this package, with what each counts."""
    axes: dict[str, str] = {}
    for family in FAMILIES.names():
        axes |= FAMILIES.config_class(family)().arrays().axes
    return axes
