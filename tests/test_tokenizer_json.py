"""Tests of `tokenizer.json` files: training, and the same token ids as Hugging Face's `tokenizers`.

A saved tokenizer is found by name. Invalid files, and checkpoints of a different tokenizer, are refused.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from valkyrie.checkpoint.contents import refuse_other_tokenizer
from valkyrie.cli.data import main
from valkyrie.data.prepare import prepare
from valkyrie.data.sources import text as text_source
from valkyrie.data.tokenizer import load_tokenizer, read_fingerprint, read_vocab_size, tokenizer_identity
from valkyrie.data.tokenizer_json import train_tokenizer
from valkyrie.data.vocabulary import SPLIT_PATTERNS, TiktokenTokenizer

TEXTS = [Path(sysconfig.get_paths()["stdlib"], name).read_text() for name in ("argparse.py", "ast.py", "csv.py")]


@pytest.fixture(scope="module")
def trained_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    assert train_tokenizer(TEXTS, 1000, "nanochat", path) == 1000
    return path


@pytest.fixture(scope="module")
def tokenizer_pair(trained_path: Path) -> tuple[Any, Any]:
    return tokenizers.Tokenizer.from_file(str(trained_path)), load_tokenizer(str(trained_path))


def write_changed(path: Path, tmp_path: Path, **changes: Any) -> str:
    """Write a copy of a `tokenizer.json` with top-level keys replaced by `changes`, and return its path."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(other)


def test_a_trained_tokenizer_compresses_and_restores_its_text(trained_path: Path) -> None:
    tokenizer = load_tokenizer(str(trained_path))
    ids = tokenizer.encode_ordinary(TEXTS[1])
    assert isinstance(tokenizer, TiktokenTokenizer) and tokenizer.decode(ids) == TEXTS[1]
    assert len(TEXTS[1]) / len(ids) > 2.5
    assert (tokenizer.vocab_size, tokenizer.bos_id, read_vocab_size(str(trained_path))) == (1000, 999, 1000)
    assert tokenizer.token_bytes[ids].sum() == len(TEXTS[1].encode()) and tokenizer.token_bytes[999] == 0
    assert tokenizer.bos_id not in tokenizer.encode_ordinary("<|bos|>")


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_token_ids_equal_those_of_hugging_face(tokenizer_pair: tuple[Any, Any], text: str) -> None:
    package, tokenizer = tokenizer_pair
    assert tokenizer.encode_ordinary(text + "<").tolist() == package.encode(text + "<").ids


@pytest.mark.parametrize("pattern", SPLIT_PATTERNS)
def test_every_pattern_splits_text_like_tiktoken(tmp_path: Path, pattern: str) -> None:
    train_tokenizer(TEXTS[:1], 400, pattern, tmp_path / "t.json")
    path = str(tmp_path / "t.json")
    package, tokenizer = tokenizers.Tokenizer.from_file(path), load_tokenizer(path)
    assert tokenizer.encode_ordinary(TEXTS[2]).tolist() == package.encode(TEXTS[2]).ids
    words = "def encode_all(self):\n    return [1234567, 'it's'] + self.RANKS[0x1F] !== x;\n\n\t  end  "
    for text in ("I'LL 12345  x\n\n \t y日本語 é ́  \r\n  ", words):
        assert tokenizer.encode_ordinary(text).tolist() == package.encode(text).ids


def test_a_saved_tokenizer_is_found_by_name_and_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("some text, and some more text\n")
    arguments = ["tokenizer", "--vocab", "5000", "--save", "mine", str(tmp_path / "a.txt")]
    main(arguments)
    notes = capsys.readouterr().out
    assert re.match(r"2\d\d ids, not", notes) and "30 bytes" in notes
    assert f"fingerprint {read_fingerprint('mine')}" in notes and notes.endswith("data.tokenizer=mine\n")
    assert text_source.Config(tokenizer="mine").with_full_paths().tokenizer == "mine"
    for name in ("mine.json", "mine.tiktoken:r50k"):
        assert text_source.Config(tokenizer=name).with_full_paths().tokenizer == str(Path(name).absolute())
    assert load_tokenizer("mine").vocab_size == read_vocab_size("mine") < 300
    with pytest.raises(SystemExit):
        main(arguments)
    assert "mine.json already exists" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"o200k_base, .*mine, or"):
        read_fingerprint("mime")


