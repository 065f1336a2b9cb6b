"""Launch engine that trains in one process on this machine and restarts it after a crash.

For a training run on several hosts, another tool starts `valkyrie-launch` on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.launch.engine import EngineConfig
from valkyrie.launch.plan import CommandStep, Plan
from valkyrie.launch.supervisor import Supervisor, local_processes, print_message


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
    """Keys of `target=host`: those of every engine."""

    processes = 1  # without an annotation it is not a key; `local.Config` makes it one

    @property
    def process_count(self) -> int:
        """Number of processes of the training run."""
        return self.processes

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return a plan with one step, the training command."""
        return Plan((), (CommandStep("train", (("valkyrie-train", *overrides),)),))

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Train in `processes` processes on this machine, and restart them after a crash. Returns the exit status."""
        logs = self.log_folder(overrides)
        if self.processes > 1:
            print_message(f"starting {self.processes} processes; all except process 0 write to {logs}")
        return Supervisor(
            lambda starts: local_processes((*command, *overrides), self.processes), self.restarts, logs
        ).run()
