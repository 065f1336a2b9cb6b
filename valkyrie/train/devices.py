"""Configures JAX and finds the devices of a run, which are accelerators or simulated by the CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from valkyrie.config.compose import count_accelerators
from valkyrie.config.run import Run
from valkyrie.foreign_errors import no_device_reason
from valkyrie.hardware.chips import chip_for_device_kind
from valkyrie.hardware.platforms import get_platform, platforms
from valkyrie.hardware.target import ChipConfig
from valkyrie.paths import cache_problem, cache_root
from valkyrie.problems import Problem, ProblemCode, raise_problems
from valkyrie.processes.team import ALONE, Team
from valkyrie.train.host import simulation_refusal, unknown_flags_message
from valkyrie.units import count_text


@dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Args:
        devices: The JAX devices, one for each position of the mesh.
        platform: Name of the JAX platform, such as `tpu`.
        chip: Kind of chip, or None if unknown.
        simulated: Whether CPU devices simulate the mesh. Speeds measured on them say nothing about accelerators.
    """

    devices: tuple[Any, ...]
    platform: str
    chip: ChipConfig | None
    simulated: bool

    @property
    def chips(self) -> float:
        """Number of chips. If the chip is unknown, each device counts as one chip."""
        return len(self.devices) / (1 if self.chip is None else self.chip.devices)

    @property
    def devices_per_memory(self) -> int:
        """Number of devices that share a memory: all if they are simulated in the host's memory, else 1."""
        return len(self.devices) if self.simulated else 1

    @property
    def note(self) -> str:
        """A line that names the devices, or warns that they are simulated."""
        count = len(self.devices)
        if self.simulated:
            devices = f"{count} CPU devices" if count > 1 else "1 CPU device"
            verb = "stand in" if count > 1 else "stands in"
            return (
                f"SIMULATED: {devices} on {os.cpu_count()} cores {verb} for the mesh. Losses are real; speeds are not "
                "those of any accelerator."
            )
        return f"{count} x {self.devices[0].device_kind}"


def machine_problems(run: Run) -> list[Problem]:
    """Return problems with the environment variables or, only if there are none, with the host's devices."""
    return environment_problems() or device_problems(run)


def environment_problems() -> list[Problem]:
    """Check `XLA_FLAGS` and `JAX_DISABLE_JIT`. Returns at most one problem. Does not import JAX."""
    if message := unknown_flags_message(flags := os.environ.get("XLA_FLAGS", "")):
        return [Problem(ProblemCode.unknown_name, "XLA_FLAGS", flags, message)]
    disable_jit = os.environ.get("JAX_DISABLE_JIT", "")
    if disable_jit.lower() in ("y", "yes", "t", "true", "on", "1"):
        text = (
            f"JAX_DISABLE_JIT={disable_jit} is set, but Valkyrie compiles its programs ahead of time, which needs jit. "
            "Unset it. To find the operation that produces a NaN in training, use debug=nans."
        )
        return [Problem(ProblemCode.unsupported, "JAX_DISABLE_JIT", disable_jit, text)]
    return []


def device_problems(run: Run) -> list[Problem]:
    """Check that this host has or can simulate the run's devices. Returns at most one problem. Does not import JAX.

    Checks `JAX_PLATFORMS`, the number of simulated devices (unless `force=true`), and whether the host has device
    files of accelerators.
    """
    target, mesh = run.config.target, run.config.mesh
    forced_platform, platform = os.environ.get("JAX_PLATFORMS"), get_platform(target.platform)
    slice_platforms = [platform.name for platform in platforms() if platform.uses_every_device]
    if forced_platform in slice_platforms and not count_accelerators():
        text = _platforms_message(f"this machine has no {forced_platform.upper()} that JAX can use")
        return [Problem(ProblemCode.missing, "JAX_PLATFORMS", forced_platform, text)]
    if platform.is_simulated(count_accelerators()):
        text = None if run.config.force else simulation_refusal(mesh.name, mesh.size)
        return [Problem(ProblemCode.device_count, "mesh", mesh.name, text, size=mesh.size)] if text else []
    if platform.jax_name is None or count_accelerators():
        return []
    planning_mode = "mode=compile" if platform.compiles_without_devices else "mode=search"
    text = (
        f"target={target.describe()} needs accelerators, but JAX finds none on this machine, only {os.cpu_count()} CPU "
        f"cores. Run on the target, use target=auto, or plan with mode=show or {planning_mode}."
    )
    return [Problem(ProblemCode.missing, "target", target.name, text)]


