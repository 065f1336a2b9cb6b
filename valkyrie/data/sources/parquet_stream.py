"""Config of text that is tokenised while it is read (see `valkyrie.data.stream`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from valkyrie.data.chunks import Chunking, Language, chunk_problems
from valkyrie.data.config import DataCheck
from valkyrie.data.documents import TextConfig
from valkyrie.data.readers import ReadOptions
from valkyrie.data.remote import path_problems
from valkyrie.problems import Problem, ProblemCode, check_range
from valkyrie.processes.team import ALONE, Team

if TYPE_CHECKING:
    from valkyrie.data.stream import StreamedText


class Packing(Enum):
    """How documents become rows: cut from one stream, or packed so that every row begins with a document."""

    stream = "stream"
    best_fit = "best_fit"


@dataclass
class Config(TextConfig):
    """Text files that are tokenised while they are read. Their number and size are not limited.

    Args:
        paths: files, directories, globs and URLs, as for `source=text`.
        val_paths: the files for validation. If empty, the last file of `paths`, or the last row group of a single file.
        field: the key with the text in .jsonl, and the feature in .tfrecord and ArrayRecord files.
        column: the column with the text in .parquet.
        chunk: `functions` makes each function or class of C, C++ and Python a document.
        language: with `chunk=functions`, the language of .parquet, .jsonl and other files of many documents.
        workers: processes that read and tokenise, at most one per lane; 0 for a thread of this process, None for one
            per CPU core, up to 8.
        packing: `stream` cuts rows from the concatenated documents; `best_fit` begins every row with a document.
        pool: documents per lane that `packing=best_fit` reads ahead.
        lanes: number of streams that read separate files or row groups and each fill an equal part of the batch, or
            None for up to 16.
    """

    name: str = "parquet_stream"
    source: str = "parquet_stream"
    paths: list[str] = dataclasses.field(default_factory=list)
    val_paths: list[str] = dataclasses.field(default_factory=list)
    field: str = "text"
    column: str = "text"
    chunk: Chunking = Chunking.whole
    language: Language | None = None
    workers: int | None = None
    packing: Packing = Packing.stream
    pool: int = 256
    lanes: int | None = None

    @property
    def read_options(self) -> ReadOptions:
        """Options for reading the files: `field`, `column`, `chunk` and `language`."""
        return ReadOptions(self.field, self.column, self.chunk, self.language)

    def problems(self) -> list[Problem]:
        problems = [*super().problems(), *path_problems(self.paths), *path_problems(self.val_paths, "data.val_paths")]
        problems += check_range("data.workers", self.workers, least=0, otherwise="null for one per CPU core, up to 8")
        problems += check_range("data.pool", self.pool, least=1)
        problems += check_range("data.lanes", self.lanes, least=1, otherwise="null for up to 16")
        if not self.paths:
            text = f"data={self.name} needs files, such as data.paths=[shards/*.parquet]."
            problems.append(Problem(ProblemCode.missing, "data.paths", self.paths, text))
        return [*problems, *chunk_problems(self.chunk)]

    def open(self, tokenizer: str, team: Team = ALONE, say: Callable[[str], object] | None = None) -> StreamedText:
        """Open the training and validation splits.

        Lists the files, but reads only the footers of .parquet files. Raises ValueError if a path matches no file, a
        footer is damaged or lacks the text column, or a split is empty.
        """
        from valkyrie.data.stream import open_stream

        return open_stream(self, tokenizer, team, say)

    def check(self, tokenizer: str, batch: int, seq: int, steps: int) -> DataCheck:
        """Check that the files can be opened and that neither split is empty. Raises ValueError if not.

        Names and sizes of the files are compared across processes later, when the run starts.
        """
        return DataCheck(self.open(tokenizer).describe())
