"""Compiles layouts to evaluate the estimates of `mode=search`: three models, and ten of odd shapes.

    python experiments/search/spaces.py             # compile missing results; 20 to 120 s each on two cores
    python experiments/search/spaces.py --only gpt  # one of the spaces

A space has every division of 32 devices into three mesh axes that is legal under one of seven partitions. Layouts with
the same number of devices in every role count once, and an evenly spaced sample is compiled. Results come from the
replay of the compiled step and are stored in compiled.json. Step times are those before the correction by published
runs. The script needs libtpu (`uv sync --extra tpu`) but no TPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from valkyrie.axes import axes_text
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.remat import load_remat
from valkyrie.parts import format_category
from valkyrie.paths import read_group, write_atomic
from valkyrie.search.compile.prediction import MemoryReport
from valkyrie.search.modes import compile_and_summarise
from valkyrie.sweep.cells import Cell, enumerate_space
from valkyrie.sweep.layouts import sample_evenly
from valkyrie.sweep.space import MeshEquivalence, RunVariant, SpaceConfig

COMPILED_FILE = Path(__file__).with_name("compiled.json")
PARTITIONS = ("dp", "fsdp", "1d_tp", "2d_tp", "2d_tp_fsdp", "fsdp_tp", "sp")


@dataclass(frozen=True)
class ComparisonSpace:
    """A space of layouts to compile. Their compiled steps are compared with their estimates.

    Args:
        name: Name of the space.
        shared: Overrides of all layouts.
        remats: Remat policies to combine with each mesh and partition.
        microbatches: Numbers of microbatches to combine with each mesh and partition.
        count: Number of layouts to sample, or None for all.
    """

    name: str
    shared: tuple[str, ...]
    remats: tuple[str, ...] = ("full",)
    microbatches: tuple[int, ...] = (1,)
    count: int | None = None

    def cells(self) -> list[Cell]:
        """Return the legal layouts of the space, or `count` of them, evenly spaced."""
        shape = RunVariant(self.shared, parse_run(list(self.shared)))
        config = SpaceConfig(same=MeshEquivalence.roles, remat=list(self.remats), microbatches=list(self.microbatches))
        partitions = {p.name: p for p in read_group("partition", PartitionConfig)}
        remats = {name: load_remat(name) for name in self.remats}
        cells = enumerate_space(config, [shape], {name: partitions[name] for name in PARTITIONS}, remats)
        return sample_evenly(cells.legal, self.count)


ODD_MODELS = {
    "wide": "target=v5e-16 model=gpt_125m model.embed=1280 model.attention.heads=20 model.attention.kv_heads=20 "
    "model.layers=16 model.mlp=5120 batch=512 seq=1024",
    "small heads": "target=v5e-16 model=gpt_tiny model.embed=160 model.attention.heads=5 model.attention.kv_heads=5 "
    "model.attention.head_dim=16 model.context=32768 batch=32 seq=32768",
    "s5": "target=v5e-16 model=s5_125m batch=256 seq=1024",
    "4 heads": "target=v5e-16 model=gpt_125m model.attention.heads=4 model.attention.kv_heads=4 "
    "model.attention.head_dim=192 batch=256 seq=1024",
    "long": "target=v5e-16 model=gpt_125m model.context=16384 batch=32 seq=16384",
    "nanochat": "target=v5e-16 model=nanochat batch=256 seq=2048",
    "embed 896": "target=v5e-8 model=gpt_125m model.embed=896 model.attention.heads=14 model.attention.kv_heads=14 "
    "batch=256 seq=1024",
    "1 kv head": "target=v4-16 model=llama_7b model.embed=1536 model.mlp=4096 model.layers=8 model.attention.heads=12 "
    "model.attention.kv_heads=1 batch=128 seq=2048",
    "deep": "target=v5e-8 model=gpt_125m model.embed=512 model.attention.heads=8 model.attention.kv_heads=8 "
    "model.mlp=2048 model.layers=48 batch=128 seq=1024",
    "embed 640": "target=v4-16 model=valkyrie_125m model.embed=640 model.attention.heads=10 "
    "model.attention.kv_heads=10 model.context=4096 batch=128 seq=4096",
}
"""Overrides of models with unusual shapes, by name of the space. No constant of the estimate is fitted to them."""

SPACES = (
    ComparisonSpace(
        "gpt",
        ("target=v5e-32", "model=gpt_125m", "precision=bf16_mixed", "batch=128", "seq=1024"),
        remats=("full", "none"),
        count=64,
    ),
    ComparisonSpace(
        "valkyrie",
        ("target=v4-64", "model=valkyrie_1b", "precision=bf16_mixed", "batch=64", "seq=4096"),
        remats=("full", "none"),
        count=9,
    ),
    ComparisonSpace(
        "llama",
        ("target=v5p-64", "model=llama_7b", "precision=bf16_mixed", "batch=64", "seq=4096"),
        remats=("full", "none"),
        microbatches=(1, 2),
        count=16,
    ),
    *(
        ComparisonSpace(name, (*overrides.split(), "precision=bf16_mixed"), count=8)
        for name, overrides in ODD_MODELS.items()
    ),
)


def main() -> None:
    """Compile the layouts of the requested spaces that have no result yet, and store the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[space.name for space in SPACES])
    args, console = parser.parse_args(), Console(width=140, highlight=False)
    rows = read_rows()
    for space in SPACES:
        if args.only and space.name not in args.only:
            continue
        cells = space.cells()
        for number, cell in enumerate(cells, 1):
            if any(row["space"] == space.name and row["overrides"] == list(cell.overrides) for row in rows):
                continue
            row = compile_row(space.name, cell.run, cell.overrides)
            rows.append(row)
            write_atomic(COMPILED_FILE, json.dumps(rows, indent=0) + "\n")
            result = f"{1e3 * row['step_s']:.1f} ms" if row["step_s"] else row["reason"]
            console.print(
                f"{space.name} {number}/{len(cells)} {row['layout']}: {row['status']}, {result}", soft_wrap=True
            )


