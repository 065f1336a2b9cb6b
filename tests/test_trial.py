"""Tests of the record of trials, `trials.jsonl`: concurrent writers, a line cut off at the end, and newer schemas."""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from valkyrie.parts import PartKind, StepPart
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.sweep.trial import SCHEMA, Status, Trial, TrialLog, TrialResult

REMEDY = "Delete that line"


def make_trial(key: str, status: Status = Status.ok, reason: str | None = None) -> Trial:
    return Trial(
        key=key,
        name=f"trial-{key}",
        sweep="swept",
        stage="measure",
        status=status,
        reason=reason,
        overrides=["partition=fsdp"],
        about=LayoutRecord("m", "8x1x1", "fsdp", "auto", roles="für " * 200),
        started="2026-01-01T00:00:00+00:00",
        wall_s=1.5,
        results=TrialResult(loss=1.0),
    )


def test_a_trial_is_read_back_as_it_was_written(tmp_path: Path):
    log = TrialLog(tmp_path / "a" / "sweep")
    log.append([make_trial("1"), make_trial("2", Status.refused, "batch=7 is odd")])
    assert log.read() == [make_trial("1"), make_trial("2", Status.refused, "batch=7 is odd")]


def test_a_later_line_replaces_an_earlier_one_with_the_same_key(tmp_path: Path):
    log = TrialLog(tmp_path)
    log.append([make_trial("1", Status.failed), make_trial("2")])
    log.append([make_trial("1")])
    assert log.read() == [make_trial("1"), make_trial("2")]
    assert len(log.path.read_text().splitlines()) == 3


def _write(folder: Path, writer: int, count: int) -> None:
    for number in range(count):
        TrialLog(folder).append([make_trial(f"{writer}-{number}")])


