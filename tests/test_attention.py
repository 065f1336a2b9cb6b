"""Tests of attention: the dense form against a reference, and every other form against the dense one."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from helpers import mark_slow_except
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.platforms import get_platform
from valkyrie.ops.attention import (
    AttentionImpl,
    AttentionRequest,
    GlobalStep,
    GlobalTokens,
    attention,
    attention_step,
    attention_within_chunks,
    choose_implementation,
    chunk_segments,
    cudnn,
    init_cache,
    sharded_attention,
)
from valkyrie.ops.attention.local import LocalOptions, local_attention
from valkyrie.ops.attention.pattern import KeyRange, Pattern
from valkyrie.parallel.remat import load_remat
from valkyrie.train.rematerialise import make_block_checkpoint

GOLDEN_FILE = Path(__file__).parent / "goldens" / "longformer.npz"


def make_inputs(
    seq, *, batch=2, heads=4, kv_heads=2, head_dim=8, value_dim=None, global_tokens=0, segments=False, seed=0
):
    """Return random q, k, v, segment IDs and global tokens. The last two are None by default.

    Values have `value_dim` channels, by default `head_dim`.

    In each row, the last global token repeats the first. In the first row, the second one is invalid.
    """
    rng = np.random.default_rng(seed)

    def random_normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k, v = (
        random_normal(batch, seq, heads, head_dim),
        *(random_normal(batch, seq, kv_heads, channels) for channels in (head_dim, value_dim or head_dim)),
    )
    tokens = ids = None
    if global_tokens:
        positions = np.stack([rng.permutation(seq)[:global_tokens] for _ in range(batch)]).astype(np.int32)
        queries = random_normal(batch, global_tokens, heads, head_dim)
        positions[:, -1], queries[:, -1] = positions[:, 0], queries[:, 0]
        valid = np.ones((batch, global_tokens), bool)
        valid[0, 1] = False
        tokens = GlobalTokens(
            positions, valid, queries, *(random_normal(batch, seq, kv_heads, head_dim) for _ in range(2))
        )
        tokens = jax.tree.map(jnp.asarray, tokens)
    if segments:
        ids = jnp.asarray(np.cumsum(rng.random((batch, seq)) < 0.1, axis=1).astype(np.int32) - 1)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    return q, k, v, ids, tokens


def brute_force(q, k, v, window, causal, dilation, segment_ids, tokens, sinks=None):
    """Return attention by its definition, computed one query at a time in float64."""
    q, k, v, segment_ids, tokens = jax.tree.map(np.asarray, (q, k, v, segment_ids, tokens))
    batch, seq, heads, head_dim = q.shape
    out = np.zeros((batch, seq, heads, v.shape[3]))
    for b, i in itertools.product(range(batch), range(seq)):
        entries = [] if tokens is None else [n for n in range(len(tokens.valid[b])) if tokens.valid[b, n]]
        index_by_position = {int(tokens.positions[b, n]): n for n in reversed(entries)}
        visible_entries = []
        for j in range(seq):
            is_near = window is None or abs(i - j) <= (window - 1) * dilation
            is_near = is_near and (i - j) % dilation == 0
            same_document = segment_ids is None or segment_ids[b, i] == segment_ids[b, j]
            if (
                same_document
                and (j <= i or not causal)
                and (is_near or i in index_by_position or j in index_by_position)
            ):
                visible_entries.append(j)
        query, keys, values = q[b, i], k[b, visible_entries], v[b, visible_entries]
        if i in index_by_position:
            query, keys, values = (
                tokens.q[b, index_by_position[i]],
                tokens.k[b, visible_entries],
                tokens.v[b, visible_entries],
            )
        for h in range(heads):
            group = h // (heads // k.shape[2])
            weights = np.exp(keys[:, group].astype(np.float64) @ query[h] / head_dim**0.5)
            out[b, i, h] = weights @ values[:, group] / (weights.sum() + (0 if sinks is None else np.exp(sinks[h])))
    return out


# seq, window, causal, dilation, segments, global tokens, chunk
CASES = [
    (37, 5, True, 1, False, 0, 8),
    (37, 5, False, 1, True, 3, 8),
    (40, 4, True, 3, True, 4, 5),
    (41, 6, False, 2, False, 4, 7),
    (33, None, True, 1, True, 3, 8),
    (33, None, False, 2, False, 3, 8),
    (30, 1, True, 1, False, 3, 16),
    (29, 40, True, 1, True, 3, 8),
    (50, 19, True, 1, True, 3, 4),
]


def run_attention(impl, q, k, v, tokens, ids=None, sinks=None, **options):
    """Return `[output, *gradients]`: the gradients of `sum(sin(output))` with respect to each float input."""

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1, 2, 3, 4), has_aux=True, allow_int=True)
    def loss_and_output(q, k, v, tokens, sinks):
        out = attention(q, k, v, segment_ids=ids, global_tokens=tokens, sinks=sinks, impl=impl, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), grads = loss_and_output(q, k, v, tokens, sinks)
    return [out, *(g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0)]


def assert_close(ours, expected, atol=1e-5):
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("case", mark_slow_except(CASES, CASES[2:3]), ids=str)
def test_dense_and_chunked_attention_equal_the_definition(case):
    seq, window, causal, dilation, segments, global_count, chunk = case
    q, k, v, ids, tokens = make_inputs(seq, global_tokens=global_count, segments=segments)
    options = {"window": window, "causal": causal, "dilation": dilation, "ids": ids}
    expected = run_attention(AttentionImpl.dense, q, k, v, tokens, **options)
    chunked = run_attention(AttentionImpl.chunked, q, k, v, tokens, chunk=chunk, **options)
    np.testing.assert_allclose(expected[0], brute_force(q, k, v, window, causal, dilation, ids, tokens), atol=2e-6)
    assert_close(chunked, expected)


@pytest.mark.parametrize("value_dim", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_values_may_have_other_channels_than_keys(value_dim, monkeypatch):
    from valkyrie.ops import attention as module

    q, k, v, ids, _ = make_inputs(40, batch=1, value_dim=value_dim, segments=True)
    expected = run_attention(AttentionImpl.dense, q, k, v, None, window=None, ids=ids)
    np.testing.assert_allclose(expected[0], brute_force(q, k, v, None, True, 1, ids, None), atol=2e-6)
    assert_close(run_attention(AttentionImpl.chunked, q, k, v, None, window=None, ids=ids, chunk=8), expected)
    monkeypatch.setattr(module, "LocalOptions", partial(LocalOptions, interpret=True))
    kernel = run_attention(AttentionImpl.kernel, q, k, v, None, window=None, ids=ids, backend="tpu")
    assert_close(kernel, expected, atol=2e-5)


SINKS = np.asarray([-2.0, 0.5, 3.0, 12.0], np.float32)


@pytest.mark.parametrize(
    "case", mark_slow_except([(20, 1, False, 0), (20, 2, True, 3), (None, 1, True, 3)], [(20, 2, True, 3)]), ids=str
)
def test_sinks_join_the_softmax_sums_without_a_value(case, monkeypatch):
    from valkyrie.ops import attention as module

    window, dilation, segments, global_count = case
    q, k, v, ids, tokens = make_inputs(70, batch=1, global_tokens=global_count, segments=segments)
    options = {"window": window, "dilation": dilation, "ids": ids, "sinks": SINKS}
    expected = run_attention(AttentionImpl.dense, q, k, v, tokens, **options)
    definition = brute_force(q, k, v, window, True, dilation, ids, tokens, SINKS)
    np.testing.assert_allclose(expected[0], definition, atol=2e-6)
    assert expected[-1].shape == SINKS.shape and np.abs(expected[-1]).min() > 1e-3
    assert_close(run_attention(AttentionImpl.chunked, q, k, v, tokens, chunk=32, **options), expected, atol=3e-5)
    monkeypatch.setattr(module, "LocalOptions", partial(LocalOptions, interpret=True))
    kernel = run_attention(AttentionImpl.kernel, q, k, v, tokens, backend="tpu", **options)
    assert_close(kernel, expected, atol=3e-5)


@pytest.mark.parametrize(
    ("window", "backend"),
    [(9, "cpu"), (None, "tpu"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, "cpu"), (9, "tpu")))],
)
def test_sinks_over_a_sharded_sequence_and_sharded_heads_equal_those_of_one_device(window, backend):
    q, k, v, ids, tokens = make_inputs(80, batch=1, segments=True, global_tokens=3 if backend == "cpu" else 0)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("s", "h"), axis_types=(AxisType.Auto,) * 2)
    heads = P(None, "s", "h")
    token_specs = None if tokens is None else GlobalTokens(P(), P(), P(None, None, "h"), heads, heads)

    def attend_locally(q, k, v, tokens, sinks, ids):
        return sharded_attention(
            q, k, v, axis_names=("s",), window=window, segment_ids=ids, global_tokens=tokens, sinks=sinks,
            backend=backend, interpret=True, chunk=16,
        )  # fmt: skip

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1, 2, 3, 4), has_aux=True, allow_int=True)
    def f(q, k, v, tokens, sinks):
        specs = (heads, heads, heads, token_specs, P("h"), P(None, "s"))
        attend = jax.shard_map(attend_locally, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=backend != "tpu")
        out = attend(q, k, v, tokens, sinks, ids)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = f(q, k, v, tokens, SINKS)
    ours = [out, *(g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0)]
    expected = run_attention(AttentionImpl.dense, q, k, v, tokens, window=window, ids=ids, sinks=jnp.asarray(SINKS))
    assert_close(ours, expected, atol=3e-5)


@pytest.mark.parametrize("chunk_length", mark_slow_except([7, 10, 20, 50], [10]))
def test_attention_within_chunks_equals_that_of_segments(chunk_length):
    """Chunks of 10 divide a shard of 20 positions, those of 20 are a shard, and those of 50 exceed the sequence."""
    q, k, v, documents, _ = make_inputs(40, batch=2, segments=True)
    mesh = Mesh(np.array(jax.devices()[:2]), ("s",), axis_types=(AxisType.Auto,))

    def run(ids, axis_names):
        @partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True)
        def f(q, k, v, sinks):
            def attend(q, k, v, sinks, ids):
                options = {"segment_ids": ids, "sinks": sinks, "axis_names": axis_names, "chunk": 8}
                return attention_within_chunks(q, k, v, chunk_length=chunk_length, **options)

            specs = (*[P(None, "s")] * 3, P(), None if ids is None else P(None, "s"))
            if axis_names:
                attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(None, "s"))
            out = attend(q, k, v, sinks, None if ids is None else chunk_segments(ids, chunk_length))
            return jnp.sum(jnp.sin(out)), out

        (_, out), grads = jax.jit(f)(q, k, v, SINKS)
        return [out, *grads]

    starts = np.array([[np.flatnonzero(row == i)[0] for i in row] for row in np.asarray(documents)])
    chunks_of_documents = np.asarray(documents) * 40 + (np.arange(40) - starts) // chunk_length
    chunks = np.broadcast_to(np.arange(40) // chunk_length, (2, 40))
    for ids, expected_ids in ((documents, chunks_of_documents), (None, chunks)):
        options = {"window": None, "ids": jnp.asarray(expected_ids), "sinks": jnp.asarray(SINKS)}
        expected = run_attention(AttentionImpl.dense, q, k, v, None, **options)
        for axis_names in ((), ("s",)):
            assert_close(run(ids, axis_names), expected)

    def step(cache, x):
        out, cache = attention_step(*x, cache, sinks=jnp.asarray(SINKS), is_chunked=True)
        return cache, out

    inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v))
    _, rows = jax.lax.scan(step, init_cache(2, 2, 8, window=chunk_length, max_len=40), inputs)
    parallel = attention_within_chunks(q, k, v, chunk_length=chunk_length, sinks=jnp.asarray(SINKS))
    np.testing.assert_allclose(jnp.moveaxis(rows, 0, 1), parallel, atol=2e-6)


@pytest.mark.parametrize("impl", [AttentionImpl.dense, AttentionImpl.chunked])
def test_logits_stay_within_a_soft_cap(impl):
    """With a cap of 1, the weights of two keys differ by at most a factor of e^2, even for queries with a huge norm."""
    q, k, v, *_ = make_inputs(40, heads=1, kv_heads=1)
    options = {"window": 2, "impl": impl, "chunk": 8}
    output = attention(1e6 * q, k, v, soft_cap=1.0, **options)
    signs = jnp.sign(jnp.einsum("bqhd,bkhd->bqk", q, k))
    signs_now, signs_before = signs[:, 1:].diagonal(1, 1, 2), signs[:, 1:].diagonal(0, 1, 2)
    share = jax.nn.sigmoid(signs_now - signs_before)[..., None, None]
    np.testing.assert_allclose(output[:, 1:], share * v[:, 1:] + (1 - share) * v[:, :-1], atol=2e-2)


@pytest.mark.parametrize("impl", [AttentionImpl.dense, AttentionImpl.chunked])
def test_attention_equals_transformers_longformer(impl):
    golden = np.load(GOLDEN_FILE)
    positions = jnp.asarray(golden["globals"])
    seq = golden["q"].shape[1]
    padding = (np.arange(seq) >= golden["lengths"][:, None]).astype(np.int32)
    q_global = np.take_along_axis(golden["q_global"], golden["globals"][:, :, None, None], axis=1)
    global_projections = (jnp.asarray(x) for x in (q_global, golden["k_global"], golden["v_global"]))
    tokens = GlobalTokens(positions, jnp.ones(positions.shape, bool), *global_projections)
    out = attention(
        *(jnp.asarray(golden[name]) for name in "qkv"),
        window=int(golden["window"]) + 1,
        causal=False,
        segment_ids=jnp.asarray(padding),
        global_tokens=tokens,
        impl=impl,
        chunk=8,
    )
    is_token = padding == 0
    np.testing.assert_allclose(np.asarray(out)[is_token], golden["out"][is_token], atol=3e-6)


@pytest.mark.parametrize("impl", mark_slow_except([AttentionImpl.dense, AttentionImpl.chunked], []))
def test_bfloat16_stays_close_to_float32(impl):
    q, k, v, ids, tokens = make_inputs(40, global_tokens=3, segments=True)
    expected = attention(q, k, v, window=6, segment_ids=ids, global_tokens=tokens, impl=impl, chunk=8)
    narrow_inputs = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, (q, k, v, tokens))
    out = attention(*narrow_inputs[:3], window=6, segment_ids=ids, global_tokens=narrow_inputs[3], impl=impl, chunk=8)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=0.06)


def temporary_bytes(impl, seq, **options):
    """Return the bytes of temporary memory that the gradient needs on this backend."""

    def loss(q, k, v):
        return attention(q, k, v, impl=impl, **options).sum()

    shape = jax.ShapeDtypeStruct((1, seq, 2, 8), jnp.float32)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dilation", [1, 2])
def test_memory_of_chunks_is_linear_in_length(dilation):
    short_bytes, long_bytes = (
        temporary_bytes(AttentionImpl.chunked, seq, window=64, dilation=dilation) for seq in (1024, 2048)
    )
    assert long_bytes < 2.2 * short_bytes
    assert long_bytes < temporary_bytes(AttentionImpl.dense, 2048, window=64, dilation=dilation) / 8


@pytest.mark.parametrize("causal", mark_slow_except([True, False], [True]))
def test_splash_kernel_with_more_keys_than_queries(causal):
    """A shard of the sequence has more keys than queries, and some keys are invalid."""
    seq, keys_before, keys_after = 150, 30, 0 if causal else 20
    q, *_ = make_inputs(seq, batch=1, heads=2, head_dim=16)
    _, k, v, ids, _ = make_inputs(
        keys_before + seq + keys_after, batch=1, kv_heads=2, head_dim=16, segments=True, seed=1
    )
    valid = (jnp.arange(k.shape[1]) >= 25)[None]
    key_range = KeyRange(keys_before, valid, query_segments=ids[:, keys_before : keys_before + seq], key_segments=ids)

    def gradients(options):
        def f(q, k, v):
            out = local_attention(q, k, v, pattern=Pattern(21, causal), options=options, key_range=key_range)
            return jnp.sum(jnp.sin(out)), out

        (_, out), grads = jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q, k, v)
        return [out, *grads]

    assert_close(
        gradients(LocalOptions(kernel="splash", interpret=True)), gradients(LocalOptions(chunk_size=32)), atol=2e-5
    )


@pytest.mark.parametrize(
    ("window", "causal", "dilation", "segments", "global_count", "soft_cap"),
    [
        (17, False, 1, True, 0, None),
        (20, True, 2, True, 3, 0.7),
        pytest.param(40, True, 1, False, 0, None, marks=pytest.mark.slow),
        pytest.param(None, True, 1, False, 3, None, marks=pytest.mark.slow),
    ],
)
def test_splash_kernel_equals_dense(monkeypatch, window, causal, dilation, segments, global_count, soft_cap):
    """Runs the TPU kernel in Pallas' interpreter. Cases with global tokens test the merged backward pass."""
    from valkyrie.ops import attention as module

    q, k, v, ids, tokens = make_inputs(
        200, batch=1, heads=2, kv_heads=1, head_dim=32, global_tokens=global_count, segments=segments
    )
    options = {"window": window, "causal": causal, "dilation": dilation, "ids": ids, "soft_cap": soft_cap}
    expected = run_attention(AttentionImpl.dense, q, k, v, tokens, **options)
    monkeypatch.setattr(module, "LocalOptions", partial(LocalOptions, interpret=True))
    kernel = run_attention(AttentionImpl.kernel, q, k, v, tokens, backend="tpu", **options)
    assert_close(kernel, expected, atol=2e-5)


