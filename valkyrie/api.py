"""The Python API: what `valkyrie-train` and `valkyrie-report` do, as functions that return values.

Every function is a name of `valkyrie` itself (`valkyrie.train`). None of them exits, takes over a signal, or prints
where `quiet=True`; a mistake of the caller is a ValueError with the message that the command line prints. JAX is
imported by what needs it, so composing, reading trials and reports work without a device.
"""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from valkyrie.hardware import TargetConfig
from valkyrie.report.records import Row
from valkyrie.run import Run
from valkyrie.units import GIB

if TYPE_CHECKING:
    from valkyrie.train.trainer import Fitted


@dataclass(frozen=True)
class Result:
    """A compiled or measured layout. `print(result)` shows what the command prints; `summary` is its JSON file.

    Seconds, tokens per second and GiB of one device; None where it is not known, as of a layout that does not fit.
    """

    summary: dict[str, Any]

    @property
    def status(self) -> str:
        """`ok`, `does_not_fit`, `failed` or `timeout`."""
        return str(self.summary["status"])

    @property
    def reason(self) -> str | None:
        """Why the status is not `ok`."""
        return self.summary.get("reason")

    @property
    def fits(self) -> bool | None:
        """Whether a step fits into the memory of one device; None where the compiler could not tell."""
        return {"ok": True, "does_not_fit": False}.get(self.status)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: predicted of a compile, the median of a measurement."""
        return self._step("step_s")

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The least and the most seconds that a predicted step took, judged by published runs (`summary` says which).

        None of a measured step, and where no published run can be held beside it.
        """
        found = self.summary.get("step", {}).get("interval")
        return None if found is None else (found["low_s"], found["high_s"])

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices."""
        return self._step("tokens_per_second")

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        """Tokens per second of one chip."""
        return self._step("tokens_per_second_per_chip")

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: FLOPs of the model over the peak of the chips, from 0 to 1."""
        return self._step("mfu")

    @property
    def peak_gib(self) -> float | None:
        """Peak memory of one device; of a layout that does not fit, what it would need."""
        memory = self.summary.get("memory", {})
        size = memory.get("peak", memory.get("needed"))
        return None if size is None else size / GIB

    def __str__(self) -> str:
        from valkyrie.search.show import show as print_summary

        text = io.StringIO()
        print_summary(self.summary, Console(file=text, width=140, soft_wrap=True, highlight=False))
        return text.getvalue()

    def _step(self, key: str) -> float | None:
        return self.summary.get("step", {}).get(key)


