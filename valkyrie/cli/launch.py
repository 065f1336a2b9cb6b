"""`valkyrie-launch`: starts a training where it is to run, or prints the commands that do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from valkyrie.cli.parser import OneLineParser, ends_in_words, without_comment
from valkyrie.launch.choose import action, plan
from valkyrie.launch.dockerfile import dockerfile
from valkyrie.launch.gcloud import Slices
from valkyrie.launch.local import say
from valkyrie.launch.options import Options, read_options
from valkyrie.launch.overrides import name_in, named, runs_in, trains
from valkyrie.launch.plan import Plan
from valkyrie.launch.ssh import Hosts
from valkyrie.launch.start import on_hosts, on_slices, on_this_host, run_steps
from valkyrie.runs.folder import key_value

ACTIONS = ("logs", "describe", "list", "delete", "dockerfile")
"""What the command does in place of a training, where it is the first word."""
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
        usage="valkyrie-launch [-h] [--restarts N] [--run] [ACTION] KEY=VALUE [KEY=VALUE ...] [-- OVERRIDES]",
        description="Start a training where it is to run: target=local in processes of this machine; for target=host, "
        "ssh, slurm, gke, skypilot, or a slice of TPUs by its name, print the commands that do, or run them.",
        epilog="Example: valkyrie-launch target=local processes=4 --restarts 3 -- model=gpt_tiny mesh=2x2x2",
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=f"{', '.join(ACTIONS)}; target= and its keys")
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="starts after a crash, 3 if not given")
    parser.add_argument("--run", action="store_true", help="run the commands in place of printing them")
    return parser


def _launch(arguments: Sequence[str], command: Sequence[str]) -> int:
    ahead, overrides = split(arguments)
    asked = _parser().parse_intermixed_args(ahead)
    word = next((word for word in asked.words[:1] if word in ACTIONS), None)
    words = asked.words[1:] if word else asked.words
    if word and overrides is not None:
        raise ValueError(f"{word} takes no settings of a training: leave out what is behind --.")
    if word == "dockerfile":
        sys.stdout.write(dockerfile(extra_of(words)))
        return 0
    options = read_options(words, asked.restarts)
    if word:
        return _act(options, words, word, asked.run)
    if overrides is None:
        ahead_of = " ".join(words)
        raise ValueError(
            f"the training's settings are missing. Write them behind --: valkyrie-launch {ahead_of} -- model=gpt_tiny"
        )
    return _train(options, overrides, command, asked.run)


def _act(options: Options, words: Sequence[str], word: str, run: bool) -> int:
    """Print or run the one command that an action stands for."""
    if word != "list" and not any(given.startswith("name=") for given in words):
        raise ValueError(f"{word} needs the name of the run: write name=NAME.")
    step = action(options, word)
    if run:
        return step.run()
    print(step.text())
    return 0


def _train(options: Options, settings: Sequence[str], command: Sequence[str], run: bool) -> int:
    """Print the plan of a training or run it, and return its exit status."""
    overrides, added = named(settings, options.name)
    options = replace(options, name=name_in(overrides) or options.name)
    if run and options.target != "local":
        _refuse_wrong(options, overrides)
    made = Plan((), ()) if options.target == "local" else plan(options, overrides)
    if added:
        say(f"name={options.name} added, by which a restart continues")
    if options.target != "local":
        if not run:
            sys.stdout.write(made.text())
            return 0
        if options.target in ("slurm", "gke", "skypilot"):
            return run_steps(made)
        for note in made.notes:
            say(note)
    processes = options.processes if options.target == "local" else 1
    logs = Path(runs_in(overrides)) / f"{options.name}.launch"
    if options.target in ("local", "host"):
        if processes > 1:
            say(f"{processes} processes; all but process 0 write to {logs}")
        return on_this_host((*command, *overrides), processes, options.restarts, logs).run()
    if not Path("pyproject.toml").is_file():
        raise ValueError("the code is copied from the current folder, which has no pyproject.toml: cd to the clone.")
    if options.target == "ssh":
        return on_hosts(Hosts(options, overrides), logs).run()
    slices = Slices(options, overrides)
    try:
        return on_slices(slices, logs).run()
    finally:
        say(f"{slices.name} is rented until it is given back: {slices.delete().text()}")


def _refuse_wrong(options: Options, overrides: Sequence[str]) -> None:
    """Raise ValueError for a training that could not start where it is sent, before anything is rented for it."""
    if not trains(overrides) or any(key_value(override)[0] == "resume" for override in overrides):
        return  # of a run to resume the settings may lie elsewhere
    from valkyrie.config.arguments import run_of

    asked = run_of(overrides)
    if problems := asked.problems():
        raise ValueError(" ".join(map(str, problems)))
    hardware, mesh = options.hardware, asked.config.mesh
    devices = None if hardware is None or hardware.devices is None else hardware.devices * options.slices
    if devices not in (None, mesh.size):
        where = f"slice={options.slice}" if options.slice else f"target={options.target}"
        several = f" slices={options.slices}" if options.slices > 1 else ""
        raise ValueError(
            f"mesh={mesh.name} has {mesh.size} device{'s' * (mesh.size > 1)}, {where}{several} has {devices}. Write a "
            f"mesh= whose sizes multiply to {devices}, or another slice."
        )


def extra_of(words: Sequence[str]) -> str:
    """Return the extra that an image is to have; ValueError says what to write."""
    if not words:
        return "tpu"
    extras = {"extra=tpu": "tpu", "extra=cuda": "cuda", "extra=none": ""}
    if len(words) > 1 or words[0] not in extras:
        raise ValueError(f"dockerfile {' '.join(words)}: write one of {', '.join(extras)}, or nothing for tpu.")
    return extras[words[0]]


def split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return what stands before the first `--` and what stands behind it; None where there is none."""
    if "--" not in arguments:
        return list(arguments), None
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


if __name__ == "__main__":
    main()
