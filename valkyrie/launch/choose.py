"""The plan of a target: what to run, in which order, what it costs, and what to know before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from valkyrie.launch import gcloud
from valkyrie.launch.cost import cost
from valkyrie.launch.gke import gke
from valkyrie.launch.options import Options
from valkyrie.launch.overrides import checkpoints_elsewhere, runs_in, trains
from valkyrie.launch.plan import Call, Plan
from valkyrie.launch.skypilot import skypilot
from valkyrie.launch.slurm import slurm
from valkyrie.launch.ssh import Hosts


def plan(options: Options, overrides: Sequence[str]) -> Plan:
    """Return the plan by which a training with these arguments runs; ValueError for what cannot be."""
    engines = {"host": _host, "ssh": _ssh, "slurm": slurm, "gke": gke, "skypilot": skypilot}
    made = engines.get(options.target, _slices)(options, tuple(overrides))
    return replace(made, notes=(*_about(options), *made.notes, *_lost(options, overrides)))


def action(options: Options, word: str) -> Call:
    """Return the one command that `logs`, `describe`, `list` or `delete` stands for; ValueError where there is none."""
    calls = [step for step in plan(options, ()).later if isinstance(step, Call) and step.action]
    named = {call.action: call for call in calls}
    if word not in named:
        there = f"There {'is' if len(named) == 1 else 'are'} {', '.join(named)}." if named else ""
        raise ValueError(f"{word}: target={options.target} has nothing of the kind. {there}".strip())
    return named[word]


def _host(options: Options, overrides: tuple[str, ...]) -> Plan:
    return Plan((), (Call("train", (("valkyrie-train", *overrides),)),))


def _ssh(options: Options, overrides: tuple[str, ...]) -> Plan:
    hosts = Hosts(options, overrides)
    again = f"--run runs this, ends all when one fails and starts all again, up to {options.restarts} times"
    return Plan((again,), (*hosts.copy(), *hosts.train()))


def _slices(options: Options, overrides: tuple[str, ...]) -> Plan:
    gcloud.check(options, overrides)
    slices = gcloud.Slices(options, overrides)
    again = (
        "--run runs this; after a preemption it deletes the slice and begins at 1 again, after a crash at 6, up to "
        f"{options.restarts} times"
    )
    steps = (slices.create(), slices.state(), *slices.copy(), slices.train())
    return Plan((again,), steps, (slices.logs(), slices.describe(), slices.list(), slices.delete()))


def _about(options: Options) -> list[str]:
    hardware = options.hardware
    if hardware is None:
        return []
    several = f"{options.slices} slices of " if options.slices > 1 else ""
    return [f"{options.name} on {several}{hardware.describe()}", cost(options)]


def _lost(options: Options, overrides: Sequence[str]) -> list[str]:
    """Return what to change where the checkpoints would be lost with the disks that they lie on."""
    own_disk = options.target not in ("local", "host", "slurm") and not Path(runs_in(overrides)).is_absolute()
    if not own_disk or not trains(overrides) or not overrides or checkpoints_elsewhere(overrides):
        return []
    runs = runs_in(overrides)
    goes = "are not seen by the other hosts" if options.target == "ssh" else "go with the machines"
    return [
        f"runs={runs} lies on each machine's own disk: checkpoints {goes}. Write runs=DIR with a folder of a disk that "
        "all hosts mount (NFS, Filestore), or checkpoint.folder=gs://BUCKET/DIR."
    ]
