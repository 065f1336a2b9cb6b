"""Compares predicted with published step times. Composes, compiles and replays every row of a table.

    python experiments/published/predict.py                          # every row; about two minutes each the first time
    python experiments/published/predict.py --only 22b v5p --max-chips 256
    python experiments/published/predict.py --rows FILE.csv --config-dir FOLDER --json results.json --markdown table.md
    python experiments/published/predict.py --kept                   # the tables again, without compiling
    python experiments/published/predict.py --rows experiments/published/gpu/rows.csv     # JAX programs on GPUs

`--rows` is any CSV with the columns of rows.csv (`row`, `experiment`, `overrides` and `step_s` are required).
`--config-dir` is a folder of your YAMLs, as for valkyrie-train; experiments can be in its `experiment/`. libtpu is
needed (`uv sync --extra tpu`), but no TPU; for GPUs, the extra `gpu-compile`, but no GPU. Rows that cannot be composed
or compiled, or do not fit, are reported with the reason. `--ship` writes the ratios of measured to replayed time, which
correct the prediction of every compile report.

Results are stored in `--json`. A rerun computes missing results, and those made by another program, replay or compiler.
If sources have changed, each row is lowered (seconds) to check whether its program has changed.

The prediction is the replayed time of the compiled step, multiplied by a factor for the chip and one for every doubling
of slices, as in `valkyrie-train mode=compile` (valkyrie/search/compile/correction.py). Both factors are fitted to
published runs. Those of a row are fitted without its whole family, so that no row is fitted to itself. If a source
gives FLOP/s or MFU instead of seconds, they were converted with the FLOP count of the source: 6 x parameters x tokens,
plus attention as if every token saw the whole sequence (MaxText's count until its issue 1988; PaLM, appendix B).

The tables also show two guesses that need no compiler (guesses.py). One is the time of the model's FLOPs at the median
MFU of other rows on the same chip, which uses measured times of similar runs. The other is the time of the model's
FLOPs and those of a recomputed forward pass, if any, at the peak of the chip.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.parts import format_category
from valkyrie.paths import write_atomic
from valkyrie.problems import raise_problems
from valkyrie.search.compile.cache import request_key
from valkyrie.search.compile.correction import PUBLISHED_FILE, PublishedRun, as_json, published_runs
from valkyrie.search.modes import compile_and_summarise

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from guesses import make_row  # noqa: E402  # beside this script
from programs import is_still_valid, program_digest, replay_digest  # noqa: E402
from tables import add_guesses, format_pair_table, format_tables, published_ratios  # noqa: E402

TIME_LIMIT = "mode.time_limit_s=7200"
"""The compiles of recipes that offload to host memory take longest, up to half an hour."""

REQUIRED_COLUMNS = ("row", "experiment", "overrides", "step_s")
"""Columns that every table must have. Rows with an empty `experiment` or `step_s` are listed but not compared."""


def main() -> None:
    """Predict the requested rows and print the predictions with the measured times."""
    args, console = parse_arguments(), Console(width=140, highlight=False)
    rows, runs, results = {}, {}, {}
    lines = [line for line in read_rows(args.rows) if is_selected(line, args)]
    for line in read_rows(args.rows):
        try:
            if is_comparable(line):
                run = compose_row(line, args.config_dir)
                rows[line["row"]], runs[line["row"]] = make_row(line, run), run
        except ValueError as error:
            results[line["row"]] = {"status": "refused", "reason": " ".join(str(error).split())}
    prediction_keys, stored = {name: prediction_key(run) for name, run in runs.items()}, read_stored_results(args.json)
    for name, result in stored.items():
        if (
            name in runs
            and "made_by" in result
            and is_still_valid(result, prediction_keys[name], compiler_version(runs[name]), runs[name])
        ):
            result["made_by"] = prediction_keys[name]
    for line in lines:
        name = line["row"]
        if name in runs and not args.kept:
            results[name] = reuse_or_predict(name, prediction_keys[name], runs[name], stored, console)
            stored[name] = {"row": name} | results[name]
            write_atomic(args.json, json.dumps(list(stored.values()), indent=1) + "\n")
            console.print(format_result(results[name], rows[name].measured_s, name), soft_wrap=True)
        elif name in runs:
            results[name] = stored.get(name, {"status": "not done", "reason": f"{args.json} has no result of it"})
        else:
            results.setdefault(name, {"status": "not comparable", "reason": line.get("note") or "says too little"})
    all_rows = list(rows.values())
    table_results = [{"row": n} | results[n] for n in (line["row"] for line in lines)]
    for result in [*stored.values(), *table_results]:
        name = result["row"]
        result["earlier"] = "made_by" in result and name in runs and result["made_by"] != prediction_keys[name]
    # With --kept, another table has only results of an earlier program to derive its corrections from.
    with_earlier = args.kept and args.rows.resolve() != HERE / "rows.csv"
    replayed = [r for r in stored.values() if with_earlier or not r["earlier"]]
    published = replace_published_runs(args, published_ratios(replayed, rows))
    table_results = [
        add_guesses(r, rows[r["row"]], all_rows, published) if r["row"] in rows else r for r in table_results
    ]
    table = format_tables(table_results, published) + "\n\n" + format_pair_table(table_results, all_rows)
    console.print(table, soft_wrap=True)
    if args.markdown:
        args.markdown.write_text(table + "\n")
    if args.ship:
        write_atomic(PUBLISHED_FILE, as_json(published))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. By default, `json` is results.json in the folder of the rows."""
    parser = argparse.ArgumentParser(description="Predicted against published step times.")
    parser.add_argument("--rows", type=Path, default=HERE / "rows.csv", help="a CSV of published runs")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own YAMLs, as valkyrie-train takes it")
    parser.add_argument("--only", nargs="*", default=[], help="only rows whose name holds one of these words")
    parser.add_argument("--max-chips", type=int, default=100_000, help="leave out larger slices")
    parser.add_argument("--json", type=Path, help="where results are kept (results.json beside the rows)")
    parser.add_argument("--kept", action="store_true", help="compile nothing: the tables of the kept results")
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    parser.add_argument("--ship", action="store_true", help="write the errors that reports hold predictions to")
    args = parser.parse_args()
    if args.ship and args.rows.resolve() != HERE / "rows.csv":
        parser.error("--ship is for the default table only")
    args.json = args.json or args.rows.with_name("results.json")
    return args


