"""Callbacks of the training loop: divergence, profiling, evaluation, saving, sampling, code evaluation and logging."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from valkyrie.checkpoint import Checkpoints
from valkyrie.data.batches import Loader
from valkyrie.runs.folder import resume_command
from valkyrie.runs.goodput import GoodputRecorder
from valkyrie.runs.tracking import Tracker
from valkyrie.train.code import CodeEvaluation
from valkyrie.train.evaluate import Evaluator
from valkyrie.train.meter import Meter
from valkyrie.train.profile import ProfileWindow
from valkyrie.train.program import StepProgram
from valkyrie.train.screen import Screen
from valkyrie.train.state import TrainState


class DivergedError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite. The message names the first parameter with such a gradient."""


class FolderGoneError(RuntimeError):
    """`metrics.jsonl` no longer exists or cannot be read: the run folder was deleted, or its disk is gone."""


@dataclass
class Progress:
    """State of a training run that callbacks read and update.

    Args:
        start_step: Step of the checkpoint that this process continues from, 0 for a new run.
        step: Step for which callbacks are called, or the previous step in `before_step`. In `on_metrics`, the next step
            is usually running already.
        state: Newest train state. In `on_metrics` it is usually one step ahead of the metrics.
        extra_summary: Other entries of the summary, such as `compile_s` and the rates of code evaluations.
        evaluation: Newest value of every evaluation metric.
        evaluation_step: Step of the last evaluation, or None.
        loss: Training loss of the last step, or None before the first one.
        is_stopping: Whether the training saves and ends after this step.
        end_status: How the training ended (`goodput.FINISHED`, `STOPPED` or `PREEMPTED`), or None while it runs.
    """

    program: StepProgram
    tracker: Tracker
    screen: Screen
    meter: Meter
    goodput_recorder: GoodputRecorder
    start_step: int
    step: int
    state: TrainState
    extra_summary: dict[str, object]
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_step: int | None = None
    loss: float | None = None
    is_stopping: bool = False
    end_status: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its last step (`steps`)."""
        return self.step >= self.program.run.config.steps

    @property
    def evaluation_of_step(self) -> dict[str, float] | None:
        """The evaluation after this step, or None if there was none."""
        return self.evaluation if self.evaluation_step == self.step else None

    def is_multiple_of(self, every: int | None) -> bool:
        """Return whether the step is a multiple of `every`. False if `every` is None."""
        return every is not None and self.step % every == 0

    def warn(self, message: str | None) -> None:
        """Print `message` as a warning, unless it is None or empty."""
        if message:
            self.screen.say(message, style="yellow")

    def log(self, record: dict[str, float] | dict[str, str]) -> None:
        """Log additional values of this step to `metrics.jsonl` and W&B."""
        self.warn(self.tracker.log(record, self.step))

    def summary(self) -> dict[str, Any]:
        """Return the run's summary so far: rates, last loss, newest evaluation, goodput, `extra_summary` and status."""
        end_values = {
            "loss": self.loss,
            "steps": self.step,
            "finished": self.is_finished,
            "stage": "train",
            "status": "ok" if self.is_finished else None,
        }
        return (
            self.meter.summary()
            | self.evaluation
            | self.goodput_recorder.goodput().summary()
            | self.extra_summary
            | end_values
        )


class StepMetrics(NamedTuple):
    """Metrics of a finished step.

    Args:
        step: Number of the step, from 1.
        values: Metrics that the step returned, as NumPy arrays by name.
        record: The scalars in `values` as floats, and the rates from `Meter.rates`.
        is_logged: Whether this step is logged and printed.
    """

    step: int
    values: dict[str, np.ndarray]
    record: dict[str, float | None]
    is_logged: bool


class Callback:
    """A callback of the training loop. All methods do nothing by default."""

    def before_step(self, progress: Progress, step: int) -> None:
        """Called before step `step` is dispatched to the devices."""

    def on_metrics(self, progress: Progress, metrics: StepMetrics) -> None:
        """Called with the metrics of every step, usually while the next step runs."""

    def is_due(self, progress: Progress) -> bool:
        """Return whether to call `on_step` after this step.

        The devices wait during `on_step`, so this should rarely return true.
        """
        return False

    def on_step(self, progress: Progress) -> None:
        """Called after a step for which `is_due` returned true, once its metrics have been passed to `on_metrics`."""

    def on_end(self, progress: Progress) -> None:
        """Called once at the end: after the last step, or when the training is stopped early.

        Also called if no step was left to do, but not if an exception ends the training.
        """


