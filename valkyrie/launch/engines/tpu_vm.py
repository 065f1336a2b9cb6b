"""Launch engine for slices of Cloud TPU VMs. Requests them with gcloud, trains, and replaces them after a preemption.

A preempted slice cannot be restarted: it is deleted and requested again. JAX finds the other hosts and slices itself.
The flags are documented at cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources and .../tpus/tpu-vm
(create, describe, ssh, scp, delete, list). For spot slices and preemption, see cloud.google.com/tpu/docs/spot and
/queued-resources.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.foreign_errors import first_lines
from valkyrie.launch import remote
from valkyrie.launch.engine import RentedConfig, disk_notes
from valkyrie.launch.gcloud import accelerator_type, has_usual_shape, resource_name, tpu_generation
from valkyrie.launch.plan import Command, CommandStep, Plan, flags, shell_text, step_error
from valkyrie.launch.supervisor import RESTARTS_VARIABLE, ProcessSpec, Supervisor, print_message

LOG_FILE = "launch.log"
"""Log file of a worker, in the folder of the code."""
_POLL_S = 30.0
"""Seconds between checks of the state of a slice."""
_STATE_ATTEMPTS = 20
"""Maximum number of attempts to read the state of a slice: ten minutes, for failures of the network."""
_COPY_ATTEMPTS = 3
"""Maximum number of attempts to copy the code to a slice.

