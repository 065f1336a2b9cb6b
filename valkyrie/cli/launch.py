"""`valkyrie-launch`: starts a training where it is to run, or prints the commands that do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from valkyrie.cli.parser import OneLineParser, ends_in_words, without_comment
from valkyrie.launch.local import Supervisor, cluster
from valkyrie.launch.options import Options, read_options
from valkyrie.launch.overrides import name_in, named, runs_in

TRAIN = (sys.executable, "-m", "valkyrie.cli.train")
"""The command of a process of this machine."""


def main(argv: Sequence[str] | None = None, command: Sequence[str] = TRAIN) -> None:
    """Run the command; a user's mistake is one line on stderr and exit status 2."""
    with ends_in_words("valkyrie-launch"):
        status = _launch(without_comment(sys.argv[1:] if argv is None else argv), command)
        sys.stdout.flush()
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="valkyrie-launch",
        usage="valkyrie-launch [-h] [--restarts N] KEY=VALUE [KEY=VALUE ...] -- OVERRIDES",
        description="Start a training: in several processes of this machine.",
        epilog="Example: valkyrie-launch target=local processes=4 --restarts 3 -- model=gpt_tiny mesh=2x2x2",
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="target=local and what belongs to it")
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="starts after a crash, 3 if not given")
    return parser


def _launch(arguments: Sequence[str], command: Sequence[str]) -> int:
    ahead, behind = split(arguments)
    asked = _parser().parse_intermixed_args(ahead)
    options = read_options(asked.words, asked.restarts)
    if behind is None:
        raise ValueError(
            "the training's settings are missing. Write them behind --: valkyrie-launch target=local processes=4 -- "
            "model=gpt_tiny"
        )
    overrides, added = named(behind, options.name)
    if added:
        print(f"valkyrie-launch: name={options.name} added, by which a restart continues", file=sys.stderr)
    options = replace(options, name=name_in(overrides) or options.name)
    if options.target not in ("local", "host"):
        raise ValueError(f"target={options.target}: only target=local and target=host are run so far.")
    return _here(options, (*command, *overrides), overrides)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return what stands before the first `--` and what stands behind it; None where there is none."""
    if "--" not in arguments:
        return list(arguments), None
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _here(options: Options, command: Sequence[str], overrides: Sequence[str]) -> int:
    """Run the training in processes of this machine and return its exit status."""
    processes = options.processes if options.target == "local" else 1
    runs = runs_in(overrides)
    logs = Path("runs" if "://" in runs else runs) / f"{options.name}.launch"
    if processes > 1:
        print(f"valkyrie-launch: {processes} processes; all but process 0 write to {logs}", file=sys.stderr)
    return Supervisor(lambda: cluster(command, processes), options.restarts, logs).run()


if __name__ == "__main__":
    main()
