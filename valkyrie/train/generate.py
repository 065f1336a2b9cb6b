"""Samples text one token at a time through the streaming state, at constant time per token."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.data.tokenizer import Tokenizer
from valkyrie.models.assembly import Assembly


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
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[str]:
    """Yield the text that follows `prompt`, as it is sampled, until `tokens` tokens or the end of the document.

    The prompt is read after a BOS. Bytes of a character that is not complete yet are held back.
    """
    if tokens == 0:
        return
    ids = [tokenizer.bos_id, *(int(i) for i in tokenizer.encode_ordinary(prompt))]
    known = tokenizer.vocab_size

    @partial(jax.jit, donate_argnums=2)
    def advance(parameters: Any, token: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        logits, state = assembly.module(parameters).step(token, state)
        return sample(logits[:, :known], key, temperature, top_k), state

    state = jax.jit(lambda p: assembly.module(p).init_state(1, len(ids) + tokens))(parameters)
    keys = jax.random.split(jax.random.key(seed), len(ids) + tokens)
    token = jnp.zeros((1,), jnp.int32)
    for i, read in enumerate(ids):
        token, state = advance(parameters, jnp.full((1,), read, jnp.int32), state, keys[i])
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for i in range(tokens):
        drawn = int(np.asarray(token)[0])
        if drawn == tokenizer.bos_id:
            return
        yield decoder.decode(tokenizer.decode_bytes([drawn]))
        if i + 1 < tokens:
            token, state = advance(parameters, token, state, keys[len(ids) + i])
    yield decoder.decode(b"", final=True)
