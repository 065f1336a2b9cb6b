"""Multiruns on several hosts: process 0 plans and records trials, and each trial runs in one process per host.

A multirun has one process per host, which starts the trial's process on that host and waits for it. Trials run one at
a time. Each uses a new port, so that processes of an earlier trial cannot connect to it. Trials that need no devices
run on the first host alone.
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

from valkyrie.config.compose import count_accelerators
from valkyrie.config.modes import Needs
from valkyrie.config.run import RunConfig
from valkyrie.paths import write_atomic
from valkyrie.problems import raise_problems
from valkyrie.processes.child import ChildProcess, module_command
from valkyrie.processes.distributed import DistributedConfig, join_team
from valkyrie.processes.ending import EXIT_LOST, end_process
from valkyrie.processes.hub import free_port, parse_address
from valkyrie.processes.team import ConnectedTeam, ProcessInfo
from valkyrie.runs.folder import RUN_FILE, key_values
from valkyrie.sweep.names import folder_name
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.trial import refuse_other_files
from valkyrie.train.processes import abort_all_on_error, agree_on_versions

WORKER_ARGUMENT = "beside"
"""Command-line argument for all processes of a trial except process 0, which alone writes the outcome."""
_GRACE_S = 60.0
"""Seconds for a trial to save and exit after another process of the multirun is lost. It is then killed."""
_UNSUPPORTED_LAUNCHER = "hydra/launcher={name} cannot start trials on {count} hosts. Omit it, or add distributed=off."


class Members:
    """The processes of a multirun on several hosts, as seen from process 0, which starts trials on the other hosts."""

    def __init__(self, team: ConnectedTeam) -> None:
        self._team, self._trial_count = team, 0
        self._kill: Callable[[], None] = lambda: None

    @property
    def count(self) -> int:
        """Number of processes of the multirun, one per host."""
        return self._team.count

    def runs_on_all_hosts(self, plan: TrialPlan) -> bool:
        """Return whether a trial runs on all hosts. A trial that needs no devices runs on the first host alone."""
        return plan.mode.needs is Needs.devices

    def start_trial(self, plan: TrialPlan) -> dict[str, str]:
        """Start a trial on the other hosts. Returns the environment variables to add for process 0 of the trial."""
        self._trial_count += 1
        host, _ = parse_address(self._team.process_info.coordinator)
        address = f"{f'[{host}]' if ':' in host else host}:{free_port()}"
        run = (plan.trial_folder / RUN_FILE).read_text()
        task = {"run": run, "address": address, "environment": plan.environment}
        self._team.exchange(f"trial {self._trial_count}", task)
        return ProcessInfo(address, self._team.count, 0).environment

    def set_kill(self, kill: Callable[[], None]) -> None:
        """Register `kill`, which ends process 0 of the running trial if another host is lost."""
        self._kill = kill

    def wait_for_end(self) -> None:
        """Wait until the other processes of the trial have ended."""
        self._kill = lambda: None
        self._team.exchange(f"ended {self._trial_count}")

    def finish(self) -> None:
        """End the other processes of the multirun."""
        self._team.exchange(f"trial {self._trial_count + 1}")
        self._team.finish()

    def abort(self, reason: str, status: int) -> None:
        """End the running trial and this process after another process is lost.

        `reason` describes the loss. `status` is the exit status of this process.
        """
        advice = "Finished trials are recorded. To run the remaining trials, repeat the same command."
        print(f"valkyrie-train: {reason}. {advice}", file=sys.stderr)
        self._kill()
        end_process(status, reason)


_current_members: ContextVar[Members | None] = ContextVar("_current_members", default=None)


def current_members() -> Members | None:
    """Return the processes of the multirun. None if this process runs alone or is not process 0."""
    return _current_members.get()


@contextmanager
def join_multirun(arguments: Sequence[str]) -> Iterator[bool]:
    """Join the processes of a multirun. Yields True on process 0, or if there is only one process.

    The other processes first start every trial that process 0 requests, and then yield False.

    Raises ValueError if the `distributed` settings are invalid, if the processes cannot connect, or if a single process
    would write the sweep into a folder of a run or the user. Connected processes instead all end with a message if the
    folder belongs to a run or the user, if their versions or arguments differ, or if the launcher does not support
    several hosts.
    """
    team = _join_team(arguments)
    if team is None:
        _refuse_other_owner(arguments)
        yield True
        return
    with abort_all_on_error(team):
        if team.is_leader:
            _refuse_other_owner(arguments)
        agree_on_versions(team)
        team.agree("arguments", _comparable_arguments(arguments))
        launcher = key_values(arguments).get("hydra/launcher", "trials")
        if launcher != "trials":
            raise ValueError(_UNSUPPORTED_LAUNCHER.format(name=launcher, count=team.count))
        if not team.is_leader:
            _run_requested_trials(team)
    if not team.is_leader:
        yield False
        return
    members = Members(team)
    team.on_loss = members.abort
    token = _current_members.set(members)
    try:
        yield True
    except SystemExit:  # some trials have no result, but the sweep is complete
        members.finish()
        raise
    except BaseException as error:
        team.fail(EXIT_LOST, f"the sweep ended ({type(error).__name__})")
        raise
    else:
        members.finish()
    finally:
        _current_members.reset(token)


def _refuse_other_owner(arguments: Sequence[str]) -> None:
    """Raise ValueError if the folder of a sweep belongs to a run or the user. The sweep would replace its files.

    Does nothing if the arguments name no folder, as for a search.
    """
    values_by_key = key_values(arguments)
    folder_text = values_by_key.get("hydra.sweep.dir")
    if folder_text is None:
        return
    folder = Path(folder_text.replace("${runs}", values_by_key.get("runs", RunConfig.runs)))
    if (folder / RUN_FILE).exists():
        raise ValueError(
            f"name={folder.name}: {folder} is the folder of a run, not of a sweep. Use another name= for the sweep."
        )
    name = values_by_key.get("name")
    is_named = name is not None and folder_text == f"${{runs}}/{folder_name(name)}"
    refuse_other_files(folder, *(("name", name) if is_named else ("hydra.sweep.dir", folder_text)))


def _comparable_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Return arguments by key, or by position if they have no key. Omits `distributed.process`, which must differ."""
    values_by_key = {key: value for key, value in key_values(arguments).items() if key != "distributed.process"}
    keyless = {f"argument {i}": text for i, text in enumerate(arguments) if "=" not in text}
    return keyless | values_by_key


