"""Muon for matrices and AdamW for most other parameters, as in nanochat's `optim.py`.

`OptimizerConfig.partition` adds the rules for puzzle embeddings and for parameters that never change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from valkyrie.axes import PARAMETER_GROUPS, Parameter
from valkyrie.optim import (
    UNAVERAGED_GROUPS,
    OptimizerConfig,
    Training,
    is_parameter,
    learning_rate_schedule,
    scale_schedule,
)
from valkyrie.problems import Problem, ProblemCode, check_range

if TYPE_CHECKING:
    import optax

ITERATIONS = 5
"""Iterations that orthogonalize a matrix: the number of rows of `valkyrie.optim.muon.POLAR_EXPRESS`."""


@dataclass
class AdamGroup:
    """Settings of AdamW for a group of parameters.

    `learning_rate` is the group's peak. The warm-up and decay are those of the run's schedule.
    """

    learning_rate: float = 0.005
    beta1: float = 0.8
    beta2: float = 0.95
    weight_decay: float = 0.0


_ADAMW_GROUPS = [name for name in PARAMETER_GROUPS if name not in ("matrix", *UNAVERAGED_GROUPS)]
"""The groups that AdamW updates."""


def _default_groups() -> dict[str, AdamGroup]:
    return {
        "embedding": AdamGroup(0.3, beta2=0.995, weight_decay=0.001),
        "unembedding": AdamGroup(0.008, beta2=0.96, weight_decay=0.01),
        "value_embedding": AdamGroup(0.15, beta2=0.995, weight_decay=0.01),
        "vector": AdamGroup(0.005),
        "residual_scale": AdamGroup(0.005, weight_decay=0.05),
        "input_scale": AdamGroup(0.5, beta1=0.96),
        "scalar": AdamGroup(0.2),
        "ssm": AdamGroup(0.0025),
    }


@dataclass
class Config(OptimizerConfig):
    """Muon. Weight decay of matrices falls to 0 along a cosine and applies only to elements that the step also shrinks.

    Args:
        epsilon: Epsilon of AdamW.
        momentum_start: Momentum at the first step. It rises to `momentum` over `momentum_warmup` steps.
        momentum_end: Momentum at the last step. The momentum falls over the last `warmdown` fraction of the steps,
            whatever the `schedule` of the learning rate is, as in nanochat.
        beta2: Decay of the mean squares that NorMuon keeps to normalise rows or columns, null for plain Muon.
        groups: Settings of AdamW by parameter group, used instead of `learning_rate` and `weight_decay`.
    """

    name: str = "muon"
    family: str = "muon"
    epsilon: float = 1e-8
    momentum_start: float = 0.85
    momentum: float = 0.97
    momentum_end: float = 0.90
    momentum_warmup: int = 400
    beta2: float | None = 0.9
    groups: dict[str, AdamGroup] = field(default_factory=_default_groups)

    def transformation(self, specs: Any, training: Training) -> optax.GradientTransformation:
        import jax
        import jax.numpy as jnp
        import optax

        from valkyrie.optim.muon import MuonSettings, muon

        schedule = learning_rate_schedule(self, training.steps)
        length = self.decay_steps or training.steps

        def decay(step: Any) -> Any:
            return self.weight_decay * (1 + jnp.cos(jnp.pi * jnp.clip(step / length, 0, 1))) / 2

        def adamw(group: AdamGroup) -> optax.GradientTransformation:
            rate = scale_schedule(schedule, group.learning_rate / self.learning_rate)
            return optax.adamw(rate, group.beta1, group.beta2, self.epsilon, weight_decay=group.weight_decay)

        labels = jax.tree.map(_label, specs, is_leaf=is_parameter)
        matrices = jax.tree.map(lambda s, label: s if label == "matrix" else optax.MaskedNode(), specs, labels)
        settings = MuonSettings(schedule, momentum_schedule(self, length), decay, self.beta2, training.compute)
        present = set(jax.tree.leaves(labels))
        rules = {name: adamw(group) for name, group in sorted(self.groups.items()) if name in present}
        return self.partition({"matrix": muon(settings, matrices, training.stack_sharding), **rules}, labels, schedule)

    def state_bytes(self, parameter: Parameter) -> float:
        """Return the bytes of state per element: 4 for matrices (momentum), 8 for other parameters (two moments).

        Ignores NorMuon's mean squares, one number per row or column.
        """
        return 4.0 if is_matrix(parameter) else 8.0

    def update_flops(self, parameters: Iterable[Parameter], devices: np.ndarray) -> np.ndarray:
        """Return the FLOPs that the busiest device spends on orthogonalizing matrices, for each layout.

        Matrices of the same shape are stacked, and each device orthogonalizes whole matrices of the stack. An iteration
        on an (m, n) matrix X with m <= n computes three products: A = X X^T, A A, and B X with B = b A + c A A.
        """
        counts: Counter[tuple[int, int]] = Counter()
        for parameter in filter(is_matrix, parameters):
            count, rows, columns = matrix_shape(parameter)
            counts[min(rows, columns), max(rows, columns)] += count
        flops = 0.0 * devices
        for (m, n), count in counts.items():
            flops = flops + np.ceil(count / devices) * ITERATIONS * (4.0 * m * m * n + 2.0 * m**3)
        return flops

    def problems(self) -> list[Problem]:
        problems = super().problems()
        problems += self.check("momentum_start", "momentum", "momentum_end", "beta2", least=0, below=1)
        problems += [*self.check("epsilon", above=0), *self.check("momentum_warmup", least=1)]
        for name, group in self.groups.items():
            key = f"optimizer.groups.{name}"
            if name not in _ADAMW_GROUPS:
                text = f"{key}: AdamW updates no parameter group of this name. Use one of {', '.join(_ADAMW_GROUPS)}."
                problems.append(Problem(ProblemCode.unknown_name, key, text=text))
            for setting in ("learning_rate", "weight_decay"):
                problems += check_range(f"{key}.{setting}", getattr(group, setting), least=0)
            for setting in ("beta1", "beta2"):
                problems += check_range(f"{key}.{setting}", getattr(group, setting), least=0, below=1)
        if missing := ", ".join(name for name in _ADAMW_GROUPS if name not in self.groups):
            text = f"optimizer.groups has no settings for {missing}. Add them."
            problems.append(Problem(ProblemCode.missing, "optimizer.groups", text=text))
        return problems


def momentum_schedule(config: Config, length: int) -> Callable[[Any], Any]:
    """Return the momentum as a function of the step, for a schedule of `length` steps.

    The momentum rises linearly for `momentum_warmup` steps, stays constant, and falls linearly to `momentum_end` over
    the last `warmdown` fraction of the schedule. Where the rise and the fall overlap, only the rise applies, so the
    momentum never falls in the first `momentum_warmup` steps.
    """
    import jax.numpy as jnp

    decay_steps = max(round(config.warmdown * length), 1)

    def momentum(step: Any) -> Any:
        progress = jnp.clip(step / config.momentum_warmup, 0, 1)
        warmed_up = config.momentum_start + (config.momentum - config.momentum_start) * progress
        drop = jnp.clip((step - (length - decay_steps)) / decay_steps, 0, 1) * (config.momentum - config.momentum_end)
        return jnp.where(step < config.momentum_warmup, warmed_up, config.momentum - drop)

    return momentum


def is_matrix(parameter: Parameter) -> bool:
    """Return whether Muon updates a parameter: a matrix, or a stack of matrices over layers and experts."""
    return parameter.group == "matrix" and len(parameter.shape) - parameter.stack_dims >= 2


def matrix_shape(parameter: Parameter) -> tuple[int, int, int]:
    """Return (matrices, rows, columns) of a parameter.

    Rows are the first dimension of a matrix (after `Parameter.stack_dims`); columns are all later ones, flattened.
    """
    shape = parameter.shape[parameter.stack_dims :]
    return math.prod(parameter.shape[: parameter.stack_dims]), shape[0], math.prod(shape[1:])


def _label(parameter: Parameter) -> str:
    if is_matrix(parameter):
        return "matrix"
    return "vector" if parameter.group == "matrix" else parameter.group
