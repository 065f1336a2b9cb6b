"""Helpers of all commands: parse arguments, run the command, print its errors, and exit silently when a pipe closes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from valkyrie.extensions import FULL_ERROR, TRACEBACK_HINT, describe_user_error
from valkyrie.paths import error_reason
from valkyrie.problems import suggest
from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_REFUSED, USER_CODE_FAILED, limit_failed_exit
from valkyrie.processes.interrupt import repair_std_streams
from valkyrie.units import escape_control_characters

BROKEN_PIPE_STATUS = 141
"""Exit status after the reader of our output closed the pipe. Shells report the same status for SIGPIPE."""

_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF}
"""Errors of failed writes to stdout: a full disk or quota, a terminal that is gone, a closed descriptor."""
_MAX_PATH_LENGTH = 160
"""Maximum number of characters of a path in a message."""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that prints errors in one line, without the usage."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None) -> Any:
        """Parse the arguments. The error for an unknown argument suggests a correction."""
        words = sys.argv[1:] if args is None else list(args)
        if "--" in words:  # intermixed parsing drops the words after it
            index = words.index("--")
            words[index:] = [f"./{word}" if word.startswith("-") else word for word in words[index + 1 :]]
        command, subcommands = self, _subcommands(self)
        if subcommands and words and words[0] in subcommands:
            command, words = subcommands[words[0]], words[1:]
        if command is self and subcommands:
            parsed, unknown = self.parse_known_args(words, namespace)
        else:
            parsed, unknown = command.parse_known_intermixed_args(words, namespace)  # paths may follow options
        if unknown:
            command.refuse_argument(unknown[0])
        return parsed

    def refuse_argument(self, word: str) -> NoReturn:
        """Print that the command has no argument `word`, with a suggestion, and exit with status 2."""
        self.error(f"{word} is not an argument{_advice(self, word)}")

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(EXIT_REFUSED, f"{self.prog}: {message}\n")


def _subcommands(parser: argparse.ArgumentParser) -> Mapping[str, OneLineParser]:
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((group.choices for group in groups), {})


def _advice(parser: argparse.ArgumentParser, word: str) -> str:
    """Return the advice that follows "WORD is not an argument": a correct form, the nearest flag, or `--help`.

    It starts with punctuation.
    """
    flag = word.partition("=")[0]
    if os.path.exists(word):
        return f", but there is such a file. Write ./{word}."
    for action in parser._actions:
        if not action.option_strings and flag.startswith("-") and flag.lstrip("-") == action.dest:
            return f": write the {action.dest} without {flag}."
    flags = {name.lstrip("-"): name for action in parser._actions for name in action.option_strings}
    text = flag.lstrip("-")
    nearest = next((name for name in flags if text and name.startswith(text)), None) or suggest(text, flags, cutoff=0.7)
    return f". Did you mean {flags[nearest]}?" if nearest else f". See {parser.prog} --help."


def run_command(command: str, body: Callable[[list[str]], int | None], argv: Sequence[str] | None) -> None:
    """Run a command, and exit the process if `body` returns a status or fails.

    For an error that a user's module caused (`describe_user_error`), prints its file, line and message to stderr and
    exits with status 1, or raises it if HYDRA_FULL_ERROR=1. For any other ValueError or OSError, prints the message
    without a traceback and exits with status 2. Raises all other errors. If `argv` is None and the command fails, also
    forces the process to exit if the interpreter's exit hangs (`limit_failed_exit`).

    Args:
        command: Name of the command, for messages.
        body: Called with the arguments. Returns the exit status, or None for 0.
        argv: The arguments, or None for those of the process.
    """
    with limit_failed_exit() if argv is None else contextlib.nullcontext():
        _run_command(command, body, argv)


def _run_command(command: str, body: Callable[[list[str]], int | None], argv: Sequence[str] | None) -> None:
    repair_std_streams()
    current_folder(command)
    status = None
    try:
        arguments = strip_comment(sys.argv[1:] if argv is None else argv)
        refuse_empty_argument(arguments)
        status = body(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        exit_on_broken_pipe()
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except Exception as error:
        if user_error := describe_user_error(error):
            if os.environ.get(FULL_ERROR) == "1":
                raise
            fail(command, f"{user_error} {TRACEBACK_HINT}", USER_CODE_FAILED)
        if not isinstance(error, ValueError | OSError):
            raise
        fail(command, error_text(error))
    if status is not None:
        sys.exit(status)


def refuse_empty_argument(arguments: Sequence[str]) -> None:
    """Raise ValueError if an argument is an empty string, which as a path would mean the current folder."""
    for position, word in enumerate(arguments):
        if re.fullmatch(r"(--[a-z-]+=)?", word):
            flag = word or arguments[max(position - 1, 0)]
            name = f"{flag} ''" if flag.startswith("-") else f"argument {position + 1} ('')"
            raise ValueError(f"{name}: an empty string is not a value. Write one, such as . for the current folder.")


def current_folder(command: str) -> str:
    """Return the current folder. Exits with a message that begins with `command` if the folder was deleted."""
    try:
        return os.getcwd()
    except OSError:
        fail(command, "the current folder was deleted. Change to another folder (cd).")


def strip_comment(arguments: Sequence[str]) -> list[str]:
    """Drop a lone `#` and the arguments after it.

    Interactive zsh does not strip comments, so a command pasted with a trailing comment receives its words as
    arguments.
    """
    return list(takewhile(lambda argument: argument != "#", arguments))


def error_text(error: Exception) -> str:
    """Return the message for an error. For an OSError with a file name, the message starts with the path."""
    if (text := output_error(error)) is not None:
        return text
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
        return f"{name if len(name) < _MAX_PATH_LENGTH else name[:_MAX_PATH_LENGTH] + '...'}: {error.strerror.lower()}."
    return str(error)


def output_error(error: Exception) -> str | None:
    """Return an error message if `error` is a failed write to stdout, for example on a full disk, or None if it is not.

    Python's error after a failed print does not name stdout, so this writes a newline to find out whether stdout fails.
    If it does, discards the unwritten output.
    """
    if type(error) is not OSError or error.filename is not None or error.errno not in _WRITE_ERRORS:
        return None
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"the output (stdout) cannot be written: {error_reason(error)}."
    return None


def fail(command: str, message: str, status: int = EXIT_REFUSED) -> NoReturn:
    """Print an error message of `command` to stderr, as a list if it has several lines, and exit with `status`."""
    lines = escape_control_characters(message).splitlines() or ["unknown error"]
    head = f"{command}: " if len(lines) == 1 else f"{command}: {len(lines)} problems\n  - "
    print(head + "\n  - ".join(lines), file=sys.stderr)
    sys.exit(status)


def exit_on_broken_pipe() -> NoReturn:
    """Exit silently after a BrokenPipeError: the reader of our output, such as `head`, has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE_STATUS)