def test_the_tokenizer_fingerprint_is_in_the_manifest(trained_path: Path, tmp_path: Path) -> None:
    paths = []
    for number in range(4):
        paths.append(str(tmp_path / f"{number}.txt"))
        Path(paths[-1]).write_text(f"{number} " + TEXTS[2])
    config = text_source.Config(paths=paths, cache_dir=str(tmp_path / "cache"), validation_fraction=0.4)
    prepared = prepare(config, str(trained_path))
    assert prepared.tokenizer_fingerprint == read_fingerprint(str(trained_path)) and prepared.vocab_size == 1000
    assert prepare(config, write_changed(trained_path, tmp_path, version="1.1")).key != prepared.key


@pytest.mark.parametrize("blank", ["\u2581", "G"])
def test_other_tokenizer_types_are_read_by_the_tokenizers_package(tmp_path: Path, blank: str) -> None:
    """Tests SentencePiece, and a byte-level tokenizer that normalises text. Neither can be a tiktoken encoding."""
    original = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    original.add_special_tokens(["<s>"])
    modules = tokenizers.pre_tokenizers, tokenizers.decoders
    if blank == "G":
        original.pre_tokenizer, original.decoder = (kind.ByteLevel() for kind in modules)
        original.normalizer = tokenizers.normalizers.NFC()
        alphabet = modules[0].ByteLevel.alphabet()
    else:
        original.pre_tokenizer, original.decoder = modules[0].Metaspace(), modules[1].Metaspace()
        alphabet = []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", *(f"<0x{i:02X}>" for i in range(256))],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    original.train_from_iterator(TEXTS[2:], trainer)
    original.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert not isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.vocab_size == read_vocab_size(str(tmp_path)) == original.get_vocab_size()
    ids = tokenizer.encode_ordinary("import csv <s>")
    assert tokenizer.bos_id == 0 and 0 not in ids and tokenizer.decode([0, *ids]).strip() == "import csv <s>"
    assert tokenizer.token_bytes[ids].sum() in (14, 15)


def test_a_bad_file_is_refused(trained_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no file .*none\.json"):
        read_fingerprint(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="beginning of a document"):
        load_tokenizer(write_changed(trained_path, tmp_path, added_tokens=[]))
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ValueError, match=r"empty\.json "):
        load_tokenizer(str(tmp_path / "empty.json"))
    with pytest.raises(ValueError, match="--vocab 256 .*257"):
        train_tokenizer([], 256, "cl100k", tmp_path / "x.json")
    with pytest.raises(ValueError, match="--pattern gpt5 .*nanochat"):
        train_tokenizer([], 300, "gpt5", tmp_path / "x.json")
    other = write_changed(trained_path, tmp_path, normalizer={"type": "NFC"})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="package tokenizers"):
        load_tokenizer(other)
    assert np.array_equal(
        load_tokenizer(str(trained_path)).encode_ordinary("ab"), load_tokenizer(str(trained_path)).encode_ordinary("ab")
    )


def test_a_checkpoint_with_another_tokenizer_is_refused(trained_path: Path, tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "5"
    json_identity, bytes_identity = tokenizer_identity(str(trained_path)), tokenizer_identity("bytes")
    refuse_other_tokenizer(step, bytes_identity, bytes_identity)
    refuse_other_tokenizer(step, None, json_identity)
    with pytest.raises(ValueError, match=r"tokenizer=/.*json .*\b5\b.* data.tokenizer=bytes\b"):
        refuse_other_tokenizer(step, bytes_identity, json_identity)
    with pytest.raises(ValueError, match=rf"\b0{{16}}\b.*\b{json_identity['fingerprint']}\b"):
        refuse_other_tokenizer(step, json_identity | {"fingerprint": "0" * 16}, json_identity)


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}", r"\p{L}+|\p{N}+", r"[^\n]+", r"\S+|\s+(?!\S)", r"\p{N}*"])
def test_text_outside_the_pattern_is_not_lost(trained_path: Path, tmp_path: Path, pattern: str) -> None:
    steps = json.loads(trained_path.read_text())["pre_tokenizer"]["pretokenizers"]
    steps[0]["pattern"] = {"Regex": pattern}
    path = write_changed(trained_path, tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    text = "Call me 12 times, at 5 pm!\n\n日本語 é\n x"
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert tokenizer.encode_ordinary(text).tolist() == tokenizers.Tokenizer.from_file(path).encode(text).ids
