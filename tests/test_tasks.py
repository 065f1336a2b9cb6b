"""Tests of task properties that are known without JAX: whether a task needs causal models or allows microbatches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers import compose_config
from valkyrie.config.run import Run
from valkyrie.problems import ProblemCode

CARRY_TASK = """
from valkyrie.tasks import Array
from valkyrie.tasks import next_token


class Config(next_token.Config):
    def problems(self, model, seq):
        return []

    def carry(self, model, compute, batch, seq):
        return {"seen": Array((batch,), "float32", ("batch",))}
"""


def run_of(task: str, *overrides: str) -> Run:
    """Return a run of the tiny GPT, with `task` in place of its model's task."""
    run = Run.from_config(compose_config("model=gpt_tiny", "mesh=1x1x1", "partition=dp", *overrides))
    family = type(run.model)
    model = type("Own", (family,), {"task": task})(**vars(run.model))
    return Run(replace(run.config, model=model), model)


def test_a_task_declares_its_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "carrying_task.py").write_text(CARRY_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    bidirectional = "model.attention.causal=false"
    assert run_of("carrying_task", bidirectional).problems() == []
    (problem,) = run_of("next_token", bidirectional).problems()
    assert (problem.code, problem.key) == (ProblemCode.unsupported, "model")
    recursive = Run.from_config(compose_config("model=trm_tiny", "task=next_token", "data=sudoku_4x4"))
    (problem,) = (problem for problem in recursive.problems() if problem.key == "model")
    assert "task=puzzles" in str(problem) and "causal=false" not in str(problem)
    assert run_of("next_token", "microbatches=2").problems() == []
    (problem,) = run_of("carrying_task", "microbatches=2").problems()
    assert (problem.code, problem.key, problem.value) == (ProblemCode.unsupported, "microbatches", 2)
    (tmp_path / "silent_task.py").write_text(CARRY_TASK.replace("return []", "return None"))
    with pytest.raises(ValueError, match=r"problems\(\) of .*/silent_task\.py .*None\b"):
        run_of("silent_task").problems()
    (unknown,) = run_of("no_such_task").problems()
    assert (unknown.code, unknown.key) == (ProblemCode.unknown_name, "task")
