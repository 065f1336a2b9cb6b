"""Implements `valkyrie-train`: composes and checks the run without JAX, then executes its mode."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from valkyrie.cli.parser import current_folder, error_text, exit_on_broken_pipe, fail, strip_comment
from valkyrie.config.arguments import add_later_problems, composition_errors, expand_shorthand, read_arguments
from valkyrie.config.compose import ENVIRONMENT_MESH, register
from valkyrie.config.explain import explain
from valkyrie.config.files import check_folder
from valkyrie.config.mistakes import (
    bytes_not_utf8,
    refuse_typos,
    refuse_unknown_flags,
    refuse_unquoted_layouts,
    version_text,
)
from valkyrie.config.modes import Needs, run_mode
from valkyrie.config.run import Run
from valkyrie.config.saved import PrimaryConfig, config_dirs, find_primary_config
from valkyrie.config.unread import layout_notes, replacement_notes, unread_notes
from valkyrie.extensions import FULL_ERROR, TRACEBACK_HINT, add_import_path, describe_user_error
from valkyrie.paths import cache_root
from valkyrie.problems import Problem
from valkyrie.processes.ending import EXIT_INTERRUPTED, USER_CODE_FAILED
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.runs.folder import command_name, key_values, split_flags
from valkyrie.sweep.end import SweepEndError, print_results_at_end
from valkyrie.sweep.members import join_multirun
from valkyrie.sweep.names import multirun_arguments, reads_one_run

COMMAND = "valkyrie-train"
SWEEP_FAILED = 1
"""Exit status if the results of a sweep could not be printed."""


def dispatch() -> None:
    """Run `valkyrie-train` with the arguments in `sys.argv`, and exit with the status of the run's mode.

    For a user error, prints a message without a traceback and exits with status 2, or 1 if a user's module raised it.
    With HYDRA_FULL_ERROR=1, raises the error instead.
    """
    show_traceback = os.environ.get(FULL_ERROR) == "1"
    arguments = strip_comment(sys.argv[1:])
    command = f"{command_name()} {shlex.join(arguments)}"
    if bad_bytes := bytes_not_utf8(current_folder(COMMAND)):
        fail(
            COMMAND,
            f"the path of the current folder has bytes that are not UTF-8 ({bad_bytes}). Rename it, or cd to another.",
        )
    add_import_path(config_dirs(arguments))
    try:
        if "--version" in arguments:
            print(version_text())
            return
        cache_root()  # refuses a VALKYRIE_CACHE that is a file before any work is done
        refuse_unquoted_layouts(arguments)
        arguments = expand_shorthand(arguments)
        multirun = multirun_arguments(arguments)
        refuse_typos(arguments, multirun is not None)
        refuse_unknown_flags(arguments)
        for folder in config_dirs(arguments):
            check_folder(folder)
        hydra_arguments = read_arguments(multirun or arguments, multirun=multirun is not None)
        primary_config = find_primary_config(
            hydra_arguments, read_run=multirun is None or reads_one_run(hydra_arguments)
        )
        flags, overrides = split_flags(primary_config.arguments)
        # argparse refuses flags between overrides. The value of --info is optional, so it must stay in its place.
        sys.argv[1:] = primary_config.arguments if {"--info", "-i"} & {*flags} else [*flags, *overrides]
        if multirun is not None:
            with join_multirun(hydra_arguments) as is_leader, signals_as_exceptions():
                config = _compose(primary_config, command) if is_leader else None
        else:
            config = _compose(primary_config, command)
        if config is not None:
            run = replace(Run.from_config(config), arguments=tuple(arguments))
            if problems := run.problems():
                raise ValueError(_describe_problems(run, problems))
            for note in (*unread_notes(run), *replacement_notes(run), *layout_notes(run), *slow_dispatch_notes(run)):
                print(f"note: {note}", file=sys.stderr)
            sys.exit(run_mode(run))
    except BrokenPipeError:
        exit_on_broken_pipe()
    except (ValueError, OSError, HydraException, OmegaConfBaseException, YAMLError) as error:
        if show_traceback:
            raise
        _fail_in_user_code(error)
        # Hydra's MissingConfigException is an OSError too, and needs an explanation.
        if not isinstance(error, OSError) or isinstance(error, HydraException):
            error = add_later_problems(explain(error, config_dirs(sys.argv[1:])), arguments)
        fail(COMMAND, _folder_key(error, arguments) + error_text(error) + _mesh_origin(str(error), arguments))
    except SweepEndError as error:
        if show_traceback:
            raise
        fail(COMMAND, str(error), SWEEP_FAILED)
    except KeyboardInterrupt:
        print(f"{COMMAND}: stopped", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if not show_traceback:
            _fail_in_user_code(error)
        raise


def slow_dispatch_notes(run: Run) -> list[str]:
    """Return a note if a step sends tokens between slices or hosts. Modes that compile have it among their hints."""
    mode = run.config.mode
    skips_note = mode.ignores_layout or mode.reads_run or mode.needs is Needs.compiler
    if skips_note or run.config.target.chip is None or not run.layout.dispatched_axes:
        return []
    from valkyrie.search.estimate.slow_dispatch import describe_slow_dispatch  # imports NumPy

    warning = describe_slow_dispatch(run)
    return [] if warning is None else [warning]


def _folder_key(error: Exception, arguments: Sequence[str]) -> str:
    """Return `KEY=PATH: ` if the folder that Hydra could not create was typed as one of Hydra's settings, else ""."""
    values = key_values(arguments)
    for key in ("hydra.sweep.dir", "hydra.run.dir"):
        if isinstance(error, OSError) and values.get(key) and Path(error.filename or "").is_relative_to(values[key]):
            return f"{key}={values[key]}: "
    return ""


