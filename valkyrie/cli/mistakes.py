"""Slips of the keyboard that Hydra answers in words of its own, or not at all: refused before it reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from itertools import zip_longest

from valkyrie.run import RunConfig
from valkyrie.train.folder import parts_of

_GROUPS = {"experiment", "sweep"}
_OWN_FLAGS = re.compile(r"--?[A-Za-z]")


def version_text() -> str:
    """Return the versions of Valkyrie and of JAX in one line."""
    return f"valkyrie {version('valkyrie-jax')}, jax {version('jax')}"


def refuse_slips(arguments: Sequence[str], multirun: bool) -> None:
    """Raise ValueError with what to write in place of `--steps=5`, `steps 5`, `mesh=2,2,2` or `model=a,b`."""
    known = {field.name for field in fields(RunConfig)} | _GROUPS
    flags, overrides = parts_of(arguments)
    for flag in flags:
        key, sign, value = flag.lstrip("-").partition("=")
        if _OWN_FLAGS.match(flag) and key.partition(".")[0].partition("/")[0] in known:
            shown = f"{key}={value}" if sign else f"{key}=VALUE"
            raise ValueError(f"{flag}: settings are written without dashes: {shown}.")
    for here, following in zip_longest(overrides, overrides[1:], fillvalue=""):
        if here.partition(".")[0] in known and "=" not in here:
            value = "VALUE" if "=" in following or not following else following
            raise ValueError(f"{here} has no value. Write {here}={value}, with = and without blanks.")
    if multirun:
        return
    for argument in overrides:
        key, _, value = argument.partition("=")
        if re.fullmatch(r"\d+(s?,\d+)+", value) and key == "mesh":
            raise ValueError(f"{argument}: the sizes of a mesh are joined by x: mesh={value.replace(',', 'x')}.")
        if key.lstrip("+") in known and re.fullmatch(r"[\w.+-]+(,[\w.+-]+)+", value):
            raise ValueError(
                f"{argument} names several values, and a run has one. For a sweep over them add -m: "
                f"valkyrie-train -m {argument}"
            )
