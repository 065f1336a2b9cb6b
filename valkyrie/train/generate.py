"""Samples one or many texts, token by token, with the streaming state of a model."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.data.tokenizer import Tokenizer
from valkyrie.models.builder import ModelBuilder
from valkyrie.train.continued import Text, begin_text, pad_state

if TYPE_CHECKING:
    from valkyrie.train.program import StepProgram


def sample(logits: jax.Array, key: jax.Array, temperature: float, top_k: int | None) -> jax.Array:
    """Sample int32 tokens of shape (...) from logits of shape (..., vocab).

    Temperature 0 selects the most likely token. Other temperatures sample from the `top_k` most likely tokens, or from
    all tokens if `top_k` is None.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def generate(
    builder: ModelBuilder,
    parameters: Any,
    tokenizer: Tokenizer,
    prompt: str | Text,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[str]:
    """Yield the continuation of `prompt`, piece by piece: `tokens` tokens, or fewer if the document ends.

    A string is read after a BOS token. A `Text` is continued from its state, and updated with every token. Several
    calls sample the same tokens as a single call, except for rounding differences: the size of the KV cache, over
    which attention without a window sums, depends on `tokens`. Incomplete UTF-8 characters are held back until their
    last byte. See `sample` for `temperature` and `top_k`.
    """
    text = begin_text(tokenizer, prompt) if isinstance(prompt, str) else prompt
    if tokens == 0 or text.ended:
        return
    vocab_size, key = tokenizer.vocab_size, jax.random.key(seed)

    @partial(jax.jit, donate_argnums=2)
    def advance(parameters: Any, token: jax.Array, state: Any, key: jax.Array, position: Any) -> tuple[jax.Array, Any]:
        logits, state = builder.module(parameters).step(token, state)
        return sample(logits[:, :vocab_size], jax.random.fold_in(key, position), temperature, top_k), state

    length = len(text.ids) + tokens
    init_state = jax.jit(lambda p: builder.module(p).init_state(1, length))
    text.state = (
        init_state(parameters) if text.state is None else pad_state(text.state, jax.eval_shape(init_state, parameters))
    )
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text.bytes(tokenizer))
    while len(text.ids) < length:
        token = jnp.full((1,), text.ids[text.read], jnp.int32)
        sampled_token, text.state = advance(parameters, token, text.state, key, np.int32(text.read))
        text.read += 1
        if text.read == len(text.ids):
            if not text.append_token(int(np.asarray(sampled_token)[0]), tokenizer):
                break
            yield decoder.decode(tokenizer.decode_bytes(text.ids[-1:]))
    if (remaining_text := decoder.decode(b"", final=True)) or not text.ended:
        yield remaining_text


def continuation(program: StepProgram, parameters: Any, tokenizer: Tokenizer, text: str | Text) -> Iterator[str]:
    """Yield the continuation of a text, piece by piece, with the run's sampling settings."""
    config, device = program.run.config, program.sampling_device
    return generate(
        program.builder,
        parameters if device is None else jax.device_put(parameters, device),
        tokenizer,
        text,
        tokens=config.sample_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    )


_CHUNK_TOKENS = 16
"""Tokens between two checks for finished texts."""


