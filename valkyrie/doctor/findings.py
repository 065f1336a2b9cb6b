"""Checks, their findings, and the table of the findings of all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from valkyrie.config.run import Run
from valkyrie.processes.team import ALONE, Team

FINE, WARNING, FAILS = "ok", "warning", "FAILS"
"""Severity of a finding: nothing to do, something to know, the run would fail."""
_STYLES = {FINE: "green", WARNING: "yellow", FAILS: "bold red"}
_MOST_FINE = 8
"""Maximum number of different `ok` findings shown per check."""


class Finding(NamedTuple):
    """Result of a check on one process: severity, a line of text, and a remedy if one is needed."""

    check: str
    verdict: str
    text: str
    remedy: str = ""


Answers = Iterator[tuple[str, ...]]
"""Results of a check: severity, text, and a remedy if one is needed."""


class Examined(NamedTuple):
    """Input of a check: the run, its number of processes, and their team once they are connected."""

    run: Run
    processes: int = 1
    team: Team = ALONE


class Check(NamedTuple):
    """A named check of a run. A ValueError or OSError of `look` counts as a failure."""

    name: str
    look: Callable[[Examined], Answers]


def findings_of(checks: Iterable[Check], examined: Examined) -> list[Finding]:
    """Run the checks and return their findings in order."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += [Finding(check.name, *answer) for answer in check.look(examined)]
        except (ValueError, OSError) as error:
            findings.append(Finding(check.name, FAILS, str(error)))
    return findings


class FindingsTable:
    """Prints tables of findings and the verdict.

    `hosts` are the host names of all processes, or empty for one process.
    """

    def __init__(self, console: Console, hosts: Sequence[str] = ()) -> None:
        self.hosts = list(hosts)
        self._console = console
        self._counts: Counter[str] = Counter()

    @property
    def failed(self) -> bool:
        """Whether the run would fail."""
        return self._counts[FAILS] > 0

    def add(self, by_process: Sequence[Iterable[Sequence[str]]]) -> None:
        """Print the findings of all processes. Equal findings share a row."""
        table = Table.grid(padding=(0, 2))
        table.add_column(width=7)
        table.add_column(width=16)
        table.add_column(overflow="fold")
        for finding, processes, more in _rows([[Finding(*f) for f in findings] for findings in by_process]):
            self._counts[finding.verdict] += 1
            who = self._who(processes, len(by_process))
            text = Text(f"{who}{finding.text}{f' (and {more} more answers that are fine)' if more else ''}")
            if finding.remedy:
                text.append(f"\n{finding.remedy}", style="italic")
            table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), finding.check, text)
        self._console.print(table)

    def conclude(self) -> int:
        """Print the verdict and return the exit status: 1 if the run would fail."""
        fails, warnings = self._counts[FAILS], self._counts[WARNING]
        known = f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
        head = f"{fails} of these would fail" if fails else "nothing here would fail"
        self._console.print(head + known, style=_STYLES[FAILS if fails else FINE])
        return int(self.failed)

    def _who(self, processes: Sequence[int], count: int) -> str:
        if len(processes) == count:
            return ""
        if len(processes) == 1:
            (index,) = processes
            return f"process {index}{f' ({self.hosts[index]})' if self.hosts else ''}: "
        return f"processes {', '.join(map(str, processes[:8]))}{', ...' if len(processes) > 8 else ''}: "


def _rows(by_process: Sequence[Sequence[Finding]]) -> list[tuple[Finding, list[int], int]]:
    """Return each finding with its processes and the number of `ok` findings omitted after it, check by check."""
    by_check: dict[str, dict[Finding, list[int]]] = {}
    for index, findings in enumerate(by_process):
        for finding in findings:
            by_check.setdefault(finding.check, {}).setdefault(finding, []).append(index)
    rows = []
    for answers in by_check.values():
        fine = [(f, processes, 0) for f, processes in answers.items() if f.verdict == FINE]
        if len(fine) > _MOST_FINE:
            last, processes, _ = fine[_MOST_FINE - 1]
            fine = [*fine[: _MOST_FINE - 1], (last, processes, len(fine) - _MOST_FINE)]
        rows += [*fine, *((f, processes, 0) for f, processes in answers.items() if f.verdict != FINE)]
    return rows
