"""`valkyrie-predict`: what a step of a compiled module, which any JAX program can dump, takes on a slice."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from valkyrie.cli.parser import OneLineParser, ends_in_words, without_comment

if TYPE_CHECKING:
    from valkyrie.hardware.position import Position

NOT_FITTING = 3
"""Exit status where the program needs more memory than the slice has: a result, not an error."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    with ends_in_words("valkyrie-predict"):
        fits = _predict(_parser().parse_args(without_comment(sys.argv[1:] if argv is None else argv)))
    sys.exit(0 if fits is not False else NOT_FITTING)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="valkyrie-predict",
        description="Predict the step of a compiled module on a TPU slice: step time, what it waits for, and why.",
        epilog="Example: valkyrie-predict step.hlo --target v4-64 --mesh data=8,model=4",
    )
    parser.add_argument(
        "module", type=Path, help="HLO text or a proto, after optimisation: *.after_optimizations.txt or .hlo.pb"
    )
    parser.add_argument("--target", required=True, metavar="SLICE", help="the slice it was compiled for, such as v4-64")
    parser.add_argument("--slices", type=int, default=1, help="how many such slices, joined by the data-centre network")
    parser.add_argument("--mesh", required=True, help="its mesh axes in order, such as data=8,model=4")
    parser.add_argument(
        "--places",
        type=Path,
        help="a JSON list of where each device of the mesh lies, as slice:x,y,z:core; by default as mesh_utils lays it",
    )
    parser.add_argument("--tokens", type=float, help="tokens of a step, for tokens per second")
    parser.add_argument("--flops", type=float, help="FLOPs of the model in a step, for MFU")
    parser.add_argument("--timeline", type=Path, help="write the step as a timeline for https://ui.perfetto.dev")
    parser.add_argument("--html", type=Path, help="write the report as a page")
    parser.add_argument("--json", type=Path, help="write the report as JSON")
    return parser


def _predict(asked: argparse.Namespace) -> bool | None:
    from valkyrie import api
    from valkyrie.records import write_record

    places = None if asked.places is None else _read_places(asked.places)
    result = api.predict(
        asked.module,
        slice=api.named_slice(asked.target, slices=asked.slices),
        mesh=mesh_axes(asked.mesh),
        places=places,
        tokens=asked.tokens,
        flops=asked.flops,
    )
    sys.stdout.write(str(result))
    if asked.json is not None:
        write_record(asked.json, result.record)
    if asked.timeline is not None:
        print(f"timeline: {result.timeline(asked.timeline)} (open it at https://ui.perfetto.dev)")
    if asked.html is not None:
        print(f"page: {result.html(asked.html)}")
    return result.fits


def mesh_axes(text: str) -> dict[str, int]:
    """Return the axes of `data=8,model=4`, in order; ValueError says what to write."""
    entries = [re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9][0-9]*)\s*", entry) for entry in text.split(",")]
    axes = {entry[1]: int(entry[2]) for entry in entries if entry}
    if len(axes) != len(entries):
        raise ValueError(f"--mesh {text}: write each axis once with its size, such as --mesh data=8,model=4.")
    return axes


def _read_places(file: Path) -> list[Position]:
    from valkyrie.hardware.position import Position

    try:
        places = json.loads(file.read_text())
    except ValueError:
        places = None
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        raise ValueError(f'--places {file}: write a JSON list such as ["0:0,0,0:0", "0:1,0,0:0"].')
    return [Position.parse(place) for place in places]


if __name__ == "__main__":
    main()
