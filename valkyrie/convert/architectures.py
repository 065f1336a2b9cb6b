"""The supported model classes of the library `transformers`. Does not import JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from valkyrie.convert.names import (
    GPT2_LAYER_TENSORS,
    GPT2_TOP_LEVEL_TENSORS,
    GPT_OSS_TENSORS,
    LATENT_ATTENTION,
    LAYER_TENSORS,
    LLAMA4_TENSORS,
    MIXTRAL_EXPERTS,
    QWEN_EXPERTS,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    TOP_LEVEL_TENSORS,
    TensorLocation,
)
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.ops.choices import Bias, NormSpan

_DEFAULT_ONLY = ("residual", "embedding_scale", "logits_soft_cap", "feed_forward_after", "block_pattern")
_DEFAULT_ONLY += tuple(f"attention.{key}" for key in ("causal", "global_tokens", "soft_cap", "dilations", "sinks"))
_DEFAULT_ONLY += ("attention.yarn.factor", "attention.window_kind", "attention.rope_layers")
_DEFAULT_ONLY += ("attention.temperature_slope",)
_GPT2_DEFAULT_ONLY = (*_DEFAULT_ONLY, *(f"attention.{key}" for key in ("windows", "rope_theta", "qk_norm", "bias")))


class Windows(Enum):
    """Layers that can have a sliding window: none, all (the same one), or those that config.json lists.

    `alternating` is `listed`, with every other layer as default, beginning with the first.
    """

    none = "none"
    all = "all"
    listed = "listed"
    alternating = "alternating"


@dataclass(frozen=True)
class Architecture:
    """A model class of the library `transformers`, and how its config.json maps to model settings.

    The defaults of the fields are Llama's.

    Args:
        name: Name of the class.
        model_type: Value of `model_type`.
        bias: Attention projections that always have a bias.
        biases_key: Key that adds a bias to all attention projections if true, or None if there is no such key.
        qk_norm: Channels that the norms of queries and keys average over, or None if there are no such norms.
        qk_norm_scale: Whether these norms have a learned scale.
        has_sinks: Whether attention has sinks.
        windows: Layers that can have a sliding window.
        has_window_switch: Whether `use_sliding_window` turns windows on.
        family: Model family that implements the architecture.
        size_keys: Maps each model setting that is a size, such as `embed`, to its key in config.json.
        other_keys: Maps other names of keys in config.json to the names used here.
        normalize_key: Key that divides the scores of a token's experts by their sum, or None if they always are.
        lists_dense_layers: Whether config.json lists layers with a dense feed-forward instead of experts.
        has_selection_bias: Whether experts have a bias for their choice (DeepSeek-V3).
        has_expert_biases: Whether the router and the experts have biases.
        quantization: Value of `quant_method` whose tensors can be read, or None.
        activation_key: Key of the nonlinearity in config.json.
        activations: Nonlinearity for each supported value of that key. If several values map to the same nonlinearity,
            exporting writes the first.
        epsilon_entry: Key and default of the norms' epsilon.
        rope_theta: Default of `rope_theta`.
        rope_type: Supported `rope_type` besides `default`: `llama3` or `yarn`.
        default_rope: Values of `rope_parameters` if config.json has none.
        tie_word_embeddings: Default of `tie_word_embeddings`.
        fixed_values: Keys with a single supported value, which is also their default.
        default_values: Defaults of other keys, if not the same in all architectures.
        default_only_settings: Model settings that must have the default of the family.
        top_level_tensors: Tensors of the parameters outside of layers.
        layer_tensors: Tensors of the parameters in a layer.
    """

    name: str
    model_type: str
    bias: Bias = Bias.none
    biases_key: str | None = None
    qk_norm: NormSpan | None = None
    qk_norm_scale: bool = True
    has_sinks: bool = False
    windows: Windows = Windows.none
    has_window_switch: bool = False
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
    other_keys: Mapping[str, str] = field(default_factory=dict)
    normalize_key: str | None = None
    lists_dense_layers: bool = False
    has_selection_bias: bool = False
    has_expert_biases: bool = False
    quantization: str | None = None
    activation_key: str = "hidden_act"
    activations: Mapping[str, Nonlinearity] = field(
        default_factory=lambda: {
            "silu": Nonlinearity.swiglu,
            "gelu_pytorch_tanh": Nonlinearity.geglu,
            "gelu_new": Nonlinearity.geglu,
        }
    )
    epsilon_entry: tuple[str, float] = ("rms_norm_eps", 1e-6)
    rope_theta: float = 1e4
    rope_type: str = "llama3"
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = False
    fixed_values: Mapping[str, object] = field(default_factory=dict)
    default_values: Mapping[str, object] = field(default_factory=dict)
    default_only_settings: tuple[str, ...] = _DEFAULT_ONLY
    top_level_tensors: Mapping[str, TensorLocation] = field(default_factory=lambda: TOP_LEVEL_TENSORS)
    layer_tensors: Mapping[str, TensorLocation] = field(default_factory=lambda: LAYER_TENSORS)

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts."""
        return self.family in ("moe", "deepseek")

    @property
    def has_latents(self) -> bool:
        """Whether attention has latents of keys and values."""
        return self.family == "deepseek"

    @property
    def is_gpt2(self) -> bool:
        """Whether the family is gpt2, with learned positions and other tensor names."""
        return self.family == "gpt2"


