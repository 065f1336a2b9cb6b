"""The order and the time limit of the slow tests: `pytest -m slow --minutes 30`.

With `--minutes`, tests affected by changes run first. The order of the other files is rotated with every commit, so
that a few bounded runs reach all of them. Tests that were not reached are skipped, counted and listed.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
END_TIME_VARIABLE = "VALKYRIE_TESTS_UNTIL"
"""Environment variable that passes the end time to the workers of pytest-xdist, in seconds since the epoch."""
NOT_REACHED_REASON = "not reached: the minutes of --minutes are over"
GOLDEN_FRACTION = 0.6180339887
"""Golden ratio minus one. Its multiples modulo one are spread evenly, so consecutive runs begin far apart."""


def add_option(parser: pytest.Parser) -> None:
    """Add the option `--minutes` to pytest."""
    parser.addoption("--minutes", type=float, help="start no test after this many minutes; take turns by commit")


def store_end_time(config: pytest.Config) -> None:
    """Store the end time in the environment variable `END_TIME_VARIABLE`, before the workers start.

    Does nothing without `--minutes`, or in a worker, which inherits the variable.
    """
    minutes = config.getoption("--minutes")
    if minutes is not None and not hasattr(config, "workerinput"):  # a worker has it from the process that started it
        os.environ[END_TIME_VARIABLE] = str(time.time() + 60 * minutes)


def rotate_files(files: list[str], changed: set[str], turn: int) -> list[str]:
    """Return the test files in running order: files affected by changes, then the rest, rotated by `turn`."""
    start = int(len(files) * (turn * GOLDEN_FRACTION % 1.0))
    rotated = files[start:] + files[:start]
    return sorted(rotated, key=lambda file: not is_affected(file, changed))


def is_affected(file: str, changed: set[str]) -> bool:
    """Return whether a test file, or a module of the package that it imports, has changed."""
    if file in changed:
        return True
    text = (ROOT / file).read_text()
    modules = re.findall(r"^\s*(?:from|import) (valkyrie[\w.]*)", text, re.M)
    sources = {module.replace(".", "/") for module in modules}
    return any(f"{source}{suffix}" in changed for source in sources for suffix in (".py", "/__init__.py"))


def sort_items(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the collected tests by file, in the order of `rotate_files`. Does nothing without `--minutes`."""
    if config.getoption("--minutes") is None:
        return
    names = [_file(item) for item in items]
    rank = {file: i for i, file in enumerate(rotate_files(sorted(set(names)), changed_files(), count_commits()))}
    items.sort(key=lambda item: rank[_file(item)])


def skip_when_over(item: pytest.Item) -> None:
    """Skip a test if the time is up. The summary counts the skipped tests."""
    end_time = os.environ.get(END_TIME_VARIABLE)
    if end_time is not None and item.config.getoption("--minutes") is not None and time.time() > float(end_time):
        # --minutes asks for a run that ends in time. A test that was not reached must not count as passed, so it is
        # skipped and listed in the summary. Without --minutes, as in the default run, this skips nothing.
        pytest.skip(NOT_REACHED_REASON)


def print_skipped(terminal: Any, config: pytest.Config) -> None:
    """Print the number of tests that were not reached, in total and by file. Does nothing without `--minutes`."""
    minutes = config.getoption("--minutes")
    if minutes is None:
        return
    skipped = Counter(
        report.nodeid.partition("::")[0]
        for report in terminal.stats.get("skipped", [])
        if NOT_REACHED_REASON in str(report.longrepr)
    )
    files = ", ".join(f"{file} {count}" for file, count in skipped.items())
    terminal.write_line(f"{skipped.total()} tests not reached in {minutes:g} minutes{': ' if files else ''}{files}")


def changed_files() -> set[str]:
    """Return the tracked files that differ between a base commit and the working tree. Empty outside a checkout.

    The base is the commit in the environment variable `CI_BASE`, if set, otherwise the merge base with origin/main. If
    this is HEAD itself, as on main, or if there is no origin/main, the base is the parent of HEAD.
    """
    base = os.environ.get("CI_BASE") or _git("merge-base", "HEAD", "origin/main")
    if base in ("", _git("rev-parse", "HEAD")):
        base = "HEAD~1"
    return set(_git("diff", "--name-only", base).splitlines())


def count_commits() -> int:
    """Return the number of commits up to this one, or 0 outside a checkout."""
    return int(_git("rev-list", "--count", "HEAD") or 0)


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
