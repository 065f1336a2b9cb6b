"""A synthetic corpus: a first-order Markov chain with known entropy, generated from a seed.

Every state has four random successors, with the probabilities `SUCCESSOR_WEIGHTS`. A model that has learned the chain
reaches a loss of `entropy` nats per token inside a document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkyrie.data.documents import DocumentConfig
from valkyrie.data.files import Listing
from valkyrie.data.readers import ReadOptions
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    from valkyrie.data.cut import TokenDocument

SUCCESSOR_WEIGHTS = (0.6, 0.2, 0.15, 0.05)
"""Probabilities of the four successors of a state."""
MAX_STATES = 224
"""Maximum number of states: the byte values from `FIRST_ID` to 255."""
FIRST_ID = 32
"""First token id used by the chain: the space. Printable ASCII characters follow."""
_DOCUMENTS_PER_BLOCK = 512


@dataclass
class Config(DocumentConfig):
    """Documents that are sampled from a Markov chain, as token ids.

    Args:
        documents: number of documents.
        mean_length: mean length of the documents, in tokens.
        states: number of states of the chain, each with a token id.
        generator_seed: seed of the chain and its documents.
    """

    name: str = "synthetic"
    source: str = "synthetic"
    documents: int = 2000
    mean_length: int = 512
    states: int = 64
    generator_seed: int = 0

    def problems(self) -> list[Problem]:
        problems = super().problems()
        problems += check_range("data.states", self.states, least=len(SUCCESSOR_WEIGHTS), most=MAX_STATES)
        problems += check_range("data.generator_seed", self.generator_seed, least=0)
        if self.documents < 2:
            text = f"data.documents={self.documents} is too few. Use 2 or more: one for training, one for validation."
            problems.append(Problem(ProblemCode.out_of_range, "data.documents", self.documents, text))
        return problems + check_range("data.mean_length", self.mean_length, least=2)

    def list_files(self) -> Listing:
        return Listing(())

    def read_documents(self, listing: Listing) -> Iterator[TokenDocument]:
        """Generate documents of 0.5 to 1.5 times `mean_length` tokens, the same for the same seed."""
        import numpy as np

        from valkyrie.data.cut import TokenDocument

        rng = np.random.default_rng(self.generator_seed)
        successors = np.argsort(rng.random((self.states, self.states)), axis=1)[:, : len(SUCCESSOR_WEIGHTS)]
        bounds = np.cumsum(SUCCESSOR_WEIGHTS)[:-1]
        for start in range(0, self.documents, _DOCUMENTS_PER_BLOCK):
            count = min(_DOCUMENTS_PER_BLOCK, self.documents - start)
            lengths = rng.integers(self.mean_length // 2, self.mean_length * 3 // 2 + 1, count)
            states = np.empty((count, int(lengths.max())), np.int64)
            states[:, 0] = rng.integers(0, self.states, count)
            successor_indices = np.searchsorted(bounds, rng.random(states.shape), side="right")
            for position in range(1, states.shape[1]):
                states[:, position] = successors[states[:, position - 1], successor_indices[:, position]]
            for row in range(count):
                yield TokenDocument(f"synthetic:{start + row}", states[row, : lengths[row]] + FIRST_ID)

    def cache_identity(self) -> dict[str, object]:
        settings = [self.documents, self.mean_length, self.states, self.generator_seed]
        return ReadOptions().cache_identity | {"synthetic": settings}

    def source_details(self) -> dict[str, object]:
        """Return the settings of the chain, and its entropy as `entropy_nats_per_token`."""
        keys = ("documents", "mean_length", "states", "generator_seed")
        return {**{key: getattr(self, key) for key in keys}, "entropy_nats_per_token": entropy()}


def entropy() -> float:
    """Return the entropy of a step of the chain, in nats: the lowest loss per token inside a document."""
    return -math.fsum(weight * math.log(weight) for weight in SUCCESSOR_WEIGHTS)
