"""Tests of `mode=figures`: the FLOPs and bytes that it divides by time are those that XLA counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from valkyrie.search.measure import figures


def cost(function: Callable[..., Any], array_count: int, shape: Sequence[int], dtype: Any, quantity: str) -> float:
    """Return the `flops` or `bytes accessed` that XLA counts for a function of `array_count` arrays."""
    inputs = [jax.ShapeDtypeStruct(tuple(shape), dtype)] * array_count
    counted = jax.jit(function).lower(*inputs).compile().cost_analysis()
    assert counted is not None
    return float(counted[quantity])


class FlopsTimer(figures._Timer):
    """A fake timer that reports one second per 1e12 FLOPs, as counted by XLA."""

    def __init__(self) -> None:
        pass  # needs no devices

    def __call__(
        self, function: Callable[..., Any], shape: Sequence[int], dtype: Any = None, mesh: Any = None
    ) -> float:
        """Return the fake seconds of a function of one array."""
        return cost(function, 1, shape, dtype, "flops") / 1e12


@pytest.mark.parametrize(
    ("devices", "bytes_"), [(1, figures.PROCESS_BYTES), (4, 2**26), (1024, figures.MIN_DEVICE_BYTES)]
)
def test_memory_bandwidth_counts_the_moved_bytes(devices: int, bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = list[Sequence[int]]()

    def fake_seconds(timer: Any, function: Callable[..., Any], shape: Sequence[int], dtype: Any) -> float:
        shapes.append(shape)
        return cost(function, 2, shape, dtype, "bytes accessed") / 5e9

    monkeypatch.setattr(figures, "_seconds_per_iteration", fake_seconds)
    assert figures._memory_bandwidth(FlopsTimer(), devices) == pytest.approx(5e9, rel=1e-3)
    assert shapes == [(bytes_ // 4,)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_speed_counts_the_executed_products(dtype: Any) -> None:
    assert 0.94 < figures._attention_speed(FlopsTimer(), dtype) / 1e12 < 1, "the softmax beside them is little"
