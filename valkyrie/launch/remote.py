"""What a shell does on a host that the launcher reaches: unpack the code, start the training, end it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from valkyrie.launch.plan import join
from valkyrie.runs.folder import key_value

ARCHIVE = ("git", "archive", "--format=tar.gz")
"""Copies the tracked files of the last commit: no run folder, no data, no secret."""

_TRAINING = r"^[^ ]*python[0-9.]* [^ ]*/valkyrie-train "


def unpack(folder: str, archive: str | None = None) -> str:
    """Return the shell command that unpacks the code, from a file of the home folder or from standard input."""
    file = join((archive,)) if archive else "-"
    return f"mkdir -p {join((folder,))} && tar -xzf {file} -C {join((folder,))}"


def install(folder: str, extra: str = "") -> str:
    """Return the shell command that makes the code's environment: uv takes the Python that it needs."""
    sync = ("python3", "-m", "uv", "sync", "--quiet", "--no-dev", *(("--extra", extra) if extra else ()))
    return f"cd {join((folder,))} && python3 -m pip install --quiet --user uv && {join(sync)}"


def train(folder: str, overrides: Sequence[str], environment: Mapping[str, str], log: str = "") -> str:
    """Return the shell command that trains, its output also at the end of a log; bash where there is one."""
    settings = "".join(f"{name}={join((setting,))} " for name, setting in environment.items())
    command = f"cd {join((folder,))} && {settings}{join(('.venv/bin/valkyrie-train', *overrides))}"
    return f"set -o pipefail; {command} 2>&1 | tee -ip -a {join((log,))}" if log else command


def end(overrides: Sequence[str], number: int, alone: bool = False) -> str | None:
    """Return the shell command that sends a signal to this training's process on a host; None where none tells it.

    `alone`: nobody else trains there. Else its name tells it from others.
    """
    names = [(key, value) for key, value in map(key_value, overrides) if key in ("name", "resume")]
    if not names and not alone:
        return None
    told = ""
    if names and not alone:
        key, value = names[-1]
        told = f"(.* )?{key}=['\"]?{re.escape(value)}['\"]?( |$)"
    return join(("pkill", f"-{signal.Signals(number).name.removeprefix('SIG')}", "-f", _TRAINING + told))
