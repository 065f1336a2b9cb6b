"""Converts a Hugging Face config.json to model settings and back. Does not import JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from valkyrie.convert.architectures import (
    ARCHITECTURES,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT2,
    GPT_OSS,
    LLAMA,
    LLAMA4,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    Architecture,
    Windows,
    find_architecture,
)
from valkyrie.convert.deepseek import (
    deepseek_entries,
    deepseek_settings,
    unsupported_settings,
    yarn_entries,
    yarn_settings,
)
from valkyrie.convert.llama4 import dense_layers as llama4_dense_layers
from valkyrie.convert.llama4 import llama4_entries, llama4_settings, unsupported_llama4_settings
from valkyrie.models.block import DENSE
from valkyrie.models.families import deepseek, gpt, gpt2, moe
from valkyrie.models.stack import Stack
from valkyrie.ops.choices import Bias, NormSpan, RopeStretch, RouterScores
from valkyrie.records import decode
from valkyrie.trees import get_value, override_text


@dataclass(frozen=True)
class _Rope:
    """Keys of `rope_scaling` and `rope_parameters` in a config.json, with their types."""

    rope_type: str = "default"
    type: str = "default"
    rope_theta: float = 1e4
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class _KeyTypes:
    """Optional keys of a config.json, with the types against which values are checked. The defaults have no effect."""

    hidden_act: str | None = None
    activation_function: str | None = None
    rms_norm_eps: float = 0.0
    layer_norm_epsilon: float = 0.0
    tie_word_embeddings: bool | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    n_inner: int | None = None
    rope_theta: float = 1e4
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    norm_topk_prob: bool | None = None
    q_lora_rank: int | None = None
    first_k_dense_replace: int | None = None
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: int = 1
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


_T = TypeVar("_T")
Setting = str | bool | int | float | None | list[int | None] | list[str] | list[bool]


def model_settings(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the model settings for a config.json. Their keys omit `model.`, as in `attention.heads`.

    Raises ValueError with the keys that have an unsupported value.
    """
    architecture = find_architecture(config)
    own_values = {architecture.other_keys.get(key, key): value for key, value in config.items()}
    config = {**architecture.default_values, **own_values}
    if invalid_keys := [
        key for key in architecture.size_keys.values() if type(config.get(key)) is not int or config[key] < 1
    ]:
        values = ", ".join(f"{key}={config.get(key)!r}" for key in invalid_keys)
        numbers = "a whole number" if len(invalid_keys) == 1 else "whole numbers"
        raise ValueError(f"config.json: {values}, but {architecture.name} needs {numbers} of at least 1.")
    decode(_KeyTypes, dict(config), "config.json")  # raises ValueError for a value of the wrong type
    refusals = _unsupported_values(architecture, config)
    sizes = {setting: config[key] for setting, key in architecture.size_keys.items()}
    embed, heads = sizes["embed"], sizes["attention.heads"]
    architecture_settings: dict[str, Setting] = {}
    if architecture.is_gpt2:
        architecture_settings["mlp"] = config.get("n_inner") or 4 * embed
    elif architecture.has_latents:
        rope, rope_refusals = _rope_settings(config, architecture)
        latent, latent_refusals = deepseek_settings(config, architecture.has_selection_bias)
        refusals += rope_refusals + latent_refusals
        architecture_settings |= rope | latent
    else:
        architecture_settings, attention_refusals = _attention_settings(architecture, config)
        refusals += attention_refusals
    if refusals:
        raise ValueError(f"config.json: {'; '.join(refusals)}.")
    if architecture.has_experts:
        architecture_settings = _expert_settings(architecture, config) | architecture_settings
    if not architecture.has_latents:
        architecture_settings |= {
            "attention.kv_heads": config.get("num_key_value_heads") or heads,
            "attention.head_dim": config.get("head_dim") or embed // heads,
        }
    epsilon, default = architecture.epsilon_entry
    return {
        **sizes,
        "name": architecture.model_type,
        "feed_forward": architecture.activations[_activation_name(architecture, config)].value,
        "norm_epsilon": float(config.get(epsilon, default)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", architecture.tie_word_embeddings)),
        **architecture_settings,
    }


def _attention_settings(architecture: Architecture, config: Mapping[str, Any]) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings of attention except sizes, and a message for each unsupported value."""
    rope, rope_refusals = _rope_settings(config, architecture)
    windows, window_refusals = _window_settings(architecture, config)
    all_biases = bool(architecture.biases_key and config.get(architecture.biases_key))
    settings: dict[str, Setting] = {
        **rope,
        "attention.windows": windows,
        "attention.qk_norm": architecture.qk_norm is not None,
        "attention.bias": (Bias.all if all_biases else architecture.bias).value,
    }
    if architecture.qk_norm is not None:
        settings |= {
            "attention.qk_norm_span": architecture.qk_norm.value,
            "attention.qk_norm_epsilon": float(config.get(*architecture.epsilon_entry)),
        }
    if architecture.has_sinks:
        settings["attention.sinks"] = True
    if architecture is LLAMA4:
        llama4, window_refusals = llama4_settings(config)
        settings |= llama4
        layer_kinds = list(zip(llama4["attention.windows"], llama4["attention.rope_layers"], strict=False))
        pattern = _shortest_pattern(layer_kinds)
        settings["attention.windows"] = windows = [window for window, _ in pattern]
        settings["attention.rope_layers"] = [is_rotated for _, is_rotated in pattern]
    if len(windows) < config["num_hidden_layers"] and architecture.has_experts:
        settings["block_pattern"] = ["attention"] * len(windows)  # one scan over all repetitions of the pattern
    return settings, rope_refusals + window_refusals


def to_config_json(model: Stack) -> dict[str, object]:
    """Return the config.json of a model.

    Raises ValueError if no architecture supports the model. The message names its family or the unsupported settings.
    """
    if not isinstance(model, _EXPORTABLE) or type(model) not in _EXPORTABLE:
        raise ValueError(
            f"model.family={model.family} cannot be converted to one of {', '.join(ARCHITECTURES)}. Only "
            f"{', '.join(f'model.family={family.family}' for family in _EXPORTABLE)} can."
        )
    architecture = _choose_architecture(model)
    if refusals := _unsupported_settings(model, architecture):
        raise ValueError(
            f"{', '.join(refusals)} cannot be converted: {architecture.name}, the closest Hugging Face architecture, "
            f"does not support {'it' if len(refusals) == 1 else 'them'}."
        )
    nonlinearity = model.moe.kind if isinstance(model, moe.Config) else model.feed_forward
    name = next(name for name, activation in architecture.activations.items() if activation is nonlinearity)
    config: dict[str, object] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    config |= {key: get_value(model, setting) for setting, key in architecture.size_keys.items()}
    config |= {architecture.activation_key: name, architecture.epsilon_entry[0]: model.norm_epsilon}
    config["tie_word_embeddings"] = model.tie_embeddings
    if architecture.is_gpt2:
        return config | {"n_inner": None if model.mlp == 4 * model.embed else model.mlp}
    if isinstance(model, deepseek.Config):
        return config | deepseek_entries(model) | _expert_entries(architecture, model)
    attention = model.attention
    scaling = yarn_entries(attention.yarn) or _rope_scaling(attention.rope_stretch)
    config |= {
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": attention.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": attention.rope_theta, **(scaling or {"rope_type": "default"})},
    }
    if architecture.biases_key:
        config[architecture.biases_key] = attention.bias is Bias.all
    if architecture is LLAMA:
        config["mlp_bias"] = False
    if isinstance(model, moe.Config):
        config |= _expert_entries(architecture, model)
        config |= llama4_entries(model) if architecture is LLAMA4 else {}
    return {**config, **_window_entries(architecture, model)}


def _activation_name(architecture: Architecture, config: Mapping[str, Any]) -> str:
    return str(config.get(architecture.activation_key, "gelu_new" if architecture.is_gpt2 else None))


def _unsupported_values(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Return a message for each unsupported value of a config.json, except those of RoPE and windows."""
    refusals = []
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if quantization and (method is None or method != architecture.quantization):
        supported = f"float32, bfloat16, float16{f', {name}' if (name := architecture.quantization) else ''}"
        refusals.append(f"quantization_config: only {supported} weights are supported")
    activation = _activation_name(architecture, config)
    if activation not in architecture.activations:
        refusals.append(
            f"{architecture.activation_key}={activation} is not one of {', '.join(architecture.activations)}"
        )
    for key, value in architecture.fixed_values.items():
        actual = config.get(key, value)
        if (bool(actual) if isinstance(value, bool) else actual) != value:
            refusals.append(f"{key}={override_text(actual)} is not supported")
    embed, heads = architecture.size_keys["embed"], architecture.size_keys["attention.heads"]
    if architecture.has_latents:
        return refusals
    if not config.get("head_dim") and config[embed] % max(config[heads], 1):
        refusals.append(
            f"{embed}={config[embed]} is not a multiple of {heads}={config[heads]}, and there is no head_dim"
        )
    return refusals


_EXPORTABLE = (gpt.Config, gpt2.Config, moe.Config, deepseek.Config)
"""Families that can be converted to config.json."""


def _choose_architecture(model: gpt.Config | gpt2.Config | moe.Config) -> Architecture:
    """Return the architecture that is closest to a model, judging by its attention and router."""
    if isinstance(model, deepseek.Config):
        return DEEPSEEK_V3 if model.moe.router is RouterScores.sigmoid else DEEPSEEK_V2
    if isinstance(model, gpt2.Config):
        return GPT2
    if isinstance(model, moe.Config):
        if model.attention.sinks:
            return GPT_OSS
        if model.moe.scale_inputs:
            return LLAMA4
        if not model.attention.qk_norm:
            return MIXTRAL
        return OLMOE if model.attention.qk_norm_span is NormSpan.all_heads else QWEN3_MOE
    if model.attention.qk_norm:
        return QWEN3
    if model.attention.bias is Bias.qkv:
        return QWEN2
    return LLAMA if all(window is None for window in model.attention.windows) else MISTRAL


_ROPE_STRETCH_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "context",
}
"""Fields of `RopeStretch`, by key of Llama 3's rope_scaling."""


