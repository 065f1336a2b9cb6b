"""`hydra/sweeper=layouts`: enumerates the cells of a space, records refused ones and runs legal ones. No JAX."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from hydra_plugins.valkyrie_launcher import TrialLauncher
from omegaconf import DictConfig, OmegaConf

from valkyrie.config.compose import accelerators
from valkyrie.paths import write_atomic
from valkyrie.problems import Identity, Problem
from valkyrie.runs.folder import key_value
from valkyrie.sweep.cells import Cell, Cells, enumerate_space
from valkyrie.sweep.composer import Composer
from valkyrie.sweep.end import end_of
from valkyrie.sweep.launcher import launch
from valkyrie.sweep.plan import SweepContext, plan_run
from valkyrie.sweep.run import settle
from valkyrie.sweep.space import ALL, ModelVariant, SweepSpace, compose_variants, read_space
from valkyrie.train.screen import make_console

REASONS_SHOWN = 6
"""Number of kinds of refusals listed before a sweep starts. `trials.jsonl` has all refusals."""


def sweep_layouts(
    context: HydraContext,
    config: DictConfig,
    arguments: Sequence[str],
    space: DictConfig,
    limit: int | None,
    launcher: Launcher,
) -> list[Sequence[JobReturn]]:
    """Record the refused cells of a space, launch the legal ones, and return the results of the jobs.

    Raises ValueError if there is no cell, and the exception of a failed job, as Hydra's own sweeper does.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"hydra.sweeper.limit={limit}: at least 1 is needed, or null for no limit.")
    composer = Composer(config, context.config_loader)
    described = read_space(space, arguments, composer)
    cells = enumerate_cells(described, composer)
    chosen = sample_evenly(cells.legal, limit)
    make_console().print(count_line(cells, chosen))
    sweep = SweepContext.from_hydra(config.hydra)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(sweep.folder / "multirun.yaml", OmegaConf.to_yaml(config))
    refused = [plan_run(c.run, sweep, [*described.fixed, *c.overrides], c.problems) for c in cells.refused]
    trials, _ = settle(refused)
    if (end := end_of(context)) is not None:
        for trial in trials.values():
            end.add(trial)
        if cells.cells and not chosen:
            end.has_all()
    if not cells.cells:
        raise ValueError("nothing to run: the space is empty.")
    if not chosen:
        return []
    jobs = [[*described.fixed, *cell.overrides] for cell in chosen]
    if isinstance(launcher, TrialLauncher):
        return [launch(context, config, jobs, 0, launcher.jobs, [cell.run for cell in chosen])]
    returns = launcher.launch(jobs, initial_job_idx=0)
    for job in returns:
        _ = job.return_value  # raises what the job raised
    return [returns]


def enumerate_cells(space: SweepSpace, composer: Composer) -> Cells:
    """Return every cell of a space.

    Meshes, partitions and remat policies are composed once for all variants with the same changes of their keys, such
    as `partition.zero1=true`.
    """
    alike: dict[tuple[str, ...], list[ModelVariant]] = defaultdict(list)
    for variant in compose_variants(space, composer):
        alike[tuple(o for o in variant.overrides if _changes_layouts(key_value(o)[0]))].append(variant)
    names = (composer.options("partition") if n == ALL else [n] for n in space.config.partitions)
    partitions = list(dict.fromkeys(itertools.chain.from_iterable(names)))
    cells: list[Cell] = []
    skipped: list[Problem] = []
    for changes, variants in alike.items():
        fixed = [*space.fixed, *changes]
        enumerated = enumerate_space(
            space.config,
            variants,
            {name: composer.choice("partition", name, fixed) for name in partitions},
            {name: composer.choice("remat", name, fixed) for name in space.config.remat or []},
            mesh_named=partial(composer.choice, "mesh", fixed=fixed),
            accelerated=accelerators() > 0,
        )
        cells += enumerated.cells
        skipped += enumerated.skipped
    return Cells(cells, skipped)


def _changes_layouts(key: str) -> bool:
    """Return whether a key may change the contents of a mesh, a partition or a remat policy."""
    return key.startswith(("mesh.", "partition.", "remat.")) or key == "experiment"


def sample_evenly(cells: Sequence[Cell], limit: int | None) -> list[Cell]:
    """Return at most `limit` cells, evenly spread over the space."""
    if limit is None or len(cells) <= limit:
        return list(cells)
    return [cells[i * len(cells) // limit] for i in range(limit)]


def count_line(cells: Cells, chosen: Sequence[Cell]) -> str:
    """Return the lines printed before a sweep starts: the numbers of cells, and the reasons of refusals and skips."""
    legal, refused = len(cells.legal), len(cells.refused)
    lines = [f"{len(cells.cells)} cells: {legal} legal, {refused} refused"]
    if len(chosen) < legal:
        lines[0] += f"; hydra.sweeper.limit takes {len(chosen)} of the legal ones"
    kinds = count_kinds(cell.problems[0] for cell in cells.refused)
    lines += [f"  {count:>4} refused: {why}" for why, count in kinds[:REASONS_SHOWN]]
    if len(kinds) > REASONS_SHOWN:
        rest = sum(count for _, count in kinds[REASONS_SHOWN:])
        lines.append(f"  {rest:>4} refused for {len(kinds) - REASONS_SHOWN} other reasons; trials.jsonl has them all")
    lines += [f"  {count:>4} skipped: {why}" for why, count in count_kinds(cells.skipped)]
    return "\n".join(lines)


def count_kinds(problems: Iterable[Problem]) -> list[tuple[str, int]]:
    """Count problems with the same code, key and axes. Returns labels and counts, most frequent first."""
    kinds: dict[Identity, list[Problem]] = defaultdict(list)
    for problem in problems:
        kinds[problem.identity].append(problem)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    return [(members[0].label, len(members)) for members in ordered]
