"""Text that is tokenised while it is read (`data=parquet_stream`): its files and row groups, and the order of reading.

A *unit* is a row group of a .parquet file, or any other file as a whole. Every epoch shuffles the training units using
the seed and deals them to `lanes` like cards: lane k gets units k, k + lanes, ... of that order. A lane reads the
documents of its units in order and packs them into rows. When it has no more units, it starts the next epoch without
waiting for other lanes. Each lane fills a separate block of rows of every global batch, so that the batch of a step
depends only on the data, the seed, `batch`, `seq`, `lanes`, `packing` and `pool`.

A process reads the lanes that fill the rows of its devices, and a run can resume on any number of processes. With more
processes than lanes, some processes read the same lane. With few units, some lanes begin their next epoch earlier than
others. Together, the lanes read each document once per epoch. Validation is a single lane in the order of the files,
and every process reads all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from valkyrie.checksums import digest
from valkyrie.data.batches import BatchPlan, Loader
from valkyrie.data.cut import split_into_pieces
from valkyrie.data.files import list_paths
from valkyrie.data.readers import File, count_row_groups, read_documents
from valkyrie.data.remote import RemoteFile
from valkyrie.data.sources.parquet_stream import Config
from valkyrie.data.tokenizer import load_tokenizer, read_fingerprint, read_vocab_size
from valkyrie.processes.team import ALONE, Team

MAX_LANES = 16
_PARALLEL_FOOTERS = 32
_TEXTS_AHEAD = 64


class Unit(NamedTuple):
    """A row group of a .parquet file, or another file as a whole (`row_group` None)."""

    file: File
    row_group: int | None


class DocumentPosition(NamedTuple):
    """Position of a document in its lane: the epoch, the unit in that epoch's order, and the document in the unit."""

    epoch: int
    unit: int
    document: int


@dataclass(frozen=True)
class LanePosition:
    """Position in the rows of a lane.

    Args:
        next: the document where the next row begins or, with `packing=best_fit`, the next document to read.
        offset: index in `next` of the first token of the next row, or 0 with `packing=best_fit`.
        pool: the documents that `packing=best_fit` has read ahead, in reading order.
    """

    next: DocumentPosition = DocumentPosition(0, 0, 0)
    offset: int = 0
    pool: tuple[DocumentPosition, ...] = ()


LaneDocument = tuple[DocumentPosition, np.ndarray]
"""A document's position and its int32 ids, BOS first."""


@dataclass(frozen=True)
class StreamedText:
    """A dataset that is tokenised while it is read.

    `content` is a hash of the names and sizes of the files and of the settings that determine the tokens.
    """

    name: str
    content: str
    config: Config
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    bos_id: int
    train: tuple[Unit, ...]
    validation: tuple[Unit, ...]
    team: Team = field(default=ALONE, compare=False)

    def units(self, split: str) -> tuple[Unit, ...]:
        """Return the units of the split `train` or `validation`."""
        return self.train if split == "train" else self.validation

    def lane_count(self, batch: int) -> int:
        """Return the number of lanes of a training batch.

        By default, the largest divisor of `batch` that is at most `MAX_LANES` and the number of training units.
        Raises ValueError if `data.lanes` does not divide `batch` or exceeds the number of training units.
        """
        lanes = self.config.lanes
        most_lanes = min(lanes or MAX_LANES, len(self.train), batch)
        nearest_count = next(count for count in range(most_lanes, 0, -1) if batch % count == 0)
        if lanes is None:
            return nearest_count
        if batch % lanes:
            raise ValueError(
                f"data.lanes={lanes} does not divide batch={batch}, but every lane fills the same number of rows. "
                f"Use data.lanes={nearest_count}."
            )
        if lanes > len(self.train):
            raise ValueError(
                f"data.lanes={lanes} exceeds the number of row groups or files for training, {len(self.train)}. "
                f"Use data.lanes={nearest_count}."
            )
        return lanes

    def loader(self, split: str, plan: BatchPlan) -> Loader[Any]:
        from valkyrie.data.stream_loader import StreamLoader

        return StreamLoader(self, split, plan)

    def describe(self) -> str:
        """Return one line with the number of files and units in each split, and the tokenizer."""
        training, validation = _describe_units(self.train), _describe_units(self.validation)
        return (
            f"data {self.name}: {training} for training, {validation} for validation, tokenised while they are read "
            f"({self.tokenizer})"
        )


