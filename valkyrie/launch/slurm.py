"""Slurm: a script for sbatch that starts one process on every GPU, or on every node without, and requeues itself.

JAX finds the processes by Slurm's variables, one GPU for each (jax/_src/clusters/slurm_cluster.py). Slurm counts the
restarts and sends SIGUSR1 before the time is over (slurm.schedmd.com/sbatch.html, srun.html).
"""

from __future__ import annotations

from collections.abc import Sequence

from valkyrie.launch.local import RESTARTS
from valkyrie.launch.options import Options
from valkyrie.launch.plan import Call, Plan, Written, join
from valkyrie.processes.child import DONE, INTERRUPTED, PREEMPTED, USER_ERROR

NOTICE_S = 120
"""Seconds before the end of its time at which a job is told to save."""
WAIT_S = 300
"""Seconds that the other processes have when one has ended: a last checkpoint is written."""


def slurm(options: Options, overrides: Sequence[str]) -> Plan:
    """Return the script and the command that submits it."""
    file = f"{options.name}.sbatch"
    return Plan(
        (),
        (
            Written("write the job", file, script(options, overrides)),
            Call("submit it", (("sbatch", file),)),
        ),
        (
            Call("its state", (("squeue", "--me", f"--name={options.name}"),), action="describe"),
            Call("what it prints", (("tail", "-F", f"{options.name}.log"),), action="logs"),
            Call("stop it", (("scancel", f"--name={options.name}"),), action="delete"),
        ),
    )


def script(options: Options, overrides: Sequence[str]) -> str:
    """Return the script of the job."""
    nodes, gpus = _size(options)
    asked = {
        "job-name": options.name,
        "nodes": nodes,
        "ntasks-per-node": gpus or 1,
        "gpus-per-node": gpus or None,
        "time": _clock(options.hours) if options.hours else None,
        "partition": options.partition or None,
        "account": options.account or None,
        "output": f"{options.name}.log",
        "open-mode": "append",
        "signal": f"USR1@{NOTICE_S}",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None]
    last = " | ".join(str(status) for status in (DONE, USER_ERROR, INTERRUPTED))
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
            f'  *) [ "${RESTARTS}" -ge {options.restarts} ] || scontrol requeue "$SLURM_JOB_ID" ;;',
            "esac",
            "exit $status",
            "",
        ]
    )


def _size(options: Options) -> tuple[int, int]:
    """Return nodes, and GPUs in each."""
    hardware = options.hardware
    if hardware is None or hardware.chips is None:
        return options.nodes, options.gpus_per_node
    return hardware.hosts, hardware.chips // hardware.hosts


def _clock(hours: float) -> str:
    minutes = max(round(hours * 60), 1)
    return f"{minutes // 60}:{minutes % 60:02}:00"
