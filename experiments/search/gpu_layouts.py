"""Compares estimates with measured layouts of GPU clusters: which layout they choose, and which layouts fit.

    python experiments/search/gpu_layouts.py
    python experiments/search/gpu_layouts.py --rows FILE.csv   # other rows with the columns of measured_gpu_layouts.csv
    python experiments/search/gpu_layouts.py --each            # also the 20 rows of each group with the largest errors

measured_gpu_layouts.csv has the layouts of two Llamas that nanotron ran on 8 to 512 H100s, mesh shapes of Alpa on
V100s, FSDP runs of llm-foundry, and their sources. Nothing is fitted to these rows. The constants are those of H100 and
A100 in `conf/target/chip`, except for those chosen by what the programs do (`NANOTRON_CONSTANTS`, `ALPA_CONSTANTS`).
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import gpus
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import rankdata

from valkyrie.config.arguments import parse_run
from valkyrie.hardware.target import ChipConfig
from valkyrie.parallel.candidates import AxisLinks, Candidates
from valkyrie.precision import PolicyConfig
from valkyrie.search.estimate.efficiency import Efficiency, chip_efficiency
from valkyrie.train.memory import MemoryEstimator

ROWS_FILE = Path(__file__).with_name("measured_gpu_layouts.csv")
NANOTRON_CONSTANTS = {"hidden_gradients": 0.9, "hidden_updates": 0.0}
"""Constants chosen by nanotron's code, and an assumed share of hidden time.

PyTorch's DistributedDataParallel sums gradients in buckets during the last backward pass. ZeRO-1 gathers all parameters
after the optimizer's step, when nothing else runs (huggingface/nanotron@069c21c src/nanotron/optim/zero.py).
"""
ALPA_CONSTANTS = {"mixing": 0.5, "scores_passes": 5.4, "hidden_weights": 0.0, "hidden_updates": 0.0}
"""Constants that follow from Alpa's program.

Its attention has no kernel, like that of the A100 runs of `gpus.py`, whose constants the first two are. In 2021, XLA's
collectives on GPUs were not asynchronous.
"""
CUBE_MESH_LINK_RATE = 25e9
"""Bytes per second of one NVLink 2 of a V100, in each direction."""
CUBE_MESH_RINGS = {(2, 1): 1, (2, 2): 1, (2, 4): 2, (4, 1): 4, (4, 2): 2, (8, 1): 6}
"""Number of rings that NVLinks form in a p3.16xlarge (DGX-1V), by the number of devices and the stride between them.

Device 0 has one link each to devices 1 and 2, and two each to devices 3 and 4 (NVIDIA DGX-1 white paper).
"""
LARGE_CLUSTER = 128
"""Number of GPUs from which a second mean counts groups."""
SAME_TIME = 0.005
"""Runs whose step times differ by less than this share are left out of pairs."""


@dataclass(frozen=True)
class Layout:
    """A measured layout with its estimates.

    Args:
        line: Its line in the table.
        estimated_s: Estimated seconds per step.
        estimated_bytes: Estimated peak memory per device, in bytes.
        usable_bytes: Memory of a device, in bytes.
    """

    line: dict[str, str]
    estimated_s: float
    estimated_bytes: float
    usable_bytes: float

    @property
    def step_s(self) -> float:
        """Measured seconds per step, or NaN if the layout did not run."""
        return float(self.line["step_time_s"] or "nan")

    @property
    def fits(self) -> bool:
        """Whether the layout fits by estimate."""
        return self.estimated_bytes <= self.usable_bytes

    @property
    def measured_bytes(self) -> float:
        """Measured peak memory in bytes, or NaN if unknown."""
        return float(self.line["memory_gib"] or "nan") * 2**30

    @property
    def model_parallelism(self) -> int:
        """Devices that share a copy of the model: of tensor and pipeline parallelism."""
        return int(self.line["tp"]) * int(self.line["pp"])

    def __str__(self) -> str:
        names = ("dp", "fsdp", "tp", "pp", "zero", "micro_bs")
        return " ".join(f"{name}={self.line[name]}" for name in names if self.line[name])


def main() -> None:
    """Print the table of nanotron's layouts, Alpa's pairs and which rows fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS_FILE)
    parser.add_argument("--each", action="store_true", help="print the rows with the largest errors of each model too")
    args, console = parser.parse_args(), Console(width=160, highlight=False)
    groups = estimate_groups(args.rows)
    console.print(make_choice_table({name: g for name, g in groups.items() if name.startswith("nanotron")}))
    alpa = [layouts for name, layouts in groups.items() if name.startswith("alpa")]
    if alpa:
        right, count = np.sum([count_pairs(layouts) for layouts in alpa], axis=0)
        console.print(f"Alpa's pairs of layouts with the same model and GPUs: {right} of {count} in order")
    console.print(make_fit_table(groups))
    if args.each:
        for name, layouts in groups.items():
            measured = [layout for layout in layouts if layout.step_s > 0]
            for layout in sorted(measured, key=lambda one: -abs(np.log(one.estimated_s / one.step_s)))[:20]:
                console.print(f"{name} {layout}: {layout.step_s:.3f} s, estimated {layout.estimated_s:.3f}")


