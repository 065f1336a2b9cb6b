"""Checkpoints by Orbax: what is saved and how often, and how a run is restored."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from valkyrie.checksums import damaged_file, write_checksums
from valkyrie.paths import is_full, why
from valkyrie.team import ALONE, Team
from valkyrie.trees import flat, names_of

FOLDER = "checkpoints"
"""The folder of a run folder that holds its checkpoints, one sub-folder a step."""
_METADATA = "_CHECKPOINT_METADATA"
"""The file of a checkpoint with the times of its saving, which Orbax writes last."""


@dataclass
class CheckpointConfig:
    """Saving, in the background: every `every` steps (null: only at the end); the newest `keep` stay on disk."""

    name: str = "async"
    every: int | None = 100
    keep: int = 2

    def problems(self) -> list[str]:
        """Return every reason why this makes no sense, in the words of the command line."""
        problems = []
        if self.every is not None and self.every < 1:
            problems.append(f"checkpoint.every={self.every}: at least 1 is needed, or null to save only at the end.")
        if self.keep < 1:
            problems.append(f"checkpoint.keep={self.keep}: at least 1 is needed.")
        return problems


class Checkpoints:
    """The checkpoints of one run folder: a train state, the data position, and what is needed to judge both.

    Saving returns as soon as the arrays are copied off the devices; `wait` and `close` see it through. A save that
    was interrupted leaves nothing that is taken for a checkpoint. Every checkpoint has the checksums of its files,
    which are compared before it is read; where one is damaged, the one before it is taken.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, *, read_only: bool = False, team: Team = ALONE) -> None:
        import orbax.checkpoint as ocp

        for name in ("absl", "asyncio"):  # Orbax reports every thread, and every part of a failure at length
            logging.getLogger(name).setLevel(logging.CRITICAL)
        _drop_late_callbacks()
        self._ocp, self._read_only, self._keep, self._team = ocp, read_only, config.keep, team
        self.path = (folder / FOLDER).resolve()
        self._manager = self._open()
        self.last_saved: int | None = self._manager.latest_step()

    def _open(self) -> Any:
        ocp = self._ocp
        if self._read_only:  # another process may be saving here: its unfinished folders are not to be cleaned away
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                create=True,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            )
        return ocp.CheckpointManager(self.path, options=options)

    def save(self, step: int, state: Any, data: Mapping[str, Any]) -> str | None:
        """Begin to save the state after `step` steps with the position of its data; once a step.

        Returns why a save failed, this one or the one before it; None where none has. A failed save leaves nothing,
        and the next one tries again.
        """
        failed = self.wait()
        if step == self.last_saved:
            return failed
        args, tree = self._ocp.args, _tree(state)
        about = {"parameters": {path: list(shape) for path, shape in _shapes(tree["parameters"]).items()}}
        content = args.Composite(
            state=args.StandardSave(tree), data=args.JsonSave(dict(data)), about=args.JsonSave(about)
        )
        self.last_saved = step
        try:
            self._manager.save(step, args=content)
        except Exception as error:  # Orbax and TensorStore raise many kinds for a disk that is full or gone
            return self._failed(error)
        return failed

    def restore(
        self, abstract_state: Any, step: int | None = None, *, changed: Mapping[str, tuple[str, str]] | None = None
    ) -> tuple[int, Any, dict[str, Any]]:
        """Return (step, state, data position) of the newest checkpoint, or of `step`, laid as `abstract_state` says.

        ValueError when there is none, when it does not fit the model or the optimizer, or when its files are damaged.
        `changed` has the settings that are not the saved run's, by key: (asked, saved), as they are written on the
        command line. A refusal names those behind it.
        """
        if step is None:
            step = self._team.of_first("sound checkpoint", self._sound_step)
            if not self._team.leads and not self._read_only and step != self.last_saved:
                self._manager.reload()
                self.last_saved = step
        elif damage := damaged_file(self.path / str(step)):
            raise ValueError(f"the checkpoint of step {step} in {self.path} is damaged: {damage}.")
        wanted = _tree(abstract_state)
        self._refuse_other_shapes(step, wanted)
        self._refuse_other_state(step, wanted, changed or {})
        args = self._ocp.args
        try:
            restored = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(wanted), data=args.JsonRestore())
            )
        except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
            raise ValueError(
                f"the checkpoint of step {step} in {self.path} cannot be read ({type(error).__name__}: "
                f"{_first_line(error)}). Delete {self.path / str(step)} to go on from an older one."
            ) from error
        return step, abstract_state._replace(**restored["state"]), dict(restored["data"])

    def _sound_step(self) -> int:
        """Return the newest step whose files are as they were saved; ValueError where there is none.

        Damaged ones are named in a note, and set aside so that their steps can be saved again.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            raise ValueError(f"{self.path} holds no finished checkpoint. Start the run anew, or resume another.")
        damages = []
        for step in steps:
            damage = damaged_file(self.path / str(step))
            if damage is None:
                break
            damages.append(f"the checkpoint of step {step} in {self.path} is damaged: {damage}")
        else:
            raise ValueError(f"{'; '.join(damages)}. No other is left: start the run anew, or resume another.")
        for line, bad in zip(damages, steps, strict=False):
            print(f"{line}. Going on from step {step}.", file=sys.stderr)
            if not self._read_only:
                (self.path / str(bad)).rename(self.path.parent / f"damaged-checkpoint-{bad}")
        if damages and not self._read_only:
            self._manager.reload()
            self.last_saved = step
        return step

    def _write_checksums(self) -> None:
        """Write the checksums of the checkpoint that is about to get its name: Orbax calls this, in its own thread."""
        for unfinished in self.path.glob("*.orbax-checkpoint-tmp*"):
            write_checksums(unfinished, without=(_METADATA,))

    def wait(self) -> str | None:
        """Return when the save begun is on disk: None, or why it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # as in save
            return self._failed(error)
        return None

    def poll(self) -> str | None:
        """Return why a save failed that has ended by now, without waiting for one that has not."""
        return None if self._manager.is_saving_in_progress() else self.wait()

    def close(self) -> None:
        """See saves through and let go of the folder."""
        try:
            self._manager.close()
        except Exception as error:  # as in save
            print(self._failed(error), file=sys.stderr)
            self._manager.close()

    def _failed(self, error: Exception) -> str:
        """Return the line about a save that failed, with its unfinished folder removed and Orbax ready for another."""
        step = self.last_saved
        with contextlib.suppress(Exception):  # it raises the same error again
            self._manager.close()
        for unfinished in self.path.glob("*.orbax-checkpoint-tmp*") if self._team.leads else ():
            shutil.rmtree(unfinished, ignore_errors=True)
        self.last_saved = latest_step(self.path.parent)
        if self.path.parent.is_dir():
            with contextlib.suppress(OSError):
                self._manager = self._open()
        newest = "no good one yet" if self.last_saved is None else f"the newest good one is of step {self.last_saved}"
        remedy = " Free some room there." if is_full(error) else ""
        return f"the checkpoint of step {step} could not be saved in {self.path} ({why(error)}); {newest}.{remedy}"

    def _refuse_other_shapes(self, step: int, wanted: dict[str, Any]) -> None:
        saved = saved_shapes(self.path / str(step))
        built = _shapes(wanted["parameters"])
        problems = [
            f"{path} is {saved.get(path, 'missing')} in the checkpoint and {built.get(path, 'missing')} in the model"
            for path in sorted({*built, *saved})
            if saved.get(path) != built.get(path)
        ]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise ValueError(
                f"the checkpoint of step {step} in {self.path} is of another model: {problems[0]}{more}. "
                f"Use the model it was trained with (resume={self.path.parent.name} takes its settings), or another "
                "name=."
            )

    def _refuse_other_state(self, step: int, wanted: dict[str, Any], changed: Mapping[str, tuple[str, str]]) -> None:
        """Refuse a sound checkpoint whose state has other arrays; one that cannot be read is left to the reading."""
        saved, wanted_names = _saved_arrays(self.path / str(step)), set(names_of(wanted))
        if saved is None or saved == wanted_names:
            return
        # another number keeps the arrays; an optimizer, an average or a clipping that comes or goes does not
        options = {
            key: values
            for key, values in changed.items()
            if key == "optimizer.name" or (key.startswith("optimizer.") and "null" in values)
        }
        if options:
            differs = "; ".join(f"{key}={was} was saved, {now} is asked for" for key, (now, was) in options.items())
            again = " ".join(f"{key}={was}" for key, (_, was) in options.items())
        else:
            name, more = min(saved ^ wanted_names), len(saved ^ wanted_names) - 1
            differs = f"{name} is only in the {'checkpoint' if name in saved else 'run'} (and {more} more)"
            again = "the optimizer options it was saved with"
        raise ValueError(
            f"the checkpoint of step {step} in {self.path} is sound, but of another optimizer: {differs}. "
            f"Use {again} (resume={self.path.parent.name} takes its settings), or another name=."
        )


