"""Slurm: a script for sbatch that starts one process per GPU, or per node without GPUs, and requeues itself.

JAX discovers the processes from Slurm's variables, with one GPU each (jax/_src/clusters/slurm_cluster.py). Slurm counts
the restarts and sends SIGUSR1 before the time limit (slurm.schedmd.com/sbatch.html, srun.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.launch.engine import SliceConfig
from valkyrie.launch.plan import Call, Plan, Written, join
from valkyrie.launch.supervisor import RESTARTS
from valkyrie.processes.ending import DONE, INTERRUPTED, PREEMPTED, REFUSED

NOTICE_S = 120
"""A job gets the signal to save this many seconds before its time limit."""
WAIT_S = 300
"""Seconds for the other processes to write a last checkpoint after one has ended."""


@dataclass(frozen=True, kw_only=True)
class Config(SliceConfig):
    """Keys of `target=slurm`, which takes either `slice` or `nodes`.

    Args:
        nodes: number of nodes.
        gpus_per_node: GPUs of each node, with one process per GPU; 0 for one process per node without GPUs.
        partition: partition of the cluster; empty for the default one.
        account: account to charge; empty for the default one.
    """

    nodes: int = 0
    gpus_per_node: int = 0
    partition: str = ""
    account: str = ""

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        unclear = bool(self.nodes) == bool(self.slice)
        needs = "target=slurm needs the nodes: write nodes=2 gpus_per_node=8, or slice=h100-16."
        return [*super().problems(), *([needs] if unclear else [])]

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the script and the command that submits it."""
        file = f"{self.name}.sbatch"
        return Plan(
            self.price_notes(),
            (Written("write the job", file, script(self, overrides)), Call("submit it", (("sbatch", file),))),
            (
                Call("its state", (("squeue", "--me", f"--name={self.name}"),), action="describe"),
                Call("what it prints", (("tail", "-F", f"{self.name}.log"),), action="logs"),
                Call("stop it", (("scancel", f"--name={self.name}"),), action="delete"),
            ),
        )


def script(config: Config, overrides: Sequence[str]) -> str:
    """Return the script of the job."""
    nodes, gpus, hardware = config.nodes, config.gpus_per_node, config.hardware
    if hardware is not None and hardware.chips is not None:
        nodes, gpus = hardware.hosts, hardware.chips // hardware.hosts
    settings = {
        "job-name": config.name,
        "nodes": nodes,
        "ntasks-per-node": gpus or 1,
        "gpus-per-node": gpus or None,
        "time": _clock(config.hours) if config.hours else None,
        "partition": config.partition or None,
        "account": config.account or None,
        "output": f"{config.name}.log",
        "open-mode": "append",
        "signal": f"USR1@{NOTICE_S}",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in settings.items() if value is not None]
    last = " | ".join(str(status) for status in (DONE, REFUSED, INTERRUPTED))
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            f"export {RESTARTS}=${{SLURM_RESTART_COUNT:-0}}",
            f"srun --kill-on-bad-exit=0 --wait={WAIT_S} {join(('valkyrie-train', *overrides))}",
            "status=$?",
            "case $status in",
            f"  {last}) ;;",
            f'  {PREEMPTED}) scontrol requeue "$SLURM_JOB_ID" ;;',
            f'  *) [ "${RESTARTS}" -ge {config.restarts} ] || scontrol requeue "$SLURM_JOB_ID" ;;',
            "esac",
            "exit $status",
            "",
        ]
    )


def _clock(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 60}:{minutes % 60:02}:00"
