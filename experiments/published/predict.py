"""Compares predicted with published step times: every row of rows.csv is composed, compiled and replayed.

    python experiments/published/predict.py                       # all rows; about two minutes each the first time
    python experiments/published/predict.py --rows 22b v5p --max-chips 256
    python experiments/published/predict.py --markdown table.md --json table.json

It needs libtpu (`pip install 'valkyrie-jax[tpu]'`) and no TPU. Nothing is fitted to a row: the prediction is the
replay of the compiled step, as `valkyrie-train mode=compile` prints it. Where a source gives FLOP/s or MFU in place of
seconds, its own count of FLOPs turned them into seconds: 6 x parameters x tokens, and attention as if every token saw
the whole sequence (MaxText counted so until its issue 1988; PaLM, appendix B).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from rich.console import Console

from valkyrie.compose import register
from valkyrie.run import Run
from valkyrie.search.modes import compile_and_summarise

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Predict the rows asked for and print them beside what was measured."""
    parser = argparse.ArgumentParser(description="Predicted against published step times.")
    parser.add_argument("--rows", nargs="*", default=[], help="only rows whose name holds one of these words")
    parser.add_argument("--max-chips", type=int, default=100_000, help="leave out larger slices")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    parser.add_argument("--json", type=Path, help="write every row's numbers here")
    asked = parser.parse_args()
    console, results = Console(width=140, highlight=False), []
    for row in read_rows():
        if asked.rows and not any(word in row["row"] for word in asked.rows):
            continue
        if row["chips"] and int(row["chips"]) > asked.max_chips:
            continue
        result = predict(row, console)
        console.print(describe(result), soft_wrap=True)
        results.append(result)
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1) + "\n")
    table = markdown(results)
    console.print(table, soft_wrap=True)
    if asked.markdown:
        asked.markdown.write_text(table + "\n")


def read_rows() -> list[dict[str, str]]:
    """Return the rows of rows.csv, with the reason in `note` where a row says too little to be composed."""
    with (HERE / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def compose_row(row: dict[str, str]) -> Run:
    """Return the legal run of a row; ValueError lists its problems."""
    overrides = [f"experiment={row['experiment']}", *row["overrides"].split(), "mode=compile"]
    with initialize_config_dir(str(register()), version_base="1.3"):
        run = Run.from_config(compose("train", overrides))
    if problems := run.problems():
        raise ValueError("\n".join(f"{row['row']}: {problem}" for problem in problems))
    return run


def predict(row: dict[str, str], console: Console) -> dict[str, Any]:
    """Return a row with the predicted and the measured seconds of a step, or the reason why there is no prediction."""
    if not row["experiment"] or not row["step_s"]:
        return {"row": row["row"], "layout": "", "status": "not comparable", "reason": row["note"]}
    run = compose_row(row)
    compiled, found, _ = compile_and_summarise(run, console)
    result = {"row": row["row"], "layout": run.layout.name, "status": compiled.status, "reason": found["reason"]}
    if compiled.status != "ok":
        return result
    measured, predicted = float(row["step_s"]), found["step"]["step_s"]
    peak = found["memory"]["peak"] / 2**30
    seconds = {key: round(value, 4) for key, value in found["seconds"].items()}
    return result | {
        "measured_s": measured,
        "predicted_s": predicted,
        "error": predicted / measured - 1,
        "peak_gib": peak,
        "parameters": found["parameters"],
        "seconds": seconds,
    }


def describe(result: dict[str, Any]) -> str:
    """Return one line about a row."""
    if "error" not in result:
        return f"{result['row']}: {result['status']}: {result['reason']}"
    numbers = f"predicted {result['predicted_s']:.3f} s, measured {result['measured_s']:.3f} s"
    return f"{result['row']}: {numbers}, {100 * result['error']:+.1f}%  {result['seconds']}"


def markdown(results: list[dict[str, Any]]) -> str:
    """Return the table, and the median and the worst error under it."""
    lines = ["| published run | layout | measured s | predicted s | error |", "|---|---|---:|---:|---:|"]
    for r in results:
        if "error" in r:
            numbers = f"{r['measured_s']:.3f} | {r['predicted_s']:.3f} | {100 * r['error']:+.1f}%"
        else:
            numbers = f" | {r['status']}: {r['reason']} | "
        lines.append(f"| {r['row']} | {r['layout']} | {numbers} |")
    errors = [abs(r["error"]) for r in results if "error" in r]
    if errors:
        median, worst = 100 * statistics.median(errors), 100 * max(errors)
        lines += ["", f"{len(errors)} rows: median absolute error {median:.1f}%, worst {worst:.1f}%."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
