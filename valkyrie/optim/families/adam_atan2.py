"""AdamATan2: Adam without epsilon (`valkyrie.ops.atan2`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from valkyrie.optim import AdamLike

if TYPE_CHECKING:
    import optax


@dataclass
class Config(AdamLike):
    """AdamATan2, which has no epsilon to tune."""

    name: str = "adam_atan2"
    family: str = "adam_atan2"
    beta1: float = 0.9
    beta2: float = 0.95
    ssm_learning_rate_ratio: float = 0.5

    def directions(self) -> optax.GradientTransformation:
        from valkyrie.ops.atan2 import scale_by_atan2

        return scale_by_atan2(self.beta1, self.beta2)
