"""Tests of multi-head latent attention: the absorbed form, YaRN, costs, sharding and refusals."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compose_run, make_builder, mark_slow_except, shared_run, small_run
from test_models import losses_of, make_batch, matmul_flops
from valkyrie.axes import UNSHARDED
from valkyrie.config.arguments import parse_run
from valkyrie.models.block import BlockContext
from valkyrie.models.latent_attention import LatentAttention
from valkyrie.models.layers import Boundaries
from valkyrie.ops.choices import Yarn
from valkyrie.ops.linear import FLOAT32
from valkyrie.ops.rotary import rotate
from valkyrie.search.estimate.work import step_work

EMBED, BATCH, SEQ = 24, 2, 13
STRETCHED = Yarn(factor=8, context=16, high=4, mscale=0.7, mscale_all_dim=1.2)


def build(**settings):
    """Return a small block with these settings, its module, and a random input (batch, seq, embed)."""
    sizes = {"heads": 3, "nope_dim": 6, "rope_dim": 4, "value_dim": 5, "latent": 7}
    block = LatentAttention(**(sizes | settings))
    module = block.build(BlockContext(EMBED, 2, key="model.attention"), numerics=FLOAT32, key=jax.random.key(1))
    return block, module, jax.random.normal(jax.random.key(0), (BATCH, SEQ, EMBED))


def attend_by_hand(block: LatentAttention, module, x) -> np.ndarray:
    """Return the output by the equations of DeepSeek-V2 (arXiv 2405.04434, appendix C), one head at a time."""

    def normalise(y):
        return y / np.sqrt(np.mean(np.square(y), axis=-1, keepdims=True) + 1e-6)

    def turn(y):
        positions = jnp.arange(SEQ)
        return np.asarray(rotate(jnp.asarray(y)[:, :, None], positions, block.rope_theta, stretch=block.yarn))[:, :, 0]

    matrices = (block.query_name, "latent", "rope_key", "key", "value", "out")
    query, latent, rope_key, key, value, out = (np.asarray(getattr(module, name)[...]) for name in matrices)
    x = np.asarray(x)
    query_input = x if block.query_latent is None else normalise(x @ np.asarray(module.query_latent[...]))
    compressed, shared_key, y = normalise(x @ latent), turn(x @ rope_key), 0.0
    for head in range(block.heads):
        q, k = query_input @ query[:, head], np.concatenate([compressed @ key[:, head], shared_key], axis=-1)
        q = np.concatenate([q[..., : block.nope_dim], turn(q[..., block.nope_dim :])], axis=-1)
        logits = block.yarn.logit_scale * np.einsum("bqd,bkd->bqk", q, k) / math.sqrt(block.head_dim)
        weights = np.exp(logits) * np.tri(SEQ)
        weights /= weights.sum(-1, keepdims=True)
        y = y + (weights @ (compressed @ value[:, head])) @ out[:, head].T
    return y


@pytest.mark.parametrize("settings", [{}, {"query_latent": 9, "yarn": STRETCHED}], ids=["plain", "latent_queries"])
def test_the_layer_equals_the_equations_and_generation_caches_only_latents(settings):
    block, module, x = build(**settings)
    y = jax.jit(lambda module, x: module(x, Boundaries(), UNSHARDED))(module, x)
    np.testing.assert_allclose(y, attend_by_hand(block, module, x), rtol=2e-4, atol=2e-5)

    state = module.init_state(BATCH, SEQ)
    assert sum(array.size for array in jax.tree.leaves(state)) == 1 + BATCH * SEQ * (block.latent + block.rope_dim)

    def step(state, x):
        out, state = module.step(x, state)
        return state, out

    state, rows = jax.lax.scan(step, state, x.swapaxes(0, 1))
    np.testing.assert_allclose(rows.swapaxes(0, 1), y, rtol=2e-4, atol=2e-5)
    assert state.position == SEQ


def test_yarn_stretches_only_slow_pairs():
    yarn = Yarn(factor=40, context=4096, mscale=0.707, mscale_all_dim=0.707)  # DeepSeek-V2-Lite
    assert yarn.amplitude == 1 and math.isclose(yarn.logit_scale, (1 + 0.0707 * math.log(40)) ** 2)
    x = jnp.ones((1, 1, 1, 64))
    plain, stretched = (rotate(x, jnp.array([120]), 1e4, stretch=s) for s in (Yarn(), yarn))
    slow = rotate(x, jnp.array([3]), 1e4)
    is_fast, is_slow = np.arange(32) <= 10, np.arange(32) >= 23  # the pairs with 32 turns and with 1 turn over 4,096
    np.testing.assert_allclose(stretched[0, 0, 0, :32][is_fast], plain[0, 0, 0, :32][is_fast], atol=1e-5)
    np.testing.assert_allclose(stretched[0, 0, 0, :32][is_slow], slow[0, 0, 0, :32][is_slow], atol=1e-5)
    assert not np.allclose(stretched[0, 0, 0, 15], plain[0, 0, 0, 15], atol=1e-3)


def test_flops_equal_those_of_the_program():
    """Below 128 positions, attention computes masked logits too, which the config does not count."""
    seq, run = 32, small_run("deepseek_tiny", "mode=show", "model.feed_forward_pattern=[feed_forward]")
    builder, model = make_builder(run), run.model
    batch = {k: jax.ShapeDtypeStruct((2, seq), v.dtype) for k, v in make_batch(run).items()}
    jaxpr = jax.make_jaxpr(lambda p, b: losses_of(builder.module(p), b).loss_sum)(builder.abstract_parameters, batch)
    block, context = model.attention, model.make_layers()[0].context
    masked = model.layers * (block.heads * seq - block.scores(context, seq))
    masked_flops = 2 * masked * (block.head_dim + block.value_dim)
    counted = matmul_flops(jaxpr.jaxpr) / (2 * seq)
    np.testing.assert_allclose(counted, model.flops_per_token(seq) + masked_flops, rtol=1e-6)


def test_estimates_count_every_product_and_the_lanes_of_keys():
    run = shared_run("model=deepseek_tiny", "mode=show", "target=v5e-8")
    products = {product.name for product in step_work(run).products}
    assert {"query", "query_latent", "latent", "rope_key", "key", "value", "out"} <= products
    block, context = run.model.attention, run.model.make_layers()[0].context
    assert block.lane_padding(context, 128) == 256 / (block.head_dim + block.value_dim)
    wide = LatentAttention(nope_dim=128, rope_dim=64, value_dim=128)
    assert wide.lane_padding(context, 128) == 384 / 320 and wide.lane_padding(context, 1) == 1


def test_fully_sharded_partitions_split_every_matrix():
    run = compose_run("model=deepseek_tiny", "mesh=2x2x2", "partition=fsdp", "mode=show", "batch=8")
    unsplit = [
        name
        for name, parameter in run.model.parameters().items()
        if ".mixer." in name and parameter.group == "matrix" and run.layout.stored_axes(parameter.axes)[1] == ()
    ]
    assert not unsplit
    run = shared_run("model=deepseek_tiny", "mesh=2x2x2", "partition=fsdp", "model.attention.latent=36", "batch=8")
    (problem,) = run.problems()
    assert problem.key == "model.attention.latent" and 32 in problem.nearest


BAD_SETTINGS = [
    "heads=0",
    "rope_dim=7",
    "latent=0",
    "query_latent=0",
    "rope_theta=0",
    "yarn.factor=0.5",
    "yarn.high=0.5",
    "yarn.context=0",
]


@pytest.mark.parametrize("setting", mark_slow_except(BAD_SETTINGS, ["rope_dim=7", "yarn.high=0.5"]))
def test_bad_settings_are_refused(setting):
    problems = parse_run(["model=deepseek_tiny", f"model.attention.{setting}"]).problems()
    assert [problem.key for problem in problems] == [f"model.attention.{setting.partition('=')[0]}"]
