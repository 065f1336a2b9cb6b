"""Decides what a training state holds and where each of its arrays lies."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.models.base import Assembly, flatten
from valkyrie.parallel.partition import Memory
from valkyrie.parallel.sharding import MeshShard


class TrainState(NamedTuple):
    """All that a step changes, or the same tree of shapes or of shardings.

    `step` counts finished optimizer steps; `ema` is None unless asked for; `key` is the data of a PRNG key.
    """

    step: Any
    parameters: Any
    optimizer: Any
    ema: Any
    key: Any


def init_state(
    assembly: Assembly, optimizer: optax.GradientTransformation, keep_ema: bool, seed: int | jax.Array
) -> TrainState:
    """Return the state before the first step; the same for the same seed on any mesh."""
    init_key, key = jax.random.split(jax.random.key(seed))
    parameters = assembly.init(init_key)
    ema = jax.tree.map(jnp.array, parameters) if keep_ema else None
    step = jnp.zeros((), jnp.int32)
    return TrainState(step, parameters, optimizer.init(parameters), ema, jax.random.key_data(key))


def state_shardings(abstract: TrainState, assembly: Assembly, shard: MeshShard) -> TrainState:
    """Return the sharding of every array of the state.

    Parameters and their average lie as the partition says; optimizer state lies with its parameter, or is split over
    the data axes too under ZeRO-1; everything else is replicated.
    """
    layout, specs = shard.layout, flatten(assembly.specs)
    host = {Memory.host: "pinned_host", Memory.device: None}
    on_parameters = host[layout.partition.parameter_memory]
    on_optimizer = host[layout.partition.optimizer_memory]
    replicated = NamedSharding(shard.mesh, PartitionSpec())  # pyright: ignore[reportArgumentType] - both kinds of mesh serve

    def of_parameter(path: Any, leaf: Any) -> NamedSharding:
        return shard.sharding(layout.stored(specs[_dotted(path)].axes), on_parameters)

    def of_optimizer(path: Any, leaf: Any) -> NamedSharding:
        name = _parameter_behind(_dotted(path), specs)
        if name is None or leaf.shape != specs[name].shape:
            return replicated
        return shard.sharding(layout.optimizer(specs[name].axes, specs[name].shape), on_optimizer)

    parameters = jax.tree_util.tree_map_with_path(of_parameter, abstract.parameters)
    return TrainState(
        step=replicated,
        parameters=parameters,
        optimizer=jax.tree_util.tree_map_with_path(of_optimizer, abstract.optimizer),
        ema=None if abstract.ema is None else parameters,
        key=replicated,
    )


def _dotted(path: Any) -> str:
    return ".".join(str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey))


def _parameter_behind(path: str, specs: dict[str, Any]) -> str | None:
    """Return the parameter whose dotted path ends this path of the optimizer state."""
    parts = path.split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in specs:
            return name
    return None


def on_device(tree: Any, shardings: Any) -> Any:
    """Return host-memory arrays of a traced tree brought to device memory, the rest as it is."""

    def bring(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        if sharding.memory_kind != "pinned_host":
            return x
        return jax.device_put(x, sharding.with_memory_kind("device"))

    return jax.tree.map(bring, tree, shardings)
