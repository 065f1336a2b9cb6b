"""Launch engine for SkyPilot, which rents hardware wherever it is available, and replaces it after a preemption.

SkyPilot runs the task on every host. JAX finds the other hosts of a TPU slice itself. On several GPU nodes, the task
sets JAX's environment variables from SkyPilot's. The fields and variables are documented at docs.skypilot.co:
reference/yaml-spec, reference/tpu, running-jobs/distributed-jobs, examples/managed-jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.hardware.chips import chips_rented_as
from valkyrie.hardware.platforms import get_platform
from valkyrie.launch import remote
from valkyrie.launch.engine import COORDINATOR_PORT, RentedConfig, disk_notes
from valkyrie.launch.gcloud import accelerator_type, has_usual_shape, resource_name
from valkyrie.launch.plan import CommandStep, FileStep, Plan, shell_text, to_yaml
from valkyrie.processes.ending import EXIT_PREEMPTED
from valkyrie.processes.team import COORDINATOR_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE


@dataclass(frozen=True, kw_only=True)
class Config(RentedConfig):
    """Keys of `target=skypilot`: those of `RentedConfig`."""

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        if problems := super().problems():
            return problems
        hardware, chip = self.hardware_and_chip
        if not get_platform(hardware.platform).rented_as_slices:
            is_available = "skypilot" in chip.rented_as
            available_slices = f"GPUs: {', '.join(chips_rented_as('skypilot'))}"
        else:
            is_available = "tpu_vm_runtime" in chip.rented_as and has_usual_shape(hardware)
            available_slices = f"TPU slices in their default shapes: {', '.join(chips_rented_as('tpu_vm_runtime'))}"
        text = f"slice={self.slice} is not available with target=skypilot, which supports these {available_slices}."
        return [] if is_available else [text]

    def code_problems(self) -> list[str]:
        """Return an error message if the current folder has no code to copy."""
        return remote.code_problems(self.target, only_committed=False)

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the steps that write the task and submit it."""
        name = resource_name(self.name)
        path = f"{name}.sky.yaml"
        return Plan(
            (
                *self.price_notes(),
                *disk_notes(overrides, files="the files of the current folder, except those that git ignores"),
            ),
            (
                FileStep("write the task", path, task(self, overrides)),
                CommandStep("submit the task", (("sky", "jobs", "launch", path),)),
            ),
            (
                CommandStep("list all jobs and their states", (("sky", "jobs", "queue"),), action="list"),
                CommandStep("follow the log", (("sky", "jobs", "logs", "-n", name),), action="logs"),
                CommandStep("stop the job", (("sky", "jobs", "cancel", "-n", name),), action="delete"),
            ),
        )


def task(config: Config, overrides: Sequence[str]) -> str:
    """Return the SkyPilot task that installs the code and trains, as YAML."""
    hardware, chip = config.hardware_and_chip
    assert hardware.chips is not None
    platform = get_platform(hardware.platform)
    resources: dict[str, object] = {}
    if config.zone:
        resources["infra"] = f"gcp/{config.zone.rpartition('-')[0]}/{config.zone}"
    if platform.rented_as_slices:
        resources["accelerators"] = f"tpu-{accelerator_type(hardware)}"
        resources["accelerator_args"] = {"runtime_version": chip.rented_as["tpu_vm_runtime"]}
    else:
        resources["accelerators"] = f"{chip.rented_as['skypilot']}:{hardware.chips // hardware.hosts}"
    if config.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {"max_restarts_on_errors": config.restarts, "recover_on_exit_codes": [EXIT_PREEMPTED]}
    nodes = 1 if platform.rented_as_slices else hardware.hosts
    sync = shell_text(("python3", "-m", "uv", *remote.sync_arguments(platform.extra or "cuda", quiet=True)))
    fields = {
        "name": resource_name(config.name),
        "workdir": ".",
        **({"num_nodes": nodes} if nodes > 1 else {}),
        "resources": resources,
        "setup": f"python3 -m pip install --quiet uv && {sync}\n",
        "run": f"{_export_cluster() if nodes > 1 else ''}{shell_text(('.venv/bin/valkyrie-train', *overrides))}\n",
    }
    return to_yaml(fields)


def _export_cluster() -> str:
    """Return shell code that sets the coordinator address, process count and process index on each node."""
    return (
        f'export {COORDINATOR_VARIABLE}="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{COORDINATOR_PORT}"\n'
        f'export {COUNT_VARIABLE}="$SKYPILOT_NUM_NODES" {INDEX_VARIABLE}="$SKYPILOT_NODE_RANK"\n'
    )