@cache
def _drop_late_callbacks() -> None:
    """Keep off the screen that the loop to which the other writes of a failed save report is gone."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook


def latest_step(folder: Path) -> int | None:
    """Return the newest finished checkpoint of a run folder without loading Orbax; None when there is none."""
    return max(saved_steps(folder), default=None)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the finished checkpoints of a run folder, oldest first, without loading Orbax."""
    paths = (folder / FOLDER).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdigit() and (path / _METADATA).is_file())


def saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter in a checkpoint by dotted path; ValueError when that cannot be read."""
    about = path / "about" / "metadata"
    try:
        return {name: tuple(shape) for name, shape in json.loads(about.read_text())["parameters"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the checkpoint {path} is damaged ({type(error).__name__}: {_first_line(error)}). Delete that folder to "
            "go on from an older one."
        ) from error


def _tree(state: Any) -> dict[str, Any]:
    """Return a train state as a dict without the entries that are None."""
    return {key: value for key, value in state._asdict().items() if value is not None}


def _saved_arrays(path: Path) -> set[str] | None:
    """Return the dotted name of every array of a saved state; None where that cannot be read."""
    try:
        entries = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values()
        return {
            ".".join(str(part["key"]) for part in entry["key_metadata"])
            for entry in entries
            if entry["value_metadata"]["value_type"] != "None"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _shapes(parameters: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in flat(parameters).items()}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
