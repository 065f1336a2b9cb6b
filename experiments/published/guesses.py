"""Rows of a table of published runs, and guesses of their step times that need no compiler."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from valkyrie.config.run import Run

PRODUCTS_ONCE = ("none", "dots", "minimal", "minimal_with_context", "minimal_offloaded")
"""Remat policies that do not recompute products with weights."""


@dataclass(frozen=True)
class Row:
    """A published run.

    Args:
        row: Name of the row.
        family: Name shared by runs of one recipe on one chip, which are not independent.
        ideal_s: Seconds per step for the model's FLOPs at the peak of the chips.
        executed_ratio: Ratio of executed FLOPs, with rematerialisation, to the model's FLOPs.
        tokens_per_chip: Tokens per step and chip.
        measured_s: Published seconds per step.
    """

    row: str
    model: str
    family: str
    chip: str
    layout: str
    slices: int
    ideal_s: float
    executed_ratio: float
    tokens_per_chip: float
    measured_s: float


def make_row(line: dict[str, str], run: Run) -> Row:
    """Return the row for a line of the table and its composed run.

    If the table has no column `family`, the row's family is its model and chip. Raises ValueError if the line
    contradicts the run, if the target names no chip, or if `step_s` is not positive and finite.
    """
    config, chip = run.config, run.config.target.chip
    if chip is None:
        raise ValueError(f"target={config.target.name} names no chip, so no step time can be predicted for it.")
    chips = config.mesh.size // chip.devices
    if line.get("chips") and int(line["chips"]) != chips:
        raise ValueError(f"chips={line['chips']}, but mesh={config.mesh.name} has {chips}.")
    measured_s = float(line["step_s"])
    if not 0 < measured_s < float("inf"):
        raise ValueError(f"step_s={line['step_s']}: seconds above 0 are needed.")
    return Row(
        row=line["row"],
        model=run.model.name,
        family=line.get("family") or f"{run.model.name} on {chip.name}",
        chip=chip.name,
        layout=run.layout.name,
        slices=config.target.slices,
        ideal_s=run.step_flops / (chips * chip.peak_tflops["bfloat16"] * 1e12),
        executed_ratio=1.0 if run.layout_record().remat in PRODUCTS_ONCE else 4 / 3,
        tokens_per_chip=config.batch * config.seq / chips,
        measured_s=measured_s,
    )


def constant_mfu_s(row: Row, rows: Iterable[Row]) -> float | None:
    """Return the seconds per step at the median MFU of other rows on the same chip, or None if there are no others."""
    others = [other for other in rows if other.chip == row.chip and other.row != row.row]
    if not others:
        return None
    return row.ideal_s / statistics.median(other.ideal_s / other.measured_s for other in others)


def roofline_s(row: Row) -> float:
    """Return the seconds per step if all FLOPs run at the peak of the chip without waiting.

    Counts the model's FLOPs, times 4/3 if rematerialisation repeats the forward pass.
    """
    return row.ideal_s * row.executed_ratio


def ordered_pairs(rows: Sequence[Row], min_difference: float = 0.0) -> list[tuple[Row, Row]]:
    """Return all pairs of rows with the same model and chip, with the row with more measured tokens/s/chip first.

    Leaves out pairs with equal rates, or with rates that differ by a smaller fraction than `min_difference`.
    """
    pairs = []
    for i, first in enumerate(rows):
        for other in rows[i + 1 :]:
            if (first.model, first.chip) != (other.model, other.chip):
                continue
            slow, fast = sorted((first, other), key=lambda row: row.tokens_per_chip / row.measured_s)
            ratio = (fast.tokens_per_chip / fast.measured_s) / (slow.tokens_per_chip / slow.measured_s)
            if ratio > 1 + min_difference:
                pairs.append((fast, slow))
    return pairs
