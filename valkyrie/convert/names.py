"""Maps model parameters to tensors of a Hugging Face folder, and converts between their shapes. Does not import JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from valkyrie.models.block import Layer
from valkyrie.models.stack import Stack


@dataclass(frozen=True)
class TensorLocation:
    """The tensor that stores a parameter.

    Args:
        name: name of the tensor, with `{}` for the layer number, and a second `{}` for the number of the expert if each
            expert has a tensor.
        transposed: whether the input and output dimensions are in the opposite order to the parameter's.
        stacked: whether the tensor stores the matrices of all experts, with the experts as its first dimension.
        flat: whether the tensor flattens the parameter's dimensions, such as heads and head_dim, to one.
        third: which third of the tensor's last dimension stores the parameter, or None if all of it does.
        parts: names in the layer of the parameters whose last dimensions the tensor concatenates, in this order. Empty
            if it stores a single parameter.
        interleaved: whether the channels of `parts` alternate, instead of being concatenated.
        pairs: name in the layer of a parameter. As many channels at the end of the last dimension as that parameter has
            in its last dimension are rotated, and the tensor stores the two channels of a rotated pair next to each
            other. None if it does not.
    """

    name: str
    transposed: bool = False
    stacked: bool = False
    flat: bool = False
    third: int | None = None
    parts: tuple[str, ...] = ()
    interleaved: bool = False
    pairs: str | None = None


TOP_LEVEL_TENSORS = {
    "embedding": TensorLocation("model.embed_tokens.weight"),
    "unembedding": TensorLocation("lm_head.weight"),
    "norm.scale": TensorLocation("model.norm.weight"),
}
LAYER_TENSORS = {
    "norm.scale": TensorLocation("model.layers.{}.input_layernorm.weight"),
    "feed_forward_norm.scale": TensorLocation("model.layers.{}.post_attention_layernorm.weight"),
    "mixer.local.query": TensorLocation("model.layers.{}.self_attn.q_proj.weight", transposed=True),
    "mixer.local.key": TensorLocation("model.layers.{}.self_attn.k_proj.weight", transposed=True),
    "mixer.local.value": TensorLocation("model.layers.{}.self_attn.v_proj.weight", transposed=True),
    "mixer.local.query_norm.scale": TensorLocation("model.layers.{}.self_attn.q_norm.weight", flat=True),
    "mixer.local.key_norm.scale": TensorLocation("model.layers.{}.self_attn.k_norm.weight", flat=True),
    "mixer.local.query_bias": TensorLocation("model.layers.{}.self_attn.q_proj.bias", flat=True),
    "mixer.local.key_bias": TensorLocation("model.layers.{}.self_attn.k_proj.bias", flat=True),
    "mixer.local.value_bias": TensorLocation("model.layers.{}.self_attn.v_proj.bias", flat=True),
    "mixer.out_bias": TensorLocation("model.layers.{}.self_attn.o_proj.bias"),
    "mixer.out": TensorLocation("model.layers.{}.self_attn.o_proj.weight"),
    "feed_forward.up": TensorLocation("model.layers.{}.mlp.up_proj.weight", transposed=True),
    "feed_forward.gate": TensorLocation("model.layers.{}.mlp.gate_proj.weight", transposed=True),
    "feed_forward.down": TensorLocation("model.layers.{}.mlp.down_proj.weight"),
}
"""Llama's tensor names in a layer, also used by the other architectures except GPT-2."""


def expert_tensors(block: str, up: str, gate: str, down: str) -> dict[str, TensorLocation]:
    """Return the tensors of a mixture whose experts have a tensor for each matrix. `block` is the module's name."""
    expert = f"model.layers.{{}}.{block}.experts.{{}}"
    return {
        "moe.router": TensorLocation(f"model.layers.{{}}.{block}.gate.weight", transposed=True),
        "moe.up": TensorLocation(f"{expert}.{up}.weight", transposed=True),
        "moe.gate": TensorLocation(f"{expert}.{gate}.weight", transposed=True),
        "moe.down": TensorLocation(f"{expert}.{down}.weight"),
    }


MIXTRAL_EXPERTS = expert_tensors("block_sparse_moe", up="w3", gate="w1", down="w2")
QWEN_EXPERTS = expert_tensors("mlp", up="up_proj", gate="gate_proj", down="down_proj")
"""Tensor names of the experts, also used by OLMoE."""

