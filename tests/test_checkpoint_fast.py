"""Tests of fast checkpoints (on local disks), of choosing between fast and durable ones, and of which ones are kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from runs import assert_same_bits, run_train, saved_arrays, tiny_arguments, trained_run, training_records
from test_checkpoint import DATA_POSITION, abstract_state, assert_equal, make_state
from valkyrie.checkpoint import CheckpointConfig, CheckpointInfo, Checkpoints, FastConfig, NotSavedError
from valkyrie.checkpoint.fast import fast_folder
from valkyrie.processes.team import ALONE, Team
from valkyrie.train import screen
from valkyrie.train.state import TrainState


def open_both_tiers(folder: Path, team: Team = ALONE, **config: Any) -> Checkpoints:
    """Return the `Checkpoints` of a folder, with fast and durable checkpoints."""
    fast = FastConfig(every=1, folder=str(folder / "fast"))
    return Checkpoints(folder / "run", CheckpointConfig(fast=fast, **config), team=team)


def save(folder: Path, *, durable_steps: tuple[int, ...] = (), fast_steps: tuple[int, ...] = ()) -> None:
    with closing(open_both_tiers(folder)) as checkpoints:
        for step in sorted({*durable_steps, *fast_steps}):
            assert step not in durable_steps or checkpoints.save(step, make_state(step), DATA_POSITION) is None
            assert (
                step not in fast_steps
                or checkpoints.save_fast(step, make_state(step), {**DATA_POSITION, "row": step}) is None
            )


def process_folder(folder: Path) -> Path:
    identity = (folder / "run" / "id").read_text().strip()
    return fast_folder(FastConfig(folder=str(folder / "fast")), folder / "run", identity) / "process-0"


@pytest.mark.parametrize(
    ("durable_steps", "fast_steps", "step", "tier", "source_suffix"),
    [
        ((3,), (4, 5), 5, "fast", "at step 3"),
        ((), (5,), 5, "fast", "no durable one"),
        ((3, 5), (4, 5), 5, "durable", ""),
        ((7,), (6,), 7, "durable", ""),
    ],
)
def test_the_newest_checkpoint_of_both_tiers_is_restored(
    tmp_path: Path,
    durable_steps: tuple[int, ...],
    fast_steps: tuple[int, ...],
    step: int,
    tier: str,
    source_suffix: str,
):
    save(tmp_path, durable_steps=durable_steps, fast_steps=fast_steps)
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        restored = checkpoints.restore(abstract_state(make_state(0)))
    assert_equal(restored.state, make_state(step))
    assert restored.step == step and restored.data["row"] == (step if tier == "fast" else DATA_POSITION["row"])
    assert restored.source.startswith(f"the {tier} checkpoint")
    assert restored.source.endswith(source_suffix)


def test_the_two_newest_are_kept_and_all_are_deleted_at_the_end(tmp_path: Path):
    save(tmp_path, fast_steps=(1, 2, 3))
    assert sorted(os.listdir(process_folder(tmp_path))) == ["2", "3"]
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        checkpoints.mark_complete()
    assert not any((tmp_path / "fast").iterdir())


def test_fast_checkpoint_metadata_lists_the_shards_of_each_array(tmp_path: Path):
    save(tmp_path, fast_steps=(2,))
    metadata = json.loads((process_folder(tmp_path) / "2" / "about" / "metadata").read_text())
    assert (metadata["tier"], metadata["step"], metadata["process"]) == ("fast", 2, 0)
    assert metadata["shards"]["parameters.block.w"] == ["float32", "0:64"]


def test_a_flipped_bit_in_any_file_falls_back_to_the_previous_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    save(tmp_path, durable_steps=(3,), fast_steps=(4, 5))
    undamaged_folder, step_folder = tmp_path / "whole", process_folder(tmp_path) / "5"
    generator = np.random.default_rng(0)
    shutil.copytree(step_folder, undamaged_folder)
    unchecked_files = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # without anything of the state
    names = [
        p.relative_to(undamaged_folder)
        for p in undamaged_folder.rglob("*")
        if p.is_file() and p.name not in unchecked_files
    ]
    assert len(names) >= 8
    for name in names:
        shutil.rmtree(step_folder, ignore_errors=True)
        shutil.copytree(undamaged_folder, step_folder)
        body = bytearray((step_folder / name).read_bytes())
        body[generator.integers(len(body))] ^= 1 << int(generator.integers(8))
        (step_folder / name).write_bytes(body)
        with closing(open_both_tiers(tmp_path)) as checkpoints:
            restored = checkpoints.restore(abstract_state(make_state(0)))
        assert restored.step == 4, name
        assert_equal(restored.state, make_state(4))
        assert "at step 5" in capfd.readouterr().err
        assert not step_folder.exists(), "it would be taken for one that other processes have"


def test_the_other_tier_is_used_if_all_of_one_tier_are_damaged(tmp_path: Path):
    save(tmp_path, durable_steps=(3, 6), fast_steps=(4, 5))
    for step in (3, 6):
        (tmp_path / "run" / "checkpoints" / str(step) / "about" / "metadata").write_text("{}")
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        assert checkpoints.restore(abstract_state(make_state(0))).step == 5
        checkpoints.save(6, make_state(6), DATA_POSITION)
    assert sorted(os.listdir(tmp_path / "run")) == [
        "checkpoints",
        "damaged-checkpoints-3",
        "damaged-checkpoints-6",
        "id",
    ]
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        assert_equal(checkpoints.restore(abstract_state(make_state(0))).state, make_state(6))


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path):
    save(tmp_path, durable_steps=(3,))
    (tmp_path / "run" / "checkpoints" / "3" / "about" / "metadata").write_text("{}")
    message = r"step 3 in .* is damaged: .* delete .*/run\b.* name="
    with closing(open_both_tiers(tmp_path)) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(abstract_state(make_state(0)))


def test_the_last_step_counts_both_tiers(tmp_path: Path):
    save(tmp_path, fast_steps=(4,))
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        assert (checkpoints.last_durable_step, checkpoints.last_step) == (None, 4)
    save(tmp_path, durable_steps=(5,))
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        assert (checkpoints.last_durable_step, checkpoints.last_step) == (5, 5)


def test_a_start_without_the_fast_tier_makes_its_old_checkpoints_obsolete(tmp_path: Path):
    save(tmp_path, durable_steps=(3,), fast_steps=(4,))
    Checkpoints(tmp_path / "run", CheckpointConfig()).close()
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        assert checkpoints.restore(abstract_state(make_state(0))).step == 3


@pytest.mark.slow
def test_fast_checkpoints_are_kept_if_the_last_durable_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    from valkyrie.checkpoint import tier

    original_write = tier.write_checksums

    def raise_disk_full(folder: Path, excluded: Any = ()) -> None:
        if "process-0" not in str(folder):
            raise OSError(28, "No space left on device")
        original_write(folder, excluded)

    fast_settings = ("checkpoint.fast.every=2", f"checkpoint.fast.folder={tmp_path / 'fast'}")
    with monkeypatch.context() as patch:
        patch.setattr(tier, "write_checksums", raise_disk_full)
        assert run_train(*tiny_arguments(tmp_path, "steps=5", *fast_settings)) == 1
    assert "step 4" in capfd.readouterr().err
    assert run_train("resume=run", f"runs={tmp_path}") == 0
    assert "from step 4" in capfd.readouterr().out
    assert saved_arrays(tmp_path / "run")["['step']"] == 5


def test_a_save_that_fails_on_one_of_several_processes_aborts_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from valkyrie.checkpoint import tier

    def raise_disk_full(folder: Path, excluded: Any = ()) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier, "write_checksums", raise_disk_full)
    with closing(Checkpoints(tmp_path / "run", CheckpointConfig(), team=FakeTwoProcessTeam([]))) as checkpoints:
        checkpoints.save(3, make_state(3), DATA_POSITION)
        with pytest.raises(NotSavedError, match="at step 3"):
            checkpoints.wait()


def test_a_save_to_a_disk_that_is_gone_returns_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from valkyrie.checkpoint.tier import Tier

    def raise_stale(self: Tier) -> list[Path]:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Tier, "_unfinished_folders", raise_stale)
    with closing(Checkpoints(tmp_path / "run", CheckpointConfig())) as checkpoints:
        error_message = checkpoints.save(3, make_state(3), DATA_POSITION) or checkpoints.wait()
    assert error_message is not None and "at step 3 could not be saved" in error_message


def test_a_fast_checkpoint_of_another_layout_is_replaced_by_a_durable_one(tmp_path: Path):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def sharded_state(step: int, spec: PartitionSpec) -> TrainState:
        return jax.device_put(make_state(step), NamedSharding(mesh, spec))

    with closing(open_both_tiers(tmp_path)) as checkpoints:
        checkpoints.save(3, sharded_state(3, PartitionSpec()), DATA_POSITION)
        checkpoints.save_fast(4, sharded_state(4, PartitionSpec()), DATA_POSITION)
    template = abstract_state(sharded_state(0, PartitionSpec()))
    sharded_template = template._replace(
        parameters=jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec("x"))),
            template.parameters,
        )
    )
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        restored = checkpoints.restore(sharded_template)
    assert restored.step == 3
    assert "step 4" in restored.source
    assert_equal(restored.state, make_state(3))
    assert not (process_folder(tmp_path) / "4").exists(), "the run goes another way from here"


def test_a_fast_checkpoint_with_another_tokenizer_is_refused(tmp_path: Path):
    config = CheckpointConfig(fast=FastConfig(every=1, folder=str(tmp_path / "fast")))

    def open_with(tokenizer: str) -> Any:
        info = CheckpointInfo({}, tokenizer={"name": tokenizer, "fingerprint": f"hash of {tokenizer}"})
        return closing(Checkpoints(tmp_path / "run", config, info=info))

    with open_with("bytes") as checkpoints:
        checkpoints.save_fast(4, make_state(4), DATA_POSITION)
    refusal = r"^data.tokenizer=gpt2 .*fast checkpoint at step 4 in .* data.tokenizer=bytes"
    with open_with("gpt2") as checkpoints, pytest.raises(ValueError, match=refusal):
        checkpoints.restore(abstract_state(make_state(0)))
    with open_with("bytes") as checkpoints:
        assert checkpoints.restore(abstract_state(make_state(0))).step == 4


class FakeTwoProcessTeam(Team):
    """Fake two-process team, as seen from process 0. Process 1 has fast checkpoints at `other_steps`."""

    def __init__(self, other_steps: list[int]) -> None:
        super().__init__(2, 0)
        self._other_steps = other_steps

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        return [value, {"steps": self._other_steps, "refused": []} if name == "fast checkpoints" else value]


def test_all_processes_use_the_newest_common_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    save(tmp_path, fast_steps=(4, 5))
    with closing(open_both_tiers(tmp_path, FakeTwoProcessTeam([4, 3]))) as checkpoints:
        assert checkpoints.restore(abstract_state(make_state(0))).step == 4
    assert os.listdir(process_folder(tmp_path)) == ["4"], "the later one is not common, and is saved anew"
    with closing(open_both_tiers(tmp_path, FakeTwoProcessTeam([3]))) as checkpoints:
        assert checkpoints.try_restore(abstract_state(make_state(0))) is None
    assert "on all processes" in capfd.readouterr().err


def test_a_new_run_with_the_same_name_ignores_older_fast_checkpoints(tmp_path: Path):
    save(tmp_path, fast_steps=(4,))
    shutil.rmtree(tmp_path / "run")
    with closing(open_both_tiers(tmp_path)) as checkpoints:
        assert checkpoints.try_restore(abstract_state(make_state(0))) is None


def test_the_best_checkpoints_are_kept_in_addition_to_the_newest(tmp_path: Path):
    for losses in ({1: 3.0, 2: 1.0, 3: 2.0}, {4: 1.5, 5: 2.5}):  # a run and its continuation
        with closing(open_both_tiers(tmp_path, keep=1, keep_best=2)) as checkpoints:
            for step, loss in losses.items():
                checkpoints.save(step, make_state(step), DATA_POSITION, {"eval_loss": loss})
    with closing(open_both_tiers(tmp_path, keep=1, keep_best=2)) as checkpoints:
        checkpoints.save(6, make_state(6), DATA_POSITION)
    assert sorted(map(int, os.listdir(tmp_path / "run" / "checkpoints"))) == [2, 4, 6]


def test_one_checkpoint_per_interval_is_kept(tmp_path: Path):
    with closing(open_both_tiers(tmp_path, keep=1, keep_every_h=1e-9)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), DATA_POSITION)
    assert sorted(map(int, os.listdir(tmp_path / "run" / "checkpoints"))) == [1, 2, 3]


def test_invalid_checkpoint_policies_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = CheckpointConfig(keep_every_h=0.0, keep_best=-1, fast=FastConfig(every=0, keep=0))
    keys = ["keep_every_h", "keep_best", "fast.every", "fast.keep"]
    assert [problem.key for problem in config.problems()] == [f"checkpoint.{key}" for key in keys]
    assert run_train(*tiny_arguments(tmp_path, "checkpoint.keep_best=1", "checkpoint.best=loss")) == 2
    assert "checkpoint.best=loss" in capfd.readouterr().err


class SimulatedKill(BaseException):
    """Simulates a kill of the process during training, after which it saves nothing."""


def test_a_killed_training_resumes_bit_for_bit_from_its_fast_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    show_step = screen.Screen.show_step

    def record_and_kill(self: screen.Screen, step: int, record: dict[str, Any], *, print_line: bool) -> None:
        show_step(self, step, record, print_line=print_line)
        if step == 5:
            raise SimulatedKill

    fast_settings = ("checkpoint=fast", "checkpoint.fast.every=2", f"checkpoint.fast.folder={tmp_path / 'fast'}")
    with monkeypatch.context() as patch:
        patch.setattr(screen.Screen, "show_step", record_and_kill)
        with pytest.raises(SimulatedKill):
            run_train(*tiny_arguments(tmp_path, "steps=6", *fast_settings))
    assert not os.listdir(tmp_path / "run" / "checkpoints")
    capfd.readouterr()
    assert run_train(*tiny_arguments(tmp_path, "steps=6", *fast_settings)) == 0
    output = capfd.readouterr().out
    assert "from step 4" in output and "the fast checkpoint" in output
    uninterrupted_run = trained_run()
    assert training_records(tmp_path / "run")[6]["loss"] == training_records(uninterrupted_run)[6]["loss"]
    assert_same_bits(saved_arrays(tmp_path / "run"), saved_arrays(uninterrupted_run))
    assert not any((tmp_path / "fast").iterdir()), "it is complete and durably saved"


def test_a_full_disk_of_the_fast_tier_only_prints_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    from valkyrie.checkpoint import tier

    original_write = tier.write_checksums

    def raise_disk_full(folder: Path, excluded: Any = ()) -> None:
        if "process-0" in str(folder):
            raise OSError(28, "No space left on device")
        original_write(folder, excluded)

    monkeypatch.setattr(tier, "write_checksums", raise_disk_full)
    fast_settings = ("checkpoint.fast.every=2", f"checkpoint.fast.folder={tmp_path / 'fast'}")
    assert run_train(*tiny_arguments(tmp_path, "steps=6", *fast_settings)) == 0
    out = capfd.readouterr().out
    assert "at step 2" in out and "no space left" in out
    assert saved_arrays(tmp_path / "run")["['step']"] == 6


def test_the_refusal_of_an_unwritable_folder_names_the_setting(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert (
        run_train(*tiny_arguments(tmp_path, "checkpoint.fast.every=2", f"checkpoint.fast.folder={tmp_path / 'file'}"))
        == 2
    )
    err = capfd.readouterr().err
    assert "cannot be written" in err and "checkpoint.fast.folder=DIR" in err and "Traceback" not in err
