"""Tests of text in buckets: listing, reading and caching, from fsspec's `memory://` and an emulator."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from omegaconf import OmegaConf
from pyarrow import parquet

from buckets import bucket
from runs import run_train, tiny_arguments
from valkyrie import buckets as schemes
from valkyrie.cli.data import main as data_command
from valkyrie.data import remote
from valkyrie.data.manifest import open_dataset
from valkyrie.data.prepare import find_dataset, prepare
from valkyrie.data.readers import Document
from valkyrie.data.sources import parquet_stream
from valkyrie.data.sources import text as text_source
from valkyrie.problems import ProblemCode

__all__ = ["bucket"]
MEMORY_FILESYSTEM = fsspec.filesystem("memory")


@pytest.fixture
def remote_folder() -> Iterator[str]:
    """The URL of a folder in memory, with text, JSON Lines and Parquet files, a picture and hidden files."""
    rows = [{"text": "one"}, {"text": ""}, {"text": "two"}]
    table = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["three", None, "four"]}), table)
    for name, content in {
        "a.txt": b"A",
        "deep/b.md": b"B",
        "deep/rows.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "deep/er/table.parquet": table.getvalue(),
        "deep/picture.png": b"",
        ".hidden/c.txt": b"C",
        "deep/.d.txt": b"D",
    }.items():
        MEMORY_FILESYSTEM.pipe(f"/shelf/{name}", content)
    yield "memory://shelf"
    MEMORY_FILESYSTEM.rm("/shelf", recursive=True)


def remote_config(*paths: str, **more: Any) -> text_source.Config:
    return text_source.Config(paths=list(paths), **more)


def read_texts(config: text_source.Config) -> list[str]:
    documents = list(config.read_documents(config.list_files()))
    return [document.text for document in documents if isinstance(document, Document)]


def test_remote_files_folders_and_globs_are_read_like_local_ones(remote_folder: str, tmp_path: Path) -> None:
    assert read_texts(remote_config(f"{remote_folder}/a.txt")) == ["A"]
    assert (
        read_texts(remote_config(remote_folder))
        == read_texts(remote_config(f"{remote_folder}/"))
        == ["A", "B", "three", "four", "one", "two"]
    )
    assert read_texts(remote_config(f"{remote_folder}/**/*.txt", f"{remote_folder}/a.txt")) == ["A"]
    assert (
        read_texts(remote_config(f"{remote_folder}/.hidden/*.txt"))
        == read_texts(remote_config(f"{remote_folder}/.h*/*.txt"))
        == ["C"]
    )
    assert read_texts(remote_config(f"{remote_folder}/*/[br]*")) == ["B", "one", "two"]
    assert len(remote_config(f"{remote_folder}/deep").list_files().skipped_names) == 1
    (tmp_path / "local.txt").write_text("L")
    assert read_texts(remote_config(f"{remote_folder}/deep/b.md", str(tmp_path))) == ["L", "B"]
    (name,) = (
        document.id
        for document in remote_config(f"{remote_folder}/a.txt").read_documents(
            remote_config(f"{remote_folder}/a.txt").list_files()
        )
    )
    assert name.endswith("/shelf/a.txt") and name.startswith("memory://")


def test_large_files_are_streamed_with_the_same_result(remote_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_texts = read_texts(remote_config(remote_folder))
    monkeypatch.setattr(remote, "_MAX_FETCHED_BYTES", 0)
    assert read_texts(remote_config(remote_folder)) == small_texts
    monkeypatch.setattr(type(MEMORY_FILESYSTEM), "cat_file", lambda *arguments, **more: pytest.fail("read as a whole"))
    assert read_texts(remote_config(f"{remote_folder}/deep/rows.jsonl", f"{remote_folder}/deep/er")) == [
        "three",
        "four",
        "one",
        "two",
    ]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("none.txt", []),
        ("*.rst", [" 0 ", ".txt, .md, .py, .c,"]),
        ("deep/*.png", [" 1 ", ".txt, .md, .py, .c,"]),
    ],
)
def test_urls_without_text_are_refused(remote_folder: str, path: str, values: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^data\.paths") as error:
        remote_config(f"{remote_folder}/{path}").list_files()
    assert all(value in str(error.value) for value in (f"{remote_folder}/{path}", *values))


def test_a_service_that_does_not_answer_is_named_while_waiting(
    remote_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    match, note_printed = remote._match, threading.Event()

    def answer_late(*arguments: Any) -> Any:
        note_printed.wait(timeout=10)
        return match(*arguments)

    remote_config(remote_folder).list_files()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(schemes, "_NOTE_AFTER_S", 0.0)
    monkeypatch.setattr(schemes, "print", lambda *a, **k: (print(*a, **k), note_printed.set()), raising=False)
    monkeypatch.setattr(remote, "_match", answer_late)
    remote_config(remote_folder).list_files()
    assert f"data.paths={remote_folder}" in capsys.readouterr().err and note_printed.is_set()


def test_refusals_of_the_service_are_reported_with_a_remedy(
    remote_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden(Exception):
        """Fake exception of the storage service's package."""

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise Forbidden("caller does not have storage.objects.list\nmore")

    listing = remote_config(f"{remote_folder}/a.txt").list_files()
    monkeypatch.setattr(type(MEMORY_FILESYSTEM), "cat_file", refuse)
    with pytest.raises(ValueError, match=r"data\.paths=memory:.*/shelf/a\.txt .*Forbidden: .*storage\.objects\.list"):
        list(remote_config().read_documents(listing))
    (validation_file,) = remote.list_remote(f"{remote_folder}/deep/b.md", "data.val_paths")
    with pytest.raises(ValueError, match=r"^data\.val_paths=memory:"):
        validation_file.read()
    monkeypatch.setattr(type(MEMORY_FILESYSTEM), "info", refuse)
    with pytest.raises(ValueError, match=r"/shelf/a\.txt.* storage\.objects\.list"):
        remote_config(f"{remote_folder}/a.txt").list_files()


