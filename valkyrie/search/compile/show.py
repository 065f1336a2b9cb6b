"""Prints a prediction or a measurement."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from valkyrie.axes import axes_text
from valkyrie.compiled.communication import Communication
from valkyrie.parts import PartKind, StepPart
from valkyrie.search.compile.prediction import (
    CollectiveTrace,
    CompileStatus,
    MeasuredStep,
    Measurement,
    MemoryReport,
    OperationCost,
    PredictedStep,
    Prediction,
    SourceLine,
    StepInterval,
    StepTime,
)
from valkyrie.search.compile.summary import short_cause, short_source
from valkyrie.train.options import KEY, TO_FIT, Option
from valkyrie.units import GIB, duration, gib
from valkyrie.units import memory as memory_text
from valkyrie.units import sent as sent_text


def show(result: Prediction | Measurement, console: Console) -> None:
    """Print what `compile.json` or `measure.json` holds."""
    _head(result, console)
    memory, step = result.memory, result.step
    if result.status is CompileStatus.does_not_fit and memory is not None:
        console.print(describe_shortage(memory, result.reason), style="bold red", markup=False)
        return
    if result.status is not CompileStatus.ok:
        console.print(f"{result.status.value}: {result.reason}", style="bold red", markup=False)
        return
    if result.options:
        console.print(f"compiler options: {_options(result.options)}", markup=False)
    if memory is not None:
        _memory(memory, result.options, console)
    simulated = isinstance(result, Measurement) and result.simulated
    parts = result.parts if isinstance(result, Prediction) else ()
    if step is not None:
        _speed(step, simulated, console)
        if parts:
            _parts(parts, step.step_s, console)
    if result.communication is not None:
        trace = result.trace if isinstance(result, Measurement) else None
        _communication(result.communication, trace, simulated, bool(parts), console)
    if isinstance(result, Prediction) and step is not None:
        _costs(result.costs, step.step_s, console)
        if "program" in result.about:  # of our own step, the operations above name the lines
            _lines(result.lines, step.step_s, console)
        for note in result.notes:
            console.print(f"assumed: {note}", style="dim", markup=False)
        for hint in result.hints:
            console.print(f"hint: {hint.text}", markup=False)


def _head(result: Prediction | Measurement, console: Console) -> None:
    """Print what was compiled and for what: a run's layout and batch, or any program's name and mesh."""
    about = result.about
    if "program" in about:
        mesh = " · ".join(f"{axis}={size}" for axis, size in about["axes"].items() if size > 1) or "one device"
        console.print(f"{about['program']} on {about['described']}", style="bold", markup=False)
        console.print(f"mesh: {mesh}", markup=False)
        return
    console.print(f"[bold]{about['model']} under {about['layout']} on {about['described']}[/]")
    console.print(f"roles: {about['roles']}")
    if about.get("pipeline"):
        console.print(f"pipeline: {about['pipeline']['described']}", markup=False, highlight=False)
    for line in result.placement if isinstance(result, Prediction) else ():
        console.print(f"placement: {line}", markup=False)
    console.print(f"batch: {about['batch']} x {about['seq']} tokens, {about['precision']}, remat={about['remat']}")


def describe_shortage(memory: MemoryReport, reason: str | None) -> str:
    """Return the verdict of a layout that does not fit: both numbers, the largest arrays, and what might fit."""
    if memory.needed is None:
        return f"does not fit: {reason}"
    text = f"does not fit: needs {gib(memory.needed)} of {gib(memory.usable)} usable"
    if memory.largest:
        causes = [f" ({short_cause(entry.op_name)})" if entry.op_name else "" for entry in memory.largest[:3]]
        named = [f"{e.shape} {gib(e.bytes)}{cause}" for e, cause in zip(memory.largest, causes, strict=False)]
        text += f"; largest: {', '.join(named)}"
    if memory.savings:
        tries = [f"{entry.change} (about -{gib(entry.saves)})" for entry in memory.savings]
        text += f"; try: {', '.join(tries)}"
    return text


def _options(options: Sequence[Option]) -> str:
    """Return the compiler's options by who set them: `a=1, b=true (chip default) · c=2, d removed (you)`."""
    by: dict[str, list[str]] = {}
    for option in options:
        by.setdefault(option.set_by, []).append(str(option))
    return " · ".join(f"{', '.join(texts)} ({who})" for who, texts in by.items())


