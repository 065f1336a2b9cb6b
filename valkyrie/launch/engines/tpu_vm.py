"""Slices of Cloud TPU VMs: requests them with gcloud, trains, and requests new ones after a preemption.

Flags: cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources and .../tpus/tpu-vm (create, describe, ssh,
scp, delete, list); spot and preemption: cloud.google.com/tpu/docs/spot and /queued-resources. A preempted slice cannot
be restarted: it is deleted and requested again. JAX discovers the other hosts and slices by itself.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.launch import remote
from valkyrie.launch.engine import RentedConfig, disk_notes
from valkyrie.launch.gcloud import accelerator, accelerator_type, has_usual_shape, resource_name
from valkyrie.launch.plan import Call, Command, Plan, flags, gave_up
from valkyrie.launch.supervisor import RESTARTS, Member, Supervisor, say

LOG = "launch.log"
"""Name of a worker's log, in the folder of the code."""
_POLL_S = 30.0
"""Seconds between two checks of a slice's state."""
_TRIES = 3
"""Attempts to copy the code to a slice that is ready. The first may fail because ssh is not up yet."""
_GONE = ("SUSPENDING", "SUSPENDED", "FAILED", "PREEMPTED", "TERMINATED", "STOPPED", "DELETING")
"""States of a slice that cannot be used again (REST references of QueuedResource and Node)."""


