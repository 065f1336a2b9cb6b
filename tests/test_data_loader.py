"""Tests of the data loader: rows, their order, their division among processes, positions, and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from valkyrie.data.batches import Batch, Loader, make_batch, make_loader
from valkyrie.data.loader import TokenStream, open_split
from valkyrie.data.manifest import PreparedText, Split, content_hash, write_manifest
from valkyrie.data.writer import EncodedDocuments, ShardWriter

BOS = 60000


def write_dataset(
    path: Path, train: Sequence[int], validation: Sequence[int] = (BOS, 1), shard_tokens: int = 100
) -> PreparedText:
    """Write a dataset of these tokens. If the tokens are a `range`, the first token of a row identifies the row."""
    splits: dict[str, Split] = {}
    path.mkdir(parents=True, exist_ok=True)
    for name, ids in (("train", train), ("validation", validation)):
        writer = ShardWriter(path, name, np.dtype("<u2"), shard_tokens)
        writer.add(EncodedDocuments(name, np.asarray(ids), documents=1, bytes=len(ids)))
        splits[name] = writer.finish()
    content = content_hash(splits["train"], splits["validation"], "uint16", BOS)
    prepared = PreparedText(
        "mine", "key", content, {"kind": "text"}, "bytes", "print", BOS + 1, BOS, "uint16", **splits, path=path
    )
    write_manifest(prepared)
    return prepared


@pytest.fixture(scope="module")
def range_dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedText:
    """37 rows of 16 consecutive numbers plus a remainder, in shards of 100 tokens. Some rows span two shards."""
    return write_dataset(tmp_path_factory.mktemp("counted"), range(37 * 16 + 5), range(50))


def take_batches(loader: Loader, count: int) -> list[Batch]:
    return [next(loader) for _ in range(count)]


def row_starts(batches: list[Batch]) -> list[int]:
    """Return the dataset index of each row of the batches. The dataset must be `range(n)`, in rows of 16 tokens."""
    return [int(row[0]) // 16 for batch in batches for row in batch["tokens"]]


def test_an_open_dataset_survives_the_deletion_of_its_cache(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", range(200), range(50))
    with make_loader(data, "train", batch=2, seq=16, repeat=True) as loader:
        first = take_batches(loader, 1)
        shutil.rmtree(data.path)
        assert len(row_starts(first + take_batches(loader, 4))) == 10
        with make_loader(data, "validation", batch=2, seq=16, repeat=False) as validation:
            assert len(list(validation)) == 2


def test_a_truncated_shard_is_named_instead_of_ending_the_process(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", range(200), range(50))
    stream, path = TokenStream(data, "train"), data.shard_path(data.train.shards[0])
    os.truncate(path, 10)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} .* restore "):
        stream.read(0, 20)


def assert_same(batches: list[Batch], expected: list[Batch]) -> None:
    assert len(batches) == len(expected)
    for first, second in zip(batches, expected, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])


def concatenate_batches(process_batches: Sequence[list[Batch]]) -> list[Batch]:
    """Return global batches. `process_batches` has a list for each process, in order of the process index."""
    return [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        for step in zip(*process_batches, strict=True)
    ]


def test_rows_can_span_shards(range_dataset: PreparedText) -> None:
    stream = open_split(range_dataset, "train")
    assert len(stream) == 597 and len(range_dataset.train.shards) == 6
    for start, stop in [(0, 1), (99, 101), (100, 200), (95, 405), (590, 700), (597, 600), (700, 800)]:
        assert stream.read(start, stop).tolist() == list(range(min(start, 597), min(stop, 597)))
    assert stream.read(0, 5).dtype == np.int32


def test_a_batch_has_the_documented_arrays(range_dataset: PreparedText) -> None:
    with make_loader(range_dataset, "train", batch=4, seq=16, repeat=True) as loader:
        batch = next(loader)
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "tokens": ((4, 16), "int32"),
        "targets": ((4, 16), "int32"),
        "segment_ids": ((4, 16), "int32"),
        "weights": ((4, 16), "float32"),
    }
    assert all(array.flags.c_contiguous for array in batch.values())
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert (batch["weights"] == 1).all() and (batch["segment_ids"] == 1).all()


@pytest.mark.parametrize("case", range(100))
def test_packing_agrees_with_a_plain_loop(case: int) -> None:
    """Uses seeds instead of Hypothesis, which fails if another thread uses the module `random`."""
    rng, seq = np.random.default_rng(case), 8
    lengths = rng.integers(0, seq + 2, rng.integers(1, 5))
    windows = [rng.choice([BOS, 1, 2], length).tolist() for length in lengths]
    batch = make_batch([np.array(window, np.int32) for window in windows], seq, BOS)
    for row, window in enumerate(windows):
        segment = 1
        for position in range(seq):
            is_target = position + 1 < len(window)
            if is_target and window[position] == BOS and position > 0:
                segment += 1
            assert batch["weights"][row, position] == is_target
            assert batch["segment_ids"][row, position] == (segment if is_target else 0)
            if is_target:
                assert batch["tokens"][row, position] == window[position]
                assert batch["targets"][row, position] == window[position + 1]


def test_every_epoch_has_every_row_once_in_a_different_order(range_dataset: PreparedText) -> None:
    def read_epochs(seed: int) -> list[list[int]]:
        with make_loader(range_dataset, "train", batch=8, seq=16, seed=seed, repeat=True) as loader:
            rows = row_starts(take_batches(loader, 37))
        return [rows[start : start + 37] for start in range(0, 8 * 37, 37)]

    first, second = read_epochs(0), read_epochs(1)
    for epoch in first + second:
        assert sorted(epoch) == list(range(37))
    assert len({tuple(epoch) for epoch in first + second}) == 16
    assert read_epochs(0) == first


def test_the_order_for_seed_0_never_changes(range_dataset: PreparedText) -> None:
    """If this order changes, resumed runs repeat some data and skip other data."""
    with make_loader(range_dataset, "train", batch=6, seq=16, seed=0, repeat=True) as loader:
        assert row_starts(take_batches(loader, 2)) == [9, 31, 20, 3, 11, 21, 8, 29, 33, 10, 19, 14]


def process_rows(batch: int, index: int, count: int) -> range:
    """Return the rows of a batch for process `index`. The `count` processes have equal, consecutive parts."""
    return range(index * batch // count, (index + 1) * batch // count)


@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_processes_divide_equal_global_batches(range_dataset: PreparedText, split: str, processes: int) -> None:
    """Includes more processes than shards: the validation split has one shard."""
    repeat = split == "train"

    def read(index: int, count: int) -> list[Batch]:
        with make_loader(
            range_dataset, split, batch=8, seq=16, rows=process_rows(8, index, count), repeat=repeat
        ) as loader:
            return take_batches(loader, 6) if repeat else list(loader)

    assert_same(concatenate_batches([read(index, processes) for index in range(processes)]), read(0, 1))


def test_a_process_can_load_any_rows_of_a_batch(range_dataset: PreparedText) -> None:
    with (
        make_loader(range_dataset, "train", batch=8, seq=16, repeat=True) as full_loader,
        make_loader(range_dataset, "train", batch=8, seq=16, rows=[6, 1, 1], repeat=True) as partial_loader,
    ):
        for full_batch, partial_batch in zip(
            take_batches(full_loader, 3), take_batches(partial_loader, 3), strict=True
        ):
            np.testing.assert_array_equal(full_batch["tokens"][[6, 1, 1]], partial_batch["tokens"])


@pytest.mark.parametrize("process_count_before", [1, 4])
@pytest.mark.parametrize("process_count_after", [1, 2])
def test_a_restored_loader_continues_on_any_number_of_processes(
    range_dataset: PreparedText, process_count_before: int, process_count_after: int
) -> None:
    def open_loaders(count: int) -> list[Loader]:
        return [
            make_loader(
                range_dataset, "train", batch=8, seq=16, seed=5, rows=process_rows(8, index, count), repeat=True
            )
            for index in range(count)
        ]

    loaders_before, loaders_after = open_loaders(process_count_before), open_loaders(process_count_after)
    for loader in loaders_before:
        take_batches(loader, 7)
    (state,) = {json.dumps(loader.state(), sort_keys=True) for loader in loaders_before}
    expected = concatenate_batches([take_batches(loader, 9) for loader in loaders_before])
    for loader in loaders_after:
        take_batches(loader, 2)
        loader.restore(json.loads(state))
        assert loader.step == 7 and loader.state() == json.loads(state)
    assert_same(concatenate_batches([take_batches(loader, 9) for loader in loaders_after]), expected)
    for loader in loaders_before + loaders_after:
        loader.close()


def test_reading_ahead_does_not_move_the_position(range_dataset: PreparedText) -> None:
    with make_loader(range_dataset, "train", batch=8, seq=16, repeat=True) as loader:
        assert loader.state()["row"] == 0
        next(loader)
        time.sleep(0.05)
        assert loader.state()["row"] == 8


def test_another_batch_size_can_continue_if_it_divides_the_position(range_dataset: PreparedText) -> None:
    with make_loader(range_dataset, "train", batch=6, seq=16, repeat=True) as loader:
        take_batches(loader, 2)
        state = loader.state()
        expected = row_starts(take_batches(loader, 4))
    with make_loader(range_dataset, "train", batch=4, seq=16, repeat=True) as loader:
        loader.restore(state)
        assert row_starts(take_batches(loader, 6)) == expected
    with (
        make_loader(range_dataset, "train", batch=5, seq=16, repeat=True) as loader,
        pytest.raises(ValueError, match=r"\brow 12\b.*=4\b"),
    ):
        loader.restore(state)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"seed": 1}, r"^data\.shuffle_seed=0\b.*=1\b"),
        ({"seq": 8}, r"^seq=16\b.*=8\b"),
        ({"content": "x"}, r"^data= differs "),
        ({"split": "validation"}, r"^split=train\b.*=validation\b"),
        ({"version": 2}, r"\bversion 2\b"),
    ],
)
def test_a_position_in_another_order_is_refused(
    range_dataset: PreparedText, change: dict[str, Any], pattern: str
) -> None:
    loader = make_loader(range_dataset, "train", batch=8, seq=16, repeat=True)
    with loader, pytest.raises(ValueError, match=pattern):
        loader.restore({**loader.state(), **change})


@pytest.mark.parametrize("tokens", [2, 16, 17, 18, 33, 64, 65, 66, 200])
@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_counts_every_target_once(tmp_path: Path, tokens: int, processes: int) -> None:
    prepared = write_dataset(tmp_path, [BOS, 1], range(tokens))
    parts = []
    for index in range(processes):
        with make_loader(
            prepared, "validation", batch=4, seq=16, rows=process_rows(4, index, processes), repeat=False
        ) as loader:
            batches = list(loader)
            assert len(batches) == -(-(tokens - 1) // 64)
            parts.append(batches)
    targets = [batch["targets"][batch["weights"] == 1] for batch in concatenate_batches(parts)]
    assert np.concatenate(targets).tolist() == list(range(1, tokens))
    for batch in concatenate_batches(parts):
        assert ((batch["segment_ids"] > 0) == (batch["weights"] == 1)).all()


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"seq": 597}, ["data=mine ", " 597 ", "seq=597", "seq<=596"]),
        ({"batch": 38}, [" 597 ", " 37 ", "seq=16", "batch=38", "batch<=37", "seq<=15"]),
        ({"batch": 600, "seq": 1}, [" 596 ", "seq=1", "batch=600", "batch<=596"]),
        ({"batch": 0}, ["batch=0: "]),
        ({"seq": 0}, ["seq=0: "]),
        ({"rows": [0, 8]}, ["rows=[0, 8] ", "batch=8"]),
    ],
)
def test_batches_that_cannot_be_filled_are_refused_with_numbers(
    range_dataset: PreparedText, arguments: dict[str, Any], values: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        make_loader(range_dataset, "train", **{"batch": 8, "seq": 16, "repeat": True, **arguments})
    assert all(value in str(error.value) for value in values)


def test_the_suggestion_in_a_refusal_works(range_dataset: PreparedText) -> None:
    for batch, seq in ((37, 16), (38, 15), (1, 596)):
        make_loader(range_dataset, "train", batch=batch, seq=seq, repeat=True).close()


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    prepared = write_dataset(tmp_path, [], [BOS])
    for split, token_count in (("train", "0 tokens"), ("validation", "1 token")):
        with pytest.raises(ValueError, match=f"{token_count} in its {split} split"):
            make_loader(prepared, split, batch=1, seq=1, repeat=False)
    with pytest.raises(ValueError, match="no split 'test'"):
        open_split(prepared, "test")


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def test_closing_the_loader_ends_its_thread(range_dataset: PreparedText) -> None:
    threads_before = len(reading_threads())
    loader = make_loader(range_dataset, "train", batch=8, seq=16, repeat=True)
    next(loader)
    assert len(reading_threads()) == threads_before + 1
    loader.close()
    loader.close()
    for thread in reading_threads():
        thread.join(5)
    assert len(reading_threads()) == 0
    with pytest.raises(StopIteration):
        next(loader)


PROGRAM = """
import signal, sys
from valkyrie.data.batches import make_loader
from valkyrie.data.manifest import open_dataset
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(True))  # as training hears Ctrl-C: a flag, not an exception
loader = make_loader(open_dataset(sys.argv[1]), "train", batch=8, seq=16, repeat=True)
print(next(loader)["tokens"].shape, flush=True)
while sys.argv[2] == "wait" and not asked:
    next(loader)
if asked:
    print(loader.state()["row"] % 8)
"""


@pytest.mark.parametrize("ending", ["exit", "wait"])
def test_a_program_exits_at_once_with_an_open_loader(range_dataset: PreparedText, ending: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(range_dataset.path), ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    first = program.stdout.readline()
    if ending == "wait":
        time.sleep(0.2)
        program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=60)
    assert (program.returncode, first, out, errors) == (0, "(8, 16)\n", "0\n" if ending == "wait" else "", "")


def test_a_script_without_a_main_guard_trains_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, valkyrie\n"
        "run = valkyrie.compose('model=gpt_tiny', 'mesh=1x1x1', 'tracking=off')\n"
        "if __name__ == '__mp_main__':\n    valkyrie.fit(run)\n"
        "process = multiprocessing.get_context('spawn').Process(target=print)\nprocess.start()\nprocess.join()\n"
    )
    result = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    (line,) = result.stderr.splitlines()
    assert "`if __name__ == '__main__':`" in line and "data.workers=0" in line and not (tmp_path / "runs").exists()
