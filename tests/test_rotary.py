"""Tests of rotary embedding: rotations of pairs, and logits that depend only on distance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.ops.rotary import rotate

THETA = 10_000.0


def test_equals_complex_rotation_of_the_two_halves():
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 5, 3, 8)), np.float64)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 100, 101, 4000]])
    frequencies = THETA ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, :, None, None] * frequencies)
    out = rotate(jnp.asarray(x, jnp.float32), jnp.asarray(positions), THETA)
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], -1), atol=1e-3)
    np.testing.assert_allclose(out[0], np.concatenate([turned.real, turned.imag], -1)[0], atol=2e-6)


def test_logits_depend_only_on_distance():
    q, k = (jax.random.normal(jax.random.key(i), (1, 6, 2, 8)) for i in (1, 2))
    near, far = (
        jnp.einsum("bqhd,bkhd->bhqk", rotate(q, start + jnp.arange(6), THETA), rotate(k, start + jnp.arange(6), THETA))
        for start in (0, 50)
    )
    np.testing.assert_allclose(near, far, atol=2e-5)
    assert np.abs(np.asarray(near - jnp.einsum("bqhd,bkhd->bhqk", q, k))).max() > 0.1


def test_bfloat16_is_rotated_in_float32_and_returned_as_bfloat16():
    x = jax.random.normal(jax.random.key(3), (1, 4, 1, 8)).astype(jnp.bfloat16)
    positions = 1000 + jnp.arange(4)
    out = rotate(x, positions, THETA)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), positions, THETA).astype(jnp.bfloat16))


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="head_dim=7 .*Use head_dim=8"):
        rotate(jnp.zeros((1, 2, 1, 7)), jnp.arange(2), THETA)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_tpu_form_as_a_matrix_product_equals_the_rotation(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8)).astype(dtype)

    def rotate_on(x, backend):
        return rotate(x, jnp.arange(5), THETA, backend)

    for f in (rotate_on, lambda x, backend: jax.grad(lambda y: (rotate_on(y, backend) ** 2 * x).sum())(x)):
        np.testing.assert_array_equal(f(x, "tpu").astype(jnp.float32), f(x, "cpu").astype(jnp.float32))


def test_the_gradient_is_the_inverse_rotation():
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    _, back = jax.vjp(lambda y: rotate(y, jnp.arange(6), THETA), x)
    np.testing.assert_allclose(back(x)[0], rotate(x, -jnp.arange(6), THETA), rtol=1e-5, atol=1e-6)
