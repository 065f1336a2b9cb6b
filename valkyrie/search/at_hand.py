"""Devices of this machine: checks whether they are the requested ones, and times CPU devices in a separate process.

This process never starts JAX's devices: a TPU or GPU that it held would be unavailable to the trials.
"""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from valkyrie.config.compose import accelerators
from valkyrie.config.modes import FIGURES
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.modes.figures import Config as FiguresMode
from valkyrie.parallel.mesh import parse_mesh
from valkyrie.processes.locks import TrialLock
from valkyrie.search.measure.figures_of import has_figures, in_words, read_figures
from valkyrie.search.request import SearchRequest
from valkyrie.sweep.members import members
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.process import TrialProcess, stop
from valkyrie.sweep.trial import Status, Trial

_POLL_S = 0.1


def processes() -> int:
    """Return the number of processes of a trial on the devices."""
    leading = members()
    return 1 if leading is None else leading.count


def not_at_hand(request: SearchRequest) -> str | None:
    """Return why nothing can be measured here, judging by device files, or None if it can."""
    if len(request.targets) > 1:
        return "several slices are compared"
    target = next(iter(request.targets))
    if is_here(target):
        return None
    here = accelerators() * processes()
    return f"{target.describe()} is not this machine, which has {here} accelerators that JAX can use"


def is_here(target: TargetConfig) -> bool:
    """Check whether the machines of this command have the devices of a target, judging by device files."""
    here = accelerators() * processes()
    return platform_of(target.platform).runs_on_host or (target.slices == 1 and here >= (target.chips or 1))


def on_cpu(target: TargetConfig) -> bool:
    """Check whether a target is CPU devices of this machine, without a description of their chip."""
    return platform_of(target.platform).runs_on_host and target.chip is None


def with_figures(request: SearchRequest, folder: Path, console: Console) -> SearchRequest:
    """Add measured figures to the CPU devices of a request, timed now or by an earlier search.

    Raises ValueError with the reason if they cannot be timed.
    """
    if not any(on_cpu(target) for target in request.targets):
        return request
    chips = [_figures(request, target, folder, console) if on_cpu(target) else None for target in request.targets]
    targets = [
        target if chip is None else replace(target, chip=chip, hosts=processes())
        for target, chip in zip(request.targets, chips, strict=True)
    ]
    return replace(request, targets=tuple(targets))


def _figures(request: SearchRequest, target: TargetConfig, folder: Path, console: Console) -> ChipConfig:
    config, devices = request.run.config, target.devices or 1
    run = request.run.changed(
        target=target,
        mesh=parse_mesh(f"{devices}x1x1"),
        mode=FiguresMode(),
        runs=str(folder),
        name=f"figures-{target.name}",
    )
    name, machine = str(run.config.name), socket.gethostname()
    if not has_figures(folder / name, machine, config.precision.compute, devices // processes()):
        plan = TrialPlan(name, name, "figures", folder, (), None, run=run, limit_s=run.config.mode.limit_s())
        trial = _carried_out(plan)
        if trial.status is not Status.ok:
            raise ValueError(f"target={target.name}: the devices could not be timed: {trial.reason}")
    chip = read_figures(file := folder / name / FIGURES)
    console.print(f"{target.name}: {in_words(chip)} (timed on {machine}: {file})", highlight=False, soft_wrap=True)
    return chip


def _carried_out(plan: TrialPlan) -> Trial:
    """Run a trial that no sweep records and return its record. Raises ValueError if another search is running it."""
    lock = TrialLock.take(plan.trial_folder)
    if lock is None:
        raise ValueError(f"{plan.trial_folder}: another search times the devices now. Wait for it, or give name=.")
    try:
        process = TrialProcess(plan, lock)
        try:
            while (trial := process.poll()) is None:
                time.sleep(_POLL_S)
        finally:
            stop([process])
    finally:
        lock.release()
    return trial
