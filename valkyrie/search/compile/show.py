"""Prints a prediction or a measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from valkyrie.axes import axes_text
from valkyrie.compiled.communication import CollectiveTrace, Communication
from valkyrie.hardware.chips import known_chips
from valkyrie.parallel.axis_links import CORE, DCN, TORUS_AXES
from valkyrie.parts import describe_part
from valkyrie.search.compile.correction import published_runs_on
from valkyrie.search.compile.prediction import (
    CompileStatus,
    MeasuredStep,
    Measurement,
    MemoryReport,
    PredictedStep,
    Prediction,
    StepInterval,
    short_cause,
    short_source,
)
from valkyrie.train.options import TO_FIT, TO_OVERLAP, Option, settings_for_training
from valkyrie.units import GIB, count_text, decimal_bytes_text, duration_text, gib_text, memory_text

_FORMATS: dict[str, Callable[[float], str]] = {
    "GiB": lambda size: f"{size / GIB:.2f}",
    "MiB": lambda size: f"{size / 2**20:.2f}",
    "ms": lambda seconds: f"{1e3 * seconds:.2f}",
    "waiting ms": lambda seconds: f"{1e3 * seconds:.2f}",
    "%": lambda share: f"{100 * share:.1f}",
    "arrays": lambda arrays: f"{arrays:,}",
    "calls": lambda calls: f"{calls:,.0f}",
    "sent": decimal_bytes_text,
}
"""Formats of number columns, by title."""


def print_record(record: Prediction | Measurement, console: Console) -> None:
    """Print a prediction or measurement as a report."""
    _show_subject(record, console)
    if record.status is not CompileStatus.ok:
        text = f"{record.status.value}: {record.reason}"
        if record.status is CompileStatus.does_not_fit and record.memory is not None:
            is_listed = isinstance(record, Prediction) and record.program is not None
            text = describe_shortage(replace(record.memory, largest=()) if is_listed else record.memory, record.reason)
        console.print(text, style="bold red")
        if isinstance(record, Prediction) and record.program is not None:
            _show_allocations(record, console)
        _show_faults(record, console)
        return
    if record.options:
        console.print(f"compiler options: {_describe_options(record.options)}")
    if record.memory is not None:
        _show_memory(record.memory, record.options, console)
    if record.step is not None:
        _show_step(record, console)
    _show_faults(record, console)
    if record.communication is not None:
        _show_communication(record, record.communication, console)
    if isinstance(record, Prediction) and record.step is not None:
        _show_costs(record, record.step.step_s, console)


def _show_faults(record: Prediction | Measurement, console: Console) -> None:
    for fault in record.faults if isinstance(record, Prediction) else ():
        console.print(f"fault {fault}", style="bold yellow")


def make_table(title: str, columns: Sequence[str], number_columns: Iterable[str] = _FORMATS) -> Table:
    """Return an empty table. Columns in `number_columns` contain numbers, so they are right-aligned and not wrapped."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE)
    number_columns = set(number_columns)
    for column in columns:
        table.add_column(
            column, justify="right" if column in number_columns else "left", no_wrap=column in number_columns
        )
    return table


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], console: Console) -> None:
    table = make_table(title, columns)
    for row in rows:
        cells = [_FORMATS.get(column, str)(value) for column, value in zip(columns, row, strict=True)]
        table.add_row(*cells, style="bold" if row[0] == "peak" else None)
    console.print(table, soft_wrap=False)


def _show_subject(record: Prediction | Measurement, console: Console) -> None:
    """Print a run's layout and batch, or the name and mesh of another program."""
    if isinstance(record, Prediction) and (program := record.program) is not None:
        mesh = " · ".join(f"{axis}={size}" for axis, size in program.axes.items() if size > 1) or "one device"
        console.print(f"{program.name} on {program.described}", style="bold")
        console.print(f"mesh: {mesh}")
        return
    layout = record.layout
    console.print(f"{layout.model} under {layout.name} on {layout.described}", style="bold")
    console.print(f"roles: {layout.roles}")
    if layout.pipeline:
        console.print(f"pipeline: {layout.pipeline.described}", highlight=False)
    if isinstance(record, Prediction) and record.gradients is not None:
        console.print(f"gradients: {record.gradients.describe()}", highlight=False)
    for line in record.placement if isinstance(record, Prediction) else ():
        console.print(f"placement: {line}")
    console.print(f"batch: {layout.batch} x {layout.seq} tokens, {layout.precision}, remat={layout.remat}")


