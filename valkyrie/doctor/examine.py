"""The doctor's round: this host, then the others, then the devices, then a dry run; the cheap and telling first."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from valkyrie.config.compose import accelerators
from valkyrie.config.run import Run
from valkyrie.doctor import disks, host
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Finding, Findings
from valkyrie.doctor.shared import checkpoint_folder, same_folder
from valkyrie.doctor.software import versions_fit
from valkyrie.processes.distributed import find_place, join, start_jax
from valkyrie.processes.team import ALONE, Connected, Team
from valkyrie.train.devices import acquire, configure_jax
from valkyrie.train.processes import agree_on_configuration, agree_on_versions, ends_all, only_first_prints

if TYPE_CHECKING:
    from valkyrie.train.devices import Devices

_CLOCK_FAILS_S = 300.0
"""By so much, and servers refuse the credentials that a host shows."""


def examine(run: Run, console: Console, steps: int | None) -> int:
    """Print what is found of a run on this host and those of its other processes, and return the exit status.

    `steps` are those of a dry run, None for none. The status is 1 where something would fail, else 0.
    """
    title = f"{run.model.name} under {run.layout.name} on target={run.config.target.describe()}"
    console.print(title, style="bold", markup=False)
    try:
        place = find_place(run.config.distributed, accelerators=accelerators())
    except ValueError as error:
        return _before_the_others(console, [*_of_this_host(run, 1), Finding("processes", FAILS, str(error))])
    own = _of_this_host(run, 1 if place is None else place.count)
    try:
        team = join(run.config.distributed, accelerators=accelerators()) or ALONE
    except ValueError as error:
        return _before_the_others(console, [*own, Finding("processes", FAILS, str(error))])
    if not isinstance(team, Connected):
        return _with_all(run, Findings(console), ALONE, own, steps)
    with ends_all(team, "valkyrie-doctor"):
        only_first_prints(team)
        findings = Findings(console, team.exchange("hosts", socket.gethostname()))
        own.append(Finding("processes", FINE, f"{team.count} have met at {team.place.coordinator}"))
        own += _of_all(run, team)
        status = _with_all(run, findings, team, own, steps)
        team.finish()
    return status


def _of_this_host(run: Run, processes: int) -> list[Finding]:
    findings = host.chips(run, processes)
    findings += host.holders()
    findings += [versions_fit(run), host.host_memory(run, processes), host.open_files(processes)]
    findings += [*disks.run_folder(run), *checkpoint_folder(run)]
    findings += [disks.disk_space(run), *disks.fast_disk_space(run, processes)]
    return [*findings, disks.compile_cache(), disks.data(run), disks.tracking(run)]


def _before_the_others(console: Console, own: list[Finding]) -> int:
    findings = Findings(console)
    findings.add([own])
    return findings.conclude()


def _with_all(run: Run, findings: Findings, team: Team, own: list[Finding], steps: int | None) -> int:
    """Print what all processes have found so far, then what their devices and a dry run show, unless that is no use."""
    findings.add(_told(team, "this host", own))
    if not findings.failed:
        devices, found = _devices(run, team)
        findings.add(_told(team, "devices", found))
        if steps is not None and devices is not None and not findings.failed:
            _dry_run(run, devices, steps, team, findings)
    elif steps is not None:
        findings.add([[Finding("dry run", WARNING, "left out for what would fail")]])
    return findings.conclude()


def _told(team: Team, name: str, own: Iterable[Finding]) -> list[list[Finding]]:
    return [[Finding(*finding) for finding in found] for found in team.exchange(name, list(own))]


def _of_all(run: Run, team: Team) -> list[Finding]:
    """Return whether the processes are of one mind, and their clocks of one time."""
    findings = []
    checks: dict[str, Callable[[], None]] = {
        "same code": lambda: agree_on_versions(team),
        "same settings": lambda: agree_on_configuration(team, run),
    }
    for check, agree in checks.items():
        try:
            agree()
        except ValueError as error:
            findings.append(Finding(check, FAILS, str(error)))
        else:
            findings.append(Finding(check, FINE, "on all processes"))
    team.wait("look at the clock")
    findings += _clocks(team.exchange("time", time.time()), team)
    return [*findings, *disks.same_data(run, team), *same_folder(run, team)]


def _clocks(times: list[float], team: Team) -> list[Finding]:
    """Return whether this host's clock is that of process 0, by what both showed when all had come to one point."""
    off = times[team.index] - times[0]
    if abs(off) <= disks.CLOCK_S:
        return [Finding("clocks", FINE, f"those of all hosts are within {disks.CLOCK_S:g} s of that of process 0")]
    verdict = FAILS if abs(off) > _CLOCK_FAILS_S else WARNING
    text = f"{off:+.0f} s off that of process 0"
    return [Finding("clocks", verdict, text, "Let all hosts keep the time: timedatectl, chrony.")]


def _devices(run: Run, team: Team) -> tuple[Devices | None, list[Finding]]:
    """Start JAX, and return the devices of the run and whether they are what the target wants."""
    if isinstance(team, Connected):
        start_jax(run.config.distributed, team.place)
    try:
        configure_jax(run)
        devices = acquire(run, team)
    except ValueError as error:
        return None, [Finding("devices", FAILS, str(error))]
    import jax

    here = f", {jax.local_device_count()} a process" if team.count > 1 else ""
    kind = devices.devices[0].device_kind
    word = "simulated " if devices.simulated else ""
    return devices, [Finding("devices", FINE, f"{len(devices.devices)} x {word}{kind}{here}")]


def _dry_run(run: Run, devices: Devices, steps: int, team: Team, findings: Findings) -> None:
    from valkyrie.doctor.dry_run import dry_run

    try:
        for found in dry_run(run, devices, steps, team):
            findings.add(_told(team, "dry run", found))
            if findings.failed:
                return
    except ValueError as error:
        if team.count > 1:  # the others may wait for this one in a collective
            raise
        findings.add([[Finding("dry run", FAILS, str(error))]])
