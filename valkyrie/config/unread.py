"""Finds what a user should know of a run, such as the settings that it does not read. Does not import JAX."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from valkyrie.config.modes import NEUTRAL_KEYS, ModeConfig
from valkyrie.config.run import Run, RunConfig
from valkyrie.models import Model, layer_blocks
from valkyrie.models.stack import Stack
from valkyrie.optim import AdamLike, Schedule, longest_warmup
from valkyrie.runs.folder import changed_settings, find_run, key_values, split_flags, split_override
from valkyrie.trees import flatten
from valkyrie.units import escape_control_characters

_ALWAYS_READ = NEUTRAL_KEYS | {"mode", "modules", "data", "task", "batch_tokens", "device_batch", "debug"}
"""Keys that count as read in every mode: those that never change a result, and those that determine other keys."""
_MAX_VALUE_LENGTH = 60
"""Maximum number of characters of a value in a note. If it is longer, such as a prompt, only the key is shown."""


def unread_notes(run: Run) -> list[str]:
    """Return a note for each reason why settings on the command line or in the environment have no effect on the run.

    The run must be legal. Settings in files get no note, because an experiment has settings for several modes.
    """
    settings_by_key = _settings_by_key(run.arguments)
    unread_settings = {key: text for key, text in settings_by_key.items() if not mode_reads(run.config.mode, key)}
    notes = mode_notes(run.config.mode, run.arguments)
    if run.config.mesh.names is not None and (axis_names := os.environ.get("TPU_AXIS_NAMES")):
        settings_by_key["TPU_AXIS_NAMES"] = f"TPU_AXIS_NAMES={axis_names}"
    for keys, reason in _keys_without_effect(run):
        settings = [text for key, text in settings_by_key.items() if key in keys or key.partition(".")[0] in keys]
        if settings and not {*settings} & {*unread_settings.values()}:
            notes.append(f"{_join_settings(settings)} {'has' if len(settings) == 1 else 'have'} no effect: {reason}")
    if (
        (sizes := os.environ.get("TPU_MESH_CONFIG"))
        and run.config.mode.name == "search"
        and "mesh" not in settings_by_key
    ):
        notes.append(
            f"TPU_MESH_CONFIG={sizes} has no effect: mode=search tries all meshes. To search only this one, add "
            "mesh=environment"
        )
    warmup_text, optimizer, longest = settings_by_key.get("optimizer.warmup_steps"), run.config.optimizer, 0
    if warmup_text and optimizer.warmup_steps > (longest := longest_warmup(optimizer, run.config.steps)):
        length = (
            f"optimizer.decay_steps={optimizer.decay_steps}" if optimizer.decay_steps else f"steps={run.config.steps}"
        )
        if mode_reads(run.config.mode, "optimizer") and mode_reads(run.config.mode, "steps"):
            notes.append(f"{warmup_text} is too long for the schedule ({length}). The warm-up takes {longest} steps")
    values = key_values(run.arguments)
    if values.get("size") == "tiny" and (model := values.get("model")) and not model.endswith("_tiny"):
        notes.append(
            f"size=tiny keeps model={model}, because the command line names it. For a tiny model, use one such as "
            "model=gpt_tiny"
        )
    return notes


def mode_notes(mode: ModeConfig, arguments: Sequence[str]) -> list[str]:
    """Return a list with a note on the settings among `arguments` that a mode does not read, or an empty list."""
    settings = [text for key, text in _settings_by_key(arguments).items() if not mode_reads(mode, key)]
    return [f"mode={mode.name} does not read {_join_settings(settings)}"] if settings else []


def replacement_notes(run: Run) -> list[str]:
    """Return a list with a note if the model differs from that of the run that `resume` names, else an empty list.

    Modes that load the weights of that run get no note.
    """
    config = run.config
    if config.resume is None or config.mode.reads_run or config.mode.name == "train":
        return []
    folder = find_run(Path(config.runs), config.resume)
    changed_model_settings = {
        key: texts for key, texts in changed_settings(run, folder).items() if key.startswith("model.")
    }
    replacements = [
        f"{name}={new_text} replaces {name}={saved_text}"
        for key, (new_text, saved_text) in changed_model_settings.items()
        for name in (key.removesuffix(".name"),)
    ]
    return [f"{_join_settings(replacements)} of {folder.name}"] if replacements else []


def layout_notes(run: Run) -> list[str]:
    """Return the notes of the model's blocks on the layout, without repetitions. Empty if the mode ignores layouts."""
    if run.config.mode.ignores_layout:
        return []
    notes = [block.layout_notes(context, run.layout.shard_count) for block, context in layer_blocks(run.model)]
    return list(dict.fromkeys(itertools.chain.from_iterable(notes)))