@dataclass(frozen=True, kw_only=True)
class Config(RentedConfig):
    """Keys of a slice of TPU VMs, `target=v4-64`.

    Args:
        project: project of Google Cloud; empty for the default one.
        network: network of the VMs; empty for the default one.
        runtime: software version of the VMs; empty for the default of the chip.
        queued: whether to wait in the queue. If false, the request fails unless the slice is available at once.
        folder: folder of the code on each worker, relative to the home folder.
        slices: number of slices that train together.
    """

    project: str = ""
    network: str = ""
    runtime: str = ""
    queued: bool = True
    folder: str = "valkyrie"
    slices: int = 1

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        if problems := super().problems():
            return problems
        chip, problems = self.rented[1], remote.folder_problems(self.folder)
        if "tpu_vm_runtime" not in chip.rented_as:  # tpu7x: cloud.google.com/tpu/docs/queued-resources
            problems.append(f"{self.where}: {chip.name} is rented by GKE alone. Write target=gke slice={self.slice}.")
        if self.slices > 1 and not self.queued:
            problems.append(f"slices={self.slices} needs the queue, which gives all at once. Leave queued=false out.")
        return problems

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the gcloud commands that rent the slice, train on it, monitor it and delete it."""
        again = (
            "--run runs this; after a preemption it deletes the slice and begins at 1 again, after a crash at 6, up to "
            f"{self.restarts} times"
        )
        log = f"tail -n 100 -F {remote.join((f'{self.folder}/{LOG}',))}"
        node = ("--node=0",) if self.queued else ()
        follow = self._gcloud("ssh", self.resource, *node, "--worker=0", f"--command={log}")
        return Plan(
            (*self.price_notes(), again, *disk_notes(overrides)),
            (self.create(), self.state(), *self.copy(), self.train(overrides)),
            (
                Call("what it prints, from any machine", (follow,), action="logs"),
                self.describe(),
                Call("all that is rented in the zone", (self._gcloud("list"),), action="list"),
                self.delete(),
            ),
        )

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Train under the supervision of this machine. The slice stays rented."""
        remote.check_clone()
        try:
            return self.supervisor(overrides).run()
        finally:
            say(f"{self.resource} is rented until it is given back: {self.delete().text()}")

    @property
    def resource(self) -> str:
        """Name of the slices at Google Cloud."""
        return resource_name(self.name)

    @property
    def ready(self) -> str:
        """State of slices that are ready to use."""
        return "ACTIVE" if self.queued else "READY"

    def create(self) -> Call:
        """Return the step that requests the slices."""
        hardware, chip = self.rented
        runtime = self.runtime or chip.rented_as["tpu_vm_runtime"]
        if has_usual_shape(hardware):
            kind = flags(accelerator_type=accelerator(hardware))
        else:
            kind = flags(type=accelerator_type(hardware), topology=str(hardware.topology))
        if not self.queued:
            request = (*kind, *flags(version=runtime))
        elif self.slices > 1:
            nodes = flags(node_count=str(self.slices), node_prefix=self.resource)
            request = (*nodes, *kind, *flags(runtime_version=runtime))
        else:
            request = (*flags(node_id=self.resource), *kind, *flags(runtime_version=runtime))
        network = flags(network=self.network, spot=self.spot)
        return Call("ask for the slice", (self._gcloud("create", self.resource, *request, *network),))

    def state(self) -> Call:
        """Return the step that prints the state of the request, repeated until the slices are ready."""
        value = "value(state.state)" if self.queued else "value(state)"
        command = self._gcloud("describe", self.resource, f"--format={value}")
        return Call("wait until it is there", (command,), until=self.ready)

    def copy(self) -> tuple[Call, Call, Call]:
        """Return the steps that copy the code to every worker and install it there."""
        archive = f"{self.resource}.tar.gz"
        pack = (*remote.ARCHIVE, f"--output=/tmp/{archive}", "HEAD")
        setup = f"{remote.unpack(self.folder, archive)} && {remote.install(self.folder, 'tpu')}"
        copied = self._gcloud("scp", f"/tmp/{archive}", f"{self.resource}:", *self._all())
        return (
            Call("pack the last commit", (pack,)),
            Call("copy it to every worker", (copied,)),
            Call("install it there", (self._on_all(setup),)),
        )

    def train(self, overrides: Sequence[str], restarts: int = 0) -> Call:
        """Return the step that trains on every worker. It exits with the first status of a worker that is not 0."""
        environment = {RESTARTS: str(restarts)} if restarts else {}
        return Call("train", (self._on_all(remote.train(self.folder, overrides, environment, LOG)),))

    def end(self, number: int) -> Call:
        """Return the step that sends a signal to the training on every worker."""
        text = remote.end((), number, alone=True)
        assert text is not None
        return Call("stop the training, with a save", (self._on_all(text),))

    def describe(self) -> Call:
        """Return the step that prints all details of the slices."""
        return Call("its state", (self._gcloud("describe", self.resource),), action="describe")

    def delete(self) -> Call:
        """Return the step that deletes the slices and their disks."""
        command = self._gcloud("delete", self.resource, *flags(force=self.queued, quiet=True))
        return Call("give it back: until then it costs", (command,), action="delete")

    def supervisor(self, overrides: Sequence[str]) -> Supervisor:
        """Return the supervisor that rents the slices, trains, and requests new slices after a preemption."""

        def lost() -> bool:
            time.sleep(_POLL_S)  # for a moment a preempted slice still shows its old state
            return self._state() != self.ready

        def members(starts: int) -> list[Member]:
            if starts == 0 and self._state() == self.ready:
                say(f"{self.resource} is there: what may still train on it is stopped, with a save")
                send(signal.SIGTERM)
                time.sleep(_POLL_S)
                send(signal.SIGKILL)
            self._prepare(installed=starts > 0)
            return [Member(self.train(overrides, starts).commands[0])]

        def send(number: int) -> None:
            remote.quietly(self.end(number))

        logs = self.log_folder(overrides)
        return Supervisor(members, self.restarts, logs, send, clean_up=lambda: send(signal.SIGKILL), lost=lost)

    def _prepare(self, installed: bool) -> None:
        """Wait until the slices are ready and have the code; ValueError if that fails.

        If `installed`, slices that are still ready already have the code. Preempted slices are requested again.
        """
        tries = 0
        while (new := self._rent()) or not installed:
            installed = False
            failed = next(((step, status) for step in self.copy() if (status := remote.loudly(step))), None)
            if failed is None:
                return
            tries += 1 - new
            if tries == _TRIES:
                raise gave_up(*failed)
            time.sleep(_POLL_S)

    def _rent(self) -> bool:
        """Rent the slices if needed and wait until they are ready; ValueError if they are not available.

        Returns whether they were requested by this call.
        """
        requested = False
        while (state := self._state()) != self.ready:
            if state == "FAILED" and requested:
                raise ValueError(f"{self.resource} cannot be had; why: {self.describe().text()}")
            if state in _GONE:
                say(f"{self.resource} is {state}: deleting it and asking for another")
                remote.must(self.delete())
                state = None
            if state is None:
                remote.must(self.create())
                requested = True
            else:
                say(f"{self.resource} is {state}: waiting for {self.ready}")
                time.sleep(_POLL_S)
        return requested

    def _state(self) -> str | None:
        """Return the state of the slices, or None if no slices with their name are rented."""
        done = subprocess.run(self.state().commands[0], capture_output=True, text=True, check=False)
        return done.stdout.strip() or None if done.returncode == 0 else None

    def _all(self) -> tuple[str, ...]:
        return ("--node=all", "--worker=all") if self.queued else ("--worker=all",)

    def _on_all(self, text: str) -> Command:
        return self._gcloud("ssh", self.resource, *self._all(), f"--command={text}")

    def _gcloud(self, verb: str, *arguments: str) -> Command:
        group = "queued-resources" if self.queued else "tpu-vm"
        where = flags(zone=self.zone, project=self.project)
        command = [word for word in arguments if word.startswith("--command=")]
        return ("gcloud", "compute", "tpus", group, verb, *(w for w in arguments if w not in command), *where, *command)