def _describe_units(units: Sequence[Unit]) -> str:
    files = len({unit.file.id for unit in units})
    return f"{files:,} file{'s' * (files > 1)} in {len(units):,} part{'s' * (len(units) > 1)}"


def open_stream(
    config: Config, tokenizer: str, team: Team = ALONE, say: Callable[[str], object] | None = None
) -> StreamedText:
    """Open the dataset of a config with `source=parquet_stream`, reading the footers of its .parquet files.

    Without `config.val_paths`, the last file is for validation, or the last row group if there is one file. Raises
    ValueError if a file is cut short or lacks the text column, or if a split would be empty. `say` gets notes about
    skipped files.
    """
    config.raise_problems()
    files = _list_files(config.paths, config, "data.paths", say)
    if config.val_paths:
        validation_files = _list_files(config.val_paths, config, "data.val_paths", say)
        validation_paths = {_full_path(file) for file in validation_files}
        files = [file for file in files if _full_path(file) not in validation_paths]
        if not files:
            raise ValueError("data.val_paths includes every file of data.paths, so none is left for training.")
        train, validation = _list_units(files, config), _list_units(validation_files, config)
    elif len(files) > 1:
        train, validation = _list_units(files[:-1], config), _list_units(files[-1:], config)
    else:
        units = _list_units(files, config)
        train, validation = units[:-1], units[-1:]
    for units, purpose, key in ((train, "training", "data.paths"), (validation, "validation", "data.val_paths")):
        if not units:
            remedy = f"{key}." if config.val_paths else "data.paths, or set data.val_paths=[FILES]."
            raise ValueError(f"data={config.name} has no file or row group left for {purpose}. Add a file to {remedy}")
    unit_ids = [[unit.file.id.rpartition("/")[2], unit.file.size, unit.row_group] for unit in (*train, *validation)]
    language = config.language.value if config.language else None
    chunking = [config.chunk.value, language]
    identity = [unit_ids, len(train), config.column, config.field, *chunking, read_fingerprint(tokenizer)]
    return StreamedText(
        config.name,
        digest(identity)[:32],
        config,
        tokenizer,
        read_fingerprint(tokenizer),
        read_vocab_size(tokenizer),
        load_tokenizer(tokenizer).bos_id,
        train,
        validation,
        team,
    )


def _list_files(paths: Sequence[str], config: Config, key: str, say: Callable[[str], object] | None) -> Sequence[File]:
    listing = list_paths(paths, config.read_options, key)
    if say is not None:
        for note in listing.skip_notes(key):
            say(f"note: {note}")
    return listing.files


def _full_path(file: File) -> str:
    """Return a path or URL that is the same however the file is named in the settings."""
    return file.id if isinstance(file, RemoteFile) else str(file.path)


def _list_units(files: Sequence[File], config: Config) -> tuple[Unit, ...]:
    def split_file(file: File) -> list[Unit]:
        if file.suffix != ".parquet":
            return [Unit(file, None)]
        return [Unit(file, row_group) for row_group in range(count_row_groups(file, config.read_options))]

    with ThreadPoolExecutor(_PARALLEL_FOOTERS) as pool:
        return tuple(unit for units in pool.map(split_file, files) for unit in units)


