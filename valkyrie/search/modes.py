"""`mode=compile` and `mode=measure`: compile or time one layout, print the result and store it in the run folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from valkyrie.checksums import digest
from valkyrie.config.modes import (
    COMPILE_FILE,
    HLO_TEXT_FILE,
    MEASURE_FILE,
    MODULE_FILE,
    SHAPING_KEYS,
    TIMELINE_FILE,
    TRACE_FOLDER,
    settings_for,
)
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.machine.timeline import write_timeline
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.modes.measure import Config as MeasureMode
from valkyrie.paths import DiskError
from valkyrie.problems import Problem, ProblemCode, raise_problems
from valkyrie.records import RecordError, read_record, write_record
from valkyrie.runs.folder import changed_settings, choose_run_folder, claim_run_folder, write_run_files
from valkyrie.search import NO_STEP_TIME
from valkyrie.search.compile.cache import package_digest, requests_folder
from valkyrie.search.compile.hints import layout_hints
from valkyrie.search.compile.prediction import CompileStatus, Hint, HintCode, Prediction
from valkyrie.search.compile.runner import CompiledRun, compile_layout
from valkyrie.search.compile.summary import summarise
from valkyrie.train.devices import prepare_devices
from valkyrie.train.processes import Team, join_processes
from valkyrie.train.screen import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from valkyrie.machine.replay import Replay

PREDICTION_FILE = "prediction.json"
"""File in the compile cache with the prediction of a layout, from which later compiles derive hints."""


def compile_mode(run: Run) -> int:
    """Compile the run's step for its target, print its predicted time by part, and return the exit status."""
    return compile_into_folder(run, make_console())


def compile_into_folder(run: Run, console: Console, watch: Callable[[], None] | None = None) -> int:
    """Compile the run's step, store its prediction and timeline, print the prediction, and return the exit status.

    Raises ValueError if the compiler refuses the run. `watch` is called several times a second while the compiler runs,
    and can stop it by raising an exception.
    """
    from valkyrie.search.compile.show import print_record

    if note := get_platform(run.config.target.platform).compile_note:
        console.print(note, style="bold yellow")
    with _create_folder(run) as folder:
        compiled_run, prediction, replay = compile_and_summarise(run, console, watch)
        if prediction.status is CompileStatus.refused:
            variable, reason = compiled_run.outcome.variable, prediction.reason or ""
            raise_problems([Problem(ProblemCode.unsupported, variable, text=reason)] if variable else [])
            raise ValueError(reason)
        for name in (TIMELINE_FILE, MODULE_FILE, HLO_TEXT_FILE):  # of an earlier compile
            (folder / name).unlink(missing_ok=True)
        try:
            write_run_files(run, folder)
            write_record(folder / COMPILE_FILE, prediction)
        finally:  # print the result even if the disk is full
            print_record(prediction, console)
    if replay is not None:
        write_timeline(
            folder / TIMELINE_FILE, replay.spans, f"{run.model.name} {run.layout.name}, one step of one chip"
        )
        console.print(f"timeline: {folder / TIMELINE_FILE} (open it at https://ui.perfetto.dev)")
    fits = prediction.status is CompileStatus.ok
    if settings_for(CompileMode, run.config.mode).hlo and fits:
        shutil.copy(compiled_run.module_file, folder / MODULE_FILE)
        shutil.copy(compiled_run.program_folder / HLO_TEXT_FILE, folder / HLO_TEXT_FILE)
        console.print(f"optimised HLO: {folder / HLO_TEXT_FILE}")
    console.print(f"report: {folder / COMPILE_FILE}")
    return 0 if fits else NO_STEP_TIME


def measure_mode(run: Run) -> int:
    """Time the run's step on the local devices, print the result, and return the exit status."""
    with join_processes(run) as team:
        return _measure(run, team)


def _measure(run: Run, team: Team) -> int:
    console = make_console()
    devices = prepare_devices(run, console.print, team)
    console.print(devices.note, style="bold yellow" if devices.simulated else None)
    from valkyrie.search.compile.show import print_record
    from valkyrie.search.measure.measure import measure

    with contextlib.ExitStack() as stack:
        folder = Path(team.broadcast_from_leader("run folder", lambda: str(stack.enter_context(_create_folder(run)))))
        trace = folder / TRACE_FOLDER if settings_for(MeasureMode, run.config.mode).trace else None
        if not console.is_terminal:
            console.print("compiling and timing the step")
        with console.status("compiling and timing the step"):
            measurement = measure(run, devices, trace, lambda line: console.print(line, style="yellow"))
    status = 0 if measurement.status is CompileStatus.ok else NO_STEP_TIME
    if not team.is_leader:
        return status
    try:
        write_run_files(run, folder)
        write_record(folder / MEASURE_FILE, measurement)
    finally:  # print the result even if the disk is full
        print_record(measurement, console)
    if trace is not None:
        console.print(f"trace: {trace}")
    console.print(f"report: {folder / MEASURE_FILE}")
    return status


