"""Settings of DeepSeek's latent attention and experts in a Hugging Face config.json, and back. Does not import JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from valkyrie.models.families import deepseek
from valkyrie.ops.choices import GroupScore, RouterScores, Yarn
from valkyrie.trees import override_text

YARN_KEYS = {
    "factor": "factor",
    "beta_slow": "low",
    "beta_fast": "high",
    "original_max_position_embeddings": "context",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""Fields of `Yarn`, by key of `rope_scaling`."""


def yarn_settings(rope: Mapping[str, Any], key: str) -> tuple[dict[str, float | bool], list[str]]:
    """Return the fields of `Yarn` for a `rope_scaling`, and a message for each unsupported value.

    `key` is the key of `rope` in config.json.
    """
    missing_keys = [name for name in ("factor", "original_max_position_embeddings") if not rope.get(name)]
    refusals = [f"{key} lacks {name}, required by rope_type=yarn" for name in missing_keys]
    if (attention_factor := rope.get("attention_factor")) is not None:
        refusals.append(f"{key}.attention_factor={attention_factor} is not supported")
    mscale, mscale_all_dim = (float(rope.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    if mscale_all_dim and not mscale:
        refusals.append(f"{key}.mscale_all_dim={mscale_all_dim:g} is not supported without {key}.mscale")
    if not mscale_all_dim:  # transformers ignores `mscale` alone
        mscale = 1.0
    settings = {"mscale": mscale, "mscale_all_dim": mscale_all_dim, "truncate": bool(rope.get("truncate", True))}
    settings |= {"low": float(rope.get("beta_slow") or 1.0), "high": float(rope.get("beta_fast") or 32.0)}
    settings |= {"factor": rope.get("factor", 1.0), "context": rope.get("original_max_position_embeddings", 1)}
    return settings, refusals


def yarn_entries(yarn: Yarn) -> Mapping[str, object] | None:
    """Return the `rope_scaling` of a `Yarn`, or None if it changes nothing."""
    if yarn.factor == 1:
        return None
    return {"rope_type": "yarn"} | {name: getattr(yarn, field_name) for name, field_name in YARN_KEYS.items()}


def deepseek_settings(config: Mapping[str, Any], has_selection_bias: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of latent attention, dense layers and the router, and a message for each unsupported value.

    `config` has the architecture's `default_values`. `has_selection_bias` is whether the router is that of DeepSeek-V3.
    """
    heads, key_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    refusals = []
    if key_heads not in (None, heads):
        refusals.append(f"num_key_value_heads={key_heads} is not supported, only num_attention_heads={heads} is")
    method = config["topk_method"]
    if method not in _METHODS[has_selection_bias]:
        refusals.append(f"topk_method={method} is not supported, only {' and '.join(_METHODS[has_selection_bias])}")
    has_groups = method != "greedy"
    return {
        "attention.query_latent": config["q_lora_rank"],
        "dense_layers": config.get("first_k_dense_replace") or 0,
        "moe.groups": (config.get("n_group") or 1) if has_groups else 1,
        "moe.top_groups": (config.get("topk_group") or 1) if has_groups else 1,
        "moe.group_score": (GroupScore.top_2 if has_selection_bias else GroupScore.max).value,
        "moe.routed_scaling": float(config.get("routed_scaling_factor", 1.0)),
        "moe.router": (RouterScores.sigmoid if has_selection_bias else RouterScores.softmax).value,
        "moe.selection_bias": has_selection_bias,
    }, refusals


_METHODS = {False: ("greedy", "group_limited_greedy"), True: ("noaux_tc",)}
"""Supported values of `topk_method`, by whether the router has a selection bias. The last one has groups."""


def deepseek_entries(model: deepseek.Config) -> dict[str, object]:
    """Return the config.json entries of latent attention, dense layers and the router, except sizes."""
    attention, experts = model.attention, model.moe
    scaling = yarn_entries(attention.yarn)
    methods = _METHODS[experts.selection_bias]
    return {
        "num_key_value_heads": attention.heads,
        "head_dim": attention.rope_dim,
        "q_lora_rank": attention.query_latent,
        "rope_theta": attention.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": attention.rope_theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": False,
        "first_k_dense_replace": model.dense_layers,
        "topk_method": methods[-1] if experts.groups > 1 else methods[0],
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "routed_scaling_factor": experts.routed_scaling,
    }


def unsupported_settings(model: deepseek.Config, has_selection_bias: bool) -> list[str]:
    """Return the settings that DeepSeek's attention, experts and router do not have, as `KEY=VALUE`."""
    experts, yarn, refusals = model.moe, model.attention.yarn, []
    # Unless both slopes are positive, transformers computes the amplitude from slopes of 1 and 0.
    if yarn.factor != 1 and not (yarn.mscale and yarn.mscale_all_dim) and (yarn.mscale, yarn.mscale_all_dim) != (1, 0):
        mscale_all_dim = f"yarn.mscale_all_dim={yarn.mscale_all_dim:g}"
        refusals.append(f"model.attention.yarn.mscale={yarn.mscale:g} with {mscale_all_dim}")
    if not experts.shared_experts:
        refusals.append("model.moe.shared_experts=0")
    if experts.selection_bias != has_selection_bias:
        router = f"moe.router={experts.router.value}"
        refusals.append(f"model.moe.selection_bias={override_text(experts.selection_bias)} with {router}")
    score = GroupScore.top_2 if has_selection_bias else GroupScore.max
    if experts.top_groups < experts.groups and experts.group_score is not score:
        refusals.append(f"model.moe.group_score={experts.group_score.value}")
    return refusals
