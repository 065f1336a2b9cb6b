"""Reads the words before `--`, such as `target=v4-64 zone=us-central2-b`, into the `Config` of a launch engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from valkyrie.extensions import Families
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import get_platform
from valkyrie.launch.engine import EngineConfig
from valkyrie.problems import suggest

ENGINES = Families("target", "valkyrie.launch.engines", EngineConfig)
TPU_ENGINE = "tpu_vm"
"""Default engine if `target=` names a slice of TPUs. Other platforms have none."""


def read_config(words: Sequence[str], restarts: int) -> EngineConfig:
    """Parse `KEY=VALUE` words into the configuration of an engine; the ValueError suggests what to write instead."""
    texts: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not value:
            raise ValueError(f"{word}: write KEY=VALUE, such as target=local; the training's settings go behind --.")
        if key in texts:
            raise ValueError(f"{key}= is given twice: {key}={texts[key]} and {word}.")
        texts[key] = value
    target = texts.pop("target", None)
    if target is None:
        raise ValueError(f"target= is missing. {_how_to_write()}")
    engine, fixed = _engine(target)
    known = [key for key in engine_keys(engine) if key not in fixed]
    for key in texts:
        if key not in known:
            raise ValueError(f"{key}= is not for target={target}. It takes {', '.join(known)}.{_where_known(key)}")
    kinds = get_type_hints(engine)
    values = {key: _value(key, text, kinds[key]) for key, text in texts.items()}
    name = time.strftime("run-%Y%m%d-%H%M%S")
    config = engine(**{"name": name, **fixed, **values, "target": target, "restarts": restarts})
    if problems := config.problems():
        raise ValueError(" ".join(problems))
    return config


def engine_keys(engine: type[EngineConfig]) -> list[str]:
    """Return the keys of an engine, except `target`."""
    return [field.name for field in fields(engine) if field.name not in ("target", "restarts")]


def _engine(target: str) -> tuple[type[EngineConfig], dict[str, str]]:
    """Return the engine of a target, and the values of the keys that the target sets."""
    if target in ENGINES:
        return ENGINES.config_class(target), {}
    try:
        hardware = parse_target(target)
    except ValueError as error:
        near = suggest(target, ENGINES.names())
        wrong = f"target={target} is no place to run. Did you mean target={near}?" if near else error
        raise ValueError(f"{wrong} {_how_to_write()}") from None
    if not get_platform(hardware.platform).rented_as_slices:
        raise ValueError(f"target={target}: only slices of TPUs are rented by name. {_how_to_write()}")
    return ENGINES.config_class(TPU_ENGINE), {"slice": target}


def _how_to_write() -> str:
    names = ", ".join(f"target={name}" for name in ENGINES.names() if name not in ("local", TPU_ENGINE))
    return (
        f"Write target=local processes=4 for processes of this machine, {names}, the name of a module in the "
        "folder of --config-dir, or a slice of TPUs such as target=v4-64."
    )


def _where_known(key: str) -> str:
    engines = [name for name in ENGINES.names() if key in engine_keys(ENGINES.config_class(name))]
    if not engines:
        return " Settings of the training go behind --."
    return f" It is a key of {', '.join(f'target={name}' for name in engines)}."


def _value(key: str, text: str, kind: Any) -> object:
    if kind is str:
        return text
    if kind == tuple[str, ...]:
        return tuple(filter(None, map(str.strip, text.strip("[]").split(","))))
    hows = {int: "a whole number, at least 1", float: "a number above 0", bool: "true or false"}
    if kind not in hows:
        raise ValueError(f"{key}=: the key of an engine is str, int, float, bool or tuple[str, ...], not {kind}.")
    if kind is bool and text in ("true", "false"):
        return text == "true"
    with contextlib.suppress(ValueError):
        if kind is not bool and 0 < (number := kind(text)) < float("inf"):
            return number
    raise ValueError(f"{key}={text}: write {hows[kind]}.")
