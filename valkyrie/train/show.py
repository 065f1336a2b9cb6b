"""`mode=show`: every parameter with its placement, the roles, and the memory expected."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import usable_hbm
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.remat import EVERYTHING
from valkyrie.train.kept import by_policy, kept_bytes
from valkyrie.train.memory import (
    ExpectedMemory,
    ParameterRow,
    activation_bytes,
    estimate_errors,
    expected_memory,
    parameter_rows,
)
from valkyrie.units import GIB


def show_run(run: Run, console: Console) -> None:
    """Print the tables of a run; nothing is allocated and no device is touched."""
    from valkyrie.train.program import StepProgram

    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    layout, rows = program.layout, parameter_rows(run)
    table = Table(title=f"{run.model.name} under {layout.name}", title_justify="left", header_style="bold", box=SIMPLE)
    table.add_column("parameter", overflow="fold", no_wrap=console.width >= 110)
    table.add_column("shape: logical axis / mesh axes", overflow="fold")
    table.add_column("bytes/device", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, describe_split(row), f"{row.bytes_per_device:,}")
    console.print(table, soft_wrap=False)
    count = sum(row.spec.size for row in rows)
    console.print(
        f"parameters: {count:,}   vocabulary: {run.model.vocab_size:,} tokens in {run.model.vocab_rows:,} rows"
    )
    console.print(f"roles: {layout.describe_roles()}")
    if layout.pipeline is not None:
        console.print(f"pipeline: {layout.pipeline.describe()}", highlight=False)
    if run.batch_note:
        console.print(f"batch: {run.batch_note}", highlight=False)
    for note in layout.notes:
        console.print(f"note: {note}")
    console.print(f"target: {run.config.target.describe()}   batch: {run.config.batch} x {run.config.seq} tokens")
    expected = expected_memory(run, program.abstract_state)
    _print_memory(console, run, expected)
    _print_remats(console, run, expected)


def describe_split(row: ParameterRow) -> str:
    """Return a parameter's dimensions with the mesh axes that split them: `8 layers · 5632 mlp/x · 2048 embed/yz`."""
    parts = []
    for size, axis, mesh_axes in zip(row.spec.shape, row.spec.axes, row.split, strict=True):
        parts.append(f"{size}{f' {axis}' if axis else ''}{'/' + ''.join(mesh_axes) if mesh_axes else ''}")
    return " · ".join(parts)


def _print_memory(console: Console, run: Run, memory: ExpectedMemory) -> None:
    table = Table(title="expected memory on one device, GiB", title_justify="left", header_style="bold", box=SIMPLE)
    table.add_column("what")
    table.add_column("GiB", justify="right")
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "average of parameters (EMA)": memory.average,
        "activations (estimate)": memory.activations,
    }
    for name, size in parts.items():
        if size or not name.startswith("average"):
            table.add_row(name, f"{size / GIB:.3f}")
    table.add_row("total", f"{memory.total / GIB:.3f}", style="bold")
    console.print(table, soft_wrap=False)
    chip = run.config.target.chip
    usable = usable_hbm(chip)
    if chip is not None and usable is not None:
        whose = f"a {chip.name} {'chip' if chip.devices == 1 else 'device'}"
        console.print(
            verdict(memory, usable, whose, measured=platform_of(chip.platform).has_estimate_errors), soft_wrap=True
        )


def verdict(memory: ExpectedMemory, usable: int, whose: str, *, measured: bool) -> str:
    """Return whether a step fits into the usable bytes of a device, by the estimate and by how far off it was.

    `measured`: the errors of the estimate have been measured on the platform.
    """
    off = estimate_errors() if measured else {"low": 0.5, "high": 2.0}
    at_rest = memory.parameters + memory.optimizer + memory.average
    low, high = (max(at_rest, off[key] * memory.total) for key in ("low", "high"))
    word = "does not fit" if low > usable else "should fit" if high <= usable else "may not fit"
    held = (
        f"it was for {off['layouts']} layouts of {off['models']} models" if measured else "it may be, a factor of two"
    )
    numbers = f"{memory.total / GIB:.1f} GiB, {low / GIB:.1f} to {high / GIB:.1f} GiB by how far off {held}"
    return f"{word}: an estimate of {numbers}; {whose} has {usable / GIB:.1f} GiB usable. mode=compile says for certain"


def _print_remats(console: Console, run: Run, memory: ExpectedMemory) -> None:
    rest = memory.total - memory.activations
    title = "memory of each remat on one device, GiB (estimate)"
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE)
    table.add_column("remat=")
    for column in ("kept on the device", "in host memory", "total"):
        table.add_column(column, justify="right")
    for name, kept in by_policy(run).items():
        sizes = (kept.on_device, kept.on_host, rest + activation_bytes(run, memory.gradients, kept))
        style = "bold" if name == run.config.remat.label else None
        table.add_row(name, *(f"{size / GIB:.3f}" for size in sizes), style=style)
    console.print(table, soft_wrap=False)
    listed = ", ".join(f"{name} {size / GIB:.3f}" for name, size in kept_bytes(run, remat=EVERYTHING).device.items())
    console.print(f"activations of all blocks, GiB: {listed}", markup=False)
