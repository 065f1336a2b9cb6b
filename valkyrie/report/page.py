"""Decides what the page of a report is: one HTML file with its data, styles and scripts, which asks no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from valkyrie.paths import cache_root, write_whole
from valkyrie.report import table, words
from valkyrie.report.figures import OF_A_GROUP, Figure, of_all, specification
from valkyrie.report.rank import Comparison, agreement, best_per_target, groups, predicted_and_measured, refusals
from valkyrie.report.records import Row, read_rows
from valkyrie.report.specs import PALETTE, PART_COLOURS, axes_colour, timeline_spec
from valkyrie.report.trace import timeline, torus
from valkyrie.report.values import PART_NAMES, axes_named, labels
from valkyrie.search.units import percent
from valkyrie.sweep.trial import PAGE

LIMIT = 2_000_000
"""Bytes that a page should not go beyond: hints and timelines are left out until it does not."""
TIMELINES = 8
"""Of how many layouts a page holds the timeline, the best of every kind of speed first."""
TORUSES = 60
"""Of how many layouts a page holds the picture on the torus, and the hints where it has little room."""
LONG = 44
"""Letters of a layout and what tells it apart, beyond which figures take the whole width."""


def write_report(folder: Path) -> Path:
    """Write the page of a sweep's folder, or of a folder of sweeps, into it; return where it is."""
    return write_whole(folder / PAGE, page(read_rows([folder])))


def page(rows: Sequence[Row], comparison: Comparison | None = None) -> str:
    """Return the page of these trials; `comparison` adds two sweeps side by side.

    Beyond `LIMIT` the hints of all but the best layouts are left out, then timelines, except that of the best layout.
    """
    parts, text = _parts(rows, comparison), ""
    for data in _ever_less(_data(rows)):
        text = _filled(parts | {"data": _json(_packed(data))})
        if len(text.encode()) <= LIMIT:
            break
    return text


