"""What `valkyrie-launch` is told about where to run, read and checked: `target=v4-64 zone=us-central2-b spot=true`."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig

PORT = 8476
"""The port of JAX's coordinator where nobody else is on a host: the one that JAX takes on Cloud TPU."""


@dataclass(frozen=True)
class Options:
    """What was written before `--`.

    `target`: `local`, `host`, `ssh`, `slurm`, `gke`, `skypilot`, or a slice of TPUs by name. `name`: of the run and of
    what is rented for it. `slice`, `slices`: which slice, and how many of them. `hours`: planned, for the price.
    """

    target: str
    name: str = ""
    processes: int = 2
    hosts: tuple[str, ...] = ()
    port: int = PORT
    folder: str = "valkyrie"
    slice: str = ""
    slices: int = 1
    spot: bool = False
    queued: bool = True
    zone: str = ""
    project: str = ""
    network: str = ""
    runtime: str = ""
    cluster: str = ""
    image: str = ""
    extra: str = ""
    nodes: int = 0
    gpus_per_node: int = 0
    partition: str = ""
    account: str = ""
    hours: float = 0.0
    usd_per_hour: float = 0.0
    spot_usd_per_hour: float = 0.0
    restarts: int = 3

    @property
    def hardware(self) -> TargetConfig | None:
        """The slice that is named, None where none is; ValueError says which there are."""
        name = self.target if self.target not in ENGINES else self.slice
        return parse_target(name) if name else None


_PRICED = ("hours", "usd_per_hour", "spot_usd_per_hour")
_RENTED = ("spot", "slices", *_PRICED)
ENGINES = {
    "local": ("processes",),
    "host": (),
    "ssh": ("hosts", "port", "folder", "extra"),
    "slurm": ("nodes", "gpus_per_node", "slice", "partition", "account", *_PRICED),
    "gke": ("slice", "cluster", "image", "zone", "project", *_RENTED),
    "skypilot": ("slice", "zone", "spot", *_PRICED),
}
"""Where a training can run apart from a slice of TPU VMs, and the keys that each takes besides `name`."""
SLICE = ("zone", "project", "network", "runtime", "queued", "folder", *_RENTED)
"""The keys of a slice of TPU VMs."""


def read_options(words: Sequence[str], restarts: int) -> Options:
    """Return the options that `KEY=VALUE` words give; ValueError says what to write instead."""
    given: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not value:
            raise ValueError(f"{word}: write KEY=VALUE, such as target=local; the training's settings go behind --.")
        if key in given:
            raise ValueError(f"{key}= is given twice: {key}={given[key]} and {word}.")
        given[key] = value
    target = given.get("target")
    if target is None:
        raise ValueError(f"target= is missing. {_TARGETS}")
    if target not in ENGINES:
        try:
            tpu = platform_of(parse_target(target).platform).rented_as_slices
        except ValueError as error:
            near = difflib.get_close_matches(target, ENGINES, n=1)
            hint = f" Did you mean target={near[0]}?" if near else ""
            raise ValueError(f"target={target} is no place to run.{hint} {_TARGETS}" if near else str(error)) from None
        if not tpu:
            raise ValueError(f"target={target}: only slices of TPUs are rented by name. {_TARGETS}")
    known = ("target", "name", *ENGINES.get(target, SLICE))
    for key in given:
        if key not in known:
            everywhere = {field.name for field in fields(Options)}
            other = "" if key in everywhere else " Settings of the training go behind --."
            raise ValueError(f"{key}= is not for target={target}. It takes {', '.join(known[1:])}.{other}")
    options = Options(**{"name": time.strftime("run-%Y%m%d-%H%M%S"), **_values(given)}, restarts=restarts)
    _check(options, given)
    return options


_TARGETS = (
    "Write target=local processes=4 for processes of this machine, target=host, target=ssh, target=slurm, target=gke, "
    "target=skypilot, or a slice of TPUs such as target=v4-64."
)


