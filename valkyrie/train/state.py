"""The train state: the arrays that a step changes, their initial values, and their shardings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.models.builder import ModelBuilder
from valkyrie.parallel.partition import MemoryKind
from valkyrie.parallel.sharding import MeshShard
from valkyrie.precision import ACCUMULATOR_DTYPE
from valkyrie.tasks import Array
from valkyrie.trees import leaf_name


class TrainState(NamedTuple):
    """The arrays that a step changes, or the same tree with shapes or shardings in place of the arrays.

    Parameters have the dtypes of the precision policy. `ema` and the moments in `optimizer` are always float32
    (`valkyrie.precision.ACCUMULATOR_DTYPE`); step counts in `optimizer` are int32.

    Args:
        step: Number of finished optimizer steps.
        ema: Average of the parameters, or None without `optimizer.ema_decay`.
        key: Data of a PRNG key (`jax.random.key_data`).
        carry: Arrays that the task passes from step to step, or None.
    """

    step: Any
    parameters: Any
    optimizer: Any
    ema: Any
    key: Any
    carry: Any = None

    @property
    def eval_parameters(self) -> Any:
        """The parameters to evaluate and to sample from: `ema` if the run keeps it, else `parameters`."""
        return self.parameters if self.ema is None else self.ema


def init_state(
    builder: ModelBuilder,
    optimizer: optax.GradientTransformation,
    keep_ema: bool,
    seed: int | jax.Array,
    carry: Mapping[str, Array] | None = None,
) -> TrainState:
    """Return the state before the first step. The same seed gives the same state on any mesh.

    `carry` describes the arrays that the task passes from step to step (`Task.carry`). They start as zeros.
    """
    init_key, _ = jax.random.split(jax.random.key(seed))
    return state_from_parameters(builder.init(init_key), optimizer, keep_ema, seed, carry)


def state_from_parameters(
    parameters: Any,
    optimizer: optax.GradientTransformation,
    keep_ema: bool,
    seed: int | jax.Array,
    carry: Mapping[str, Array] | None = None,
) -> TrainState:
    """Return the state before the first step, with the given parameters. See `init_state` for the other arguments."""
    _, key = jax.random.split(jax.random.key(seed))
    ema = jax.tree.map(lambda p: jnp.array(p, ACCUMULATOR_DTYPE.value), parameters) if keep_ema else None
    step = jnp.zeros((), jnp.int32)
    carry_arrays = {name: jnp.zeros(array.shape, array.dtype) for name, array in (carry or {}).items()}
    return TrainState(step, parameters, optimizer.init(parameters), ema, jax.random.key_data(key), carry_arrays or None)


def state_shardings(
    abstract_state: TrainState, builder: ModelBuilder, shard: MeshShard, carry: Mapping[str, Array]
) -> TrainState:
    """Return the sharding of every array of the state. `abstract_state` has the shapes of the state.

    Parameters and their EMA follow the partition. Optimizer state with the shape of its parameter is sharded like
    it, and under ZeRO-1 over the data axes too. The carry is sharded like activations. Everything else is replicated.
    Arrays that the partition keeps in host memory have the memory kind `pinned_host`.
    """
    layout, specs = shard.layout, builder.specs
    memory_kinds = {MemoryKind.host: "pinned_host", MemoryKind.device: None}
    parameter_memory_kind = memory_kinds[layout.partition.parameter_memory]
    optimizer_memory_kind = memory_kinds[layout.partition.optimizer_memory]
    replicated = NamedSharding(shard.mesh, PartitionSpec())  # pyright: ignore[reportArgumentType] - abstract meshes work too

    def parameter_sharding(path: Any, leaf: Any) -> NamedSharding:
        return shard.sharding(layout.stored_axes(specs[leaf_name(path)].axes), parameter_memory_kind)

    def optimizer_sharding(path: Any, leaf: Any) -> NamedSharding:
        name = _matching_parameter(leaf_name(path), specs)
        if name is None or leaf.shape != specs[name].shape:
            return replicated
        return shard.sharding(layout.optimizer_axes(specs[name].axes, specs[name].shape), optimizer_memory_kind)

    parameters = jax.tree_util.tree_map_with_path(parameter_sharding, abstract_state.parameters)
    return TrainState(
        step=replicated,
        parameters=parameters,
        optimizer=jax.tree_util.tree_map_with_path(optimizer_sharding, abstract_state.optimizer),
        ema=None if abstract_state.ema is None else parameters,
        key=replicated,
        carry={name: shard.sharding(layout.activation_axes(array.axes)) for name, array in carry.items()} or None,
    )


def _matching_parameter(path: str, specs: Collection[str]) -> str | None:
    """Return the parameter name at the end of a dotted path in the optimizer state, or None."""
    parts = path.split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if name in specs:
            return name
    return None


def copy_to_device(tree: Any, shardings: Any) -> Any:
    """Copy arrays with a host-memory sharding (`pinned_host`) to device memory. Returns other arrays unchanged.

    Must be traced by `jax.jit`. `shardings` has the structure of `tree`.
    """

    def copy(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        if sharding.memory_kind != "pinned_host":
            return x
        return jax.device_put(x, sharding.with_memory_kind("device"))

    return jax.tree.map(copy, tree, shardings)
