"""Settings of DeepSeek's latent attention and experts in a Hugging Face config.json, and back. Does not import JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from valkyrie.models.block import DENSE
from valkyrie.models.families import deepseek
from valkyrie.ops.choices import Yarn

YARN_KEYS = {
    "factor": "factor",
    "beta_slow": "low",
    "beta_fast": "high",
    "original_max_position_embeddings": "context",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Fields of `Yarn`, by key of `rope_scaling`."""


def yarn_settings(rope: Mapping[str, Any], key: str) -> tuple[dict[str, float], list[str]]:
    """Return the fields of `Yarn` for a `rope_scaling`, and a message for each unsupported value.

    `key` is the key of `rope` in config.json.
    """
    missing_keys = [name for name in ("factor", "original_max_position_embeddings") if not rope.get(name)]
    refusals = [f"{key} lacks {name}, required by rope_type=yarn" for name in missing_keys]
    refusals += [
        f"{key}.{name}={rope[name]} is not supported"
        for name, supported in (("attention_factor", None), ("truncate", True))
        if rope.get(name, supported) != supported
    ]
    mscale, mscale_all_dim = (float(rope.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if mscale_all_dim and not mscale:
        refusals.append(f"{key}.mscale_all_dim={mscale_all_dim:g} is not supported without {key}.mscale")
    if not mscale_all_dim:  # transformers ignores `mscale` alone
        mscale = 1.0
    settings = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    settings |= {"low": float(rope.get("beta_slow") or 1.0), "high": float(rope.get("beta_fast") or 32.0)}
    settings |= {"factor": rope.get("factor", 1.0), "context": rope.get("original_max_position_embeddings", 1)}
    return settings, refusals


def yarn_entries(yarn: Yarn) -> Mapping[str, object] | None:
    """Return the `rope_scaling` of a `Yarn`, or None if it changes nothing."""
    if yarn.factor == 1:
        return None
    return {"rope_type": "yarn"} | {name: getattr(yarn, field_name) for name, field_name in YARN_KEYS.items()}


def deepseek_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of latent attention and of the dense layers, and a message for each unsupported value."""
    heads, key_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    refusals = []
    if key_heads not in (None, heads):
        refusals.append(f"num_key_value_heads={key_heads} is not supported, only num_attention_heads={heads} is")
    dense_layers, layers = config.get("first_k_dense_replace") or 0, config["num_hidden_layers"]
    pattern = [DENSE if i < dense_layers else "moe" for i in range(layers)] if dense_layers else ["moe"]
    return {"attention.query_latent": config.get("q_lora_rank"), "feed_forward_pattern": pattern}, refusals


def deepseek_entries(model: deepseek.Config) -> dict[str, object]:
    """Return the config.json entries of latent attention and of the dense layers, except sizes."""
    attention, kinds = model.attention, [layer.feed_forward_kind for layer in model.make_layers()]
    scaling = yarn_entries(attention.yarn)
    return {
        "num_key_value_heads": attention.heads,
        "head_dim": attention.rope_dim,
        "q_lora_rank": attention.query_latent,
        "rope_theta": attention.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": attention.rope_theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": False,
        "first_k_dense_replace": kinds.count(DENSE),
    }


def unsupported_pattern(model: deepseek.Config) -> list[str]:
    """Return a message if a dense layer follows one with experts, which config.json cannot describe."""
    kinds = [layer.feed_forward_kind for layer in model.make_layers()]
    has_dense_first = kinds == sorted(kinds, key=lambda kind: kind != DENSE)
    return [] if has_dense_first else [f"model.feed_forward_pattern={model.feed_forward_pattern}"]