# window, causal, dilation, segments, global tokens; a shard has 5 positions, so the halo takes 1, 2, 3 or all 7 hops
SHARDED_CASES = [
    (4, True, 1, False, 0),
    (9, True, 1, True, 3),
    (5, True, 3, True, 3),
    (4, False, 2, True, 3),
    (39, True, 1, False, 0),
    (14, False, 3, False, 0),
    (None, True, 1, True, 3),
]


def sequence_specs(tokens: GlobalTokens | None) -> tuple[P, P, GlobalTokens | None]:
    """Return the specs of arrays sharded along the sequence, of replicated arrays, and of the global tokens."""
    sharded_spec, replicated_spec = P(None, ("a", "b")), P()
    if tokens is None:
        return sharded_spec, replicated_spec, None
    return (
        sharded_spec,
        replicated_spec,
        GlobalTokens(replicated_spec, replicated_spec, replicated_spec, sharded_spec, sharded_spec),
    )


@pytest.mark.parametrize(
    ("case", "check_vma"),
    [
        *(pytest.param(case, True, marks=[pytest.mark.slow] * (i != 1)) for i, case in enumerate(SHARDED_CASES)),
        pytest.param(SHARDED_CASES[2], False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_over_a_sharded_sequence_equals_that_over_a_whole_one(case, check_vma):
    """`jax.shard_map` around Pallas kernels needs `check_vma=False`, so both settings are tested."""
    window, causal, dilation, segments, global_count = case
    q, k, v, ids, tokens = make_inputs(40, global_tokens=global_count, segments=segments)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharded_spec, replicated_spec, token_specs = sequence_specs(tokens)

    def attend_locally(q, k, v, tokens, ids):
        return sharded_attention(
            q, k, v, axis_names=("a", "b"), window=window, causal=causal, dilation=dilation,
            segment_ids=ids, global_tokens=tokens, chunk=3,
        )  # fmt: skip

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True, allow_int=True)
    def f(q, k, v, tokens):
        specs = (sharded_spec, sharded_spec, sharded_spec, token_specs, None if ids is None else sharded_spec)
        out = jax.shard_map(attend_locally, mesh=mesh, in_specs=specs, out_specs=sharded_spec, check_vma=check_vma)(
            q, k, v, tokens, ids
        )
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = f(q, k, v, tokens)
    ours = [out, *(g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0)]
    options = {"window": window, "causal": causal, "dilation": dilation, "ids": ids}
    assert_close(ours, run_attention(AttentionImpl.dense, q, k, v, tokens, **options))


@pytest.mark.parametrize(
    ("seq", "causal", "segments", "global_count", "soft_cap", "max_dq_writes"),
    [
        (1024, True, True, 0, 0.7, 8),
        (1024, True, True, 0, None, 1),
        pytest.param(1024, True, False, 3, None, 8, marks=pytest.mark.slow),
        pytest.param(1024, True, True, 3, None, 1, marks=pytest.mark.slow),
        pytest.param(296, True, True, 3, None, 8, marks=pytest.mark.slow),
        pytest.param(200, False, True, 0, None, 8, marks=pytest.mark.slow),
    ],
)
def test_kernel_attention_over_a_sharded_sequence_equals_dense(
    monkeypatch: pytest.MonkeyPatch, seq, causal, segments, global_count, soft_cap, max_dq_writes
):
    """Runs in Pallas' interpreter.

    At seq=1024, the four shards exchange halves of their queries to balance causal work. At the other lengths they do
    not, because the halves are not whole blocks or the attention is not causal. With one dq write per kernel, the
    backward pass has a kernel for each of two parts of the keys.
    """
    from valkyrie.ops.attention import splash

    monkeypatch.setattr(splash, "MAX_DQ_WRITES", max_dq_writes)
    monkeypatch.setattr(splash, "WIDE_BLOCK", 512)
    assert splash._causal_shard_blocks(seq // 8, 1024, 128)[0] == (2 if max_dq_writes == 1 else 1)
    q, k, v, ids, tokens = make_inputs(
        seq,
        batch=1,
        heads=2,
        kv_heads=1,
        value_dim=None if global_count else 4,
        segments=segments,
        global_tokens=global_count,
    )
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharded_spec, replicated_spec, token_specs = sequence_specs(tokens)

    def attend_locally(q, k, v, tokens, ids):
        return sharded_attention(
            q, k, v, axis_names=("a", "b"), window=None, causal=causal, segment_ids=ids,
            global_tokens=tokens, backend="tpu", soft_cap=soft_cap, interpret=True,
        )  # fmt: skip

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True, allow_int=True)
    def f(q, k, v, tokens):
        specs = (sharded_spec, sharded_spec, sharded_spec, token_specs, None if ids is None else sharded_spec)
        out = jax.shard_map(attend_locally, mesh=mesh, in_specs=specs, out_specs=sharded_spec, check_vma=False)(
            q, k, v, tokens, ids
        )
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = f(q, k, v, tokens)
    ours = [out, *(g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0)]
    expected = run_attention(
        AttentionImpl.dense, q, k, v, tokens, window=None, causal=causal, ids=ids, soft_cap=soft_cap
    )
    assert_close(ours, expected, atol=3e-5)


@pytest.mark.parametrize(("dilation", "global_count", "window"), [(1, 0, 4), (3, 2, 4), (1, 3, None)])
def test_streaming_attention_equals_parallel_attention(dilation, global_count, window):
    batch, seq = 2, 23
    q, k, v, _, tokens = make_inputs(seq, batch=batch)
    q_global, k_global, v_global, *_ = make_inputs(seq, batch=batch, seed=1)
    if global_count:
        positions = jnp.broadcast_to(jnp.arange(global_count), (batch, global_count))
        tokens = GlobalTokens(
            positions, jnp.ones(positions.shape, bool), q_global[:, :global_count], k_global, v_global
        )
    parallel = attention(
        *(q, k, v),
        window=window,
        dilation=dilation,
        global_tokens=tokens,
        sinks=jnp.asarray(SINKS),
        impl=AttentionImpl.dense,
    )
    cache = init_cache(batch, 2, 8, window=window, max_len=seq, dilation=dilation, global_tokens=global_count)

    def step(cache, x):
        q, k, v, *global_kv = x
        global_step = GlobalStep(*global_kv) if global_count else None
        out, cache = attention_step(q, k, v, cache, global_step=global_step, sinks=jnp.asarray(SINKS))
        return cache, out

    inputs = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, q_global, k_global, v_global)]
    final, rows = jax.lax.scan(step, cache, tuple(inputs))
    np.testing.assert_allclose(jnp.moveaxis(rows, 0, 1), parallel, atol=2e-6)
    if window is not None:
        assert final.k.shape[1:3] == (dilation, window), "the ring does not grow with the sequence"


