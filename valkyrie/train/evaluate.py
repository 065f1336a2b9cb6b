"""The evaluation of a model: the task's metrics over rows of the validation split, the same rows every time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from valkyrie.data.forms import Dataset
from valkyrie.data.tokenizer import Tokenizer
from valkyrie.train.options import refusals_in_plain_words
from valkyrie.train.program import StepProgram


class Evaluator:
    """Evaluates parameters on the validation split of a dataset."""

    def __init__(self, program: StepProgram, prepared: Dataset, tokenizer: Tokenizer | None) -> None:
        self._program, self._prepared = program, prepared
        references = program.task.references(tokenizer, program.run.model.vocab_rows)
        replicated = program.shard.sharding(())
        self._references = jax.tree.map(lambda x: jax.device_put(x, replicated), references)

    def __call__(self, parameters: Any, batches: int | None) -> dict[str, float]:
        """Return the task's evaluation over the first `batches` (None: all)."""
        program = self._program
        sums: list[dict[str, jax.Array]] = []
        with program.loader(self._prepared, "validation") as loader:
            for number, batch in enumerate(loader):
                if batches is not None and number >= batches:
                    break
                with refusals_in_plain_words():
                    result = program.evaluate(parameters, program.place(batch), self._references)
                sums.append(jax.block_until_ready(result))
        total = {key: float(np.sum([np.asarray(s[key], np.float64) for s in sums])) for key in sums[0]}
        return program.task.evaluation(total)
