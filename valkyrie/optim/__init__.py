"""The optimizer: AdamW, AdamATan2 or Muon; its schedule, clipping, and groups with rules of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from valkyrie.axes import GROUPS
from valkyrie.precision import ACCUMULATED

if TYPE_CHECKING:
    import optax

    from valkyrie.optim.muon import Spread


NOT_AVERAGED = frozenset({"puzzle", "fixed"})
"""The groups that `ema_decay` does not average: tables whose rows change seldom, and what never changes."""


class Kind(Enum):
    """How a step follows from gradients: AdamW, AdamATan2 (`valkyrie.ops.atan2`), or Muon and AdamW (`muon`)."""

    adamw = "adamw"
    adam_atan2 = "adam_atan2"
    muon = "muon"


class Schedule(Enum):
    """The learning rate after warm-up: along a cosine, or held at its peak and then lowered evenly (`trapezoid`)."""

    cosine = "cosine"
    trapezoid = "trapezoid"


@dataclass
class AdamGroup:
    """AdamW for a group of parameters beside Muon: its own peak rate, which follows the run's schedule."""

    learning_rate: float = 0.005
    beta1: float = 0.8
    beta2: float = 0.95
    weight_decay: float = 0.0


_BY_ADAMW = [name for name in GROUPS if name not in ("matrix", *NOT_AVERAGED)]
"""The groups that AdamW takes where Muon takes matrices."""


