"""Prints the claimed rate of each experiment, the rate at its chips' peak, and the rate of its predicted step.

    python experiments/promised.py            # compiles layouts that are not cached: some minutes each the first time
    python experiments/promised.py --kept     # the table of stored results (promised.json), without compiling
    python experiments/promised.py --only llama trm

An experiment's file has the fastest layout found. If the claim was made for a different layout, both are compiled. The
rate at the chips' peak is their peak FLOP/s over the model's FLOPs per token or puzzle. No layout exceeds it, and
published runs reach 40 to 70% of it. Needs libtpu (`uv sync --extra tpu`) but no TPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import valkyrie
from valkyrie.config.run import Run
from valkyrie.paths import write_atomic

RESULTS_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Claim:
    """The claimed rate and layout of an experiment.

    Args:
        experiment: Name of the experiment.
        rate: Claimed rate as text, or None if only a layout is claimed.
        overrides: Overrides of the experiment for the claimed layout, or empty if there is none.
        layout: Description of the claimed layout, or None if only a rate is claimed.
    """

    experiment: str
    rate: str | None = None
    overrides: tuple[str, ...] = ()
    layout: str | None = None


CLAIMS = [
    Claim(
        "valkyrie_1b_v4_64",
        None,
        ("partition=2d_tp", "microbatches=4"),
        "4x4x2, weights in two dimensions",
    ),
    Claim("nanochat_v5e8", "175,000 tokens/s"),
    Claim("nanochat_v6e4", "320,000 tokens/s"),
    Claim("nanochat_v6e4_16k", "470,000 to 630,000 tokens/s"),
    Claim("trm_sudoku_v4_64", "360,000 puzzles/s"),
    Claim(
        "llama_7b_v4_64",
        None,
        ("partition=data_model_fsdp", "microbatches=2", "remat=full", "remat.save=[]"),
        "data x model x fsdp = 4x4x2",
    ),
    Claim(
        "gpt_16b_v4_64",
        "42.5% MFU (Pax, measured)",
        ("mesh=4x2x4", "partition=fsdp_tp", "remat=full", "remat.save=[]"),
        "data 16 by model 2",
    ),
    Claim(
        "multihost_v5p_128",
        None,
        ("mesh=8x16x1", "partition=data_model_fsdp", "remat=full"),
        "data x model = 8x16",
    ),
]
"""Claims by the people who run these systems, except the rate of gpt_16b, which google/paxml reports as measured."""
LARGER_SLICES = {"multihost_v5p_128": ("target=v5p-256",)}
"""Overrides by experiment, for claimed layouts that need more chips than the experiment's slice has."""


def main() -> None:
    """Predict the step of each experiment and store the results, unless `--kept`, then print the table."""
    parser = argparse.ArgumentParser(
        description="Print the claimed rates of the experiments, the rates at the chips' peak, and the predicted rates."
    )
    parser.add_argument("--kept", action="store_true", help="compile nothing: print the table of stored results")
    parser.add_argument("--only", nargs="*", default=[], help="only experiments with one of these words in their name")
    args = parser.parse_args()
    stored = json.loads(RESULTS_FILE.read_text()) if RESULTS_FILE.is_file() else {}
    for claim in [] if args.kept else CLAIMS:
        if not args.only or any(word in claim.experiment for word in args.only):
            stored[claim.experiment] = compile_layouts(claim)
            write_atomic(RESULTS_FILE, json.dumps(stored, indent=1) + "\n")
    print(format_table(stored))


def compile_layouts(claim: Claim) -> dict[str, Any]:
    """Return the prediction of the experiment's layout as `best`, and of the claimed layout, if any, as `asked`."""
    results = {"best": predict_layout(claim, ())}
    if claim.overrides:
        results["asked"] = predict_layout(claim, claim.overrides)
    return results


def predict_layout(claim: Claim, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the prediction of an experiment with overrides, as numbers for the table.

    `count` is the number of tokens or puzzles per step, and `possible` is the rate at the chips' peak, in `unit`. If
    the overrides are illegal on the experiment's slice, those of `LARGER_SLICES` are added, and `refused` is the error
    message. Otherwise `refused` is None. Raises ValueError if the layout is illegal and `LARGER_SLICES` has no
    overrides for the experiment, or if these do not make it legal.
    """
    try:
        run, refused = compose_run(claim, overrides), None
    except ValueError as error:
        if not overrides or claim.experiment not in LARGER_SLICES:
            raise
        overrides = (*overrides, *LARGER_SLICES[claim.experiment])
        run, refused = compose_run(claim, overrides), str(error)
    print(f"{claim.experiment} {' '.join(overrides)}", flush=True)
    result = valkyrie.predict(run, quiet=True)
    target = run.config.target
    assert target.chip is not None and target.chips is not None
    peak = target.chips * target.slices * target.chip.peak_flops(run.config.precision.compute)
    count = run.config.batch * (run.config.seq if run.task.is_text else 1)
    return {
        "overrides": list(overrides),
        "refused": refused,
        "target": target.name,
        "layout": run.layout.name,
        "chips": target.chips * target.slices,
        "unit": "tokens/s" if run.task.is_text else "puzzles/s",
        "count": count,
        "possible": count * peak / run.step_flops,
        "status": result.status,
        "reason": result.reason,
        "step_s": result.step_s,
        "interval_s": result.interval_s,
        "mfu": result.mfu,
        "peak_gib": result.peak_gib,
        "usable_gib": target.chip.usable_hbm_gib,
        "libtpu": version("libtpu"),
    }


def compose_run(claim: Claim, overrides: Sequence[str]) -> Run:
    """Return the run of an experiment with overrides. Raises ValueError if it is illegal."""
    return valkyrie.compose(f"experiment={claim.experiment}", *overrides, "mode=compile")


def format_table(stored: dict[str, dict[str, Any]]) -> str:
    """Return the table in Markdown, with a row for each of the `CLAIMS` that has a stored result."""
    titles = ("claimed", "at the chips' peak", "claimed layout, predicted", "fastest layout found, predicted")
    lines = [f"| `+experiment=` | {' | '.join(titles)} |", "|---|---|---:|---|---|"]
    for claim in CLAIMS:
        results = stored.get(claim.experiment)
        if results is None:
            continue
        best_result, claimed_result = results["best"], results.get("asked")
        claimed = "; ".join(text for text in (claim.rate, claim.layout) if text)
        cells = [claimed, f"{best_result['possible']:,.0f} {best_result['unit']}"]
        cells += [
            "none" if claimed_result is None else format_prediction(claimed_result, best_result),
            format_prediction(best_result, best_result),
        ]
        lines.append(f"| `{claim.experiment}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_prediction(result: dict[str, Any], best_result: dict[str, Any]) -> str:
    """Return the table cell for a prediction, or the reason that it has no step time.

    The cell has the rate, step time, MFU, memory and layout. It begins with the slice if that differs from the one of
    `best_result`, and notes if the experiment's own slice was refused.
    """
    note = "" if result["target"] == best_result["target"] else f" on {result['target']}"
    if result["refused"]:
        note = f"refused: {best_result['chips']} chips;{note}"
    if result["status"] != "ok":
        return f"{note} {result['reason']}".strip()
    rate = f"{result['count'] / result['step_s']:,.0f} {result['unit']}"
    facts = [rate, f"{1e3 * result['step_s']:,.0f} ms", f"MFU {100 * result['mfu']:.1f}%"]
    facts.append(f"{result['peak_gib']:.1f} of {result['usable_gib']:.1f} GiB")
    return f"{note} {', '.join(facts)} (`{result['layout']}`)".strip()


if __name__ == "__main__":
    main()