def _fail_in_user_code(error: Exception) -> None:
    """Exit with a line about the error if a user's module caused it."""
    if user_error := describe_user_error(error):
        fail(COMMAND, f"{user_error} {TRACEBACK_HINT}", USER_CODE_FAILED)


def _compose(primary_config: PrimaryConfig, command: str) -> DictConfig | None:
    """Return the config that Hydra composes, or None if Hydra has done the work itself (multirun, help, completion).

    `command` is the command as typed.
    """
    composed: list[DictConfig] = []

    def task(config: DictConfig) -> float | None:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            from valkyrie.sweep.launcher import run_trial

            return run_trial(config)
        composed.append(config)
        return None

    user_setting = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # Hydra raises, and `explain` writes the message
    try:
        folder = register()
        with print_results_at_end(command), composition_errors(sys.argv[1:]):
            hydra.main(config_path=str(folder), config_name=primary_config.name, version_base="1.3")(task)()
    except RuntimeError as error:
        deepest = traceback.extract_tb(error.__traceback__)[-1].filename
        if f"{os.sep}submitit{os.sep}" not in deepest:
            raise
        raise ValueError(
            f"hydra/launcher: {error} To run on this machine, use hydra/launcher=submitit_local."
        ) from error
    finally:
        os.environ.pop(FULL_ERROR) if user_setting is None else os.environ.update({FULL_ERROR: user_setting})
    return composed[0] if composed else None


def _mesh_origin(text: str, arguments: Sequence[str]) -> str:
    """Return a line that names TPU_MESH_CONFIG if `text` is an error about the mesh that the variable sets, else ""."""
    sizes = os.environ.get("TPU_MESH_CONFIG", "")
    is_typed = key_values(arguments).get("mesh", ENVIRONMENT_MESH) != ENVIRONMENT_MESH
    if not sizes or is_typed or f"mesh={sizes.replace(',', 'x')}" not in text:
        return ""
    return f"\nTPU_MESH_CONFIG={sizes} sets the mesh. Set mesh= to use another, or unset the variable."


def _describe_problems(run: Run, problems: Sequence[Problem]) -> str:
    """Return the messages of the problems. If the partition causes one, lists the legal partitions too."""
    lines = [str(problem) for problem in problems]
    if any(problem.partition for problem in problems) and (legal := run.legal_partitions()):
        lines.append(f"Partitions that work with mesh={run.config.mesh.name}: partition={', '.join(legal)}.")
    return "\n".join(lines)
