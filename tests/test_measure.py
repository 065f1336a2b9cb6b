"""Tests of `mode=measure`: every timed step counts, and simulated speeds are marked as such."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS, run_train
from valkyrie.tasks import next_token


def test_the_step_is_timed_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    status = run_train(
        *TINY_ARGUMENTS, "mesh=2x2x1", "partition=fsdp", "mode=measure", "mode.repeats=3", "mode.warmup=1", "name=m"
    )
    out = capfd.readouterr().out
    assert status == 0
    measured = json.loads((tmp_path / "runs" / "m" / "measure.json").read_text())
    step = measured["step"]
    assert measured["simulated"] and len(step["seconds"]) == 3
    assert step["min_s"] <= step["step_s"] <= step["p90_s"]
    assert step["tokens_per_second"] == pytest.approx(8 * 16 / step["step_s"])
    assert step["mfu"] is None
    communication = measured["communication"]
    assert [over["mesh_axes"] for over in communication["bytes_by_mesh_axes"]] == [["x", "y"]]
    assert np.isfinite(measured["loss"])
    times = measured["trace"]["times"]
    assert all(time["mesh_axes"] == ["x", "y"] and time["seconds"] > 0 for time in times)
    assert {time["kind"] for time in times} == set(communication["bytes_by_kind"])
    assert "including waiting" in measured["trace"]["note"] and "including waiting" in out
    assert not (tmp_path / "runs" / "m" / "trace").exists()
    assert "SIMULATED" in out and "measured step simulated:" in out
    assert all("simulated" in line for line in out.splitlines() if "tokens/s" in line)


def test_nothing_to_time_is_refused(capfd: pytest.CaptureFixture):
    assert run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "mode=measure", "mode.repeats=0") == 2
    assert "mode.repeats=0" in capfd.readouterr().err


def test_the_batch_has_random_tokens_and_targets_of_the_next_token():
    batch, again = (next_token.Config().random_batch(8, 16, 61, seed=0, places=range(8)) for _ in range(2))
    part = next_token.Config().random_batch(8, 16, 61, seed=0, places=[2, 5])
    np.testing.assert_array_equal(batch["tokens"][[2, 5]], part["tokens"])
    assert batch["tokens"].shape == (8, 16) and batch["tokens"].max() < 61
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["tokens"], again["tokens"])


@pytest.mark.slow
def test_real_data_comes_from_the_loader_and_the_trace_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    options = ("mode=measure", "mode.data=real", "mode.trace=true", "mode.repeats=2", "mode.warmup=0", "name=m")
    assert run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, *options) == 0
    measured = json.loads((tmp_path / "runs" / "m" / "measure.json").read_text())
    assert measured["data"] == "synthetic"
    assert measured["trace"]["times"] == []
    assert len(list((tmp_path / "runs" / "m" / "trace").rglob("*.xplane.pb"))) == 1


def test_too_little_real_data_is_refused(capfd: pytest.CaptureFixture):
    assert run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "mode=measure", "mode.data=real", "batch=100000") == 2
    assert "but batch=100000" in capfd.readouterr().err
