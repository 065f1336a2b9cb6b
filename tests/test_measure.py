"""Measuring a layout: every timed step counts, and no simulated speed is printed without the word."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers import compose_run
from runs import SINGLE, TINY, command
from valkyrie.search.measure import random_batch


def test_the_step_is_timed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    status = command(*TINY, "mesh=2x2x1", "partition=fsdp", "mode=measure", "mode.repeats=3", "mode.warmup=1", "name=m")
    said = capfd.readouterr().out
    assert status == 0
    found = json.loads((tmp_path / "runs" / "m" / "measure.json").read_text())
    step = found["step"]
    assert found["simulated"] and len(step["seconds"]) == 3
    assert step["min_s"] <= step["step_s"] <= step["p90_s"]
    assert step["tokens_per_second"] == pytest.approx(8 * 16 / step["step_s"])
    assert step["mfu"] is None
    assert set(found["communication"]["bytes_by_mesh_axes"]) == {"x,y"}
    assert np.isfinite(found["loss"])
    assert "SIMULATED" in said and "measured step simulated:" in said
    assert all("simulated" in line for line in said.splitlines() if "tokens/s" in line)


def test_nothing_to_time_is_refused(capfd: pytest.CaptureFixture):
    assert command(*TINY, *SINGLE, "mode=measure", "mode.repeats=0") == 2
    assert "mode.repeats=0" in capfd.readouterr().err


def test_the_batch_is_next_tokens_of_the_seed():
    run = compose_run(*TINY, *SINGLE)
    batch, again = random_batch(run), random_batch(run)
    assert batch["tokens"].shape == (8, 16) and batch["tokens"].max() < run.model.vocab_size
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["tokens"], again["tokens"])
