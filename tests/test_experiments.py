"""Tests of every experiment file: each is legal as written, and trains with `size=tiny`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers import compose_config, config_names
from valkyrie.config.compose import tiny_model_for
from valkyrie.config.run import Run
from valkyrie.problems import ProblemCode

EXPERIMENTS = config_names("experiment")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_legal_at_both_sizes_with_a_tiny_model_of_its_family(experiment):
    full_run = Run.from_config(compose_config(f"experiment={experiment}"))
    assert not full_run.problems()
    tiny_run = Run.from_config(compose_config(f"experiment={experiment}", "size=tiny"))
    assert not tiny_run.problems()
    assert tiny_run.model.family == full_run.model.family and tiny_run.model.task == full_run.model.task
    assert tiny_run.config.optimizer.name == full_run.config.optimizer.name
    assert tiny_run.model.parameter_count() < 10e6 and tiny_run.config.target.name == "auto"


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_trains_at_size_tiny(experiment, tmp_path):
    command = [sys.executable, "-m", "valkyrie.cli.train", f"experiment={experiment}", "size=tiny"]
    more = ["mesh=1x1x2", "steps=6", "eval_every=6", "tracking=off", "name=tiny"]
    result = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 6/6" in result.stdout


def test_an_experiment_without_a_tiny_model_is_refused():
    with pytest.raises(ValueError) as error:
        tiny_model_for("mine")
    assert "experiment=mine" in str(error.value) and "model=NAME" in str(error.value)
    assert tiny_model_for(None) == "valkyrie_tiny"


def test_llama_7b_has_the_published_size():
    model = Run.from_config(compose_config("experiment=llama_7b_v4_64")).model
    shape = (model.vocab_size, model.embed, model.layers, model.attention.heads, model.mlp)
    assert shape == (32000, 4096, 32, 32, 11008)
    assert model.vocab_rows == model.vocab_size and model.parameter_count() == 6_738_415_616


@pytest.mark.parametrize(
    "promised",
    [
        ("experiment=llama_7b_v4_64", "partition=data_model_fsdp", "microbatches=2", "remat=full", "remat.save=[]"),
        ("experiment=multihost_v5p_128", "target=v5p-256", "mesh=8x16x1", "partition=data_model_fsdp", "remat=full"),
        ("experiment=gpt_16b_v4_64", "mesh=4x2x4", "partition=fsdp_tp", "remat.save=[]"),
    ],
)
def test_requested_layouts_are_legal_on_the_slices_in_the_comments(promised):
    assert not Run.from_config(compose_config(*promised)).problems()


def test_an_8x16_mesh_is_refused_on_v5p_128():
    overrides = ("experiment=multihost_v5p_128", "mesh=8x16x1", "partition=data_model_fsdp", "remat=full")
    (problem,) = Run.from_config(compose_config(*overrides)).problems()
    assert (problem.code, problem.size, problem.parts) == (ProblemCode.device_count, 128, 64)
