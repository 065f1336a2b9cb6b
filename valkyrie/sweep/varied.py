"""Finds the settings and targets that distinguish trials with the same layout."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from valkyrie.config.modes import reads_run
from valkyrie.hardware.names import parse_target
from valkyrie.runs.folder import key_values
from valkyrie.sweep.names import RUN_KEYS
from valkyrie.sweep.trial import Trial

_TRIAL_GROUPS = {"name", "runs", "resume", "trial", "tracking", "hydra"}
"""Config groups that only name, locate, limit or track trials."""
_GROUPS_OUTSIDE_WORKLOAD = {"mesh", "partition", "microbatches", "remat", "placement", "mode", "target"} | _TRIAL_GROUPS
"""Config groups that do not change the workload: those that choose the layout, mode or target, and `_TRIAL_GROUPS`."""
_DESCRIBED_FIELDS = ("model", "batch", "seq")
"""Fields of `Trial.about` that tables show anyway. A setting that they determine is not listed as varied."""
_MODEL_GROUPS = {"model"}
"""Config groups that are compared across all sweeps, stages and targets."""
_STEP_GROUPS = _MODEL_GROUPS | {"precision", "optimizer"}
"""Config groups that are compared across the sweeps of one stage and target."""


def varied_settings(sweeps: Mapping[Path, Sequence[Trial]]) -> dict[tuple[Path, str], tuple[str, ...]]:
    """Return a dict from (sweep folder, trial key) to the varied settings of the trial, such as `state_size=1024`.

    A key is varied if its value differs between trials of one sweep, stage and target. Keys of the precision or
    optimizer are compared across sweeps too, and keys of the model also across stages and targets.

    Omits keys whose value is determined by the model, batch and sequence length, or by another varied key. Shortens
    keys to the part after their last dot if that is unique.

    Records contain all settings of the model, precision and optimizer. Settings of other groups, and of older records,
    are known only if the command line set them.
    """
    settings = {(folder, t.key): (t, _settings(t)) for folder, trials in sweeps.items() for t in trials}
    keys = _distinguishing_keys(list(settings.values()), _differing_keys(sweeps))
    last_parts = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last_parts.values())
    short_keys = {key: word if counts[word] == 1 else key for key, word in last_parts.items()}
    return {
        trial_id: tuple(f"{short_keys[key]}={values[key]}" for key in keys if key in values)
        for trial_id, (_, values) in settings.items()
    }


def target_text(trial: Trial) -> str:
    """Return the target of a trial as text, such as `v4-64 with topology 2x2x8 in 2 slices`.

    Omits the topology if it is unknown or implied by the target's name, and the slices if there is only one. Returns
    `unknown target` if the configuration of the trial does not compose.
    """
    about = trial.about
    if about is None:
        return "unknown target"
    hardware = about.hardware
    if hardware is None:
        return about.target
    try:
        default = parse_target(about.target).record().shape
    except ValueError:  # `auto`, or a target or chip defined in a file of the user
        default = None
    topology = f" with topology {hardware.shape}" if hardware.shape not in (None, default) else ""
    return f"{about.target}{topology}" + (f" in {hardware.slices} slices" if hardware.slices > 1 else "")


def _settings(trial: Trial) -> dict[str, str]:
    """Return the settings that may affect the workload, by key.

    These are the settings in the record, and those on the command line in config groups that the record lacks.
    """
    recorded_groups = {_group(key) for key in trial.values}
    return {
        key: value for key, value in _command_line_settings(trial).items() if _group(key) not in recorded_groups
    } | trial.values


def _command_line_settings(trial: Trial) -> dict[str, str]:
    return {
        key: value
        for key, value in key_values(trial.overrides).items()
        if _group(key) not in _GROUPS_OUTSIDE_WORKLOAD or (key in RUN_KEYS and reads_run(trial.stage))
    }


def _differing_keys(sweeps: Mapping[Path, Sequence[Trial]]) -> list[str]:
    """Return the keys that differ between comparable trials. Keys that appear on a command line come first.

    A key that no command line sets is compared only among trials whose records contain it.
    """
    comparable_settings: dict[tuple[object, ...], list[dict[str, str]]] = defaultdict(list)
    command_line_keys: dict[str, None] = {}
    for folder, trials in sweeps.items():
        for trial in trials:
            command_line_keys |= dict.fromkeys(_command_line_settings(trial))
            settings, kind = _settings(trial), (trial.stage, target_text(trial))
            comparable_settings[(folder, *kind)].append(settings)
            comparable_settings[kind].append(
                {key: value for key, value in settings.items() if _group(key) in _STEP_GROUPS}
            )
            comparable_settings[()].append(
                {key: value for key, value in settings.items() if _group(key) in _MODEL_GROUPS}
            )
    keys: dict[str, None] = {}
    for settings_list in comparable_settings.values():
        for key in dict.fromkeys(key for values in settings_list for key in values):
            distinct_values = {values.get(key) for values in settings_list}
            if len(distinct_values if key in command_line_keys else distinct_values - {None}) > 1:
                keys[key] = None
    return [*(key for key in command_line_keys if key in keys), *(key for key in keys if key not in command_line_keys)]


def _distinguishing_keys(trials: Sequence[tuple[Trial, dict[str, str]]], keys: Sequence[str]) -> list[str]:
    """Return the keys whose values are not determined by the fields in `_DESCRIBED_FIELDS` and the keys before them.

    For keys of the group `precision`, the field `precision` is one of these fields too.
    """
    described_fields: list[tuple[str, ...]] = [
        tuple(str(getattr(trial.about, key, None)) for key in _DESCRIBED_FIELDS) for trial, _ in trials
    ]
    precisions = [getattr(trial.about, "precision", None) for trial, _ in trials]
    distinguishing_keys = []
    for key in keys:
        values = [settings.get(key) for _, settings in trials]
        known_fields = (
            list(zip(described_fields, precisions, strict=True)) if _group(key) == "precision" else described_fields
        )
        if len(set(zip(known_fields, values, strict=True))) > len(set(known_fields)):
            distinguishing_keys.append(key)
            described_fields = [(*fields, str(value)) for fields, value in zip(described_fields, values, strict=True)]
    return distinguishing_keys


def _group(key: str) -> str:
    return re.split(r"[./@]", key)[0]
