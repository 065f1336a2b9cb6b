"""Settings of Llama 4's attention and experts in a Hugging Face config.json, and back. Does not import JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from valkyrie.models.block import DENSE
from valkyrie.models.families import moe
from valkyrie.ops.choices import RouterScores, WindowKind

_CHUNKED, _FULL = "chunked_attention", "full_attention"
"""Values of `layer_types`."""


def llama4_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of attention except sizes and RoPE, those of the router, and the unsupported values.

    `config` has the architecture's `default_values`. Lists have an entry for each layer.
    """
    layers, rope_layers = config["num_hidden_layers"], config.get("no_rope_layers")
    if not rope_layers:
        interval = _whole_number(config, "no_rope_layer_interval", 4)
        rope_layers = [(i + 1) % interval != 0 for i in range(layers)]
    rope_layers = [bool(is_rotated) for is_rotated in rope_layers[:layers]]  # 1 means that a layer has RoPE
    layer_types = config.get("layer_types") or [_CHUNKED if is_rotated else _FULL for is_rotated in rope_layers]
    has_temperature = config["attn_temperature_tuning"] and not all(rope_layers)
    refusals = []
    if unknown_types := sorted({*layer_types} - {_CHUNKED, _FULL}):
        refusals.append(f"layer_types has {', '.join(unknown_types)}, but only {_CHUNKED} and {_FULL} are supported")
    lengths = {"no_rope_layers": len(rope_layers), "layer_types": len(layer_types)}
    refusals += [f"{key} has {n} entries for {layers} layers" for key, n in lengths.items() if n != layers]
    chunk = config["attention_chunk_size"]
    return {
        "attention.windows": [chunk if layer_type == _CHUNKED else None for layer_type in layer_types],
        "attention.window_kind": WindowKind.chunked.value,
        "attention.rope_layers": rope_layers,
        "attention.qk_norm": bool(config["use_qk_norm"]),
        "attention.qk_norm_scale": False,
        "attention.temperature_slope": float(config["attn_scale"]) if has_temperature else 0.0,
        "attention.temperature_interval": _whole_number(config, "floor_scale", 8192),
        "moe.router": RouterScores.sigmoid.value,
        "moe.scale_inputs": True,
        "moe.shared_experts": 1,
    }, refusals


def dense_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the layers without experts."""
    layers, expert_layers = config["num_hidden_layers"], config.get("moe_layers")
    if expert_layers is None:
        step = _whole_number(config, "interleave_moe_layer_step", 1)
        expert_layers = range(step - 1, layers, step)
    return [i for i in range(layers) if i not in expert_layers]


def _whole_number(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number, also if it is written as a float. Raises ValueError if it is none or less than 1."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 1:
        raise ValueError(f"config.json: {key}={json.dumps(value)} must be a whole number of at least 1.")
    return int(value)


def llama4_entries(model: moe.Config) -> dict[str, object]:
    """Return the config.json entries of attention and of the layers that have experts, except sizes and RoPE.

    Raises ValueError if chunks differ in length.
    """
    attention, layers = model.attention, range(model.layers)
    windows = [attention.windows[i % len(attention.windows)] for i in layers]
    lengths = {window for window in windows if window is not None}
    if len(lengths) > 1:
        raise ValueError(
            f"model.attention.windows={attention.windows} cannot be converted: in Llama4ForCausalLM, all chunks have "
            "the same length."
        )
    kinds = [layer.feed_forward_kind for layer in model.make_layers()]
    return {
        "attention_chunk_size": next(iter(lengths), None),
        "layer_types": [_FULL if window is None else _CHUNKED for window in windows],
        "no_rope_layers": [int(attention.rope_layers[i % len(attention.rope_layers)]) for i in layers],
        "use_qk_norm": attention.qk_norm,
        "attn_temperature_tuning": attention.temperature_slope > 0,
        "attn_scale": attention.temperature_slope or 0.1,
        "floor_scale": attention.temperature_interval,
        "moe_layers": [i for i, kind in enumerate(kinds) if kind != DENSE],
    }


def unsupported_llama4_settings(model: moe.Config) -> list[str]:
    """Return the settings that Llama 4's attention and experts do not have, as `KEY=VALUE`."""
    attention, experts, refusals = model.attention, model.moe, []
    if experts.router is not RouterScores.sigmoid:
        refusals.append(f"model.moe.router={experts.router.value}")
    if experts.shared_experts != 1:
        refusals.append(f"model.moe.shared_experts={experts.shared_experts}")
    if attention.window_kind is not WindowKind.chunked and any(attention.windows):
        refusals.append(f"model.attention.window_kind={attention.window_kind.value}")
    return refusals
