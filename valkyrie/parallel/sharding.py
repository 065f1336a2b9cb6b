"""JAX shardings of a layout, and the `Shard` that models use on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from valkyrie.axes import BATCH, SEQ, Axis, CombinedAxes, LayerFunction, LossHead, apply_head, scan_layers
from valkyrie.hardware.platforms import Platform, get_platform
from valkyrie.parallel.alternating import run_1f1b
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.partition import GradientSum
from valkyrie.parallel.pipeline import StageRegion, run_pipeline, save_without_copies
from valkyrie.parallel.remat import ActivationLocation
from valkyrie.precision import ACCUMULATOR_DTYPE

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def to_spec(dim_axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Return the PartitionSpec for per-dimension tuples of mesh axes."""
    return PartitionSpec(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in dim_axes))


class MeshShard:
    """The `Shard` of a layout on a mesh, made of sharding constraints and `jax.shard_map`."""

    def __init__(
        self,
        layout: Layout,
        mesh: AnyMesh,
        backend: str | None = None,
        gradient_sum: GradientSum = GradientSum.auto,
        *,
        axes_summed_once: Collection[str] = (),
        reduction_dtype: str = ACCUMULATOR_DTYPE.value,
        sums_head_first: bool = False,
    ) -> None:
        """Make the `Shard` of a layout.

        Args:
            layout: The layout.
            mesh: Its mesh.
            backend: JAX platform of the program, or None for the default.
            gradient_sum: Used if the partition has `gradient_sum: auto`. If both are `auto`, gradients are
                reduce-scattered.
            axes_summed_once: Mesh axes over which a step sums gradients once (`SumGradientsPer`).
            reduction_dtype: Dtype of this sum.
            sums_head_first: See `Shard`.
        """
        self.layout = layout
        self.mesh = mesh
        self.backend = backend
        self.sums_head_first = sums_head_first
        self._gradient_sum, configured = gradient_sum, layout.partition.gradient_sum
        self._can_check_vma = True
        self._axes_summed_once, self._reduction_dtype = axes_summed_once, reduction_dtype
        self._uses_all_to_all = (
            gradient_sum if configured is GradientSum.auto else configured
        ) is GradientSum.all_to_all

    @property
    def _platform(self) -> Platform:
        return get_platform(self.backend or jax.default_backend())

    @property
    def shares_gathers(self) -> bool:
        """Whether a product saves its gathered weight for its backward pass (see `Shard`)."""
        saves_unnamed = self.layout.remat.location(None) is not ActivationLocation.nowhere
        return self._platform.shares_gathers and not saves_unnamed

    def sharding(self, dim_axes: Sequence[tuple[str, ...]], memory_kind: str | None = None) -> NamedSharding:
        """Return the NamedSharding of per-dimension tuples of mesh axes on this mesh."""
        return NamedSharding(self.mesh, to_spec(dim_axes), memory_kind=memory_kind)  # pyright: ignore[reportArgumentType]

    def __call__(self, x: jax.Array, *axes: Axis) -> jax.Array:
        """Constrain `x` to the sharding of activations with these logical axes."""
        return jax.lax.with_sharding_constraint(x, self.sharding(self.layout.activation_axes(axes)))

    def gather_for_use(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Gather a parameter for use, over the mesh axes that split data."""
        return jax.lax.with_sharding_constraint(x, self.sharding(self.layout.used_axes(axes)))

    def gather_table(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Gather a parameter for row look-ups, replicated in a pipeline stage and under `SumGradientsPer.hybrid`.

        XLA's partitioner crashes (`partition_group_list.num_replica_groups()`) at a look-up in a table that is split
        over two axes, inside a region that is manual over another axis (JAX 0.10.2).
        """
        if not _manual_axes(self.mesh):
            return self.gather_for_use(x, *axes)
        return jax.lax.with_sharding_constraint(x, self.sharding([()] * x.ndim))

    def shard_for_storage(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain a parameter, or its gradient, to its sharding between steps."""
        return jax.lax.with_sharding_constraint(x, self.sharding(self.layout.stored_axes(axes)))

    def compute_gradient(
        self,
        f: Callable[..., jax.Array],
        operands: Sequence[jax.Array],
        *axes: str | None,
        reduction_dtype: str,
        full_gradient: bool = False,
        row_axes: tuple[str, str] = (BATCH, SEQ),
    ) -> jax.Array:
        """Compute the gradient of a parameter, sum it over devices, and return it sharded like the stored parameter.

        Under `gradient_sum=all_to_all`, each device receives the other devices' gradients of its shard and adds them in
        float32. The TPU compiler overlaps this all-to-all with matmuls, but would not overlap a reduce-scatter
        (experiments/LOG.md). Parameters that tensor parallelism also splits are reduce-scattered anyway, because the
        compiler would gather their gradients over the tensor-parallel axis before an all-to-all.

        Args:
            f: Computes the gradient from the operands or, for an all-to-all, from a device's part of the operands.
            operands: Arrays of shape (*row_axes, ...).
            axes: Logical axes of the parameter.
            reduction_dtype: Dtype of the gradients that an all-to-all sends. Ignored for a reduce-scatter, which
                sends the dtype that `f` returns.
            full_gradient: Whether each device computes a full-size gradient of its part of the batch before the sum. If
                False, the compiler chooses when to sum. Ignored for an all-to-all.
            row_axes: Logical axes of the leading dimensions of the operands. Only sums over (batch, seq) can be an
                all-to-all.
        """
        data_axes = {*self.activation_mesh_axes(BATCH), *self.activation_mesh_axes(SEQ)}
        dim_axes = [tuple(m for m in entry if m in data_axes) for entry in self.layout.gathered_axes(axes)]
        uses_all_to_all = self._uses_all_to_all and any(dim_axes) and row_axes == (BATCH, SEQ)
        if not uses_all_to_all or any(
            self.layout.mesh.axes[m] > 1 for entry in self.layout.used_axes(axes) for m in entry
        ):
            total = f(*operands)
            return self._shard_gradient(self.gather_for_use(total, *axes) if full_gradient else total, *axes)
        scattered_axes = {m for entry in dim_axes for m in entry}
        other_data_axes = tuple(m for m in self.layout.mesh.axes if m in data_axes and m not in scattered_axes)
        row_spec = to_spec((self.activation_mesh_axes(BATCH), self.activation_mesh_axes(SEQ)))

        def sum_local_part(*local: jax.Array) -> jax.Array:
            total = f(*local)
            for dim, entry in enumerate(dim_axes):
                if entry:
                    total = _scatter(total.astype(reduction_dtype), entry, dim)
            return jax.lax.psum(total.astype(reduction_dtype), other_data_axes) if other_data_axes else total

        parts = jax.shard_map(
            sum_local_part,
            mesh=self.mesh,  # pyright: ignore[reportArgumentType]
            in_specs=tuple(row_spec for _ in operands),
            out_specs=to_spec(dim_axes),
            axis_names=data_axes,
            check_vma=False,
        )(*operands)
        return self._shard_gradient(parts, *axes)

    def _shard_gradient(self, x: jax.Array, *axes: str | None) -> jax.Array:
        # Not `shard_for_storage`, which constrains parameters and gradients differently in `BatchShard`.
        return jax.lax.with_sharding_constraint(x, self.sharding(self.layout.stored_axes(axes)))

    def activation_mesh_axes(self, axis: str, *, all_sizes: bool = False) -> tuple[str, ...]:
        """Return the mesh axes that shard a logical axis of activations, those of size 1 only with `all_sizes`."""
        axes, sizes = self.layout.activation_axes([axis])[0], self.layout.mesh.axes
        return tuple(m for m in axes if all_sizes or sizes[m] > 1)

    def shard_count(self, axis: str) -> int:
        """Return the number of shards of a logical axis of activations."""
        return self.layout.shard_count(axis)

    def apply_layers(self, f: LayerFunction, layers: Any, x: Any, rows: Any, head: LossHead | None = None) -> Any:
        """Apply `f` once per layer, in a scan or, if a mesh axis splits the layers, in a pipeline. Then apply `head`.

        Returns the results of `head`, or the stream after the last layer if `head` is None.
        """
        pipeline = self.layout.pipeline
        if pipeline is None:
            return apply_head(head, scan_layers(f, layers, x, rows, self), self)
        batch_axes = tuple(
            axis for axis in self.layout.stage_layout.activations[BATCH] if axis in self._axes_summed_once
        )
        make_shard = partial(self.make_local_shard, self.layout.stage_layout)
        region = StageRegion(pipeline, self.mesh, make_shard, batch_axes, self._reduction_dtype)
        if head is not None and pipeline.is_1f1b:
            return run_1f1b(region, self, f, layers, x, rows, head)
        if self.layout.remat.saves_everything:
            f = save_without_copies(f)
        return apply_head(head, run_pipeline(region, f, layers, x, rows), self)

    def make_local_shard(self, layout: Layout | None = None) -> MeshShard:
        """Return the `Shard` for use inside `jax.shard_map` over the mesh axes over which gradients are summed once.

        `layout`: Layout to use instead of this one, such as that within a pipeline stage.
        """
        layout = (layout or self.layout).shard_layout(self._axes_summed_once)
        return MeshShard(
            layout,
            jax.sharding.get_abstract_mesh(),
            self.backend,
            self._gradient_sum,
            sums_head_first=self.sums_head_first,
        )

    def map(
        self,
        f: Callable[..., Any],
        in_axes: Sequence[CombinedAxes | None],
        out_axes: Any,
        *,
        check_vma: bool | None = None,
    ) -> Callable[..., Any]:
        """Wrap `f` so that it runs on each device with its local shards of the arguments.

        Args:
            f: The function.
            in_axes: Logical axes of each argument, or None for a replicated one.
            out_axes: Logical axes of the result, or a list with those of each result.
            check_vma: Argument of `jax.shard_map`, or None for True on all platforms except TPUs. Always False in a
                `BatchShard`.
        """
        activation = self.layout.activation_axes
        in_specs = tuple(PartitionSpec() if axes is None else to_spec(activation(axes)) for axes in in_axes)
        out_specs = (
            [to_spec(activation(axes)) for axes in out_axes]
            if isinstance(out_axes, list)
            else to_spec(activation(out_axes))
        )
        if check_vma is None or not self._can_check_vma:
            # JAX's TPU kernels do not declare the mesh axes over which their results vary, so the check would fail.
            check_vma = self._can_check_vma and not self._platform.runs_pallas_tpu
        axes = {axis for axis in self.mesh.axis_names if axis not in _manual_axes(self.mesh)}
        if not axes:  # in a pipeline's stage, `f` runs on each device already
            return f
        return jax.shard_map(
            f,
            mesh=self.mesh,  # pyright: ignore[reportArgumentType] - both kinds of mesh serve
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axes,
            check_vma=check_vma,
        )


class BatchShard(MeshShard):
    """The `Shard` of the rows in one shard of the batch, for use under `jax.vmap` over all shards.

    `vmap` must have `spmd_axis_name=axes`, which adds these mesh axes to the specs of everything that depends on the
    rows. Gradients of parameters are those of the shard's rows: they are not summed over `axes`.
    """

    def __init__(self, shard: MeshShard) -> None:
        """`shard` is the `Shard` of the whole batch."""
        self._stored_layout, self.axes = shard.layout, shard.activation_mesh_axes(BATCH)
        super().__init__(shard.layout.shard_layout(self.axes), shard.mesh, shard.backend)
        # The check refuses constants of the function under `vmap` (JAX 0.10.2). Without it, gradients of replicated
        # arguments are summed over the mesh axes that do not split the batch.
        self._can_check_vma = False
        # TODO: sums over the sequence could use the all-to-all of `compute_gradient`, which is untested under `vmap`.
        self._uses_all_to_all = False

    def shard_for_storage(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain a parameter to its sharding between steps, and its gradient to that within a batch shard."""
        stored = self.sharding(self._stored_layout.stored_axes(axes))

        @jax.custom_vjp
        def constrain(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, stored)

        constrain.defvjp(lambda x: (constrain(x), None), lambda _, g: (self._shard_gradient(g, *axes),))
        return constrain(x)


def _manual_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Return the manual axes of a mesh: within a pipeline's stage those of its `StageRegion`, otherwise none."""
    return mesh.manual_axes if isinstance(mesh, jax.sharding.AbstractMesh) else ()


def _scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Sum `x` over mesh axes in float32, and return this device's part along `dim`. Call it in `jax.shard_map`."""
    count = math.prod(jax.lax.axis_size(axis) for axis in axes)
    parts = x.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    received = jax.lax.all_to_all(parts, axes, dim, dim)
    return received.astype(jnp.float32).sum(dim)
