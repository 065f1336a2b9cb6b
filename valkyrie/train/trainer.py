"""The training loop, `fit`. Logging, evaluation and saving are callbacks (`valkyrie.train.callbacks`)."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from valkyrie.checkpoint import Checkpoints, NotSavedError, is_resumable
from valkyrie.checkpoint.location import in_bucket
from valkyrie.config.run import Run
from valkyrie.data.batches import Dataset, Loader
from valkyrie.data.tokenizer import Tokenizer
from valkyrie.parallel.mesh import build_mesh
from valkyrie.paths import disk_errors
from valkyrie.processes.interrupt import Interrupt
from valkyrie.processes.locks import write_lock
from valkyrie.processes.team import ALONE, Team
from valkyrie.records import encode
from valkyrie.runs.folder import (
    RUN_FILE,
    changed_settings,
    claim_run_folder,
    describe_continuation,
    describe_schedule_change,
    write_run_files,
)
from valkyrie.runs.goodput import FINISHED, PREEMPTED, STOPPED, GoodputRecorder
from valkyrie.runs.tracking import Tracker
from valkyrie.runs.wandb_writer import COMMUNICATION_KEY, wandb_config
from valkyrie.train.callbacks import (
    Callback,
    CheckpointCallback,
    CodeEvaluationCallback,
    DivergenceCheck,
    EvaluationCallback,
    LoggingCallback,
    ProfilerCallback,
    Progress,
    SamplingCallback,
    StepMetrics,
)
from valkyrie.train.code import CodeEvaluation
from valkyrie.train.compiled import StepExecutable, compile_step
from valkyrie.train.devices import Devices
from valkyrie.train.evaluate import Evaluator
from valkyrie.train.meter import Meter
from valkyrie.train.processes import check_shared_folder, redirect_to_log
from valkyrie.train.profile import ProfileWindow
from valkyrie.train.program import StepProgram
from valkyrie.train.room import check_memory_fit, explain_oom
from valkyrie.train.saving import checkpoint_info, refuse_missing_checkpoints, refuse_unknown_best_metric, shared_folder
from valkyrie.train.screen import Screen
from valkyrie.train.state import TrainState
from valkyrie.train.watchdog import Watchdog, make_watchdog


@dataclass(frozen=True)
class FitResult:
    """The result of a training run.

    Args:
        program: The step program of the run.
        folder: The run folder.
        state: The last state.
        summary: The run's summary, as in `metrics.jsonl`.
        interrupted: Whether the training was stopped before its last step, by the user or by a preemption.
        preempted: Whether SIGTERM or SIGUSR1 requested a stop or, with several processes, any signal that only another
            process received (`Interrupt.is_preempted`). If that was during the last step, `interrupted` is false.
    """

    program: StepProgram
    folder: Path
    state: TrainState
    summary: dict[str, Any]
    interrupted: bool
    preempted: bool

    @property
    def parameters(self) -> Any:
        """The parameters to evaluate and sample from: the average (`ema_decay`) if the run has one."""
        return self.state.eval_parameters


def fit(
    run: Run,
    devices: Devices,
    dataset: Dataset,
    tokenizer: Tokenizer | None,
    folder: Path,
    console: Console,
    interrupt: Interrupt | None = None,
    team: Team = ALONE,
    start_time: float | None = None,
) -> FitResult:
    """Train the run in its folder, from its newest usable checkpoint if it has one.

    Args:
        run: A run without problems (`Run.problems`).
        devices: Devices to train on.
        dataset: The prepared data.
        tokenizer: Tokenizer of the data, or None if the data is not text.
        folder: The run folder, from `choose_run_folder`. If this is a new folder that another run has created in the
            meantime, a different one is used.
        console: Where progress is printed.
        interrupt: Requests a stop on a signal (see `Interrupt`). The training then finishes its step, saves and
            returns. A second Ctrl-C ends the process at once. Until the first step has finished, any signal does so,
            except SIGTERM to several processes. None in notebooks, which handle signals; also disables the watchdog.
        team: The processes of the run.
        start_time: Unix time when the command started, or None for now.

    Raises:
        DivergedError: Loss or gradients are no longer finite.
        FolderGoneError: The run folder was deleted, or its disk is gone.
        FloatingPointError: With `debug=nans`, an operation produced a NaN.
        NotSavedError: The last state could not be saved, or a durable save failed in a run with several processes.
        DiskError: The run folder cannot be written, or the bucket in `checkpoint.folder` cannot be reached.
        ValueError: The run does not fit in memory, another process writes its folder, its checkpoints are missing or
            damaged, or its checkpoint, its data or `checkpoint.best` does not match it.
    """
    config, start_time = run.config, start_time or time.time()
    handles_signals, interrupt = interrupt is not None, interrupt or Interrupt(multiprocess=team.count > 1)
    program = StepProgram(run, build_mesh(config.mesh, devices.devices))
    check_memory_fit(program, devices, say=partial(console.print, style="yellow"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(explain_oom(run, devices))
        # The loader may refuse the data, so it comes before the run folder is created.
        loader = stack.enter_context(program.loader(dataset, "train"))
        folder = Path(team.broadcast_from_leader("claimed run folder", lambda: str(claim_run_folder(run, folder))))
        checkpoints = stack.enter_context(_open_run_folder(program, folder, team))
        meter = stack.enter_context(contextlib.closing(_make_meter(run, devices)))
        recorder = GoodputRecorder(folder, start_time, meter.seconds_by_kind, is_writer=team.is_leader)
        with meter.paused("setup" if checkpoints.last_step is None else "restore"), recorder.record_refusal():
            start_step, state = _restore_or_init(program, checkpoints, loader, folder, console)
        is_local = not in_bucket(checkpoints.durable.path)
        interrupt.set_checkpoints(start_step or None, checkpoints.newest_complete_step if is_local else None)
        recorder.count_setup(start_step)  # records the restored step before the compile, which may crash
        # A run that has no step to do keeps its record, so that the next one does not report `steps` as changed.
        if team.is_leader and (start_step < config.steps or not (folder / RUN_FILE).is_file()):
            write_run_files(run, folder)
        if start_step < config.steps and not console.is_terminal:
            console.print("compiling the step")
        with meter.paused("compile"):
            executable = compile_step(program) if start_step < config.steps else None
        profile_window = stack.enter_context(ProfileWindow(config.profile, folder, team=team))
        tracker = _make_tracker(run, devices, folder, start_step, is_writer=team.is_leader)
        stack.push(lambda kind, error, trace: tracker.close(exit_code=0 if kind is None else 1))
        screen = stack.enter_context(Screen(console, config.steps, start_step, devices.simulated))
        watchdog = stack.enter_context(make_watchdog(run, team, folder, handles_signals))
        extra_summary = {"simulated": devices.simulated, "compile_s": None, "hbm_gib": None}
        progress = Progress(program, tracker, screen, meter, recorder, start_step, start_step, state, extra_summary)
        progress.warn(tracker.note)
        screen.say(_opening_line(start_step, config.steps, None if executable is None else executable.compile_s))
        progress.warn(profile_window.missed_warning(start_step))
        evaluator, checkpoint_callback = Evaluator(program, dataset, tokenizer), CheckpointCallback(checkpoints, loader)
        # The order matters: evaluations come before the save, because `keep_best` needs them.
        callbacks: list[Callback] = [DivergenceCheck(checkpoints), ProfilerCallback(profile_window)]
        callbacks += [EvaluationCallback(evaluator), checkpoint_callback, SamplingCallback(evaluator)]
        callbacks += [*_code_evaluations(program, tokenizer, interrupt), LoggingCallback()]
        stack.callback(lambda: recorder.write(progress.step, progress.end_status))
        recorder.count_setup(start_step)  # counts what came after the compile as setup
        _train_steps(progress, executable, loader, callbacks, interrupt, watchdog)
        is_stopped = progress.is_stopping and not progress.is_finished  # a signal during the last step stops nothing
        tracker.write_summary(summary := progress.summary())
        progress.warn(tracker.lost_records_note)
        if checkpoint_callback.save_error:
            raise NotSavedError(checkpoint_callback.save_error)
        progress.end_status = FINISHED if not is_stopped else PREEMPTED if interrupt.is_preempted else STOPPED
        if progress.is_finished:
            checkpoints.mark_complete()  # `close` then deletes the fast checkpoints
    return FitResult(program, folder, progress.state, summary, is_stopped, interrupt.is_preempted)


def _code_evaluations(program: StepProgram, tokenizer: Tokenizer | None, interrupt: Interrupt) -> list[Callback]:
    """Return the callback of code evaluations in a list, which is empty if the run has none."""
    if tokenizer is None or program.run.config.code_eval_every is None:
        return []
    return [CodeEvaluationCallback(CodeEvaluation(program, tokenizer), lambda: interrupt.stop_requested)]


@contextlib.contextmanager
def _open_run_folder(program: StepProgram, folder: Path, team: Team) -> Iterator[Checkpoints]:
    """Lock the run folder for writing, direct the output of workers to it, and open its checkpoints."""
    config = program.run.config.checkpoint
    resume = shlex.quote(f"resume=DIR/{folder.name}")
    copy_advice = f"a copy: mkdir -p DIR, cp -r {shlex.quote(str(folder))} DIR, and {resume}"
    with contextlib.ExitStack() as stack:
        with disk_errors(folder, copy_advice if is_resumable(folder) else None):
            if team.is_leader:
                stack.enter_context(write_lock(folder))
                refuse_missing_checkpoints(folder, program.run.config)
            if (shared_path := shared_folder(folder, config)) is not None:
                check_shared_folder(team, shared_path)
            redirect_to_log(team, folder)
            refuse_unknown_best_metric(config, program.task)
            checkpoints = Checkpoints(folder, config, team=team, info=checkpoint_info(program))
        yield stack.enter_context(contextlib.closing(checkpoints))


def _train_steps(
    progress: Progress,
    executable: StepExecutable | None,
    loader: Loader[Any],
    callbacks: Sequence[Callback],
    interrupt: Interrupt,
    watchdog: Watchdog,
) -> None:
    """Train to the last step, or until an interrupt. The metrics of a step are read while the next one runs."""
    program, meter, pending_metrics = progress.program, progress.meter, None

    def report_metrics(metrics: dict[str, jax.Array] | None) -> None:
        if metrics is not None:
            values = jax.device_get(metrics)
            meter.record_step()
            interrupt.has_progress = True
            step_metrics = _step_metrics(values, progress)
            for callback in callbacks:
                callback.on_metrics(progress, step_metrics)

    meter.start()
    for step in range(progress.start_step + 1, program.run.config.steps + 1):
        assert executable is not None
        for callback in callbacks:
            callback.before_step(progress, step)
        watchdog.begin_step(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            with meter.waiting_for_data():
                batch = program.place(next(loader))
            progress.state, metrics = executable.advance(progress.state, batch)
        meter.record_dispatch(partial(jax.block_until_ready, metrics))
        if step == progress.start_step + 1:
            _record_program(progress, executable)
        report_metrics(pending_metrics)
        progress.step, pending_metrics = step, metrics
        progress.is_stopping = interrupt.should_stop(step, force=progress.screen.is_closed)
        if due_callbacks := [callback for callback in callbacks if callback.is_due(progress)]:
            report_metrics(pending_metrics)
            pending_metrics = None
            with watchdog.paused():
                for callback in due_callbacks:
                    callback.on_step(progress)
        if progress.is_stopping:
            break
    for callback in callbacks:
        callback.on_end(progress)


def _step_metrics(values: dict[str, np.ndarray], progress: Progress) -> StepMetrics:
    """Return the metrics of step `progress.step`: its `values`, the current rates, and whether to log them."""
    config, step = progress.program.run.config, progress.step
    first_names = ("loss", "grad_norm", "learning_rate", "tokens")
    other_names = sorted(name for name, value in values.items() if name not in first_names and np.ndim(value) == 0)
    record = {name: float(values[name]) for name in (*first_names, *other_names)} | progress.meter.rates(
        config.log_every
    )
    is_logged = step % config.log_every == 0 or step in (1, progress.start_step + 1, config.steps)
    return StepMetrics(step, values, record, is_logged)


def _record_program(progress: Progress, executable: StepExecutable) -> None:
    """Record facts about the compiled step during the first step, so that a killed run has them too."""
    with progress.meter.paused("setup"):
        progress.extra_summary |= {"compile_s": executable.compile_s, "hbm_gib": executable.peak_gib}
        if progress.tracker.writes:
            if (traffic := executable.traffic(progress.program.mesh, progress.warn)) is not None:
                progress.extra_summary[COMMUNICATION_KEY] = {
                    "bytes": traffic.bytes,
                    "bytes_by_mesh_axes": traffic.bytes_by_label,
                }
            progress.tracker.write_summary(progress.extra_summary)


def _restore_or_init(
    program: StepProgram, checkpoints: Checkpoints, loader: Loader[Any], folder: Path, console: Console
) -> tuple[int, TrainState]:
    """Restore the newest checkpoint that all processes can use, with its data position, or initialise.

    Initialises if there is neither a durable checkpoint nor a usable fast one. Fast ones of another layout or model are
    not used. Damaged fast ones, and all fast ones of steps after the restored one, are deleted. Returns (number of
    finished steps, state). Raises ValueError if no fast one is usable and all durable ones are damaged, or if the
    newest undamaged durable one does not fit the run and no newer fast one is usable (see `Checkpoints.try_restore`).

    Converted weights have neither optimizer state nor data position, so both start from the beginning. For a continued
    run, prints the step, the settings that changed, and any jump of the learning rate.
    """
    run, setting_changes = program.run, changed_settings(program.run, folder)
    restored = checkpoints.try_restore(program.abstract_state, changed_settings=setting_changes)
    if restored is None:
        return 0, program.init(run.config.seed)
    step, state, data_position, source = restored
    if state.optimizer is None:  # converted weights have no data position
        state = program.init_with_parameters(state.parameters)
    else:
        seed_key = "seed" if run.config.data.shuffle_seed is None else "data.shuffle_seed"
        loader.restore(data_position, seed_key=seed_key)
    if step < run.config.steps:
        console.print(describe_continuation(run, folder, step, setting_changes))
        if run.config.checkpoint.fast.every is not None:
            console.print(source)
    if step and step < run.config.steps and (note := describe_schedule_change(run, folder, step)):
        console.print(note)
    return step, state


def _opening_line(start_step: int, steps: int, compile_s: float | None) -> str:
    if compile_s is None and start_step > steps:
        return f"steps={steps}: the run is already at step {start_step}. To train longer: steps={2 * start_step}"
    if compile_s is None:
        return f"already finished ({start_step} of {steps} steps). To train longer: steps={2 * start_step}"
    return f"compiled the step in {compile_s:.1f} s; training steps {start_step + 1} to {steps}"


def _make_meter(run: Run, devices: Devices) -> Meter:
    tokens = run.config.batch * run.config.seq
    chips = devices.chips
    peak_flops = None if devices.chip is None else devices.chip.peak_flops(run.config.precision.compute)
    return Meter(tokens, chips, run.step_flops, None if peak_flops is None else peak_flops * chips)


def _make_tracker(run: Run, devices: Devices, folder: Path, start_step: int, *, is_writer: bool) -> Tracker:
    """Return the tracker. The config of its W&B run has the layout, devices, peak FLOP/s and all settings."""
    chip = devices.chip
    fields = encode(run.layout_record()) | {
        "stage": "train",
        "chip": devices.devices[0].device_kind if chip is None else chip.name,
        "chips": devices.chips,
        "simulated": devices.simulated,
        "steps": run.config.steps,
        "flops_per_token": run.step_flops / (run.config.batch * run.config.seq),
        "mfu_denominator_flops_per_chip": None if chip is None else chip.peak_flops(run.config.precision.compute),
    }
    return Tracker(
        run.config.tracking,
        folder,
        run_name=folder.name,
        fields=wandb_config(fields, run.record()),
        group=f"{run.model.name}-{run.config.target.name}",
        start_step=start_step,
        is_writer=is_writer,
    )
