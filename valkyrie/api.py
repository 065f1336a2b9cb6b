"""The Python API, which offers `valkyrie-train` and `valkyrie-report` as functions with return values.

Import the functions from `valkyrie`: `valkyrie.fit`, and `valkyrie.slice` for `named_slice`. They do not exit the
process, do not install signal handlers, and print nothing with `quiet=True`. Wrong values raise ValueError with the
message that the command would print, and arguments of a wrong type raise TypeError. Only functions that need JAX import
it, so composing runs and reading trials work without a device.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from valkyrie.config.run import Run, RunConfig
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.position import Position
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.slice import Slice
from valkyrie.paths import write_atomic
from valkyrie.problems import check_range, refuse, require_type
from valkyrie.search.compile.prediction import CompileStatus, Measurement, Prediction
from valkyrie.sweep.rows import Row
from valkyrie.units import GIB, duration

if TYPE_CHECKING:
    import jax

    from valkyrie.machine.replay import Replay
    from valkyrie.train.trainer import FitResult


@dataclass(frozen=True)
class Result:
    """The prediction or measurement of a training step.

    `print(result)` prints the report of `mode=compile` or `mode=measure`. `record` has the same content as their JSON
    files. `replay` is the simulated timeline of a predicted step, or None. Properties are None if unknown, such as the
    step time of a layout that does not fit.
    """

    record: Prediction | Measurement
    replay: Replay | None = dataclasses.field(default=None, repr=False)

    @property
    def status(self) -> str:
        """`ok`, `does_not_fit`, `failed` or `timeout`."""
        return self.record.status.value

    @property
    def reason(self) -> str | None:
        """Reason why the status is not `ok`, or None."""
        return self.record.reason

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into the memory of one device, or None if unknown."""
        memory, status = self.record.memory, self.record.status
        if status is CompileStatus.ok and memory is not None and memory.peak is None:
            return None
        return {CompileStatus.ok: True, CompileStatus.does_not_fit: False}.get(status)

    @property
    def step_s(self) -> float | None:
        """Step time in seconds: predicted for a compile, the median for a measurement."""
        return None if self.record.step is None else self.record.step.step_s

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Interval of a predicted step time in seconds, from comparable published runs (see `record.step.interval`).

        None for a measured step, or if no published run is comparable.
        """
        interval = getattr(self.record.step, "interval", None)
        return None if interval is None else (interval.low_s, interval.high_s)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on all devices."""
        return None if self.record.step is None else self.record.step.tokens_per_second

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        """Throughput in tokens per second per chip, predicted or measured like `step_s`, or None if unknown."""
        return None if self.record.step is None else self.record.step.tokens_per_second_per_chip

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: FLOPs of the model over the peak of the chips, from 0 to 1."""
        return None if self.record.step is None else self.record.step.mfu

    @property
    def peak_gib(self) -> float | None:
        """Peak memory of one device in GiB. For a layout that does not fit, the memory that it would need."""
        memory = self.record.memory
        if memory is None:
            return None
        fits = self.record.status is CompileStatus.ok
        size = memory.peak if fits or memory.peak is not None else memory.needed
        return None if size is None else size / GIB

    def __repr__(self) -> str:
        step = "no step time" if self.step_s is None else duration(self.step_s)
        peak = "" if self.peak_gib is None else f", {self.peak_gib:.1f} GiB"
        return f"<Result {self._title}: {self.status}, {step}{peak}>"

    def __str__(self) -> str:
        from valkyrie.search.compile.show import show as print_record

        text = io.StringIO()
        print_record(self.record, Console(file=text, width=140, soft_wrap=True, highlight=False))
        return text.getvalue()

    def timeline(self, path: str | Path) -> Path:
        """Write the predicted step as a timeline for https://ui.perfetto.dev, and return its path.

        Raises ValueError if there is no predicted step: for a measurement, a CPU target or a failed compile.
        """
        from valkyrie.machine.timeline import write_timeline

        write_timeline(Path(path), self._require_replay().spans, self._title, "another path")
        return Path(path)

    def html(self, path: str | Path) -> Path:
        """Write a standalone HTML page with the report and a drawing of the step's timeline. Returns its path."""
        from valkyrie.report.program import program_page

        spans = self.replay.spans if self.replay else []
        return write_atomic(Path(path), program_page(self.record, self._title, spans), "another path")

    def _repr_html_(self) -> str:
        """Return the page of `html` in an iframe, for notebooks."""
        from html import escape

        from valkyrie.report.program import program_page

        page = program_page(self.record, self._title, self.replay.spans if self.replay else [])
        return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 640px; border: 0"></iframe>'

    @property
    def _title(self) -> str:
        if isinstance(self.record, Prediction) and self.record.program is not None:
            return self.record.program.name
        return f"{self.record.layout.model} {self.record.layout.name}"

    def _require_replay(self) -> Replay:
        if self.replay is None:
            raise ValueError(f"This result has no timeline: {self.reason or 'no step was predicted'}.")
        return self.replay


