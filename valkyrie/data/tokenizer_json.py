"""Loads and trains tokenizers in Hugging Face's one-file format, `tokenizer.json`.

A byte-level BPE that tiktoken can run (GPT-2, Llama 3, and those trained here) becomes a tiktoken encoding, which is
faster and releases the GIL. All other tokenizers run in Hugging Face's package `tokenizers`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from jaxtyping import Int32

from valkyrie.data.config import trained_tokenizer_path
from valkyrie.data.documents import CorpusConfig
from valkyrie.data.files import Listing
from valkyrie.data.git_lfs import refuse_git_lfs_pointer
from valkyrie.data.vocabulary import SPLIT_PATTERNS, Ids, TiktokenTokenizer, Tokenizer, checked_ids
from valkyrie.paths import cache_root, disk_errors, write_atomic
from valkyrie.problems import format_alternatives
from valkyrie.records import RecordError, read_record

BOS = "<|bos|>"
"""The special token of trained tokenizers. It has the last id."""
_BOS_TOKENS = (BOS, "<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")
_SPACE = "\u2581"
_CATEGORY_SAMPLES = "\xa0a\u01c5\u02b0\xaa\u65e5\u0301\u0903\u0488\u0664\u16ee\xb2\u203f\u2014\xab\xbb\xa7"
_CATEGORY_SAMPLES += "\u20ac\xa6\U0001f600\xad\u200b\u2028\u2029\u0378\ue000\x85\xc9\xe9"
_PROBE_CHARACTERS = [*map(chr, range(128)), *_CATEGORY_SAMPLES]
"""Characters to test an encoding with: ASCII, and at least one character of each Unicode category."""
_MAX_IDS = 2**24
_OTHER_PATH_OPTION = "--save PATH.json"
"""The option that writes a tokenizer to another disk, for messages."""
_INSTALL_HINT = "Install it with `uv sync --extra tokenizers` in the clone, or with `uv pip install tokenizers`."


def tokenizer_json_path(name: str) -> Path | None:
    """Find the tokenizer.json of a tokenizer, given its path, its folder or the name it was trained under.

    Returns None if there is no such file. Raises ValueError for the path of a .json that does not exist.
    """
    path = Path(name).expanduser()
    if name.endswith(".json"):
        if not path.is_file():
            raise ValueError(f"tokenizer={name}: there is no file {path} (current folder: {Path.cwd()}).")
        return path
    if "/" not in name and (trained_file := trained_tokenizer_path(name)).is_file():
        return trained_file
    return path / "tokenizer.json" if (path / "tokenizer.json").is_file() else None


def trained_tokenizer_names() -> list[str]:
    """Return the names of the tokenizers that were trained on this machine."""
    return sorted(path.stem for path in (cache_root() / "tokenizers").glob("*.json"))


@dataclass(frozen=True)
class _AddedToken:
    content: str
    id: int
    special: bool = False


@dataclass(frozen=True)
class _Model:
    """The vocabulary and merges. `vocab` maps tokens to ids or, in a unigram model, lists [token, score] by id."""

    vocab: dict[str, int] | list[object]
    type: str = "BPE"
    merges: tuple[str | tuple[str, str], ...] = ()
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


@dataclass(frozen=True)
class _PipelineStep:
    """A pre-tokenizer or a decoder. If its type is `Sequence`, its steps are in `pretokenizers` or `decoders`."""

    type: str = ""
    pretokenizers: tuple[_PipelineStep, ...] = ()
    decoders: tuple[_PipelineStep, ...] = ()
    pattern: dict[str, str] | None = None
    behavior: str | None = None
    invert: bool = False
    add_prefix_space: bool = False
    use_regex: bool = True

    @property
    def steps(self) -> tuple[_PipelineStep, ...]:
        """The steps of a sequence, or this step alone."""
        return self.pretokenizers + self.decoders if self.type == "Sequence" else (self,)


@dataclass(frozen=True)
class _TokenizerJson:
    """The parts of a `tokenizer.json` that Valkyrie uses."""

    model: _Model
    added_tokens: tuple[_AddedToken, ...] = ()
    normalizer: object = None
    pre_tokenizer: _PipelineStep | None = None
    decoder: _PipelineStep | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, even if lower ids are unused."""
        return 1 + max(self.ids, default=-1)

    @property
    def ids(self) -> list[int]:
        """The ids of the vocabulary and of the added tokens."""
        vocabulary = self.model.vocab
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return [*ids, *(token.id for token in self.added_tokens)]


def json_vocab_size(path: Path) -> int:
    """Return the vocabulary size of a `tokenizer.json`: its highest token id plus one."""
    return _read_tokenizer_json(path).vocab_size


