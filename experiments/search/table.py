"""Compares estimates with compiled steps of the layouts in spaces.py: order, errors, memory, and what fits.

    python experiments/search/table.py            # the table, with the default constants
    python experiments/search/table.py --fit      # each space with constants fitted to the other two; then fits all
    python experiments/search/table.py --ship     # write the errors that mode=search shows with its estimates
    python experiments/search/table.py --each     # every layout

The compiled steps are those that spaces.py has stored in compiled.json.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from spaces import ODD_MODELS, read_rows

from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.paths import write_atomic
from valkyrie.report.words import EQUAL_RATIO
from valkyrie.search.compiling import MIN_CHANCE
from valkyrie.search.correcting import EstimatedStep, correct_estimates
from valkyrie.search.estimate.efficiency import Efficiency, chip_efficiency
from valkyrie.search.estimate.fit import FITTED_CONSTANTS, TimedLayouts, cross_validate, fit_constants, timed_layouts
from valkyrie.search.estimate.runs import estimate_runs, stack_runs
from valkyrie.search.shortlist import ERRORS_FILE, estimate_errors
from valkyrie.train.memory import MemoryEstimator

PIPELINE_QUANTILES = {"pipeline_low": 0.9, "pipeline_high": 1.5}
"""Assumed 5% and 95% quantiles of compiled over estimated step times of pipelines. spaces.py compiles none.

Seven pipelines of three models took 0.96 to 1.08 times their estimate (experiments/LOG.md), but none was circular.
"""


def main() -> None:
    """Print the table of all spaces and, if requested, every layout (`--each`) or the fitted constants (`--fit`).

    With `--ship`, also writes the errors of the estimates.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for flag in ("--fit", "--ship", "--each"):
        parser.add_argument(flag, action="store_true")
    args, console = parser.parse_args(), Console(width=150, highlight=False)
    groups: dict[str, list[tuple[dict[str, Any], Run]]] = defaultdict(list)
    for row in read_rows():
        if row["space"] in ODD_MODELS and (args.fit or args.ship):
            continue
        run = parse_run(row["overrides"])
        groups[repr((row["space"], run.config.partition, run.config.remat))].append((row, run))
    timed_groups = {
        key: stack_compiled(pairs) for key, pairs in groups.items() if any(row["step_s"] for row, _ in pairs)
    }
    fitted_constants = FITTED_CONSTANTS if args.fit else ()
    estimates = {
        id(timed): seconds
        for timed, seconds in cross_validate(list(timed_groups.values()), Efficiency(), fitted_constants)
    }
    step_estimates: dict[str, list[tuple[dict[str, Any], float]]] = defaultdict(list)
    memory_estimates: dict[str, list[tuple[dict[str, Any], float]]] = defaultdict(list)
    for key, pairs in groups.items():
        rows = [row for row, _ in pairs]
        layouts = stack_runs([run for _, run in pairs])
        memory = MemoryEstimator(pairs[0][1], layouts).estimate(pairs[0][1].config.remat).total
        memory_estimates[rows[0]["space"]] += zip(rows, map(float, memory), strict=True)
        if key in timed_groups:
            compiled = [row for row in rows if row["step_s"]]
            step_estimates[rows[0]["space"]] += zip(compiled, map(float, estimates[id(timed_groups[key])]), strict=True)
    console.print(make_table(step_estimates, memory_estimates))
    for name, spaces in (("all spaces", memory_estimates), ("odd models", ODD_MODELS)):
        errors = [abs(e / row["peak"] - 1) for s in spaces for row, e in memory_estimates.get(s, []) if row["peak"]]
        if errors:
            console.print(f"memory of {name}: median error {100 * np.median(errors):.1f}% of {len(errors)} layouts")
    if args.each:
        for pairs in step_estimates.values():
            for row, estimate in pairs:
                ratio = estimate / row["step_s"]
                console.print(
                    f"{row['space']} {row['layout']}: {1e3 * row['step_s']:.1f} ms, estimated {ratio:.2f} of it"
                )
    if args.fit:
        console.print(fit_constants(list(timed_groups.values()), Efficiency(), fitted_constants))
    if args.ship:
        write_errors(step_estimates, memory_estimates)


def stack_compiled(pairs: list[tuple[dict[str, Any], Run]]) -> TimedLayouts:
    """Stack layouts of one partition and remat with their compiled step times. Leaves out those without a step time.

    The `family` is the space of the layouts, so that cross-validation leaves out a whole space at a time.
    """
    compiled = [(row, run) for row, run in pairs if row["step_s"]]
    return timed_layouts([run for _, run in compiled], [row["step_s"] for row, _ in compiled], compiled[0][0]["space"])


