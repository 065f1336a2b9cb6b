"""Launch engine for Slurm. Writes an sbatch script that starts one process per GPU, or per node without GPUs.

JAX finds the processes through Slurm's variables and gives each one GPU (jax/_src/clusters/slurm_cluster.py). The
script requeues its job after a crash or preemption. Slurm counts the restarts and sends SIGUSR1 before the time limit
(slurm.schedmd.com/sbatch.html, srun.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.launch.engine import SliceConfig
from valkyrie.launch.plan import CommandStep, FileStep, Plan, shell_text
from valkyrie.launch.supervisor import RESTARTS_VARIABLE
from valkyrie.processes.ending import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_REFUSED

NOTICE_S = 120
"""Seconds between the signal to save and the time limit of the job."""
WAIT_S = 300
"""Seconds that the other processes have to write a last checkpoint after the first one ends."""


@dataclass(frozen=True, kw_only=True)
class Config(SliceConfig):
    """Keys of `target=slurm`. Either `slice` or `nodes` is required.

    Args:
        nodes: number of nodes.
        gpus_per_node: GPUs per node, with one process per GPU; 0 for one process per node without GPUs.
        partition: partition of the cluster; empty for the default partition.
        account: account to charge; empty for the default account.
    """

    nodes: int = 0
    gpus_per_node: int = 0
    partition: str = ""
    account: str = ""

    @property
    def process_count(self) -> int:
        """Number of processes of the training run: one per GPU, or one per node without GPUs."""
        hardware = self.hardware
        return self.nodes * max(1, self.gpus_per_node) if hardware is None else hardware.chips or 1

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        problems = super().problems()
        if bool(self.nodes) == bool(self.slice):
            problems.append(
                "target=slurm needs either nodes= or slice=, such as nodes=2 gpus_per_node=8 or slice=h100-16."
            )
        return problems

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the steps that write the script and submit it."""
        path = f"{self.name}.sbatch"
        return Plan(
            self.price_notes(),
            (
                FileStep("write the job", path, script(self, overrides)),
                CommandStep("submit the job", (("sbatch", path),)),
            ),
            (
                CommandStep(
                    "show the state of the job", (("squeue", "--me", f"--name={self.name}"),), action="describe"
                ),
                CommandStep("follow the log", (("tail", "-F", f"{self.name}.log"),), action="logs"),
                CommandStep("stop the job", (("scancel", f"--name={self.name}"),), action="delete"),
            ),
        )


def script(config: Config, overrides: Sequence[str]) -> str:
    """Return the sbatch script, which requeues its job after a preemption or a crash."""
    nodes, gpus, hardware = config.nodes, config.gpus_per_node, config.hardware
    if hardware is not None and hardware.chips is not None:
        nodes, gpus = hardware.hosts, hardware.chips // hardware.hosts
    settings = {
        "job-name": config.name,
        "nodes": nodes,
        "ntasks-per-node": gpus or 1,
        "gpus-per-node": gpus or None,
        "time": _format_time(config.hours) if config.hours else None,
        "partition": config.partition or None,
        "account": config.account or None,
        "output": f"{config.name}.log",
        "open-mode": "append",
        "signal": f"USR1@{NOTICE_S}",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in settings.items() if value is not None]
    final_statuses = " | ".join(str(status) for status in (EXIT_DONE, EXIT_REFUSED, EXIT_INTERRUPTED))
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            f"export {RESTARTS_VARIABLE}=${{SLURM_RESTART_COUNT:-0}}",
            f"srun --kill-on-bad-exit=0 --wait={WAIT_S} {shell_text(('valkyrie-train', *overrides))}",
            "status=$?",
            "case $status in",
            f"  {final_statuses}) ;;",
            f'  {EXIT_PREEMPTED}) scontrol requeue "$SLURM_JOB_ID" ;;',
            f'  *) [ "${RESTARTS_VARIABLE}" -ge {config.restarts} ] || scontrol requeue "$SLURM_JOB_ID" ;;',
            "esac",
            "exit $status",
            "",
        ]
    )


def _format_time(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 60}:{minutes % 60:02}:00"
