"""The page of a report as a file: its size, its figures' contrast, what it loads, hostile names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reported import sweep_folder, trial
from test_report import FSDP, LARGE, RAN, WRONG, data_of, rows_of
from valkyrie.report import figures, specs
from valkyrie.report.page import LIMIT, page, write_report
from valkyrie.sweep.trial import Status, Trial


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(1, 2, 3)`, as WCAG 2 defines it."""
    named = {"white": "255,255,255", "black": "0,0,0"}.get(colour, colour)
    parts = [int(part) / 255 for part in re.findall(r"[0-9]+", named)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_numbers_on_the_map_are_read_on_every_blue():
    import vl_convert

    found = [{"data": 1, "mp1": i, "mp2": 1, "rate": float(i), "text": f"r{i}"} for i in range(101)]
    spec = specs.heat(False, found) | {"data": {"values": found}, "config": specs.CONFIG}
    drawn = vl_convert.vegalite_to_svg(spec)
    cells = re.findall(r'aria-roledescription="rect mark"[^>]*fill="([^"]+)"', drawn)
    words = re.findall(r'<text [^>]*fill="(white|black)"[^>]*>r[0-9]+</text>', drawn)
    assert len(cells) == len(words) == 101
    levels = [sorted([luminance(cell), luminance(word)]) for cell, word in zip(cells, words, strict=True)]
    assert min((high + 0.05) / (low + 0.05) for low, high in levels) >= 4.5


def many(count: int) -> list[Trial]:
    long = "partition=2d_tp puts heads (4) of attention.query on x=8: 4 is not divisible by 8. Use a mesh whose x " * 4
    found = []
    for i in range(count):
        name = (
            f"{2 ** (i % 5)}x{2 ** (i % 3)}x{i}-{('fsdp', '2d_tp', '1d_tp', 'data_model_fsdp')[i % 4]}-mb{i}-remat_full"
        )
        if i % 5 == 4:
            found.append(trial(name, None, status=Status.refused, reason=long + str(i)))
        else:
            found.append(trial(name, 1000 + i, stage="measure" if i % 5 == 3 else "compile"))
    return found


def test_a_page_of_500_trials_stays_under_its_limit(tmp_path: Path):
    path = write_report(sweep_folder(tmp_path, many(500), timelines=40))
    assert path == tmp_path / "report.html"
    assert path.stat().st_size < LIMIT == 2_000_000
    data = data_of(path.read_text())
    assert len(data["rows"]) == len(data["details"]) == 500
    assert len(data["timelines"]) >= 4


def test_timelines_are_left_out_until_a_page_is_small_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = rows_of(tmp_path, *(trial(f"8x1x{i}-fsdp", 1000 - i) for i in range(6)), timelines=6)
    size = len(page(found).encode())
    asked: list[str] = []
    specification = figures.specification
    monkeypatch.setattr("valkyrie.report.page.specification", lambda f, r: asked.append(f.id) or specification(f, r))
    for limit, kept in ((size, "012345"), (size - 1, "012"), (1, "")):
        asked.clear()
        monkeypatch.setattr("valkyrie.report.page.LIMIT", limit)
        assert "".join(data_of(page(found))["timelines"]) == kept
        assert len(asked) == len(set(asked))


def test_a_page_names_no_address_to_load_from(tmp_path: Path):
    text = page(rows_of(tmp_path, FSDP, LARGE, WRONG, RAN))
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href|action)\s*=\s*[\"']?(https?:)?//", outside)
    assert "default-src 'none'" in text
    assert data_of(text)["rows"][0][1] == "8x1x1-fsdp"


def test_hostile_names_stay_text(tmp_path: Path):
    bad = "</script><script>alert(1)</script>"
    text = page(rows_of(tmp_path, trial("1x1x1-" + bad, 10), trial(bad, None, status=Status.failed, reason=bad)))
    assert bad not in text and "alert(1)" in text
    assert bad in json.dumps(data_of(text))
