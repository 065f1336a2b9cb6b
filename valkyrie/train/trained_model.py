"""A trained language model as a function from tokens to logits, on the mesh of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from valkyrie.axes import BATCH, SEQ
from valkyrie.config.run import Run
from valkyrie.data.tokenizer import Tokenizer
from valkyrie.problems import raise_problems
from valkyrie.train.generate import generate
from valkyrie.train.prepare import check_sampling
from valkyrie.train.program import StepProgram


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """A trained language model. `model(tokens)` returns logits, `model.generate(prompt)` text.

    Args:
        run: The run, with its mesh and partition.
        step: Training step of the parameters.
        parameters: Nested dicts of arrays, sharded as in training. With `ema_decay`, their moving average.
        tokenizer: The tokenizer. A document starts with `tokenizer.bos_id`.
        program: The jitted functions of the run.
    """

    run: Run
    step: int
    parameters: Any
    tokenizer: Tokenizer
    program: StepProgram = field(repr=False)

    def __call__(self, tokens: np.ndarray | jax.Array | Sequence[Sequence[int]]) -> jax.Array:
        """Return float32 logits of shape (batch, seq, vocab), which predict the token after every position.

        `tokens` is an integer array of shape (batch, seq), and each row is one document. The mesh does not limit batch
        or seq: both are padded to multiples of their shards, the batch also to a multiple of the pipeline's
        microbatches. Each new shape is compiled once.

        Raises ValueError if rows differ in length, if `tokens` is empty or not a two-dimensional integer array, if
        there are more positions than the model has, or if a token is not in its vocabulary.
        """
        try:
            ids = np.asarray(tokens)
        except ValueError:  # of NumPy
            raise ValueError("tokens= has rows of different lengths. Pad the shorter ones, or pass one row.") from None
        if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"tokens= is a {ids.dtype} array of shape {ids.shape}. Pass whole numbers of shape (batch, seq), such "
                "as [[model.tokenizer.bos_id, *model.tokenizer.encode_ordinary(text)]]."
            )
        (rows, seq), vocab_size = ids.shape, self.run.model.vocab_size
        if ids.min() < 0 or ids.max() >= vocab_size:
            invalid_token = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"tokens= contains {invalid_token}, but the vocabulary has ids 0 to {vocab_size - 1:,}.")
        raise_problems(self.run.task.problems(self.run.model, seq))
        shard, pipeline = self.program.shard, self.program.layout.pipeline
        row_parts = shard.shard_count(BATCH) * (1 if pipeline is None else pipeline.microbatches)
        padded_ids = np.pad(ids, ((0, -rows % row_parts), (0, -seq % shard.shard_count(SEQ)))).astype(np.int32)
        sharding = shard.sharding(self.program.layout.activation_axes((BATCH, SEQ)))
        return self.program.logits(self.parameters, jax.device_put(padded_ids, sharding))[:rows, :seq]

    def generate(
        self,
        prompt: str,
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 40,
        seed: int | None = None,
    ) -> str:
        """Return the continuation of a prompt by at most `tokens` tokens, without the prompt.

        See `valkyrie.train.generate.sample` for `temperature` and `top_k`. The default of `seed` is the run's seed.
        Raises TypeError or ValueError for invalid arguments.
        """
        check_sampling(prompt, tokens, temperature, top_k)
        seed = self.run.config.seed if seed is None else seed
        sampling = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        return "".join(generate(self.program.builder, self._sampling_parameters, self.tokenizer, prompt, **sampling))

    def __repr__(self) -> str:
        layout, count = self.program.layout.name, self.run.model.parameter_count()
        return f"<TrainedModel {self.run.model.name}, {count:,} parameters of step {self.step}, {layout}>"

    @cached_property
    def _sampling_parameters(self) -> Any:
        device = self.program.sampling_device
        return self.parameters if device is None else jax.device_put(self.parameters, device)
