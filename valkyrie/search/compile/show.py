"""Prints the summary of a compiled or measured layout."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from valkyrie.axes import UNATTRIBUTED
from valkyrie.search.compile.summary import short_cause, short_source
from valkyrie.train.options import KEY, TO_FIT, Option
from valkyrie.units import GIB, duration, gib
from valkyrie.units import memory as memory_text
from valkyrie.units import sent as sent_text


def show(summary: dict[str, Any], console: Console) -> None:
    """Print the summary that `compile.json` holds."""
    _head(summary, console)
    if summary["status"] == "does_not_fit" and "memory" in summary:
        console.print(does_not_fit(summary), style="bold red", markup=False)
        return
    if summary["status"] != "ok":
        console.print(f"{summary['status']}: {summary['reason']}", style="bold red", markup=False)
        return
    if summary.get("options"):
        console.print(f"compiler options: {_options(summary['options'])}", markup=False)
    _memory(summary, console)
    if "step" in summary:
        _speed(summary, console)
    if "seconds" in summary:
        _seconds(summary, console)
    _communication(summary, console)
    if "costs" in summary:
        _costs(summary, console)
        _lines(summary, console)
        for note in summary["notes"]:
            console.print(f"assumed: {note}", style="dim", markup=False)
    for hint in summary.get("hints", []):
        console.print(f"hint: {hint}", markup=False)


def _head(summary: dict[str, Any], console: Console) -> None:
    """Print what was compiled and for what: a run's layout and batch, or any program's name and mesh."""
    about = summary["about"]
    if "program" in about:
        mesh = " · ".join(f"{axis}={size}" for axis, size in about["axes"].items() if size > 1) or "one device"
        console.print(f"{about['program']} on {about['described']}", style="bold", markup=False)
        console.print(f"mesh: {mesh}", markup=False)
        return
    console.print(f"[bold]{about['model']} under {about['layout']} on {about['described']}[/]")
    console.print(f"roles: {about['roles']}")
    if about.get("pipeline"):
        console.print(f"pipeline: {about['pipeline']['described']}", markup=False, highlight=False)
    for line in summary.get("placement", []):
        console.print(f"placement: {line}", markup=False)
    console.print(f"batch: {about['batch']} x {about['seq']} tokens, {about['precision']}, remat={about['remat']}")


def does_not_fit(summary: dict[str, Any]) -> str:
    """Return the verdict of a layout that does not fit: both numbers, the largest arrays, and what might fit."""
    memory = summary["memory"]
    if memory["needed"] is None:
        return f"does not fit: {summary['reason']}"
    text = f"does not fit: needs {gib(memory['needed'])} of {gib(memory['usable'])} usable"
    if memory["largest"]:
        largest = memory["largest"][:3]
        named = [f"{entry['shape']} {gib(entry['bytes'])}{_of(entry['op_name'])}" for entry in largest]
        text += f"; largest: {', '.join(named)}"
    if memory["savings"]:
        tries = [f"{entry['change']} (about -{gib(entry['saves'])})" for entry in memory["savings"]]
        text += f"; try: {', '.join(tries)}"
    return text


def _options(options: list[dict[str, Any]]) -> str:
    """Return the compiler's options by who set them: `a=1, b=true (chip default) · c=2, d removed (you)`."""
    by: dict[str, list[str]] = {}
    for option in options:
        by.setdefault(option["set_by"], []).append(str(Option(**option)))
    return " · ".join(f"{', '.join(texts)} ({who})" for who, texts in by.items())


