"""Decides what each mode does with a checked run. JAX is imported only after everything cheaper has been tried."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valkyrie.run import Run, RunConfig
from valkyrie.train.devices import acquire, configure_jax, missing_devices, prepare_devices
from valkyrie.train.folder import changed_settings, find_run, run_folder
from valkyrie.train.screen import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from valkyrie.data.manifest import Prepared
    from valkyrie.data.tokenizer import Tokenizer
    from valkyrie.train.devices import Devices


def train(run: Run, arguments: Sequence[str]) -> int:
    """Train, evaluate, print a sample, and say where the run is and what to do next; return the exit status."""
    folder = run_folder(run)
    console, prepared, tokenizer, devices = _prepare(run)
    from valkyrie.train.interrupt import EXIT_STATUS
    from valkyrie.train.trainer import DivergedError, fit

    console.print(f"[bold]{run.layout.describe_roles()}[/]")
    try:
        fitted = fit(run, devices, prepared, tokenizer, folder, console, arguments)
    except (DivergedError, FloatingPointError) as error:
        print(f"valkyrie-train: {_where(error) if isinstance(error, FloatingPointError) else error}", file=sys.stderr)
        return 1
    found_by = folder.name if folder.parent == Path(RunConfig.runs) else str(folder)  # a name is looked for there alone
    again = f"valkyrie-train resume={shlex.quote(found_by)}"
    if fitted.interrupted:
        console.print(f"stopped at step {fitted.summary['steps']}, saved in {folder}. Go on with: {again}")
        return EXIT_STATUS
    _report(console, fitted.summary, devices)
    parameters = fitted.state.parameters if fitted.state.ema is None else fitted.state.ema
    if run.config.sample_tokens:
        console.rule("sample")
        _print_sample(run, fitted.program.assembly, parameters, tokenizer, devices)
        console.rule()
    console.print(f"run folder: {folder}")
    console.print(f"next: {again} steps={2 * run.config.steps}   goes on training")
    console.print(f'      {again} mode=generate prompt="class "')
    return 0


def evaluate(run: Run, arguments: Sequence[str]) -> int:
    """Print loss and bits per byte of a trained run over its whole validation split; return the exit status."""
    folder = _trained_folder(run)
    console, prepared, tokenizer, devices = _prepare(run)
    program, step, parameters = _restore(run, devices, folder)
    from valkyrie.train.evaluate import Evaluator

    result = Evaluator(program, prepared, tokenizer)(parameters, None)
    console.print(
        f"{folder.name} at step {step}: validation loss {result['eval_loss']:.4f}, "
        f"{result['eval_bits_per_byte']:.4f} bits per byte over {result['eval_tokens']:,.0f} tokens",
        highlight=False,
    )
    return 0


def generate(run: Run, arguments: Sequence[str]) -> int:
    """Print the prompt and what a trained run makes of it, as it is sampled; return the exit status."""
    folder = _trained_folder(run)
    _refuse_small_vocabulary(run)
    console, tokenizer, devices = make_console(), _tokenizer(run), prepare_devices(run)
    program, step, parameters = _restore(run, devices, folder)
    console.print(f"{folder.name} at step {step}", style="dim")
    _print_sample(run, program.assembly, parameters, tokenizer, devices)
    return 0


def show(run: Run, arguments: Sequence[str]) -> int:
    """Print every parameter with its placement and bytes, the roles, and the memory expected; needs no device."""
    from valkyrie.train.show import show_run

    show_run(run, make_console())
    return 0


MODES: dict[str, Callable[[Run, Sequence[str]], int]] = {
    "train": train,
    "show": show,
    "eval": evaluate,
    "generate": generate,
}
"""What `mode=` may name."""


def _refuse_small_vocabulary(run: Run) -> None:
    from valkyrie.data.tokenizer import vocab_size_of

    ids, rows = vocab_size_of(run.tokenizer), run.model.vocab_size
    if ids > rows:
        key = "data.tokenizer" if run.config.data.tokenizer else "model.tokenizer"
        raise ValueError(
            f"{key}={run.tokenizer} has {ids:,} ids, but model.vocab_size={rows} is all that the model has. "
            f"Use model.vocab_size={ids} or above, or a tokenizer of at most {rows:,} ids."
        )


def _tokenizer(run: Run) -> Tokenizer:
    from valkyrie.data.tokenizer import load_tokenizer

    return load_tokenizer(run.tokenizer)


def _prepare(run: Run) -> tuple[Console, Prepared, Tokenizer, Devices]:
    """Return what a run needs before its program: the cheap and the refusable first."""
    from valkyrie.data.prepare import prepare

    console, problems = make_console(), missing_devices(run)
    if problems:
        raise ValueError("\n".join(problems))
    _refuse_small_vocabulary(run)
    prepared = prepare(run.config.data, run.tokenizer)
    console.print(
        f"data {prepared.name}: {prepared.train.tokens:,} tokens to train on, {prepared.validation.tokens:,} "
        f"to judge by ({prepared.tokenizer})",
        highlight=False,
    )
    configure_jax(run)
    devices = acquire(run)
    console.print(devices.note, style="bold yellow" if devices.simulated else None)
    return console, prepared, _tokenizer(run), devices


def _trained_folder(run: Run) -> Path:
    config = run.config
    return find_run(Path(config.runs), config.resume or config.name or "latest")


def _restore(run: Run, devices: Devices, folder: Path) -> tuple[Any, int, Any]:
    """Return (program, step, parameters) of a trained run; the average of the parameters where it kept one."""
    from contextlib import closing

    from valkyrie.checkpoint import Checkpoints
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.train.program import StepProgram

    program = StepProgram(run, build_mesh(run.config.mesh, devices.devices))
    with closing(Checkpoints(folder, run.config.checkpoint, read_only=True)) as checkpoints:
        step, state, _ = checkpoints.restore(program.abstract_state, changed=changed_settings(run, folder))
    return program, step, state.parameters if state.ema is None else state.ema


def _print_sample(run: Run, assembly: Any, parameters: Any, tokenizer: Tokenizer, devices: Devices) -> None:
    import jax

    from valkyrie.train.generate import generate as stream

    config = run.config
    if devices.simulated:  # one CPU device does it faster than many that share its cores
        parameters = jax.device_put(parameters, devices.devices[0])
    sys.stdout.write(config.prompt)
    for piece in stream(
        assembly,
        parameters,
        tokenizer,
        config.prompt,
        tokens=config.sample_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    ):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _report(console: Console, summary: dict[str, Any], devices: Devices) -> None:
    word = " simulated" if devices.simulated else ""
    if summary["compile_s"] is None:
        return
    parts = [f"compile {summary['compile_s']:.1f} s"]
    if summary["first_step_s"] is not None:
        parts.append(f"first step {summary['first_step_s']:.2f} s")
    if summary["step_s"] is not None:
        parts.append(f"then {1e3 * summary['step_s']:.0f} ms a step (p90 {1e3 * summary['step_p90_s']:.0f} ms)")
        parts.append(f"{summary['tokens_per_second']:,.0f} tokens/s{word}")
    if summary["mfu"] is not None:
        parts.append(f"MFU {100 * summary['mfu']:.1f}% of {devices.chip.name if devices.chip else ''} peak")
    console.print(", ".join(parts))


def _where(error: FloatingPointError) -> str:
    """Return what `debug=nans` found, with the innermost line of this program that was at work."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}valkyrie{os.sep}" in f.filename]
    deepest = frames[-1]
    return f"debug=nans: {error}, at {deepest.filename}:{deepest.lineno} in {deepest.name}: {deepest.line}"
