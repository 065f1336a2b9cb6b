"""Write transformers.npz: logits of transformers' models with fixed weights on fixed tokens, in float32.

    pip install transformers==5.23.0 torch==2.13.0
    python tests/goldens/make_transformers.py

Each model is tiny. Its config.json, the shapes of its tensors in model.safetensors, and its logits are stored. Its
weights are not: `random_weights` computes them from their names and shapes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

VOCAB, SEQ = 300, 24
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = LLAMA | {"intermediate_size": 20, "num_experts_per_tok": 2}
OLMOE = EXPERTS | {"num_experts": 4, "pad_token_id": None, "eos_token_id": None}
QWEN3_MOE = EXPERTS | {"head_dim": 16, "num_experts": 6, "moe_intermediate_size": 12, "num_experts_per_tok": 3}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 16,
}
DEEPSEEK = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEEPSEEK_V3 = DEEPSEEK | {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
GPT_OSS = EXPERTS | {
    "head_dim": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {key: value for key, value in YARN.items() if "mscale" not in key} | {"truncate": False},
}
LLAMA4 = EXPERTS | {
    "head_dim": 16,
    "num_hidden_layers": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 24,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "pad_token_id": None,
    "rope_parameters": STRETCHED | {"high_freq_factor": 1.0},
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "llama3": ("Llama", LLAMA | {"rope_parameters": STRETCHED, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2_windows": ("Qwen2", LLAMA | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "gpt2": ("GPT2", GPT2),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 4}),
    "olmoe": ("Olmoe", OLMOE),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "llama4": ("Llama4", LLAMA4),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK),
    "deepseek_v2_yarn": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": 20, "rope_parameters": YARN}),
    "deepseek_v2_groups": (
        "DeepseekV2",
        DEEPSEEK
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK_V3),
    "qwen3_moe_dense": ("Qwen3Moe", QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
}
"""Models by name: the prefix of their classes in transformers, and their settings."""


def random_weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return random weights by name, scaled so that activations are close to 1.

    The seed is fixed, so the same names and shapes always give the same weights.
    """
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) < 2 else shape[-1] ** -0.5)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


def run_model(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a model's `config` (its config.json), the `shapes` of its tensors as JSON, and its `logits`.

    The logits are those of random weights on random tokens. `kind` is the prefix of the model's classes.
    """
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Llama4" else f"{kind}Config")(**settings)
    model_class = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model_class(config).save_pretrained(folder)
        weights_file = Path(folder) / "model.safetensors"
        with safe_open(weights_file, "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
        save_file(random_weights(shapes), weights_file, {"format": "pt"})
        model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
        tokens = np.random.default_rng(1).integers(0, VOCAB, (1, SEQ))
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.float().numpy()
        text = (Path(folder) / "config.json").read_text()
    return {"config": text, "shapes": json.dumps(shapes), "logits": logits}


def main() -> None:
    """Run the references and write their results."""
    golden = {f"{name}_{key}": value for name, case in CASES.items() for key, value in run_model(*case).items()}
    np.savez_compressed(Path(__file__).with_name("transformers.npz"), **golden)


if __name__ == "__main__":
    main()