def test_an_unsupported_url_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "find_spec", lambda name: None)
    problems = remote_config("s3://b/x", "local", "az://b/y", "gz://b").problems()
    assert [(problem.code, problem.value) for problem in problems] == [
        (ProblemCode.not_installed, "s3://b/x"),
        (ProblemCode.not_installed, "az://b/y"),
        (ProblemCode.unknown_name, "gz://b"),
    ]
    stream = parquet_stream.Config(paths=["a"], val_paths=["gz://b"])
    assert [problem.text.partition(":")[0] for problem in stream.problems()] == ["data.val_paths=gz"]


def test_prepared_data_is_found_by_content_without_reading_it_again(
    remote_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_config = remote_config(remote_folder, cache_dir=str(tmp_path))
    assert find_dataset(source_config, "bytes") is None
    first = prepare(source_config, "bytes")
    for name in ("cat_file", "open"):
        monkeypatch.setattr(type(MEMORY_FILESYSTEM), name, lambda *arguments, **more: pytest.fail("read again"))
    assert prepare(source_config, "bytes") == find_dataset(source_config, "bytes") == first
    monkeypatch.undo()
    MEMORY_FILESYSTEM.pipe("/shelf/a.txt", b"Z")
    second = prepare(source_config, "bytes")
    assert second.path != first.path and second.content != first.content


def test_a_file_is_identified_by_its_most_reliable_checksum() -> None:
    marks = {"generation": "7", "md5Hash": "abc=", "mtime": 3}
    assert remote._version(marks) == "abc="
    assert remote._version({"generation": "7", "etag": ""}) == "7"
    assert remote._version({"name": "x", "size": 3}) == "[('name', 'x'), ('size', 3)]"


def test_a_url_does_not_depend_on_the_working_directory() -> None:
    source = remote_config("gs://bucket/books/*.txt", "notes").with_full_paths()
    assert source.paths == ["gs://bucket/books/*.txt", str(Path.cwd() / "notes")]


def test_local_paths_do_not_load_fsspec(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    program = (
        "import sys; from valkyrie.data.sources.text import Config;"
        f"asked = Config(paths=['{tmp_path}']); assert not asked.problems();"
        "assert len(list(asked.read_documents(asked.list_files()))) == 1; assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_training_reads_its_text_from_a_bucket(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    books = f"{bucket.rpartition('/')[0]}/books"
    system = fsspec.filesystem("gs")
    (tmp_path / "books").mkdir()
    for number in range(30):
        text = f"document {number} of thirty\n" * (number + 3)
        system.pipe(f"{books}/{number:02d}.txt", text.encode())
        (tmp_path / "books" / f"{number:02d}.txt").write_text(text)
    arguments = [argument for argument in tiny_arguments(tmp_path, "steps=1") if not argument.startswith("data")]
    cache = tmp_path / "cache"
    arguments += ["data=text", f"data.cache_dir={cache}"]
    assert run_train(*arguments, f"data.paths={books}/*.txt") == 0
    from_bucket = OmegaConf.load(tmp_path / "run" / "run.yaml")
    assert from_bucket.data.paths == [f"{books}/*.txt"]
    capsys.readouterr()
    contents = []
    for paths in (books, str(tmp_path / "books")):
        data_command(["prepare", "text", paths, "--cache-dir", str(cache)])
        contents.append(open_dataset(capsys.readouterr().out.splitlines()[-1]).content)
    assert contents[0] == contents[1] and len(list(cache.glob("text-*"))) == 2, (
        "the training's and the folder's are one"
    )
    with pytest.raises(SystemExit):
        data_command(["prepare", "text", f"{books}/*.md"])
    assert capsys.readouterr().err.startswith(f"valkyrie-data: {books}/*.md ")
