"""One process on this machine, for trainings that another tool starts on every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.launch.engine import EngineConfig
from valkyrie.launch.plan import Call, Plan
from valkyrie.launch.supervisor import Supervisor, cluster, say


@dataclass(frozen=True, kw_only=True)
class Config(EngineConfig):
    """`target=host` has no keys."""

    processes = 1

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return a plan with the training command alone."""
        return Plan((), (Call("train", (("valkyrie-train", *overrides),)),))

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Train in supervised processes on this machine."""
        logs = self.log_folder(overrides)
        if self.processes > 1:
            say(f"{self.processes} processes; all but process 0 write to {logs}")
        return Supervisor(lambda starts: cluster((*command, *overrides), self.processes), self.restarts, logs).run()
