"""Compares predicted with published step times: every row of rows.yaml is composed, compiled and replayed.

    python experiments/published/predict.py                       # all rows; about two minutes each the first time
    python experiments/published/predict.py --rows 22b v5p --max-chips 256
    python experiments/published/predict.py --markdown table.md --json table.json

It needs libtpu (`pip install 'valkyrie-jax[tpu]'`) and no TPU. Nothing is fitted to a row: the prediction is the
replay of the compiled step, as `valkyrie-train mode=compile` prints it. Where a source gives FLOP/s, its own count of
FLOPs turns them into seconds: 6 x parameters x tokens, and attention as if every token saw the whole sequence (MaxText
counted so until its issue 1988; Pax as in PaLM's appendix B).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
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
        run = compose_row(row)
        if asked.rows and not any(word in row["row"] for word in asked.rows):
            continue
        if run.config.mesh.size > asked.max_chips:
            continue
        result = predict(row, run, console)
        console.print(describe(result), soft_wrap=True)
        results.append(result)
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1) + "\n")
    table = markdown(results)
    console.print(table, soft_wrap=True)
    if asked.markdown:
        asked.markdown.write_text(table + "\n")


def read_rows() -> list[dict[str, Any]]:
    """Return the rows of rows.yaml."""
    rows = OmegaConf.to_container(OmegaConf.load(HERE / "rows.yaml"))
    assert isinstance(rows, list)
    return rows


def compose_row(row: dict[str, Any]) -> Run:
    """Return the legal run of a row; ValueError lists its problems."""
    overrides = [f"experiment=published/{row['experiment']}", f"target={row['target']}", "mode=compile"]
    slices = row.get("slices", 1)
    with initialize_config_dir(str(register()), version_base="1.3"):
        base = Run.from_config(compose("train", overrides + ([f"mesh={row['mesh']}"] if "mesh" in row else [])))
        mesh = f"{slices}s{base.config.mesh.name}" if slices > 1 else base.config.mesh.name
        batch = row.get("batch", base.config.batch) * slices
        overrides += [f"mesh={mesh}", f"batch={batch}", f"target.slices={slices}"]
        run = Run.from_config(compose("train", overrides))
    if problems := run.problems():
        raise ValueError("\n".join(f"{row['row']}: {problem}" for problem in problems))
    return run


def measured_seconds(row: dict[str, Any], run: Run, parameters: int) -> float:
    """Return the published seconds of a step, from what the source prints."""
    if "seconds" in row:
        return float(row["seconds"])
    config, chip, attention = run.config, run.config.target.chip, run.model.attention
    assert chip is not None
    tokens = config.batch * config.seq
    pairs = 12 * run.model.layers * attention.heads * attention.head_dim * config.seq
    flops = (6 * parameters + pairs) * tokens / (config.mesh.size / chip.devices)
    tflops = row["tflops"] if "tflops" in row else row["mfu"] * chip.peak_tflops["bfloat16"]
    return flops / (tflops * 1e12)


def predict(row: dict[str, Any], run: Run, console: Console) -> dict[str, Any]:
    """Return a row with the predicted and the measured seconds of a step, or the reason why there is no prediction."""
    compiled, found, _ = compile_and_summarise(run, console)
    result = {"row": row["row"], "layout": run.layout.name, "status": compiled.status, "reason": found["reason"]}
    if compiled.status != "ok":
        return result
    measured, predicted = measured_seconds(row, run, found["parameters"]), found["step"]["step_s"]
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
            numbers = f" | {r['status']} | "
        lines.append(f"| {r['row']} | {r['layout']} | {numbers} |")
    errors = [abs(r["error"]) for r in results if "error" in r]
    if errors:
        median, worst = 100 * statistics.median(errors), 100 * max(errors)
        lines += ["", f"{len(errors)} rows: median absolute error {median:.1f}%, worst {worst:.1f}%."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
