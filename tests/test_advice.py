"""Tests of advice for refused layouts: each value, applied alone, removes its problem and causes no other."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from helpers import MODELS, compose_run
from valkyrie.config.run import Run
from valkyrie.parallel.mesh import parse_mesh, resize_axis
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.paths import read_group
from valkyrie.problems import Identity
from valkyrie.trees import get_value, with_value

PARTITIONS = {partition.name: partition for partition in read_group("partition", PartitionConfig)}


def problem_identities(run: Run) -> set[Identity]:
    """Return the identities of the run's problems, in its model and its layout."""
    return {problem.identity for problem in run.model.problems()} | run.layout_problem_identities()


def apply_setting(run: Run, key: str, value: int) -> Run:
    if "." not in key and key not in ("batch", "seq"):
        return run.changed(mesh=resize_axis(run.config.mesh, key, value))
    config = with_value(run.config, key, value)
    return Run(config, config.model)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(MODELS),
    partition=st.sampled_from(sorted(PARTITIONS)),
    shape=st.lists(st.sampled_from([1, 1, 2, 3, 4, 5, 6, 8, 12]), min_size=3, max_size=3),
    batch=st.integers(1, 50),
    seq=st.integers(1, 300),
    microbatches=st.sampled_from([1, 2, 3]),
)
def test_every_suggested_value_is_legal(model: str, partition: str, shape: list[int], **sizes: int):
    mesh = parse_mesh("x".join(map(str, shape)))
    run = compose_run("mesh=1x1x1", "partition=dp", f"model={model}").changed(
        mesh=mesh, partition=PARTITIONS[partition], **sizes
    )
    problems_before = problem_identities(run)
    for problem in run.problems():
        advice = [(problem.key, value) for value in problem.nearest or () if problem.key]
        advice += [(problem.mesh_axes[0], size) for size in problem.legal_sizes or ()]
        for key, value in advice:
            event(f"advises {key}")
            problems_after = problem_identities(apply_setting(run, key, value))
            assert problems_after <= problems_before - {problem.identity}, (key, value, problem)


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (("mesh=3x1x1", "partition=2d_tp"), ("model.s5.state_size", (48, 72))),  # pairs, in blocks
        (("mesh=3x1x1", "partition=2d_tp"), ("model.attention.heads", (12,))),  # a multiple of the key heads
        (("mesh=1x1x4", "partition=dp", "batch=10", "microbatches=3"), ("batch", (12,))),
    ],
)
def test_suggested_values_obey_other_constraints_of_the_key(
    overrides: tuple[str, ...], advice: tuple[str, tuple[int, ...]]
):
    run = compose_run("model=valkyrie_tiny", "mesh=1x1x1", "partition=dp", "batch=12")
    overrides_by_key = dict(text.split("=") for text in overrides)
    changes = {key: int(value) for key, value in overrides_by_key.items() if key not in ("mesh", "partition")}
    run = run.changed(
        mesh=parse_mesh(overrides_by_key["mesh"]), partition=PARTITIONS[overrides_by_key["partition"]], **changes
    )
    assert advice in [(problem.key, problem.nearest) for problem in run.problems()]
    assert get_value(run.config, "model.s5.state_size") == 64
