"""Tests of the data stream: batches do not depend on the number of processes, and positions are restored exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet

from valkyrie.data import stream_loader
from valkyrie.data.batches import Batch, BatchPlan, make_loader
from valkyrie.data.sources.parquet_stream import Config, Packing
from valkyrie.data.stream import StreamedText, open_stream
from valkyrie.data.stream_loader import StreamLoader
from valkyrie.processes.team import Team

BOS = 256


def write_shards(folder: Path, shards: int = 4, groups: int = 5, documents: int = 7) -> Path:
    """Write Parquet shards of documents, and return their folder.

    Each shard has `groups` row groups of `documents` documents. A document starts with its position, `SHARD.NUMBER.`,
    followed by up to 59 letters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        lengths = np.random.default_rng(shard).integers(0, 60, groups * documents)
        texts = [f"{shard}.{number}." + "x" * length for number, length in enumerate(lengths)]
        table = arrow.table({"text": texts, "number": list(range(len(texts)))})
        parquet.write_table(table, folder / f"{shard:03d}.parquet", row_group_size=documents)
    return folder


@pytest.fixture(scope="module")
def shards_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("stream") / "shards")


def open_shards(folder: Path | str, team: Team | None = None, **options: Any) -> StreamedText:
    config = Config(paths=[str(folder)], **{"workers": 0, **options})
    return open_stream(config, "bytes", *([team] if team else []))


def take_batches(
    data: StreamedText, count: int, state: dict[str, Any] | None = None, **options: Any
) -> tuple[list[Batch], Any]:
    """Return the next `count` batches from a position, and the position after them."""
    with make_loader(data, "train", **{"batch": 8, "seq": 32, "seed": 3, "repeat": True, **options}) as loader:
        if state is not None:
            loader.restore(json.loads(json.dumps(state)))
        return [next(loader) for _ in range(count)], loader.state()


