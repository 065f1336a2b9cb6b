"""Tests of settings on the command line: each one is used, refused, or reported as unused."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache

import pytest

import valkyrie
from runs import SINGLE, TINY, command
from valkyrie.config.modes import MODES
from valkyrie.config.run import Run
from valkyrie.config.unread import _ALWAYS_READ, mode_reads, unread_notes
from valkyrie.sweep.names import trial_key
from valkyrie.trees import flatten, with_value


@cache
def run_in(mode: str) -> Run:
    return valkyrie.compose(*TINY, *SINGLE).changed(mode=MODES.config_class(mode)())


KEYS = [key for key in flatten(asdict(run_in("train").config)) if not key.startswith("mode.")]


@pytest.mark.parametrize("mode", MODES.names())
def test_every_key_is_read_or_reported(mode: str):
    run = run_in(mode)
    for key in KEYS:
        notes = unread_notes(replace(run, arguments=(f"{key}=1",)))
        if not mode_reads(run.config.mode, key):
            assert notes == [f"mode={mode} does not read {key}=1"]
        elif notes:
            assert len(notes) == 1 and notes[0].startswith(f"{key}=1 has no effect: ")


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
        (["mode=show", "partition.rounds=2"], "partition.rounds=2 has no effect: partition=dp has no pipeline"),
        (["mode=show", "~steps"], "note: mode=show does not read ~steps"),
        (["mode=show", f"prompt={'a' * 100}"], "note: mode=show does not read prompt\n"),
        (["mode=show", "target.slices=2"], "target.slices=2 has no effect: target=auto has no slices"),
    ],
)
def test_unread_settings_are_reported(arguments: list[str], note: str, capfd: pytest.CaptureFixture[str]):
    assert command("model=gpt_tiny", *SINGLE, *arguments) == 0
    assert note in capfd.readouterr().err


def test_used_settings_are_not_reported():
    pipeline = ["mesh=1x1x2", "partition=pp", "partition.schedule=gpipe", "microbatches=2"]
    assert unread_notes(valkyrie.compose(*TINY, "model.layers=2", "sample_tokens=1", *pipeline)) == []
    assert unread_notes(valkyrie.compose("target=cpu8", "target.slices=2", "mesh=2s2x2x2", "mode=compile")) == []
    assert mode_reads(MODES.config_class("search")(), "seed")
