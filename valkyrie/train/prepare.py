"""Prepares the devices, the data and the tokenizer of a run, cheapest checks first, and restores trained runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from valkyrie.checkpoint.contents import read_info, refuse_other_tokenizer
from valkyrie.checkpoint.location import checkpoint_root, latest_step
from valkyrie.config.run import Run
from valkyrie.data.config import is_tokenizer_file, source_names, trained_tokenizer_path
from valkyrie.problems import check_range, raise_problems, require_type
from valkyrie.processes.team import ALONE, Team
from valkyrie.runs.folder import RUN_FILE, changed_settings, find_run, saved_config
from valkyrie.train.devices import acquire_devices, configure_jax, machine_problems

if TYPE_CHECKING:
    from rich.console import Console

    from valkyrie.data.batches import Dataset
    from valkyrie.data.tokenizer import Tokenizer
    from valkyrie.train.devices import Devices
    from valkyrie.train.program import StepProgram


class Inputs(NamedTuple):
    """Inputs of a training run or an evaluation. `tokenizer` is None if the data is not text."""

    devices: Devices
    data: Dataset
    tokenizer: Tokenizer | None


_UNGUARDED_SCRIPT = (
    "valkyrie: the processes of data.workers import this script and would train, too. Put its calls under "
    "`if __name__ == '__main__':`, or set data.workers=0."
)


def prepare_run(
    run: Run,
    console: Console,
    team: Team = ALONE,
    cleanup: contextlib.AbstractContextManager[None] | None = None,
) -> Inputs:
    """Prepare the tokenizer, the data and the devices of a run, and print a line about the data and the devices.

    `cleanup` is the context of the preparation of the data. It lets a signal delete partial data before the process
    ends.

    Raises ValueError if this host lacks the devices or cannot judge code that the run evaluates, or if the model
    does not match the data or the tokenizer.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that imports the user's script
        sys.exit(_UNGUARDED_SCRIPT)
    data, tokenizer = _prepare_data(run, console, team, cleanup)
    return Inputs(_prepare_devices(run, console, team), data, tokenizer)


def _prepare_data(
    run: Run, console: Console, team: Team, cleanup: contextlib.AbstractContextManager[None] | None
) -> tuple[Dataset, Tokenizer | None]:
    raise_problems(machine_problems(run))
    refuse_unsuitable_data(run)
    if run.config.mode.name == "train" and run.config.code_eval_every is not None:
        refuse_without_judge(run, team)
    with cleanup or contextlib.nullcontext():
        tokenizer = load_run_tokenizer(run) if run.task.is_text else None
        data = _open_data(run, console, team)
    console.print(data.describe(), highlight=False)
    if note := run.config.data.note(data):
        console.print(note, style="yellow")
    return data, tokenizer


def _prepare_devices(run: Run, console: Console, team: Team) -> Devices:
    configure_jax(run, console.print)
    devices = acquire_devices(run, team)
    console.print(devices.note, style="bold yellow" if devices.simulated else None)
    return devices


def prepare_evaluation(
    run: Run,
    folder: Path,
    console: Console,
    team: Team = ALONE,
    cleanup: contextlib.AbstractContextManager[None] | None = None,
) -> Inputs:
    """Prepare the evaluation of the run in `folder`, as `prepare_run` does.

    Also raises ValueError if `seq` is larger than in training and the validation split does not fill one row.
    """
    from valkyrie.data.manifest import PreparedText

    data, tokenizer = _prepare_data(run, console, team, cleanup)
    seq = run.config.seq
    trained_seq = saved_config(folder).seq if (folder / RUN_FILE).is_file() else seq
    if isinstance(data, PreparedText) and seq > trained_seq and seq >= data.validation.tokens:
        target_count = data.validation.tokens - 1
        raise ValueError(
            f"seq={seq}: the validation split has only {target_count:,} tokens to predict, less than one row. Use "
            f"seq={max(target_count, trained_seq)} or less."
        )
    return Inputs(_prepare_devices(run, console, team), data, tokenizer)


def refuse_unsuitable_data(run: Run) -> None:
    """Raise ValueError if the data is not of the kind that the task needs, or does not suit the model."""
    task, data = run.task, run.config.data
    if task.data_kind != data.kind:
        choices = ", ".join(f"data={name}" for name in source_names(task.data_kind)) or "a source of that kind"
        raise ValueError(
            f"model={run.model.name} trains on {task.data_kind}, but data={data.name} has {data.kind}. Use {choices}."
        )
    raise_problems(task.data_problems(run.model, run.config.seq, data))


def refuse_without_judge(run: Run, team: Team = ALONE) -> None:
    """Raise ValueError if process 0, which judges code, lacks the coding problems, a compiler or a sandbox."""
    from valkyrie.code_eval.config import evaluation_problems

    # Messages of problems, since only JSON values travel between processes.
    messages = team.broadcast_from_leader(
        "evaluation by code", lambda: [str(p) for p in evaluation_problems(run.config.code_eval)]
    )
    if messages:
        raise ValueError("\n".join(messages))


def _open_data(run: Run, console: Console, team: Team) -> Dataset:
    """Prepare the data on process 0 first, so that processes that share its cache find the data there.

    Raises ValueError if the data differs between processes.
    """
    from valkyrie.data.tokenizer import tokenizer_errors

    if not team.is_leader:
        team.wait("data of process 0")
    with tokenizer_errors(_tokenizer_key(run)):
        data = run.config.data.open(run.tokenizer, team, console.print)
    if team.is_leader:
        team.wait("data of process 0")
    team.agree("data", {"content": data.content, "tokenizer": data.tokenizer, "size": data.describe()})
    return data


