"""How large the state of a run is, by its specs alone. Imports no JAX."""

from __future__ import annotations

import math

from valkyrie.config.run import Run

_BYTES = {"float32": 4, "bfloat16": 2}


def state_bytes(run: Run) -> int:
    """Return the bytes of a run's state as it is saved: parameters, Adam's two moments, the average if one is kept."""
    policy, ema = run.config.precision, run.config.optimizer.ema_decay is not None
    size = 0
    for spec in run.model.parameters().values():
        stored = _BYTES["float32" if spec.float32 else policy.parameter.value]
        size += math.prod(spec.shape) * (stored + (3 if ema else 2) * _BYTES["float32"])
    return size
