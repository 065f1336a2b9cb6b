"""`valkyrie-report`: ranks the trials of sweeps and writes an HTML report, Markdown or CSV, or a W&B dashboard."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from valkyrie.cli.parser import OneLineParser, run_command
from valkyrie.report.wandb import add_arguments, main_wandb
from valkyrie.units import count_text


def main(argv: Sequence[str] | None = None) -> None:
    """Run `valkyrie-report` with `argv`, or with the arguments of the process if it is None."""
    run_command("valkyrie-report", _run, argv)


def _run(words: list[str]) -> int | None:
    arguments = _parser().parse_args(words)
    _refuse_ignored_options(arguments)
    if arguments.wandb is not None:
        return main_wandb(arguments.wandb, arguments.group, arguments.dry_run)
    return _report(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="valkyrie-report",
        description="Rank the layouts of sweeps. Writes a standalone HTML page, Markdown or CSV.",
        epilog="Example: valkyrie-report runs/laptop_8 --format md",
    )
    parser.add_argument(
        "paths", nargs="*", type=_parse_path, metavar="PATH", help="a sweep's folder, or a folder of sweeps"
    )
    parser.add_argument(
        "--output",
        type=_parse_path,
        help="output file; default: report.html in the first PATH, or stdout (-) for md and csv",
    )
    parser.add_argument(
        "--format", choices=("html", "md", "csv"), help="output format; default: that of --output, or html"
    )
    add_arguments(parser)
    compare_help = "compare two sweeps, given by name or folder; writes compare-A-B.html by default"
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help=compare_help)
    return parser


def _refuse_ignored_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options that `--wandb` ignores or that need it."""
    if arguments.wandb is None and (arguments.group is not None or arguments.dry_run):
        raise ValueError("--group and --dry-run need --wandb ENTITY/PROJECT.")
    if arguments.wandb is not None:
        options = {"PATH": arguments.paths, "--format": arguments.format, "--output": arguments.output}
        options["--compare"] = arguments.compare
        if ignored := [name for name, value in options.items() if value]:
            raise ValueError(f"--wandb builds a dashboard from the data in W&B. Leave out {', '.join(ignored)}.")


def _output_format(format: str | None, output: Path | None) -> str:
    """Return the format of the report: `format`, else the one that the suffix of `output` names, else `html`.

    Raises ValueError if `format` and the suffix differ. Also refuses unknown suffixes, because such a file may be a
    record of the sweep.
    """
    suffix = "" if output is None or str(output) == "-" else output.suffix.lower()
    format_by_suffix = {"": None, ".html": "html", ".htm": "html", ".md": "md", ".csv": "csv"}
    if suffix not in format_by_suffix:
        raise ValueError(f"--output {output}: the name must end in .html, .md or .csv.")
    if format is not None and format_by_suffix[suffix] not in (None, format):
        raise ValueError(f"--output {output} ends in {suffix}, but the format is {format}. Leave out --format.")
    return format or format_by_suffix[suffix] or "html"


def _parse_path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty. Is a shell variable not set?")
    return Path(text)


def _report(arguments: argparse.Namespace) -> None:
    from valkyrie.paths import write_atomic
    from valkyrie.report.page import page_file, render_page
    from valkyrie.report.rank import compare
    from valkyrie.report.records import read_rows
    from valkyrie.report.text import as_csv, as_markdown

    compared_sweeps = arguments.compare or []
    if compared_sweeps and len({Path(name).resolve() for name in compared_sweeps}) == 1:
        raise ValueError(f"--compare {' '.join(compared_sweeps)} names the same sweep twice. Name two sweeps.")
    paths = [*arguments.paths, *(Path(name) for name in compared_sweeps if Path(name).is_dir())]
    if not paths:
        if compared_sweeps:
            arguments_text = f"--compare {' '.join(compared_sweeps)}"
            raise ValueError(
                f"{arguments_text}: neither is a folder, so PATH is needed to find them. Example: valkyrie-report runs "
                f"{arguments_text}"
            )
        raise ValueError("PATH is missing. Pass a sweep folder, or a folder with sweeps. Example: valkyrie-report runs")
    report_format = _output_format(arguments.format, arguments.output)
    if compared_sweeps and report_format == "csv":
        raise ValueError("--compare is not supported with the format csv. Use --format html or --format md.")
    rows = read_rows(paths, say=lambda line: print(line, file=sys.stderr))
    comparison = compare(rows, *compared_sweeps) if compared_sweeps else None
    if report_format == "html":
        text = render_page(rows, comparison)
    else:
        text = as_csv(rows) if report_format == "csv" else as_markdown(rows, comparison)
    to_screen = str(arguments.output) == "-" or (arguments.output is None and report_format != "html")
    if to_screen:
        sys.stdout.write(text)
        return
    output = arguments.output
    if output is None and comparison is not None:  # not over the page of the first sweep
        folder = page_file(paths, None).parent
        output = folder / f"compare-{Path(compared_sweeps[0]).name}-{Path(compared_sweeps[1]).name}.html"
    file = write_atomic(page_file(paths, output), text, "--output FILE")
    print(f"{count_text(len(rows), 'trial')}: {file}")


if __name__ == "__main__":
    main()