@dataclass(frozen=True)
class Trained:
    """A finished training: its run folder, its summary (losses, rates, memory), and the model that it left."""

    run: Run
    folder: Path
    summary: dict[str, Any]
    fitted: Fitted = dataclasses.field(repr=False)

    @property
    def parameters(self) -> Any:
        """The trained parameters on their devices, as a tree of arrays: the average of them where one was kept."""
        return self.fitted.parameters

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: logged steps (`step`, `loss`, `learning_rate`, ...) and evaluations."""
        from valkyrie.tracking import read_metrics

        return read_metrics(self.folder / "metrics.jsonl")


def compose(*overrides: str, config_dir: str | Path | None = None) -> Run:
    """Return the run that `valkyrie-train` makes of the same arguments: `compose("model=gpt_tiny", "mesh=2x2x2")`.

    `config_dir` is a folder with configurations and modules of your own, as `--config-dir` takes it. ValueError lists
    everything that is wrong with the run: unknown names with the known ones, and all problems of the layout.
    """
    from valkyrie.train.arguments import run_of

    folder = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ValueError(f"config_dir={config_dir} is not a folder.")
        folder = ["--config-dir", str(Path(config_dir).resolve())]
    return _checked(run_of([*folder, *overrides]))


def load(folder: str | Path, *overrides: str) -> Run:
    """Return the run of a run folder from its `run.yaml`, with other values of some keys: `load(folder, "steps=400")`.

    Training it goes on from its newest checkpoint. Another choice of a group (`mesh=4x2x1`) is composed with the
    arguments that the run was trained with, as `resume=` does. ValueError where there is no such file, or it is
    damaged, and for what `compose` refuses.
    """
    from valkyrie.train.arguments import run_in

    return _checked(run_in(Path(folder), overrides))


def slice(name: str) -> TargetConfig:
    """Return a slice by its name (`v4-64`, `v5litepod-8`, `v4:4x8x8`): chip, chips, hosts, topology, prices.

    ValueError names the nearest legal slices.
    """
    from valkyrie.choices import target_named

    return target_named(name)


def show(run: Run) -> None:
    """Print every parameter with its placement and bytes, the roles, and the memory expected; needs no device."""
    from valkyrie.train.screen import make_console
    from valkyrie.train.show import show_run

    show_run(run, make_console())


def predict(run: Run, *, quiet: bool = False) -> Result:
    """Return what compiling the run's step for its target says: whether it fits, and how long a step takes.

    Needs the TPU compiler (extra `tpu`) for TPU targets, but no TPU; of a CPU target only memory and bytes
    come back. The compiler runs in a process of its own, and equal compiles are taken from the cache. ValueError where
    the compile is refused.
    """
    from valkyrie.search.modes import compile_and_summarise

    _, summary, _ = compile_and_summarise(run, _console(quiet))
    if summary["status"] == "refused":
        raise ValueError(summary["reason"])
    return Result(summary)


def measure(run: Run, *, quiet: bool = False) -> Result:
    """Return the timed step of a run on the devices of this process; ValueError where they are not the target's.

    Simulated devices are fixed when JAX first starts: a mesh of more of them needs a new process.
    """
    from valkyrie.train.devices import prepare_devices

    devices, console = prepare_devices(run), _console(quiet)
    from valkyrie.search.measure import measure as time_step

    with console.status("compiling and timing the step"):
        return Result(time_step(run, devices))


def train(run: Run, *, quiet: bool = False) -> Trained:
    """Train a run in its run folder, as `mode=train` does without the sample, and return what it leaves.

    A run with `resume=` or the `name=` of an earlier one goes on from its newest checkpoint. Interrupting it (a
    notebook's stop button) raises KeyboardInterrupt; the checkpoints saved until then stay. ValueError where devices,
    data or checkpoint do not fit; `valkyrie.train.trainer.DivergedError` where the loss is no longer finite.
    """
    from valkyrie.train.folder import run_folder
    from valkyrie.train.prepare import prepare_run

    folder, console = run_folder(run), _console(quiet)
    prepared = prepare_run(run, console)
    from valkyrie.train.trainer import fit

    fitted = fit(run, *prepared, folder, console, signals=False)
    return Trained(run, folder, fitted.summary, fitted)


def evaluate(run: Run, *, quiet: bool = True) -> dict[str, float]:
    """Return the metrics of a trained run over its whole validation split: `eval_loss` in nats per token, ...

    The run is the one that `resume=` or `name=` names, or the latest; ValueError where there is none.
    """
    from valkyrie.train.prepare import prepare_run, restore, trained_folder

    folder = trained_folder(run)
    prepared = prepare_run(run, _console(quiet))
    from valkyrie.train.evaluate import Evaluator

    program, _, parameters = restore(run, prepared.devices, folder)
    return Evaluator(program, prepared.data, prepared.tokenizer)(parameters, None)


def generate(run: Run, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int | None = 40) -> str:
    """Return the text that a trained run makes of a prompt, without the prompt, of at most `tokens` tokens.

    The run is the one that `resume=` or `name=` names, or the latest; ValueError where there is none.
    """
    from valkyrie.train.devices import prepare_devices
    from valkyrie.train.prepare import restore, tokenizer_of, trained_folder

    folder, tokenizer = trained_folder(run), tokenizer_of(run)
    devices = prepare_devices(run)
    from valkyrie.train.generate import generate as pieces

    program, _, parameters = restore(run, devices, folder)
    sampling = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": run.config.seed}
    return "".join(pieces(program.assembly, parameters, tokenizer, prompt, **sampling))


def trials(*paths: str | Path) -> list[Row]:
    """Return the trials of sweeps, one row each, from folders of sweeps or folders of those.

    `pandas.DataFrame(valkyrie.trials("runs"))` is a table of them.
    """
    from valkyrie.report.records import read_rows

    return read_rows([Path(path) for path in paths])


def report(*paths: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of sweeps and return its path: `report.html` in the first folder, or `output`."""
    from valkyrie.paths import write_whole
    from valkyrie.report.page import page, page_file

    text = page(trials(*paths))
    return write_whole(page_file([Path(path) for path in paths], None if output is None else Path(output)), text)


def _checked(run: Run) -> Run:
    if problems := run.problems():
        raise ValueError("\n".join(problems))
    return run


def _console(quiet: bool) -> Console:
    from valkyrie.train.screen import make_console

    return Console(quiet=True) if quiet else make_console()
