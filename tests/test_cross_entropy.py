"""Tests of chunked cross-entropy against the plain formula: values, gradients, masks, memory and messages."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from valkyrie.ops.cross_entropy import cross_entropy

BATCH, SEQ, EMBED, ROWS, VOCAB = 4, 12, 8, 24, 19


@pytest.fixture(scope="module")
def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (BATCH, SEQ, EMBED))
    unembed = jax.random.normal(keys[1], (ROWS, EMBED))
    targets = jax.random.randint(keys[2], (BATCH, SEQ), 0, VOCAB)
    weights = jax.random.uniform(keys[3], (BATCH, SEQ)).at[1, 5:].set(0.0)
    return hidden, unembed, targets, weights


def reference_losses(hidden, unembed, targets, weights, z_loss=0.0, soft_cap=None, vocab_size=VOCAB):
    """Return the weighted loss, the weighted z-loss and the loss of every token, from all logits at once.

    The loss of a token with weight 0 is 0.
    """
    logits = jnp.einsum("bse,ve->bsv", hidden, unembed)[..., :vocab_size]
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    nll = log_sum - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (weights * nll).sum(), z_loss * (weights * log_sum**2).sum(), jnp.where(weights != 0, nll, 0.0)


def gradients(f, hidden, unembed):
    """Return ((total, results), gradients).

    `results` are the loss, z-loss and token losses that `f` returns, `total` is a scalar that depends on all of them,
    and `gradients` are its gradients with respect to `hidden` and `unembed`.
    """

    def mixture(hidden, unembed):
        parts = loss, z, per_token = f(hidden, unembed)
        return loss + 0.3 * z + jnp.sum(jnp.sin(per_token)), parts

    return jax.jit(jax.value_and_grad(mixture, (0, 1), has_aux=True))(hidden, unembed)


@pytest.mark.parametrize(
    ("seq", "chunk", "options"),
    [
        pytest.param(12, 12, {}, marks=pytest.mark.slow),
        (12, 5, {"z_loss": 0.1}),
        (11, 4, {"soft_cap": 1.5}),
        pytest.param(12, 100, {"soft_cap": 3.0, "z_loss": 0.5}, marks=pytest.mark.slow),
        (12, 2, {"seq_shards": 3, "batch_shards": 2}),
        (10, 3, {"seq_shards": 2, "z_loss": 0.2}),
    ],
)
def test_chunked_cross_entropy_equals_the_plain_formula(inputs, seq, chunk, options):
    hidden, unembed, targets, weights = inputs
    hidden, targets, weights = hidden[:, :seq], targets[:, :seq], weights[:, :seq]

    def chunked(hidden, unembed):
        out = cross_entropy(hidden, unembed, targets, weights, vocab_size=VOCAB, chunk=chunk, **options)
        return out.loss_sum, out.z_sum, out.per_token

    formula = {name: value for name, value in options.items() if name in ("z_loss", "soft_cap")}
    actual = gradients(chunked, hidden, unembed)
    reference = gradients(lambda h, u: reference_losses(h, u, targets, weights, **formula), hidden, unembed)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert not np.asarray(actual[1][1])[VOCAB:].any(), "the padding of the vocabulary is not trained"


def test_sums_exclude_ignored_targets(inputs):
    hidden, unembed, targets, weights = inputs
    out = cross_entropy(hidden, unembed, targets, weights, vocab_size=VOCAB, chunk=5)
    np.testing.assert_allclose(out.weight_sum, weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(out.loss_sum, (out.per_token * weights).sum(), rtol=1e-6)
    ignored = jnp.where(weights == 0, -100, targets)
    again = cross_entropy(hidden, unembed, ignored, weights, vocab_size=VOCAB, chunk=5)
    np.testing.assert_array_equal(again.per_token, out.per_token)
    assert not np.asarray(out.per_token)[1, 5:].any()


@pytest.mark.slow
def test_float32_parameters_have_float32_gradients_with_bfloat16_operands(inputs):
    hidden, unembed, targets, weights = inputs

    def loss(hidden, unembed):
        out = cross_entropy(hidden, unembed, targets, weights, vocab_size=VOCAB, chunk=1)
        return out.loss_sum

    float32_grads = jax.grad(loss, (0, 1))(hidden, unembed)
    mixed_grads = jax.grad(loss, (0, 1))(hidden.astype(jnp.bfloat16), unembed)
    assert mixed_grads[0].dtype == jnp.bfloat16
    assert mixed_grads[1].dtype == jnp.float32
    for a, b in zip(mixed_grads, float32_grads, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05)


def test_gradient_over_many_chunks_is_summed_in_float32():
    """A bfloat16 sum of ones stops at 256, so with one chunk per position it would be too small."""
    seq = 600
    hidden = jnp.ones((1, seq, 1), jnp.bfloat16)
    unembed = jnp.zeros((2, 1), jnp.bfloat16)
    targets, weights = jnp.zeros((1, seq), jnp.int32), jnp.full((1, seq), 2.0)

    def f(u):
        return cross_entropy(hidden, u, targets, weights, vocab_size=2, chunk=1).loss_sum

    np.testing.assert_array_equal(jax.grad(f)(unembed).astype(jnp.float32)[:, 0], [-600.0, 600.0])


def test_memory_holds_one_chunk_of_logits():
    vocab, embed, seq = 4096, 8, 256
    floats = [(2, seq, embed), (vocab, embed), (2, seq)]
    hidden, unembed, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats)
    targets = jax.ShapeDtypeStruct((2, seq), jnp.int32)

    def temporaries(chunk):
        def loss(hidden, unembed, targets, weights):
            return cross_entropy(hidden, unembed, targets, weights, vocab_size=vocab, chunk=chunk).loss_sum

        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, unembed, targets, weights)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    all_logits = 2 * seq * vocab * 4
    assert temporaries(16) < all_logits / 4 < all_logits <= temporaries(seq)


@pytest.mark.parametrize("sum_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_gradient_of_the_unembedding_is_reduced_after_the_last_chunk(sum_first: bool):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("d", "s", "m"), axis_types=(AxisType.Auto,) * 3)
    batch, seq, embed, vocab = 4, 32, 8, 64
    shapes = [
        ((batch, seq, embed), jnp.float32, P("d", "s")),
        ((vocab, embed), jnp.float32, P("m")),
        ((batch, seq), jnp.int32, P("d", "s")),
        ((batch, seq), jnp.float32, P("d", "s")),
    ]
    shardings = [NamedSharding(mesh, spec) for *_, spec in shapes]
    logits_sharding = NamedSharding(mesh, P("d", "s", "m"))

    def loss(hidden, unembed, targets, weights):
        out = cross_entropy(
            hidden, unembed, targets, weights, vocab_size=60, chunk=4, seq_shards=2, batch_shards=2,
            constrain=lambda x: jax.lax.with_sharding_constraint(x, logits_sharding), sum_first=sum_first,
        )  # fmt: skip
        return out.loss_sum

    step = jax.jit(jax.value_and_grad(loss, (0, 1)), in_shardings=shardings)
    keys = jax.random.split(jax.random.key(5), 3)
    arrays = [jax.random.normal(keys[0], shapes[0][0]), jax.random.normal(keys[1], shapes[1][0])]
    arrays += [jax.random.randint(keys[2], (batch, seq), 0, 60), jnp.ones((batch, seq))]
    compiled = step.lower(*arrays).compile()
    # Only a shard of the gradient has shape (32, 8). In the text, the bodies of loops precede the entry computation.
    loops, entry = compiled.as_text().split("ENTRY ")
    reduction_pattern = re.compile(r"f32\[[\d,]*32,8\].* all-reduce\(")
    assert reduction_pattern.search(entry) and not reduction_pattern.search(loops)
    on_mesh = compiled(*(jax.device_put(a, s) for a, s in zip(arrays, shardings, strict=True)))
    alone = jax.value_and_grad(lambda h, u: cross_entropy(h, u, *arrays[2:], vocab_size=60, chunk=4).loss_sum, (0, 1))
    for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(alone(*arrays[:2])), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"vocab_size": 25}, r"\bvocab_size=25\b.* 24\b"),
        ({"seq_shards": 5}, r"\bsequence\b.* 12\b.* 5\b"),
        ({"batch_shards": 3}, r"\bbatch\b.* 4\b.* 3\b"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_invalid_arguments_are_refused(inputs, options, pattern):
    with pytest.raises(ValueError, match=pattern):
        cross_entropy(*inputs, **({"vocab_size": VOCAB, "chunk": 4} | options))