def _memory(memory: MemoryReport, options: Sequence[Option], console: Console) -> None:
    if memory.peak is None:
        of = "" if memory.usable is None else f" of {gib(memory.usable)} usable"
        arguments = gib(memory.split["arguments"])
        console.print(f"memory: arguments take {arguments}{of}; this module does not say what a step needs beside them")
        return
    unit, scale = ("GiB", GIB) if memory.peak >= GIB / 10 else ("MiB", 2**20)
    table = _table("memory of one device at the peak", ("what", unit))
    for name, size in memory.split.items():
        table.add_row(name, f"{size / scale:.2f}")
    table.add_row("peak", f"{memory.peak / scale:.2f}", style="bold")
    console.print(table, soft_wrap=False)
    if memory.reported_peak is not None:
        console.print(f"the devices report a peak of {gib(memory.reported_peak)}")
    if memory.usable is not None and memory.headroom is not None:
        share = memory.headroom / memory.usable
        verdict = "fits" if memory.headroom >= 0 else "does not fit"
        free = memory_text(memory.headroom) if share < 0.02 else gib(memory.headroom)
        console.print(
            f"[bold]{verdict}[/]: {gib(memory.peak)} of {gib(memory.usable)} usable; "
            f"headroom {free} ({100 * share:.0f}%)"
        )
    others = (("kept by the runtime", memory.reserved), ("code", memory.code), ("in host memory", memory.host))
    if beside := [f"{what} {memory_text(size)}" for what, size in others if size]:
        console.print(f"beside it, on each device: {', '.join(beside)}")
    if needed := [option for option in options if option.set_by == TO_FIT]:
        lines = " ".join(f"{KEY}.{option}" for option in needed)
        console.print(f"without compiler options that save memory it does not fit; to train, write: {lines}")


def _speed(step: StepTime, simulated: bool, console: Console) -> None:
    word, text = " simulated" if simulated else "", f"{duration(step.step_s)}[/]"
    if isinstance(step, MeasuredStep) and step.p90_s is not None and step.min_s is not None:
        text += f" (p90 {duration(step.p90_s)}, least {duration(step.min_s)})"
    text = f"[bold]{'measured' if isinstance(step, MeasuredStep) else 'predicted'} step{word}: {text}, "
    parts = []
    if step.tokens_per_second is not None:
        parts.append(f"{step.tokens_per_second:,.0f} tokens/s{word}")
        parts.append(f"{step.tokens_per_second_per_chip:,.0f} tokens/s/chip{word}")
    if step.mfu is not None:
        parts.append(f"MFU {100 * step.mfu:.1f}% of {step.mfu_denominator}")
    elif isinstance(step, PredictedStep) and step.hardware_utilisation is not None and step.executed_flops is not None:
        executed = f"{step.executed_flops / 1e12:,.1f} TFLOP of products a device"
        parts.append(f"{executed}, {100 * step.hardware_utilisation:.1f}% of {step.mfu_denominator}")
    console.print(text + ", ".join(parts))
    if isinstance(step, PredictedStep):
        console.print(f"how far to trust it: {how_far(step.interval)}", markup=False)
        for kind, tokens in step.tokens_per_dollar.items():
            console.print(f"{tokens / 1e6:,.2f} million tokens per dollar ({kind.replace('_', ' ')})")


def how_far(interval: StepInterval | None) -> str:
    """Return what a predicted step is held to: what measured runs took of what was predicted, and the step by that."""
    if interval is None:
        return "no measured run was predicted that could be held beside it"
    chip, by = interval.chip, "other recipes"
    runs = f"{interval.rows} published runs of {interval.models} model{'s' * (interval.models > 1)} "
    runs += f"on {chip}" if chip else "on chips with several recipes, for want of some on this one"
    if interval.yours:
        runs, by = f"your {interval.rows} measured steps on {chip}", "other models and batches"
    took = f"took {100 * (interval.low - 1):+.0f}% to {100 * (interval.high - 1):+.0f}% of it"
    return f"{duration(interval.low_s)} to {duration(interval.high_s)}: {runs}, predicted by {by}, {took}"


