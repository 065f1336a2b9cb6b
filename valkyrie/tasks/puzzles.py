"""Puzzles: the model predicts all cells of an answer at once and refines it over several steps, until it halts.

Every batch has a new puzzle for each row. A row that has halted starts the new puzzle. Any other row ignores it and
continues with its current puzzle. A puzzle therefore takes several optimizer steps, and the current puzzle of each row
is part of the train state.

Only functions that compute import JAX, because runs are checked before JAX loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from valkyrie.axes import Shard
from valkyrie.data.config import PUZZLES, DataConfig
from valkyrie.data.sources.puzzles import PuzzleConfig
from valkyrie.models.families import trm
from valkyrie.problems import Problem, ProblemCode
from valkyrie.tasks import Array, BatchLoss, Task

if TYPE_CHECKING:
    import jax
    import numpy as np

    from valkyrie.models.layers import Checkpoint

    Batch = dict[str, jax.Array]


class PuzzleLosses(NamedTuple):
    """Losses and accuracy of each puzzle in a batch. All arrays are [rows].

    Args:
        answer: mean cross-entropy of labelled cells, in nats.
        halt: binary cross-entropy of halting, in nats. 0 without labelled cells.
        exact: whether there are labelled cells and all of them are right.
        cell_accuracy: share of labelled cells that are right.
        labelled_count: number of labelled cells.
    """

    answer: jax.Array
    halt: jax.Array
    exact: jax.Array
    cell_accuracy: jax.Array
    labelled_count: jax.Array


def puzzle_losses(answers: Any, labels: jax.Array) -> PuzzleLosses:
    """Return the losses of each puzzle. The target of halting is whether all labelled cells are right.

    `answers` has `logits` [rows, cells, values] and `halt_logits` [rows]. `labels` are [rows, cells]; cells with a
    negative label are ignored.
    """
    import jax
    import jax.numpy as jnp

    from valkyrie.ops.stablemax import stablemax_cross_entropy

    is_labelled = labels >= 0
    labelled_count = is_labelled.sum(-1)
    correct_count = (is_labelled & (answers.logits.argmax(-1) == labels)).sum(-1)
    has_labels, divisor = labelled_count > 0, jnp.maximum(labelled_count, 1)
    exact = has_labels & (correct_count == labelled_count)
    nats = stablemax_cross_entropy(answers.logits, labels).sum(-1) / divisor
    halt = jax.nn.softplus(answers.halt_logits) - answers.halt_logits * exact
    return PuzzleLosses(nats, jnp.where(has_labels, halt, 0.0), exact, correct_count / divisor, labelled_count)


@dataclass
class Config(Task):
    """Refines answers until the model halts or for `max_steps` steps. Losses are averaged over puzzles with labels."""

    data_kind: ClassVar[str] = PUZZLES
    needs_key: ClassVar[bool] = True

    name: str = "puzzles"
    family: str = "puzzles"

    def problems(self, model: Any, seq: int) -> list[Problem]:
        """Return a problem if the model is not recursive, or if its MLP mixer has weights for another `seq`."""
        if not isinstance(model, trm.Config):
            text = (
                f"task={self.name} trains only models of model.family=trm, and model={model.name} is not one. "
                "Use model=trm_mlp, or leave out task."
            )
            return [Problem(ProblemCode.unsupported, "model", model.name, text)]
        if model.has_attention or seq == model.context:
            return []
        text = (
            f"seq={seq} must equal model.context={model.context} with model.mixer=mlp. Leave out seq, and use "
            f"model.context={seq}."
        )
        return [Problem(ProblemCode.conflict, "seq", seq, text)]

    def data_problems(self, model: Any, seq: int, data: DataConfig) -> list[Problem]:
        """Return a problem unless `seq` is the number of cells and the model has enough values and identifiers."""
        assert isinstance(data, PuzzleConfig), "data of this kind"
        shape = data.shape()
        needed = {"vocab_size": shape.vocab_size, "puzzles": shape.identifier_count}
        settings = {f"model.{key}": count for key, count in needed.items() if getattr(model, key) < count}
        if seq != shape.cell_count:  # `seq` follows `model.context` unless it is set
            settings = {"model.context" if seq == model.context else "seq": shape.cell_count} | settings
        if not settings:
            return []
        text = (
            f"data={data.name} has puzzles of {shape.cell_count} cells with {shape.vocab_size} values and "
            f"{shape.identifier_count} identifiers, but model={model.name} is for {seq} cells, {model.vocab_size} "
            f"values and {model.puzzles} identifiers. Use {' '.join(f'{key}={n}' for key, n in settings.items())}."
        )
        return [Problem(ProblemCode.conflict, "data", data.name, text)]

    def batch(self, batch: int, seq: int) -> dict[str, Array]:
        """Return the shape, dtype and axes of `inputs` and `labels` (per cell) and `puzzles` (identifier per row)."""
        cells = Array((batch, seq), "int32", ("batch", "seq"))
        return {"inputs": cells, "labels": cells, "puzzles": Array((batch,), "int32", ("batch",))}

    def carry(self, model: Any, compute: str, batch: int, seq: int) -> dict[str, Array]:
        """Return the shape, dtype and axes of the arrays that hold the state of each row.

        `inputs`, `labels` and `puzzles` are the row's current puzzle. `high` and `low` are the hidden states of the
        model. `steps` is the number of steps spent on the current puzzle. `running` is whether the row continues with
        the current puzzle in the next step. `last_steps` is the number of steps of the row's last finished puzzle, or 0
        if there is none.
        """
        shape = (batch, seq + model.puzzle_tokens, model.embed)
        states = Array(shape, compute, ("batch", "seq", "embed"))
        rows = {"steps": "int32", "last_steps": "int32", "running": "bool"}
        row_arrays = {name: Array((batch,), dtype, ("batch",)) for name, dtype in rows.items()}
        return {**self.batch(batch, seq), "high": states, "low": states, **row_arrays}

    def random_batch(
        self, batch: int, seq: int, vocab_size: int, seed: int, places: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return the rows with indices `places` of a global batch of random cells. Every cell has a label."""
        import numpy as np

        cells = [np.random.default_rng([seed, place]).integers(1, vocab_size, (2, seq)) for place in places]
        inputs, labels = np.stack(cells, axis=1).astype(np.int32)
        return {"inputs": inputs, "labels": labels, "puzzles": np.zeros(len(cells), np.int32)}

    def loss(
        self,
        module: Any,
        batch: Batch,
        carry: Any,
        *,
        shard: Shard,
        checkpoint: Checkpoint,
        key: jax.Array | None,
    ) -> BatchLoss:
        """Refine every row's answer by one step. Returns the objective, sums over the batch, and the new carry.

        The objective is the sum of the answer losses and half the halting losses of all rows.
        """
        import jax.numpy as jnp

        assert key is not None, "a training step has a key"
        running, (count, cells) = carry["running"], batch["inputs"].shape

        def select(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(running.reshape(-1, *[1] * (old.ndim - 1)), old, new)

        current = {name: select(carry[name], new) for name, new in batch.items()}
        initial = module.initial_states(count, cells, shard=shard)
        states = initial._replace(high=select(carry["high"], initial.high), low=select(carry["low"], initial.low))
        x = module.embed(current["inputs"], current["puzzles"], shard=shard)
        answers = module(states, x, shard=shard, checkpoint=checkpoint)
        steps = jnp.where(running, carry["steps"], 0) + 1
        halted = _halting_mask(module.config, answers.halt_logits, steps, key)
        losses = puzzle_losses(answers, current["labels"])
        last_steps = jnp.where(halted, steps, carry["last_steps"])
        objective = losses.answer.sum() + 0.5 * losses.halt.sum()
        sums = {
            "loss": objective,
            "weight": (losses.labelled_count > 0).sum(dtype=jnp.float32),
            "answer_loss": losses.answer.sum(),
            "exact": losses.exact.sum(dtype=jnp.float32),
            "cells": losses.cell_accuracy.sum(),
            "labelled": losses.labelled_count.sum(dtype=jnp.float32),
            "last_steps": last_steps.sum(dtype=jnp.float32),
            "finished": (last_steps > 0).sum(dtype=jnp.float32),
        }
        states = {"high": answers.states.high, "low": answers.states.low}
        row_states = {"steps": steps, "last_steps": last_steps, "running": ~halted}
        return BatchLoss(objective, sums, {**current, **states, **row_states})

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the metrics of a step. Means are over puzzles with labels, except for `halting_steps`.

        `loss` is the mean objective per puzzle and `answer_loss` the mean cross-entropy in nats per cell.
        `exact_accuracy` is the share of solved puzzles and `cell_accuracy` the share of correct cells. `tokens` is the
        number of labelled cells. `halting_steps` is the mean number of steps of each row's last finished puzzle.
        """
        import jax.numpy as jnp

        puzzles = jnp.maximum(sums["weight"], 1.0)
        return {
            "loss": sums["loss"] / puzzles,
            "tokens": sums["labelled"],
            "answer_loss": sums["answer_loss"] / puzzles,
            "exact_accuracy": sums["exact"] / puzzles,
            "cell_accuracy": sums["cells"] / puzzles,
            "halting_steps": sums["last_steps"] / jnp.maximum(sums["finished"], 1.0),
        }

    def evaluate(self, module: Any, batch: Batch, references: Any, *, shard: Shard) -> dict[str, jax.Array]:
        """Return sums over the puzzles of a batch after `max_steps` steps each. Ignores puzzles without labels.

        `weight` counts the puzzles, `loss` sums their losses, `exact` counts the solved ones, and `cells` sums the
        share of correct cells. `steps` sums the first step at which the model would halt, or `max_steps` if it would
        not.
        """
        import jax
        import jax.numpy as jnp

        config, (count, cells) = module.config, batch["inputs"].shape
        x = module.embed(batch["inputs"], batch["puzzles"], shard=shard)

        def step(carried: tuple[Any, jax.Array], number: jax.Array) -> tuple[Any, None]:
            states, halting_step = carried
            answers = module(states, x, shard=shard)
            return (
                answers.states,
                jnp.minimum(halting_step, jnp.where(answers.halt_logits > 0, number, config.max_steps)),
            ), None

        start = module.initial_states(count, cells, shard=shard), jnp.full((count,), config.max_steps, jnp.int32)
        numbers = jnp.arange(1, config.max_steps, dtype=jnp.int32)
        (states, halting_step), _ = jax.lax.scan(step, start, numbers)
        answers = module(states, x, shard=shard)
        losses = puzzle_losses(answers, batch["labels"])
        counted = losses.labelled_count > 0
        weights = counted.astype(jnp.float32)
        return {
            "weight": weights.sum(),
            "loss": (weights * (losses.answer + 0.5 * losses.halt)).sum(),
            "exact": (weights * losses.exact).sum(),
            "cells": (weights * losses.cell_accuracy).sum(),
            "steps": (weights * halting_step).sum(),
        }

    def evaluation(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the means of `loss`, `exact_accuracy`, `cell_accuracy` and `halting_steps`, and the number of puzzles.

        All names start with `eval_`.
        """
        names = {"loss": "loss", "exact": "exact_accuracy", "cells": "cell_accuracy", "steps": "halting_steps"}
        values = {f"eval_{name}": sums[key] / sums["weight"] for key, name in names.items()}
        return {**values, "eval_puzzles": sums["weight"]}

    def describe(self, evaluation: dict[str, float]) -> str:
        """Return one line with the loss, the shares of solved puzzles and correct cells, and the mean steps."""
        exact, cells = (100 * evaluation[f"eval_{name}_accuracy"] for name in ("exact", "cell"))
        return (
            f"validation loss {evaluation['eval_loss']:.4f}, {exact:.1f}% of {evaluation['eval_puzzles']:,.0f} puzzles "
            f"solved, {cells:.1f}% of cells right, halting after {evaluation['eval_halting_steps']:.1f} steps"
        )


def _halting_mask(config: trm.Config, halt_logits: jax.Array, steps: jax.Array, key: jax.Array) -> jax.Array:
    """Return a mask of the rows that halt: after `max_steps`, or when the model halts.

    In each call, a random share of rows (`exploration`) may not halt before a random step from 2 to `max_steps`.
    """
    import jax
    import jax.numpy as jnp

    at_limit = steps >= config.max_steps
    if config.max_steps == 1:
        return at_limit
    explore_key, least_key = jax.random.split(key)
    explores = jax.random.bernoulli(explore_key, config.exploration, steps.shape)
    min_steps = jax.random.randint(least_key, steps.shape, 2, config.max_steps + 1)
    return (at_limit | (halt_logits > 0)) & (steps >= jnp.where(explores, min_steps, 0))
