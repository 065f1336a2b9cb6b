"""Names of sweeps and trials, and keys that identify equal trials. Imports no JAX.

A sweep is a multirun; its folder is `<runs>/<sweep name>`, with one run folder per trial inside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from valkyrie.checksums import digest
from valkyrie.config.modes import reads_run
from valkyrie.config.run import Run
from valkyrie.runs.folder import key_value, key_values, parts_of

_NOT_OF_THE_SWEEP = {"mode", "target", "name", "runs", "resume", "trial", "tracking", "hydra"}
"""Keys that may differ between commands of one sweep: compiled and measured layouts share a page."""
_OF_THE_SPACE = ("hydra/sweeper", "hydra.sweeper.")
_NOT_OF_THE_SPACE = ("hydra.sweeper.limit", "hydra.sweeper.n_trials", "hydra.sweeper.n_jobs")
"""Keys of the sweeper that only limit the number or speed of trials, so that it stays the same sweep."""

_LONGEST = 120


def multirun_arguments(arguments: Sequence[str]) -> list[str] | None:
    """Return the arguments of a multirun with the sweep's folder added, or None for a single run.

    `resume=true` is dropped: a sweep runs only the missing trials anyway.
    """
    overrides_by_key = key_values(arguments)
    mode = overrides_by_key.get("hydra.mode")
    flagged = any(argument in ("-m", "--multirun") for argument in arguments)
    overlay = overrides_by_key.get("sweep") not in (None, "null")
    if mode == "RUN" or not (mode == "MULTIRUN" or flagged or overlay):
        return None
    arguments_left = [a for a in arguments if key_value(a) not in (("resume", "true"), ("resume", "null"))]
    if "hydra.sweep.dir" in overrides_by_key:
        return arguments_left
    folder = f"hydra.sweep.dir=${{runs}}/{sweep_name(arguments)}"
    flags, overrides = parts_of(arguments_left)
    return [*flags, folder, *overrides]


def sweep_name(arguments: Sequence[str]) -> str:
    """Return the sweep's name: `name=`, else that of its `sweep=` overlay, else a digest of the arguments."""
    given = key_values(arguments)
    name, overlay = given.get("name"), given.get("sweep")
    if name not in (None, "null") and not reads_run(given.get("mode")):
        return folder_name(name)
    if overlay not in (None, "null"):
        return folder_name(overlay)
    arguments_by_key = {key: value for key, value in given.items() if _is_of_the_sweep(key)}
    return f"sweep-{digest(arguments_by_key)[:8]}"


def trial_key(run: Run) -> str:
    """Return a digest of the mode and of every key that affects the result."""
    config, values = run.config, asdict(run.config)
    mode, keys = config.mode, config.mode.decided_by()
    if keys is None:
        keys = [key for key in values if key not in mode.not_decided_by]
    if config.task is None:  # older trials, from before `task=`, keep their keys
        keys = [key for key in keys if key != "task"]
    values |= {f"mode.{key}": value for key, value in values["mode"].items()}
    read = {"resume": config.resume or config.name} if mode.reads_run else {}
    return digest({key: values[key] for key in keys} | {"mode": mode.name} | read)[:16]


def trial_name(run: Run, key: str, layout: str | None = None) -> str:
    """Return a short, stable folder name: `gpt_tiny-2x2x2-fsdp-measure-1a2b3c`.

    `layout` is the name of the run's layout, or None if it is illegal.
    """
    config = run.config
    layout = layout or f"{config.mesh.name}-{config.partition.name}"
    target = [] if config.target.name == "auto" else [config.target.name]
    words = folder_name("-".join([run.model.name, layout, config.mode.name, *target]))
    return f"{words[:_LONGEST]}-{key[:6]}"


def folder_name(text: str) -> str:
    """Replace characters that are special in paths or in Hydra's grammar."""
    return re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-.") or "sweep"


def reads_one_run(arguments: Sequence[str]) -> bool:
    """Return whether all trials of a multirun read the same trained run."""
    given = key_values(arguments)
    several = given.get("resume") or given.get("name") or ""
    return reads_run(given.get("mode")) and not ("," in several or "(" in several)


def without_place(overrides: Sequence[str]) -> list[str]:
    """Return overrides without those of the run folder."""
    return [o for o in overrides if key_value(o)[0] not in ("name", "runs", "resume")]


def _is_of_the_sweep(key: str) -> bool:
    if key.startswith(_OF_THE_SPACE):
        return key not in _NOT_OF_THE_SPACE
    return re.split(r"[./@]", key)[0] not in _NOT_OF_THE_SWEEP
