"""`valkyrie-launch`: starts a training run on this or on other machines, or prints the commands that would start it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from valkyrie.cli.parser import OneLineParser, run_command
from valkyrie.config.modes import MODES, Needs
from valkyrie.extensions import add_import_path
from valkyrie.hardware.target import AUTO_TARGET, TargetConfig
from valkyrie.launch.choose import ENGINES, parse_engine_config
from valkyrie.launch.dockerfile import dockerfile
from valkyrie.launch.engine import EngineConfig, SliceConfig, add_name, is_single_training
from valkyrie.launch.plan import ACTIONS, CommandStep, shell_text
from valkyrie.launch.supervisor import print_message
from valkyrie.problems import raise_problems
from valkyrie.processes.child import module_command
from valkyrie.runs.folder import key_values, split_flags

SUBCOMMANDS = (*ACTIONS, "dockerfile")
"""Subcommands of `valkyrie-launch`. Without one, it starts a training run."""
TRAIN_COMMAND = module_command("valkyrie.cli.train")
"""Command that runs `valkyrie-train` on this machine."""


def main(argv: Sequence[str] | None = None, command: Sequence[str] = TRAIN_COMMAND) -> None:
    """Run `valkyrie-launch` with `argv`, or with the arguments of the process if it is None.

    `command` is the command that starts `valkyrie-train` on this machine.
    """
    run_command("valkyrie-launch", lambda words: _launch(words, command), argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="valkyrie-launch",
        usage="valkyrie-launch [-h] [--restarts N] [--run] [-cd FOLDER] [ACTION] KEY=VALUE ... [-- OVERRIDES]",
        description="Start a training run on this machine (target=local), or print the commands that start it "
        f"elsewhere: on a TPU slice (target=v4-64), or with another engine ({', '.join(ENGINES.names())}). --run runs "
        "them.",
        epilog="Example: valkyrie-launch target=local processes=4 --restarts 3 -- model=gpt_tiny mesh=2x2x2",
    )
    words_help = f"target= and its settings; optionally one action: {', '.join(SUBCOMMANDS)}"
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=words_help)
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="maximum number of restarts after a crash; default: 3"
    )
    parser.add_argument("--run", action="store_true", help="run the commands instead of printing them")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="folder with your own launch engines")
    return parser


def _launch(arguments: Sequence[str], command: Sequence[str]) -> int:
    launch_arguments, overrides = split_at_dashes(arguments)
    parser = _parser()
    options, unknown_flags = parser.parse_known_intermixed_args(launch_arguments)
    if unknown_flags:
        _refuse_flag(unknown_flags[0], parser)
    actions = [word for word in options.words if word in SUBCOMMANDS]
    if len(actions) > 1:
        raise ValueError(f"{' '.join(actions)}: write only one action.")
    action = actions[0] if actions else None
    words = [word for word in options.words if word not in SUBCOMMANDS]
    if action and overrides is not None:
        raise ValueError(f"{action} does not take settings of a training run. Leave out everything after --.")
    if action == "dockerfile":
        sys.stdout.write(dockerfile(image_extra(words)))
        return 0
    if options.config_dir is not None:
        if not Path(options.config_dir).is_dir():
            raise ValueError(f"--config-dir {options.config_dir} is not a folder.")
        add_import_path([Path(options.config_dir).resolve()])
    config = parse_engine_config(words, options.restarts)
    if action:
        return _handle_action(config, words, action, options.run)
    if overrides is None:
        raise ValueError(
            "The settings of the training run are missing. Write them after --: "
            f"valkyrie-launch {shell_text(words)} -- model=gpt_tiny"
        )
    if "name" in (launch_values := key_values(words)):
        _refuse_other_name(launch_values["name"], overrides)
    _refuse_useless_launch(config, overrides)
    return _train(config, overrides, command, options.run)


def _refuse_flag(flag: str, parser: OneLineParser) -> NoReturn:
    """Raise ValueError, or exit with status 2, for a flag that the command does not have."""
    if flag == "--dry-run":
        raise ValueError(f"{flag} is not needed: without --run, the commands are only printed.")
    if "=" in flag:
        raise ValueError(f"{flag}: write settings without dashes: {flag.lstrip('-')}")
    parser.refuse_argument(flag)


def _refuse_useless_launch(config: EngineConfig, overrides: Sequence[str]) -> None:
    """Raise ValueError if the launch would not do what the user expects.

    Refuses `--run` after the `--`, different runs in `resume=` and `name=`, `distributed=off` with several processes,
    and, if the target is a slice, a mode that does not use devices.
    """
    if "--run" in overrides:
        raise ValueError("--run: valkyrie-train has no such flag. Write --run before the --.")
    values = key_values(overrides)
    resume, name = values.get("resume", "null"), values.get("name", "null")
    if is_single_training(overrides) and "null" not in (resume, name) and Path(resume).name != name:
        raise ValueError(
            f"resume={resume} and name={name} name different runs. Leave out name= to continue {resume}, or leave out "
            f"resume= to train {name}."
        )
    if values.get("distributed") == "off" and (count := config.process_count) > 1:
        raise ValueError(
            f"distributed=off: each of the {count} processes of target={config.target} would train alone. Leave it out."
        )
    mode = values.get("mode", "train")
    if (
        isinstance(config, SliceConfig)
        and config.slice
        and mode in MODES
        and MODES.config_class(mode).needs is not Needs.devices
    ):
        target = () if "target" in values else (f"target={config.slice}",)
        raise ValueError(
            f"mode={mode} does not use devices, so {config.slice_setting} would be idle. Run it on this machine: "
            f"valkyrie-train {shell_text((*overrides, *target))}"
        )


def _handle_action(config: EngineConfig, words: Sequence[str], action: str, execute: bool) -> int:
    """Print the command of an action and return 0, or, if `execute` is true, run it and return its exit status."""
    if config.runs_immediately:
        raise ValueError(
            f"{action} does not apply to target={config.target}, which runs in the foreground. Stop it with Ctrl-C."
        )
    if action != "list" and not any(setting.startswith("name=") for setting in words):
        raise ValueError(f"{action} needs the name of the run. Write name=NAME.")
    steps_by_action = {
        step.action: step
        for step in config.checked_plan(()).later_steps
        if isinstance(step, CommandStep) and step.action
    }
    if action not in steps_by_action:
        available = f" Available: {', '.join(steps_by_action)}." if steps_by_action else ""
        raise ValueError(f"{action} is not available for target={config.target}.{available}")
    if execute:
        return steps_by_action[action].run()
    print(steps_by_action[action].text())
    return 0


def _train(config: EngineConfig, settings: Sequence[str], command: Sequence[str], execute: bool) -> int:
    """Print the commands that start a training run, or run them if `execute` is true or the engine always runs them.

    Returns the exit status.
    """
    overrides, name_added = add_name(settings, config.name)
    config = replace(config, name=key_values(overrides).get("name") or config.name)
    if problems := config.code_problems():
        raise ValueError(" ".join(problems))
    memory_note = None if config.runs_immediately else _check_training(config, overrides)
    plan = config.checked_plan(overrides)
    if memory_note is not None:
        plan = replace(plan, notes=(*plan.notes, memory_note))
    if name_added:
        print_message(f"added name={config.name}, so that a restart continues this run")
    if not execute and not config.runs_immediately:
        sys.stdout.write(plan.text())
        return 0
    for note in plan.notes:
        print_message(note)
    return config.run(overrides, command) or 0


def _refuse_other_name(name: str, overrides: Sequence[str]) -> None:
    """Raise ValueError if the overrides of the training run set a `name=` that differs from `name`."""
    training_name = key_values(overrides).get("name", name)
    if training_name != name:
        raise ValueError(
            f"name={name} (before --) and name={training_name} (after --) differ, but both name the training run. "
            "Write only one of them."
        )


def _check_training(config: EngineConfig, overrides: Sequence[str]) -> str | None:
    """Raise ValueError for a training run that could not start on its target, before anything is rented.

    Returns a note if the run may not fit in the memory of the target's devices, else None. Skips sweeps, other modes,
    and runs with settings that may be stored only on other machines.
    """
    if not is_single_training(overrides) or "resume" in key_values(overrides):
        return None  # the settings of a run to resume may be stored elsewhere
    from valkyrie.config.arguments import parse_run
    from valkyrie.config.saved import config_dirs, config_path
    from valkyrie.train.room import check_target_fit

    flags = split_flags(overrides)[0]
    if config_path(flags) or not all(Path(folder).is_dir() for folder in config_dirs(flags)):
        return None  # the folder may exist only on the hosts
    training_run = parse_run(overrides)
    rented_target = config.full_target if isinstance(config, SliceConfig) else None
    if rented_target is not None and training_run.config.target.name == AUTO_TARGET:
        training_run = parse_run([*overrides, f"target={rented_target.name}", f"target.slices={rented_target.slices}"])
    elif rented_target is not None:
        _refuse_other_target(training_run.config.target, rented_target)
    try:
        raise_problems(training_run.problems())
        fit = check_target_fit(training_run)
        return None if fit is None or fit.should_fit else fit.text
    except ValueError as error:
        if not isinstance(config, SliceConfig):
            raise
        text = str(error).replace("target.slices=", "slices=")  # as written before --
        prefix = "" if config.slice == config.target else f"{config.slice_setting}: "  # if target=SLICE was not written
        raise ValueError(f"{prefix}{text}") from error


def _refuse_other_target(requested_target: TargetConfig, rented_target: TargetConfig) -> None:
    """Raise ValueError if the hardware that a training run requests differs from the rented slices."""
    hardware, rented_hardware = (
        (target.chip and target.chip.name, target.chips, target.topology, target.slices)
        for target in (requested_target, rented_target)
    )
    if hardware == rented_hardware:
        return
    settings = f"target={rented_target.name}" + (
        f" target.slices={rented_target.slices}" if rented_target.slices > 1 else ""
    )
    raise ValueError(
        f"The training sets target={requested_target.describe()}, but valkyrie-launch starts it on "
        f"{rented_target.describe()}. Write {settings} after --, or no target."
    )


def image_extra(words: Sequence[str]) -> str:
    """Parse the arguments of `valkyrie-launch dockerfile`. Returns the extra of `pyproject.toml` to install.

    It is `tpu` for `extra=tpu` or no arguments, `cuda` for `extra=cuda`, and an empty string for `extra=none` (CPUs).
    Raises ValueError for other arguments.
    """
    if not words:
        return "tpu"
    extras = {"extra=tpu": "tpu", "extra=cuda": "cuda", "extra=none": ""}
    if len(words) > 1 or words[0] not in extras:
        raise ValueError(f"dockerfile {' '.join(words)}: write one of {', '.join(extras)}, or nothing for extra=tpu.")
    return extras[words[0]]


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split arguments at the first `--`. The second part is None if there is no `--`."""
    if "--" not in arguments:
        return list(arguments), None
    index = list(arguments).index("--")
    return list(arguments[:index]), list(arguments[index + 1 :])


if __name__ == "__main__":
    main()
