"""Finds the other processes of a run, connects to them, and initializes JAX's distributed runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.processes.hub import parse_address
from valkyrie.processes.team import COORDINATOR_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE, ConnectedTeam, ProcessInfo

_COUNT_VARIABLES = (COUNT_VARIABLE, "JAX_NUM_PROCESSES")
_INDEX_VARIABLES = (INDEX_VARIABLE, "JAX_PROCESS_ID")
_CLUSTER_VARIABLES = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES")
"""Variables set by Slurm's srun, Open MPI, Kubernetes and Cloud TPU, where JAX can find the other processes."""
_JAX_HEARTBEAT_FACTOR = 10
"""JAX's heartbeat timeout as a multiple of `heartbeat_s`. Ours must expire first, because its message names the lost
process."""


@dataclass
class DistributedConfig:
    """How the processes of a run find each other, and how long they wait.

    Args:
        name: `auto` uses the keys below, or else environment variables such as `JAX_PROCESS_COUNT`, or else JAX's
            detection on Cloud TPU, Slurm, MPI and GKE. `off` runs this process alone.
        coordinator: address of process 0, as `HOST:PORT`.
        processes: number of processes.
        process: index of this process, from 0.
        timeout_s: seconds to wait for all processes at the start.
        heartbeat_s: seconds without a message after which a process counts as lost.
        step_timeout_s: seconds after which a training step counts as hung, or null for no limit. The limit is at least
            half an hour for the first two steps, and at least 20 times the median step time for the others.
    """

    name: str = "auto"
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout_s: float = 50.0
    heartbeat_s: float = 60.0
    step_timeout_s: float | None = 600.0

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid or missing key."""
        problems = check_range("distributed.processes", self.processes, least=1)
        problems += check_range("distributed.process", self.process, least=0)
        problems += check_range("distributed.timeout_s", self.timeout_s, above=0)
        problems += check_range("distributed.heartbeat_s", self.heartbeat_s, least=1)
        problems += check_range("distributed.step_timeout_s", self.step_timeout_s, above=0, otherwise="null")
        keys = {"coordinator": self.coordinator, "processes": self.processes, "process": self.process}
        missing = [f"distributed.{key}" for key, value in keys.items() if value is None]
        if 0 < len(missing) < len(keys):
            present = " and ".join(f"distributed.{key}={value}" for key, value in keys.items() if value is not None)
            verb = "also need" if len(missing) == 1 else "needs"
            text = f"{present} {verb} {' and '.join(missing)}. Set all three or none."
            problems.append(Problem(ProblemCode.missing, missing[0], text=text))
        index, count = self.process, self.processes
        if not problems and index is not None and count is not None and index >= count:
            text = (
                f"distributed.process={self.process} must be below distributed.processes={self.processes}. The first "
                "process has distributed.process=0."
            )
            problems.append(Problem(ProblemCode.conflict, "distributed.process", self.process, text))
        return problems


def find_process(
    config: DistributedConfig, *, accelerators: int = 0, environment: Mapping[str, str] = os.environ
) -> ProcessInfo | None:
    """Return how this process connects to the others, or None if it runs alone.

    Uses the config, or else environment variables. If neither is set, lets JAX detect the processes, but only in a
    cluster or on a host with accelerators. A count of 1 in the config or from JAX is returned, not replaced by None.

    Args:
        config: The keys `distributed`.
        accelerators: Number of accelerators of this host.
        environment: Environment variables.

    Raises:
        ValueError: The settings are incomplete or invalid, or JAX's detection fails.
    """
    if config.name == "off":
        return None
    if config.processes is not None:
        process_info = ProcessInfo(str(config.coordinator), config.processes, int(config.process or 0))
        return _check_process(process_info, "distributed.processes", "distributed.process")
    count_variable, index_variable = (
        next((n for n in names if environment.get(n)), None) for names in (_COUNT_VARIABLES, _INDEX_VARIABLES)
    )
    if count_variable is None and index_variable is None:
        in_cluster = accelerators or any(name in environment for name in _CLUSTER_VARIABLES)
        detected_process = _detect_process(config) if in_cluster else None
        if detected_process is not None or not environment.get(COORDINATOR_VARIABLE):
            return detected_process
    if count_variable is not None and environment[count_variable] == "1":
        return None
    address = environment.get(COORDINATOR_VARIABLE)
    if not address or count_variable is None or index_variable is None:
        variables = (
            (COORDINATOR_VARIABLE, address),
            (_COUNT_VARIABLES[0], count_variable),
            (_INDEX_VARIABLES[0], index_variable),
        )
        missing = [name for name, value in variables if not value]
        raise ValueError(
            f"the environment has {count_variable or index_variable or COORDINATOR_VARIABLE} but not "
            f"{' and '.join(missing)}. Set all of {COORDINATOR_VARIABLE}, {_COUNT_VARIABLES[0]} and "
            f"{_INDEX_VARIABLES[0]}, or unset all of them to run a single process."
        )
    try:
        process_info = ProcessInfo(address, int(environment[count_variable]), int(environment[index_variable]))
    except ValueError:
        raise ValueError(
            f"{count_variable}={environment[count_variable]} and {index_variable}={environment[index_variable]} must "
            "be whole numbers."
        ) from None
    return _check_process(process_info, count_variable, index_variable)


def join_team(config: DistributedConfig, *, accelerators: int = 0) -> ConnectedTeam | None:
    """Connect to the other processes and return their team, or None if there is only one process.

    Raises ValueError on every connected process if some are late or disagree on the number of processes.
    """
    process_info = find_process(config, accelerators=accelerators)
    if process_info is None or process_info.count == 1:
        return None
    return ConnectedTeam(process_info, timeout_s=config.timeout_s, heartbeat_s=config.heartbeat_s)


def start_jax(config: DistributedConfig, process_info: ProcessInfo) -> None:
    """Initialize JAX's distributed runtime. Must be called before anything uses a device."""
    import jax

    jax.distributed.initialize(
        process_info.coordinator,
        process_info.count,
        process_info.index,
        initialization_timeout=int(config.timeout_s) + 1,
        heartbeat_timeout_seconds=int(_JAX_HEARTBEAT_FACTOR * config.heartbeat_s),
        local_device_ids=process_info.local_devices,
        shutdown_timeout_seconds=int(config.heartbeat_s) + 1,
    )


