"""Tests of every tiny model: causality, gradients, streaming, packed documents, dropout, and FLOPs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import valkyrie.models.language_model
from helpers import (
    LANGUAGE_MODELS,
    initial_state,
    make_batch,
    make_builder,
    mark_slow_except,
    small_overrides,
    small_run,
)
from valkyrie.axes import UNSHARDED
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.models.block import BlockContext
from valkyrie.models.language_model import Losses
from valkyrie.models.layers import dropout
from valkyrie.tasks.next_token import token_losses
from valkyrie.train.memory import MemoryEstimator
from valkyrie.train.run_memory import to_candidates


@lru_cache
def build_model(model: str, *overrides: str) -> tuple[Run, Any]:
    """Return the run of a shrunken model, and its module with initial parameters plus noise."""
    run = small_run(model, *overrides)
    parameters = initial_state((*small_overrides(model), *overrides)).parameters
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda p: p + jnp.asarray(0.02 * rng.standard_normal(p.shape), p.dtype), parameters)
    return run, make_builder(run).module(moved)


def losses_of(module: Any, batch: dict[str, jax.Array]) -> Losses:
    return token_losses(module, batch, shard=UNSHARDED, checkpoint=lambda block: block, key=None)


def tokens_of(run: Run, rows: int = 2, seq: int = 32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, run.model.vocab_size, (rows, seq)), jnp.int32)


@pytest.mark.parametrize("model", mark_slow_except(LANGUAGE_MODELS, ["valkyrie_tiny"]))
def test_logits_do_not_depend_on_later_tokens(model):
    run, module = build_model(model)
    logits = jax.jit(module.logits)
    tokens = tokens_of(run)
    before, changed = logits(tokens), logits(tokens.at[:, 20].set((tokens[:, 20] + 1) % run.model.vocab_size))
    np.testing.assert_allclose(changed[:, :20], before[:, :20], rtol=0, atol=1e-6)
    for later in range(20, 24):
        assert np.abs(changed[:, later] - before[:, later]).max() > 1e-4
    assert before.shape == (2, 32, run.model.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("model", mark_slow_except(LANGUAGE_MODELS, ["valkyrie_tiny"]))
def test_every_parameter_gets_a_finite_gradient(model):
    run, module = build_model(model)
    batch = jax.tree.map(jnp.asarray, make_batch(run))
    gradients = jax.jit(jax.grad(lambda m: losses_of(m, batch).objective_sum))(module)
    leaves = jax.tree_util.tree_flatten_with_path(gradients)[0]
    assert len(leaves) == len(make_builder(run).specs)
    for path, g in leaves:
        assert np.isfinite(g).all(), path
        per_layer = np.abs(g).reshape(g.shape[0], -1).max(1) if "segment" in str(path[0]) else np.abs(g).max()
        assert np.all(per_layer > 0), path
    (table,) = (leaf for path, leaf in leaves if "'embedding'" in str(path[0]) or ".embedding" in str(path[0]))
    assert not np.any(table[run.model.vocab_size :]), "the padding of the vocabulary is never trained"


ATTENTION = ("model.block_pattern=[attention]", "model.layers=2")
S5 = ("model.block_pattern=[s5]", "model.layers=2")
VARIANTS = {
    "plain": (),
    "global_tokens": (*ATTENTION, "model.attention.global_tokens=3"),
    "dilated": (*ATTENTION, "model.attention.windows=[4,3]", "model.attention.dilations=[1,3]"),
    "dilated_global": (*ATTENTION, "model.attention.dilations=[2]", "model.attention.global_tokens=2"),
    "full": (*ATTENTION, "model.attention.windows=[null]", "model.attention.kv_heads=2"),
    "gelu": (*S5, "model.s5.activation=gelu", "model.s5.discretization=bilinear"),
    "half_glu2": (*S5, "model.s5.activation=half_glu2", "model.s5.conjugate_symmetric=false"),
    "full_glu": (*S5, "model.s5.activation=full_glu", "model.s5.clip_eigenvalues=false"),
    "s5_without_feed_forward": ("model.feed_forward_after=[attention]", "model.feed_forward=gelu"),
    "gemma_2": (
        *ATTENTION,
        "model.attention.windows=[4,null]",
        "model.attention.soft_cap=2",
        "model.attention.kv_heads=1",
        "model.logits_soft_cap=3",
        "model.embedding_scale=5.5",
        "model.feed_forward=geglu",
    ),
    "capped_globals": (*ATTENTION, "model.attention.global_tokens=3", "model.attention.soft_cap=0.5"),
    "qk_norm": (*ATTENTION, "model.attention.qk_norm=true", "model.attention.global_tokens=2"),
    "qk_norm_over_all_heads": (*ATTENTION, "model.attention.qk_norm=true", "model.attention.qk_norm_span=all_heads"),
    "parallel": ("model.residual=parallel", "model.feed_forward_after=[attention]"),
    "untied_relu2": ("model.tie_embeddings=false", "model.feed_forward=relu2"),
}


def stream(run: Run, module: Any, tokens: jax.Array) -> jax.Array:
    """Return the logits of whole sequences, computed one token at a time with `module.step`."""
    start = module.init_state(tokens.shape[0], tokens.shape[1])

    def scan_step(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        logits, state = module.step(token, state)
        return state, logits

    return jax.jit(lambda t: jax.lax.scan(scan_step, start, t)[1])(tokens.T).swapaxes(0, 1)


@pytest.mark.parametrize("model", mark_slow_except(LANGUAGE_MODELS, ["valkyrie_tiny"]))
def test_streaming_equals_the_parallel_form(model):
    run, module = build_model(model)
    tokens = tokens_of(run)
    np.testing.assert_allclose(stream(run, module, tokens), jax.jit(module.logits)(tokens), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("variant", mark_slow_except(VARIANTS, ["dilated_global"]))
def test_streaming_equals_the_parallel_form_in_every_variant(variant):
    run, module = build_model("valkyrie_tiny", *VARIANTS[variant])
    tokens = tokens_of(run, seq=21)
    parallel = jax.jit(module.logits)(tokens)
    np.testing.assert_allclose(stream(run, module, tokens), parallel, rtol=1e-4, atol=2e-5)
    changed = jax.jit(module.logits)(tokens.at[:, 11].set((tokens[:, 11] + 1) % run.model.vocab_size))
    np.testing.assert_allclose(changed[:, :11], parallel[:, :11], rtol=0, atol=1e-6, err_msg="not causal")


def packed_batch(run: Run, lengths: tuple[int, ...]) -> dict[str, jax.Array]:
    """Return a batch of one row with documents of these lengths. Tokens and targets are random."""
    rng, seq = np.random.default_rng(1), sum(lengths)
    ids = np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)

    def draw() -> np.ndarray:
        return rng.integers(0, run.model.vocab_size, (1, seq)).astype(np.int32)

    return jax.tree.map(
        jnp.asarray,
        {"tokens": draw(), "targets": draw(), "segment_ids": ids, "weights": np.ones((1, seq), np.float32)},
    )


@pytest.mark.parametrize(
    "setting", mark_slow_except(["rope_layers=[false]", "rope_theta=null"], ["rope_layers=[false]"])
)
def test_the_temperature_of_layers_without_rotation_restarts_in_each_document(setting):
    overrides = (*ATTENTION, f"model.attention.{setting}", "model.attention.global_tokens=3")
    run, constant = build_model("valkyrie_tiny", *overrides)
    temperature = ("model.attention.temperature_slope=1.0", "model.attention.temperature_interval=4")
    _, module = build_model("valkyrie_tiny", *overrides, *temperature)
    tokens, ids = tokens_of(run, seq=16), jnp.zeros((2, 16), jnp.int32)
    of_documents = jax.jit(lambda m, ids: m.logits(tokens, ids))
    whole, packed = of_documents(module, ids), of_documents(module, ids.at[:, 8:].set(1))
    np.testing.assert_allclose(whole, jax.jit(module.logits)(tokens), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(packed[:, :8], whole[:, :8], rtol=1e-5, atol=1e-6)
    assert np.abs(whole - of_documents(constant, ids))[:, 8:].max() > 1e-3


@pytest.mark.parametrize("model", mark_slow_except(LANGUAGE_MODELS, ["valkyrie_tiny"]))
def test_packed_documents_have_the_same_losses_as_alone(model):
    lengths = (13, 11, 8)
    run, module = build_model(model)
    _, crossing = build_model(model, "model.document_boundary=cross")
    per_token = jax.jit(lambda m, batch: losses_of(m, batch).per_token)
    batch = packed_batch(run, lengths)
    packed_losses, crossing_losses = per_token(module, batch), per_token(crossing, batch)
    start = 0
    for length in lengths:
        alone = {k: jnp.pad(v[:, start : start + length], ((0, 0), (0, 32 - length))) for k, v in batch.items()}
        alone["segment_ids"] = jnp.zeros((1, 32), jnp.int32)
        part = slice(start, start + length)
        np.testing.assert_allclose(packed_losses[:, part], per_token(module, alone)[:, :length], rtol=2e-5, atol=2e-6)
        if start:
            assert np.abs(crossing_losses[:, part] - packed_losses[:, part]).max() > 1e-3
        start += length
    np.testing.assert_allclose(crossing_losses[:, : lengths[0]], packed_losses[:, : lengths[0]], rtol=1e-5)


@pytest.mark.parametrize("model", mark_slow_except(LANGUAGE_MODELS, ["valkyrie_tiny"]))
def test_padding_does_not_change_the_loss(model):
    run, module = build_model(model)
    losses = jax.jit(lambda m, batch: losses_of(m, batch))
    batch = jax.tree.map(jnp.asarray, make_batch(run))
    weights = batch["weights"].at[:, 24:].set(0)
    masked_losses = losses(module, batch | {"weights": weights})
    garbage = {k: batch[k].at[:, 24:].set(run.model.vocab_size - 1) for k in ("tokens", "targets")}
    padded = losses(module, batch | garbage | {"weights": weights})
    # Auxiliary losses are means over all positions of a sequence.
    for name in ("loss_sum", "weight_sum", *(() if run.model.auxiliary else ("objective_sum",))):
        np.testing.assert_array_equal(getattr(padded, name), getattr(masked_losses, name))
    assert masked_losses.weight_sum == weights.sum()
    assert not np.any(masked_losses.per_token[np.asarray(weights) == 0])


@pytest.mark.slow
def test_loss_is_the_log_likelihood_of_the_logits():
    run, module = build_model("valkyrie_tiny")
    batch = jax.tree.map(jnp.asarray, make_batch(run))
    losses = jax.jit(lambda m: losses_of(m, batch))(module)
    logits = np.asarray(jax.jit(module.logits)(batch["tokens"], batch["segment_ids"]), np.float64)
    log_sum = np.log(np.exp(logits).sum(-1))
    nll = log_sum - np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    weights = np.asarray(batch["weights"])
    np.testing.assert_allclose(losses.loss_sum, (weights * nll).sum(), rtol=1e-5)
    np.testing.assert_allclose(losses.per_token, np.where(weights > 0, nll, 0), rtol=1e-4, atol=1e-5)
    assert losses.objective_sum == losses.loss_sum
    _, penalised = build_model("valkyrie_tiny", "model.z_loss=0.1")
    with_z = jax.jit(lambda m: losses_of(m, batch))(penalised)
    np.testing.assert_allclose(with_z.loss_sum, losses.loss_sum, rtol=1e-6)
    np.testing.assert_allclose(with_z.objective_sum - with_z.loss_sum, 0.1 * (weights * log_sum**2).sum(), rtol=1e-4)


@pytest.mark.slow
def test_dropout_changes_training_but_not_evaluation():
    run, module = build_model("valkyrie_tiny", "model.dropout=0.3")
    _, module_without_dropout = build_model("valkyrie_tiny")
    batch = jax.tree.map(jnp.asarray, make_batch(run))
    hidden = jax.jit(lambda m, key: m.blocks(m.embed(batch["tokens"]), m.boundaries(batch["segment_ids"]), key=key))
    evaluated, same = hidden(module, None), hidden(module_without_dropout, None)
    np.testing.assert_array_equal(evaluated, same, err_msg="without a key nothing is dropped")
    keys = jax.random.split(jax.random.key(0), 64)
    first, again, other = hidden(module, keys[0]), hidden(module, keys[0]), hidden(module, keys[1])
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2
    assert np.abs(first - evaluated).max() > 1e-2


def test_dropout_keeps_the_mean_and_drops_whole_channels():
    x = jnp.ones((2, 5, 4096), jnp.bfloat16)
    y = np.asarray(dropout(x, 0.25, jax.random.key(1)), np.float32)
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
    assert set(np.unique(y)) == {0.0, np.float32(jnp.bfloat16(1 / 0.75))}
    assert abs(y.mean() - 1) < 0.03
    assert not np.array_equal(y[0], y[1])


@pytest.mark.slow
def test_every_layer_has_a_different_dropout_key(monkeypatch):
    """If the iterations of a scan shared a key, all of them would drop the same channels."""
    seen = []

    def spy(x, rate, key):
        jax.debug.callback(lambda data: seen.append(tuple(data.tolist())), jax.random.key_data(key))
        return x

    monkeypatch.setattr(valkyrie.models.language_model, "dropout", spy)
    run, module = build_model("longformer_tiny", "model.dropout=0.5")
    module.blocks(module.embed(tokens_of(run)), module.boundaries(None), key=jax.random.key(0))
    jax.effects_barrier()
    assert len(seen) == 2 * run.model.layers
    assert len(set(seen)) == len(seen)


def test_tied_and_untied_embeddings():
    tied, untied = (
        set(make_builder(small_run("valkyrie_tiny", f"model.tie_embeddings={tie}")).specs) for tie in ("true", "false")
    )
    assert untied - tied == {"unembedding"}
    assert tied <= untied


def matmul_flops(jaxpr: Any, times: float = 1.0) -> float:
    """Return the FLOPs of all matrix products of a jaxpr that runs `times` times, two per multiply-add.

    The body of a scan counts once per iteration.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = np.prod([eqn.invars[0].aval.shape[i] for i in contracted])
            total += times * 2 * depth * eqn.outvars[0].aval.size
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr"):
                total += matmul_flops(value.jaxpr, inner)
    return total


