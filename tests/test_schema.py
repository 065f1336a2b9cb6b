"""Tests of numeric settings with zero, negative, huge and non-finite values: they work, or a message names the key."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import types
import typing
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jax
import pytest

from helpers import MODELS, compose_config, mark_slow_except, small_run
from valkyrie.config.run import Run
from valkyrie.data.config import SOURCES
from valkyrie.data.prepare import prepare
from valkyrie.data.sources import text as text_source
from valkyrie.parallel.mesh import MeshConfig, abstract_mesh
from valkyrie.problems import Problem, ProblemCode, Range
from valkyrie.train.program import StepProgram

HUGE = (2**31, 10**400)
INTEGERS, FLOATS = (0, -1, *HUGE), (0.0, -1.0, math.nan, math.inf, -math.inf)
STEP_GROUPS = ("model", "optimizer", "mesh", "precision", "partition")
"""Config groups that determine the training step, together with the run's `SIZES`."""
SIZES = ("batch", "seq", "microbatches")
INT64_KEYS = ("data.max_bytes", "data.shard_tokens", "data.generator_seed")
"""Keys whose values are 64-bit integers, so that 2**31 is legal."""


@lru_cache
def base(model: str) -> Run:
    return small_run(model, "batch=2", "seq=8")


def bad_numbers(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a pair (key, bad value) for every number in a tree of dataclasses and every bad value to try."""
    hints = typing.get_type_hints(type(values))
    for field in dataclasses.fields(values):
        value, hint, key = getattr(values, field.name), hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from bad_numbers(value, f"{key}.")
            continue
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for kind in kinds:
            if kind is int or kind is float:
                yield from ((key, bad) for bad in (INTEGERS if kind is int else FLOATS))
            elif typing.get_origin(kind) is list and value:
                item_type = typing.get_args(kind)[0]
                if item_type is int or typing.get_args(item_type)[:1] == (int,):
                    yield from ((key, [bad, *value[1:]]) for bad in INTEGERS)


def replace_key(values: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return dataclasses.replace(values, **{name: replace_key(getattr(values, name), rest, value) if rest else value})


@cache
def cases(model: str) -> list[tuple[str, Any]]:
    """Return the pairs (key, bad value) of a model's run. Only the first model has keys outside the model."""
    return [case for case in bad_numbers(base(model).config) if model == MODELS[0] or case[0].startswith("model.")]


def problems_of(model: str, key: str, value: Any) -> tuple[Run, list[Problem]]:
    """Return a run with one key changed, and its problems.

    If there are none and the key starts with `data.`, prepares the data, and returns an error of this as a problem.
    Asserts that each problem names the key, and that there is one if the value is not finite, or if it is in `HUGE` and
    the key is not in `INT64_KEYS`.
    """
    config = replace_key(base(model).config, key, value)
    run = Run(config, config.model)
    problems = run.problems()
    if not problems and key.startswith("data."):
        problems = data_problems(config.data, key)
    last = key.rpartition(".")[2]
    assert all(problem.key == key or last in str(problem) for problem in problems), (key, value, problems)
    if isinstance(value, float) and not math.isfinite(value):
        assert problems, (key, value, "no key takes what is not a finite number")
    if value in HUGE and key not in INT64_KEYS:
        assert problems, (key, "no key takes a number that JAX cannot count to")
    return run, problems


def test_every_refusal_of_a_number_names_its_key() -> None:
    refused = {key for model in MODELS for key, value in cases(model) if problems_of(model, key, value)[1]}
    assert {
        "steps",
        "model.vocab_multiple",
        "model.attention.kv_heads",
        "optimizer.clip_norm",
        "data.shard_tokens",
    } <= refused


@pytest.mark.parametrize("source", SOURCES.names())
def test_refusals_of_numbers_in_data_sources_name_their_key(source: str) -> None:
    run, config = base(MODELS[0]), SOURCES.config_class(source)
    data = config(**({"paths": ["x"]} if "paths" in {field.name for field in dataclasses.fields(config)} else {}))
    for key, value in bad_numbers(data, "data."):
        problems = run.changed(data=replace_key(data, key.removeprefix("data."), value)).problems()
        assert not problems or key in {problem.key for problem in problems}, (key, value, problems)
        assert problems or value in (0, *HUGE), (key, value)


@pytest.mark.parametrize(
    "key",
    ["model.s5.state_size", "model.attention.windows", "model.attention.dilations", "model.layers", "seq", "steps"],
)
def test_a_number_with_hundreds_of_digits_is_abbreviated(key: str):
    number = "9" * 400
    value = f"[{number}]" if key.endswith("s") and "attention" in key else number
    (problem,) = Run.from_config(compose_config("model=valkyrie_tiny", f"{key}={value}")).problems()
    assert (problem.code, problem.key) == (ProblemCode.too_large, key)
    assert problem.value == "999999999999... (400 characters)"


def test_an_implausible_number_of_layers_is_refused_before_building():
    run = Run.from_config(compose_config("model=gpt_tiny", "model.layers=2147483647"))
    assert [(problem.key, problem.allowed) for problem in run.problems()] == [("model.layers", Range(most=4096))]


def test_refusals_of_chip_and_target_figures_name_their_key():
    config = compose_config("model=gpt_tiny", "target=v4-8", "mesh=2x2x1", "partition=dp")
    run = Run.from_config(config)
    peaks = [("target.chip.peak_tflops", {"bfloat16": bad}) for bad in FLOATS]
    for key, value in [*bad_numbers(run.config.target, "target."), *peaks]:
        other = replace_key(run.config, key, value)
        problems = Run(other, other.model).problems()
        assert all(key in str(problem) for problem in problems), (key, value, problems)
        is_free = value == 0 and key in (
            "target.chip.hop_us",
            "target.chip.usd_per_hour",
            "target.chip.spot_usd_per_hour",
            "target.chip.replay.rows",
            "target.chip.replay.models",
        )
        assert is_free != bool(problems), (key, value)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("model", MODELS)
def test_a_number_that_is_accepted_works(model: str, part: int) -> None:
    """The cases of a model are in 8 parts, because listing each as a test takes seconds of every collection."""
    for key, value in cases(model)[part::8]:
        run, problems = problems_of(model, key, value)
        if not problems and (key.partition(".")[0] in STEP_GROUPS or key in SIZES):
            try:
                trace(run)
            except Exception as error:
                error.add_note(f"{model} with {key}={value}")
                raise


@pytest.mark.parametrize(
    "axis", mark_slow_except(["layers", "heads", "kv_heads", "head_dim", "mlp", "embed", "vocab"], ["embed"])
)
def test_a_partition_of_any_single_axis_works_or_the_refusal_names_it(axis: str) -> None:
    run = base(MODELS[0])
    rule = dataclasses.replace(run.config.partition, default=[], parameters={axis: ["x"]}, activations={"batch": ["x"]})
    split = run.changed(mesh=MeshConfig(name="2x1x1", shape=[2, 1, 1]), partition=rule)
    problems = split.problems()
    assert all(axis in str(problem) for problem in problems), problems
    if not problems:
        trace(split)


def test_a_zero_width_that_a_default_is_divided_by_is_refused_by_its_key() -> None:
    run = Run.from_config(compose_config("model=gpt_tiny", "model.embed=0"))
    assert "model.embed" in {problem.key for problem in run.problems()}


def trace(run: Run) -> None:
    program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
    jax.eval_shape(program.step, program.abstract_state, program.abstract_batch)


def data_problems(config: Any, key: str) -> list[Problem]:
    name = key.partition(".")[2]
    value = {name: getattr(config, name)}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text("a few words\n" * 200)
        try:
            prepare(text_source.Config(paths=[f"{folder}/text.txt"], cache_dir=f"{folder}/cache", **value), "bytes")
        except ValueError as error:
            return [Problem(ProblemCode.conflict, text=str(error))]
    return []
