"""What a search is asked: the slices, what may vary, for how long it may look, and for how many tokens or dollars."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
from valkyrie.search.estimate.space import Space, schedules, space_of, with_zero1
from valkyrie.units import seconds_of

ITS_OWN = ("mode", "target", "partition", "remat", "microbatches", "device_batch", "name")
"""Keys that the answer writes anew, or that are the search's alone."""
_OF_ANY_PARTITION = ("zero1", "gradient_sum", "parameter_memory", "optimizer_memory", "schedule", "rounds")
"""Keys of a partition that all of them can have."""


@dataclass(frozen=True)
class SearchRequest:
    """A search as it was asked: the run that says model, batch and precision, and the rest of the command.

    What the command names of partition, remat and microbatches (or `device_batch`) stays; the rest varies. A setting
    such as `partition.zero1=true` goes for every partition, `target.slices=2` for every slice. `budget_s`: seconds
    after which nothing new is compiled. `tokens`, `budget_usd`: for which hours and dollars are told.
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
        """Return every layout that may answer it."""
        return space_of(self.run, self.targets, self.partitions, self.remats, self.microbatches)

    @property
    def by_price(self) -> bool:
        """Whether layouts are chosen by dollars: tokens or dollars are asked for, and every slice has its price."""
        asked_for = self.tokens is not None or self.budget_usd is not None
        return asked_for and all(dollars(target, 1.0) for target in self.targets)

    def cost(self, target: TargetConfig, step_s: float) -> float:
        """Return what a layout is chosen by: its step, or where dollars decide, what that costs."""
        usd = dollars(target, step_s) if self.by_price else None
        return step_s if usd is None else usd

    @property
    def mode(self) -> SearchMode:
        """The settings of the search."""
        return settings_for(SearchMode, self.run.config.mode)

    @property
    def command(self) -> list[str]:
        """The arguments of the command that say nothing of layout, slice or search."""
        flags, overrides = parts_of(self.run.arguments)
        own = (*ITS_OWN, "target.slices", "partition.schedule", "partition.rounds", "partition.zero1")
        keys = [(override, key_value(override)[0]) for override in overrides]
        return [*flags, *(override for override, key in keys if key not in own and not key.startswith("mode."))]


def parse_request(run: Run) -> SearchRequest:
    """Read the request of a run with `mode=search`. Raises ValueError for keys that a search cannot take."""
    config, mode = run.config, settings_for(SearchMode, run.config.mode)
    given = {key_value(o)[0] for o in parts_of(run.arguments)[1]}
    if wrong := sorted(key for key in given if key.partition(".")[0] == "mesh"):
        raise ValueError(
            f"{wrong[0]}=: mode=search looks for the mesh itself. Leave it out; mode=compile predicts one layout."
        )
    if mode.targets and (wrong := sorted(key for key in given if _of_one_target(key))):
        raise ValueError(f"{wrong[0]}=: which of several slices is meant? Search one at a time: target=SLICE.")
    remat_given = any(key.partition(".")[0] == "remat" for key in given)
    return SearchRequest(
        run=run,
        targets=tuple(_targets(run, mode)),
        partitions=tuple(_partitions(config.partition, given)),
        remats=() if remat_given else tuple(read_group("remat", RematConfig)),
        microbatches=config.microbatches if "microbatches" in given else None,
        budget_s=None if mode.budget is None else seconds_of(mode.budget),
        tokens=mode.tokens,
        budget_usd=mode.budget_usd,
    )


def _partitions(partition: PartitionConfig, given: Collection[str]) -> Iterator[PartitionConfig]:
    """Yield the partitions that are looked at, each schedule of a pipeline, and each without and with ZeRO-1.

    The run's own alone where it, or a rule of it, is named; else every shipped one, with the settings that are named;
    a schedule, rounds, or ZeRO-1, that are named do not vary.
    """
    named = {key.partition(".")[2].partition(".")[0] for key in given if key.startswith("partition.")}
    if "partition" in given or named - {*_OF_ANY_PARTITION}:
        partitions = [partition]
    else:
        settings = {key: getattr(partition, key) for key in named}
        partitions = [replace(other, **settings) for other in read_group("partition", PartitionConfig)]
    for one in partitions:
        for scheduled in schedules(one, named):
            yield from [scheduled] if "zero1" in named or scheduled.zero1 else with_zero1(scheduled)


def _targets(run: Run, mode: SearchMode) -> list[TargetConfig]:
    """Return the slices that are compared; with `mode.shapes` every shape that each comes in."""
    target, named = run.config.target, mode.targets
    parsed = {t.name: t for t in (parse_target(name, files=config_names("target")) for name in named)}
    several = [replace(_with_settings_of(target.chip, t), slices=target.slices) for t in parsed.values()]
    targets = several or [target]
    refuse([problem for t in targets for problem in t.problems()])
    without = [t for t in targets if t.chips is None or (t.chip is None and not platform_of(t.platform).runs_on_host)]
    if without and without[0].chips is not None:
        raise ValueError(
            f"target.chips={without[0].chips} says how many chips, and not which. Add target.chip=NAME, one of "
            f"{', '.join(known_chips())}."
        )
    if without:
        raise ValueError(
            f"target={without[0].name} has no chip whose figures are known, so nothing can be estimated. Name a slice, "
            "such as target=v4-64, or several: target=[v4-64,v5e-64], or so many CPU devices of this machine, such as "
            "target=cpu8, which are timed. To time layouts of other devices: valkyrie-train -m mode=measure "
            "hydra/sweeper=layouts."
        )
    return [shape for t in targets for shape in _shapes(t)] if mode.shapes else targets


def _of_one_target(key: str) -> bool:
    """Return whether a setting is of one slice alone; each may be asked for as often (`target.slices`)."""
    return key.startswith("target.") and key != "target.slices"


def _with_settings_of(chip: ChipConfig | None, target: TargetConfig) -> TargetConfig:
    """Return a slice whose chip is as the run has it, where an experiment sets figures; ValueError for another chip."""
    if chip is None or chip == known_chips().get(chip.name):
        return target
    if target.chip is None or target.chip.name != chip.name:
        raise ValueError(
            f"target={target.name}: the command sets figures of {chip.name} (target.chip), which are not those of this "
            f"slice. Search slices of {chip.name} alone, or leave the experiment out that sets them."
        )
    return replace(target, chip=chip)


def _shapes(target: TargetConfig) -> Sequence[TargetConfig]:
    chip, chips = target.chip, target.chips
    if chip is None or chips is None or chip.ici_axes is None:
        return [target]
    shapes = chip.slices.shapes(chips)
    found = [slice_of(chip, shape) for shape in shapes]
    found += [slice_of(chip, shape, twisted=True) for shape in shapes if chip.slices.is_twisted(shape)]
    return [replace(shape, slices=target.slices) for shape in found] or [target]


def tokens_of(run: Run) -> int:
    """Return the tokens of a step."""
    return run.config.batch * run.config.seq


def dollars(target: TargetConfig, seconds: float) -> float | None:
    """Return what a slice costs for so long, on demand; None where no price is known."""
    usd = None if target.chip is None else target.chip.usd_per_hour
    return None if usd is None or target.chips is None else usd * target.chips * target.slices * seconds / 3600


def affordable(target: TargetConfig, usd: float) -> float | None:
    """Return the seconds that a slice can be had for so many dollars; None where no price above 0 is known."""
    one = dollars(target, 1.0)
    return usd / one if one else None
