"""The Python API, which offers the commands as functions with return values.

Import the functions from `valkyrie`, such as `valkyrie.fit`. `named_slice` is exported as `valkyrie.slice`.

The functions do not exit the process, do not install signal handlers, and print nothing with `quiet=True`. Wrong values
raise ValueError with the message that the command would print, and arguments of a wrong type raise TypeError. Only
functions that need JAX import it, so composing runs and reading trials work without a device.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Never

from rich.console import Console

from valkyrie.api_programs import check, predict
from valkyrie.api_search import search
from valkyrie.config.run import Run, RunConfig
from valkyrie.parallel.slice import Slice
from valkyrie.paths import write_atomic
from valkyrie.problems import raise_problems, require_settings, require_type
from valkyrie.processes.child import module_command, run_streamed
from valkyrie.processes.ending import EXIT_INTERRUPTED
from valkyrie.results import Answer, Explanation, FoundLayout, Result, Trained, TrialRow, Trials
from valkyrie.runs.folder import key_values
from valkyrie.search.comparison import Comparison
from valkyrie.search.compile.fault import Fault
from valkyrie.search.compile.prediction import Prediction

if TYPE_CHECKING:
    from valkyrie.train.trained_model import TrainedModel

__all__ = [
    "Answer",
    "Comparison",
    "Explanation",
    "Fault",
    "FoundLayout",
    "Result",
    "Run",
    "Slice",
    "Trained",
    "TrialRow",
    "Trials",
    "check",
    "compose",
    "evaluate",
    "explain",
    "fit",
    "from_hf",
    "generate",
    "load",
    "load_model",
    "measure",
    "named_slice",
    "predict",
    "run_sweep",
    "search",
    "show",
    "to_hf",
    "trials",
    "write_report",
]


def compose(*overrides: str, config_dir: str | Path | None = None, **keywords: Never) -> Run:
    """Compose a run from arguments of `valkyrie-train`: `compose("model=gpt_tiny", "mesh=2x2x2")`.

    `config_dir` is a folder with your configs and modules, like `--config-dir`. Raises ValueError if an argument is
    invalid or the run has problems. The message lists the problems and, for an unknown name, the valid ones.
    """
    from valkyrie.config.arguments import parse_run

    require_settings('compose takes strings, such as compose("model=gpt_tiny", "mesh=2x2x2")', overrides, keywords)
    return _refuse_illegal(parse_run([*_config_flags(config_dir), *overrides], in_python=True))


def load(folder: str | Path, *overrides: str, **keywords: Never) -> Run:
    """Load a run from the `run.yaml` of a run folder, with some keys overridden: `load(folder, "steps=400")`.

    `folder` is a path, the name of a run under `runs`, or `latest`, as for `resume=`. `fit` resumes the run from its
    newest checkpoint. Another choice of a group (`mesh=4x2x1`) replaces that group, and all other settings keep their
    saved values, as with `resume=`. Raises ValueError if the file is missing or damaged, and for the same reasons as
    `compose`.
    """
    from valkyrie.config.arguments import load_run

    require_settings('load takes overrides as strings, such as load(folder, "steps=400")', overrides, keywords)
    runs = Path(key_values(overrides).get("runs", RunConfig.runs))
    return _refuse_illegal(load_run(_find_folder("load", folder, runs), overrides))


def _find_folder(function: str, folder: str | Path, runs: Path) -> Path:
    """Return the path of a run folder, given as a path, the name of a run in `runs`, or `latest`."""
    from valkyrie.runs.folder import find_run

    require_type(folder, str | Path, f"{function} takes the path of a run folder")
    path = Path(folder)
    if path.is_file():
        remedy = f" Pass its folder, {path.parent}." if (path.parent / "run.yaml").is_file() else ""
        raise ValueError(f"{path} is not a run folder but a file.{remedy}")
    if not path.exists() and len(path.parts) == 1:
        return runs / path if (runs / path).is_dir() else find_run(runs, str(folder), key="")
    return path


def named_slice(name: str, *, slices: int = 1) -> Slice:
    """Return the slice with this name, such as `v4-64`, `v5litepod-8` or `v4:4x8x8`.

    It has the chip, the number of chips and hosts, the topology and prices. `slice.mesh((4, 16), ("data", "model"))`
    returns a mesh to compile for. `slices` is the number of such slices, connected by the data-centre network. Raises
    ValueError for an unknown name, with the nearest legal slices in the message, and for an illegal `slices`.
    """
    from valkyrie.config.choices import get_target

    require_type(name, str, 'slice takes a name, such as slice("v5e-8")')
    require_type(slices, int, "slices= takes a whole number")
    target = dataclasses.replace(get_target(name), slices=slices)
    raise_problems(target.problems())
    return Slice.from_target(target)


def show(run: Run) -> None:
    """Print the sharding and bytes of parameters, the roles of mesh axes, and the expected memory. Needs no device."""
    _require_run("show", run)
    from valkyrie.train.screen import make_console
    from valkyrie.train.show import show_run

    show_run(run, make_console())


def measure(run: Run, *, quiet: bool = False) -> Result:
    """Time the step of a run on the devices of this process, and return the measurement.

    Raises ValueError if the devices do not match the target. The number of simulated devices is fixed when JAX starts,
    so a mesh with more devices needs a new process.
    """
    _require_run("measure", run)
    from valkyrie.train.devices import prepare_devices

    devices, console = prepare_devices(run), _console(quiet)
    from valkyrie.search.measure.measure import measure as time_step

    with console.status("compiling and timing the step"):
        return Result(time_step(run, devices))


def explain(first: Run | Result | str | Path, second: Run | Result | str | Path, *, quiet: bool = False) -> Explanation:
    """Explain why one of two layouts of a model is faster: what each waits for, recomputes and saves.

    Each layout is a `Run`, which is compiled for its target, a `Result` of `predict`, or the path or name of a run
    folder that `mode=compile` has made. Raises ValueError if the layouts cannot be compared, before compiling anything.
    """
    from valkyrie.search.explain.mode import explain as explain_layouts

    usage = "takes a Run (such as answer.run(row)), a Result of predict, or a run folder of mode=compile"
    layouts: list[Run | Path | Prediction] = []
    for key, layout in (("first", first), ("second", second)):
        layout = layout.record if isinstance(layout, Result) else Path(layout) if isinstance(layout, str) else layout
        require_type(layout, Run | Path | Prediction, f"{key}= {usage}")
        if isinstance(layout, Path) and not layout.is_dir():
            name, layout = layout, Path(RunConfig.runs) / layout
            if not layout.is_dir():
                raise ValueError(
                    f"{key}: there is no run folder {name}. Pass a run folder of mode=compile, a Run or a Result."
                )
        layouts.append(layout)  # pyright: ignore[reportArgumentType]
    return Explanation(explain_layouts(layouts[0], layouts[1], _console(quiet)))


def fit(run: Run, *, quiet: bool = False) -> Trained:
    """Train a run in its run folder, like `mode=train`, but without printing a sample.

    A run with `resume=` or with the `name=` of an earlier run resumes from its newest checkpoint. An interrupt (a
    notebook's stop button) raises KeyboardInterrupt and keeps the checkpoints saved so far. Raises ValueError if
    devices, data or checkpoint do not match the run, `valkyrie.train.callbacks.DivergedError` if the loss or gradients
    are no longer finite, and `valkyrie.checkpoint.NotSavedError` if the final state cannot be saved.
    """
    _require_run("fit", run)
    from valkyrie.runs.folder import choose_run_folder
    from valkyrie.train.prepare import prepare_run

    start_time, folder, console = time.time(), choose_run_folder(run), _console(quiet)
    prepared = prepare_run(run, console)
    from valkyrie.train import trainer

    fitted = trainer.fit(run, *prepared, folder, console, start_time=start_time)
    return Trained(run, fitted.folder, fitted.summary, fitted)


def evaluate(run: Run, *, quiet: bool = True) -> dict[str, float]:
    """Evaluate a trained run on its whole validation split. Returns its metrics by name, such as `eval_loss`.

    Uses the trained run that `resume=` or `name=` selects, as in a run of `load`. Raises ValueError if the run sets
    neither, if there is no such run, if devices, data or checkpoint do not match it, or if `seq` is longer than in
    training and the validation split does not fill one row of that length.
    """
    _require_run("evaluate", run)
    from valkyrie.train.prepare import prepare_evaluation, restore, selected_folder

    folder = selected_folder(run)
    inputs = prepare_evaluation(run, folder, _console(quiet))
    from valkyrie.train.evaluate import Evaluator

    program, _, parameters = restore(run, inputs.devices, folder)
    return Evaluator(program, inputs.data, inputs.tokenizer)(parameters, None)


def generate(run: Run, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int | None = 40) -> str:
    """Generate up to `tokens` tokens that continue `prompt`, with a trained model. Returns the text without the prompt.

    The run's `resume` or `name` setting selects the checkpoint's run folder, as in a run of `load`. Each token is
    sampled from the `top_k` most likely ones, or from all if `top_k` is None. `temperature=0` always takes the most
    likely token. Raises ValueError if the run sets neither, if no trained run is found or a sampling argument is
    invalid.
    """
    _require_run("generate", run)
    from valkyrie.train.prepare import check_sampling

    check_sampling(prompt, tokens, temperature, top_k)
    return _restore_model(run).generate(prompt, tokens=tokens, temperature=temperature, top_k=top_k)


def load_model(folder: str | Path, *overrides: str) -> TrainedModel:
    """Load the newest checkpoint of a run folder as a model, a function from tokens to logits.

    It also has `model.generate(prompt)`, `model.parameters` and `model.tokenizer`. `overrides` change settings of the
    run, such as `"mesh=1x1x1"` for one device or `"precision=float32"`. Raises ValueError if there is no checkpoint, if
    this process lacks the devices, or if the run does not train a language model.
    """
    require_type(folder, str | Path, "load_model takes the path of a run folder")
    return _restore_model(load(folder, *overrides))


def _restore_model(run: Run) -> TrainedModel:
    from valkyrie.train.devices import prepare_devices
    from valkyrie.train.prepare import load_run_tokenizer, restore, selected_folder

    folder, tokenizer = selected_folder(run), load_run_tokenizer(run)
    devices = prepare_devices(run)
    from valkyrie.train.trained_model import TrainedModel

    program, step, parameters = restore(run, devices, folder)
    return TrainedModel(run, step, parameters, tokenizer, program)


def from_hf(
    folder: str | Path, *overrides: str, name: str | None = None, tokenizer: str | None = None, quiet: bool = False
) -> Path:
    """Convert a Hugging Face folder to a run folder, like `valkyrie-convert from-hf`, and return its path.

    `load_model` loads it, and `fit(load(folder, "steps=1000", ...))` continues its training. The weights are converted
    in a child process. Raises ValueError if the model cannot be converted, or if the run folder exists.

    Args:
        folder: The folder, with `config.json` and safetensors.
        overrides: Settings of the run, such as `"mesh=2x2x1"`.
        name: Name of the run, or None for the name of the folder.
        tokenizer: `bytes`, `gpt2`, a tiktoken encoding or a `tokenizer.json`, or None for the folder's.
        quiet: Whether to print nothing.
    """
    require_type(folder, str | Path, "from_hf takes the path of a Hugging Face folder")
    for override in overrides:
        require_type(override, str, 'from_hf takes overrides as strings, such as from_hf(folder, "mesh=2x2x1")')
    options = {"name": name, "tokenizer": tokenizer}
    for key, value in options.items():
        require_type(value, str | None, f"{key}= takes a string")
    return _convert("from-hf", [str(folder), *overrides], options, quiet)


def to_hf(
    run_folder: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    file_gb: float = 5.0,
    quiet: bool = False,
) -> Path:
    """Convert a trained run to a Hugging Face folder, like `valkyrie-convert to-hf`, and return its path.

    The weights are converted in a child process. Raises ValueError if there is no checkpoint, if the model cannot be
    converted, or if `output` is not empty.

    Args:
        run_folder: The run folder.
        output: The folder to write, for `AutoModelForCausalLM.from_pretrained`.
        step: Step of the checkpoint, or None for the newest.
        dtype: `float32`, `bfloat16` or `float16`. None means the dtype of the folder that the run was converted from,
            or float32 for other runs.
        file_gb: Maximum size of a weights file in GB, and of the weights that are in memory at a time.
        quiet: Whether to print nothing.
    """
    from valkyrie.config.arguments import load_run

    run_folder = _find_folder("to_hf", run_folder, Path(RunConfig.runs))
    require_type(output, str | Path, "output= takes the path of a folder")
    require_type(step, Integral | None, "step= takes a whole number or None")
    require_type(file_gb, Real, "file_gb= takes a number")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype}: must be float32, bfloat16 or float16, or None.")
    load_run(run_folder, [])  # raises ValueError if it is no run folder
    options = {"step": step, "dtype": dtype, "file-gb": file_gb}
    return _convert("to-hf", [str(run_folder), str(output)], options, quiet)


def _convert(command: str, arguments: Sequence[str], options: Mapping[str, object], quiet: bool) -> Path:
    """Run `valkyrie-convert` in a child process, because it initialises JAX, and return the folder that it writes."""
    folders: list[Path] = []

    def collect_folder(line: str) -> None:
        if match := re.fullmatch(r"wrote (.+) in [\d.]+ s", line):
            folders.append(Path(match[1]))

    flags = [f"--{key}={value}" for key, value in options.items() if value is not None]
    try:
        _run_command("convert", [command, *flags, *arguments], quiet, collect_folder, lambda: bool(folders))
    except ValueError as error:
        text = re.sub(r"--([\w-]+) (?=[A-Z\d])", r"\1=", str(error))  # `--step 3` is step=3 here
        raise ValueError(re.sub(r"--([\w-]+)", r"\1=", text).replace("file-gb=", "file_gb=")) from None
    return folders[-1]


def trials(*paths: str | Path) -> Trials:
    """Return the trials of sweeps and the training runs outside sweeps, one row each.

    `paths` are sweep folders, run folders, or folders that contain them. `pandas.DataFrame(valkyrie.trials("runs"))`
    makes a table. Raises ValueError if a path has no trials or training runs, or if a file is damaged.
    """
    for path in paths:
        require_type(path, str | Path, "trials takes paths of sweep folders")
    from valkyrie.report.records import read_rows
    from valkyrie.sweep.columns import CSV_COLUMNS

    rows = read_rows([Path(path) for path in paths])
    return Trials(TrialRow(**{column.name: column.value(row) for column in CSV_COLUMNS}) for row in rows)


def run_sweep(*overrides: str, config_dir: str | Path | None = None, quiet: bool = False, **keywords: Never) -> Trials:
    """Run a sweep, like `valkyrie-train -m`, and return the trials of its folder.

    `run_sweep("+sweep=laptop_8", "steps=3")` runs the sweep `conf/sweep/laptop_8.yaml` with 3 steps, and
    `run_sweep("mesh=2x2x2,4x2x1", "partition=fsdp,dp", "mode=measure")` runs every combination. Trials that already
    have a result in the folder are not repeated. Failed trials are rows with a `status` and `reason`.

    The sweep and each of its trials run in separate child processes, which need the devices: on a TPU or GPU, sweep
    before this process uses JAX. An interrupt raises KeyboardInterrupt and keeps the finished trials. Raises
    ValueError for refused settings, or if a trial cannot be recorded. `config_dir` has your configs and modules.
    """
    folders: list[str] = []

    def collect_folder(line: str) -> None:
        if line.startswith(_FOLDER_LINE):
            folders.append(line.removeprefix(_FOLDER_LINE))

    require_settings('run_sweep takes strings, such as run_sweep("+sweep=laptop_8", "steps=3")', overrides, keywords)
    if not overrides:
        raise ValueError('run_sweep needs settings, such as run_sweep("+sweep=laptop_8", "steps=3").')
    arguments = [*_config_flags(config_dir), *(o for o in overrides if o not in ("-m", "--multirun"))]
    _run_command("train", ["-m", *arguments], quiet, collect_folder, lambda: bool(folders))
    return trials(folders[-1])


def _config_flags(config_dir: str | Path | None) -> list[str]:
    """Return `--config-dir` and the absolute path, or an empty list for None. Raises ValueError if it is no folder."""
    if config_dir is None:
        return []
    require_type(config_dir, str | Path, "config_dir= takes the path of a folder")
    if not Path(config_dir).is_dir():
        raise ValueError(f"config_dir={config_dir} is not a folder.")
    return ["--config-dir", str(Path(config_dir).resolve())]


_FOLDER_LINE = "folder: "
"""Prefix of the output line that names the folder of a sweep."""


def _run_command(
    name: str, arguments: Sequence[str], quiet: bool, on_line: Callable[[str], None], has_result: Callable[[], bool]
) -> None:
    """Run a command such as `valkyrie-train` in a child process, and print its output.

    Args:
        name: The command, without `valkyrie-`.
        arguments: Its arguments.
        quiet: Whether to print nothing.
        on_line: Called with each line that the command prints on stdout.
        has_result: Called when the command has ended. Returns whether `on_line` has received its result.

    Raises:
        KeyboardInterrupt: The command was interrupted.
        ValueError: The command failed with an error message, even if it had printed a result before.
        RuntimeError: The command printed neither a result nor an error message.
    """

    def print_line(line: str) -> None:
        on_line(line)
        if not quiet:
            print(line, flush=True)

    status, errors = run_streamed(module_command(f"valkyrie.cli.{name}", *arguments), print_line)
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    message = errors.partition(f"valkyrie-{name}: ")[2].strip() if status else ""
    if has_result() and not message:
        if not quiet:
            print(errors, end="", file=sys.stderr)
        return
    if not message:
        raise RuntimeError(f"valkyrie-{name} ended with status {status} and without a result. {errors}".rstrip())
    first, *problems = message.splitlines()
    raise ValueError("\n".join(problem.removeprefix("  - ") for problem in problems) if problems else first)


def write_report(*paths: str | Path, output: str | Path | None = None) -> Path:
    """Write the HTML report of the sweeps in `paths` (see `trials`), and return its path.

    Writes to `output`, or to `report.html` in the first folder. Raises ValueError if the suffix of `output` is not
    `.html`, `.htm` or empty.
    """
    from valkyrie.report.page import page_file, render_page
    from valkyrie.report.records import read_rows

    for path in paths:
        require_type(path, str | Path, "write_report takes paths of sweep folders")
    require_type(output, str | Path | None, "output= takes the path of a file")
    if output is not None and Path(output).suffix.lower() not in ("", ".html", ".htm"):
        raise ValueError(f"output={output}: the name must end in .html.")
    text = render_page(read_rows([Path(path) for path in paths]))
    file = page_file([Path(path) for path in paths], None if output is None else Path(output))
    return write_atomic(file, text, "output=FILE")


def _require_run(function: str, run: object) -> None:
    require_type(run, Run, f'{function} takes a Run, such as valkyrie.compose("model=gpt_tiny", "mesh=2x2x2")')


def _refuse_illegal(run: Run) -> Run:
    raise_problems(run.problems())
    return run


def _console(quiet: bool) -> Console:
    from valkyrie.train.screen import make_console

    return Console(quiet=True) if quiet else make_console()
