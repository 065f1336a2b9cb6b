"""Measures how long a save blocks training, and how fast durable and fast checkpoints are saved and restored.

    python experiments/checkpoints.py --gib 1 --folder /var/tmp/checkpoints --fast /dev/shm/checkpoints

Prints medians over `--repeats` saves of a state of about `--gib` GiB on one CPU device (parameters and two moments),
and their ratios to the time of copying or reading the same files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from valkyrie.checkpoint import CheckpointConfig, Checkpoints, FastConfig
from valkyrie.train.state import TrainState

LAYERS = 16
"""Number of arrays in each of the three trees of the state: the parameters and two moments."""


def main() -> None:
    """Measure both tiers of checkpoints and print a table with a row for each."""
    parser = argparse.ArgumentParser(description="Time saves and restores of both tiers of checkpoints.")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5, help="number of saves in each tier")
    parser.add_argument("--folder", type=Path, required=True, help="folder for durable checkpoints")
    parser.add_argument("--fast", type=Path, required=True, help="folder for fast checkpoints")
    args = parser.parse_args()
    for folder in (args.folder, args.fast):
        if folder.exists():
            parser.error(f"{folder} exists, and this measurement deletes its folders. Name a new folder.")
    jax.config.update("jax_platforms", "cpu")
    state = make_state(int(args.gib * 2**30 / (3 * LAYERS * 4)))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    print(f"state of {size / 2**30:.2f} GiB; medians of {args.repeats}")
    print("| tier | training waits | save | restore | copy of the same files | restore / read of them |")
    print("|---|---:|---:|---:|---:|---:|")
    for tier, folder in (("durable", args.folder), ("fast", args.fast)):
        row = measure(tier, state, folder, args.repeats)
        print(f"| {tier} | {' | '.join(row)} |")


def make_state(size: int) -> TrainState:
    """Return a state of parameters and two moments, each with `LAYERS` arrays of `size` float32 values."""
    key = jax.random.key(0)
    trees = [{f"layer{i}": jax.random.normal(jax.random.fold_in(key, i), (size,)) for i in range(LAYERS)}] * 3
    parameters, first_moment, second_moment = (
        jax.tree.map(lambda x, n=n: x * n, tree) for n, tree in enumerate(trees, start=1)
    )
    return TrainState(
        jnp.int32(0), parameters, {"mu": first_moment, "nu": second_moment}, None, jax.random.key_data(key)
    )


def measure(tier: str, state: TrainState, folder: Path, repeats: int) -> list[str]:
    """Return the cells of a tier's row. `tier` is `durable` or `fast`. Creates `folder`, and deletes it at the end.

    The first four cells are seconds: how long a save blocks training, and the times of a whole save, of a restore, and
    of copying the saved files. The first two are also shown as multiples of the copy. The last cell is the time of a
    restore as a multiple of reading the files. All are medians of `repeats` saves, which follow a warm-up. Raises
    OSError if a save fails.
    """
    config = CheckpointConfig(keep=1, fast=FastConfig(every=1, folder=str(folder / "fast"), keep=1))
    checkpoints = Checkpoints(folder / "run", config)
    tier_checkpoints = checkpoints.durable if tier == "durable" else checkpoints.fast
    assert tier_checkpoints is not None
    waits, saves, restores, copies, reads = [], [], [], [], []
    abstract_state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for step in range(1, repeats + 2):
        start = time.perf_counter()
        if error := tier_checkpoints.save(step, state, {}):
            raise OSError(error)
        waits.append(time.perf_counter() - start)
        if error := tier_checkpoints.wait():
            raise OSError(error)
        os.sync()
        saves.append(time.perf_counter() - start)
        copies.append(
            measure_seconds(lambda step=step: copy_and_sync(tier_checkpoints.folder_of(step), folder / "copy"))
        )
        restores.append(measure_seconds(lambda: jax.block_until_ready(checkpoints.restore(abstract_state).state)))
        reads.append(measure_seconds(lambda step=step: read_all(tier_checkpoints.folder_of(step))))
    checkpoints.close()
    shutil.rmtree(folder)
    wait_s, save_s, restore_s, copy_s, read_s = (
        statistics.median(t[1:]) for t in (waits, saves, restores, copies, reads)
    )
    save_cells = [f"{wait_s:.2f} s ({wait_s / copy_s:.2f}x copy)", f"{save_s:.2f} s ({save_s / copy_s:.2f}x copy)"]
    return [*save_cells, f"{restore_s:.2f} s", f"{copy_s:.2f} s", f"{restore_s / read_s:.2f}x of {read_s:.2f} s"]


def measure_seconds(work: Callable[[], object]) -> float:
    """Call `work` and return the seconds it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_and_sync(source: Path, target: Path) -> None:
    """Copy a folder and flush it to disk."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    os.sync()


def read_all(folder: Path) -> int:
    """Read all files of a folder and return their number of bytes."""
    return sum(len(path.read_bytes()) for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