def describe_shortage(memory: MemoryReport, reason: str | None) -> str:
    """Describe a layout that does not fit: bytes needed and usable, largest arrays, and changes that save memory.

    If the needed bytes are unknown, gives only `reason`.
    """
    if memory.needed is None:
        return f"does not fit: {reason}"
    text = f"does not fit: needs {gib_text(memory.needed)} of {gib_text(memory.usable)} usable"
    if memory.largest:
        causes = [f" ({short_cause(entry.op_name)})" if entry.op_name else "" for entry in memory.largest[:3]]
        arrays = [f"{e.shape} {gib_text(e.bytes)}{cause}" for e, cause in zip(memory.largest, causes, strict=False)]
        text += f"; largest: {', '.join(arrays)}"
    if memory.savings:
        text += f"; try: {', '.join(f'{entry.change} (about -{gib_text(entry.saves)})' for entry in memory.savings)}"
    return text


def _show_allocations(prediction: Prediction, console: Console) -> None:
    """Print the largest arrays of a program that does not fit, and what would help."""
    largest = prediction.memory.largest if prediction.memory else ()
    columns = [("GiB", lambda entry: entry.bytes), ("what", lambda entry: entry.shape or "")]
    if any(entry.op_name for entry in largest):
        columns.append(("operation", lambda entry: short_cause(entry.op_name) if entry.op_name else ""))
    if any(entry.source for entry in largest):
        columns.append(("source", lambda entry: short_source(entry.source)))
    counts = Counter(tuple(value(entry) for _, value in columns) for entry in largest)  # equal layers have equal arrays
    if counts:
        names, rows = [name for name, _ in columns], [list(row) for row in counts]
        if max(counts.values()) > 1:
            names[1:1], rows = ["arrays"], [[row[0], count, *row[1:]] for row, count in counts.items()]
        _print_table("the largest arrays on a device", names, rows, console)
    for hint in prediction.hints:
        console.print(f"hint: {hint.text}")


def _describe_options(options: Sequence[Option]) -> str:
    """Format compiler options by who set them: `a=1, b=true (chip default) · c=2, d removed (you)`."""
    texts_by_source: dict[str, list[str]] = {}
    for option in options:
        texts_by_source.setdefault(option.set_by, []).append(str(option))
    return " · ".join(f"{', '.join(texts)} ({source})" for source, texts in texts_by_source.items())


def _show_memory(memory: MemoryReport, options: Sequence[Option], console: Console) -> None:
    if memory.peak is None:
        usable = "" if memory.usable is None else f" of {gib_text(memory.usable)} usable"
        arguments = gib_text(memory.split["arguments"])
        console.print(f"memory: arguments need {arguments}{usable}. The module does not record its other memory.")
        return
    unit = "GiB" if memory.peak >= GIB / 10 else "MiB"
    rows = (memory.split | {"peak": memory.peak}).items()
    _print_table("memory per device at the peak", ("what", unit), rows, console)
    if memory.reported_peak is not None:
        console.print(f"the devices report a peak of {gib_text(memory.reported_peak)}")
    if memory.usable is not None and memory.headroom is not None:
        share = memory.headroom / memory.usable
        verdict = "fits" if memory.headroom >= 0 else "does not fit"
        free = memory_text(memory.headroom) if share < 0.02 else gib_text(memory.headroom)
        text = f": {gib_text(memory.peak)} of {gib_text(memory.usable)} usable; headroom {free} ({100 * share:.0f}%)"
        console.print(Text.assemble((verdict, "bold"), text))
    other_memory = (
        ("reserved by the runtime", memory.reserved),
        ("code", memory.code),
        ("in host memory", memory.host),
    )
    if parts := [f"{what} {memory_text(size)}" for what, size in other_memory if size]:
        console.print(f"not included, per device: {', '.join(parts)}")
    if settings := " ".join(settings_for_training(options, TO_FIT)):
        console.print(f"fits only with compiler options that save memory. Add to the training command: {settings}")
    if settings := " ".join(settings_for_training(options, TO_OVERLAP)):
        console.print(
            "Communication overlaps with compute only with compiler options, because the step nearly fills the memory. "
            f"Add to the training command: {settings}"
        )


