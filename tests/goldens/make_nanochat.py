"""Write nanochat.npz: float32 logits of public nanochat models with fixed weights, and two steps of nanochat's Muon.

    pip install transformers==5.23.0 torch==2.13.0
    python tests/goldens/make_nanochat.py FOLDER     (FOLDER: a checkout of karpathy/nanochat at 92d63d4)

The version of October 2025 is transformers' NanoChatForCausalLM. The version of July 2026 is nanochat's own gpt.py,
with a context longer than its short windows. Weights are not stored: `random_weights` computes them from
their names and shapes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HEADS, KV_HEADS, EMBED, LAYERS, VOCAB = 4, 2, 32, 4, 61
SEQ = {"2025": 24, "2026": 200}


def random_weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return random weights by name, scaled so that activations are close to 1.

    The seed is fixed, so the same names and shapes always give the same weights.
    """
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) < 2 else shape[-1] ** -0.5)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


def compute_logits(model: torch.nn.Module, forward: Any, seq: int) -> tuple[np.ndarray, str]:
    """Return the logits of a model with random weights on random tokens, and the shapes of its weights as JSON."""
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    values = random_weights(shapes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values[name]))
        tokens = np.random.default_rng(1).integers(0, VOCAB, (1, seq))
        return forward(torch.from_numpy(tokens)).float().numpy(), json.dumps(shapes)


def nanochat_2025() -> tuple[np.ndarray, str]:
    """Return logits and weight shapes of nanochat as of October 2025, from transformers."""
    from transformers import NanoChatConfig, NanoChatForCausalLM

    config = NanoChatConfig(
        vocab_size=VOCAB,
        hidden_size=EMBED,
        intermediate_size=4 * EMBED,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    model = NanoChatForCausalLM(config).eval()
    return compute_logits(model, lambda tokens: model(tokens).logits, SEQ["2025"])


def nanochat_2026() -> tuple[np.ndarray, str]:
    """Return logits and weight shapes of nanochat as of July 2026, from its own gpt.py."""
    from nanochat.gpt import GPT, GPTConfig

    config = GPTConfig(SEQ["2026"], VOCAB, LAYERS, HEADS, KV_HEADS, EMBED, "SSSL")
    model = GPT(config, pad_vocab_size_to=1)
    model.init_weights()
    return compute_logits(model, model, SEQ["2026"])


def muon_steps() -> dict[str, np.ndarray]:
    """Return the arrays of two Muon steps for a `tall` and a `wide` matrix, by name.

    `muon_tall_first` is the matrix before the steps, `muon_tall_last` the matrix after them, and `muon_tall_gradients`
    the gradient of each step.
    """
    from nanochat.optim import muon_step_fused

    rng, arrays = np.random.default_rng(2), {}
    for name, (rows, cols) in {"tall": (12, 8), "wide": (6, 10)}.items():
        first, gradients = rng.standard_normal((1, rows, cols)), rng.standard_normal((2, 1, rows, cols))
        parameters = torch.from_numpy(first.astype(np.float32))
        reduced = (1, rows, 1) if rows >= cols else (1, 1, cols)
        momentum, second = torch.zeros_like(parameters), torch.zeros(reduced)
        for gradient in gradients:
            scalars = [torch.tensor(value) for value in (0.9, 0.02 * max(1.0, rows / cols) ** 0.5, 0.1, 0.9)]
            gradient_tensor = torch.from_numpy(gradient.astype(np.float32))
            muon_step_fused(gradient_tensor, parameters, momentum, second, *scalars, 5, -1 if rows >= cols else -2)
        arrays |= {f"muon_{name}_first": first[0], f"muon_{name}_gradients": gradients[:, 0]}
        arrays[f"muon_{name}_last"] = parameters.numpy()[0]
    return arrays


def main() -> None:
    """Run the references and write their results."""
    os.environ["NANOCHAT_DTYPE"] = "float32"
    torch.compile = lambda f=None, **_: f if f is not None else lambda g: g  # pyright: ignore[reportAttributeAccessIssue]
    sys.path.insert(0, sys.argv[1])
    golden: dict[str, Any] = {}
    for form, golden_form in (("2025", nanochat_2025()), ("2026", nanochat_2026())):
        golden[f"logits_{form}"], golden[f"shapes_{form}"] = golden_form
    np.savez_compressed(Path(__file__).with_name("nanochat.npz"), **golden, **muon_steps())


if __name__ == "__main__":
    main()
