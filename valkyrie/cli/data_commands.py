"""Implements `valkyrie-data`: trains tokenizers, and prepares, checks and shows token shards."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from valkyrie.cli.parser import OneLineParser, run_command
from valkyrie.data.config import SOURCES, trained_tokenizer_path
from valkyrie.data.documents import DocumentConfig
from valkyrie.data.files import empty_rows_note
from valkyrie.data.readers import COLUMN_SUFFIXES, FIELD_SUFFIXES
from valkyrie.data.sources import text
from valkyrie.problems import format_alternatives, suggest
from valkyrie.processes.interrupt import signals_as_exceptions
from valkyrie.units import count_text

_SOURCES = [name for name in SOURCES.names() if issubclass(SOURCES.config_class(name), DocumentConfig)]
"""Sources that can be tokenised before a run. A run prepares puzzles itself, and streams need no preparation."""


def run(argv: Sequence[str] | None = None) -> None:
    """Run `valkyrie-data` with `argv`, or with the arguments of the process if it is None."""
    run_command("valkyrie-data", _run, argv)


def _run(words: list[str]) -> None:
    for word in words:
        if word.startswith(("data=", "data.", "tokenizer=")) and (option := _keys_to_options(word)) != word:
            raise ValueError(f"{word} is a setting of valkyrie-train. Write {option}.")
    arguments = _parser().parse_args(words)
    try:
        with signals_as_exceptions():  # SIGTERM, too, deletes the shards written so far
            arguments.run(arguments)
    except ValueError as error:
        raise ValueError(_keys_to_options(str(error))) from error


def _keys_to_options(message: str) -> str:
    """Replace keys of a run in a message by the options of this command: `data.workers=0` by `--workers 0`."""

    def format_option(match: re.Match[str]) -> str:
        key, value = match["key"], match["value"]
        if key == "paths":
            return "the paths" if value is None else " ".join(re.findall(r"[^\[\],]+", value))
        return f"--{key.replace('_', '-')}" + ("" if value is None else f" {value}")

    keys = "|".join(field.name for field in fields(text.Config) if field.name not in ("name", "source"))
    message = re.sub(r"(?m)^(note: )?data\.paths: ", r"\1", message)
    key_pattern = rf"(?<![\w./])(?:data\.(?={keys})|(?=tokenizer=))(?P<key>\w+)"
    message = re.sub(rf"{key_pattern}(?:=(?P<value>\[.*?\]|[^\s,;]*[^\s,;:.]))?", format_option, message)
    message = re.sub(r"(?<![\w./])data=(?=\w)", "", message)
    return message.replace(", or null for ", ", or left out for ")


def _parser() -> argparse.ArgumentParser:
    about = "Prepare token shards before a run, verify them and show them; train tokenizers."
    parser = OneLineParser(prog="valkyrie-data", description=about)
    commands = parser.add_subparsers(
        required=True, metavar="{prepare,tokenizer,verify,show}", parser_class=OneLineParser
    )
    defaults = text.Config()

    prepare_parser = commands.add_parser("prepare", help="tokenise a source into shards, unless the cache has them")
    prepare_parser.set_defaults(run=_prepare)
    prepare_parser.add_argument("source", nargs="?", default="stdlib", metavar=f"{{{','.join(_SOURCES)}}}")
    prepare_parser.add_argument(
        "paths", nargs="*", help="files, directories or globs, local or at gs:// or s3://; only if the source is text"
    )
    tokenizer_help = (
        "bytes, gpt2, a tiktoken encoding, FILE.tiktoken, tokenizer.json, or the name of a tokenizer you trained"
    )
    prepare_parser.add_argument("--tokenizer", default="bytes", help=tokenizer_help)
    prepare_parser.add_argument("--validation-fraction", type=float, default=defaults.validation_fraction)
    prepare_parser.add_argument(
        "--max-bytes", type=int, default=None, help="maximum bytes of text to read; default: all"
    )
    prepare_parser.add_argument("--shard-tokens", type=int, default=defaults.shard_tokens)
    prepare_parser.add_argument(
        "--workers", type=int, default=None, help="tokenising threads; default: one per CPU core"
    )
    prepare_parser.add_argument("--field", default=defaults.field, help="JSON key of the text in .jsonl files")
    prepare_parser.add_argument("--column", default=defaults.column, help="column of the text in .parquet files")
    prepare_parser.add_argument("--cache-dir", default=defaults.cache_dir, help="folder of the shards")

    tokenizer_parser = commands.add_parser(
        "tokenizer", help="train a tokenizer on text and write it to a tokenizer.json"
    )
    tokenizer_parser.set_defaults(run=_train_tokenizer)
    tokenizer_parser.add_argument("paths", nargs="+", help="files, directories or globs; gs://, s3:// too")
    tokenizer_parser.add_argument("--vocab", type=int, default=65536, help="number of ids, including BOS")
    save_help = "a name for data.tokenizer=NAME, usable from every folder, or the path of a .json file"
    tokenizer_parser.add_argument("--save", default="tokenizer.json", metavar="NAME", help=save_help)
    tokenizer_parser.add_argument(
        "--pattern", default="cl100k", help="pattern that splits text into words: r50k, cl100k, o200k, nanochat"
    )
    tokenizer_parser.add_argument(
        "--max-bytes", type=int, default=None, help="maximum bytes of text to read; default: all"
    )
    tokenizer_parser.add_argument("--field", default=defaults.field, help="JSON key of the text in .jsonl files")
    tokenizer_parser.add_argument("--column", default=defaults.column, help="column of the text in .parquet files")

    verify_parser = commands.add_parser("verify", help="check every shard against its checksum")
    verify_parser.set_defaults(run=_verify)
    verify_parser.add_argument("path", help="the directory that prepare printed")

    show_parser = commands.add_parser("show", help="print the manifest as a table, and the beginning of the text")
    show_parser.set_defaults(run=_show)
    show_parser.add_argument("path", help="the directory that prepare printed")
    show_parser.add_argument("--split", default="train", choices=["train", "validation"], help="split of the excerpt")
    show_parser.add_argument("--tokens", type=int, default=200, help="tokens of the excerpt")
    return parser


def _prepare(arguments: argparse.Namespace) -> None:
    if arguments.source not in _SOURCES:
        nearest = None if Path(arguments.source).exists() else suggest(arguments.source, _SOURCES)
        hint = f"Did you mean {nearest}?" if nearest else _text_command([arguments.source, *arguments.paths])
        raise ValueError(f"{arguments.source} is not a source ({', '.join(_SOURCES)}). {hint}")
    if arguments.paths and arguments.source != "text":
        raise ValueError(f"{arguments.source} does not take paths. {_text_command(arguments.paths)}")
    config_class = SOURCES.config_class(arguments.source)
    keys, defaults = {field.name for field in fields(config_class)}, text.Config()
    values = {key: value for key, value in vars(arguments).items() if hasattr(defaults, key) and key != "tokenizer"}
    for key, value in list(values.items()):
        if key not in keys:
            if value != getattr(defaults, key):
                raise ValueError(f"--{key.replace('_', '-')} does not apply to {arguments.source}. Leave it out.")
            del values[key]
    config = config_class(name=arguments.source, **values)
    assert isinstance(config, DocumentConfig), "one of the choices"
    if isinstance(config, text.Config):
        _refuse_unread_options(config)
    from rich.console import Console
    from rich.progress import Progress

    from valkyrie.data.prepare import prepare

    start = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("tokenising", total=None)

        def show_progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        dataset = prepare(config, arguments.tokenizer, show_progress, alternative="--cache-dir DIR", say=_print_note)
    print(
        f"{dataset.train.tokens:,} training and {dataset.validation.tokens:,} validation tokens "
        f"in {time.perf_counter() - start:.1f} s"
    )
    if (note := config.note(dataset)) is not None:
        _print_note(note)
    print(dataset.path)


def _print_note(note: str) -> None:
    print(_keys_to_options(note), file=sys.stderr)


def _text_command(paths: Sequence[str]) -> str:
    return f"To prepare files: valkyrie-data prepare text {shlex.join(paths)}"


def _refuse_unread_options(config: text.Config) -> None:
    """Raise ValueError if `--field` or `--column` is set, but no file has a format that reads it."""
    if config.prepared_folder() is not None or config.problems():
        return
    for key, suffixes, other_key, other_suffixes in (
        ("field", FIELD_SUFFIXES, "column", COLUMN_SUFFIXES),
        ("column", COLUMN_SUFFIXES, "field", FIELD_SUFFIXES),
    ):
        value = getattr(config, key)
        if value == getattr(text.Config(), key):
            continue
        file_suffixes = {file.suffix for file in config.list_files().files}
        if file_suffixes.isdisjoint(suffixes):
            remedy = "Leave it out." if file_suffixes.isdisjoint(other_suffixes) else f"Write --{other_key} {value}."
            raise ValueError(f"--{key} {value} applies only to {format_alternatives(None, suffixes)} files. {remedy}")


def _train_tokenizer(arguments: argparse.Namespace) -> None:
    from valkyrie.data.tokenizer import check_tokenizer_name, read_fingerprint
    from valkyrie.data.tokenizer_json import TextCounts, train_tokenizer, training_texts

    is_path = arguments.save.endswith(".json")
    if not is_path:
        check_tokenizer_name(arguments.save)
    path = Path(arguments.save).expanduser() if is_path else trained_tokenizer_path(arguments.save)
    if path.exists():
        raise ValueError(f"{path} already exists, and runs may depend on it. Use another --save NAME, or delete it.")
    config = text.Config(
        paths=arguments.paths,
        field=arguments.field,
        column=arguments.column,
        max_bytes=arguments.max_bytes,
    )
    config.raise_problems()
    _refuse_unread_options(config)
    start, listing, counts = time.perf_counter(), config.list_files(), TextCounts()
    for note in listing.skip_notes():
        _print_note(f"note: {note}")
    vocab_size = train_tokenizer(training_texts(config, listing, counts), arguments.vocab, arguments.pattern, path)
    if (note := empty_rows_note(listing.empty_rows)) is not None:
        _print_note(f"note: {note}")
    fewer_note = (
        f", not {arguments.vocab:,}, because the text has no more pairs to merge"
        if vocab_size < arguments.vocab
        else ""
    )
    print(
        f"{vocab_size:,} ids{fewer_note}; trained on {count_text(counts.documents, 'document')} with {counts.bytes:,} "
        f"bytes in {time.perf_counter() - start:.1f} s"
    )
    name = str(path) if is_path else arguments.save
    print(f"{path} (fingerprint {read_fingerprint(name)}). Use it with data.tokenizer={name}")


def _verify(arguments: argparse.Namespace) -> None:
    from valkyrie.data.manifest import verify

    dataset = verify(arguments.path)
    size = sum(shard.tokens for shard in dataset.shards) * dataset.token_size
    print(f"{len(dataset.shards)} shards, {size:,} bytes: all checksums match")


def _show(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from valkyrie.data.loader import open_split
    from valkyrie.data.manifest import SPLITS, open_dataset
    from valkyrie.data.tokenizer import load_tokenizer

    if arguments.tokens < 1:
        raise ValueError(f"--tokens {arguments.tokens}: must be at least 1.")
    dataset = open_dataset(arguments.path)
    console = Console()
    source = ", ".join(f"{name}={value}" for name, value in dataset.source.items() if value not in (None, []))
    console.print(Text(f"{dataset.name}: {source}"))
    console.print(Text(f"tokenizer {dataset.tokenizer}, {dataset.vocab_size:,} ids, {dataset.dtype}"))
    table = Table()
    for column in ("split", "documents", "tokens", "bytes", "bytes/token", "shards"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name in SPLITS:
        split = dataset.split(name)
        ratio = f"{split.bytes / split.tokens:.2f}"
        counts = (split.documents, split.tokens, split.bytes)
        table.add_row(name, *(f"{count:,}" for count in counts), ratio, str(len(split.shards)))
    console.print(table)
    console.print(Text(f"content {dataset.content}"))
    ids = open_split(dataset, arguments.split).read(0, arguments.tokens)
    console.rule(f"the first {count_text(len(ids), 'token')} of {arguments.split}")
    console.print(Text(load_tokenizer(dataset.tokenizer).decode(ids)))
