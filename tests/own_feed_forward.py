"""Writes a user's folder with a module, a model and a partition.

The module has a gated feed-forward that returns an auxiliary loss and a metric.
"""

from __future__ import annotations

from pathlib import Path

MODULE = '''
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx

from valkyrie.axes import Size
from valkyrie.models.attention import Attention
from valkyrie.models.block import Block, saved, weight
from valkyrie.models.layers import normal, parameter, project
from valkyrie.models.stack import Stack
from valkyrie.problems import check_range


@dataclass
class GatedUnit(Block):
    """A gated feed-forward, whose hidden activations an auxiliary loss keeps small."""

    units: int = 48
    penalty: float = 0.3

    axes = {"units": "the hidden side of a gated unit"}
    activations = (("batch", "seq", "units"),)
    pointwise = True

    @property
    def auxiliary(self):
        return {"size": self.penalty, "largest": 0.0}

    def problems(self, key):
        return check_range(f"{key}.units", self.units, least=1)

    def sizes(self, context):
        return {"units": Size(self.units, f"{context.key}.units")}

    def weights(self, context):
        return {name: weight("embed", "units", output_first=name == "out") for name in ("up", "gate", "out")}

    def flops(self, context, seq):
        return 6.0 * context.embed * self.units

    def saves(self, context):
        return [
            saved("units", name="unit_up", product=True),
            saved("units", name="unit_gate", product=True),
            saved("embed", name="unit_out", product=True, result=True),
            saved("units", count=2),
        ]

    def build(self, context, *, numerics, key):
        return GatedUnitLayer(self, context, numerics, key)


class GatedUnitLayer(nnx.Module):
    def __init__(self, block, context, numerics, key):
        self.numerics = numerics
        specs, keys = block.parameters(context), jax.random.split(key, 3)
        for (name, spec), weight_key in zip(specs.items(), keys, strict=True):
            setattr(self, name, parameter(spec, normal(weight_key, spec.shape, spec.shape[0] ** -0.5), numerics))

    def __call__(self, x, boundaries, shard):
        def project_in(weights, name):
            product = project("bse,eu->bsu", x, weights, shard=shard, numerics=self.numerics, name=name)
            return shard(product, "batch", "seq", "units")

        hidden = jax.nn.sigmoid(project_in(self.gate, "unit_gate")) * project_in(self.up, "unit_up")
        y = project("bsu,eu->bse", hidden, self.out, shard=shard, numerics=self.numerics, name="unit_out")
        wide = jnp.abs(hidden.astype(jnp.float32))
        return y, {"size": jnp.mean(wide**2, axis=(1, 2)), "largest": jnp.max(wide, axis=(1, 2))}


@dataclass
class Config(Stack):
    family: str = "gated_unit"
    block_pattern: list[str] = field(default_factory=lambda: ["attention"])
    feed_forward_pattern: list[str] = field(default_factory=lambda: ["unit", "feed_forward"])
    attention: Attention = field(default_factory=Attention)
    unit: GatedUnit = field(default_factory=GatedUnit)
'''

MODEL = """
defaults: [gated_unit_schema, _self_]
name: gated_unit_tiny
embed: 32
mlp: 64
loss_chunk: 16
attention: {heads: 4, kv_heads: 2, head_dim: 8, windows: [16]}
"""

PARTITION = """
defaults: [partition_schema, _self_]
name: units
parameters: {embed: [y], units: [x], mlp: [x], heads: [x], kv_heads: [x], vocab: [x]}
activations: {batch: ['s?', 'w?', z], embed: [y], units: [x], mlp: [x], heads: [x], kv_heads: [x], vocab: [x]}
"""

SMALL_OVERRIDES = ("model=gated_unit_tiny", "batch=16", "seq=48", "tracking=off")


def write_folder(folder: Path) -> Path:
    """Write the module, a model that uses it, and a partition into a user's folder, and return the folder."""
    for name, text in {
        "gated_unit.py": MODULE,
        "model/gated_unit_tiny.yaml": MODEL,
        "partition/units.yaml": PARTITION,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.lstrip())
    return folder