The first attempt on a new slice does not count, because ssh may not be ready yet.
"""
_UNUSABLE_STATES = ("SUSPENDING", "SUSPENDED", "FAILED", "PREEMPTED", "TERMINATED", "STOPPED", "DELETING")
"""Final states: a slice in one of them never becomes ready again (REST references of QueuedResource and Node)."""


@dataclass(frozen=True, kw_only=True)
class Config(RentedConfig):
    """Keys of `target=tpu_vm`, and of a TPU slice as the target, such as `target=v4-64`.

    Args:
        project: Google Cloud project; empty for the default project.
        network: network of the VMs; empty for the default network.
        runtime: software version of the VMs; empty for the chip's default version.
        queued: whether to wait in the queue. If false, the request fails unless the slice is available immediately.
        folder: folder of the code on each worker: an absolute path, or a path relative to the home folder.
        slices: number of slices that train together.
    """

    project: str = ""
    network: str = ""
    runtime: str = ""
    queued: bool = True
    folder: str = "valkyrie"
    slices: int = 1

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        if problems := super().problems():
            return problems
        chip, problems = self.hardware_and_chip[1], remote.folder_problems(self.folder)
        if "tpu_vm_runtime" not in chip.rented_as:  # tpu7x: cloud.google.com/tpu/docs/queued-resources
            problems.append(
                f"{self.slice_setting}: {chip.name} is available only on GKE. Use target=gke slice={self.slice}."
            )
        if self.slices > 1 and not self.queued:
            problems.append(
                f"slices={self.slices} needs the queue, which allocates all slices together. Remove queued=false."
            )
        return problems

    def code_problems(self) -> list[str]:
        """Return an error message if the current folder has no code to copy."""
        return remote.code_problems(self.target)

    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the gcloud commands that rent the slice, train on it, monitor it and delete it."""
        restart_note = (
            "--run executes these steps. After a preemption it deletes the slice and restarts at step 1. After a crash "
            f"it restarts at step 6, up to {self.restarts} times"
        )
        tail = f"tail -n 100 -F {shell_text((f'{self.folder}/{LOG_FILE}',))}"
        node = ("--node=0",) if self.queued else ()
        follow_log = self._gcloud_command("ssh", self.resource, *node, "--worker=0", f"--command={tail}")
        return Plan(
            (*self.price_notes(), restart_note, *disk_notes(overrides), *remote.config_folder_notes(overrides)),
            (self.create_step(), self.state_step(), *self.copy_steps(), self.train_step(overrides)),
            (
                CommandStep("follow the log, from any machine", (follow_log,), action="logs"),
                self.describe_step(),
                CommandStep("list everything rented in the zone", (self._gcloud_command("list"),), action="list"),
                self.delete_step(),
            ),
        )

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Train on the slices, and return the exit status. Does not delete the slices afterwards.

        Restarts after a crash or preemption, as long as this process runs.
        """
        try:
            return self.supervisor(overrides).run()
        finally:
            print_message(
                f"{self.resource} may still be rented, which costs money. Delete it with: {self.delete_step().text()}"
            )

    @property
    def resource(self) -> str:
        """Resource name of the slices on Google Cloud."""
        return resource_name(self.name)

    @property
    def ready_state(self) -> str:
        """State of a slice that is ready for use, as Google Cloud names it."""
        return "ACTIVE" if self.queued else "READY"

    def create_step(self) -> CommandStep:
        """Return the step that requests the slices."""
        hardware, chip = self.hardware_and_chip
        runtime = self.runtime or chip.rented_as["tpu_vm_runtime"]
        if has_usual_shape(hardware):
            shape_flags = flags(accelerator_type=accelerator_type(hardware))
        else:
            shape_flags = flags(type=tpu_generation(hardware), topology=str(hardware.topology))
        if not self.queued:
            request = (*shape_flags, *flags(version=runtime))
        elif self.slices > 1:
            nodes = flags(node_count=str(self.slices), node_prefix=self.resource)
            request = (*nodes, *shape_flags, *flags(runtime_version=runtime))
        else:
            request = (*flags(node_id=self.resource), *shape_flags, *flags(runtime_version=runtime))
        network = flags(network=self.network, spot=self.spot)
        return CommandStep("request the slice", (self._gcloud_command("create", self.resource, *request, *network),))

    def state_step(self) -> CommandStep:
        """Return the step that prints the state of the slices. A printed plan repeats it until they are ready."""
        value = "value(state.state)" if self.queued else "value(state)"
        command = self._gcloud_command("describe", self.resource, f"--format={value}")
        return CommandStep("wait until it is ready", (command,), until=self.ready_state)

    def copy_steps(self) -> tuple[CommandStep, CommandStep, CommandStep]:
        """Return the steps that copy the code to every worker and install it there."""
        archive = f"{self.resource}.tar.gz"
        pack = (*remote.ARCHIVE_COMMAND, f"--output=/tmp/{archive}", "HEAD")
        setup = f"{remote.unpack_command(self.folder, archive)} && {remote.install_command(self.folder, 'tpu')}"
        copy = self._gcloud_command("scp", f"/tmp/{archive}", f"{self.resource}:", *self._worker_flags())
        return (
            CommandStep("pack the last commit", (pack,)),
            CommandStep("copy it to every worker", (copy,)),
            CommandStep("install it on every worker", (self._ssh_all_command(setup),)),
        )

    def train_step(self, overrides: Sequence[str], past_restarts: int = 0) -> CommandStep:
        """Return the step that trains on every worker. It exits with 0, or with the first nonzero status of a worker.

        `past_restarts` is the number of restarts so far.
        """
        environment = {RESTARTS_VARIABLE: str(past_restarts)} if past_restarts else {}
        return CommandStep(
            "train", (self._ssh_all_command(remote.train_command(self.folder, overrides, environment, LOG_FILE)),)
        )

    def signal_step(self, signum: int) -> CommandStep:
        """Return the step that sends a signal to the training process on every worker."""
        text = remote.signal_command((), signum, is_only_run=True)
        assert text is not None
        return CommandStep("stop the training", (self._ssh_all_command(text),))

    def describe_step(self) -> CommandStep:
        """Return the step that prints all details of the slices."""
        return CommandStep("show its state", (self._gcloud_command("describe", self.resource),), action="describe")

    def delete_step(self) -> CommandStep:
        """Return the step that deletes the slices and their disks."""
        command = self._gcloud_command("delete", self.resource, *flags(force=self.queued, quiet=True))
        return CommandStep("delete the slice, to stop paying for it", (command,), action="delete")

    def supervisor(self, overrides: Sequence[str]) -> Supervisor:
        """Return a supervisor that rents the slices, trains, restarts after a crash, and replaces preempted slices.

        If the slices are ready before the first start, it stops any training run on them: with SIGTERM, so that the run
        can save, and after `_POLL_S` with SIGKILL.
        """

        def is_preempted() -> bool:
            time.sleep(_POLL_S)  # a preempted slice keeps its old state for a moment
            return self._read_state() != self.ready_state

        def prepare(start_count: int) -> list[ProcessSpec]:
            if start_count == 0 and self._read_state(attempts=1) == self.ready_state:
                print_message(
                    f"{self.resource} is already rented: stopping any training run on it, which has {_POLL_S:g} s to "
                    "save"
                )
                send_signal(signal.SIGTERM)
                time.sleep(_POLL_S)
                send_signal(signal.SIGKILL)
            self._ensure_installed(has_code=start_count > 0)
            return [ProcessSpec(self.train_step(overrides, start_count).commands[0])]

        def send_signal(signum: int) -> None:
            remote.try_run(self.signal_step(signum))

        logs = self.log_folder(overrides)
        return Supervisor(
            prepare,
            self.restarts,
            logs,
            send_signal,
            clean_up=lambda: send_signal(signal.SIGKILL),
            is_preempted=is_preempted,
        )

    def _ensure_installed(self, has_code: bool) -> None:
        """Wait until the slices are ready, and copy the code to them if needed. Raises ValueError on failure.

        Requests preempted slices again. If `has_code`, the code is copied only to newly requested slices.
        """
        attempts = 0
        while (is_new_slice := self._ensure_ready()) or not has_code:
            has_code = False
            failed_step = next(
                ((step, status) for step in self.copy_steps() if (status := remote.run_verbose(step))), None
            )
            if failed_step is None:
                return
            attempts += not is_new_slice  # the first copy to a new slice does not count: ssh may not be ready yet
            if attempts == _COPY_ATTEMPTS:
                raise step_error(*failed_step)
            time.sleep(_POLL_S)

    def _ensure_ready(self) -> bool:
        """Request the slices if they are not rented, and wait until they are ready. Returns whether it requested them.

        Deletes slices in one of `_UNUSABLE_STATES` and requests them again. Raises ValueError if gcloud cannot delete
        or request them, or if Google Cloud does not allocate the slices that this call requested.
        """
        has_requested = False
        while (state := self._read_state()) != self.ready_state:
            if state == "FAILED" and has_requested:
                raise ValueError(
                    f"{self.resource} was not allocated. For the reason, run: {self.describe_step().text()}"
                )
            if state in _UNUSABLE_STATES:
                print_message(f"{self.resource} is {state}: deleting it and requesting a new one")
                remote.run_checked(self.delete_step())
                state = None
            if state is None:
                remote.run_checked(self.create_step())
                has_requested = True
            else:
                print_message(f"{self.resource} is {state}: waiting for {self.ready_state}")
                time.sleep(_POLL_S)
        return has_requested

    def _read_state(self, attempts: int = _STATE_ATTEMPTS) -> str | None:
        """Return the state of the slices, or None if they are not rented.

        Repeats a call of gcloud that fails for another reason, such as the network. Raises ValueError if it fails
        `attempts` times.
        """
        reason = ""
        for attempt in range(attempts):
            if attempt == 1:
                print_message(f"gcloud cannot read the state of {self.resource}, trying again: {reason}")
            if attempt > 0:
                time.sleep(_POLL_S)
            result = subprocess.run(self.state_step().commands[0], capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stdout.strip() or None
            if re.search("NOT_FOUND|not found", result.stderr):
                return None
            reason = first_lines(result.stderr) or f"status {result.returncode}"
        raise ValueError(f"gcloud cannot read the state of {self.resource}: {reason}")

    def _worker_flags(self) -> tuple[str, ...]:
        return ("--node=all", "--worker=all") if self.queued else ("--worker=all",)

    def _ssh_all_command(self, shell_command: str) -> Command:
        return self._gcloud_command("ssh", self.resource, *self._worker_flags(), f"--command={shell_command}")

    def _gcloud_command(self, verb: str, *arguments: str) -> Command:
        group = "queued-resources" if self.queued else "tpu-vm"
        location = flags(zone=self.zone, project=self.project)
        command_flag = [word for word in arguments if word.startswith("--command=")]  # long, so it is printed last
        other_arguments = [word for word in arguments if word not in command_flag]
        return ("gcloud", "compute", "tpus", group, verb, *other_arguments, *location, *command_flag)
