"""Decides what tells rows apart beside their layouts: what else a sweep varies, and the hardware asked for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from valkyrie.hardware import known_targets
from valkyrie.sweep.names import key_values
from valkyrie.sweep.trial import Trial

_ABOUT_A_TRIAL = {"name", "runs", "resume", "trial", "tracking", "hydra"}
_NO_WORK = {"mesh", "partition", "microbatches", "remat", "placement", "mode", "target"} | _ABOUT_A_TRIAL
"""Keys, up to their first dot, that do not change what a step computes."""
_TOLD = ("model", "batch", "seq")
"""Keys of `about` that say what a step does already; of the keys of the precision, `precision` does too."""
_OF_THE_MODEL = {"model"}
"""Keys, up to their first dot, that make it another work wherever they differ: a prediction and a measurement too."""
_OF_A_STEP = _OF_THE_MODEL | {"precision", "optimizer"}
"""Keys, up to their first dot, that do so between sweeps, in one stage on one target."""


def varied_of(sweeps: Mapping[Path, Sequence[Trial]]) -> dict[tuple[Path, str], tuple[str, ...]]:
    """Return what was varied beside the layout, as `state_size=1024`, of every trial by its sweep's folder and its key.

    A key is varied where trials of one stage on one target, in one sweep, differ in it; a key of the model where any
    two trials do, and one of the precision or the optimizer where two of one stage on one target do. It is left out
    where it follows from the model, batch and length, or from the keys before it (one of the precision, where it
    follows from that): what a sweep varies together is told once. Keys lose what stands before their last dot, where
    that leaves them apart.

    A trial that does not name a key has it all the same where its record has the values that were in force; an older
    record, without them, is told apart by the keys that it names alone.
    """
    given = {(folder, t.key): (t, _given(t)) for folder, trials in sweeps.items() for t in trials}
    kept = _telling(list(given.values()), _differing(sweeps))
    last = Counter(_last(key) for key in kept)
    short = {key: _last(key) if last[_last(key)] == 1 else key for key in kept}
    return {
        place: tuple(f"{short[key]}={values[key]}" for key in kept if key in values)
        for place, (_, values) in given.items()
    }


def target_of(about: Mapping[str, Any]) -> str:
    """Return the target of a trial; with its topology and slices where they are not those that the target has alone."""
    name = str(about.get("target") or "unknown target")
    described = about.get("described") or name
    plain = next((target.describe() for target in known_targets() if target.name == name), described)
    if described == plain:
        return name
    shape, slices = _shape(described), re.search(r"in each of ([0-9]+) slices", described)
    said = f" with topology {shape}" if shape and shape != _shape(plain) else ""
    return f"{name}{said}" + (f" in {slices[1]} slices" if slices else "")


def _shape(described: str) -> str | None:
    found = re.search(r"\b[0-9]+(?:x[0-9]+)+\b", described)
    return found and found[0]


def _given(trial: Trial) -> dict[str, str]:
    """Return the keys that may make a trial another work; those of its record have the values that were in force."""
    in_force = {_root(key) for key in trial.values}
    return {key: value for key, value in _named(trial).items() if _root(key) not in in_force} | trial.values


def _named(trial: Trial) -> dict[str, str]:
    return {key: value for key, value in key_values(trial.overrides).items() if _root(key) not in _NO_WORK}


def _differing(sweeps: Mapping[Path, Sequence[Trial]]) -> list[str]:
    """Return the keys in which trials differ that might do the same work, in the order in which they first came.

    Those that a command line names stand first. The others are counted only among trials whose records have them.
    """
    alike: dict[tuple[object, ...], list[dict[str, str]]] = defaultdict(list)
    named: dict[str, None] = {}
    for folder, trials in sweeps.items():
        for trial in trials:
            named |= dict.fromkeys(_named(trial))
            given, kind = _given(trial), (trial.stage, trial.about.get("target"))
            alike[(folder, *kind)].append(given)
            alike[kind].append({key: value for key, value in given.items() if _root(key) in _OF_A_STEP})
            alike[()].append({key: value for key, value in given.items() if _root(key) in _OF_THE_MODEL})
    keys: dict[str, None] = {}
    for members in alike.values():
        for key in dict.fromkeys(key for values in members for key in values):
            found = {values.get(key) for values in members}
            if len(found if key in named else found - {None}) > 1:
                keys[key] = None
    return [*(key for key in named if key in keys), *(key for key in keys if key not in named)]


def _telling(given: Sequence[tuple[Trial, dict[str, str]]], keys: Sequence[str]) -> list[str]:
    """Return the keys whose values do not follow from what a step is said to do and the keys before them."""
    told = [tuple(str(trial.about.get(key)) for key in _TOLD) for trial, _ in given]
    precisions = [trial.about.get("precision") for trial, _ in given]
    kept = []
    for key in keys:
        values = [found.get(key) for _, found in given]
        known = list(zip(told, precisions, strict=True)) if _root(key) == "precision" else told
        if len(set(zip(known, values, strict=True))) > len(set(known)):
            kept.append(key)
            told = [(*before, str(value)) for before, value in zip(told, values, strict=True)]
    return kept


def _root(key: str) -> str:
    return re.split(r"[./@]", key)[0]


def _last(key: str) -> str:
    return key.rpartition(".")[2]
