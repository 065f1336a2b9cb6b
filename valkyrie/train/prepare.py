"""What a run needs before its program: data, tokenizer and devices, the cheap and the refusable first; trained runs."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from valkyrie.config.run import Run
from valkyrie.data.config import Source
from valkyrie.data.manifest import Prepared
from valkyrie.paths import DiskError
from valkyrie.processes.team import ALONE, Team
from valkyrie.runs.folder import changed_settings, find_run
from valkyrie.tasks import task_of
from valkyrie.train.devices import acquire, configure_jax, missing_devices

if TYPE_CHECKING:
    from rich.console import Console

    from valkyrie.data.forms import Dataset
    from valkyrie.data.tokenizer import Tokenizer
    from valkyrie.train.devices import Devices
    from valkyrie.train.program import StepProgram


class Inputs(NamedTuple):
    """What a training or an evaluation works with."""

    devices: Devices
    data: Dataset
    tokenizer: Tokenizer | None


def prepare_run(run: Run, console: Console, team: Team = ALONE) -> Inputs:
    """Return the devices, prepared data and tokenizer of a run, printing what they are.

    ValueError where the devices are not of this machine, or where tokenizer and model do not fit.
    """
    problems = missing_devices(run)
    if problems:
        raise ValueError("\n".join(problems))
    refuse_other_data(run)
    if run.config.mode.name == "train" and run.config.code_eval_every is not None:
        refuse_without_judge(run, team)
    tokenizer = tokenizer_of(run) if task_of(run.model.task).is_text else None
    data = _prepared_together(run, console, team)
    console.print(data.describe(), highlight=False)
    if isinstance(data, Prepared) and (note := _uneven(run, data)):
        console.print(note, style="yellow")
    configure_jax(run, console.print)
    devices = acquire(run, team)
    console.print(devices.note, style="bold yellow" if devices.simulated else None)
    return Inputs(devices, data, tokenizer)


def _uneven(run: Run, data: Prepared) -> str | None:
    return uneven_split(data.train.tokens, data.validation.tokens, run.config.data.validation_fraction)


def refuse_other_data(run: Run) -> None:
    """Raise ValueError where the model's task is not for this kind of data: text, or puzzles."""
    model, data = run.model.name, run.config.data
    wants_text = task_of(run.model.task).is_text
    if wants_text and not data.is_text:
        raise ValueError(
            f"model={model} trains on text, and data={data.name} is puzzles. Use data=stdlib, or your own by data=text."
        )
    if data.is_text and not wants_text:
        raise ValueError(
            f"model={model} trains on puzzles, and data={data.name} is text. Use data=sudoku, data=sudoku_4x4, or your "
            "own by data=puzzles."
        )


def refuse_without_judge(run: Run, team: Team = ALONE) -> None:
    """Raise ValueError where process 0, which judges code, has no problems, no compiler or no sandbox for it."""
    from valkyrie.code_eval.config import not_possible

    if problems := team.of_first("evaluation by code", lambda: not_possible(run.config.code_eval)):
        raise ValueError("\n".join(problems))


def _prepared_together(run: Run, console: Console, team: Team) -> Dataset:
    """Return the prepared data, which process 0 prepares first: the others find it, or have caches of their own."""
    if not team.leads:
        team.wait("data of process 0")
    data = prepared_anywhere(run, console.print, team)
    if team.leads:
        team.wait("data of process 0")
    team.agree("data", {"content": data.content, "tokenizer": data.tokenizer, "size": data.describe()})
    return data


