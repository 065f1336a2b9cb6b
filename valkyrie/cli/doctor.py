"""`valkyrie-doctor`: checks whether a training run would run on this machine, and prints findings with remedies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from valkyrie.cli.parser import OneLineParser, run_command
from valkyrie.processes.interrupt import exit_on_ctrl_c


def main(argv: Sequence[str] | None = None) -> None:
    """Run `valkyrie-doctor` with `argv`, or with the arguments of the process if it is None.

    Exits with status 0 if the training run would start and run, 1 if it would fail, or 2 if the arguments are wrong.
    """
    with exit_on_ctrl_c("valkyrie-doctor"):
        run_command("valkyrie-doctor", _doctor, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="valkyrie-doctor",
        usage="valkyrie-doctor [-h] [--dry-run STEPS] [OVERRIDES]",
        description="Check whether the hosts of a training run are ready for it. Takes the overrides of "
        "valkyrie-train. With several hosts, start valkyrie-doctor on every host, like the training run.",
        epilog="Example: valkyrie-doctor --dry-run 5 target=v4-64 mesh=4x4x2 model=valkyrie_1b batch=64",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dry-run", type=_parse_steps, metavar="STEPS", help="run STEPS steps of the real layout on random tokens"
    )
    return parser


def _parse_steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps. Write --dry-run 5")
    return int(text)


def _doctor(words: list[str]) -> int:
    parser = _parser()
    options, overrides = parser.parse_known_args(words)
    from valkyrie.config.arguments import parse_run
    from valkyrie.config.mistakes import refuse_typos
    from valkyrie.config.modes import MODES
    from valkyrie.config.saved import CONFIG_FLAGS
    from valkyrie.doctor.examine import examine
    from valkyrie.problems import raise_problems
    from valkyrie.runs.folder import split_flags
    from valkyrie.train.screen import make_console

    refuse_typos(overrides, multirun=False)
    for flag in split_flags(overrides)[0]:
        if flag.startswith("-") and flag.partition("=")[0] not in CONFIG_FLAGS:
            parser.refuse_argument(flag)
    run = parse_run(overrides)
    mode = run.config.mode.name
    if mode != "train" and mode in MODES.names():  # a user's mode may train
        raise ValueError(f"mode={mode}: valkyrie-doctor checks only training runs. Use mode=train.")
    raise_problems(run.problems())
    return examine(run, make_console(), options.dry_run)


if __name__ == "__main__":
    main()
