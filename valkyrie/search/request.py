"""Parses the request of a search: slices, settings that may vary, time limit, and tokens or dollars to plan for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from valkyrie.config.modes import settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.target import ChipConfig, TargetConfig, make_slice
from valkyrie.modes.search import Config as SearchMode
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.parallel.on_target import target_problems
from valkyrie.parallel.partition import PartitionConfig, partition_variants, shipped_partitions
from valkyrie.parallel.remat import RematConfig
from valkyrie.paths import config_names, read_group
from valkyrie.problems import raise_problems
from valkyrie.runs.folder import split_flags, split_override
from valkyrie.search.estimate.rank import EstimatedLayout
from valkyrie.search.estimate.settings import ModelSettings, find_settings
from valkyrie.search.estimate.space import LayoutSpace, enumerate_layouts
from valkyrie.trees import flatten
from valkyrie.units import parse_seconds

SEARCH_KEYS = ("mode", "target", "mesh", "partition", "remat", "microbatches", "device_batch", "name")
"""Keys that are not copied to the training commands of an answer: those of a layout, and those of the search itself."""
_PARTITION_KEYS = (
    "zero1",
    "gradient_sum",
    "sum_gradients_per",
    "parameter_memory",
    "optimizer_memory",
    "schedule",
    "rounds",
)
"""Settings that every partition has. A command that sets one of them does not fix the choice of partition."""


@dataclass(frozen=True)
class SearchRequest:
    """What to search. Layout settings on the command line are fixed, and all others vary.

    Args:
        run: Provides model, batch and precision.
        targets: Slices to compare. A setting such as `target.slices=2` applies to each of them.
        partitions: Partitions to try. A setting such as `partition.zero1=true` applies to each of them.
        remats: Remat policies to try in addition to the run's.
        microbatches: The only count to try, or None to try several.
        device_batches: Numbers of sequences that a device processes at a time, per pipeline stage, to try. They
            determine the microbatches of each layout. Empty to use `microbatches`.
        search_batch: Whether to search the global batch too, instead of using that of the run.
        mesh: The only mesh to try, or None to try all.
        settings: Settings of the model to try.
        budget_s: Time limit in seconds for all compiles, and separately for starting measurements. None for no limit.
        tokens: Tokens to train on, to compute hours and dollars, or None.
        budget_usd: Dollars to spend, to compute the tokens that they buy, or None.
    """

    run: Run
    targets: tuple[TargetConfig, ...]
    partitions: tuple[PartitionConfig, ...]
    remats: tuple[RematConfig, ...]
    microbatches: int | None
    device_batches: tuple[int, ...]
    search_batch: bool
    mesh: MeshConfig | None
    settings: tuple[ModelSettings, ...]
    budget_s: float | None
    tokens: float | None
    budget_usd: float | None

    def space(self) -> LayoutSpace:
        """Return all legal layouts to search (see `enumerate_layouts`), with all settings of the model to try."""
        space = enumerate_layouts(
            self.run,
            self.targets,
            self.partitions,
            self.remats,
            self.microbatches,
            self.mesh,
            self.device_batches,
            self.search_batch,
        )
        groups = [group.with_settings(settings, self.run) for settings in self.settings for group in space.groups]
        return replace(space, groups=[group for group in groups if group.meshes])

    @property
    def ranks_by_price(self) -> bool:
        """Whether layouts are ranked by price.

        True if `tokens` or `budget_usd` is set, and the price of every slice is known and not 0.
        """
        planned = self.tokens is not None or self.budget_usd is not None
        return planned and all(compute_price(target, 1.0) for target in self.targets)

    def cost(self, layout: EstimatedLayout, step_s: float) -> float:
        """Return the cost to rank a layout by, if its step takes `step_s` seconds.

        The cost is dollars per step if `ranks_by_price`, else seconds per step. With `search_batch`, it is dollars per
        sequence if `ranks_by_price`, else chip-seconds per sequence.
        """
        target = layout.group.target
        usd = compute_price(target, step_s) if self.ranks_by_price else None
        chips = (target.chips or 1) * target.slices if self.search_batch else 1
        return layout.per_sequence(step_s * chips if usd is None else usd)

    def step_tokens(self, batch: int | None) -> int:
        """Return the tokens of a step of a layout. `batch` is its batch, or None if the search does not vary it."""
        return (batch or self.run.config.batch) * self.run.config.seq

    @property
    def mode(self) -> SearchMode:
        """Settings of `mode=search`."""
        return settings_for(SearchMode, self.run.config.mode)

    @property
    def arguments(self) -> list[str]:
        """The user's arguments that apply to all layouts (see `shared_arguments`)."""
        return shared_arguments(self.run.arguments)

    def train_arguments(self, batch: int | None, tokens_for_budget: float | None) -> list[str]:
        """Return `arguments` with `steps=` added to train on `tokens`, or else on the tokens that `budget_usd` buys.

        Adds nothing if neither is known.

        Args:
            batch: Batch of the layout, or None if the search does not vary it.
            tokens_for_budget: Tokens that the layout trains on for `budget_usd`, or None if unknown. The steps are
                rounded down, so that they cost at most the budget, but to at least 1.
        """
        step_tokens = self.step_tokens(batch)
        if self.tokens is not None:
            return [*self.arguments, f"steps={math.ceil(self.tokens / step_tokens)}"]
        if tokens_for_budget is not None:
            return [*self.arguments, f"steps={max(1, math.floor(tokens_for_budget / step_tokens))}"]
        return self.arguments


