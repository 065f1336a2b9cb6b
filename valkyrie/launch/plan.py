"""Plans: the commands and files that start a training on other hardware, printed as a shell script."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from valkyrie.paths import write_atomic

WIDTH = 120
"""Maximum length of a printed line. Longer commands are broken before their flags."""

Command = tuple[str, ...]
"""A program and its arguments."""


@dataclass(frozen=True)
class Call:
    """A step that runs a command, or several joined by pipes.

    Args:
        about: description of the step.
        commands: the commands. Each reads the output of the previous one.
        until: in the printed script, the step repeats until it prints this word.
        beside: whether the next steps start without waiting for this one.
        action: subcommand of `valkyrie-launch` that runs only this step: logs, describe, list or delete.
    """

    about: str
    commands: tuple[Command, ...]
    until: str = ""
    beside: bool = False
    action: str = ""

    def text(self) -> str:
        """Return the step as shell code."""
        text = " | ".join(command_text(command) for command in self.commands)
        if self.until:
            return f'until [ "$({text})" = {shlex.quote(self.until)} ]; do sleep 30; done'
        return f"{text} &" if self.beside else text

    def run(self) -> int:
        """Run the commands once and return the exit status of the last one that fails, or 0."""
        running: list[subprocess.Popen[bytes]] = []
        for number, command in enumerate(self.commands, 1):
            source = running[-1].stdout if running else None
            sink = subprocess.PIPE if number < len(self.commands) else None
            running.append(subprocess.Popen(command, stdin=source, stdout=sink))
            if source is not None:
                source.close()  # so that the writer gets SIGPIPE when the reader ends
        statuses = [process.wait() for process in running]
        return next(filter(None, reversed(statuses)), 0)


@dataclass(frozen=True)
class Written:
    """A step that writes a file into the current folder."""

    about: str
    path: str
    content: str

    def text(self) -> str:
        """Return the step as shell code: a here-document without expansion."""
        end = "END"
        while re.search(rf"^{end}$", self.content, re.MULTILINE):
            end += "_"
        return f"cat > {shlex.quote(self.path)} <<'{end}'\n{self.content}{end}"

    def run(self) -> int:
        """Write the file and return 0."""
        write_atomic(Path(self.path), self.content)
        return 0


Step = Call | Written


@dataclass(frozen=True)
class Plan:
    """Notes for the user, the steps that start a training, and commands to use later."""

    notes: tuple[str, ...]
    steps: tuple[Step, ...]
    later: tuple[Step, ...] = ()

    def text(self) -> str:
        """Return the plan as a shell script: the steps, with notes and later commands as comments."""
        lines = [f"# {line}" for note in self.notes for line in textwrap.wrap(note, WIDTH - 2)]
        for number, step in enumerate(self.steps, 1):
            lines += [f"# {number}. {step.about}", step.text()]
        if any(isinstance(step, Call) and step.beside for step in self.steps):
            lines.append("wait")
        for step in self.later:
            lines += [f"# {step.about}:", *(f"#   {line}" for line in step.text().splitlines())]
        return "\n".join(lines) + "\n"


def command_text(command: Sequence[str]) -> str:
    """Return a command as shell code, broken before its flags if it is long."""
    words = [quoted(word) for word in command]
    whole = " ".join(words)
    if len(whole) <= WIDTH:
        return whole
    lines = [words[0]]
    for word in words[1:]:
        joins = not word.startswith("--") or (len(lines) > 1 and len(f"{lines[-1]} {word}") <= WIDTH - 2)
        if joins and "\n" not in word:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return " \\\n".join(lines)


def quoted(word: str) -> str:
    """Quote a word for a shell, leaving a flag outside the quotes: `--flag='two words'`."""
    match = re.fullmatch(r"(--[a-z][a-z-]*=)(.+)", word, re.DOTALL)
    return match[1] + shlex.quote(match[2]) if match else shlex.quote(word)


def flags(**values: str | bool) -> Command:
    """Return `--key=value` words. Omits empty values; `True` gives `--key`."""
    given = ((f"--{key.replace('_', '-')}", value) for key, value in values.items() if value)
    return tuple(flag if value is True else f"{flag}={value}" for flag, value in given)


def join(command: Iterable[str]) -> str:
    """Return a command as one line of shell code for a remote machine."""
    return " ".join(quoted(word) for word in command)


def gave_up(step: Call, status: int) -> ValueError:
    """Return the error for a failed step that other steps depend on."""
    return ValueError(f"it failed with status {status}: {step.text()}")


class _Readable(yaml.SafeDumper):
    """Indents lists below their key, and writes multi-line text as a block."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def yaml_text(described: Mapping[str, object]) -> str:
    """Return a mapping as ASCII YAML, because PyYAML reads some other characters as line breaks."""
    return yaml.dump(dict(described), Dumper=_Readable, sort_keys=False, width=1000)
