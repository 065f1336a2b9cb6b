"""Tests of the attention layer against a dense float64 definition: rotary, windows, and global tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from valkyrie.axes import UNSHARDED, Arrays, Shard, Tensor
from valkyrie.models.attention import Attention
from valkyrie.models.block import BlockContext
from valkyrie.models.layers import Boundaries
from valkyrie.ops.choices import AttentionImpl
from valkyrie.ops.linear import FLOAT32, Numerics
from valkyrie.parallel.layout import derive_layout
from valkyrie.parallel.mesh import build_mesh, parse_mesh
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.sharding import MeshShard
from valkyrie.trees import leaf_names

EMBED, SEQ = 16, 29


def layer(window: int | None, dilation: int = 1, numerics: Numerics = FLOAT32, **settings) -> Any:
    block = Attention(
        **{"heads": 4, "kv_heads": 2, "head_dim": 8, "windows": [window], "dilations": [dilation], **settings}
    )
    return block.build(BlockContext(EMBED, layers=2), numerics=numerics, key=jax.random.key(5))


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotate each pair (i, i + half) of a head by position / theta ** (i / half) (RoFormer, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] / theta ** (np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[None, :, None]
    return np.concatenate([z.real, z.imag], -1)


def project(p: dict[str, np.ndarray], name: str, x: np.ndarray, theta: float) -> list[np.ndarray]:
    q, k, v = (np.einsum("bse,ehd->bshd", x, p[f"{name}.{part}"]) for part in ("query", "key", "value"))
    return [rotate(q, theta), rotate(k, theta), v]


def reference_output(module: Any, x: np.ndarray, segment_ids: np.ndarray | None) -> np.ndarray:
    """Return the layer's output from dense float64 attention.

    A position attends to its window and to the global tokens, which are the first positions. Global tokens attend to
    every position, with separate projections. Later positions are masked if the layer is causal, and so are other
    documents if there are `segment_ids`.
    """
    c = module.config
    tree = nnx.to_pure_dict(nnx.state(module))
    p = {name: np.asarray(x, np.float64) for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
    i, j = np.arange(SEQ)[:, None], np.arange(SEQ)[None, :]
    near = (i - j) % module.dilation == 0
    if module.window is not None:
        near = near & (abs(i - j) < module.window * module.dilation)
    mask = near | (j < c.global_tokens) | (i < c.global_tokens)
    if c.causal:
        mask = mask & (j <= i)
    mask = np.broadcast_to(mask, (len(x), SEQ, SEQ))
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])

    def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        k, v = (np.repeat(y, c.heads // c.kv_heads, axis=2) for y in (k, v))
        logits = np.where(mask[:, None], np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(c.head_dim), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)

    out = attend(*project(p, "local", x, c.rope_theta))
    if c.global_tokens:
        out[:, : c.global_tokens] = attend(*project(p, "globals", x, c.rope_theta))[:, : c.global_tokens]
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


@pytest.mark.parametrize(
    ("impl", "packed"),
    [
        pytest.param(AttentionImpl.chunked, False, marks=pytest.mark.slow),
        (AttentionImpl.chunked, True),
        pytest.param(AttentionImpl.dense, False, marks=pytest.mark.slow),
        pytest.param(AttentionImpl.dense, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_layer_equals_its_definition(case, packed, impl):
    arguments, settings = CASES[case]
    module = layer(*arguments, **settings, impl=impl)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, SEQ, EMBED)).astype(np.float32)
    ids = np.cumsum(rng.random((2, SEQ)) < 0.15, axis=1).astype(np.int32) if packed else None
    out = module(jnp.asarray(x), Boundaries(None, None if ids is None else jnp.asarray(ids)), UNSHARDED)
    np.testing.assert_allclose(out, reference_output(module, x.astype(np.float64), ids), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_window_includes_the_token_itself():
    module = layer(3, kv_heads=4)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, SEQ, EMBED)), jnp.float32)
    change = jax.jacobian(lambda x: module(x, Boundaries(), UNSHARDED)[0, 10].sum())(x)
    assert sorted(set(np.nonzero(np.abs(change[0]).max(-1))[0])) == [8, 9, 10]


def test_logits_and_softmax_are_float32_under_a_narrow_policy():
    narrow = layer(6, numerics=Numerics("float32", "bfloat16", "float32"))
    x = jnp.zeros((2, SEQ, EMBED), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: narrow(x, Boundaries(), UNSHARDED))(x)
    exponentials = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "exp"] or [
        line for line in str(jaxpr).splitlines() if "= exp" in line
    ]
    assert exponentials
    assert all("f32" in str(e) and "bf16[" not in str(e).split("=")[0] for e in exponentials)
    assert jaxpr.out_avals[0].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(narrow))} == {jnp.dtype("float32")}


GROUPED = {
    "key heads whole": ("4x1x1", {"heads": ["x"]}, {}),
    "one key head a device": ("2x1x1", {"heads": ["x"]}, {"heads": 2, "kv_heads": 1}),
    "a device's queries begin within a group": ("6x1x1", {"heads": ["x"]}, {"heads": 12, "kv_heads": 4}),
    "heads split further": ("2x4x1", {"heads": ["x", "y"], "kv_heads": ["x"]}, {"heads": 16, "kv_heads": 4}),
    "on another axis": ("2x2x1", {"heads": ["x"], "kv_heads": ["y"]}, {}),
    "heads whole": ("1x2x1", {"kv_heads": ["y"]}, {}),
    "alike": ("2x1x2", {"heads": ["x"], "kv_heads": ["x"]}, {}),
    "alike, but too few": ("8x1x1", {"heads": ["x"], "kv_heads": ["x"]}, {}),
    "with the sequence": ("2x2x1", {"heads": ["x"], "seq": ["y"]}, {}),
    "full, with the sequence": ("2x2x1", {"heads": ["x"], "seq": ["y"]}, {"windows": [None]}),
    "with global tokens": ("4x2x1", {"heads": ["x"], "seq": ["y"]}, {"global_tokens": 2}),
}
"""Cases of (mesh, rules that shard heads, key heads or the sequence, settings of `Attention`).

