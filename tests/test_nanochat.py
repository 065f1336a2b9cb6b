"""Tests of nanochat models: logits equal those of both public implementations, and the depth determines the sizes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compose_config, compose_run, make_builder, small_run
from valkyrie.config.run import Run
from valkyrie.models.feed_forward_layer import square_relu
from valkyrie.models.layers import plain_rms_norm
from valkyrie.models.nanochat_attention_layer import norm_and_scale
from valkyrie.problems import ProblemCode

GOLDEN = np.load(Path(__file__).parent / "goldens" / "nanochat.npz")
SMALL = ("model.depth=4", "model.embed=32", "model.attention.heads=4", "model.attention.kv_heads=2")
SMALL += ("model.attention.head_dim=8", "model.vocab_size=61", "model.vocab_multiple=1", "precision=float32")
VERSIONS = {
    "2025": ("model=nanochat_2025", "model.norm_epsilon=1e-6", "model.attention.qk_norm_epsilon=1e-6"),
    "2026": ("model=nanochat", "model.context=200"),
}
"""Overrides for both versions of nanochat, with the settings of the public code.

The 2025 version is in Hugging Face transformers, where the epsilons of the norms differ from nanochat's. With a context
of 200, short windows have 129 tokens.
"""


def random_weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return random weights, the same as in goldens/make_nanochat.py."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) < 2 else shape[-1] ** -0.5)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


PUBLIC = {
    "2025": {
        "embedding": "model.embed_tokens.weight",
        "unembedding": "lm_head.weight",
        "local.query": "model.layers.{}.self_attn.q_proj.weight",
        "local.key": "model.layers.{}.self_attn.k_proj.weight",
        "local.value": "model.layers.{}.self_attn.v_proj.weight",
        "out": "model.layers.{}.self_attn.o_proj.weight",
        "up": "model.layers.{}.mlp.fc1.weight",
        "down": "model.layers.{}.mlp.fc2.weight",
    },
    "2026": {
        "embedding": "transformer.wte.weight",
        "unembedding": "lm_head.weight",
        "backout_scale": "backout_lambda",
        "smear_gate": "smear_gate.weight",
        "smear_scale": "smear_lambda",
        "residual_scale": "resid_lambdas[{}]",
        "input_scale": "x0_lambdas[{}]",
        "local.query": "transformer.h.{}.attn.c_q.weight",
        "local.key": "transformer.h.{}.attn.c_k.weight",
        "local.value": "transformer.h.{}.attn.c_v.weight",
        "value_gate": "transformer.h.{}.attn.ve_gate.weight",
        "value_embedding": "value_embeds.{}.weight",
        "out": "transformer.h.{}.attn.c_proj.weight",
        "up": "transformer.h.{}.mlp.c_fc.weight",
        "down": "transformer.h.{}.mlp.c_proj.weight",
    },
}
"""Parameter names in the public implementations. `{}` is the layer index."""


def module_with(run: Run, version: str, weights: dict[str, np.ndarray]) -> Any:
    """Return the module of a run with the golden's weights. Fails if a weight is not used."""
    builder, unused = make_builder(run), {*weights}
    (group, repeats), *more = run.model.segments()
    assert not more

    def of_layer(public: str, layer: int, shape: tuple[int, ...], own_name: str) -> np.ndarray:
        name, _, index = public.format(layer).partition("[")
        unused.discard(name)
        value = weights[name][int(index.rstrip("]"))] if index else weights[name]
        reads_first = own_name in ("local.query", "local.key", "local.value", "up")
        return (value.T if reads_first else value).reshape(shape)

    values = []
    for name, spec in builder.specs.items():
        own_name = name.split("mixer.")[-1].removeprefix("segment_0.")
        own_name = own_name.split("feed_forward.")[-1].rpartition("block_")[2]
        own_name = own_name.split(".", 1)[1] if own_name[0].isdigit() else own_name
        load_weight = partial(of_layer, PUBLIC[version][own_name], own_name=own_name)
        if "block_" not in name:
            values.append(load_weight(0, spec.shape))
            continue
        block = int(name.split("block_")[1].split(".")[0])
        values.append(np.stack([load_weight(i * len(group) + block, spec.shape[1:]) for i in range(repeats)]))
    assert not unused
    structure = jax.tree.structure(builder.abstract_parameters)
    return builder.module(jax.tree.unflatten(structure, [jnp.asarray(value) for value in values]))


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_equal_those_of_the_public_model(version):
    run = compose_run(*VERSIONS[version], *SMALL, "mesh=1x1x1", "partition=dp")
    module = module_with(run, version, random_weights(json.loads(str(GOLDEN[f"shapes_{version}"]))))
    expected = GOLDEN[f"logits_{version}"]
    tokens = np.random.default_rng(1).integers(0, 61, (1, expected.shape[1]))
    logits = jax.jit(module.logits)(jnp.asarray(tokens, jnp.int32))
    assert np.abs(expected).max() > 3, "the cap of the logits is not tested"
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("depth", "embed", "heads", "total", "of_2025"),
    [
        (12, 768, 6, 286_261_730, 135_266_304),
        (16, 1024, 8, 536_871_738, 268_435_456),
        (20, 1280, 10, 896_533_746, 477_102_080),
        (24, 1536, 12, 1_384_122_122, 780_140_544),
    ],
)
def test_the_depth_determines_the_size(depth, embed, heads, total, of_2025):
    model = compose_run("model=nanochat", f"model.depth={depth}", "model.vocab_size=32768").model
    assert (model.embed, model.attention.heads, model.layers, model.mlp) == (embed, heads, depth, 4 * embed)
    assert model.parameter_count() == total
    assert [repeats for _, repeats in model.segments()] == [depth // 4]
    old = compose_run("model=nanochat_2025", f"model.depth={depth}", "model.vocab_size=32768").model
    assert old.parameter_count() == of_2025
    assert sum(p.size for p in old.parameters().values() if p.group == "matrix") == 12 * depth * embed**2


def windows_of(pattern: str, depth: int = 6, context: int = 2048) -> list[int | None]:
    model = compose_run("model=nanochat", f"model.depth={depth}", f"model.window_pattern={pattern}").model
    model.context = context
    return [layer.mixer.window(layer.context) for layer in model.make_layers()]


def test_the_window_pattern_repeats_and_the_last_layer_has_no_window():
    assert windows_of("SSSL") == [513, 513, 513, None, 513, None]
    assert windows_of("GL") == windows_of("L") == [None] * 6
    assert windows_of("S", context=1000) == [257] * 5 + [None]


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("model.window_pattern=SSXL", ProblemCode.malformed),
        ("model.depth=0", ProblemCode.out_of_range),
        ("model.residual=parallel", ProblemCode.unsupported),
        ("model.feed_forward=swiglu", ProblemCode.unsupported),
        ("model.attention.global_tokens=2", ProblemCode.unsupported),
        ("model.attention.qk_gain=0", ProblemCode.out_of_range),
    ],
)
def test_unsupported_settings_are_refused(override, code):
    run = Run.from_config(compose_config("model=nanochat", "mesh=1x1x1", "partition=dp", override))
    assert (run.problems()[0].code, run.problems()[0].key) == (code, override.partition("=")[0])


