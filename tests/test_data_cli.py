"""Tests of `valkyrie-data`: its output, and mistakes refused in one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from valkyrie.cli.data import main
from valkyrie.processes.ending import EXIT_INTERRUPTED


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02d}.txt").write_text(f"the text of document {number}")
    return folder


def prepare_corpus(corpus: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    main(["prepare", "text", str(corpus), "--validation-fraction", "0.3", *more])
    return capsys.readouterr().out.splitlines()[-1]


def test_prepare_verify_and_show(corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = prepare_corpus(corpus, capsys, "--shard-tokens", "100")
    assert Path(path).parent == tmp_path / "cache" / "data"
    assert prepare_corpus(corpus, capsys, "--shard-tokens", "100") == path != prepare_corpus(corpus, capsys)
    main(["verify", path])
    size = sum(len(file.read_bytes()) + 1 for file in corpus.iterdir()) * 2
    assert f"{size:,} bytes: all" in capsys.readouterr().out
    main(["show", path, "--tokens", "30"])
    output = capsys.readouterr().out
    for text in ("text: kind=text", "bytes, 257 ids", "bytes/token", "30 tokens of train", "text of document"):
        assert text in output


def test_tokenizer_and_byte_limit_are_used(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", prepare_corpus(corpus, capsys, "--tokenizer", "gpt2", "--max-bytes", "100")])
    output = capsys.readouterr().out
    assert "gpt2, 50,257 ids" in output and "max_bytes=100" in output


def test_synthetic_data_needs_no_files(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prepare", "synthetic"])
    main(["show", capsys.readouterr().out.splitlines()[-1]])
    assert "entropy_nats_per_token=1.06" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["prepare", "text"], ["tokenizer"]])
def test_skipped_files_are_noted_if_the_work_fails(
    corpus: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (corpus / "table.csv").touch()
    (corpus / "wrong.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(SystemExit):
        main([*command, str(corpus)])
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith("note: 1 file ") and "(.csv)" in note and "wrong.jsonl" in error


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ([], ["{prepare,tokenizer,verify,show}"]),
        (["prepare", "docs/", "x y"], ["data: docs/ is", "valkyrie-data prepare text docs/ 'x y'"]),
        (["prepare", "txt", "docs/"], ["data: txt is", "mean text?"]),
        (["prepare", "data=text", "docs/"], ["data: data=text is", "Write text."]),
        (["prepare", "text", "data.paths=[docs]"], ["data: data.paths=[docs] is", "Write docs."]),
        (["prepare", "text", "--tokenizer", "bytes", "none.txt"], ["no file or directory none.txt "]),
        (
            ["prepare", "text", "http://127.0.0.1:1/x.txt"],
            ["http://127.0.0.1:1/x.txt cannot be read: connect call failed"],
        ),
        (["prepare", "--shard-tokens", "1"], ["--shard-tokens 1: ", "more than 1,000 files"]),
        (["prepare", "--paths", "docs/"], ["prepare: --paths is", "without --paths"]),
        (["prepare", "text", "a.txt", "--wokers", "2"], ["prepare: --wokers is", "mean --workers?"]),
        (["prepare", "text"], ["data: text needs files, such as corpus.txt 'notes/"]),
        (["prepare", "text", "none.txt"], ["data: there is no file or directory none.txt "]),
        (["prepare", "stdlib", "a.txt"], ["stdlib ", "prepare text a.txt"]),
        (["prepare", "--tokenizer", "gtp2"], ["--tokenizer gtp2 ", " bytes, "]),
        (["prepare", "--workers", "0"], ["data: --workers 0: ", "1, or left out for one per"]),
        (["prepare", "--validation-fraction", "2"], ["data: --validation-fraction 2: "]),
        (["prepare", "--cache-dir", "gs://a/b"], ["data: --cache-dir gs://a/b: "]),
        (["prepare", "text", "corpus", "--field", "body"], ["--field body ", ".jsonl", "Leave it out"]),
        (["tokenizer", "corpus", "--column", "body"], ["--column body ", ".parquet files"]),
        (
            ["prepare", "text", "c.jsonl", "--column", "body"],
            [": --column body ", ".parquet files. Write --field body."],
        ),
        (["prepare", "text", "c.jsonl"], ["c.jsonl is UTF-16, UTF-32 or binary"]),
        (["prepare", "text", "-1.txt"], ["-1.txt ", "./-1.txt"]),
        (["prepare", "--cache-dir", ""], [": --cache-dir '': an empty string"]),
        (["prepare", "text", "corpus", "--field="], [": --field= '': an empty string"]),
        (["prepare", "text", "corpus", ""], [": argument 4 (''): an empty string", ". for the current folder"]),
        (["prepare", "--workers", "many"], ["--workers", "'many'"]),
        (["verify", "nowhere"], ["nowhere ", "no such folder"]),
        (["show", "nowhere"], ["nowhere ", "no such folder"]),
        (["verify", "corpus"], ["corpus ", "no manifest.json", "`valkyrie-data prepare` printed"]),
        (["show", "nowhere", "--tokens", "0"], ["--tokens 0: "]),
    ],
)
def test_a_mistake_gives_one_line_and_status_2(
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    values: list[str],
) -> None:
    monkeypatch.chdir(corpus.parent)
    Path("-1.txt").write_text("text")
    Path("c.jsonl").write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(SystemExit) as error:
        main(arguments)
    out, errors = capsys.readouterr()
    assert (error.value.code, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("valkyrie-data") and all(value in errors for value in values)


@pytest.mark.parametrize("name", ["", "gpt2", "p50k_edit", "../../escaped", "mine/t", "a.tiktoken"])
def test_an_invalid_tokenizer_name_is_refused(
    corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tokenizer", str(corpus), "--vocab", "300", "--save", name])
    assert "--save" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_manifest_or_the_cache_folder_names_the_dataset_to_pass(
    corpus: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = prepare_corpus(corpus, capsys)
    for wrong in (Path(path).parent, Path(path, "manifest.json")):
        with pytest.raises(SystemExit, match="2"):
            main([command, str(wrong)])
        assert path in capsys.readouterr().err.removeprefix(f"valkyrie-data: {wrong} ")


def test_a_share_of_validation_far_from_the_option_is_noted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prepare", "text", str(corpus), "--validation-fraction", "0.0001"])
    assert "--validation-fraction 0.0001: the validation split has " in capsys.readouterr().err
    prepare_corpus(corpus, capsys)
    assert capsys.readouterr().err == ""


def test_sigterm_deletes_the_unfinished_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("valkyrie.data.manifest.write_manifest", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit, match=str(EXIT_INTERRUPTED)):
        main(["prepare", "text", str(corpus)])
    assert not [path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir()]
    assert capsys.readouterr().err == "valkyrie-data: stopped\n"


def test_characters_that_are_not_utf8_are_reported_by_file(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "latin.txt").write_bytes(b"caf\xe9 " + b"and more text " * 10)
    (corpus / "other.txt").write_bytes(b"\xe9\xe9 " + b"and more text " * 10)
    main(["prepare", "text", str(corpus), "--validation-fraction", "0.3"])
    line = capsys.readouterr().err
    assert (
        line.startswith(f"note: {corpus}/other.txt: ")
        and "by 2 U+FFFD characters" in line
        and "(1.4%)" in line
        and "(3 in " in line
    )


def test_a_corrupt_shard_is_named_by_verify(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prepare_corpus(corpus, capsys)
    shard = Path(path, "train-00000.bin")
    shard.write_bytes(b"!" + shard.read_bytes()[1:])
    with pytest.raises(SystemExit, match="2"):
        main(["verify", path])
    assert "train-00000.bin has changed" in capsys.readouterr().err
    Path(path, "validation-00000.bin").write_bytes(b"")
    with pytest.raises(SystemExit, match="2"):
        main(["verify", path])
    err = capsys.readouterr().err
    assert all(text in err for text in ("2 of 2", "train-00000.bin has changed", "validation-00000.bin has 0 bytes"))


def test_a_full_disk_is_reported_with_the_option_of_the_command(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)
    for arguments, option in (
        (
            ["tokenizer", str(corpus), "--vocab", "257", "--save", str(corpus / "small" / "tok.json")],
            "--save PATH.json",
        ),
        (["prepare", "text", str(corpus), "--cache-dir", str(corpus / "cache")], "--cache-dir DIR"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        err = capsys.readouterr().err
        assert "(no space left on device)" in err and option in err


def test_the_command_does_not_load_jax(corpus: Path) -> None:
    program = (
        f"import sys; from valkyrie.cli.data import main; main(['prepare', 'text', {str(corpus)!r}]);"
        "assert 'jax' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
