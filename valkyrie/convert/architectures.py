"""Converts a Hugging Face config.json to model settings and back. Imports no JAX."""

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
    """The types of the keys of `rope_scaling` and `rope_parameters`."""

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
    """The types of the optional keys of a config.json. The defaults depend on the architecture."""

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

_PLAIN = ("residual", "embedding_scale", "logits_soft_cap", "feed_forward_after", "block_pattern")
_PLAIN += tuple(f"attention.{key}" for key in ("causal", "global_tokens", "soft_cap", "dilations"))
_GPT2_PLAIN = (*_PLAIN, *(f"attention.{key}" for key in ("windows", "rope_theta", "qk_norm", "bias")))


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers, and how its config.json maps to the settings of a model. Defaults are Llama's.

    Args:
        name: The class.
        model_type: Its `model_type`.
        bias: The attention projections that always have a bias.
        biases_key: A key that gives all of them one if true, or None.
        qk_norm: Whether queries and keys are normalised.
        windows: Whether layers can have a sliding window.
        family: The model family that computes the same.
        sizes: Numeric settings and their keys.
        activation: Key of the nonlinearity.
        activations: Supported values of that key. If several mean the same, the first is written.
        epsilon: Key of the norms' epsilon, and its default.
        tied: Default of `tie_word_embeddings`.
        only: Keys with one supported value, which is also their default.
        plain: Settings that must have the default of the family.
    """

    name: str
    model_type: str
    bias: Bias = Bias.none
    biases_key: str | None = None
    qk_norm: bool = False
    windows: bool = False
    family: str = "gpt"
    sizes: Mapping[str, str] = field(
        default_factory=lambda: {
            "vocab_size": "vocab_size",
            "embed": "hidden_size",
            "layers": "num_hidden_layers",
            "mlp": "intermediate_size",
            "attention.heads": "num_attention_heads",
            "context": "max_position_embeddings",
        }
    )
    activation: str = "hidden_act"
    activations: Mapping[str, Nonlinearity] = field(
        default_factory=lambda: {
            "silu": Nonlinearity.swiglu,
            "gelu_pytorch_tanh": Nonlinearity.geglu,
            "gelu_new": Nonlinearity.geglu,
        }
    )
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6)
    tied: bool = False
    only: Mapping[str, bool] = field(default_factory=lambda: {"mlp_bias": False})
    plain: tuple[str, ...] = _PLAIN

    @property
    def is_gpt2(self) -> bool:
        """Whether it is of the family gpt2, with learned positions and other tensor names."""
        return self.family == "gpt2"


LLAMA, MISTRAL, QWEN2, QWEN3, GPT2 = (
    Architecture("LlamaForCausalLM", "llama", biases_key="attention_bias"),
    Architecture("MistralForCausalLM", "mistral", windows=True),
    Architecture("Qwen2ForCausalLM", "qwen2", windows=True, bias=Bias.qkv),
    Architecture("Qwen3ForCausalLM", "qwen3", qk_norm=True, windows=True, biases_key="attention_bias"),
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        family="gpt2",
        sizes={
            "vocab_size": "vocab_size",
            "embed": "n_embd",
            "layers": "n_layer",
            "attention.heads": "n_head",
            "context": "n_positions",
        },
        activation="activation_function",
        activations={"gelu_new": Nonlinearity.gelu, "gelu_pytorch_tanh": Nonlinearity.gelu, "relu": Nonlinearity.relu},
        epsilon=("layer_norm_epsilon", 1e-5),
        tied=True,
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        plain=_GPT2_PLAIN,
    ),
)
KNOWN = {kind.name: kind for kind in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)}
"""The architectures that can be converted."""
_QK_NORM_EPSILON = 1e-6


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config.json. ValueError, with the known ones, if it is not supported."""
    names = config.get("architectures") or []
    known = ", ".join(KNOWN)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ValueError(f"config.json: architectures={names} must name one. Known: {known}.")
    if names[0] not in KNOWN:
        raise ValueError(f"config.json: architectures={names} is not known. Known: {known}.")
    return KNOWN[names[0]]


