"""Tests of tokenizers: round trips, published ids, and refused names and files."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from valkyrie.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    read_fingerprint,
    read_vocab_size,
    tokenizer_errors,
)

GPT2 = load_tokenizer("gpt2")
BOTH_TOKENIZERS = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), GPT2], ids=["bytes", "gpt2"])
texts = st.text(st.characters(exclude_categories=["Cs"]))


def write_vocabulary(path: Path) -> Path:
    """Write a vocabulary of all bytes and the token `he`, in tiktoken's format, and return its path."""
    tokens = [bytes([value]) for value in range(256)] + [b"he"]
    path.write_bytes(b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)))
    return path


@BOTH_TOKENIZERS
@given(text=texts)
@settings(deadline=None)
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_ordinary(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


@BOTH_TOKENIZERS
def test_bos_is_never_encoded_and_never_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_ordinary("a<|endoftext|>b")
    assert tokenizer.bos_id not in ids
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.bos_id]) == "a<|endoftext|>b"
    assert tokenizer.token_bytes[tokenizer.bos_id] == 0
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert (np.delete(tokenizer.token_bytes, tokenizer.bos_id) > 0).all()


@BOTH_TOKENIZERS
def test_a_lone_surrogate_becomes_a_question_mark(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_ordinary("a\ud800b")) == "a?b"


def test_gpt2_gives_the_published_ids() -> None:
    assert GPT2.encode_ordinary("hello world").tolist() == [31373, 995]
    assert GPT2.encode_ordinary("    return x\n").tolist() == [220, 220, 220, 1441, 2124, 198]
    assert (GPT2.vocab_size, GPT2.bos_id) == (50257, 50256)


def test_text_may_end_inside_a_character() -> None:
    first, second = ByteTokenizer().encode_ordinary("é")
    assert ByteTokenizer().decode([first]) == "\ufffd"
    assert ByteTokenizer().decode_bytes([first]) + ByteTokenizer().decode_bytes([second]) == "é".encode()


@BOTH_TOKENIZERS
def test_an_id_beyond_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    with pytest.raises(
        ValueError, match=f"token id {size + 3} is outside the {size} ids of tokenizer={tokenizer.name}"
    ):
        tokenizer.decode([1, size + 3])
    with pytest.raises(ValueError, match="token id -1"):
        tokenizer.decode([-1])


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_vocab_size_and_fingerprint_are_known_without_loading(name: str) -> None:
    tokenizer = load_tokenizer(name)
    assert read_vocab_size(name) == tokenizer.vocab_size
    assert read_fingerprint(name) == tokenizer.fingerprint


def test_sizes_of_downloaded_encodings_are_known() -> None:
    sizes = {"r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}
    assert {name: read_vocab_size(name) for name in sizes} == sizes
    assert len({read_fingerprint(name) for name in ["bytes", "gpt2", *sizes]}) == 6


def test_a_vocabulary_file_is_read(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "mine.tiktoken")
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (258, 257)
    assert tokenizer.encode_ordinary("hehy").tolist() == [256, ord("h"), ord("y")]
    assert read_vocab_size(str(path)) == 258
    assert load_tokenizer(f"{path}:cl100k").fingerprint != tokenizer.fingerprint == read_fingerprint(str(path))
    before = tokenizer.fingerprint
    path.write_bytes(path.read_bytes() + b"\n" + base64.b64encode(b"ha") + b" 257")
    assert read_fingerprint(str(path)) != before


def test_the_pattern_of_a_file_determines_how_text_is_split(tmp_path: Path) -> None:
    digits = [b"12", b"34", b"1234"]
    path = write_vocabulary(tmp_path / "digits.tiktoken")
    lines = [base64.b64encode(token) + b" %d" % (257 + rank) for rank, token in enumerate(digits)]
    path.write_bytes(path.read_bytes() + b"\n" + b"\n".join(lines))
    assert load_tokenizer(f"{path}:r50k").encode_ordinary("1234").tolist() == [259]
    assert load_tokenizer(f"{path}:cl100k").encode_ordinary("1234").tolist() == [257, ord("3"), ord("4")]
    assert load_tokenizer(f"{path}:o200k").encode_ordinary("1234").tolist() == [257, ord("3"), ord("4")]


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer=gtp2 .*cl100k_base, gpt2"):
        read_fingerprint("gtp2")
    with pytest.raises(ValueError, match=r"^tokenizer=\S+ is a folder\b.*\bUse one of"):
        read_fingerprint(str(tmp_path))
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"^tokenizer=\S+/mine\.txt is a file\b"):
        read_fingerprint(str(tmp_path / "mine.txt"))
    with pytest.raises(ValueError, match=r"no file .*none\.tiktoken"):
        read_fingerprint(str(tmp_path / "none.tiktoken"))
    path = write_vocabulary(tmp_path / "mine.tiktoken")
    with pytest.raises(ValueError, match="'gpt5' .*r50k, cl100k"):
        read_fingerprint(f"{path}:gpt5")


def test_a_damaged_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "mine.tiktoken")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\n", b"\nnot base64!\n", 1))
    with pytest.raises(ValueError, match=r"mine\.tiktoken, line 2:"):
        load_tokenizer(str(path))
    path.write_bytes(b"\n".join(content.splitlines()[3:]))
    with pytest.raises(ValueError, match=r"mine\.tiktoken lacks 3"):
        load_tokenizer(str(path))


def test_the_error_without_a_network_names_the_cache_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise requests.ConnectionError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ValueError, match=r"cl100k_base .*\(ConnectionError\).*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("cl100k_base")


def test_the_vendored_vocabulary_equals_the_published_file() -> None:
    import hashlib
    import lzma

    from valkyrie.data import tokenizer

    packed = Path(tokenizer.__file__).parent / "gpt2.tiktoken.xz"
    digest = hashlib.sha256(lzma.decompress(packed.read_bytes())).hexdigest()
    assert digest == "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    assert digest in packed.with_name("gpt2.tiktoken.LICENSE").read_text()


def test_naming_the_key_of_a_tokenizer_keeps_the_notes_of_the_error() -> None:
    error = ValueError("tokenizer=nosuch is unknown. Did you mean tokenizer=bytes?")
    error.add_note("document 3")
    message = r"^data\.tokenizer=nosuch .* data\.tokenizer=bytes"
    with pytest.raises(ValueError, match=message) as caught, tokenizer_errors("data.tokenizer"):
        raise error
    assert caught.value is error and error.__notes__ == ["document 3"]
