"""Compares the estimates of a search with compiled steps: rank correlation, seconds, and compiles until the best.

    python experiments/foreign/ranking.py
    python experiments/foreign/ranking.py vision

Compiles steps of four programs under eight or twelve layouts each for a v5e-8, which takes an hour on two cores
unless the cache has them. Needs libtpu (`uv sync --extra tpu`) but no TPU.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.stats import spearmanr

import valkyrie
from valkyrie.search.compile.predict import PredictedProgram, ProgramWork
from valkyrie.search.compile.prediction import Prediction
from valkyrie.search.program_order import CompileOrder, estimate_layouts, find_equal_names
from valkyrie.search.programs import ProgramSearch, parse_meshes

AXES = ("data", "model")
SLICE = valkyrie.slice("v5e-8")
Rule = Mapping[str, P]
BOTH: Rule = {"embed": P("model", "data"), "in": P("data", "model"), "out": P("model", "data")}
TENSOR: Rule = {"embed": P("model"), "in": P(None, "model"), "out": P("model")}
SHARDED, REPLICATED = dict.fromkeys(TENSOR, P("data")), dict.fromkeys(TENSOR, P())


def shape(mesh: Mesh, sizes: Sequence[int], spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape of a sharded argument."""
    return jax.ShapeDtypeStruct(tuple(sizes), dtype, sharding=NamedSharding(mesh, spec))


def mlp(mesh: Mesh, rule: P) -> Any:
    """The example of valkyrie/search/README.md."""

    def train(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.square(jax.nn.relu(x @ w) @ w.T).mean())(w)

    w, x = shape(mesh, (2048, 8192), rule, jnp.bfloat16), shape(mesh, (8192, 2048), P("data"), jnp.bfloat16)
    return jax.jit(train), (w, x)


def norm(x: jax.Array) -> jax.Array:
    """Divide by the root mean square of the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(x.dtype)


def transformer(mesh: Mesh, rule: Rule) -> Any:
    """A decoder as a user wrote it: 8 scanned layers of 1024 with rematerialisation, momentum, 64 x 1024 tokens."""
    layers, embed, heads, head_dim, mlp, vocab, batch, seq = 8, 1024, 8, 128, 4096, 32768, 64, 1024

    def block(x: jax.Array, p: Any) -> jax.Array:
        h = norm(x)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", h, p[name]) for name in "qkv")
        s = jnp.einsum("bqhk,bshk->bhqs", q, k) / head_dim**0.5
        s = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), s, -1e9)
        a = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(s.astype(jnp.float32), -1).astype(x.dtype), v)
        x = x + jnp.einsum("bqhk,hkd->bqd", a, p["o"])
        m = jax.nn.gelu(jnp.einsum("bsd,df->bsf", norm(x), p["wi"]))
        return x + jnp.einsum("bsf,fd->bsd", m, p["wd"])

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["emb"].astype(jnp.bfloat16)[tokens]
        body = jax.checkpoint(lambda x, p: (block(x, jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)), None))
        x, _ = jax.lax.scan(body, x, params["blocks"])
        logits = jnp.einsum("bsd,vd->bsv", norm(x), params["emb"].astype(jnp.bfloat16)).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()

    def step(params: Any, m: Any, tokens: jax.Array) -> Any:
        g = jax.grad(loss)(params, tokens)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        return jax.tree.map(lambda p, m: p - 1e-3 * m, params, m), m

    sizes = {"q": (embed, heads, head_dim), "o": (heads, head_dim, embed), "wi": (embed, mlp), "wd": (mlp, embed)}
    sizes |= {"k": sizes["q"], "v": sizes["q"]}
    blocks = {name: shape(mesh, (layers, *size), P(None, *rule[name])) for name, size in sizes.items()}
    params = {"emb": shape(mesh, (vocab, embed), rule["emb"]), "blocks": blocks}
    return jax.jit(step, donate_argnums=(0, 1)), (params, params, shape(mesh, (batch, seq), P("data"), jnp.int32))


_IN, _OUT = dict.fromkeys("qkv", P(None, "model", None)), P("model", None, None)
TRANSFORMER_RULES: dict[str, Rule] = {
    "fsdp": dict.fromkeys("qkv", P("data", None, None))
    | {"o": P(None, None, "data"), "wi": P("data", None), "wd": P(None, "data"), "emb": P(None, "data")},
    "tp": _IN | {"o": _OUT, "wi": P(None, "model"), "wd": P("model", None), "emb": P("model", None)},
}


def block(x: jax.Array, w: Any, heads: int, is_causal: bool, constrain: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Apply attention and an MLP to a residual stream of shape (batch, seq, embed)."""
    w = jax.tree.map(lambda array: array.astype(x.dtype), w)
    q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (norm(x) @ w[name] for name in ("q", "k", "v")))
    x = x + constrain(jax.nn.dot_product_attention(q, k, v, is_causal=is_causal).reshape(x.shape) @ w["o"])
    return x + constrain(jax.nn.gelu(norm(x) @ w["up"]) @ w["down"])


