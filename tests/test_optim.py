"""Tests of optimizers: learning-rate schedules, parameter groups, clipping, the betas of AdamW, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import vector_specs
from valkyrie.optim import (
    OptimizerConfig,
    Schedule,
    Training,
    learning_rate_schedule,
    make_optimizer,
    rate_rises_if_extended,
)
from valkyrie.optim.families.adamw import Config
from valkyrie.problems import ProblemCode

GROUPS = {"w": "matrix", "scale": "vector", "B": "ssm"}


def parameters() -> dict[str, jnp.ndarray]:
    return {name: jnp.full(2, 2.0) for name in GROUPS}


def one_update(config: OptimizerConfig, gradient: float = 0.5, steps: int = 10) -> dict[str, np.ndarray]:
    """Return the change of each parameter in the first update, by name. All parameters start at 2."""
    optimizer = make_optimizer(config, vector_specs(GROUPS), Training(steps))
    start = parameters()
    updates, _ = optimizer.update({name: jnp.full(2, gradient) for name in start}, optimizer.init(start), start)
    return {name: np.asarray(update) for name, update in updates.items()}


def test_schedule_warms_up_to_the_peak_and_ends_at_its_ratio() -> None:
    config = Config(learning_rate=1e-2, warmup_steps=4, final_ratio=0.1)
    schedule = learning_rate_schedule(config, 20)
    rates = [float(schedule(step)) for step in range(21)]
    np.testing.assert_allclose(rates[:5], 1e-2 * np.array([0.2, 0.4, 0.6, 0.8, 1.0]), rtol=1e-6)
    progress = np.arange(17) / 16
    np.testing.assert_allclose(rates[4:], 1e-3 + 9e-3 * (1 + np.cos(np.pi * progress)) / 2, rtol=1e-5)


def test_a_schedule_shorter_than_the_run_stays_at_its_last_rate() -> None:
    config = Config(learning_rate=1e-2, warmup_steps=4, final_ratio=0.1, decay_steps=20)
    rates = [[float(learning_rate_schedule(config, steps)(step)) for step in range(40)] for steps in (20, 40)]
    assert rates[0] == rates[1]
    assert rates[0][:20] == [
        float(learning_rate_schedule(replace(config, decay_steps=None), 20)(step)) for step in range(20)
    ]
    np.testing.assert_allclose(rates[1][20:], 1e-3, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_schedule_of_a_run_shorter_than_its_warmup_stays_within_the_peak(steps: int) -> None:
    schedule = learning_rate_schedule(Config(learning_rate=1e-2, warmup_steps=20), steps)
    rates = [float(schedule(step)) for step in range(steps)]
    assert all(0 < rate <= 1.001e-2 for rate in rates)
    assert rates == sorted(rates)


def test_only_matrices_are_decayed_and_state_spaces_have_a_lower_rate() -> None:
    config = Config(learning_rate=1.0, warmup_steps=0, weight_decay=0.1, ssm_learning_rate_ratio=0.25, clip_norm=None)
    updates = one_update(config)
    np.testing.assert_allclose(updates["scale"], -1.0, rtol=1e-5)
    np.testing.assert_allclose(updates["w"], -1.0 - 0.1 * 2.0, rtol=1e-5)
    np.testing.assert_allclose(updates["B"], -0.25, rtol=1e-5)


def test_only_models_with_selection_biases_have_a_state_for_them() -> None:
    """Checkpoints contain the names of the states, so another one would make stored checkpoints unreadable."""
    for groups, own in (
        ({"w": "matrix", "codes": "puzzle"}, {"puzzle", "fixed"}),
        ({"w": "matrix", "bias": "balance"}, {"balance"}),
    ):
        optimizer = make_optimizer(Config(clip_norm=None), vector_specs(groups), Training(10))
        state = optimizer.init({name: jnp.full((2, 2), 2.0) for name in groups})
        names = {
            str(getattr(key, "key", ""))
            for path, _ in jax.tree.flatten_with_path(state, is_leaf=lambda node: isinstance(node, optax.MaskedState))[
                0
            ]
            for key in path
        }
        assert names & {"puzzle", "fixed", "balance"} == own


@pytest.mark.parametrize(("gradient", "clipped"), [(100.0, 1.0 / math.sqrt(2 * len(GROUPS))), (0.1, 0.1)])
def test_clipping_uses_one_norm_over_all_groups(gradient: float, clipped: float) -> None:
    config = Config(learning_rate=1.0, warmup_steps=0, weight_decay=0.0, clip_norm=1.0, epsilon=1.0)
    np.testing.assert_allclose(one_update(config, gradient)["w"], -clipped / (clipped + 1.0), rtol=1e-5)


def test_adam_uses_the_configured_betas() -> None:
    config = Config(
        learning_rate=0.1, warmup_steps=0, final_ratio=1.0, weight_decay=0.0, clip_norm=None, beta1=0.5, beta2=0.75
    )
    optimizer = make_optimizer(config, vector_specs(GROUPS), Training(3))
    values, m, v, x = parameters(), 0.0, 0.0, 2.0
    state = optimizer.init(values)
    for step, gradient in enumerate([1.0, -2.0, 0.5], start=1):
        updates, state = optimizer.update({name: jnp.full(2, gradient) for name in values}, state, values)
        values = optax.apply_updates(values, updates)
        m, v = 0.5 * m + 0.5 * gradient, 0.75 * v + 0.25 * gradient**2
        x -= 0.1 * (m / (1 - 0.5**step)) / (math.sqrt(v / (1 - 0.75**step)) + config.epsilon)
    np.testing.assert_allclose(np.asarray(values["w"]), x, rtol=1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("epsilon", 0.0),
        ("weight_decay", -1.0),
        ("final_ratio", -1.0),
        ("final_ratio", 5.0),
        ("ssm_learning_rate_ratio", math.inf),
        ("warmup_steps", -1),
        ("decay_steps", 0),
        ("clip_norm", 0.0),
        ("ema_decay", 1.0),
    ],
)
def test_invalid_optimizer_settings_are_refused(key: str, value: float) -> None:
    (problem,) = Config(**{key: value}).problems()
    assert (problem.code, problem.key) == (ProblemCode.out_of_range, f"optimizer.{key}")


def test_the_default_optimizer_has_no_problems() -> None:
    assert Config().problems() == []


@pytest.mark.parametrize(
    ("settings", "rises"),
    [
        ({}, True),
        ({"final_ratio": 1.0}, False),
        ({"decay_steps": 50}, False),
        ({"schedule": Schedule.trapezoid}, True),
        ({"schedule": Schedule.trapezoid, "final_ratio": 1.0}, False),
    ],
)
def test_a_longer_run_raises_the_rate_again_only_if_the_schedule_stretches(settings: dict[str, object], rises: bool):
    assert rate_rises_if_extended(Config(**settings), 100, 200) is rises