def test_a_cache_with_global_tokens_needs_their_projections():
    cache = init_cache(1, 1, 4, window=2, max_len=8, global_tokens=2)
    with pytest.raises(ValueError, match=r"\b2 global\b"):
        attention_step(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1, 4)), jnp.zeros((1, 1, 4)), cache)


@pytest.mark.parametrize("impl", [AttentionImpl.chunked, AttentionImpl.dense])
def test_a_sharded_sequence_on_a_tpu_uses_no_kernel_unless_it_is_selected(impl):
    """The kernel would not run on a CPU, where only its interpreter does."""
    q, k, v, _, _ = make_inputs(16)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharded_spec = sequence_specs(None)[0]
    attend = partial(sharded_attention, axis_names=("a", "b"), window=None, backend="tpu", impl=impl)
    run = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(sharded_spec,) * 3, out_specs=sharded_spec))
    assert_close([run(q, k, v)], [attention(q, k, v, window=None, impl=AttentionImpl.dense)])


def test_a_missing_kernel_for_a_sharded_sequence_is_refused():
    q, k, v, _, _ = make_inputs(16)
    with pytest.raises(ValueError, match=r"model\.attention\.impl=kernel: "):
        sharded_attention(q, k, v, axis_names=("a",), window=None, backend="gpu", impl=AttentionImpl.kernel)


