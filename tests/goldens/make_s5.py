"""Write s5.npz: outputs of the PyTorch S5 layer of s5-pytorch 0.2.1 (torch 2.13.0) for given parameters.

    pip install torch==2.13.0 s5-pytorch==0.2.1 numpy && python tests/goldens/make_s5.py

The PyTorch layer does not use conjugate symmetry. It stores both states of each conjugate pair, so that
y = Re(C_tilde x) + D u.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from s5.s5_model import S5, discretize_bilinear, discretize_zoh


def main() -> None:
    """Write the parameters, the input and the outputs for both discretisations.

    The outputs are computed in one call, and in two calls of half the sequence.
    """
    torch.manual_seed(0)
    layer = S5(width=3, state_width=12, block_count=2, bcInit="dense")
    signal = torch.randn(2, 20, 3)
    golden = {"u": signal.numpy()}
    for name in ("Lambda", "B", "C", "D", "log_step"):
        golden[name] = getattr(layer.seq, name).detach().numpy()
    for name, discretize in (("zoh", discretize_zoh), ("bilinear", discretize_bilinear)):
        layer.seq.discretize = discretize
        with torch.no_grad():
            golden[f"y_{name}"] = layer(signal, step_scale=2.0).numpy()
            first, state = layer(signal[:, :10], step_scale=2.0, return_state=True)
            second = layer(signal[:, 10:], step_scale=2.0, state=state)
            golden[f"y_{name}_continued"] = torch.cat([first, second], dim=1).numpy()
    np.savez_compressed(Path(__file__).with_name("s5.npz"), **golden)


if __name__ == "__main__":
    main()
