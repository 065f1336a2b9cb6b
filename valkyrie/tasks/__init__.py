"""Tasks: the loss to minimise, its metrics, and the state carried from step to step.

Each model family has a default task, which `task=` overrides. A task is a module with a dataclass `Config` derived from
`Task`, in this package or in a folder of the user (`valkyrie/tasks/README.md`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from valkyrie.axes import Axes, Shard
from valkyrie.data.config import TEXT, DataConfig
from valkyrie.extensions import Families
from valkyrie.problems import Problem

if TYPE_CHECKING:
    import jax
    import numpy as np

    from valkyrie.data.tokenizer import Tokenizer
    from valkyrie.models import Model
    from valkyrie.models.layers import Checkpoint


class Array(NamedTuple):
    """Shape, dtype name and logical axes of an array in a batch or in the carry."""

    shape: tuple[int, ...]
    dtype: str
    axes: Axes


class BatchLoss(NamedTuple):
    """Result of a task's loss on a batch.

    `objective` and `sums` are sums over the batch, not means, so that they can be added over microbatches and devices.
    Divided by `sums["weight"]`, they become means.

    Args:
        objective: The quantity to differentiate.
        sums: Sums of the metrics, by name.
        carry: The arrays for the next step, as `Task.carry` describes them.
    """

    objective: jax.Array
    sums: dict[str, jax.Array]
    carry: Any


@dataclass
class Task(ABC):
    """Base of the config of every task. Import JAX only in methods that compute: runs are checked before JAX loads.

    Args:
        name: the name of the YAML in `conf/task`.
        family: the module that defines the task.
    """

    data_kind: ClassVar[str] = TEXT
    """Kind of data that the task trains on (`valkyrie.data.config`)."""
    needs_key: ClassVar[bool] = False
    """Whether a training step needs random numbers in addition to those of dropout."""

    name: str
    family: str

    @property
    def is_text(self) -> bool:
        """Whether the data is text, so that the task has a tokenizer and the model can generate."""
        return self.data_kind == TEXT

    def problems(self, model: Model, seq: int) -> list[Problem]:
        """Return every reason why this model cannot be trained on sequences of `seq` positions. Empty by default."""
        return []

    def data_problems(self, model: Model, seq: int, data: DataConfig) -> list[Problem]:
        """Return every reason why this model cannot be trained on `data`, judging by the beginning of the data."""
        return []

    @abstractmethod
    def batch(self, batch: int, seq: int) -> dict[str, Array]:
        """Return the shape, dtype and axes of each array in a global batch, by name. The first dimension is `batch`."""

    def carry(self, model: Model, compute: str, batch: int, seq: int) -> dict[str, Array]:
        """Return the shape, dtype and axes of each array carried from step to step, by name. Empty by default.

        These arrays start as zeros. They belong to the whole batch, so a task that has them does not support
        microbatches. `compute` is the name of the model's compute dtype.
        """
        return {}

    @abstractmethod
    def random_batch(
        self, batch: int, seq: int, vocab_size: int, seed: int, places: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return the rows with indices `places` of a random global batch.

        The same seed gives the same batch. No target is masked out of the loss.
        """

    @abstractmethod
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
        """Compute the loss of a training batch.

        Args:
            module: The model with its parameters.
            batch: The arrays of the batch, as `Task.batch` describes them.
            carry: The arrays from the previous step, as `Task.carry` describes them, or None if there are none.
            shard: Shards activations by their logical axes.
            checkpoint: Applies the rematerialisation policy to a block.
            key: Random key for dropout and for random choices of the task, or None if the step needs neither.
        """

    @abstractmethod
    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Convert the sums of a step to the logged metrics: `loss`, `tokens` and others."""

    def references(self, tokenizer: Tokenizer | None, vocab_rows: int) -> Any:
        """Return constant arrays that `evaluate` needs for every batch; `()` by default.

        Args:
            tokenizer: The tokenizer of the data, or None if the data is not text.
            vocab_rows: Number of rows of the model's token embedding, including padding.
        """
        return ()

    @abstractmethod
    def evaluate(
        self, module: Any, batch: dict[str, jax.Array], references: Any, *, shard: Shard
    ) -> dict[str, jax.Array]:
        """Return metrics summed over an evaluation batch, such as the total loss.

        `references` is the result of `Task.references`. The sums of all batches are added and passed to
        `evaluation`.
        """

    @abstractmethod
    def evaluation(self, sums: dict[str, float]) -> dict[str, float]:
        """Convert the sums over all evaluation batches to the logged metrics. All names start with `eval_`."""

    @abstractmethod
    def describe(self, evaluation: dict[str, float]) -> str:
        """Return one line for the user with the main metrics of an evaluation (the result of `evaluation`)."""


TASKS = Families("task.family", "valkyrie.tasks", Task)
"""Tasks by name, the choices of `task.family`: modules with a dataclass `Config` derived from `Task`."""
