"""Tasks: what a batch is, the loss to minimise, the metrics, and what is carried from step to step.

A model's configuration names its task. A task of this package is a module of it; any other name is a module of the
user's that can be imported. Either has a class `Task`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from valkyrie.axes import Axes, Shard

if TYPE_CHECKING:
    import jax
    import numpy as np

    from valkyrie.data.forms import Batches
    from valkyrie.data.tokenizer import Tokenizer
    from valkyrie.models import Model
    from valkyrie.models.layers import Checkpoint


class Array(NamedTuple):
    """An array of a batch, or of what is carried: its shape, the name of its dtype, and its logical axes."""

    shape: tuple[int, ...]
    dtype: str
    axes: Axes


class BatchLoss(NamedTuple):
    """What a batch comes to: the objective to differentiate, sums over the batch, and what the next step is handed.

    Objective and sums are sums, not means, so that microbatches and devices add up; `sums["weight"]` is what both are
    divided by.
    """

    objective: jax.Array
    sums: dict[str, jax.Array]
    carry: Any


@runtime_checkable
class Task(Protocol):
    """What a run and the trainer ask of a task. `name` is the module's.

    `needs_causal` says that a position must see none after it, as where it is to predict the next; `needs_key` that a
    training step draws random numbers, whether the model has dropout or not; `is_text` that its data is text, which a
    tokenizer reads and the model writes.
    """

    name: str
    needs_causal: bool
    needs_key: bool
    is_text: bool

    def of(self, model: Model, compute: str) -> Task:
        """Return the task for a model and the dtype it computes in: itself, where no array of it follows from them."""
        ...

    def problems(self, model: Model, seq: int) -> list[str]:
        """Return why it cannot train this model on sequences of this length."""
        ...

    def batch(self, batch: int, seq: int) -> dict[str, Array]:
        """Return the arrays of a global batch, first dimension `batch`."""
        ...

    def carry(self, batch: int, seq: int) -> dict[str, Array]:
        """Return what is carried from one step to the next, zeros before the first; empty where nothing is.

        It is of the whole batch, so a task that carries anything takes no microbatches.
        """
        ...

    def loader(
        self, prepared: Any, split: str, *, batch: int, seq: int, seed: int, repeat: bool, places: Sequence[int]
    ) -> Batches:
        """Return batches of a split, of each the rows of the global batch at `places`: those of this process."""
        ...

    def random_batch(
        self, batch: int, seq: int, vocab_size: int, seed: int, places: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return the rows at `places` of a batch of random values, every target counted, which follow from the seed."""
        ...

    def loss(
        self,
        module: Any,
        batch: dict[str, jax.Array],
        carry: Any,
        *,
        shard: Shard,
        checkpoint: Checkpoint,
        key: jax.Array | None,
    ) -> BatchLoss:
        """Return what a training batch comes to; `key`, where there is one, is for dropout and what the task draws."""
        ...

    def metrics(self, sums: dict[str, Any]) -> dict[str, Any]:
        """Return what is logged of a step's sums: `loss`, `tokens` and whatever else the task has."""
        ...

    def references(self, tokenizer: Tokenizer | None, vocab_rows: int) -> Any:
        """Return arrays that `evaluate` needs beside the batch, the same for all batches."""
        ...

    def evaluate(
        self, module: Any, batch: dict[str, jax.Array], references: Any, *, shard: Shard
    ) -> dict[str, jax.Array]:
        """Return sums over an evaluation batch."""
        ...

    def evaluation(self, sums: dict[str, float]) -> dict[str, float]:
        """Return what is logged of the sums over all evaluation batches; each name begins with `eval_`."""
        ...

    def describe(self, evaluation: dict[str, float]) -> str:
        """Return an evaluation in a few words, as it is printed."""
        ...


def task_of(name: str) -> Task:
    """Return the task of a name; ValueError names the known ones."""
    return _class_of(name)()


@cache
def _class_of(name: str) -> Callable[[], Task]:
    own = [module.name for module in iter_modules(__path__)]
    if name not in own and find_spec(name) is None:
        raise ValueError(f"the task {name} is not known. Known: {', '.join(own)}, or the name of a module of yours.")
    return import_module(f"{__name__}.{name}" if name in own else name).Task
