"""Writes the HTML report: one file with its data, styles and scripts, which loads nothing from the network."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from valkyrie.checksums import digest
from valkyrie.config.arguments import abbreviate_search
from valkyrie.parts import PART_LABELS
from valkyrie.paths import cache_root, write_atomic
from valkyrie.records import encode
from valkyrie.report import tables, words
from valkyrie.report.colours import axes_colour, part_colour
from valkyrie.report.figures import GROUP_FIGURES, OVERALL_FIGURES, TRAINING_FIGURES, figure_spec
from valkyrie.report.rank import SweepComparison, best_per_workload, group_unsuccessful
from valkyrie.report.records import read_answer, read_command, read_rows
from valkyrie.report.search import SearchPage, search_page, split_command
from valkyrie.report.specs import Spec, timeline_spec
from valkyrie.report.trace import Timeline, TorusDrawing, read_timeline, read_torus
from valkyrie.report.values import label_rows
from valkyrie.sweep.columns import PAGE_COLUMNS
from valkyrie.sweep.rows import Row, group_by_kind
from valkyrie.sweep.trial import PAGE_FILE, TrialLog
from valkyrie.units import escape_control_characters

if TYPE_CHECKING:
    from valkyrie.search.answer_record import SearchAnswer

MAX_PAGE_BYTES = 2_000_000
"""Size in bytes above which a page omits hints, then timelines (see `render_page`)."""
MAX_TIMELINES = 8
"""Maximum number of layouts with a timeline. The best layouts of each kind of speed take precedence."""
MAX_TORUSES = 60
"""Maximum number of layouts with a drawing of the torus.

