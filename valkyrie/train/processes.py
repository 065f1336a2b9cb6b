"""A run in several processes: they start together, agree on what they are about to do, and end together."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valkyrie.config.compose import accelerators
from valkyrie.config.explain import explain
from valkyrie.config.run import Run
from valkyrie.paths import source_digest
from valkyrie.problems import first_line
from valkyrie.processes.distributed import join, start_jax
from valkyrie.processes.ending import end_process
from valkyrie.processes.team import ALONE, Team
from valkyrie.runs.folder import versions
from valkyrie.trees import flat

LOGS = "logs"
"""The folder of a run folder with what each process but the first has printed."""


_NEWS_S = 2.0
"""A collective or a save fails where another process died: so long may the line take that names it."""


@contextlib.contextmanager
def together(run: Run) -> Iterator[Team]:
    """Be one of the processes of a run inside: `ALONE` where there is one, else JAX is started among all of them.

    Before that they compare the version of their code and their configuration. Only process 0 prints. An error ends
    the process here, and the others with it, for those that wait for it in a collective would wait for ever.
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
    """Check that all processes run the same code; ValueError names the package that differs."""
    team.agree("versions", versions() | {"the source of valkyrie": source_digest("")[:12]})


def agree_on_configuration(team: Team, run: Run) -> None:
    """Check that all processes have the same settings; ValueError names the key that differs."""
    team.agree("configuration", _compared(run))


def only_first_prints(team: Team) -> None:
    """Keep off the screen what processes but the first print, and what libraries print without Python."""
    if team.leads:
        _only_python_prints()
    else:
        _print_to(Path(os.devnull))


def check_shared(team: Team, folder: Path) -> None:
    """Check that all processes see the folder that process 0 writes; ValueError names those that do not."""
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
    """Let a process that is not the first print into its log file in the run folder."""
    if not team.leads:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        _print_to(folder / LOGS / f"process-{team.index}.log", errors=True)


def _compared(run: Run) -> dict[str, Any]:
    """Return the settings that must be the same on all processes, by dotted key."""
    settings = {key: value for key, value in run.record().items() if key != "distributed"}
    return {key: repr(value) for key, value in flat(settings).items()}


@contextlib.contextmanager
def abort_all_on_error(team: Team, command: str = "valkyrie-train") -> Iterator[None]:
    """End the process at an error, after the others were told: JAX's own end would wait for them."""
    try:
        yield
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        if status == 1:  # a save fails too where another process died
            time.sleep(_NEWS_S)
        _end(team, status, f"it ended with status {status}")
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        who = "" if team.leads else f"process {team.index}: "
        print(f"{command}: {who}{explain(error, [])}", file=sys.stderr)
        _end(team, 2, str(explain(error, [])))
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
    """Keep off the screen what libraries print without Python: Gloo has a line for each device and collective."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, errors="replace")
    _print_to(Path(os.devnull))
    sys.stdout = own


def _print_to(path: Path, *, errors: bool = False) -> None:
    """Send what this process prints to a file, also what libraries print without Python."""
    for stream in (sys.stdout, sys.stderr) if errors else (sys.stdout,):
        stream.flush()
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, stream.fileno())
        os.close(target)
