"""Pipelines: the same steps as on one device, schedules by their formulas, what is sent, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import (
    assert_same_steps,
    compose_config,
    initial_state,
    reference,
    small,
    small_run,
    stirred,
    two_steps,
)
from valkyrie.run import Run

ALTERNATING = ("partition.schedule=1f1b", "remat=full")
CIRCULAR = ("partition.schedule=circular", "partition.rounds=2")


def case(*values: str, quick: bool = False) -> Any:
    return pytest.param(*values[:3], values[3:], marks=() if quick else pytest.mark.slow)


def steps_like_one_device(model: str, partition: str, mesh: str, overrides: tuple[str, ...]) -> None:
    of_model = tuple(o for o in overrides if o.startswith(("model.", "batch", "precision")))
    run = small_run(model, f"mesh={mesh}", f"partition={partition}", *overrides)
    assert run.layout.pipeline is not None
    found = two_steps(run, stirred(initial_state((*small(model), *of_model))))
    assert_same_steps(found, reference(model, *of_model))


@pytest.mark.parametrize(
    ("model", "partition", "mesh", "overrides"),
    [
        case("gpt_tiny", "pp", "2x1x4", "microbatches=4", quick=True),
        case("gpt_tiny", "pp", "1x1x4", "microbatches=8"),
        case("gpt_tiny", "pp", "1x1x2", "microbatches=3", "batch=6"),
        case("gpt_tiny", "pp_2d_tp", "2x2x2", "microbatches=4"),
        case("gpt_tiny", "pp", "2x1x4", "microbatches=4", "partition.zero1=true"),
        case("gpt_tiny", "pp", "2x1x2", "microbatches=2", "partition.activations.seq=[y]"),
        case("gpt2_tiny", "pp_fsdp", "2x2x2", "microbatches=2", "remat=full"),
        case("valkyrie_tiny", "pp_fsdp", "2x2x2", "microbatches=2", "remat=dots"),
        case("valkyrie_tiny", "pp_fsdp", "2x2x2", "partition.gradient_sum=all_to_all"),
        case("longformer_tiny", "pp_2d_tp", "2x2x2", "microbatches=4", "remat=save_qkv_proj"),
        case("nanochat_tiny", "pp_2d_tp", "2x2x2", "microbatches=4"),
        case("s5_tiny", "pp", "2x2x2", "microbatches=2", "optimizer=muon", "optimizer.warmup_steps=2"),
    ],
)
def test_same_steps_as_on_one_device(model: str, partition: str, mesh: str, overrides: tuple[str, ...]):
    steps_like_one_device(model, partition, mesh, overrides)


@pytest.mark.parametrize(
    ("model", "partition", "mesh", "overrides"),
    [
        case("gpt_tiny", "pp", "1x2x2", "microbatches=2", *CIRCULAR, quick=True),
        case("gpt_tiny", "pp_fsdp", "2x1x4", "microbatches=4", *CIRCULAR, "model.layers=8"),
        case("gpt_tiny", "pp", "1x2x2", "microbatches=4", CIRCULAR[0], "partition.rounds=3", "model.layers=12"),
        case("gpt_tiny", "pp", "1x1x4", "microbatches=8", CIRCULAR[0], "partition.rounds=6", "model.layers=24"),
        case("nanochat_tiny", "pp_2d_tp", "2x2x2", "microbatches=4", *CIRCULAR, "model.layers=8"),
    ],
)
def test_rounds_of_a_circular_pipeline_make_the_same_steps(
    model: str, partition: str, mesh: str, overrides: tuple[str, ...]
):
    steps_like_one_device(model, partition, mesh, overrides)


@pytest.mark.parametrize(
    ("model", "partition", "mesh", "overrides"),
    [
        case("gpt_tiny", "pp", "1x2x2", "microbatches=4", "batch=16", *ALTERNATING, quick=True),
        case("gpt_tiny", "pp", "2x1x4", "microbatches=1", *ALTERNATING),
        case("gpt_tiny", "pp", "1x1x4", "microbatches=2", *ALTERNATING, "model.layers=8"),
        case("valkyrie_tiny", "pp_fsdp", "2x1x2", "microbatches=2", *ALTERNATING, "model.tie_embeddings=false"),
        case("gpt2_tiny", "pp_fsdp", "2x2x2", "microbatches=1", *ALTERNATING, "partition.gradient_sum=all_to_all"),
        case("nanochat_tiny", "pp_2d_tp", "2x2x2", "microbatches=4", *ALTERNATING),
    ],
)
def test_forward_and_backward_turn_about_make_the_same_steps(
    model: str, partition: str, mesh: str, overrides: tuple[str, ...]
):
    steps_like_one_device(model, partition, mesh, overrides)


REFUSED = {
    "a recursive model": (
        ("model=trm_tiny", "microbatches=1"),
        "partition=pp puts layers on z=2, and this model has no stack of equal layers to make stages of: it passes its "
        "few layers again and again. Use a mesh with z=1, or another partition.",
    ),
    "layers that do not divide": (
        ("mesh=2x1x3", "batch=24"),
        "partition=pp puts layers (4) of norm.scale, feed_forward_norm.scale, attention.out and 6 more on z=3: 4 is "
        "not divisible by 3. Use a mesh with z=1, z=2 or z=4, or model.layers=3 or model.layers=6.",
    ),
    "a batch that does not divide": (
        ("microbatches=3",),
        "batch=8 is not divisible by 24: partition=pp splits it over z=2·x=2·y=2, and each of microbatches=3 over all "
        "but z. Use batch=24.",
    ),
    "several rounds of one stretch": (
        ("partition.rounds=2",),
        "partition.rounds=2: under schedule=gpipe a stage holds one stretch. Use partition.rounds=1, or "
        "partition.schedule=circular.",
    ),
    "a circle of one round": (
        ("partition.schedule=circular",),
        "partition.rounds=1: under schedule=circular a stage holds 2 or more stretches of layers. Use "
        "partition.rounds=2.",
    ),
    "fewer microbatches than stages in a circle": (
        ("microbatches=1", *CIRCULAR),
        "microbatches=1: under schedule=circular the first stage begins the next round when the last one has ended, "
        "which takes 2 (z=2). Use microbatches=2, or partition.schedule=gpipe.",
    ),
    "layers that do not divide by rounds": (
        ("partition.schedule=circular", "partition.rounds=4"),
        "partition=pp with schedule=circular makes 8 stretches (z=2 times rounds=4) of layers (4): 4 is not divisible "
        "by 8. Use a mesh with z=1, or model.layers=8.",
    ),
    "kept activations where forward and backward turn about": (
        ("partition.schedule=1f1b", "remat=dots"),
        "remat=dots: under schedule=1f1b layers are made again from their inputs: nothing else is kept. Use "
        "remat=full, or partition.schedule=gpipe.",
    ),
    "several stacks where forward and backward turn about": (
        ("model=longformer_tiny", *ALTERNATING),
        "partition=pp with schedule=1f1b: this model has 2 stacks of equal layers one after the other, and a "
        "microbatch comes back as soon as it has passed one. Use partition.schedule=gpipe.",
    ),
    "two axes": (
        ("partition.parameters.layers=[y,z]",),
        "partition=pp puts layers on y=2 and on z=2: a pipeline lies on one axis. Use one.",
    ),
    "an axis of parameters": (
        ("partition.parameters.embed=[z]",),
        "partition=pp puts parameters.embed on z=2, which holds the stages of a pipeline (parameters.layers). Give it "
        "another axis.",
    ),
    "an axis of activations": (
        ("partition.activations.seq=[z]", "partition.activations.heads=[z]"),
        "partition=pp puts activations.seq, heads on z=2, which holds the stages of a pipeline (parameters.layers). "
        "Give them another axis.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str):
    overrides, text = REFUSED[what]
    model = overrides[0].removeprefix("model=") if overrides[0].startswith("model=") else "gpt_tiny"
    asked = (*small(model), "mesh=2x2x2", "partition=pp", "microbatches=2", *overrides)
    assert text in Run.from_config(compose_config(*asked)).problems()