EVERY_KEY = ("model.attention.windows=[null]", "model.attention.causal=false")
FLOPS = {
    "s5": (*S5, "model.s5.activation=half_glu1"),
    "s5_full_glu": (*S5, "model.s5.activation=full_glu", "model.feed_forward=gelu"),
    "s5_without_symmetry": (*S5, "model.s5.activation=gelu", "model.s5.conjugate_symmetric=false"),
    "attention": (*ATTENTION, *EVERY_KEY),
    "grouped": (*ATTENTION, *EVERY_KEY, "model.attention.kv_heads=2"),
    "both": EVERY_KEY,
}


@pytest.mark.parametrize("case", mark_slow_except(FLOPS, ["s5", "both"]))
def test_flops_of_the_config_equal_those_of_the_program(case):
    """Uses bidirectional full attention, where every query sees every key, so no product is masked."""
    run = small_run("valkyrie_tiny", "mode=show", *FLOPS[case])
    builder, seq = make_builder(run), 32
    shapes = builder.abstract_parameters
    batch = {k: jax.ShapeDtypeStruct((2, seq), v.dtype) for k, v in make_batch(run).items()}
    jaxpr = jax.make_jaxpr(lambda p, b: losses_of(builder.module(p), b).loss_sum)(shapes, batch)
    expected = run.model.flops_per_token(seq)
    recurrence = 8 * run.model.s5.state_count * run.model.mixer_kinds.count("s5")
    counted = matmul_flops(jaxpr.jaxpr) / (2 * seq)
    np.testing.assert_allclose(counted, expected - recurrence, rtol=1e-6)


