"""AdamATan2, which has no epsilon (`valkyrie.ops.atan2`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkyrie.optim import OptimizerConfig, scaled
from valkyrie.problems import Problem

if TYPE_CHECKING:
    import optax


@dataclass
class Config(OptimizerConfig):
    """AdamATan2. `ssm_learning_rate_ratio` is that of AdamW."""

    name: str = "adam_atan2"
    family: str = "adam_atan2"
    beta1: float = 0.9
    beta2: float = 0.95
    ssm_learning_rate_ratio: float = 0.5

    def rules(self, rate: optax.Schedule) -> dict[str, optax.GradientTransformation]:
        """AdamATan2 with decoupled weight decay for each group."""
        import optax

        from valkyrie.ops.atan2 import scale_by_atan2

        def adam(ratio: float, decay: float) -> optax.GradientTransformation:
            decayed = optax.add_decayed_weights(decay)
            directions = scale_by_atan2(self.beta1, self.beta2)
            return optax.chain(directions, decayed, optax.scale_by_learning_rate(scaled(rate, ratio)))

        ssm = adam(self.ssm_learning_rate_ratio, 0.0)
        return {"matrix": adam(1.0, self.weight_decay), "vector": adam(1.0, 0.0), "ssm": ssm}

    def problems(self) -> list[Problem]:
        """Return everything that is wrong with these settings."""
        problems = [*super().problems(), *self.check("beta1", "beta2", least=0, below=1)]
        return [*problems, *self.check("ssm_learning_rate_ratio", least=0)]