def _ever_less(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the data of a page, then without what it can do without, least missed first."""
    yield data
    ranks = [row[0] for row in data["rows"]]
    without = [{name: fact for name, fact in one.items() if name != "hints"} for one in data["details"]]
    best = [rank is not None and rank <= TORUSES for rank in ranks]
    details = [one if kept else less for kept, one, less in zip(best, data["details"], without, strict=True)]
    yield data | {"details": details}
    timelines = list(data["timelines"].items())
    while len(timelines) > 1:
        timelines = timelines[: len(timelines) // 2]
        yield data | {"details": details, "timelines": dict(timelines)}


def _packed(data: dict[str, Any]) -> dict[str, Any]:
    """Return data with each text of `details` once, in `texts`, and the place there wherever it stood."""
    places: dict[str, int] = {}

    def place(fact: str | list[str]) -> int | list[Any]:
        return places.setdefault(fact, len(places)) if isinstance(fact, str) else [place(text) for text in fact]

    details = [{name: place(fact) for name, fact in one.items()} for one in data["details"]]
    return data | {"details": details, "texts": list(places)}


def _filled(parts: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _parts(rows: Sequence[Row], comparison: Comparison | None) -> dict[str, str]:
    """Return what stands in the places of the page's frame, without the data of its script."""
    sweeps = list(dict.fromkeys(row.sweep for row in rows))
    wide = max(map(len, labels(rows).values())) > LONG
    title = ", ".join(sweeps[:3]) + (f" and {len(sweeps) - 3} more" if len(sweeps) > 3 else "")
    return {
        "title": html.escape(title),
        "summary": html.escape(words.summary(rows)),
        "notice": _notice(rows),
        "answers": _answers(rows),
        "best": table.best(best_per_target(rows)),
        "figures": "".join(_figure(figure, wide) for figure in OF_A_GROUP),
        "together": "".join(_figure(figure, False) for figure in of_all(rows)),
        "order": _order(rows),
        "compared": "" if comparison is None else table.compared(comparison),
        "refused": table.refused(refusals(rows)),
        "version": html.escape(version("valkyrie-jax")),
        "css": _asset("page.css"),
        "vega": _in_script(_vega()),
        "js": _in_script(_asset("page.js")),
    }


def _data(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the script of the page reads: table, figures by kind of speed, and details of layouts.

    Timelines are in the order of `_best_first`.
    """
    kinds = groups(rows)
    ordered = [row for members in kinds.values() for row in members]
    timed = _best_first(list(kinds.values()))
    place = {row.id: i for i, row in enumerate(ordered)}
    drawn: dict[str, dict[str, Any]] = {}
    for row in timed:
        if len(drawn) >= TIMELINES:
            break
        if (found := timeline(row)) is not None:
            drawn[row.id] = found
    placed = {row.id: found for row in timed[:TORUSES] if (found := torus(row)) is not None}
    return {
        "groups": [{"label": group.label, "simulated": group.simulated} for group in kinds],
        "figures": {figure.id: [specification(figure, members) for members in kinds.values()] for figure in OF_A_GROUP},
        "together": {figure.id: specification(figure, ordered) for figure in of_all(rows)},
        "columns": [vars(column) for column in table.COLUMNS],
        "rows": table.cells(kinds),
        "details": [table.details(row) for row in ordered],
        "timelines": {place[id]: found for id, found in drawn.items()},
        "toruses": {place[id]: found for id, found in placed.items()},
        "timeline": timeline_spec(),
        "colours": _colours(drawn, placed),
    }


def _colours(drawn: dict[str, dict[str, Any]], placed: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the colours of parts of a step and of mesh axes, by the words of timelines and pictures."""
    found = {PART_NAMES[part]: PALETTE[place] for part, place in PART_COLOURS.items()}
    found |= {axis: axes_colour(axis) for picture in placed.values() for axis, _ in picture["axes"]}
    named = {name: axes_named(name) for one in drawn.values() for name in one["names"]}
    return found | {name: axes_colour(axes) for name, axes in named.items() if axes is not None}


def _best_first(kinds: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of all kinds with a speed, the best of each kind before the second of any."""
    longest = max(map(len, kinds), default=0)
    return [members[i] for i in range(longest) for members in kinds if i < len(members) and members[i].ok]


def _notice(rows: Sequence[Row]) -> str:
    if not any(row.group.simulated and row.ok for row in rows):
        return ""
    return (
        '<p class="notice"><strong>Simulated:</strong> some speeds here were measured on CPU devices that stand in for '
        "accelerators. Losses, bytes sent and memory by the compiler are real; those speeds, and their order, are not "
        "those of any accelerator. Each bears the word <em>simulated</em>.</p>"
    )


def _answers(rows: Sequence[Row]) -> str:
    said = []
    for group, members in groups(rows).items():
        first, *others = words.answer(group, members)
        listed = "".join(f"<li>{html.escape(line)}</li>" for line in others)
        said.append(f'<div class="answer"><p class="lead">{html.escape(first)}</p><ul>{listed}</ul></div>')
    return "".join([*said, *(f"<p>{html.escape(line)}</p>" for line in words.price_lines(rows))])


def _figure(figure: Figure, wide: bool) -> str:
    return (
        f'<section class="figure{" wide" * wide}" id="{figure.id}" aria-labelledby="{figure.id}-title">'
        f'<h3 id="{figure.id}-title">{html.escape(figure.title)}</h3><p class="words">{html.escape(figure.words)}</p>'
        f'<div class="chart" data-figure="{figure.id}"></div>'
        f'<p class="empty" hidden>{html.escape(figure.empty)}</p></section>'
    )


def _order(rows: Sequence[Row]) -> str:
    pairs = predicted_and_measured(rows)
    share = agreement(pairs)
    if share is None:
        return ""
    word = " (simulated)" if any(pair.b.group.simulated for pair in pairs) else ""
    said = f"Of every two of these layouts, the prediction names the faster one{word} in {percent(share)} of cases; "
    said += "chance names it in 50%."
    if word:
        said += " Threads of one processor are no chips with links: little can be expected of such a comparison."
    return f"<p>{said}</p>"


def _json(data: dict[str, Any]) -> str:
    """Return data as JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _in_script(text: str) -> str:
    """Return JavaScript that may stand inside a script element: what would end or hide it stands only in strings."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return (files("valkyrie.report") / name).read_text(encoding="utf-8")


def _vega() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script; it is bundled once for each version and kept."""
    import vl_convert

    kept = cache_root() / "report" / f"vega-{version('vl-convert-python')}.js"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return kept.read_text(encoding="utf-8")
