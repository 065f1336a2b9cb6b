"""A synthetic corpus: a Markov chain of first order whose entropy is known, drawn from a seed.

Every state has four successors, taken with the probabilities of `SUCCESSOR_WEIGHTS`; which four is drawn from the seed.
A model that has learned the chain reaches a loss of `synthetic_entropy` nats a token inside a document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from valkyrie.data.config import SUCCESSOR_WEIGHTS, DataConfig

FIRST_ID = 32
"""The chain uses the ids from here on: letters, digits and signs in the `bytes` vocabulary."""
_BLOCK = 512


@dataclass(frozen=True)
class SyntheticDocument:
    """A document that is made of tokens from the beginning."""

    id: str
    tokens: Int[np.ndarray, " length"]


def synthetic_entropy() -> float:
    """Return the entropy of a step of the chain, in nats: the lowest loss a token inside a document can have."""
    weights = np.asarray(SUCCESSOR_WEIGHTS)
    return float(-(weights * np.log(weights)).sum())


def synthetic_documents(config: DataConfig) -> Iterator[SyntheticDocument]:
    """Yield `documents` documents of half to one and a half times `mean_length` tokens, the same for the same seed."""
    if problems := config.problems():
        raise ValueError("\n".join(problems))
    rng = np.random.default_rng(config.generator_seed)
    choices = np.argsort(rng.random((config.states, config.states)), axis=1)[:, : len(SUCCESSOR_WEIGHTS)]
    bounds = np.cumsum(SUCCESSOR_WEIGHTS)[:-1]
    for start in range(0, config.documents, _BLOCK):
        count = min(_BLOCK, config.documents - start)
        lengths = rng.integers(config.mean_length // 2, config.mean_length * 3 // 2 + 1, count)
        states = np.empty((count, int(lengths.max())), np.int64)
        states[:, 0] = rng.integers(0, config.states, count)
        picks = np.searchsorted(bounds, rng.random(states.shape), side="right")
        for position in range(1, states.shape[1]):
            states[:, position] = choices[states[:, position - 1], picks[:, position]]
        for row in range(count):
            yield SyntheticDocument(f"synthetic:{start + row}", states[row, : lengths[row]] + FIRST_ID)
