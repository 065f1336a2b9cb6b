"""Converts a Hugging Face config.json to model settings and back. Does not import JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from valkyrie.models.families import gpt, gpt2
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.models.stack import Stack
from valkyrie.ops.choices import Bias, RopeStretch
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
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


Setting = str | bool | int | float | list[int | None]

_DEFAULT_ONLY = ("residual", "embedding_scale", "logits_soft_cap", "feed_forward_after", "block_pattern")
_DEFAULT_ONLY += tuple(f"attention.{key}" for key in ("causal", "global_tokens", "soft_cap", "dilations"))
_GPT2_DEFAULT_ONLY = (*_DEFAULT_ONLY, *(f"attention.{key}" for key in ("windows", "rope_theta", "qk_norm", "bias")))


@dataclass(frozen=True)
class Architecture:
    """A model class of the library `transformers`, and how its config.json maps to model settings.

    The defaults of the fields are Llama's.

    Args:
        name: Name of the class.
        model_type: Value of `model_type`.
        bias: Attention projections that always have a bias.
        biases_key: Key that adds a bias to all attention projections if true, or None if there is no such key.
        qk_norm: Whether queries and keys are normalized.
        supports_windows: Whether layers can have a sliding window.
        family: Model family that implements the architecture.
        size_keys: Maps each model setting that is a size, such as `embed`, to its key in config.json.
        activation_key: Key of the nonlinearity in config.json.
        activations: Nonlinearity for each supported value of that key. If several values map to the same nonlinearity,
            exporting writes the first.
        epsilon_entry: Key and default of the norms' epsilon.
        tie_word_embeddings: Default of `tie_word_embeddings`.
        fixed_values: Keys with a single supported value, which is also their default.
        default_only_settings: Model settings that must have the default of the family.
    """

    name: str
    model_type: str
    bias: Bias = Bias.none
    biases_key: str | None = None
    qk_norm: bool = False
    supports_windows: bool = False
    family: str = "gpt"
    size_keys: Mapping[str, str] = field(
        default_factory=lambda: {
            "vocab_size": "vocab_size",
            "embed": "hidden_size",
            "layers": "num_hidden_layers",
            "mlp": "intermediate_size",
            "attention.heads": "num_attention_heads",
            "context": "max_position_embeddings",
        }
    )
    activation_key: str = "hidden_act"
    activations: Mapping[str, Nonlinearity] = field(
        default_factory=lambda: {
            "silu": Nonlinearity.swiglu,
            "gelu_pytorch_tanh": Nonlinearity.geglu,
            "gelu_new": Nonlinearity.geglu,
        }
    )
    epsilon_entry: tuple[str, float] = ("rms_norm_eps", 1e-6)
    tie_word_embeddings: bool = False
    fixed_values: Mapping[str, bool] = field(default_factory=lambda: {"mlp_bias": False})
    default_only_settings: tuple[str, ...] = _DEFAULT_ONLY

    @property
    def is_gpt2(self) -> bool:
        """Whether the family is gpt2, with learned positions and other tensor names."""
        return self.family == "gpt2"


LLAMA, MISTRAL, QWEN2, QWEN3, GPT2 = (
    Architecture("LlamaForCausalLM", "llama", biases_key="attention_bias"),
    Architecture("MistralForCausalLM", "mistral", supports_windows=True),
    Architecture("Qwen2ForCausalLM", "qwen2", supports_windows=True, bias=Bias.qkv),
    Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, supports_windows=True, biases_key="attention_bias"),
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        family="gpt2",
        size_keys={
            "vocab_size": "vocab_size",
            "embed": "n_embd",
            "layers": "n_layer",
            "attention.heads": "n_head",
            "context": "n_positions",
        },
        activation_key="activation_function",
        activations={"gelu_new": Nonlinearity.gelu, "gelu_pytorch_tanh": Nonlinearity.gelu, "relu": Nonlinearity.relu},
        epsilon_entry=("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=True,
        fixed_values={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        default_only_settings=_GPT2_DEFAULT_ONLY,
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)}
"""The supported architectures, by class name."""
_QK_NORM_EPSILON = 1e-6


def find_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config.json. Raises ValueError if it is not supported."""
    names = config.get("architectures") or []
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(f"config.json: architectures={names} must name a single architecture. Supported: {supported}.")
    if names[0] not in ARCHITECTURES:
        raise ValueError(f"config.json: architectures={names} is not supported. Supported: {supported}.")
    architecture = ARCHITECTURES[names[0]]
    if (model_type := config.get("model_type", architecture.model_type)) != architecture.model_type:
        raise ValueError(
            f"config.json: model_type={model_type} contradicts architectures={names}, which needs "
            f"model_type={architecture.model_type}. Correct the wrong one."
        )
    return architecture


