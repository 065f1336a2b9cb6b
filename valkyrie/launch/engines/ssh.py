"""Launch engine for hosts reachable by ssh. Copies the code to each host and runs one process there."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.launch import remote
from valkyrie.launch.engine import COORDINATOR_PORT, EngineConfig, disk_notes
from valkyrie.launch.plan import Command, CommandStep, Plan
from valkyrie.launch.supervisor import RESTARTS_VARIABLE, ProcessSpec, Supervisor
from valkyrie.processes.team import ProcessInfo


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
    """Keys of `target=ssh`.

    Args:
        hosts: hosts as `ssh` accepts them, such as `ann@a`. The first one runs the coordinator.
        port: port of the coordinator on the first host.
        folder: folder of the code on each host: an absolute path, or a path relative to the home folder.
        extra: extra of `pyproject.toml` to install: `tpu`, `cuda`, or empty for CPUs.
    """

    hosts: tuple[str, ...] = ()
    port: int = COORDINATOR_PORT
    folder: str = "valkyrie"
    extra: str = ""

    @property
    def process_count(self) -> int:
        """Number of processes of the training run: one per host."""
        return len(self.hosts)

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        problems = [*super().problems(), *remote.folder_problems(self.folder)]
        if self.extra not in ("", "tpu", "cuda"):
            problems.append(
                f"extra={self.extra} is unknown. Use extra=tpu or extra=cuda, or leave it out on hosts with neither."
            )
        if self.port > 65535:
            problems.append(f"port={self.port} is not a valid port. Use 65535 or less.")
        if not self.hosts:
            problems.append("target=ssh needs hosts, such as hosts=a,b. The first one runs the coordinator.")
        if invalid_hosts := [host for host in self.hosts if not re.fullmatch(r"[A-Za-z0-9_][\w.@:-]*", host)]:
            problems.append(
                f"hosts={','.join(self.hosts)}: {invalid_hosts[0]} is not a valid host name. Use names such as "
                "hosts=a,b."
            )
        if len({*self.hosts}) < len(self.hosts):
            problems.append(
                f"hosts={','.join(self.hosts)} lists {max(self.hosts, key=self.hosts.count)} more than once, but each "
                "host runs one process. List each host once."
            )
        return problems

    def code_problems(self) -> list[str]:
        """Return an error message if the current folder has no code to copy."""
        return remote.code_problems(self.target)

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the steps that copy the code to all hosts and train there."""
        risk = "cannot be read by the other hosts" if len(self.hosts) > 1 else None
        notes = (
            f"--run executes these steps. If a process fails, all processes are restarted, up to {self.restarts} times",
            *disk_notes(overrides, risk=risk, certainty="probably "),
            *remote.config_folder_notes(overrides),
        )
        return Plan(notes, (*self.copy_steps(), *self.train_steps(overrides)))

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Train on all hosts, and restart after a crash. Returns the exit status."""
        return self.supervisor(overrides).run()

    def supervisor(self, overrides: Sequence[str]) -> Supervisor:
        """Return a supervisor that copies the code once, trains on all hosts, and restarts training after a crash."""

        def prepare(start_count: int) -> list[ProcessSpec]:
            for step in self.copy_steps() if start_count == 0 else []:
                remote.run_checked(step)
            return [ProcessSpec(step.commands[0]) for step in self.train_steps(overrides, start_count)]

        def send_signal(signum: int) -> None:
            for step in self.signal_steps(overrides, signum):
                remote.try_run(step)

        can_signal = bool(self.signal_steps(overrides, signal.SIGKILL))
        return Supervisor(
            prepare,
            self.restarts,
            self.log_folder(overrides),
            send_signal if can_signal else None,
            clean_up=lambda: send_signal(signal.SIGKILL),
        )

    def copy_steps(self) -> list[CommandStep]:
        """Return the steps that copy the last commit to every host and install it there."""
        unpack = f"{remote.unpack_command(self.folder)} && {remote.install_command(self.folder, self.extra)}"
        pack = (*remote.ARCHIVE_COMMAND, "HEAD")
        return [
            CommandStep(f"copy the last commit to {host} and install it", (pack, _ssh_command(host, unpack)))
            for host in self.hosts
        ]

    def train_steps(self, overrides: Sequence[str], past_restarts: int = 0) -> list[CommandStep]:
        """Return the steps that train in one process on each host. `past_restarts` is the number of restarts so far."""
        address = f"{self.hosts[0].rpartition('@')[2]}:{self.port}"
        restart_count = {RESTARTS_VARIABLE: str(past_restarts)} if past_restarts else {}
        steps = []
        for index, host in enumerate(self.hosts):
            environment = ProcessInfo(address, len(self.hosts), index).environment if len(self.hosts) > 1 else {}
            shell_command = remote.train_command(self.folder, overrides, environment | restart_count)
            steps.append(CommandStep(f"train on {host}", (_ssh_command(host, shell_command),), in_background=True))
        return steps

    def signal_steps(self, overrides: Sequence[str], signum: int) -> list[CommandStep]:
        """Return the steps that send a signal to this run's process on each host, or [] if the run has no name."""
        shell_command = remote.signal_command(overrides, signum)
        return [
            CommandStep(f"stop the training on {host}", (_ssh_command(host, shell_command),))
            for host in self.hosts
            if shell_command
        ]


def _ssh_command(host: str, shell_command: str) -> Command:
    return ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", host, shell_command)
