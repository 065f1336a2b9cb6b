"""Tests of the layouts that a search estimates: the time limit, and the lines about those without or with estimates."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

import valkyrie
from valkyrie.search import program_order
from valkyrie.search.compile.partitioner import ProgramEstimate
from valkyrie.search.program_order import ProgramLayout, describe_estimates, describe_missing, estimate_layouts
from valkyrie.search.programs import ProgramCall


def test_a_long_lowering_leaves_time_to_estimate_its_program(monkeypatch: pytest.MonkeyPatch):
    limits_s: list[float] = []

    def lower_slowly(*arguments: Any) -> tuple[Any, None, Any]:
        time.sleep(0.02)
        return object(), None, SimpleNamespace(shape={"data": 8}, devices=SimpleNamespace(flat=[]))

    def estimate(programs: dict[str, Any], target: Any, limit_s: float, progress: Any) -> dict[str, ProgramEstimate]:
        limits_s.append(limit_s)
        return {name: ProgramEstimate(step_s=0.1) for name in programs}

    monkeypatch.setattr(program_order, "lower_on_mesh", lower_slowly)
    monkeypatch.setattr(program_order, "capture_program", lambda *_: object())
    monkeypatch.setattr(program_order, "estimate_programs", estimate)
    monkeypatch.setattr(program_order, "is_cached", lambda *_: True)
    layouts = [ProgramLayout(name, {"data": 8}, None, lambda: ProgramCall(None)) for name in "ab"]
    estimates = estimate_layouts(layouts, valkyrie.slice("v5e-8"), 0.01, lambda line: None)
    assert limits_s == [program_order.MIN_ESTIMATE_S]
    assert estimates["a"].reason is None and "lowering" in str(estimates["b"].reason)
    assert [layout.is_cached for layout in layouts] == [True, False], "b was not lowered"


def test_layouts_without_an_estimate_are_said_to_be_compiled_last():
    estimates = {"a": ProgramEstimate(reason="too slow"), "b": ProgramEstimate(step_s=0.1)}
    note = describe_missing(estimates)
    assert note.startswith("1 layout ") and "last" in note and note.endswith("too slow")
    assert "first" in describe_missing({"a": estimates["a"]}) and not describe_missing({"b": estimates["b"]})


def test_a_layout_with_the_program_of_a_compiled_one_is_no_rival():
    steps_s = {"best": 0.1, "equal": 0.1, "rival": 0.12, "slow": 0.2}
    estimates = {
        name: ProgramEstimate(step_s=step_s, program="best" if name == "equal" else name)
        for name, step_s in steps_s.items()
    }
    rivals, programs = describe_estimates(estimates, ["equal", "rival", "slow"], "best", 0.1)
    assert "may be faster than best: rival. " in rivals and "best, equal" in programs
    assert describe_estimates(estimates, ["equal"], "best", 0.1) == [programs]
