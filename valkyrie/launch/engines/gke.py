"""Google Kubernetes Engine: a JobSet with one job per slice and one pod per host, or the same with XPK.

Fields: cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice and kubernetes-sigs/jobset (failure policy). XPK:
AI-Hypercomputer/xpk, docs/usage/workloads.md and docker.md. JAX discovers the other pods by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.hardware.chips import chips_rented_as
from valkyrie.hardware.platforms import get_platform
from valkyrie.launch.engine import RentedConfig, disk_notes
from valkyrie.launch.gcloud import accelerator, resource_name
from valkyrie.launch.plan import Call, Command, Plan, Written, flags, join, yaml_text
from valkyrie.launch.supervisor import RESTARTS
from valkyrie.processes.ending import INTERRUPTED, REFUSED

_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
"""Annotation of a pod with the number of restarts of its job."""
_PORTS = (8471, 8080, 8431)
"""Ports of libtpu between hosts, of the first slice's coordinator between slices, and of the metrics."""


@dataclass(frozen=True, kw_only=True)
class Config(RentedConfig):
    """Keys of `target=gke`.

    Args:
        cluster: name of the cluster.
        image: image with the code, built from `valkyrie-launch dockerfile`.
        project: project of Google Cloud; empty for the default one.
        slices: number of slices that train together.
    """

    cluster: str = ""
    image: str = ""
    project: str = ""
    slices: int = 1

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        problems = super().problems()
        if not self.image:
            problems.append("target=gke needs the image: image=REGISTRY/NAME, built from `valkyrie-launch dockerfile`.")
        if not self.cluster:
            problems.append("target=gke needs the cluster: write cluster=NAME.")
        elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.cluster):
            problems.append(f"cluster={self.cluster}: write letters, digits, - and _.")
        if problems:
            return problems
        hardware, chip = self.rented
        if not get_platform(hardware.platform).rented_as_slices:
            return [f"target=gke slice={self.slice}: only slices of TPUs are known there. Use target=skypilot."]
        if "gke" not in chip.rented_as:
            return [f"slice={self.slice}: GKE has {', '.join(chips_rented_as('gke'))}."]
        if self.slices > 1 and hardware.hosts == 1:
            return [f"slices={self.slices}: GKE joins slices of several hosts, {self.slice} has one."]
        return []

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the manifest and the commands that submit it."""
        name = resource_name(self.name)
        cluster = (self.cluster, *flags(location=self.zone, project=self.project))
        file = f"{name}.jobset.yaml"
        labels = (f"jobset.sigs.k8s.io/jobset-name={name}", "jobset.sigs.k8s.io/job-index=0")
        pod = f"--selector={','.join(labels)},batch.kubernetes.io/job-completion-index=0"
        return Plan(
            (*self.price_notes(), *disk_notes(overrides)),
            (
                Call("choose the cluster", (("gcloud", "container", "clusters", "get-credentials", *cluster),)),
                Written("write the job", file, manifest(self, overrides)),
                Call("submit it", (("kubectl", "apply", f"--filename={file}"),)),
            ),
            (
                Call("in place of 1 to 3, where XPK made the cluster", (xpk(self, overrides),)),
                Call("its state", (("kubectl", "describe", "jobset", name),), action="describe"),
                Call("all jobs", (("kubectl", "get", "jobsets"),), action="list"),
                Call("what it prints", (("kubectl", "logs", "--follow", pod),), action="logs"),
                Call("stop it", (("kubectl", "delete", "jobset", name),), action="delete"),
            ),
        )


def xpk(config: Config, overrides: Sequence[str]) -> Command:
    """Return the command that submits the same job with XPK."""
    return (
        *("xpk", "workload", "create", f"--workload={resource_name(config.name)}", f"--cluster={config.cluster}"),
        *flags(zone=config.zone, project=config.project),
        *flags(tpu_type=accelerator(config.rented[0]), num_slices=str(config.slices), docker_image=config.image),
        f"--max-restarts={config.restarts}",
        f"--command={join(('valkyrie-train', *overrides))}",
    )


def manifest(config: Config, overrides: Sequence[str]) -> str:
    """Return the JobSet as YAML."""
    hardware, chip = config.rented
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
        "env": [{"name": RESTARTS, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_ATTEMPT}']"}}}],
        "command": [_unexpanded(word) for word in ("valkyrie-train", *overrides)],
        "resources": {"limits": {"google.com/tpu": hardware.chips // hardware.hosts}},
    }
    pod = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector,
        "containers": [container],
    }
    mistakes = {"containerName": "train", "operator": "In", "values": [REFUSED, INTERRUPTED]}
    job = {
        "parallelism": hardware.hosts,
        "completions": hardware.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistakes}]},
        "template": {"spec": pod},
    }
    rule = {"name": "mistakeOfTheUser", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": resource_name(config.name),
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": config.restarts, "rules": [rule]},
            "replicatedJobs": [{"name": "slice", "replicas": config.slices, "template": {"spec": job}}],
        },
    }
    return yaml_text(jobset)


def _unexpanded(word: str) -> str:
    """Escape `$(NAME)` in an argument, so that Kubernetes does not expand it. Kubernetes reads `$$` as `$`."""
    return word.replace("$", "$$")
