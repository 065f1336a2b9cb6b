"""What the commands share: messages for wrong arguments, and a quiet end when the output is closed early."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

NOBODY_READS = 141
"""Exit status when the reader of a pipe has gone, as shells have it for SIGPIPE."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def leave_unread() -> NoReturn:
    """Exit after a BrokenPipeError: whoever read our output has gone, as `head` does, and no more is written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(NOBODY_READS)