def test_concurrent_writers_lose_no_lines(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(tmp_path, writer, 30)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert {t.key for t in TrialLog(tmp_path).read()} == {f"{w}-{n}" for w in range(4) for n in range(30)}
    assert len(TrialLog(tmp_path).path.read_text().splitlines()) == 120


@pytest.mark.parametrize("kept_bytes", [1, 100, -1])
def test_an_incomplete_last_line_is_ignored_and_removed_by_the_next_write(tmp_path: Path, kept_bytes: int):
    log = TrialLog(tmp_path)
    log.append([make_trial("1"), make_trial("2")])
    whole, torn, _ = log.path.read_bytes().split(b"\n")
    log.path.write_bytes(whole + b"\n" + torn[:kept_bytes])
    assert log.read() == [make_trial("1")]
    log.append([make_trial("3")])
    assert log.read() == [make_trial("1"), make_trial("3")]


def test_a_line_without_recently_added_keys_is_read(tmp_path: Path):
    log = TrialLog(tmp_path)
    values = json.loads(
        replace(make_trial("1"), values={"model.layers": "4"}, flags=["--config-dir", "/mine"]).to_json()
    )
    log.path.write_text(json.dumps({k: v for k, v in values.items() if k not in ("values", "flags")}) + "\n")
    assert log.read() == [make_trial("1")] and (make_trial("1").values, make_trial("1").flags) == ({}, [])


OLD_LINE = """{"schema": 1, "key": "ab", "name": "n", "sweep": "s", "stage": "compile", "status": "ok", "reason": null,
"overrides": ["target=v4-256", "+target.topology=4x4x8_twisted"], "started": "2026-01-01T00:00:00+00:00",
"about": {"model": "gpt_tiny", "mesh": "4x4x8", "axes": {"x": 4, "y": 4, "z": 8}, "mesh_placement": null,
"partition": "fsdp", "microbatches": 1, "remat": "none", "target": "v4-256", "described": "a text", "chip": "v4",
"chips": 128, "batch": 128, "seq": 64, "precision": "float32", "layout": "4x4x8-fsdp", "roles": "x=4 DP(batch)",
"degrees": {"DP": 128}, "sharding": "abc", "predicted_by": "123"}, "wall_s": 1.5, "folder": "n", "results":
{"memory": {"peak": 5, "usable": null}, "step": {"step_s": 0.5, "mfu": null, "interval": {"low_s": 0.4,
"high_s": 0.6, "low": 0.8, "high": 1.2}}, "seconds":
{"matmul": 0.5, "exposed x,y": 0.25},
"communication": {"bytes": 3, "bytes_by_mesh_axes": {"x": 1, "?": 2}}, "compile": {"compile_s": 2.0,
"cached": false}, "hints": [], "placement": ["x=4 on torus a"]}, "values": {"model.layers": "4"}, "flags": []}"""


def test_a_line_in_the_format_before_typed_records_is_read():
    trial_read = Trial.from_json(OLD_LINE.replace("\n", " "))
    assert trial_read.about is not None and trial_read.about.hardware is not None
    hardware = trial_read.about.hardware
    assert (hardware.topology, hardware.twisted, hardware.chips, hardware.hosts) == ("4x4x8", True, 128, 32)
    assert (trial_read.about.name, trial_read.about.degrees, trial_read.about.predicted_by) == (
        "4x4x8-fsdp",
        {"DP": 128},
        "123",
    )
    results = trial_read.results
    assert (results.memory.required, results.step.step_s) == (5, 0.5)
    assert results.parts == (StepPart(PartKind.matmul, (), 0.5), StepPart(PartKind.exposed, ("x", "y"), 0.25))
    assert results.bytes_by_axes == {"x": 1.0, "unattributed": 2.0}
    old, new = json.loads(OLD_LINE.replace("\n", " ")), json.loads(trial_read.to_json())
    assert new.keys() - old.keys() == {"problems"} and new["about"].keys() - old["about"].keys() == {"hardware"}
    assert Trial.from_json(trial_read.to_json()) == trial_read


def test_a_newer_schema_is_refused_but_unknown_keys_are_accepted(tmp_path: Path):
    log = TrialLog(tmp_path)
    values = json.loads(make_trial("1").to_json())
    log.path.write_text(json.dumps({**values, "weather": "fine"}) + "\n")
    assert log.read() == [make_trial("1")]
    log.path.write_text(json.dumps({**values, "schema": SCHEMA + 1}) + "\n")
    with pytest.raises(ValueError, match=f"schema {SCHEMA + 1} .*Update valkyrie.$"):
        log.read()


WRONG = [("results", None), ("results", []), ("about", [1]), ("folder", 5), ("overrides", None)]
WRONG += [("overrides", [1]), ("values", None), ("values", {"a": 1}), ("key", ["a"]), ("status", "weird")]
WRONG += [("status", ["ok"]), ("reason", 3), ("wall_s", "x"), ("wall_s", True), ("flags", "x"), ("schema", "1")]
WRONG += [("schema", True), ("about.degrees", 3), ("about.batch", "8"), ("about.mesh", 3), ("results.step", "x")]
WRONG += [("results.step.step_s", "x"), ("results.memory.peak", "x"), ("results.seconds", {"a": "x"})]
WRONG += [("results.seconds", 3)]
WRONG += [("results.communication.bytes_by_mesh_axes", 3), ("results.loss", "x")]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_the_error_for_a_wrong_value_names_the_line_and_the_remedy(tmp_path: Path, name: str, value: Any):
    log = TrialLog(tmp_path)
    log.append([make_trial("1"), make_trial("2")])
    first, second = log.path.read_text().splitlines()
    line = json.loads(second)
    *folders, last = name.split(".")
    inner = line
    for folder in folders:
        inner = inner.setdefault(folder, {})
    inner[last] = value
    log.path.write_text(f"{first}\n{json.dumps(line)}\n")
    with pytest.raises(ValueError) as caught:
        log.read()
    assert re.match(rf"{re.escape(str(log.path))}, line 2, .*: {re.escape(name)}\b", str(caught.value))
    assert f". {REMEDY} " in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"schema": 1, "ke', "JSON ("),
        (b'{"schema": 1, "key": "\xff"}', "JSON ("),
        (b"[]", " trial"),
        (b'{"schema": 1, "status": "ok"}', "`key`"),
    ],
)
def test_the_error_for_a_line_that_is_not_a_trial_names_it_and_the_remedy(tmp_path: Path, line: bytes, reason: str):
    log = TrialLog(tmp_path)
    log.path.write_bytes(line + b"\n")
    with pytest.raises(ValueError) as caught:
        log.read()
    location, _, problem = str(caught.value).partition(f". {REMEDY}")[0].partition(": ")
    assert location.startswith(f"{log.path}, line 1, ") and reason in problem
    assert f". {REMEDY} " in str(caught.value)