_GPT_OSS_MLP, _GATE_UP = "model.layers.{}.mlp", ("moe.gate", "moe.up")
_GATE_UP_BIAS = tuple(f"{name}_bias" for name in _GATE_UP)
GPT_OSS_TENSORS = {
    "mixer.sinks": TensorLocation("model.layers.{}.self_attn.sinks"),
    "moe.router": TensorLocation(f"{_GPT_OSS_MLP}.router.weight", transposed=True),
    "moe.router_bias": TensorLocation(f"{_GPT_OSS_MLP}.router.bias"),
    "moe.down": TensorLocation(f"{_GPT_OSS_MLP}.experts.down_proj", transposed=True, stacked=True),
    "moe.down_bias": TensorLocation(f"{_GPT_OSS_MLP}.experts.down_proj_bias"),
}
GPT_OSS_TENSORS |= {
    name: TensorLocation(f"{_GPT_OSS_MLP}.experts.gate_up_proj", stacked=True, parts=_GATE_UP, interleaved=True)
    for name in _GATE_UP
}
GPT_OSS_TENSORS |= {
    name: TensorLocation(f"{_GPT_OSS_MLP}.experts.gate_up_proj_bias", parts=_GATE_UP_BIAS, interleaved=True)
    for name in _GATE_UP_BIAS
}
"""Tensor names of the sinks and experts of gpt-oss."""

_LLAMA4_MLP = "model.layers.{}.feed_forward"
LLAMA4_TENSORS = {
    "moe.router": TensorLocation(f"{_LLAMA4_MLP}.router.weight", transposed=True),
    "moe.down": TensorLocation(f"{_LLAMA4_MLP}.experts.down_proj", transposed=True, stacked=True),
}
LLAMA4_TENSORS |= {
    name: TensorLocation(f"{_LLAMA4_MLP}.experts.gate_up_proj", stacked=True, parts=_GATE_UP) for name in _GATE_UP
}
LLAMA4_TENSORS |= {
    f"{prefix}{name}": TensorLocation(f"{_LLAMA4_MLP}.{module}{name}_proj.weight", transposed=name != "down")
    for prefix, module in (("moe.shared_", "shared_expert."), ("feed_forward.", ""))
    for name in ("up", "gate", "down")
}
LLAMA4_TENSORS |= {
    name: replace(LAYER_TENSORS[name], pairs=name.removesuffix("_bias"))
    for name in (f"mixer.local.{kind}{suffix}" for kind in ("query", "key") for suffix in ("", "_bias"))
}
"""Tensor names of the feed-forwards of Llama 4, and its queries and keys, whose channels are in pairs."""

_SELF_ATTENTION, _ROPE_KEY = "model.layers.{}.self_attn", "mixer.rope_key"


def _latent_tensor(name: str, *parts: str, pairs: str | None = None) -> TensorLocation:
    return TensorLocation(f"{_SELF_ATTENTION}.{name}.weight", transposed=True, parts=parts, pairs=pairs)


LATENT_ATTENTION = {
    "mixer.query_latent": _latent_tensor("q_a_proj"),
    "mixer.query_latent_norm.scale": TensorLocation(f"{_SELF_ATTENTION}.q_a_layernorm.weight"),
    "mixer.query": _latent_tensor("q_proj", pairs=_ROPE_KEY),
    "mixer.expanded_query": _latent_tensor("q_b_proj", pairs=_ROPE_KEY),
    "mixer.latent": _latent_tensor("kv_a_proj_with_mqa", "mixer.latent", _ROPE_KEY),
    _ROPE_KEY: _latent_tensor("kv_a_proj_with_mqa", "mixer.latent", _ROPE_KEY, pairs=_ROPE_KEY),
    "mixer.latent_norm.scale": TensorLocation(f"{_SELF_ATTENTION}.kv_a_layernorm.weight"),
    "mixer.key": _latent_tensor("kv_b_proj", "mixer.key", "mixer.value"),
    "mixer.value": _latent_tensor("kv_b_proj", "mixer.key", "mixer.value"),
    "mixer.out": TensorLocation(f"{_SELF_ATTENTION}.o_proj.weight"),
}
"""Tensor names of latent attention."""

SHARED_EXPERTS = {
    f"moe.shared_{name}": TensorLocation(
        f"model.layers.{{}}.mlp.shared_experts.{name}_proj.weight", transposed=name != "down"
    )
    for name in ("up", "gate", "down")
}
"""Tensor names of the shared experts. A tensor stores all of them."""