def _platforms_message(reason: str) -> str:
    """Return the error message for an unusable JAX_PLATFORMS in the environment."""
    return (
        f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} is set in the environment, but {reason}. Unset it to use the "
        "available devices, or set JAX_PLATFORMS=cpu to simulate."
    )


def acquire_devices(run: Run, team: Team = ALONE) -> Devices:
    """Return the devices for the run's mesh: the first ones that JAX lists.

    Call this before anything else initialises a JAX backend, because the number of CPU devices is fixed afterwards.

    Raises ValueError if JAX finds no devices, if they do not match the mesh and the target, if the size of the mesh is
    not divisible by the number of processes, or if the processes list the devices in different orders.
    """
    config = run.config
    mesh, target = config.mesh, config.target
    _configure_simulated_devices(mesh.size // team.count)
    for possible_platform in platforms():  # the platform is only known once JAX has started
        for name, value in possible_platform.process_environment().items():
            os.environ.setdefault(name, value)
    import jax

    if mesh.size % team.count:
        raise ValueError(
            f"mesh={mesh.name} has {mesh.size} devices, which do not divide evenly among {team.count} processes. Use a "
            f"mesh with a multiple of {team.count} devices, or another number of processes."
        )
    is_count_in_flags, is_count_fixed = _DEVICE_COUNT_FLAG in os.environ.get("XLA_FLAGS", ""), False
    if not is_count_in_flags:
        try:
            jax.config.update("jax_num_cpu_devices", mesh.size // team.count)
        except RuntimeError:  # the backend is already initialised; the check below decides
            is_count_fixed = True
    platform = get_platform(target.platform).jax_name
    try:
        devices = jax.devices(platform)
    except (RuntimeError, AssertionError) as error:  # JAX has an empty AssertionError if no backend initialises
        cause = no_device_reason(error)
        reason = f"JAX finds no {f'{platform} ' if platform else ''}device here{f' ({cause})' if cause else ''}"
        if os.environ.get("JAX_PLATFORMS"):
            raise ValueError(_platforms_message(reason)) from error
        raise ValueError(f"target={target.describe()}: {reason}.") from error
    device_kind, actual_platform = devices[0].device_kind, get_platform(devices[0].platform)
    if target.chip is not None and device_kind not in target.chip.device_kinds:
        raise ValueError(
            f"target={target.describe()} needs {target.chip.name} chips, but this machine has {len(devices)} x "
            f"{device_kind}. Use target=auto to train on those."
        )
    if len(devices) < mesh.size and actual_platform.runs_on_host and (is_count_fixed or is_count_in_flags):
        reason, remedy = (
            "the number of devices was fixed when this process first used JAX",
            "Start a new process and use the largest mesh before smaller ones",
        )
        if is_count_in_flags:
            reason, remedy = f"XLA_FLAGS has {_DEVICE_COUNT_FLAG}", "Remove that flag"
        raise ValueError(
            f"mesh={mesh.name} needs {mesh.size} devices, but this process has {len(devices)} x {device_kind}: "
            f"{reason}. {remedy}, or use a mesh of at most {count_text(len(devices), 'device')}, such as "
            f"mesh=1x1x{len(devices)}."
        )
    if len(devices) < mesh.size or (actual_platform.uses_every_device and len(devices) != mesh.size):
        surplus_note = ", and a program must use all of them" if len(devices) > mesh.size else ""
        raise ValueError(
            f"mesh={mesh.name} needs {mesh.size} devices, but this machine has {len(devices)} x "
            f"{device_kind}{surplus_note}. Use a mesh of {len(devices)} devices, such as mesh=1x1x{len(devices)}, or "
            "target=cpu to simulate."
        )
    if team.count > 1:
        team.agree("devices", {"their order": [str(device) for device in devices]})
    chip = target.chip or chip_for_device_kind(device_kind)
    return Devices(tuple(devices[: mesh.size]), devices[0].platform, chip, simulated=actual_platform.runs_on_host)


def prepare_devices(run: Run, say: Callable[[str], Any] | None = None, team: Team = ALONE) -> Devices:
    """Configure JAX and return the run's devices.

    If compiled programs cannot be cached, calls `say` (unless it is None) with the reason. Raises ValueError if an
    environment variable has an unusable value, or if this host lacks the devices.
    """
    raise_problems(machine_problems(run))
    configure_jax(run, say)
    return acquire_devices(run, team)


def configure_jax(run: Run, say: Callable[[str], Any] | None = None) -> None:
    """Configure JAX for this process: its platform, its persistent compilation cache, and `debug=nans`.

    If all plugins are for accelerators that this host lacks, the platform is the CPU. The cache is a subfolder of
    `cache_root`, unless `JAX_COMPILATION_CACHE_DIR` is set. If the subfolder cannot be written, JAX runs without a
    cache, and `say` (unless it is None) is called with the reason.
    """
    import jax

    if only_idle_plugins():
        jax.config.update("jax_platforms", "cpu")  # without their accelerators, plugins write many lines to stderr
    cache = cache_root() / "xla"
    # A full disk must not flood the output.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        pass  # the user has set a cache
    elif cache_problem_text := cache_problem(cache):
        if say is not None:
            say(f"{cache_problem_text} Compiled programs will not be cached.")
    else:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_debug_nans", run.config.debug.value == "nans")


def only_idle_plugins() -> bool:
    """Return whether all JAX plugins are for accelerators that this host lacks. False if `JAX_PLATFORMS` is set.

    These are libtpu, and the plugin for GPUs on a host without their driver. False without any plugin.
    """
    if os.environ.get("JAX_PLATFORMS") or count_accelerators():
        return False
    plugins = _plugin_names()
    idle_plugins = {name for platform in platforms() if not platform.has_driver() for name in platform.jax_plugins}
    return plugins <= idle_plugins and (bool(plugins) or any(platform.is_installed() for platform in platforms()))


def _plugin_names() -> set[str]:
    """Return the names of the installed JAX plugins, other than libtpu."""
    package = find_spec("jax_plugins")
    folders = package.submodule_search_locations if package is not None else None
    return {module.name for module in iter_modules(folders or [])} | {e.name for e in entry_points(group="jax_plugins")}


_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_THREADS_PER_DEVICE = 4
"""Threads of a simulated device: it computes while it waits in up to three collectives, each on a separate thread."""


def _configure_simulated_devices(count: int) -> None:
    """Set environment variables that give simulated devices enough threads and time for their collectives.

    With XLA's default of one thread per device, all threads can block in a collective before its last participant runs.
    `NPROC` overrides the number of cores that XLA counts. XLA's default timeout of collectives would end the process
    after 40 s on a busy host. They are set on every host, because the platform is only known once JAX has started; they
    do not affect accelerators.
    """
    current_threads = int(os.environ["NPROC"]) if os.environ.get("NPROC", "").isdigit() else os.cpu_count() or 1
    os.environ["NPROC"] = str(max(_THREADS_PER_DEVICE * count, current_threads))
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_collective_call_terminate_timeout_seconds" not in flags:
        timeouts = (
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
            "--xla_cpu_collective_call_terminate_timeout_seconds=1200"
        )
        os.environ["XLA_FLAGS"] = f"{flags} {timeouts}".strip()
