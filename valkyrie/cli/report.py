"""`valkyrie-report`: ranks the trials of sweeps and writes them as one page, as Markdown or as CSV."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from valkyrie.cli.parser import OneLineParser
from valkyrie.report.wandb import add_arguments, main_wandb


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.wandb is not None:
            sys.exit(main_wandb(arguments.wandb, arguments.group, arguments.dry_run))
        if arguments.group is not None or arguments.dry_run:
            raise ValueError("--group and --dry-run go with --wandb ENTITY/PROJECT.")
        _report(arguments)
    except (ValueError, OSError) as error:
        print(f"valkyrie-report: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="valkyrie-report",
        description="Rank the layouts of sweeps: one page that opens from disk, or Markdown, or CSV.",
        epilog="Example: valkyrie-report runs/laptop_8 --format md",
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a sweep's folder, or a folder of sweeps")
    parser.add_argument(
        "--output",
        type=Path,
        help="the file to write instead of report.html in the first PATH; - for the screen, where md and csv go anyway",
    )
    parser.add_argument("--format", choices=("html", "md", "csv"), default="html")
    add_arguments(parser)
    both = "two sweeps side by side, by name or folder"
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help=both)
    return parser


def _report(arguments: argparse.Namespace) -> None:
    from valkyrie.report.page import page
    from valkyrie.report.rank import compare
    from valkyrie.report.records import read_rows
    from valkyrie.report.text import as_csv, as_markdown
    from valkyrie.sweep.trial import PAGE

    named = arguments.compare or []
    paths = [*arguments.paths, *(Path(name) for name in named if Path(name).is_dir())]
    if not paths:
        asked = f"--compare {' '.join(named)} names no folder here" if named else "no path was given"
        raise ValueError(f"{asked}. Give a sweep's folder, or a folder of them: valkyrie-report runs")
    rows = read_rows(paths)
    comparison = None
    if named:
        comparison = compare(rows, *named)
    if arguments.format == "html":
        text = page(rows, comparison)
    else:
        text = as_csv(rows) if arguments.format == "csv" else as_markdown(rows, comparison)
    to_screen = str(arguments.output) == "-" or (arguments.output is None and arguments.format != "html")
    if to_screen:
        sys.stdout.write(text)
        return
    output = arguments.output or (paths[0] if paths[0].is_dir() else paths[0].parent) / PAGE
    output.write_text(text, encoding="utf-8")
    print(f"{len(rows)} trials: {output}")


if __name__ == "__main__":
    main()