def make_request(window=128, causal=True, dtype=jnp.bfloat16, head_dim=64, segments=False, global_tokens=False):
    return AttentionRequest(Pattern(window, causal), dtype, head_dim, segments, global_tokens)


@pytest.mark.parametrize(
    ("backend", "seq", "attention_request", "expected_impl"),
    [
        ("cpu", 100, make_request(), AttentionImpl.dense),
        ("cpu", 256, make_request(), AttentionImpl.chunked),
        ("cpu", 256, make_request(window=256), AttentionImpl.dense),
        ("gpu", 256, make_request(window=None, segments=True), AttentionImpl.dense),
        ("tpu", 100, make_request(), AttentionImpl.dense),
        ("cpu", 4096, make_request(window=4096), AttentionImpl.chunked),
        ("cpu", 512, make_request(window=None), AttentionImpl.dense),
        ("tpu", 4096, make_request(segments=True, global_tokens=True), AttentionImpl.kernel),
        ("gpu", 4096, make_request(), AttentionImpl.kernel),
        ("gpu", 4096, make_request(segments=True), AttentionImpl.chunked),
    ],
)
def test_auto_chooses_by_backend_and_length(backend, seq, attention_request, expected_impl):
    assert choose_implementation(AttentionImpl.auto, backend, seq, attention_request) is expected_impl


