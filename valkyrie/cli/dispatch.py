"""What `valkyrie-train` does: composes and checks the run without JAX, then hands it to its mode."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.cli.parser import leave_unread, without_comment
from valkyrie.config.arguments import read_arguments, refuses_keys_of_null
from valkyrie.config.compose import register
from valkyrie.config.explain import explain
from valkyrie.config.mistakes import refuse_slips, version_text
from valkyrie.config.run import Run
from valkyrie.config.saved import Primary, config_dirs, primary_of
from valkyrie.config.shorthand import written_out
from valkyrie.extensions import add_import_path
from valkyrie.problems import Problem
from valkyrie.processes.ending import INTERRUPTED, REFUSED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.sweep.end import SweepEndError, multirun_ends
from valkyrie.sweep.members import over_processes
from valkyrie.sweep.names import multirun_arguments, reads_one_run

FULL_ERROR = "HYDRA_FULL_ERROR"
"""What makes Hydra raise, which the command always wants, and shows the user tracebacks."""
OUR_ERROR = 1
"""Exit status after a mistake of ours."""


def dispatch() -> None:
    """Carry out the arguments of the process; a user's mistake is a message and exit status 2."""
    show_traceback = os.environ.get(FULL_ERROR) == "1"
    arguments = without_comment(sys.argv[1:])
    try:
        os.getcwd()
    except OSError:
        fail("the current folder is gone: somebody deleted it. cd to another.")
    add_import_path(config_dirs(arguments))
    try:
        if "--version" in arguments:
            print(version_text())
            return
        arguments = written_out(arguments)
        multirun = multirun_arguments(arguments)
        refuse_slips(arguments, multirun is not None)
        typed = read_arguments(multirun or arguments, multirun=multirun is not None)
        primary = primary_of(typed, read=multirun is None or reads_one_run(typed))
        sys.argv[1:] = primary.arguments
        if multirun is not None:
            with over_processes(typed) as leads, signals_as_exceptions():
                config = _compose(primary) if leads else None
        else:
            config = _compose(primary)
        if config is not None:
            run = replace(Run.from_config(config), arguments=tuple(arguments))
            if problems := run.problems():
                raise ValueError(_with_choices(run, problems))
            sys.exit(_dispatch(run))
    except BrokenPipeError:
        leave_unread()
    except (ValueError, OSError, HydraException, OmegaConfBaseException, YAMLError) as error:
        if show_traceback:
            raise
        fail(str(explain(error, config_dirs(sys.argv[1:]))))
    except SweepEndError as error:
        if show_traceback:
            raise
        fail(str(error), OUR_ERROR)
    except KeyboardInterrupt:
        print("valkyrie-train: stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _compose(primary: Primary) -> DictConfig | None:
    """Return what Hydra composes from the arguments; None when Hydra did the work (multirun, help, completion)."""
    composed: list[DictConfig] = []

    def task(config: DictConfig) -> float | None:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            from valkyrie.sweep.launcher import run_trial

            return run_trial(config)
        composed.append(config)
        return None

    given = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # so that Hydra raises, and the words of an error are ours
    try:
        folder = register()
        with multirun_ends(), refuses_keys_of_null(sys.argv[1:]):
            hydra.main(config_path=str(folder), config_name=primary.name, version_base="1.3")(task)()
    except RuntimeError as error:
        deepest = traceback.extract_tb(error.__traceback__)[-1].filename
        if f"{os.sep}submitit{os.sep}" not in deepest:
            raise
        raise ValueError(f"hydra/launcher: {error} hydra/launcher=submitit_local runs on this machine.") from error
    finally:
        os.environ.pop(FULL_ERROR) if given is None else os.environ.update({FULL_ERROR: given})
    return composed[0] if composed else None


def _dispatch(run: Run) -> int:
    return run.config.mode.run(run)


def fail(message: str, status: int = REFUSED) -> None:
    """Print a mistake to stderr and exit; `HYDRA_FULL_ERROR=1` shows the traceback instead."""
    lines = message.splitlines() or ["unknown error"]
    head = "valkyrie-train: " if len(lines) == 1 else f"valkyrie-train: {len(lines)} problems\n  - "
    print(head + "\n  - ".join(lines), file=sys.stderr)
    sys.exit(status)


def _with_choices(run: Run, problems: Sequence[Problem]) -> str:
    """Return the problems, and the legal partitions if the rules of this one are among the causes."""
    lines = [str(problem) for problem in problems]
    if any(problem.partition for problem in problems) and (legal := run.legal_partitions()):
        lines.append(f"Legal with mesh={run.config.mesh.name} as it stands: partition={', '.join(legal)}.")
    return "\n".join(lines)