@pytest.mark.parametrize(
    ("window", "dilation", "seq"), [(8, 1, 32), (8, 3, 32), (None, 1, 32), (64, 1, 32), (5, 2, 37)]
)
def test_flops_count_the_keys_that_a_query_sees(window, dilation, seq):
    def windows_override(w):
        return f"model.attention.windows=[{'null' if w is None else w}]"

    run = small_run(
        "longformer_tiny", windows_override(window), f"model.attention.dilations=[{dilation}]", "model.layers=1"
    )
    reach = seq if window is None else window
    seen = np.mean([sum(1 for n in range(reach) if i - n * dilation >= 0) for i in range(seq)])
    one_key_run = small_run("longformer_tiny", windows_override(1), "model.layers=1")
    per_key = 4 * run.model.attention.heads * run.model.attention.head_dim
    counted = (run.model.flops_per_token(seq) - one_key_run.model.flops_per_token(seq)) / per_key + 1
    np.testing.assert_allclose(counted, seen, rtol=0.01)


@pytest.mark.parametrize(("chunk", "seq"), [(8, 32), (8, 37), (64, 32)])
def test_flops_count_the_keys_of_chunks(chunk, seq):
    def flops_per_token(override):
        run = small_run("llama4_tiny", override, "model.layers=1", "model.block_pattern=[attention]")
        return run.model.flops_per_token(seq), 4 * run.model.attention.heads * run.model.attention.head_dim

    (flops, per_key), (one_key_flops, _) = (flops_per_token(f"model.attention.windows=[{w}]") for w in (chunk, 1))
    np.testing.assert_allclose((flops - one_key_flops) / per_key + 1, np.mean(np.arange(seq) % chunk + 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "settings", "key"),
    [
        ("llama4_tiny", ["dilations=[2]"], "dilations"),
        ("llama4_tiny", ["global_tokens=1"], "global_tokens"),
        ("llama4_tiny", ["rope_layers=[]"], "rope_layers"),
        ("llama4_tiny", ["temperature_interval=0"], "temperature_interval"),
        ("gpt_oss_tiny", ["rope_stretch.factor=2"], "yarn.factor"),
        ("gpt_oss_tiny", ["rope_theta=1"], "rope_theta"),
        ("nanochat_tiny", ["rope_layers=[true,false]"], "rope_layers"),
        ("nanochat_tiny", ["yarn.factor=2"], "yarn.factor"),
        ("nanochat_tiny", ["temperature_slope=0.1", "rope_theta=null"], "temperature_slope"),
        ("gpt_tiny", ["temperature_slope=0.1"], "temperature_slope"),
    ],
)
def test_settings_of_attention_that_do_not_fit_are_refused(model, settings, key):
    run = parse_run([f"model={model}", "mode=show", *(f"model.attention.{setting}" for setting in settings)])
    assert [problem.key for problem in run.model.problems()] == [f"model.attention.{key}"]


