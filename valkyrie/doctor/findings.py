"""A finding of the doctor, and the table of what all processes have found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

FINE, WARNING, FAILS = "ok", "warning", "FAILS"
"""What a finding says of the run: nothing against it, something to know, it would fail."""
_STYLES = {FINE: "green", WARNING: "yellow", FAILS: "bold red"}
_ALIKE = 8
"""Answers of different processes that are shown of a check that none of them fails."""


class Finding(NamedTuple):
    """What one check came to on one process, in words, and what to do about it where that is needed."""

    check: str
    verdict: str
    text: str
    remedy: str = ""


class Findings:
    """The table of a doctor's findings, printed part by part, and what they come to."""

    def __init__(self, console: Console, hosts: Sequence[str] = ()) -> None:
        """`hosts` are the names of the hosts of all processes; none where there is one process."""
        self.hosts = list(hosts)
        self._console = console
        self._counts: Counter[str] = Counter()

    @property
    def failed(self) -> bool:
        """Whether something would fail."""
        return self._counts[FAILS] > 0

    def add(self, of_processes: Sequence[Iterable[Finding]]) -> None:
        """Print what every process has found, those with the same answer in one row."""
        table = Table.grid(padding=(0, 2))
        table.add_column(width=7)
        table.add_column(width=16)
        table.add_column(overflow="fold")
        for row in _rows([list(map(Finding._make, found)) for found in of_processes]):
            finding, processes, left = row
            self._counts[finding.verdict] += 1
            who = self._who(processes, len(of_processes))
            text = Text(f"{who}{finding.text}{f' (and {left} more answers that are fine)' if left else ''}")
            if finding.remedy:
                text.append(f"\n{finding.remedy}", style="italic")
            table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), finding.check, text)
        self._console.print(table)

    def conclude(self) -> int:
        """Print what all of it comes to, and return the exit status: 1 where something would fail."""
        fails, warnings = self._counts[FAILS], self._counts[WARNING]
        known = f"{warnings} warning{'s' * (warnings > 1)}" if warnings else ""
        if fails:
            self._console.print(f"{fails} of these would fail{f', {known}' if known else ''}", style=_STYLES[FAILS])
        else:
            self._console.print(f"nothing here would fail{f', {known}' if known else ''}", style=_STYLES[FINE])
        return int(self.failed)

    def _who(self, processes: Sequence[int], count: int) -> str:
        if len(processes) == count:
            return ""
        if len(processes) == 1:
            (index,) = processes
            return f"process {index}{f' ({self.hosts[index]})' if self.hosts else ''}: "
        named = ", ".join(map(str, processes[:8])) + (", ..." if len(processes) > 8 else "")
        return f"processes {named}: "


def _rows(of_processes: Sequence[Sequence[Finding]]) -> list[tuple[Finding, list[int], int]]:
    """Return each answer with the processes that gave it, check by check, and how many answers are left out behind it.

    What is amiss is never left out.
    """
    by_check: dict[str, dict[Finding, list[int]]] = {}
    for index, found in enumerate(of_processes):
        for finding in found:
            by_check.setdefault(finding.check, {}).setdefault(finding, []).append(index)
    rows = []
    for answers in by_check.values():
        amiss = [(f, who, 0) for f, who in answers.items() if f.verdict != FINE]
        fine = [(f, who, 0) for f, who in answers.items() if f.verdict == FINE]
        if len(fine) > _ALIKE:
            last, who, _ = fine[_ALIKE - 1]
            fine = [*fine[: _ALIKE - 1], (last, who, len(fine) - _ALIKE)]
        rows += [*fine, *amiss]
    return rows