def _show_step(record: Prediction | Measurement, console: Console) -> None:
    step, simulated_suffix = record.step, " simulated" if isinstance(record, Measurement) and record.simulated else ""
    assert step is not None
    facts = []
    if step.tokens_per_second is not None:
        facts.append(f"{step.tokens_per_second:,.0f} {record.unit}/s{simulated_suffix}")
        facts.append(f"{step.tokens_per_second_per_chip:,.0f} {record.unit}/s/chip{simulated_suffix}")
    if step.mfu is not None:
        impossible = " (more than 100%: check the FLOPs per step)" if step.mfu > 1 else ""
        facts.append(f"MFU {100 * step.mfu:{'.3g' if impossible else '.1f'}}% of {step.mfu_denominator}{impossible}")
    elif isinstance(step, PredictedStep) and step.hardware_utilisation is not None and step.executed_flops is not None:
        executed = f"{step.executed_flops / 1e12:,.1f} TFLOP of matrix products per device"
        facts.append(f"{executed} at {100 * step.hardware_utilisation:.1f}% of {step.mfu_denominator}")
    kind, spread = "predicted", ""
    if isinstance(step, MeasuredStep):
        kind = "measured"
        if step.p90_s is not None and step.min_s is not None:
            spread = f" (p90 {duration_text(step.p90_s)}, min {duration_text(step.min_s)})"
    text = f"{kind} step{simulated_suffix}: {duration_text(step.step_s)}"
    console.print(Text.assemble((text, "bold"), ", ".join([spread, *facts])))
    if isinstance(step, PredictedStep):
        is_program = isinstance(record, Prediction) and record.program is not None
        chip = None if record.about is None else known_chips().get(record.about.chip or "")
        platform = None if chip is None else chip.platform
        console.print(f"interval: {describe_interval(step.interval, is_program=is_program, platform=platform)}")
        for price, tokens in step.tokens_per_dollar.items():
            console.print(f"{tokens / 1e6:,.2f} million {record.unit} per dollar ({price.replace('_', ' ')})")
    if isinstance(record, Prediction) and record.parts:
        rows = [
            (describe_part(part.kind, axes_text(part.mesh_axes)), part.seconds, part.seconds / step.step_s)
            for part in sorted(record.parts, key=lambda part: -part.seconds)
            if part.seconds >= 5e-4 * step.step_s
        ]
        _print_table("where the step time goes", ("what", "ms", "%"), rows, console)


def describe_interval(interval: StepInterval | None, *, is_program: bool = False, platform: str | None = None) -> str:
    """Describe the interval of a predicted step, and the measured runs behind it.

    `is_program` is whether the step is that of another program (`valkyrie.predict`), not of a run. `platform` is that
    of the chip, or None if unknown.
    """
    if interval is None and is_program:
        return (
            "unknown, because published runs were predicted with Valkyrie's own transformers, and errors for other "
            "programs are not known. If you time a layout, measured_s={NAME: SECONDS} corrects the others (with "
            "layouts= or valkyrie.search). mode=calibrate derives intervals from your own runs"
        )
    if interval is None and platform is not None and not published_runs_on(platform):
        return (
            "unknown for chips of this kind, because no published runs give one. mode=calibrate derives intervals from "
            "your own runs"
        )
    if interval is None:
        return "unknown for this model. Intervals come from published runs of dense transformers, or mode=calibrate"
    seconds = f"{duration_text(interval.low_s)} to {duration_text(interval.high_s)}"
    low, high = (100 * (ratio - 1) for ratio in (interval.low, interval.high))
    if interval.yours:
        runs_text = f"your {interval.rows} measured steps on {interval.chip}"
        return f"{seconds}, because {runs_text} differ from their predictions by {low:+.0f}% to {high:+.0f}%"
    chips = interval.chip or ("other chips" if interval.is_new else "this and other chips")
    runs_text = f"{count_text(interval.rows, 'published run')} of {count_text(interval.models, 'model')} on {chips}"
    if interval.is_new:
        runs_text = f"no run on this chip is published, and {runs_text}"
    elif interval.chip is None:
        runs_text += " (this one has too few runs or recipes)"
    return f"{seconds}, because {runs_text} differ from their predictions by up to {high:.0f}%"


