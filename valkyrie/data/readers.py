"""Reads documents from files. `READERS` has a function for each suffix, which yields the documents in order."""

from __future__ import annotations

import codecs
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from valkyrie.data.chunks import LANGUAGE_BY_SUFFIX, PROSE_SUFFIXES, Chunking, Language, split_into_chunks
from valkyrie.data.compressed import refuse_compressed
from valkyrie.data.records import read_array_records, read_tfrecords, record_text
from valkyrie.data.remote import RemoteFile, reader_suffix
from valkyrie.host_memory import free_memory
from valkyrie.units import memory_text

MAX_REPLACED_SHARE = 0.1
"""Maximum share of NUL bytes or undecodable characters in a text. Files with more are refused."""
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""Byte order marks of UTF-16 and UTF-32. UTF-32-LE is covered, because its mark begins with the UTF-16-LE mark."""
_MEMORY_FACTOR = 3
"""Memory to read a text, as a multiple of its size: for its bytes, its characters, and its bytes again for the hash."""
_LARGE_FILE_BYTES = 2**28
"""Size in bytes above which the free memory is checked before a file is read whole."""
SINGLE_DOCUMENT_SUFFIXES = (".txt", ".md", ".py", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp")
"""Suffixes of files with one document each."""
_ROWS_PER_READ = 256
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_DECODER = json.JSONDecoder(parse_int=float)
"""Decoder for .jsonl lines. It parses integers as floats, because Python refuses an int of more than 4,300 digits."""
_JSON_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
"""Names of JSON values in messages, by their Python type."""
_NEEDS_PYARROW = "needs pyarrow. Install it with `uv sync --extra parquet` in the clone."


@dataclass(frozen=True)
class SourceFile:
    """A local file to read.

    Args:
        id: name of the file in messages.
        path: path of the file, or of the zip archive that contains it.
        size: size in bytes.
        mtime_ns: modification time in nanoseconds.
        member: name of the file in the zip archive, or None for a plain file.
    """

    id: str
    path: Path
    size: int
    mtime_ns: int
    member: str | None = None

    @property
    def suffix(self) -> str:
        """The suffix of the name in lower case, such as `.txt`."""
        return reader_suffix(self.id)

    @property
    def stamp(self) -> list[str | int | None]:
        """The values that identify this version of the file in a cache key: path, zip member, size and time."""
        return [str(self.path), self.member, self.size, self.mtime_ns]

    def open(self) -> AbstractContextManager[BinaryIO]:
        """Open a plain file (`member` is None) as a binary stream."""
        return self.path.open("rb")

    def read(self) -> bytes:
        """Return all bytes of the file, or of the member of the zip archive."""
        if self.member is None:
            return self.path.read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(self.member)


@dataclass(frozen=True)
class Document:
    """The text of one document.

    Args:
        id: name of the document in messages, such as `FILE:LINE`.
        text: the text.
        replaced: number of undecodable characters and lone surrogates that were replaced by U+FFFD.
    """

    id: str
    text: str
    replaced: int = 0


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading files.

    Args:
        field: the key with the text in .jsonl, and the feature in .tfrecord and ArrayRecord files.
        column: the column with the text in .parquet.
        chunk: `functions` makes each function or class of C, C++ and Python a document.
        language: with `chunk=functions`, the language of .parquet, .jsonl and other files of many documents. None
            leaves their documents whole.
    """

    field: str = "text"
    column: str = "text"
    chunk: Chunking = Chunking.whole
    language: Language | None = None

    @property
    def cache_identity(self) -> dict[str, object]:
        """Options as JSON values, for the cache key of the shards.

        Do not change the form of these values, because existing shards in users' caches would not be found.
        """
        chunk = {} if self.chunk is Chunking.whole else {"chunk": [self.chunk.value, str(self.language)]}
        return {"fields": [self.field, self.column], **chunk, "synthetic": None}


File = SourceFile | RemoteFile
Reader = Callable[[File, ReadOptions, int | None], Iterator[Document]]


def _refuse_other_formats(raw: bytes, name: str) -> None:
    """Raise ValueError if `raw`, a text file or one line of it, is compressed, UTF-16, UTF-32 or binary."""
    refuse_compressed(raw, name)
    if raw.startswith(_BYTE_ORDER_MARKS) or raw.count(0) > MAX_REPLACED_SHARE * len(raw):
        raise ValueError(
            f"{name} is UTF-16, UTF-32 or binary, not UTF-8 text. Convert it (iconv -f UTF-16 -t UTF-8), or remove it "
            "from data.paths."
        )


