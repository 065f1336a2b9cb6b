"""Joins the processes of a run, which start together, compare code and configuration, and end together."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from valkyrie.config.compose import count_accelerators
from valkyrie.config.explain import explain
from valkyrie.config.run import Run
from valkyrie.extensions import FULL_ERROR, TRACEBACK_HINT, describe_user_error
from valkyrie.paths import source_digest
from valkyrie.problems import first_line
from valkyrie.processes.distributed import join_team, start_jax
from valkyrie.processes.ending import EXIT_REFUSED, OUT_OF_MEMORY, USER_CODE_FAILED, end_process
from valkyrie.processes.team import ALONE, Team
from valkyrie.runs.folder import package_versions
from valkyrie.trees import flatten

LOGS_FOLDER = "logs"
"""Subfolder of a run folder for the output of workers."""


_ERROR_REPORT_DELAY_S = 2.0
"""Seconds that a process waits before it reports an error. If another process failed first and caused this error, that
process reports its own and ends this one."""


@contextlib.contextmanager
def join_processes(run: Run) -> Iterator[Team]:
    """Join the processes of a run and start JAX in them. Yields the team, or `ALONE` for a single process.

    The processes first compare code versions and configurations. Only process 0 writes to standard output. An error
    ends all processes, since those in a collective would wait forever.
    """
    config = run.config.distributed
    team = join_team(config, accelerators=count_accelerators())
    if team is None:
        yield ALONE
        return
    with abort_all_on_error(team):
        agree_on_versions(team)
        agree_on_configuration(team, run)
        silence_workers(team)
        start_jax(config, team.process_info)
        yield team
        team.finish()


def agree_on_versions(team: Team) -> None:
    """Check that all processes run the same code. Raises ValueError, naming the packages that differ."""
    team.agree("versions", package_versions() | {"the source of valkyrie": source_digest("")[:12]})


def agree_on_configuration(team: Team, run: Run) -> None:
    """Check that all processes have the same settings, except for `distributed` and `data.cache_dir`.

    The cache may be in the home folder, which differs between users. Raises ValueError, naming the keys that differ.
    """
    settings = flatten({key: value for key, value in run.record().items() if key != "distributed"})
    team.agree("configuration", {key: repr(value) for key, value in settings.items() if key != "data.cache_dir"})


def silence_workers(team: Team) -> None:
    """Hide the standard output of workers, and on the leader only that of native libraries."""
    if team.is_leader:
        _hide_native_output()
    else:
        _redirect_output(Path(os.devnull))


def check_shared_folder(team: Team, folder: Path) -> None:
    """Check that all processes see the folder that process 0 writes. Raises ValueError if some do not."""
    if team.count == 1:
        return
    probe = folder / f".shared-{socket.gethostname()}-{os.getpid()}"
    if team.is_leader:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    name = team.exchange("probe", probe.name)[0]
    saw_probe = team.exchange("probe seen", (folder / name).exists())
    if team.is_leader:
        probe.unlink()
    blind_processes = [index for index, saw in enumerate(saw_probe) if not saw]
    if blind_processes:
        processes = f"process{'es' * (len(blind_processes) > 1)} {', '.join(map(str, blind_processes[:16]))}"
        raise ValueError(
            f"{folder}: {processes} cannot see the files that process 0 writes there. Checkpoints need a folder that "
            "all hosts share: set runs=DIR or checkpoint.folder=gs://BUCKET/DIR. To train on one host: distributed=off."
        )


def redirect_to_log(team: Team, folder: Path) -> None:
    """Redirect the output of workers to log files in the run folder."""
    if not team.is_leader:
        (folder / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
        _redirect_output(folder / LOGS_FOLDER / f"process-{team.index}.log", include_stderr=True)


@contextlib.contextmanager
def abort_all_on_error(team: Team, command: str = "valkyrie-train") -> Iterator[None]:
    """End all processes after an error in this one. JAX's own shutdown would wait for the others.

    After ValueError or OSError, prints the name of the `command` and the message, and all processes end with status 2.
    After any error that a user's module raised, prints such a line too, and this process ends with status
    `USER_CODE_FAILED`. SystemExit ends this process with its status. Any other exception is printed with its traceback
    and ends this process with status 1. In these three cases, the other processes end with status `EXIT_LOST`, or 2 if
    this one does.
    """
    try:
        yield
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        if status == 1:  # possibly a save that failed because another process died
            time.sleep(_ERROR_REPORT_DELAY_S)
        _end_all(team, status, f"it ended with status {status}")
    except BaseException as error:
        user_error = describe_user_error(error)
        if not isinstance(error, ValueError | OSError):
            time.sleep(_ERROR_REPORT_DELAY_S)
        if not user_error and not isinstance(error, ValueError | OSError):
            traceback.print_exc()
            return _end_all(team, 1, f"{type(error).__name__}: {first_line(error)[:300]}")
        if os.environ.get(FULL_ERROR) == "1":
            traceback.print_exc()
        prefix = "" if team.is_leader else f"process {team.index}: "
        text = (
            f"{user_error} {TRACEBACK_HINT}"
            if user_error or not isinstance(error, Exception)
            else str(explain(error, []))
        )
        print(f"{command}: {prefix}{text}", file=sys.stderr)
        # Imported here because it imports NumPy, which help and `--cfg` do not need.
        from valkyrie.train.room import DoesNotFitError

        # Only trial records see OUT_OF_MEMORY: the process exits with EXIT_REFUSED.
        status = OUT_OF_MEMORY if isinstance(error, DoesNotFitError) else EXIT_REFUSED
        _end_all(team, USER_CODE_FAILED if user_error else status, text)


def _end_all(team: Team, status: int, reason: str) -> None:
    team.fail(status, reason)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    end_process(status, reason)


def _hide_native_output() -> None:
    """Hide the output of native libraries on stdout: Gloo prints a line for each device and collective."""
    python_stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, errors="replace")
    _redirect_output(Path(os.devnull))
    sys.stdout = python_stdout


def _redirect_output(path: Path, *, include_stderr: bool = False) -> None:
    """Redirect stdout (and stderr, with `include_stderr`) of this process and its native libraries to a file."""
    for stream in (sys.stdout, sys.stderr) if include_stderr else (sys.stdout,):
        stream.flush()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