def settings_of(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings, by dotted key without `model.`, of a model that computes what a config.json describes.

    ValueError names every key with an unsupported value.
    """
    kind = architecture_of(config)
    if wrong := [key for key in kind.sizes.values() if type(config.get(key)) is not int or config[key] < 1]:
        values = ", ".join(f"{key}={config.get(key)!r}" for key in wrong)
        raise ValueError(f"config.json: {values}: must be whole numbers of at least 1 for {kind.name}.")
    decode(_KeyTypes, dict(config), "config.json")
    refusals = _unsupported(kind, config)
    sizes = {setting: config[key] for setting, key in kind.sizes.items()}
    embed, heads = sizes["embed"], sizes["attention.heads"]
    others: dict[str, Setting] = {}
    if kind.is_gpt2:
        others["mlp"] = config.get("n_inner") or 4 * embed
    else:
        rope, rope_refusals = _rope(config)
        windows, window_refusals = _windows(kind, config)
        refusals += rope_refusals + window_refusals
        all_biases = bool(kind.biases_key and config.get(kind.biases_key))
        others |= {**rope, "attention.windows": windows, "attention.qk_norm": kind.qk_norm}
        others["attention.bias"] = (Bias.all if all_biases else kind.bias).value
    if refusals:
        raise ValueError(f"config.json: {'; '.join(refusals)}.")
    epsilon, default = kind.epsilon
    return {
        **sizes,
        "name": kind.model_type,
        "feed_forward": kind.activations[_activation(kind, config)].value,
        "norm_epsilon": float(config.get(epsilon, default)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", kind.tied)),
        "attention.kv_heads": config.get("num_key_value_heads") or heads,
        "attention.head_dim": config.get("head_dim") or embed // heads,
        **others,
    }


def config_of(model: Stack) -> dict[str, object]:
    """Return the config.json of a model. ValueError names every setting that no known architecture supports."""
    kind = _kind_of(model)
    if refusals := _unsupported_settings(model, kind):
        raise ValueError(
            f"no architecture of {', '.join(KNOWN)} has {'; '.join(refusals)}: this model cannot be converted."
        )
    assert isinstance(model, gpt.Config | gpt2.Config)
    name = next(name for name, activation in kind.activations.items() if activation is model.feed_forward)
    config: dict[str, object] = {"architectures": [kind.name], "model_type": kind.model_type}
    config |= {key: get_value(model, setting) for setting, key in kind.sizes.items()}
    config |= {kind.activation: name, kind.epsilon[0]: model.norm_epsilon}
    config["tie_word_embeddings"] = model.tie_embeddings
    if kind.is_gpt2:
        return config | {"n_inner": None if model.mlp == 4 * model.embed else model.mlp}
    attention = model.attention
    scaling = _as_scaling(attention.rope_stretch)
    config |= {
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "rope_theta": attention.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": attention.rope_theta, **(scaling or {"rope_type": "default"})},
    }
    if kind.biases_key:
        config[kind.biases_key] = attention.bias is Bias.all
    if kind is LLAMA:
        config["mlp_bias"] = False
    return {**config, **(_as_sliding(kind, model) if kind.windows else {})}


def _activation(kind: Architecture, config: Mapping[str, Any]) -> str:
    return str(config.get(kind.activation, "gelu_new" if kind.is_gpt2 else None))


def _unsupported(kind: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json with values that no setting supports, other than those of RoPE and windows."""
    refusals = []
    if config.get("quantization_config"):
        refusals.append("quantization_config: only float32, bfloat16 and float16 weights are supported")
    activation = _activation(kind, config)
    if activation not in kind.activations:
        refusals.append(f"{kind.activation}={activation} is not one of {', '.join(kind.activations)}")
    for key, value in kind.only.items():
        if bool(config.get(key, value)) != value:
            refusals.append(f"{key}={override_text(not value)} is not supported")
    epsilon = config.get(*kind.epsilon)
    if kind.qk_norm and epsilon != _QK_NORM_EPSILON:
        refusals.append(f"rms_norm_eps={epsilon:g}: the norms of queries and keys have {_QK_NORM_EPSILON:g}")
    embed, heads = kind.sizes["embed"], kind.sizes["attention.heads"]
    if not config.get("head_dim") and config[embed] % max(config[heads], 1):
        refusals.append(
            f"{embed}={config[embed]} is not a multiple of {heads}={config[heads]}, and there is no head_dim"
        )
    return refusals


def _kind_of(model: Stack) -> Architecture:
    """Return the architecture with the features of a model."""
    if not isinstance(model, gpt.Config):
        return GPT2
    if model.attention.qk_norm:
        return QWEN3
    if model.attention.bias is Bias.qkv:
        return QWEN2
    return LLAMA if all(window is None for window in model.attention.windows) else MISTRAL


_STRETCH = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "context",
}
"""The keys of Llama 3's rope_scaling, and our names for them."""


