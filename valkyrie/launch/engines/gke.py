"""Launch engine for Google Kubernetes Engine. Writes a JobSet with one job per slice and one pod per host.

Also prints the XPK command for the same job. JAX finds the other pods through GKE's environment variables. The fields
of the JobSet follow cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice and kubernetes-sigs/jobset (failure
policy). The XPK command follows docs/usage/workloads.md and docker.md of AI-Hypercomputer/xpk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.hardware.chips import chips_rented_as
from valkyrie.hardware.platforms import get_platform
from valkyrie.launch.engine import RentedConfig, disk_notes
from valkyrie.launch.gcloud import accelerator_type, resource_name
from valkyrie.launch.plan import Command, CommandStep, FileStep, Plan, flags, shell_text, to_yaml
from valkyrie.launch.supervisor import RESTARTS_VARIABLE
from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_REFUSED

_RESTARTS_ANNOTATION = "jobset.sigs.k8s.io/restart-attempt"
"""Pod annotation that holds the number of restarts of the job."""
_PORTS = (8471, 8080, 8431)
"""Ports of libtpu: for other hosts, for the coordinator between slices, and for metrics."""


@dataclass(frozen=True, kw_only=True)
class Config(RentedConfig):
    """Keys of `target=gke`.

    Args:
        cluster: name of the cluster.
        image: container image with the code, built from `valkyrie-launch dockerfile`.
        project: Google Cloud project; empty for the default project.
        slices: number of slices that train together.
    """

    cluster: str = ""
    image: str = ""
    project: str = ""
    slices: int = 1

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        problems = super().problems()
        if not self.image:
            problems.append("target=gke needs an image built from `valkyrie-launch dockerfile`: image=REGISTRY/NAME.")
        if not self.cluster:
            problems.append("target=gke needs a cluster: cluster=NAME.")
        elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.cluster):
            problems.append(f"cluster={self.cluster} is not valid. Use letters, digits, dots, - and _.")
        if problems:
            return problems
        hardware, chip = self.hardware_and_chip
        if not get_platform(hardware.platform).rented_as_slices:
            return [f"slice={self.slice} has no TPUs, but target=gke supports only TPU slices. Use target=skypilot."]
        if "gke" not in chip.rented_as:
            return [f"slice={self.slice} is not available on GKE. Use a slice of {', '.join(chips_rented_as('gke'))}."]
        if self.slices > 1 and hardware.hosts == 1:
            return [
                f"slices={self.slices}: GKE joins only slices with several hosts, and {self.slice} has one. Use "
                "slices=1 or a larger slice."
            ]
        return []

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the manifest and the commands that submit it."""
        name = resource_name(self.name)
        cluster = (self.cluster, *flags(location=self.zone, project=self.project))
        path = f"{name}.jobset.yaml"
        labels = (f"jobset.sigs.k8s.io/jobset-name={name}", "jobset.sigs.k8s.io/job-index=0")
        pod_selector = f"--selector={','.join(labels)},batch.kubernetes.io/job-completion-index=0"
        return Plan(
            (*self.price_notes(), *disk_notes(overrides, files="the files of the image")),
            (
                CommandStep("select the cluster", (("gcloud", "container", "clusters", "get-credentials", *cluster),)),
                FileStep("write the job", path, manifest(self, overrides)),
                CommandStep("submit the job", (("kubectl", "apply", f"--filename={path}"),)),
            ),
            (
                CommandStep("instead of steps 1 to 3, on a cluster created with XPK", (xpk_command(self, overrides),)),
                CommandStep("show the state of the job", (("kubectl", "describe", "jobset", name),), action="describe"),
                CommandStep("list all jobs", (("kubectl", "get", "jobsets"),), action="list"),
                CommandStep("follow the log", (("kubectl", "logs", "--follow", pod_selector),), action="logs"),
                CommandStep("stop the job and delete it", (("kubectl", "delete", "jobset", name),), action="delete"),
            ),
        )


def xpk_command(config: Config, overrides: Sequence[str]) -> Command:
    """Return the XPK command that submits the same job as `manifest`."""
    return (
        *("xpk", "workload", "create", f"--workload={resource_name(config.name)}", f"--cluster={config.cluster}"),
        *flags(zone=config.zone, project=config.project),
        *flags(
            tpu_type=accelerator_type(config.hardware_and_chip[0]),
            num_slices=str(config.slices),
            docker_image=config.image,
        ),
        f"--max-restarts={config.restarts}",
        f"--command={shell_text(('valkyrie-train', *overrides))}",
    )


def manifest(config: Config, overrides: Sequence[str]) -> str:
    """Return the JobSet as YAML."""
    hardware, chip = config.hardware_and_chip
    assert hardware.chips is not None
    selector = {
        "cloud.google.com/gke-tpu-accelerator": chip.rented_as["gke"],
        "cloud.google.com/gke-tpu-topology": hardware.topology,
    }
    if config.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    container = {
        "name": "train",
        "image": config.image,
        "ports": [{"containerPort": port} for port in _PORTS],
        "env": [
            {
                "name": RESTARTS_VARIABLE,
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_RESTARTS_ANNOTATION}']"}},
            }
        ],
        "command": [_escape_variables(word) for word in ("valkyrie-train", *overrides)],
        "resources": {"limits": {"google.com/tpu": hardware.chips // hardware.hosts}},
    }
    pod = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector,
        "containers": [container],
    }
    user_errors = {"containerName": "train", "operator": "In", "values": [EXIT_REFUSED, EXIT_INTERRUPTED]}
    job = {
        "parallelism": hardware.hosts,
        "completions": hardware.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": user_errors}]},
        "template": {"spec": pod},
    }
    # A wrong configuration fails again on every restart, and Ctrl-C is meant to stop the job.
    no_restart = {"name": "mistakeOfTheUser", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": resource_name(config.name),
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": config.restarts, "rules": [no_restart]},
            "replicatedJobs": [{"name": "slice", "replicas": config.slices, "template": {"spec": job}}],
        },
    }
    return to_yaml(jobset)


def _escape_variables(word: str) -> str:
    """Double each `$`, because Kubernetes expands `$(NAME)` and turns `$$` into `$`."""
    return word.replace("$", "$$")
