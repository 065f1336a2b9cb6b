"""Tokenises a source into token shards in the cache, which are reused until its files, tokenizer or settings change.

Tokenising uses threads, not processes. tiktoken releases the GIL while it merges byte pairs, so threads can use every
core, and they avoid forking a process that runs JAX. The shards do not depend on the number of threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from valkyrie.checksums import digest
from valkyrie.data import manifest
from valkyrie.data.cached import ensure_cached_folder
from valkyrie.data.config import SOURCES
from valkyrie.data.cut import HASH_RANGE, Census, adjust_threshold, split_documents
from valkyrie.data.documents import DocumentConfig
from valkyrie.data.files import Listing
from valkyrie.data.manifest import EMPTY_ROWS, UNDECODABLE, PreparedText, Split, open_dataset, read_manifest
from valkyrie.data.tokenizer import Tokenizer, load_tokenizer, read_fingerprint
from valkyrie.data.writer import ShardWriter, encode_in_threads
from valkyrie.paths import source_digest

Progress = Callable[[int, int | None], None]
"""Called with the bytes of text processed so far and the total to process (None for a source without files)."""

_ALGORITHM_VERSION = 2
"""Part of the cache key. Increase it whenever the same text would give different shards."""
_MAX_LISTED = 10
"""Maximum number of documents with undecodable characters, and of files with empty rows, that the manifest lists."""


def prepare(
    config: DocumentConfig,
    tokenizer: str,
    progress: Progress | None = None,
    *,
    alternative: str | None = None,
    say: Callable[[str], object] | None = None,
) -> PreparedText:
    """Open the shards of a source, tokenising it first if they are not in the cache.

    If the settings name a folder of shards (`config.prepared_folder`), opens that folder. The cache key is a hash of
    the files, the tokenizer and the settings. Several processes may call this at once: one prepares, and the others
    wait or produce the same result. A process that is killed never leaves an incomplete dataset in the cache.

    Raises ValueError for mistakes in the settings or the files, and DiskError if the cache cannot be written.

    Args:
        config: the source.
        tokenizer: name of the tokenizer.
        progress: called while the source is tokenised, or None.
        alternative: setting that the message of DiskError suggests, or None for the default of `ensure_cached_folder`.
        say: called with notes about skipped files, or None.
    """
    if (dataset := _open_named_folder(config, tokenizer)) is not None:
        return dataset
    config.raise_problems()
    listing = config.list_files()
    if say is not None:
        for note in listing.skip_notes():
            say(f"note: {note}")
    key = _cache_key(config, listing, tokenizer)

    def write(path: Path) -> None:
        _write_dataset(config, listing, load_tokenizer(tokenizer), key, path, progress)

    cache = Path(config.cache_dir).expanduser()
    return _open_cached(
        ensure_cached_folder(cache, _folder_name(config, tokenizer, key), write, alternative=alternative)
    )


def find_dataset(config: DocumentConfig, tokenizer: str) -> PreparedText | None:
    """Open the shards of a source if they are in the cache, else None. Raises ValueError like `prepare`."""
    if (dataset := _open_named_folder(config, tokenizer)) is not None:
        return dataset
    config.raise_problems()
    key = _cache_key(config, config.list_files(), tokenizer)
    folder = Path(config.cache_dir).expanduser() / _folder_name(config, tokenizer, key)
    return _open_cached(folder) if folder.is_dir() else None


def _open_cached(folder: Path) -> PreparedText:
    """Open a cached folder of shards. Raises ValueError if it has no manifest.

    The manifest is written before the folder gets its final name, so a missing one was deleted later.
    """
    if not (folder / manifest.MANIFEST_FILE).is_file():
        raise ValueError(
            f"{folder} has no {manifest.MANIFEST_FILE}. Delete the folder, and the data is prepared again."
        )
    return open_dataset(folder)


def _folder_name(config: DocumentConfig, tokenizer: str, key: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{config.name}-{Path(tokenizer).name}")
    return f"{slug}-{key[:16]}"


def _open_named_folder(config: DocumentConfig, tokenizer: str) -> PreparedText | None:
    """Open the folder of shards that the settings name, or return None if they name none.

    Raises ValueError if the folder was prepared with another tokenizer.
    """
    if (path := config.prepared_folder()) is None:
        return None
    if read_manifest(path).tokenizer_fingerprint != read_fingerprint(tokenizer):
        saved_tokenizer = read_manifest(path).tokenizer
        raise ValueError(
            f"{path} was prepared with the tokenizer {saved_tokenizer}, not {tokenizer}. "
            f"Set data.tokenizer={saved_tokenizer}, or prepare its source again."
        )
    return open_dataset(path)


def _cache_key(config: DocumentConfig, listing: Listing, tokenizer: str) -> str:
    inputs = {
        "algorithm": [_ALGORITHM_VERSION, manifest.VERSION],
        "source": config.source,
        "files": listing.signature,
        "tokenizer": read_fingerprint(tokenizer),
        "split": [config.validation_fraction, config.shard_tokens, config.byte_limit],
        **config.cache_identity(),
    }
    if config.source not in SOURCES.names():  # `_ALGORITHM_VERSION` covers the sources that ship with Valkyrie
        inputs["code"] = source_digest(*map(str, SOURCES.source_paths(config.source)))
    return digest(inputs)


def _write_dataset(
    config: DocumentConfig, listing: Listing, tokenizer: Tokenizer, key: str, path: Path, progress: Progress | None
) -> None:
    threshold, census = int(config.validation_fraction * HASH_RANGE), Census()
    train, validation = _write_shards(config, listing, tokenizer, threshold, census, path, progress)
    new_threshold = adjust_threshold(config, listing, census, threshold)
    if new_threshold != threshold:  # few documents, all in one split
        census = Census()
        train, validation = _write_shards(config, listing, tokenizer, new_threshold, census, path, progress)
    dtype = _dtype(tokenizer)
    dataset = PreparedText(
        path=path,
        name=config.name,
        key=key,
        content=manifest.content_hash(train, validation, dtype.name, tokenizer.bos_id),
        source=_describe(config, listing, census),
        tokenizer=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        dtype=dtype.name,
        train=train,
        validation=validation,
    )
    manifest.write_manifest(dataset)


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _write_shards(
    config: DocumentConfig,
    listing: Listing,
    tokenizer: Tokenizer,
    threshold: int,
    census: Census,
    path: Path,
    progress: Progress | None,
) -> tuple[Split, ...]:
    for old_file in path.iterdir():
        old_file.unlink()
    dtype = _dtype(tokenizer)
    writers = {name: ShardWriter(path, name, dtype, config.shard_tokens) for name in manifest.SPLITS}
    total = min(listing.bytes, config.byte_limit or listing.bytes) or None
    pieces = split_documents(config, listing, threshold, census)
    try:
        for encoded_documents in encode_in_threads(pieces, tokenizer, dtype, config.workers or os.cpu_count() or 1):
            writers[encoded_documents.split].add(encoded_documents)
            if progress is not None:
                progress(sum(writer.bytes for writer in writers.values()), total)
        return tuple(writer.finish() for writer in writers.values())
    finally:
        for writer in writers.values():
            writer.abort()


def _describe(config: DocumentConfig, listing: Listing, census: Census) -> dict[str, object]:
    details = {
        "files": len(listing.files),
        "file_bytes": listing.bytes,
        "skipped_files": len(listing.skipped_names),
        "undecodable_characters": sum(replaced for replaced, _ in census.undecodable_counts.values()),
        UNDECODABLE: _largest_counts(census.undecodable_counts),
        f"total_{EMPTY_ROWS}": sum(empty_rows for empty_rows, _ in listing.empty_rows.values()),
        EMPTY_ROWS: _largest_counts(listing.empty_rows),
        "max_bytes": config.byte_limit,
        "validation_fraction": config.validation_fraction,
    }
    details = {key: value for key, value in details.items() if value != {}}
    return {"kind": config.source, **config.source_details(), **(details if listing.files else {})}


def _largest_counts(counts: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return dict(sorted(counts.items(), key=lambda item: -item[1][0])[:_MAX_LISTED])
