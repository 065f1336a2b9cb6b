"""The page of a report: one HTML file with its data, styles and scripts. It loads nothing from the network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from valkyrie.paths import cache_root, write_atomic
from valkyrie.records import encode
from valkyrie.report import tables, words
from valkyrie.report.colours import axes_colour, part_colour
from valkyrie.report.figures import OF_A_GROUP, OF_ALL, WALL_TIME, specification
from valkyrie.report.rank import Comparison, best_per_target, refusals
from valkyrie.report.records import read_answer, read_command, read_rows
from valkyrie.report.specs import Spec, timeline_spec
from valkyrie.report.trace import Timeline, TorusDrawing, read_timeline, read_torus
from valkyrie.report.values import PART_NAMES, labels
from valkyrie.sweep.columns import PAGE as PAGE_COLUMNS
from valkyrie.sweep.rows import Row, groups
from valkyrie.sweep.trial import PAGE

LIMIT = 2_000_000
"""Maximum bytes of a page. Hints and timelines are left out until it fits."""
TIMELINES = 8
"""Number of layouts with a timeline, the best of every kind of speed first."""
TORUSES = 60
"""Number of layouts with a drawing of the torus, and with hints if there is little room."""
LONG = 44
"""Length of a layout's label from which figures take the whole width."""


def page_file(paths: Sequence[Path], output: Path | None) -> Path:
    """Return the file of the page, `output` or `report.html` in the first folder, and create its folder.

    The path of a `trials.jsonl` means its folder. Raises ValueError if the folder cannot be created.
    """
    file = output or (paths[0] if paths[0].is_dir() else paths[0].parent) / PAGE
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{file.parent} is not a folder and cannot be created. Name another file.") from error
    return file


def write_report(folder: Path) -> Path:
    """Write the page of a sweep's folder, or of a folder of sweeps, into that folder and return its path."""
    return write_atomic(folder / PAGE, page(read_rows([folder])))


def page(rows: Sequence[Row], comparison: Comparison | None = None) -> str:
    """Return the HTML of a page. `comparison` adds two sweeps next to each other.

    Beyond `LIMIT`, hints of all but the best layouts are left out, then timelines except that of the best layout.
    """
    template, whole, text = templates().get_template("page.html"), _data(rows), ""
    parts = _parts(rows, comparison, whole)
    for data in _shrink(whole):
        text = template.render(parts, data=_json(data))
        if len(text.encode()) <= LIMIT:
            break
    return text


@dataclass(frozen=True)
class PageData:
    """Data for `page.js`. Rows are numbered over all kinds of speed, the best of each kind first.

    Args:
        groups: Labels of the kinds of speed.
        figures: By figure, its specification for each kind of speed.
        together: By figure, its specification for all rows.
        columns: Columns of the ranked table.
        rows: Its cells.
        details: Further facts of each row.
        pairs: Comparison of predicted rows.
        timelines: Timelines of the best rows, by row.
        toruses: Drawings of the mesh on the torus, by row.
        timeline: Specification of a timeline, without values.
        colours: Colours of parts of a step and of mesh axes.
    """

    groups: list[str]
    figures: dict[str, list[Spec | None]]
    together: dict[str, Spec | None]
    columns: list[dict[str, str]]
    rows: list[list[Any]]
    details: list[tables.Facts]
    pairs: words.PairedRows
    timelines: dict[int, Timeline]
    toruses: dict[int, TorusDrawing]
    timeline: Spec
    colours: dict[str, str]


