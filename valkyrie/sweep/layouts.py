"""The sweeper `hydra/sweeper=layouts`: enumerates all combinations of settings in a space and runs the legal ones.

Illegal combinations are recorded as refused. Does not import JAX.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from hydra_plugins.valkyrie_launcher import TrialLauncher
from omegaconf import DictConfig, OmegaConf

from valkyrie.config.compose import count_accelerators
from valkyrie.parallel.partition import distinct_partitions
from valkyrie.paths import write_atomic
from valkyrie.problems import Problem
from valkyrie.runs.folder import split_override
from valkyrie.sweep.cells import Cell, Cells, enumerate_space
from valkyrie.sweep.composer import Composer
from valkyrie.sweep.end import find_sweep_end
from valkyrie.sweep.launcher import launch
from valkyrie.sweep.plan import SweepContext, plan_run
from valkyrie.sweep.run import settle
from valkyrie.sweep.space import ALL_CHOICES, RunVariant, SweepSpace, compose_variants, read_space
from valkyrie.sweep.trial import MULTIRUN_FILE
from valkyrie.train.screen import make_console
from valkyrie.units import count_text

MAX_SHOWN_REASONS = 6
"""Number of different reasons for refusals that are printed before a sweep starts. `trials.jsonl` has them all."""


def sweep_layouts(
    context: HydraContext,
    config: DictConfig,
    arguments: Sequence[str],
    space: DictConfig,
    limit: int | None,
    launcher: Launcher,
) -> list[Sequence[JobReturn]]:
    """Record the refused cells of a space, launch the legal ones, and return the results of the jobs.

    The results are in a list with one entry, as from Hydra's own sweepers. The list is empty if no cell is legal.

    Args:
        context: Hydra's context, with its callbacks and config loader.
        config: The configuration of the multirun.
        arguments: The overrides on the command line.
        space: The node `hydra.sweeper.space`.
        limit: Maximum number of cells to run, or None for all.
        launcher: Runs the jobs.

    Raises:
        ValueError: The space is invalid, all its combinations were skipped, or `limit` is below 1.
        Exception: With a launcher other than `trials`, the exception of the first failed job, as in Hydra's own
            sweepers.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"hydra.sweeper.limit={limit}: must be at least 1, or null for no limit.")
    composer = Composer(config, context.config_loader)
    sweep_space = read_space(space, arguments, composer)
    cells = enumerate_cells(sweep_space, composer)
    selected_cells = sample_evenly(cells.legal, limit)
    make_console().print(describe_counts(cells, selected_cells))
    sweep = SweepContext.from_hydra(config.hydra)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(sweep.folder / MULTIRUN_FILE, OmegaConf.to_yaml(config))
    refused_plans = [
        plan_run(c.run, sweep, [*sweep_space.fixed_overrides, *c.overrides], c.problems) for c in cells.refused
    ]
    trials, _ = settle(refused_plans)
    if (sweep_end := find_sweep_end(context)) is not None:
        for trial in trials.values():
            sweep_end.add(trial)
        if cells.cells and not selected_cells:
            sweep_end.expect_all_trials()
    if not cells.cells:
        raise ValueError("nothing to run: all combinations in the space were skipped, for the reasons above.")
    if not selected_cells:
        return []
    jobs = [[*sweep_space.fixed_overrides, *cell.overrides] for cell in selected_cells]
    if isinstance(launcher, TrialLauncher):
        return [launch(context, config, jobs, 0, launcher.jobs, [cell.run for cell in selected_cells])]
    job_returns = launcher.launch(jobs, initial_job_idx=0)
    for job in job_returns:
        _ = job.return_value  # raises the exception of a failed job
    return [job_returns]


def enumerate_cells(space: SweepSpace, composer: Composer) -> Cells:
    """Return every cell of a space. Composes its runs, meshes, partitions and remat policies with `composer`.

    Meshes, partitions and remat policies are composed once for all variants that override their keys in the same way,
    for example with `partition.zero1=true`. Of partitions that shard the models alike, `all` means the first one.
    """
    variants_by_changes: dict[tuple[str, ...], list[RunVariant]] = defaultdict(list)
    for variant in compose_variants(space, composer):
        changes = tuple(o for o in variant.overrides if _changes_layouts(split_override(o)[0]))
        variants_by_changes[changes].append(variant)
    named = [name for name in space.config.partitions if name != ALL_CHOICES]
    others = composer.group_options("partition") if ALL_CHOICES in space.config.partitions else []
    cells: list[Cell] = []
    skip_problems: list[Problem] = []
    for layout_changes, variants in variants_by_changes.items():
        fixed_overrides = [*space.fixed_overrides, *layout_changes]
        axes = set(itertools.chain.from_iterable(variant.run.arrays.axes for variant in variants))
        names = dict.fromkeys([*named, *others])
        partitions = {name: composer.compose_choice("partition", name, fixed_overrides) for name in names}
        distinct = {partition.name for partition in distinct_partitions(partitions.values(), axes)}
        variant_cells = enumerate_space(
            space.config,
            variants,
            {name: each for name, each in partitions.items() if name in named or each.name in distinct},
            {name: composer.compose_choice("remat", name, fixed_overrides) for name in space.config.remat or []},
            resolve_mesh=partial(composer.compose_choice, "mesh", fixed_overrides=fixed_overrides),
            has_accelerators=count_accelerators() > 0,
        )
        cells += variant_cells.cells
        skip_problems += variant_cells.skip_problems
    return Cells(cells, skip_problems)


def _changes_layouts(key: str) -> bool:
    """Return whether a key may modify a mesh, a partition or a remat policy."""
    return key.startswith(("mesh.", "partition.", "remat.")) or key == "experiment"


def sample_evenly(cells: Sequence[Cell], limit: int | None) -> list[Cell]:
    """Return at most `limit` cells, spaced evenly over the list. None means no limit."""
    if limit is None or len(cells) <= limit:
        return list(cells)
    return [cells[i * len(cells) // limit] for i in range(limit)]


def describe_counts(cells: Cells, selected_cells: Sequence[Cell]) -> str:
    """Return the text printed before a sweep starts: the numbers of trials, and the reasons for refusals and skips."""
    legal_count, refused, total = len(cells.legal), len(cells.refused), len(cells.cells)
    lines = [f"{count_text(total, 'trial')}: {legal_count} legal, {refused} refused"]
    if len(selected_cells) < legal_count:
        lines[0] += f"; running {len(selected_cells)} of the legal ones (hydra.sweeper.limit={len(selected_cells)})"
    reasons = count_kinds(cell.problems[0] for cell in cells.refused)
    lines += [f"  {count:>4} refused: {why}" for why, count in reasons[:MAX_SHOWN_REASONS]]
    if len(reasons) > MAX_SHOWN_REASONS:
        remaining, other = sum(count for _, count in reasons[MAX_SHOWN_REASONS:]), len(reasons) - MAX_SHOWN_REASONS
        why = "another reason" if other == 1 else f"{other} other reasons"
        lines.append(f"  {remaining:>4} refused for {why}, listed in trials.jsonl")
    lines += [f"  {count:>4} skipped: {why}" for why, count in count_kinds(cells.skip_problems)]
    return "\n".join(lines)


def count_kinds(problems: Iterable[Problem]) -> list[tuple[str, int]]:
    """Count problems by label. Returns (label, count) pairs, most frequent first."""
    return Counter(problem.label for problem in problems).most_common()
