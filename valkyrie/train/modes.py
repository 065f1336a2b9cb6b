"""Carries out the modes `train`, `eval`, `generate`, `code_eval`, `checkpoints` and `show`.

JAX is imported after cheaper checks. With several processes, these are the comparison of versions and settings.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.checkpoint import NotSavedError, checkpoint_root, stored_checkpoints
from valkyrie.checkpoint.location import missing_remedy
from valkyrie.config.modes import CODE_EVAL_FILE, settings_for
from valkyrie.config.run import Run
from valkyrie.extensions import is_own_file
from valkyrie.modes.generate import Config as GenerateMode
from valkyrie.optim import rate_rises_if_extended
from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_PREEMPTED
from valkyrie.processes.interrupt import Interrupt, clean_up_on_signals
from valkyrie.runs.folder import choose_run_folder, key_values, resume_command, stored_text_file
from valkyrie.runs.goodput import read_goodput
from valkyrie.runs.wandb_writer import COMMUNICATION_KEY
from valkyrie.train.devices import configure_jax, prepare_devices
from valkyrie.train.prepare import (
    load_run_tokenizer,
    prepare_evaluation,
    prepare_run,
    refuse_without_judge,
    restore,
    trained_folder,
)
from valkyrie.train.processes import Team, join_processes
from valkyrie.train.room import explain_oom
from valkyrie.train.screen import make_console
from valkyrie.units import decimal_bytes_text

if TYPE_CHECKING:
    from rich.console import Console

    from valkyrie.data.tokenizer import Tokenizer
    from valkyrie.train.continued import Text
    from valkyrie.train.devices import Devices
    from valkyrie.train.program import StepProgram
    from valkyrie.train.trainer import FitResult


def train(run: Run) -> int:
    """Train, and print the results, a text sample and commands to continue.

    Returns the exit status: 0 after the last step, 1 if the training failed, or `EXIT_INTERRUPTED` (130) or
    `EXIT_PREEMPTED` (75) if it was stopped. ValueError (also for out of memory) and OSError end the process with
    `EXIT_REFUSED` (2), or with 1 if a user's module raised them. The watchdog ends it with `EXIT_LOST` (69) if a step
    hangs.
    """
    start_time = time.time()
    with join_processes(run) as team:
        return _train(run, team, start_time)


def _train(run: Run, team: Team, start_time: float) -> int:
    folder = Path(team.broadcast_from_leader("run folder", lambda: str(choose_run_folder(run))))
    console, interrupt = make_console(), Interrupt(multiprocess=team.count > 1)
    with interrupt.handle_signals():
        inputs = prepare_run(run, console, team, interrupt.clean_up_on_signals())
        from valkyrie.train.callbacks import DivergedError, FolderGoneError
        from valkyrie.train.trainer import fit

        console.print(run.layout.describe_roles(), style="bold")
        if run.batch_note:
            console.print(f"batch: {run.batch_note}")
        try:
            result = fit(run, *inputs, folder, console, interrupt, team, start_time)
        except (DivergedError, FolderGoneError, NotSavedError, FloatingPointError) as error:
            message = _nan_message(error) if isinstance(error, FloatingPointError) else error
            print(f"valkyrie-train: {message}", file=sys.stderr)
            if team.count > 1:  # SystemExit also ends the other processes, which wait for this one
                sys.exit(1)
            return 1
    folder = result.folder
    command = resume_command(folder)
    if result.interrupted:
        stopped = f"stopped at step {result.summary['steps']}, saved in {folder}. Resume with: {command}"
        console.print(stopped)
        return EXIT_PREEMPTED if result.preempted else EXIT_INTERRUPTED
    _report(console, result, inputs.devices)
    if (goodput := read_goodput(folder)) is not None:
        console.print(goodput.describe())
    is_text = result.program.task.is_text
    if run.config.sample_tokens and is_text and inputs.tokenizer is not None:
        console.rule("sample")
        sys.stdout.write(run.config.prompt)
        _print_continuation(result.program, result.parameters, inputs.tokenizer, run.config.prompt)
        console.rule()
    console.print(f"run folder: {folder}")
    total_steps = 2 * max(run.config.steps, result.summary["steps"])
    rate_rises = rate_rises_if_extended(run.config.optimizer, result.summary["steps"], total_steps)
    # No semicolon: interactive zsh does not know comments, and would run what follows as a second command.
    rate_note = f". The learning rate jumps up, because its decay now takes {total_steps} steps" if rate_rises else ""
    console.print(f"next: {command} steps={total_steps}   # continues to step {total_steps}{rate_note}")
    other_mode = 'mode=generate prompt="class "' if is_text else "mode=eval"
    console.print(f"      {command} {other_mode}")
    return 0


def evaluate(run: Run) -> dict[str, float]:
    """Evaluate a trained run on its whole validation split and print the result. Returns its metrics and the step."""
    with join_processes(run) as team:
        folder = Path(team.broadcast_from_leader("trained run", lambda: str(trained_folder(run))))
        console = make_console()
        inputs = prepare_evaluation(run, folder, console, team, clean_up_on_signals("valkyrie-train"))
        program, step, parameters = restore(run, inputs.devices, folder, team)
        from valkyrie.train.evaluate import Evaluator

        with explain_oom(run, inputs.devices):
            result = Evaluator(program, inputs.data, inputs.tokenizer)(parameters, None)
        console.print(f"{folder.name} at step {step}: {program.task.describe(result)}")
        return {**result, "step": step}


def generate(run: Run) -> int:
    """Print the prompt, then its continuation by a trained run as it is sampled. Returns 0.

    With `mode.keep`, continues the saved text of that name instead, or begins it with the prompt, and saves it.
    """
    with join_processes(run) as team:
        folder = Path(team.broadcast_from_leader("trained run", lambda: str(trained_folder(run))))
        keep = settings_for(GenerateMode, run.config.mode).keep
        path = None if keep is None else stored_text_file(folder, keep)
        tokenizer, console, devices = load_run_tokenizer(run), make_console(), prepare_devices(run, _to_stderr, team)
        program, step, parameters = restore(run, devices, folder, team)
        console.print(f"{folder.name} at step {step}", style="dim")
        with explain_oom(run, devices):
            if path is not None:
                _continue_saved_text(program, step, parameters, tokenizer, path, team)
            else:
                sys.stdout.write(run.config.prompt)
                _print_continuation(program, parameters, tokenizer, run.config.prompt)
        return 0


def code_eval(run: Run) -> int:
    """Sample solutions to coding problems, print pass rates and write `code_eval.json` to the run folder.

    Returns the exit status: 1 if the solutions could not be judged, else 0.
    """
    with join_processes(run) as team:
        folder = Path(team.broadcast_from_leader("trained run", lambda: str(trained_folder(run))))
        refuse_without_judge(run, team)
        tokenizer, console, devices = load_run_tokenizer(run), make_console(), prepare_devices(run, _to_stderr, team)
        program, step, parameters = restore(run, devices, folder, team)
        from valkyrie.train.code import CodeEvaluation, results_table

        evaluation = CodeEvaluation(program, tokenizer)
        if not console.is_terminal:
            console.print(f"sampling and judging {len(evaluation.problems)} problems")
        with explain_oom(run, devices), console.status("sampling and judging"):
            rates, line = evaluation(parameters, step, folder)
        if team.is_leader:
            if rates:
                console.print(results_table(evaluation.results, evaluation))
            console.print(f"{folder.name} at {line}")
        if rates:
            console.print(f"every completion: {folder / CODE_EVAL_FILE}")
        return int(team.is_leader and not rates)


def list_checkpoints(run: Run) -> int:
    """Print the durable checkpoints of a trained run, and its fast ones on this host.

    Returns 1 if any is damaged, else 0. Raises ValueError if there are none.
    """
    folder, console = trained_folder(run), make_console()
    checkpoints = stored_checkpoints(folder, run.config.checkpoint)
    if not checkpoints:
        raise ValueError(f"{folder.name} has no checkpoint in {checkpoint_root(folder)}. {missing_remedy(folder)}")
    for c in checkpoints:
        parts = (c.tier, decimal_bytes_text(c.size), c.description, c.check_result)
        console.print(f"{folder.name} step {c.step}: {', '.join(filter(None, parts))}")
    return int(any(c.damage for c in checkpoints))


def show(run: Run) -> int:
    """Print the parameters with shardings and bytes, the roles of mesh axes, and the estimated memory. Returns 0."""
    import jax

    from valkyrie.train.show import show_run

    configure_jax(run)
    jax.config.update("jax_platforms", "cpu")  # overrides the environment, because no device is needed
    show_run(run, make_console())
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _continue_saved_text(
    program: StepProgram, step: int, parameters: Any, tokenizer: Tokenizer, path: Path, team: Team
) -> None:
    """Continue the text in `path`, or begin a new one with the prompt if there is no such file.

    A prompt on the command line is appended before the continuation, unless it is the one that began the saved text. If
    another checkpoint generated the saved text, the model reads the text again from the start.

    Prints the text with its continuation, and saves both with the model's state. Ctrl-C ends the process; a single
    process first saves the text that it has generated, and the next command reads it again.
    """
    import jax

    from valkyrie.train.continued import begin_text, load_text, save_text

    prompt = program.run.config.prompt
    if not team.broadcast_from_leader("saved text", path.exists):
        text = begin_text(tokenizer, prompt, step)
    else:
        text = load_text(path, jax.eval_shape(lambda p: program.builder.module(p).init_state(1, 1), parameters))
        if text.step != step:
            _to_stderr(
                f"mode.keep={path.stem} was saved with the checkpoint at step {text.step}. Re-reading the text with "
                f"the checkpoint at step {step}."
            )
            text = text.without_state(step)
        if prompt != text.prompt and "prompt" in key_values(program.run.arguments):
            text.append(tokenizer, prompt)
    sys.stdout.write(text.bytes(tokenizer).decode(errors="ignore"))
    with clean_up_on_signals("valkyrie-train") if team.count == 1 else contextlib.nullcontext():
        try:
            _print_continuation(program, parameters, tokenizer, text)
        except KeyboardInterrupt:
            save_text(text.without_state(step), path)  # the state is incomplete if a token was being read
            raise
    save_text(text, path, is_writer=team.is_leader)
    ending = " The model has ended the text. To extend it, add prompt=TEXT." if text.ended else ""
    _to_stderr(f"saved in {path} ({len(text.ids) - 1:,} tokens).{ending}")


def _print_continuation(program: StepProgram, parameters: Any, tokenizer: Tokenizer, text: str | Text) -> None:
    from valkyrie.train.generate import continuation

    for piece in continuation(program, parameters, tokenizer, text):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _report(console: Console, result: FitResult, devices: Devices) -> None:
    summary, label = result.summary, " simulated" if devices.simulated else ""
    if summary["compile_s"] is None:
        return
    parts = [f"compile {summary['compile_s']:.1f} s"]
    if summary["first_step_s"] is not None:
        parts.append(f"first step {summary['first_step_s']:.2f} s")
    if summary["step_s"] is not None:
        parts.append(f"then {1e3 * summary['step_s']:.0f} ms a step (p90 {1e3 * summary['step_p90_s']:.0f} ms)")
        parts.append(f"{summary['tokens_per_second']:,.0f} tokens/s{label}")
    if summary["mfu"] is not None:
        parts.append(f"MFU {100 * summary['mfu']:.1f}% of {devices.chip.name if devices.chip else ''} peak")
    console.print(", ".join(parts))
    traffic = summary.get(COMMUNICATION_KEY) or {}
    if total := traffic.get("bytes"):
        by_axes = ", ".join(
            f"{axes} {decimal_bytes_text(size)}" for axes, size in traffic["bytes_by_mesh_axes"].items()
        )
        console.print(f"a device sends {decimal_bytes_text(total)} per step, by mesh axes: {by_axes}")


def _nan_message(error: FloatingPointError) -> str:
    """Return the error message under `debug=nans`, with the innermost line of Valkyrie or of a user's module."""
    innermost = [f for f in traceback.extract_tb(error.__traceback__) if is_own_file(f.filename)][-1]
    return f"debug=nans: {error}, at {innermost.filename}:{innermost.lineno} in {innermost.name}: {innermost.line}"
