"""Base configs of text sources, including those that are tokenised once into shards."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from valkyrie.buckets import bucket_problems
from valkyrie.data.chunks import Chunking, chunk_problems
from valkyrie.data.config import SOURCES, DataCheck, DataConfig, default_cache_dir, full_path, is_tokenizer_file
from valkyrie.data.files import Listing, read_files
from valkyrie.data.readers import Document, ReadOptions
from valkyrie.paths import DiskError
from valkyrie.problems import Problem, check_range
from valkyrie.processes.team import ALONE, Team

if TYPE_CHECKING:
    from valkyrie.data.batches import Dataset
    from valkyrie.data.cut import TokenDocument
    from valkyrie.data.manifest import PreparedText

_MAX_EPOCHS = 4
"""Number of epochs above which `valkyrie-doctor` warns. Up to about four epochs, repeated text is nearly as good as new
text (arXiv 2305.16264)."""


@dataclass
class TextConfig(DataConfig):
    """Base of text sources.

    Args:
        tokenizer: `bytes`, `gpt2`, another tiktoken encoding, a .tiktoken file, a Hugging Face tokenizer.json, or the
            name of a tokenizer trained by `valkyrie-data tokenizer`; or None for the default of the model.
    """

    tokenizer: str | None = None

    def with_full_paths(self) -> DataConfig:
        """Return this config with absolute paths, including the path of a tokenizer file."""
        config = super().with_full_paths()
        if self.tokenizer is None or not is_tokenizer_file(self.tokenizer):
            return config
        return dataclasses.replace(config, tokenizer=full_path(self.tokenizer))

    def tokenizer_for(self, default: str) -> str:
        return self.tokenizer or default


@dataclass
class DocumentConfig(TextConfig):
    """Base of sources with documents that are tokenised once, into shards in a cache.

    A source defines `list_files` and `read_documents`. It overrides `cache_identity` if some of its settings do not
    affect the documents.

    Args:
        validation_fraction: expected share of the documents held out for evaluation.
        cache_dir: folder for the shards, which are reused as long as the files and settings are the same.
        shard_tokens: tokens per shard file.
        workers: threads that tokenise, or None for one per CPU core.
    """

    validation_fraction: float = 0.05
    cache_dir: str = dataclasses.field(default_factory=default_cache_dir)
    shard_tokens: int = 64 * 1024 * 1024
    workers: int | None = None

    @abstractmethod
    def list_files(self) -> Listing:
        """Return the files of the source, sorted, without reading them.

        A source that generates its documents returns an empty listing. Others raise ValueError if there are no files.
        """

    @abstractmethod
    def read_documents(self, listing: Listing) -> Iterator[Document | TokenDocument]:
        """Read the non-empty documents, always in the same order for the same files."""

    def read_annotating_errors(self, listing: Listing) -> Iterator[Document | TokenDocument]:
        """Yield the documents of `read_documents`. Errors while reading get a note with the document's number."""
        number = 1
        try:
            for document in self.read_documents(listing):
                yield document
                number += 1
        except Exception as error:
            error.add_note(f"while reading data.source={self.source}, document {number}")
            raise

    def cache_identity(self) -> dict[str, object]:
        """Return the settings that determine the documents, as JSON values.

        They are part of the cache key of the shards: if one changes, the text is tokenised again. By default, these are
        all fields except those of `DocumentConfig`.
        """
        excluded_keys = {field.name for field in dataclasses.fields(DocumentConfig)}
        settings = dataclasses.asdict(self.with_full_paths())
        return {"settings": {key: value for key, value in settings.items() if key not in excluded_keys}}

    def source_details(self) -> dict[str, object]:
        """Return details of the source as JSON values, for example `{"paths": [...]}`.

        They are written to the manifest of the shards, only for people to read.
        """
        return {}

    def prepared_folder(self) -> Path | None:
        """Return the folder named in the settings if it already holds shards, else None."""
        return None

    @property
    def byte_limit(self) -> int | None:
        """Bytes of text after which reading stops, or None to read all."""
        return None

    def is_single_text(self, listing: Listing) -> bool:
        """Return whether the source is a single text. Its end then becomes the validation split."""
        return False

    def problems(self) -> list[Problem]:
        problems = [*super().problems(), *bucket_problems("data.cache_dir", self.cache_dir)]
        problems += check_range("data.validation_fraction", self.validation_fraction, above=0, below=1)
        problems += check_range("data.shard_tokens", self.shard_tokens, least=1)
        return problems + check_range("data.workers", self.workers, least=1, otherwise="null for one per CPU core")

    def open(self, tokenizer: str, team: Team = ALONE, say: Callable[[str], object] | None = None) -> PreparedText:
        """Open the shards, tokenising the documents first if they are not in the cache.

        If the cache cannot be written, the shards go to a temporary folder that this process deletes when it exits.
        """
        from valkyrie.data.prepare import prepare

        try:
            return prepare(self, tokenizer, say=say)
        except DiskError as error:
            folder = tempfile.mkdtemp(prefix="valkyrie-data-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            data = prepare(dataclasses.replace(self, cache_dir=folder), tokenizer)
            if say is not None:
                say(f"{error} The data is prepared in {folder}, only for this run.")
            return data

    def check(self, tokenizer: str, batch: int, seq: int, steps: int) -> DataCheck:
        """Check that the training split has at least one batch. Raises ValueError if not.

        If the shards are not in the cache, only the settings and files are checked, and the result says so. Of a user's
        source, the first document is read.
        """
        from valkyrie.data.cut import read_first_document
        from valkyrie.data.loader import count_rows
        from valkyrie.data.prepare import find_dataset

        data = find_dataset(self, tokenizer)
        if data is None:
            next_step = "process 0 prepares it when the run starts"
            if self.source in SOURCES.names():  # `valkyrie-data` knows no sources of the user
                next_step += (
                    f". To prepare it now, use `valkyrie-data prepare {self.source}` with this run's paths and options"
                )
                return DataCheck(f"data={self.name} is not prepared yet, so its text was not read: {next_step}")
            read_first_document(self, self.list_files())
            return DataCheck(f"data={self.name} is not prepared yet. Its first document was read: {next_step}")
        epochs = steps * batch / count_rows(data, "train", batch, seq)
        shards, content = len(data.train.shards), data.content[:12]
        text = f"{data.train.tokens:,} training tokens in {shards} shard{'s' * (shards > 1)} (hash {content})"
        repeat_warning = "Use more text or fewer steps: the data repeats more than four times."
        return DataCheck(
            f"{text}, read {epochs:.2g} times in steps={steps}",
            repeat_warning if epochs > _MAX_EPOCHS else None,
            content,
        )

    def note(self, data: Dataset) -> str | None:
        """Return notes on undecodable characters, rows without text and an unexpected size of the validation split.

        Returns None if there are none. Each is a line that begins with `note: `. The size is unexpected if the
        validation split has less than half or more than twice `validation_fraction` of the tokens. Whole documents are
        held out, so this happens with a few long documents. The size is not checked for a folder that already held
        shards (`prepared_folder`).
        """
        from valkyrie.data.manifest import PreparedText

        assert isinstance(data, PreparedText), "what `open` returns"
        validation_share = data.validation.tokens / (data.train.tokens + data.validation.tokens)
        notes = [*filter(None, (data.undecodable_note(), data.empty_rows_note()))]
        is_off = not self.validation_fraction / 2 <= validation_share <= 2 * self.validation_fraction
        # The split of a folder that already holds shards was made with settings that are unknown here.
        if is_off and self.prepared_folder() is None:
            notes.append(
                f"data.validation_fraction={self.validation_fraction:g}: the validation split has "
                f"{100 * validation_share:.3g}% of the tokens, because whole documents are held out and this data has "
                "only a few long ones"
            )
        return "\n".join(f"note: {note}" for note in notes) or None


@dataclass
class CorpusConfig(DocumentConfig):
    """Base of sources that read text from files.

    Args:
        chunk: `functions` makes each function or class of C, C++ and Python a document, with the text before it.
        max_bytes: bytes of UTF-8 text after which reading stops, or None for all.
    """

    chunk: Chunking = Chunking.whole
    max_bytes: int | None = None

    @property
    def read_options(self) -> ReadOptions:
        """Options for `read_files`, taken from the fields of this config."""
        return ReadOptions(chunk=self.chunk)

    def read_documents(self, listing: Listing) -> Iterator[Document]:
        return read_files(listing, self.read_options)

    @property
    def byte_limit(self) -> int | None:
        return self.max_bytes

    def problems(self) -> list[Problem]:
        problems = [*super().problems(), *chunk_problems(self.chunk)]
        return problems + check_range("data.max_bytes", self.max_bytes, least=1, otherwise="null for all")