def prepared_anywhere(run: Run, say: Callable[[str], Any] | None = None, team: Team = ALONE) -> Dataset:
    """Return the data of a run; where the cache cannot be written, prepared for this process alone, with a line."""
    from valkyrie.data.prepare import prepare
    from valkyrie.data.stream import open_stream

    if run.config.data.source is Source.parquet_stream:
        return open_stream(run.config.data, run.tokenizer, team)
    if not run.config.data.is_text:
        return puzzles_of(run, say)
    try:
        return prepare(run.config.data, run.tokenizer)
    except DiskError as error:
        folder = tempfile.mkdtemp(prefix="valkyrie-data-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        data = prepare(replace(run.config.data, cache_dir=folder), run.tokenizer)
        if say is not None:
            say(f"{error} The data is prepared in {folder}, for this run alone.")
        return data


def puzzles_of(run: Run, say: Callable[[str], Any] | None = None) -> Dataset:
    """Return the puzzles of a run, prepared where they are not yet; ValueError where its model is for others."""
    from valkyrie.data.puzzles.prepare import prepare_puzzles

    check_puzzles(run)
    return prepare_puzzles(run.config.data, say)


def check_puzzles(run: Run) -> str:
    """Return what the puzzles of a run are, in a few words; ValueError where its model is for others."""
    from valkyrie.data.puzzles.prepare import shape_of

    model, config = run.model, run.config
    shape = shape_of(config.data)
    wanted = {"context": shape.cells, "vocab_size": shape.vocab_size, "puzzles": shape.identifiers}
    has = {"context": config.seq, "vocab_size": model.vocab_size, "puzzles": getattr(model, "puzzles", 1)}
    fits = has["context"] == shape.cells and all(has[key] >= wanted[key] for key in ("vocab_size", "puzzles"))
    if not fits:
        settings = " ".join(f"model.{key}={value}" for key, value in wanted.items() if has[key] != value)
        raise ValueError(
            f"data={config.data.name} has puzzles of {shape.cells} cells with {shape.vocab_size} values and "
            f"{shape.identifiers} identifiers, and model={model.name} is for {has['context']} cells, "
            f"{has['vocab_size']} values and {has['puzzles']} identifiers. Use {settings}."
        )
    return f"puzzles of {shape.cells} cells"


def uneven_split(train: int, validation: int, wanted: float) -> str | None:
    """Return what to know of a validation split that is over twice its share: documents are whole, and here are few."""
    share = validation / (train + validation)
    if share <= 2 * wanted:
        return None
    return (
        f"validation has {100 * share:.0f}% of the tokens, where data.validation_fraction={wanted:g} asks for "
        f"{100 * wanted:.0f}%: documents are held out whole, and these are few and long"
    )


def tokenizer_of(run: Run) -> Tokenizer:
    """Return the tokenizer of a run; ValueError where it has more ids than the model has rows for."""
    from valkyrie.data.tokenizer import load_tokenizer, vocab_size_of

    if not task_of(run.model.task).is_text:
        raise ValueError(f"model={run.model.name} answers puzzles: it has no tokenizer and continues no text.")

    ids, rows = vocab_size_of(run.tokenizer), run.model.vocab_size
    if ids > rows:
        key = "data.tokenizer" if run.config.data.tokenizer else "model.tokenizer"
        raise ValueError(
            f"{key}={run.tokenizer} has {ids:,} ids, but model.vocab_size={rows} is all that the model has. "
            f"Use model.vocab_size={ids} or above, or a tokenizer of at most {rows:,} ids."
        )
    return load_tokenizer(run.tokenizer)


def trained_folder(run: Run) -> Path:
    """Return the folder of the trained run that `resume` or `name` names, or of the latest; ValueError if none."""
    config = run.config
    return find_run(Path(config.runs), config.resume or config.name or "latest")


def restore(run: Run, devices: Devices, folder: Path, team: Team = ALONE) -> tuple[StepProgram, int, Any]:
    """Return (program, step, parameters) of a trained run; the average of the parameters where it kept one.

    ValueError where the state is larger than the memory of the devices.
    """
    from contextlib import closing

    from valkyrie.checkpoint import Checkpoints
    from valkyrie.data.tokenizer import identity_of
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.train.program import StepProgram
    from valkyrie.train.room import check_room, out_of_memory_in_plain_words

    program = StepProgram(run, build_mesh(run.config.mesh, devices.devices))
    check_room(program, devices, training=False)
    config, about = run.config.checkpoint, {"tokenizer": identity_of(run.tokenizer)}
    with (
        out_of_memory_in_plain_words(run, devices),
        closing(Checkpoints(folder, config, read_only=True, team=team, about=about)) as checkpoints,
    ):
        restored = checkpoints.restore(program.abstract_state, changed=changed_settings(run, folder))
    return program, restored.step, restored.state.averaged
