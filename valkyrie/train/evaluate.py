"""Evaluation of a model: the task's metrics on the validation split, and text samples."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from valkyrie.data.batches import Dataset
from valkyrie.data.tokenizer import Tokenizer
from valkyrie.hardware.platforms import get_platform
from valkyrie.train.generate import continuation
from valkyrie.train.options import explain_option_errors
from valkyrie.train.program import StepProgram


class Evaluator:
    """Evaluates parameters on the validation split of a dataset."""

    def __init__(self, program: StepProgram, dataset: Dataset, tokenizer: Tokenizer | None) -> None:
        self._program, self._dataset, self._tokenizer = program, dataset, tokenizer
        references = program.task.references(tokenizer, program.run.model.vocab_rows)
        replicated = program.shard.sharding(())
        self._references = jax.tree.map(lambda x: jax.device_put(x, replicated), references)

    def __call__(self, parameters: Any, batches: int | None) -> dict[str, float]:
        """Return the task's metrics over the first `batches` batches of the validation split, or over all if None."""
        program = self._program
        sums: list[dict[str, jax.Array]] = []
        with program.loader(self._dataset, "validation") as loader:
            for number, batch in enumerate(loader):
                if batches is not None and number >= batches:
                    break
                with explain_option_errors(get_platform(program.backend)):
                    result = program.evaluate(parameters, program.place(batch), self._references)
                sums.append(jax.block_until_ready(result))
        totals = {key: float(np.sum([np.asarray(s[key], np.float64) for s in sums])) for key in sums[0]}
        return program.task.evaluation(totals)

    @property
    def generates_text(self) -> bool:
        """Whether the run has a tokenizer, so that its model can generate text."""
        return self._tokenizer is not None

    def sample(self, parameters: Any) -> str:
        """Return the run's prompt, followed by the model's continuation."""
        assert self._tokenizer is not None
        prompt = self._program.run.config.prompt
        return prompt + "".join(continuation(self._program, parameters, self._tokenizer, prompt))
