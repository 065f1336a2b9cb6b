"""A training whose loss or gradients are no longer finite ends, and says since when and where."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from valkyrie.train.program import StepProgram


class DivergedError(RuntimeError):
    """The loss or a gradient is no longer finite; the message says since when and where."""


def refuse_divergence(program: StepProgram, values: dict[str, Any], step: int, saved: int | None) -> None:
    """Raise DivergedError where the loss or the gradient norm of a step is not finite; `saved`: the last saved step."""
    if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
        return
    bad = np.flatnonzero(~np.isfinite(values["leaf_norms"]))
    where = (
        f"the first parameter whose gradient is not finite is {program.parameter_names[bad[0]]} ({len(bad)} of "
        f"{len(program.parameter_names)} are not)"
        if bad.size
        else "every gradient is finite"
    )
    last = "no checkpoint was saved before it" if saved is None else f"the last good checkpoint is of step {saved}"
    raise DivergedError(
        f"step {step}: loss is {float(values['loss'])} and the gradient norm {float(values['grad_norm'])}; {where}; "
        f"{last}. Lower optimizer.learning_rate, or find the operation with debug=nans."
    )
