"""Every experiment: legal as its file says and at size=tiny, which trains it on this machine; found by its file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers import compose_config, names
from valkyrie.compose import tiny_of
from valkyrie.run import Run

EXPERIMENTS = names("experiment")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_it_is_legal_at_both_sizes_with_a_tiny_model_of_its_kind(experiment):
    full = Run.from_config(compose_config(f"experiment={experiment}"))
    assert not full.problems()
    tiny = Run.from_config(compose_config(f"experiment={experiment}", "size=tiny"))
    assert not tiny.problems()
    assert tiny.model.family == full.model.family and tiny.model.task == full.model.task
    assert tiny.config.optimizer.name == full.config.optimizer.name
    assert tiny.model.parameter_count() < 10e6 and tiny.config.target.name == "auto"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_it_trains_at_size_tiny(experiment, tmp_path):
    command = [sys.executable, "-m", "valkyrie.cli.train", f"experiment={experiment}", "size=tiny"]
    more = ["mesh=1x1x2", "steps=6", "eval_every=6", "tracking=off", "name=tiny"]
    done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 6/6" in done.stdout


def test_an_experiment_without_a_tiny_model_is_refused():
    with pytest.raises(ValueError) as error:
        tiny_of("mine")
    assert str(error.value) == (
        "size=tiny has no model for experiment=mine. Name a small one: model=NAME, without size=tiny."
    )
    assert tiny_of(None) == "valkyrie_tiny"
