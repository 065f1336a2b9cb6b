"""Shell commands that copy and install the code on remote hosts, train there, and stop a training run."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from valkyrie.launch.plan import CommandStep, list_items, shell_text, step_error
from valkyrie.launch.supervisor import print_message
from valkyrie.runs.folder import key_values, split_override

ARCHIVE_COMMAND = ("git", "archive", "--format=tar.gz")
"""Command that packs the tracked files of a commit. Runs, data and secrets are not tracked."""

_PACKAGE = re.compile("valkyrie[-_.]jax", re.IGNORECASE)
"""The package that the code copied to a host must be, or depend on. Python treats these spellings as one name."""
_TRAINING_PROCESS = r"^[^ ]*python[0-9.]* [^ ]*/valkyrie-train "
_SIGNAL_TIMEOUT_S = 120.0
"""Seconds to wait for the command that sends a signal to a host."""


def folder_problems(folder: str) -> list[str]:
    """Return an error message if the code cannot be copied to this folder on the hosts."""
    if not folder.startswith("~"):
        return []
    # Paths are quoted for the remote shell, which does not expand a quoted ~.
    return [f"folder={folder} cannot start with ~. Use folder=NAME for a folder in the home folder, or folder=/PATH."]


def code_problems(target: str, *, only_committed: bool = True) -> list[str]:
    """Return an error message if the current folder, which is copied to the hosts, is no project that uses Valkyrie.

    Args:
        target: the value of `target=`, for the message.
        only_committed: whether the files of the last commit are copied, as opposed to those of the folder.
    """
    file, git_error = Path("pyproject.toml"), None
    if only_committed:
        project, git_error = _run_git("show", f"HEAD:./{file}")
    else:
        project = file.read_text(errors="replace") if file.is_file() else ""
    if _PACKAGE.search(project):
        return []
    fault = f"which has no {file} of Valkyrie" if git_error is None else f"but cannot read its {file} ({git_error})"
    remedy = "Start" if git_error is None else "Correct this, or start"
    source = "the last commit of the current folder" if only_committed else "the current folder"
    clone = Path(__file__).parents[2]
    example = f": cd {shell_text((str(clone),))}" if (clone / file).is_file() and clone != Path.cwd() else ""
    return [
        f"target={target} copies the code from {source} ({Path.cwd()}), {fault}. {remedy} "
        f"valkyrie-launch in your clone of Valkyrie{example}"
    ]


def _run_git(*arguments: str) -> tuple[str, str | None]:
    """Run git in the current folder. Returns its output, and its error message or None if it succeeded."""
    try:
        result = subprocess.run(("git", *arguments), capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        return "", "git is not installed"
    if result.returncode == 0:
        return result.stdout, None
    return "", f"git: {' '.join(result.stderr.split()) or f'status {result.returncode}'}"


def config_folder_notes(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return a warning for each folder of `--config-dir` and `modules=` that is not in the clone's last commit.

    The hosts get only the files of that commit.
    """
    flags = ("--config-dir", "-cd")
    folders = [
        folder for flag, separator, folder in (word.partition("=") for word in overrides) if separator and flag in flags
    ]
    folders += [value for word, value in zip(overrides, overrides[1:], strict=False) if word in flags]
    settings = [(f"--config-dir {folder}", folder) for folder in folders]
    settings += [(f"modules={folder}", folder) for folder in list_items(key_values(overrides).get("modules", ""))]
    return tuple(
        f"{setting} {fault}. The hosts get only the clone's last commit: commit the folder there and name it by its "
        "relative path, or create it on every host."
        for setting, folder in settings
        if (fault := _commit_fault(folder)) is not None
    )


def _commit_fault(folder: str) -> str | None:
    """Return the fault of a folder that is to come from the last commit, such as uncommitted files, or None."""
    if folder.startswith(("/", "~", "..")):
        return "is not a relative path inside the clone"
    if not Path(folder).exists():
        return f"does not exist (current folder: {Path.cwd()})"
    changes, error = _run_git("status", "--porcelain", "--ignored", "--", folder, ":(exclude)*__pycache__*")
    if error is not None:
        return f"cannot be compared with the last commit ({error})"
    return "has files that are not committed" if changes else None


def unpack_command(folder: str, archive: str | None = None) -> str:
    """Return the shell command that unpacks `archive` (relative to $HOME), or stdin if None, into `folder`."""
    file = shell_text((archive,)) if archive else "-"
    return f"mkdir -p {shell_text((folder,))} && tar -xzf {file} -C {shell_text((folder,))}"


def install_command(folder: str, extra: str = "") -> str:
    """Return the shell command that installs uv, then Python and the dependencies of the code in `folder`."""
    sync = shell_text(("python3", "-m", "uv", *sync_arguments(extra, quiet=True)))
    return f"cd {shell_text((folder,))} && python3 -m pip install --quiet --user uv && {sync}"


def sync_arguments(extra: str = "", quiet: bool = False) -> tuple[str, ...]:
    """Return the arguments of `uv` that install the code's dependencies, with the extra `data` and, if set, `extra`."""
    extras = [word for name in (extra, "data") if name for word in ("--extra", name)]
    return ("sync", *(("--quiet",) if quiet else ()), "--no-dev", *extras)


def train_command(folder: str, overrides: Sequence[str], environment: Mapping[str, str], log: str = "") -> str:
    """Return the shell command that runs `valkyrie-train` in `folder` with these environment variables.

    With `log`, the command needs bash, and also appends its output to that file.
    """
    assignments = "".join(f"{name}={shell_text((value,))} " for name, value in environment.items())
    command = f"cd {shell_text((folder,))} && {assignments}{shell_text(('.venv/bin/valkyrie-train', *overrides))}"
    return f"set -o pipefail; {command} 2>&1 | tee -ip -a {shell_text((log,))}" if log else command


def signal_command(overrides: Sequence[str], signum: int, is_only_run: bool = False) -> str | None:
    """Return the shell command that sends a signal to a training run, or None if its process cannot be identified.

    Args:
        overrides: the arguments of the training run. `name=` or `resume=` identifies its process.
        signum: the signal's number, such as `signal.SIGTERM`.
        is_only_run: whether the host has no other training run, so that no name is needed.
    """
    names = [(key, value) for key, value in map(split_override, overrides) if key in ("name", "resume")]
    if not names and not is_only_run:
        return None
    pattern = _TRAINING_PROCESS
    if not is_only_run:
        key, value = names[-1]
        pattern += f"(.* )?{key}=['\"]?{re.escape(value)}['\"]?( |$)"
    return shell_text(("pkill", f"-{signal.Signals(signum).name.removeprefix('SIG')}", "-f", pattern))


def run_verbose(step: CommandStep) -> int:
    """Print a step, run it, and return its exit status."""
    print_message(f"{step.description}: {step.text()}")
    return step.run()


def run_checked(step: CommandStep) -> None:
    """Print a step and run it. Raises ValueError if it fails."""
    if status := run_verbose(step):
        raise step_error(step, status)


def try_run(step: CommandStep) -> None:
    """Run the first command of a step without output, for example to stop a training run on a host that may be gone.

    Ignores its exit status. Kills the command after `_SIGNAL_TIMEOUT_S` and prints a message.
    """
    try:
        subprocess.run(step.commands[0], capture_output=True, check=False, timeout=_SIGNAL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print_message(f"no response within {_SIGNAL_TIMEOUT_S:g} s: {step.text()}")
