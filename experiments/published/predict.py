"""Compares predicted with published step times: every row of rows.csv is composed, compiled and replayed.

    python experiments/published/predict.py                       # all rows; about two minutes each the first time
    python experiments/published/predict.py --rows 22b v5p --max-chips 256
    python experiments/published/predict.py --markdown table.md --json table.json

It needs libtpu (`uv sync --extra tpu`) and no TPU. Nothing is fitted to a row: the prediction is the
replay of the compiled step, as `valkyrie-train mode=compile` prints it. Where a source gives FLOP/s or MFU in place of
seconds, its own count of FLOPs turned them into seconds: 6 x parameters x tokens, and attention as if every token saw
the whole sequence (MaxText counted so until its issue 1988; PaLM, appendix B).

Beside each prediction stands what a trivial guess would say: the FLOPs of the model at the median MFU of the other rows
on the same chip. That guess has seen measured times of its neighbours; the prediction has seen none.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from rich.console import Console

from valkyrie.compose import register
from valkyrie.run import Run
from valkyrie.search.modes import compile_and_summarise

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Work:
    """A published row: its seconds at the peak of its chips, by the model's FLOPs, and as measured."""

    row: str
    chip: str
    ideal_s: float
    measured_s: float


def main() -> None:
    """Predict the rows asked for and print them beside what was measured."""
    parser = argparse.ArgumentParser(description="Predicted against published step times.")
    parser.add_argument("--rows", nargs="*", default=[], help="only rows whose name holds one of these words")
    parser.add_argument("--max-chips", type=int, default=100_000, help="leave out larger slices")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    parser.add_argument("--json", type=Path, help="write every row's numbers here")
    asked = parser.parse_args()
    console, results = Console(width=140, highlight=False), []
    rows = read_rows()
    works = [work_of(row) for row in rows if comparable(row)]
    for row in rows:
        if asked.rows and not any(word in row["row"] for word in asked.rows):
            continue
        if row["chips"] and int(row["chips"]) > asked.max_chips:
            continue
        result = predict(row, works, console)
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


def comparable(row: dict[str, str]) -> bool:
    """Return whether a row states enough to be composed and compared."""
    return bool(row["experiment"] and row["step_s"])


def work_of(row: dict[str, str]) -> Work:
    """Return what a trivial guess needs of a row."""
    run = compose_row(row)
    chip, chips = run.config.target.chip, int(row["chips"])
    assert chip is not None
    return Work(
        row["row"], chip.name, run.step_flops / (chips * chip.peak_tflops["bfloat16"] * 1e12), float(row["step_s"])
    )


def trivial_guess(row: str, works: list[Work]) -> float:
    """Return the seconds of a step at the median MFU of the other rows on the same chip."""
    (own,) = (work for work in works if work.row == row)
    others = [work for work in works if work.chip == own.chip and work.row != row]
    return own.ideal_s / statistics.median(work.ideal_s / work.measured_s for work in others)


def predict(row: dict[str, str], works: list[Work], console: Console) -> dict[str, Any]:
    """Return a row with the predicted and the measured seconds of a step, or the reason why there is no prediction."""
    if not comparable(row):
        return {"row": row["row"], "layout": "", "status": "not comparable", "reason": row["note"]}
    run = compose_row(row)
    compiled, found, _ = compile_and_summarise(run, console)
    result = {"row": row["row"], "layout": run.layout.name, "status": compiled.status, "reason": found["reason"]}
    if compiled.status != "ok":
        return result
    measured, predicted = float(row["step_s"]), found["step"]["step_s"]
    peak = found["memory"]["peak"] / 2**30
    seconds = {key: round(value, 4) for key, value in found["seconds"].items()}
    guess = trivial_guess(row["row"], works)
    return result | {
        "libtpu": version("libtpu"),
        "measured_s": measured,
        "predicted_s": predicted,
        "error": predicted / measured - 1,
        "guessed_s": guess,
        "guess_error": guess / measured - 1,
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
    lines = ["| published run | layout | measured s | predicted s | error | constant MFU s | error |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for r in results:
        if "error" in r:
            numbers = f"{r['measured_s']:.3f} | {r['predicted_s']:.3f} | {100 * r['error']:+.1f}% | "
            numbers += f"{r['guessed_s']:.3f} | {100 * r['guess_error']:+.1f}%"
        else:
            numbers = f" | {r['status']}: {r['reason']} | | | "
        lines.append(f"| {r['row']} | {r['layout']} | {numbers} |")
    predicted = [r for r in results if "error" in r]
    if predicted:
        versions = ", ".join(sorted({r["libtpu"] for r in predicted}))
        said = f"{len(predicted)} rows, libtpu {versions}: predicted {_errors(predicted, 'error')}; "
        lines += ["", f"{said}constant MFU of the chip's other rows {_errors(predicted, 'guess_error')}."]
    return "\n".join(lines)


def _errors(results: list[dict[str, Any]], key: str) -> str:
    errors = [100 * abs(r[key]) for r in results]
    return f"median absolute error {statistics.median(errors):.1f}%, worst {max(errors):.1f}%"


if __name__ == "__main__":
    main()