SELECTION_BIAS = {"moe.selection_bias": TensorLocation("model.layers.{}.mlp.gate.e_score_correction_bias")}
"""Tensor name of the bias for the choice of experts."""

GPT2_TOP_LEVEL_TENSORS = {
    "embedding": TensorLocation("wte.weight"),
    "positions": TensorLocation("wpe.weight"),
    "norm.scale": TensorLocation("ln_f.weight"),
    "norm.bias": TensorLocation("ln_f.bias"),
    "unembedding": TensorLocation("lm_head.weight"),
}
GPT2_LAYER_TENSORS = {
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
GPT2_LAYER_TENSORS |= {
    f"mixer.local.{name}": TensorLocation("h.{}.attn.c_attn.weight", third=third)
    for third, name in enumerate(("query", "key", "value"))
}
GPT2_LAYER_TENSORS |= {
    f"mixer.local.{name}_bias": TensorLocation("h.{}.attn.c_attn.bias", flat=True, third=third)
    for third, name in enumerate(("query", "key", "value"))
}
"""GPT-2's tensor names in a layer. Matrices have their input dimension first. One tensor holds query, key and value."""
GPT2_PREFIX = "transformer."
"""Prefix of GPT-2's tensor names in folders saved with the output head. Other folders have no prefix."""

DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Suffixes of tensors in older files that can be computed from config.json, and are therefore ignored."""


@dataclass(frozen=True)
class TensorSlice:
    """One layer of a parameter, one expert of a layer, or a parameter without layers, and the tensor that stores it.

    Args:
        parameter: name of the parameter.
        index: indices in the parameter's leading axes, layers and experts, or () for a parameter without these.
        name: name of the tensor.
        location: how the tensor stores the parameter.
        shape: shape of this part of the parameter.
        row_count: number of rows of the parameter that the tensor stores. The remaining rows are padding.
        start: first index of this part in the last dimension of the tensor's parts (`TensorLocation.parts`).
        total: length of that dimension, or None if the tensor stores a single part.
        paired: number of rotated channels at the end of the last dimension, of which the tensor stores pairs.
    """

    parameter: str
    index: tuple[int, ...]
    name: str
    location: TensorLocation
    shape: tuple[int, ...]
    row_count: int
    start: int = 0
    total: int | None = None
    paired: int = 0

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor in the folder."""
        *leading_sizes, last_size = self._flattened(self._whole_shape)
        return (*leading_sizes, last_size * (1 if self.location.third is None else 3))

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        """Shape of the parameters that the tensor joins along the last dimension, or of this part alone."""
        return (self.row_count, *self.shape[1:]) if self.total is None else (*self.shape[:-1], self.total)

    def _flattened(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) == 1 or self.location.flat:
            return (math.prod(shape),)
        experts, shape = (shape[:1], shape[1:]) if self.location.stacked else ((), shape)
        rows, columns = shape[0], math.prod(shape[1:])
        return (*experts, columns, rows) if self.location.transposed else (*experts, rows, columns)

    def from_tensor(self, tensor: np.ndarray) -> np.ndarray:
        """Convert a tensor of the folder to this part of the parameter. Padding is zero."""
        if self.location.third is not None:
            tensor = np.split(tensor, 3, axis=-1)[self.location.third]
        matrix = (tensor.swapaxes(-1, -2) if self.location.transposed else tensor).reshape(self._whole_shape)
        if self.location.interleaved:
            matrix = matrix[..., self.start :: len(self.location.parts)]
        elif self.total is not None:
            matrix = matrix[..., self.start : self.start + self.shape[-1]]
        matrix = matrix[..., self._channel_order] if self.paired else matrix
        if self.row_count == self.shape[0]:
            return matrix
        return np.concatenate([matrix, np.zeros((self.shape[0] - self.row_count, *self.shape[1:]), matrix.dtype)])

    def to_rows(self, part: np.ndarray) -> np.ndarray:
        """Return this part of a parameter without padding, with its channels in the order of the tensor."""
        part = part[: self.row_count]
        return part[..., np.argsort(self._channel_order)] if self.paired else part

    @property
    def _channel_order(self) -> np.ndarray:
        """Index in the tensor of each channel. The first channels of rotated pairs precede the second ones."""
        first = self.shape[-1] - self.paired
        rotated = np.arange(first, self.shape[-1]).reshape(-1, 2)
        return np.concatenate([np.arange(first), rotated.T.reshape(-1)])

    def to_tensor(self, rows: np.ndarray) -> np.ndarray:
        """Convert the rows of all parts (`to_rows`) to the layout of the tensor in the Hugging Face folder.

        For a tensor that fuses GPT-2's query, key and value, `rows` and the result are only one third.
        """
        shape = self._flattened(rows.shape)
        if not self.location.transposed:
            return np.ascontiguousarray(rows.reshape(shape))
        return np.ascontiguousarray(rows.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2))


