"""Base classes of launch engines, which define their `KEY=VALUE` arguments, their plans, and how `--run` works."""

from __future__ import annotations

import inspect
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from valkyrie.data.config import is_tokenizer_file, trained_tokenizer_path
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.hooks import is_exit_status, returns
from valkyrie.launch.plan import CommandStep, Plan, check_plan, list_items
from valkyrie.launch.supervisor import print_message
from valkyrie.runs.folder import key_values
from valkyrie.units import count_text

COORDINATOR_PORT = 8476
"""Default port of JAX's coordinator, as on Cloud TPU. Training runs with the same first host need different ports."""
_HOME_FOLDERS = (Path("/home"), Path("/Users"), Path("/root"))
"""Folders with the home folders of users, which are usually on a local disk."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ABC):
    """Base class of every engine's `Config`. An engine is a way to start a run, such as on a TPU slice or with Slurm.

    The fields of a subclass are the engine's keys on the command line of `valkyrie-launch`. A field must have a default
    and be a `str`, an `int` (at least 1), a `float` (above 0), a `bool` or a `tuple[str, ...]`.

    Args:
        target: name of the engine or of the slice, as in `target=NAME`.
        name: name of the run and of the resources rented for it.
        restarts: maximum number of restarts after crashes; the value of `--restarts`, not a key.
    """

    target: str
    name: str
    restarts: int = 3

    runs_immediately: ClassVar[bool] = False
    """Whether the training run starts without `--run`. The plan is then not printed."""

    @property
    def process_count(self) -> int:
        """Number of processes of the training run."""
        return 1

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        problems = [f"--restarts {self.restarts} is negative. Use 0 or more."] if self.restarts < 0 else []
        for key, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if not isinstance(value, str):
                continue
            if key == "name" and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value):
                problems.append(
                    f"name={value} is not valid. Use letters, digits, dots, - and _, and start with a letter or digit."
                )
            elif re.search(r"[\x00-\x1f\x7f]", value) or value.startswith("-"):
                problems.append(f"{key}={value!r} must be a single line that does not start with a dash.")
            elif re.search(r"\s", value) and key != "folder":
                problems.append(f"{key}={value!r} contains spaces. Remove them.")
        return problems

    def code_problems(self) -> list[str]:
        """Return an error message if the engine copies the current folder to the hosts, and that has no code."""
        return []

    @abstractmethod
    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the steps that start a training run with these arguments of `valkyrie-train`."""

    def checked_plan(self, overrides: Sequence[str]) -> Plan:
        """Return `plan(overrides)`. Raises ValueError, with the path of the engine's file, if the plan is not valid."""
        return check_plan(self.plan(overrides), f"target={self.target}: plan() of {inspect.getfile(type(self))}")

    @returns("an exit status from 0 to 255", is_exit_status)
    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Execute the plan for `--run`. Returns the exit status of the first step that fails, or 0.

        Raises ValueError if a step has `until` or `in_background`. Engines with such steps override this method.

        Args:
            overrides: the arguments of `valkyrie-train`.
            command: the command that starts `valkyrie-train` on this machine. Only overriding methods use it.
        """
        steps = self.checked_plan(overrides).steps
        for step in steps:
            if isinstance(step, CommandStep) and (step.until or step.in_background):
                raise ValueError(
                    f"target={self.target}: the step '{step.description}' sets until or in_background, which --run "
                    "does not support. Override `run` in the engine's Config."
                )
        for number, step in enumerate(steps, 1):
            print_message(f"{number}. {step.description}")
            if status := step.run():
                print_message(f"step {number} ({step.description}) failed with status {status}")
                return status
        print_message(f"{count_text(len(steps), 'step')} done")
        return 0

    def log_folder(self, overrides: Sequence[str]) -> Path:
        """Return the folder for the logs of supervised workers; the leader writes to the terminal."""
        return Path(key_values(overrides).get("runs", "runs")) / f"{self.name}.launch"


@dataclass(frozen=True, kw_only=True)
class SliceConfig(EngineConfig):
    """Base of engines that train on a slice of TPUs or GPUs.

    Args:
        slice: the hardware, such as `v5e-8` or `h100-16`.
        hours: planned duration in hours, to estimate the cost; 0 if unknown. Slurm also limits the job to this time.
        usd_per_hour: list price of a chip, in USD per hour; 0 for the price in `conf/target/chip`.
        spot_usd_per_hour: spot price of a chip, in USD per hour; 0 for the price in `conf/target/chip`.
    """

    slice: str = ""
    hours: float = 0.0
    usd_per_hour: float = 0.0
    spot_usd_per_hour: float = 0.0

    # Defaults without annotations, so they are not keys. Engines that support them redeclare them as fields.
    slices = 1
    spot = False

    @property
    def hardware(self) -> TargetConfig | None:
        """The slice, or None if `slice` is empty. Raises ValueError for an unknown name."""
        return parse_target(self.slice) if self.slice else None

    @property
    def full_target(self) -> TargetConfig | None:
        """The target of the training run: `hardware` with the number of slices set. None if `slice` is empty."""
        hardware = self.hardware
        return None if hardware is None else replace(hardware, slices=self.slices)

    @property
    def process_count(self) -> int:
        """Number of processes of the training run: one per host of the slices."""
        hardware = self.hardware
        return 1 if hardware is None else hardware.hosts * self.slices

    @property
    def slice_setting(self) -> str:
        """The setting that names the slice, for messages: `target=v4-64` or `slice=v4-64`."""
        return f"target={self.target}" if self.target == self.slice else f"slice={self.slice}"

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        try:
            hardware = self.hardware
        except ValueError as error:
            return [*super().problems(), str(error)]
        problems = super().problems()
        if hardware is not None and hardware.chip is None:
            problems.append(
                f"slice={self.slice} does not name a chip. Use a slice such as slice=v5e-8 or slice=h100-8."
            )
        return problems

    def price_notes(self) -> tuple[str, ...]:
        """Return a note with the hardware and one with its cost. Empty if the hardware or its size is unknown."""
        hardware = self.hardware
        if hardware is None or hardware.chip is None or hardware.chips is None:
            return ()
        chip, chips, hours = hardware.chip, hardware.chips * self.slices, self.hours
        parts = []
        for kind, key in (("list", "usd_per_hour"), ("spot", "spot_usd_per_hour")):
            price = getattr(self, key) or getattr(chip, key)
            if price is None:
                parts.append(f"{kind} price unknown (set {key}=)")
                continue
            hourly_text = f"${chips * price:,.2f} per hour"
            hours_text = f"{hours:g} hour{'s' * (hours != 1)}"
            total = f"${chips * price * hours:,.2f} for {hours_text} ({hourly_text})" if hours else hourly_text
            parts.append(f"{total} at the {kind} price of ${price:.2f} per chip-hour")
        count = f"{self.slices} slices of " if self.slices > 1 else ""
        return (
            f"{self.name} on {count}{hardware.describe()}",
            f"cost of {count_text(chips, f'{chip.name} chip')}: {', '.join(parts[::-1] if self.spot else parts)}",
        )


@dataclass(frozen=True, kw_only=True)
class RentedConfig(SliceConfig):
    """Base of engines that rent their slice from a cloud.

    Args:
        zone: zone of the cloud; empty for the default zone.
        spot: whether to rent at the spot price. Spot slices can be preempted.
    """

    zone: str = ""
    spot: bool = False

    @property
    def hardware_and_chip(self) -> tuple[TargetConfig, ChipConfig]:
        """The slice and its chip. Call `problems` first, which checks that both exist."""
        hardware = self.hardware
        assert hardware is not None and hardware.chip is not None
        return hardware, hardware.chip

    def problems(self) -> list[str]:
        """Return an error message for each invalid key."""
        missing_slice = [] if self.slice else [f"target={self.target} needs a slice, such as slice=v5e-8."]
        return [*super().problems(), *missing_slice]


def is_single_training(overrides: Sequence[str]) -> bool:
    """Return whether arguments of `valkyrie-train` start one training run, as opposed to another mode or a sweep."""
    return key_values(overrides).get("mode", "train") == "train" and not {"-m", "--multirun"} & {*overrides}


def add_name(overrides: Sequence[str], name: str) -> tuple[tuple[str, ...], bool]:
    """Add `name=` to the arguments of a single training run, so that a restart resumes it.

    Adds nothing if `name=` or `resume=` is set, or for another mode or a sweep. Returns the arguments, and whether
    `name=` was added.
    """
    if not is_single_training(overrides) or key_values(overrides).keys() & {"name", "resume"}:
        return tuple(overrides), False
    return (*overrides, f"name={name}"), True


def disk_notes(
    overrides: Sequence[str],
    *,
    files: str = "the files of the last commit",
    risk: str | None = "are deleted with the machines",
    certainty: str = "",
) -> tuple[str, ...]:
    """Return warnings if a training run reads its data or saves its checkpoints on a local disk of each machine.

    Args:
        overrides: the arguments of `valkyrie-train`.
        files: the files that the engine copies to such a disk.
        risk: what happens to checkpoints on such a disk, or None if nothing does. The warning has this text after the
            word "checkpoints".
        certainty: `"probably "` if the folders of such a disk, such as home folders, may be on a shared disk.
    """
    values, notes = key_values(overrides), []
    tokenizer = values.get("data.tokenizer", "null").strip("'\"")
    local_paths = {
        **{
            key: [path for path in list_items(values.get(key, "")) if _is_local(path)]
            for key in ("data.paths", "data.val_paths")
        },
        "data.tokenizer": [tokenizer] if is_tokenizer_file(tokenizer) and _is_local(tokenizer) else [],
    }
    notes += [
        f"{key}={','.join(paths)} is {certainty}read from the disk of each machine, which only has {files}. "
        f"Use {'gs://BUCKET/..., or ' if key != 'data.tokenizer' else ''}a disk that all hosts mount."
        for key, paths in local_paths.items()
        if paths
    ]
    if "/" not in tokenizer and (file := trained_tokenizer_path(tokenizer)).is_file():
        notes.append(
            f"data.tokenizer={tokenizer} was trained on this machine, and the others do not have it. Copy {file} to a "
            "disk that all hosts mount, and set data.tokenizer to its path there."
        )
    key = "runs" if values.get("checkpoint.folder", "null") == "null" else "checkpoint.folder"
    folder = values.get(key, "runs")
    if risk is not None and overrides and is_single_training(overrides) and _is_local(folder):
        notes.append(
            f"{key}={folder} is {certainty}on the local disk of each machine: checkpoints {risk}. Set {key}=DIR to a "
            "folder on a disk that all hosts mount (NFS, Filestore), or set checkpoint.folder=gs://BUCKET/DIR."
        )
    return tuple(notes)


def _is_local(path: str) -> bool:
    """Return whether a path is on the local disk of one machine: a relative path, or one in a home or temp folder.

    URLs are not local. Other absolute paths may be on a shared disk.
    """
    local_folders = (*_HOME_FOLDERS, Path.home(), Path(tempfile.gettempdir()))
    may_be_shared = Path(path).is_absolute() and not any(map(Path(path).is_relative_to, local_folders))
    return not may_be_shared and "://" not in path