def _show_communication(record: Prediction | Measurement, traffic: Communication, console: Console) -> None:
    if not traffic.collectives:
        console.print("no communication between devices")
        return
    bytes_by_mesh_axes = {axes_text(axes): size for axes, size in traffic.by_mesh_axes.items()}
    is_torus = {*traffic.bytes_by_torus_axis} <= {*TORUS_AXES, CORE, DCN}
    sizes_by = {
        "mesh axes": bytes_by_mesh_axes,
        "torus axis" if is_torus else "link": traffic.bytes_by_torus_axis,
        "kind": traffic.bytes_by_kind,
    }
    for what, sizes in sizes_by.items():
        if parts := [
            f"{name} {decimal_bytes_text(size)}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])
        ]:
            console.print(f"sent by {what}: {' · '.join(parts)}")
    if traffic.sending_s:
        hidden = max(0.0, 1 - (traffic.exposed_s or 0.0) / traffic.sending_s)
        console.print(f"{100 * hidden:.0f}% of the communication time overlaps with compute")
    if isinstance(record, Measurement) and record.trace is not None:
        _show_trace(record.trace, record.simulated, console)
    has_times = isinstance(record, Prediction) and bool(record.parts)
    columns = ("kind", "over", "sent", "calls", *(("waiting ms",) if has_times else ()), "cause", "source")
    rows = [
        (
            *(use.kind, axes_text(use.mesh_axes), use.bytes, use.calls),
            *((use.exposed_s,) if has_times else ()),
            *(short_cause(use.cause), short_source(use.source)),
        )
        for use in traffic.collectives[:10]
    ]
    _print_table("communication by cause", columns, rows, console)


def _show_trace(trace: CollectiveTrace, simulated: bool, console: Console) -> None:
    if trace.times is None:
        console.print(f"time in collectives: {trace.note}")
    if not trace.times or trace.step_s is None:
        return
    suffix, total = ", simulated" if simulated else "", sum(time.seconds for time in trace.times)
    text = " · ".join(f"{axes_text(t.mesh_axes)} {t.kind} {duration_text(t.seconds)}" for t in trace.times)
    console.print(
        f"traced step: {duration_text(trace.step_s)}, of which {duration_text(total)} in collectives, including "
        f"waiting (mean over devices{suffix}): {text}",
    )


def _show_costs(prediction: Prediction, step_s: float, console: Console) -> None:
    rows = []
    for cost in prediction.costs:
        what = describe_part(cost.kind, axes_text(cost.mesh_axes), short=True)
        numbers = cost.seconds, cost.seconds / step_s, cost.calls
        rows.append((*numbers, what, short_cause(cost.op_name), short_source(cost.source)))
    columns = ("ms", "%", "calls", "what", "operation", "source")
    title = f"the {len(rows)} slowest operations" if len(rows) > 1 else "the slowest operation"
    _print_table(title, columns, rows, console)
    # Training steps do not need this table, because their operations above name the lines.
    if prediction.program is not None and prediction.lines:
        lines = [
            (line.seconds, line.seconds / step_s, line.waiting_s, short_source(line.source), line.text or "")
            for line in prediction.lines
        ]
        columns = ("ms", "%", "waiting ms", "source", "code")
        title = f"the {len(lines)} slowest source lines" if len(lines) > 1 else "the slowest source line"
        _print_table(title, columns, lines, console)
    for note in prediction.notes:
        console.print(f"assumed: {note}", style="dim")
    for hint in prediction.hints:
        console.print(f"hint: {hint.text}")
