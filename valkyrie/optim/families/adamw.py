"""AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkyrie.optim import OptimizerConfig, scaled
from valkyrie.problems import Problem

if TYPE_CHECKING:
    import optax


@dataclass
class Config(OptimizerConfig):
    """AdamW.

    `ssm_learning_rate_ratio` scales the rate of S5's own parameters (B, Lambda, log_step, norm), which are never
    decayed, as in lindermanlab/S5 `train_helpers.py`.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    ssm_learning_rate_ratio: float = 0.5

    def rules(self, rate: optax.Schedule) -> dict[str, optax.GradientTransformation]:
        """AdamW for each group."""
        import optax

        def adamw(ratio: float, decay: float) -> optax.GradientTransformation:
            return optax.adamw(scaled(rate, ratio), self.beta1, self.beta2, self.epsilon, weight_decay=decay)

        ssm = adamw(self.ssm_learning_rate_ratio, 0.0)
        return {"matrix": adamw(1.0, self.weight_decay), "vector": adamw(1.0, 0.0), "ssm": ssm}

    def problems(self) -> list[Problem]:
        """Return everything that is wrong with these settings."""
        problems = [*super().problems(), *self.check("beta1", "beta2", least=0, below=1)]
        return [*problems, *self.check("ssm_learning_rate_ratio", least=0), *self.check("epsilon", above=0)]
