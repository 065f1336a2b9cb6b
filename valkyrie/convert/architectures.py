"""Converts a Hugging Face config.json to model settings and back. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from valkyrie.convert import gpt2
from valkyrie.models.block import Residual
from valkyrie.models.families.gpt import Config
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.models.stack import Stack
from valkyrie.ops.choices import Bias, RopeStretch

Settings = dict[str, Any]
"""Settings of a model by dotted key, without `model.`."""


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers: its name and `model_type`, and how it differs from the others.

    `bias`: the attention projections that always have a bias. If the key `biases_key` is true in config.json, all have
    one.
    """

    name: str
    model_type: str
    qk_norm: bool = False
    windows: bool = False
    bias: Bias = Bias.none
    biases_key: str | None = None
    family: str = "gpt"

    @property
    def is_gpt2(self) -> bool:
        """Whether it belongs to the family gpt2, which has other keys in config.json."""
        return self.family == "gpt2"


KNOWN = {
    kind.name: kind
    for kind in (
        Architecture("LlamaForCausalLM", "llama", biases_key="attention_bias"),
        Architecture("MistralForCausalLM", "mistral", windows=True),
        Architecture("Qwen2ForCausalLM", "qwen2", windows=True, bias=Bias.qkv),
        Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, windows=True, biases_key="attention_bias"),
        Architecture("GPT2LMHeadModel", "gpt2", family="gpt2"),
    )
}
"""The architectures that can be converted."""

_ACTIVATIONS = {"silu": Nonlinearity.swiglu, "gelu_pytorch_tanh": Nonlinearity.geglu, "gelu_new": Nonlinearity.geglu}
_QK_NORM_EPSILON = 1e-6
_SIZES = {
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "mlp": "intermediate_size",
    "attention.heads": "num_attention_heads",
    "context": "max_position_embeddings",
}
"""Numeric settings and their keys in config.json."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config.json. ValueError, with the known ones, if it is not supported."""
    names = config.get("architectures") or []
    known = ", ".join(KNOWN)
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"config.json: architectures={names} must name one. Known: {known}.")
    if names[0] not in KNOWN:
        raise ValueError(f"config.json: architectures={names} is not known. Known: {known}.")
    return KNOWN[names[0]]


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return the settings of a model that computes what a config.json describes.

    ValueError names every key with an unsupported value.
    """
    kind = architecture_of(config)
    sizes = gpt2.SIZES if kind.is_gpt2 else _SIZES
    lacking = [key for key in sizes.values() if not isinstance(config.get(key), int)]
    if lacking:
        raise ValueError(f"config.json: {', '.join(lacking)} must be a whole number for {kind.name}.")
    refusals = [_QUANTISED] if config.get("quantization_config") else []
    refusals += gpt2.refusals_of(config) if kind.is_gpt2 else _unsupported(kind, config)
    if refusals and kind.is_gpt2:
        raise ValueError(f"config.json: {'; '.join(refusals)}.")
    settings: Settings = {setting: config[key] for setting, key in sizes.items()}
    if kind.is_gpt2:
        return settings | gpt2.settings_of(config)
    theta, stretch, trouble = _rope(config)
    refusals += trouble
    heads = config["num_attention_heads"]
    if not config.get("head_dim") and config["hidden_size"] % heads:
        refusals.append(
            f"hidden_size={config['hidden_size']} is not a multiple of num_attention_heads={heads}, and there is no "
            "head_dim"
        )
    windows, trouble = _windows(kind, config)
    refusals += trouble
    if refusals:
        raise ValueError(f"config.json: {'; '.join(refusals)}.")
    return settings | {
        "name": kind.model_type,
        "feed_forward": _ACTIVATIONS[config["hidden_act"]].value,
        "norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention.kv_heads": config.get("num_key_value_heads") or heads,
        "attention.head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "attention.rope_theta": theta,
        "attention.bias": _bias(kind, config).value,
        "attention.qk_norm": kind.qk_norm,
        "attention.windows": windows,
        **stretch,
    }


def config_of(model: Stack) -> dict[str, Any]:
    """Return the config.json of a model. ValueError names every setting that no known architecture supports."""
    is_gpt2 = isinstance(model, gpt2.Config)
    if refusals := gpt2.not_theirs(model) if is_gpt2 else _not_theirs(model):
        raise ValueError(
            f"no architecture of {', '.join(KNOWN)} has {'; '.join(refusals)}: this model stays in Valkyrie's form."
        )
    if is_gpt2:
        return gpt2.config_of(model)
    assert isinstance(model, Config)
    attention, lists_windows = model.attention, any(w is not None for w in model.attention.windows)
    name = _name_of(attention.qk_norm, attention.bias, lists_windows)
    activations = {kind: key for key, kind in reversed(_ACTIVATIONS.items())}
    config: dict[str, Any] = {"architectures": [name], "model_type": KNOWN[name].model_type}
    values = {"vocab_size": model.vocab_size, "embed": model.embed, "layers": model.layers, "mlp": model.mlp}
    values |= {"attention.heads": attention.heads, "context": model.context}
    config |= {_SIZES[setting]: value for setting, value in values.items()}
    config |= {
        "hidden_act": activations[model.feed_forward],
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": attention.rope_theta,
        "rope_scaling": _as_scaling(attention.rope_stretch),
        "rope_parameters": {"rope_theta": attention.rope_theta}
        | (_as_scaling(attention.rope_stretch) or {"rope_type": "default"}),
    }
    if KNOWN[name].biases_key:
        config["attention_bias"] = attention.bias is Bias.all
    if name == "LlamaForCausalLM":
        config["mlp_bias"] = False
    if KNOWN[name].windows:
        config |= _as_sliding(name, model)
    return config


_QUANTISED = "quantization_config: weights are read as float32, bfloat16 or float16 alone"


def _unsupported(kind: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json with values that no setting supports."""
    refusals = []
    if config.get("hidden_act") not in _ACTIVATIONS:
        refusals.append(f"hidden_act={config.get('hidden_act')} is not one of {', '.join(_ACTIVATIONS)}")
    if config.get("mlp_bias"):
        refusals.append("mlp_bias=true adds biases that the feed-forward here does not have")
    epsilon = config.get("rms_norm_eps", 1e-6)
    if kind.qk_norm and epsilon != _QK_NORM_EPSILON:
        refusals.append(f"rms_norm_eps={epsilon:g}: norms of queries and keys have {_QK_NORM_EPSILON:g} here")
    return refusals