def read_rows() -> list[dict[str, Any]]:
    """Return the rows of compiled.json, or an empty list if it does not exist."""
    return json.loads(COMPILED_FILE.read_text()) if COMPILED_FILE.is_file() else []


def compile_row(space: str, run: Run, overrides: Sequence[str]) -> dict[str, Any]:
    """Compile a layout, and return its result as a row of compiled.json.

    `step_s` is the replayed time before its correction by published runs. `parts_s` (seconds by part) includes the
    correction. `sent` is bytes by mesh axes. If the layout does not compile or fit, `step_s` and `sent` are None,
    `parts_s` is empty, and `reason` is set. `peak` and `usable` are bytes of memory. If the layout does not fit, `peak`
    is the memory that it needs.
    """
    start_s = time.perf_counter()
    _, prediction, replay = compile_and_summarise(run, Console(quiet=True))
    memory, sent = prediction.memory or MemoryReport(), prediction.communication
    parts = [] if replay is None else replay.parts
    return {
        "space": space,
        "overrides": list(overrides),
        "layout": run.layout.name,
        "status": prediction.status.value,
        "reason": prediction.reason,
        "step_s": None if replay is None else round(replay.step_s / replay.correction, 6),
        "parts_s": {format_category(part.kind, part.mesh_axes): round(part.seconds, 6) for part in parts},
        "executed_flops": None if replay is None else replay.flops,
        "sent": None if sent is None else {axes_text(axes): size for axes, size in sent.by_mesh_axes.items()},
        "peak": memory.needed if memory.peak is None else memory.peak,
        "usable": memory.usable,
        "compile_s": round(time.perf_counter() - start_s, 1),
        "libtpu": prediction.versions.get("libtpu"),
    }


if __name__ == "__main__":
    main()