@dataclass(frozen=True)
class Trained:
    """A finished training: its run folder, its summary (losses, rates, memory) and the trained model."""

    run: Run
    folder: Path
    summary: dict[str, Any]
    fitted: FitResult = dataclasses.field(repr=False)

    @property
    def parameters(self) -> Any:
        """The trained parameters on their devices, as a tree of arrays. With `ema_decay`, their moving average."""
        return self.fitted.parameters

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Entries of `metrics.jsonl`: logged steps (`step`, `loss`, `learning_rate`, ...) and evaluations."""
        from valkyrie.runs.tracking import read_metrics

        return [line for line in read_metrics(self.folder / "metrics.jsonl") if "step" in line]


def compose(*overrides: str, config_dir: str | Path | None = None) -> Run:
    """Compose a run from arguments of `valkyrie-train`: `compose("model=gpt_tiny", "mesh=2x2x2")`.

    `config_dir` is a folder with your configs and modules, like `--config-dir`. Raises ValueError with everything that
    is wrong with the run: unknown names with the valid ones, and all problems of the layout.
    """
    from valkyrie.config.arguments import parse_run

    usage = 'compose takes strings, such as compose("model=gpt_tiny", "mesh=2x2x2")'
    for override in overrides:
        require_type(override, str, usage)
    folder = []
    if config_dir is not None:
        require_type(config_dir, str | Path, "config_dir= takes the path of a folder")
        if not Path(config_dir).is_dir():
            raise ValueError(f"config_dir={config_dir} is not a folder.")
        folder = ["--config-dir", str(Path(config_dir).resolve())]
    return _refuse_illegal(parse_run([*folder, *overrides]))


def load(folder: str | Path, *overrides: str) -> Run:
    """Load a run from the `run.yaml` of a run folder, with some keys overridden: `load(folder, "steps=400")`.

    `fit` resumes it from its newest checkpoint. Another choice of a group (`mesh=4x2x1`) replaces that group, and all
    other settings keep their saved values, as with `resume=`. Raises ValueError if the file is missing or damaged, and
    for the same reasons as `compose`.
    """
    from valkyrie.config.arguments import load_run

    require_type(folder, str | Path, "load takes the path of a run folder")
    for override in overrides:
        require_type(override, str, 'load takes overrides as strings, such as load(folder, "steps=400")')
    folder = Path(folder)
    if not folder.exists() and not folder.is_absolute() and (in_runs := Path(RunConfig.runs) / folder).is_dir():
        raise ValueError(f"{folder} does not exist. Did you mean {in_runs}?")
    return _refuse_illegal(load_run(folder, overrides))


def named_slice(name: str, *, slices: int = 1) -> Slice:
    """Return the slice with this name, such as `v4-64`, `v5litepod-8` or `v4:4x8x8`.

    It has the chip, the number of chips and hosts, the topology and prices. `slice.mesh((4, 16), ("data", "model"))`
    returns a mesh to compile for. `slices` is the number of slices, connected by the data-centre network. Raises
    ValueError for an unknown name, with the nearest legal slices.
    """
    from valkyrie.config.choices import get_target

    require_type(name, str, 'slice takes a name, such as slice("v5e-8")')
    require_type(slices, int, "slices= takes a whole number")
    target = dataclasses.replace(get_target(name), slices=slices)
    refuse(target.problems())
    return Slice.from_target(target)


def show(run: Run) -> None:
    """Print the sharding and bytes of parameters, the roles of mesh axes, and the expected memory. Needs no device."""
    _require_run("show", run)
    from valkyrie.train.screen import make_console
    from valkyrie.train.show import show_run

    show_run(run, make_console())


def predict(
    program: Run | str | Path | Any,
    *arguments: Any,
    slice: Slice | None = None,
    mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    places: Sequence[Position] | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    tokens: float | int | None = None,
    flops: float | int | None = None,
    time_limit_s: float | int | None = None,
    quiet: bool = False,
    **keywords: Any,
) -> Result:
    """Predict a step on a slice without the hardware: whether it fits, its time, and the time spent waiting.

    `program` is one of:

    - A `Run`. Its step is compiled for its target in a child process, and identical compiles come from the cache. It
      takes no other arguments except `quiet`, and its time limit is `mode.time_limit_s`. For a CPU target, only memory
      and communicated bytes are predicted.
    - A jitted function with the positional and keyword arguments of a call (or `jax.ShapeDtypeStruct`s), or the result
      of its `lower` or `compile`. Requires `slice`. Shardings must use a mesh from `slice.mesh(...)`. If no argument
      has a sharding, pass that mesh as `mesh`. The function is lowered here and compiled in a child process, and
      identical compiles come from the cache. One with Python callbacks is compiled in this process.
    - The path of a dumped compiled module, as for `valkyrie-predict`. Requires `slice` and the mesh of the module,
      such as `mesh={"data": 8, "model": 4}`.

    Compiling for TPU slices needs libtpu (extra `tpu`) but no TPU. Raises ValueError for illegal arguments or programs.

    Args:
        program: The program, as above.
        arguments: Positional arguments of the function.
        slice: The slice to predict for.
        mesh: The mesh of the program, or a dict of its axis names and sizes, in order.
        places: Positions of the mesh's devices, as in `record.positions`, or None for those of `Slice.mesh`. Only for
            a dumped module.
        options: Compiler options. Only for a function.
        name: Title of the report.
        tokens: Tokens in one step on all devices, for tokens per second.
        flops: Model FLOPs in one step on all devices, for MFU.
        time_limit_s: Time limit of the compile in seconds; None for no limit. Ctrl-C ends the compile at once. Only for
            a function.
        quiet: Whether to hide the progress, a line on stderr.
        keywords: Keyword arguments of the function.
    """
    if isinstance(program, Run):
        settings = {"slice": slice, "mesh": mesh, "places": places, "options": options, "name": name}
        settings |= {"time_limit_s": time_limit_s}
        _refuse_run_arguments(arguments, keywords, **settings, tokens=tokens, flops=flops)
        return _predict_run(program, quiet)
    from valkyrie.search.compile.predict import ProgramWork, predict_file, predict_function

    _refuse_other_programs(program)
    if slice is None:
        raise ValueError('Name the slice to predict for: valkyrie.predict(..., slice=valkyrie.slice("v5p-128")).')
    require_type(slice, TargetConfig, 'slice= takes a slice, such as valkyrie.slice("v5p-128")')
    for key, value, kind, takes in (
        ("tokens", tokens, Real, "a number"),
        ("flops", flops, Real, "a number"),
        ("options", options, Mapping, "a dictionary of compiler options"),
        ("places", places, Sequence, "a list of positions, such as record.positions"),
        ("name", name, str, "a string"),
        ("time_limit_s", time_limit_s, Real, "a number of seconds"),
    ):
        if value is not None:
            require_type(value, kind, f"{key}= takes {takes}")
    refuse([*check_range("tokens", tokens, above=0), *check_range("flops", flops, above=0)])
    refuse(check_range("time_limit_s", time_limit_s, above=0))
    target, work = Slice.from_target(slice), ProgramWork(name, tokens, flops)
    if not get_platform(target.platform).compiles_without_devices:
        raise ValueError(f"slice={target.name} is not a TPU slice. Only TPU programs compile without a device.")
    if isinstance(program, str | Path):
        axes = mesh if mesh is None or isinstance(mesh, Mapping) else dict(mesh.shape)
        if not axes:
            raise ValueError('Name the mesh axes of this module, in order: mesh={"data": 8, "model": 4}.')
        predicted = predict_file(Path(program), target, axes, places=places, work=work)
    else:
        if isinstance(mesh, Mapping):
            mesh = target.mesh(list(mesh.values()), list(mesh))
        with Console(stderr=True, quiet=quiet).status("lowering") as status:
            predicted = predict_function(
                *(program, arguments, keywords, target),
                mesh=mesh,
                options=options,
                work=work,
                time_limit_s=time_limit_s,
                progress=status.update,
            )
    return Result(predicted.prediction, predicted.replay)


def _predict_run(run: Run, quiet: bool) -> Result:
    from valkyrie.search.modes import compile_and_summarise

    _, prediction, replay = compile_and_summarise(run, Console(stderr=True, quiet=quiet))
    if prediction.status is CompileStatus.refused:
        raise ValueError(prediction.reason)
    return Result(prediction, replay)


def _refuse_other_programs(program: object) -> None:
    """Raise TypeError or ValueError if `predict` gets something that is easily mistaken for a program."""
    takes = "predict takes a Run, a jitted, lowered or compiled function, or the path of a dumped module"
    if isinstance(program, bytes | bytearray | list | tuple | dict):
        raise TypeError(f"{takes}, not a {type(program).__name__}.")
    if isinstance(program, str) and program.lstrip().startswith("HloModule"):
        raise ValueError(f"{takes}. This is the text of a module: save it to a file, or pass the compiled function.")
    if isinstance(program, str) and "=" in program and not Path(program).exists():
        raise ValueError(f'{takes}. Compose a run first: valkyrie.predict(valkyrie.compose("{program}", ...)).')


def _refuse_run_arguments(arguments: Sequence[Any], keywords: Mapping[str, Any], **options: Any) -> None:
    """Raise ValueError for arguments of `predict` that a run already sets."""
    redundant = [*keywords, *(key for key, value in options.items() if value is not None)]
    if arguments or redundant:
        raise ValueError(
            f"A run already sets its slice, mesh and shapes. Leave out "
            f"{', '.join(redundant) or 'the other arguments'}, or "
            "compose the run with other values."
        )


def measure(run: Run, *, quiet: bool = False) -> Result:
    """Time the step of a run on the devices of this process. Raises ValueError if they do not match the target.

    The number of simulated devices is fixed when JAX starts. A mesh with more devices needs a new process.
    """
    _require_run("measure", run)
    from valkyrie.train.devices import prepare_devices

    devices, console = prepare_devices(run), _console(quiet)
    from valkyrie.search.measure.measure import measure as time_step

    with console.status("compiling and timing the step"):
        return Result(time_step(run, devices))


def fit(run: Run, *, quiet: bool = False) -> Trained:
    """Train a run in its run folder, like `mode=train`, but without printing a sample.

    A run with `resume=` or with the `name=` of an earlier run resumes from its newest checkpoint. Interrupting it (a
    notebook's stop button) raises KeyboardInterrupt and keeps the checkpoints saved so far. Raises ValueError if
    devices, data or checkpoint do not match the run, and `valkyrie.train.callbacks.DivergedError` if the loss is no
    longer finite.
    """
    _require_run("fit", run)
    from valkyrie.runs.folder import run_folder
    from valkyrie.train.prepare import prepare_run

    began, folder, console = time.time(), run_folder(run), _console(quiet)
    prepared = prepare_run(run, console)
    from valkyrie.train import trainer

    fitted = trainer.fit(run, *prepared, folder, console, signals=False, began=began)
    return Trained(run, fitted.folder, fitted.summary, fitted)


def evaluate(run: Run, *, quiet: bool = True) -> dict[str, float]:
    """Return the metrics of a trained run on its whole validation split: `eval_loss` and others.

    Uses the run of `resume=` or `name=`, or else the latest. Raises ValueError if there is none.
    """
    _require_run("evaluate", run)
    from valkyrie.train.prepare import prepare_run, restore, trained_folder

    folder = trained_folder(run)
    prepared = prepare_run(run, _console(quiet))
    from valkyrie.train.evaluate import Evaluator

    program, _, parameters = restore(run, prepared.devices, folder)
    return Evaluator(program, prepared.data, prepared.tokenizer)(parameters, None)


def generate(run: Run, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int | None = 40) -> str:
    """Continue a prompt with a trained run by at most `tokens` tokens. Returns the new text without the prompt.

    Uses the run of `resume=` or `name=`, or else the latest. Raises ValueError if there is none.
    """
    _require_run("generate", run)
    require_type(prompt, str, "prompt= takes a string")
    require_type(tokens, Integral, "tokens= takes a whole number")
    require_type(temperature, Real, "temperature= takes a number")
    require_type(top_k, Integral | None, "top_k= takes a whole number or None")
    refuse(check_range("tokens", tokens, least=0))
    from valkyrie.train.devices import prepare_devices
    from valkyrie.train.prepare import load_run_tokenizer, restore, trained_folder

    folder, tokenizer = trained_folder(run), load_run_tokenizer(run)
    devices = prepare_devices(run)
    from valkyrie.train.generate import generate as generate_pieces

    program, _, parameters = restore(run, devices, folder)
    sampling = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": run.config.seed}
    return "".join(generate_pieces(program.assembly, parameters, tokenizer, prompt, **sampling))


def trials(*paths: str | Path) -> list[Row]:
    """Return the trials of sweeps, one row per trial. `paths` are sweep folders or folders that contain them.

    `pandas.DataFrame(valkyrie.trials("runs"))` makes a table.
    """
    from valkyrie.report.records import read_rows

    for path in paths:
        require_type(path, str | Path, "trials takes paths of sweep folders")
    return read_rows([Path(path) for path in paths])


def write_report(*paths: str | Path, output: str | Path | None = None) -> Path:
    """Write the HTML report of sweeps to `output`, or to `report.html` in the first folder. Returns its path."""
    from valkyrie.paths import write_atomic
    from valkyrie.report.page import page_file, render_page

    for path in paths:
        require_type(path, str | Path, "write_report takes paths of sweep folders")
    require_type(output, str | Path | None, "output= takes the path of a file")
    if output is not None and Path(output).suffix.lower() not in ("", ".html", ".htm"):
        raise ValueError(f"output={output}: the name must end in .html.")
    text = render_page(trials(*paths))
    file = page_file([Path(path) for path in paths], None if output is None else Path(output))
    return write_atomic(file, text, "output=FILE")


def _require_run(function: str, run: object) -> None:
    require_type(run, Run, f'{function} takes a Run, such as valkyrie.compose("model=gpt_tiny", "mesh=2x2x2")')


def _refuse_illegal(run: Run) -> Run:
    refuse(run.problems())
    return run


def _console(quiet: bool) -> Console:
    from valkyrie.train.screen import make_console

    return Console(quiet=True) if quiet else make_console()
