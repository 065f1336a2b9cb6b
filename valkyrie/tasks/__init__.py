"""Tasks: the loss to minimise, its metrics, and what is carried from step to step.

A model family names the task it is trained on unless `task=` chooses another. A task is a module with a dataclass
`Config` derived from `Task`, in this package or in a folder of the user's (`valkyrie/tasks/README.md`).
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
    """An array of a batch or of the carry: shape, dtype name, and logical axes."""

    shape: tuple[int, ...]
    dtype: str
    axes: Axes


class BatchLoss(NamedTuple):
    """The objective to differentiate, summed metrics, and the carry for the next step.

    Objective and sums are sums, not means, so that microbatches and devices add up; `sums["weight"]` is what both are
    divided by.
    """

    objective: jax.Array
    sums: dict[str, jax.Array]
    carry: Any


@dataclass
class Task(ABC):
    """Base of the config of every task. Imports JAX only in what computes: a run is checked before JAX loads.

    Args:
        name: the name of the YAML in `conf/task`.
        family: the module that defines the task.
    """

    data_kind: ClassVar[str] = TEXT
    """The kind of data whose batches it takes (`valkyrie.data.config`)."""
    needs_key: ClassVar[bool] = False
    """Whether a training step draws random numbers, in addition to dropout."""

    name: str
    family: str

    @property
    def is_text(self) -> bool:
        """Whether its data is text, which a tokenizer reads and the model writes."""
        return self.data_kind == TEXT

    def problems(self, model: Model, seq: int) -> list[Problem]:
        """Why it cannot train this model on sequences of `seq` positions."""
        return []

    def data_problems(self, model: Model, seq: int, data: DataConfig) -> list[Problem]:
        """Why it cannot train this model on this data, judged by the beginning of the data."""
        return []

    @abstractmethod
    def batch(self, batch: int, seq: int) -> dict[str, Array]:
        """Arrays of a global batch, first dimension `batch`."""

    def carry(self, model: Model, compute: str, batch: int, seq: int) -> dict[str, Array]:
        """Arrays carried from one step to the next, zeros before the first; empty by default.

        They belong to the whole batch, so a task that carries anything takes no microbatches. `compute`: the dtype in
        which the model computes.
        """
        return {}

    @abstractmethod
    def random_batch(
        self, batch: int, seq: int, vocab_size: int, seed: int, places: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """The rows at `places` of a batch of random values, every target counted, which follow from the seed."""

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
        """Loss of a training batch. `key` is for dropout and for what the task draws, or None without either."""

    @abstractmethod
    def metrics(self, sums: dict[str, Any]) -> dict[str, Any]:
        """What is logged of a step's sums: `loss`, `tokens`, and anything else."""

    def references(self, tokenizer: Tokenizer | None, vocab_rows: int) -> Any:
        """Arrays that `evaluate` needs in addition to the batch, the same for all batches; none by default."""
        return ()

    @abstractmethod
    def evaluate(
        self, module: Any, batch: dict[str, jax.Array], references: Any, *, shard: Shard
    ) -> dict[str, jax.Array]:
        """Sums over an evaluation batch."""

    @abstractmethod
    def evaluation(self, sums: dict[str, float]) -> dict[str, float]:
        """What is logged of the sums over all evaluation batches; each name begins with `eval_`."""

    @abstractmethod
    def describe(self, evaluation: dict[str, float]) -> str:
        """An evaluation in a few words, as it is printed."""


TASKS = Families("task.family", "valkyrie.tasks", Task)
"""Tasks by name."""
