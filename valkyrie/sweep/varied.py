"""Settings other than the layout that a sweep varies, and its target: they distinguish rows of one layout."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from valkyrie.hardware.names import parse_target
from valkyrie.runs.folder import key_values
from valkyrie.sweep.trial import Trial

_ABOUT_A_TRIAL = {"name", "runs", "resume", "trial", "tracking", "hydra"}
_NO_WORK = {"mesh", "partition", "microbatches", "remat", "placement", "mode", "target"} | _ABOUT_A_TRIAL
"""Keys, up to their first dot, that do not change what a step computes."""
_DESCRIBED = ("model", "batch", "seq")
"""Fields of `about` that already describe a step; for keys of the precision, so does `precision`."""
_OF_THE_MODEL = {"model"}
"""Keys, up to their first dot, that make it another workload, also between a prediction and a measurement."""
_OF_A_STEP = _OF_THE_MODEL | {"precision", "optimizer"}
"""Keys, up to their first dot, that do so between sweeps for one stage and target."""


def varied_settings(sweeps: Mapping[Path, Sequence[Trial]]) -> dict[tuple[Path, str], tuple[str, ...]]:
    """Return the varied settings of every trial (`state_size=1024`), by its sweep's folder and its key.

    A key is varied if trials of one sweep, stage and target differ in it. For keys of the model any two trials count,
    and for keys of the precision or optimizer any two of one stage and target. A key that follows from the model, batch
    and length, or from earlier keys, is omitted, so that keys that vary together are named once. Keys are shortened to
    the part after their last dot if that is unique.

    Records have the values of all keys, and older records only those of keys that the trial named.
    """
    settings = {(folder, t.key): (t, _settings(t)) for folder, trials in sweeps.items() for t in trials}
    keys = _distinguishing(list(settings.values()), _differing(sweeps))
    last = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last.values())
    short = {key: word if counts[word] == 1 else key for key, word in last.items()}
    return {
        trial: tuple(f"{short[key]}={values[key]}" for key in keys if key in values)
        for trial, (_, values) in settings.items()
    }


def target_of(trial: Trial) -> str:
    """Return the target of a trial, with its topology and slices unless its name implies them."""
    about = trial.about
    if about is None:
        return "unknown target"
    hardware = about.hardware
    if hardware is None:
        return about.target
    try:
        default = parse_target(about.target).record().shape
    except ValueError:  # `auto`, or a target or chip with a file of the user's
        default = None
    topology = f" with topology {hardware.shape}" if hardware.shape not in (None, default) else ""
    return f"{about.target}{topology}" + (f" in {hardware.slices} slices" if hardware.slices > 1 else "")


def _settings(trial: Trial) -> dict[str, str]:
    """Return the keys that may make a trial another workload, with the values in its record if it has them."""
    in_force = {_root(key) for key in trial.values}
    return {key: value for key, value in _named(trial).items() if _root(key) not in in_force} | trial.values


def _named(trial: Trial) -> dict[str, str]:
    return {key: value for key, value in key_values(trial.overrides).items() if _root(key) not in _NO_WORK}


def _differing(sweeps: Mapping[Path, Sequence[Trial]]) -> list[str]:
    """Return the keys in which otherwise comparable trials differ: those that a command line names, then the others.

    Keys that no command line names are compared only among trials whose records have them.
    """
    alike: dict[tuple[object, ...], list[dict[str, str]]] = defaultdict(list)
    named: dict[str, None] = {}
    for folder, trials in sweeps.items():
        for trial in trials:
            named |= dict.fromkeys(_named(trial))
            settings, kind = _settings(trial), (trial.stage, target_of(trial))
            alike[(folder, *kind)].append(settings)
            alike[kind].append({key: value for key, value in settings.items() if _root(key) in _OF_A_STEP})
            alike[()].append({key: value for key, value in settings.items() if _root(key) in _OF_THE_MODEL})
    keys: dict[str, None] = {}
    for members in alike.values():
        for key in dict.fromkeys(key for values in members for key in values):
            different = {values.get(key) for values in members}
            if len(different if key in named else different - {None}) > 1:
                keys[key] = None
    return [*(key for key in named if key in keys), *(key for key in keys if key not in named)]


def _distinguishing(trials: Sequence[tuple[Trial, dict[str, str]]], keys: Sequence[str]) -> list[str]:
    """Return the keys whose values do not follow from the description of a step and from earlier keys."""
    described: list[tuple[str, ...]] = [
        tuple(str(getattr(trial.about, key, None)) for key in _DESCRIBED) for trial, _ in trials
    ]
    precisions = [getattr(trial.about, "precision", None) for trial, _ in trials]
    distinguishing = []
    for key in keys:
        values = [settings.get(key) for _, settings in trials]
        known = list(zip(described, precisions, strict=True)) if _root(key) == "precision" else described
        if len(set(zip(known, values, strict=True))) > len(set(known)):
            distinguishing.append(key)
            described = [(*before, str(value)) for before, value in zip(described, values, strict=True)]
    return distinguishing


def _root(key: str) -> str:
    return re.split(r"[./@]", key)[0]