class Completer:
    """Continues many prompts in batches.

    The tokens of a continuation depend on its prompt, the index of the prompt and the seed, not on other prompts in the
    batch. Its length may depend on them: see `is_complete` of a call.
    """

    def __init__(
        self,
        builder: ModelBuilder,
        tokenizer: Tokenizer,
        *,
        temperature: float,
        top_k: int | None,
        replicate: Callable[[jax.Array], jax.Array] = lambda tokens: tokens,
    ) -> None:
        """`replicate` replicates the sampled tokens over the mesh, so that every process can read them."""
        vocab_size, self._tokenizer = tokenizer.vocab_size, tokenizer

        def advance(
            parameters: Any,
            state: Any,
            token: jax.Array,
            prompts: jax.Array,
            keys: jax.Array,
            first_position: jax.Array,
        ) -> tuple[Any, jax.Array, jax.Array]:
            """Run the model for each column of `prompts`, where -1 means the token sampled in the step before.

            Returns (state, tokens of the last step, tokens of all steps).
            """

            def read_token(carry: tuple[Any, jax.Array], column: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
                (state, token), (prompt_token, position) = carry, column
                token = jnp.where(prompt_token >= 0, prompt_token, token)
                logits, state = builder.module(parameters).step(token, state)
                row_keys = jax.vmap(lambda key: jax.random.fold_in(key, position))(keys)
                token = jax.vmap(lambda row, key: sample(row, key, temperature, top_k))(
                    logits[:, :vocab_size], row_keys
                )
                return (state, token), token

            columns = (prompts.T, first_position + jnp.arange(prompts.shape[1]))
            (state, token), sampled_tokens = jax.lax.scan(read_token, (state, token), columns)
            return state, token, replicate(sampled_tokens.T)

        self._advance = jax.jit(advance, donate_argnums=1)
        self._init_state = jax.jit(
            lambda parameters, rows, length: builder.module(parameters).init_state(rows, length), static_argnums=(1, 2)
        )

    def __call__(
        self,
        parameters: Any,
        prompts: Sequence[str],
        *,
        tokens: int,
        batch: int,
        seed: int,
        is_complete: Callable[[int, str], bool] = lambda number, text: False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[str] | None:
        """Return the continuation of each prompt, or None once `should_stop` returns true.

        Args:
            parameters: Parameters of the model.
            prompts: The prompts.
            tokens: Maximum number of tokens of a continuation. It is shorter if the document ends.
            batch: Prompts sampled at a time.
            seed: Seed of the samples.
            is_complete: Called with the index of a prompt and its continuation so far. Returns whether the continuation
                needs no more tokens. A batch ends once each continuation needs no more, has `tokens` tokens or has
                reached the end of its document, so a continuation may be longer than it needs to be.
            should_stop: Returns whether to abandon the sampling.
        """
        ids = [[self._tokenizer.bos_id, *map(int, self._tokenizer.encode_ordinary(prompt))] for prompt in prompts]
        length = -(-(max(map(len, ids), default=0) + tokens - 1) // _CHUNK_TOKENS) * _CHUNK_TOKENS
        keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.key(seed), number))(np.arange(len(ids)))
        texts: list[str] = []
        for first in range(0, len(ids), batch):
            prompt_numbers = [min(number, len(ids) - 1) for number in range(first, first + batch)]
            text_batches = self._sample_texts(
                parameters, [ids[r] for r in prompt_numbers], keys[np.array(prompt_numbers)], length, tokens
            )
            for batch_texts in text_batches:
                if should_stop():
                    return None
                if all(
                    is_finished or is_complete(row, text)
                    for row, (text, is_finished) in zip(prompt_numbers, batch_texts, strict=True)
                ):
                    break
            texts += [text for text, _ in batch_texts]
        return texts[: len(ids)]

    def _sample_texts(
        self, parameters: Any, ids: Sequence[Sequence[int]], keys: jax.Array, length: int, tokens: int
    ) -> Iterator[list[tuple[str, bool]]]:
        """Yield a list of (continuation so far, is_finished), one per prompt, every `_CHUNK_TOKENS` of `length` steps.

        `is_finished` is True if the document has ended or the continuation has `tokens` tokens.
        """
        prompts = np.full((len(ids), length), -1, np.int32)
        for row, prompt in enumerate(ids):
            prompts[row, : len(prompt)] = prompt
        sampled_tokens = np.zeros_like(prompts)
        state, token = self._init_state(parameters, len(ids), length), jnp.zeros(len(ids), jnp.int32)
        for start in range(0, length, _CHUNK_TOKENS):
            end = start + _CHUNK_TOKENS
            state, token, new_tokens = self._advance(
                parameters, state, token, prompts[:, start:end], keys, np.int32(start)
            )
            sampled_tokens[:, start:end] = np.asarray(new_tokens)
            yield [
                self._decode_text(row[len(prompt) - 1 : end], tokens)
                for prompt, row in zip(ids, sampled_tokens, strict=True)
            ]

    def _decode_text(self, sampled_tokens: np.ndarray, tokens: int) -> tuple[str, bool]:
        """Decode at most `tokens` sampled tokens, up to the end of the document.

        Returns (text, is_finished). `is_finished` is True if the document has ended or `tokens` tokens are sampled.
        """
        ids, end_indices = sampled_tokens[:tokens], np.flatnonzero(sampled_tokens[:tokens] == self._tokenizer.bos_id)
        is_finished = bool(len(end_indices)) or len(ids) == tokens
        return self._tokenizer.decode(ids[: end_indices[0]] if len(end_indices) else ids), is_finished