def _bias(kind: Architecture, config: Mapping[str, Any]) -> Bias:
    return Bias.all if kind.biases_key and config.get(kind.biases_key) else kind.bias


def _name_of(qk_norm: bool, bias: Bias, windows: bool) -> str:
    """Return the architecture with these features."""
    if qk_norm:
        return "Qwen3ForCausalLM"
    if bias is Bias.qkv:
        return "Qwen2ForCausalLM"
    return "MistralForCausalLM" if windows else "LlamaForCausalLM"


_STRETCH = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "context",
}
"""The keys of Llama 3's rope_scaling, and our names for them."""


def _as_scaling(stretch: RopeStretch) -> dict[str, Any] | None:
    if stretch.factor == 1:
        return None
    return {"rope_type": "llama3"} | {theirs: getattr(stretch, ours) for theirs, ours in _STRETCH.items()}


def _rope(config: Mapping[str, Any]) -> tuple[float, Settings, list[str]]:
    """Return the RoPE base, its scaling settings, and the reasons why they are unsupported."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    kind = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    refusals = []
    stretch = {}
    if kind == "llama3" and (lacking := [name for name in _STRETCH if name not in given]):
        refusals.append(f"{key} has no {', '.join(lacking)}, which rope_type=llama3 needs")
    elif kind == "llama3":
        stretch = {f"attention.rope_stretch.{ours}": given[theirs] for theirs, ours in _STRETCH.items()}
    elif kind != "default":
        refusals.append(f"{key}.rope_type={kind} is not supported. Known: default, llama3")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        refusals.append(f"partial_rotary_factor={partial}: whole heads are rotated here")
    return float(theta), stretch, refusals


def _windows(kind: Architecture, config: Mapping[str, Any]) -> tuple[list[int | None], list[str]]:
    """Return the window of each layer (a single one if all are equal), and the reasons why they are unsupported."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if not kind.windows or window is None or not config.get("use_sliding_window", True):
        return [None], []
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    by_type = {"full_attention": None, "sliding_attention": window}
    if unknown := sorted({*types} - by_type.keys()):
        return [None], [f"layer_types has {', '.join(unknown)}, and only {' and '.join(by_type)} are known"]
    windows = [by_type[layer] for layer in types]
    return (windows[:1] if len({*windows}) == 1 else windows), []


def _as_sliding(name: str, model: Config) -> dict[str, Any]:
    """Return the config.json entries for the windows of a model's layers."""
    windows = [model.attention.windows[i % len(model.attention.windows)] for i in range(model.layers)]
    lengths = {window for window in windows if window is not None}
    if not lengths:
        return {"sliding_window": None} | ({"use_sliding_window": False} if name != "MistralForCausalLM" else {})
    if len(lengths) > 1 or (name == "MistralForCausalLM" and None in windows):
        raise ValueError(
            f"model.attention.windows={model.attention.windows}: {name} has one window for "
            f"{'all layers' if name == 'MistralForCausalLM' else 'those layers that have one'}."
        )
    sliding: dict[str, Any] = {"sliding_window": lengths.pop()}
    if name != "MistralForCausalLM":
        types = ["full_attention" if window is None else "sliding_attention" for window in windows]
        sliding |= {"use_sliding_window": True, "layer_types": types, "max_window_layers": windows.count(None)}
    return sliding


def _not_theirs(model: Stack) -> list[str]:
    """Return the settings of a model that no known architecture supports, written as on the command line."""
    if type(model) is not Config:
        return [f"model.family={model.family}"]
    attention, theirs = model.attention, Config()
    plain = ["residual", "embedding_scale", "logits_soft_cap", "feed_forward_after", "block_pattern"]
    refusals = [
        f"model.{key}={_text(getattr(model, key))}" for key in plain if getattr(model, key) != getattr(theirs, key)
    ]
    ours = ["causal", "global_tokens", "soft_cap", "dilations"]
    refusals += [
        f"model.attention.{key}={_text(getattr(attention, key))}"
        for key in ours
        if getattr(attention, key) != getattr(theirs.attention, key)
    ]
    if model.feed_forward not in _ACTIVATIONS.values():
        refusals.append(f"model.feed_forward={model.feed_forward.value}")
    if attention.rope_theta is None:
        refusals.append("model.attention.rope_theta=null")
    if attention.bias is Bias.qkv and attention.qk_norm:
        refusals.append("model.attention.bias=qkv beside qk_norm=true")
    if attention.bias is Bias.all and any(window is not None for window in attention.windows) and not attention.qk_norm:
        refusals.append("model.attention.bias=all beside windows")
    if attention.qk_norm and model.norm_epsilon != _QK_NORM_EPSILON:
        refusals.append(f"model.norm_epsilon={model.norm_epsilon:g} beside queries and keys normed by 1e-06")
    return refusals


def _text(value: Any) -> str:
    return value.value if isinstance(value, Residual) else str(value)