@dataclass(frozen=True)
class Lane:
    """One lane of a split (see the module docstring), which reads its share of the units.

    It is pickled and sent to the process that reads it.

    Args:
        units: All units of the split.
        config: The data source.
        tokenizer: Name or path of the tokenizer.
        number: Index of the lane.
        lane_count: Number of lanes in the split.
        seed: Seed of the shuffle in each epoch; units repeat forever. If None, units are read once, in order.
        threads: Number of threads that tokenise.
    """

    units: tuple[Unit, ...]
    config: Config
    tokenizer: str
    number: int
    lane_count: int
    seed: int | None
    threads: int = 1

    def documents(self, start: DocumentPosition) -> Iterator[LaneDocument]:
        """Yield the documents of the lane, starting at a position.

        With a seed, continues forever, and raises ValueError if an epoch has no text.
        """
        return self._encode(self._read_texts(start))

    def fetch(self, positions: Sequence[DocumentPosition]) -> list[LaneDocument]:
        """Return the documents at the given positions, in the order of `positions`. Reads each unit once."""
        texts: dict[DocumentPosition, str] = {}
        requested = set(positions)
        for epoch, unit in sorted({(position.epoch, position.unit) for position in positions}):
            last_document = max(position.document for position in positions if position[:2] == (epoch, unit))
            for number, text in enumerate(islice(self._read_unit(epoch, unit), last_document + 1)):
                if (position := DocumentPosition(epoch, unit, number)) in requested:
                    texts[position] = text
        return [*self._encode(iter([(position, texts[position]) for position in positions]))]

    def _read_texts(self, start: DocumentPosition) -> Iterator[tuple[DocumentPosition, str]]:
        epoch, first_unit, first_document = start
        while True:
            has_text = first_unit > 0 or first_document > 0
            for unit in range(first_unit, len(self._unit_order(epoch))):
                for number, text in enumerate(self._read_unit(epoch, unit)):
                    has_text = True
                    if number >= first_document:
                        yield DocumentPosition(epoch, unit, number), text
                first_document = 0
            if self.seed is None:
                return
            if not has_text:
                raise ValueError(self._no_text_message(epoch))
            epoch, first_unit = epoch + 1, 0

    def _no_text_message(self, epoch: int) -> str:
        order = self._unit_order(epoch)
        first_file = self.units[order[0]].file.id
        lane_text, remedy = "", "Add a file with text"
        if self.lane_count > 1:
            lane_text = f" of lane {self.number + 1} of {self.lane_count}"
            remedy = f"Remove the empty files, or set data.lanes below {self.lane_count}"
        if len(order) == 1:
            fault = f"{first_file}, the only file or row group{lane_text}, has no text"
        else:
            fault = f"none of the {len(order)} files or row groups{lane_text} ({first_file}, ...) has text"
        return f"data={self.config.name}: {fault}. {remedy}."

    def _encode(self, texts: Iterator[tuple[DocumentPosition, str]]) -> Iterator[LaneDocument]:
        """Encode texts. One thread reads ahead and `threads` threads encode."""
        encode = _encoder(self.tokenizer)
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(self.threads) as encoders:

            def read_texts() -> list[tuple[DocumentPosition, str]]:
                return [*islice(texts, _TEXTS_AHEAD)]

            next_texts = reader.submit(read_texts)
            while texts_read := next_texts.result():
                next_texts = reader.submit(read_texts)
                positions, contents = zip(*texts_read, strict=True)
                map_in_order = map if self.threads == 1 else encoders.map
                yield from zip(positions, map_in_order(encode, contents), strict=True)

    def _read_unit(self, epoch: int, unit: int) -> Iterator[str]:
        file, row_group = self.units[self._unit_order(epoch)[unit]]
        for document in read_documents(file, self.config.read_options, row_group):
            if document.text:
                yield document.text

    def _unit_order(self, epoch: int) -> list[int]:
        return _shuffle_units(len(self.units), self.seed, epoch)[self.number :: self.lane_count]


@cache
def _shuffle_units(unit_count: int, seed: int | None, epoch: int) -> list[int]:
    if seed is None:
        return [*range(unit_count)]
    return np.random.default_rng([seed, epoch]).permutation(unit_count).tolist()


@cache
def _encoder(name: str) -> Any:
    """Return a function that encodes a text as int32 ids, with BOS first."""
    tokenizer = load_tokenizer(name)
    bos = np.array([tokenizer.bos_id], np.int32)

    def encode(text: str) -> np.ndarray:
        parts = [tokenizer.encode_ordinary(str(piece.content)) for piece in split_into_pieces(text, "")]
        return np.concatenate([bos, *parts], dtype=np.int32, casting="unsafe")  # ids are below 2**31

    return encode
