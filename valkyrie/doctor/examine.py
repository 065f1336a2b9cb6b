"""Runs the checks of `valkyrie-doctor`, cheap ones first: this host, the other hosts, the devices, a dry run."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from rich.console import Console

from valkyrie.config.compose import accelerators
from valkyrie.config.run import Run
from valkyrie.doctor import disks, host
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Answers, Check, Examined, Finding, FindingsTable, findings_of
from valkyrie.processes.distributed import find_place, join, start_jax
from valkyrie.processes.team import ALONE, Connected, Team
from valkyrie.train.devices import acquire_devices, configure_jax
from valkyrie.train.processes import abort_all_on_error, agree_on_configuration, agree_on_versions, silence_workers

if TYPE_CHECKING:
    from valkyrie.train.devices import Devices

_CLOCK_FAILS_S = 300.0
"""Seconds of clock error above which servers reject a host's credentials."""


def same_code(examined: Examined) -> Answers:
    """Check that all processes run the same code."""
    agree_on_versions(examined.team)
    yield FINE, "on all processes"


def same_settings(examined: Examined) -> Answers:
    """Check that all processes have the same settings."""
    agree_on_configuration(examined.team, examined.run)
    yield FINE, "on all processes"


def clocks(examined: Examined) -> Answers:
    """Compare this host's clock with that of process 0 at a barrier."""
    team = examined.team
    team.wait("look at the clock")
    times = team.exchange("time", time.time())
    off = times[team.index] - times[0]
    severity = FAILS if abs(off) > _CLOCK_FAILS_S else WARNING
    trouble = severity, f"{off:+.0f} s off that of process 0", "Let all hosts keep the time: timedatectl, chrony."
    fine = FINE, f"those of all hosts are within {disks.CLOCK_S:g} s of that of process 0"
    yield fine if abs(off) <= disks.CLOCK_S else trouble


HOST_CHECKS = (
    Check("chips", host.chips),
    Check("processes", host.expected_processes),
    Check("chips free", host.chips_free),
    Check("versions", host.versions),
    Check("host memory", host.host_memory),
    Check("open files", host.open_files),
    Check("run folder", disks.run_folder),
    Check("clock", disks.disk_clock),
    Check("checkpoint folder", disks.checkpoint_folder),
    Check("disk space", disks.disk_space),
    Check("fast disk space", disks.fast_disk_space),
    Check("compile cache", disks.compile_cache),
    Check("data", disks.data),
    Check("W&B", disks.wandb_key),
)
"""Checks that each process makes alone, before it connects to the others."""
TEAM_CHECKS = (
    Check("same code", same_code),
    Check("same settings", same_settings),
    Check("clocks", clocks),
    Check("same data", disks.same_data),
    Check("shared folder", disks.shared_folder),
)
"""Checks that all processes make together, in this order."""


def examine(run: Run, console: Console, steps: int | None) -> int:
    """Print the findings of all processes of a run. Returns the exit status: 1 if the run would fail, else 0.

    `steps` is the number of steps of a dry run, or None for no dry run.
    """
    title = f"{run.model.name} under {run.layout.name} on target={run.config.target.describe()}"
    console.print(title, style="bold", markup=False)
    own: list[Finding] = []
    try:
        place = find_place(run.config.distributed, accelerators=accelerators())
        own = findings_of(HOST_CHECKS, Examined(run, 1 if place is None else place.count))
        team = join(run.config.distributed, accelerators=accelerators()) or ALONE
    except ValueError as error:
        table = FindingsTable(console)
        table.add([[*(own or findings_of(HOST_CHECKS, Examined(run))), Finding("processes", FAILS, str(error))]])
        return table.conclude()
    if not isinstance(team, Connected):
        return _with_all(Examined(run), FindingsTable(console), own, steps)
    with abort_all_on_error(team, "valkyrie-doctor"):
        silence_workers(team)
        table = FindingsTable(console, team.exchange("hosts", socket.gethostname()))
        own.append(Finding("processes", FINE, f"{team.count} have met at {team.place.coordinator}"))
        examined = Examined(run, team.count, team)
        own += findings_of(TEAM_CHECKS, examined)
        status = _with_all(examined, table, own, steps)
        team.finish()
    return status


def _with_all(examined: Examined, table: FindingsTable, own: list[Finding], steps: int | None) -> int:
    """Print the findings of all processes, then check their devices and make a dry run unless something has failed."""
    team = examined.team
    table.add(team.exchange("this host", own))
    if not table.failed:
        devices, findings = _devices(examined.run, team)
        table.add(team.exchange("devices", findings))
        if steps is not None and devices is not None and not table.failed:
            _dry_run(examined.run, devices, steps, team, table)
    elif steps is not None:
        table.add([[Finding("dry run", WARNING, "left out for what would fail")]])
    return table.conclude()


def _devices(run: Run, team: Team) -> tuple[Devices | None, list[Finding]]:
    """Start JAX and return the devices of the run, or None if they do not match the target."""
    if isinstance(team, Connected):
        start_jax(run.config.distributed, team.place)
    try:
        configure_jax(run)
        devices = acquire_devices(run, team)
    except ValueError as error:
        return None, [Finding("devices", FAILS, str(error))]
    import jax

    here = f", {jax.local_device_count()} a process" if team.count > 1 else ""
    kind = devices.devices[0].device_kind
    word = "simulated " if devices.simulated else ""
    return devices, [Finding("devices", FINE, f"{len(devices.devices)} x {word}{kind}{here}")]


def _dry_run(run: Run, devices: Devices, steps: int, team: Team, table: FindingsTable) -> None:
    from valkyrie.doctor.dry_run import dry_run

    try:
        for findings in dry_run(run, devices, steps, team):
            table.add(team.exchange("dry run", findings))
            if table.failed:
                return
    except ValueError as error:
        if team.count > 1:  # the others may wait for this one in a collective
            raise
        table.add([[Finding("dry run", FAILS, str(error))]])