@pytest.mark.parametrize(
    ("backend", "attention_request", "reason"),
    [
        ("cpu", make_request(), r"\bcpu\b"),
        ("gpu", make_request(dtype=jnp.float32), r"\bfloat32\b"),
        ("gpu", make_request(causal=False), r"\bcausal\b"),
        ("gpu", make_request(segments=True), "packed documents"),
        ("gpu", make_request(global_tokens=True), "global tokens"),
        ("gpu", make_request(head_dim=264), r"\b256\b.*\b264\b"),
        ("gpu", make_request()._replace(has_sinks=True), "sinks"),
    ],
)
def test_an_unsupported_kernel_is_refused_with_reason_and_alternative(backend, attention_request, reason):
    with pytest.raises(ValueError, match=f"{reason}.*model.attention.impl=chunked"):
        choose_implementation(AttentionImpl.kernel, backend, 4096, attention_request)


@pytest.mark.parametrize(
    ("kv_heads", "options", "message"),
    [
        (3, {"window": 4}, r"\bkv_heads=3\b.* heads=4\b.* kv_heads=[24]\b"),
        (2, {"window": 0}, "window=0"),
        (2, {"window": 4, "dilation": 0}, "dilation=0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kv_heads, options, message):
    q, k, v, *_ = make_inputs(8, kv_heads=kv_heads)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("length", "head_dim", "window", "forward", "backward", "backward_compute", "fused"),
    [
        (200, 128, None, 200, 200, 200, True),
        (2048, 128, None, 512, 1024, 1024, True),
        (8192, 128, None, 1024, 1024, 1024, True),
        (16384, 128, None, 1024, 2048, 256, True),
        (32768, 128, None, 1024, 1024, 1024, False),
        (4096, 256, None, 512, 512, 512, True),
        (1024, 128, 512, 512, 512, 512, True),
        (4096, 128, 512, 512, 512, 512, False),
        (16384, 128, 2048, 512, 512, 512, False),
        (8192, 128, 4096, 1024, 1024, 1024, True),
        (16384, 128, 4096, 1024, 2048, 256, True),
    ],
)
def test_block_sizes_of_the_splash_kernel(length, head_dim, window, forward, backward, backward_compute, fused):
    from valkyrie.ops.attention.splash import _block_sizes

    sizes = _block_sizes(length, length, head_dim, window)
    assert (sizes.block_q, sizes.block_kv, sizes.block_q_dkv) == (forward, forward, forward)
    assert (sizes.block_kv_dkv, sizes.block_kv_dkv_compute) == (backward, backward_compute)
    assert sizes.use_fused_bwd_kernel is fused


@pytest.mark.parametrize(
    ("rows", "keys", "head_dim", "parts"),
    [
        (8192, 16384, 128, 1),
        (4096, 32768, 128, 2),
        (8192, 131072, 128, 8),
        (8192, 262144, 128, 1),
        (8192, 8192, 256, 2),
    ],
)
def test_the_backward_pass_of_a_causal_shard_is_fused_for_each_part_of_the_keys(rows, keys, head_dim, parts):
    from valkyrie.ops.attention.splash import _causal_shard_blocks

    count, sizes = _causal_shard_blocks(rows, keys, head_dim)
    assert (count, sizes.use_fused_bwd_kernel) == (parts, keys <= 131072)


@pytest.mark.parametrize("document_count", [1, 3, 40])
def test_cudnn_gets_the_starts_and_lengths_of_documents(monkeypatch: pytest.MonkeyPatch, document_count: int):
    """A stand-in follows the contract of JAX's test of packed layouts. 40 documents are more than cuDNN takes."""
    seq = 256
    q, k, v, _, _ = make_inputs(seq)
    starts = np.sort(np.random.default_rng(0).choice(np.arange(1, seq), (2, document_count - 1)), axis=1)
    ids = jnp.asarray((np.arange(seq) >= starts[..., None]).sum(1, dtype=np.int32))

    def kernel(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length):
        assert q_offsets.shape == (2, q_seqlen.shape[1] + 1) and mask_type is MaskType.PADDING_CAUSAL
        assert scale == q.shape[-1] ** -0.5 and q_seqlen is kv_seqlen and q_offsets is kv_offsets
        start, length, position = q_offsets[:, :-1, None], q_seqlen[:, :, None], jnp.arange(seq)
        is_inside = (start >= 0) & (position >= start) & (position < start + length)
        documents = jnp.where(is_inside.any(1), is_inside.argmax(1), -1)
        out = attention(q, k, v, window=sliding_window_length, segment_ids=documents, impl=AttentionImpl.dense)
        return jnp.where((documents >= 0)[..., None, None], out, jnp.nan)

    monkeypatch.setattr(cudnn.kernel, "dot_product_attention", kernel)
    pattern, key_range = Pattern(window=50, causal=True), KeyRange(query_segments=ids, key_segments=ids)
    out = local_attention(q, k, v, pattern=pattern, options=LocalOptions(kernel="cudnn"), key_range=key_range)
    expected = attention(q, k, v, window=50, segment_ids=ids, impl=AttentionImpl.dense)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("request_", [(64, True, 64), (192, False, 128)])
def test_a_kernel_with_wrong_results_is_not_used_and_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], request_: tuple[int, bool, int]
):
    head_dim, has_segments, value_dim = request_
    monkeypatch.setattr(cudnn.kernel, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn.kernel, "dot_product_attention", lambda q, k, v, **options: v)
    monkeypatch.setattr(cudnn, "get_platform", lambda name: SimpleNamespace(runs_on_host=False))
    cudnn._example_problem.cache_clear()
    pattern = Pattern(window=None, causal=True)
    request = AttentionRequest(pattern, jnp.bfloat16, head_dim, has_segments, False, value_dim)
    try:
        assert choose_implementation(AttentionImpl.auto, "gpu", 1024, request) is AttentionImpl.chunked
    finally:
        cudnn._example_problem.cache_clear()
    assert "wrong on this GPU" in capfd.readouterr().err