LLAMA, MISTRAL, QWEN2, QWEN3, GPT2 = (
    Architecture("LlamaForCausalLM", "llama", biases_key="attention_bias", fixed_values={"mlp_bias": False}),
    Architecture("MistralForCausalLM", "mistral", windows=Windows.all),
    Architecture("Qwen2ForCausalLM", "qwen2", windows=Windows.listed, has_window_switch=True, bias=Bias.qkv),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        qk_norm=NormSpan.head,
        windows=Windows.listed,
        has_window_switch=True,
        biases_key="attention_bias",
    ),
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
        top_level_tensors=GPT2_TOP_LEVEL_TENSORS,
        layer_tensors=GPT2_LAYER_TENSORS,
    ),
)

_MOE_SIZES = {
    **{setting: key for setting, key in LLAMA.size_keys.items() if setting != "mlp"},
    "moe.mlp": "intermediate_size",
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
}
_MOE_DEFAULT_ONLY = (*_DEFAULT_ONLY, "moe.shared_experts", "moe.router", "moe.selection_bias", "moe.groups")
_MOE_DEFAULT_ONLY += ("moe.routed_scaling", "moe.scale_inputs", "moe.biases")
_WITHOUT_DENSE_LAYERS = (*_MOE_DEFAULT_ONLY, "feed_forward_pattern", "dense_layers")

_GPT_OSS_DEFAULT_ONLY = tuple(
    setting
    for setting in (*_WITHOUT_DENSE_LAYERS, "attention.qk_norm", "attention.rope_stretch.factor")
    if setting not in ("block_pattern", "attention.sinks", "attention.yarn.factor", "moe.biases")
)

_LLAMA4_DEFAULT_ONLY = tuple(f"attention.{key}" for key in ("causal", "soft_cap", "sinks", "yarn.factor"))
_LLAMA4_DEFAULT_ONLY += ("attention.dilations", "attention.global_tokens")
_LLAMA4_DEFAULT_ONLY += ("residual", "embedding_scale", "logits_soft_cap", "feed_forward_after", "moe.normalize")
_LLAMA4_DEFAULT_ONLY += ("moe.selection_bias", "moe.groups", "moe.routed_scaling", "moe.biases")

