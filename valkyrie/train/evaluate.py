"""Decides how a model is judged: mean loss per token and bits per byte over rows of the validation split."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from valkyrie.data.loader import make_loader
from valkyrie.data.manifest import Prepared
from valkyrie.data.tokenizer import Tokenizer
from valkyrie.train.program import StepProgram


class Evaluator:
    """Evaluates parameters on the same rows every time, with token lengths known for bits per byte."""

    def __init__(self, program: StepProgram, prepared: Prepared, tokenizer: Tokenizer) -> None:
        lengths = np.zeros(program.run.model.vocab_rows, np.float32)
        lengths[: tokenizer.vocab_size] = tokenizer.token_bytes
        self._program, self._prepared = program, prepared
        self._lengths = jax.device_put(lengths, program.shard.sharding(((),)))

    def __call__(self, parameters: Any, batches: int | None) -> dict[str, float]:
        """Return `eval_loss` (nats per target) and `eval_bits_per_byte` over the first `batches` (None: all)."""
        config = self._program.run.config
        sums: list[dict[str, jax.Array]] = []
        with make_loader(
            self._prepared, "validation", batch=config.batch, seq=config.seq, seed=0, repeat=False
        ) as loader:
            for number, batch in enumerate(loader):
                if batches is not None and number >= batches:
                    break
                sums.append(
                    jax.block_until_ready(self._program.evaluate(parameters, self._program.place(batch), self._lengths))
                )
        total = {key: float(np.sum([np.asarray(s[key], np.float64) for s in sums])) for key in sums[0]}
        return {
            "eval_loss": total["loss"] / total["weight"],
            "eval_bits_per_byte": total["nats"] / (math.log(2) * max(total["bytes"], 1.0)),
            "eval_tokens": total["weight"],
        }
