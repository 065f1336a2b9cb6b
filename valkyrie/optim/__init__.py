"""Optimizers: the learning rate schedule, clipping and update rules that all optimizer families share.

A family is a module with a dataclass `Config` that derives from `OptimizerConfig`; see README.md in this folder.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, Any

from valkyrie.axes import Parameter
from valkyrie.extensions import Families
from valkyrie.hooks import returns
from valkyrie.precision import ACCUMULATOR_DTYPE
from valkyrie.problems import Problem, check_range

if TYPE_CHECKING:
    import numpy as np
    import optax

    from valkyrie.optim.muon import StackSharding

UNAVERAGED_GROUPS = frozenset({"puzzle", "balance", "fixed"})
"""Groups with rules of their own, which `ema_decay` does not average.

These are tables with rarely updated rows, biases that balance experts, and parameters that never change.
"""

_RULE_GROUPS = dict.fromkeys(("matrix", "vector", "ssm")).keys()
"""The groups that `OptimizerConfig.rules` distinguishes."""


class Schedule(Enum):
    """The learning rate after warm-up: a cosine, or constant followed by a linear decay (`trapezoid`)."""

    cosine = "cosine"
    trapezoid = "trapezoid"


@dataclass(frozen=True)
class Training:
    """Properties of a run that an optimizer depends on.

    Args:
        steps: Optimizer steps of the run.
        compute: Name of the compute dtype of the model's matmuls.
        stack_sharding: Sharding of Muon's stacks of matrices, or None for a single device.
    """

    steps: int
    compute: str = ACCUMULATOR_DTYPE.value
    stack_sharding: StackSharding | None = None


def _is_byte_count(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


@dataclass
class OptimizerConfig:
    """Settings of every optimizer. The `Config` of a family derives from this and adds its settings.

    Args:
        family: The module that defines the optimizer.
        learning_rate: Peak of the schedule.
        warmup_steps: Steps of linear warm-up.
        decay_steps: Length of the schedule in steps, null for the length of the run. The rate is constant afterwards.
        final_ratio: Final learning rate as a fraction of the peak; 1 for no decay.
        schedule: Shape of the decay after warm-up: `cosine` decays at once, `trapezoid` holds the peak first.
        warmdown: Fraction of the schedule over which `trapezoid` decays, at its end.
        weight_decay: Weight decay of matrices, embeddings and puzzle embeddings.
        clip_norm: Maximum global norm of the gradients, null for no clipping.
        puzzle_learning_rate: Peak rate of puzzle embeddings, which are updated by the signs of their gradients; null
            for `learning_rate`.
        balance_rate: Change per step of the biases that balance the loads of experts (`model.moe.selection_bias`). It
            does not follow the schedule.
        ema_decay: Decay of the moving average of parameters, null for no average.
    """

    name: str = "adamw"
    family: str = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay_steps: int | None = None
    final_ratio: float = 0.1
    schedule: Schedule = Schedule.cosine
    warmdown: float = 0.65
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    puzzle_learning_rate: float | None = None
    balance_rate: float = 1e-3
    ema_decay: float | None = None

    def rules(self, rate: optax.Schedule) -> dict[str, optax.GradientTransformation]:
        """Build the transformation of each group of parameters: `matrix` (decayed), `vector` and `ssm` (not decayed).

        `matrix` includes embeddings. `vector` includes all other groups of `valkyrie.axes.PARAMETER_GROUPS` except
        `puzzle`, `balance` and `fixed`, for which `partition` adds rules. A family that distinguishes more groups
        overrides `transformation` instead.

        Args:
            rate: Learning rate by step.
        """
        # Not an abstract method: a family may override `transformation` instead, as Muon does, and then needs no rules.
        # Only a user's own family that defines neither gets here.
        raise ValueError(
            f"optimizer.family={self.family}: Config defines neither `rules` nor `transformation`. Define one of them."
        )

    def transformation(self, specs: Any, training: Training) -> optax.GradientTransformation:
        """Build the transformation of all parameters, without clipping.

        Args:
            specs: Tree of `Parameter` with the structure of the parameters. Gradients, parameters and state are
                float32.
            training: Properties of the run.

        Raises:
            ValueError: `rules` returns a rule for an unknown group, or none for a group that the model has.
        """
        import jax

        rate = learning_rate_schedule(self, training.steps)
        rules, labels = self.rules(rate), jax.tree.map(_label, specs, is_leaf=is_parameter)
        if unknown := [str(group) for group in rules if group not in _RULE_GROUPS]:
            text = (
                f"the unknown group{'s' * (len(unknown) > 1)} {', '.join(unknown)}. Groups: {', '.join(_RULE_GROUPS)}."
            )
            raise ValueError(f"optimizer={self.name}: rules() returned {text}")
        present = {*jax.tree.leaves(labels)}
        if missing := [group for group in _RULE_GROUPS if group in present and group not in rules]:
            raise ValueError(
                f"optimizer={self.name}: rules() has no rule for the parameter group{'s' * (len(missing) > 1)} "
                f"{', '.join(missing)}. Return a rule for each group that the model has."
            )
        return self.partition(rules, labels, rate)

    def partition(
        self, rules: Mapping[str, optax.GradientTransformation], labels: Any, rate: optax.Schedule
    ) -> optax.GradientTransformation:
        """Build the transformation that applies each rule to the parameters with its label.

        If any are present, adds rules for `puzzle`, `balance` and `fixed` parameters: sign updates with weight decay,
        sign updates at a constant rate, and no updates.

        Args:
            rules: Transformation by label, including its learning rate.
            labels: Tree of labels with the structure of the parameters.
            rate: Learning rate by step. The `puzzle` rule scales it to the peak `puzzle_learning_rate`.
        """
        import jax
        import optax

        from valkyrie.ops.atan2 import sign_descent_on_used_rows

        all_rules: dict[Hashable, optax.GradientTransformation] = {**rules}
        present = {*jax.tree.leaves(labels)}
        # Checkpoints contain a state for each of these labels, so the rules must not depend on more than their groups.
        if "balance" in present:
            all_rules["balance"] = optax.chain(optax.scale_by_sign(), optax.scale(-self.balance_rate))
        if present & {"puzzle", "fixed"}:
            ratio = (self.puzzle_learning_rate or self.learning_rate) / self.learning_rate
            scale_by_rate = optax.scale_by_learning_rate(scale_schedule(rate, ratio))
            all_rules["puzzle"] = optax.chain(sign_descent_on_used_rows(self.weight_decay), scale_by_rate)
            all_rules["fixed"] = optax.set_to_zero()
        return optax.partition(all_rules, labels)

    @returns("a number of bytes", _is_byte_count)
    def state_bytes(self, parameter: Parameter) -> float:
        """Return the bytes of optimizer state per element of a parameter, by default 8: two float32 moments."""
        return 8.0

    @returns("a number of bytes", _is_byte_count)
    def update_bytes(self, parameter: Parameter) -> float:
        """Return the HBM traffic of an update, in bytes per element of a parameter.

        An update reads the gradient (4 bytes), and reads and writes the parameter (2 x 4 bytes) and the state.
        """
        return 12.0 + 2 * self.state_bytes(parameter)

    def update_flops(self, parameters: Iterable[Parameter], devices: np.ndarray) -> np.ndarray:
        """Return the matmul FLOPs of an update on the busiest device, for each layout. By default 0.

        Args:
            parameters: Every parameter of the model.
            devices: Number of devices of each layout.
        """
        return 0.0 * devices

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid setting."""
        return [
            *self.check("learning_rate", above=0),
            *self.check("puzzle_learning_rate", above=0, otherwise="null for learning_rate"),
            *self.check("weight_decay", "warmup_steps", "balance_rate", least=0),
            *self.check("final_ratio", least=0, most=1),
            *self.check("decay_steps", least=1, otherwise="null for `steps`"),
            *self.check("clip_norm", above=0, otherwise="null for no clipping"),
            *self.check("ema_decay", above=0, below=1, otherwise="null for no average"),
            *self.check("warmdown", above=0, most=1),
        ]

    def check(self, *names: str, otherwise: str = "", **bounds: int | float) -> list[Problem]:
        """Return a problem for each of the named settings that is out of bounds (see `check_range`)."""
        return [
            problem
            for name in names
            for problem in check_range(f"optimizer.{name}", getattr(self, name), otherwise=otherwise, **bounds)
        ]