def model_settings(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the model settings for a config.json. Their keys omit `model.`, as in `attention.heads`.

    Raises ValueError with the keys that have an unsupported value.
    """
    architecture = find_architecture(config)
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
    else:
        rope, rope_refusals = _rope_settings(config)
        windows, window_refusals = _window_settings(architecture, config)
        refusals += rope_refusals + window_refusals
        all_biases = bool(architecture.biases_key and config.get(architecture.biases_key))
        architecture_settings |= {
            **rope,
            "attention.windows": windows,
            "attention.qk_norm": architecture.qk_norm,
            "attention.bias": (Bias.all if all_biases else architecture.bias).value,
        }
    if refusals:
        raise ValueError(f"config.json: {'; '.join(refusals)}.")
    epsilon, default = architecture.epsilon_entry
    return {
        **sizes,
        "name": architecture.model_type,
        "feed_forward": architecture.activations[_activation_name(architecture, config)].value,
        "norm_epsilon": float(config.get(epsilon, default)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", architecture.tie_word_embeddings)),
        "attention.kv_heads": config.get("num_key_value_heads") or heads,
        "attention.head_dim": config.get("head_dim") or embed // heads,
        **architecture_settings,
    }


def to_config_json(model: Stack) -> dict[str, object]:
    """Return the config.json of a model.

    Raises ValueError if no architecture supports the model. The message names its family or the unsupported settings.
    """
    if type(model) not in (gpt.Config, gpt2.Config):
        raise ValueError(
            f"model.family={model.family} cannot be converted to one of {', '.join(ARCHITECTURES)}. Only "
            "model.family=gpt and model.family=gpt2 can."
        )
    assert isinstance(model, gpt.Config | gpt2.Config)
    architecture = _choose_architecture(model)
    if refusals := _unsupported_settings(model, architecture):
        raise ValueError(
            f"{', '.join(refusals)} cannot be converted: {architecture.name}, the closest Hugging Face architecture, "
            f"does not support {'it' if len(refusals) == 1 else 'them'}."
        )
    name = next(name for name, activation in architecture.activations.items() if activation is model.feed_forward)
    config: dict[str, object] = {"architectures": [architecture.name], "model_type": architecture.model_type}
    config |= {key: get_value(model, setting) for setting, key in architecture.size_keys.items()}
    config |= {architecture.activation_key: name, architecture.epsilon_entry[0]: model.norm_epsilon}
    config["tie_word_embeddings"] = model.tie_embeddings
    if architecture.is_gpt2:
        return config | {"n_inner": None if model.mlp == 4 * model.embed else model.mlp}
    attention = model.attention
    scaling = _rope_scaling(attention.rope_stretch)
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
    return {**config, **(_window_entries(architecture, model) if architecture.supports_windows else {})}


def _activation_name(architecture: Architecture, config: Mapping[str, Any]) -> str:
    return str(config.get(architecture.activation_key, "gelu_new" if architecture.is_gpt2 else None))


def _unsupported_values(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Return a message for each unsupported value of a config.json, except those of RoPE and windows."""
    refusals = []
    if config.get("quantization_config"):
        refusals.append("quantization_config: only float32, bfloat16 and float16 weights are supported")
    activation = _activation_name(architecture, config)
    if activation not in architecture.activations:
        refusals.append(
            f"{architecture.activation_key}={activation} is not one of {', '.join(architecture.activations)}"
        )
    for key, value in architecture.fixed_values.items():
        if bool(config.get(key, value)) != value:
            refusals.append(f"{key}={override_text(not value)} is not supported")
    epsilon = config.get(*architecture.epsilon_entry)
    if architecture.qk_norm and epsilon != _QK_NORM_EPSILON:
        refusals.append(
            f"rms_norm_eps={epsilon:g} is not supported with query and key norms, only {_QK_NORM_EPSILON:g} is"
        )
    embed, heads = architecture.size_keys["embed"], architecture.size_keys["attention.heads"]
    if not config.get("head_dim") and config[embed] % max(config[heads], 1):
        refusals.append(
            f"{embed}={config[embed]} is not a multiple of {heads}={config[heads]}, and there is no head_dim"
        )
    return refusals


def _choose_architecture(model: gpt.Config | gpt2.Config) -> Architecture:
    """Return the architecture that is closest to a model, judging by its attention."""
    if not isinstance(model, gpt.Config):
        return GPT2
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


def _rope_settings(config: Mapping[str, Any]) -> tuple[dict[str, Setting], list[str]]:
    """Return the RoPE base and scaling settings, and a message for each unsupported value."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    rope_type = _rope_type(rope)
    settings: dict[str, Setting] = {
        "attention.rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    }
    refusals = []
    if (scaling := config.get("rope_scaling")) and _without_rope_base(scaling) != _without_rope_base(rope):
        refusals.append("rope_scaling and rope_parameters differ. Remove the wrong one")
    if (outer := config.get("rope_theta")) and (inner := rope.get("rope_theta", outer)) != outer:
        refusals.append(f"rope_theta={outer} and {key}.rope_theta={inner} differ. Remove the wrong one")
    if rope_type == "llama3" and (missing_keys := [name for name in _ROPE_STRETCH_KEYS if name not in rope]):
        refusals.append(f"{key} lacks {', '.join(missing_keys)}, required by rope_type=llama3")
    elif rope_type == "llama3":
        settings |= {
            f"attention.rope_stretch.{field_name}": rope[rope_key]
            for rope_key, field_name in _ROPE_STRETCH_KEYS.items()
        }
    elif rope_type != "default":
        refusals.append(f"{key}.rope_type={rope_type} is not supported, only default and llama3 are")
    rotary_factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if rotary_factor != 1.0:
        refusals.append(f"partial_rotary_factor={rotary_factor} is not supported, only 1 is")
    return settings, refusals


def _window_settings(architecture: Architecture, config: Mapping[str, Any]) -> tuple[list[int | None], list[str]]:
    """Return the window of each layer (a single one if all are equal), and a message for each unsupported value."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if not architecture.supports_windows or window is None or not config.get("use_sliding_window", True):
        return [None], []
    layer_types = config.get("layer_types")
    if layer_types is None:
        full_layers = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
        layer_types = ["full_attention" if i < full_layers else "sliding_attention" for i in range(layers)]
    window_by_type = {"full_attention": None, "sliding_attention": window}
    if unknown_types := sorted({*layer_types} - window_by_type.keys()):
        return [None], [
            f"layer_types has {', '.join(unknown_types)}, but only {' and '.join(window_by_type)} are supported"
        ]
    windows = [window_by_type[layer_type] for layer_type in layer_types]
    return (windows[:1] if len({*windows}) == 1 else windows), []


def _window_entries(architecture: Architecture, model: gpt.Config | gpt2.Config) -> Mapping[str, object]:
    """Return the config.json entries for the windows of a model's layers.

    Raises ValueError if windows differ in length, or for Mistral if some layers have no window.
    """
    windows = [model.attention.windows[i % len(model.attention.windows)] for i in range(model.layers)]
    lengths = {window for window in windows if window is not None}
    if not lengths:
        return {"sliding_window": None} | ({} if architecture is MISTRAL else {"use_sliding_window": False})
    if len(lengths) > 1 or (architecture is MISTRAL and None in windows):
        raise ValueError(
            f"model.attention.windows={model.attention.windows} cannot be converted: in {architecture.name}, "
            f"{'all layers have the same window' if architecture is MISTRAL else 'all windows have the same length'}."
        )
    if architecture is MISTRAL:
        return {"sliding_window": lengths.pop()}
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sliding_entries = {"use_sliding_window": True, "layer_types": layer_types, "max_window_layers": windows.count(None)}
    return {"sliding_window": lengths.pop(), **sliding_entries}


def _unsupported_settings(model: gpt.Config | gpt2.Config, architecture: Architecture) -> list[str]:
    """Return the settings of a model that the architecture does not support, as `KEY=VALUE` for an error message."""
    attention, defaults = model.attention, type(model)()
    refusals = [
        f"model.{key}={override_text(get_value(model, key))}"
        for key in architecture.default_only_settings
        if get_value(model, key) != get_value(defaults, key)
    ]
    if model.feed_forward not in architecture.activations.values():
        refusals.append(f"model.feed_forward={model.feed_forward.value}")
    if architecture.is_gpt2:
        if attention.kv_heads != attention.heads:
            refusals.append(f"model.attention.kv_heads={attention.kv_heads} with {attention.heads} heads")
        if attention.heads * attention.head_dim != model.embed:
            sizes = f"{attention.heads} heads and model.embed={model.embed}"
            refusals.append(f"model.attention.head_dim={attention.head_dim} with {sizes}")
        return refusals
    if attention.rope_theta is None:
        refusals.append("model.attention.rope_theta=null")
    if attention.bias is Bias.qkv and attention.qk_norm:
        refusals.append("model.attention.bias=qkv with qk_norm=true")
    if attention.bias is Bias.all and architecture is MISTRAL:
        refusals.append("model.attention.bias=all with windows")
    if attention.qk_norm and model.norm_epsilon != _QK_NORM_EPSILON:
        refusals.append(f"model.norm_epsilon={model.norm_epsilon:g} with qk_norm=true (only 1e-06 is supported)")
    return refusals