def _values(given: Mapping[str, str]) -> dict[str, Any]:
    kinds = {field.name: field.type for field in fields(Options)}
    return {key: _value(key, text, str(kinds[key])) for key, text in given.items()}


def _value(key: str, text: str, kind: str) -> object:
    if kind == "int":
        if not text.isdecimal():
            raise ValueError(f"{key}={text}: write a whole number.")
        return int(text)
    if kind == "float":
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{key}={text}: write a number.") from None
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(f"{key}={text}: write {key}=true or {key}=false.")
        return text == "true"
    if kind.startswith("tuple"):
        return tuple(filter(None, (host.strip() for host in text.strip("[]").split(","))))
    return text


def _check(options: Options, given: Mapping[str, str]) -> None:
    target = options.target
    if options.restarts < 0:
        raise ValueError(f"--restarts {options.restarts}: write 0 or more.")
    for key in ("processes", "slices", "port", "nodes", "gpus_per_node"):
        if key in given and getattr(options, key) < 1:
            raise ValueError(f"{key}={given[key]}: at least 1 is needed.")
    for key in _PRICED:
        if key in given and not 0 < getattr(options, key) < float("inf"):
            raise ValueError(f"{key}={given[key]}: write a number above 0.")
    if options.extra not in ("", "tpu", "cuda"):
        raise ValueError(
            f"extra={options.extra}: write extra=tpu, extra=cuda, or nothing where the hosts have neither."
        )
    for key in ("name", "cluster"):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value := getattr(options, key) or "x"):
            raise ValueError(f"{key}={value}: write letters, digits, - and _.")
    for key in ("zone", "project", "network", "runtime", "slice", "image", "partition", "account"):
        if re.search(r"\s", value := getattr(options, key)):
            raise ValueError(f"{key}={value!r}: a name has no blanks.")
    for key in ("name", "folder", "zone", "project", "network", "runtime", "slice", "image", "partition", "account"):
        if re.search(r"[\x00-\x1f\x7f]", value := getattr(options, key)) or value.startswith("-"):
            raise ValueError(f"{key}={value!r}: a name begins with no dash and stands on one line.")
    if options.folder.startswith("~"):
        raise ValueError(f"folder={options.folder}: it lies in the home folder anyway; write folder=NAME, or /a/b.")
    if options.port > 65535:
        raise ValueError(f"port={options.port}: the largest is 65535.")
    if target == "ssh":
        if not options.hosts:
            raise ValueError("target=ssh needs the hosts: write hosts=a,b, the first of which is the coordinator.")
        if bad := [host for host in options.hosts if not re.fullmatch(r"[A-Za-z0-9_][\w.@:-]*", host)]:
            raise ValueError(f"hosts=: {bad[0]} is no name of a host. Write hosts=a,b.")
        if len({*options.hosts}) < len(options.hosts):
            raise ValueError(f"hosts={','.join(options.hosts)} names a host twice; each runs one process.")
    if target in ("gke", "skypilot") and not options.slice:
        raise ValueError(f"target={target} needs the slice: write slice=v5e-8.")
    if target == "gke":
        if not options.image:
            raise ValueError(
                "target=gke needs the image: image=REGISTRY/NAME, built from `valkyrie-launch dockerfile`."
            )
        if not options.cluster:
            raise ValueError("target=gke needs the cluster: write cluster=NAME.")
    if target == "slurm" and bool(options.nodes) == bool(options.slice):
        raise ValueError("target=slurm needs the nodes: write nodes=2 gpus_per_node=8, or slice=h100-16.")
    hardware = options.hardware
    if hardware is not None and hardware.chip is None:
        raise ValueError(f"slice={options.slice} names no chip: write slice=v5e-8 or slice=h100-8.")
    if target == "gke" and hardware is not None and not platform_of(hardware.platform).rented_as_slices:
        raise ValueError(f"target=gke slice={options.slice}: only slices of TPUs are known there. Use target=skypilot.")
