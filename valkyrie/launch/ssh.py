"""Hosts that ssh reaches: the code copied to each, one process on each, the first host being the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from valkyrie.launch import remote
from valkyrie.launch.local import RESTARTS
from valkyrie.launch.options import Options
from valkyrie.launch.plan import Call, Command
from valkyrie.processes.team import Place


@dataclass(frozen=True)
class Hosts:
    """The hosts of a training, and the commands for each."""

    options: Options
    overrides: tuple[str, ...]

    def copy(self) -> list[Call]:
        """Copy the last commit to every host and install it there."""
        steps = []
        for host in self.options.hosts:
            unpack = (
                f"{remote.unpack(self.options.folder)} && {remote.install(self.options.folder, self.options.extra)}"
            )
            pack = (*remote.ARCHIVE, "HEAD")
            steps.append(Call(f"copy the last commit to {host} and install it", (pack, self._ssh(host, unpack))))
        return steps

    def train(self, restarts: int = 0) -> list[Call]:
        """Train in one process on each host."""
        hosts, port = self.options.hosts, self.options.port
        address = f"{hosts[0].rpartition('@')[2]}:{port}"
        again = {RESTARTS: str(restarts)} if restarts else {}
        steps = []
        for index, host in enumerate(hosts):
            environment = Place(address, len(hosts), index).environment if len(hosts) > 1 else {}
            text = remote.train(self.options.folder, self.overrides, environment | again)
            steps.append(Call(f"train on {host}", (self._ssh(host, text),), beside=True))
        return steps

    def end(self, number: int) -> list[Call]:
        """Send a signal to this training's process on each host; nothing where it has no name to be known by."""
        text = remote.end(self.overrides, number)
        return [Call(f"end it on {host}", (self._ssh(host, text),)) for host in self.options.hosts if text]

    def _ssh(self, host: str, text: str) -> Command:
        return ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", host, text)
