"""Many processes, one run: whether this is one of several, and JAX started among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.processes.hub import address_of
from valkyrie.processes.team import COORDINATOR, COUNT, INDEX, Connected, Place

_COUNT = (COUNT, "JAX_NUM_PROCESSES")
_INDEX = (INDEX, "JAX_PROCESS_ID")
_CLUSTERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES")
"""What Slurm's srun, Open MPI, and Kubernetes set: the environments in which JAX finds the other processes itself."""
_JAX_PATIENCE = 10
"""JAX's own heartbeat waits so many times as long as ours, which ends the processes with words."""


@dataclass
class DistributedConfig:
    """The processes of a run. `auto` finds them: from the environment, else as JAX does on Cloud TPU, Slurm, MPI, GKE.

    `coordinator` is the address of process 0 as HOST:PORT, `processes` how many there are, `process` which this one is.
    `timeout_s` is how long to wait for all of them at the start, `heartbeat_s` after which silence one counts as lost.
    `step_timeout_s` is how long a training step may take before it counts as hung; null: as long as it does. The first
    has half an hour at least, the others 20 times the median of those before them.
    """

    name: str = "auto"
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout_s: float = 50.0
    heartbeat_s: float = 60.0
    step_timeout_s: float | None = 600.0

    def problems(self) -> list[Problem]:
        """Return everything that is wrong with these settings."""
        problems = check_range("distributed.processes", self.processes, least=1)
        problems += check_range("distributed.process", self.process, least=0)
        problems += check_range("distributed.timeout_s", self.timeout_s, above=0)
        problems += check_range("distributed.heartbeat_s", self.heartbeat_s, least=1)
        problems += check_range("distributed.step_timeout_s", self.step_timeout_s, above=0, otherwise="null")
        given = {"coordinator": self.coordinator, "processes": self.processes, "process": self.process}
        missing = [f"distributed.{key}" for key, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            stated = ", ".join(f"distributed.{key}={value}" for key, value in given.items() if value is not None)
            text = f"{stated}: give {' and '.join(missing)} too; address, count and index go together."
            problems.append(Problem(ProblemCode.missing, missing[0], text=text))
        return problems


def find_place(
    config: DistributedConfig, *, accelerators: int = 0, environment: Mapping[str, str] = os.environ
) -> Place | None:
    """Return where this process stands among those of its run; None where it is the only one.

    ValueError where what is given does not make sense. JAX is asked only where there is a cluster or a TPU.
    """
    if config.name == "off":
        return None
    if config.processes is not None:
        return _checked(Place(str(config.coordinator), config.processes, int(config.process or 0)), "distributed")
    count, index = (next((n for n in names if environment.get(n)), None) for names in (_COUNT, _INDEX))
    if count is not None or index is not None:
        missing = [
            name
            for name, found in ((COORDINATOR, environment.get(COORDINATOR)), (_COUNT[0], count), (_INDEX[0], index))
            if not found
        ]
        if count is not None and environment[count] == "1":
            return None
        if missing or count is None or index is None:
            raise ValueError(
                f"{' and '.join(missing)} missing in the environment, beside {count or index}: address, count and "
                "index go together. Unset them to run alone."
            )
        try:
            place = Place(environment[COORDINATOR], int(environment[count]), int(environment[index]))
        except ValueError:
            raise ValueError(
                f"{count}={environment[count]} and {index}={environment[index]}: write whole numbers."
            ) from None
        return _checked(place, count)
    if accelerators or any(name in environment for name in _CLUSTERS):
        return _of_cluster(config)
    return None


def join(config: DistributedConfig, *, accelerators: int = 0) -> Connected | None:
    """Return the team of this run, with all its processes come; None where there is one process.

    ValueError, on every process that came, names those that did not come in time and those that count otherwise.
    """
    place = find_place(config, accelerators=accelerators)
    if place is None or place.count == 1:
        return None
    return Connected(place, timeout_s=config.timeout_s, heartbeat_s=config.heartbeat_s)


def start_jax(config: DistributedConfig, place: Place) -> None:
    """Start JAX's coordination among the processes of a team, before anything touches a device."""
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
    address_of(place.coordinator)
    if place.count < 1 or not 0 <= place.index < place.count:
        raise ValueError(f"{source}: process {place.index} of {place.count} processes; they are counted from 0.")
    return place


def _of_cluster(config: DistributedConfig) -> Place | None:
    """Return what JAX's own detection finds; it has no public name."""
    from jax._src.clusters import ClusterEnv

    try:
        found: tuple[Any, ...] = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(config.timeout_s)
        )
    except Exception as error:  # metadata servers and schedulers fail in many ways
        raise ValueError(
            f"JAX cannot tell the processes of this run ({type(error).__name__}: {' '.join(str(error).split())}). Give "
            "distributed.coordinator, distributed.processes and distributed.process, or distributed=off to run alone."
        ) from error
    address, count, index, local = found
    if address is None or count is None or index is None:
        return None
    return Place(str(address), int(count), int(index), None if local is None else tuple(local))