def test_queries_and_keys_need_no_rotation():
    run = Run.from_config(compose_config("model=nanochat_tiny", "mesh=1x1x1", "model.attention.rope_theta=null"))
    assert run.problems() == []


def test_a_depth_that_the_mesh_does_not_divide_is_refused():
    run = Run.from_config(compose_config("model=nanochat", "model.depth=12", "mesh=4x1x1", "partition=1d_tp"))
    assert (6, 4) in {(problem.size, problem.parts) for problem in run.problems()}


def test_initial_scales_decrease_over_the_layers():
    run = small_run("nanochat_tiny")
    parameters = make_builder(run).init(jax.random.key(0))
    blocks = parameters["segment_0"]
    scales = np.stack([blocks[f"block_{i}"]["residual_scale"] for i in (0, 1)]).T.ravel()
    np.testing.assert_allclose(scales, 1.15 - 0.1 * np.arange(4) / 3, rtol=1e-6)
    scales = np.stack([blocks[f"block_{i}"]["input_scale"] for i in (0, 1)]).T.ravel()
    np.testing.assert_allclose(scales, 0.2 - 0.15 * np.arange(4) / 3, rtol=1e-6)
    assert not np.any(blocks["block_0"]["mixer"]["out"]) and not np.any(blocks["block_1"]["feed_forward"]["down"])


def rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + 1e-6)


FUNCTIONS = {
    "norm": (lambda x: plain_rms_norm(x, 1e-6), lambda x: x / rms(x)),
    "query": (lambda x: norm_and_scale(x, 1.2, 1e-6, "query"), lambda x: 1.2 * x / rms(x)),
    "relu2": (square_relu, lambda x: jnp.square(jax.nn.relu(x))),
}
"""Functions with backward passes of their own, and their definitions."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_passes_save_one_array_in_the_compute_dtype_and_have_the_gradients_of_the_definition(name: str):
    function, definition = FUNCTIONS[name]
    x, g = jax.random.normal(jax.random.key(0), (2, 2, 3, 64))
    values, gradients = zip(*(jax.vjp(f, x) for f in (function, definition)), strict=True)
    np.testing.assert_allclose(*values, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(*(gradient(g)[0] for gradient in gradients), rtol=1e-5, atol=1e-5)
    _, gradient = jax.vjp(function, x.astype(jnp.bfloat16))
    assert [y.dtype for y in jax.tree.leaves(gradient) if y.size >= x.size] == [jnp.bfloat16]
