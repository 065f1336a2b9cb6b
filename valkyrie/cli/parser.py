"""What the commands share: messages for wrong arguments, and a quiet end when the output is closed early."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NoReturn

from valkyrie.processes.ending import INTERRUPTED
from valkyrie.processes.interrupt import repair_std_streams

NOBODY_READS = 141
"""Exit status when the reader of a pipe has gone, as shells have it for SIGPIPE."""


def without_comment(arguments: Sequence[str]) -> list[str]:
    """Return the arguments before a lone `#`: zsh hands on the comment behind a pasted command as words."""
    return list(takewhile(lambda argument: argument != "#", arguments))


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


@contextlib.contextmanager
def ends_in_words(command: str) -> Iterator[None]:
    """A context for a command: a user's mistake is one line on stderr and exit status 2, without a traceback."""
    repair_std_streams()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        leave_unread()
    except (ValueError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


def leave_unread() -> NoReturn:
    """Exit after a BrokenPipeError: whoever read our output has gone, as `head` does, and no more is written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(NOBODY_READS)
