"""`mode=show`: parameters and their shardings, roles of mesh axes, and estimated memory. No arrays are allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from valkyrie.axes import LAYERS, Parameter
from valkyrie.config.run import Run
from valkyrie.models import Model, layer_blocks
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import RoleKind, SumGradientsPer
from valkyrie.parallel.remat import SAVE_EVERYTHING, RematConfig, load_remat, shipped_remat_names
from valkyrie.train.memory import ExpectedMemory, MemoryEstimator
from valkyrie.train.program import StepProgram
from valkyrie.train.room import judge_target_fit
from valkyrie.train.run_memory import accumulated_gradients, expected_memory, saved_bytes, to_candidates
from valkyrie.units import GIB


def show_run(run: Run, console: Console) -> None:
    """Print a run's parameters with their shardings and bytes, its layout, and its expected memory per device.

    The last table has the memory under each remat policy.
    """
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    layout, parameters, candidates = program.layout, run.model.parameters(), to_candidates([run])
    table = _table(f"{run.model.name} under {layout.name}")
    table.add_column("parameter", overflow="fold", no_wrap=console.width >= 110)
    table.add_column("shape: logical axis / mesh axes", overflow="fold")
    table.add_column("bytes/device", justify="right", no_wrap=True)
    for name, spec in parameters.items():
        itemsize = 4 if spec.float32 else run.config.precision.parameter.itemsize
        size = int(candidates.shard_elements(spec, "stored").item()) * itemsize
        table.add_row(name, describe_split(spec, layout.stored_axes(spec.axes)), f"{size:,}")
    console.print(table, soft_wrap=False)
    count = sum(spec.size for spec in parameters.values())
    console.print(
        f"parameters: {count:,}   vocabulary: {run.model.vocab_size:,} tokens in {run.model.vocab_rows:,} rows"
    )
    console.print(f"roles: {layout.describe_roles()}")
    if layout.pipeline is not None:
        console.print(f"pipeline: {layout.pipeline.describe()}", highlight=False)
    if gradients := accumulated_gradients(run):
        console.print(
            f"gradients: {gradients.describe()}{_describe_gradient_choice(run, gradients.summed_per)}", highlight=False
        )
    if run.batch_note:
        console.print(f"batch: {run.batch_note}", highlight=False)
    for note in layout.notes:
        console.print(f"note: {note}")
    if axes := [axis for axis in _axes_without_rule(layout, parameters.values()) if axis not in _small_axes(run.model)]:
        console.print(
            f"note: partition={layout.partition.name} has no rule for {', '.join(axes)}, so model parallelism does not "
            f"split {'it' if len(axes) == 1 else 'them'}. Rename an axis to mlp in the model, or add a rule to your "
            "own partition"
        )
    console.print(f"target: {run.config.target.describe()}   batch: {run.config.batch} x {run.config.seq} tokens")
    expected = expected_memory(run, program.abstract_state)
    _print_memory(console, run, expected)
    _print_remats(console, run, expected)


def _describe_gradient_choice(run: Run, summed_per: SumGradientsPer) -> str:
    """Return a clause with the chip by whose memory a step chooses how often to sum gradients.

    If the setting is `hybrid` and has no effect, returns a clause with the reason. Returns "" for other settings.
    """
    chip, partition = run.config.target.chip, run.layout.partition
    if partition.sum_gradients_per is SumGradientsPer.hybrid and summed_per is not SumGradientsPer.hybrid:
        return (
            f", as with partition.sum_gradients_per={summed_per.value}: hybrid needs a mesh axis that splits the batch "
            "but no parameter"
        )
    if partition.sum_gradients_per is not SumGradientsPer.auto:
        return ""
    if chip is not None:
        return f", chosen by the memory of {chip.name}"
    return ". This is the choice without a slice. With target=, it depends on the memory of the chip"


def _small_axes(model: Model) -> set[str]:
    """Return the `small_axes` of the blocks of a model that declares its layers."""
    return {axis for block, _ in layer_blocks(model) for axis in block.small_axes}


def _axes_without_rule(layout: Layout, parameters: Iterable[Parameter]) -> list[str]:
    """Return the logical axes without a partition rule, in the matrices that model parallelism (MP1) leaves unsplit.

    Skips a matrix if the partition has a rule for any of its axes, even if the rule has no effect on this mesh, for
    example because the mesh axis does not divide the number of heads. Rules for `embed` and layers do not count, and
    these axes are not returned. Empty if no mesh axis has the role MP1.
    """
    mesh_axes = {axis for axis, role in layout.roles.items() if role.kind is RoleKind.MP1}
    matrices = [spec for spec in parameters if spec.group == "matrix"] if mesh_axes else []
    ignored_axes = {None, LAYERS, "embed"}
    axes_with_rule = {axis.removesuffix("?") for axis in layout.partition.parameters} - ignored_axes
    unsplit_matrices = [
        spec
        for spec in matrices
        if axes_with_rule.isdisjoint(spec.axes) and mesh_axes.isdisjoint(chain(*layout.stored_axes(spec.axes)))
    ]
    return list(
        dict.fromkeys(
            axis for spec in unsplit_matrices for axis in spec.axes if axis is not None and axis not in ignored_axes
        )
    )


def describe_split(spec: Parameter, mesh_axes_by_dimension: Sequence[Sequence[str]]) -> str:
    """Format a parameter's dimensions with the mesh axes that split them: `8 layers · 5632 mlp/x · 2048 embed/yz`."""
    parts = []
    for size, axis, mesh_axes in zip(spec.shape, spec.axes, mesh_axes_by_dimension, strict=True):
        parts.append(f"{size}{f' {axis}' if axis else ''}{'/' + ''.join(mesh_axes) if mesh_axes else ''}")
    return " · ".join(parts)