def _refuse_other_results(run: Run, folder: Path) -> None:
    """Raise ValueError if `name=` is a folder with results of other work or another layout."""
    if run.config.name is None or run.config.resume is not None:
        return
    # Both modes write run.yaml, which describes the results of both.
    file = next(filter(Path.is_file, (folder / COMPILE_FILE, folder / MEASURE_FILE)), None)
    changes = changed_settings(run, folder) if file else {}
    saved = [
        f"{key.removesuffix('.name')}={value}"
        for key, (_, value) in changes.items()
        if key.partition(".")[0] in SHAPING_KEYS
    ]
    if saved:
        others = f" and {len(saved) - 3} other settings" if len(saved) > 3 else ""
        raise ValueError(
            f"name={run.config.name}: {file} is the result of another run, with {', '.join(saved[:3])}{others}. Use "
            "another name=."
        )


@contextlib.contextmanager
def _create_folder(run: Run) -> Iterator[Path]:
    """Create the run folder before the body of the `with` statement runs, so that an unwritable path fails early.

    If the body raises, removes a new folder that is still empty. Raises DiskError if the folder cannot be created, and
    ValueError if it has results of another run.
    """
    requested = choose_run_folder(run)
    _refuse_other_results(run, requested)
    existed = requested.exists()
    folder = claim_run_folder(run, requested)
    try:
        yield folder
    except BaseException:
        if not existed:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def compile_and_summarise(
    run: Run, console: Console, watch: Callable[[], None] | None = None
) -> tuple[CompiledRun, Prediction, Replay | None]:
    """Compile a run, and return the result, its prediction with hints, and its replay. Shows progress.

    The replay is None if the layout does not fit, if its compile did not succeed, or if the compiler writes no schedule
    (only the TPU compiler does). `watch` is called several times a second while the compiler runs. Unless the compile
    was refused, failed or timed out, stores the prediction in the compile cache for the hints of later compiles.
    """
    mode = settings_for(CompileMode, run.config.mode)
    if not console.is_terminal:
        console.print(f"compiling for {run.config.target.describe()}", soft_wrap=True)
    with console.status("compiling") as status:

        def progress(line: str) -> None:
            status.update(line)
            if watch is not None:
                watch()

        compiled_run = compile_layout(run, mode.time_limit_s, mode.cache, progress)
        replay, uses = None, []
        if compiled_run.status is CompileStatus.ok:
            status.update("replaying the schedule")
            from valkyrie.search.compile.replayed import replay_program  # imports NumPy, which reports do not need

            replay, uses = replay_program(run, compiled_run)
    if compiled_run.note is not None:
        console.print(compiled_run.note, soft_wrap=True)
    prediction = replace(summarise(run, compiled_run, replay, uses), work=work_key(run))
    unpadded, hints = None, tuple[Hint, ...]()
    if prediction.step is not None:
        from valkyrie.search.estimate.runs import suggest_unpadded_heads  # imports NumPy
        from valkyrie.search.estimate.slow_dispatch import describe_slow_dispatch

        unpadded = suggest_unpadded_heads(run)
        if (warning := describe_slow_dispatch(run)) is not None:
            hints = (Hint(HintCode.slow_dispatch, warning),)
    hints += layout_hints(prediction, _earlier_predictions(run, compiled_run), unpadded)
    prediction = replace(prediction, hints=hints)
    if compiled_run.status in (CompileStatus.ok, CompileStatus.does_not_fit):
        with contextlib.suppress(DiskError):  # only hints of later compiles need the file
            write_record(compiled_run.folder / PREDICTION_FILE, prediction)
    return compiled_run, prediction, replay


def work_key(run: Run) -> str:
    """Return a digest that is equal for layouts of the same model, batch, length, precision, target and source code."""
    config = run.config
    work = [repr(run.model), config.batch, config.seq, repr(config.precision), repr(config.target), package_digest(run)]
    return digest(work)[:16]


def _earlier_predictions(run: Run, compiled_run: CompiledRun) -> list[Prediction]:
    """Return the cached predictions of other layouts with the same `work_key`."""
    predictions, work = [], work_key(run)
    for file in requests_folder().glob(f"*/{PREDICTION_FILE}"):
        with contextlib.suppress(OSError, RecordError):  # a cache entry may be damaged, or gone by now
            if file.parent != compiled_run.folder and work in file.read_text():
                predictions.append(read_record(Prediction, file))
    return [prediction for prediction in predictions if prediction.work == work]