def replace_published_runs(args: argparse.Namespace, replayed_runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return the published runs that replay corrections are derived from.

    These are the runs that ship with the package. If `--rows` is the default `rows.csv`, the runs that this script has
    replayed, `replayed_runs`, replace all shipped runs of their families. Another table in this folder is corrected by
    its own runs only.
    """
    is_default = args.rows.resolve() == HERE / "rows.csv"
    if not is_default and HERE in args.rows.resolve().parents:
        return list(replayed_runs)
    replayed_runs = replayed_runs if is_default else []
    families = {run.family for run in replayed_runs}
    return [*(run for run in published_runs() if run.family not in families), *replayed_runs]


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the lines of a table, as dicts from column to text. Missing cells are "".

    Exits with a one-line message if the file cannot be read, has no rows, or lacks a required column.
    """
    try:
        with file.open(newline="") as text:
            lines = list(csv.DictReader(text))
    except OSError as error:
        sys.exit(f"--rows {file}: {error.strerror}")
    missing = [column for column in REQUIRED_COLUMNS if lines and column not in lines[0]]
    if missing or not lines:
        sys.exit(f"--rows {file}: {'no column ' + ', '.join(missing) if missing else 'no rows'}")
    return [{key: value or "" for key, value in line.items() if key} for line in lines]


def read_stored_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the results of earlier runs of this script, by row. Empty if the file does not exist."""
    return {result["row"]: result for result in json.loads(file.read_text())} if file.is_file() else {}


def is_selected(line: dict[str, str], args: argparse.Namespace) -> bool:
    """Return whether a row passes the `--only` and `--max-chips` filters."""
    is_named = not args.only or any(word in line["row"] for word in args.only)
    chips = line.get("chips") or "0"
    return is_named and (not chips.isdecimal() or int(chips) <= args.max_chips)


def is_comparable(line: dict[str, str]) -> bool:
    """Return whether a row has an experiment and a measured step time, which are needed to compare it."""
    return bool(line["experiment"] and line["step_s"])


def compose_row(line: dict[str, str], config_dir: Path | None = None) -> Run:
    """Return the run of a row. Raises ValueError with all problems if the run is illegal."""
    folder = [] if config_dir is None else ["--config-dir", str(config_dir.resolve())]
    overrides = [f"experiment={line['experiment']}", *line["overrides"].split(), "mode=compile", TIME_LIMIT]
    run = parse_run([*folder, *overrides])
    raise_problems(run.problems())
    return run


def reuse_or_predict(
    name: str, key: str, run: Run, stored: dict[str, dict[str, Any]], console: Console
) -> dict[str, Any]:
    """Return a row's result for `--json`.

    Reuses the stored result if its status is `ok` or `does_not_fit` and it is from the same program, compiler and
    replay (`key`). Otherwise compiles the run.

    `replayed_s` and `seconds` (by category) are replayed seconds per step before any correction. They are missing if
    the program was not replayed. `made_by` is `key`, and `program` the digest of the lowered program.
    """
    stored_result = stored.get(name, {})
    if stored_result.get("made_by") == key and stored_result["status"] in ("ok", "does_not_fit"):
        return stored_result
    try:
        compiled_run, prediction, _ = compile_and_summarise(run, console)
    except ValueError as error:
        return {"status": "refused", "reason": str(error), "made_by": key}
    result = {
        "status": compiled_run.status.value,
        "reason": prediction.reason,
        "made_by": key,
        "libtpu": compiler_version(run),
    }
    result["program"] = program_digest(run)
    if prediction.step is not None and prediction.step.replayed_s is not None:
        result["replayed_s"] = prediction.step.replayed_s
        correction = prediction.step.replayed_s / prediction.step.step_s
        result["seconds"] = {
            format_category(p.kind, p.mesh_axes): round(correction * p.seconds, 4) for p in prediction.parts
        }
    if prediction.memory is not None and prediction.memory.peak is not None:
        result["peak_gib"] = prediction.memory.peak / 2**30
    return result


def prediction_key(run: Run) -> str:
    """Return a key of everything that determines a prediction: the program, the compiler, and the replay's sources."""
    return f"{request_key(run)} {replay_digest(run)}"


def compiler_version(run: Run) -> str:
    """Return the installed version of the target's compiler (libtpu or jaxlib), or "not installed"."""
    try:
        return version(get_platform(run.config.target.platform).compiler_packages[0])
    except PackageNotFoundError:
        return "not installed"


def format_result(result: dict[str, Any], measured_s: float, name: str) -> str:
    """Return a one-line comparison of a row's replayed and measured times, or the reason that it was not replayed."""
    if "replayed_s" not in result:
        return f"{name}: {result['status']}: {result['reason']}"
    numbers = f"replayed {result['replayed_s']:.3f} s, measured {measured_s:.3f} s"
    return f"{name}: {numbers}, {100 * (result['replayed_s'] / measured_s - 1):+.1f}%  {result.get('seconds', '')}"


if __name__ == "__main__":
    main()
