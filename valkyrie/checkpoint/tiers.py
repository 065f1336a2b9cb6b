"""Both tiers of a run's checkpoints: each step saved where it is due, and the newest sound one restored."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from valkyrie.checkpoint.config import CheckpointConfig
from valkyrie.checkpoint.contents import (
    damage_of,
    holds_parameters_alone,
    parameters_alone,
    read_about,
    refuse_other_shapes,
    refuse_other_state,
    refuse_other_tokenizer,
    tree_of,
)
from valkyrie.checkpoint.durable import Durable
from valkyrie.checkpoint.fast import Fast, fast_folder
from valkyrie.checkpoint.place import IDENTITY, in_bucket, place_of
from valkyrie.checkpoint.steps import saved_steps, steps_in
from valkyrie.checksums import CHECKSUMS
from valkyrie.paths import write_whole
from valkyrie.problems import Problem
from valkyrie.processes.team import ALONE, Team


class Restored(NamedTuple):
    """A restored state, the position of its data, and `source`: which checkpoint it is and why that one.

    Of a checkpoint with parameters alone, as `valkyrie-convert` writes, everything else of the state is None.
    """

    step: int
    state: Any
    data: dict[str, Any]
    source: str


class Checkpoints:
    """The checkpoints of one run folder, durable and, where asked for, fast. All processes call the same methods.

    With `read_only` only the durable ones, of which nothing is changed. `about` is said in every checkpoint; those that
    say another `tokenizer` are refused.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        *,
        read_only: bool = False,
        team: Team = ALONE,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._team, self._read_only, self._done = team, read_only, False
        self._about = about = about or {}
        self.durable = Durable(folder, config, read_only=read_only, team=team, about={"tier": "durable", **about})
        self.fast: Fast | None = None
        if config.fast.every is None and not read_only and team.leads:
            (folder / IDENTITY).unlink(missing_ok=True)  # what is trained now, fast checkpoints of before do not know
        if config.fast.every is not None and not read_only:
            identity = team.of_first("run identity", lambda: _identity(folder))
            path = fast_folder(config.fast, folder, identity)
            self.fast = Fast(path / f"process-{team.index}", config.fast, team.index, about={"tier": "fast", **about})

    @property
    def last_saved(self) -> int | None:
        """The newest durable checkpoint."""
        return self.durable.last_saved

    def save(
        self, step: int, state: Any, data: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> str | None:
        """Begin to save a durable checkpoint, as `Tier.save` does."""
        return self.durable.save(step, state, data, metrics)

    def save_fast(self, step: int, state: Any, data: Mapping[str, Any]) -> str | None:
        """Begin to save a fast checkpoint, as `Tier.save` does; nothing where the run has no fast tier."""
        return None if self.fast is None else self.fast.save(step, state, data)

    def restore(
        self, abstract_state: Any, step: int | None = None, *, changed: Mapping[str, tuple[str, str]] | None = None
    ) -> Restored:
        """Return the newest sound checkpoint, or the durable one of `step`, laid as `abstract_state` says.

        ValueError when there is none, when it does not fit the model or the optimizer, or when its files are damaged.
        `changed` has the settings that are not the saved run's, by key: (asked, saved), as they are written on the
        command line. A refusal names those behind it.
        """
        if step is None:
            restored = self.newest(abstract_state, changed=changed)
            if restored is None:
                raise ValueError(
                    f"{self.durable.path} holds no finished checkpoint. Start the run anew, or resume another."
                )
            return restored
        if damage := damage_of(self.durable.folder_of(step)):
            raise ValueError(f"the checkpoint of step {step} in {self.durable.path} is damaged: {damage}.")
        return self._restored(abstract_state, step, changed or {}, "")

    def newest(self, abstract_state: Any, *, changed: Mapping[str, tuple[str, str]] | None = None) -> Restored | None:
        """Return the newest sound checkpoint of both tiers that all processes can read; None where there is none.

        ValueError as `restore` raises it.
        """
        wanted = tree_of(abstract_state)
        fast, reason = self._agreed_fast(wanted)
        durable = self._sound_durable(needed=fast is None)
        restored = None
        if self.fast is not None and fast is not None and (durable is None or fast > durable):
            arrays, data = self.fast.read(fast, wanted)
            older = "there is no durable one" if durable is None else f"the newest durable one is of step {durable}"
            source = f"the fast checkpoint of step {fast} in {self.fast.path}; {older}"
            restored = Restored(fast, abstract_state._replace(**arrays), data, source)
        elif durable is not None:
            restored = self._restored(abstract_state, durable, changed or {}, reason)
        elif reason and self._team.leads:
            print(f"beginning at step 0: nothing durable is saved yet{reason}", file=sys.stderr)
        if self.fast is not None:
            self.fast.forget_after(0 if restored is None else restored.step)
        return restored

    def _restored(
        self, abstract_state: Any, step: int, changed: Mapping[str, tuple[str, str]], reason: str
    ) -> Restored:
        """Return a durable checkpoint, refused where it is of another model or optimizer."""
        wanted, path = tree_of(abstract_state), self.durable.folder_of(step)
        refuse_other_shapes(path, wanted)
        refuse_other_tokenizer(path, self._about.get("tokenizer"))
        source = f"the durable checkpoint of step {step} in {self.durable.path}{reason}"
        if holds_parameters_alone(path):
            arrays, data = self.durable.read(step, {"parameters": wanted["parameters"]})
            return Restored(step, parameters_alone(abstract_state, arrays["parameters"]), data, source)
        refuse_other_state(path, wanted, changed)
        arrays, data = self.durable.read(step, wanted)
        return Restored(step, abstract_state._replace(**arrays), data, source)

    def _sound_durable(self, *, needed: bool) -> int | None:
        """Return the newest durable checkpoint whose files are as they were saved, as process 0 finds it; None if none.

        Where all are damaged ValueError if one is `needed`, else None.
        """
        if self._team.of_first("durable checkpoint", lambda: self.last_saved) is None:
            return None
        try:
            step = self._team.of_first("sound checkpoint", self.durable.sound_step)
        except ValueError as error:
            if needed:
                raise
            if self._team.leads:
                print(f"{error} They are set aside, for a fast one is sound.", file=sys.stderr)
            self._team.of_first("damaged ones set aside", self.durable.set_all_aside)
            self.durable.reload(None)
            return None
        if not self._team.leads and not self._read_only and step != self.last_saved:
            self.durable.reload(step)
        return step

    def _agreed_fast(self, wanted: Mapping[str, Any]) -> tuple[int | None, str]:
        """Return the newest fast checkpoint that every process can read, and where there is none why, in words."""
        if self.fast is None:
            return None, ""
        steps, refused = self.fast.usable(wanted)
        answers = self._team.exchange("fast checkpoints", {"steps": steps, "refused": refused})
        common = set.intersection(*({*answer["steps"]} for answer in answers))
        if common:
            return max(common), ""
        told = [f"process {i}: {answer['refused'][0]}" for i, answer in enumerate(answers) if answer["refused"]]
        if told:
            return None, f"; no fast one is used ({told[0]})"
        seen = any(answer["steps"] for answer in answers)
        return None, "; no fast one is complete on all processes" if seen else ""

    def wait(self) -> str | None:
        """Return when what was begun is on disk: None, or why it failed."""
        failed = None if self.fast is None else self.fast.wait()
        return self.durable.wait() or failed

    def poll(self) -> str | None:
        """Return why a save failed that has ended by now, without waiting for one that has not."""
        return self.durable.poll() or (None if self.fast is None else self.fast.poll())

    def close(self) -> None:
        """See saves through and let go of the folders."""
        self.durable.close()
        if self.fast is not None:
            self.fast.close()
            if self._done:
                self.fast.remove()

    def done(self) -> None:
        """Delete the fast checkpoints at the end: the run is complete and durably saved."""
        self._done = True


class Kept(NamedTuple):
    """A checkpoint on disk: its tier, step, the bytes of its files, of which layout and when, and how its files are."""

    tier: str
    step: int
    size: int
    saved: str
    damage: Problem | str | None
    state: str


def kept_checkpoints(folder: Path, config: CheckpointConfig) -> list[Kept]:
    """Return the finished checkpoints of a run, durable ones and the fast ones of this host, by step."""
    found = [_kept("durable", place_of(folder) / str(step)) for step in saved_steps(folder)]
    if (folder / IDENTITY).is_file():
        fast = fast_folder(config.fast, folder, _identity(folder))
        for path in sorted(fast.glob("process-*")):
            found += [_kept(f"fast {path.name.replace('-', ' ')}", path / str(step)) for step in steps_in(path)]
    return sorted(found, key=lambda kept: kept.step)


def _kept(tier: str, path: Any) -> Kept:
    size = _bytes_in(path)
    try:
        about, damage = read_about(path), damage_of(path)
    except ValueError:
        about, damage = {}, damage_of(path) or "about/metadata cannot be read"
    unchecked = "complete; the bucket checks its objects" if in_bucket(path) else "no checksums"
    saved = f"{about.get('layout', '')} {about.get('saved', '')}".strip()
    state = f"damaged: {damage}" if damage else "as saved" if (path / CHECKSUMS).is_file() else unchecked
    return Kept(tier, int(path.name), size, saved, damage, state)


def _bytes_in(path: Any) -> int:
    """Return the bytes of all files under a folder; epath has no glob of all depths in a bucket."""
    entries = list(path.iterdir())
    return sum(_bytes_in(entry) if entry.is_dir() else entry.stat().length for entry in map(_epath, entries))


def _epath(path: Any) -> Any:
    from etils import epath

    return epath.Path(path)


def _identity(folder: Path) -> str:
    """Return what tells this run folder from one of the same path before it."""
    file = folder / IDENTITY
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, f"{uuid.uuid4().hex[:12]}\n")
    return file.read_text().strip()