def _as_scaling(stretch: RopeStretch) -> Mapping[str, object] | None:
    if stretch.factor == 1:
        return None
    return {"rope_type": "llama3"} | {theirs: getattr(stretch, ours) for theirs, ours in _STRETCH.items()}


def _rope(config: Mapping[str, Any]) -> tuple[dict[str, Setting], list[str]]:
    """Return the RoPE base and scaling settings, and the reasons why they are unsupported."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    settings: dict[str, Setting] = {
        "attention.rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    }
    refusals = []
    if kind == "llama3" and (lacking := [name for name in _STRETCH if name not in rope]):
        refusals.append(f"{key} has no {', '.join(lacking)}, which rope_type=llama3 needs")
    elif kind == "llama3":
        settings |= {f"attention.rope_stretch.{ours}": rope[theirs] for theirs, ours in _STRETCH.items()}
    elif kind != "default":
        refusals.append(f"{key}.rope_type={kind} is not supported. Known: default, llama3")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        refusals.append(f"partial_rotary_factor={partial}: only whole heads can be rotated")
    return settings, refusals


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


def _as_sliding(kind: Architecture, model: gpt.Config | gpt2.Config) -> Mapping[str, object]:
    """Return the config.json entries for the windows of a model's layers. Mistral has the same one in all layers."""
    windows = [model.attention.windows[i % len(model.attention.windows)] for i in range(model.layers)]
    lengths = {window for window in windows if window is not None}
    if not lengths:
        return {"sliding_window": None} | ({} if kind is MISTRAL else {"use_sliding_window": False})
    if len(lengths) > 1 or (kind is MISTRAL and None in windows):
        raise ValueError(
            f"model.attention.windows={model.attention.windows}: {kind.name} has one window for "
            f"{'all layers' if kind is MISTRAL else 'those layers that have one'}."
        )
    if kind is MISTRAL:
        return {"sliding_window": lengths.pop()}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sliding = {"use_sliding_window": True, "layer_types": types, "max_window_layers": windows.count(None)}
    return {"sliding_window": lengths.pop(), **sliding}


def _unsupported_settings(model: Stack, kind: Architecture) -> list[str]:
    """Return the settings of a model that no known architecture supports, written as on the command line."""
    if type(model) not in (gpt.Config, gpt2.Config):
        return [f"model.family={model.family}"]
    assert isinstance(model, gpt.Config | gpt2.Config)
    attention, defaults = model.attention, type(model)()
    refusals = [
        f"model.{key}={override_text(get_value(model, key))}"
        for key in kind.plain
        if get_value(model, key) != get_value(defaults, key)
    ]
    if model.feed_forward not in kind.activations.values():
        refusals.append(f"model.feed_forward={model.feed_forward.value}")
    if kind.is_gpt2:
        if attention.kv_heads != attention.heads or attention.heads * attention.head_dim != model.embed:
            refusals.append("attention heads with fewer key heads, or with another total width than model.embed")
        return refusals
    if attention.rope_theta is None:
        refusals.append("model.attention.rope_theta=null")
    if attention.bias is Bias.qkv and attention.qk_norm:
        refusals.append("model.attention.bias=qkv with qk_norm=true")
    if attention.bias is Bias.all and kind is MISTRAL:
        refusals.append("model.attention.bias=all with windows")
    if attention.qk_norm and model.norm_epsilon != _QK_NORM_EPSILON:
        refusals.append(f"model.norm_epsilon={model.norm_epsilon:g} with norms of queries and keys of 1e-06")
    return refusals
