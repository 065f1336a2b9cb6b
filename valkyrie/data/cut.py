"""Splits documents into training and validation, and cuts long ones into pieces that can be tokenised separately.

A document's split is determined by the hash of its text. The same text is in the same split on every machine and in
every file, so no copy of a training document is used for validation. A source that is a single text or code file is cut
into two parts instead: its end is for validation.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from valkyrie.data.config import SOURCES
from valkyrie.data.documents import DocumentConfig
from valkyrie.data.files import Listing
from valkyrie.data.readers import Document
from valkyrie.problems import describe_value

PIECE_CHARS = 1 << 20
HASH_RANGE = 1 << 64
_PIECE_END = re.compile(r"(?<=\S)\n(?=[A-Za-z0-9])")
_LINE_END = re.compile(r"\n")


@dataclass(frozen=True)
class TokenDocument:
    """A document that a source provides as token ids (without BOS) instead of text. `id` is its name in messages."""

    id: str
    tokens: Int[np.ndarray, " length"]


@dataclass(frozen=True)
class DocumentPiece:
    """A piece of a document.

    Args:
        content: text, or token ids if the source provides tokens.
        split: `train` or `validation`.
        is_first: whether the document begins with this piece. If so, a BOS is inserted before it.
    """

    content: str | np.ndarray
    split: str
    is_first: bool


@dataclass
class Census:
    """Statistics of the documents of a source.

    Args:
        documents: Number of documents.
        bytes: Bytes of UTF-8 text, or number of tokens if the source provides tokens.
        undecodable_counts: Maps the ID of each document that is not valid UTF-8 to (undecodable characters, all
            characters).
        lowest_hash: Lowest hash of a document.
        highest_hash: Highest hash of a document.
    """

    documents: int = 0
    bytes: int = 0
    undecodable_counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    lowest_hash: int = HASH_RANGE
    highest_hash: int = 0

    def add(self, document: Document | TokenDocument, size: int, digest: int) -> None:
        """Add a document. `size` is in the unit of `bytes`, and `digest` is the 64-bit hash of its content."""
        self.documents += 1
        self.bytes += size
        if isinstance(document, Document) and document.replaced:
            self.undecodable_counts[document.id] = (document.replaced, len(document.text))
        self.lowest_hash = min(self.lowest_hash, digest)
        self.highest_hash = max(self.highest_hash, digest)


def adjust_threshold(config: DocumentConfig, listing: Listing, census: Census, threshold: int) -> int:
    """Return the hash threshold (see `split_documents`), adjusted if needed so that both splits have a document.

    A source that is a single text is cut into two parts, so its threshold is not used and is returned unchanged. Raises
    ValueError if the source has no documents, or if it is not a single text and has fewer than two different documents.
    """
    name = f"data={config.name}"
    if census.documents == 0:
        noun = "file" if len(listing.files) == 1 else "files"
        raise ValueError(f"{name} has no text: {len(listing.files)} {noun} with {listing.bytes:,} bytes.")
    if config.is_single_text(listing):
        return threshold
    if census.documents == 1:
        raise ValueError(
            f"{name} has 1 document with {census.bytes:,} bytes, but needs 2: one for training and one for validation. "
            f"Add another, raise data.max_bytes, or use a single .txt file, whose end becomes the validation text."
        )
    if census.lowest_hash == census.highest_hash:
        raise ValueError(
            f"{name} has {census.documents:,} documents that all have the same text. Add a document with another text "
            "for validation."
        )
    return max(census.lowest_hash + 1, min(threshold, census.highest_hash))


def split_documents(
    config: DocumentConfig, listing: Listing, threshold: int, census: Census
) -> Iterator[DocumentPiece]:
    """Yield the pieces of the documents in order, up to `config.byte_limit` bytes of text. Adds documents to `census`.

    Documents with a 64-bit hash below `threshold` are for validation. If the source is a single text, the text is cut
    into two parts instead. A `TokenDocument` is one piece, to which the limit does not apply. Raises ValueError if a
    document has a wrong type, or if a single text is too short for two parts.
    """
    byte_limit, is_single_text = config.byte_limit, config.is_single_text(listing)
    for document in config.read_annotating_errors(listing):
        _check_document(config, document)
        if isinstance(document, TokenDocument):
            digest = _digest(document.tokens.astype("<i8").tobytes())
            census.add(document, document.tokens.size, digest)
            yield DocumentPiece(document.tokens, _choose_split(digest, threshold), True)
            continue
        raw = document.text.encode("utf-8", errors="replace")
        text = document.text
        is_last = byte_limit is not None and census.bytes + len(raw) >= byte_limit
        if byte_limit is not None and is_last:
            raw = raw[: byte_limit - census.bytes]
            text = raw.decode("utf-8", errors="ignore")
        if text:
            digest = _digest(raw)
            census.add(document, len(raw), digest)
            if is_single_text:
                yield from _split_single_text(document.id, text, config)
            else:
                yield from split_into_pieces(text, _choose_split(digest, threshold))
        if is_last:
            return


def read_first_document(config: DocumentConfig, listing: Listing) -> Document | TokenDocument:
    """Return the first document of a source. Raises ValueError if there is none, or like `split_documents`."""
    for document in config.read_annotating_errors(listing):
        _check_document(config, document)
        return document
    raise ValueError(f"data={config.name} has no documents: {len(listing.files)} files with {listing.bytes:,} bytes.")


def _check_document(config: DocumentConfig, document: object) -> None:
    """Raise ValueError for a document of a wrong type, because users' sources are not type-checked."""
    if not isinstance(document, Document | TokenDocument):
        actual, file = describe_value(document), inspect.getfile(type(config))
        raise ValueError(f"{SOURCES.setting(config)}: read_documents() of {file} returned {actual}, not a Document.")
    if isinstance(document, Document) and not isinstance(document.text, str):
        kind = type(document.text).__name__
        raise ValueError(f"data.source={config.source}: document {document.id} has a text of type {kind}, not str.")


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def _choose_split(digest: int, threshold: int) -> str:
    return "validation" if digest < threshold else "train"


def _split_single_text(name: str, text: str, config: DocumentConfig) -> Iterator[DocumentPiece]:
    target_position = int(len(text) * (1 - config.validation_fraction))
    line_end = _LINE_END.search(text, target_position)
    boundary = line_end.end() if line_end is not None and line_end.end() < len(text) else target_position
    if not 0 < boundary < len(text):
        raise ValueError(
            f"{name} has {len(text)} characters, too few for data.validation_fraction={config.validation_fraction}: "
            f"a split would have no text. Use more text."
        )
    yield from split_into_pieces(text[:boundary], "train")
    yield from split_into_pieces(text[boundary:], "validation")


def split_into_pieces(text: str, split: str, size: int = PIECE_CHARS) -> Iterator[DocumentPiece]:
    """Split a text into pieces that can be tokenised separately. `split` is recorded in the pieces.

    Each piece, except the last, has more than `size` characters. It ends after the next newline that follows a visible
    character and precedes an ASCII letter or digit. No match of a pattern in `vocabulary.SPLIT_PATTERNS` crosses such a
    boundary, so with these patterns the pieces give the same tokens as the whole text.
    """
    start = 0
    while (boundary := _PIECE_END.search(text, start + size)) is not None:
        yield DocumentPiece(text[start : boundary.end()], split, start == 0)
        start = boundary.end()
    yield DocumentPiece(text[start:], split, start == 0)