By default, there are 8 heads, 2 key heads and a window of 5.
"""
GROUPED_ONCE = [
    pytest.param(case, impl, marks=[pytest.mark.slow] * ((i + 2 * j) % 16 != 2))
    for i, case in enumerate(GROUPED)
    for j, impl in enumerate([AttentionImpl.chunked, AttentionImpl.dense])
]
"""Every case with both implementations. About a sixteenth of the pairs are default tests, the others slow."""


@pytest.mark.parametrize(("case", "impl"), GROUPED_ONCE)
def test_queries_use_their_key_heads_however_both_are_sharded(case, impl):
    mesh, rules, settings = GROUPED[case]
    block = Attention(**{"heads": 8, "kv_heads": 2, "head_dim": 8, "windows": [5], "impl": impl, **settings})
    context = BlockContext(EMBED, layers=1)
    arrays = Arrays(
        axes=dict.fromkeys(["batch", "seq", "layers", "embed", *block.axes], ""),
        parameters={Tensor(p.axes, p.shape, p.config_keys): [name] for name, p in block.parameters(context).items()},
        activations={},
        sharded_like=dict(block.sharded_like),
    )
    parameters = {axis: on for axis, on in rules.items() if axis != "seq"}
    partition = PartitionConfig("mine", parameters, {"batch": ["z"], **rules})
    layout, problems = derive_layout(parse_mesh(mesh), partition, arrays, known_axes=())
    assert not problems
    shard = MeshShard(layout, build_mesh(parse_mesh(mesh), jax.devices()))
    module = block.build(context, numerics=FLOAT32, key=jax.random.key(1))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 16, EMBED)), jnp.float32)
    segments = jnp.asarray(np.arange(16) // 6)[None].repeat(2, 0)

    def loss(module: Any, x: jax.Array, shard: Shard) -> jax.Array:
        return (module(x, Boundaries(None, segments), shard) ** 2).sum()

    def value_and_gradients(shard: Shard) -> tuple[jax.Array, object]:
        return jax.jit(jax.value_and_grad(lambda module, x: loss(module, x, shard), argnums=(0, 1)))(module, x)

    sharded, expected = value_and_gradients(shard), value_and_gradients(UNSHARDED)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), sharded, expected)