def join_slices(slices: Sequence[TensorSlice], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the tensor that stores `parts` of parameters. `slices` are all slices that it stores."""
    order = sorted(range(len(slices)), key=lambda i: (slices[i].location.third or 0, slices[i].start))
    rows = [slices[i].to_rows(parts[i]) for i in order]
    if slices[0].location.third is not None:
        return np.concatenate([slices[0].to_tensor(third) for third in rows], axis=-1)
    if slices[0].location.interleaved:
        return slices[0].to_tensor(np.stack(rows, axis=-1).reshape(*rows[0].shape[:-1], -1))
    return slices[0].to_tensor(rows[0] if len(rows) == 1 else np.concatenate(rows, axis=-1))


def tensor_slices(
    model: Stack,
    top_level_tensors: Mapping[str, TensorLocation],
    layer_tensors: Mapping[str, TensorLocation],
    prefix: str = "",
) -> dict[str, list[TensorSlice]]:
    """Return the `TensorSlice` objects of each parameter by its name, in the order of layers and experts.

    Args:
        model: the model.
        top_level_tensors: locations of the parameters outside of layers, by name.
        layer_tensors: locations of the parameters in a layer, by name in the layer. Names of a feed-forward begin with
            its name in `feed_forward_pattern`.
        prefix: prepended to all tensor names except those that start with `lm_head.`.
    """
    slices_by_parameter: dict[str, list[TensorSlice]] = {}
    layers = {name: (layer, numbers) for name, layer, numbers in _stacked_layers(model)}
    parameters = model.parameters()
    for name, parameter in parameters.items():
        if name in top_level_tensors:
            location, shape = top_level_tensors[name], parameter.shape
            row_count = model.vocab_size if parameter.axes[0] == "vocab" else shape[0]
            tensor = location.name if location.name.startswith("lm_head.") else prefix + location.name
            slices_by_parameter[name] = [TensorSlice(name, (), tensor, location, shape, row_count)]
            continue
        segment, block, name_in_layer = name.split(".", 2)
        layer, numbers = layers[f"{segment}.{block}"]
        local_name = name_in_layer.replace("feed_forward.", f"{layer.feed_forward_kind}.", 1)
        location = layer_tensors[local_name]
        leading_sizes = parameter.shape[: location.name.count("{}")]
        shape = parameter.shape[len(leading_sizes) :]
        widths = {
            part: parameters[f"{segment}.{block}.{_parameter_name(part, layer)}"].shape[-1] for part in location.parts
        }
        earlier_parts = location.parts[: location.parts.index(local_name)] if widths else ()
        start = len(earlier_parts) if location.interleaved else sum(widths[part] for part in earlier_parts)
        total = sum(widths.values()) or None
        paired = 0 if location.pairs is None else parameters[f"{segment}.{block}.{location.pairs}"].shape[-1]
        slices_by_parameter[name] = [
            TensorSlice(
                name,
                index,
                prefix + location.name.format(numbers[index[0]], *index[1:]),
                location,
                shape,
                shape[0],
                start,
                total,
                paired,
            )
            for index in np.ndindex(leading_sizes)
        ]
    return slices_by_parameter


def _parameter_name(local_name: str, layer: Layer) -> str:
    """Return the name in a layer of a parameter, given that in `layer_tensors`."""
    return local_name.replace(f"{layer.feed_forward_kind}.", "feed_forward.", 1)


def _stacked_layers(model: Stack) -> Iterator[tuple[str, Layer, list[int]]]:
    """Yield the name prefix of each stacked layer, such as `segment_0.block_1`, the layer, and the layers' numbers."""
    first_number = 0
    for i, (group, repeats) in enumerate(model.segments()):
        for j, layer in enumerate(group):
            numbers = [first_number + repeat * len(group) + j for repeat in range(repeats)]
            yield f"segment_{i}.block_{j}", layer, numbers
        first_number += repeats * len(group)
