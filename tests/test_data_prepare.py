"""Tests of data preparation: the cache, the shards, interruptions and damage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from valkyrie.data import prepare as prepare_module
from valkyrie.data import writer
from valkyrie.data.loader import open_split
from valkyrie.data.manifest import MANIFEST_FILE, CorruptShardsError, PreparedText, open_dataset, verify
from valkyrie.data.prepare import prepare
from valkyrie.data.sources import synthetic
from valkyrie.data.sources import text as text_source
from valkyrie.data.tokenizer import load_tokenizer
from valkyrie.problems import ProblemCode

CORPUS = {f"{number:02d}.txt": f"document {number}: {'é' * number}\nline two\n" * 3 for number in range(40)}


@pytest.fixture
def config(tmp_path: Path) -> text_source.Config:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in CORPUS.items():
        (corpus / name).write_text(text)
    cache = str(tmp_path / "cache")
    return text_source.Config(paths=[str(corpus)], cache_dir=cache, shard_tokens=300, validation_fraction=0.2)


def all_tokens(prepared: PreparedText, split: str) -> np.ndarray:
    stream = open_split(prepared, split)
    return stream.read(0, len(stream))


def split_texts(prepared: PreparedText, split: str) -> list[str]:
    """Split the token stream at BOS and return the decoded documents."""
    tokenizer = load_tokenizer(prepared.tokenizer)
    tokens = all_tokens(prepared, split)
    starts = np.flatnonzero(tokens == prepared.bos_id)
    assert starts[0] == 0
    return [tokenizer.decode(document) for document in np.split(tokens, starts[1:])]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_the_shards_have_every_document_once_after_a_bos(config: text_source.Config, tokenizer: str) -> None:
    prepared = prepare(config, tokenizer)
    train, validation = split_texts(prepared, "train"), split_texts(prepared, "validation")
    assert sorted(train + validation) == sorted(CORPUS.values())
    assert (
        train == [text for text in CORPUS.values() if text in train]
        and len(validation) == prepared.validation.documents > 0
    )
    for name, texts in (("train", train), ("validation", validation)):
        split = prepared.split(name)
        assert split.bytes == sum(len(text.encode()) for text in texts)
        assert split.documents == len(texts)
        assert split.tokens == len(all_tokens(prepared, name)) == sum(shard.tokens for shard in split.shards)
        assert [shard.tokens for shard in split.shards[:-1]] == [300] * (len(split.shards) - 1)
    assert len(prepared.train.shards) > 2 and prepared.dtype == "uint16"
    assert json.loads((prepared.path / MANIFEST_FILE).read_text())["version"] == 1


def test_a_long_file_is_one_document_in_each_split(config: text_source.Config, tmp_path: Path) -> None:
    text = "one line of many\n" * 150_000
    (tmp_path / "long.txt").write_text(text)
    config.paths, config.shard_tokens = [str(tmp_path / "long.txt")], 1 << 20
    prepared = prepare(config, "bytes")
    (train,), (validation,) = split_texts(prepared, "train"), split_texts(prepared, "validation")
    assert train + validation == text and len(validation) == pytest.approx(0.2 * len(text), abs=20)
    assert (prepared.train.documents, prepared.validation.documents) == (1, 1)


def test_a_large_vocabulary_uses_four_bytes_per_token(config: text_source.Config, tmp_path: Path) -> None:
    import base64

    lines = [base64.b64encode(bytes([value])) + b" %d" % value for value in range(256)]
    (tmp_path / "large.tiktoken").write_bytes(b"\n".join([*lines, base64.b64encode(b"document") + b" 70000"]))
    prepared = prepare(config, str(tmp_path / "large.tiktoken"))
    assert (prepared.dtype, prepared.bos_id, prepared.vocab_size) == ("uint32", 70001, 70002)
    assert sorted(split_texts(prepared, "train") + split_texts(prepared, "validation")) == sorted(CORPUS.values())


@pytest.mark.parametrize("workers", [1, 5])
def test_the_result_does_not_depend_on_the_number_of_workers(
    config: text_source.Config, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = prepare(config, "gpt2").content
    monkeypatch.setattr("valkyrie.data.writer.PIECE_CHARS", 100)
    config.workers = workers
    config.cache_dir += "-other"
    assert prepare(config, "gpt2").content == content


def test_a_second_call_does_not_tokenise_again(config: text_source.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config, "gpt2")

    def fail_if_called(*arguments: object) -> None:
        raise AssertionError

    for name in ("load_tokenizer", "split_documents", "encode_in_threads"):
        monkeypatch.setattr(prepare_module, name, fail_if_called)
    monkeypatch.setattr("valkyrie.checksums._checksum", fail_if_called)
    assert prepare(config, "gpt2", fail_if_called) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda config: Path(config.paths[0], "00.txt").write_text("another text"),
        lambda config: Path(config.paths[0], "new.md").write_text("another text"),
        lambda config: Path(config.paths[0], "00.txt").unlink(),
        lambda config: setattr(config, "validation_fraction", 0.3),
        lambda config: setattr(config, "shard_tokens", 301),
        lambda config: setattr(config, "max_bytes", 1000),
    ],
)
def test_a_relevant_change_makes_another_dataset(
    config: text_source.Config, change: Callable[[text_source.Config], object]
) -> None:
    first = prepare(config, "bytes")
    change(config)
    second = prepare(config, "bytes")
    assert second.path != first.path and second.content != first.content
    assert open_dataset(first.path) == first


def test_irrelevant_changes_keep_the_content_hash(config: text_source.Config) -> None:
    first = prepare(config, "bytes")
    config.shuffle_seed, config.workers, config.name = 3, 1, "other"
    Path(config.paths[0], "00.txt").touch()
    second = prepare(config, "bytes")
    assert (second.content, second.path != first.path) == (first.content, True)
    assert prepare(config, "gpt2").content != first.content


def test_synthetic_documents_are_written_to_shards(tmp_path: Path) -> None:
    config = synthetic.Config(documents=50, mean_length=20, cache_dir=str(tmp_path))
    prepared = prepare(config, "bytes")
    assert prepared.train.documents + prepared.validation.documents == 50
    assert prepared.train.tokens == prepared.train.bytes + prepared.train.documents
    assert prepared.source["entropy_nats_per_token"] == pytest.approx(1.0627, abs=1e-4)
    config.generator_seed = 1
    assert prepare(config, "bytes").content != prepared.content


def test_a_prepared_directory_is_a_dataset(config: text_source.Config, tmp_path: Path) -> None:
    prepared = prepare(config, "bytes")
    moved_folder = prepared.path.rename(tmp_path / "moved")
    config.paths = [str(moved_folder)]
    assert prepare(config, "bytes").content == prepared.content
    with pytest.raises(ValueError, match=r"tokenizer bytes, not gpt2\. .*data\.tokenizer=bytes"):
        prepare(config, "gpt2")


PROGRAM = """
import os, signal, sys
from valkyrie.data.prepare import prepare
from valkyrie.data.sources import text as text_source
what, corpus, cache = sys.argv[1:]
def progress(done, total):
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
config = text_source.Config(paths=[corpus], cache_dir=cache, shard_tokens=300, validation_fraction=0.2)
print(prepare(config, "bytes", progress).content)
"""


def start_preparation(action: str, config: text_source.Config) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, action, config.paths[0], config.cache_dir]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_several_simultaneous_processes_produce_one_result(config: text_source.Config) -> None:
    processes = [start_preparation("work", config) for _ in range(4)]
    contents = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert contents == {prepare(config, "bytes").content}
    assert [entry.name for entry in Path(config.cache_dir).iterdir() if entry.is_dir()] == [
        prepare(config, "bytes").path.name
    ]


def test_two_simultaneous_results_become_one_without_locks(
    config: text_source.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without locks, the second process to finish uses the result of the first."""
    import fcntl

    def no_locks(*arguments: object) -> None:
        raise OSError

    monkeypatch.setattr(fcntl, "flock", no_locks)
    nested_results: list[PreparedText] = []

    def other_process(done: int, total: int | None) -> None:
        if not nested_results:
            nested_results.append(prepare(config, "bytes"))

    assert prepare(config, "bytes", other_process) == nested_results[0] == verify(nested_results[0].path)
    assert not list(Path(config.cache_dir).glob(".*tmp*"))


