"""The attention layer against its definition written densely in float64: rotary, windowed, with global tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.axes import UNSHARDED
from valkyrie.models.base import describe, flatten, parameters_of
from valkyrie.models.config import AttentionConfig
from valkyrie.models.longformer import LongformerAttention
from valkyrie.ops.choices import AttentionImpl
from valkyrie.ops.linear import FLOAT32, Numerics

EMBED, SEQ = 16, 29


def layer(window: int | None, dilation: int = 1, numerics: Numerics = FLOAT32, **settings) -> LongformerAttention:
    config = AttentionConfig(**{"heads": 4, "kv_heads": 2, "head_dim": 8, **settings})
    key = jax.random.key(5)
    return LongformerAttention(config, EMBED, window=window, dilation=dilation, depth=2, numerics=numerics, key=key)


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Each pair (i, i + half) of a head turned by position / theta ** (i / half) (RoFormer, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] / theta ** (np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([z.real, z.imag], -1)


def projected(p: dict[str, np.ndarray], name: str, x: np.ndarray, theta: float) -> list[np.ndarray]:
    q, k, v = (np.einsum("bse,ehd->bshd", x, p[f"{name}.{part}"]) for part in ("query", "key", "value"))
    return [rotated(q, theta), rotated(k, theta), v]


def definition(module: LongformerAttention, x: np.ndarray, segment_ids: np.ndarray | None) -> np.ndarray:
    """Row i sees itself, its window and the first tokens; a first token sees every row with projections of its own."""
    c = module.config
    p = {path: np.asarray(value, np.float64) for path, value in flatten(parameters_of(module)).items()}
    i, j = np.arange(SEQ)[:, None], np.arange(SEQ)[None, :]
    near = (i - j) % module.dilation == 0
    if module.window is not None:
        near = near & (abs(i - j) < module.window * module.dilation)
    seen = near | (j < c.global_tokens) | (i < c.global_tokens)
    if c.causal:
        seen = seen & (j <= i)
    seen = np.broadcast_to(seen, (len(x), SEQ, SEQ))
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        k, v = (np.repeat(y, c.heads // c.kv_heads, axis=2) for y in (k, v))
        logits = np.where(seen[:, None], np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(c.head_dim), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)

    out = attend(*projected(p, "local", x, c.rope_theta))
    if c.global_tokens:
        out[:, : c.global_tokens] = attend(*projected(p, "globals", x, c.rope_theta))[:, : c.global_tokens]
    return np.einsum("bshd,ehd->bse", out, p["out"])


CASES = {
    "window": ((6,), {}),
    "full": ((None,), {}),
    "dilated": ((4, 3), {}),
    "bidirectional": ((6,), {"causal": False}),
    "globals": ((5,), {"global_tokens": 3}),
    "globals_dilated": ((3, 2), {"global_tokens": 2, "kv_heads": 4}),
    "globals_bidirectional": ((5,), {"global_tokens": 3, "causal": False}),
    "window_of_one": ((1,), {"rope_theta": 100.0}),
}


@pytest.mark.parametrize("impl", [AttentionImpl.dense, AttentionImpl.chunked], ids=lambda i: i.value)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_layer_is_its_definition(case, packed, impl):
    places, settings = CASES[case]
    module = layer(*places, **settings, impl=impl)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, SEQ, EMBED)).astype(np.float32)
    ids = np.cumsum(rng.random((2, SEQ)) < 0.15, axis=1).astype(np.int32) if packed else None
    found = module(jnp.asarray(x), segment_ids=None if ids is None else jnp.asarray(ids), shard=UNSHARDED)
    np.testing.assert_allclose(found, definition(module, x.astype(np.float64), ids), rtol=1e-4, atol=1e-5)


def test_a_window_counts_the_token_itself():
    module = layer(3, kv_heads=4)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, SEQ, EMBED)), jnp.float32)
    change = jax.jacobian(lambda x: module(x, segment_ids=None, shard=UNSHARDED)[0, 10].sum())(x)
    assert sorted(set(np.nonzero(np.abs(change[0]).max(-1))[0])) == [8, 9, 10]


def test_logits_and_softmax_are_float32_under_a_narrow_policy():
    narrow = layer(6, numerics=Numerics("float32", "bfloat16", "float32"))
    x = jnp.zeros((2, SEQ, EMBED), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda x: narrow(x, segment_ids=None, shard=UNSHARDED))(x)
    exponentials = [e for e in traced.jaxpr.eqns if e.primitive.name == "exp"] or [
        line for line in str(traced).splitlines() if "= exp" in line
    ]
    assert exponentials
    assert all("f32" in str(e) and "bf16[" not in str(e).split("=")[0] for e in exponentials)
    assert traced.out_avals[0].dtype == jnp.bfloat16
    assert {spec.dtype for spec in flatten(describe(narrow)).values()} == {jnp.dtype("float32")}