def _decode(raw: bytes, name: str) -> Document:
    _refuse_other_formats(raw, name)
    try:
        return Document(name, raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        text = raw.decode("utf-8-sig", errors="replace")
    replaced = text.count("\ufffd")
    if replaced > MAX_REPLACED_SHARE * len(text):
        raise ValueError(
            f"{name} is not UTF-8 text: {replaced:,} of its {len(text):,} characters cannot be decoded. "
            f"Convert it, or remove it from data.paths."
        )
    return Document(name, text, replaced)


def read_documents(file: File, options: ReadOptions, row_group: int | None = None) -> Iterator[Document]:
    """Yield the documents of a file, or of the row group with index `row_group` of a .parquet file. Some may be empty.

    With `options.chunk=functions`, each function or class in a document becomes a separate document.

    Raises ValueError, naming the file, if it is damaged, is not UTF-8 text, is too large for the free memory or needs a
    package that is not installed, or if a line or record has no text.
    """
    documents = READERS[file.suffix](file, options, row_group)
    language = (
        options.language
        if file.suffix not in (*LANGUAGE_BY_SUFFIX, *PROSE_SUFFIXES)
        else LANGUAGE_BY_SUFFIX.get(file.suffix)
    )
    if options.chunk is Chunking.whole or language is None:
        yield from documents
        return
    for document in documents:
        for number, text in enumerate(split_into_chunks(document.text, language), 1):
            yield replace(
                document,
                id=f"{document.id}#{number}",
                text=text,
                replaced=text.count("\ufffd") if document.replaced else 0,
            )


def count_row_groups(file: File, options: ReadOptions) -> int:
    """Return the number of row groups of a .parquet file, from its footer.

    Raises ValueError if the file is cut short or lacks the text column.
    """
    with _open_parquet(file, options) as table:
        return table.num_row_groups


def _read_whole_file(file: File, options: ReadOptions, row_group: int | None) -> Iterator[Document]:
    free_bytes = free_memory() if file.size > _LARGE_FILE_BYTES else None
    if free_bytes is not None and _MEMORY_FACTOR * file.size > free_bytes:
        raise ValueError(
            f"{file.id} is too large ({memory_text(file.size)}): a {file.suffix} file is read into memory whole, which "
            f"needs {memory_text(_MEMORY_FACTOR * file.size)}, but only {memory_text(free_bytes)} is free. Split it, "
            "or write its documents to a .jsonl file, which is read line by line."
        )
    yield _decode(file.read(), file.id)


def _read_jsonl(file: File, options: ReadOptions, row_group: int | None) -> Iterator[Document]:
    with file.open() as lines:
        yield from _parse_jsonl_lines(lines, file, options)


def _read_jsonl_zst(file: File, options: ReadOptions, row_group: int | None) -> Iterator[Document]:
    try:
        import pyarrow as arrow
    except ImportError:
        raise ValueError(f"{file.id}: reading .jsonl.zst {_NEEDS_PYARROW}") from None
    with file.open() as compressed_file:
        try:
            with arrow.input_stream(compressed_file, compression="zstd") as stream:
                yield from _parse_jsonl_lines(io.BufferedReader(stream, 1 << 20), file, options)
        except OSError as error:  # Arrow's error for a stream that is damaged or cut short
            raise ValueError(f"{file.id} is not a readable .zst file, or is cut short: {error}") from None


def _parse_jsonl_lines(lines: Any, file: File, options: ReadOptions) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        name = f"{file.id}:{number}"
        if not line.strip():
            continue
        try:
            row: Any = _JSON_DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
        except (ValueError, RecursionError) as error:
            _refuse_other_formats(line, file.id)
            reason = (
                f"{error.msg} at character {error.pos + 1:,}" if isinstance(error, json.JSONDecodeError) else str(error)
            )
            cut_hint = (
                "" if line.endswith(b"\n") else "It is the last line and has no line break: the file may be cut short. "
            )
            raise ValueError(
                f"{name} is not JSON ({reason}). {cut_hint}A .jsonl file has one object per line."
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f'{name} is {_JSON_KINDS[type(row)]}, not an object such as {{"{options.field}": "some text"}}.'
            )
        if options.field not in row:
            keys = f"one of its keys ({', '.join(row)})" if row else "the key of the text"
            raise ValueError(f"data.field={options.field} is not a key of {name}. Set data.field to {keys}.")
        text = row[options.field]
        if not isinstance(text, str):
            raise ValueError(
                f"data.field={options.field} is {_JSON_KINDS[type(text)]} in {name}, not a string. Set data.field to "
                "the key of the text, or remove the line."
            )
        # Only escapes such as \ud83d can give lone surrogates, which have no UTF-8.
        text, replaced = _LONE_SURROGATE.subn("\ufffd", text) if b"\\u" in line else (text, 0)
        yield Document(name, text, replaced)


def _read_parquet(file: File, options: ReadOptions, row_group: int | None) -> Iterator[Document]:
    with _open_parquet(file, options) as table:
        import pyarrow as arrow

        row_groups, row = None if row_group is None else [row_group], 0
        try:
            for batch in table.iter_batches(_ROWS_PER_READ, row_groups=row_groups, columns=[options.column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield Document(
                        f"{file.id}:{row}" if row_group is None else f"{file.id}:{row_group}:{row}", text or ""
                    )
        except (arrow.ArrowException, OSError) as error:  # pages that are damaged
            raise ValueError(f"{file.id} is not a readable .parquet file: {error}") from None


@contextmanager
def _open_parquet(file: File, options: ReadOptions) -> Iterator[Any]:
    """Open a .parquet file as a `pyarrow.parquet.ParquetFile`.

    Raises ValueError if it is damaged or has no text column.
    """
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{file.id}: reading .parquet {_NEEDS_PYARROW}") from None
    with file.open() as opened_file:
        try:
            table = parquet.ParquetFile(file.path if isinstance(file, SourceFile) else opened_file)
        except (arrow.ArrowInvalid, OSError) as error:
            opened_file.seek(0)
            refuse_compressed(opened_file.read(8), file.id)
            raise ValueError(f"{file.id} is not a readable .parquet file, or is cut short: {error}") from None
        with table:
            schema = table.schema_arrow
            text_columns = [field.name for field in schema if _is_text(arrow.types, field.type)]
            if options.column in schema.names and options.column not in text_columns:
                type_name = str(schema.field(options.column).type).partition("<")[0]  # a struct lists all its fields
                others = f", or choose another data.column: {', '.join(text_columns)}" if text_columns else ""
                raise ValueError(f"{file.id}: column {options.column} is {type_name}, not string. Cast it{others}.")
            if options.column not in text_columns:
                raise ValueError(
                    f"{file.id} has no text column data.column={options.column}. Text columns: "
                    f"{', '.join(text_columns) or 'none'}. All columns: {', '.join(schema.names)}."
                )
            yield table


def _is_text(types: Any, arrow_type: Any) -> bool:
    arrow_type = arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type
    return types.is_string(arrow_type) or types.is_large_string(arrow_type)


def _read_tfrecord(file: File, options: ReadOptions, row_group: int | None) -> Iterator[Document]:
    with file.open() as opened_file:
        yield from _parse_records(read_tfrecords(opened_file, file.id), file, options)


def _read_array_record(file: File, options: ReadOptions, row_group: int | None) -> Iterator[Document]:
    if not isinstance(file, SourceFile):
        raise ValueError(f"{file.id}: ArrayRecord files must be on a disk. Copy them there, or mount the bucket.")
    yield from _parse_records(read_array_records(str(file.path), file.id), file, options)


def _parse_records(records: Iterator[bytes], file: File, options: ReadOptions) -> Iterator[Document]:
    for number, raw in enumerate(records, 1):
        name = f"{file.id}:{number}"
        yield Document(name, record_text(raw, name, options.field))


READERS: dict[str, Reader] = {
    **dict.fromkeys(SINGLE_DOCUMENT_SUFFIXES, _read_whole_file),
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl_zst,
    ".parquet": _read_parquet,
    ".tfrecord": _read_tfrecord,
    ".array_record": _read_array_record,
    ".arrayrecord": _read_array_record,
}
SUFFIXES = tuple(READERS)
FIELD_SUFFIXES = (".jsonl", ".jsonl.zst", ".tfrecord", ".array_record", ".arrayrecord")
"""Suffixes of files that are read with `ReadOptions.field`."""
COLUMN_SUFFIXES = (".parquet",)
"""Suffixes of files that are read with `ReadOptions.column`."""