def make_table(step_estimates: dict[str, list[Any]], memory_estimates: dict[str, list[Any]]) -> Table:
    """Return a table with a line per space, which compares estimated with compiled step times and memory.

    Regret is how much slower the layout with the shortest estimate is than the fastest one. The last columns are those
    of `simulate_search`. `fit: right, unsure, wrong` counts layouts by the search's verdict: that the layout fits, that
    it may fit (`Shortlist.may_fit`), or that it does not fit.
    """
    table = Table()
    columns = ("layouts", "Spearman", "mean error", "median", "worst", "regret", "memory median")
    columns += ("fit: right, unsure, wrong", "search's regret", "compiles", "wasted", "of the time")
    for name in ("space", *columns):
        table.add_column(name, justify="left" if name == "space" else "right")
    for space in memory_estimates:
        compiled, estimated = (
            np.array(v) for v in zip(*((r["step_s"], e) for r, e in step_estimates[space]), strict=True)
        )
        errors = np.abs(estimated / compiled - 1)
        peaks = [(e, r["peak"]) for r, e in memory_estimates[space] if r["peak"]]
        memory_low, verdicts = estimate_errors().memory_low, Counter[str]()
        for row, estimate in memory_estimates[space]:
            is_unsure = memory_low * estimate <= row["usable"] < estimate
            is_right = (estimate <= row["usable"]) == (row["status"] == "ok")
            verdicts["unsure" if is_unsure else "right" if is_right else "wrong"] += 1
        regret = compiled[np.argmin(estimated)] / compiled.min() - 1
        values = [f"{spearmanr(compiled, estimated).statistic:.3f}"]
        values += [f"{100 * f(errors):.1f}%" for f in (np.mean, np.median, np.max)] + [f"{100 * regret:.1f}%"]
        values.append(f"{100 * np.median([abs(e / p - 1) for e, p in peaks]):.1f}%")
        funnel = simulate_search(step_estimates[space], [row for row, _ in memory_estimates[space]])
        values.append(", ".join(str(verdicts[verdict]) for verdict in ("right", "unsure", "wrong")))
        table.add_row(space, str(len(memory_estimates[space])), *values, *funnel)
    return table


def simulate_search(pairs: list[tuple[dict[str, Any], float]], all_rows: list[dict[str, Any]]) -> list[str]:
    """Simulate a search that compiles the layout with the best chance to be the fastest, as `mode=search` does.

    Returns table cells: how much slower the best layout found is than the fastest one, the number of compiles, how many
    of them took over 1.1 times the best one before, and their share of the time that compiling all layouts takes.

    Args:
        pairs: Rows with a compiled step time, each with its estimated seconds per step. Only these are compiled.
        all_rows: All rows of the space, including layouts that do not fit.
    """
    pending, compiled = dict(enumerate(estimated_steps(pairs))), list[tuple[EstimatedStep, float]]()
    best_s, spent_s, wasted = float("inf"), 0.0, 0
    while pending:
        times = dict(zip(pending, correct_estimates([*pending.values()], compiled), strict=True))
        index = min(times, key=lambda i: times[i].step_s)
        if compiled:
            index = max(times, key=lambda i: times[i].chance_below(best_s / EQUAL_RATIO))
            if times[index].chance_below(best_s / EQUAL_RATIO) < MIN_CHANCE:
                break
        row = pairs[index][0]
        compiled.append((pending.pop(index), row["step_s"]))
        wasted += row["step_s"] > 1.1 * best_s
        best_s, spent_s = min(best_s, row["step_s"]), spent_s + row["compile_s"]
    regret = best_s / min(row["step_s"] for row, _ in pairs) - 1
    share = spent_s / sum(row["compile_s"] for row in all_rows)
    return [f"{100 * regret:.1f}%", f"{len(compiled)} of {len(all_rows)}", str(wasted), f"{100 * share:.0f}%"]


def estimated_steps(pairs: list[tuple[dict[str, Any], float]]) -> list[EstimatedStep]:
    """Return the steps of rows of one space, each with its estimated seconds, for the correction of estimates."""
    runs = [parse_run(row["overrides"]) for row, _ in pairs]
    chip = runs[0].config.target.chip
    assert chip is not None
    steps = []
    for run, parts, (_, step_s) in zip(runs, estimate_runs(runs, chip_efficiency(chip)), pairs, strict=True):
        partition, has_pipeline = run.config.partition.name, run.layout.pipeline is not None
        mesh_partition = f"{run.config.mesh} {partition} {run.config.partition.schedule.value}"
        devices = run.config.mesh.size
        steps.append(EstimatedStep(chip.name, devices, partition, mesh_partition, has_pipeline, step_s, parts))
    return steps


def write_errors(step_estimates: dict[str, list[Any]], memory_estimates: dict[str, list[Any]]) -> None:
    """Write the errors of the estimates to `ERRORS_FILE`, from the ratios of compiled to estimated values.

    `low` and `high` bound the ratios of 90% of the step times, `memory_low` and `memory_high` those of 50% of the
    memory peaks. The medians are of absolute errors, |ratio - 1|.
    """
    ratios = [row["step_s"] / estimate for pairs in step_estimates.values() for row, estimate in pairs]
    peaks = [row["peak"] / estimate for pairs in memory_estimates.values() for row, estimate in pairs if row["peak"]]
    errors: dict[str, Any] = {"rows": len(ratios), "spaces": len(step_estimates)}
    for prefix, values, tail in (("", ratios, 0.05), ("memory_", peaks, 0.25)):
        low, high = (float(np.quantile(values, share)) for share in (tail, 1 - tail))
        errors |= {f"{prefix}low": low, f"{prefix}high": high}
        errors[f"{prefix}median"] = float(np.median(np.abs(np.array(values) - 1)))
    rounded = {key: round(value, 3) for key, value in (errors | PIPELINE_QUANTILES).items()}
    write_atomic(Path(ERRORS_FILE), json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