def _rope_scaling(stretch: RopeStretch) -> Mapping[str, object] | None:
    if stretch.factor == 1:
        return None
    return {"rope_type": "llama3"} | {
        rope_key: getattr(stretch, field_name) for rope_key, field_name in _ROPE_STRETCH_KEYS.items()
    }


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _without_rope_base(rope: Mapping[str, Any]) -> Mapping[str, object]:
    entries = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    return entries | {"rope_type": _rope_type(rope)}


def _rope_settings(config: Mapping[str, Any], architecture: Architecture) -> tuple[dict[str, Setting], list[str]]:
    """Return the RoPE base and scaling settings, and a message for each unsupported value."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or architecture.default_rope
    rope_type = _rope_type(rope)
    settings: dict[str, Setting] = {
        "attention.rope_theta": float(rope.get("rope_theta", config.get("rope_theta", architecture.rope_theta)))
    }
    refusals = []
    if (scaling := config.get("rope_scaling")) and _without_rope_base(scaling) != _without_rope_base(rope):
        refusals.append("rope_scaling and rope_parameters differ. Remove the wrong one")
    if (outer := config.get("rope_theta")) and (inner := rope.get("rope_theta", outer)) != outer:
        refusals.append(f"rope_theta={outer} and {key}.rope_theta={inner} differ. Remove the wrong one")
    is_llama3 = rope_type == architecture.rope_type == "llama3"
    if is_llama3 and (missing_keys := [name for name in _ROPE_STRETCH_KEYS if name not in rope]):
        refusals.append(f"{key} lacks {', '.join(missing_keys)}, required by rope_type=llama3")
    elif is_llama3:
        settings |= {
            f"attention.rope_stretch.{field_name}": rope[rope_key]
            for rope_key, field_name in _ROPE_STRETCH_KEYS.items()
        }
    elif rope_type == architecture.rope_type == "yarn":
        yarn, yarn_refusals = yarn_settings(rope, key)
        settings |= {f"attention.yarn.{name}": value for name, value in yarn.items()}
        refusals += yarn_refusals
        if yarn["mscale_all_dim"] and not architecture.has_latents:  # transformers scales logits only for latents
            refusals.append(f"{key}.mscale_all_dim={yarn['mscale_all_dim']:g} is not supported")
    elif rope_type != "default":
        supported = architecture.rope_type
        refusals.append(f"{key}.rope_type={rope_type} is not supported, only default and {supported} are")
    rotary_factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if rotary_factor != 1.0:
        refusals.append(f"partial_rotary_factor={rotary_factor} is not supported, only 1 is")
    return settings, refusals


def _window_settings(architecture: Architecture, config: Mapping[str, Any]) -> tuple[list[int | None], list[str]]:
    """Return the window of each layer (a single one if all are equal), and a message for each unsupported value."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    is_on = config.get("use_sliding_window", not architecture.has_window_switch)
    if architecture.windows is Windows.none or window is None or not is_on:
        return [None], []
    if architecture.windows is Windows.all:
        return [window], []
    layer_types = config.get("layer_types")
    if layer_types is None and architecture.windows is Windows.alternating:
        layer_types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    elif layer_types is None:
        full_layers = config.get("max_window_layers", 0)
        layer_types = ["full_attention" if i < full_layers else "sliding_attention" for i in range(layers)]
    window_by_type = {"full_attention": None, "sliding_attention": window}
    if unknown_types := sorted({*layer_types} - window_by_type.keys()):
        return [None], [
            f"layer_types has {', '.join(unknown_types)}, but only {' and '.join(window_by_type)} are supported"
        ]
    windows = [window_by_type[layer_type] for layer_type in layer_types]
    if architecture.windows is Windows.alternating:
        return _shortest_pattern(windows), []
    return (windows[:1] if len({*windows}) == 1 else windows), []


