"""The memory a run is expected to need on a device: exact for arrays at rest, estimated for activations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from valkyrie.axes import LAYERS, Parameter
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.models.block import BLOCK_INPUT
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.partition import Memory
from valkyrie.precision import ACCUMULATED
from valkyrie.train.kept import UNNAMED, KeptBytes, bytes_of, kept_bytes

ERRORS = Path(__file__).with_name("memory.json")
"""How far the estimate was off where it was held to the compiler; experiments/memory.py writes it."""


@dataclass(frozen=True)
class ParameterRow:
    """One line of the parameter table; `bytes_per_device` is what one device stores of it."""

    name: str
    spec: Parameter
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


def compiled_peak(compiled: jax.stages.Compiled, backend: str) -> int | None:
    """Return the bytes of one device at the peak of a compiled step, as XLA counts them; None where it does not."""
    sizes = compiled.memory_analysis()
    return None if sizes is None else platform_of(backend).peak_bytes(sizes)


def parameter_rows(run: Run) -> list[ParameterRow]:
    """Return a row for every parameter of a run: how it is split, and its bytes on one device."""
    layout, policy = run.layout, run.config.precision
    rows = []
    for name, spec in run.model.parameters().items():
        split = layout.stored(spec.axes)
        dtype = "float32" if spec.float32 else policy.parameter.value
        rows.append(ParameterRow(name, spec, split, shard_bytes(spec.shape, dtype, split, layout)))
    return rows


def shard_bytes(shape: Sequence[int], dtype: Any, split: Sequence[tuple[str, ...]], layout: Layout) -> int:
    """Return the bytes of one shard of an array split this way."""
    parts = [math.prod(layout.mesh.axes[m] for m in mesh_axes) for mesh_axes in split]
    return math.prod(n // p for n, p in zip(shape, parts, strict=True)) * jnp.dtype(dtype).itemsize


def expected_memory(run: Run, abstract_state: Any) -> ExpectedMemory:
    """Return what a step needs on one device; arrays that rest in host memory are not counted."""
    layout, config = run.layout, run.config
    rows = parameter_rows(run)
    parameters = sum(r.bytes_per_device for r in rows)
    reduced = sum(shard_bytes(r.spec.shape, config.precision.reduction.value, r.split, layout) for r in rows)
    added = sum(shard_bytes(r.spec.shape, ACCUMULATED.value, r.split, layout) for r in rows)
    parameters_here = layout.partition.parameter_memory is Memory.device
    optimizer_here = layout.partition.optimizer_memory is Memory.device
    return ExpectedMemory(
        parameters=parameters if parameters_here else 0,
        gradients=(gradients := min(parameters, reduced) + (added if layout.microbatches > 1 else 0)),
        optimizer=_local_bytes(abstract_state.optimizer) if optimizer_here else 0,
        average=_local_bytes(abstract_state.ema) if parameters_here else 0,
        activations=activation_bytes(run, gradients, kept_bytes(run, layout)),
    )


def _local_bytes(abstract: Any) -> int:
    """Return the bytes of one device's shards of a tree of shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(abstract))


def activation_bytes(run: Run, gradients: int, kept: KeptBytes) -> int:
    """Return what a policy keeps for the backward pass, and the working set of one group of blocks and of the loss."""
    layout, working = run.layout, run.model.working()
    loss = sum(bytes_of(part, run, layout) for part in working if part.positions is not None)
    group = sum(bytes_of(part, run, layout.in_stage) for part in working if part.positions is None)
    if pipeline := layout.pipeline:
        loss /= pipeline.microbatches if pipeline.alternates else 1
        group += pipeline.microbatches * _stream_bytes(run, layout)
    platform, unnamed = platform_of(run.config.target.platform), kept.device.get(UNNAMED, 0)
    gathered = _gathered_bytes(run, layout)
    return int(platform.activation_bytes(kept.on_device, unnamed, loss, group, gradients, gathered))


def _stream_bytes(run: Run, layout: Layout) -> float:
    """Return the bytes of the residual stream of a microbatch: the first stage has that of all of them at hand."""
    inputs = next(kept for kept in run.model.kept() if kept.name == BLOCK_INPUT)
    return bytes_of(replace(inputs, count=1), run, layout.in_stage)


def _gathered_bytes(run: Run, layout: Layout) -> int:
    """Return the bytes of one layer's weights gathered for use, and of their gradients before the reduction."""
    policy, total = run.config.precision, 0
    itemsize = jnp.dtype(policy.compute.value).itemsize + jnp.dtype(policy.reduction.value).itemsize
    for spec in run.model.parameters().values():
        stored, used = layout.stored(spec.axes), layout.computed(spec.axes)
        gathered = any(layout.parts(at) != layout.parts(by) for at, by in zip(stored, used, strict=True))
        if LAYERS in spec.axes and gathered:
            sizes = zip(spec.shape, spec.axes, used, strict=True)
            total += itemsize * math.prod(n // layout.parts(over) for n, axis, over in sizes if axis != LAYERS)
    return total


@cache
def estimate_errors() -> dict[str, Any]:
    """Return how far the estimate was off: the ratio of needed to estimated bytes is from `low` to `high`.

    Keys: also `layouts`, `models`, `median` and `within_15_percent`.
    """
    return json.loads(ERRORS.read_text())
