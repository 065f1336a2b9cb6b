"""The devices of a run: the target's, this machine's, or simulated ones."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from valkyrie.config.compose import accelerators
from valkyrie.config.run import Run
from valkyrie.foreign_errors import no_device_reason
from valkyrie.hardware.chips import chip_of
from valkyrie.hardware.platforms import platform_of, platforms
from valkyrie.hardware.target import ChipConfig
from valkyrie.paths import cache_problem, cache_root
from valkyrie.problems import Problem, ProblemCode, refuse
from valkyrie.processes.team import ALONE, Team
from valkyrie.train.host import too_many_simulated, unknown_flags


@dataclass(frozen=True)
class Devices:
    """The devices of a run. `simulated`: CPU devices simulate the mesh, and their speed means nothing."""

    devices: tuple[Any, ...]
    platform: str
    chip: ChipConfig | None
    simulated: bool

    @property
    def chips(self) -> float:
        """Number of chips; a simulated device counts as one."""
        return len(self.devices) / (1 if self.chip is None else self.chip.devices)

    @property
    def note(self) -> str:
        """A line that names the devices, or warns that they are simulated."""
        count = len(self.devices)
        if self.simulated:
            devices = f"{count} CPU devices" if count > 1 else "1 CPU device"
            stand = "stand in" if count > 1 else "stands in"
            return (
                f"SIMULATED: {devices} on {os.cpu_count()} cores {stand} for the mesh. Losses are real; speeds are not "
                "those of any accelerator."
            )
        return f"{count} x {self.devices[0].device_kind}"


def missing_devices(run: Run) -> list[Problem]:
    """Return why this machine lacks the target's devices, judging by device files. Imports no JAX."""
    target, mesh = run.config.target, run.config.mesh
    if unknown := unknown_flags(flags := os.environ.get("XLA_FLAGS", "")):
        return [Problem(ProblemCode.unknown_name, "XLA_FLAGS", flags, unknown)]
    if os.environ.get("JAX_DISABLE_JIT", "").lower() in ("y", "yes", "t", "true", "on", "1"):
        text = (
            "JAX_DISABLE_JIT=1 is set: steps are compiled ahead of time and cannot run without jit. Unset it; to find "
        )
        return [
            Problem(
                ProblemCode.unsupported,
                "JAX_DISABLE_JIT",
                "1",
                text + "the operation that makes a NaN, use debug=nans.",
            )
        ]
    forced, platform = os.environ.get("JAX_PLATFORMS"), platform_of(target.platform)
    whole = [platform.name for platform in platforms() if platform.uses_every_device]
    if forced in whole and not accelerators():
        text = _not_here(f"this machine has no {forced.upper()} that JAX can use")
        return [Problem(ProblemCode.missing, "JAX_PLATFORMS", forced, text)]
    if platform.is_simulated(accelerators()):
        text = None if run.config.force else too_many_simulated(mesh.name, mesh.size)
        return [Problem(ProblemCode.device_count, "mesh", mesh.name, text, size=mesh.size)] if text else []
    if platform.jax_name is None or accelerators():
        return []
    text = (
        f"target={target.describe()} is not this machine: it has no accelerator that JAX can use "
        f"({os.cpu_count()} CPU cores). Run this where the chips are, use target=auto, or plan for them with mode=show "
        "or mode=compile."
    )
    return [Problem(ProblemCode.missing, "target", target.name, text)]


def _not_here(reason: str) -> str:
    """Return the error message for the JAX_PLATFORMS of the environment."""
    return (
        f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} is set in the environment, and {reason}. Unset it to take the "
        "devices that there are, or set JAX_PLATFORMS=cpu to simulate."
    )


