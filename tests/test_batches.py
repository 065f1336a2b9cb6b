"""Tests of `batch_tokens` and `device_batch`, which determine the batch and the number of microbatches."""

from __future__ import annotations

import re

import pytest

from helpers import compose_config, compose_run
from valkyrie.config.run import Run
from valkyrie.parallel.batches import resolve_batches
from valkyrie.problems import ProblemCode

SMALL_OVERRIDES = ("mesh=2x2x2", "partition=fsdp", "seq=64")


def test_tokens_per_batch_give_sequences_and_microbatches():
    assert resolve_batches(32, 1, 1024, 8, 524288, 8) == (512, 8, [])
    assert resolve_batches(512, 4, 1024, 8, None, None) == (512, 4, [])
    assert resolve_batches(32, 1, 2048, 4, 524288, None) == (256, 1, [])


def test_a_run_uses_and_reports_the_derived_batch():
    run = compose_run(*SMALL_OVERRIDES, "batch_tokens=4096", "device_batch=2")
    assert (run.config.batch, run.config.microbatches, run.layout.microbatches) == (64, 4, 4)
    assert re.findall(r"\w*=?[\d,]*\d", run.batch_note or "") == ["4,096", "batch=64", "seq=64", "microbatches=4", "2"]
    assert compose_run(*SMALL_OVERRIDES).batch_note is None
    assert (
        compose_run(*SMALL_OVERRIDES, *(f"{key}={getattr(run.config, key)}" for key in ("batch", "microbatches")))
        == run
    )
    tensor = compose_run("mesh=2x2x2", "partition=2d_tp", "seq=64", "batch_tokens=4096", "device_batch=2")
    assert tensor.config.microbatches == 16  # two devices split the batch


@pytest.mark.parametrize(
    ("overrides", "code", "key", "nearest"),
    [
        (["batch_tokens=1000"], ProblemCode.batch_tokens_not_divisible, "batch_tokens", (960,)),
        (["batch=64", "device_batch=3"], ProblemCode.device_batch_not_divisible, "device_batch", (2,)),
        (
            ["batch_tokens=512", "device_batch=1", "mesh=4x4x1"],
            ProblemCode.device_batch_not_divisible,
            "device_batch",
            (),
        ),
        (["batch=64", "device_batch=2", "microbatches=2"], ProblemCode.conflict, "device_batch", None),
        (["batch=64", "device_batch=0"], ProblemCode.out_of_range, "device_batch", None),
        (["sample_every=0"], ProblemCode.out_of_range, "sample_every", None),
    ],
)
def test_refusals_of_indivisible_batches_suggest_divisible_ones(overrides, code, key, nearest):
    problems = Run.from_config(compose_config(*SMALL_OVERRIDES, *overrides)).problems()
    assert (code, key, nearest) in [(p.code, p.key, p.nearest) for p in problems]