def shared_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a search that apply to all its layouts.

    Omits the search's own settings and the keys that select a slice or layout. Keeps settings that apply to
    every slice or partition, such as `target.chip.hbm_gib` and `partition.gradient_sum`.
    """
    flags, overrides = split_flags(arguments)
    search_keys = (*SEARCH_KEYS, "target.slices", "partition.schedule", "partition.rounds", "partition.zero1")
    keys = [(override, split_override(override)[0]) for override in overrides]
    return [*flags, *(override for override, key in keys if key not in search_keys and not key.startswith("mode."))]


def parse_request(run: Run) -> SearchRequest:
    """Parse the request of a run with `mode=search`. Raises ValueError for settings that a search cannot use."""
    config, mode = run.config, settings_for(SearchMode, run.config.mode)
    keys = {split_override(o)[0] for o in split_flags(run.arguments)[1]}
    if "resume" in keys:
        raise ValueError(
            "resume: mode=search does not resume runs. To continue a search, repeat its command. To search for layouts "
            "for the model of a run, set the model, such as model=gpt_1b."
        )
    if mode.search_batch and (refused_keys := sorted(keys & {"batch", "batch_tokens"})):
        raise ValueError(
            f"{refused_keys[0]}= cannot be combined with batch=auto, which searches the batch. Remove one of the two "
            "settings."
        )
    for key, amount in (("tokens", mode.tokens), ("budget_usd", mode.budget_usd)):
        if amount is not None and "steps" in keys:
            raise ValueError(
                f"steps={config.steps} cannot be combined with {key}={amount:g}, which sets the number of steps. "
                "Remove one of the two settings."
            )
    if "mode.device_batches" in keys and not mode.device_batches:
        raise ValueError("device_batch=[] has no value to try. Use device_batch=[2,4], or leave it out.")
    if mode.device_batches and (refused_keys := sorted(keys & {"device_batch", "microbatches"})):
        values = ",".join(map(str, mode.device_batches))
        raise ValueError(
            f"{refused_keys[0]}= cannot be combined with device_batch=[{values}], which sets the microbatches of each "
            "layout. Remove one of the two settings."
        )
    if refused_keys := sorted(key for key in keys if key.startswith("mesh.")):
        raise ValueError(
            f"{refused_keys[0]}: mode=search chooses the placement of a mesh. Name a mesh by its sizes (mesh=4x2x1), "
            "or predict one layout with mode=compile."
        )
    # `target.slices` applies to every target; the other settings are those of one slice.
    if mode.targets and (refused_keys := sorted(k for k in keys - {"target.slices"} if k.startswith("target."))):
        raise ValueError(
            f"{refused_keys[0]} cannot be set for several slices at once. Search one slice at a time: target=SLICE."
        )
    targets = tuple(_requested_slices(run, mode))
    if mesh := config.mesh if "mesh" in keys else None:
        raise_problems([problem for target in targets for problem in target_problems(target, mesh)])
    vary = flatten(mode.vary)
    if refused_keys := sorted(keys & vary.keys()):
        raise ValueError(
            f"{refused_keys[0]}= cannot be combined with mode.vary.{refused_keys[0]}=, which sets it to each of its "
            "values. Remove one of the two settings."
        )
    names_remat = any(key.partition(".")[0] == "remat" for key in keys)
    return SearchRequest(
        run=run,
        targets=targets,
        partitions=tuple(_requested_partitions(config.partition, keys, run.arrays.axes)),
        remats=() if names_remat else tuple(read_group("remat", RematConfig)),
        microbatches=config.microbatches if "microbatches" in keys else None,
        device_batches=tuple(mode.device_batches) or (() if config.device_batch is None else (config.device_batch,)),
        search_batch=mode.search_batch,
        mesh=mesh,
        settings=tuple(find_settings(run, keys, vary)),
        budget_s=None if mode.budget is None else parse_seconds(mode.budget),
        tokens=mode.tokens,
        budget_usd=mode.budget_usd,
    )


def _requested_partitions(
    partition: PartitionConfig, keys: Collection[str], model_axes: Collection[str]
) -> Iterator[PartitionConfig]:
    """Yield the run's partition if the command names it or one of its rules, otherwise all shipped partitions.

    Yields each with its pipeline schedules, and with and without ZeRO-1. Settings in the command apply to all of them.
    Partitions that differ only in rules for logical axes that the model does not have are yielded once.
    """
    named_keys = {key.partition(".")[2].partition(".")[0] for key in keys if key.startswith("partition.")}
    if "partition" in keys or named_keys - {*_PARTITION_KEYS}:
        partitions = [partition]
    else:
        settings = {key: getattr(partition, key) for key in named_keys}
        partitions = [replace(shipped, **settings) for shipped in shipped_partitions(model_axes)]
    for variant_base in partitions:
        yield from partition_variants(variant_base, named_keys)


def _requested_slices(run: Run, mode: SearchMode) -> list[TargetConfig]:
    """Return the slices to compare or, with `mode.shapes`, all available shapes of each.

    Raises ValueError for unknown names, illegal or contradictory settings, and slices of unknown speed.
    """
    target, named = run.config.target, mode.targets
    parsed = {t.name: t for t in (parse_target(name, target_names=config_names("target")) for name in named)}
    named_slices = [replace(_apply_chip_settings(target.chip, t), slices=target.slices) for t in parsed.values()]
    targets = named_slices or [target]
    raise_problems([problem for t in targets for problem in t.problems()])
    for t in targets:
        platform, compute = get_platform(t.platform), run.config.precision.compute.value
        if t.chip is not None and (missing := platform.missing_figures_message(t.chip, compute, t.hosts * t.slices)):
            raise ValueError(missing)
    for t in targets:
        if t.chips is not None and (t.chip is not None or get_platform(t.platform).runs_on_host):
            continue
        if t.chips is not None:
            raise ValueError(
                f"target.chips={t.chips} needs a kind of chip. Add target.chip=NAME, one of {', '.join(known_chips())}."
            )
        raise ValueError(
            f"target={t.name} is not a chip with known speed, so its layouts cannot be estimated. Use a slice "
            "(target=v4-64), several slices (target=[v4-64,v5e-64]), or CPU devices of this machine (target=cpu8). To "
            "time layouts on other devices: valkyrie-train -m mode=measure hydra/sweeper=layouts."
        )
    return [shape for t in targets for shape in _available_shapes(t)] if mode.shapes else targets


def _apply_chip_settings(chip: ChipConfig | None, target: TargetConfig) -> TargetConfig:
    """Return a slice with the chip settings that the run changes, if any.

    Raises ValueError if the run changes the settings of another chip. `chip` is the chip of the run.
    """
    if chip is None or chip == known_chips().get(chip.name):
        return target
    if target.chip is None or target.chip.name != chip.name:
        raise ValueError(
            f"target={target.name}: the target.chip settings in this command are for {chip.name} and do not apply to "
            f"this slice. Search only {chip.name} slices, or remove those settings (they may come from an experiment)."
        )
    return replace(target, chip=chip)


def _available_shapes(target: TargetConfig) -> list[TargetConfig]:
    chip, chips = target.chip, target.chips
    if chip is None or chips is None or chip.ici_axes is None:
        return [target]
    shapes = chip.slices.shapes(chips)
    targets = [make_slice(chip, shape) for shape in shapes]
    targets += [make_slice(chip, shape, twisted=True) for shape in shapes if chip.slices.has_twist(shape)]
    return [replace(available, slices=target.slices) for available in targets] or [target]


def compute_price(target: TargetConfig, seconds: float, *, spot: bool = False) -> float | None:
    """Return the price in dollars of using all slices of a target for `seconds`, or None if unknown.

    The price is that of chips on demand or, with `spot`, of interruptible chips.
    """
    usd = None if target.chip is None else target.chip.spot_usd_per_hour if spot else target.chip.usd_per_hour
    return None if usd is None or target.chips is None else usd * target.chips * target.slices * seconds / 3600


def affordable_seconds(target: TargetConfig, usd: float) -> float | None:
    """Return the seconds on all slices of a target that `usd` dollars buy, or None if the price is unknown or 0."""
    per_second = compute_price(target, 1.0)
    return usd / per_second if per_second else None