If the page exceeds `MAX_PAGE_BYTES`, hints are kept only for layouts up to this rank.
"""
LONG_LABEL_LENGTH = 44
"""Length of a label, in characters, above which figures take the full width of the page."""


def page_file(paths: Sequence[Path], output: Path | None) -> Path:
    """Return the file to write the page to, and create its folder.

    The file is `output`, or by default `report.html` in the first path, or in its folder if that path is a file. Raises
    ValueError if the output folder or one of its parents is a file.
    """
    file = output or (paths[0] if paths[0].is_dir() else paths[0].parent) / PAGE_FILE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"{file} cannot be written: {file.parent} is not a folder and cannot be created. Choose another output "
            "file."
        ) from error
    return file


def write_report(folder: Path) -> Path:
    """Write the HTML report of a folder to its `report.html`, and return the path of the file.

    The folder contains a sweep, a search, or several sweeps and training runs. Raises ValueError if it has no results
    or a damaged `trials.jsonl`.
    """
    answer = read_answer(folder)
    rows = [] if answer is not None and not TrialLog(folder).read() else read_rows([folder])
    return write_atomic(folder / PAGE_FILE, render_page(rows, answer=answer))


def render_page(
    rows: Sequence[Row], comparison: SweepComparison | None = None, answer: SearchAnswer | None = None
) -> str:
    """Return the HTML report. With `comparison`, it has a section that compares two sweeps.

    If `answer` is None and all rows are from the folder of one search, the page shows the answer of that search. `rows`
    may be empty only if there is an answer.

    A page larger than `MAX_PAGE_BYTES` drops the hints of all but the best layouts, then half of its timelines at a
    time until it fits or only one timeline is left.
    """
    folders = list(dict.fromkeys(row.folder or row.source if row.is_training else row.source for row in rows))
    if answer is None and len(folders) == 1:
        answer = read_answer(folders[0])
    command = read_command(folders[0]) if len(folders) == 1 else None
    if answer is not None:
        command = f"valkyrie-train {shlex.join(abbreviate_search(answer.command))}"
    search = None if answer is None else search_page(answer)
    page_data = _page_data(rows, search)
    template, text = template_environment().get_template("page.html"), ""
    values = _template_values(rows, comparison, page_data) | {
        "command": command,
        "search_answer": answer,
        "search": search,
    }
    for data in _shrink(page_data):
        text = template.render(values, data=_script_json(data))
        if len(text.encode()) <= MAX_PAGE_BYTES:
            break
    return text


@dataclass(frozen=True)
class PageData:
    """Data for `page.js`. Rows are grouped by kind of speed and numbered across groups, fastest first in each group.

    Args:
        groups: Labels of the kinds of speed.
        figures: Maps figure ids to specifications, one for each kind of speed. None where the figure is omitted.
        overall_figures: Maps ids of the other figures to their specifications. None if the figure is omitted.
        columns: Columns of the ranked table.
        rows: Cells of the ranked table.
        details: For each row, a dict of the facts that are shown when the row is selected.
        pairs: Quantities of predicted rows, and explanations of the difference between two of them.
        timelines: Timelines of the best rows, by row number.
        toruses: Drawings of the mesh on the torus, by row number.
        timeline: Specification of a timeline, without values.
        colours: Colours of step parts and mesh axes, by label.
    """

    groups: list[str]
    figures: dict[str, list[Spec | None]]
    overall_figures: dict[str, Spec | None]
    columns: list[dict[str, str]]
    rows: list[list[Any]]
    details: list[tables.Facts]
    pairs: words.PairedRows
    timelines: dict[int, Timeline]
    toruses: dict[int, TorusDrawing]
    timeline: Spec
    colours: dict[str, str]


def _shrink(data: PageData) -> Iterator[PageData]:
    """Yield the data of a page, then versions of decreasing size that omit hints first and timelines next."""
    yield data
    keeps_hints_by_row = [row[0] is not None and row[0] <= MAX_TORUSES for row in data.rows]
    without_hints = [{name: fact for name, fact in facts.items() if name != "hints"} for facts in data.details]
    details = [
        full if keeps_hints else reduced
        for keeps_hints, full, reduced in zip(keeps_hints_by_row, data.details, without_hints, strict=True)
    ]
    yield (data := replace(data, details=details))
    while len(data.timelines) > 1:
        timelines = list(data.timelines.items())
        yield (data := replace(data, timelines=dict(timelines[: len(timelines) // 2])))


def _script_json(data: PageData) -> Markup:
    """Convert data to JSON for a script element. To save space, `details` refers to texts by their index in `texts`."""
    text_indices: dict[str, int] = {}

    def text_index(fact: Any) -> Any:
        return (
            text_indices.setdefault(fact, len(text_indices))
            if isinstance(fact, str)
            else [text_index(text) for text in fact]
        )

    details = [{name: text_index(fact) for name, fact in facts.items()} for facts in data.details]
    json_values = encode(data) | {"details": details, "texts": list(text_indices)}
    text = json.dumps(json_values, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))


def _template_values(rows: Sequence[Row], comparison: SweepComparison | None, data: PageData) -> dict[str, object]:
    """Return the values for the page's template, except the data for its script."""
    rows_by_kind = group_by_kind(rows)
    best, training_table = tables.best_table(best_per_workload(rows)), tables.training_table(rows)
    trainings_only = bool(rows) and all(row.is_training for row in rows)
    return {
        "question": "how did it train?" if trainings_only else "which layout?",
        "trainings_only": trainings_only,
        "one_training": trainings_only and len(rows) == 1,
        "rows": rows,
        "title": words.title(rows),
        "facts": words.facts(rows),
        "summary": words.describe_counts(rows),
        "simulated": words.SIMULATED_NOTE if any(row.speed_kind.simulated and row.has_speed for row in rows) else None,
        "answers": [words.summarise_kind(group, members) for group, members in rows_by_kind.items()],
        "prices": words.price_lines(rows),
        "best": best if len(best.rows) > 1 else None,
        "figures": [figure for figure in GROUP_FIGURES if any(data.figures[figure.id])],
        "wide": max(map(len, label_rows(rows).values()), default=0) > LONG_LABEL_LENGTH,
        "overall_figures": [figure for figure in OVERALL_FIGURES if data.overall_figures[figure.id]],
        "trained": training_table if training_table.rows else None,
        "training_figures": [figure for figure in TRAINING_FIGURES if data.overall_figures[figure.id]],
        "agreement": words.agreement_line(rows),
        "comparison": comparison and {"summary": comparison.summary, "table": tables.comparison_table(comparison)},
        "refusals": group_unsuccessful(rows),
        "version": version("valkyrie-jax"),
        "css": Markup(read_asset("page.css")),
        "vega": _escape_script(_vega_script()),
        "js": _escape_script(read_asset("page.js")),
    }


