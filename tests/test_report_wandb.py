"""Tests of the W&B dashboard of a sweep: every panel reads keys that the sweep's runs have."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from test_sweep_tracking import OK, row
from valkyrie.records import encode
from valkyrie.report.wandb import add_arguments, main_wandb
from valkyrie.sweep.tracking import trial_summary
from valkyrie.sweep.trial import GoodputResult, TrialResult


@pytest.fixture
def dry_run_output(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the output of `--wandb me/valkyrie --group laptop_8 --dry-run`."""
    assert main_wandb("me/valkyrie", "laptop_8", dry_run=True) == 0
    return json.loads(capsys.readouterr().out)


def panels(dry_run_output: dict[str, Any]) -> list[dict[str, Any]]:
    sections = dry_run_output["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel for section in sections for panel in section["panels"]]


def test_the_dashboard_shows_one_sweep(dry_run_output: dict[str, Any]) -> None:
    (runs,) = dry_run_output["workspace"]["spec"]["section"]["runSets"]
    (rule,) = runs["filters"]["filters"]
    assert (rule["key"], rule["op"], rule["value"]) == ({"section": "run", "name": "group"}, "=", "laptop_8")
    assert dry_run_output["workspace"]["entity"] == "me" and dry_run_output["workspace"]["project"] == "valkyrie"
    assert {panel["viewType"] for panel in panels(dry_run_output)} == {
        "Bar Chart",
        "Scatter Plot",
        "Parallel Coordinates Plot",
    }


def test_all_sweeps_are_shown_without_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_wandb("me/valkyrie", None, dry_run=True) == 0
    assert json.loads(capsys.readouterr().out)["workspace"]["spec"]["section"]["runSets"][0]["filters"]["filters"] == []


def test_every_panel_reads_keys_that_runs_have(dry_run_output: dict[str, Any]) -> None:
    trained = replace(OK, results=TrialResult(goodput=GoodputResult(10.0, {"steps": 9.0}, 1, 0.9, 0.1)))
    summary = {
        *trial_summary(row(OK)),
        *trial_summary(row(trained)),
        *("mfu", "predicted_mfu", "predicted_step_ms", "dollars_per_million_tokens"),
        *(f"comm_bytes/{a}" for a in ("s", "w", "y", "z", "x,z", "y,z", "x,y,z")),
    }
    config = {*encode(OK.about), "stage"}
    read_keys: set[str] = set()
    for panel in panels(dry_run_output):
        shown = panel["config"]
        if panel["viewType"] == "Bar Chart":
            assert shown["groupBy"] == "layout.value"
            read_keys |= {*shown["metrics"]}
            continue
        accessors = [column["accessor"] for column in shown.get("columns", [])] or [shown["xAxis"], shown["yAxis"]]
        for accessor in accessors:
            section, _, key = accessor.partition(":")
            if section == "config":
                assert re.split(r"\.value", key)[0] in config, accessor
            else:
                read_keys.add(key)
    assert read_keys <= summary
    assert {
        "tokens_per_second_per_chip",
        "hbm_gib",
        "comm_bytes/x",
        "comm_bytes/x,y",
        "comm_bytes/total",
        "goodput",
        "data_wait",
    } <= read_keys


def test_the_report_compares_predicted_and_measured_values(dry_run_output: dict[str, Any]) -> None:
    grids = [block for block in dry_run_output["report"]["blocks"] if block["type"] == "panel-grid"]
    assert len(grids) == 4
    for grid in grids:
        assert [runs["name"] for runs in grid["runSets"]] == ["measured", "predicted", "trained"]
        assert all("laptop_8" in runs["filters"] and "stage" in runs["filters"] for runs in grid["runSets"])
        assert grid["panels"]


@pytest.mark.parametrize("project", ["valkyrie", "me/", "/valkyrie", "a/b/c"])
def test_a_project_needs_its_entity(project: str) -> None:
    with pytest.raises(ValueError, match=f"--wandb={project} .* ENTITY/PROJECT"):
        main_wandb(project, None, dry_run=True)


def test_a_missing_key_is_reported_with_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # takes 1 s, in every collection if imported above

    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(ValueError, match="Set WANDB_API_KEY"):
        main_wandb("me/valkyrie", None, dry_run=False)


def test_a_server_refusal_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # takes 1 s, in every collection if imported above

    def fail(**_: Any) -> bool:
        raise wandb.errors.AuthenticationError("wrong key")

    monkeypatch.setattr(wandb, "login", fail)
    with pytest.raises(ValueError, match="wrong key"):
        main_wandb("me/valkyrie", None, dry_run=False)


def test_a_missing_library_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="--extra wandb-workspaces"):
        main_wandb("me/valkyrie", None, dry_run=True)


def test_the_arguments_are_parsed() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parsed = parser.parse_args(["--wandb", "me/valkyrie", "--group", "g", "--dry-run"])
    assert (parsed.wandb, parsed.group, parsed.dry_run) == ("me/valkyrie", "g", True)
