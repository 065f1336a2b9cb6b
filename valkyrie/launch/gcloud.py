"""Slices of Cloud TPU VMs: the gcloud commands that ask for one, train on it, look at it and give it back.

Flags: cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources and .../tpus/tpu-vm (create, describe, ssh,
scp, delete, list); spot and preemption: cloud.google.com/tpu/docs/spot and /queued-resources. A preempted slice cannot
be started again: it is deleted and asked for anew. JAX finds the other hosts and slices by itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.hardware.target import TargetConfig
from valkyrie.launch import remote
from valkyrie.launch.local import RESTARTS
from valkyrie.launch.options import Options
from valkyrie.launch.plan import Call, Command

LOG = "launch.log"
"""The log of a worker in the folder of the code."""


def accelerator(target: TargetConfig) -> str:
    """Return the AcceleratorType that Google Cloud calls a slice of the usual shape: `v4-64`, `v5litepod-8`."""
    assert target.chip is not None
    return _type(target) + target.name.removeprefix(target.chip.name)


def resource_name(name: str) -> str:
    """Return a name as Google Cloud and Kubernetes take it: small letters, digits and dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].rstrip("-")


@dataclass(frozen=True)
class Slices:
    """One slice, or several of one kind, that this run rents, and every command about them."""

    options: Options
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Under which they are rented."""
        return resource_name(self.options.name)

    def create(self) -> Call:
        """Ask for them: `queued=true` waits in the queue for them, `queued=false` takes them now or fails."""
        options, hardware = self.options, self._hardware
        assert hardware.chip is not None
        runtime = options.runtime or hardware.chip.rented_as["tpu_vm_runtime"]
        if hardware.name.rpartition("-")[2].isdecimal():
            kind = (f"--accelerator-type={accelerator(hardware)}",)
        else:
            kind = (f"--type={_type(hardware)}", f"--topology={hardware.topology}")
        if options.queued:
            nodes = (f"--node-count={options.slices}", f"--node-prefix={self.name}")
            which = nodes if options.slices > 1 else (f"--node-id={self.name}",)
            which = (*which, *kind, f"--runtime-version={runtime}")
        else:
            which = (*kind, f"--version={runtime}")
        network = (f"--network={options.network}",) if options.network else ()
        spot = ("--spot",) if options.spot else ()
        return Call("ask for the slice", (self._gcloud("create", self.name, *which, *network, *spot),))

    def state(self) -> Call:
        """Print the state of what was asked for."""
        value = "value(state.state)" if self.options.queued else "value(state)"
        command = self._gcloud("describe", self.name, f"--format={value}")
        return Call("wait until it is there", (command,), until=self.ready)

    @property
    def ready(self) -> str:
        """The state in which it can be used."""
        return "ACTIVE" if self.options.queued else "READY"

    def copy(self) -> tuple[Call, Call, Call]:
        """Copy the code to every worker and install it there."""
        archive = f"{self.name}.tar.gz"
        pack = (*remote.ARCHIVE, f"--output=/tmp/{archive}", "HEAD")
        setup = f"{remote.unpack(self.options.folder, archive)} && {remote.install(self.options.folder, 'tpu')}"
        return (
            Call("pack the last commit", (pack,)),
            Call("copy it to every worker", (self._gcloud("scp", f"/tmp/{archive}", f"{self.name}:", *self._all()),)),
            Call("install it there", (self._on_all(setup),)),
        )

    def train(self, restarts: int = 0) -> Call:
        """Train on every worker; the exit status is that of the first worker whose status is not 0."""
        environment = {RESTARTS: str(restarts)} if restarts else {}
        text = remote.train(self.options.folder, self.overrides, environment, LOG)
        return Call("train", (self._on_all(text),))

    def end(self, number: int = signal.SIGKILL) -> Call:
        """Send a signal to the training on every worker."""
        text = remote.end(self.overrides, number, alone=True)
        assert text is not None
        return Call("stop the training, with a save", (self._on_all(text),))

    def logs(self) -> Call:
        """Follow what the first worker prints."""
        tail = f"tail -n 100 -F {remote.join((f'{self.options.folder}/{LOG}',))}"
        node = ("--node=0",) if self.options.queued else ()
        command = self._gcloud("ssh", self.name, *node, "--worker=0", f"--command={tail}")
        return Call("what it prints, from any machine", (command,), action="logs")

    def describe(self) -> Call:
        """Show everything about them."""
        return Call("its state", (self._gcloud("describe", self.name),), action="describe")

    def list(self) -> Call:
        """Show all that is rented in the zone."""
        return Call("all that is rented in the zone", (self._gcloud("list"),), action="list")

    def delete(self) -> Call:
        """Give them back, with all that lies on their disks."""
        force = ("--force",) if self.options.queued else ()
        command = self._gcloud("delete", self.name, *force, "--quiet")
        return Call("give it back: until then it costs", (command,), action="delete")

    @property
    def _hardware(self) -> TargetConfig:
        hardware = self.options.hardware
        assert hardware is not None
        return hardware

    def _all(self) -> tuple[str, ...]:
        return ("--node=all", "--worker=all") if self.options.queued else ("--worker=all",)

    def _on_all(self, text: str) -> Command:
        return self._gcloud("ssh", self.name, *self._all(), f"--command={text}")

    def _gcloud(self, verb: str, *arguments: str) -> Command:
        group = "queued-resources" if self.options.queued else "tpu-vm"
        where = {"zone": self.options.zone, "project": self.options.project}
        flags = [f"--{key}={value}" for key, value in where.items() if value]
        command = [word for word in arguments if word.startswith("--command=")]
        return ("gcloud", "compute", "tpus", group, verb, *(w for w in arguments if w not in command), *flags, *command)


def check(options: Options, overrides: Sequence[str]) -> None:
    """Raise ValueError for what Cloud TPU VMs do not have."""
    hardware = options.hardware
    chip = None if hardware is None else hardware.chip
    if chip is None or "tpu_vm_runtime" not in chip.rented_as:  # tpu7x: cloud.google.com/tpu/docs/queued-resources
        raise ValueError(
            f"target={options.target}: {chip.name if chip else ''} is rented by GKE alone. Write target=gke "
            f"slice={options.target}."
        )
    if options.slices > 1 and not options.queued:
        raise ValueError(f"slices={options.slices} needs the queue, which gives all at once. Leave queued=false out.")


def _type(target: TargetConfig) -> str:
    assert target.chip is not None
    return target.chip.rented_as.get("tpu_vm_type", target.chip.name)