def template_environment() -> Environment:
    """Return the Jinja environment for the templates of all pages."""
    loader = PackageLoader("valkyrie.report")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda x: escape_control_characters(x) if isinstance(x, str) and not isinstance(x, Markup) else x,
    )
    environment.globals |= {"zip": zip, "split_command": split_command}
    return environment


def _page_data(rows: Sequence[Row], search: SearchPage | None) -> PageData:
    """Return the data for the page's script. Only the best rows have timelines and drawings of the torus."""
    rows_by_kind = group_by_kind(rows)
    ordered_rows = [row for members in rows_by_kind.values() for row in members]
    best_rows = _best_first(list(rows_by_kind.values()))
    row_numbers = {row.id: i for i, row in enumerate(ordered_rows)}
    with_timelines = (
        (row_numbers[row.id], timeline) for row in best_rows if (timeline := read_timeline(row)) is not None
    )
    timelines = dict(itertools.islice(with_timelines, MAX_TIMELINES))
    toruses = {
        row_numbers[row.id]: drawing for row in best_rows[:MAX_TORUSES] if (drawing := read_torus(row)) is not None
    }
    return PageData(
        groups=[group.label for group in rows_by_kind],
        figures={
            figure.id: [figure_spec(figure, members) for members in rows_by_kind.values()] for figure in GROUP_FIGURES
        },
        overall_figures={
            figure.id: figure_spec(figure, ordered_rows) for figure in [*OVERALL_FIGURES, *TRAINING_FIGURES]
        }
        | ({} if search is None else {figure.id: figure.spec for figure in search.figures}),
        columns=[{"id": c.name, "label": c.label, "kind": c.unit, "help": c.help} for c in PAGE_COLUMNS],
        rows=tables.cells(rows_by_kind),
        details=[tables.details(row) for row in ordered_rows],
        pairs=words.compare_rows(ordered_rows),
        timelines=timelines,
        toruses=toruses,
        timeline=timeline_spec(),
        colours=_colours(timelines.values(), toruses.values()),
    )


def _colours(timelines: Iterable[Timeline], toruses: Iterable[TorusDrawing]) -> dict[str, str]:
    """Return the colours of step parts and mesh axes, by the labels that timelines and drawings of the torus use."""
    labels_without_axes = [label for kind, label in PART_LABELS.items() if not kind.has_mesh_axes]
    colours = {name: part_colour(name, None) for name in [*labels_without_axes, "copies", "loop"]}
    colours |= {axis: axes_colour(axis) for drawing in toruses for axis, _ in drawing.axes}
    return colours | {name: axes_colour(axes) for timeline in timelines for name, axes in timeline.axes.items()}


def _best_first(rows_by_kind: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows with a speed: the best row of each kind of speed, then the second best of each, and so on."""
    largest_group = max(map(len, rows_by_kind), default=0)
    return [
        members[i]
        for i in range(largest_group)
        for members in rows_by_kind
        if i < len(members) and members[i].has_speed
    ]


def _escape_script(text: str) -> Markup:
    """Escape `</script` and `<!--`, which would end a script element or hide its end.

    The escape is a backslash, which has no effect in a JavaScript string.
    """
    return Markup(text.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def read_asset(name: str) -> str:
    """Return the text of a style sheet or script in `valkyrie/report/templates`, such as `page.css`."""
    return (files("valkyrie.report") / "templates" / name).read_text(encoding="utf-8")


def _vega_script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script. It is bundled once per version if the cache is writable.

    The first line of the cached file is a digest of the rest, so that a damaged file is bundled again.
    """
    import vl_convert

    bundle = cache_root() / "report" / f"vega-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        first_line, _, cached_script = bundle.read_bytes().partition(b"\n")
        if first_line == f"// {digest(cached_script)}".encode():
            return cached_script.decode()
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with contextlib.suppress(OSError):
        bundle.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(bundle, f"// {digest(script)}\n{script}")
    return script