def block_shapes(mesh: Mesh, rule: Rule, embed: int, layers: int | None = None) -> Any:
    """Return the weights of a block, or of `layers` blocks with a leading axis."""

    def weight(sizes: tuple[int, int], name: str) -> jax.ShapeDtypeStruct:
        leading, spec = ((), ()) if layers is None else ((layers,), (None,))
        return shape(mesh, (*leading, *sizes), P(*spec, *rule[name]))

    weights = {name: weight((embed, embed), "in") for name in ("q", "k", "v")}
    weights |= {"o": weight((embed, embed), "out"), "up": weight((embed, 4 * embed), "in")}
    return weights | {"down": weight((4 * embed, embed), "out")}


def build_step(loss: Callable[..., jax.Array], parameters: Any, *batch: jax.ShapeDtypeStruct) -> Any:
    """Return a jitted step of Adam, and the shapes of its arguments."""
    optimizer = optax.adam(1e-3)

    def step(parameters: Any, state: Any, *batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    sharding: Any = batch[0].sharding
    first, *others = jax.eval_shape(optimizer.init, parameters)
    count = shape(sharding.mesh, (), P(), jnp.int32)
    state = (first._replace(count=count, mu=parameters, nu=parameters), *others)
    shardings = jax.tree.map(lambda array: array.sharding, (parameters, state, count))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings), (parameters, state, *batch)


def nanodo(mesh: Mesh, rule: Rule) -> Any:
    """A decoder like nanodo's, without sharding constraints: 2 layers of 512, Adam, 256 x 512 tokens."""
    embed, vocab = 512, 8192

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        table = parameters["embed"].astype(jnp.bfloat16)
        x = table[tokens]
        for w in parameters["layers"]:
            x = block(x, w, 8, True, lambda x: x)
        logits = (norm(x) @ table.T)[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    parameters = {"embed": shape(mesh, (vocab, embed), rule["embed"]), "layers": [block_shapes(mesh, rule, embed)] * 2}
    return build_step(loss, parameters, shape(mesh, (256, 512), P("data"), jnp.int32))


def vision(mesh: Mesh, rule: Rule) -> Any:
    """A ViT-B/16 like big_vision's, with scanned layers and rematerialisation: Adam, 256 images of 224 x 224 pixels."""
    embed, layers = 768, 12
    constrain = partial(with_sharding_constraint, shardings=NamedSharding(mesh, P("data")))

    def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        kernel = parameters["patches"].astype(jnp.bfloat16)
        x = jax.lax.conv_general_dilated(
            images.astype(jnp.bfloat16), kernel, (16, 16), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = constrain(x.reshape(x.shape[0], -1, embed))
        layer = jax.checkpoint(lambda x, w: (block(x, w, 12, False, constrain), None))
        x, _ = jax.lax.scan(layer, x, parameters["layers"])
        logits = norm(x).mean(1) @ parameters["head"].astype(jnp.bfloat16)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    parameters = {
        "patches": shape(mesh, (16, 16, 3, embed), P()),
        "layers": block_shapes(mesh, rule, embed, layers),
        "head": shape(mesh, (embed, 1000), P()),
    }
    images, labels = shape(mesh, (256, 224, 224, 3), P("data")), shape(mesh, (256,), P("data"), jnp.int32)
    return build_step(loss, parameters, images, labels)


PROGRAMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mlp": (mlp, {"dp": P(), "fsdp": P("data"), "tp": P(None, "model")}),
    "transformer": (transformer, TRANSFORMER_RULES),
    "vision": (vision, {"fsdp": SHARDED, "tp": TENSOR}),
    "nanodo": (nanodo, {"dp": REPLICATED, "both": BOTH}),
}


def count_compiles(found: valkyrie.Comparison, order: CompileOrder) -> int:
    """Return how many programs a search in this order compiles until it has compiled the fastest."""
    programs = set[str]()
    while order.untried:
        layout = order.pop()
        prediction = found[layout.name].record
        assert isinstance(prediction, Prediction)
        order.add(layout, PredictedProgram(prediction, None))
        programs.add(min([layout.name, *find_equal_names(order.estimates, layout.name)]))
        if found.step_s(layout.name) == found.step_s(found.best or ""):
            break
    return len(programs)


def main() -> None:
    """Print a line for each of the programs named as arguments, or for all."""
    for name in sys.argv[1:] or PROGRAMS:
        build, rules = PROGRAMS[name]
        found = valkyrie.search(build, slice=SLICE, rules=rules, axes=AXES, name=name)
        search = ProgramSearch(build, SLICE, parse_meshes(None, AXES, SLICE), rules, ProgramWork(name))
        layouts = search.build_layouts()
        start = time.perf_counter()
        estimates = estimate_layouts(layouts, SLICE, math.inf, lambda line: None)
        seconds = (time.perf_counter() - start) / len(layouts)
        compiled = [layout for layout in estimates if found[layout].step_s]
        correlation: Any = spearmanr([estimates[n].step_s for n in compiled], [found[n].step_s for n in compiled])
        orders = (CompileOrder(list(layouts), known) for known in (estimates, {}))
        by_estimate, by_difference = (count_compiles(found, order) for order in orders)
        print(
            f"{name}: rank correlation {correlation.statistic:.2f} over {len(compiled)} layouts, {seconds:.1f} s per "
            f"estimate, compiles until the best: {by_estimate} by estimate, {by_difference} by difference",
            flush=True,
        )


if __name__ == "__main__":
    main()
