"""The request of a search: the slices, what may vary, the compile budget, and the tokens or dollars to plan for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from valkyrie.config.modes import settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import ChipConfig, TargetConfig, slice_of
from valkyrie.modes.search import Config as SearchMode
from valkyrie.parallel.partition import PartitionConfig
from valkyrie.parallel.remat import RematConfig
from valkyrie.paths import config_names, read_group
from valkyrie.problems import refuse
from valkyrie.runs.folder import key_value, parts_of
from valkyrie.search.estimate.space import Space, enumerate_layouts, partition_variants
from valkyrie.units import parse_seconds

ITS_OWN = ("mode", "target", "partition", "remat", "microbatches", "device_batch", "name")
"""Keys that the answer sets for each layout, or that only a search has."""
_OF_ANY_PARTITION = ("zero1", "gradient_sum", "parameter_memory", "optimizer_memory", "schedule", "rounds")
"""Keys that every partition can have."""


@dataclass(frozen=True)
class SearchRequest:
    """A search as requested. Settings of the layout that the command names are fixed; the others vary.

    Args:
        run: Has the model, the batch and the precision.
        targets: Slices to compare. A setting such as `target.slices=2` applies to each of them.
        partitions: Partitions to try. A setting such as `partition.zero1=true` applies to each of them.
        remats: Remat policies to try in addition to the run's.
        microbatches: The only count to try, or None to try several.
        budget_s: Seconds for all compiles, and again for all measurements. None for no limit.
        tokens: Tokens to train on, for hours and dollars.
        budget_usd: Dollars to spend, for the tokens that they buy.
    """

    run: Run
    targets: tuple[TargetConfig, ...]
    partitions: tuple[PartitionConfig, ...]
    remats: tuple[RematConfig, ...]
    microbatches: int | None
    budget_s: float | None
    tokens: float | None
    budget_usd: float | None

    def space(self) -> Space:
        """Return the space of all layouts to search."""
        return enumerate_layouts(self.run, self.targets, self.partitions, self.remats, self.microbatches)

    @property
    def by_price(self) -> bool:
        """Whether layouts are ranked by dollars: the request has tokens or dollars, and every slice has a price."""
        planned = self.tokens is not None or self.budget_usd is not None
        return planned and all(dollars(target, 1.0) for target in self.targets)

    def cost(self, target: TargetConfig, step_s: float) -> float:
        """Return the cost that layouts are ranked by: dollars per step with `by_price`, otherwise seconds per step."""
        usd = dollars(target, step_s) if self.by_price else None
        return step_s if usd is None else usd

    @property
    def mode(self) -> SearchMode:
        """The settings of the search."""
        return settings_for(SearchMode, self.run.config.mode)

    @property
    def command(self) -> list[str]:
        """The arguments of the command, except those for the layout, the slice and the search."""
        flags, overrides = parts_of(self.run.arguments)
        own = (*ITS_OWN, "target.slices", "partition.schedule", "partition.rounds", "partition.zero1")
        keys = [(override, key_value(override)[0]) for override in overrides]
        return [*flags, *(override for override, key in keys if key not in own and not key.startswith("mode."))]


def parse_request(run: Run) -> SearchRequest:
    """Read the request of a run with `mode=search`. Raises ValueError for keys that a search cannot take."""
    config, mode = run.config, settings_for(SearchMode, run.config.mode)
    keys = {key_value(o)[0] for o in parts_of(run.arguments)[1]}
    if wrong := sorted(key for key in keys if key.partition(".")[0] == "mesh"):
        raise ValueError(
            f"{wrong[0]}=: mode=search looks for the mesh itself. Leave it out; mode=compile predicts one layout."
        )
    # `target.slices` applies to every target; the other settings are those of one slice.
    if mode.targets and (wrong := sorted(k for k in keys - {"target.slices"} if k.startswith("target."))):
        raise ValueError(f"{wrong[0]}=: which of several slices is meant? Search one at a time: target=SLICE.")
    names_remat = any(key.partition(".")[0] == "remat" for key in keys)
    return SearchRequest(
        run=run,
        targets=tuple(_targets(run, mode)),
        partitions=tuple(_partitions(config.partition, keys)),
        remats=() if names_remat else tuple(read_group("remat", RematConfig)),
        microbatches=config.microbatches if "microbatches" in keys else None,
        budget_s=None if mode.budget is None else parse_seconds(mode.budget),
        tokens=mode.tokens,
        budget_usd=mode.budget_usd,
    )


def _partitions(partition: PartitionConfig, keys: Collection[str]) -> Iterator[PartitionConfig]:
    """Yield the run's partition if the command names it or one of its rules, else all shipped ones.

    Each comes with its schedules, and with and without ZeRO-1. Settings that the command names apply to all of them.
    """
    named = {key.partition(".")[2].partition(".")[0] for key in keys if key.startswith("partition.")}
    if "partition" in keys or named - {*_OF_ANY_PARTITION}:
        partitions = [partition]
    else:
        settings = {key: getattr(partition, key) for key in named}
        partitions = [replace(other, **settings) for other in read_group("partition", PartitionConfig)]
    for each in partitions:
        yield from partition_variants(each, named)


def _targets(run: Run, mode: SearchMode) -> list[TargetConfig]:
    """Return the slices to compare. With `mode.shapes`, every available torus of each."""
    target, named = run.config.target, mode.targets
    parsed = {t.name: t for t in (parse_target(name, files=config_names("target")) for name in named)}
    several = [replace(_with_settings_of(target.chip, t), slices=target.slices) for t in parsed.values()]
    targets = several or [target]
    refuse([problem for t in targets for problem in t.problems()])
    for t in targets:
        if t.chips is not None and (t.chip is not None or platform_of(t.platform).runs_on_host):
            continue
        if t.chips is not None:
            raise ValueError(
                f"target.chips={t.chips} says how many chips, and not which. Add target.chip=NAME, one of "
                f"{', '.join(known_chips())}."
            )
        raise ValueError(
            f"target={t.name} has no chip whose figures are known, so nothing can be estimated. Name a slice, "
            "such as target=v4-64, or several: target=[v4-64,v5e-64], or so many CPU devices of this machine, such as "
            "target=cpu8, which are timed. To time layouts of other devices: valkyrie-train -m mode=measure "
            "hydra/sweeper=layouts."
        )
    return [shape for t in targets for shape in _shapes(t)] if mode.shapes else targets


def _with_settings_of(chip: ChipConfig | None, target: TargetConfig) -> TargetConfig:
    """Return a slice with the figures of its chip that the run sets. Raises ValueError if they are for another chip."""
    if chip is None or chip == known_chips().get(chip.name):
        return target
    if target.chip is None or target.chip.name != chip.name:
        raise ValueError(
            f"target={target.name}: the command sets figures of {chip.name} (target.chip), which are not those of this "
            f"slice. Search slices of {chip.name} alone, or leave the experiment out that sets them."
        )
    return replace(target, chip=chip)


def _shapes(target: TargetConfig) -> list[TargetConfig]:
    chip, chips = target.chip, target.chips
    if chip is None or chips is None or chip.ici_axes is None:
        return [target]
    shapes = chip.slices.shapes(chips)
    slices = [slice_of(chip, shape) for shape in shapes]
    slices += [slice_of(chip, shape, twisted=True) for shape in shapes if chip.slices.is_twisted(shape)]
    return [replace(shape, slices=target.slices) for shape in slices] or [target]


def tokens_of(run: Run) -> int:
    """Return the tokens per step."""
    return run.config.batch * run.config.seq


def dollars(target: TargetConfig, seconds: float) -> float | None:
    """Return the on-demand price of a slice for some seconds, or None if unknown."""
    usd = None if target.chip is None else target.chip.usd_per_hour
    return None if usd is None or target.chips is None else usd * target.chips * target.slices * seconds / 3600


def affordable(target: TargetConfig, usd: float) -> float | None:
    """Return the seconds that a budget in dollars buys on a slice, or None if no price above 0 is known."""
    per_second = dollars(target, 1.0)
    return usd / per_second if per_second else None
