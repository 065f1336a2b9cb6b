"""The optimizer: AdamW or AdamATan2 with warm-up and cosine decay, clipping, and groups with rules of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from valkyrie.precision import ACCUMULATED

if TYPE_CHECKING:
    import optax


NOT_AVERAGED = frozenset({"puzzle", "fixed"})
"""The groups that `ema_decay` does not average: tables whose rows change seldom, and what never changes."""


class Kind(Enum):
    """How a step follows from gradients: AdamW (arXiv 1711.05101), or AdamATan2 (`valkyrie.ops.atan2`)."""

    adamw = "adamw"
    adam_atan2 = "adam_atan2"


@dataclass
class OptimizerConfig:
    """An optimizer of some `kind` with linear warm-up and cosine decay (none where `final_ratio` is 1).

    The schedule takes `decay_steps` steps, null for as many as the run has; after them the rate stays at its last.
    `ssm_learning_rate_ratio` scales the rate of S5's own parameters (B, Lambda, log_step, norm), which are never
    decayed, as in lindermanlab/S5 `train_helpers.py`. `final_ratio` is the last learning rate over the peak.
    Rows of puzzles take steps by the signs of their gradients at `puzzle_learning_rate`, null for the rate of the rest.
    `clip_norm` null leaves gradients alone; `ema_decay` null keeps no average of the parameters.
    """

    name: str = "adamw"
    kind: Kind = Kind.adamw
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
    puzzle_learning_rate: float | None = None
    ema_decay: float | None = None

    def problems(self) -> list[str]:
        """Return every reason why this recipe makes no sense, in the words of the command line."""
        problems = []
        if not 0 < self.learning_rate < math.inf:
            problems.append(f"optimizer.learning_rate={self.learning_rate}: must be above 0.")
        if self.puzzle_learning_rate is not None and not 0 < self.puzzle_learning_rate < math.inf:
            rate = self.puzzle_learning_rate
            problems.append(f"optimizer.puzzle_learning_rate={rate}: must be above 0, or null for learning_rate.")
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

    Groups: `matrix` (decayed), `vector` (not decayed), `ssm` (not decayed, at `ssm_learning_rate_ratio` of the rate),
    `puzzle` (by signs, at `puzzle_learning_rate`, decayed) and `fixed` (left alone).
    Clipping is by the global norm over all groups. Moments, and the updates made of them, are float32 whatever the
    dtypes of parameters and gradients.
    """
    import jax
    import optax

    schedule = learning_rate(config, steps)

    def rate(ratio: float) -> Callable[[Any], Any]:
        return schedule if ratio == 1.0 else lambda step: ratio * schedule(step)

    def adam(ratio: float, decay: float) -> optax.GradientTransformation:
        if config.kind is Kind.adamw:
            b1, b2, eps = config.beta1, config.beta2, config.epsilon
            return optax.adamw(rate(ratio), b1=b1, b2=b2, eps=eps, weight_decay=decay)
        from valkyrie.ops.atan2 import scale_by_atan2

        decayed = optax.add_decayed_weights(decay)
        directions = scale_by_atan2(config.beta1, config.beta2)
        return optax.chain(directions, decayed, optax.scale_by_learning_rate(rate(ratio)))

    rules: dict[Hashable, optax.GradientTransformation] = {
        "matrix": adam(1.0, config.weight_decay),
        "vector": adam(1.0, 0.0),
        "ssm": adam(config.ssm_learning_rate_ratio, 0.0),
    }
    if NOT_AVERAGED & set(jax.tree.leaves(groups)):
        from valkyrie.ops.atan2 import signs_of_rows

        ratio = (config.puzzle_learning_rate or config.learning_rate) / config.learning_rate
        signs = signs_of_rows(config.weight_decay)
        rules |= {"puzzle": optax.chain(signs, optax.scale_by_learning_rate(rate(ratio)))}
        rules |= {"fixed": optax.set_to_zero()}
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
