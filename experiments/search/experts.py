"""Compares estimates with measured steps of mixtures of experts: does the order of FSDP and expert parallelism agree?

    python experiments/search/experts.py
    python experiments/search/experts.py --pairs     # every pair too

measured_experts.csv has the measurements and their sources. Rows of a group differ in one thing: the number of devices
that experts are split over (1 is FSDP), or the shape of the experts. Times of a layer are forward and backward passes
without optimizer, those of kind `relative` are quotients of published rates. `assumed` names what the source does not
give. Nothing is fitted to these rows.

By default, Valkyrie drops no tokens. Under expert parallelism, its devices have room for the assignments of all tokens
of their group. The measured programs have buffers of about the mean load. So there are two estimates: without a limit,
and with `model.moe.capacity_factor=1.25`.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.runs import estimate_runs

ROWS_FILE = Path(__file__).with_name("measured_experts.csv")
CAPACITY_FACTOR = 1.25
"""`model.moe.capacity_factor` of the second estimate."""
MIN_DIFFERENCE = 0.02
"""Pairs whose measured times differ by less have no order."""


@dataclass(frozen=True)
class Row:
    """A measurement: its line in the table, its seconds, and estimates without and with a limit of the buffers."""

    line: dict[str, str]
    measured_s: float
    dropless_s: float
    compact_s: float

    @property
    def group(self) -> tuple[str, str]:
        """Name and target of the row's group."""
        return self.line["group"], self.line["target"]

    @property
    def experts_over(self) -> int:
        """Number of devices that experts are split over."""
        return int(self.line["experts_over"])


def main() -> None:
    """Print the measured and estimated times of every row, and how often the estimates order pairs correctly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS_FILE)
    parser.add_argument("--pairs", action="store_true", help="print every pair too")
    args, console = parser.parse_args(), Console(width=150, highlight=False)
    with args.rows.open() as lines:
        rows = [estimate_row(line) for line in csv.DictReader(lines)]
    console.print(make_table(rows))
    console.print(make_summary(rows, "all rows"))
    console.print(make_summary([row for row in rows if row.line["kind"] != "layer"], "whole steps"))
    if args.pairs:
        for fast, slow in ordered_pairs(rows):
            verdicts = ", ".join(
                f"{name} {'right' if key(fast) < key(slow) else 'wrong'}" for name, key in ESTIMATES.items()
            )
            console.print(f"{' on '.join(fast.group)}: {describe(fast)} faster than {describe(slow)}: {verdicts}")


def estimate_row(line: dict[str, str]) -> Row:
    """Return a line of the table with the estimated seconds of both programs."""
    settings = [*line["settings"].split(), *line["layout"].split(), "mode=show", "model.tokenizer=bytes"]
    settings += [f"target={line['target']}", f"model.moe.dispatch={line['dispatch']}"]
    dropless, compact = (parse_run([*settings, f"model.moe.capacity_factor={n}"]) for n in ("null", CAPACITY_FACTOR))
    return Row(line, float(line["measured_s"]), estimate(dropless, line["kind"]), estimate(compact, line["kind"]))


def estimate(run: Run, kind: str) -> float:
    """Return the estimated seconds of a step, or without the optimizer if `kind` is `layer`."""
    chip = run.config.target.chip
    assert chip is not None
    parts = estimate_runs([run], chip_efficiency(chip))[0]
    return parts["step"] - (parts["optimizer"] if kind == "layer" else 0.0)


ESTIMATES = {"no limit": lambda row: row.dropless_s, "capacity_factor 1.25": lambda row: row.compact_s}
"""The estimates by name, each as a function of a row."""
GUESSES = {
    "always FSDP": lambda row: row.experts_over,
    "always EP over as many devices as possible": lambda row: -row.experts_over,
}
"""Trivial guesses of the order of rows that differ in the number of devices that experts are split over."""


def ordered_pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Return the pairs of rows of a group, the faster one first, except those within `MIN_DIFFERENCE`."""
    pairs = []
    for first, second in combinations(rows, 2):
        fast, slow = sorted((first, second), key=lambda row: row.measured_s)
        if first.group == second.group and slow.measured_s / fast.measured_s > 1 + MIN_DIFFERENCE:
            pairs.append((fast, slow))
    return pairs


def describe(row: Row) -> str:
    """Return the number of devices that experts are split over, or the number of experts of a row."""
    settings = dict(setting.split("=", 1) for setting in row.line["settings"].split() if "=" in setting)
    experts = settings.get("model.moe.experts")
    shape = f"{experts} experts of {settings['model.moe.mlp']}, " if experts else ""
    return f"{shape}{'FSDP' if row.experts_over == 1 else f'EP {row.experts_over}'}"


def make_table(rows: list[Row]) -> Table:
    """Return a table with a line per row."""
    table = Table()
    for name in ("measured group", "slice", "layout", "measured", *(f"{name}, estimated" for name in ESTIMATES)):
        table.add_column(name, justify="left" if name in ("measured group", "slice", "layout") else "right")
    for row in rows:
        is_relative = row.line["kind"] == "relative"
        estimates = [
            f"{1e3 * s:,.0f} ms" + ("" if is_relative else f" ({s / row.measured_s:.2f})")
            for s in (key(row) for key in ESTIMATES.values())
        ]
        measured = f"{row.measured_s:.2f} x" if is_relative else f"{1e3 * row.measured_s:,.0f} ms"
        table.add_row(*row.group, describe(row), measured, *estimates)
    return table


def make_summary(rows: list[Row], title: str) -> Table:
    """Return a table with a line per estimate and guess: pairs in the right order, best layouts, and regret.

    Regret is how much slower the layout that it chooses in a group is than the fastest one. Its mean is over groups
    that differ in the number of devices that experts are split over.
    """
    table = Table(title=title)
    for name in ("order by", "FSDP and EP: pairs right", "FSDP or EP right", "mean regret", "shapes: pairs right"):
        table.add_column(name, justify="left" if name == "order by" else "right")
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    groups = {key: group for key, group in groups.items() if len({row.experts_over for row in group}) > 1}
    pairs = ordered_pairs(rows)
    for name, key in (ESTIMATES | GUESSES).items():
        right = [key(fast) < key(slow) for fast, slow in pairs if fast.experts_over != slow.experts_over]
        shapes = [key(fast) < key(slow) for fast, slow in pairs if fast.experts_over == slow.experts_over]
        chosen = [(min(group, key=key), min(group, key=lambda row: row.measured_s)) for group in groups.values()]
        kinds = sum((a.experts_over == 1) == (b.experts_over == 1) for a, b in chosen)
        regret = np.mean([a.measured_s / b.measured_s - 1 for a, b in chosen])
        shape_text = f"{sum(shapes)} of {len(shapes)}" if name in ESTIMATES else ""
        table.add_row(
            name, f"{sum(right)} of {len(right)}", f"{kinds} of {len(chosen)}", f"{100 * regret:.0f}%", shape_text
        )
    return table


if __name__ == "__main__":
    main()
