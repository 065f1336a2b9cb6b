"""Tests of a report's page as a file: its size, the contrast of its figures, and hostile names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from reported import make_trial, write_sweep
from test_report import FSDP, LARGE, MEASURED, REFUSED, page_data, sweep_rows
from valkyrie.config.modes import ANSWER_FILE
from valkyrie.parallel.partition import PipelineSchedule
from valkyrie.records import write_record
from valkyrie.report import figures, specs, tables
from valkyrie.report.page import MAX_PAGE_BYTES, render_page, template_environment, write_report
from valkyrie.search.answer_record import (
    Bottleneck,
    MeasureReport,
    RankedLayout,
    SearchAnswer,
    Stage,
    TriedBatch,
)
from valkyrie.search.estimate.space import Candidate
from valkyrie.search.shortlist import estimate_errors
from valkyrie.sweep.trial import Status, Trial


def luminance(colour: str) -> float:
    """Return the relative luminance of a CSS colour such as `rgb(1, 2, 3)`, by WCAG 2: 0 for black, 1 for white."""
    named = {"white": "255,255,255", "black": "0,0,0"}.get(colour, colour)
    parts = [int(part) / 255 for part in re.findall(r"[0-9]+", named)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_numbers_on_the_heatmap_have_enough_contrast():
    import vl_convert

    points = [{"data": 1, "mp1": i, "mp2": 1, "rate": float(i), "text": f"r{i}"} for i in range(101)]
    spec = specs.heat(points) | {"data": {"values": points}, "config": specs.CHART_CONFIG}
    svg = vl_convert.vegalite_to_svg(spec)
    cells = re.findall(r'aria-roledescription="rect mark"[^>]*fill="([^"]+)"', svg)
    words = re.findall(r'<text [^>]*fill="(white|black)"[^>]*>r[0-9]+</text>', svg)
    assert len(cells) == len(words) == 101
    levels = [sorted([luminance(cell), luminance(word)]) for cell, word in zip(cells, words, strict=True)]
    assert min((high + 0.05) / (low + 0.05) for low, high in levels) >= 4.5


def trial_overrides(i: int) -> list[str]:
    """Return overrides like those of `sweeps/pa_nas_1b.yaml`. Trials 2n and 2n + 1 have the same model shape."""
    return [
        *("sweep=pa_nas_1b", "tracking=off", "model.embed=1536", "model.mlp=4096", "model.attention.heads=12"),
        *("model.attention.kv_heads=12", f"model.layers={12 + i // 2 % 25}", f"model.s5.state_size={64 * (i // 50)}"),
        *("model.block_pattern=[s5,s5,attention]", "model.attention.windows=[512]"),
    ]


def hints(i: int) -> list[str]:
    return [
        f"Waiting for communication over {axis} is {i / 10}% of the step, most of it all-reduce for "
        f"transpose(jvp())/bse,em->bsm/dot_general (models/layers.py:64). {axis} is MP2(embed)."
        for axis in "xy"
    ]


def many(count: int) -> list[Trial]:
    long = "partition=2d_tp puts heads (4) of attention.query on x=8: 4 is not divisible by 8. Use a mesh whose x " * 4
    trials = []
    for i in range(count):
        name = (
            f"{2 ** (i % 5)}x{2 ** (i % 3)}x{i}-{('fsdp', '2d_tp', '1d_tp', 'data_model_fsdp')[i % 4]}-mb{i}-remat_full"
        )
        if i % 10 == 9:
            trials.append(make_trial(name, None, status=Status.refused, reason=long + str(i)))
        else:
            layout_trial = make_trial(
                name, 1000 + i, stage="measure" if i % 5 == 3 else "compile", price=1.2, overrides=trial_overrides(i)
            )
            folder = f"valkyrie_1b-{name}-{layout_trial.stage}-v4-64-{i:06x}"
            trials.append(
                replace(layout_trial, folder=folder, results=replace(layout_trial.results, hints=tuple(hints(i))))
            )
    return trials


@pytest.mark.slow
def test_a_page_of_500_trials_stays_under_its_limit(tmp_path: Path):
    path = write_report(write_sweep(tmp_path, many(500), timeline_count=40))
    assert path == tmp_path / "report.html"
    assert path.stat().st_size < MAX_PAGE_BYTES == 2_000_000
    data = page_data(path.read_text())
    assert len(data["rows"]) == len(data["details"]) == 500
    assert len(data["timelines"]) >= 4


def row_details(data: dict[str, Any], row_index: int) -> dict[str, str | list[str]]:
    """Return the details of row `row_index`, with indices replaced by the texts they refer to, as the page does."""
    texts = data["texts"]
    details = data["details"][row_index].items()
    return {name: [texts[i] for i in value] if isinstance(value, list) else texts[value] for name, value in details}


def test_texts_shared_by_layouts_are_stored_once(tmp_path: Path):
    rows = sweep_rows(
        tmp_path, *(make_trial(f"8x1x{i}-fsdp", 1000 - i, overrides=trial_overrides(0)) for i in range(3))
    )
    text = render_page(rows)
    texts = page_data(text)["texts"]
    assert [sum(part in text for text in texts) for part in ("block_pattern", "v5e chips 2x4")] == [1, 1]
    for row_index, row in enumerate(rows):
        details = row_details(page_data(text), row_index)
        assert " ".join(details["command"]) == tables.command(row) and details["folder"] == row.trial.folder
        assert details["hints"] == list(row.trial.results.hints[:3])


def test_hints_and_timelines_are_dropped_until_a_page_is_small_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = sweep_rows(tmp_path, *(make_trial(f"8x1x{i}-fsdp", 1000 - i) for i in range(6)), timeline_count=6)
    monkeypatch.setattr("valkyrie.report.page.MAX_TORUSES", 2)
    size = len(render_page(rows).encode())
    drawn_figures: list[str] = []
    figure_spec = figures.figure_spec
    monkeypatch.setattr(
        "valkyrie.report.page.figure_spec", lambda f, r: drawn_figures.append(f.id) or figure_spec(f, r)
    )
    monkeypatch.setattr("valkyrie.report.page.MAX_PAGE_BYTES", size - 1)
    without = len(render_page(rows).encode())
    for limit, timelines, hinted in (
        (size, "012345", 6),
        (size - 1, "012345", 2),
        (without - 1, "012", 2),
        (1, "0", 2),
    ):
        drawn_figures.clear()
        monkeypatch.setattr("valkyrie.report.page.MAX_PAGE_BYTES", limit)
        data = page_data(render_page(rows))
        assert (
            "".join(data["timelines"]) == timelines and sum("hints" in details for details in data["details"]) == hinted
        )
        assert len(drawn_figures) == len(set(drawn_figures))


def test_a_page_loads_nothing_from_the_network(tmp_path: Path):
    text = render_page(sweep_rows(tmp_path, FSDP, LARGE, REFUSED, MEASURED))
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href|action)\s*=\s*[\"']?(https?:)?//", outside)
    assert "default-src 'none'" in text
    assert page_data(text)["rows"][0][1] == "8x1x1-fsdp"


def test_hostile_names_are_escaped(tmp_path: Path):
    bad = "</script><script>alert(1)</script>"
    text = render_page(
        sweep_rows(tmp_path, make_trial("1x1x1-" + bad, 10), make_trial(bad, None, status=Status.failed, reason=bad))
    )
    assert bad not in text and "alert(1)" in text
    assert bad in json.dumps(page_data(text))


def test_two_layouts_are_compared_in_both_orders(tmp_path: Path):
    rows = sweep_rows(
        tmp_path,
        make_trial("8x1x1-fsdp", 1000, bytes_by_axes={"x": 512.0}),
        make_trial("2x4x1-2d_tp", 400, bytes_by_axes={"x": 9e6}, batch=32),
    )
    pairs = page_data(render_page(rows))["pairs"]
    assert set(pairs["explanations"]) == {"0,1", "1,0"}
    first, other = pairs["explanations"]["0,1"], pairs["explanations"]["1,0"]
    assert first[0].startswith("A is 2.50") and other[0].startswith("B is 2.50")
    tokens = [side["tokens"] for side in pairs["quantities"].values()]
    assert tokens[1] != tokens[0]
    assert f"{tokens[0]:,} tokens" in first[0] and f"{tokens[1]:,} tokens" in other[0]


def test_only_layouts_of_the_same_work_are_compared(tmp_path: Path):
    sizes = [
        make_trial("8x1x1-fsdp", 1000, overrides=["model.layers=4"]),
        make_trial("8x1x1-fsdp", 500, overrides=["model.layers=8"]),
    ]
    pairs = page_data(
        render_page(sweep_rows(tmp_path, *sizes, make_trial("2x4x1-2d_tp", 400, overrides=["model.layers=4"])))
    )["pairs"]
    assert set(pairs["explanations"]) == {"0,2", "2,0"}
    works = [side["work"] for side in pairs["quantities"].values()]
    assert works[0] == works[2] != works[1] and works[1].startswith("valkyrie_tiny layers=8, ")


def test_the_page_of_a_search_shows_its_answer(tmp_path: Path):
    candidate = Candidate("v5e-8", 1, "8x1x1", None, "fsdp", PipelineSchedule.gpipe, 1, False, "full", 2)
    layout = RankedLayout(
        candidate,
        candidate.overrides,
        Stage.compile,
        *(0.5, 0.45, 0.6, 2**30, 2**34, 1000.0, 0.4, 0.01),
        Bottleneck("compute", 0.9, False),
        {},
        tokens_for_budget=5e9,
    )
    commands = {"train": "valkyrie-train a", "launch": "valkyrie-launch b"}
    description = {"title": "m, batch 16", "targets": ["v5e-8", "v6e-8"], "budget_usd": 500.0, **commands}
    description |= {"model": "m_1b", "parameters": 1_300_000_000, "batch": 16, "seq": 64, "date": "2026-05-04"}
    description |= {"too_large": 40, "compile_outcomes": {"ok": 2, "does_not_fit": 3}, "remarks": ["fsdp is slower"]}
    refused = {"layers do not divide": 11}
    answer = SearchAnswer(
        ["mode=search"], "abc", 99, refused, 0, 5, "done", MeasureReport(), [layout], [], **description
    )
    folder = write_sweep(tmp_path, [FSDP])
    write_record(folder / ANSWER_FILE, answer)
    text = write_report(folder).read_text()
    main_html = text.partition("<main>")[2].partition("</main>")[0]
    (heading,) = re.findall(r"<h1>(.*?)</h1>", text)
    assert all(name in heading for name in ("m_1b", "v5e-8", "v6e-8"))
    assert "1.3 billion parameters" in text and "a batch of 16 sequences of 64 tokens" in text and "4 May 2026" in text
    counts = re.findall(r'<td class="number">([0-9]+)</td>\s*<td class="work">(.*?)</td>', main_html)
    assert [count for count, _ in counts] == ["110", "11", "40", "54", "2", "3"], "considered, then by outcome"
    assert (
        "11: layers do not divide" in main_html
        and "fsdp is slower" in main_html
        and '<td data-label="source">compiled</td>' in main_html
    )
    assert 'id="costs"' not in text and 'id="limits"' not in text, "no chart of one point or one bar"
    assert all(f"<code>{command}</code>" in text for command in ("valkyrie-train mode=search", *commands.values()))
    assert re.findall(r"<b>(.*?)</b>", main_html) == ["8x1x1 fsdp", "1,000", "500.0 ms", "1.0 GiB", "5 billion"]
    settings = ("mesh=8x1x1", "partition=fsdp", "remat=full", "microbatches=2")
    assert "$500" in main_html and " ".join(settings) in main_html
    assert "unknown" not in main_html
    write_record(folder / ANSWER_FILE, replace(answer, best=[replace(layout, low_s=0.5, high_s=0.5)]))
    text = write_report(folder).read_text()
    assert ">unknown</td>" in text and "interval unknown" in text, "no interval is not a sure step time"
    assert "<h3>Fastest of 2 " not in text
    others = [make_trial(layout, rate, target="v6e-8") for layout, rate in (("8x1x1-fsdp", 9), ("2x4x1-2d_tp", 5))]
    write_sweep(folder, [make_trial("2x4x1-2d_tp", 5), *others])
    text = write_report(folder).read_text()
    assert "<h3>Fastest of 2 predicted for v6e-8</h3>" in text, "explanations name their slice"


def test_the_page_of_a_search_needs_no_compiled_layout(tmp_path: Path):
    rows = []
    for target, step_s, price, share in (("v5e-8", 0.5, 0.01, 0.9), ("v6e-8", 0.25, 0.02, 0.3)):
        candidate = Candidate(target, 1, "8x1x1", None, "fsdp", PipelineSchedule.gpipe, 1, False, "full", 1)
        memory = int(share * 2**34)
        numbers = (step_s, 0.9 * step_s, 1.2 * step_s, memory, 2**34, 1000.0, 0.4, price)
        bottleneck = Bottleneck("compute", 0.9, False)
        rows.append(RankedLayout(candidate, candidate.overrides, Stage.estimate, *numbers, bottleneck, {}))
    description: dict[str, Any] = {"targets": ["v5e-8", "v6e-8"], "model": "m", "batch": 16, "seq": 64, "tokens": 1e9}
    answer = SearchAnswer([], "abc", 99, {}, 0, 0, "", MeasureReport(), rows, [], ranked_by="dollars", **description)
    write_record(tmp_path / ANSWER_FILE, answer)
    text = write_report(tmp_path).read_text()
    assert "<h1>Cheapest layout of m on v5e-8 or v6e-8</h1>" in text and "1 billion tokens" in text
    assert "estimated, none compiled" in text and text.count('<td data-label="source">estimated</td>') == 2
    assert re.search(r'<section id="ranked"[^>]* hidden>', text), "there are no trials"
    figures = page_data(text)["overall_figures"]
    points = [(value["time"], value["price"]) for value in figures["costs"]["data"]["values"]]
    assert points == [(500.0, 0.01), (250.0, 0.02)]
    shares = {value["label"]: value["share"] for value in figures["limits"]["data"]["values"]}
    assert shares == pytest.approx({"#1": 0.9, "#2": 0.3})
    errors = estimate_errors()
    assert f"{errors.memory_low:.2f} to {errors.memory_high:.2f} times their estimates" in text
    for outcomes, counted in (
        ({"ok": 2}, "The best of 2 layouts: all compiled"),
        ({"ok": 1, "failed": 1}, "The best of 2 layouts: 1 compiled, the others estimated"),
        ({"timeout": 2}, "The best of 2 layouts: estimated, none compiled"),
    ):
        write_record(tmp_path / ANSWER_FILE, replace(answer, layouts=2, compiled=2, compile_outcomes=outcomes))
        assert counted in write_report(tmp_path).read_text(), "a failed compile leaves a layout estimated"
    tried = [TriedBatch(8 * n, 1000.0 + n, n * 2**30, n < 4, Stage.estimate) for n in (1, 2, 4)]
    command = "valkyrie-train mode=compile batch=8"
    batches = {"best": [replace(rows[0], batches=tried)], "remarks": [f"To compile it: {command}"]}
    write_record(tmp_path / ANSWER_FILE, replace(answer, **batches))
    text = write_report(tmp_path).read_text()
    figures = page_data(text)["overall_figures"]
    assert [v["batch"] for v in figures["batch_rates"]["data"]["values"]] == [8, 16], "the largest does not fit"
    assert [v["memory"] for v in figures["batch_memory"]["data"]["values"]] == [1.0, 2.0]
    compiled = replace(rows[0], stage=Stage.compile, batches=[replace(tried[0], stage=Stage.compile), *tried[1:]])
    write_record(tmp_path / ANSWER_FILE, replace(answer, best=[compiled]))
    figures = page_data(write_report(tmp_path).read_text())["overall_figures"]
    sources = {name: [v["source"] for v in figures[name]["data"]["values"]] for name in ("batch_rates", "batch_memory")}
    assert sources["batch_rates"] == ["compiled", "corrected estimate"], "the speed is scaled like that of #1"
    assert sources["batch_memory"] == ["compiled", "estimated"]
    estimate, compiled = tried[0], compiled.batches[0]
    mixed = [replace(t, batch=n) for n, t in enumerate((estimate, estimate, compiled, compiled, estimate), start=1)]
    write_record(tmp_path / ANSWER_FILE, replace(answer, best=[replace(rows[0], batches=mixed)]))
    values = page_data(write_report(tmp_path).read_text())["overall_figures"]["batch_rates"]["data"]["values"]
    assert [value["run"] for value in values] == [0, 0, 1, 1, 2], "lines connect neighbours with the same source"
    assert f"<code>{command}</code>" in text


def test_control_characters_are_escaped_in_pages():
    template = template_environment().from_string("{{ text }}{{ script }}")
    assert template.render(text="a\x1b[2J", script=Markup("<b>")) == "a\\x1b[2J<b>"
