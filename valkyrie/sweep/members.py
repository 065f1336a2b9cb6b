"""A multirun over several processes: process 0 plans and records, and every trial runs in a process on each host.

The processes of the multirun start those of the trials and wait for them, one trial at a time. Each trial uses a new
port, so that nothing remains of the trial before.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from valkyrie.config.compose import accelerators
from valkyrie.config.modes import Needs
from valkyrie.paths import write_atomic
from valkyrie.problems import refuse
from valkyrie.processes.child import ChildProcess, python_module
from valkyrie.processes.distributed import DistributedConfig, join
from valkyrie.processes.ending import LOST, end_process
from valkyrie.processes.hub import free_port, parse_address
from valkyrie.processes.team import Connected, Place
from valkyrie.runs.folder import RUN, key_values
from valkyrie.sweep.plan import TrialPlan
from valkyrie.train.processes import abort_all_on_error, agree_on_versions

BESIDE = "beside"
"""Argument of a trial's process that is not process 0 and therefore writes no outcome."""
_GRACE_S = 60.0
"""Seconds that a trial has to save and end after process 0 of the multirun is lost."""
_OTHER_LAUNCHER = "hydra/launcher={name} cannot start trials on {count} hosts. Leave it out, or distributed=off."


class Members:
    """Process 0's view of the processes of a multirun. Starts and ends every trial that needs devices."""

    def __init__(self, team: Connected) -> None:
        self._team, self._trials = team, 0
        self._kill: Callable[[], None] = lambda: None

    @property
    def count(self) -> int:
        """Number of processes of a trial."""
        return self._team.count

    def takes(self, plan: TrialPlan) -> bool:
        """Return whether all processes run a trial. Process 0 alone runs a trial that needs no devices."""
        return plan.mode.needs is Needs.devices

    def begin(self, plan: TrialPlan) -> dict[str, str]:
        """Start a trial on the other processes. Returns additional environment variables of its process 0."""
        self._trials += 1
        host, _ = parse_address(self._team.place.coordinator)
        address = f"{f'[{host}]' if ':' in host else host}:{free_port()}"
        run = (plan.trial_folder / RUN).read_text()
        task = {"run": run, "address": address, "environment": plan.environment}
        self._team.exchange(f"trial {self._trials}", task)
        return Place(address, self._team.count, 0).environment

    def started(self, kill: Callable[[], None]) -> None:
        """Set the function that ends process 0 of the running trial if another host is lost."""
        self._kill = kill

    def ended(self) -> None:
        """Wait until the other processes of the trial have ended too."""
        self._kill = lambda: None
        self._team.exchange(f"ended {self._trials}")

    def finish(self) -> None:
        """End the other processes of the multirun."""
        self._team.exchange(f"trial {self._trials + 1}")
        self._team.finish()

    def lost(self, line: str, status: int) -> None:
        """End the running trial and this process, because another process is lost."""
        print(f"valkyrie-train: {line}. What is done is kept; the same command does the rest.", file=sys.stderr)
        self._kill()
        end_process(status, line)


_leading: ContextVar[Members | None] = ContextVar("_leading", default=None)


def members() -> Members | None:
    """Return the processes of the multirun that this process leads, or None if it is the only one."""
    return _leading.get()


@contextmanager
def over_processes(arguments: Sequence[str]) -> Iterator[bool]:
    """Join the processes of a multirun. Yields True for the process that carries it out: process 0, or the only one.

    The others start the trials that process 0 requests, and yield False at the end. Raises ValueError on all processes
    if they were started differently.
    """
    team = _meet(arguments)
    if team is None:
        yield True
        return
    with abort_all_on_error(team):
        agree_on_versions(team)
        team.agree("arguments", _compared(arguments))
        launcher = key_values(arguments).get("hydra/launcher", "trials")
        if launcher != "trials":
            raise ValueError(_OTHER_LAUNCHER.format(name=launcher, count=team.count))
        if not team.leads:
            _follow(team)
    if not team.leads:
        yield False
        return
    leading = Members(team)
    team.on_loss = leading.lost
    token = _leading.set(leading)
    try:
        yield True
    except SystemExit:  # trials without a result: the sweep is done all the same
        leading.finish()
        raise
    except BaseException as error:
        team.fail(LOST, f"the sweep ended ({type(error).__name__})")
        raise
    else:
        leading.finish()
    finally:
        _leading.reset(token)


def _compared(arguments: Sequence[str]) -> dict[str, str]:
    """Return arguments by key, or by position if they have none, without the index of the process."""
    given = {key: value for key, value in key_values(arguments).items() if key != "distributed.process"}
    plain = {f"argument {i}": text for i, text in enumerate(arguments) if "=" not in text}
    return plain | given


def _meet(arguments: Sequence[str]) -> Connected | None:
    given = key_values(arguments)
    own = [f"{key.removeprefix('distributed.')}={value}" for key, value in given.items() if key[:12] == "distributed."]
    name = [f"name={given['distributed']}"] if "distributed" in given else []
    config: Any = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(DistributedConfig), OmegaConf.from_dotlist([*name, *own]))
    )
    refuse(config.problems())
    return join(config, accelerators=accelerators())


def _follow(team: Connected) -> None:
    """Start a process for every trial that process 0 requests, until there are no more."""
    running: list[ChildProcess] = []

    def end(*_: Any) -> None:
        for process in running:
            process.send(signal.SIGTERM)

    def lost(line: str, status: int) -> None:
        print(f"valkyrie-train: process {team.index} stops: {line}", file=sys.stderr, flush=True)
        for process in running:  # it ends by itself once the first of the trial has, which may save before
            if not process.wait(_GRACE_S):
                process.kill()
        end_process(status, line)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 hears it too, and ends what runs
    signal.signal(signal.SIGTERM, end)
    team.on_loss = lost
    number = 0
    while True:
        number += 1
        task = team.exchange(f"trial {number}")[0]
        if task is None:
            return team.finish()
        with tempfile.TemporaryDirectory(prefix="valkyrie-trial-") as folder:
            write_atomic(Path(folder) / RUN, task["run"])
            place = Place(task["address"], team.count, team.index)
            command = python_module("valkyrie.sweep.child", folder, BESIDE)
            process = ChildProcess(command, task["environment"] | place.environment)
            running.append(process)
            process.wait()
            running.clear()
        team.exchange(f"ended {number}")
