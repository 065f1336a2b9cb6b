"""Tests of data sources: their documents, the order of documents, the splits, and refusals."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from pyarrow import parquet

from helpers import compose_run
from valkyrie.data import cut as cut_module
from valkyrie.data import readers
from valkyrie.data.chunks import Chunking
from valkyrie.data.config import SOURCES
from valkyrie.data.cut import HASH_RANGE, Census, TokenDocument, adjust_threshold, split_documents, split_into_pieces
from valkyrie.data.documents import DocumentConfig
from valkyrie.data.readers import Document
from valkyrie.data.sources import parquet_stream, stdlib, synthetic
from valkyrie.data.sources import text as text_source
from valkyrie.data.sources.synthetic import FIRST_ID, SUCCESSOR_WEIGHTS, entropy
from valkyrie.data.tokenizer import load_tokenizer
from valkyrie.train.prepare import prepare_run
from valkyrie.train.screen import make_console

GPT2 = load_tokenizer("gpt2")


def text_config(*paths: object, **more: Any) -> text_source.Config:
    return text_source.Config(paths=[str(path) for path in paths], **more)


def read(config: DocumentConfig) -> list[Document]:
    entries = list(config.read_documents(config.list_files()))
    documents = [document for document in entries if isinstance(document, Document)]
    assert documents == entries
    return documents


def read_texts(config: DocumentConfig) -> list[str]:
    return [document.text for document in read(config)]


def test_configs_load_without_numpy_and_sources_load_without_jax() -> None:
    program = (
        "import sys; from valkyrie.data.config import SOURCES; [*map(SOURCES.config_class, SOURCES.names())];"
        "assert not {'numpy', 'jax', 'grain', 'omegaconf'} & set(sys.modules);"
        "import valkyrie.data.prepare, valkyrie.data.loader; assert not {'jax', 'grain', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[1].glob("conf/data/*.yaml")), ids=lambda file: file.stem)
def test_every_dataset_of_conf_is_a_data_config(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = file.read_text().splitlines()[0]
    assert command.startswith("# valkyrie-train ") and f"data={file.stem}" in command.split()
    loaded = OmegaConf.load(file)
    assert isinstance(loaded, DictConfig)
    schema, last = loaded.pop("defaults")
    source = schema.removesuffix("_schema")
    assert last == "_self_" and (file.stem == source or file.stem.startswith(f"{source}_"))
    merged = OmegaConf.merge(OmegaConf.structured(SOURCES.config_class(source)), loaded)
    monkeypatch.setenv("VALKYRIE_CACHE", "/elsewhere")
    config = OmegaConf.to_object(merged)
    assert isinstance(config, SOURCES.config_class(source))
    assert (config.name, config.source) == (file.stem, source)
    assert getattr(config, "cache_dir", "/elsewhere/data") == "/elsewhere/data"


def test_stdlib_is_this_pythons_library_without_its_tests() -> None:
    config = stdlib.Config()
    listing = config.list_files()
    names = [file.id for file in listing.files]
    assert {"os.py", "json/decoder.py"} < set(names) and names == sorted(names)
    assert not [name for name in names if {"site-packages", "test", "tests"} & set(name.split("/"))]
    assert listing.bytes > 5_000_000
    assert config.list_files() == listing
    first = next(iter(config.read_documents(listing)))
    assert isinstance(first, Document) and (Path(sysconfig.get_paths()["stdlib"]) / first.id).read_text() == first.text


def test_a_zipped_stdlib_is_read_and_a_missing_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "python311.zip"
    with zipfile.ZipFile(archive, "w") as zip_file:
        zip_file.writestr("os.py", "# os\n" * 300_000)
        zip_file.writestr("json/decoder.py", "# json")
        zip_file.writestr("json/tests/test_it.py", "# not this")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    monkeypatch.setattr(sys, "path", [str(archive)])
    assert read_texts(stdlib.Config()) == ["# json", "# os\n" * 300_000]
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ValueError, match="found 0"):
        stdlib.Config().list_files()


def test_files_directories_and_globs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    (tmp_path / "notes" / ".hidden").mkdir()
    for name, text in {
        "a.txt": "A",
        "notes/b.md": "B",
        "notes/deep/c.py": "C",
        "notes/.hidden/d.txt": "D",
        "notes/picture.png": "E",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert read_texts(text_config("notes/**/*.py", "a.txt")) == ["A", "C"]
    assert read_texts(text_config("notes")) == ["B", "C"]
    assert read_texts(text_config("**/*.md", "notes/b.md", tmp_path / "notes")) == ["B", "C"]
    assert text_config("notes/*").list_files().skipped_names == ("notes/picture.png",)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_texts(text_config("~/a.txt", "~/notes/*.md")) == ["A", "B"]


def test_rows_of_jsonl_and_parquet_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"body": "one"}, {"body": ""}, {"body": "two\nlines", "n": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    parquet.write_table(pyarrow.table({"story": ["three", None, "four"], "n": [1, 2, 3]}), tmp_path / "b.parquet")
    config = text_config(tmp_path, field="body", column="story")
    assert [(d.id.removeprefix(f"{tmp_path}/"), d.text) for d in read(config)] == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "two\nlines"),
        ("b.parquet:1", "three"),
        ("b.parquet:3", "four"),
    ]
    with monkeypatch.context() as patches:
        patches.delattr(json, "JSONDecoder")  # json.loads would build one for each line
        assert [d.text for d in read(text_config(tmp_path / "a.jsonl", field="body"))] == ["one", "two\nlines"]
    with pytest.raises(ValueError, match=r"b\.parquet .*data\.column=m\. .*story"):
        read(text_config(tmp_path / "b.parquet", column="m"))
    with pytest.raises(ValueError, match=r"data\.field=text .*a\.jsonl:1\. .*body"):
        read(text_config(tmp_path / "a.jsonl"))
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"c\.jsonl:2 .*JSON .*at character \d+"):
        read(text_config(tmp_path / "c.jsonl"))
    (tmp_path / "c.jsonl").write_text('{"text": "x", "id": ' + 5000 * "9" + '}\n{"text": "y')
    with pytest.raises(ValueError, match=r"c\.jsonl:2 .* at character 10\b.*cut short"):
        read(text_config(tmp_path / "c.jsonl"))
    (tmp_path / "d.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"d\.parquet "):
        read(text_config(tmp_path / "d.parquet"))
    for row, kind in {"[1]": "a list", "null": "null", '"x"': "a string", "true": "true or false"}.items():
        (tmp_path / "e.jsonl").write_text(row)
        with pytest.raises(ValueError, match=rf"e\.jsonl:1 is {kind}, not an object"):
            read(text_config(tmp_path / "e.jsonl"))


def tfrecord(content: bytes) -> bytes:
    """Return a record of a .tfrecord file: its length and its content, each followed by its masked CRC-32C."""
    record = b""
    for part in (struct.pack("<Q", len(content)), content):
        crc = google_crc32c.value(part)
        record += part + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    return record


def test_compressed_jsonl_and_sharded_tfrecord_files_are_read(tmp_path: Path) -> None:
    with pyarrow.output_stream(tmp_path / "a.jsonl.zst", compression="zstd") as file:
        file.write(b'{"text": "one"}\n')
    (tmp_path / "B.TFRECORD-00000-of-00001").write_bytes(tfrecord(b"two") + tfrecord(b"three"))
    assert read_texts(text_config(tmp_path)) == ["two", "three", "one"]
    assert read_texts(text_config(tmp_path / "a.jsonl.zst")) == ["one"]
    with pytest.raises(ValueError, match=r"inferred from \.jsonl\.zst\."):
        text_config(tmp_path / "a.jsonl.zst", chunk=Chunking.functions).list_files()


def test_a_feature_without_text_is_refused(tmp_path: Path) -> None:
    def message(*fields: tuple[int, bytes]) -> bytes:
        return b"".join(bytes([number << 3 | 2, len(content)]) + content for number, content in fields)

    features = {b"image": message((1, message((1, b"\xff\xd8")))), b"label": message((3, b""))}
    example = message((1, message(*((1, message((1, name), (2, value))) for name, value in features.items()))))
    (tmp_path / "a.tfrecord").write_bytes(tfrecord(example))
    for field, fault in (("text", "a feature of"), ("label", "text in"), ("image", "UTF-8 in")):
        with pytest.raises(ValueError, match=rf"^data\.field={field} is not {fault} .*a\.tfrecord:1\. "):
            read(text_config(tmp_path, field=field))


@pytest.mark.parametrize("source", [text_source, parquet_stream], ids=["text", "parquet_stream"])
def test_skipped_files_are_noted(tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / ".home"))
    for name in ("a.txt", "b.txt", "table.csv", "LICENSE", ".hidden"):
        (tmp_path / name).write_text(f"the text of {name}")
    config = source.Config(paths=[str(tmp_path)])
    notes: list[str] = []
    config.open("bytes", say=notes.append)
    (note,) = notes
    assert note.startswith("note: data.paths: 2 files ") and "(.csv, none)" in note
    (tmp_path / "LICENSE").unlink()
    (tmp_path / "linked.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    notes.clear()
    config.open("bytes", say=notes.append)
    unsupported, without_content = notes
    assert unsupported.startswith("note: data.paths: 1 file ") and "(.csv)" in unsupported
    assert without_content.startswith("note: data.paths: 2 files ")
    assert f"{tmp_path}/linked.txt, {tmp_path}/pipe.txt" in without_content
    notes.clear()
    source.Config(paths=[f"{tmp_path}/*.txt", str(tmp_path / "a.txt")]).open("bytes", say=notes.append)
    assert len(notes) == 1


def test_rows_without_text_are_noted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a", "", "b"]))
    (tmp_path / "empty.txt").write_text("")
    config = text_config(tmp_path, cache_dir=str(tmp_path / "cache"))
    note = str(config.note(config.open("bytes")))
    assert f"note: {tmp_path}/a.jsonl: 1 of 3 rows " in note
    parquet.write_table(pyarrow.table({"text": ["three", None, None, "four"]}), tmp_path / "b.parquet")
    note = str(config.note(config.open("bytes")))
    assert f"note: {tmp_path}/b.parquet: 2 of 4 rows " in note and "(3 in all files)" in note


def test_brackets_in_the_name_of_a_file_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("notes[old].jsonl", "table[old].txt")
    (tmp_path / names[0]).write_text('{"text": "a b"}\n{"text": ""}\n{"text": "c d"}\n')
    (tmp_path / names[1]).symlink_to("nowhere")
    overrides = ("data=text", f"data.paths=[{tmp_path}]", f"data.cache_dir={tmp_path / 'cache'}")
    prepare_run(compose_run("model=s5_tiny", "mesh=1x1x1", "partition=dp", *overrides), make_console())
    out = capfd.readouterr().out
    assert all(name in out for name in names)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("null", "null"), ("0", "a number"), ("[]", "a list"), ("{}", "an object"), ("true", "true or false")],
)
def test_a_value_that_is_not_text_is_named(tmp_path: Path, value: str, kind: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": {value}}}')
    with pytest.raises(ValueError, match=rf"data\.field=text is {kind} .*a\.jsonl:1\b"):
        read(text_config(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("values", "kind"), [([b"a"], "binary"), ([1], "int64"), ([{"a": 1, "b": "x"}], "struct"), ([["a"]], "list")]
)
def test_the_type_of_a_parquet_column_without_text_is_named(tmp_path: Path, values: list[object], kind: str) -> None:
    parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"a\.parquet: column text is {kind}\b") as error:
        read(text_config(tmp_path / "a.parquet"))
    assert "data.column" not in str(error.value)
    parquet.write_table(pyarrow.table({"text": values, "body": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"column text is {kind}\b.*\bdata\.column: body\b"):
        read(text_config(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.tfrecord"])
@pytest.mark.parametrize(
    ("magic", "message"),
    [
        (b"\x1f\x8b", "is gzip-compressed"),
        (b"PK\x03\x04", "is a zip archive"),
        (b"(\xb5/\xfd", "is zstd-compressed"),
    ],
)
def test_a_compressed_file_with_the_suffix_of_another_format_is_named(
    tmp_path: Path, name: str, magic: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(magic + bytes(range(256)))
    with pytest.raises(ValueError, match=re.escape(f"{name} {message}")):
        read(text_config(tmp_path / name))


def test_lone_surrogates_are_counted_as_undecodable(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud83db \ud83d\ude00"}')
    (document,) = read(text_config(tmp_path / "a.jsonl"))
    assert (document.text, document.replaced) == ("a\ufffdb \U0001f600", 1)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.parquet").write_text("no")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="--extra parquet"):
        read(text_config(tmp_path / "b.parquet"))


def test_bytes_that_are_not_utf8_are_counted_or_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9" + b"!" * 30)
    (document,) = read(text_config(tmp_path / "a.txt"))
    assert document.text == "caf\ufffd" + "!" * 30 and document.replaced == 1
    (tmp_path / "b.txt").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"b\.txt .*\b128\b"):
        read(text_config(tmp_path / "b.txt"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_is_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("Some text, in a file of Windows".encode(encoding))
    with pytest.raises(ValueError, match=r"a\.txt .*UTF-16"):
        read(text_config(tmp_path / "a.txt"))


def test_circular_links_are_followed_once(tmp_path: Path) -> None:
    folder, link = tmp_path / "a[1]", tmp_path / "linked"
    for directory in (folder / "deep", link):
        directory.mkdir(parents=True)
        (directory / "a.txt").write_text(directory.name)
    for number in range(20):
        (folder / f"{number}").symlink_to(".")
    (folder / "other").symlink_to(link)
    assert sorted(read_texts(text_config(f"{tmp_path}/a*/**/*.txt"))) == ["deep", "linked"]
    assert read_texts(text_config(f"{tmp_path}/**/deep/**")) == ["deep"]


def test_a_pipe_and_a_file_larger_than_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(ValueError, match=r"p\.txt .*regular file"):
        read(text_config(tmp_path / "p.txt"))
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(2**29)
    monkeypatch.setattr(readers, "free_memory", lambda: 2**30)
    with pytest.raises(ValueError, match=r"a\.txt .*\b1\.5 GiB"):
        read(text_config(tmp_path / "a.txt"))


def test_a_deeply_nested_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + "[" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 "):
        read(text_config(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("paths", "values"),
    [
        ([], ("data=text", "data.paths=[", ".txt", ".md", ".py")),
        (["none.txt"], ("data.paths", " none.txt ")),
        (["*.rst"], ("data.paths", " *.rst ", " 0 ")),
        (["a.rst"], ("data.paths", " a.rst ", " 1 ")),
    ],
)
def test_paths_without_text_are_refused(
    paths: list[str], values: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if paths == ["a.rst"]:
        (tmp_path / "a.rst").write_text("text")
    with pytest.raises(ValueError) as error:
        text_config(*paths).list_files()
    assert all(value in str(error.value) for value in (*values, str(tmp_path) if paths else ""))


def test_the_synthetic_chain_is_seeded_and_has_the_stated_entropy() -> None:
    config = synthetic.Config(documents=700, mean_length=100, states=16)
    documents = list(config.read_documents(config.list_files()))
    second_reading = list(config.read_documents(config.list_files()))
    assert len(documents) == 700
    counts = np.zeros((16, 16))
    for first, second in zip(documents, second_reading, strict=True):
        assert isinstance(first, TokenDocument) and isinstance(second, TokenDocument)
        assert np.array_equal(first.tokens, second.tokens) and 50 <= first.tokens.size <= 150
        np.add.at(counts, (first.tokens[:-1] - FIRST_ID, first.tokens[1:] - FIRST_ID), 1)
    assert ((counts > 0).sum(axis=1) == len(SUCCESSOR_WEIGHTS)).all()
    share = counts / counts.sum(axis=1, keepdims=True)
    measured = -(counts.sum(axis=1) / counts.sum()) @ np.where(share > 0, share * np.log(share + (share == 0)), 0).sum(
        axis=1
    )
    assert measured == pytest.approx(entropy(), rel=0.01)
    other = next(synthetic.Config(states=16, generator_seed=1).read_documents(config.list_files()))
    assert isinstance(other, TokenDocument) and isinstance(documents[0], TokenDocument)
    assert other.tokens.tolist() != documents[0].tokens.tolist()


@pytest.mark.parametrize(("key", "value"), [("states", 3), ("documents", 1), ("mean_length", 1)])
def test_an_impossible_synthetic_chain_is_refused(key: str, value: int) -> None:
    (problem,) = synthetic.Config(**{key: value}).problems()
    assert (problem.key, problem.value) == (f"data.{key}", value)


def split_texts(config: DocumentConfig, threshold: int | None = None) -> tuple[dict[str, list[str]], Census]:
    census = Census()
    texts: dict[str, list[str]] = {"train": [], "validation": []}
    limit = int(config.validation_fraction * HASH_RANGE) if threshold is None else threshold
    for piece in split_documents(config, config.list_files(), limit, census):
        assert isinstance(piece.content, str)
        texts[piece.split].append(piece.content)
    return texts, census


def test_the_split_of_a_document_depends_only_on_its_text(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    for number in range(400):
        (tmp_path / "one" / f"{number}.txt").write_text(f"text {number}")
        (tmp_path / "two" / f"renamed-{number}.md").write_text(f"text {number}")
    first, _ = split_texts(text_config(tmp_path / "one", validation_fraction=0.2))
    texts_of_both_folders, _ = split_texts(text_config(tmp_path / "one", tmp_path / "two", validation_fraction=0.2))
    assert 50 < len(first["validation"]) < 110
    assert sorted(texts_of_both_folders["validation"]) == sorted(first["validation"] * 2)
    texts_of_one_folder, _ = split_texts(text_config(tmp_path / "one", validation_fraction=0.1))
    assert set(texts_of_one_folder["validation"]) < set(first["validation"])


@pytest.mark.parametrize("fraction", [1e-6, 0.999999])
def test_both_splits_get_at_least_one_document(tmp_path: Path, fraction: float) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    config = text_config(tmp_path, validation_fraction=fraction)
    first, census = split_texts(config)
    assert min(map(len, first.values())) == 0
    threshold = adjust_threshold(config, config.list_files(), census, int(config.validation_fraction * HASH_RANGE))
    second, _ = split_texts(config, threshold)
    assert sorted(map(len, second.values())) == [1, 2]
    assert adjust_threshold(config, config.list_files(), census, threshold) == threshold


def test_a_single_file_is_split_at_a_line(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(100)]
    (tmp_path / "a.txt").write_text("".join(lines))
    texts, census = split_texts(text_config(tmp_path / "a.txt", validation_fraction=0.1))
    train, validation = "".join(texts["train"]), "".join(texts["validation"])
    assert train + validation == "".join(lines) and train.endswith("\n") and validation.startswith("line 9")
    assert census.documents == 1
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(ValueError, match=r"b\.txt .*\b1\b"):
        split_texts(text_config(tmp_path / "b.txt", validation_fraction=0.1))


@pytest.mark.parametrize("limit", [1, 11, 12, 999, 1000])
def test_max_bytes_limits_the_text_exactly(tmp_path: Path, limit: int) -> None:
    for number in range(100):
        (tmp_path / f"{number:03d}.txt").write_text(f"document {number % 10}")  # 10 bytes
    texts, census = split_texts(text_config(tmp_path, max_bytes=limit))
    assert sum(len(text) for split in texts.values() for text in split) == census.bytes == limit


def test_max_bytes_never_cuts_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 10)
    (tmp_path / "b.txt").write_text("è" * 10)
    texts, _ = split_texts(text_config(tmp_path, max_bytes=33))
    assert sorted("".join(text) for text in texts["train"] + texts["validation"]) == ["è" * 6, "é" * 10]


@given(parts=st.lists(st.sampled_from(["ab", "1", " ", "\n", "\n\n", "\t", "!", "/", "'s", "é", "\r"]), max_size=40))
@settings(deadline=None, max_examples=300)
def test_tokenising_pieces_gives_the_tokens_of_the_whole_text(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = list(split_into_pieces(text, "train", 2))
    contents = [piece.content for piece in pieces]
    assert "".join(map(str, contents)) == text
    assert [piece.is_first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    apart = np.concatenate([GPT2.encode_ordinary(str(content)) for content in contents])
    assert apart.tolist() == GPT2.encode_ordinary(text).tolist()


def test_long_texts_are_split() -> None:
    assert len(list(split_into_pieces("one line\n" * (cut_module.PIECE_CHARS // 3), "train"))) == 3
