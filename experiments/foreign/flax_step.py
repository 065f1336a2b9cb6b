"""Predicts a plain Flax training step for a slice without having the slice. The step does not use Valkyrie.

    python experiments/foreign/flax_step.py
    python experiments/foreign/flax_step.py --target v4-64 --mesh data=8,model=4 --html report.html

The model is a small Flax NNX decoder, trained by optax's Adam, with common shardings: the batch over `data`, and the
wide dimension of every weight over `model`. The script needs libtpu (`uv sync --extra tpu`) but no TPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import valkyrie
from valkyrie.cli.predict import parse_mesh_axes


class Block(nnx.Module):
    """A Transformer block: attention and an MLP, each with an RMSNorm and a residual connection."""

    def __init__(self, embed: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(embed, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, embed, dtype=jnp.bfloat16, decode=False, rngs=rngs)
        self.up = nnx.Linear(embed, 4 * embed, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * embed, embed, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to a residual stream of shape (batch, seq, embed)."""
        x = x + self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    """A decoder-only Transformer without positional encodings. The input embedding is also the output layer."""

    def __init__(self, vocab: int, embed: int, heads: int, layers: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocab, embed, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(embed, heads, rngs) for _ in range(layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of the next token at every position."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(x)


SPECS = {
    "up": PartitionSpec(None, "model"),
    "down": PartitionSpec("model"),
    "embedding": PartitionSpec("model"),
    "query": PartitionSpec(None, "model"),
    "key": PartitionSpec(None, "model"),
    "value": PartitionSpec(None, "model"),
    "out": PartitionSpec("model"),
}
"""Sharding of weights over `model`, by the name of the layer. Other weights are replicated."""


def training_step(mesh: Mesh, batch: int = 32, seq: int = 1024, **sizes: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the jitted step and the shapes of its arguments, on a mesh with axes `data` and `model`.

    `sizes` replaces the default `vocab`, `embed`, `heads` and `layers` of the decoder.
    """
    sizes = {"vocab": 32000, "embed": 1024, "heads": 8, "layers": 4} | sizes
    model = nnx.eval_shape(lambda: Decoder(**sizes, rngs=nnx.Rngs(0)))
    graph, parameters, other_state = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-3)

    def step(parameters: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(parameters: Any) -> jax.Array:
            logits = nnx.merge(graph, parameters, other_state)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    parameters = add_shardings(parameters, mesh)
    state = add_shardings(jax.eval_shape(optimizer.init, parameters), mesh)
    tokens = jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return jax.jit(step, donate_argnums=(0, 1)), (parameters, state, tokens)


def add_shardings(tree: Any, mesh: Mesh) -> Any:
    """Return the shapes of a tree's arrays, with the shardings from `SPECS`. Vectors are replicated."""

    def add_sharding(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        path_text = jax.tree_util.keystr(path)
        spec = next(
            (spec for name, spec in SPECS.items() if f"'{name}'" in path_text and leaf.ndim > 1), PartitionSpec()
        )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(add_sharding, tree)


def main() -> None:
    """Predict the step on the slice of `--target` and print the report."""
    parser = argparse.ArgumentParser(description="A plain Flax step, predicted for a slice.")
    parser.add_argument("--target", default="v5e-8", help="the slice")
    parser.add_argument("--mesh", default="data=2,model=4", help="its axes data and model, in order")
    parser.add_argument("--html", type=Path, help="write the report as a page")
    args = parser.parse_args()
    slice = valkyrie.slice(args.target)
    axes = parse_mesh_axes(args.mesh)
    step, arguments = training_step(slice.mesh(list(axes.values()), list(axes)))
    report = valkyrie.predict(step, *arguments, slice=slice, tokens=32 * 1024)
    print(report)
    if args.html:
        print(report.html(args.html))


if __name__ == "__main__":
    main()
