"""The training loop: `fit`, one page from a run to a trained model."""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape

from valkyrie.checkpoint import Checkpoints, NotSavedError
from valkyrie.config.run import Run
from valkyrie.data.batches import Dataset, Loader
from valkyrie.data.tokenizer import Tokenizer
from valkyrie.parallel.mesh import build_mesh
from valkyrie.paths import writing
from valkyrie.processes.interrupt import Interrupt
from valkyrie.processes.locks import only_writer
from valkyrie.processes.team import ALONE, Team
from valkyrie.records import encode
from valkyrie.runs.folder import changed_settings, command_name, continuation, schedule_change, write_about
from valkyrie.runs.goodput import FINISHED, PREEMPTED, STOPPED, Ledger
from valkyrie.runs.results import TRAFFIC
from valkyrie.runs.tracking import Silent, Tracker
from valkyrie.runs.wandb_writer import config_of
from valkyrie.train.code import CodeEvaluation
from valkyrie.train.compiled import CompiledStep, compile_step
from valkyrie.train.devices import Devices
from valkyrie.train.diverged import refuse_divergence
from valkyrie.train.evaluate import Evaluator
from valkyrie.train.meter import Meter
from valkyrie.train.processes import check_shared, print_to_log
from valkyrie.train.profile import Window
from valkyrie.train.program import StepProgram
from valkyrie.train.room import check_room, out_of_memory_in_plain_words
from valkyrie.train.saving import about, refuse_unknown_best, shared_folder
from valkyrie.train.screen import Screen
from valkyrie.train.state import TrainState
from valkyrie.train.watchdog import Watchdog, watchdog_of


class FolderGoneError(RuntimeError):
    """The run folder was deleted while its run trains, or its disk is gone."""


@dataclass(frozen=True)
class Fitted:
    """What training leaves: the state, the last evaluation, the summary, and whether it was interrupted."""

    program: StepProgram
    state: TrainState
    summary: dict[str, Any]
    interrupted: bool
    preempted: bool

    @property
    def parameters(self) -> Any:
        """The parameters to use: the average of them where one was kept."""
        return self.state.averaged