@dataclass
class DivergenceCheck(Callback):
    """Raises DivergedError when the loss or the gradient norm of a step is not finite.

    Updated parameters are first checked by the loss and gradients of the next step, and may be saved before that. So
    the newest checkpoint may have parameters that are not finite.
    """

    checkpoints: Checkpoints

    def on_metrics(self, progress: Progress, metrics: StepMetrics) -> None:
        values, names = metrics.values, progress.program.parameter_names
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            return
        nonfinite_gradients = np.flatnonzero(~np.isfinite(values["squared_grad_norms"]))
        finding = (
            f"{len(nonfinite_gradients)} of {len(names)} gradients are not finite, starting with "
            f"{names[nonfinite_gradients[0]]}"
            if nonfinite_gradients.size
            else "All gradients are finite"
        )
        saved_step = self.checkpoints.last_step
        newest_checkpoint = "none" if saved_step is None else f"step {saved_step}"
        if saved_step == metrics.step - 1:  # no finished step has used its parameters
            newest_checkpoint += " (its parameters were not checked)"
        raise DivergedError(
            f"step {metrics.step}: loss={float(values['loss'])}, gradient norm={float(values['grad_norm'])}. "
            f"{finding}. Newest checkpoint: {newest_checkpoint}. Lower optimizer.learning_rate, or set debug=nans to "
            "find the operation that produces the NaN."
        )


@dataclass
class ProfilerCallback(Callback):
    """Traces a window of steps with JAX's profiler."""

    window: ProfileWindow

    def before_step(self, progress: Progress, step: int) -> None:
        if self.window.starts_at(step):
            with progress.meter.paused():
                progress.warn(self.window.open(step, progress.state))

    def is_due(self, progress: Progress) -> bool:
        return self.window.ends_at(progress.step) and not progress.is_stopping

    def on_step(self, progress: Progress) -> None:
        with progress.meter.paused():
            if line := self.window.close(progress.step):
                progress.screen.say(line)

    def on_end(self, progress: Progress) -> None:
        # Writes an incomplete trace. The last save has begun (`CheckpointCallback.on_step`), but may still be running.
        self.on_step(progress)


@dataclass
class EvaluationCallback(Callback):
    """Evaluates the model every `eval_every` steps, and after the last step."""

    evaluator: Evaluator

    def is_due(self, progress: Progress) -> bool:
        every = progress.program.run.config.eval_every
        return progress.is_finished or progress.is_multiple_of(every) and not progress.is_stopping

    def on_step(self, progress: Progress) -> None:
        with progress.meter.paused("evaluation"):
            batches = progress.program.run.config.eval_batches
            progress.evaluation.update(self.evaluator(progress.state.eval_parameters, batches))
        progress.evaluation_step = progress.step
        progress.log(progress.evaluation)
        progress.screen.say(f"step {progress.step}: {progress.program.task.describe(progress.evaluation)}")

    def on_end(self, progress: Progress) -> None:
        if progress.is_finished and not progress.evaluation:  # all steps were done at the start
            self.on_step(progress)