def _groups() -> dict[str, AdamGroup]:
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
class MuonConfig:
    """Muon for matrices (nanochat's `optim.py`), AdamW by `groups` for the rest.

    Momentum rises from `momentum_start` to `momentum` over `momentum_warmup` steps, and falls to `momentum_end` while
    the learning rate falls. `beta2` is that of the mean squares by which rows are evened out (NorMuon); null: not. The
    run's `weight_decay` falls along a cosine to 0, and decays only what the step makes smaller too.
    """

    momentum_start: float = 0.85
    momentum: float = 0.97
    momentum_end: float = 0.90
    momentum_warmup: int = 400
    beta2: float | None = 0.9
    groups: dict[str, AdamGroup] = field(default_factory=_groups)

    def problems(self) -> list[str]:
        """Return every reason why this recipe makes no sense, in the words of the command line."""
        problems = []
        for key in ("momentum_start", "momentum", "momentum_end", "beta2"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < 1:
                problems.append(f"optimizer.muon.{key}={value}: must be at least 0 and below 1.")
        if self.momentum_warmup < 1:
            problems.append(f"optimizer.muon.momentum_warmup={self.momentum_warmup}: at least 1 is needed.")
        for name, group in self.groups.items():
            key = f"optimizer.muon.groups.{name}"
            if name not in _BY_ADAMW:
                known = ", ".join(_BY_ADAMW)
                problems.append(f"{key} is no group of parameters that AdamW takes. There are {known}.")
            if not 0 <= group.learning_rate < math.inf or not 0 <= group.weight_decay < math.inf:
                problems.append(f"{key}: learning_rate and weight_decay must be at least 0.")
            if not 0 <= group.beta1 < 1 or not 0 <= group.beta2 < 1:
                problems.append(f"{key}: beta1 and beta2 must be at least 0 and below 1.")
        missing = ", ".join(name for name in _BY_ADAMW if name not in self.groups)
        return problems + ([f"optimizer.muon.groups lacks {missing}."] if missing else [])


@dataclass
class OptimizerConfig:
    """An optimizer of some `kind` with linear warm-up and a decay (none where `final_ratio` is 1).

    `kind: muon` goes by `muon` (null: its defaults). `schedule: trapezoid` holds the peak until the last `warmdown` of
    the steps. The schedule takes `decay_steps` steps, null for as many as the run has; after them the rate stays at its
    last. `ssm_learning_rate_ratio` scales the rate of S5's own parameters (B, Lambda, log_step, norm), which are never
    decayed, as in lindermanlab/S5 `train_helpers.py`. Rows of puzzles take steps by the signs of their gradients at
    `puzzle_learning_rate`, null for the rate of the rest.
    `final_ratio` is the last learning rate over the peak. `clip_norm` null leaves gradients alone; `ema_decay` null
    keeps no average of the parameters.
    """

    name: str = "adamw"
    kind: Kind = Kind.adamw
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay_steps: int | None = None
    final_ratio: float = 0.1
    schedule: Schedule = Schedule.cosine
    warmdown: float = 0.65
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    ssm_learning_rate_ratio: float = 0.5
    puzzle_learning_rate: float | None = None
    ema_decay: float | None = None
    muon: MuonConfig | None = None

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
        if not 0 < self.warmdown <= 1:
            problems.append(f"optimizer.warmdown={self.warmdown}: must be above 0 and at most 1.")
        if self.muon is not None and self.kind is not Kind.muon:
            problems.append(
                f"optimizer.muon is for kind=muon, and optimizer.kind={self.kind.value}. Use optimizer=muon."
            )
        return problems + ([] if self.muon is None else self.muon.problems())


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the schedule of a run of `steps` steps: linear warm-up to the peak, then down to `final_ratio` of it."""
    import optax

    length = steps if config.decay_steps is None else config.decay_steps
    if Schedule(config.schedule) is Schedule.trapezoid:
        return _trapezoid(config, length)
    warmup = min(config.warmup_steps, max(length - 1, 0))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(length, warmup + 1),
        end_value=config.learning_rate * config.final_ratio,
    )


def _trapezoid(config: OptimizerConfig, length: int) -> optax.Schedule:
    """Return a schedule that warms up, holds the peak, and falls evenly over the last `warmdown` of the steps."""
    import jax.numpy as jnp

    down = max(round(config.warmdown * length), 1)
    warmup = min(config.warmup_steps, length - down)

    def rate(step: Any) -> Any:
        left = jnp.clip((length - step) / down, 0, 1)
        up = jnp.minimum((step + 1) / max(warmup, 1), 1)
        return config.learning_rate * jnp.minimum(up, left + (1 - left) * config.final_ratio)

    return rate


def make_optimizer(
    config: OptimizerConfig,
    steps: int,
    groups: Any,
    specs: Any = None,
    compute: str = ACCUMULATED.value,
    spread: Spread | None = None,
) -> optax.GradientTransformation:
    """Return the optax transformation for parameters whose tree of group names is `groups` (`valkyrie.axes.GROUPS`).

    Without Muon, matrices and tables are decayed, and `ssm` goes at `ssm_learning_rate_ratio` of the rate. `puzzle`
    goes by signs, at `puzzle_learning_rate`, decayed; `fixed` is left alone. Muon needs the tree of the parameters'
    `specs`; it multiplies matrices in the dtype `compute`, split by `spread`. Clipping is by the global norm over all
    groups. Moments, and the updates made of them, are float32 whatever the dtypes of
    parameters and gradients.
    """
    import jax
    import optax

    if config.kind is Kind.muon:
        partitioned = _with_muon(config, config.muon or MuonConfig(), steps, specs, compute, spread)
    else:
        rules = _adam_rules(config, learning_rate(config, steps))
        if NOT_AVERAGED & set(jax.tree.leaves(groups)):
            rules |= _rules_of_rows(config, learning_rate(config, steps))
        partitioned = optax.partition(rules, jax.tree.map(_adam_rule, groups))
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    return _accumulated(optax.chain(*clip, partitioned))


def _adam_rules(config: OptimizerConfig, schedule: Any) -> dict[Hashable, optax.GradientTransformation]:
    import optax

    def adam(ratio: float, decay: float) -> optax.GradientTransformation:
        if config.kind is Kind.adamw:
            b1, b2, eps = config.beta1, config.beta2, config.epsilon
            return optax.adamw(_scaled(schedule, ratio), b1=b1, b2=b2, eps=eps, weight_decay=decay)
        from valkyrie.ops.atan2 import scale_by_atan2

        decayed = optax.add_decayed_weights(decay)
        directions = scale_by_atan2(config.beta1, config.beta2)
        return optax.chain(directions, decayed, optax.scale_by_learning_rate(_scaled(schedule, ratio)))

    return {
        "matrix": adam(1.0, config.weight_decay),
        "vector": adam(1.0, 0.0),
        "ssm": adam(config.ssm_learning_rate_ratio, 0.0),
    }


def _rules_of_rows(config: OptimizerConfig, schedule: Any) -> dict[Hashable, optax.GradientTransformation]:
    """Return the rules of puzzles' rows, and of what never changes."""
    import optax

    from valkyrie.ops.atan2 import signs_of_rows

    ratio = (config.puzzle_learning_rate or config.learning_rate) / config.learning_rate
    signs = signs_of_rows(config.weight_decay)
    puzzle = optax.chain(signs, optax.scale_by_learning_rate(_scaled(schedule, ratio)))
    return {"puzzle": puzzle, "fixed": optax.set_to_zero()}


def _scaled(schedule: Any, ratio: float) -> Callable[[Any], Any]:
    return schedule if ratio == 1.0 else lambda step: ratio * schedule(step)


def _with_muon(
    config: OptimizerConfig, own: MuonConfig, steps: int, specs: Any, compute: str, spread: Spread | None
) -> optax.GradientTransformation:
    """Return Muon for matrices, and AdamW for each other group that there is."""
    import jax
    import jax.numpy as jnp
    import optax

    from valkyrie.axes import Parameter
    from valkyrie.optim.muon import Recipe, is_matrix, muon

    schedule = learning_rate(config, steps)
    length = steps if config.decay_steps is None else config.decay_steps
    down = max(round(config.warmdown * length), 1)

    def momentum(step: Any) -> Any:
        risen = own.momentum_start + (own.momentum - own.momentum_start) * jnp.clip(step / own.momentum_warmup, 0, 1)
        fallen = jnp.clip((step - (length - down)) / down, 0, 1) * (own.momentum - own.momentum_end)
        return jnp.where(step < own.momentum_warmup, risen, own.momentum - fallen)

    def decay(step: Any) -> Any:
        return config.weight_decay * (1 + jnp.cos(jnp.pi * jnp.clip(step / length, 0, 1))) / 2

    def adamw(group: AdamGroup) -> optax.GradientTransformation:
        def rate(step: Any) -> Any:
            return group.learning_rate / config.learning_rate * schedule(step)

        return optax.adamw(rate, group.beta1, group.beta2, config.epsilon, weight_decay=group.weight_decay)

    def label(spec: Parameter) -> str:
        return "matrix" if is_matrix(spec) else "vector" if spec.group == "matrix" else spec.group

    labels = jax.tree.map(label, specs, is_leaf=lambda node: isinstance(node, Parameter))
    matrices = jax.tree.map(lambda s, of: s if of == "matrix" else optax.MaskedNode(), specs, labels)
    recipe = Recipe(schedule, momentum, decay, own.beta2, compute)
    rules: dict[Hashable, optax.GradientTransformation] = {"matrix": muon(recipe, matrices, spread)}
    present = set(jax.tree.leaves(labels))
    rules |= {name: adamw(group) for name, group in sorted(own.groups.items()) if name in present}
    if NOT_AVERAGED & present:
        rules |= _rules_of_rows(config, schedule)
    return optax.partition(rules, labels)


def _adam_rule(group: str) -> str:
    """Return under which rule a group of parameters goes where nothing is Muon's."""
    if group in ("embedding", "unembedding", "value_embedding"):
        return "matrix"
    return group if group in ("matrix", "ssm", *NOT_AVERAGED) else "vector"


def _accumulated(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation that sees parameters and gradients in float32: its state and its updates are so too."""
    import optax

    def wide(tree: Any) -> Any:
        return optax.tree.cast(tree, ACCUMULATED.value)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return inner.update(wide(updates), state, wide(params))

    return optax.GradientTransformation(lambda params: inner.init(wide(params)), update)