def _memory(summary: dict[str, Any], console: Console) -> None:
    memory = summary["memory"]
    if memory["peak"] is None:
        arguments, usable = gib(memory["split"]["arguments"]), memory["usable"]
        of = "" if usable is None else f" of {gib(usable)} usable"
        console.print(f"memory: arguments take {arguments}{of}; this module does not say what a step needs beside them")
        return
    unit, scale = ("GiB", GIB) if memory["peak"] >= GIB / 10 else ("MiB", 2**20)
    table = _table("memory of one device at the peak", ("what", unit))
    for name, size in memory["split"].items():
        table.add_row(name, f"{size / scale:.2f}")
    table.add_row("peak", f"{memory['peak'] / scale:.2f}", style="bold")
    console.print(table, soft_wrap=False)
    if memory.get("reported_peak") is not None:
        console.print(f"the devices report a peak of {gib(memory['reported_peak'])}")
    if memory["usable"] is not None:
        share = memory["headroom"] / memory["usable"]
        verdict = "fits" if memory["headroom"] >= 0 else "does not fit"
        free = memory_text(memory["headroom"]) if share < 0.02 else gib(memory["headroom"])
        console.print(
            f"[bold]{verdict}[/]: {gib(memory['peak'])} of {gib(memory['usable'])} usable; "
            f"headroom {free} ({100 * share:.0f}%)"
        )
    beside = [
        f"{what} {memory_text(memory[key])}"
        for key, what in (("reserved", "kept by the runtime"), ("code", "code"), ("host", "in host memory"))
        if memory.get(key)
    ]
    if beside:
        console.print(f"beside it, on each device: {', '.join(beside)}")
    needed = [option for option in summary.get("options", []) if option["set_by"] == TO_FIT]
    if needed:
        lines = " ".join(f"{KEY}.{Option(**option)}" for option in needed)
        console.print(f"without compiler options that save memory it does not fit; to train, write: {lines}")


def _speed(summary: dict[str, Any], console: Console) -> None:
    step = summary["step"]
    word = " simulated" if summary.get("simulated") else ""
    spread = f" (p90 {duration(step['p90_s'])}, least {duration(step['min_s'])})" if "p90_s" in step else ""
    text = f"[bold]{'measured' if spread else 'predicted'} step{word}: {duration(step['step_s'])}[/]{spread}, "
    parts = []
    if step["tokens_per_second"] is not None:
        parts.append(f"{step['tokens_per_second']:,.0f} tokens/s{word}")
        parts.append(f"{step['tokens_per_second_per_chip']:,.0f} tokens/s/chip{word}")
    if step["mfu"] is not None:
        parts.append(f"MFU {100 * step['mfu']:.1f}% of {step['mfu_denominator']}")
    elif step.get("hardware_utilisation") is not None:
        executed = f"{step['executed_flops'] / 1e12:,.1f} TFLOP of products a device"
        parts.append(f"{executed}, {100 * step['hardware_utilisation']:.1f}% of {step['mfu_denominator']}")
    console.print(text + ", ".join(parts))
    if not spread:
        console.print(f"how far to trust it: {how_far(step.get('interval'))}", markup=False)
    for kind, tokens in step.get("tokens_per_dollar", {}).items():
        console.print(f"{tokens / 1e6:,.2f} million tokens per dollar ({kind.replace('_', ' ')})")


def how_far(interval: dict[str, Any] | None) -> str:
    """Return what a predicted step is held to: what measured runs took of what was predicted, and the step by that."""
    if interval is None:
        return "no measured run was predicted that could be held beside it"
    chip, by = interval["chip"], "other recipes"
    runs = f"{interval['rows']} published runs of {interval['models']} model{'s' * (interval['models'] > 1)} "
    runs += f"on {chip}" if chip else "on chips with several recipes, for want of some on this one"
    if interval.get("yours"):
        runs, by = f"your {interval['rows']} measured steps on {chip}", "other models and batches"
    took = f"took {100 * (interval['low'] - 1):+.0f}% to {100 * (interval['high'] - 1):+.0f}% of it"
    span = f"{duration(interval['low_s'])} to {duration(interval['high_s'])}"
    return f"{span}: {runs}, predicted by {by}, {took}"


def _seconds(summary: dict[str, Any], console: Console) -> None:
    table = _table("where the time goes", ("what", "ms", "%"))
    total = summary["step"]["step_s"]
    for name, seconds in sorted(summary["seconds"].items(), key=lambda item: -item[1]):
        if seconds >= 5e-4 * total:
            label = f"waiting for communication over {name[8:]}" if name.startswith("exposed ") else name
            table.add_row(label, f"{1e3 * seconds:.2f}", f"{100 * seconds / total:.1f}")
    console.print(table, soft_wrap=False)


