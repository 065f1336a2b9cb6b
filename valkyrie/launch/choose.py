"""Parses the arguments before `--`, such as `target=v4-64 zone=us-central2-b`, into the `Config` of a launch engine."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from valkyrie.extensions import Families
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import get_platform
from valkyrie.launch.engine import EngineConfig
from valkyrie.launch.plan import ACTIONS
from valkyrie.problems import suggest

ENGINES = Families("target", "valkyrie.launch.engines", EngineConfig)
TPU_ENGINE = "tpu_vm"
"""Engine used if `target=` names a TPU slice. Slices of other platforms need an engine's name."""


def parse_engine_config(arguments: Sequence[str], restarts: int) -> EngineConfig:
    """Parse `KEY=VALUE` arguments, one of which is `target=`, into the configuration of an engine.

    `restarts` is the value of `--restarts`. Raises ValueError with a suggested fix if an argument is invalid.
    """
    texts: dict[str, str] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and not value:
            remedy = (
                _target_examples() if key == "target" else f"Write {argument}VALUE, or leave it out for the default."
            )
            raise ValueError(f"{argument} has no value. {remedy}")
        if not separator:
            raise ValueError(
                f"{argument} is neither an action ({', '.join(ACTIONS)}, dockerfile) nor KEY=VALUE, such as "
                f"target=local.{_action_hint(argument)}"
            )
        if key in texts:
            raise ValueError(f"{key}= is set twice: {key}={texts[key]} and {argument}. Remove one of them.")
        texts[key] = value
    target = texts.pop("target", None)
    if target is None:
        raise ValueError(f"target= is missing. {_target_examples()}")
    engine, implied_values = _find_engine(target)
    accepted_keys = [key for key in engine_keys(engine) if key not in implied_values]
    for key in texts:
        if key not in accepted_keys:
            keys = ", ".join(accepted_keys)
            raise ValueError(f"{key}= is not a key of target={target}. Its keys are {keys}.{_key_hint(key)}")
    types = get_type_hints(engine)
    values = {key: _parse_value(key, text, types[key]) for key, text in texts.items()}
    name = time.strftime("run-%Y%m%d-%H%M%S")
    config = engine(**{"name": name, **implied_values, **values, "target": target, "restarts": restarts})
    if problems := config.problems():
        raise ValueError(" ".join(problems))
    return config


def _action_hint(word: str) -> str:
    """Return the last sentence of the error message for a word that is not an action."""
    action = "delete" if word in ("stop", "kill", "cancel", "rm") else suggest(word, ACTIONS)
    return f" Did you mean {action}?" if action else " Put settings of the training run after --."


def engine_keys(engine: type[EngineConfig]) -> list[str]:
    """Return the keys that an engine accepts in addition to `target`."""
    return [field.name for field in fields(engine) if field.name not in ("target", "restarts")]


def _find_engine(target: str) -> tuple[type[EngineConfig], dict[str, str]]:
    """Return the `Config` class for `target=`, and the values that the target implies, by key.

    The only such key is `slice`, for a TPU slice. Raises ValueError for other targets that are not engines.
    """
    ENGINES.refuse_ignored_module(target)
    if target in ENGINES:
        return ENGINES.config_class(target), {}
    try:
        hardware = parse_target(target)
    except ValueError as error:
        chip = known_chips().get(re.split("[-:]", target)[0])
        if chip is not None and get_platform(chip.platform).rented_as_slices:  # the error suggests slices
            raise
        suggestion = suggest(target, ENGINES.names())
        problem = f"target={target} is unknown. Did you mean target={suggestion}?" if suggestion else error
        raise ValueError(f"{problem} {_target_examples()}") from None
    if not get_platform(hardware.platform).rented_as_slices:
        raise ValueError(f"target={target} is not a TPU slice. {_target_examples()}")
    return ENGINES.config_class(TPU_ENGINE), {"slice": target}


def _target_examples() -> str:
    names = ", ".join(f"target={name}" for name in ENGINES.names() if name not in ("local", TPU_ENGINE))
    return (
        f"Use target=local processes=4 (processes on this machine), {names}, the name of a module in the --config-dir "
        "folder, or the name of a TPU slice such as target=v4-64."
    )


def _key_hint(key: str) -> str:
    """Return the last sentence of the error message for an unknown key: the engines that accept it, or other advice."""
    engines = [name for name in ENGINES.names() if key in engine_keys(ENGINES.config_class(name))]
    if not engines:
        return " Put settings of the training run after --."
    return f" {key}= is a key of {', '.join(f'target={name}' for name in engines)}."


def _parse_value(key: str, text: str, field_type: Any) -> object:
    """Convert the text of `key=text` to the type of the engine's config field.

    Raises ValueError if the text is malformed, or if a number is not positive and finite.
    """
    if field_type is str:
        return text
    if field_type == tuple[str, ...]:
        return tuple(filter(None, map(str.strip, text.strip("[]").split(","))))
    expected = {int: "a whole number of at least 1", float: "a number above 0", bool: "true or false"}
    if field_type not in expected:
        raise ValueError(
            f"{key}= has type {field_type}, but the keys of an engine must be str, int, float, bool or tuple[str, ...]."
        )
    if field_type is bool and text in ("true", "false"):
        return text == "true"
    with contextlib.suppress(ValueError):
        if field_type is not bool and 0 < (number := field_type(text)) < float("inf"):
            return number
    raise ValueError(f"{key}={text} is not valid. Use {expected[field_type]}.")
