"""Decides what memory a run is expected to need on a device: exact for arrays at rest, estimated for activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from valkyrie.models.base import ParameterSpec, flatten
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.partition import Memory
from valkyrie.run import Run


@dataclass(frozen=True)
class ParameterRow:
    """One line of the parameter table; `bytes_per_device` is what one device stores of it."""

    name: str
    spec: ParameterSpec
    split: tuple[tuple[str, ...], ...]
    bytes_per_device: int


@dataclass(frozen=True)
class ExpectedMemory:
    """Bytes on one device during a step. All but `activations` follow from shapes; that one is estimated."""

    parameters: int
    gradients: int
    optimizer: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        """The sum, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.average + self.activations


def compiled_peak(compiled: jax.stages.Compiled) -> int | None:
    """Return the bytes of one device at the peak of a compiled step, as XLA counts them; None where it does not."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return held + found.temp_size_in_bytes + found.generated_code_size_in_bytes


def parameter_rows(specs: Any, layout: Layout) -> list[ParameterRow]:
    """Return a row for every parameter: how it is split, and its bytes on one device."""
    rows = []
    for name, spec in flatten(specs).items():
        split = layout.stored(spec.axes)
        rows.append(ParameterRow(name, spec, split, shard_bytes(spec.shape, spec.dtype, split, layout)))
    return rows


def shard_bytes(shape: Sequence[int], dtype: Any, split: Sequence[tuple[str, ...]], layout: Layout) -> int:
    """Return the bytes of one shard of an array split this way."""
    parts = [math.prod(layout.mesh.axes[m] for m in held) for held in split]
    return math.prod(n // p for n, p in zip(shape, parts, strict=True)) * jnp.dtype(dtype).itemsize


def expected_memory(run: Run, abstract_state: Any, specs: Any) -> ExpectedMemory:
    """Return what a step needs on one device; arrays that rest in host memory are not counted."""
    layout, config = run.layout, run.config
    rows = parameter_rows(specs, layout)
    itemsize = jnp.dtype(config.precision.reduction.value).itemsize
    gradients = sum(shard_bytes(r.spec.shape, config.precision.reduction.value, r.split, layout) for r in rows)
    parameters = sum(r.bytes_per_device for r in rows)
    on_device = layout.partition.optimizer_memory is Memory.device
    return ExpectedMemory(
        parameters=parameters if layout.partition.parameter_memory is Memory.device else 0,
        gradients=gradients * (2 if layout.microbatches > 1 else 1),
        optimizer=sum(map(_local_bytes, jax.tree.leaves(abstract_state.optimizer))) if on_device else 0,
        average=parameters if abstract_state.ema is not None else 0,
        activations=_activation_bytes(run, layout, itemsize),
    )


def _local_bytes(x: jax.ShapeDtypeStruct) -> int:
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _activation_bytes(run: Run, layout: Layout, reduction: int) -> int:
    """Return what the backward pass keeps of all blocks, plus the working set of one pattern and of the loss."""
    config, model = run.config, run.model
    rows = config.batch // layout.microbatches
    compute = jnp.dtype(config.precision.compute.value).itemsize
    sizes = {"batch": rows, "seq": config.seq, **model.activation_sizes()}

    def bytes_of(axes: tuple[str, ...], count: float, itemsize: int) -> float:
        held = layout.activation(axes)
        parts = [math.prod(layout.mesh.axes[m] for m in h) for h in held]
        return count * math.prod(sizes[a] / p for a, p in zip(axes, parts, strict=True)) * itemsize

    def of_block(kind: Any, remat: str) -> float:
        kept = model.kept_activations(kind, remat)
        return sum(bytes_of(axes, count, 4 if wide else compute) for axes, count, wide in kept)

    blocks = sum(of_block(kind, config.remat.value) for kind in model.kinds)
    working = sum(of_block(kind, "none") for kind in model.block_pattern)
    sizes["seq"] = min(config.seq, model.loss_chunk * layout.shards("seq"))
    loss = bytes_of(("batch", "seq", "vocab"), 2.0, 4)
    return int(blocks + working + loss)
