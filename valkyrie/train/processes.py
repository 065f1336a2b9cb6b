"""Runs in several processes: they start together, compare code and configuration, and end together."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from valkyrie.config.compose import accelerators
from valkyrie.config.explain import explain
from valkyrie.config.run import Run
from valkyrie.paths import source_digest
from valkyrie.problems import first_line
from valkyrie.processes.distributed import join, start_jax
from valkyrie.processes.ending import DOES_NOT_FIT, REFUSED, end_process
from valkyrie.processes.team import ALONE, Team
from valkyrie.runs.folder import versions
from valkyrie.trees import flatten

LOGS = "logs"
"""Subfolder of a run folder for the output of all processes except the first."""


_NEWS_S = 2.0
"""Seconds to wait for the message that names the process that failed first. Its failure breaks collectives and saves
elsewhere."""


@contextlib.contextmanager
def together(run: Run) -> Iterator[Team]:
    """Join the processes of a run and start JAX among them. Yields the team, or `ALONE` for a single process.

    The processes first compare code versions and configurations. Only process 0 prints. An error ends all processes,
    since those in a collective would wait forever.
    """
    config = run.config.distributed
    team = join(config, accelerators=accelerators())
    if team is None:
        yield ALONE
        return
    with abort_all_on_error(team):
        agree_on_versions(team)
        agree_on_configuration(team, run)
        only_first_prints(team)
        start_jax(config, team.place)
        yield team
        team.finish()


def agree_on_versions(team: Team) -> None:
    """Check that all processes run the same code. Raises ValueError with the package that differs."""
    team.agree("versions", versions() | {"the source of valkyrie": source_digest("")[:12]})


def agree_on_configuration(team: Team, run: Run) -> None:
    """Check that all processes have the same settings. Raises ValueError with the key that differs."""
    settings = {key: value for key, value in run.record().items() if key != "distributed"}
    team.agree("configuration", {key: repr(value) for key, value in flatten(settings).items()})


def only_first_prints(team: Team) -> None:
    """Silence all processes except the first, and native libraries in that one."""
    if team.leads:
        _only_python_prints()
    else:
        _print_to(Path(os.devnull))


def check_shared(team: Team, folder: Path) -> None:
    """Check that all processes see the folder that process 0 writes. Raises ValueError with those that do not."""
    if team.count == 1:
        return
    probe = folder / f".shared-{socket.gethostname()}-{os.getpid()}"
    if team.leads:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    name = team.exchange("probe", probe.name)[0]
    seen = team.exchange("probe seen", (folder / name).exists())
    if team.leads:
        probe.unlink()
    blind = [index for index, sees in enumerate(seen) if not sees]
    if blind:
        named = f"process{'es' * (len(blind) > 1)} {', '.join(map(str, blind[:16]))}"
        raise ValueError(
            f"{folder}: what process 0 writes there is not seen by {named}. Checkpoints need a folder that all hosts "
            "share: runs=DIR, checkpoint.folder=gs://BUCKET/DIR, or distributed=off to train on one host."
        )


def print_to_log(team: Team, folder: Path) -> None:
    """Redirect the output of all processes except the first to log files in the run folder."""
    if not team.leads:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        _print_to(folder / LOGS / f"process-{team.index}.log", errors=True)


@contextlib.contextmanager
def abort_all_on_error(team: Team, command: str = "valkyrie-train") -> Iterator[None]:
    """End all processes at an error. JAX's own shutdown would wait for the others."""
    try:
        yield
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        if status == 1:  # may be a save that failed because another process died
            time.sleep(_NEWS_S)
        _end(team, status, f"it ended with status {status}")
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        who = "" if team.leads else f"process {team.index}: "
        print(f"{command}: {who}{explain(error, [])}", file=sys.stderr)
        from valkyrie.train.room import DoesNotFit  # imports NumPy, which help and `--cfg` do without

        _end(team, DOES_NOT_FIT if isinstance(error, DoesNotFit) else REFUSED, str(explain(error, [])))
    except BaseException as error:
        time.sleep(_NEWS_S)
        traceback.print_exc()
        _end(team, 1, f"{type(error).__name__}: {first_line(error)[:300]}")


def _end(team: Team, status: int, reason: str) -> None:
    team.fail(status, reason)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    end_process(status, reason)


def _only_python_prints() -> None:
    """Silence native libraries on stdout: Gloo prints a line for each device and collective."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, errors="replace")
    _print_to(Path(os.devnull))
    sys.stdout = own


def _print_to(path: Path, *, errors: bool = False) -> None:
    """Redirect this process's output to a file, including that of native libraries."""
    for stream in (sys.stdout, sys.stderr) if errors else (sys.stdout,):
        stream.flush()
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.dup2(target, stream.fileno())
        os.close(target)
