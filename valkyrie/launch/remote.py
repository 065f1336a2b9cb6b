"""Commands for remote hosts: copy the code, install it, train, stop the training."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from valkyrie.launch.plan import Call, gave_up, join
from valkyrie.launch.supervisor import say
from valkyrie.runs.folder import key_value

ARCHIVE = ("git", "archive", "--format=tar.gz")
"""Command that packs the tracked files of the last commit, so no runs, data or secrets."""

_TRAINING = r"^[^ ]*python[0-9.]* [^ ]*/valkyrie-train "
_ANSWER_S = 120.0
"""Timeout in seconds for hosts to stop a training."""


def folder_problems(folder: str) -> list[str]:
    """Return the reasons why the code cannot be copied to this folder on the hosts."""
    if not folder.startswith("~"):
        return []
    return [f"folder={folder}: it lies in the home folder anyway; write folder=NAME, or /a/b."]


def check_clone() -> None:
    """Raise ValueError if the current folder is not a clone. The code is copied from there."""
    if not Path("pyproject.toml").is_file():
        raise ValueError("the code is copied from the current folder, which has no pyproject.toml: cd to the clone.")


def unpack(folder: str, archive: str | None = None) -> str:
    """Return the shell command that unpacks the code from a file in the home folder, or from standard input."""
    file = join((archive,)) if archive else "-"
    return f"mkdir -p {join((folder,))} && tar -xzf {file} -C {join((folder,))}"


def install(folder: str, extra: str = "") -> str:
    """Return the shell command that installs the code, its dependencies, uv and the required Python."""
    sync = ("python3", "-m", "uv", "sync", "--quiet", "--no-dev", *(("--extra", extra) if extra else ()))
    return f"cd {join((folder,))} && python3 -m pip install --quiet --user uv && {join(sync)}"


def train(folder: str, overrides: Sequence[str], environment: Mapping[str, str], log: str = "") -> str:
    """Return the shell command that trains. With `log`, it also appends its output to that file and needs bash."""
    settings = "".join(f"{name}={join((setting,))} " for name, setting in environment.items())
    command = f"cd {join((folder,))} && {settings}{join(('.venv/bin/valkyrie-train', *overrides))}"
    return f"set -o pipefail; {command} 2>&1 | tee -ip -a {join((log,))}" if log else command


def end(overrides: Sequence[str], number: int, alone: bool = False) -> str | None:
    """Return the shell command that sends a signal to a training, or None if nothing identifies its process.

    Args:
        overrides: the arguments of the training. Their `name=` or `resume=` identifies its process.
        number: the signal.
        alone: whether no other training runs on the host, so that no name is needed.
    """
    names = [(key, value) for key, value in map(key_value, overrides) if key in ("name", "resume")]
    if not names and not alone:
        return None
    pattern = _TRAINING
    if not alone:
        key, value = names[-1]
        pattern += f"(.* )?{key}=['\"]?{re.escape(value)}['\"]?( |$)"
    return join(("pkill", f"-{signal.Signals(number).name.removeprefix('SIG')}", "-f", pattern))


def loudly(step: Call) -> int:
    """Print a step, run it, and return its exit status."""
    say(f"{step.about}: {step.text()}")
    return step.run()


def must(step: Call) -> None:
    """Print a step and run it; ValueError if it fails."""
    if status := loudly(step):
        raise gave_up(step, status)


def quietly(step: Call) -> None:
    """Run a step that may fail, such as stopping a training on hosts that are gone."""
    try:
        subprocess.run(step.commands[0], capture_output=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        say(f"no answer within {_ANSWER_S:g} s: {step.text()}")