def estimate_groups(file: Path) -> dict[str, list[Layout]]:
    """Return the rows of a file with their estimates, by group."""
    with file.open() as lines:
        rows = [_parse_row(line) for line in csv.DictReader(lines)]
    groups: dict[str, list[Layout]] = defaultdict(list)
    for similar_rows in gpus.group_rows(rows):
        timed = gpus.stack_rows(similar_rows)
        if timed.family.startswith("alpa"):
            timed = replace(timed, layouts=replace(timed.layouts, links=cube_mesh_links(timed.layouts)))
        seconds = timed.estimate(_constants(timed.chip, timed.family))
        memory = MemoryEstimator(timed.work.run, timed.layouts, timed.chip).estimate(timed.remat)
        master_bytes = memory.optimizer / 2 if is_nanotron(timed.family) else 0.0
        usable_bytes = (timed.chip.usable_hbm_gib or np.inf) * 2**30
        for row, step_s, peak in zip(similar_rows, seconds, memory.total + master_bytes, strict=True):
            groups[timed.family].append(Layout(row.line, float(step_s), float(peak), usable_bytes))
    return dict(groups)


def make_choice_table(groups: dict[str, list[Layout]]) -> Table:
    """Return a table of how fast the layouts are that estimates choose, as shares of the fastest measured layout.

    Compares layouts with the most common batch of their group. The choice is the layout with the shortest estimate
    among those that fit by estimate. The last two lines are means of all groups, and of those with at least
    `LARGE_CLUSTER` GPUs.
    """
    table = Table()
    shares = ("choice", "best of 3", "smallest MP", "best of 3 smallest MP", "any layout")
    for name in ("group", "layouts", "fastest, tokens/s/GPU", *shares, "Spearman", "median error"):
        table.add_column(name, justify="left" if name == "group" else "right")
    results: list[tuple[int, list[float]]] = []
    for group, layouts in groups.items():
        timed = [layout for layout in layouts if layout.step_s > 0]
        same_batch = [layout for layout in timed if layout.line["gbs_seqs"] == _common_batch(timed)]
        if not same_batch:
            continue
        line, fastest_s = same_batch[0].line, min(layout.step_s for layout in same_batch)
        chips, tokens = int(line["chips"]), int(line["gbs_seqs"]) * int(line["seq_len"])
        values = compare_choices(same_batch)
        results.append((chips, values))
        texts = [f"{value:.2f}" for value in values[:-1]] + [f"{100 * values[-1]:.0f}%"]
        table.add_row(group, str(len(same_batch)), f"{tokens / fastest_s / chips:,.0f}", *texts)
    for name, least in (("mean", 0), (f"mean of {LARGE_CLUSTER} GPUs or more", LARGE_CLUSTER)):
        rows = [values for chips, values in results if chips >= least]
        if rows:
            means = np.mean(rows, axis=0)
            table.add_row(name, "", "", *(f"{value:.2f}" for value in means[:-1]), f"{100 * means[-1]:.0f}%")
    return table


def _common_batch(layouts: Sequence[Layout]) -> str:
    return Counter(layout.line["gbs_seqs"] for layout in layouts).most_common(1)[0][0]


def compare_choices(layouts: Sequence[Layout]) -> list[float]:
    """Return the values of a row of `make_choice_table`.

    The first five are shares of the fastest layout's rate: that of the choice, of the fastest of three choices, both of
    these with another rule, and the mean of all layouts. The other rule is the smallest model parallelism, then the
    largest microbatch, then the shorter measured time. The last two are the rank correlation of estimates with measured
    times, and the median error of estimates.
    """
    measured_s, estimated_s = (np.array([getattr(one, name) for one in layouts]) for name in ("step_s", "estimated_s"))
    rates = measured_s.min() / measured_s
    fits = np.array([layout.fits for layout in layouts])
    by_estimate = np.argsort(np.where(fits, estimated_s, np.inf))
    sizes = [(one.model_parallelism, -int(one.line["micro_bs"]), one.step_s) for one in layouts]
    by_size = sorted(range(len(layouts)), key=sizes.__getitem__)
    shares = [share for order in (by_estimate, by_size) for share in (rates[order[0]], rates[order[:3]].max())]
    order = float(np.corrcoef(rankdata(measured_s), rankdata(estimated_s))[0, 1])
    return [*map(float, shares), float(rates.mean()), order, float(np.median(np.abs(estimated_s / measured_s - 1)))]