def _check_process(process_info: ProcessInfo, count_source: str, index_source: str) -> ProcessInfo:
    """Return `process_info` if its address, count and index are valid. Raises ValueError otherwise.

    `count_source` and `index_source` are the settings or environment variables of the count and the index.
    """
    parse_address(process_info.coordinator)
    if process_info.count < 1:
        raise ValueError(f"{count_source}={process_info.count} must be at least 1.")
    if not 0 <= process_info.index < process_info.count:
        raise ValueError(
            f"{index_source}={process_info.index} must be at least 0 and below {count_source}={process_info.count}."
        )
    return process_info


def _detect_process(config: DistributedConfig) -> ProcessInfo | None:
    """Let JAX detect how this process connects, or return None without a cluster. Raises ValueError if that fails."""
    from jax._src.clusters import ClusterEnv  # JAX has no public function for this

    try:
        address, count, index, local = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(config.timeout_s)
        )
    except Exception as error:  # metadata servers and schedulers raise many types
        raise ValueError(
            f"JAX cannot find the processes of this run ({type(error).__name__}: {' '.join(str(error).split())}). Set "
            "distributed.coordinator, distributed.processes and distributed.process, or use distributed=off to run a "
            "single process."
        ) from error
    if address is None or count is None or index is None:
        return None
    return ProcessInfo(str(address), int(count), int(index), None if local is None else tuple(local))