def fit(
    run: Run,
    devices: Devices,
    prepared: Dataset,
    tokenizer: Tokenizer | None,
    folder: Path,
    console: Console,
    signals: bool = True,
    team: Team = ALONE,
    began: float | None = None,
) -> Fitted:
    """Train the run in its folder, from its newest checkpoint if it has one, and return what is left at the end.

    Metrics of a step are read while the next one runs. With `signals`, Ctrl-C saves before the training ends. Raises
    DivergedError when loss or gradients stop being finite, FolderGoneError when the folder goes, NotSavedError when
    the disk does not take the last state, DiskError when the folder cannot be written at all, and ValueError when the
    checkpoint, the data or the memory of this machine do not fit. `began`: the Unix time at which the command began,
    if that was before.
    """
    config, began = run.config, began or time.time()
    program = StepProgram(run, build_mesh(config.mesh, devices.devices))
    check_room(program, devices, say=lambda line: console.print(line, style="yellow"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory_in_plain_words(run, devices))
        loader = stack.enter_context(program.loader(prepared, "train"))  # refuses too little text: no folder for that
        with writing(folder):
            if team.leads:
                stack.enter_context(only_writer(folder))
            if (shared := shared_folder(folder, config.checkpoint)) is not None:
                check_shared(team, shared)
            print_to_log(team, folder)
            refuse_unknown_best(config.checkpoint, program.task)
            checkpoints = Checkpoints(folder, config.checkpoint, team=team, about=about(program))
            stack.enter_context(contextlib.closing(checkpoints))
        meter = stack.enter_context(contextlib.closing(_meter(run, devices)))
        ledger = Ledger(folder, began, meter.spent, write=team.leads)
        with meter.paused("setup" if checkpoints.last_saved is None else "restore"), ledger.refusals():
            start, state = _begin(program, checkpoints, loader, folder, console)
        ledger.prepared(start)
        if team.leads:
            write_about(run, folder)
        if start < config.steps and not console.is_terminal:
            console.print("compiling the step")
        with meter.paused("compile"):
            step = compile_step(program) if start < config.steps else None
        window = stack.enter_context(Window(config.profile, folder, team=team))
        tracker = _tracker(run, devices, folder, start) if team.leads else Silent(folder)
        stack.push(lambda kind, error, trace: tracker.close(exit_code=0 if kind is None else 1))
        screen = stack.enter_context(Screen(console, config.steps, start, devices.simulated))
        interrupt = stack.enter_context(Interrupt(signals, several=team.count > 1))
        if tracker.note:
            screen.say(tracker.note, style="yellow")
        screen.say(_opening(start, config.steps, None if step is None else step.compile_s))
        if missed := window.missed(start):
            screen.say(missed, style="yellow")
        evaluate = Evaluator(program, prepared, tokenizer)
        codes = None if tokenizer is None or config.code_eval_every is None else CodeEvaluation(program, tokenizer)
        loop = _Loop(
            program,
            step,
            loader,
            checkpoints,
            tracker,
            screen,
            interrupt,
            meter,
            ledger,
            window,
            stack.enter_context(watchdog_of(run, team, folder, signals)),
            evaluate,
            codes,
            start,
            state,
            {"simulated": devices.simulated, "compile_s": None, "hbm_gib": None},
        )
        stack.callback(lambda: ledger.write(loop.step, loop.end))
        ledger.prepared(start)
        loop.run()
        tracker.summary(summary := loop.summary())
        if tracker.lost:
            screen.say(tracker.lost, style="yellow")
        if loop.unsaved:
            raise NotSavedError(f"{loop.unsaved} {_next(checkpoints, folder)}")
        if loop.finished:
            checkpoints.done()
    return Fitted(program, loop.state, summary, loop.stopping, loop.interrupt.preempted)


@dataclass
class _Loop:
    """The steps of a training from the one after `step`; `step` and `state` are those that are done."""

    program: StepProgram
    compiled: CompiledStep | None
    loader: Loader[Any]
    checkpoints: Checkpoints
    tracker: Tracker | Silent
    screen: Screen
    interrupt: Interrupt
    meter: Meter
    ledger: Ledger
    window: Window
    watchdog: Watchdog
    evaluate: Evaluator
    codes: CodeEvaluation | None
    step: int
    state: TrainState
    facts: dict[str, Any]
    """What is known of the run beside its steps, for its summary."""
    evaluation: dict[str, float] = field(default_factory=dict)
    unsaved: str | None = None
    stopping: bool = False
    """Whether the training is to be saved and ended after this step."""
    end: str | None = None
    """How the training ended; None until it did."""

    def run(self) -> None:
        """Train to the last step, or until an interrupt; read the metrics of a step while the next one runs."""
        config, start, unread = self.program.run.config, self.step, None
        self.meter.start()
        for step in range(start + 1, config.steps + 1):
            assert self.compiled is not None
            if self.window.opens(step):
                with self.meter.paused():
                    self._say(self.window.open(step, self.state))
            self.watchdog.step(step)
            with self.window.step(step):
                with self.meter.waiting():
                    batch = self.program.place(next(self.loader))
                self.state, metrics = self.compiled.advance(self.state, batch)
            self.meter.given(partial(jax.block_until_ready, metrics))
            if step == start + 1:
                self._tell_program(self.compiled)
            self._read(unread, step - 1, start)
            self.step, unread = step, metrics
            self.stopping = self.interrupt.stops_at(step, also=self.screen.unread)
            judge = _is_due(config.eval_every, step) and not self.stopping or step == config.steps
            fast = _is_due(config.checkpoint.fast.every, step) and step != config.steps or self.stopping
            durable = _is_due(config.checkpoint.every, step) or self.stopping or step == config.steps
            traced = self.window.closes(step)
            sample = _is_due(config.sample_every, step) and self.evaluate.writes and not self.stopping
            code = self.codes if _is_due(config.code_eval_every, step) and not self.stopping else None
            if judge or fast or durable or traced or sample or code:
                self._read(unread, step, start)
                unread = None
                with self.watchdog.resting():
                    if traced and not self.stopping:
                        self._end_trace()
                    self._save(fast=fast, durable=durable, judge=judge)
                    if sample:
                        self._sample()
                    if code:
                        self._try_code(code)
            if self.stopping:
                break
        self._end_trace()  # of a window that is cut short: after the save, for which a preemption leaves little time
        if self.finished and not self.evaluation:
            self._judge()
        with self.meter.paused("save"):
            self._say(self.checkpoints.wait())
            if self.checkpoints.last_saved != self.step:  # once more: there may be room by now
                failed = self.checkpoints.save(self.step, self.state, self.loader.state())
                self.unsaved = failed or self.checkpoints.wait()
        self.end = FINISHED if not self.stopping else PREEMPTED if self.interrupt.preempted else STOPPED

    @property
    def finished(self) -> bool:
        """Whether every step that was asked for is done."""
        return self.step >= self.program.run.config.steps

    def summary(self) -> dict[str, Any]:
        """Return what the steps came to."""
        status = "ok" if self.finished else None
        ending = {"steps": self.step, "finished": self.finished, "stage": "train", "status": status}
        return self.meter.summary() | self.evaluation | self.ledger.goodput().summary() | self.facts | ending

    def _tell_program(self, compiled: CompiledStep) -> None:
        """Record what is known of the compiled step while the devices do the first one: of a run that is killed too."""
        with self.meter.paused("setup"):
            self.facts |= {"compile_s": compiled.compile_s, "hbm_gib": compiled.hbm_gib}
            if not isinstance(self.tracker, Silent):
                if (traffic := compiled.traffic(self.program.mesh, self._say)) is not None:
                    self.facts[TRAFFIC] = {"bytes": traffic.bytes, "bytes_by_mesh_axes": traffic.bytes_by_mesh_axes}
                self.tracker.summary(self.facts)

    def _read(self, metrics: dict[str, Any] | None, step: int, start: int) -> None:
        """Wait for a step's metrics, check them, and record them."""
        if metrics is None:
            return
        config = self.program.run.config
        values = jax.device_get(metrics)
        self.meter.finished()
        self.interrupt.worth_saving = True
        refuse_divergence(self.program, values, step, self.checkpoints.last_saved)
        record = _record(values, self.meter, config.log_every)
        log = step % config.log_every == 0 or step in (1, start + 1, config.steps)
        self.ledger.at(step)
        if log:
            self._say(self.tracker.log(record | {"goodput": self.ledger.goodput().share}, step))
            self._say(self.checkpoints.poll())
            if self.tracker.gone:
                raise FolderGoneError(
                    f"step {step}: the run folder {self.tracker.folder} is gone, deleted or with its disk. "
                    "Stopped, for nothing from here on could be saved."
                )
        self.screen.step(step, record, line=log)

    def _save(self, *, fast: bool, durable: bool, judge: bool) -> None:
        """Evaluate where that is due, and begin to save: fast first, for a preemption may leave no time for more.

        A failure, of this save or the one before, is said, and the next save tries again.
        """
        if judge:
            self._judge()
        metrics = self.evaluation if judge else None
        if fast or durable:
            self.ledger.write(self.step)  # how much is lost if the run goes on from here
        with self.meter.paused("save"):
            if fast:
                self._say(self.checkpoints.save_fast(self.step, self.state, self.loader.state()))
            if durable:
                self._say(self.checkpoints.save(self.step, self.state, self.loader.state(), metrics))

    def _end_trace(self) -> None:
        with self.meter.paused():
            if line := self.window.close():
                self.screen.say(line)

    def _say(self, trouble: str | None) -> None:
        if trouble:
            self.screen.say(trouble, style="yellow")

    def _judge(self) -> None:
        with self.meter.paused("evaluation"):
            self.evaluation.update(self.evaluate(self.state.averaged, self.program.run.config.eval_batches))
        self._say(self.tracker.log(self.evaluation, self.step))
        self.screen.say(f"step {self.step}: {self.program.task.describe(self.evaluation)}")

    def _sample(self) -> None:
        with self.meter.paused("evaluation"):
            text = self.evaluate.sample(self.state.averaged)
        self._say(self.tracker.log({"sample": text}, self.step))
        self.screen.say(f"step {self.step}, sample: {escape(text)}")

    def _try_code(self, code: CodeEvaluation) -> None:
        with self.meter.paused("evaluation"):
            rates, line = code(self.state.averaged, self.step, self.tracker.folder, lambda: self.interrupt.requested)
        self.facts |= rates
        self._say(self.tracker.log(rates, self.step) if rates else None)
        self.screen.say(line)


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _begin(
    program: StepProgram, checkpoints: Checkpoints, loader: Loader[Any], folder: Path, console: Console
) -> tuple[int, TrainState]:
    """Return (finished steps, state): those of the newest checkpoint with its data position, or a fresh start.

    Prints to which step a continued run goes on, its settings that differ from before, and how its rate jumps.
    """
    run, changed = program.run, changed_settings(program.run, folder)
    restored = checkpoints.newest(program.abstract_state, changed=changed)
    if restored is None:
        return 0, program.init(run.config.seed)
    step, state, data, source = restored
    if state.optimizer is None:  # converted weights, whose data begins with this run
        state = program.begin_with(state.parameters)
    else:
        loader.restore(data)
    if step < run.config.steps:
        console.print(continuation(run, folder, step, changed), markup=False)
        if run.config.checkpoint.fast.every is not None:
            console.print(source, markup=False)
    if step and step < run.config.steps and (note := schedule_change(run, folder, step)):
        console.print(note, markup=False)
    return step, state


def _next(checkpoints: Checkpoints, folder: Path) -> str:
    """Return how a training goes on whose last state was not saved."""
    if checkpoints.fast is not None and (fast := checkpoints.fast.last_saved) is not None:
        return f"The fast checkpoint of step {fast} is kept in {checkpoints.fast.path}: start again with room."
    if checkpoints.last_saved is None:
        return "Train again where there is room: runs=DIR."
    return f"Then go on from there: {command_name()} resume={shlex.quote(str(folder))}"


def _opening(start: int, steps: int, compile_s: float | None) -> str:
    if compile_s is None:
        return f"complete: {start} steps are done and steps={steps} are asked for; steps={2 * start} goes on"
    return f"compiled the step in {compile_s:.1f} s; training steps {start + 1} to {steps}"


def _meter(run: Run, devices: Devices) -> Meter:
    tokens = run.config.batch * run.config.seq
    chips = devices.chips
    peak = None if devices.chip is None else devices.chip.peak_flops(run.config.precision.compute)
    return Meter(tokens, chips, run.step_flops, None if peak is None else peak * chips)


def layout_fields(run: Run, devices: Devices) -> dict[str, Any]:
    """Return the fields by which runs are compared: what was asked, the layout, the devices, and MFU's denominator."""
    chip = devices.chip
    return encode(run.about()) | {
        "stage": "train",
        "chip": devices.devices[0].device_kind if chip is None else chip.name,
        "chips": devices.chips,
        "simulated": devices.simulated,
        "steps": run.config.steps,
        "flops_per_token": run.step_flops / (run.config.batch * run.config.seq),
        "mfu_denominator_flops_per_chip": None if chip is None else chip.peak_flops(run.config.precision.compute),
    }


def _tracker(run: Run, devices: Devices, folder: Path, start: int) -> Tracker:
    group = f"{run.model.name}-{run.config.target.name}"
    fields = config_of(layout_fields(run, devices), run.record())
    return Tracker(run.config.tracking, folder, run_name=folder.name, fields=fields, group=group, start=start)


def _record(values: dict[str, Any], meter: Meter, window: int) -> dict[str, Any]:
    """Return one step's metrics as plain numbers, with the rates over the last `window` steps."""
    known = ("loss", "grad_norm", "learning_rate", "tokens")
    own = sorted(name for name, value in values.items() if name not in known and np.ndim(value) == 0)
    return {name: float(values[name]) for name in (*known, *own)} | meter.rates(window)
