"""What `--run` does: the steps of a plan, and starting again after a crash where no scheduler does."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from valkyrie.launch.gcloud import Slices
from valkyrie.launch.local import Member, Supervisor, cluster, say
from valkyrie.launch.plan import Call, Plan, gave_up
from valkyrie.launch.ssh import Hosts

_POLL_S = 30.0
"""Seconds between two looks at a slice."""
_TRIES = 3
"""How often the code is copied to a slice that is there: the first ssh may come too soon."""
_ANSWER_S = 120.0
"""Seconds within which hosts end a training."""
_GONE = ("SUSPENDING", "SUSPENDED", "FAILED", "PREEMPTED", "TERMINATED", "STOPPED", "DELETING")
"""States in which a slice is of no use any more (REST references of QueuedResource and Node)."""


def run_steps(plan: Plan) -> int:
    """Run the steps of a plan in order and return the status of the first that fails, or 0."""
    for number, step in enumerate(plan.steps, 1):
        say(f"{number}. {step.about}")
        if status := step.run():
            return status
    return 0


def on_this_host(command: tuple[str, ...], processes: int, restarts: int, logs: Path) -> Supervisor:
    """Return what runs a training in processes of this machine."""
    return Supervisor(lambda starts: cluster(command, processes), restarts, logs)


def on_hosts(hosts: Hosts, logs: Path) -> Supervisor:
    """Return what runs a training on hosts that ssh reaches."""

    def members(starts: int) -> list[Member]:
        for step in hosts.copy() if starts == 0 else []:
            _must(step)
        return [Member(call.commands[0]) for call in hosts.train(starts)]

    def send(number: int) -> None:
        for call in hosts.end(number):
            _quietly(call)

    known = bool(hosts.end(signal.SIGKILL))
    return Supervisor(
        members,
        hosts.options.restarts,
        logs,
        send if known else None,
        clean_up=lambda: send(signal.SIGKILL),
    )


def on_slices(slices: Slices, logs: Path, sleep: Callable[[float], None] = time.sleep) -> Supervisor:
    """Return what rents slices, trains on them, and asks for new ones when they were taken away."""

    def lost() -> bool:
        sleep(_POLL_S)  # a slice is shown as it was for a moment
        return _state(slices) != slices.ready

    def members(starts: int) -> list[Member]:
        if starts == 0 and _state(slices) == slices.ready:
            say(f"{slices.name} is there: what may still train on it is stopped, with a save")
            _quietly(slices.end(signal.SIGTERM))
            sleep(_POLL_S)
            _quietly(slices.end(signal.SIGKILL))
        _prepare(slices, sleep, installed=starts > 0)
        return [Member(slices.train(starts).commands[0])]

    def send(number: int) -> None:
        _quietly(slices.end(number))

    restarts = slices.options.restarts
    return Supervisor(members, restarts, logs, send, clean_up=lambda: send(signal.SIGKILL), lost=lost)


def _prepare(slices: Slices, sleep: Callable[[float], None], installed: bool) -> None:
    """Return when the slices can be used and have the code; ValueError where they cannot be had or not be reached.

    A slice that is there and was trained on is taken as it is. One that is taken away meanwhile is asked for again.
    """
    tries = 0
    while (asked := _rent(slices, sleep)) or not installed:
        installed = False
        failed = next(((step, status) for step in slices.copy() if (status := _told(step))), None)
        if failed is None:
            return
        tries += 1 - asked
        if tries == _TRIES:
            raise gave_up(*failed)
        sleep(_POLL_S)


def _rent(slices: Slices, sleep: Callable[[float], None]) -> bool:
    """Return when the slices are there; whether they are new. ValueError where they cannot be had."""
    asked = False
    while (state := _state(slices)) != slices.ready:
        if state == "FAILED" and asked:
            raise ValueError(f"{slices.name} cannot be had; why: {slices.describe().text()}")
        if state in _GONE:
            say(f"{slices.name} is {state}: deleting it and asking for another")
            _must(slices.delete())
            state = None
        if state is None:
            _must(slices.create())
            asked = True
        else:
            say(f"{slices.name} is {state}: waiting for {slices.ready}")
            sleep(_POLL_S)
    return asked


def _state(slices: Slices) -> str | None:
    """Return the state of the slices; None where nothing of their name is rented."""
    asked = subprocess.run(slices.state().commands[0], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def _told(step: Call) -> int:
    """Say what is done, do it, and return its exit status."""
    say(f"{step.about}: {step.text()}")
    return step.run()


def _must(step: Call) -> None:
    if status := _told(step):
        raise gave_up(step, status)


def _quietly(step: Call) -> None:
    """Run what may fail: hosts that are gone have nothing left to end."""
    try:
        subprocess.run(step.commands[0], capture_output=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        say(f"no answer within {_ANSWER_S:g} s: {step.text()}")