def _communication(summary: dict[str, Any], console: Console) -> None:
    sent = summary["communication"]
    if not sent["causes"]:
        console.print("no communication between devices")
        return
    for what, key in (("mesh axes", "mesh_axes"), ("torus axis", "torus_axis"), ("kind", "kind")):
        parts = sorted(sent[f"bytes_by_{key}"].items(), key=lambda item: -item[1])
        if parts:
            console.print(f"sent by {what}: {' · '.join(f'{name} {sent_text(size)}' for name, size in parts)}")
    if sent["sending_s"]:
        hidden = max(0.0, 1 - sent["exposed_s"] / sent["sending_s"])
        console.print(f"{100 * hidden:.0f}% of the time in which anything is sent is hidden behind compute")
    _collective_times(summary, console)
    timed = "seconds" in summary
    waited = ("waiting ms",) if timed else ()
    table = _table("what is sent, by cause", ("kind", "over", "sent", "calls", *waited, "cause", "source"))
    for use in sent["causes"][:10]:
        exposed = [f"{1e3 * use['exposed_s']:.2f}"] if timed else []
        over = ",".join(use["mesh_axes"]) or UNATTRIBUTED
        cause, source = short_cause(use["cause"]), short_source(use["source"])
        table.add_row(use["kind"], over, sent_text(use["bytes"]), f"{use['calls']:,.0f}", *exposed, cause, source)
    console.print(table, soft_wrap=False)


def _collective_times(summary: dict[str, Any], console: Console) -> None:
    sent = summary["communication"]
    if not sent.get("collective_s"):
        if "collective_note" in sent and sent["collective_s"] is None:
            console.print(f"time in collectives: {sent['collective_note']}", markup=False)
        return
    word = " simulated" if summary.get("simulated") else ""
    parts = {f"{axes} {kind}": s for axes, kinds in sent["collective_s"].items() for kind, s in kinds.items()}
    text = " · ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
    console.print(
        f"time in collectives{word}, waiting included, mean over devices: {duration(sum(parts.values()))} "
        f"of a traced step of {duration(sent['traced_step_s'])} ({text})",
        markup=False,
    )


def _costs(summary: dict[str, Any], console: Console) -> None:
    table = _table(
        f"the {len(summary['costs'])} slowest operations", ("ms", "%", "calls", "what", "operation", "source")
    )
    total = summary["step"]["step_s"]
    for cost in summary["costs"]:
        share = f"{100 * cost['seconds'] / total:.1f}"
        where = short_cause(cost["op_name"]), short_source(cost["source"])
        what = cost["category"].replace("exposed ", "waiting over ")
        table.add_row(f"{1e3 * cost['seconds']:.2f}", share, f"{cost['calls']:,.0f}", what, *where)
    console.print(table, soft_wrap=False)


def _lines(summary: dict[str, Any], console: Console) -> None:
    """Print the dearest lines of any program's source; of our own step, the operations above name them."""
    lines = summary.get("lines", []) if "program" in summary["about"] else []
    if not lines:
        return
    table = _table(f"the {len(lines)} dearest lines of the source", ("ms", "%", "waiting ms", "source", "code"))
    total = summary["step"]["step_s"]
    for line in lines:
        share, waiting = f"{100 * line['seconds'] / total:.1f}", f"{1e3 * line['waiting_s']:.2f}"
        text = escape(line["text"] or "")
        table.add_row(f"{1e3 * line['seconds']:.2f}", share, waiting, short_source(line["source"]), text)
    console.print(table, soft_wrap=False)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE)
    numbers = {"GiB", "MiB", "ms", "%", "sent", "calls", "waiting ms"}
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=column in numbers)
    return table


def _of(op_name: str | None) -> str:
    return f" ({short_cause(op_name)})" if op_name else ""