def load_run_tokenizer(run: Run) -> Tokenizer:
    """Load the tokenizer of a run.

    Raises ValueError if the task has no text, if the checkpoint of the run was trained with another tokenizer, or if
    the tokenizer has more ids than the model's vocabulary.
    """
    from valkyrie.data.tokenizer import load_tokenizer, read_vocab_size, tokenizer_errors

    if not run.task.is_text:
        raise ValueError(
            f"model={run.model.name} solves puzzles and has no tokenizer, so it cannot continue text. To evaluate it, "
            "use mode=eval."
        )
    if (path := _last_checkpoint(run)) is not None:
        refuse_changed_tokenizer(run, path)
    key = _tokenizer_key(run)
    with tokenizer_errors(key):
        id_count, row_count = read_vocab_size(run.tokenizer), run.model.vocab_size
    if id_count > row_count:
        raise ValueError(
            f"{key}={run.tokenizer} has {id_count:,} ids, but model.vocab_size={row_count}. "
            f"Use model.vocab_size={id_count} or more, or a tokenizer with at most {row_count:,} ids."
        )
    with tokenizer_errors(key):
        return load_tokenizer(run.tokenizer)


def _last_checkpoint(run: Run) -> Any | None:
    """Return the folder of the newest durable checkpoint of the run that `resume` or `name` selects, or None."""
    config, runs = run.config, Path(run.config.runs)
    if config.resume is None and config.name is None:
        return None
    folder = find_run(runs, config.resume) if config.resume is not None else runs / str(config.name)
    step = latest_step(folder)
    return None if step is None else checkpoint_root(folder) / str(step)


def refuse_changed_tokenizer(run: Run, path: Any) -> None:
    """Raise ValueError if a run has another tokenizer than the one that the checkpoint in the folder `path` has.

    Does nothing if the metadata of the checkpoint is damaged.
    """
    from valkyrie.data.tokenizer import tokenizer_errors, tokenizer_identity

    key, saved_tokenizer = _tokenizer_key(run), None
    with contextlib.suppress(ValueError):  # restoring moves a damaged checkpoint aside
        saved_tokenizer = read_info(path).tokenizer
    if saved_tokenizer is None:
        return
    try:
        with tokenizer_errors(key):
            tokenizer = tokenizer_identity(run.tokenizer)
    except ValueError:
        if saved_tokenizer["name"] != run.tokenizer or is_tokenizer_file(run.tokenizer):
            raise
        file = trained_tokenizer_path(run.tokenizer)
        raise ValueError(
            f"{key}={run.tokenizer}, with which {path} was trained, is not in {file.parent}. Copy {file.name} there "
            f"from the machine that trained it, or set {key} to its path."
        ) from None
    refuse_other_tokenizer(path, saved_tokenizer, tokenizer, key=key)


def _tokenizer_key(run: Run) -> str:
    """Return the key that sets the tokenizer of a run."""
    return "data.tokenizer" if run.tokenizer != run.model.tokenizer else "model.tokenizer"


def check_sampling(prompt: object, tokens: int, temperature: float, top_k: int | None) -> None:
    """Check arguments of text generation. Raises TypeError for wrong types, and ValueError for values out of range."""
    require_type(prompt, str, "prompt= takes a string")
    require_type(tokens, Integral, "tokens= takes a whole number")
    require_type(temperature, Real, "temperature= takes a number")
    require_type(top_k, Integral | None, "top_k= takes a whole number or None")
    raise_problems([*check_range("tokens", tokens, least=0), *check_range("temperature", temperature, least=0)])
    raise_problems(check_range("top_k", top_k, least=1))


def trained_folder(run: Run) -> Path:
    """Return the run folder that `resume` or `name` selects. By default, the one with the newest checkpoint.

    Raises ValueError if there is no such folder.
    """
    config = run.config
    return find_run(Path(config.runs), config.resume or config.name or "latest")


def selected_folder(run: Run) -> Path:
    """Return the run folder that `resume` or `name` selects.

    Raises ValueError if there is none, or if the run sets neither: the newest run may have other settings.
    """
    if run.config.resume is None and run.config.name is None:
        raise ValueError("this run has not been trained. Use valkyrie.load(FOLDER), or compose it with resume=latest.")
    return trained_folder(run)


def restore(run: Run, devices: Devices, folder: Path, team: Team = ALONE) -> tuple[StepProgram, int, Any]:
    """Return (program, step, parameters) of a trained run, with averaged parameters if the run has them.

    Raises ValueError if the state exceeds the memory of the devices or if no checkpoint can be restored, and DiskError
    if the bucket of the checkpoints cannot be reached.
    """
    from contextlib import closing

    from valkyrie.checkpoint import CheckpointInfo, Checkpoints
    from valkyrie.data.tokenizer import tokenizer_identity
    from valkyrie.parallel.mesh import build_mesh
    from valkyrie.train.program import StepProgram
    from valkyrie.train.room import check_memory_fit, explain_oom

    program = StepProgram(run, build_mesh(run.config.mesh, devices.devices))
    check_memory_fit(program, devices, is_training=False)
    config, info = run.config.checkpoint, CheckpointInfo({}, tokenizer=tokenizer_identity(run.tokenizer))
    with (
        explain_oom(run, devices),
        closing(Checkpoints(folder, config, read_only=True, team=team, info=info)) as checkpoints,
    ):
        restored = checkpoints.restore(program.abstract_state, changed_settings=changed_settings(run, folder))
    return program, restored.step, restored.state.eval_parameters
