"""The optimizer: AdamW with warm-up and cosine decay, clipping, and a slower group for state-space parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from valkyrie.precision import ACCUMULATED

if TYPE_CHECKING:
    import optax


@dataclass
class OptimizerConfig:
    """AdamW (arXiv 1711.05101) with linear warm-up and cosine decay.

    The schedule takes `decay_steps` steps, null for as many as the run has; after them the rate stays at its last.
    `ssm_learning_rate_ratio` scales the rate of S5's own parameters (B, Lambda, log_step, norm), which are never
    decayed, as in lindermanlab/S5 `train_helpers.py`. `final_ratio` is the last learning rate over the peak.
    `clip_norm` null leaves gradients alone; `ema_decay` null keeps no average of the parameters.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay_steps: int | None = None
    final_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    ssm_learning_rate_ratio: float = 0.5
    ema_decay: float | None = None

    def problems(self) -> list[str]:
        """Return every reason why this recipe makes no sense, in the words of the command line."""
        problems = []
        if not 0 < self.learning_rate < math.inf:
            problems.append(f"optimizer.learning_rate={self.learning_rate}: must be above 0.")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                problems.append(f"optimizer.{key}={getattr(self, key)}: must be at least 0 and below 1.")
        if not 0 < self.epsilon < math.inf:
            problems.append(f"optimizer.epsilon={self.epsilon}: must be above 0.")
        for key in ("final_ratio", "weight_decay", "ssm_learning_rate_ratio"):
            if not 0 <= getattr(self, key) < math.inf:
                problems.append(f"optimizer.{key}={getattr(self, key)}: must be at least 0.")
        if self.warmup_steps < 0:
            problems.append(f"optimizer.warmup_steps={self.warmup_steps}: must be at least 0.")
        if self.decay_steps is not None and self.decay_steps < 1:
            problems.append(f"optimizer.decay_steps={self.decay_steps}: at least 1 is needed, or null for `steps`.")
        if self.clip_norm is not None and self.clip_norm <= 0:
            problems.append(f"optimizer.clip_norm={self.clip_norm}: must be above 0, or null for no clipping.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            problems.append(f"optimizer.ema_decay={self.ema_decay}: must be in (0, 1), or null for no average.")
        return problems


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the schedule of a run of `steps` steps: linear warm-up to the peak, cosine to `final_ratio` of it."""
    import optax

    length = steps if config.decay_steps is None else config.decay_steps
    warmup = min(config.warmup_steps, max(length - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(length, warmup + 1),
        end_value=config.learning_rate * config.final_ratio,
    )


def make_optimizer(config: OptimizerConfig, steps: int, groups: Any) -> optax.GradientTransformation:
    """Return the optax transformation for parameters whose tree of group names is `groups`.

    Groups: `matrix` (decayed), `vector` (not decayed), `ssm` (not decayed, at `ssm_learning_rate_ratio` of the rate).
    Clipping is by the global norm over all groups. Moments, and the updates made of them, are float32 whatever the
    dtypes of parameters and gradients.
    """
    import optax

    schedule = learning_rate(config, steps)

    def adamw(ratio: float, decay: float) -> optax.GradientTransformation:
        rate: Callable[[Any], Any] = schedule if ratio == 1.0 else lambda step: ratio * schedule(step)
        return optax.adamw(rate, b1=config.beta1, b2=config.beta2, eps=config.epsilon, weight_decay=decay)

    rules: dict[Hashable, optax.GradientTransformation] = {
        "matrix": adamw(1.0, config.weight_decay),
        "vector": adamw(1.0, 0.0),
        "ssm": adamw(config.ssm_learning_rate_ratio, 0.0),
    }
    partitioned = optax.partition(rules, groups)
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return _accumulated(optax.chain(*clip, partitioned))


def _accumulated(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation that sees parameters and gradients in float32: its state and its updates are so too."""
    import optax

    def wide(tree: Any) -> Any:
        return optax.tree.cast(tree, ACCUMULATED.value)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(lambda params: inner.init(wide(params)), update)
