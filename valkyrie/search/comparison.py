"""Compares predictions of several layouts of a program: a ranked table, a record and a page."""

from __future__ import annotations

import io
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from valkyrie.parts import PartKind, sum_seconds
from valkyrie.paths import disk_errors, require_suffix, write_atomic
from valkyrie.records import write_record
from valkyrie.runs.columns import FORMATS, Column, terminal_table
from valkyrie.runs.folder import package_versions
from valkyrie.search.compile.prediction import CompileStatus, Prediction
from valkyrie.search.compile.show import describe_interval
from valkyrie.units import count_text, duration_text, memory_text, percent_text

if TYPE_CHECKING:
    from valkyrie.results import Result
    from valkyrie.search.compile.partitioner import ProgramEstimate

SEARCH_FILE, PAGE_FILE = "search.json", "report.html"
"""Names of the record and the HTML page that `Comparison.save` writes."""


MAX_RATIO = 20.0
"""A larger ratio of measured to predicted time, or one below its inverse, is probably an error of units."""


@dataclass(frozen=True)
class ComparedProgram:
    """A row of a comparison. None means unknown, unless stated otherwise.

    Args:
        name: Name of the layout.
        axes: Sizes of the mesh axes by name.
        status: Status of the prediction, or None if the layout is only estimated.
        reason: Why the status is not `ok`, or None.
        step_s: Step time in seconds: measured, or else predicted and multiplied by the comparison's ratio. Predicted
            times are those of compiled programs, or else estimates.
        predicted_s: Predicted step time in seconds.
        measured_s: Measured step time in seconds.
        tokens_per_second: Tokens (or other units) per second on all devices at `step_s`.
        peak: Peak memory of one device in bytes, or the bytes that it needs if it does not fit.
        waiting: Share of the step spent waiting for communication, from 0 to 1.
        faults: Number of faults in the sharding, or None if the program was not compiled.
        interval: Ends of the interval of a predicted step time relative to it, such as (-0.1, 0.2).
        estimated_s: Step time in seconds that was estimated before the program was compiled.
        same_as: Name of an earlier row with the same program, or None if there is none. Tables omit such rows.
    """

    name: str
    axes: dict[str, int]
    status: CompileStatus | None
    reason: str | None = None
    step_s: float | None = None
    predicted_s: float | None = None
    measured_s: float | None = None
    tokens_per_second: float | None = None
    peak: int | None = None
    waiting: float | None = None
    faults: int | None = None
    interval: tuple[float, float] | None = None
    estimated_s: float | None = None
    same_as: str | None = None

    @property
    def interval_text(self) -> str:
        """The interval of a predicted step time, or `unknown`. Empty if the step time is measured or unknown."""
        if self.step_s is None or self.measured_s is not None:
            return ""
        return "unknown" if self.interval is None else FORMATS["range"](self.interval)

    @property
    def source_text(self) -> str:
        """Source of the step time: `measured`, `compiled` (and replayed) or `estimated`. Empty if none."""
        if self.step_s is None:
            return ""
        return "measured" if self.measured_s else "estimated" if self.status is None else "compiled"

    @property
    def fits_text(self) -> str:
        """`yes`, `no`, `unknown` if the program is only estimated, or the status if its compile failed."""
        if self.status is None:
            return "unknown"
        return {CompileStatus.ok: "yes", CompileStatus.does_not_fit: "no"}.get(self.status, self.status.value)


@dataclass(frozen=True)
class ComparisonRecord:
    """Content of the `search.json` that `valkyrie.search` writes for a program.

    The key `rows` distinguishes it from the `search.json` of `mode=search` (`report.records.is_program_search`), so
    every version must have this key.

    Args:
        target: Description of the slice.
        best: Name of the fastest layout that fits, or None if none fits.
        rows: The layouts, in the order of `Comparison.results`.
        ratio: Median ratio of measured to predicted step time, or None.
        unit: What the rates count, such as `tokens`.
        notes: Lines below the table.
        versions: Versions of Valkyrie and the libraries it uses.
        untried: Names of the layouts that a search has not compiled.
    """

    target: str
    best: str | None
    rows: tuple[ComparedProgram, ...]
    ratio: float | None
    unit: str
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    schema: int = 1

    @property
    def table_rows(self) -> list[ComparedProgram]:
        """The rows of a table: one per program, and those with a measured time."""
        return [row for row in self.rows if row.same_as is None or row.measured_s is not None]


