"""Decides what every model is: an NNX module whose parameters know their logical axes and optimizer group.

A model is single-device code. It is handed a `Shard`, a checkpoint (rematerialisation) wrapper and a batch, and never
sees a mesh. Shapes, axes and groups are known before an array exists: `describe` reads them off `jax.eval_shape`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from valkyrie.axes import Axes, Shard
from valkyrie.ops.linear import Numerics

BLOCK_INPUT, QUERY, KEY, VALUE, ATTENTION_OUT = KEPT = (
    "block_input",
    "query",
    "key",
    "value",
    "attention_out",
)
"""The activations that blocks name (`checkpoint_name`), so that a rematerialisation policy may keep them."""

Checkpoint = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a block so that its backward pass keeps less (`jax.checkpoint` with a policy), or returns it as it is."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter before it exists: shape, dtype, logical axes (one per dimension), and optimizer group."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes
    group: str

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        total = 1
        for n in self.shape:
            total *= n
        return total


class Losses(NamedTuple):
    """Sums over the tokens of a batch, in nats; `objective_sum` includes the z-loss, `loss_sum` does not.

    `byte_nats` holds every token's own loss, unweighted, for bits per byte.
    """

    objective_sum: Float[Array, ""]
    loss_sum: Float[Array, ""]
    weight_sum: Float[Array, ""]
    per_token: Float[Array, "batch seq"]


@runtime_checkable
class LanguageModel(Protocol):
    """What the trainer asks of a model, whichever family it is."""

    def losses(self, batch: dict[str, Array], *, shard: Shard, checkpoint: Checkpoint, key: Array | None) -> Losses:
        """Return the loss sums of a batch (`tokens`, `targets`, `segment_ids`, `weights`: batch by seq)."""
        ...

    def init_state(self, batch: int, max_len: int) -> Any:
        """Return the state of generation before the first token, for sequences of at most `max_len`."""
        ...

    def step(self, tokens: Int[Array, " batch"], state: Any) -> tuple[Float[Array, "batch vocab"], Any]:
        """Return the logits after one more token and the state that follows it; equal to the parallel form."""
        ...


def parameter(value: Array, axes: Axes, group: str = "matrix") -> nnx.Param:
    """Return a parameter with its logical axes and its optimizer group: `matrix`, `vector` or `ssm`."""
    assert value.ndim == len(axes), f"{value.shape} against {axes}"
    return nnx.Param(value, logical_axes=axes, group=group)


def describe(module: nnx.Module) -> Any:
    """Return the tree of `ParameterSpec`s of a module, concrete or abstract; stacked ones get a leading `layers`."""
    state = nnx.state(module)
    flat = {}
    for path, variable in nnx.to_flat_state(state):
        value, metadata = variable.get_value(), variable.get_metadata()
        axes = metadata["logical_axes"]
        stacked = ("layers",) * (value.ndim - len(axes))
        flat[path] = ParameterSpec(tuple(value.shape), value.dtype, (*stacked, *axes), metadata["group"])
    return _nested(flat)


def flatten(tree: Any) -> dict[str, Any]:
    """Return a nested dict's leaves by dotted path, in order."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= {f"{key}.{path}": leaf for path, leaf in flatten(value).items()}
        else:
            out[str(key)] = value
    return out


def parameters_of(module: nnx.Module) -> Any:
    """Return the parameters of a module as a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(module))


class Assembly:
    """A family's module without its arrays: makes parameters from a key, and a module from parameters."""

    def __init__(self, module: Callable[..., nnx.Module], config: Any, numerics: Numerics) -> None:
        self._make = lambda key: module(config, numerics=numerics, key=key)
        self._abstract = jax.eval_shape(self._make, jax.random.key(0))
        self._graph, self._state = nnx.split(self._abstract)
        self.specs = describe(self._abstract)
        """The nested dict of `ParameterSpec`s."""

    def init(self, key: Array) -> Any:
        """Return fresh parameters as a nested dict; the same for the same key on any mesh."""
        return parameters_of(self._make(key))

    def module(self, parameters: Any) -> Any:
        """Return the module holding these parameters."""
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(self._graph, state)


def _nested(flat: dict[tuple[Any, ...], Any]) -> Any:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = leaf
    return tree


def normal(key: Array, shape: tuple[int, ...], deviation: float, dtype: str) -> Array:
    """Return normal numbers of this deviation, drawn in float32."""
    return (deviation * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
