"""`valkyrie-doctor`: whether a training would run here, before it is started: a table of findings with remedies."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from valkyrie.cli.parser import OneLineParser, ends_in_words, without_comment
from valkyrie.processes.interrupt import exit_on_ctrl_c


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit status 1 where something would fail, 2 after a user's mistake, told without a traceback."""
    with exit_on_ctrl_c("valkyrie-doctor"), ends_in_words("valkyrie-doctor"):
        status = _doctor(without_comment(sys.argv[1:] if argv is None else argv))
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="valkyrie-doctor",
        usage="valkyrie-doctor [-h] [--dry-run STEPS] [OVERRIDES]",
        description="Look at what a training needs, on this host and the others, before it is started. The overrides "
        "are those of valkyrie-train; on several hosts start it on each of them, as the training.",
        epilog="Example: valkyrie-doctor --dry-run 5 target=v4-64 mesh=4x4x2 model=valkyrie_1b batch=64",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dry-run", type=_steps, metavar="STEPS", help="take so many steps of the real layout on random tokens"
    )
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of steps: write --dry-run 5")
    return int(text)


def _doctor(arguments: Sequence[str]) -> int:
    asked, overrides = _parser().parse_known_args(arguments)
    from valkyrie.config.arguments import run_of
    from valkyrie.config.mistakes import refuse_slips
    from valkyrie.doctor.examine import examine
    from valkyrie.train.screen import make_console

    refuse_slips(overrides, multirun=False)
    run = run_of(overrides)
    if problems := run.problems():
        several = f"{len(problems)} problems\n  - " if len(problems) > 1 else ""
        raise ValueError(several + "\n  - ".join(map(str, problems)))
    return examine(run, make_console(), asked.dry_run)


if __name__ == "__main__":
    main()