def test_a_chip_that_is_only_lowered_for_answers_instead_of_the_gpu_of_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cudnn.kernel, "check_compute_capability", lambda capability: False)
    monkeypatch.setattr(cudnn, "get_platform", lambda name: SimpleNamespace(runs_on_host=False))
    monkeypatch.setattr(cudnn, "_example_problem", lambda *request: "the example ran")
    gpu, chips = get_platform("gpu"), known_chips()
    assert "Hopper" in (cudnn.hopper_problem(64, 64, True) or "")
    for request in ((64, 64, True), (256, 256, False), (192, 128, False)):
        with gpu.lowering_for(chips["h100"]):
            assert cudnn.hopper_problem(*request) is None
        with gpu.lowering_for(chips["a100"]):
            assert "Hopper" in (cudnn.hopper_problem(*request) or "")
    monkeypatch.setattr(cudnn.kernel, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn.kernel, "check_cudnn_version", lambda: 90900)
    assert "9.10" in (cudnn.hopper_problem(192, 128, False) or "")
    assert cudnn.hopper_problem(64, 64, True) == "the example ran"


@pytest.mark.parametrize(("remat", "forward_runs"), [("minimal", 2), ("minimal_with_context", 1)])
def test_the_kernel_of_cudnn_is_not_run_again_if_its_output_is_saved(
    monkeypatch: pytest.MonkeyPatch, remat: str, forward_runs: int
):
    for name, answer in (("check_cudnn_version", 91200), ("check_compute_capability", True)):
        monkeypatch.setattr(cudnn.kernel, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(cudnn.kernel, "is_cuda_compute_capability_equal", lambda capability: False)
    q = jnp.ones((1, 256, 2, 64), jnp.bfloat16)

    @make_block_checkpoint(load_remat(remat), "gpu")
    def block(q):
        return jnp.sin(attention(jnp.cos(q), q, q, window=None, impl=AttentionImpl.kernel, backend="gpu"))

    program = str(jax.make_jaxpr(jax.grad(lambda q: block(q).astype(jnp.float32).sum()))(q))
    assert program.count("dot_product_attention_fwd") == forward_runs and "dot_product_attention_bwd" in program


@pytest.mark.parametrize("value_dim", [64, 128])
def test_cudnn_takes_a_batch_of_rows_with_values_of_any_width(monkeypatch: pytest.MonkeyPatch, value_dim: int):
    for name, answer in (("check_cudnn_version", 91200), ("check_compute_capability", True)):
        monkeypatch.setattr(cudnn.kernel, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(cudnn.kernel, "is_cuda_compute_capability_equal", lambda capability: False)
    q, v = jnp.ones((3, 1, 256, 2, 128), jnp.bfloat16), jnp.ones((3, 1, 256, 2, value_dim), jnp.bfloat16)

    def loss(q, v):
        pattern = Pattern(window=None, causal=True)
        out = cudnn.cudnn_attention(q, q, v, pattern=pattern, segments=None, fallback=lambda q, k, v: v)
        return jnp.square(out.astype(jnp.float32)).sum()

    gradients = jax.eval_shape(jax.vmap(jax.grad(loss, argnums=(0, 1))), q, v)
    assert [gradient.shape for gradient in gradients] == [q.shape, v.shape]


def test_cudnn_takes_a_batch_of_packed_rows_as_more_rows_and_one_condition(monkeypatch: pytest.MonkeyPatch):
    """`partition.sum_gradients_per=step` computes gradients in a `jax.vmap`, for which JAX's own rule fails."""
    for name, answer in (("check_cudnn_version", 91200), ("check_compute_capability", True)):
        monkeypatch.setattr(cudnn.kernel, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(cudnn.kernel, "is_cuda_compute_capability_equal", lambda capability: False)
    shards, rows, seq = 3, 2, 256
    q = jnp.ones((shards, rows, seq, 2, 64), jnp.bfloat16)
    segments = jnp.zeros((shards, rows, seq), jnp.int32)
    pattern = Pattern(window=None, causal=True)

    def loss(q, segments):
        out = cudnn.cudnn_attention(q, q, q, pattern=pattern, segments=segments, fallback=lambda q, k, v: q)
        return out.astype(jnp.float32).sum()

    program = str(jax.make_jaxpr(jax.vmap(jax.grad(loss)))(q, segments))
    assert program.count("dot_product_attention_fwd") == program.count("dot_product_attention_bwd") == 1
    assert f"bf16[{shards * rows},{seq},2,64]" in program and program.count("cond[") == 2
    assert jax.eval_shape(jax.vmap(jax.grad(loss)), q, segments).shape == q.shape