def mode_reads(mode: ModeConfig, key: str) -> bool:
    """Return whether a mode reads a key of a run, such as `optimizer.learning_rate`."""
    group, deciding_keys = key.partition(".")[0], mode.result_keys()
    if group in _ALWAYS_READ:
        return True
    if deciding_keys is not None:
        return group in deciding_keys
    return group not in mode.unread


def _keys_without_effect(run: Run) -> Iterable[tuple[tuple[str, ...], str]]:
    """Yield (keys, reason) for keys that have no effect because of other settings of the run.

    Omits keys that a training run saves for later modes, such as `prompt` with `sample_tokens=0`.
    """
    config, mode = run.config, run.config.mode
    if config.target.slices > 1 and config.target.chips is None:
        reason = f"target={config.target.name} does not name a slice. Use a target that does, such as target=v5e-8"
        yield ("target.slices",), reason
    batch = key_values(run.arguments).get("batch", "")
    if batch.isdecimal() and int(batch) != config.batch:
        yield ("batch",), f"batch_tokens sets batch={config.batch}. Add batch_tokens=null"
    if not mode.ignores_layout and config.mesh.names is not None and not config.partition.roles:
        yield ("mesh.names", "TPU_AXIS_NAMES"), f"partition={config.partition.name} has no roles"
    if not mode.ignores_layout and run.layout.pipeline is None:
        reason = f"partition={config.partition.name} has no pipeline on mesh={config.mesh.name}"
        yield ("partition.schedule", "partition.rounds"), reason
    if config.distributed.name == "off":
        keys = tuple(f"distributed.{key}" for key in ("coordinator", "processes", "process", "timeout_s"))
        yield keys, "distributed=off runs this process alone"
    if isinstance(config.optimizer, AdamLike) and Schedule(config.optimizer.schedule) is Schedule.cosine:
        yield ("optimizer.warmdown",), "it belongs to optimizer.schedule=trapezoid"
    yield from _model_keys_without_effect(run.model)


def _model_keys_without_effect(model: Model) -> Iterable[tuple[tuple[str, ...], str]]:
    """Yield (keys, reason) for keys of a model that have no effect because of its other settings."""
    if not isinstance(model, Stack):
        return
    for kind, block in model.mixer_blocks.items():
        if kind not in model.used_mixers:
            yield tuple(f"model.{kind}.{name}" for name in flatten(asdict(block))), f"no layer of the model has {kind}"
    if (pattern := getattr(model, "window_pattern", None)) is not None:
        reason = f"model.window_pattern={pattern} sets the windows. To use these, add model.window_pattern=null"
        yield ("model.attention.windows",), reason


def _settings_by_key(arguments: Sequence[str]) -> dict[str, str]:
    """Return the settings of a run among `arguments`, formatted by `_setting_text`, by key."""
    overrides = [(split_override(argument)[0], argument) for argument in split_flags(arguments)[1]]
    return {k: _setting_text(a) for k, a in overrides if k.partition(".")[0] in RunConfig.__dataclass_fields__}


def _setting_text(argument: str) -> str:
    """Format a setting: KEY=VALUE, KEY alone if the value is long or has several lines, or ~KEY for a deletion."""
    key, value = split_override(argument)
    if argument.startswith("~"):
        return f"~{key}"
    return key if len(value) > _MAX_VALUE_LENGTH or "\n" in value else escape_control_characters(f"{key}={value}")


def _join_settings(settings: list[str]) -> str:
    return settings[0] if len(settings) == 1 else f"{', '.join(settings[:-1])} and {settings[-1]}"
