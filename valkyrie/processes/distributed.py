"""Finds the processes of a run, connects them and starts JAX among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.processes.hub import parse_address
from valkyrie.processes.team import COORDINATOR, COUNT, INDEX, Connected, Place

_COUNT = (COUNT, "JAX_NUM_PROCESSES")
_INDEX = (INDEX, "JAX_PROCESS_ID")
_CLUSTERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES")
"""Variables that Slurm's srun, Open MPI, Kubernetes and Cloud TPU set. JAX finds the other processes there itself."""
_JAX_PATIENCE = 10
"""JAX's heartbeat timeout as a multiple of ours, so that ours ends the processes first, with a message."""


@dataclass
class DistributedConfig:
    """The processes of a run. `auto` finds them in the environment, or through JAX on Cloud TPU, Slurm, MPI and GKE.

    Args:
        coordinator: the address of process 0 as `HOST:PORT`.
        processes: number of processes.
        process: number of this process, from 0.
        timeout_s: seconds to wait for all processes at the start.
        heartbeat_s: a process that is silent for this many seconds is lost.
        step_timeout_s: a training step that takes longer than this many seconds hangs; null for no limit. The first
            step has at least half an hour, later ones at least 20 times the median of the earlier ones.
    """

    name: str = "auto"
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout_s: float = 50.0
    heartbeat_s: float = 60.0
    step_timeout_s: float | None = 600.0

    def problems(self) -> list[Problem]:
        """Return the problems of the keys."""
        problems = check_range("distributed.processes", self.processes, least=1)
        problems += check_range("distributed.process", self.process, least=0)
        problems += check_range("distributed.timeout_s", self.timeout_s, above=0)
        problems += check_range("distributed.heartbeat_s", self.heartbeat_s, least=1)
        problems += check_range("distributed.step_timeout_s", self.step_timeout_s, above=0, otherwise="null")
        place = {"coordinator": self.coordinator, "processes": self.processes, "process": self.process}
        missing = [f"distributed.{key}" for key, value in place.items() if value is None]
        if 0 < len(missing) < len(place):
            stated = ", ".join(f"distributed.{key}={value}" for key, value in place.items() if value is not None)
            text = f"{stated}: give {' and '.join(missing)} too; address, count and index go together."
            problems.append(Problem(ProblemCode.missing, missing[0], text=text))
        return problems


def find_place(
    config: DistributedConfig, *, accelerators: int = 0, environment: Mapping[str, str] = os.environ
) -> Place | None:
    """Return the place of this process in its run, or None if it runs alone.

    Queries JAX only in a cluster or with `accelerators`. Raises ValueError for contradictory settings or variables.
    """
    if config.name == "off":
        return None
    if config.processes is not None:
        return _checked(Place(str(config.coordinator), config.processes, int(config.process or 0)), "distributed")
    count, index = (next((n for n in names if environment.get(n)), None) for names in (_COUNT, _INDEX))
    if count is None and index is None:
        in_cluster = accelerators or any(name in environment for name in _CLUSTERS)
        return _detect_place(config) if in_cluster else None
    if count is not None and environment[count] == "1":
        return None
    address = environment.get(COORDINATOR)
    if not address or count is None or index is None:
        variables = ((COORDINATOR, address), (_COUNT[0], count), (_INDEX[0], index))
        missing = [name for name, value in variables if not value]
        raise ValueError(
            f"{' and '.join(missing)} missing in the environment, beside {count or index}: address, count and "
            "index go together. Unset them to run alone."
        )
    try:
        place = Place(address, int(environment[count]), int(environment[index]))
    except ValueError:
        raise ValueError(
            f"{count}={environment[count]} and {index}={environment[index]}: write whole numbers."
        ) from None
    return _checked(place, count)


def join(config: DistributedConfig, *, accelerators: int = 0) -> Connected | None:
    """Return the team of this run, once all processes are connected, or None if there is one process.

    The ValueError, on every connected process, names those that are late or disagree on the number of processes.
    """
    place = find_place(config, accelerators=accelerators)
    if place is None or place.count == 1:
        return None
    return Connected(place, timeout_s=config.timeout_s, heartbeat_s=config.heartbeat_s)


def start_jax(config: DistributedConfig, place: Place) -> None:
    """Start JAX's coordination between the processes. Call it before anything uses a device."""
    import jax

    jax.distributed.initialize(
        place.coordinator,
        place.count,
        place.index,
        initialization_timeout=int(config.timeout_s) + 1,
        heartbeat_timeout_seconds=int(_JAX_PATIENCE * config.heartbeat_s),
        local_device_ids=place.local_devices,
        shutdown_timeout_seconds=int(config.heartbeat_s) + 1,
    )


def _checked(place: Place, source: str) -> Place:
    parse_address(place.coordinator)
    if place.count < 1 or not 0 <= place.index < place.count:
        raise ValueError(f"{source}: process {place.index} of {place.count} processes; they are counted from 0.")
    return place


def _detect_place(config: DistributedConfig) -> Place | None:
    """Return the place that JAX detects, or None. The detection has no public name."""
    from jax._src.clusters import ClusterEnv

    try:
        address, count, index, local = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(config.timeout_s)
        )
    except Exception as error:  # metadata servers and schedulers fail in many ways
        raise ValueError(
            f"JAX cannot tell the processes of this run ({type(error).__name__}: {' '.join(str(error).split())}). Give "
            "distributed.coordinator, distributed.processes and distributed.process, or distributed=off to run alone."
        ) from error
    if address is None or count is None or index is None:
        return None
    return Place(str(address), int(count), int(index), None if local is None else tuple(local))
