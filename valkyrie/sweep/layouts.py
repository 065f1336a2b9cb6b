"""Decides what `hydra/sweeper=layouts` does: count a space, record what is refused, launch what is legal. No JAX."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from valkyrie.compose import accelerators
from valkyrie.sweep.asked import Asked, Composer, changes_layouts, read_asked, shapes_of
from valkyrie.sweep.end import SweepEnd
from valkyrie.sweep.plan import config_flags, illegal_plan
from valkyrie.sweep.space import Cell, Cells, Shape, enumerate_space
from valkyrie.sweep.trial import Status, Trial, TrialLog
from valkyrie.train.folder import key_value
from valkyrie.train.screen import make_console

REASONS_SHOWN = 6
"""How many kinds of refusals are listed before a sweep starts; `trials.jsonl` has every one in full."""


@dataclass
class Sweep:
    """One multirun under `hydra/sweeper=layouts`: the configuration of its jobs, and its arguments."""

    config: DictConfig
    loader: ConfigLoader
    arguments: list[str]

    def run(
        self,
        space: Mapping[str, Any] | DictConfig,
        limit: int | None,
        launcher: Launcher,
        end: SweepEnd | None = None,
    ) -> list[Sequence[JobReturn]]:
        """Record the refused cells of a space, hand the legal ones to a launcher, and return what came of these.

        `end` is told of the refused ones, as the launcher tells it of the others; where all are, nothing is launched.
        ValueError where there is no cell; an exception of a job comes up here, as Hydra's own sweeper has it.
        """
        if limit is not None and limit < 1:
            raise ValueError(f"hydra.sweeper.limit={limit}: at least 1 is needed, or null for no limit.")
        composer = Composer(self.config, self.loader)
        asked = read_asked(space, self.arguments, composer)
        cells = cells_of(asked, composer)
        chosen = spread(cells.legal, limit)
        console = make_console()
        console.print(count_line(cells, chosen))
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        refused = [(cell, [*asked.fixed, *cell.overrides]) for cell in cells.refused]
        for trial in record_refused(folder, refused, config_flags(self.config.hydra)):
            if end is not None:
                end.take(trial)
        if not cells.cells:
            raise ValueError("nothing to run: the space is empty.")
        if not chosen:
            if end is not None:
                end.is_given_all()
            return []
        jobs = [[*asked.fixed, *cell.overrides] for cell in chosen]
        # Our own launcher need not compose them again: that takes Hydra a quarter of a second each.
        getattr(launcher, "runs", {}).update({tuple(job): cell.run for job, cell in zip(jobs, chosen, strict=True)})
        returns = launcher.launch(jobs, initial_job_idx=0)
        for job in returns:
            _ = job.return_value  # raises what the job raised
        return [returns]


def cells_of(asked: Asked, composer: Composer) -> Cells:
    """Return every cell of what a multirun asks for.

    Meshes and partitions are composed once for all shapes that change the same keys of them, as `partition.zero1=true`.
    """
    alike: dict[tuple[str, ...], list[Shape]] = defaultdict(list)
    for shape in shapes_of(asked, composer):
        alike[tuple(o for o in shape.overrides if changes_layouts(key_value(o)[0]))].append(shape)
    found = Cells([], Counter())
    for changes, shapes in alike.items():
        named = [*asked.fixed, *changes]
        cells = enumerate_space(
            asked.space,
            shapes,
            composer.partitions(asked.space.partitions, named),
            mesh_named=partial(composer.mesh, asked=named),
            accelerated=accelerators() > 0,
        )
        found.cells.extend(cells.cells)
        found.left_out.update(cells.left_out)
    return found


def spread(cells: Sequence[Cell], limit: int | None) -> list[Cell]:
    """Return at most `limit` cells, evenly spread over the space."""
    if limit is None or len(cells) <= limit:
        return list(cells)
    return [cells[i * len(cells) // limit] for i in range(limit)]


def count_line(cells: Cells, chosen: Sequence[Cell]) -> str:
    """Return what a person should know before a sweep starts: how many cells, and why not more."""
    legal, refused = len(cells.legal), len(cells.refused)
    lines = [f"{len(cells.cells)} cells: {legal} legal, {refused} refused"]
    if len(chosen) < legal:
        lines[0] += f"; hydra.sweeper.limit takes {len(chosen)} of the legal ones"
    found = reasons(cells)
    lines += [f"  {count:>4} refused: {why}" for why, count in found[:REASONS_SHOWN]]
    if len(found) > REASONS_SHOWN:
        rest = sum(count for _, count in found[REASONS_SHOWN:])
        lines.append(f"  {rest:>4} refused for {len(found) - REASONS_SHOWN} other reasons; trials.jsonl has them all")
    lines += [f"  {count:>4} left out: {why}" for why, count in cells.left_out.most_common()]
    return "\n".join(lines)


def reasons(cells: Cells) -> list[tuple[str, int]]:
    """Return the kinds of refusals, each cell counted once by its first, the most frequent first.

    A kind is a refusal's first clause without its partition and its mesh: `heads (4) on x=8`.
    """
    found: Counter[str] = Counter()
    for cell in cells.refused:
        clause = re.split(r"[:.] ", cell.problems[0])[0]
        clause = re.sub(r"partition=\S+ (puts )?", "", clause)
        found[re.sub(r" of [\w., ]+ on ", " on ", clause)] += 1
    return found.most_common()


def record_refused(folder: Path, cells: Sequence[tuple[Cell, list[str]]], flags: tuple[str, ...]) -> list[Trial]:
    """Append the refused cells that `trials.jsonl` does not have yet, and return the records of all of them."""
    log = TrialLog(folder)
    known = {(trial.key, trial.reason): trial for trial in log.read()}
    now = datetime.now(UTC).isoformat()
    plans = [illegal_plan(cell.run, cell.problems, folder, overrides, flags) for cell, overrides in cells]
    trials = [plan.ended(Status.refused, plan.refusal, now, 0.0) for plan in plans]
    log.append(trial for trial in trials if (trial.key, trial.reason) not in known)
    return [known.get((trial.key, trial.reason), trial) for trial in trials]
