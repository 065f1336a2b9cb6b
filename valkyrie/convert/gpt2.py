"""Converts a config.json of GPT-2 to settings of the gpt2 family and back. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from valkyrie.models.block import Residual
from valkyrie.models.families.gpt2 import Config
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.ops.choices import Bias

ACTIVATIONS = {"gelu_new": Nonlinearity.gelu, "gelu_pytorch_tanh": Nonlinearity.gelu, "relu": Nonlinearity.relu}
SIZES = {
    "vocab_size": "vocab_size",
    "embed": "n_embd",
    "layers": "n_layer",
    "attention.heads": "n_head",
    "context": "n_positions",
}
"""Numeric settings and their keys in config.json."""
_ONLY = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""Keys with only one supported value, which is also their default."""


def refusals_of(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config.json with values that no setting supports."""
    activation, embed, heads = config.get("activation_function", "gelu_new"), config["n_embd"], config["n_head"]
    refusals = []
    if activation not in ACTIVATIONS:
        refusals.append(f"activation_function={activation} is not one of {', '.join(ACTIVATIONS)}")
    for key, only in _ONLY.items():
        if config.get(key, only) != only:
            refusals.append(f"{key}={str(not only).lower()} is not supported")
    if embed % max(heads, 1):
        refusals.append(f"n_embd={embed} is not a multiple of n_head={heads}")
    return refusals


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not in `SIZES`."""
    return {
        "name": "gpt2",
        "mlp": config.get("n_inner") or 4 * config["n_embd"],
        "feed_forward": ACTIVATIONS[config.get("activation_function", "gelu_new")].value,
        "norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "attention.kv_heads": config["n_head"],
        "attention.head_dim": config["n_embd"] // config["n_head"],
    }


def config_of(model: Config) -> dict[str, Any]:
    """Return the config.json of a model that passes `not_theirs`."""
    plain = model.mlp == 4 * model.embed
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_embd": model.embed,
        "n_layer": model.layers,
        "n_head": model.attention.heads,
        "n_positions": model.context,
        "n_inner": None if plain else model.mlp,
        "activation_function": "relu" if model.feed_forward is Nonlinearity.relu else "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
    }


def not_theirs(model: Config) -> list[str]:
    """Return the settings of a model that transformers' GPT-2 does not support, written as on the command line."""
    attention, theirs = model.attention, Config()
    keys = ["embedding_scale", "logits_soft_cap", "feed_forward_after", "block_pattern"]
    refusals = [f"model.{key}={getattr(model, key)}" for key in keys if getattr(model, key) != getattr(theirs, key)]
    keys = ["causal", "global_tokens", "soft_cap", "dilations", "windows", "rope_theta", "qk_norm"]
    refusals += [
        f"model.attention.{key}={getattr(attention, key)}"
        for key in keys
        if getattr(attention, key) != getattr(theirs.attention, key)
    ]
    if model.residual is not Residual.sequential:
        refusals.append(f"model.residual={model.residual.value}")
    if model.feed_forward not in ACTIVATIONS.values():
        refusals.append(f"model.feed_forward={model.feed_forward.value}")
    if attention.bias is not Bias.all:
        refusals.append(f"model.attention.bias={attention.bias.value}")
    if attention.kv_heads != attention.heads or attention.heads * attention.head_dim != model.embed:
        refusals.append("heads that are not as many key heads, together as wide as model.embed")
    return refusals