def load_tokenizer_json(name: str, path: Path, fingerprint: str) -> Tokenizer:
    """Load the tokenizer in the `tokenizer.json` at `path`.

    `name` and `fingerprint` become attributes of the result. Raises ValueError if the file is damaged, if the tokenizer
    has no known BOS token or drops spaces, or if reading it needs the package tokenizers, which is not installed.
    """
    content = _read_tokenizer_json(path)
    added_ids = {token.content: token.id for token in content.added_tokens}
    bos_id = next((added_ids[bos] for bos in _BOS_TOKENS if bos in added_ids), None)
    if bos_id is None:
        raise ValueError(
            f"tokenizer={name} has no known token for the beginning of a document. Its special tokens: "
            f"{', '.join(added_ids) or 'none'}. Add {format_alternatives(None, _BOS_TOKENS)} to its "
            "added_tokens, or use another tokenizer."
        )
    encoding = _as_tiktoken(name, content, added_ids)
    if encoding is not None:
        return TiktokenTokenizer(name, encoding, bos_id, fingerprint)
    return _HuggingFaceTokenizer(name, path, content, bos_id, fingerprint)


class _HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that is run by Hugging Face's package `tokenizers`.

    Its tokens are bytes, or pieces of text with a marker for spaces (SentencePiece).
    """

    def __init__(self, name: str, path: Path, content: _TokenizerJson, bos_id: int, fingerprint: str) -> None:
        package = _import_tokenizers(f"tokenizer={name} is not a byte-level BPE: reading it")
        try:
            self._encoder = package.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no narrower class
            raise ValueError(
                f"tokenizer={name}: the package tokenizers cannot load {path} ({error}). Upgrade the package, or "
                "download the file again."
            ) from None
        self._encoder.encode_special_tokens = True  # the spelling of special tokens is ordinary text
        self.name, self.bos_id, self.fingerprint = name, bos_id, fingerprint
        self.vocab_size = content.vocab_size
        self._bytes = _bytes_by_id(name, content, self._encoder)
        self.token_bytes: Int32[np.ndarray, " vocab"] = np.array([len(value) for value in self._bytes], np.int32)

    def encode_ordinary(self, text: str) -> np.ndarray:
        valid_text = text.encode("utf-8", errors="replace").decode("utf-8")
        return np.array(self._encoder.encode(valid_text, add_special_tokens=False).ids, np.uint32)

    def decode_bytes(self, ids: Ids) -> bytes:
        return b"".join(self._bytes[i] for i in checked_ids(ids, self))


@dataclass
class TextCounts:
    """Running counts of documents and of bytes of UTF-8 text."""

    documents: int = 0
    bytes: int = 0


def training_texts(config: CorpusConfig, listing: Listing, counts: TextCounts) -> Iterator[str]:
    """Yield the texts of the files of a source, up to `config.max_bytes` bytes of UTF-8.

    Adds their number and bytes to `counts`. Raises ValueError if there are no texts.
    """
    for document in config.read_documents(listing):
        raw = document.text.encode("utf-8", errors="replace")
        if config.max_bytes is not None:
            raw = raw[: config.max_bytes - counts.bytes]
        counts.documents += 1
        counts.bytes += len(raw)
        yield raw.decode("utf-8", errors="ignore")
        if counts.bytes == config.max_bytes:
            return
    if not counts.documents:
        raise ValueError("these files have no text to train a tokenizer on.")


def train_tokenizer(texts: Iterable[str], vocab_size: int, pattern: str, path: Path) -> int:
    """Train a byte-level BPE with at most `vocab_size` ids, write it to `path`, and return its number of ids.

    The last id is BOS. There are fewer ids than `vocab_size` if the texts have too few different pairs.

    Raises ValueError if `vocab_size` is below 257, `pattern` is not a key of `SPLIT_PATTERNS`, or the package
    tokenizers is not installed.
    """
    if vocab_size < 257:
        raise ValueError(f"--vocab {vocab_size} is too small. Use 257 or more: 256 bytes and one token for BOS.")
    if pattern not in SPLIT_PATTERNS:
        raise ValueError(f"--pattern {pattern} is unknown. Use one of {', '.join(SPLIT_PATTERNS)}.")
    package = _import_tokenizers("training a tokenizer")
    tokenizer = package.Tokenizer(package.models.BPE())
    split = package.pre_tokenizers.Split(package.Regex(_without_possessives(SPLIT_PATTERNS[pattern])), "isolated")
    byte_level = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    tokenizer.add_special_tokens([BOS])
    with disk_errors(path, _OTHER_PATH_OPTION):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, tokenizer.to_str(pretty=True), _OTHER_PATH_OPTION)
    return tokenizer.get_vocab_size(with_added_tokens=True)


def _import_tokenizers(purpose: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"{purpose} needs the package tokenizers. {_INSTALL_HINT}") from None
    return tokenizers


def _without_possessives(pattern: str) -> str:
    r"""Return an equivalent of a pattern in `SPLIT_PATTERNS` for the package tokenizers, where some syntax differs.

    Makes possessive quantifiers (`++`, `*+`, `?+`, `{1,3}+`) greedy, and replaces `$` by `\z`.
    """
    return re.sub(r"(?<=[+*?])\+|(?<=\d})\+", "", pattern).replace("$", r"\z")  # not the + of \p{L}+


def _read_tokenizer_json(path: Path) -> _TokenizerJson:
    try:
        content = read_record(_TokenizerJson, path)
        if invalid_ids := [i for i in content.ids if not 0 <= i < _MAX_IDS]:
            raise RecordError(str(path), "", f"the id {invalid_ids[0]} is not in 0 to {_MAX_IDS - 1}")
        return content
    except RecordError as error:
        refuse_git_lfs_pointer(path, "the tokenizer")
        reason = f"{error.reason} {error.field}".strip()
        raise ValueError(f"tokenizer={path} is not a tokenizer.json of Hugging Face ({reason}).") from None


def _as_tiktoken(name: str, content: _TokenizerJson, added_ids: Mapping[str, int]) -> tiktoken.Encoding | None:
    """Return an equivalent tiktoken encoding, or None if the file is not a byte-level BPE that tiktoken can run."""
    model, pattern = content.model, _split_pattern(content)
    is_plain = not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
    if model.type != "BPE" or not isinstance(model.vocab, dict) or not is_plain:
        return None
    if pattern is None or content.normalizer is not None:
        return None
    if not all(token.special for token in content.added_tokens):
        return None
    byte_by_character, vocabulary = _bytes_by_character(), {t: i for t, i in model.vocab.items() if t not in added_ids}
    if not all(character in vocabulary for character in byte_by_character) or any(
        set(t) - byte_by_character.keys() for t in vocabulary
    ):
        return None
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else pair for pair in model.merges]
    ids = [*vocabulary.values(), *added_ids.values()]
    if any(len(pair) != 2 for pair in pairs) or len({*ids}) != len(ids):
        return None
    merged_ids = [vocabulary.get(first + second, -1) for first, second in pairs]
    if len(pairs) != len(vocabulary) - len(byte_by_character) or any(
        a >= b for a, b in zip(merged_ids, merged_ids[1:], strict=False)
    ):
        return None
    ranks = {bytes(byte_by_character[character] for character in token): rank for token, rank in vocabulary.items()}
    try:
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(added_ids))
    except ValueError:  # a pattern of another engine
        return None
    return encoding if _keeps_text(encoding) else None


def _keeps_text(encoding: tiktoken.Encoding) -> bool:
    """Return whether decoding an encoded text restores it, tested with characters of all Unicode categories.

    tiktoken drops characters that its pattern does not match, while Hugging Face encodes them separately.
    """
    pairs = "".join(map("".join, itertools.product(_PROBE_CHARACTERS, repeat=2)))
    texts = [pairs, *(character * count for character in _PROBE_CHARACTERS for count in (1, 2))]
    try:
        return all(encoding.decode(encoding.encode_ordinary(text)) == text for text in texts)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # tiktoken's for a pattern that matches the empty text
            raise
        return False


def _split_pattern(content: _TokenizerJson) -> str | None:
    """Return the pattern that a byte-level tokenizer splits text by, or None if it splits text in another way."""
    steps = content.pre_tokenizer.steps if content.pre_tokenizer else ()
    *first_steps, last_step = steps or (_PipelineStep(),)
    if last_step.type != "ByteLevel" or last_step.add_prefix_space:
        return None
    if not first_steps and last_step.use_regex:
        return SPLIT_PATTERNS["r50k"]
    if last_step.use_regex or [step.type for step in first_steps] != ["Split"]:
        return None
    split = first_steps[0]
    is_isolated = split.behavior == "Isolated" and not split.invert
    return (split.pattern or {}).get("Regex") if is_isolated else None


def _bytes_by_id(name: str, content: _TokenizerJson, encoder: Any) -> list[bytes]:
    """Return the bytes of each token, indexed by id. Special ids and gaps in the vocabulary have empty bytes.

    Raises ValueError for a tokenizer that drops spaces.
    """
    decoder_types = {step.type for step in content.decoder.steps} if content.decoder else set()
    if not decoder_types & {"ByteLevel", "Metaspace", "ByteFallback"}:
        raise ValueError(
            f"tokenizer={name} is a {content.model.type} tokenizer that drops spaces, so decoding cannot restore the "
            "text. Use a byte-level BPE or a SentencePiece tokenizer."
        )
    special_ids = {token.id for token in content.added_tokens if token.special}
    ids = range(content.vocab_size)
    return [b"" if i in special_ids else _token_bytes(encoder.id_to_token(i) or "", decoder_types) for i in ids]


def _token_bytes(token: str, decoder_types: set[str]) -> bytes:
    byte_by_character = _bytes_by_character()
    if "ByteLevel" in decoder_types and all(character in byte_by_character for character in token):
        return bytes(byte_by_character[character] for character in token)
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


@cache
def _bytes_by_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary represents (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(unprintable)}
