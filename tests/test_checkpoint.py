"""Tests of saving and restoring checkpoints, retention, damaged checkpoints, and refusals."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import mark_slow_except
from runs import open_checkpoints
from valkyrie.checkpoint import CheckpointConfig, durable, latest_step, stored_checkpoints
from valkyrie.checkpoint.location import METADATA_FILE
from valkyrie.train.state import TrainState

DATA_POSITION = {"version": 1, "row": 32, "content": "abc"}


def make_state(step: int, size: int = 64, name: str = "w") -> TrainState:
    """Return a state with values that depend on the step."""
    values = {"block": {name: jnp.arange(size, dtype=jnp.float32) + step}}
    moments = ({"count": jnp.int32(step)}, {"mu": {"block": {name: jnp.full(size, -float(step))}}})
    return TrainState(jnp.int32(step), values, moments, None, jax.random.key_data(jax.random.key(step)))


def abstract_state(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(actual: TrainState, expected: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def save(folder: Path, *steps: int, **config: int) -> None:
    with closing(open_checkpoints(folder, **config)) as saver:
        for step in steps:
            saver.save(step, make_state(step), DATA_POSITION)


def test_a_state_is_restored_with_its_data_position(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.last_durable_step == 5
        step, state, data, _ = checkpoints.restore(abstract_state(make_state(0)))
    assert (step, data) == (5, DATA_POSITION)
    assert_equal(state, make_state(5))


def test_a_background_save_is_correct_even_if_its_arrays_are_donated(tmp_path: Path) -> None:
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0, state), donate_argnums=0)
    state = make_state(3, size=1 << 20)
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(3, state, DATA_POSITION)
        for _ in range(3):
            state = overwrite(state)
        checkpoints.wait()
        _, restored, *_ = checkpoints.restore(abstract_state(state))
    assert_equal(restored, make_state(3, size=1 << 20))


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]
    assert latest_step(tmp_path) == 4


KILLED_PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_checkpoint as t
kept = t.open_checkpoints(Path({folder!r}))
kept.save(1, t.make_state(1), t.DATA_POSITION)
kept.wait()
kept.save(2, t.make_state(2, size=1 << 24), t.DATA_POSITION)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    program = KILLED_PROGRAM.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2, "the save was not under way"
    assert latest_step(tmp_path) == 1
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        step, state, *_ = checkpoints.restore(abstract_state(make_state(0)))
        assert step == 1
        assert_equal(state, make_state(1))
        checkpoints.save(2, make_state(2), DATA_POSITION)
    assert latest_step(tmp_path) == 2


def test_reading_does_not_disturb_a_save_in_progress(tmp_path: Path) -> None:
    save(tmp_path, 1)
    unfinished_folder = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    unfinished_folder.mkdir()
    with closing(open_checkpoints(tmp_path, read_only=True)) as checkpoints:
        assert checkpoints.restore(abstract_state(make_state(0)))[0] == 1
    assert unfinished_folder.is_dir()


def test_a_renamed_checkpoint_is_refused_with_the_step_that_it_holds(tmp_path: Path) -> None:
    save(tmp_path, 10)
    renamed = (tmp_path / "checkpoints" / "10").rename(tmp_path / "checkpoints" / "20")
    with (
        closing(open_checkpoints(tmp_path)) as checkpoints,
        pytest.raises(ValueError, match="at step 20 .* saved at step 10") as error,
    ):
        checkpoints.restore(abstract_state(make_state(0)))
    assert f"Rename {renamed} to 10." in str(error.value)


def test_the_refusal_of_another_model_names_a_parameter(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        with pytest.raises(ValueError) as shape_error:
            checkpoints.restore(abstract_state(make_state(0, size=128)))
        with pytest.raises(ValueError) as name_error:
            checkpoints.restore(abstract_state(make_state(0, name="v")))
    assert "block.w is (64,) " in str(shape_error.value) and " (128,) " in str(shape_error.value)
    assert "block.v is missing" in str(name_error.value) and "(1 more differs)" in str(name_error.value)
    assert f"resume={tmp_path.name}" in str(name_error.value)


def test_a_state_with_other_arrays_is_not_called_damaged(tmp_path: Path) -> None:
    save(tmp_path, 5)
    state_with_ema = make_state(0)._replace(ema=make_state(0).parameters)
    changed = {
        "optimizer.name": ("muon", "adamw"),
        "optimizer.ema_decay": ("0.9", "null"),
        "optimizer.beta1": ("0.8", "0.9"),
        "seed": ("1", "0"),
    }
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        with pytest.raises(ValueError) as error_without_changes:
            checkpoints.restore(abstract_state(state_with_ema))
        with pytest.raises(ValueError) as error_with_changes:
            checkpoints.restore(abstract_state(state_with_ema), changed_settings=changed)
    assert "ema.block.w is only" in str(error_without_changes.value)
    assert " more differ" not in str(error_without_changes.value)
    assert "optimizer=adamw optimizer.ema_decay=null" in str(error_with_changes.value)
    assert "0.9" in str(error_with_changes.value)
    for error in (error_without_changes, error_with_changes):
        assert "a different optimizer" in str(error.value) and f"resume={tmp_path.name}" in str(error.value)


def test_an_empty_folder_does_not_count_as_a_checkpoint(tmp_path: Path) -> None:
    assert latest_step(tmp_path) is None
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.last_durable_step is None
        with pytest.raises(ValueError, match="no finished checkpoint"):
            checkpoints.restore(abstract_state(make_state(0)))


def halve_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble_file(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 4 : -len(body) // 4] = os.urandom(len(body[len(body) // 4 : -len(body) // 4]))
    path.write_bytes(bytes(body))


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "about truncated": lambda step: halve_file(step / "about" / "metadata"),
    "about of another kind": lambda step: (step / "about" / "metadata").write_text('{"parameters": 3}'),
    "about missing": lambda step: shutil.rmtree(step / "about"),
    "tree truncated": lambda step: halve_file(step / "state" / "_METADATA"),
    "tree missing": lambda step: (step / "state" / "_METADATA").unlink(),
    "arrays truncated": lambda step: [halve_file(p) for p in (step / "state").rglob("d/*")][0],
    "arrays garbled": lambda step: [garble_file(p) for p in (step / "state").rglob("d/*")][0],
    "arrays missing": lambda step: [p.unlink() for p in (step / "state").rglob("d/*")][0],
    "data position garbled": lambda step: garble_file(step / "data" / "metadata"),
    "data position missing": lambda step: shutil.rmtree(step / "data"),
}


@pytest.mark.parametrize("damage", mark_slow_except(DAMAGES, [*DAMAGES][::4]))
def test_the_previous_checkpoint_replaces_a_damaged_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    save(tmp_path, 4, 5)
    folder = tmp_path / "checkpoints" / "5"
    DAMAGES[damage](folder)
    with closing(open_checkpoints(tmp_path, read_only=True)) as checkpoints:
        assert checkpoints.restore(abstract_state(make_state(0)))[0] == 4
    assert folder.is_dir(), "a reader changes nothing"
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert_equal(checkpoints.restore(abstract_state(make_state(0)))[1], make_state(4))
        checkpoints.save(5, make_state(5), DATA_POSITION)
        checkpoints.wait()
    notes = capfd.readouterr().err.splitlines()
    assert len(notes) == 2
    assert all(" step 5 " in note and "is damaged: " in note and note.endswith(" step 4.") for note in notes)
    assert (tmp_path / "damaged-checkpoints-5").is_dir()
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert_equal(checkpoints.restore(abstract_state(make_state(0)))[1], make_state(5))


INTERRUPTED_COPIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda step: [shutil.rmtree(step), step.mkdir()][0], "the folder is empty"),
    "about missing": (DAMAGES["about missing"], "about/metadata is missing"),
    "about truncated": (DAMAGES["about truncated"], "about/metadata cannot be read"),
    "tree missing": (DAMAGES["tree missing"], "state/_METADATA is missing"),
    "data position missing": (DAMAGES["data position missing"], "data/metadata is missing"),
    "save times missing": (lambda step: (step / METADATA_FILE).unlink(), f"{METADATA_FILE} is missing"),
}


@pytest.mark.parametrize("damage", mark_slow_except(INTERRUPTED_COPIES, [*INTERRUPTED_COPIES][::3]))
def test_the_previous_checkpoint_replaces_one_whose_copy_was_interrupted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    save(tmp_path, 4, 5)
    root = tmp_path / "checkpoints"
    (root / "5" / "checksums.json").unlink()
    remove, reason = INTERRUPTED_COPIES[damage]
    remove(root / "5")
    listed = {c.step: str(c.damage) for c in stored_checkpoints(tmp_path, CheckpointConfig())}
    assert listed == {4: "None", 5: reason}
    with closing(open_checkpoints(tmp_path, read_only=True)) as checkpoints:
        assert checkpoints.restore(abstract_state(make_state(0)))[0] == 4
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert_equal(checkpoints.restore(abstract_state(make_state(0)))[1], make_state(4))
    note = f"The durable checkpoint at step 5 in {root} is damaged: {reason}. Continuing from step 4."
    assert capfd.readouterr().err.splitlines() == [note, note]


def test_a_flipped_bit_is_found_in_any_file(tmp_path: Path) -> None:
    save(tmp_path, 5)
    step_folder, generator = tmp_path / "checkpoints" / "5", np.random.default_rng(0)
    unchecked_files = {"checksums.json", "_CHECKPOINT_METADATA", "commit_success.txt"}  # without anything of the state
    for path in [p for p in step_folder.rglob("*") if p.is_file() and p.name not in unchecked_files]:
        content = path.read_bytes()
        bit_index = int(generator.integers(8 * len(content)))
        path.write_bytes(
            content[: bit_index // 8]
            + bytes([content[bit_index // 8] ^ 1 << bit_index % 8])
            + content[bit_index // 8 + 1 :]
        )
        name = str(path.relative_to(step_folder))
        with closing(open_checkpoints(tmp_path)) as checkpoints, pytest.raises(ValueError) as caught:
            checkpoints.restore(abstract_state(make_state(0)))
        assert f"is damaged: {name} has changed" in str(caught.value)
        path.write_bytes(content)
    with closing(open_checkpoints(tmp_path)) as checkpoints:
        assert_equal(checkpoints.restore(abstract_state(make_state(0)))[1], make_state(5))


# TensorStore's other reads report to the event loop that Orbax has closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["tree truncated", "arrays garbled"])
def test_the_refusal_of_damage_without_checksums_has_a_remedy(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 4, 5)
    folder = tmp_path / "checkpoints" / "5"
    (folder / "checksums.json").unlink()
    DAMAGES[damage](folder)
    with closing(open_checkpoints(tmp_path)) as checkpoints, pytest.raises(ValueError) as caught:
        checkpoints.restore(abstract_state(make_state(0)))
    assert str(folder) in str(caught.value) and "Delete" in str(caught.value)


def test_checkpoint_metadata_lists_the_parameters(tmp_path: Path) -> None:
    save(tmp_path, 5)
    metadata = json.loads((tmp_path / "checkpoints" / "5" / "about" / "metadata").read_text())
    assert metadata.pop("saved").startswith("20")
    assert metadata == {"step": 5, "tier": "durable", "parameters": {"block.w": [64]}}


def test_invalid_checkpoint_intervals_are_refused() -> None:
    assert [p.key for p in CheckpointConfig(every=0, keep=0).problems()] == ["checkpoint.every", "checkpoint.keep"]
    assert CheckpointConfig(every=None).problems() == []


@pytest.mark.parametrize(("highest_is_best", "worst"), [(False, math.inf), (True, -math.inf)])
def test_a_checkpoint_without_the_best_metric_counts_as_the_worst(highest_is_best: bool, worst: float):
    config = CheckpointConfig(best="renamed", highest_is_best=highest_is_best)
    assert durable._metric_getter(config)({"other": 1.0}) == worst
