"""Maps each parameter of a model to tensors of a Hugging Face folder, and converts between their shapes. No JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from valkyrie.models.stack import Stack


@dataclass(frozen=True)
class TensorLocation:
    """The tensor of a parameter. `{}` in its name is the layer number.

    `transposed`: input and output dimensions are in the opposite order to ours. `flat`: the tensor has one dimension.
    `third`: the parameter is this third of the tensor's last dimension, or None if it is the whole tensor.
    """

    name: str
    transposed: bool = False
    flat: bool = False
    third: int | None = None


OUTSIDE = {
    "embedding": TensorLocation("model.embed_tokens.weight"),
    "unembedding": TensorLocation("lm_head.weight"),
    "norm.scale": TensorLocation("model.norm.weight"),
}
LAYER = {
    "norm.scale": TensorLocation("model.layers.{}.input_layernorm.weight"),
    "feed_forward_norm.scale": TensorLocation("model.layers.{}.post_attention_layernorm.weight"),
    "mixer.local.query": TensorLocation("model.layers.{}.self_attn.q_proj.weight", transposed=True),
    "mixer.local.key": TensorLocation("model.layers.{}.self_attn.k_proj.weight", transposed=True),
    "mixer.local.value": TensorLocation("model.layers.{}.self_attn.v_proj.weight", transposed=True),
    "mixer.local.query_norm.scale": TensorLocation("model.layers.{}.self_attn.q_norm.weight"),
    "mixer.local.key_norm.scale": TensorLocation("model.layers.{}.self_attn.k_norm.weight"),
    "mixer.local.query_bias": TensorLocation("model.layers.{}.self_attn.q_proj.bias", flat=True),
    "mixer.local.key_bias": TensorLocation("model.layers.{}.self_attn.k_proj.bias", flat=True),
    "mixer.local.value_bias": TensorLocation("model.layers.{}.self_attn.v_proj.bias", flat=True),
    "mixer.out_bias": TensorLocation("model.layers.{}.self_attn.o_proj.bias"),
    "mixer.out": TensorLocation("model.layers.{}.self_attn.o_proj.weight"),
    "feed_forward.up": TensorLocation("model.layers.{}.mlp.up_proj.weight", transposed=True),
    "feed_forward.gate": TensorLocation("model.layers.{}.mlp.gate_proj.weight", transposed=True),
    "feed_forward.down": TensorLocation("model.layers.{}.mlp.down_proj.weight"),
}
"""Llama's names of the tensors of a layer. The other architectures use them too."""

GPT2_OUTSIDE = {
    "embedding": TensorLocation("wte.weight"),
    "positions": TensorLocation("wpe.weight"),
    "norm.scale": TensorLocation("ln_f.weight"),
    "norm.bias": TensorLocation("ln_f.bias"),
    "unembedding": TensorLocation("lm_head.weight"),
}
GPT2_LAYER = {
    "norm.scale": TensorLocation("h.{}.ln_1.weight"),
    "norm.bias": TensorLocation("h.{}.ln_1.bias"),
    "feed_forward_norm.scale": TensorLocation("h.{}.ln_2.weight"),
    "feed_forward_norm.bias": TensorLocation("h.{}.ln_2.bias"),
    "mixer.out": TensorLocation("h.{}.attn.c_proj.weight", transposed=True),
    "mixer.out_bias": TensorLocation("h.{}.attn.c_proj.bias"),
    "feed_forward.up": TensorLocation("h.{}.mlp.c_fc.weight"),
    "feed_forward.up_bias": TensorLocation("h.{}.mlp.c_fc.bias"),
    "feed_forward.down": TensorLocation("h.{}.mlp.c_proj.weight", transposed=True),
    "feed_forward.down_bias": TensorLocation("h.{}.mlp.c_proj.bias"),
}
GPT2_LAYER |= {
    f"mixer.local.{name}": TensorLocation("h.{}.attn.c_attn.weight", third=third)
    for third, name in enumerate(("query", "key", "value"))
}
GPT2_LAYER |= {
    f"mixer.local.{name}_bias": TensorLocation("h.{}.attn.c_attn.bias", flat=True, third=third)
    for third, name in enumerate(("query", "key", "value"))
}
"""GPT-2's tensor names. Its matrices have their input dimension first; one tensor combines queries, keys and values."""
GPT2_PREFIX = "transformer."
"""Prefix of these names in files that were saved with the output head."""

DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Name suffixes of tensors in older files that are derived from config.json."""


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of a folder: the part of a parameter at `layer` of its leading axis (None: all of it).

    `shape` is the shape of this part in our parameter. The tensor has only `rows` of its first dimension; the rest is
    padding.
    """

    parameter: str
    layer: int | None
    name: str
    place: TensorLocation
    shape: tuple[int, ...]
    rows: int

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the tensor in the folder. A tensor with thirds counts as a whole."""
        *ahead, last = self._own
        return (*ahead, last * (1 if self.place.third is None else 3))

    @property
    def _own(self) -> tuple[int, ...]:
        if len(self.shape) == 1 or self.place.flat:
            return (math.prod(self.shape),)
        matrix = (self.rows, math.prod(self.shape[1:]))
        return matrix[::-1] if self.place.transposed else matrix

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """Convert a tensor of the folder to our part of the parameter. Padding is zero."""
        if self.place.third is not None:
            tensor = np.split(tensor, 3, axis=-1)[self.place.third]
        laid = (tensor.T if self.place.transposed else tensor).reshape(self.rows, *self.shape[1:])
        if self.rows == self.shape[0]:
            return laid
        return np.concatenate([laid, np.zeros((self.shape[0] - self.rows, *self.shape[1:]), laid.dtype)])

    def theirs(self, part: np.ndarray) -> np.ndarray:
        """Convert a part of our parameter to the tensor of the folder, or to its third of that tensor."""
        laid = part[: self.rows].reshape(self._own[::-1] if self.place.transposed else self._own)
        return np.ascontiguousarray(laid.T if self.place.transposed else laid)


def tensor_slices(model: Stack, prefix: str = "") -> dict[str, list[TensorSlice]]:
    """Return the tensors of each parameter of a model, first layer first. Tensor names begin with `prefix`."""
    by_parameter: dict[str, list[TensorSlice]] = {}
    layers = dict(_layers(model))
    outside, of_layer = (GPT2_OUTSIDE, GPT2_LAYER) if model.family == "gpt2" else (OUTSIDE, LAYER)
    for name, parameter in model.parameters().items():
        if name in outside:
            place, shape = outside[name], parameter.shape
            rows = model.vocab_size if parameter.axes[0] == "vocab" else shape[0]
            tensor = place.name if place.name.startswith("lm_head.") else prefix + place.name
            by_parameter[name] = [TensorSlice(name, None, tensor, place, shape, rows)]
            continue
        segment, of_group, rest = name.split(".", 2)
        place, numbers = of_layer[rest], layers[f"{segment}.{of_group}"]
        shape = parameter.shape[1:]
        by_parameter[name] = [
            TensorSlice(name, i, prefix + place.name.format(number), place, shape, shape[0])
            for i, number in enumerate(numbers)
        ]
    return by_parameter


def _layers(model: Stack) -> Iterator[tuple[str, list[int]]]:
    """Yield the prefix of each stacked block with its layer numbers."""
    first = 0
    for i, (group, repeats) in enumerate(model.segments()):
        for j in range(len(group)):
            yield f"segment_{i}.block_{j}", [first + repeat * len(group) + j for repeat in range(repeats)]
        first += repeats * len(group)