class AdamLike(OptimizerConfig, ABC):
    """Base of Adam-like optimizers. Subclasses define `directions`; weight decay of matrices is decoupled.

    `ssm_learning_rate_ratio` scales the learning rate of S5's parameters (B, Lambda, log_step, norm), which are never
    decayed, as in lindermanlab/S5 `train_helpers.py`.
    """

    beta1: float
    beta2: float
    ssm_learning_rate_ratio: float

    @abstractmethod
    def directions(self) -> optax.GradientTransformation:
        """Build the transformation from gradients to directions, before weight decay and learning rate."""

    def rules(self, rate: optax.Schedule) -> dict[str, optax.GradientTransformation]:
        """Build the transformation of each group: `directions`, then weight decay, then the learning rate."""
        import optax

        def rule(ratio: float, decay: float) -> optax.GradientTransformation:
            scale_by_rate = optax.scale_by_learning_rate(scale_schedule(rate, ratio))
            return optax.chain(self.directions(), optax.add_decayed_weights(decay), scale_by_rate)

        ssm = rule(self.ssm_learning_rate_ratio, 0.0)
        return {"matrix": rule(1.0, self.weight_decay), "vector": rule(1.0, 0.0), "ssm": ssm}

    def problems(self) -> list[Problem]:
        """Return a problem for each invalid setting."""
        problems = [*super().problems(), *self.check("beta1", "beta2", least=0, below=1)]
        return [*problems, *self.check("ssm_learning_rate_ratio", least=0)]


