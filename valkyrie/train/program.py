"""`StepProgram`: the jitted functions of a run, for training, evaluation, compilation and measurement."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.axes import Parameter
from valkyrie.config.run import Run
from valkyrie.hardware.chips import chip_for_device_kind
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig, usable_hbm
from valkyrie.models.builder import ModelBuilder
from valkyrie.models.layers import Checkpoint
from valkyrie.ops.linear import Numerics
from valkyrie.optim import Training, is_parameter, learning_rate_schedule, make_optimizer
from valkyrie.parallel.partition import GradientSum, MemoryKind
from valkyrie.parallel.sharding import AnyMesh, MeshShard
from valkyrie.precision import DType
from valkyrie.tasks import Array
from valkyrie.train.memory_errors import memory_estimate_errors
from valkyrie.train.options import Option, collect_options, explain_option_errors, option_text
from valkyrie.train.rematerialise import make_block_checkpoint
from valkyrie.train.run_memory import accumulated_gradients, estimated_memory
from valkyrie.train.spread import matrix_stack_sharding
from valkyrie.train.state import TrainState, init_state, state_from_parameters, state_shardings
from valkyrie.train.step import eval_step, logits_step, train_step

if TYPE_CHECKING:
    from valkyrie.data.batches import Dataset, Loader

MIN_HEAD_SHARE = 0.02
"""Minimum share of a device's memory that summing the gradient of the loss head first must free.