def test_a_killed_preparation_leaves_no_usable_result(config: text_source.Config) -> None:
    process = start_preparation("kill", config)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (temporary_folder,) = Path(config.cache_dir).glob(".*tmp*")
    assert not (temporary_folder / MANIFEST_FILE).exists() and list(temporary_folder.iterdir())
    prepared = prepare(config, "bytes")
    assert verify(prepared.path).train.documents > 0
    assert not temporary_folder.exists()


def test_an_interrupted_preparation_cleans_up(config: text_source.Config) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, "bytes", interrupt)
    assert [entry for entry in Path(config.cache_dir).iterdir() if entry.is_dir()] == []


def test_a_shard_size_that_needs_too_many_files_is_refused(
    config: text_source.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_SMALL_SHARDS", 3)
    config.shard_tokens = 1
    with pytest.raises(ValueError, match=r"data\.shard_tokens=1: .* 3 files"):
        prepare(config, "bytes")
    assert [entry for entry in Path(config.cache_dir).iterdir() if entry.is_dir()] == []


def test_progress_counts_bytes(config: text_source.Config) -> None:
    progress: list[tuple[int, int | None]] = []
    prepared = prepare(config, "bytes", lambda done, total: progress.append((done, total)))
    size = sum(len(text.encode()) for text in CORPUS.values())
    assert progress[-1] == (size, size) == (prepared.train.bytes + prepared.validation.bytes, size)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_when_a_shard_was_touched(config: text_source.Config) -> None:
    prepared = prepare(config, "bytes")
    count = len(prepared.train.shards) + len(prepared.validation.shards)
    shard = prepared.shard_path(prepared.train.shards[1])
    flip_bit(shard)
    with pytest.raises(CorruptShardsError, match=f"1 of {count}") as caught:
        open_dataset(prepared.path)
    assert [(problem.code, problem.value) for problem in caught.value.problems] == [
        (ProblemCode.damaged, "train-00001.bin")
    ]
    with pytest.raises(CorruptShardsError):
        prepare(config, "bytes")
    flip_bit(shard)
    assert open_dataset(prepared.path) == prepared


def test_verify_finds_damage_that_opening_does_not_check(config: text_source.Config) -> None:
    prepared = prepare(config, "bytes")
    shard = prepared.shard_path(prepared.validation.shards[0])
    modified_ns = shard.stat().st_mtime_ns
    flip_bit(shard)
    os.utime(shard, ns=(modified_ns, modified_ns))
    assert open_dataset(prepared.path) == prepared
    with pytest.raises(CorruptShardsError, match=r"validation-00000\.bin"):
        verify(prepared.path)
    with pytest.raises(CorruptShardsError, match=r"validation-00000\.bin"):
        prepare(config, "bytes")


def test_short_and_missing_shards_are_named_together(config: text_source.Config) -> None:
    prepared = prepare(config, "bytes")
    os.truncate(prepared.shard_path(prepared.train.shards[0]), 599)
    prepared.shard_path(prepared.validation.shards[0]).unlink()
    with pytest.raises(CorruptShardsError, match="599 bytes") as caught:
        open_dataset(prepared.path)
    wrong = [(ProblemCode.damaged, "train-00000.bin"), (ProblemCode.missing, "validation-00000.bin")]
    assert [(problem.code, problem.value) for problem in caught.value.problems] == wrong


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("{", r"manifest\.json .*damaged"),
        ("[]", r"manifest\.json is damaged \(not a JSON object\)"),
        ('{"name": "text"}', r"manifest\.json is damaged \(the key version is missing\)"),
        ('{"version": 99}', r"manifest\.json .*\bversion 99\b"),
        ('{"version": 1}', r"manifest\.json .*damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(config: text_source.Config, content: str, pattern: str) -> None:
    path = prepare(config, "bytes").path
    (path / MANIFEST_FILE).write_text(content)
    with pytest.raises(ValueError, match=pattern):
        open_dataset(path)


def test_a_cached_dataset_without_a_manifest_and_an_unreadable_folder_are_named(
    config: text_source.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(config, "bytes").path
    (path / MANIFEST_FILE).unlink()
    with pytest.raises(ValueError, match=rf"^{path} .*\bmanifest\.json\. Delete"):
        prepare(config, "bytes")
    secret = tmp_path / "folder" / "secret"
    secret.mkdir(parents=True)
    (tmp_path / "folder" / "a.txt").write_text("a line\n" * 100)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != secret and access(path, mode))
    for pattern in ("folder", "folder/**", "fold*/**/*.txt"):
        config.paths, notes = [f"{tmp_path}/{pattern}"], list[str]()
        prepare(config, "bytes", say=notes.append)
        assert [str(secret) in note and "1 folder" in note for note in notes] == [True], notes
    (tmp_path / "folder" / "a.txt").unlink()
    for pattern in ("folder", "folder/**", "folder/secret/*.txt"):
        config.paths = [f"{tmp_path}/{pattern}"]
        with pytest.raises(ValueError, match=rf"^data\.paths: {secret} cannot be read"):
            prepare(config, "bytes")
    monkeypatch.setattr(os, "access", lambda *_: False)
    config.paths = [str(tmp_path)]
    with pytest.raises(ValueError, match=rf"^data\.paths: {tmp_path} cannot be read \(permission denied\)"):
        prepare(config, "bytes")
    file = tmp_path / "a.txt"
    file.touch()
    config.paths = [str(file)]
    with pytest.raises(ValueError, match=rf"^{file} .*permission denied.*chmod u\+r "):
        prepare(config, "bytes")


def test_a_directory_without_a_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("files", "options", "pattern"),
    [
        ({"a.txt": ""}, {}, r"data=text .*\bno text\b"),
        ({"a.jsonl": '{"text": "x"}'}, {}, r"data=text .*\b1 document .*\b1 byte"),
        ({"a.txt": "x", "b.txt": "x"}, {}, r"data=text .*\b2 documents"),
        ({"a.txt": "xy"}, {"validation_fraction": 1.0}, "data.validation_fraction=1: "),
        ({"a.txt": "xy"}, {"validation_fraction": 0.0}, "data.validation_fraction=0: "),
        ({"a.txt": "xy"}, {"workers": 0}, "data.workers=0: "),
        ({"a.txt": "xy"}, {"max_bytes": 0}, "data.max_bytes=0: "),
        ({"a.txt": "xy"}, {"shard_tokens": 0}, "data.shard_tokens=0: "),
    ],
)
def test_mistakes_are_refused_and_leave_no_files(
    tmp_path: Path, files: dict[str, str], options: dict[str, Any], pattern: str
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in files.items():
        (corpus / name).write_text(text)
    cache = tmp_path / "cache"
    config = text_source.Config(paths=[str(corpus)], cache_dir=str(cache), **options)
    with pytest.raises(ValueError, match=pattern):
        prepare(config, "bytes")
    assert not cache.exists() or not [entry for entry in cache.iterdir() if entry.is_dir()]
