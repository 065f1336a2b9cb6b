"""Measures how fast Parquet shards are streamed into batches, compared with tiktoken on the same texts and cores.

    python experiments/stream.py --mib 64

Writes shards of the functions and classes of the standard library. Then alternates between tiktoken's threads, with the
texts in memory, and batches from `data=parquet_stream` (open, decompress, tokenise, pack, assemble). Starting the
workers is not timed, because it happens once per run. Prints medians over `--repeats` turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sysconfig
import tempfile
import time
from functools import partial
from itertools import cycle
from pathlib import Path

import pyarrow as arrow
from pyarrow import parquet

from valkyrie.data.batches import make_loader
from valkyrie.data.chunks import Language, split_into_chunks
from valkyrie.data.sources.parquet_stream import Config, Packing
from valkyrie.data.stream import open_stream
from valkyrie.data.tokenizer import load_tokenizer
from valkyrie.data.vocabulary import TiktokenTokenizer

BATCH, SEQ, SHARDS = 32, 2048, 8
WARMUP_BATCHES = 12
"""Number of batches that are read before timing starts, because the loader may have prepared them in advance."""


def main() -> None:
    """Write the shards, then time the stream and tiktoken in alternation."""
    parser = argparse.ArgumentParser(description="Compare the speed of a stream of shards with that of tiktoken alone.")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = write_shards(Path(folder), args.mib * 2**20)
        measurements = {"tiktoken": lambda: tiktoken_speed(texts)}
        for packing in Packing:
            measurements[f"stream, packing={packing.value}"] = partial(stream_speed, Path(folder), packing, args.mib)
        rounds = [{name: run() for name, run in measurements.items()} for _ in range(args.repeats)]
    size = statistics.mean(map(len, texts))
    print(f"{args.mib} MiB of Python in {SHARDS} shards, documents of {size:,.0f} characters, {os.cpu_count()} cores")
    print("| | million tokens/s | relative to tiktoken |")
    print("|---|---:|---:|")
    for name in measurements:
        speed = statistics.median(speeds[name] for speeds in rounds) / 1e6
        ratio = statistics.median(speeds[name] / speeds["tiktoken"] for speeds in rounds)
        print(f"| {name} | {speed:.2f} | {ratio:.2f} |")


def write_shards(folder: Path, size: int) -> list[str]:
    """Write `SHARDS` Parquet files with at least `size` characters of text in total. Return the texts for training.

    These are the texts of all shards except the last one, which is for validation.
    """
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    function_texts = [
        text for path in paths for text in split_into_chunks(path.read_text(encoding="utf-8"), Language.python)
    ]
    texts: list[str] = []
    total = 0
    for text in cycle(function_texts):
        texts.append(text)
        total += len(text)
        if total >= size:
            break
    for shard in range(SHARDS):
        part = arrow.table({"text": texts[shard::SHARDS]})
        parquet.write_table(part, folder / f"{shard}.parquet", row_group_size=1024)
    return [text for shard in range(SHARDS - 1) for text in texts[shard::SHARDS]]


def tiktoken_speed(texts: list[str]) -> float:
    """Return tokens per second of tiktoken with one thread per core."""
    tokenizer = load_tokenizer("gpt2")
    assert isinstance(tokenizer, TiktokenTokenizer)
    start = time.perf_counter()
    tokens = tokenizer.encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
    return sum(map(len, tokens)) / (time.perf_counter() - start)


def stream_speed(folder: Path, packing: Packing, mib: int) -> float:
    """Return tokens per second of batches, over about one epoch of `mib` MiB of text (at 4 bytes per token)."""
    config = Config(paths=[str(folder)], packing=packing)
    data = open_stream(config, "gpt2")
    steps = mib * 2**20 // (4 * BATCH * SEQ)
    with make_loader(data, "train", batch=BATCH, seq=SEQ, seed=0, repeat=True) as loader:
        for _ in range(WARMUP_BATCHES):
            next(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(loader)
        return steps * BATCH * SEQ / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