def test_only_layers_with_norms_of_queries_and_keys_save_their_inputs():
    model = parse_run(["model=llama4_tiny", "mode=show"]).model
    block, counts = model.attention, []
    for number in range(model.layers):
        activations = block.saved_activations(BlockContext(model.embed, model.layers, number))
        norm_inputs = [a for a in activations if a.float32 and a.name is None and "head_dim" in a.tensor.axes]
        counts.append([a.count for a in norm_inputs])
    assert counts == [[1, 1]] * 3 + [[0, 0]]


@pytest.mark.parametrize(("sequences", "positions"), [(1, 32), (3, 16), (8, 8)])
def test_fewer_sequences_have_longer_chunks_of_the_loss(sequences: int, positions: int) -> None:
    run, module = build_model("gpt_tiny", "model.loss_chunk=8", "seq=64", f"batch={sequences}", "mesh=1x1x1")
    hidden = jnp.zeros((sequences, 64, run.model.embed))
    tokens, weights = jnp.zeros(hidden.shape[:2], jnp.int32), jnp.ones(hidden.shape[:2])
    program = str(jax.make_jaxpr(lambda x: module.head_loss(x, tokens, weights).objective_sum)(hidden))
    assert f"length={64 // positions}" in program  # of the scan over chunks
    assert MemoryEstimator(run, to_candidates([run])).loss_chunks(8) == ([64 // positions], [positions])
