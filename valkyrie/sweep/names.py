"""Names of sweeps and trials, and the keys that identify equal trials. Does not import JAX.

A sweep is a multirun. Its folder is `<runs>/<sweep name>`, and contains one run folder per trial.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from valkyrie.checksums import digest
from valkyrie.config.modes import reads_run
from valkyrie.config.run import Run
from valkyrie.hardware.target import AUTO_TARGET
from valkyrie.runs.folder import key_values, split_flags, split_override

_GROUPS_NOT_IN_NAME = {"mode", "target", "name", "runs", "resume", "trial", "tracking", "hydra"}
"""Config groups left out of the digest that names a sweep.

Without `mode`, sweeps that compile and measure the same layouts share a folder and its report. In modes that read a
trained run, the digest includes `RUN_KEYS` nevertheless.
"""
RUN_KEYS = ("name", "resume")
"""Keys that select a trained run in modes that read one."""
_SWEEPER_PREFIXES = ("hydra/sweeper", "hydra.sweeper.")
_SWEEPER_KEYS_NOT_IN_NAME = ("hydra.sweeper.limit", "hydra.sweeper.n_trials", "hydra.sweeper.n_jobs")
"""Sweeper keys that do not affect the name of a sweep: they only limit how many trials run, or how many at a time."""

_MAX_LENGTH = 120


def multirun_arguments(arguments: Sequence[str]) -> list[str] | None:
    """Return the arguments of a multirun with `hydra.sweep.dir` added if it is missing, or None for a single run.

    A multirun has `-m`, `hydra.mode=MULTIRUN` or `+sweep=NAME`, and not `hydra.mode=RUN`. If `+sweep=NAME` is the only
    one of these, adds `hydra.mode=MULTIRUN`. Drops `resume=true` and `resume=null`, because a sweep always skips trials
    that already have a result.
    """
    overrides_by_key = key_values(arguments)
    mode = overrides_by_key.get("hydra.mode")
    has_flag = any(argument in ("-m", "--multirun") for argument in arguments)
    has_sweep_choice = overrides_by_key.get("sweep") not in (None, "null")
    if mode == "RUN" or not (mode == "MULTIRUN" or has_flag or has_sweep_choice):
        return None
    remaining = [a for a in arguments if split_override(a) not in (("resume", "true"), ("resume", "null"))]
    added_overrides = [] if has_flag or mode else ["hydra.mode=MULTIRUN"]
    if "hydra.sweep.dir" not in overrides_by_key:
        added_overrides.append(f"hydra.sweep.dir=${{runs}}/{sweep_name(arguments)}")
    flags, overrides = split_flags(remaining)
    return [*flags, *added_overrides, *overrides]


def sweep_name(arguments: Sequence[str]) -> str:
    """Return the sweep's name: the value of `name=`, else of `sweep=`, else a digest of the arguments.

    Ignores `name=` in modes that read a trained run, because it then names that run.
    """
    values_by_key = key_values(arguments)
    name, sweep_choice = values_by_key.get("name"), values_by_key.get("sweep")
    if name not in (None, "null") and not reads_run(values_by_key.get("mode")):
        return folder_name(name)
    if sweep_choice not in (None, "null"):
        return folder_name(sweep_choice)
    run_keys = RUN_KEYS if reads_run(values_by_key.get("mode")) else ()
    identifying_values = {
        key: value for key, value in values_by_key.items() if key in run_keys or _identifies_sweep(key)
    }
    return f"sweep-{digest(identifying_values)[:8]}"


def trial_key(run: Run) -> str:
    """Return a digest of a run's mode and of every setting that affects the result. Equal trials have equal keys."""
    config, values = run.config, asdict(run.config)
    mode, keys = config.mode, config.mode.result_keys()
    if keys is None:
        keys = [key for key in values if key not in mode.neutral_keys]
    if config.task is None:  # keeps the keys of trials recorded before `task=` existed
        keys = [key for key in keys if key != "task"]
    values |= {f"mode.{key}": value for key, value in values["mode"].items()}
    trained_run = {"resume": config.resume or config.name} if mode.reads_run else {}
    return digest({key: values[key] for key in keys} | {"mode": mode.name} | trained_run)[:16]


def trial_name(run: Run, key: str, layout: str | None = None) -> str:
    """Return the name of a trial's folder, such as `gpt_tiny-2x2x2-fsdp-measure-1a2b3c`.

    `key` is the trial's key. `layout` is the name of its layout. If the layout is illegal, `layout` is None, and the
    names of the mesh and partition are used instead.
    """
    config = run.config
    layout = layout or f"{config.mesh.name}-{config.partition.name}"
    target = [] if config.target.name == AUTO_TARGET else [config.target.name]
    description = folder_name("-".join([run.model.name, layout, config.mode.name, *target]))
    return f"{description[:_MAX_LENGTH]}-{key[:6]}"


def folder_name(text: str) -> str:
    """Convert a text to a folder name without characters that are special in paths or in Hydra's grammar.

    Keeps ASCII letters, digits, `_`, `.`, `+` and `-`, and replaces each run of other characters by one `-`. Strips `-`
    and `.` from both ends. An empty result becomes `sweep`.
    """
    return re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-.") or "sweep"


def reads_one_run(arguments: Sequence[str]) -> bool:
    """Return whether all trials of a multirun read the same trained run."""
    values_by_key = key_values(arguments)
    trained_run = values_by_key.get("resume") or values_by_key.get("name") or ""
    return reads_run(values_by_key.get("mode")) and not ("," in trained_run or "(" in trained_run)


def without_run_folder(overrides: Sequence[str]) -> list[str]:
    """Return overrides without those that select the run folder: `name`, `runs` and `resume`."""
    return [o for o in overrides if split_override(o)[0] not in ("name", "runs", "resume")]


def _identifies_sweep(key: str) -> bool:
    if key.startswith(_SWEEPER_PREFIXES):
        return key not in _SWEEPER_KEYS_NOT_IN_NAME
    return re.split(r"[./@]", key)[0] not in _GROUPS_NOT_IN_NAME
