"""Base classes of launch engines: the keys of their `KEY=VALUE` words, their plans, and what `--run` does."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from valkyrie.hardware.names import parse_target
from valkyrie.hardware.target import ChipConfig, TargetConfig
from valkyrie.launch.plan import Plan
from valkyrie.launch.supervisor import say
from valkyrie.runs.folder import key_values

PORT = 8476
"""Port of JAX's coordinator on a host that runs one training: the port that JAX uses on Cloud TPU."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ABC):
    """Base of every engine's `Config`. The fields of a subclass are the keys that the engine takes.

    A key is a `str`, an `int` (at least 1), a `float` (above 0), a `bool` or a `tuple[str, ...]`, and has a default.

    Args:
        target: the value of `target=`.
        name: name of the run and of the resources rented for it.
        restarts: number of restarts after crashes.
    """

    target: str
    name: str
    restarts: int = 3

    runs_at_once: ClassVar[bool] = False
    """Whether the engine runs without `--run`, and so prints no plan."""

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched, each with the key to change."""
        problems = [f"--restarts {self.restarts}: write 0 or more."] if self.restarts < 0 else []
        for key, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if not isinstance(value, str):
                continue
            if key == "name" and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value):
                problems.append(f"name={value}: write letters, digits, - and _.")
            elif re.search(r"[\x00-\x1f\x7f]", value) or value.startswith("-"):
                problems.append(f"{key}={value!r}: a name starts with no dash and is one line.")
            elif re.search(r"\s", value) and key != "folder":
                problems.append(f"{key}={value!r}: a name has no blanks.")
        return problems

    def mesh_problems(self, name: str, size: int) -> list[str]:
        """Return the reasons why the hardware cannot run a mesh with this name and `size` devices."""
        return []

    @abstractmethod
    def plan(self, overrides: Sequence[str]) -> Plan:
        """Return the plan that trains with these arguments of `valkyrie-train`."""

    def run(self, overrides: Sequence[str], command: Sequence[str]) -> int:
        """Execute the plan, as `--run` does, and return the exit status of the first step that fails, or 0.

        Args:
            overrides: the arguments of `valkyrie-train`.
            command: starts `valkyrie-train` on this machine.
        """
        for number, step in enumerate(self.plan(overrides).steps, 1):
            say(f"{number}. {step.about}")
            if status := step.run():
                return status
        return 0

    def log_folder(self, overrides: Sequence[str]) -> Path:
        """Folder for the output of all supervised processes but the first."""
        return Path(key_values(overrides).get("runs", "runs")) / f"{self.name}.launch"


@dataclass(frozen=True, kw_only=True)
class SliceConfig(EngineConfig):
    """An engine that trains on a slice: TPUs or GPUs with a known price.

    Args:
        slice: the hardware, such as `v5e-8` or `h100-16`.
        hours: planned duration, for the price.
        usd_per_hour: list price of a chip; overrides the one in `conf/target/chip`.
        spot_usd_per_hour: spot price of a chip; overrides the one in `conf/target/chip`.
    """

    slice: str = ""
    hours: float = 0.0
    usd_per_hour: float = 0.0
    spot_usd_per_hour: float = 0.0

    slices = 1  # subclasses that join several slices or rent at spot prices turn these into keys
    spot = False

    @property
    def hardware(self) -> TargetConfig | None:
        """The slice, or None if none is named. Raises ValueError with the available slices for an unknown name."""
        return parse_target(self.slice) if self.slice else None

    @property
    def where(self) -> str:
        """The key and value that name the slice, for messages."""
        return f"target={self.target}" if self.target == self.slice else f"slice={self.slice}"

    def mesh_problems(self, name: str, size: int) -> list[str]:
        """Return the reasons why the slices cannot run a mesh with this name and `size` devices."""
        hardware = self.hardware
        devices = None if hardware is None or hardware.devices is None else hardware.devices * self.slices
        if devices in (None, size):
            return []
        where = f"{self.where} slices={self.slices}" if self.slices > 1 else self.where
        return [
            f"mesh={name} has {size} device{'s' * (size > 1)}, {where} has {devices}. Write a mesh= whose sizes "
            f"multiply to {devices}, or another slice."
        ]

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        try:
            hardware = self.hardware
        except ValueError as error:
            return [*super().problems(), str(error)]
        chipless = hardware is not None and hardware.chip is None
        wrong = [f"slice={self.slice} names no chip: write slice=v5e-8 or slice=h100-8."] if chipless else []
        return [*super().problems(), *wrong]

    def price_notes(self) -> tuple[str, ...]:
        """Return notes for a plan: the hardware, and its cost at list and spot prices. Never guesses a price."""
        hardware = self.hardware
        if hardware is None or hardware.chip is None or hardware.chips is None:
            return ()
        chip, chips, hours = hardware.chip, hardware.chips * self.slices, self.hours
        parts = []
        for kind, key in (("list", "usd_per_hour"), ("spot", "spot_usd_per_hour")):
            price = getattr(self, key) or getattr(chip, key)
            if price is None:
                parts.append(f"{kind} price not known here ({key}= of a chip sets it)")
                continue
            hourly = f"${chips * price:,.2f} an hour"
            total = f"${chips * price * hours:,.2f} for {hours:g} hours ({hourly})" if hours else hourly
            parts.append(f"{total} at the {kind} price of ${price:.2f} a chip")
        several = f"{self.slices} slices of " if self.slices > 1 else ""
        return (
            f"{self.name} on {several}{hardware.describe()}",
            f"cost of {chips} {chip.name} chip{'s' * (chips > 1)}: {'; '.join(parts[::-1] if self.spot else parts)}",
        )


@dataclass(frozen=True, kw_only=True)
class RentedConfig(SliceConfig):
    """An engine that rents its slice from a cloud.

    Args:
        zone: zone of the cloud; empty for the default one.
        spot: whether to rent at the spot price, which can be preempted.
    """

    zone: str = ""
    spot: bool = False

    @property
    def rented(self) -> tuple[TargetConfig, ChipConfig]:
        """The slice and its chip. Call `problems` first, which checks that both exist."""
        hardware = self.hardware
        assert hardware is not None and hardware.chip is not None
        return hardware, hardware.chip

    def problems(self) -> list[str]:
        """Return the reasons why nothing can be launched."""
        missing = [] if self.slice else [f"target={self.target} needs the slice: write slice=v5e-8."]
        return [*super().problems(), *missing]


def trains(overrides: Sequence[str]) -> bool:
    """Return whether arguments of `valkyrie-train` start a single training, not another mode or a sweep."""
    return key_values(overrides).get("mode", "train") == "train" and not {"-m", "--multirun"} & {*overrides}


def named(overrides: Sequence[str], name: str) -> tuple[tuple[str, ...], bool]:
    """Add a `name=` to a training without one, so that a restart resumes it. Also returns whether it was added."""
    if not trains(overrides) or key_values(overrides).keys() & {"name", "resume"}:
        return tuple(overrides), False
    return (*overrides, f"name={name}"), True


def disk_notes(overrides: Sequence[str], fate: str = "go with the machines") -> tuple[str, ...]:
    """Return a warning if a training saves its checkpoints to a disk that only one machine can read.

    Args:
        overrides: the arguments of `valkyrie-train`.
        fate: what happens to checkpoints on such a disk.
    """
    values = key_values(overrides)
    runs, folder = values.get("runs", "runs"), values.get("checkpoint.folder", "null")
    if not overrides or not trains(overrides) or Path(runs).is_absolute() or "://" in folder or folder.startswith("/"):
        return ()
    return (
        f"runs={runs} lies on each machine's own disk: checkpoints {fate}. Write runs=DIR with a folder of a disk that "
        "all hosts mount (NFS, Filestore), or checkpoint.folder=gs://BUCKET/DIR.",
    )