def _window_entries(architecture: Architecture, model: gpt.Config | gpt2.Config | moe.Config) -> Mapping[str, object]:
    """Return the config.json entries for the windows of a model's layers.

    Raises ValueError if windows differ in length, or if some layers have no window and the architecture needs the same
    in all.
    """
    if architecture.windows is Windows.none:
        return {}
    windows = [model.attention.windows[i % len(model.attention.windows)] for i in range(model.layers)]
    lengths = {window for window in windows if window is not None}
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    if not lengths and architecture.windows is not Windows.alternating:
        return {"sliding_window": None} | ({"use_sliding_window": False} if architecture.has_window_switch else {})
    needs_equal = architecture.windows is Windows.all
    if len(lengths) > 1 or (needs_equal and None in windows):
        raise ValueError(
            f"model.attention.windows={model.attention.windows} cannot be converted: in {architecture.name}, "
            f"{'all layers have the same window' if needs_equal else 'all windows have the same length'}."
        )
    if needs_equal:
        return {"sliding_window": lengths.pop()} | (
            {"use_sliding_window": True} if architecture.has_window_switch else {}
        )
    if architecture.windows is Windows.alternating:
        return {"sliding_window": next(iter(lengths), None), "layer_types": layer_types}
    sliding_entries = {"use_sliding_window": True, "layer_types": layer_types, "max_window_layers": windows.count(None)}
    return {"sliding_window": lengths.pop(), **sliding_entries}