@dataclass(frozen=True)
class Comparison:
    """Predictions of several layouts of a program, shown as a table by `print` and in notebooks.

    Args:
        results: Results by name, the fastest layout that fits first. Layouts that do not fit or fail are last.
        measured_s: Measured step times in seconds by name.
        notes: Lines to print below the table, such as why a search ended.
        untried: Names of the layouts that a search has not compiled.
        target: Description of the slice. If empty, that of the results is used.
        estimates: Estimates by name, of compiled layouts and of others.
    """

    results: Mapping[str, Result]
    measured_s: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    target: str = ""
    estimates: Mapping[str, ProgramEstimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = sorted(self.results, key=self._sort_key)
        object.__setattr__(self, "results", {name: self.results[name] for name in order})

    def __getitem__(self, name: str) -> Result:
        return self.results[name]

    @property
    def best(self) -> str | None:
        """Name of the fastest layout that fits, or None if none fits."""
        return next((name for name, result in self.results.items() if result.fits and result.step_s), None)

    @property
    def ratio(self) -> float | None:
        """Factor on predictions in `step_s`: median ratio of measured to predicted step time, or None if unknown."""
        predicted = {name: result.step_s for name, result in self.results.items() if result.step_s}
        ratios = [seconds / predicted[name] for name, seconds in self.measured_s.items() if name in predicted]
        return statistics.median(ratios) if ratios else None

    @property
    def uncompiled(self) -> list[str]:
        """Names of the layouts that are estimated but not compiled, the fastest first."""
        names = [name for name, estimate in self.estimates.items() if name not in self.results and not estimate.reason]
        return sorted(names, key=lambda name: self.estimates[name].step_s)

    def step_s(self, name: str | None) -> float | None:
        """Return the measured step time of a layout, or else its predicted one times `ratio`. None if unknown.

        The predicted time of a layout that was not compiled is its estimate. `name` may be `best`, which can be None.
        """
        if name is None:
            return None
        predicted = self.estimates[name].step_s if name in self.uncompiled else self.results[name].step_s
        return self.measured_s.get(name, None if predicted is None else predicted * (self.ratio or 1.0))

    def describe(self, name: str) -> str:
        """Return a line with the result of a layout: whether it fits or why it failed, step time and peak memory."""
        row = self._row(name)
        facts = [f"fits: {row.fits_text}" if row.reason is None else f"{row.fits_text}: {row.reason}"]
        facts += [] if row.step_s is None else [duration_text(row.step_s)]
        facts += [] if row.peak is None else [memory_text(row.peak)]
        return ", ".join(facts)

    @property
    def record(self) -> ComparisonRecord:
        """The content of `search.json`: rows, best layout and notes."""
        foreign_programs = [_prediction(result).program for result in self.results.values()]
        description = self.target or next((program.described for program in foreign_programs if program), "")
        unit = next((program.unit for program in foreign_programs if program), "tokens")
        rows = self._rows()
        notes = (*self._failure_lines(), *self.notes, *self._estimate_lines())
        return ComparisonRecord(description, self.best, rows, self.ratio, unit, notes, package_versions(), self.untried)

    def __str__(self) -> str:
        from valkyrie.train.screen import make_console

        record, text = self.record, io.StringIO()
        console = make_console(text)
        console.print(terminal_table(comparison_columns(record), record.table_rows))
        for line in self._note_lines(record):
            console.print(line)
        return text.getvalue()

    def __repr__(self) -> str:
        best = self.best or ("none fits" if self.results else "none compiled")
        return f"<Comparison of {self._count_text()}, best: {best}>"

    def html(self, path: str | Path) -> Path:
        """Write a standalone HTML page with the table and the report of each layout. Returns its path.

        Raises ValueError if the name does not end in `.html`.
        """
        return write_atomic(require_suffix(path, ".html"), self._page(), "another path")

    def save(self, folder: str | Path) -> Path:
        """Write `search.json` and the page `report.html` into a folder, creating it if missing. Returns the folder.

        Raises ValueError if the folder belongs to a run, a sweep or a search of layouts, or if it has one of these
        files and the file is not from `valkyrie.search`.
        """
        from valkyrie.search.folder import refuse_other_folder

        refuse_other_folder(Path(folder))
        return self.write(Path(folder))

    def write(self, folder: Path) -> Path:
        """Write the files of `save`, replacing any that the folder has. Returns the folder."""
        with disk_errors(folder, "another folder="):
            folder.mkdir(parents=True, exist_ok=True)
        write_record(folder / SEARCH_FILE, self.record)
        self.html(folder / PAGE_FILE)
        return folder

    def log_to_wandb(self, project: str, folder: str | Path, *, name: str = "search") -> str | None:
        """Report the table, the best layout and the page to W&B, as one run of the job type `search`.

        `WANDB_MODE` and `WANDB_API_KEY` select online or offline. Repeated reports from the same folder update the same
        run. Prints a line to stderr and returns it: the run's folder, with its address or, offline, the command that
        uploads it; or why W&B did not start. Returns None if W&B is off. Raises ValueError for an illegal `project`.

        Args:
            project: W&B project.
            folder: Folder for W&B's files, created if missing.
            name: Name of the W&B run and of its group.
        """
        from valkyrie.checksums import digest
        from valkyrie.problems import raise_problems
        from valkyrie.runs.wandb_writer import TrackingConfig, WandbMode, WandbWriter, group_tag

        config, record, folder = TrackingConfig(project=project), self.record, Path(folder)
        raise_problems([*config.problems("project"), *config.environment_problems()])
        with disk_errors(folder, "another folder"):
            folder.mkdir(parents=True, exist_ok=True)
        writer = WandbWriter(config, folder)
        run_id = digest(repr((project, folder.resolve().name, folder.stat().st_ino, name)))[:16]
        fields = {"target": record.target, "unit": record.unit, "layouts": len(record.rows), "folder": str(folder)}
        fields["versions"] = record.versions
        tags = [group_tag("target", record.target)]
        run = writer.start(
            name=name, run_id=run_id, group=name, job_type="search", fields=fields, tags=tags, resume="allow"
        )
        if run is None:
            return _print_to_stderr(writer.note)
        import wandb

        columns = comparison_columns(record)
        cells = [[column.wandb_value(row) for column in columns] for row in record.rows]
        table = wandb.Table(columns=[column.key for column in columns], data=cells, allow_mixed_types=True)
        run.log({"layouts": table, "page": wandb.Html(self._page(), inject=False)})
        if self.best is not None:
            best = {column.key: column.wandb_value(self._row(self.best)) for column in columns}
            run.summary.update({f"best/{key}": value for key, value in best.items() if value is not None})
        run.finish()
        run_folder = folder / "wandb" / Path(run.dir).parent.name
        upload = f"offline. To upload it later: wandb sync {shlex.quote(str(run_folder))}"
        return _print_to_stderr(
            writer.note or f"W&B run in {run_folder}: {run.url if writer.mode is WandbMode.online else upload}"
        )

    def _repr_html_(self) -> str:
        from html import escape

        return f'<iframe srcdoc="{escape(self._page())}" style="width: 100%; height: 480px; border: 0"></iframe>'

    def _page(self) -> str:
        from valkyrie.report.program import comparison_page

        record = self.record
        table = terminal_table(comparison_columns(record), record.table_rows)
        records = {name: _prediction(result) for name, result in self.results.items()}
        title = f"{self._title()} on {record.target}"
        label = "fastest compiled" if self.untried else "fastest"
        return comparison_page(title, self._subject(), table, self._note_lines(record), records, (label, self.best))

    @property
    def _names(self) -> list[str]:
        return [*self.results, *self.untried]

    @property
    def _compiled_names(self) -> list[str]:
        return [name for name, result in self.results.items() if result.fits is not None]

    def _title(self) -> str:
        from valkyrie.search.program_order import count_programs

        compiled, layouts = self._compiled_names, count_text(len(self._names), "layout")
        if not compiled:
            return f"{layouts}, none compiled"
        if len(compiled) == len(self._names):
            return f"Fastest of {layouts}"
        count, total = count_programs(compiled, self.estimates), count_programs(self._names, self.estimates)
        fastest = "The only compiled" if count == 1 else f"Fastest of {count} compiled"
        if total == len(self._names):
            return f"{fastest} layout{'s' * (count > 1)} (of {total})"
        return f"{fastest} program{'s' * (count > 1)} (of {total} distinct ones, for {layouts})"

    def _subject(self) -> str:
        """Return a line with the number of compiled layouts, the fastest one, and one that is estimated to be faster.

        For example, `2 of 6 layouts compiled; the fastest so far is dp`.
        """
        from valkyrie.search.program_order import count_compiled

        compiled = f"{count_compiled(self._compiled_names, self._names, self.estimates)} compiled"
        if not self._compiled_names:
            return f"{compiled}, so none has a step time"
        if self.best is None:
            return f"{compiled}; no layout fits"
        text = f"{compiled}; the fastest{' so far' if self.untried else ''} is {self.best}"
        best_s = self.step_s(self.best) or 0.0
        for row in self._rows():
            is_rival = row.status is None and not row.same_as and not self.estimates[row.name].is_too_large
            if is_rival and row.step_s and row.step_s < best_s:
                return f"{text}, but {row.name} is {row.source_text} to be faster: {duration_text(row.step_s)}"
        return text

    def _count_text(self) -> str:
        """Return the number of layouts, with that of compiled ones if a search has not tried all."""
        from valkyrie.search.program_order import count_compiled

        if not self.untried:
            return count_text(len(self._names), "layout")
        return count_compiled(self._compiled_names, self._names, self.estimates)

    def _sort_key(self, name: str) -> tuple[int, float]:
        """Return a sort key: step time if the layout fits, peak memory if it does not, and failed layouts last."""
        result, step_s = self.results[name], self.step_s(name)
        if result.fits is not False and step_s:
            return 0, step_s
        return (1, result.peak_gib or 0.0) if result.fits is False else (2, 0.0)

    def _rows(self) -> tuple[ComparedProgram, ...]:
        """Return the compiled and estimated layouts by step time, after the best compiled one."""
        compiled = [self._row(name) for name in self.results]
        tokens = [row.tokens_per_second * row.step_s for row in compiled if row.tokens_per_second and row.step_s]
        estimated = [
            ComparedProgram(
                *(name, self.estimates[name].axes, None, None),
                step_s=(step_s := self.step_s(name)),
                tokens_per_second=tokens[0] / step_s if tokens and step_s else None,
                predicted_s=self.estimates[name].step_s,
                measured_s=self.measured_s.get(name),
                waiting=self.estimates[name].waiting_s / (self.estimates[name].step_s or 1.0),
                estimated_s=self.estimates[name].step_s,
            )
            for name in self.uncompiled
        ]
        fitting = [row for row in compiled if row.step_s and row.status is CompileStatus.ok]
        large = {name for name in self.uncompiled if self.estimates[name].is_too_large}
        timed = sorted(
            [*fitting, *estimated], key=lambda row: (row.name in large, row.name != self.best, row.step_s or 0.0)
        )
        return self._mark_equal([*timed, *(row for row in compiled if row not in fitting)])

    def _mark_equal(self, rows: Sequence[ComparedProgram]) -> tuple[ComparedProgram, ...]:
        """Set `same_as` of rows with the program of an earlier row."""
        first_names, marked = dict[str, str](), list[ComparedProgram]()
        for row in rows:
            program = self.estimates[row.name].program if row.name in self.estimates else ""
            marked.append(replace(row, same_as=first_names.get(program)))
            if program:
                first_names.setdefault(program, row.name)
        return tuple(marked)

    def _estimate_lines(self) -> list[str]:
        if not self.estimates:
            return []
        from valkyrie.search.program_order import describe_estimates

        best_s = None if self.best is None else self.results[self.best].step_s
        return describe_estimates(self.estimates, self.uncompiled, self.best, best_s)

    def _row(self, name: str) -> ComparedProgram:
        result, step_s = self.results[name], self.step_s(name)
        prediction = _prediction(result)
        rate, program = result.tokens_per_second, prediction.program
        return ComparedProgram(
            name=name,
            axes=program.axes if program else {},
            status=prediction.status,
            reason=result.reason,
            step_s=step_s,
            predicted_s=result.step_s,
            measured_s=self.measured_s.get(name),
            tokens_per_second=rate and step_s and result.step_s and rate * result.step_s / step_s,
            peak=None if prediction.memory is None else prediction.memory.required,
            waiting=sum_seconds(prediction.parts, PartKind.exposed) / result.step_s if result.step_s else None,
            faults=len(prediction.faults) if result.fits is not None else None,
            interval=_interval(prediction),
            estimated_s=(self.estimates[name].step_s or None) if name in self.estimates else None,
        )

    def _failure_lines(self) -> list[str]:
        """Return a line for each reason why layouts failed, timed out or were refused, with their names."""
        names: dict[str, list[str]] = {}
        for name, result in self.results.items():
            if result.status in ("failed", "timeout", "refused"):
                names.setdefault(f"{result.status}: {result.reason}", []).append(name)
        return [f"{', '.join(layouts)}: {reason}" for reason, layouts in names.items()]

    def _note_lines(self, record: ComparisonRecord) -> list[str]:
        from valkyrie.report.words import EQUAL_RATIO

        lines, best_s = [*record.notes], self.step_s(self.best)
        equal_names = [
            row.name
            for row in record.table_rows
            if row.status is CompileStatus.ok
            and row.name != self.best
            and (row.step_s or math.inf) <= EQUAL_RATIO * (best_s or 0.0)
        ]
        if equal_names:
            lines.append(f"as fast as {self.best} (within {percent_text(EQUAL_RATIO - 1)}): {', '.join(equal_names)}")
        faults = {name: _prediction(result).faults for name, result in self.results.items() if result.fits is not None}
        texts = [f"{name}: {', '.join(fault.code.value for fault in found)}" for name, found in faults.items() if found]
        if texts:
            lines.append(f"faults: {'; '.join(texts)}. The report of a layout has their lines and remedies")
        if any(row.interval_text == "unknown" for row in record.rows):
            lines.append(f"interval: {describe_interval(None, is_program=True)}")
        if record.ratio is not None:
            measured = ", ".join(name for name in self.measured_s if name in self.results)
            lines.append(
                f"predicted steps are multiplied by {record.ratio:.3f}, the ratio of measured to predicted time "
                f"of {measured}"
            )
            if not 1 / MAX_RATIO < record.ratio < MAX_RATIO:
                lines.append("measured_s= is far from the predicted times. Check that all values are in seconds")
        return lines


def comparison_columns(record: ComparisonRecord) -> list[Column[ComparedProgram]]:
    """Return the columns of a comparison's table. Rates appear only if one is known."""
    column, rows = Column[ComparedProgram], record.rows
    rate = column("rate", f"{record.unit}/s", "speed", lambda row: row.tokens_per_second, wandb_key="tokens_per_second")
    estimate = column(
        "estimated_s", "estimate", "seconds", lambda row: row.estimated_s, wandb_key="estimated_step_ms", scale=1e3
    )
    return [
        column("name", "layout", "text", lambda row: row.name, min_width=12),
        column("fits", "fits", "text", lambda row: row.fits_text),
        column("step_s", "step", "seconds", lambda row: row.step_s, wandb_key="step_ms", scale=1e3),
        column("interval", "interval", "text", lambda row: row.interval_text),
        *([estimate] if any(row.estimated_s for row in rows) else []),
        *([rate] if any(row.tokens_per_second for row in rows) else []),
        column("peak", "peak", "bytes", lambda row: row.peak, wandb_key="hbm_gib", scale=2**-30),
        column("waiting", "waiting", "percent", lambda row: row.waiting),
        column("faults", "faults", "count", lambda row: row.faults),
        *(
            [column("by", "source", "text", lambda row: row.source_text)]
            if record.ratio is not None or any(row.status is None for row in rows)
            else []
        ),
    ]


def _interval(prediction: Prediction) -> tuple[float, float] | None:
    interval = None if prediction.step is None else prediction.step.interval
    return None if interval is None else (interval.low - 1, interval.high - 1)


def _print_to_stderr(note: str | None) -> str | None:
    """Print a note unless it is None, and return it."""
    if note is not None:
        print(note, file=sys.stderr)
    return note


def _prediction(result: Result) -> Prediction:
    assert isinstance(result.record, Prediction)
    return result.record