def assert_same(batches: Sequence[Batch], expected: Sequence[Batch]) -> None:
    assert len(batches) == len(expected)
    for first, second in zip(batches, expected, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


FOR_EACH_PACKING = pytest.mark.parametrize("packing", Packing)


@FOR_EACH_PACKING
def test_a_restored_position_continues_with_the_same_batches(shards_folder: Path, packing: Packing) -> None:
    data = open_shards(shards_folder, packing=packing, pool=20, lanes=4)
    batches, final_state = take_batches(data, 30)
    for count_before in (1, 7, 13):
        first, state = take_batches(data, count_before)
        remaining_batches, resumed_state = take_batches(data, 30 - count_before, state)
        assert_same([*first, *remaining_batches], batches)
        assert resumed_state == final_state and state["row"] == count_before * 8


@FOR_EACH_PACKING
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_several_processes_read_the_rows_of_one(shards_folder: Path, packing: Packing, processes: int) -> None:
    data = open_shards(shards_folder, packing=packing, pool=20, lanes=4)
    batches, _ = take_batches(data, 12)
    rows_each = 8 // processes
    parts = [take_batches(data, 12, rows=range(p * rows_each, p * rows_each + rows_each))[0] for p in range(processes)]
    joined_batches = [
        {name: np.concatenate([part[step][name] for part in parts]) for name in batches[0]} for step in range(12)
    ]
    assert_same(joined_batches, batches)


class FakeTwoProcessTeam(Team):
    """Fake team of two processes that run one after the other in one process.

    `exchange` returns all values sent so far.
    """

    sent_values: list[Any] = []

    def exchange(self, name: str, value: Any = None) -> list[Any]:
        assert name == "positions of the lanes"
        self.sent_values.append(value)
        return self.sent_values


def test_positions_of_two_processes_are_restored_by_one(shards_folder: Path) -> None:
    FakeTwoProcessTeam.sent_values = []
    take_batches(open_shards(shards_folder, FakeTwoProcessTeam(2, 0), lanes=4), 5, rows=range(4))
    _, state = take_batches(open_shards(shards_folder, FakeTwoProcessTeam(2, 1), lanes=4), 5, rows=range(4, 8))
    batches, _ = take_batches(open_shards(shards_folder, lanes=4), 9)
    assert_same(take_batches(open_shards(shards_folder, lanes=4), 4, state)[0], batches[5:])
    assert_same(
        take_batches(open_shards(shards_folder, lanes=4), 4, state, batch=8, rows=[6, 1])[0],
        [{name: array[[6, 1]] for name, array in batch.items()} for batch in batches[5:]],
    )


def test_every_document_of_an_epoch_is_read_once(shards_folder: Path) -> None:
    steps, _ = take_batches(open_shards(shards_folder, lanes=3), 250, batch=3, seq=32)
    training = sorted(
        text for n in range(3) for text in parquet.read_table(shards_folder / f"{n:03d}.parquet")["text"].to_pylist()
    )
    lanes = [bytes(t % 256 for step in steps for t in step["tokens"][lane]).split(b"\0")[1:-1] for lane in range(3)]
    for epoch in range(2):
        epochs = [text.decode() for lane in lanes for text in lane[35 * epoch : 35 * epoch + 35]]
        assert sorted(epochs) == training
    assert lanes[0][:35] != lanes[0][35:70]


def test_validation_has_every_token_of_the_last_file_once(shards_folder: Path) -> None:
    data = open_shards(shards_folder)
    with make_loader(data, "validation", batch=4, seq=32, repeat=False) as loader:
        batches = list(loader)
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    table = parquet.read_table(shards_folder / "003.parquet")
    whole = [token for text in table["text"].to_pylist() for token in (BOS, *text.encode())]
    assert targets.tolist() == whole[1:]
    assert all((batch["segment_ids"] > 0).sum() == batch["weights"].sum() for batch in batches)
    train = {unit.file.id.rpartition("/")[2] for unit in data.train}
    assert train == {"000.parquet", "001.parquet", "002.parquet"} and len(data.train) == 15


def test_best_fit_rows_start_with_a_document_and_are_full(shards_folder: Path) -> None:
    for batch in take_batches(open_shards(shards_folder, packing=Packing.best_fit), 20)[0]:
        assert (batch["tokens"][:, 0] == BOS).all() and (batch["weights"] == 1).all()
    cropped = take_batches(open_shards(shards_folder, packing=Packing.best_fit, pool=200, lanes=1), 20, seq=128)[0]
    assert np.mean([row.sum() for batch in cropped for row in batch["tokens"] == BOS]) > 3


@pytest.mark.slow
def test_workers_give_the_same_batches_as_a_thread_and_end_on_close(shards_folder: Path) -> None:
    import multiprocessing

    data = open_shards(shards_folder, lanes=4, packing=Packing.best_fit, pool=20)
    data_with_workers = replace(data, config=replace(data.config, workers=2))
    batches, _ = take_batches(data, 6)
    _, state = take_batches(data, 3)
    assert_same(take_batches(data_with_workers, 3, state)[0], batches[3:])
    assert not multiprocessing.active_children()


def test_the_seed_orders_the_groups_and_epochs_differ(shards_folder: Path) -> None:
    data = open_shards(shards_folder, lanes=1)
    (first,), _ = take_batches(data, 1)
    (two,), _ = take_batches(data, 1, seed=4)
    assert (first["tokens"] != two["tokens"]).any()
    rows, _ = take_batches(data, 30, batch=8)
    flat = np.concatenate([batch["tokens"].ravel() for batch in rows])
    half = len(flat) // 2
    assert (flat[:half] != flat[half:]).any()
    assert (
        data.lane_count(8) == 1
        and open_shards(shards_folder).lane_count(8) == 8
        and open_shards(shards_folder).lane_count(14) == 14
    )


def test_validation_is_the_last_group_of_a_single_file_or_val_paths(
    shards_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single_file = open_shards(shards_folder / "000.parquet")
    assert [unit.row_group for unit in single_file.train] == [0, 1, 2, 3] and [
        unit.row_group for unit in single_file.validation
    ] == [4]
    with_val_paths = open_shards(shards_folder, val_paths=[str(shards_folder / "001.parquet")])
    assert {unit.file.id.rpartition("/")[2] for unit in with_val_paths.train} == {
        "000.parquet",
        "002.parquet",
        "003.parquet",
    }
    assert with_val_paths.content != open_shards(shards_folder).content
    monkeypatch.chdir(shards_folder.parent)
    relative = open_shards(shards_folder, val_paths=[f"{shards_folder.name}/001.parquet"])
    assert relative.content == with_val_paths.content, "the file is not for training however it is named"


def refusal(action: Any) -> str:
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


def test_unreadable_streams_are_refused_before_the_first_step(shards_folder: Path, tmp_path: Path) -> None:
    for column, fault in (("body", "data.column=body. "), ("number", "column number is int64, not string. ")):
        assert fault in refusal(lambda column=column: open_shards(shards_folder, column=column))
    (tmp_path / "empty").mkdir()
    assert "matches 0 files" in refusal(lambda: open_shards(tmp_path / "empty"))
    assert "data.paths=[shards/*.parquet]" in refusal(lambda: open_stream(Config(), "bytes"))
    short_shards = write_shards(tmp_path / "short", 2)
    content = (short_shards / "000.parquet").read_bytes()
    (short_shards / "000.parquet").write_bytes(content[: len(content) // 2])
    text = refusal(lambda: open_shards(short_shards))
    assert "000.parquet " in text and "cut short" in text
    single_shard = write_shards(tmp_path / "single", 1, groups=1)
    assert "left for training" in refusal(lambda: open_shards(single_shard))
    everything = [str(single_shard)]
    assert "data.val_paths includes every file " in refusal(lambda: open_shards(single_shard, val_paths=everything))
    held_out = tmp_path / "held_out.parquet"
    parquet.ParquetWriter(held_out, arrow.schema({"text": arrow.string()})).close()  # no row groups
    text = refusal(lambda: open_shards(single_shard, val_paths=[str(held_out)]))
    assert "left for validation" in text and "data.val_paths" in text
    assert "data.lanes=3 " in refusal(lambda: take_batches(open_shards(shards_folder, lanes=3), 1))
    for lanes, batch, suggestion in ((32, 64, 8), (32, 48, 12), (20, 30, 15), (16, 16, 8)):
        text = refusal(lambda lanes=lanes, batch=batch: open_shards(shards_folder, lanes=lanes).lane_count(batch))
        assert text.endswith(f"Use data.lanes={suggestion}.")
        assert open_shards(shards_folder, lanes=suggestion).lane_count(batch) == suggestion
    problems = Config(paths=["a"], workers=0, pool=0, lanes=0).problems()
    assert [problem.key for problem in problems] == ["data.pool", "data.lanes"]


def test_a_position_in_another_order_is_refused(shards_folder: Path) -> None:
    _, state = take_batches(open_shards(shards_folder, lanes=4), 1)
    held_out = [str(shards_folder / "000.parquet")]
    for text, changed in (
        ("data.lanes=4", {"lanes": 2}),
        ("data.packing=stream", {"lanes": 4, "packing": Packing.best_fit}),
        ("data= differs", {"lanes": 4, "val_paths": held_out}),
    ):
        assert text in refusal(lambda changed=changed: take_batches(open_shards(shards_folder, **changed), 1, state))
    assert "of 16" in refusal(lambda: take_batches(open_shards(shards_folder, lanes=4), 1, state, batch=16))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_error_for_a_row_without_text_names_its_line(tmp_path: Path, workers: int) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "fine"}\n{"text": 7}\n')
    assert "0.jsonl:2, not a string" in refusal(lambda: take_batches(open_shards(tmp_path, workers=workers), 1))


@pytest.mark.parametrize(
    ("files", "fault", "remedy"),
    [
        (2, "0.jsonl, the only file or row group, has no text", "Add a file with text"),
        (3, ".jsonl, the only file or row group of lane 1 of 2, has no text", "set data.lanes below 2"),
        (5, "none of the 2 files or row groups of lane 1 of 2 (", "set data.lanes below 2"),
    ],
)
def test_files_without_text_are_refused(tmp_path: Path, files: int, fault: str, remedy: str) -> None:
    for number in range(files):
        (tmp_path / f"{number}.jsonl").write_text('{"text": ""}\n')
    message = refusal(lambda: take_batches(open_shards(tmp_path, lanes=min(2, files - 1)), 1))
    assert fault in message and remedy in message


def test_a_worker_that_returns_to_a_position_reads_the_same_rows(shards_folder: Path) -> None:
    """Grain may reset a worker's iterator to an earlier position. Our loader starts new iterators instead."""
    data = open_shards(shards_folder)
    loader = StreamLoader(data, "train", BatchPlan(4, 32, 0, True, np.arange(4)))
    start = stream_loader._Positions((None,) * len(loader._lanes))
    iterator = iter(stream_loader._LaneBatches(loader._lanes, start, 32, 1, data.bos_id))
    next(iterator)
    position = iterator.get_state()
    expected = [next(iterator) for _ in range(3)]
    iterator.set_state(position)
    assert_same([next(iterator) for _ in range(3)], expected)
