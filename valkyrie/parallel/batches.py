"""A batch given in tokens, or by what a device takes at a time: how many sequences and microbatches that is. No JAX."""

from __future__ import annotations

from typing import NamedTuple


class Batches(NamedTuple):
    """Sequences of the global batch, its microbatches, and why they cannot be had, if so."""

    batch: int
    microbatches: int
    problems: list[str]

    def describe(self, seq: int, device_batch: int | None) -> str:
        """Return it in words."""
        text = f"{self.batch * seq:,} tokens: batch={self.batch} of seq={seq}, microbatches={self.microbatches}"
        return text if device_batch is None else f"{text} of {device_batch} sequences a device"


def batches_of(
    batch: int, microbatches: int, seq: int, shards: int, batch_tokens: int | None, device_batch: int | None
) -> Batches:
    """Return the batch of `batch_tokens` tokens (None: `batch` sequences), cut so that devices take `device_batch`.

    `shards`: into how many parts the partition splits a batch. `device_batch` None leaves `microbatches`.
    """
    problems = []
    if batch_tokens is not None:
        if batch_tokens < 1 or seq < 1 or batch_tokens % seq:
            near = max(batch_tokens // max(seq, 1), 1) * seq
            return Batches(
                batch, microbatches, [f"batch_tokens={batch_tokens} is not a multiple of seq={seq}. Use {near}."]
            )
        batch = batch_tokens // seq
    if device_batch is not None:
        at_once = device_batch * shards
        if device_batch < 1:
            problems.append(f"device_batch={device_batch}: at least 1 is needed.")
        elif microbatches != 1:
            problems.append(
                f"device_batch={device_batch} decides the microbatches, and microbatches={microbatches} is given too. "
                "Use microbatches=1, or device_batch=null."
            )
        elif batch % at_once:
            asked = f"batch={batch}" if batch_tokens is None else f"batch_tokens={batch_tokens}, {batch} sequences,"
            over = f" on {shards} devices ({at_once} at a time)" if shards > 1 else ""
            divisors = [n for n in range(1, batch // shards + 1) if batch % (n * shards) == 0]
            near = sorted(divisors, key=lambda n: abs(n - device_batch))[:1]
            advice = f" Use device_batch={near[0]}." if near else f" Use a batch that {shards} divides."
            problems.append(
                f"{asked} does not divide into parts of device_batch={device_batch} sequences{over}.{advice}"
            )
        else:
            microbatches = batch // at_once
    return Batches(batch, microbatches, problems)
