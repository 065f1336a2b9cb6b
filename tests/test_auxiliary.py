"""Tests of auxiliary losses and metrics that a user's block returns, under several layouts."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import SMALL_LEARNING_RATE, compose_run, make_batch, make_builder, make_program, run_steps
from own_feed_forward import SMALL_OVERRIDES, write_folder
from valkyrie.config.run import Run
from valkyrie.extensions import add_import_path
from valkyrie.models import FAMILIES, known_axes
from valkyrie.tasks.next_token import token_losses

AUXILIARY_NAMES = ("unit/size", "unit/largest")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("own_feed_forward"))
    add_import_path([folder])
    return folder


def compose_own_run(folder: Path, *overrides: str) -> Run:
    return compose_run(
        *SMALL_OVERRIDES, *SMALL_LEARNING_RATE, f"hydra.searchpath=[valkyrie://groups,{folder}]", *overrides
    )


def run_own_steps(folder: Path, *overrides: str) -> list[dict[str, np.ndarray]]:
    return run_steps(make_program(compose_own_run(folder, *overrides)), 2).metrics


@pytest.fixture(scope="module")
def single_device_steps(folder: Path) -> list[dict[str, np.ndarray]]:
    """The metrics of two steps on one device, with which every layout is compared."""
    return run_own_steps(folder, "mesh=1x1x1", "partition=dp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("mesh=2x2x2", "partition=units"),
        ("mesh=2x2x2", "partition=fsdp_tp", "microbatches=2", "remat=full"),
        ("mesh=2x2x2", "partition=pp", "microbatches=2"),
        ("mesh=2x2x2", "partition=pp", "microbatches=2", "partition.schedule=1f1b", "remat=full"),
        ("mesh=2x2x2", "partition=sp"),
        ("mesh=2x2x1", "partition=pp_fsdp", "microbatches=4"),
    ],
    ids=lambda layout: "-".join(part.partition("=")[2] for part in layout),
)
def test_values_and_gradients_equal_those_of_one_device(folder, single_device_steps, layout):
    for metrics, expected in zip(run_own_steps(folder, *layout), single_device_steps, strict=True):
        for name in ("loss", *AUXILIARY_NAMES):
            np.testing.assert_allclose(metrics[name], expected[name], rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(
            np.sqrt(metrics["squared_grad_norms"]), np.sqrt(expected["squared_grad_norms"]), rtol=2e-5, atol=1e-8
        )


def test_the_objective_includes_the_weighted_sum_over_layers(folder):
    run = compose_own_run(folder, "mesh=1x1x1", "partition=dp", "model.unit.penalty=0.5")
    builder, program = make_builder(run), make_program(run)
    batch = program.place(make_batch(run))

    def losses(parameters):
        return token_losses(builder.module(parameters), batch, shard=program.shard, checkpoint=lambda f: f, key=None)

    computed_losses = jax.jit(losses)(builder.init(jax.random.key(0)))
    weighted_sum = computed_losses.objective_sum - computed_losses.loss_sum
    assert set(computed_losses.auxiliary) == set(AUXILIARY_NAMES)
    np.testing.assert_allclose(weighted_sum, 0.5 * 2 * computed_losses.auxiliary["unit/size"], rtol=1e-4)
    assert computed_losses.auxiliary["unit/largest"] > computed_losses.auxiliary["unit/size"] > 0


def test_undeclared_values_are_refused(folder, monkeypatch):
    run = compose_own_run(folder, "mesh=1x1x1", "partition=dp")
    monkeypatch.setattr(type(run.model.unit), "auxiliary", {"size": 1.0})
    with pytest.raises(ValueError) as error:
        make_program(run).lower_step()
    assert re.findall(r"\[.*?\]", str(error.value)) == ["['unit/largest', 'unit/size']", "['unit/size']"]


@pytest.mark.parametrize(
    ("pattern", "repeats"), [("[unit]", [4]), ("[unit,feed_forward]", [2]), ("[feed_forward,unit,unit,unit]", [1, 3])]
)
def test_equal_layers_share_a_scan(folder, pattern, repeats):
    model = compose_own_run(folder, "mesh=1x1x1", "partition=dp", f"model.feed_forward_pattern={pattern}").model
    assert [repeat for _, repeat in model.segments()] == repeats
    assert model.auxiliary["unit/size"] == (
        0.3,
        sum(layer.feed_forward_kind == "unit" for layer in model.make_layers()),
    )


def test_axes_of_the_users_families_are_known(folder):
    assert "gated_unit" in FAMILIES.user_names()
    assert "gated unit" in known_axes()["units"]
