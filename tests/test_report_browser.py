"""Tests of a report's page in headless Chromium: sorting, filters, keyboard, dark and narrow screens, print."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from reported import golden_summary, make_trial, trial_from_summary, write_sweep
from test_report import REFUSED
from test_report_work import make_cpu_trial
from valkyrie.config.modes import ANSWER_FILE
from valkyrie.parallel.partition import PipelineSchedule
from valkyrie.records import write_record
from valkyrie.report.page import write_report
from valkyrie.search.answer_record import Bottleneck, MeasureReport, RankedLayout, SearchAnswer, Stage
from valkyrie.search.estimate.space import Candidate
from valkyrie.sweep.trial import Status

pytestmark = [pytest.mark.slow]

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
TRIALS = [
    trial_from_summary(golden_summary("compile"), "compile", "hand", "2x4x1-fsdp"),
    make_trial("8x1x1-dp", 900, peak_gib=12, price=1.2, degrees={"DP": 8}, bytes_by_axes={"x": 4e6}),
    make_trial(
        "2x2x2-2d_tp",
        5000,
        peak_gib=4,
        price=1.2,
        degrees={"DP": 2, "MP1": 2, "MP2": 2},
        bytes_by_axes={"x": 1e6, "y,z": 2e6},
    ),
    make_trial("1x1x8-dp", None, peak_gib=20, status=Status.does_not_fit),
    make_trial("3x1x1-dp", None, status=Status.refused, reason="batch=16 is not divisible by 3"),
    trial_from_summary(golden_summary("measure"), "measure", "hand", "ran"),
    make_trial("2x2x2-2d_tp", 10, stage="measure", target="auto", peak_gib=4),
    make_trial("8x1x1-dp", 30, stage="measure", target="auto", peak_gib=12),
]


def executable() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.fail("no Chromium on this machine: apt-get install chromium", pytrace=False)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable(), args=FLAGS, env={**os.environ})
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_sweep(tmp_path_factory.mktemp("sweep"), TRIALS, timeline_count=1))


@dataclass
class BrowserPage:
    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        """Return the cells of a column by row, or "" for rows that show a reason instead."""
        column = self.page.locator("#table thead").get_by_role("columnheader", name=name, exact=True)
        cell = f"[data-id={column.get_attribute('data-id')}]"
        found = self.page.evaluate(
            "cell => [...document.querySelectorAll('#table tbody tr')].map((r) => r.querySelector(cell)?.innerText)",
            cell,
        )
        return [(text or "").strip() for text in found]

    def sort(self, name: str) -> str | None:
        head = self.page.locator("#table").get_by_role("columnheader", name=name, exact=True)
        head.get_by_role("button").click()
        return head.get_attribute("aria-sort")


@pytest.fixture
def opened(browser: Browser, report: Path, request: pytest.FixtureRequest) -> Iterator[BrowserPage]:
    options = getattr(request, "param", {})
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
    opened_page = BrowserPage(page)
    page.on("console", lambda message: opened_page.messages.append(message.text))
    page.on("pageerror", lambda error: opened_page.messages.append(str(error)))
    page.on("request", lambda one: opened_page.requests.append(one.url))
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-ready]", timeout=30_000)
    yield opened_page
    assert opened_page.messages == []
    assert [url for url in opened_page.requests if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    page.close()


def test_the_page_ranks_layouts_and_draws_figures(opened: BrowserPage):
    assert opened.column("layout")[0] == "2x4x1-fsdp"
    assert opened.column("#") == ["1", "2", "3", "", "", "1", "2", "3"]
    for name in ("speed", "memory", "parts", "sent", "pairs"):
        assert opened.page.locator(f"#{name} svg path").count() > 3, name
    assert not opened.page.locator("#price").count(), "all prices are equal"
    assert opened.page.locator("#torus circle").count() == 8
    assert opened.page.locator("#timeline svg path").count() > 50
    assert opened.page.locator("#memory svg").get_by_text("does not fit", exact=True).count() == 1
    assert "x as fast" in opened.page.locator("#answers").inner_text()


def test_two_layouts_are_shown_side_by_side(opened: BrowserPage):
    page = opened.page
    options = page.locator("#one option").all_inner_texts()
    assert len(options) == 3, "those that were predicted"
    assert page.locator("#why li").first.inner_text().startswith("A is ")
    sums = [row.inner_text().split("\t") for row in page.locator("#sides tr", has_text="total").all()]
    assert sums[0][0] == "total" and len(sums[0]) == 4
    page.select_option("#one", page.input_value("#other"))
    assert page.locator("#why").inner_text().endswith("the same layout.")


def test_units_stay_when_two_layouts_are_swapped(browser: Browser, tmp_path: Path):
    short, long = {"matmul": 0.9, "exposed x": 0.1}, {"matmul": 0.2, "exposed x": 0.8}
    trials = [
        make_trial("8x1x1-fsdp", 1000, part_shares=short, bytes_by_axes={"x": 512.0}, overrides=["model.layers=4"]),
        make_trial(
            "2x4x1-2d_tp", 400, part_shares=long, bytes_by_axes={"x": 9e6}, batch=32, overrides=["model.layers=4"]
        ),
        make_trial("1x8x1-dp", 300, part_shares=long, overrides=["model.layers=8"]),
    ]
    opened = open_page(browser, write_report(write_sweep(tmp_path, trials)))
    page, reasons = opened.page, []
    for first, other in (("0", "1"), ("1", "0")):
        page.select_option("#one", first)
        page.select_option("#other", other)
        reasons.append(page.locator("#why").inner_text())
        tokens = page.evaluate(
            f"JSON.parse(document.getElementById('data').textContent).pairs.quantities[{first}].tokens"
        )
        assert f"scaled to the {tokens:,} tokens of A" in reasons[-1]
    assert "512 B under A." in reasons[0] and "9 MB" in reasons[1]
    page.select_option("#other", "2")
    assert "layers=4" in page.locator("#why").inner_text() and "can be compared." in page.locator("#why").inner_text()
    assert page.locator("#sides").is_hidden()
    page.close()


def test_one_banner_says_that_speeds_are_simulated(opened: BrowserPage):
    assert opened.page.locator(".notice").inner_text().startswith("Simulated.")
    assert opened.column("source")[-3:] == ["measured on simulated devices"] * 3
    assert not any("simulated" in text for text in [*opened.column("tokens/s"), *opened.column("step")])
    opened.page.get_by_role("radio", name="measured on simulated devices").check()
    assert opened.page.locator("#parts").is_hidden() and opened.page.locator("#speed").is_visible()


def test_no_column_is_cut_off(opened: BrowserPage):
    overflow = "[...document.querySelectorAll('.scroll')].map((box) => box.scrollWidth - box.clientWidth)"
    assert max(opened.page.evaluate(overflow)) <= 1


def test_a_question_mark_opens_its_description(opened: BrowserPage):
    words = opened.page.locator("#speed .help p")
    assert not words.is_visible()
    opened.page.locator("#speed .help summary").click()
    assert words.is_visible()


def test_a_click_on_a_column_sorts_the_table(opened: BrowserPage):
    assert opened.sort("peak memory") == "ascending"
    sizes = ["5.9 MiB", "13.9 MiB", "4.0 GiB", "4.0 GiB", "12.0 GiB", "12.0 GiB", "20.0 GiB"]
    assert opened.column("peak memory") == [*sizes, ""]
    assert opened.sort("peak memory") == "descending"
    assert opened.column("peak memory") == [*reversed(sizes), ""]
    assert opened.sort("tokens/s/chip") == "descending"
    assert opened.column("layout")[:2] == ["2x4x1-fsdp", "2x2x2-2d_tp"]
    heads = opened.page.locator("#table thead th").count()
    assert opened.page.locator('#table th[aria-sort="none"]').count() == heads - 1


def test_a_reason_is_shown_instead_of_missing_values(opened: BrowserPage):
    row = opened.page.locator("#table tbody tr", has_text="1x1x8-dp")
    assert row.locator("td.reason").inner_text().startswith("needs 20.0 GiB")
    assert row.locator("td[data-id=peak_bytes]").inner_text() == "20.0 GiB"
    refused = opened.page.locator("#table tbody tr", has_text="3x1x1-dp")
    spans = refused.locator("td, th").evaluate_all("cells => cells.map((cell) => cell.colSpan)")
    assert sum(spans) == opened.page.locator("#table thead th").count() and spans.count(1) == len(spans) - 1


def test_a_layout_heads_its_row(opened: BrowserPage):
    assert opened.page.get_by_role("rowheader", name="8x1x1-dp", exact=True).count() == 2


def test_filters_reduce_the_table(opened: BrowserPage):
    count = opened.page.locator("#count")
    opened.page.get_by_label("Find").fill("divisible")
    assert opened.column("layout") == ["3x1x1-dp"] and count.inner_text().startswith("1 of 8")
    opened.page.get_by_role("button", name="Clear").click()
    opened.page.locator("select[data-column=partition]").select_option("dp")
    opened.page.locator("select[data-column=outcome]").select_option("ok")
    assert opened.column("layout") == ["8x1x1-dp", "8x1x1-dp"]
    opened.page.locator("select[data-column=seen]").select_option("predicted for v5e-8")
    assert count.inner_text().startswith("1 of 8")
    opened.page.get_by_role("button", name="Clear").click()
    opened.page.wait_for_function("document.getElementById('count').textContent === '8 of 8 trials'")


def test_hovering_shows_the_numbers(opened: BrowserPage):
    opened.page.locator("#speed svg .mark-rect path").nth(1).hover()
    tooltip = opened.page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert "tokens/s/chip" in tooltip.inner_text() and "5,000" in tooltip.inner_text()


def test_a_layout_is_selected_in_the_table(opened: BrowserPage):
    opened.page.get_by_role("button", name="3x1x1-dp").click()
    details = opened.page.locator("#facts").inner_text()
    assert str(REFUSED.reason) in details
    assert "mesh=2x4x1 partition=fsdp hydra.mode=RUN" in details
    assert opened.page.locator("#torus .empty").is_visible()
    assert opened.page.evaluate("document.activeElement.id") == "layout"


def test_the_page_works_with_only_a_keyboard(opened: BrowserPage):
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('th')?.dataset.id") == "label":
            break
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("Enter")
    assert page.locator("#table thead th[data-id=label]").get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert page.locator("#table thead th[data-id=label]").get_attribute("aria-sort") == "descending"


def brightness(opened: BrowserPage, what: str) -> float:
    colour = opened.page.evaluate(f"getComputedStyle(document.body).{what}")
    return sum(float(part) for part in colour[4:-1].split(",")[:3]) / 3


@pytest.mark.parametrize("opened", [{"color_scheme": "dark"}, {"color_scheme": "light"}], indirect=True)
def test_the_page_has_dark_and_light_colours(opened: BrowserPage):
    dark = opened.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (brightness(opened, "backgroundColor") < brightness(opened, "color")) == dark
    label = "getComputedStyle(document.querySelector('#speed svg .role-axis-label text')).fill"
    assert opened.page.evaluate(label) == opened.page.evaluate("getComputedStyle(document.body).color")
    theme = opened.page.locator("#theme")
    assert theme.inner_text() == ("Light page" if dark else "Dark page") and theme.get_attribute("aria-pressed") is None
    theme.click()
    assert (brightness(opened, "backgroundColor") < brightness(opened, "color")) != dark
    assert opened.page.evaluate(label) == opened.page.evaluate("getComputedStyle(document.body).color")
    opened.page.emulate_media(media="print")
    assert brightness(opened, "backgroundColor") == 255
    assert not opened.page.locator("#filters").is_visible()
    assert len(opened.page.pdf()) > 20_000


@pytest.mark.parametrize("opened", [{"viewport": {"width": 400, "height": 800}}], indirect=True)
def test_narrow_screens_do_not_scroll_sideways(opened: BrowserPage):
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("opened", [{"viewport": {"width": 400, "height": 800}}], indirect=True)
def test_a_phone_shows_the_layout_and_its_speed_side_by_side(opened: BrowserPage):
    for name in ("label", "tokens_per_second_per_chip"):
        box = opened.page.locator(f"#table tbody tr:first-child [data-id={name}]").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 400, name
    failed = opened.page.locator("#table tbody tr", has_text="1x1x8-dp").locator("[data-id=tokens_per_second_per_chip]")
    assert failed.inner_text().strip() == "does not fit"


def open_page(browser: Browser, report: Path) -> BrowserPage:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-ready]", timeout=30_000)
    return BrowserPage(page)


def test_a_sweep_without_timelines_opens_on_the_best_layout(browser: Browser, tmp_path: Path):
    opened = open_page(browser, write_report(write_sweep(tmp_path, TRIALS)))
    assert opened.page.locator("#chosen").input_value() == "0"
    opened.page.close()


def test_a_sweep_without_speeds_shows_memory_and_bytes(browser: Browser, tmp_path: Path):
    trials = [make_cpu_trial("8x1x1-fsdp", 4, 4e6), make_cpu_trial("2x4x1-2d_tp", 2, 9e6)]
    opened = open_page(browser, write_report(write_sweep(tmp_path, trials)))
    assert opened.column("peak memory") == ["2.0 GiB", "4.0 GiB"] and opened.column("sent") == ["9.00 MB", "4.00 MB"]
    for figure in ("memory", "sent"):
        assert opened.page.locator(f"#{figure} .mark-rect path").count() == 2
    assert opened.page.locator("#table td.reason").count() == 0
    opened.page.close()


def test_the_answers_are_readable_without_javascript(browser: Browser, report: Path):
    page = browser.new_page(java_script_enabled=False)
    page.goto(report.as_uri())
    assert "Fastest of 3" in page.locator("main").inner_text()
    page.close()


def test_the_page_of_a_search_shows_settings_as_typed_and_how_sure_its_order_is(browser: Browser, tmp_path: Path):
    candidate = Candidate("v5e-8", 1, "1x2x4", None, "fsdp", PipelineSchedule.gpipe, 1, False, "full", 1)
    numbers = (0.5, 0.45, 0.6, 2**30, 2**34, 1000.0, 0.4, 0.01)
    row = RankedLayout(candidate, candidate.overrides, Stage.compile, *numbers, Bottleneck("compute", 0.9, False), {})
    row = replace(row, compile="valkyrie-train mode=compile", train="valkyrie-train steps=1")
    command = "valkyrie-launch target=v6e-8 -- mode=measure"
    texts: dict[str, list[str]] = {"remarks": ["mesh=1x2x4 is typed."], "certainty": [f"Measure #1: {command}"]}
    answer = SearchAnswer([], "abc", 9, {}, 0, 1, "", MeasureReport(), [row], [], targets=["v5e-8"], **texts)
    write_record(tmp_path / ANSWER_FILE, answer)
    opened = open_page(browser, write_report(tmp_path))
    items = opened.page.locator("#answers .remarks li")
    assert "mesh=1x2x4 is typed." in items.all_inner_texts()
    transform = "li => getComputedStyle(li, '::first-letter').textTransform"
    assert {items.nth(i).evaluate(transform) for i in range(items.count())} == {"none"}
    assert command in opened.page.locator("#answers code").all_inner_texts(), "it can be copied"
    opened.page.locator("#commands summary").click()
    assert opened.page.locator("#commands code").all_inner_texts() == [row.compile, row.train]
    opened.page.close()