def count_pairs(layouts: Sequence[Layout]) -> tuple[int, int]:
    """Return how many pairs of layouts the estimates put in the measured order, and how many pairs there are.

    Leaves out layouts that did not run, and pairs with the same time (`SAME_TIME`).
    """
    pairs = [
        (a, b)
        for a, b in itertools.combinations([layout for layout in layouts if layout.step_s > 0], 2)
        if abs(a.step_s / b.step_s - 1) > SAME_TIME
    ]
    return sum((a.step_s < b.step_s) == (a.estimated_s < b.estimated_s) for a, b in pairs), len(pairs)


def make_fit_table(groups: dict[str, list[Layout]]) -> Table:
    """Return a table by source: how many layouts fit by estimate, and the ratios of estimated to measured memory."""
    table = Table()
    for name in ("rows", "ran: fits", "ran: does not", "out of memory: does not", "out of memory: fits", "right"):
        table.add_column(name, justify="left" if name == "rows" else "right")
    table.add_column("estimated / measured memory: median, p10 to p90", justify="right")
    by_source: dict[str, list[Layout]] = defaultdict(list)
    for group, layouts in groups.items():
        for name in (group.split("_")[0], "all"):
            by_source[name] += layouts
    for name in [*(name for name in by_source if name != "all"), "all"]:
        layouts = by_source[name]
        counts = Counter((layout.line["fits"], layout.fits) for layout in layouts)
        right = counts["yes", True] + counts["no", False]
        ratios = [one.estimated_bytes / one.measured_bytes for one in layouts if one.measured_bytes > 0]
        spread = ", ".join(f"{n:.2f}" for n in np.percentile(ratios, (50, 10, 90))) if ratios else ""
        cells = [counts[key] for key in (("yes", True), ("yes", False), ("no", False), ("no", True))]
        table.add_row(name, *map(str, cells), f"{right} of {len(layouts)} ({right / len(layouts):.0%})", spread)
    return table


def _parse_row(line: dict[str, str]) -> gpus.Row:
    """Return the row of a line, with the columns of measured_gpus.csv that this table does not have."""
    # Only the first stage of a pipeline has the embedding, and only the last has the unembedding: each has one table.
    line = {"n_kv_heads": "", "vpp": ""} | line | ({} if line["pp"] == "1" else {"tied": "1"})
    run = gpus.read_run(line).changed(precision=_precision(line["precision"]))
    return gpus.Row(line, run, float(line["step_time_s"] or "nan"))


@cache
def _precision(name: str) -> PolicyConfig:
    return parse_run(["model=gpt_1b", *f"precision={name}".split(), "mode=show"]).config.precision


def is_nanotron(family: str) -> bool:
    """Check whether a group ran nanotron, which also stores its parameters in float32 (the size of an AdamW moment)."""
    return family.startswith(("nanotron", "bench-cluster"))


def cube_mesh_links(layouts: Candidates) -> dict[str, AxisLinks]:
    """Return the links of mesh axes in a host of eight V100s (`CUBE_MESH_RINGS`)."""
    links_by_axis, stride = {}, np.ones(len(layouts), int)
    for axis in reversed(list(layouts.sizes)):
        size = layouts.sizes[axis]
        counts = [CUBE_MESH_RINGS.get((int(n), int(step)), 1) for n, step in zip(size, stride, strict=True)]
        rate = np.array(counts) * CUBE_MESH_LINK_RATE
        links_by_axis[axis] = replace(layouts.links[axis], inner_rate=rate, ring_rate=rate, exchange_rate=rate)
        stride = stride * size
    return links_by_axis


def _constants(chip: ChipConfig, family: str) -> Efficiency:
    efficiency = chip_efficiency(chip)
    if is_nanotron(family):
        return replace(efficiency, **NANOTRON_CONSTANTS)
    return replace(efficiency, **ALPA_CONSTANTS) if family.startswith("alpa") else efficiency


if __name__ == "__main__":
    main()
