"""`valkyrie-predict`: predicts the step time of any JAX program on a slice, from its compiled module."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from valkyrie.cli.parser import OneLineParser, run_command
from valkyrie.units import escape_control_characters

if TYPE_CHECKING:
    from valkyrie.hardware.position import Position

DOES_NOT_FIT = 3
"""Exit status if the program needs more memory than the slice has, which is a result and not an error."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run `valkyrie-predict` with `argv`, or with the arguments of the process if it is None."""
    run_command("valkyrie-predict", _predict, argv)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="valkyrie-predict",
        description="Predict the step time of a compiled module on a TPU slice, and which collectives it waits for.",
        epilog="Example: valkyrie-predict step.hlo --target v4-64 --mesh data=8,model=4",
    )
    parser.add_argument(
        "module", type=Path, help="optimised HLO as text (*.after_optimizations.txt) or as a proto (.hlo.pb)"
    )
    parser.add_argument(
        "--target", required=True, metavar="SLICE", help="slice that the module was compiled for, such as v4-64"
    )
    parser.add_argument(
        "--slices", type=int, default=1, help="number of slices, connected by the data-centre network; default: 1"
    )
    parser.add_argument("--mesh", required=True, help="mesh axes of the module in order, such as data=8,model=4")
    parser.add_argument(
        "--places",
        type=Path,
        help="JSON list with the position of each device of the mesh, as slice:x,y,z:core; default: as placed by "
        "jax.experimental.mesh_utils",
    )
    parser.add_argument("--tokens", type=float, help="tokens per step, to report tokens per second")
    parser.add_argument("--flops", type=float, help="FLOPs of the model per step, to report MFU")
    parser.add_argument("--timeline", type=Path, help="write the step as a timeline for https://ui.perfetto.dev")
    parser.add_argument("--html", type=Path, help="write the report as an HTML page")
    parser.add_argument("--json", type=Path, help="write the report as JSON")
    return parser


def _predict(words: list[str]) -> int:
    options = _parser().parse_args(words)
    _check_outputs(options)
    from valkyrie import api
    from valkyrie.paths import write_atomic
    from valkyrie.records import dump

    places = None if options.places is None else _read_places(options.places)
    result = api.predict(
        options.module,
        slice=api.named_slice(options.target, slices=options.slices),
        mesh=parse_mesh_axes(options.mesh),
        places=places,
        tokens=options.tokens,
        flops=options.flops,
    )
    sys.stdout.write(escape_control_characters(str(result)))
    if options.json is not None:
        write_atomic(options.json, dump(result.record), "--json FILE")
    if options.timeline is not None:
        print(f"timeline: {result.timeline(options.timeline)} (open it at https://ui.perfetto.dev)")
    if options.html is not None:
        print(f"page: {result.html(options.html)}")
    return DOES_NOT_FIT if result.fits is False else 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError if an output would replace an input or another output, or its folder is missing."""
    taken_paths = {options.module.resolve(): "the input module"}
    if options.places is not None:
        taken_paths[options.places.resolve()] = "the file of --places"
    for key in ("json", "timeline", "html"):
        path: Path | None = getattr(options, key)
        if path is None:
            continue
        if (other := taken_paths.get(path.resolve())) is not None:
            raise ValueError(f"--{key} {path} would overwrite {other}. Choose another path.")
        if not path.parent.is_dir():
            raise ValueError(f"--{key} {path}: there is no folder {path.parent}.")
        taken_paths[path.resolve()] = f"the file of --{key}"


def parse_mesh_axes(text: str) -> dict[str, int]:
    """Parse mesh axes such as `data=8,model=4` to their sizes, in order. Raises ValueError for other text."""
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
