"""Predicts our program and MaxText's program for the same work, with the same compiler and the same replay.

    python experiments/foreign/compare.py                        # every case of cases.yml, and the table
    python experiments/foreign/compare.py 1b_v4_64 22b_v4_128    # some
    python experiments/foreign/compare.py --markdown foreign.md --json foreign.json

The script runs in an environment with MaxText 0.2.5 and this package (experiments/README.md), so that the same libtpu
compiles both programs. Compiling MaxText's program takes minutes. Its compiled modules are stored in `--modules`, and
ours in the cache of programs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

import valkyrie
from valkyrie.hardware.position import Position
from valkyrie.parts import format_category

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Compile missing programs, print the table, and write the requested files."""
    parser = argparse.ArgumentParser(description="Our program and MaxText's, predicted by the same compiler.")
    parser.add_argument("cases", nargs="*", help="names of cases in cases.yml; all by default")
    parser.add_argument("--cases-file", type=Path, default=HERE / "cases.yml", help="a file of the same keys")
    parser.add_argument("--modules", type=Path, default=Path("modules"), help="where MaxText's modules are kept")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    parser.add_argument("--json", type=Path, help="write every case's numbers here")
    parser.add_argument("--compile", metavar="CASE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = {case["name"]: case for case in yaml.safe_load(args.cases_file.read_text())}
    if unknown := set(args.cases) - cases.keys():
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    args.modules.mkdir(parents=True, exist_ok=True)
    if args.compile:
        compile_maxtext(cases[args.compile], args.modules)
        return
    results = []
    for case in [cases[name] for name in args.cases or cases]:
        results.append(compare(case, args))
        print(json.dumps(results[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    table = format_table(results)
    print(table)
    if args.markdown:
        args.markdown.write_text(table)


def compare(case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return a case's results: `name`, `work`, `slice`, `libtpu`, and the numbers of both programs.

    The programs are `ours` and `maxtext`. If MaxText's program does not fit, its only value is `status`, XLA's error.
    """
    run = valkyrie.compose(*case["ours"], f"target={case['slice']}")
    ours = valkyrie.predict(run, quiet=True)
    maxtext_file = args.modules / f"{case['name']}.json"
    if not maxtext_file.is_file():
        command = [sys.executable, __file__, "--compile", case["name"], "--modules", str(args.modules)]
        subprocess.run([*command, "--cases-file", str(args.cases_file)], check=True, stdout=sys.stderr)
    maxtext_record = json.loads(maxtext_file.read_text())
    result = {"name": case["name"], "work": case["work"], "slice": case["slice"], "libtpu": version("libtpu")}
    result["ours"] = prediction_numbers(ours)
    if "refused" in maxtext_record:
        return result | {"maxtext": {"status": maxtext_record["refused"]}}
    theirs = valkyrie.predict(
        maxtext_file.with_suffix(".hlo.pb"),
        slice=valkyrie.slice(case["slice"]),
        mesh=maxtext_record["axes"],
        places=[Position.parse(place) for place in maxtext_record["places"]],
    )
    return result | {
        "maxtext": prediction_numbers(theirs)
        | {"peak_gib": maxtext_record["peak_gib"], "libtpu": maxtext_record["libtpu"]}
    }


def prediction_numbers(result: Any) -> dict[str, Any]:
    """Return the numbers of a prediction to store. `result` is a report of `valkyrie.predict`.

    `step_s` and `seconds` (by category) are seconds per step, `peak_gib` is the peak memory of a device, and `sent_gb`
    is what a device sends per step. `hidden` is the share of the communication time that overlaps with compute, or None
    if nothing is sent. `notes` are the assumptions of the replay, and `status` is `ok`. If the prediction failed, the
    only key is `status`, with the reason.
    """
    record = result.record
    if result.status != "ok":
        return {"status": result.reason or result.status}
    sent = record.communication
    hidden = max(0.0, 1 - sent.exposed_s / sent.sending_s) if sent.sending_s else None
    values = {"status": "ok", "step_s": result.step_s, "peak_gib": result.peak_gib, "hidden": hidden}
    seconds = {format_category(part.kind, part.mesh_axes): part.seconds for part in record.parts}
    return values | {"sent_gb": sent.bytes / 1e9, "seconds": seconds, "notes": record.notes}


def compile_maxtext(case: dict[str, Any], modules: Path) -> None:
    """Compile MaxText's step of a case, and store its module, device positions and peak memory in `modules`.

    If the program does not fit, stores XLA's error instead.
    """
    from maxtext_step import compile_step

    from valkyrie.search.compile.executable import read_compiled_program

    options = " ".join(f"--{option}" for option in case["options"])
    record: dict[str, Any] = {"libtpu": version("libtpu"), "maxtext": version("maxtext"), "arguments": case["maxtext"]}
    try:
        compiled, mesh = compile_step(
            [f"compile_topology={case['slice']}", *case["maxtext"], f"compile_xla_flags={options}"]
        )
    except Exception as error:  # a program that does not fit raises XLA's error, which is a result
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        record["refused"] = str(error).splitlines()[0][:300]
    else:
        program = read_compiled_program(compiled, mesh)
        (modules / f"{case['name']}.hlo.pb").write_bytes(program.module)
        record |= {"axes": program.axes, "places": [str(position) for position in program.positions]}
        record["peak_gib"] = program.memory.peak / 2**30
    (modules / f"{case['name']}.json").write_text(json.dumps(record, indent=1) + "\n")


def format_table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table: seconds per step, hidden share of communication, and our speedup over MaxText."""
    lines = [
        "| work | slice | ours | hidden | MaxText's own | hidden | ours is faster by |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        ours, theirs = result["ours"], result["maxtext"]
        both_fit = ours["status"] == theirs["status"] == "ok"
        ratio = f"{theirs['step_s'] / ours['step_s']:.2f}x" if both_fit else ""
        cells = [result["work"], result["slice"], *_cells(ours), *_cells(theirs), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cells(program: dict[str, Any]) -> list[str]:
    if program["status"] != "ok":
        return [program["status"], ""]
    hidden = "" if program["hidden"] is None else f"{100 * program['hidden']:.0f}%"
    return [f"{program['step_s']:.3f} s", hidden]


if __name__ == "__main__":
    main()