def _print_memory(console: Console, run: Run, memory: ExpectedMemory[int]) -> None:
    table = _table("expected memory on one device, GiB")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        **({"EMA of the parameters": memory.ema} if memory.ema else {}),
        "activations (estimate)": memory.activations,
    }
    for name, size in parts.items():
        table.add_row(name, f"{size / GIB:.3f}")
    table.add_row("total", f"{memory.total / GIB:.3f}", style="bold")
    console.print(table, soft_wrap=False)
    if fit := judge_target_fit(run, memory):
        console.print(fit.text, soft_wrap=True)


def _print_remats(console: Console, run: Run, memory: ExpectedMemory[int]) -> None:
    table = _table("memory of one device under each remat policy, GiB (estimate)")
    table.add_column("remat=")
    for column in ("saved on the device", "in host memory", "total"):
        table.add_column(column, justify="right")
    estimator = MemoryEstimator(run, to_candidates([run]))
    rows = []
    for name, remat in legal_remats(run).items():
        saved_sizes, activations = saved_bytes(run, remat), int(estimator.estimate(remat).activations.item())
        rows.append(
            (name, saved_sizes.device_total, saved_sizes.host_total, memory.total - memory.activations + activations)
        )
    for name, *sizes in sorted(rows, key=lambda row: (-row[1], row[2])):
        style = "bold" if name == run.config.remat.label else None
        table.add_row(name, *(f"{size / GIB:.3f}" for size in sizes), style=style)
    console.print(table, soft_wrap=False)
    sizes_text = ", ".join(
        f"{name} {size / GIB:.3f}" for name, size in saved_bytes(run, SAVE_EVERYTHING).device.items()
    )
    console.print(f"saved size of each activation, GiB per device, all blocks: {sizes_text}")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=SIMPLE)


def legal_remats(run: Run) -> dict[str, RematConfig]:
    """Return the remat policies that are legal for a run, by label: the shipped ones and the run's own."""
    remats = {name: load_remat(name) for name in shipped_remat_names()}
    remats.setdefault(run.config.remat.label, run.config.remat)
    return {name: remat for name, remat in remats.items() if not run.changed(remat=remat).layout_problem_identities()}
