"""Google Kubernetes Engine: a JobSet, a job for every slice and a pod for every host, or the same by XPK.

Fields: cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice and kubernetes-sigs/jobset (failure policy). XPK:
AI-Hypercomputer/xpk, docs/usage/workloads.md and docker.md. GKE tells every pod its place, which JAX reads by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from valkyrie.hardware.chips import chips_rented_as
from valkyrie.launch.gcloud import accelerator, resource_name
from valkyrie.launch.local import RESTARTS
from valkyrie.launch.options import Options
from valkyrie.launch.plan import Call, Plan, Written, join
from valkyrie.launch.yaml_text import yaml_text
from valkyrie.processes.child import INTERRUPTED, USER_ERROR

_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
"""The annotation by which a pod knows how often the job was started again."""
_PORTS = (8471, 8080, 8431)
"""Of libtpu between hosts, of the first slice's coordinator between slices, and of the metrics."""


def gke(options: Options, overrides: Sequence[str]) -> Plan:
    """Return the manifest and the commands that submit it; ValueError for a chip that GKE does not have."""
    hardware = options.hardware
    assert hardware is not None and hardware.chip is not None
    if "gke" not in hardware.chip.rented_as:
        raise ValueError(f"slice={options.slice}: GKE has {', '.join(chips_rented_as('gke'))}.")
    if options.slices > 1 and hardware.hosts == 1:
        raise ValueError(f"slices={options.slices}: GKE joins slices of several hosts, {options.slice} has one.")
    name = resource_name(options.name)
    where = {"location": options.zone, "project": options.project}
    cluster = (options.cluster, *(f"--{key}={value}" for key, value in where.items() if value))
    file = f"{name}.jobset.yaml"
    labels = (f"jobset.sigs.k8s.io/jobset-name={name}", "jobset.sigs.k8s.io/job-index=0")
    pod = f"--selector={','.join(labels)},batch.kubernetes.io/job-completion-index=0"
    return Plan(
        (),
        (
            Call("choose the cluster", (("gcloud", "container", "clusters", "get-credentials", *cluster),)),
            Written("write the job", file, manifest(options, overrides)),
            Call("submit it", (("kubectl", "apply", f"--filename={file}"),)),
        ),
        (
            Call("in place of 1 to 3, where XPK made the cluster", (xpk(options, overrides),)),
            Call("its state", (("kubectl", "describe", "jobset", name),), action="describe"),
            Call("all jobs", (("kubectl", "get", "jobsets"),), action="list"),
            Call("what it prints", (("kubectl", "logs", "--follow", pod),), action="logs"),
            Call("stop it", (("kubectl", "delete", "jobset", name),), action="delete"),
        ),
    )


def xpk(options: Options, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the command by which XPK runs the same."""
    hardware = options.hardware
    assert hardware is not None
    where = {"zone": options.zone, "project": options.project}
    return (
        *("xpk", "workload", "create", f"--workload={resource_name(options.name)}", f"--cluster={options.cluster}"),
        *(f"--{key}={value}" for key, value in where.items() if value),
        *(f"--tpu-type={accelerator(hardware)}", f"--num-slices={options.slices}"),
        *(f"--docker-image={options.image}", f"--max-restarts={options.restarts}"),
        f"--command={join(('valkyrie-train', *overrides))}",
    )


def manifest(options: Options, overrides: Sequence[str]) -> str:
    """Return the JobSet as YAML."""
    hardware = options.hardware
    assert hardware is not None and hardware.chip is not None and hardware.chips is not None
    selector = {
        "cloud.google.com/gke-tpu-accelerator": hardware.chip.rented_as["gke"],
        "cloud.google.com/gke-tpu-topology": hardware.topology,
    }
    if options.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    container = {
        "name": "train",
        "image": options.image,
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
    mistakes = {"containerName": "train", "operator": "In", "values": [USER_ERROR, INTERRUPTED]}
    job = {
        "parallelism": hardware.hosts,
        "completions": hardware.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistakes}]},
        "template": {"spec": pod},
    }
    rule = {"name": "mistakeOfTheUser", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobset: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": resource_name(options.name),
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": options.restarts, "rules": [rule]},
            "replicatedJobs": [{"name": "slice", "replicas": options.slices, "template": {"spec": job}}],
        },
    }
    return yaml_text(jobset)


def _unexpanded(word: str) -> str:
    """Return an argument in which Kubernetes replaces no `$(NAME)`: it reads `$$` as `$`."""
    return word.replace("$", "$$")