It frees 2.3 of 31.5 GiB for GPT-3 175B on v6e-256 under fsdp, which does not fit otherwise (experiments/LOG.md).
"""


class StepProgram:
    """The jitted functions of a run on a mesh. All shapes and shardings are known before an array exists.

    On an abstract mesh it can be lowered but not run. `backend`: platform to run on, or None for JAX's default.
    """

    def __init__(self, run: Run, mesh: AnyMesh, backend: str | None = None) -> None:
        config = run.config
        self.run = run
        self.layout = run.layout
        self.mesh = mesh
        chip = self._chip(mesh, backend)
        gradients = accumulated_gradients(run, chip)
        self.axes_summed_once = gradients.once_axes if gradients else ()
        """Mesh axes over which gradients of microbatches are summed once per step (`SumGradientsPer`)."""
        self.builder = ModelBuilder(run.model, Numerics.from_policy(config.precision))
        self.shard = MeshShard(
            self.layout,
            mesh,
            backend,
            _gradient_sum(chip),
            axes_summed_once=self.axes_summed_once,
            reduction_dtype=config.precision.reduction.value,
            sums_head_first=self._sums_head_first(chip),
        )
        self.task = run.task
        self.parameter_names = list(self.builder.specs)
        structure = jax.tree.structure(self.builder.abstract_parameters)
        specs = jax.tree.unflatten(structure, self.builder.specs.values())
        self.groups = jax.tree.map(lambda spec: spec.group, specs, is_leaf=is_parameter)
        training = Training(config.steps, config.precision.compute.value, matrix_stack_sharding(self.shard))
        self.optimizer = make_optimizer(config.optimizer, specs, training)
        self.schedule = learning_rate_schedule(config.optimizer, config.steps)
        self._keep_ema = config.optimizer.ema_decay is not None
        assert not self.carry or self.layout.microbatches == 1, "refused by Run.problems"
        if isinstance(mesh, jax.sharding.Mesh):
            _check_memory_kinds(self.layout.partition.parameter_memory, self.layout.partition.optimizer_memory, mesh)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the train state."""
        shapes = jax.eval_shape(self._init, 0)
        shardings = state_shardings(shapes, self.builder, self.shard, self.carry)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    @cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the global batch."""
        arrays = self.task.batch(self.run.config.batch, self.run.config.seq)
        return {
            name: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=self.shard.sharding(self.layout.activation_axes(a.axes))
            )
            for name, a in arrays.items()
        }

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every array of the train state, in a tree of the same structure."""
        return jax.tree.map(lambda x: x.sharding, self.abstract_state)

    @cached_property
    def init(self) -> Callable[[Any], TrainState]:
        """The jitted function (seed) -> the state before the first step, sharded as in `shardings`."""
        return jax.jit(self._init, out_shardings=self.shardings)

    def init_with_parameters(self, parameters: Any) -> TrainState:
        """Return the state before the first step with these parameters. Their buffers are donated."""

        def begin(parameters: Any, seed: Any) -> TrainState:
            return state_from_parameters(parameters, self.optimizer, self._keep_ema, seed, self.carry)

        return jax.jit(begin, donate_argnums=0, out_shardings=self.shardings)(parameters, self.run.config.seed)

    @cached_property
    def step(self) -> Any:
        """The jitted function (state, batch) -> (state, metrics). The state is donated, except under `debug=nans`."""

        def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
            with self._matmul_precision():
                return train_step(self, state, batch)

        # JAX itself ignores `donate_argnums` under `jax_debug_nans`, so that it can repeat the step.
        return jax.jit(
            step, donate_argnums=0, out_shardings=(self.shardings, None), compiler_options=self.compiler_options
        )

    @cached_property
    def evaluate(self) -> Any:
        """The jitted function (parameters, batch, references) -> metrics summed over the batch, by name.

        See `Task.references` and `Task.evaluate`.
        """

        def evaluate(parameters: Any, batch: dict[str, jax.Array], references: Any) -> dict[str, jax.Array]:
            with self._matmul_precision():
                return eval_step(self, parameters, batch, references)

        return jax.jit(evaluate, compiler_options=self.compiler_options)

    @cached_property
    def logits(self) -> Any:
        """The jitted function (parameters, tokens) -> float32 logits (batch, seq, vocab). Only for language models."""

        def logits(parameters: Any, tokens: jax.Array) -> jax.Array:
            with self._matmul_precision():
                return logits_step(self, parameters, tokens)

        return jax.jit(logits, compiler_options=self.compiler_options)

    def compile_step(self) -> jax.stages.Compiled:
        """Compile the train step for the mesh. Raises OptionRefusedError if the compiler rejects an option."""
        lowered = self.lower_step()
        with explain_option_errors(get_platform(self.backend)):
            return lowered.compile()

    def lower_step(self) -> jax.stages.Lowered:
        """Lower the train step for the mesh, without allocating arrays."""
        traced = self.step.trace(self.abstract_state, self.abstract_batch)
        if isinstance(self.mesh, jax.sharding.Mesh):
            return traced.lower()
        return traced.lower(lowering_platforms=(get_platform(self.backend).lowering_name,))

    @property
    def backend(self) -> str:
        """The platform the program will run on: cpu, gpu or tpu."""
        return self.shard.backend or jax.default_backend()

    @property
    def sampling_device(self) -> Any:
        """The single device to sample on if all devices share this host's cores, or None to sample on the mesh."""
        if not get_platform(self.backend).runs_on_host or jax.process_count() > 1:
            return None
        assert isinstance(self.mesh, jax.sharding.Mesh)
        return self.mesh.devices.flat[0]

    def loader(self, dataset: Dataset, split: str) -> Loader[Any]:
        """Return a loader of this process's rows of each batch.

        The split `train` repeats without end, in an order set by `Run.order_seed`. `validation` is read once, in file
        order.
        """
        from valkyrie.data.batches import make_loader

        config, is_training = self.run.config, split == "train"
        return make_loader(
            dataset,
            split,
            batch=config.batch,
            seq=config.seq,
            seed=self.run.order_seed if is_training else 0,
            repeat=is_training,
            rows=self.local_rows,
        )

    @cached_property
    def local_rows(self) -> list[int]:
        """Rows of the global batch that are placed on devices of this process, in order."""
        return sorted(
            {
                row
                for array in self.abstract_batch.values()
                for index in array.sharding.addressable_devices_indices_map(array.shape).values()
                for row in range(*(index or (slice(None),))[0].indices(array.shape[0]))
            }
        )

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Make global arrays on the mesh from a batch, of which this process has the rows `local_rows`."""
        return {name: self._place_array(array, batch[name]) for name, array in self.abstract_batch.items()}

    def _place_array(self, array: jax.ShapeDtypeStruct, rows: np.ndarray) -> jax.Array:
        """Make a global array from the rows of this process."""

        def read_rows(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "an array of the batch has dimensions"
            start, stop, _ = index[0].indices(array.shape[0])
            first = bisect.bisect_left(self.local_rows, start)
            return rows[(slice(first, first + stop - start), *index[1:])]

        return jax.make_array_from_callback(array.shape, array.sharding, read_rows)

    def checkpoint(self) -> Checkpoint:
        """Return the function that wraps groups of blocks in `jax.checkpoint`, as the layout's remat specifies."""
        return make_block_checkpoint(self.layout.remat, self.backend)

    def _init(self, seed: int | jax.Array) -> TrainState:
        return init_state(self.builder, self.optimizer, self._keep_ema, seed, self.carry)

    @property
    def carry(self) -> dict[str, Array]:
        """Shapes, dtypes and axes of the arrays that the task passes from step to step."""
        config = self.run.config
        return self.task.carry(self.run.model, config.precision.compute.value, config.batch, config.seq)

    @property
    def compiler_options(self) -> dict[str, str] | None:
        """The values of `options` for the compiler, or None if there are none."""
        values = {option.name: option.value for option in self.options if option.value is not None}
        return get_platform(self.backend).spell_options(values) or None

    @cached_property
    def options(self) -> list[Option]:
        """Compiler options for the platform, and for the chip if it belongs to that platform, each with its origin.

        Training and compiling without devices use the same options.
        """
        itemsize = jnp.dtype(self.run.config.precision.reduction.value).itemsize
        gathered_sizes = (self._gathered_size(spec) for spec in self.builder.specs.values() if "vocab" not in spec.axes)
        platform = get_platform(self.backend)
        computed_options = platform.step_options(max(gathered_sizes) * itemsize, self.mesh.size)
        chip = self._chip(self.mesh, self.backend)
        if (
            self.layout.mesh.slices > 1
            and chip is not None
            and chip.ici_axes == 3
            and chip.xla_options.get(_ASYNC_GATHER)
        ):
            computed_options[_PREFER_GATHERS] = "true"
        return collect_options(chip, computed_options)

    def _chip(self, mesh: AnyMesh, backend: str | None) -> ChipConfig | None:
        """Return the target's chip or, if the target has none, the chip of the mesh's devices.

        None if the chip is unknown or not of the backend's platform.
        """
        chip = self.run.config.target.chip
        if chip is None and isinstance(mesh, jax.sharding.Mesh):
            chip = chip_for_device_kind(mesh.devices.flat[0].device_kind)
        return chip if chip is not None and chip.platform == (backend or jax.default_backend()) else None

    def _sums_head_first(self, chip: ChipConfig | None) -> bool:
        """Return whether to sum the gradient of the loss head before the backward pass of the layers (`Shard`).

        This is the case if the step may not fit otherwise, by the estimate and its error, and if the sum frees at least
        `MIN_HEAD_SHARE` of the memory of a device.
        """
        usable, tables = usable_hbm(chip), [spec for spec in self.builder.specs.values() if "vocab" in spec.axes]
        if chip is None or usable is None or not tables:
            return False
        parts = [math.prod(self.layout.mesh.axes[m] for m in chain(*self.layout.gathered_axes(s.axes))) for s in tables]
        freed = max(4 * self._gathered_size(s) * (1 - 1 / n) for s, n in zip(tables, parts, strict=True))  # float32
        if freed < MIN_HEAD_SHARE * usable:
            return False
        has_errors = get_platform(chip.platform).has_estimate_errors
        error = memory_estimate_errors(self.layout.pipeline is not None).high if has_errors else 1.0
        return error * estimated_memory(self.run).total > usable

    def _gathered_size(self, spec: Parameter) -> int:
        """Return the size of one layer's parameter on a device after it is gathered for use, in elements."""
        parts = [
            math.prod(self.layout.mesh.axes[m] for m in mesh_axes) for mesh_axes in self.layout.used_axes(spec.axes)
        ]
        sizes = zip(spec.shape, parts, spec.axes, strict=True)
        return math.prod(size // part for size, part, axis in sizes if axis != "layers")

    def _matmul_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the precision of matrix products.

        If the compute dtype is float32, they use full float32 instead of TF32 or bfloat16. For other compute dtypes,
        the context has no effect.
        """
        is_float32 = self.run.config.precision.compute is DType.float32
        return jax.default_matmul_precision("highest") if is_float32 else contextlib.nullcontext()


def serialised_module(compiled: jax.stages.Compiled) -> bytes:
    """Return the optimised HLO module of a compiled program, as a serialised HloModuleProto."""
    executable = compiled.runtime_executable()
    assert executable is not None
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def _gradient_sum(chip: ChipConfig | None) -> GradientSum:
    """Return the collective for `gradient_sum=auto`.

    This is an all-to-all if the chip's compiler options overlap it with matrix products, else a reduce-scatter.
    """
    is_asynchronous = chip is not None and option_text(chip.xla_options.get(_ASYNC_ALL_TO_ALL)) == "true"
    return GradientSum.all_to_all if is_asynchronous else GradientSum.reduce_scatter


_ASYNC_ALL_TO_ALL, _ASYNC_GATHER = "xla_tpu_enable_async_all_to_all", "xla_enable_async_all_gather"
_PREFER_GATHERS = "xla_tpu_prefer_async_allgather_to_allreduce"
"""TPU option that keeps gathers over three torus axes asynchronous.

With several slices, libtpu otherwise compiles them to float32 all-reduces, which send four times as much and overlap
with nothing (52B on two v4-384: 34.9 s per step instead of 26.6, libtpu 0.0.42.1).
"""


def _check_memory_kinds(parameters: MemoryKind, optimizer: MemoryKind, mesh: jax.sharding.Mesh) -> None:
    device = mesh.devices.flat[0]
    on_host = get_platform(device.platform).runs_on_host
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    for key, memory in (("parameter_memory", parameters), ("optimizer_memory", optimizer)):
        if memory is MemoryKind.host and ("pinned_host" not in kinds or on_host):
            available = "use the memory of the host" if on_host else f"have {', '.join(kinds)}"
            raise ValueError(
                f"partition.{key}=host needs devices with separate memory and memory_kind=pinned_host, but "
                f"{device.device_kind} devices {available}. Use partition.{key}=device."
            )
