"""Tests of int8 and float8 products.

They are close to exact products, equal on a mesh and on one device up to rounding, and train like bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import initial_state, make_batch, make_program, run_two_steps, small_overrides, small_run
from valkyrie.axes import UNSHARDED
from valkyrie.ops.linear import Numerics, linear
from valkyrie.ops.narrow import narrow_einsum, quantize

TOLERANCES = {"int8": 0.02, "float8_e4m3fn": 0.06}
"""Allowed error of a product by dtype, relative to the largest value of the exact product."""


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("equation", ["bse,em->bsm", "bse,ehd->bshd", "bshd,ehd->bse", "bsm,em->bse"])
def test_a_narrow_product_is_close_to_the_exact_one(equation: str, dtype: str):
    sizes = dict(zip("bsemhd", (2, 5, 64, 48, 4, 16), strict=True))
    of_x, of_w = equation.partition("->")[0].split(",")
    x, w = (normal(*(sizes[i] for i in letters), seed=k) for k, letters in enumerate((of_x, of_w)))
    x = x * jnp.asarray([1.0, 1e-4])[(...,) + (None,) * (x.ndim - 1)]  # every row has a scale of its own
    wide, narrow = jnp.einsum(equation, x, w), narrow_einsum(equation, x, w, dtype)
    for row, expected in zip(narrow, wide, strict=True):
        np.testing.assert_allclose(row, expected, atol=TOLERANCES[dtype] * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_zero_rows_and_the_largest_number_are_exact(dtype: str):
    narrow, scale = quantize(jnp.asarray([[0.0, 0.0], [-3.0, 1.0]]), dtype, (1,))
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(narrow[0].astype(jnp.float32), 0)
    np.testing.assert_allclose(narrow[1, 0].astype(jnp.float32) * scale[1, 0], -3.0, rtol=1e-6)


def operand_dtypes(jaxpr: Any) -> list[str]:
    dtypes = [e.invars[0].aval.dtype.name for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            dtypes += operand_dtypes(value.jaxpr) if hasattr(value, "jaxpr") else []
    return dtypes


def test_parameter_gradients_are_not_quantised():
    numerics = Numerics("float32", "bfloat16", "float32", "int8")

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = linear("bse,em->bsm", x, w, axes=("embed", "mlp"), shard=UNSHARDED, numerics=numerics)
        return y.astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(normal(2, 3, 8), normal(8, 4))
    assert sorted(operand_dtypes(jaxpr.jaxpr)) == ["bfloat16", "int8", "int8"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_training_with_narrow_products_learns_as_well(precision: str):
    def losses(policy: str) -> list[float]:
        run = small_run("gpt_tiny", f"precision={policy}", "model.layers=2", "optimizer.learning_rate=1e-2")
        program = make_program(run)
        state, batch = program.init(0), program.place(make_batch(run))
        curve = []
        for _ in range(12):
            state, metrics = program.step(state, batch)
            curve.append(float(metrics["loss"]))
        return curve

    narrow, wide = losses(precision), losses("bf16_mixed")
    assert narrow[-1] < narrow[0] - 0.5
    assert narrow != wide
    np.testing.assert_allclose(narrow, wide, rtol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["2d_tp_fsdp", "fsdp", "1d_tp"])
def test_narrow_products_on_eight_devices_equal_those_on_one(partition: str):
    """Sums in another order change the last bits of a value, which may then be rounded to another int8 number."""
    overrides = (*small_overrides("gpt_tiny"), "precision=int8", "precision.compute=float32")
    state = initial_state(overrides)
    single = run_two_steps(small_run("gpt_tiny", "precision=int8", "precision.compute=float32"), state)
    sharded_steps = run_two_steps(
        small_run("gpt_tiny", "precision=int8", "precision.compute=float32", "mesh=2x2x2", f"partition={partition}"),
        state,
    )
    for metrics, expected in zip(sharded_steps.metrics, single.metrics, strict=True):
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=5e-4)
        np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-2)
