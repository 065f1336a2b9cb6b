"""SkyPilot: a task that rents a slice or GPUs wherever they are available, trains, and moves when preempted.

Fields and variables: docs.skypilot.co, reference/yaml-spec, reference/tpu, running-jobs/distributed-jobs and
examples/managed-jobs. The task runs on every host of a slice; JAX discovers the other hosts by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.hardware.chips import chips_rented_as
from valkyrie.hardware.platforms import get_platform
from valkyrie.launch.engine import PORT, RentedConfig, disk_notes
from valkyrie.launch.gcloud import accelerator, has_usual_shape, resource_name
from valkyrie.launch.plan import Call, Plan, Written, join, yaml_text
from valkyrie.processes.ending import PREEMPTED
from valkyrie.processes.team import COORDINATOR, COUNT, INDEX


@dataclass(frozen=True, kw_only=True)
class Config(RentedConfig):
    """`target=skypilot` has the keys of every rented slice."""

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        if problems := super().problems():
            return problems
        hardware, chip = self.rented
        if not get_platform(hardware.platform).rented_as_slices:
            wrong = "skypilot" not in chip.rented_as
            known = f"of GPUs SkyPilot is asked for {', '.join(chips_rented_as('skypilot'))}."
        else:
            wrong = "tpu_vm_runtime" not in chip.rented_as or not has_usual_shape(hardware)
            known = f"SkyPilot has {', '.join(chips_rented_as('tpu_vm_runtime'))} in their usual shapes."
        return [f"slice={self.slice}: {known}"] if wrong else []

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the task and the command that submits it."""
        name = resource_name(self.name)
        file = f"{name}.sky.yaml"
        return Plan(
            (*self.price_notes(), *disk_notes(overrides)),
            (
                Written("write the task", file, task(self, overrides)),
                Call("submit it", (("sky", "jobs", "launch", file),)),
            ),
            (
                Call("its state", (("sky", "jobs", "queue"),), action="list"),
                Call("what it prints", (("sky", "jobs", "logs", "-n", name),), action="logs"),
                Call("stop it", (("sky", "jobs", "cancel", "-n", name),), action="delete"),
            ),
        )


def task(config: Config, overrides: Sequence[str]) -> str:
    """Return the task as YAML."""
    hardware, chip = config.rented
    assert hardware.chips is not None
    platform = get_platform(hardware.platform)
    resources: dict[str, object] = {}
    if config.zone:
        resources["infra"] = f"gcp/{config.zone.rpartition('-')[0]}/{config.zone}"
    if platform.rented_as_slices:
        resources["accelerators"] = f"tpu-{accelerator(hardware)}"
        resources["accelerator_args"] = {"runtime_version": chip.rented_as["tpu_vm_runtime"]}
    else:
        resources["accelerators"] = f"{chip.rented_as['skypilot']}:{hardware.chips // hardware.hosts}"
    if config.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {"max_restarts_on_errors": config.restarts, "recover_on_exit_codes": [PREEMPTED]}
    nodes = 1 if platform.rented_as_slices else hardware.hosts
    sync = join(("python3", "-m", "uv", "sync", "--quiet", "--no-dev", "--extra", platform.extra or "cuda"))
    described = {
        "name": resource_name(config.name),
        "workdir": ".",
        **({"num_nodes": nodes} if nodes > 1 else {}),
        "resources": resources,
        "setup": f"python3 -m pip install --quiet uv && {sync}\n",
        "run": f"{_cluster() if nodes > 1 else ''}{join(('.venv/bin/valkyrie-train', *overrides))}\n",
    }
    return yaml_text(described)


def _cluster() -> str:
    """Return shell code with the address and rank variables that connect the processes of several nodes."""
    return (
        f'export {COORDINATOR}="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"\n'
        f'export {COUNT}="$SKYPILOT_NUM_NODES" {INDEX}="$SKYPILOT_NODE_RANK"\n'
    )
