"""Tests of pipelines.

Training steps match those on one device, and the number of sends and the bubble match their closed-form values.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers import (
    assert_same_steps,
    initial_state,
    make_program,
    mark_slow_except,
    randomize_zero_parameters,
    reference_steps,
    run_two_steps,
    small_overrides,
    small_run,
)
from valkyrie.compiled.collectives import collective_uses
from valkyrie.compiled.hlo import parse_module
from valkyrie.models import language_model
from valkyrie.parallel.partition import PipelineSchedule, RoleKind
from valkyrie.parallel.pipeline import SEND_SCOPE
from valkyrie.parallel.schedule import Pipeline
from valkyrie.records import encode
from valkyrie.search.compile.alternatives import fuller_remats
from valkyrie.search.compile.summary import recomputed_activations
from valkyrie.train.memory import MemoryEstimator
from valkyrie.train.program import serialised_module
from valkyrie.train.run_memory import to_candidates
from valkyrie.train.show import legal_remats

SEQUENCE = ("partition.activations.batch=[x]", "partition.activations.seq=[y]")
ONCE = "partition.sum_gradients_per=step"
SCHEDULE_1F1B = ("partition.schedule=1f1b", "remat=full")
CIRCULAR = ("partition.schedule=circular", "partition.rounds=2")


def case(*values: str, quick: bool = False) -> Any:
    return pytest.param(*values[:3], values[3:], marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "partition", "mesh", "overrides"),
    [
        case("gpt_tiny", "pp", "2x1x4", "microbatches=4"),
        case("gpt_tiny", "pp", "1x1x4", "microbatches=8"),
        case("gpt_tiny", "pp", "1x1x2", "microbatches=3", "batch=6"),
        case("gpt_tiny", "pp_2d_tp", "2x2x2", "microbatches=4"),
        case("gpt_tiny", "pp", "2x1x4", "microbatches=4", "partition.zero1=true"),
        case("gpt_tiny", "pp", "2x2x2", "microbatches=2", *SEQUENCE),
        case("gpt2_tiny", "pp_fsdp", "2x2x2", "microbatches=2", "remat=full"),
        case("valkyrie_tiny", "pp_fsdp", "2x2x2", "microbatches=2", "remat=dots"),
        case("valkyrie_tiny", "pp_fsdp", "2x2x2", "partition.gradient_sum=all_to_all"),
        case("longformer_tiny", "pp_2d_tp", "2x2x2", "microbatches=4", "remat=save_qkv_proj"),
        case("nanochat_tiny", "pp_2d_tp", "2x2x2", "microbatches=4"),
        case("s5_tiny", "pp", "2x2x2", "microbatches=2"),
        case("gpt_tiny", "pp_fsdp", "2x1x4", "microbatches=2", ONCE, quick=True),
        case("valkyrie_tiny", "pp_fsdp", "2x2x2", "microbatches=2", ONCE),
        case("gpt_tiny", "pp_fsdp", "2x1x2", "microbatches=2", ONCE, *CIRCULAR),
        case("gpt2_tiny", "pp_fsdp", "2x2x2", "microbatches=1", ONCE, *SCHEDULE_1F1B),
        case("gpt_tiny", "pp", "1x2x2", "microbatches=2", *CIRCULAR, quick=True),
        case("gpt_tiny", "pp_fsdp", "2x1x4", "microbatches=4", *CIRCULAR, "model.layers=8"),
        case("gpt_tiny", "pp", "1x2x2", "microbatches=4", CIRCULAR[0], "partition.rounds=3", "model.layers=12"),
        case("gpt_tiny", "pp", "1x1x4", "microbatches=8", CIRCULAR[0], "partition.rounds=6", "model.layers=24"),
        case("nanochat_tiny", "pp_2d_tp", "2x2x2", "microbatches=4", *CIRCULAR, "model.layers=8"),
        case("gpt_tiny", "pp", "1x2x2", "microbatches=2", *SCHEDULE_1F1B, quick=True),
        case("gpt_tiny", "pp", "1x2x2", "microbatches=4", "batch=16", *SCHEDULE_1F1B),
        case("gpt_tiny", "pp", "2x1x4", "microbatches=1", *SCHEDULE_1F1B),
        case("gpt_tiny", "pp", "1x1x4", "microbatches=2", *SCHEDULE_1F1B, "model.layers=8"),
        case("valkyrie_tiny", "pp_fsdp", "2x1x2", "microbatches=2", *SCHEDULE_1F1B, "model.tie_embeddings=false"),
        case("gpt2_tiny", "pp_fsdp", "2x2x2", "microbatches=1", *SCHEDULE_1F1B, "partition.gradient_sum=all_to_all"),
        case("nanochat_tiny", "pp_2d_tp", "2x2x2", "microbatches=4", *SCHEDULE_1F1B),
    ],
)
def test_pipelines_take_the_same_steps_as_one_device(model: str, partition: str, mesh: str, overrides: tuple[str, ...]):
    model_overrides = tuple(o for o in overrides if o.startswith(("model.", "batch", "precision")))
    run = small_run(model, f"mesh={mesh}", f"partition={partition}", *overrides)
    assert run.layout.pipeline is not None
    steps = run_two_steps(run, randomize_zero_parameters(initial_state((*small_overrides(model), *model_overrides))))
    assert_same_steps(steps, reference_steps(model, *model_overrides))


@pytest.mark.parametrize(
    ("overrides", "sends", "stored_microbatches"),
    [
        pytest.param((), 2 * (8 + 3), 8 + 3, id="gpipe"),
        pytest.param(SCHEDULE_1F1B, 2 * (8 + 3), 2 * 4 - 1, id="1f1b", marks=pytest.mark.slow),
        pytest.param(CIRCULAR, 2 * (2 * 8 + 3), 2 * 8 + 3, id="circular", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_has_the_sends_of_the_formula(overrides: tuple[str, ...], sends: int, stored_microbatches: int):
    arguments = ("mesh=1x1x4", "partition=pp", "microbatches=8", "batch=32", "model.layers=8", "seq=16", *overrides)
    run = small_run("gpt_tiny", *arguments)
    module = parse_module(serialised_module(make_program(run).compile_step()))
    uses = [use for use in collective_uses(module, run.config.mesh.axes) if SEND_SCOPE in use.op_name]
    assert {(use.kind, use.mesh_axes) for use in uses} == {("collective-permute", ("z",))}
    pipeline = run.layout.pipeline
    assert pipeline is not None
    assert sum(use.calls for use in uses) == pipeline.sends_per_step == sends
    assert pipeline.stored_microbatches == stored_microbatches


@pytest.mark.slow
def test_1f1b_stores_inputs_of_fewer_microbatches_than_gpipe():
    """With 16 microbatches and 2 stages, gpipe stores the inputs of 17 microbatches and 1f1b of 3.

    The inputs of a microbatch are those of the 32 layers of a stage, each a float32 array of shape (4, 128, 32). Gpipe
    also holds about 3.5 batches of the residual stream.
    """
    overrides = (
        "mesh=1x1x2",
        "partition=pp",
        "microbatches=16",
        "batch=64",
        "model.layers=64",
        "seq=128",
        "remat=full",
    )
    temp_bytes = []
    for schedule in ("gpipe", "1f1b"):
        run = small_run("gpt_tiny", *overrides, f"partition.schedule={schedule}")
        sizes = make_program(run).compile_step().memory_analysis()
        assert sizes is not None
        temp_bytes.append(sizes.temp_size_in_bytes)
    inputs = 32 * 4 * 128 * 32 * 4
    assert temp_bytes[0] - temp_bytes[1] == pytest.approx((17 - 3) * inputs, rel=0.15)


@pytest.mark.parametrize(
    ("pipeline", "bubble"),
    [
        (Pipeline("z", 4, 8, PipelineSchedule.gpipe, 1), 3 / 8),
        (Pipeline("z", 4, 8, PipelineSchedule["1f1b"], 1), 3 / 8),
        (Pipeline("z", 4, 8, PipelineSchedule.circular, 2), 3 / 16),
    ],
)
def test_the_bubble_is_the_idle_time_relative_to_the_busy_time(pipeline: Pipeline, bubble: float):
    """The bubble is a stage's idle time divided by its busy time.

    In a turn of 1F1B, the forward pass of a microbatch takes 1/3 and the backward pass 2/3.
    """
    work = pipeline.rounds * pipeline.microbatches
    turns = pipeline.forward_turns
    if pipeline.is_1f1b:
        ramp_turns = pipeline.stages - 1
        assert pipeline.turns == ramp_turns + pipeline.microbatches + ramp_turns
        assert 3 * turns == ramp_turns * 1 + pipeline.microbatches * 3 + ramp_turns * 2
    assert pipeline.bubble == pytest.approx((turns - work) / work) == pytest.approx(bubble)


def test_the_description_of_a_pipeline():
    run = small_run("gpt_tiny", "mesh=2x2x2", "partition=pp", "microbatches=2", *CIRCULAR)
    description = run.layout_record().pipeline
    assert run.layout.name == "2x2x2-pp-circular2-mb2"
    assert description is not None
    assert (description.axis, description.stages, description.schedule, description.rounds) == (
        "z",
        2,
        PipelineSchedule.circular,
        2,
    )
    assert encode(description)["schedule"] == "circular"
    assert all(words in description.described for words in ("2 rounds", "25.0%", "10 times", "5 microbatches"))
    assert run.layout.degrees == {"DP": 4, "FSDP": 1, "MP1": 1, "MP2": 1, "SP": 1, "PP": 2}
    assert run.layout.accumulation_steps == 1
    assert small_run("gpt_tiny", "mesh=2x2x1", "partition=dp").layout_record().pipeline is None
    unused = small_run("gpt_tiny", "mesh=2x2x1", "partition=pp", "microbatches=2").layout
    assert (unused.pipeline, unused.accumulation_steps, unused.roles["z"].kind) == (None, 2, RoleKind.unused)


def test_hints_of_1f1b_suggest_no_activations_to_save():
    run = small_run("gpt_tiny", "mesh=1x1x2", "partition=pp", "microbatches=2", *SCHEDULE_1F1B)
    assert list(legal_remats(run)) == ["full"]
    assert (recomputed_activations(run), fuller_remats(run)) == ({}, ())
    assert len(legal_remats(run.changed(partition=small_run("gpt_tiny", "partition=pp").config.partition))) > 5


@pytest.mark.parametrize(
    "case",
    mark_slow_except(
        [((), 16, 8), ((), 2, 2), (CIRCULAR, 16, 8), (SCHEDULE_1F1B, 16, 4), (SCHEDULE_1F1B, 8, 4)],
        [(CIRCULAR, 16, 8), (SCHEDULE_1F1B, 8, 4)],
    ),
)
def test_estimated_chunks_of_the_loss_are_those_of_the_schedule(
    monkeypatch: pytest.MonkeyPatch, case: tuple[tuple[str, ...], int, int]
) -> None:
    """A stage computes the loss of half of the batch, or of half of a microbatch under 1F1B."""
    schedule, batch, microbatches = case
    settings = ("mesh=1x1x2", "partition=pp", "seq=64", "model.loss_chunk=4", "model.layers=4")
    run = small_run("gpt_tiny", *settings, f"batch={batch}", f"microbatches={microbatches}", *schedule)
    chunks, compute = set[int](), language_model.cross_entropy

    def cross_entropy(hidden: Any, *args: Any, chunk: int, **kwargs: Any) -> Any:
        chunks.add(chunk)
        return compute(hidden, *args, chunk=chunk, **kwargs)

    monkeypatch.setattr(language_model, "cross_entropy", cross_entropy)
    make_program(run).lower_step()
    assert chunks == {int(MemoryEstimator(run, to_candidates([run])).loss_chunks(4)[1].item())}
