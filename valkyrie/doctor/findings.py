"""Checks, their findings, and the table of the findings of all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from valkyrie.config.explain import explain
from valkyrie.config.run import Run
from valkyrie.extensions import describe_user_error
from valkyrie.processes.team import ALONE, Team

OK, WARNING, FAILURE = "ok", "warning", "FAILS"
"""Severities of a finding. `FAILURE`: the run would fail."""
_STYLES = {OK: "green", WARNING: "yellow", FAILURE: "bold red"}
_MAX_OK_FINDINGS = 8
"""Maximum number of distinct `ok` findings shown per check."""


class Finding(NamedTuple):
    """A result of a check on one process: name of the check, severity, description, and remedy (may be empty)."""

    check: str
    severity: str
    text: str
    remedy: str = ""


CheckResults = Iterator[tuple[str, ...]]
"""Results of a check, as (severity, description) or (severity, description, remedy)."""


class CheckContext(NamedTuple):
    """Input of each check of `valkyrie-doctor`.

    `team` connects the `process_count` processes of the run. It is `ALONE` until they are connected.
    """

    run: Run
    process_count: int = 1
    team: Team = ALONE


class Check(NamedTuple):
    """A named check. It fails if `function` raises ValueError, OSError or an error in a user's module."""

    name: str
    function: Callable[[CheckContext], CheckResults]


def run_checks(checks: Iterable[Check], context: CheckContext) -> list[Finding]:
    """Run the checks and return their findings in order."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += [Finding(check.name, *result) for result in check.function(context)]
        except Exception as error:
            text = describe_user_error(error) or (
                str(explain(error)) if isinstance(error, (ValueError, OSError)) else None
            )
            if text is None:
                raise
            findings.append(Finding(check.name, FAILURE, text))
    return findings


class FindingsTable:
    """Prints tables of findings and a summary.

    `hosts` are the host names of all processes. It is empty for a single process.
    """

    def __init__(self, console: Console, hosts: Sequence[str] = ()) -> None:
        self.hosts = list(hosts)
        self._console = console
        self._counts: Counter[str] = Counter()

    @property
    def failed(self) -> bool:
        """Whether a finding with severity `FAILURE` has been added."""
        return self._counts[FAILURE] > 0

    def add(self, findings_by_process: Sequence[Iterable[Sequence[str]]]) -> None:
        """Print one table with the findings of all processes. Equal findings share a row.

        `findings_by_process` has the findings of each process, as `Finding` or as sequences of its fields.
        """
        table = Table.grid(padding=(0, 2))
        table.add_column(width=7)
        table.add_column(width=16)
        table.add_column(overflow="fold")
        for finding, processes, omitted_count in _merge_findings(
            [[Finding(*f) for f in findings] for findings in findings_by_process]
        ):
            self._counts[finding.severity] += 1
            prefix = self._process_prefix(processes, len(findings_by_process))
            text = Text(f"{prefix}{finding.text}{f' (and {omitted_count} more that are ok)' if omitted_count else ''}")
            if finding.remedy:
                text.append(f"\n{finding.remedy}", style="italic")
            table.add_row(Text(finding.severity, style=_STYLES[finding.severity]), finding.check, text)
        self._console.print(table)

    def print_summary(self) -> int:
        """Print a summary and return the exit status: 1 if the run would fail, else 0."""
        failure_count, warning_count = self._counts[FAILURE], self._counts[WARNING]
        summary = f"{failure_count} problem{'s' * (failure_count > 1)}" if failure_count else "no problems found"
        summary += f", {warning_count} warning{'s' * (warning_count > 1)}" if warning_count else ""
        self._console.print(
            f"{summary}: the run would fail" if failure_count else summary,
            style=_STYLES[FAILURE if failure_count else OK],
        )
        return int(self.failed)

    def _process_prefix(self, processes: Sequence[int], count: int) -> str:
        if len(processes) == count:
            return ""
        if len(processes) == 1:
            (index,) = processes
            return f"process {index}{f' ({self.hosts[index]})' if self.hosts else ''}: "
        return f"processes {', '.join(map(str, processes[:8]))}{', ...' if len(processes) > 8 else ''}: "


def _merge_findings(findings_by_process: Sequence[Sequence[Finding]]) -> list[tuple[Finding, list[int], int]]:
    """Merge equal findings of all processes, check by check.

    Returns rows (finding, its processes, number of `ok` findings omitted after it).
    """
    processes_by_check: dict[str, dict[Finding, list[int]]] = {}
    for index, findings in enumerate(findings_by_process):
        for finding in findings:
            processes_by_check.setdefault(finding.check, {}).setdefault(finding, []).append(index)
    rows = []
    for processes_by_finding in processes_by_check.values():
        ok_rows = [(f, processes, 0) for f, processes in processes_by_finding.items() if f.severity == OK]
        if len(ok_rows) > _MAX_OK_FINDINGS:
            last, processes, _ = ok_rows[_MAX_OK_FINDINGS - 1]
            ok_rows = [*ok_rows[: _MAX_OK_FINDINGS - 1], (last, processes, len(ok_rows) - _MAX_OK_FINDINGS)]
        rows += [*ok_rows, *((f, processes, 0) for f, processes in processes_by_finding.items() if f.severity != OK)]
    return rows
