"""Tests of the examples that predict other programs: a plain Flax step, and MaxText's step compared with ours."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import valkyrie
from machines import needs_libtpu

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "foreign"
CASES = yaml.safe_load((FOLDER / "cases.yml").read_text())
PAGE = (ROOT / "README.md").read_text()
README_EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE.split("## Predict any JAX program")[1], re.DOTALL)[0]


def import_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_both_programs_of_a_case_do_the_same_work(case: dict[str, Any]):
    run = valkyrie.compose(*case["ours"], f"target={case['slice']}")
    maxtext_settings = dict(argument.split("=", 1) for argument in case["maxtext"])
    devices = valkyrie.slice(case["slice"]).devices
    assert devices == run.config.mesh.size
    assert devices == math.prod(int(n) for key, n in maxtext_settings.items() if key.startswith("ici_"))
    assert run.config.batch == devices * int(maxtext_settings["per_device_batch_size"])
    assert run.config.seq == int(maxtext_settings["max_target_length"])
    model: Any = run.config.model
    widths = {"base_emb_dim": model.embed, "base_num_decoder_layers": model.layers, "base_mlp_dim": model.mlp}
    assert {key: maxtext_settings[key] for key in widths if key in maxtext_settings} == {
        k: str(n) for k, n in widths.items() if k in maxtext_settings
    }
    assert all(re.fullmatch(r"xla_\w+=\w+", option) for option in case["options"])


def table_row(table: str) -> list[str]:
    """Return the cells of the last row of a Markdown table."""
    *_, row = (line for line in table.splitlines() if line.startswith("|"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_table_has_our_speedup(monkeypatch: pytest.MonkeyPatch):
    format_table = import_example("compare", monkeypatch).format_table
    program = {"status": "ok", "step_s": 0.5, "hidden": 0.25}
    result = {"work": "dense 1B", "slice": "v4-64", "ours": program, "maxtext": program | {"step_s": 0.6}}
    assert table_row(format_table([result])) == ["dense 1B", "v4-64", "0.500 s", "25%", "0.600 s", "25%", "1.20x"]
    refused = format_table([result | {"maxtext": {"status": "does not fit"}}])
    assert table_row(refused) == ["dense 1B", "v4-64", "0.500 s", "25%", "does not fit", "", ""]


@needs_libtpu
@pytest.mark.slow  # compiles for a TPU
@pytest.mark.timeout(300)
def test_a_plain_flax_step_is_predicted(monkeypatch: pytest.MonkeyPatch):
    slice_ = valkyrie.slice("v5e-8")
    sizes = {"batch": 8, "seq": 128, "vocab": 1024, "embed": 256, "heads": 4, "layers": 1}
    step, arguments = import_example("flax_step", monkeypatch).training_step(
        slice_.mesh((2, 4), ("data", "model")), **sizes
    )
    report = valkyrie.predict(step, *arguments, slice=slice_, tokens=8 * 128)
    assert report.fits and report.step_s and report.tokens_per_second
    lines = report.record.lines
    assert len(lines) >= 5 and all("flax_step.py" in line.source for line in lines)
    assert any("self.attention(self.attention_norm(x)" in (line.text or "") for line in lines)


@needs_libtpu
@pytest.mark.slow  # compiles for a TPU
@pytest.mark.timeout(600)
def test_the_fault_of_the_plain_step_is_its_constraint(monkeypatch: pytest.MonkeyPatch):
    example, slice_ = import_example("plain_step", monkeypatch), valkyrie.slice("v5e-8")
    monkeypatch.setattr(example, "LAYERS", 1)  # compiles faster
    step, arguments = example.faulty(slice_)
    (fault,) = valkyrie.check(step, *arguments, slice=slice_)
    file, _, line = fault.source.rpartition(":")
    assert "hidden_spec" in Path(file).read_text().splitlines()[int(line) - 1]
    page = (FOLDER / "README.md").read_text()
    assert f"plain_step.py:{line} replicates" in page and f"plain_step.py:{int(line) + 1}" in page
    step, arguments = example.step(slice_)
    assert not valkyrie.check(step, *arguments, slice=slice_)


@needs_libtpu
@pytest.mark.slow  # compiles for a TPU
@pytest.mark.timeout(300)
def test_the_example_of_the_readme_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(README_EXAMPLE, "example.py", "exec"), names)
    report = names["report"]
    assert report.fits and report.tokens_per_second and (tmp_path / "timeline.json").is_file()
    assert "predicted step" in (tmp_path / "report.html").read_text()


@needs_libtpu
@pytest.mark.slow  # compiles for a TPU
@pytest.mark.timeout(600)
def test_estimates_rank_the_layouts_of_a_program(monkeypatch: pytest.MonkeyPatch):
    from scipy.stats import spearmanr  # takes 1 s, in every collection if imported above

    build, rules = import_example("ranking", monkeypatch).PROGRAMS["mlp"]
    found = valkyrie.search(build, slice=valkyrie.slice("v5e-8"), meshes=[(8, 1), (2, 4)], rules=rules, quiet=True)
    estimates = found.estimates
    assert len(estimates) == len(found.results) == 6 and not any(estimate.reason for estimate in estimates.values())
    names = list(estimates)
    correlation: Any = spearmanr([estimates[n].step_s for n in names], [found.step_s(n) for n in names])
    assert correlation.statistic > 0.8
    assert "the same program: dp on mesh data=8 model=1, tp on mesh data=8 model=1" in found.notes + found.record.notes
