"""Settings of the model that a search varies in addition to the layout."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from valkyrie.config.run import Run, RunConfig
from valkyrie.models import Model, layer_blocks, sequence_problems
from valkyrie.parallel.candidates import Candidates
from valkyrie.problems import first_line, raise_problems
from valkyrie.trees import get_value, override_text, with_value


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the model that a search tries.

    Args:
        overrides: The settings that differ from those of the search's command, such as `model.moe.dispatch=exchanged`.
        model: The model with these settings, or None for that of the run.
        axes: Logical axes of parameters. In layouts that do not split all of them, these settings change nothing.
    """

    overrides: tuple[str, ...] = ()
    model: Model | None = None
    axes: tuple[str, ...] = ()

    def apply(self, run: Run) -> Run:
        """Return a run with these settings and all other settings of `run`."""
        return run if self.model is None else _with_config(run, replace(run.config, model=self.model))

    def select(self, candidates: Candidates) -> np.ndarray:
        """Return the indices of the layouts in which these settings change something."""
        is_split = [candidates.axes_size(candidates.stored_axes(axis)) > 1 for axis in self.axes]
        return np.flatnonzero(np.all(is_split, axis=0) if is_split else np.ones(len(candidates), bool))


def find_settings(run: Run, keys: Collection[str], vary: Mapping[str, Sequence[Any]]) -> list[ModelSettings]:
    """Return the settings of a run's model to try, those with the fewest changes first.

    These are all combinations of the values in `vary` and, for each, of the values of other settings that compute the
    same function (`Block.alternatives`).

    Args:
        run: The run of the search.
        keys: Keys that the command sets. They are not varied.
        vary: Values by key.

    Raises:
        ValueError: A key or value in `vary` is invalid, or changes the shapes of parameters.
    """
    settings = list[ModelSettings]()
    for key in ("model.name", "model.family"):
        if key in vary:
            raise ValueError(f"mode.vary.{key}: this names a model. Run one search for each model.")
    for values in itertools.product(*vary.values()):
        varied = _compose(run, dict(zip(vary, values, strict=True))) if vary else run
        settings += [_describe(run, changed, axes) for changed, axes in _equivalent_runs(varied, {*keys, *vary})]
    distinct = {(each.overrides, each.axes): each for each in settings}.values()
    return sorted(distinct, key=lambda each: len(each.overrides))


def _equivalent_runs(run: Run, fixed_keys: Collection[str]) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """Yield runs that compute the same function, each with the axes that must be split for it to be another program."""
    blocks = layer_blocks(run.model)
    alternatives = {a.key: a for block, context in blocks for a in block.alternatives(context)}
    varied = [a for key, a in alternatives.items() if key not in fixed_keys]
    for values in itertools.product(*(a.values for a in varied)):
        config, axes = run.config, list[str]()
        for (key, _, axis), value in zip(varied, values, strict=True):
            if value != get_value(config, key):
                config = with_value(config, key, value)
                axes += [] if axis is None else [axis]
        yield _with_config(run, config), tuple(axes)


def _with_config(run: Run, config: RunConfig) -> Run:
    return Run(config, config.model, run.arguments)


def _compose(run: Run, values: Mapping[str, Any]) -> Run:
    """Return a run with other values of some settings of its model."""
    config = OmegaConf.structured(run.config)
    for key, value in values.items():
        try:
            OmegaConf.update(config, key, value)
        except OmegaConfBaseException as error:
            raise ValueError(f"mode.vary.{key}: {override_text(value)}: {first_line(error)}") from error
    composed_config = OmegaConf.to_object(config)
    assert isinstance(composed_config, RunConfig)
    varied = _with_config(run, composed_config)
    raise_problems(varied.model.problems() or sequence_problems(varied.model, config.seq))
    if _shapes(varied) != _shapes(run):
        text = " ".join(f"{key}={override_text(value)}" for key, value in values.items())
        raise ValueError(
            f"mode.vary: {text} changes the shapes of parameters, so step times cannot rank them. Run one "
            "search for each value."
        )
    return varied


def _shapes(run: Run) -> dict[str, tuple[object, ...]]:
    return {name: (spec.axes, spec.shape) for name, spec in run.model.parameters().items()}


def _describe(run: Run, changed: Run, axes: tuple[str, ...]) -> ModelSettings:
    before, after = run.values(), changed.values()
    overrides = tuple(f"{key}={value}" for key, value in after.items() if before.get(key) != value)
    return ModelSettings(overrides, changed.model, axes) if overrides else ModelSettings()
