"""Write trm.npz: reference outputs of SamsungSAILMontreal/TinyRecursiveModels at e7b6871.

    git clone https://github.com/SamsungSAILMontreal/TinyRecursiveModels && git -C TinyRecursiveModels checkout e7b6871
    pip install torch==2.13.0 einops pydantic numpy
    PYTHONPATH=TinyRecursiveModels python tests/goldens/make_trm.py

Runs two float32 training steps without exploration, for a model with attention and one with an MLP over the sequence
(`mlp_t`). The weights are not updated between the steps. They are rounded to float16 before the reference runs, so the
stored float16 weights are exact.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from models.losses import ACTLossHead
from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1
from models.sparse_embedding import _sparse_emb_signsgd_dist

BASE_CONFIG = {"batch_size": 5, "seq_len": 9, "puzzle_emb_ndim": 12, "num_puzzle_identifiers": 4, "vocab_size": 7}
BASE_CONFIG |= {"H_cycles": 3, "L_cycles": 6, "H_layers": 0, "hidden_size": 8, "expansion": 4, "num_heads": 2}
BASE_CONFIG |= {"halt_max_steps": 16, "halt_exploration_prob": 0.0, "forward_dtype": "float32", "puzzle_emb_len": 3}
VARIANTS = {
    "attention": {"pos_encodings": "rope", "L_layers": 2},
    "mlp": {"pos_encodings": "none", "L_layers": 1, "mlp_t": True},
}


def main() -> None:
    """Write `trm.npz` with the results of both variants."""
    golden = {}
    for name, variant in VARIANTS.items():
        golden |= {f"{name}.{key}": value for key, value in run_variant(BASE_CONFIG | variant).items()}
    np.savez_compressed(Path(__file__).with_name("trm.npz"), **golden)


def run_variant(config: dict) -> dict[str, np.ndarray]:
    """Return a variant's weights (`weights.NAME`) and the results of both steps (`step_1.NAME`, `step_2.NAME`).

    The results are the batch, losses, gradient norms, carry, and `table_after`: a copy of the puzzle embeddings,
    updated with the gradient of this step alone.
    """
    torch.manual_seed(1)
    model = TinyRecursiveReasoningModel_ACTV1(config)
    inner, golden = model.inner, {}
    with torch.no_grad():
        inner.q_head.weight.normal_()
        inner.q_head.bias.zero_()  # some rows halt after the first step
        inner.puzzle_emb.weights.normal_()
        for key, value in inner.state_dict().items():
            value.copy_(value.half().float())
            golden[f"weights.{key}"] = value.half().numpy()
    head, carry = ACTLossHead(model, "stablemax_cross_entropy").train(), None
    shape = (config["batch_size"], config["seq_len"])
    for step in (1, 2):
        batch = {
            "inputs": torch.randint(0, config["vocab_size"], shape, dtype=torch.int32),
            "labels": torch.randint(1, config["vocab_size"], shape, dtype=torch.int32),
            "puzzle_identifiers": torch.randint(0, 3, shape[:1], dtype=torch.int32),  # the last row is never used
        }
        batch["labels"][torch.rand(shape) < 0.3] = -100
        carry = head.initial_carry(batch) if carry is None else carry
        head.zero_grad()
        inner.puzzle_emb.local_weights.grad = None
        carry, loss, metrics, _, _ = head(carry=carry, batch=batch, return_keys=[])
        (loss / shape[0]).backward()
        results = {f"batch.{key}": value for key, value in batch.items()}
        results |= {"loss": loss.detach(), "lm_loss": metrics["lm_loss"], "q_halt_loss": metrics["q_halt_loss"]}
        results |= {f"gradient.{key}": p.grad.norm() for key, p in inner.named_parameters() if p.grad is not None}
        results |= {"z_H": carry.inner_carry.z_H, "z_L": carry.inner_carry.z_L}
        results |= {"steps": carry.steps, "halted": carry.halted}
        table, gradient = inner.puzzle_emb.weights.clone(), inner.puzzle_emb.local_weights.grad
        _sparse_emb_signsgd_dist(gradient, inner.puzzle_emb.local_ids, table, lr=0.01, weight_decay=0.5, world_size=1)
        results["table_after"] = table
        golden |= {f"step_{step}.{key}": value.detach().numpy() for key, value in results.items()}
    return golden


if __name__ == "__main__":
    main()
