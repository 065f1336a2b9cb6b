"""Plans: the commands and files that start a training run on other hardware, printed as a shell script."""

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
"""Line length at which notes are wrapped and commands are split before their flags. A longer flag stays whole."""

ACTIONS = ("logs", "describe", "list", "delete")
"""Subcommands of `valkyrie-launch` that print a single later step of a plan, or run it with `--run`."""

Command = tuple[str, ...]
"""A program and its arguments."""


@dataclass(frozen=True)
class CommandStep:
    """A step that runs a command, or several joined by pipes.

    Args:
        description: short text about the step, which is printed before it.
        commands: the commands. Each reads the output of the previous one.
        until: if not empty, the printed script repeats the step until it prints this word.
        in_background: whether the next steps start without waiting for this one.
        action: the subcommand, one of `ACTIONS`, that prints or runs only this step; empty if none does.
    """

    description: str
    commands: tuple[Command, ...]
    until: str = ""
    in_background: bool = False
    action: str = ""

    def text(self) -> str:
        """Return the step as shell code."""
        text = " | ".join(command_text(command) for command in self.commands)
        if self.until:
            return f'until [ "$({text})" = {shlex.quote(self.until)} ]; do sleep 30; done'
        return f"{text} &" if self.in_background else text

    def run(self) -> int:
        """Run the commands once and return the exit status of the last one that fails, or 0."""
        processes: list[subprocess.Popen[bytes]] = []
        for number, command in enumerate(self.commands, 1):
            stdin = processes[-1].stdout if processes else None
            stdout = subprocess.PIPE if number < len(self.commands) else None
            processes.append(subprocess.Popen(command, stdin=stdin, stdout=stdout))
            if stdin is not None:
                stdin.close()  # so that the writer gets SIGPIPE when the reader ends
        statuses = [process.wait() for process in processes]
        return next(filter(None, reversed(statuses)), 0)


@dataclass(frozen=True)
class FileStep:
    """A step that writes a file in the current folder."""

    description: str
    path: str
    content: str

    def text(self) -> str:
        """Return the step as shell code: a here-document without expansion."""
        delimiter = "END"
        while re.search(rf"^{delimiter}$", self.content, re.MULTILINE):
            delimiter += "_"
        return f"cat > {shlex.quote(self.path)} <<'{delimiter}'\n{self._whole_lines}{delimiter}"

    def run(self) -> int:
        """Write the file and return 0."""
        write_atomic(Path(self.path), self._whole_lines)
        return 0

    @property
    def _whole_lines(self) -> str:
        """The content with a final newline, without which a here-document would not end."""
        return self.content + "\n" * (self.content[-1:] not in ("", "\n"))


Step = CommandStep | FileStep


@dataclass(frozen=True)
class Plan:
    """How an engine starts a training run.

    Args:
        notes: notes for the user, such as the cost.
        steps: steps that start the run, in order.
        later_steps: steps for the user to run later, such as showing the log.
    """

    notes: tuple[str, ...]
    steps: tuple[Step, ...]
    later_steps: tuple[Step, ...] = ()

    def text(self) -> str:
        """Return the plan as a shell script. Notes and later steps are comments."""
        lines = [f"# {line}" for note in self.notes for line in textwrap.wrap(note, WIDTH - 2, break_on_hyphens=False)]
        for number, step in enumerate(self.steps, 1):
            lines += [f"# {number}. {step.description}", step.text()]
        if any(isinstance(step, CommandStep) and step.in_background for step in self.steps):
            lines.append("wait")
        for step in self.later_steps:
            lines += [f"# {step.description}:", *(f"#   {line}" for line in step.text().splitlines())]
        return "\n".join(lines) + "\n"


def check_plan(plan: Plan, source: str) -> Plan:
    """Check the types in a plan, because users' engines are not type-checked. Returns the plan.

    Lists are accepted in place of tuples. Raises ValueError for other types, empty commands and unknown actions. The
    message starts with `source`, which names the engine and its file.
    """
    if not _is_list(plan.notes, str):
        raise ValueError(f'{source}: notes must be a tuple of strings, such as ("a note",).')
    for name, steps in (("steps", plan.steps), ("later_steps", plan.later_steps)):
        if not _is_list(steps, CommandStep, FileStep):
            raise ValueError(f"{source}: {name} must be a tuple of CommandStep and FileStep, such as (step,).")
    for step in (*plan.steps, *plan.later_steps):
        if isinstance(step, CommandStep) and step.action not in ("", *ACTIONS):
            raise ValueError(
                f'{source}: step "{step.description}": action={step.action!r} is not one of {", ".join(ACTIONS)}.'
            )
        if isinstance(step, FileStep) and not (isinstance(step.path, str) and isinstance(step.content, str)):
            raise ValueError(f'{source}: step "{step.description}": path and content must be strings.')
        if isinstance(step, CommandStep) and not (
            step.commands
            and _is_list(step.commands, tuple, list)
            and all(c and _is_list(c, str) for c in step.commands)
        ):
            raise ValueError(
                f'{source}: step "{step.description}": commands must be a tuple of tuples of strings, such as '
                '(("echo", "hi"),).'
            )
    return plan


def _is_list(values: object, *types: type) -> bool:
    return isinstance(values, tuple | list) and all(isinstance(value, types) for value in values)


def command_text(command: Sequence[str]) -> str:
    """Return a command as shell code, split before its flags if it is longer than `WIDTH`."""
    words = [quote(word) for word in command]
    one_line = " ".join(words)
    if len(one_line) <= WIDTH:
        return one_line
    lines = [words[0]]
    for word in words[1:]:
        stays_on_line = not word.startswith("--") or (len(lines) > 1 and len(f"{lines[-1]} {word}") <= WIDTH - 2)
        if stays_on_line and "\n" not in word:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return " \\\n".join(lines)


def quote(word: str) -> str:
    """Quote a word for a shell. The name of a flag stays outside of the quotes: `--flag='two words'`."""
    match = re.fullmatch(r"(--[a-z][a-z-]*=)(.+)", word, re.DOTALL)
    return match[1] + shlex.quote(match[2]) if match else shlex.quote(word)


def flags(**values: str | bool) -> Command:
    """Return `--key=value` for each value that is not empty, or `--key` for True. Underscores become dashes."""
    items = ((f"--{key.replace('_', '-')}", value) for key, value in values.items() if value)
    return tuple(flag if value is True else f"{flag}={value}" for flag, value in items)


def shell_text(command: Iterable[str]) -> str:
    """Return a command as one line of shell code."""
    return " ".join(quote(word) for word in command)


def step_error(step: CommandStep, status: int) -> ValueError:
    """Return the error to raise for a step that failed with this exit status."""
    return ValueError(f"the step `{step.description}` failed with status {status}: {step.text()}")


class _ReadableDumper(yaml.SafeDumper):
    """Indents lists below their key and writes multi-line strings as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ReadableDumper.add_representer(str, _represent_text)


def list_items(value: str) -> list[str]:
    """Return the items of a list as typed after `KEY=`, such as `[a,'b c']`. Empty for an empty string or `null`."""
    return [item for item in (item.strip(" '\"") for item in value.strip("[]").split(",")) if item not in ("", "null")]


def to_yaml(mapping: Mapping[str, object]) -> str:
    """Return a mapping as ASCII YAML, because PyYAML reads some other characters as line breaks."""
    return yaml.dump(dict(mapping), Dumper=_ReadableDumper, sort_keys=False, width=1000)
