"""Write longformer.npz: outputs of transformers' Longformer self-attention for a fixed input.

    pip install transformers==5.23.0 torch==2.13.0 && python tests/goldens/make_longformer.py

Computes in float64 and stores float32. Stores the projections instead of the hidden states, so that the golden file
covers attention alone. The window has WINDOW keys on either side (Valkyrie's `window` also counts the token itself).
Each sequence has two global tokens. The second sequence ends with padding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

BATCH, SEQ, HEADS, HEAD_DIM, WINDOW = 2, 32, 2, 8, 4
GLOBALS = np.array([[0, 13], [5, 20]])
LENGTHS = np.array([32, 27])


def main() -> None:
    """Run the reference and write its inputs and output."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    embed = HEADS * HEAD_DIM
    config = LongformerConfig(
        hidden_size=embed,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        attention_window=[2 * WINDOW],
        attention_probs_dropout_prob=0.0,
    )
    layer = LongformerSelfAttention(config, layer_id=0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden = torch.randn(BATCH, SEQ, embed)
    is_global, is_padding = torch.zeros(BATCH, SEQ, dtype=torch.bool), torch.zeros(BATCH, SEQ, dtype=torch.bool)
    for row in range(BATCH):
        is_global[row, GLOBALS[row]] = True
        is_padding[row, LENGTHS[row] :] = True
    mask = torch.zeros(BATCH, SEQ)
    mask[is_global], mask[is_padding] = 1.0, -1.0
    with torch.no_grad():
        out = layer(
            hidden,
            attention_mask=mask,
            is_index_masked=is_padding,
            is_index_global_attn=is_global,
            is_global_attn=True,
        )[0]
        projected = {
            name: getattr(layer, projection)(hidden).reshape(BATCH, SEQ, HEADS, HEAD_DIM)
            for name, projection in {
                "q": "query",
                "k": "key",
                "v": "value",
                "q_global": "query_global",
                "k_global": "key_global",
                "v_global": "value_global",
            }.items()
        }
    arrays = {name: value.numpy().astype(np.float32) for name, value in projected.items()}
    np.savez_compressed(
        Path(__file__).with_name("longformer.npz"),
        out=out.reshape(BATCH, SEQ, HEADS, HEAD_DIM).numpy().astype(np.float32),
        globals=GLOBALS,
        lengths=LENGTHS,
        window=WINDOW,
        **arrays,
    )


if __name__ == "__main__":
    main()
