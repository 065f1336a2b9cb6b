"""`mode=search`: finds the fastest layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from valkyrie.config.modes import TRAINING_KEYS, CompilingMode, MeasuringMode, Needs, check_time
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.trees import flatten, override_text

if TYPE_CHECKING:
    from valkyrie.config.run import Run


@dataclass
class Config(CompilingMode, MeasuringMode):
    """Settings of `mode=search`.

    Args:
        budget: time for compiles, and the same again for measurements (`10min`, `90s`, `2h`); null for no limit. At
            its end, a running compile is stopped (the first one at twice this time), and no further measurement starts.
        targets: slices to compare. If empty, searches only the slice of `target`.
        shapes: whether to search every shape of a slice.
        search_batch: whether to search the global batch as well (`batch=auto` for short).
        device_batches: values to try for the number of sequences that a device processes at a time, per pipeline stage
            (`device_batch=[2,4]` for short). If empty, the number of microbatches varies, unless the command sets it.
        vary: values to try for other settings of the model, such as `mode.vary.model.moe.capacity_factor=[1.25,null]`.
            Settings that compute the same function, such as `model.moe.dispatch`, vary unless the command sets them.
        compiles: maximum number of layouts to compile.
        measure: maximum number of layouts to measure, if the devices are available. Measurements do not use the options
            that `tune` found. The answer includes these options only if the tuned layout is the fastest.
        tune: time for trying compiler options and implementations on the best layout; null for none.
        tokens: tokens to train on. The answer reports the hours and dollars for them.
        budget_usd: dollars to spend. The answer reports the number of tokens that they pay for, and its command trains
            on them.
    """

    description: ClassVar[str] = (
        "find the fastest layout on a slice: estimate all, compile the best, measure them if this machine is the slice"
    )
    needs: ClassVar[Needs] = Needs.nothing
    short_keys: ClassVar[tuple[str, ...]] = ("tokens", "budget_usd", "budget")
    ignores_layout: ClassVar[bool] = True
    trial_limit_s: ClassVar[float | None] = None

    unread: ClassVar[frozenset[str]] = TRAINING_KEYS - {"seed"}  # measurements initialise the weights

    name: str = "search"
    budget: str | None = "8min"
    targets: list[str] = field(default_factory=list)
    shapes: bool = False
    search_batch: bool = False
    device_batches: list[int] = field(default_factory=list)
    vary: dict[str, Any] = field(default_factory=dict)
    compiles: int = 12
    measure: int = 4
    tune: str | None = None
    tokens: float | None = None
    budget_usd: float | None = None

    def problems(self) -> list[Problem]:
        """Return the problems of this mode's settings."""
        problems = super().problems()
        for key in ("tokens", "budget_usd"):
            problems += check_range(f"mode.{key}", getattr(self, key), above=0)
        for key in ("compiles", "measure"):
            problems += check_range(f"mode.{key}", getattr(self, key), least=0)
        for count in self.device_batches:
            problems += check_range("mode.device_batches", count, least=1)
        for key, values in flatten(self.vary).items():
            if not key.startswith("model.") or not isinstance(values, list) or not values:
                reason = (
                    "the values must be a list" if key.startswith("model.") else f"{key} is no setting of the model"
                )
                text = f"mode.vary.{key}={override_text(values)}: {reason}. For example: "
                text += "mode.vary.model.moe.capacity_factor=[1.25,null]."
                problems.append(Problem(ProblemCode.malformed, f"mode.vary.{key}", values, text))
        return [*problems, *check_time("mode.budget", self.budget), *check_time("mode.tune", self.tune)]

    def run(self, run: Run) -> int:
        """Search for the fastest layout. Returns the exit status."""
        from valkyrie.search.mode import search_mode

        return search_mode(run)
