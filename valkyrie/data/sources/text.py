"""Data source for text in files on a disk or in a bucket."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from valkyrie.buckets import url_scheme
from valkyrie.data.chunks import Chunking, Language
from valkyrie.data.documents import CorpusConfig
from valkyrie.data.files import Listing, list_paths
from valkyrie.data.readers import SINGLE_DOCUMENT_SUFFIXES, ReadOptions
from valkyrie.data.remote import path_problems
from valkyrie.problems import Problem


@dataclass
class Config(CorpusConfig):
    """Text files, or one folder of shards written by `valkyrie-data prepare`.

    Args:
        paths: files, directories or globs, relative to the current directory (`~` and `**` are supported), or URLs that
            fsspec can read, such as `gs://bucket/books/*.txt` or `s3://bucket/books`.
        field: the key with the text in .jsonl, and the feature in .tfrecord and ArrayRecord files.
        column: the column with the text in .parquet.
        language: with `chunk=functions`, the language of .parquet, .jsonl and other files of many documents.
    """

    name: str = "text"
    source: str = "text"
    paths: list[str] = dataclasses.field(default_factory=list)
    field: str = "text"
    column: str = "text"
    language: Language | None = None

    @property
    def read_options(self) -> ReadOptions:
        return ReadOptions(self.field, self.column, self.chunk, self.language)

    def problems(self) -> list[Problem]:
        return [*super().problems(), *path_problems(self.paths)]

    def list_files(self) -> Listing:
        """Return the files matched by `paths`.

        Raises ValueError if a path matches no file with a supported suffix, or if `chunk` is `functions` and the
        programming language of a file is unknown.
        """
        return list_paths(self.paths, self.read_options)

    def cache_identity(self) -> dict[str, object]:
        return self.read_options.cache_identity

    def source_details(self) -> dict[str, object]:
        return {"paths": self.paths}

    def is_single_text(self, listing: Listing) -> bool:
        is_single_file = len(listing.files) == 1 and listing.files[0].suffix in SINGLE_DOCUMENT_SUFFIXES
        return is_single_file and self.chunk is Chunking.whole

    def prepared_folder(self) -> Path | None:
        from valkyrie.data.manifest import MANIFEST_FILE

        if len(self.paths) != 1 or not self.paths[0] or url_scheme(self.paths[0]):
            return None
        path = Path(self.paths[0]).expanduser()
        return path if os.access(path / MANIFEST_FILE, os.F_OK) else None  # False for a folder without permissions
