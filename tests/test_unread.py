"""Tests of settings on the command line: each one is used, refused, or reported as unused."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache

import pytest

import valkyrie
from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS, run_train
from valkyrie.config.modes import MODES
from valkyrie.config.run import Run
from valkyrie.config.unread import _ALWAYS_READ, layout_notes, mode_reads, unread_notes
from valkyrie.sweep.names import trial_key
from valkyrie.trees import flatten, with_value


@cache
def run_in(mode: str) -> Run:
    return valkyrie.compose(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS).changed(mode=MODES.config_class(mode)())


KEYS = [key for key in flatten(asdict(run_in("train").config)) if not key.startswith("mode.")]
UNREAD = {
    "calibrate": "batch seq model.layers optimizer.learning_rate partition.zero1 mesh.name remat.name steps profile",
    "checkpoints": "profile log_every eval_every sample_tokens temperature code_eval.samples",
    "code_eval": "profile log_every eval_every sample_tokens temperature steps",
    "compile": "seed profile log_every eval_every sample_tokens checkpoint.every code_eval.samples",
    "eval": "profile log_every eval_every sample_tokens temperature steps code_eval.samples",
    "explain": "seed profile log_every eval_every sample_tokens checkpoint.every code_eval.samples",
    "figures": "batch seq model.layers optimizer.learning_rate partition.zero1 remat.name steps profile",
    "generate": "profile log_every eval_every steps code_eval.samples",
    "measure": "profile log_every eval_every sample_tokens checkpoint.every code_eval.samples",
    "search": "profile log_every eval_every sample_tokens checkpoint.every code_eval.samples",
    "show": "seed profile log_every eval_every sample_tokens checkpoint.every code_eval.samples",
    "train": "",
    "tune": "seed profile log_every eval_every sample_tokens checkpoint.every code_eval.samples",
}
"""Keys that each mode reports as unused. `READ` has keys that each mode uses. Other keys are not tested."""
READ = {
    "calibrate": "runs data.name",
    "checkpoints": "resume runs checkpoint.every",
    "code_eval": "model.layers batch code_eval.samples checkpoint.every seed",
    "compile": "model.layers batch seq steps optimizer.learning_rate partition.zero1 mesh.name target.name remat.name",
    "eval": "model.layers batch seq data.name checkpoint.every seed",
    "explain": "model.layers batch seq optimizer.learning_rate partition.zero1 mesh.name target.name remat.name",
    "figures": "target.name mesh.name precision.name",
    "generate": "model.layers prompt sample_tokens temperature top_k checkpoint.every seed",
    "measure": "model.layers batch seq seed optimizer.learning_rate partition.zero1 mesh.name target.name remat.name",
    "search": "model.layers batch seq optimizer.learning_rate partition.zero1 target.name remat.name",
    "show": "model.layers batch seq partition.zero1 mesh.name remat.name",
    "train": " ".join(KEYS),
    "tune": "model.layers batch seq optimizer.learning_rate partition.zero1 mesh.name target.name remat.name",
}


@pytest.mark.parametrize("mode", MODES.names())
def test_each_mode_reports_the_keys_that_it_does_not_read(mode: str):
    run = run_in(mode)
    for key in UNREAD[mode].split():
        assert key in KEYS
        notes = unread_notes(replace(run, arguments=(f"{key}=1",)))
        assert notes == [f"mode={mode} does not read {key}=1"]
    for key in READ[mode].split():
        assert key in KEYS
        notes = unread_notes(replace(run, arguments=(f"{key}=1",)))
        assert not [note for note in notes if not note.startswith(f"{key}=1 has no effect: ")], key


def test_a_training_reports_only_the_keys_of_other_schedules_and_layers():
    run = run_in("train")
    reported = {key for key in KEYS if unread_notes(replace(run, arguments=(f"{key}={run.config.batch}",)))}
    attention_keys = {key for key in KEYS if key.startswith("model.attention.")}
    assert reported == attention_keys | {"partition.schedule", "partition.rounds", "optimizer.warmdown"}


@pytest.mark.parametrize("mode", ["compile", "measure"])
def test_a_trial_key_depends_on_exactly_the_keys_that_its_mode_reads(mode: str):
    run = run_in(mode)
    before = trial_key(run)
    for key, value in flatten(asdict(run.config)).items():
        if type(value) not in (int, float, bool) or key.startswith(("model.", "mode.")):
            continue
        config = with_value(run.config, key, not value if isinstance(value, bool) else value + 1)
        changed = Run(config, run.model)
        if key.partition(".")[0] not in _ALWAYS_READ:
            assert (trial_key(changed) != before) == mode_reads(config.mode, key), key


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["mode=show", "profile=2-3", "steps=5"], "note: mode=show does not read profile=2-3"),
        (["mode=show", "partition.rounds=2"], "partition.rounds=2 has no effect: partition=dp "),
        (["mode=show", "~temperature"], "note: mode=show does not read ~temperature"),
        (["mode=show", f"prompt={'a' * 100}"], "note: mode=show does not read prompt\n"),
        (["mode=show", "target.slices=2"], "target.slices=2 has no effect: target=auto "),
        (["mode=show", "size=tiny", "model=gpt_125m"], "note: size=tiny keeps model=gpt_125m"),
        (["mode=show", "model=s5_tiny", "model.attention.heads=8"], "model.attention.heads=8 has no effect: no layer"),
        (
            ["mode=show", "model.window_pattern=SL", "model=nanochat_tiny", "model.attention.windows=[8]"],
            "[8] has no effect: model.",
        ),
    ],
)
def test_unread_settings_are_reported(arguments: list[str], note: str, capfd: pytest.CaptureFixture[str]):
    assert run_train("model=gpt_tiny", *ONE_DEVICE_ARGUMENTS, *arguments) == 0
    assert note in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (["warmup_steps=50"], "steps=10). The warm-up takes 9 steps"),
        (["warmup_steps=9"], None),
        (["warmup_steps=5", "decay_steps=4"], "optimizer.decay_steps=4). The warm-up takes 3 steps"),
        (["warmup_steps=8", "schedule=trapezoid", "warmdown=0.5"], "steps=10). The warm-up takes 5 steps"),
        (["learning_rate=0.1"], None),
    ],
)
def test_a_warmup_that_the_schedule_shortens_is_reported(settings: list[str], note: str | None):
    run = valkyrie.compose("model=gpt_tiny", "steps=10", *(f"optimizer.{setting}" for setting in settings))
    assert [text.partition("schedule (")[2] for text in unread_notes(run)] == ([note] if note else [])


def test_a_batch_that_an_experiment_replaces_is_reported():
    arguments = ("experiment=nanochat_v5e8", "batch=8")
    for mode in ("mode=compile", "mode=search"):
        (note,) = unread_notes(valkyrie.compose(*arguments, mode))
        assert note.startswith("batch=8 ") and "batch=512" in note and "batch_tokens=null" in note
        assert unread_notes(valkyrie.compose(*arguments, mode, "batch_tokens=null", "device_batch=null")) == []


def test_used_settings_are_not_reported():
    pipeline = ["mesh=1x1x2", "partition=pp", "partition.schedule=gpipe", "microbatches=2"]
    assert unread_notes(valkyrie.compose(*TINY_ARGUMENTS, "model.layers=2", "sample_tokens=1", *pipeline)) == []
    assert unread_notes(valkyrie.compose("target=cpu8", "target.slices=2", "mesh=2s2x2x2", "mode=compile")) == []
    assert mode_reads(MODES.config_class("search")(), "seed")


def test_processes_of_a_run_alone_are_reported():
    alone = valkyrie.compose("model=gpt_tiny", "distributed=off", "distributed.timeout_s=9")
    (note,) = unread_notes(alone)
    assert note.startswith("distributed.timeout_s=9 ") and "distributed=off " in note


def test_axis_names_that_the_partition_does_not_use_are_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_MESH_CONFIG", "2,2,2")
    monkeypatch.setenv("TPU_AXIS_NAMES", "data,model,fsdp")
    assert unread_notes(valkyrie.compose("model=gpt_tiny", "mode=show")) == []
    (note,) = unread_notes(valkyrie.compose("model=gpt_tiny", "mode=show", "partition=fsdp"))
    assert note.startswith("TPU_AXIS_NAMES=data,model,fsdp ") and "partition=fsdp " in note
    monkeypatch.delenv("TPU_MESH_CONFIG")
    typed = ("mesh=2x2x2", "partition=fsdp", "mesh.names=[data,model,fsdp]")
    assert len(unread_notes(valkyrie.compose("model=gpt_tiny", "mode=show", *typed))) == 1


def test_a_search_notes_that_it_ignores_the_mesh_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    run = valkyrie.compose("model=gpt_tiny", "target=v5e-8", "mode=search")
    assert unread_notes(run) == []
    monkeypatch.setenv("TPU_MESH_CONFIG", "2,2,2")
    (note,) = unread_notes(run)
    assert note.startswith("TPU_MESH_CONFIG=2,2,2 has no effect: ") and note.endswith("add mesh=environment")
    named = valkyrie.compose("model=gpt_tiny", "target=v5e-8", "mode=search", "mesh=environment")
    assert unread_notes(named) == []


def test_a_run_whose_layout_may_drop_rows_of_experts_says_so():
    limited = ["model=moe_tiny", "mesh=2x1x4", "partition=fsdp_ep", "model.moe.capacity_factor=1.25"]
    for mode in ("mode=train", "mode=show"):
        (note,) = layout_notes(valkyrie.compose(*limited, mode))
        assert note.startswith("model.moe.capacity_factor=1.25: ") and "model.moe.capacity_factor=null" in note
    for dispatch in ("sorted", "dense"):
        small = ("model.moe.capacity_factor=0.3", f"model.moe.dispatch={dispatch}", "partition=fsdp")
        (note,) = layout_notes(valkyrie.compose(*limited, *small))
        assert "about 70%" in note and "model.moe.capacity_factor=1 or more" in note
    for change in ("model.moe.capacity_factor=null", "model.moe.capacity_factor=4", "partition=fsdp", "mode=search"):
        assert layout_notes(valkyrie.compose(*limited, "target=cpu8", change)) == []