MIXTRAL, OLMOE, QWEN3_MOE, GPT_OSS, LLAMA4 = (
    Architecture(
        "MixtralForCausalLM",
        "mixtral",
        family="moe",
        windows=Windows.all,
        rope_theta=1e6,
        size_keys=_MOE_SIZES | {"moe.experts": "num_local_experts"},
        epsilon_entry=("rms_norm_eps", 1e-5),
        default_only_settings=_WITHOUT_DENSE_LAYERS,
        layer_tensors=LAYER_TENSORS | MIXTRAL_EXPERTS,
    ),
    Architecture(
        "OlmoeForCausalLM",
        "olmoe",
        family="moe",
        qk_norm=NormSpan.all_heads,
        biases_key="attention_bias",
        size_keys=_MOE_SIZES,
        other_keys={"num_local_experts": "num_experts"},
        normalize_key="norm_topk_prob",
        epsilon_entry=("rms_norm_eps", 1e-5),
        fixed_values={"clip_qkv": None},
        default_only_settings=_WITHOUT_DENSE_LAYERS,
        layer_tensors=LAYER_TENSORS | QWEN_EXPERTS,
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        family="moe",
        qk_norm=NormSpan.head,
        windows=Windows.all,
        has_window_switch=True,
        biases_key="attention_bias",
        size_keys=_MOE_SIZES | {"mlp": "intermediate_size", "moe.mlp": "moe_intermediate_size"},
        other_keys={"num_local_experts": "num_experts"},
        normalize_key="norm_topk_prob",
        lists_dense_layers=True,
        default_only_settings=_MOE_DEFAULT_ONLY,
        layer_tensors=LAYER_TENSORS | QWEN_EXPERTS,
    ),
    Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        family="moe",
        has_sinks=True,
        windows=Windows.alternating,
        biases_key="attention_bias",
        size_keys=_MOE_SIZES | {"moe.experts": "num_local_experts"},
        other_keys={"num_experts": "num_local_experts"},
        has_expert_biases=True,
        quantization="mxfp4",
        activations={"silu": Nonlinearity.clamped_swiglu},
        epsilon_entry=("rms_norm_eps", 1e-5),
        rope_theta=150000.0,
        rope_type="yarn",
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        fixed_values={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        default_values={"attention_bias": True, "sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8},
        default_only_settings=_GPT_OSS_DEFAULT_ONLY,
        layer_tensors=LAYER_TENSORS | GPT_OSS_TENSORS,
    ),
    Architecture(
        "Llama4ForCausalLM",
        "llama4_text",
        family="moe",
        qk_norm=NormSpan.head,
        qk_norm_scale=False,
        biases_key="attention_bias",
        size_keys=_MOE_SIZES | {"mlp": "intermediate_size_mlp", "moe.experts": "num_local_experts"},
        normalize_key="norm_topk_prob",
        epsilon_entry=("rms_norm_eps", 1e-5),
        rope_theta=500000.0,
        fixed_values={"num_experts_per_tok": 1, "norm_topk_prob": False},
        default_values={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
        default_only_settings=_LLAMA4_DEFAULT_ONLY,
        layer_tensors=LAYER_TENSORS | LLAMA4_TENSORS,
    ),
)
_DEEPSEEK_SIZES = {
    **LLAMA.size_keys,
    "attention.nope_dim": "qk_nope_head_dim",
    "attention.rope_dim": "qk_rope_head_dim",
    "attention.value_dim": "v_head_dim",
    "attention.latent": "kv_lora_rank",
    "moe.mlp": "moe_intermediate_size",
    "moe.experts": "n_routed_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.shared_experts": "n_shared_experts",
}
_DEEPSEEK_DEFAULT_ONLY = tuple(setting for setting in _DEFAULT_ONLY if not setting.startswith("attention."))
_DEEPSEEK_DEFAULT_ONLY += ("feed_forward_pattern", "moe.scale_inputs", "moe.biases")

DEEPSEEK_V2, DEEPSEEK_V3 = (
    Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        family="deepseek",
        rope_type="yarn",
        size_keys=_DEEPSEEK_SIZES,
        other_keys={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        normalize_key="norm_topk_prob",
        fixed_values={
            "attention_bias": False,
            "mlp_bias": False,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
        },
        default_values={"q_lora_rank": 1536, "topk_method": "greedy"},
        default_only_settings=(*_DEEPSEEK_DEFAULT_ONLY, "moe.normalize"),
        layer_tensors=LAYER_TENSORS | LATENT_ATTENTION | QWEN_EXPERTS | SHARED_EXPERTS,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        family="deepseek",
        rope_type="yarn",
        size_keys=_DEEPSEEK_SIZES,
        other_keys={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        normalize_key="norm_topk_prob",
        fixed_values={
            "attention_bias": False,
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
        },
        default_values={
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "topk_method": "noaux_tc",
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        has_selection_bias=True,
        default_only_settings=_DEEPSEEK_DEFAULT_ONLY,
        layer_tensors=LAYER_TENSORS | LATENT_ATTENTION | QWEN_EXPERTS | SHARED_EXPERTS | SELECTION_BIAS,
    ),
)
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GPT2,
        MIXTRAL,
        OLMOE,
        QWEN3_MOE,
        GPT_OSS,
        LLAMA4,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
"""The supported architectures, by class name."""


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