def _expert_settings(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of experts and of the layers that have them, except sizes."""
    dense_layers = llama4_dense_layers(config) if architecture is LLAMA4 else []
    if architecture.lists_dense_layers:
        listed_layers, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
        if step < 1:
            raise ValueError(f"config.json: decoder_sparse_step={step} must be at least 1.")
        dense_layers = [i for i in range(config["num_hidden_layers"]) if i in listed_layers or (i + 1) % step]
    kinds = [DENSE if i in dense_layers else "moe" for i in range(config["num_hidden_layers"])]
    normalize_key = architecture.normalize_key
    biases: dict[str, Setting] = {"moe.biases": True} if architecture.has_expert_biases else {}
    return biases | {
        "moe.kind": architecture.activations[_activation_name(architecture, config)].value,
        "moe.normalize": normalize_key is None or bool(config.get(normalize_key)),
        "feed_forward_pattern": _shortest_pattern(kinds),
    }


def _shortest_pattern(kinds: Sequence[_T]) -> list[_T]:
    """Return the shortest list that gives `kinds` if repeated."""
    lengths = range(1, len(kinds) + 1)
    return next(list(kinds[:n]) for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))


def _expert_entries(architecture: Architecture, model: moe.Config) -> dict[str, object]:
    """Return the config.json entries of experts and of the layers that have them, except sizes."""
    entries: dict[str, object] = {architecture.normalize_key: model.moe.normalize} if architecture.normalize_key else {}
    if architecture.lists_dense_layers:
        layers = enumerate(model.make_layers())
        entries |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, layer in layers if layer.feed_forward_kind == DENSE],
        }
    return entries


def _unsupported_settings(model: gpt.Config | gpt2.Config | moe.Config, architecture: Architecture) -> list[str]:
    """Return the settings of a model that the architecture does not support, as `KEY=VALUE` for an error message."""
    defaults = type(model)()
    refusals = [
        f"model.{key}={override_text(get_value(model, key))}"
        for key in architecture.default_only_settings
        if get_value(model, key) != get_value(defaults, key)
    ]
    used_feed_forwards = model.used_feed_forwards
    if DENSE in used_feed_forwards and model.feed_forward not in architecture.activations.values():
        refusals.append(f"model.feed_forward={model.feed_forward.value}")
    if isinstance(model, moe.Config):
        if model.moe.kind not in architecture.activations.values():
            refusals.append(f"model.moe.kind={model.moe.kind.value}")
        elif DENSE in used_feed_forwards and model.moe.kind is not model.feed_forward:
            refusals.append(f"model.feed_forward={model.feed_forward.value} with moe.kind={model.moe.kind.value}")
        if architecture.normalize_key is None and not model.moe.normalize:
            refusals.append("model.moe.normalize=false")
        if architecture.has_expert_biases and not model.moe.biases:
            refusals.append("model.moe.biases=false")
    if isinstance(model, deepseek.Config):
        return refusals + unsupported_settings(model, architecture.has_selection_bias)
    attention = model.attention
    if architecture.is_gpt2:
        if attention.kv_heads != attention.heads:
            refusals.append(f"model.attention.kv_heads={attention.kv_heads} with {attention.heads} heads")
        if attention.heads * attention.head_dim != model.embed:
            sizes = f"{attention.heads} heads and model.embed={model.embed}"
            refusals.append(f"model.attention.head_dim={attention.head_dim} with {sizes}")
        return refusals
    if attention.rope_theta is None:
        refusals.append("model.attention.rope_theta=null")
    if attention.yarn.factor != 1 and (attention.yarn.mscale, attention.yarn.mscale_all_dim) != (1, 0):
        mscale_all_dim = f"yarn.mscale_all_dim={attention.yarn.mscale_all_dim:g}"
        refusals.append(f"model.attention.yarn.mscale={attention.yarn.mscale:g} with {mscale_all_dim}")
    if attention.bias not in (architecture.bias, Bias.all if architecture.biases_key else architecture.bias):
        refusals.append(f"model.attention.bias={attention.bias.value}")
    if attention.qk_norm and attention.qk_norm_scale is not architecture.qk_norm_scale:
        refusals.append(f"model.attention.qk_norm_scale={override_text(attention.qk_norm_scale)}")
    if isinstance(model, moe.Config) and architecture is LLAMA4:
        refusals += unsupported_llama4_settings(model)
    if attention.qk_norm and attention.qk_norm_span is not architecture.qk_norm:
        refusals.append(f"model.attention.qk_norm_span={attention.qk_norm_span.value}")
    if attention.qk_norm and model.norm_epsilon != attention.qk_norm_epsilon:
        norm_epsilon = f"model.norm_epsilon={model.norm_epsilon:g}"
        refusals.append(f"model.attention.qk_norm_epsilon={attention.qk_norm_epsilon:g} with {norm_epsilon}")
    return refusals