def _parts(parts: Sequence[StepPart], step_s: float, console: Console) -> None:
    table = _table("where the time goes", ("what", "ms", "%"))
    for part in sorted(parts, key=lambda part: -part.seconds):
        if part.seconds >= 5e-4 * step_s:
            waiting = f"waiting for communication over {axes_text(part.mesh_axes)}"
            label = waiting if part.kind is PartKind.exposed else part.kind.value
            table.add_row(label, f"{1e3 * part.seconds:.2f}", f"{100 * part.seconds / step_s:.1f}")
    console.print(table, soft_wrap=False)


def _communication(
    sent: Communication, trace: CollectiveTrace | None, simulated: bool, timed: bool, console: Console
) -> None:
    if not sent.collectives:
        console.print("no communication between devices")
        return
    over_mesh = {axes_text(over.mesh_axes): over.bytes for over in sent.bytes_by_mesh_axes}
    for what, sizes in (
        ("mesh axes", over_mesh),
        ("torus axis", sent.bytes_by_torus_axis),
        ("kind", sent.bytes_by_kind),
    ):
        if parts := sorted(sizes.items(), key=lambda item: -item[1]):
            console.print(f"sent by {what}: {' · '.join(f'{name} {sent_text(size)}' for name, size in parts)}")
    if sent.sending_s:
        hidden = max(0.0, 1 - (sent.exposed_s or 0.0) / sent.sending_s)
        console.print(f"{100 * hidden:.0f}% of the time in which anything is sent is hidden behind compute")
    if trace is not None:
        _trace(trace, simulated, console)
    waited = ("waiting ms",) if timed else ()
    table = _table("what is sent, by cause", ("kind", "over", "sent", "calls", *waited, "cause", "source"))
    for use in sent.collectives[:10]:
        exposed = [f"{1e3 * use.exposed_s:.2f}"] if timed else []
        cause, source = short_cause(use.cause), short_source(use.source)
        numbers = sent_text(use.bytes), f"{use.calls:,.0f}", *exposed
        table.add_row(use.kind, axes_text(use.mesh_axes), *numbers, cause, source)
    console.print(table, soft_wrap=False)


def _trace(trace: CollectiveTrace, simulated: bool, console: Console) -> None:
    if trace.times is None:
        console.print(f"time in collectives: {trace.note}", markup=False)
    if not trace.times or trace.step_s is None:
        return
    word, total = " simulated" if simulated else "", sum(time.seconds for time in trace.times)
    text = " · ".join(f"{axes_text(t.mesh_axes)} {t.kind} {duration(t.seconds)}" for t in trace.times)
    console.print(
        f"time in collectives{word}, waiting included, mean over devices: {duration(total)} "
        f"of a traced step of {duration(trace.step_s)} ({text})",
        markup=False,
    )


def _costs(costs: Sequence[OperationCost], step_s: float, console: Console) -> None:
    table = _table(f"the {len(costs)} slowest operations", ("ms", "%", "calls", "what", "operation", "source"))
    for cost in costs:
        share = f"{100 * cost.seconds / step_s:.1f}"
        where = short_cause(cost.op_name), short_source(cost.source)
        waiting = cost.kind is PartKind.exposed
        what = f"waiting over {axes_text(cost.mesh_axes)}" if waiting else cost.kind.value
        table.add_row(f"{1e3 * cost.seconds:.2f}", share, f"{cost.calls:,.0f}", what, *where)
    console.print(table, soft_wrap=False)


def _lines(lines: Sequence[SourceLine], step_s: float, console: Console) -> None:
    if not lines:
        return
    table = _table(f"the {len(lines)} dearest lines of the source", ("ms", "%", "waiting ms", "source", "code"))
    for line in lines:
        share, waiting = f"{100 * line.seconds / step_s:.1f}", f"{1e3 * line.waiting_s:.2f}"
        text = escape(line.text or "")
        table.add_row(f"{1e3 * line.seconds:.2f}", share, waiting, short_source(line.source), text)
    console.print(table, soft_wrap=False)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE)
    numbers = {"GiB", "MiB", "ms", "%", "sent", "calls", "waiting ms"}
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return table
