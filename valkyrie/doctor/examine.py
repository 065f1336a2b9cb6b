"""Runs the checks of `valkyrie-doctor`, the cheap ones first: this host, the other hosts, the devices, a dry run."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from rich.console import Console

from valkyrie.config.compose import count_accelerators
from valkyrie.config.run import Run
from valkyrie.doctor import disks, host
from valkyrie.doctor.findings import (
    FAILURE,
    OK,
    WARNING,
    Check,
    CheckContext,
    CheckResults,
    Finding,
    FindingsTable,
    run_checks,
)
from valkyrie.processes.distributed import find_process, join_team, start_jax
from valkyrie.processes.team import ALONE, ConnectedTeam, Team
from valkyrie.train.devices import acquire_devices, configure_jax
from valkyrie.train.processes import abort_all_on_error, agree_on_configuration, agree_on_versions, silence_workers
from valkyrie.train.room import check_target_fit

if TYPE_CHECKING:
    from valkyrie.train.devices import Devices

_MAX_CLOCK_ERROR_S = 300.0
"""Seconds of clock error above which servers reject a host's credentials."""


def check_same_code(context: CheckContext) -> CheckResults:
    """Check that all processes run the same code."""
    agree_on_versions(context.team)
    yield OK, "on all processes"


def check_same_settings(context: CheckContext) -> CheckResults:
    """Check that all processes have the same settings."""
    agree_on_configuration(context.team, context.run)
    yield OK, "on all processes"


def check_clocks(context: CheckContext) -> CheckResults:
    """Compare this host's clock with that of process 0 at a barrier.

    A difference above `MAX_CLOCK_DIFFERENCE_S` is a warning, and above `_MAX_CLOCK_ERROR_S` a failure.
    """
    team = context.team
    team.wait("look at the clock")
    times = team.exchange("time", time.time())
    difference = times[team.index] - times[0]
    severity = FAILURE if abs(difference) > _MAX_CLOCK_ERROR_S else WARNING
    remedy = "Synchronize the clocks of all hosts, for example with timedatectl or chrony."
    if abs(difference) > disks.MAX_CLOCK_DIFFERENCE_S:
        yield severity, f"this clock differs by {difference:+.0f} s from that of process 0", remedy
    else:
        yield OK, f"the clocks agree with process 0 within {disks.MAX_CLOCK_DIFFERENCE_S:g} s"


def check_device_memory(context: CheckContext) -> CheckResults:
    """Check that the run fits in the memory of a device of its target. Skipped if the size of that memory is unknown.

    Fails if the state and the gradients alone exceed it, and warns if the estimate with activations may exceed it.
    """
    if fit := check_target_fit(context.run):
        yield OK if fit.should_fit else WARNING, fit.text


HOST_CHECKS = (
    Check("environment", host.check_environment),
    Check("chips", host.check_chips),
    Check("processes", host.check_processes),
    Check("chips free", host.check_chips_free),
    Check("versions", host.check_versions),
    Check("device memory", check_device_memory),
    Check("host memory", host.check_host_memory),
    Check("open files", host.check_open_files),
    Check("run folder", disks.check_run_folder),
    Check("shared disk", disks.check_mounted_disk),
    Check("clock", disks.check_disk_clock),
    Check("checkpoint folder", disks.check_checkpoint_folder),
    Check("disk space", disks.check_disk_space),
    Check("fast disk space", disks.check_fast_disk_space),
    Check("compile cache", disks.check_compile_cache),
    Check("data", disks.check_data),
    Check("W&B", disks.check_wandb_key),
)
"""Checks that each process runs before it connects to the others."""
TEAM_CHECKS = (
    Check("same code", check_same_code),
    Check("same settings", check_same_settings),
    Check("clocks", check_clocks),
    Check("same data", disks.check_same_data),
    Check("shared folder", disks.check_shared_folder),
)
"""Checks that compare the connected processes. Every process runs them in this order."""
RESUME_CHECK = Check("checkpoint", disks.check_resumed_checkpoint)
"""Checks the checkpoint to resume from. It reads the whole checkpoint, so only process 0 runs it."""


def examine(run: Run, console: Console, steps: int | None) -> int:
    """Run all checks and print the findings of all processes. Returns the exit status: 1 if the run would fail, else 0.

    `steps` is the number of steps of the dry run, or None for no dry run.
    """
    title = f"{run.model.name} under {run.layout.name} on target={run.config.target.describe()}"
    console.print(title, style="bold")
    findings: list[Finding] = []
    try:
        process_info = find_process(run.config.distributed, accelerators=count_accelerators())
        findings = run_checks(HOST_CHECKS, CheckContext(run, 1 if process_info is None else process_info.count))
        team = join_team(run.config.distributed, accelerators=count_accelerators()) or ALONE
    except ValueError as error:
        table = FindingsTable(console)
        findings = findings or run_checks(HOST_CHECKS, CheckContext(run))
        table.add([[*findings, Finding("processes", FAILURE, str(error))]])
        return table.print_summary()
    if not isinstance(team, ConnectedTeam):
        return _report_all(CheckContext(run), FindingsTable(console), findings, steps)
    with abort_all_on_error(team, "valkyrie-doctor"):
        silence_workers(team)
        table = FindingsTable(console, team.exchange("hosts", socket.gethostname()))
        findings.append(
            Finding("processes", OK, f"all {team.count} are connected through {team.process_info.coordinator}")
        )
        context = CheckContext(run, team.count, team)
        findings += run_checks(TEAM_CHECKS, context)
        status = _report_all(context, table, findings, steps)
        team.finish()
    return status


def _report_all(context: CheckContext, table: FindingsTable, findings: list[Finding], steps: int | None) -> int:
    """Check the checkpoint to resume from, and print the findings of all processes, including `findings`.

    If none has failed, checks the devices, then makes a dry run unless that check has failed or `steps` is None. Prints
    a summary and returns the exit status.
    """
    team = context.team
    table.add(team.exchange("this host", [*findings, *run_checks([RESUME_CHECK], context)]))
    if not table.failed:
        devices, findings = _acquire_devices(context.run, team)
        table.add(team.exchange("devices", findings))
        if steps is not None and devices is not None and not table.failed:
            _dry_run(context.run, devices, steps, team, table)
    elif steps is not None:
        table.add([[Finding("dry run", WARNING, "skipped because of the failures above")]])
    return table.print_summary()


def _acquire_devices(run: Run, team: Team) -> tuple[Devices | None, list[Finding]]:
    """Start JAX and acquire the devices of the run. Returns (devices, findings).

    If the devices do not match the target, returns None in place of the devices, and a failure.
    """
    if isinstance(team, ConnectedTeam):
        start_jax(run.config.distributed, team.process_info)
    try:
        configure_jax(run)
        devices = acquire_devices(run, team)
    except ValueError as error:
        return None, [Finding("devices", FAILURE, str(error))]
    import jax

    share = f", {jax.local_device_count()} per process" if team.count > 1 else ""
    kind = devices.devices[0].device_kind
    prefix = "simulated " if devices.simulated else ""
    return devices, [Finding("devices", OK, f"{len(devices.devices)} x {prefix}{kind}{share}")]


def _dry_run(run: Run, devices: Devices, steps: int, team: Team, table: FindingsTable) -> None:
    from valkyrie.doctor.dry_run import dry_run

    try:
        for findings in dry_run(run, devices, steps, team):
            table.add(team.exchange("dry run", findings))
            if table.failed:
                return
    except ValueError as error:
        if team.count > 1:  # ends the other processes, which may wait for this one in a collective
            raise
        table.add([[Finding("dry run", FAILURE, str(error))]])