FAMILIES = Families("optimizer.family", "valkyrie.optim.families", OptimizerConfig)


def convert_old_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the optimizer settings of an old `run.yaml` to the current keys.

    Before optimizers had families, all shared one set of keys: `kind` named the optimizer, and `muon` held the settings
    of Muon. Keys that the optimizer does not use are dropped. Settings without `kind` are current and stay unchanged.
    """
    if "kind" not in settings:
        return dict(settings)
    family = str(settings["kind"])
    values = {**settings, **(settings.get("muon") or {}), "family": family}
    field_names = FAMILIES.config_class(family).__dataclass_fields__
    return {key: value for key, value in values.items() if key in field_names}


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by step: linear warm-up to the peak, then decay to `final_ratio` of the peak.

    The schedule takes `config.decay_steps` steps, or `steps` if that is None. Warm-up is shortened to `longest_warmup`.
    """
    import optax

    length = config.decay_steps or steps
    if Schedule(config.schedule) is Schedule.trapezoid:
        return _trapezoid(config, length)
    warmup = min(config.warmup_steps, longest_warmup(config, steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(length, warmup + 1),
        end_value=config.learning_rate * config.final_ratio,
    )


def longest_warmup(config: OptimizerConfig, steps: int) -> int:
    """Return the maximum number of warm-up steps: all but one step for a cosine, or but the decay for `trapezoid`."""
    length = config.decay_steps or steps
    is_trapezoid = Schedule(config.schedule) is Schedule.trapezoid
    return max(length - (_linear_decay_steps(config, length) if is_trapezoid else 1), 0)


def rate_rises_if_extended(config: OptimizerConfig, steps: int, extended_steps: int) -> bool:
    """Return whether a run of `steps` steps would continue with a higher learning rate if extended to `extended_steps`.

    A longer run stretches the schedule, unless it is constant (`final_ratio=1`) or has a fixed length (`decay_steps`).
    """
    import numpy as np

    extended_rate, original_rate = (
        np.asarray(learning_rate_schedule(config, length)(steps)) for length in (extended_steps, steps)
    )
    return bool(extended_rate > original_rate * (1 + 1e-6))  # both are float32


def _linear_decay_steps(config: OptimizerConfig, length: int) -> int:
    return max(round(config.warmdown * length), 1)


def _trapezoid(config: OptimizerConfig, length: int) -> optax.Schedule:
    """Return a schedule of `length` steps: warm-up, the peak, and a linear decay over the last fraction `warmdown`."""
    import jax.numpy as jnp

    decay_steps = _linear_decay_steps(config, length)
    warmup = min(config.warmup_steps, longest_warmup(config, length))

    def rate(step: Any) -> Any:
        remaining = jnp.clip((length - step) / decay_steps, 0, 1)
        warmed_up = jnp.minimum((step + 1) / max(warmup, 1), 1)
        return config.learning_rate * jnp.minimum(warmed_up, remaining + (1 - remaining) * config.final_ratio)

    return rate


def scale_schedule(schedule: optax.Schedule, ratio: float) -> optax.Schedule:
    """Return the schedule multiplied by `ratio`."""
    return schedule if ratio == 1.0 else lambda step: ratio * schedule(step)


def make_optimizer(config: OptimizerConfig, specs: Any, training: Training) -> optax.GradientTransformation:
    """Build the optax transformation of a config, with clipping by the global norm over all groups.

    State and updates are float32 for any dtype of parameters and gradients.

    Args:
        config: Settings of the optimizer.
        specs: Tree of `Parameter` with the structure of the parameters.
        training: Properties of the run.
    """
    import optax

    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    inner = optax.chain(*clip, config.transformation(specs, training))

    def cast_to_accumulator(tree: Any) -> Any:
        return optax.tree.cast(tree, ACCUMULATOR_DTYPE.value)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(cast_to_accumulator(updates), state, cast_to_accumulator(params))

    return optax.GradientTransformation(lambda params: inner.init(cast_to_accumulator(params)), update)


def check_bytes(config: OptimizerConfig, parameters: Iterable[Parameter]) -> None:
    """Call `state_bytes` and `update_bytes`. Raises ValueError if a user's method does not return a number of bytes."""
    for parameter in parameters:
        config.state_bytes(parameter)
        config.update_bytes(parameter)


def is_parameter(node: Any) -> bool:
    """Return whether a node is a `Parameter`. Pass it as `is_leaf` to `jax.tree` functions."""
    return isinstance(node, Parameter)


def _label(parameter: Parameter) -> str:
    group = parameter.group
    if group in ("embedding", "unembedding", "value_embedding"):
        return "matrix"
    return group if group in ("matrix", "ssm", *UNAVERAGED_GROUPS) else "vector"
