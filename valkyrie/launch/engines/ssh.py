"""Hosts reachable by ssh: copies the code to each host and runs one process there. The first host coordinates."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.launch import remote
from valkyrie.launch.engine import PORT, EngineConfig, disk_notes
from valkyrie.launch.plan import Call, Command, Plan
from valkyrie.launch.supervisor import RESTARTS, Member, Supervisor
from valkyrie.processes.team import Place


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
    """Keys of `target=ssh`.

    Args:
        hosts: names of the hosts for ssh.
        port: port of the coordinator on the first host.
        folder: folder of the code on each host, relative to the home folder.
        extra: dependencies to install: `tpu`, `cuda`, or empty for CPUs.
    """

    hosts: tuple[str, ...] = ()
    port: int = PORT
    folder: str = "valkyrie"
    extra: str = ""

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        problems = [*super().problems(), *remote.folder_problems(self.folder)]
        if self.extra not in ("", "tpu", "cuda"):
            problems.append(
                f"extra={self.extra}: write extra=tpu, extra=cuda, or nothing where the hosts have neither."
            )
        if self.port > 65535:
            problems.append(f"port={self.port}: the largest is 65535.")
        if not self.hosts:
            problems.append("target=ssh needs the hosts: write hosts=a,b, the first of which is the coordinator.")
        if bad := [host for host in self.hosts if not re.fullmatch(r"[A-Za-z0-9_][\w.@:-]*", host)]:
            problems.append(f"hosts=: {bad[0]} is no name of a host. Write hosts=a,b.")
        if len({*self.hosts}) < len(self.hosts):
            problems.append(f"hosts={','.join(self.hosts)} names a host twice; each runs one process.")
        return problems

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the commands for all hosts."""
        again = (
            f"--run runs this, ends all when one fails and starts all again, up to {self.restarts} times",
            *disk_notes(overrides, "are not seen by the other hosts"),
        )
        return Plan(again, (*self.copy(), *self.train(overrides)))

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Train under the supervision of this machine."""
        remote.check_clone()
        return self.supervisor(overrides).run()

    def supervisor(self, overrides: Sequence[str]) -> Supervisor:
        """Return the supervisor that copies the code, trains on all hosts and restarts all of them after a crash."""

        def members(starts: int) -> list[Member]:
            for step in self.copy() if starts == 0 else []:
                remote.must(step)
            return [Member(call.commands[0]) for call in self.train(overrides, starts)]

        def send(number: int) -> None:
            for call in self.end(overrides, number):
                remote.quietly(call)

        known = bool(self.end(overrides, signal.SIGKILL))
        return Supervisor(
            members,
            self.restarts,
            self.log_folder(overrides),
            send if known else None,
            clean_up=lambda: send(signal.SIGKILL),
        )

    def copy(self) -> list[Call]:
        """Return the steps that copy the last commit to every host and install it there."""
        unpack = f"{remote.unpack(self.folder)} && {remote.install(self.folder, self.extra)}"
        pack = (*remote.ARCHIVE, "HEAD")
        return [
            Call(f"copy the last commit to {host} and install it", (pack, _ssh(host, unpack))) for host in self.hosts
        ]

    def train(self, overrides: Sequence[str], restarts: int = 0) -> list[Call]:
        """Return the steps that train in one process on each host."""
        address = f"{self.hosts[0].rpartition('@')[2]}:{self.port}"
        again = {RESTARTS: str(restarts)} if restarts else {}
        steps = []
        for index, host in enumerate(self.hosts):
            environment = Place(address, len(self.hosts), index).environment if len(self.hosts) > 1 else {}
            text = remote.train(self.folder, overrides, environment | again)
            steps.append(Call(f"train on {host}", (_ssh(host, text),), beside=True))
        return steps

    def end(self, overrides: Sequence[str], number: int) -> list[Call]:
        """Return the steps that send a signal to this training on each host; empty if the run has no name."""
        text = remote.end(overrides, number)
        return [Call(f"end it on {host}", (_ssh(host, text),)) for host in self.hosts if text]


def _ssh(host: str, text: str) -> Command:
    return ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", host, text)
