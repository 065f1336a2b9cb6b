"""What `valkyrie-train` does: composes and checks the run without JAX, then hands it to its mode."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.cli.mistakes import refuse_slips, version_text
from valkyrie.cli.parser import leave_unread
from valkyrie.compose import explain, register
from valkyrie.interrupt import EXIT_STATUS, raises
from valkyrie.models import let_import
from valkyrie.modes import MODES
from valkyrie.run import Run
from valkyrie.sweep.end import SweepEndError, multirun_ends
from valkyrie.sweep.names import multirun_arguments
from valkyrie.train.arguments import read_arguments
from valkyrie.train.composed import composed_file, config_dirs, refuse_choices, without_outputs

FULL_ERROR = "HYDRA_FULL_ERROR"
"""What makes Hydra raise, which the command always wants, and shows the user tracebacks."""
USER_ERROR = 2
"""Exit status after a mistake of the user."""
OUR_ERROR = 1
"""Exit status after a mistake of ours."""


def dispatch() -> None:
    """Carry out the arguments of the process; a user's mistake is a message and exit status 2."""
    show_traceback = os.environ.get(FULL_ERROR) == "1"
    arguments = sys.argv[1:]
    let_import(config_dirs(arguments))
    try:
        if "--version" in arguments:
            print(version_text())
            return
        multirun, file = multirun_arguments(arguments), composed_file(arguments)
        refuse_slips(arguments, multirun is not None)
        arguments = read_arguments(multirun or arguments, multirun=multirun is not None, composed=file is not None)
        sys.argv[1:] = arguments if file is None else without_outputs(arguments, file)
        with raises() if multirun is not None else nullcontext():
            config = _compose(file)
        if config is not None:
            refuse_choices(config, file)
            run = Run.from_config(config)
            problems = run.problems()
            if problems:
                raise ValueError(_with_choices(run, problems))
            sys.exit(_dispatch(run, arguments))
    except BrokenPipeError:
        leave_unread()
    except (ValueError, OSError, HydraException, OmegaConfBaseException, YAMLError) as error:
        if show_traceback:
            raise
        fail(explain(error))
    except SweepEndError as error:
        if show_traceback:
            raise
        fail(str(error), OUR_ERROR)
    except KeyboardInterrupt:
        print("valkyrie-train: stopped", file=sys.stderr)
        sys.exit(EXIT_STATUS)


def _compose(file: Path | None) -> DictConfig | None:
    """Return what Hydra composes from the arguments; None when Hydra did the work (multirun, help, completion).

    `file` is the configuration where that is composed already.
    """
    composed: list[DictConfig] = []

    def task(config: DictConfig) -> float | None:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            from valkyrie.sweep.launcher import run_trial

            refuse_choices(config, file)
            return run_trial(config)
        composed.append(config)
        return None

    given = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # so that Hydra raises, and the words of an error are ours
    try:
        folder = register()
        with multirun_ends():
            hydra.main(config_path=str(folder), config_name="train", version_base="1.3")(task)()
    finally:
        os.environ.pop(FULL_ERROR) if given is None else os.environ.update({FULL_ERROR: given})
    return composed[0] if composed else None


def _dispatch(run: Run, arguments: Sequence[str]) -> int:
    return MODES[run.config.mode.name](run, arguments)


def fail(message: str, status: int = USER_ERROR) -> None:
    """Print a mistake to stderr and exit; `HYDRA_FULL_ERROR=1` shows the traceback instead."""
    lines = message.splitlines() or ["unknown error"]
    head = "valkyrie-train: " if len(lines) == 1 else f"valkyrie-train: {len(lines)} problems\n  - "
    print(head + "\n  - ".join(lines), file=sys.stderr)
    sys.exit(status)


def _with_choices(run: Run, problems: Sequence[str]) -> str:
    if any("partition=" in p for p in problems):
        legal = run.legal_partitions()
        mesh = run.config.mesh.name
        if legal:
            return "\n".join([*problems, f"Legal with mesh={mesh} as it stands: partition={', '.join(legal)}."])
    return "\n".join(problems)
