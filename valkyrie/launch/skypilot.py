"""SkyPilot: a task that rents a slice or GPUs where there are some, trains, and moves on when it is preempted.

Fields and variables: docs.skypilot.co, reference/yaml-spec, reference/tpu, running-jobs/distributed-jobs and
examples/managed-jobs. A task is run on every host of a slice; JAX finds the others by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from valkyrie.hardware.chips import chips_rented_as
from valkyrie.hardware.platforms import platform_of
from valkyrie.launch.gcloud import accelerator, resource_name
from valkyrie.launch.options import PORT, Options
from valkyrie.launch.plan import Call, Plan, Written, join
from valkyrie.launch.yaml_text import yaml_text
from valkyrie.processes.child import PREEMPTED
from valkyrie.processes.team import COORDINATOR, COUNT, INDEX


def skypilot(options: Options, overrides: Sequence[str]) -> Plan:
    """Return the task and the command that submits it; ValueError for hardware that SkyPilot does not have."""
    name = resource_name(options.name)
    file = f"{name}.sky.yaml"
    return Plan(
        (),
        (
            Written("write the task", file, task(options, overrides)),
            Call("submit it", (("sky", "jobs", "launch", file),)),
        ),
        (
            Call("its state", (("sky", "jobs", "queue"),), action="list"),
            Call("what it prints", (("sky", "jobs", "logs", "-n", name),), action="logs"),
            Call("stop it", (("sky", "jobs", "cancel", "-n", name),), action="delete"),
        ),
    )


def task(options: Options, overrides: Sequence[str]) -> str:
    """Return the task as YAML."""
    hardware = options.hardware
    assert hardware is not None and hardware.chip is not None and hardware.chips is not None
    names = hardware.chip.rented_as
    resources: dict[str, Any] = {}
    if options.zone:
        resources["infra"] = f"gcp/{options.zone.rpartition('-')[0]}/{options.zone}"
    platform = platform_of(hardware.platform)
    if platform.rented_as_slices:
        if "tpu_vm_runtime" not in names or not hardware.name.rpartition("-")[2].isdecimal():
            chips = ", ".join(chips_rented_as("tpu_vm_runtime"))
            raise ValueError(f"slice={options.slice}: SkyPilot has {chips} in their usual shapes.")
        resources["accelerators"] = f"tpu-{accelerator(hardware)}"
        resources["accelerator_args"] = {"runtime_version": names["tpu_vm_runtime"]}
    elif "skypilot" in names:
        resources["accelerators"] = f"{names['skypilot']}:{hardware.chips // hardware.hosts}"
    else:
        raise ValueError(
            f"slice={options.slice}: of GPUs SkyPilot is asked for {', '.join(chips_rented_as('skypilot'))}."
        )
    if options.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {"max_restarts_on_errors": options.restarts, "recover_on_exit_codes": [PREEMPTED]}
    nodes = 1 if platform.rented_as_slices else hardware.hosts
    sync = join(("python3", "-m", "uv", "sync", "--quiet", "--no-dev", "--extra", platform.extra or "cuda"))
    described = {
        "name": resource_name(options.name),
        "workdir": ".",
        **({"num_nodes": nodes} if nodes > 1 else {}),
        "resources": resources,
        "setup": f"python3 -m pip install --quiet uv && {sync}\n",
        "run": f"{_cluster() if nodes > 1 else ''}{join(('.venv/bin/valkyrie-train', *overrides))}\n",
    }
    return yaml_text(described)


def _cluster() -> str:
    """Return the lines by which the processes of several nodes find each other."""
    return (
        f'export {COORDINATOR}="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"\n'
        f'export {COUNT}="$SKYPILOT_NUM_NODES" {INDEX}="$SKYPILOT_NODE_RANK"\n'
    )
