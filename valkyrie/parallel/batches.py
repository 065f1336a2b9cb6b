"""Converts `batch_tokens` and `device_batch` to sequences and microbatches. Does not import JAX."""

from __future__ import annotations

from typing import NamedTuple

from valkyrie.problems import Problem, ProblemCode, check_range


class BatchSizes(NamedTuple):
    """Result of `resolve_batches`: sequences in the global batch, number of microbatches, problems of the settings."""

    batch: int
    microbatches: int
    problems: list[Problem]

    def describe(self, seq: int, device_batch: int | None) -> str:
        """Describe the batch in one line, such as `8,192 tokens: batch=8 of seq=1024, microbatches=2`."""
        text = f"{self.batch * seq:,} tokens: batch={self.batch} of seq={seq}, microbatches={self.microbatches}"
        return text if device_batch is None else f"{text} of {device_batch} sequences per device"


def resolve_batches(
    batch: int, microbatches: int, seq: int, shards: int, batch_tokens: int | None, device_batch: int | None
) -> BatchSizes:
    """Convert `batch_tokens` to sequences and `device_batch` to a number of microbatches, if they are set.

    If `batch_tokens` is illegal, the result has a problem and the arguments `batch` and `microbatches`, and
    `device_batch` is not checked. If `device_batch` is illegal, the result has a problem and the argument
    `microbatches`.

    Args:
        batch: Number of sequences in the global batch, unless `batch_tokens` is set.
        microbatches: Number of microbatches. Must be 1 if `device_batch` is set.
        seq: Number of tokens per sequence.
        shards: Number of parts into which the partition splits a batch.
        batch_tokens: Number of tokens in the global batch, or None.
        device_batch: Number of sequences that a device processes at a time (per pipeline stage), or None.
    """
    problems = []
    if batch_tokens is not None:
        if batch_tokens < 1 or seq < 1 or batch_tokens % seq:
            nearest, code = max(batch_tokens // max(seq, 1), 1) * seq, ProblemCode.batch_tokens_not_divisible
            problem = Problem(code, "batch_tokens", batch_tokens, nearest=(nearest,), details={"seq": seq})
            return BatchSizes(batch, microbatches, [problem])
        batch = batch_tokens // seq
    if device_batch is not None:
        shard_sequences = device_batch * shards
        if device_batch < 1:
            problems += check_range("device_batch", device_batch, least=1)
        elif microbatches != 1:
            text = (
                f"device_batch={device_batch} sets the number of microbatches, so microbatches={microbatches} cannot "
                "be set too. Use microbatches=1 or device_batch=null."
            )
            problems.append(Problem(ProblemCode.conflict, "device_batch", device_batch, text))
        elif batch % shard_sequences:
            divisors = [n for n in range(1, batch // shards + 1) if batch % (n * shards) == 0]
            problems.append(
                Problem(
                    ProblemCode.device_batch_not_divisible,
                    "device_batch",
                    device_batch,
                    size=batch,
                    parts=shards,
                    nearest=tuple(sorted(divisors, key=lambda n: abs(n - device_batch))[:1]),
                    details={"batch_tokens": batch_tokens},
                )
            )
        else:
            microbatches = batch // shard_sequences
    return BatchSizes(batch, microbatches, problems)
