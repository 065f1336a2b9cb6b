"""AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkyrie.optim import AdamLike
from valkyrie.problems import Problem

if TYPE_CHECKING:
    import optax


@dataclass
class Config(AdamLike):
    """AdamW. `epsilon` is added to the square root of the second moment."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    ssm_learning_rate_ratio: float = 0.5

    def directions(self) -> optax.GradientTransformation:
        import optax

        return optax.scale_by_adam(self.beta1, self.beta2, self.epsilon)

    def problems(self) -> list[Problem]:
        return [*super().problems(), *self.check("epsilon", above=0)]
