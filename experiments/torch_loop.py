"""A plain torch training loop of the shapes of gpt_125m and gpt_1b, to compare tokens/s, MFU and memory on one GPU.

    python experiments/torch_loop.py --model gpt_1b --batch 8 --seq 2048
    valkyrie-train mode=measure model=gpt_1b mesh=1x1x1 batch=8 seq=2048 model.document_boundary=cross

The loop is what torch users write: float32 parameters, bfloat16 autocast, `scaled_dot_product_attention`, fused AdamW,
`torch.compile`. Both sides count the same FLOPs: 6 per parameter of a matrix product and token, and causal attention.
Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

SHAPES = {
    "gpt_125m": {"embed": 768, "layers": 12, "heads": 12, "mlp": 3072, "gated": False},
    "gpt_1b": {"embed": 2048, "layers": 24, "heads": 16, "mlp": 5632, "gated": True},
}
VOCAB = 50304
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}


class Block(nn.Module):
    """Attention with rotary positions and a feed-forward layer, each after an RMS norm."""

    def __init__(self, embed: int, heads: int, mlp: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        self.qkv, self.out = nn.Linear(embed, 3 * embed, bias=False), nn.Linear(embed, embed, bias=False)
        self.up, self.down = nn.Linear(embed, mlp * (2 if gated else 1), bias=False), nn.Linear(mlp, embed, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(embed) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x` (batch, seq, embed)."""
        batch, seq, embed = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, embed))
        hidden = self.up(self.norms[1](x))
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            return x + self.down(F.silu(gate) * hidden)
        return x + self.down(F.gelu(hidden, approximate="tanh"))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels (batch, heads, seq, head_dim) by the angles of their positions."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Model(nn.Module):
    """A decoder with tied embeddings, which returns the mean cross-entropy."""

    def __init__(self, embed: int, layers: int, heads: int, mlp: int, gated: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, embed)
        self.blocks = nn.ModuleList(Block(embed, heads, mlp, gated) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(embed), nn.Linear(embed, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head_dim = embed // heads

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of `tokens` (batch, seq)."""
        x = self.embed(tokens)
        rates = 10000.0 ** -(torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def main() -> None:
    """Time steps on random tokens and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt_1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    shape = SHAPES[options.model]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Model(**shape).cuda()
    step_model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(VOCAB, (options.batch, options.seq + 1), device="cuda")

    def train_step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = step_model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    start_time = time.perf_counter()
    train_step().item()
    compile_s, times_s = time.perf_counter() - start_time, []
    for _ in range(5 + options.steps):
        start_time = time.perf_counter()
        loss = train_step()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_time)
    step_s, count = statistics.median(times_s[5:]), options.batch * options.seq
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = 6 * parameters * count + 6 * shape["layers"] * shape["embed"] * options.seq * count
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name())
    result = {
        "model": options.model,
        "parameters": parameters,
        "step_ms": round(1e3 * step_s, 2),
        "tokens_per_second": round(count / step_s),
        "mfu": None if peak is None else round(flops / step_s / peak, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "compile_s": round(compile_s, 1),
        "loss": round(loss.item(), 3),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
