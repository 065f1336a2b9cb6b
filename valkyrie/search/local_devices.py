"""Checks whether this machine has the requested devices, and times CPU devices in a separate process.

The search process itself never initialises JAX's devices, because its trials cannot use a TPU or GPU that it holds.
"""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from valkyrie.config.compose import count_accelerators
from valkyrie.config.modes import FIGURES_FILE
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.modes.figures import Config as FiguresMode
from valkyrie.parallel.mesh import parse_mesh
from valkyrie.processes.locks import TrialLock
from valkyrie.search.measure.figures_file import describe_figures, has_figures, read_figures
from valkyrie.search.request import SearchRequest
from valkyrie.sweep.members import current_members
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.process import TrialProcess, stop_trials
from valkyrie.sweep.trial import Status, Trial

_POLL_S = 0.1


def process_count() -> int:
    """Return the number of processes that run each trial: all processes of a multirun, or 1 if this one runs alone."""
    members = current_members()
    return 1 if members is None else members.count


def can_measure(request: SearchRequest) -> bool:
    """Return whether layouts can be measured: the request has a single target, and its devices are available."""
    return len(request.targets) == 1 and has_devices(request.targets[0])


def has_devices(target: TargetConfig) -> bool:
    """Return whether the machines that run this command have the devices of a target.

    True for CPU targets, and False for several slices of accelerators. For one slice, counts the device files of this
    machine and multiplies by `process_count`.
    """
    local_devices = count_accelerators() * process_count()
    return get_platform(target.platform).runs_on_host or (target.slices == 1 and local_devices >= (target.chips or 1))


def missing_compilers(request: SearchRequest) -> dict[str, str]:
    """Return the requested slices for which this machine cannot compile, as a dict from name to reason."""
    reasons = dict[str, str]()
    reason_by_platform = dict[str, str | None]()  # names only the first slice, so that it is printed once
    for target in request.targets:
        platform = get_platform(target.platform)
        if target.platform not in reason_by_platform:
            reason_by_platform[target.platform] = (
                platform.compiler_install_hint(target)
                if platform.compiles_without_devices
                else "its programs cannot be compiled without the devices"
            )
        if (reason := reason_by_platform[target.platform]) is not None:
            reasons[target.name] = reason
    return reasons


def needs_cpu_figures(target: TargetConfig) -> bool:
    """Return whether a target is the CPU of this machine and its speed is not configured (`target.chip` is None)."""
    return get_platform(target.platform).runs_on_host and target.chip is None


def add_measured_figures(request: SearchRequest, folder: Path, console: Console) -> SearchRequest:
    """Return the request with measured chip speeds for each target for which `needs_cpu_figures` is True.

    Times the devices, unless an earlier search stored the speeds in `folder`.

    Raises ValueError if the devices cannot be timed.
    """
    if not any(needs_cpu_figures(target) for target in request.targets):
        return request
    chips = [
        _time_chip(request, target, folder, console) if needs_cpu_figures(target) else None
        for target in request.targets
    ]
    targets = [
        target if chip is None else replace(target, chip=chip, hosts=process_count())
        for target, chip in zip(request.targets, chips, strict=True)
    ]
    return replace(request, targets=tuple(targets))


def _time_chip(request: SearchRequest, target: TargetConfig, folder: Path, console: Console) -> ChipConfig:
    config, devices = request.run.config, target.devices or 1
    run = request.run.changed(
        target=target,
        mesh=parse_mesh(f"{devices}x1x1"),
        mode=FiguresMode(),
        runs=str(folder),
        name=f"figures-{target.name}",
    )
    name, machine = str(run.config.name), socket.gethostname()
    if not has_figures(folder / name, machine, config.precision.compute, devices // process_count()):
        plan = TrialPlan(name, name, "figures", folder, (), None, run=run, limit_s=run.config.mode.limit_s())
        trial = _run_trial(plan)
        if trial.status is not Status.ok:
            raise ValueError(f"target={target.name}: the devices could not be timed: {trial.reason}")
    chip = read_figures(file := folder / name / FIGURES_FILE)
    console.print(
        f"{target.name}: {describe_figures(chip)} (timed on {machine}: {file})", highlight=False, soft_wrap=True
    )
    return chip


def _run_trial(plan: TrialPlan) -> Trial:
    """Run a trial outside of any sweep and return its record. Raises ValueError if another search is running it."""
    lock = TrialLock.acquire(plan.trial_folder)
    if lock is None:
        raise ValueError(
            f"{plan.trial_folder}: another search is timing the devices. Wait for it, or use another name=."
        )
    try:
        process = TrialProcess(plan, lock)
        try:
            while (trial := process.poll()) is None:
                time.sleep(_POLL_S)
        finally:
            stop_trials([process])
    finally:
        lock.release()
    return trial