@dataclass
class CheckpointCallback(Callback):
    """Saves durable checkpoints, which a run restores under any layout, and fast ones.

    A fast checkpoint can only be restored by a run whose processes have all shards they need in their own files. A run
    that reaches its last step deletes its fast checkpoints.

    A failed save is reported, and training continues. With several processes, a failed durable save instead raises
    NotSavedError, which ends the run. At steps that are logged, the leader raises FolderGoneError if `metrics.jsonl` no
    longer exists or cannot be read.
    """

    checkpoints: Checkpoints
    loader: Loader[Any]
    save_error: str | None = None
    """Error message with advice if the last state could not be saved, else None."""

    def on_metrics(self, progress: Progress, metrics: StepMetrics) -> None:
        if not metrics.is_logged:
            return
        if progress.tracker.is_gone:
            raise FolderGoneError(
                f"step {metrics.step}: {progress.tracker.file} no longer exists or cannot be read. Training stopped "
                "because the run folder was deleted or its disk is gone, so that nothing can be saved."
            )
        progress.warn(self.checkpoints.poll())

    def is_due(self, progress: Progress) -> bool:
        return self._is_fast_due(progress) or self._is_durable_due(progress)

    def on_step(self, progress: Progress) -> None:
        # The fast checkpoint comes first: a preemption may leave no time for the durable one.
        step, state, position = progress.step, progress.state, self.loader.state()
        progress.goodput_recorder.write(step)  # makes the time of repeated steps exact if a restart continues from here
        with progress.meter.paused("save"):
            if self._is_fast_due(progress):
                progress.warn(self.checkpoints.save_fast(step, state, position))
            if self._is_durable_due(progress):
                progress.warn(self.checkpoints.save(step, state, position, progress.evaluation_of_step))

    def on_end(self, progress: Progress) -> None:
        with progress.meter.paused("save"):
            progress.warn(self.checkpoints.wait())
            # Retry a failed save: the disk may have room by now.
            if self.checkpoints.last_durable_step != progress.step:
                step, state, metrics = progress.step, progress.state, progress.evaluation_of_step
                error_message = self.checkpoints.save(step, state, self.loader.state(), metrics)
                if error_message := error_message or self.checkpoints.wait():
                    self.save_error = f"{error_message} {self._resume_advice(progress.tracker.folder)}"

    def _is_fast_due(self, progress: Progress) -> bool:
        every = progress.program.run.config.checkpoint.fast.every
        return progress.is_stopping or progress.is_multiple_of(every) and not progress.is_finished

    def _is_durable_due(self, progress: Progress) -> bool:
        every = progress.program.run.config.checkpoint.every
        return progress.is_stopping or progress.is_finished or progress.is_multiple_of(every)

    def _resume_advice(self, folder: Path) -> str:
        """Return advice on how to resume after the last state could not be saved."""
        fast_tier, resume = self.checkpoints.fast, resume_command(folder)
        if fast_tier is not None and fast_tier.last_saved_step is not None:
            step, path = fast_tier.last_saved_step, fast_tier.path
            return f"The fast checkpoint at step {step} is in {path}. Fix the cause, then resume: {resume}"
        if self.checkpoints.last_durable_step is None:
            return (
                "Nothing was saved, so this run cannot be resumed. Start again after fixing the cause, or with "
                "checkpoints elsewhere: runs=DIR or checkpoint.folder=DIR."
            )
        return f"Fix the cause, then resume: {resume}"


@dataclass
class SamplingCallback(Callback):
    """Prints and logs a sample of the model's text every `sample_every` steps."""

    evaluator: Evaluator

    def is_due(self, progress: Progress) -> bool:
        every = progress.program.run.config.sample_every
        return self.evaluator.generates_text and progress.is_multiple_of(every) and not progress.is_stopping

    def on_step(self, progress: Progress) -> None:
        with progress.meter.paused("evaluation"):
            text = self.evaluator.sample(progress.state.eval_parameters)
        progress.log({"sample": text})
        progress.screen.say(f"step {progress.step}, sample: {text}")


@dataclass
class CodeEvaluationCallback(Callback):
    """Evaluates the model on coding problems every `code_eval_every` steps.

    `should_stop` is called repeatedly during an evaluation. Once it returns true, the evaluation is abandoned. With
    several processes, it is called only by the leader while it runs the tests; sampling always runs to its end.
    """

    evaluation: CodeEvaluation
    should_stop: Callable[[], bool]

    def is_due(self, progress: Progress) -> bool:
        return progress.is_multiple_of(progress.program.run.config.code_eval_every) and not progress.is_stopping

    def on_step(self, progress: Progress) -> None:
        with progress.meter.paused("evaluation"):
            folder = progress.tracker.folder
            rates, line = self.evaluation(progress.state.eval_parameters, progress.step, folder, self.should_stop)
        progress.extra_summary |= rates
        if rates:
            progress.log(rates)
        progress.screen.say(line)


class LoggingCallback(Callback):
    """Writes step metrics to the tracker and the screen, and the time of steps to `goodput.jsonl`.

    `GoodputRecorder.record_step` writes a line after a step if the last line is older than 1% of the elapsed time (at
    least 1 s, at most 60 s). `fit` writes others after the restore, before the first step and at the end, and
    `CheckpointCallback` before each save.
    """

    def on_metrics(self, progress: Progress, metrics: StepMetrics) -> None:
        progress.goodput_recorder.record_step(metrics.step)
        progress.loss = metrics.record["loss"]
        if metrics.is_logged:
            record = metrics.record | {"goodput": progress.goodput_recorder.goodput().share}
            progress.warn(progress.tracker.log(record, metrics.step))
        progress.screen.show_step(metrics.step, metrics.record, print_line=metrics.is_logged)