def _shrink(data: PageData) -> Iterator[PageData]:
    """Yield the data of a page, then ever smaller versions of it without the least important parts."""
    yield data
    best = [row[0] is not None and row[0] <= TORUSES for row in data.rows]
    without = [{name: fact for name, fact in facts.items() if name != "hints"} for facts in data.details]
    details = [full if keep else less for keep, full, less in zip(best, data.details, without, strict=True)]
    yield (data := replace(data, details=details))
    while len(data.timelines) > 1:
        timelines = list(data.timelines.items())
        yield (data := replace(data, timelines=dict(timelines[: len(timelines) // 2])))


def _json(data: PageData) -> Markup:
    """Return data as JSON for a script element. `details` are indices into `texts`, which has each text once."""
    places: dict[str, int] = {}

    def place(fact: Any) -> Any:
        return places.setdefault(fact, len(places)) if isinstance(fact, str) else [place(text) for text in fact]

    details = [{name: place(fact) for name, fact in facts.items()} for facts in data.details]
    plain = encode(data) | {"details": details, "texts": list(places)}
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))


def _parts(rows: Sequence[Row], comparison: Comparison | None, data: PageData) -> dict[str, object]:
    """Return the values of the page's template, except the data of its script."""
    folders = list(dict.fromkeys(row.folder or row.source if row.is_training else row.source for row in rows))
    command, answer = (read_command(folders[0]), read_answer(folders[0])) if len(folders) == 1 else (None, None)
    kinds = groups(rows)
    best, trained = tables.best_table(best_per_target(rows)), tables.training_table(rows)
    return {
        "question": "how did it train?" if all(row.is_training for row in rows) else "which layout?",
        "title": words.title(rows, answer),
        "facts": words.facts(rows),
        "command": command,
        "summary": words.summary(rows),
        "simulated": words.SIMULATED if any(row.group.simulated and row.ok for row in rows) else None,
        "answers": [words.answer(group, members) for group, members in kinds.items()],
        "prices": words.price_lines(rows),
        "search": answer,
        "found": None
        if answer is None
        else {"best": words.search_answer(answer), "table": tables.answer_table(answer)},
        "best": best if len(best.rows) > 1 else None,
        "figures": [figure for figure in OF_A_GROUP if any(data.figures[figure.id])],
        "wide": max(map(len, labels(rows).values())) > LONG,
        "together": [figure for figure in OF_ALL if data.together[figure.id]],
        "trained": trained if trained.rows else None,
        "times": [WALL_TIME] if data.together[WALL_TIME.id] else [],
        "agreement": words.agreement_line(rows),
        "comparison": comparison and {"summary": comparison.summary, "table": tables.comparison_table(comparison)},
        "refusals": refusals(rows),
        "version": version("valkyrie-jax"),
        "css": Markup(read_asset("page.css")),
        "vega": _in_script(_vega()),
        "js": _in_script(read_asset("page.js")),
    }


def templates() -> Environment:
    """Return the environment of the templates of all pages."""
    loader = PackageLoader("valkyrie.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["zip"] = zip
    return environment


def _data(rows: Sequence[Row]) -> PageData:
    """Return the data of the page's script. Timelines are in the order of `_best_first`."""
    kinds = groups(rows)
    ordered = [row for members in kinds.values() for row in members]
    timed = _best_first(list(kinds.values()))
    place = {row.id: i for i, row in enumerate(ordered)}
    with_timelines = ((place[row.id], drawing) for row in timed if (drawing := read_timeline(row)) is not None)
    timelines = dict(itertools.islice(with_timelines, TIMELINES))
    toruses = {place[row.id]: drawing for row in timed[:TORUSES] if (drawing := read_torus(row)) is not None}
    return PageData(
        groups=[group.label for group in kinds],
        figures={figure.id: [specification(figure, members) for members in kinds.values()] for figure in OF_A_GROUP},
        together={figure.id: specification(figure, ordered) for figure in [*OF_ALL, WALL_TIME]},
        columns=[{"id": c.name, "label": c.label, "kind": c.unit, "help": c.help} for c in PAGE_COLUMNS],
        rows=tables.cells(kinds),
        details=[tables.details(row) for row in ordered],
        pairs=words.compare_rows(ordered),
        timelines=timelines,
        toruses=toruses,
        timeline=timeline_spec(),
        colours=_colours(timelines.values(), toruses.values()),
    )


def _colours(timelines: Iterable[Timeline], toruses: Iterable[TorusDrawing]) -> dict[str, str]:
    """Return the colours of parts of a step and of mesh axes, by the labels of timelines and tori."""
    colours = {name: part_colour(name, None) for name in [*PART_NAMES.values(), "copies", "loop"]}
    colours |= {axis: axes_colour(axis) for drawing in toruses for axis, _ in drawing.axes}
    return colours | {name: axes_colour(axes) for drawing in timelines for name, axes in drawing.axes.items()}


def _best_first(kinds: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of all kinds with a speed, the best of each kind before the second of any."""
    longest = max(map(len, kinds), default=0)
    return [members[i] for i in range(longest) for members in kinds if i < len(members) and members[i].ok]


def _in_script(text: str) -> Markup:
    """Escape JavaScript for a script element. The sequences that would end or hide it occur only in strings."""
    return Markup(text.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def read_asset(name: str) -> str:
    """Read a style sheet or script of the pages."""
    return (files("valkyrie.report") / "templates" / name).read_text(encoding="utf-8")


def _vega() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which is bundled once per version and cached."""
    import vl_convert

    bundle = cache_root() / "report" / f"vega-{version('vl-convert-python')}.js"
    if not bundle.is_file():
        bundle.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(bundle, vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return bundle.read_text(encoding="utf-8")