def _join_team(arguments: Sequence[str]) -> ConnectedTeam | None:
    values_by_key = key_values(arguments)
    settings = [
        f"{key.removeprefix('distributed.')}={value}"
        for key, value in values_by_key.items()
        if key[:12] == "distributed."
    ]
    name = [f"name={values_by_key['distributed']}"] if "distributed" in values_by_key else []
    config: Any = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(DistributedConfig), OmegaConf.from_dotlist([*name, *settings]))
    )
    raise_problems(config.problems())
    return join_team(config, accelerators=count_accelerators())


def _run_requested_trials(team: ConnectedTeam) -> None:
    """Start a process for each trial that process 0 requests, until it requests no more."""
    processes: list[ChildProcess] = []

    def terminate_trial(*_: Any) -> None:
        for process in processes:
            process.send(signal.SIGTERM)

    def abort(reason: str, status: int) -> None:
        print(f"valkyrie-train: process {team.index} stops: {reason}", file=sys.stderr, flush=True)
        for process in processes:  # it exits after process 0 of the trial, which may first save a checkpoint
            if not process.wait(_GRACE_S):
                process.kill()
        end_process(status, reason)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 0 also receives the signal, and ends the trial
    signal.signal(signal.SIGTERM, terminate_trial)
    team.on_loss = abort
    number = 0
    while True:
        number += 1
        task = team.exchange(f"trial {number}")[0]
        if task is None:
            return team.finish()
        with tempfile.TemporaryDirectory(prefix="valkyrie-trial-") as folder:
            write_atomic(Path(folder) / RUN_FILE, task["run"])
            process_info = ProcessInfo(task["address"], team.count, team.index)
            command = module_command("valkyrie.sweep.child", folder, WORKER_ARGUMENT)
            # If this process is killed, the trial must not keep using the devices. Process 0 of a trial does the same.
            environment = task["environment"] | process_info.environment
            process = ChildProcess(command, environment, dies_with_parent=True)
            processes.append(process)
            process.wait()
            processes.clear()
        team.exchange(f"ended {number}")
