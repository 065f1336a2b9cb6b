"""Decides what `mode=compile` and `mode=measure` do: look at a layout, say what was found, and keep it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from valkyrie.hardware import Platform
from valkyrie.paths import cache_root
from valkyrie.run import Run
from valkyrie.search import NOT_COMPILED
from valkyrie.search.child import MODULE, TEXT
from valkyrie.search.compile import Compiled, compile_layout, source_digest
from valkyrie.search.hints import hints
from valkyrie.search.replayed import replayed
from valkyrie.search.summary import summarise
from valkyrie.search.timeline import write_timeline
from valkyrie.train.devices import prepare_devices
from valkyrie.train.folder import run_folder, write_about
from valkyrie.train.screen import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from valkyrie.search.replay import Replay

SUMMARY, TIMELINE, KEPT_SUMMARY, MEASURED = "compile.json", "timeline.json", "summary.json", "measure.json"
TRACE = "trace"


def compile_mode(run: Run, arguments: Sequence[str]) -> int:
    """Compile the run's step for its target, print what a step takes and why; return the exit status."""
    from valkyrie.search.show import show

    console = make_console()
    if run.config.target.platform in (Platform.any, Platform.cpu):
        note = (
            "COMPILED FOR CPU: memory and bytes on every axis are told, no time. For that, name a slice: target=v4-64"
        )
        console.print(note, style="bold yellow")
    compiled, found, replay = compile_and_summarise(run, console)
    if compiled.status == "refused":
        raise ValueError(found["reason"])
    folder = run_folder(run)
    write_about(run, folder, arguments)
    (folder / SUMMARY).write_text(json.dumps(found, indent=1) + "\n")
    show(found, console)
    if replay is not None:
        write_timeline(folder / TIMELINE, replay.spans, f"{run.model.name} {run.layout.name}, one step of one chip")
        console.print(f"timeline: {folder / TIMELINE} (open it at https://ui.perfetto.dev)")
    if run.config.mode.hlo and compiled.status == "ok":
        shutil.copy(compiled.module, folder / MODULE)
        shutil.copy(compiled.folder / TEXT, folder / TEXT)
        console.print(f"optimised HLO: {folder / TEXT}")
    console.print(f"report: {folder / SUMMARY}")
    return 0 if compiled.status == "ok" else NOT_COMPILED


def measure_mode(run: Run, arguments: Sequence[str]) -> int:
    """Time the run's step on the devices at hand, print what it takes, and return the exit status."""
    devices, console = prepare_devices(run), make_console()
    console.print(devices.note, style="bold yellow" if devices.simulated else None)
    from valkyrie.search.measure import measure
    from valkyrie.search.show import show

    folder = run_folder(run)
    trace = folder / TRACE if run.config.mode.trace else None
    with console.status("compiling and timing the step"):
        found = measure(run, devices, trace)
    write_about(run, folder, arguments)
    (folder / MEASURED).write_text(json.dumps(found, indent=1) + "\n")
    show(found, console)
    if trace is not None:
        console.print(f"trace: {trace}")
    console.print(f"report: {folder / MEASURED}")
    return 0 if found["status"] == "ok" else NOT_COMPILED


MODES: dict[str, Callable[[Run, Sequence[str]], int]] = {"compile": compile_mode, "measure": measure_mode}
"""What `mode=` may name beside the modes of `valkyrie.train`."""


def compile_and_summarise(run: Run, console: Console) -> tuple[Compiled, dict[str, Any], Replay | None]:
    """Return the compile of a run, its summary with hints, and its replay; shows a line while it works."""
    config = run.config.mode
    with console.status("compiling") as status:
        compiled = compile_layout(run, config.time_limit_s, config.cache, status.update)
        replay, uses = None, []
        if compiled.status == "ok":
            status.update("replaying the schedule")
            replay, uses = replayed(run, compiled)
    found = summarise(run, compiled, replay, uses)
    found["work"] = work_key(run)
    found["hints"] = hints(found, _others(run, compiled))
    if compiled.status in ("ok", "does_not_fit"):
        (compiled.folder / KEPT_SUMMARY).write_text(json.dumps(found))
    return compiled, found, replay


def work_key(run: Run) -> str:
    """Return a name for the work, whatever the layout: model, batch, length, precision, target, and our own source."""
    config = run.config
    work = [repr(run.model), config.batch, config.seq, repr(config.precision), repr(config.target), source_digest()]
    return hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]


def _others(run: Run, compiled: Compiled) -> list[dict[str, Any]]:
    """Return the summaries of other layouts of the same work that were compiled before."""
    found, work = [], work_key(run)
    for file in (cache_root() / "compile").glob(f"*/{KEPT_SUMMARY}"):
        if file.parent != compiled.folder and work in (text := file.read_text()):
            found.append(json.loads(text))
    return [other for other in found if other.get("work") == work]