def acquire(run: Run, team: Team = ALONE) -> Devices:
    """Return the devices for the run's mesh. Raises ValueError if the machine has too few, or a different chip.

    Call it before anything else initialises a JAX backend, which fixes the number of CPU devices.
    """
    config = run.config
    mesh, target = config.mesh, config.target
    _let_simulated_devices_wait(mesh.size // team.count)
    import jax

    if mesh.size % team.count:
        raise ValueError(
            f"mesh={mesh.name} has {mesh.size} devices, which {team.count} processes cannot share: each has the same "
            f"number. Use a mesh of a multiple of {team.count} devices, or other processes."
        )
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # the backend is already initialised; the check below decides
            jax.config.update("jax_num_cpu_devices", mesh.size // team.count)
    platform = platform_of(target.platform).jax_name
    try:
        devices = jax.devices(platform)
    except (RuntimeError, AssertionError) as error:  # JAX has an empty AssertionError if no backend initialises
        why = no_device_reason(error)
        reason = f"JAX finds no {f'{platform} ' if platform else ''}device here{f' ({why})' if why else ''}"
        if os.environ.get("JAX_PLATFORMS"):
            raise ValueError(_not_here(reason)) from error
        raise ValueError(f"target={target.describe()}: {reason}.") from error
    kind, found = devices[0].device_kind, platform_of(devices[0].platform)
    if target.chip is not None and kind not in target.chip.device_kinds:
        raise ValueError(
            f"target={target.describe()} wants {target.chip.name} chips; this machine has {len(devices)} x {kind}. "
            "Use target=auto to take them."
        )
    if len(devices) < mesh.size or (found.uses_every_device and len(devices) != mesh.size):
        raise ValueError(
            f"mesh={mesh.name} needs {mesh.size} devices; this machine has {len(devices)} x {kind}. "
            f"Use a mesh of {len(devices)} devices, such as mesh=1x1x{len(devices)}, or target=cpu to simulate."
        )
    if team.count > 1:
        team.agree("devices", {"their order": [str(device) for device in devices]})
    chip = target.chip or chip_of(kind)
    return Devices(tuple(devices[: mesh.size]), devices[0].platform, chip, simulated=found.runs_on_host)


def prepare_devices(run: Run, say: Callable[[str], Any] | None = None, team: Team = ALONE) -> Devices:
    """Configure JAX and return the run's devices. Raises ValueError if this machine lacks them."""
    refuse(missing_devices(run))
    configure_jax(run, say)
    return acquire(run, team)


def configure_jax(run: Run, say: Callable[[str], Any] | None = None) -> None:
    """Configure JAX for the process: its persistent compilation cache, and `debug=nans`.

    If the cache cannot be written, JAX runs without it and `say` gets a line about that.
    """
    import jax

    if only_libtpu_without_a_tpu():
        jax.config.update("jax_platforms", "cpu")  # without a TPU, libtpu writes many lines to stderr
    cache = cache_root() / "xla"
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")  # the disk may fill up
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        pass  # the user's own
    elif trouble := cache_problem(cache):
        if say is not None:
            say(f"{trouble} Compiled programs are not kept.")
    else:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_debug_nans", run.config.debug.value == "nans")


def only_libtpu_without_a_tpu() -> bool:
    """Return whether libtpu is the only installed JAX plugin, on a machine without a TPU."""
    if os.environ.get("JAX_PLATFORMS") or accelerators():
        return False
    others = find_spec("jax_plugins") is not None or bool(entry_points(group="jax_plugins"))
    return find_spec("libtpu") is not None and not others


_THREADS_A_DEVICE = 4
"""A simulated device computes while it waits in up to three collectives at once, each on a separate thread."""


def _let_simulated_devices_wait(count: int) -> None:
    """Give simulated devices enough threads and time to meet in collectives.

    XLA starts one thread per device; if all of them wait in a collective, the last participant has none left. It reads
    `NPROC` before it counts cores. Its default timeout ends the process after 40 s on a busy machine.
    """
    set_already = int(os.environ["NPROC"]) if os.environ.get("NPROC", "").isdigit() else os.cpu_count() or 1
    os.environ["NPROC"] = str(max(_THREADS_A_DEVICE * count, set_already))
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_collective_call_terminate_timeout_seconds" not in flags:
        patience = (
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
            "--xla_cpu_collective_call_terminate_timeout_seconds=1200"
        )
        os.environ["XLA_FLAGS"] = f"{flags} {patience}".strip()
