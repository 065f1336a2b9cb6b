"""Samples text, one or many at once, a token at a time through the streaming state, at constant time per token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.data.tokenizer import Tokenizer
from valkyrie.models.assembly import Assembly
from valkyrie.train.continued import Text, begin, grown


def sample(logits: jax.Array, key: jax.Array, temperature: float, top_k: int | None) -> jax.Array:
    """Return a token drawn from logits (batch, vocab): the best at temperature 0, else among the `top_k` best."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def generate(
    assembly: Assembly,
    parameters: Any,
    tokenizer: Tokenizer,
    prompt: str | Text,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[str]:
    """Yield the text that follows `prompt`, as it is sampled, until `tokens` tokens or the end of the document.

    The prompt is read after a BOS. A `Text` goes on from its state, to the tokens that it would have had in one go (but
    for rounding where attention is unbounded: a longer cache is summed in another order); it has the new tokens and the
    state after them at every moment. Bytes of a character that is not complete yet are held back.
    """
    text = begin(tokenizer, prompt) if isinstance(prompt, str) else prompt
    if tokens == 0 or text.ended:
        return
    known, key = tokenizer.vocab_size, jax.random.key(seed)

    @partial(jax.jit, donate_argnums=2)
    def advance(parameters: Any, token: jax.Array, state: Any, key: jax.Array, at: Any) -> tuple[jax.Array, Any]:
        logits, state = assembly.module(parameters).step(token, state)
        return sample(logits[:, :known], jax.random.fold_in(key, at), temperature, top_k), state

    last = len(text.ids) + tokens
    empty = jax.jit(lambda p: assembly.module(p).init_state(1, last))
    text.state = empty(parameters) if text.state is None else grown(text.state, jax.eval_shape(empty, parameters))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text.bytes(tokenizer))
    while len(text.ids) < last:
        token = jnp.full((1,), text.ids[text.read], jnp.int32)
        drawn, text.state = advance(parameters, token, text.state, key, np.int32(text.read))
        text.read += 1
        if text.read == len(text.ids):
            if not text.take(int(np.asarray(drawn)[0]), tokenizer):
                break
            yield decoder.decode(tokenizer.decode_bytes(text.ids[-1:]))
    if (rest := decoder.decode(b"", final=True)) or not text.ended:
        yield rest


_CHUNK = 16
"""Tokens between two looks at which texts have ended."""


class Completer:
    """Continues many prompts at a time, each read to its own end, through one streaming state.

    A text depends on its prompt and its number among them, not on which others are sampled beside it.
    """

    def __init__(
        self,
        assembly: Assembly,
        tokenizer: Tokenizer,
        *,
        temperature: float,
        top_k: int | None,
        everywhere: Callable[[jax.Array], jax.Array] = lambda tokens: tokens,
    ) -> None:
        """`everywhere` places the tokens on all devices, so that each of several processes has them."""
        known, self._tokenizer = tokenizer.vocab_size, tokenizer

        def advance(
            parameters: Any, state: Any, token: jax.Array, given: jax.Array, keys: jax.Array, first: jax.Array
        ) -> tuple[Any, jax.Array, jax.Array]:
            """Return (state, last tokens, drawn tokens) after reading `given`, or where that is -1 the last one."""

            def one(carry: tuple[Any, jax.Array], column: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
                (state, token), (read, number) = carry, column
                read = jnp.where(read >= 0, read, token)
                logits, state = assembly.module(parameters).step(read, state)
                own = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
                token = jax.vmap(lambda row, key: sample(row, key, temperature, top_k))(logits[:, :known], own)
                return (state, token), token

            columns = (given.T, first + jnp.arange(given.shape[1]))
            (state, token), drawn = jax.lax.scan(one, (state, token), columns)
            return state, token, everywhere(drawn.T)

        self._advance = jax.jit(advance, donate_argnums=1)
        self._start = jax.jit(
            lambda parameters, rows, length: assembly.module(parameters).init_state(rows, length), static_argnums=(1, 2)
        )

    def __call__(
        self,
        parameters: Any,
        prompts: Sequence[str],
        *,
        tokens: int,
        batch: int,
        seed: int,
        ended: Callable[[int, str], bool] = lambda number, text: False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[str] | None:
        """Return what follows each prompt, `batch` of them at a time: up to `tokens` tokens or the end of the document.

        Sampling of a batch ends as soon as `ended` says of all of its texts, by their number, that nothing of what
        follows matters. None where `stopped` says so on the way.
        """
        ids = [[self._tokenizer.bos_id, *map(int, self._tokenizer.encode_ordinary(prompt))] for prompt in prompts]
        length = -(-(max(map(len, ids), default=0) + tokens - 1) // _CHUNK) * _CHUNK
        keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.key(seed), number))(np.arange(len(ids)))
        texts: list[str] = []
        for first in range(0, len(ids), batch):
            rows = [min(number, len(ids) - 1) for number in range(first, first + batch)]
            batches = self._texts(parameters, [ids[r] for r in rows], keys[np.array(rows)], length, tokens)
            for found in batches:
                if stopped():
                    return None
                if all(over or ended(row, text) for row, (text, over) in zip(rows, found, strict=True)):
                    break
            texts += [text for text, _ in found]
        return texts[: len(ids)]

    def _texts(
        self, parameters: Any, ids: Sequence[Sequence[int]], keys: jax.Array, length: int, tokens: int
    ) -> Iterator[list[tuple[str, bool]]]:
        """Yield the texts so far, each with whether it is complete, after every `_CHUNK` tokens."""
        given = np.full((len(ids), length), -1, np.int32)
        for row, own in enumerate(ids):
            given[row, : len(own)] = own
        drawn = np.zeros_like(given)
        state, token = self._start(parameters, len(ids), length), jnp.zeros(len(ids), jnp.int32)
        for first in range(0, length, _CHUNK):
            part = slice(first, first + _CHUNK)
            state, token, some = self._advance(parameters, state, token, given[:, part], keys, np.int32(first))
            drawn[:, part] = np.asarray(some)
            after = first + _CHUNK
            yield [self._text(row[len(own) - 1 : after], tokens) for own, row in zip(ids, drawn, strict=True)]

    def _text(self, drawn: np.ndarray, tokens: int) -> tuple[str, bool]:
        """Return the text of drawn tokens, and whether no more of them belong to it."""
        kept, ends = drawn[:tokens], np.flatnonzero(drawn[:tokens] == self._tokenizer.bos_id)
        over = bool(len(ends)) or len(kept) == tokens
        return self._tokenizer.decode(kept[: ends[0]] if len(ends) else kept), over
