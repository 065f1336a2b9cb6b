"""What the backward pass of a run finds, activation by activation, in bytes of one device. Imports no JAX."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from valkyrie.config.run import Run
from valkyrie.models.block import SavedActivation
from valkyrie.parallel.layout import Layout
from valkyrie.parallel.remat import Place, RematConfig, remat_named, shipped_remats
from valkyrie.precision import DType

UNNAMED = "everything else"
"""What is kept of activations without a name."""


@dataclass(frozen=True)
class KeptBytes:
    """The bytes of one device that a policy keeps for the backward pass, by activation: on it and in host memory."""

    device: dict[str, int]
    host: dict[str, int]

    @property
    def on_device(self) -> int:
        """The sum on the device, in bytes."""
        return sum(self.device.values())

    @property
    def on_host(self) -> int:
        """The sum in host memory, in bytes."""
        return sum(self.host.values())


def kept_bytes(run: Run, layout: Layout | None = None, remat: RematConfig | None = None) -> KeptBytes:
    """Return what a run keeps for its backward pass under its own rematerialisation, or under another one."""
    remat, layout = remat or run.config.remat, layout or run.layout
    sizes: dict[Place, dict[str, float]] = {place: defaultdict(float) for place in Place}
    pipeline = layout.pipeline
    turns = 1.0 if pipeline is None else pipeline.kept / (pipeline.rounds * pipeline.microbatches)
    for kept in run.model.kept():
        place = place_of(kept, remat)
        sizes[place][kept.name or UNNAMED] += turns * bytes_of(kept, run, layout)
    device, host = ({name: int(n) for name, n in sizes[p].items() if n} for p in (Place.device, Place.host))
    return KeptBytes(device, host)


def made_again(run: Run) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the named activations that this run computes again: the bytes of one device that keeping one takes.

    With them the names of those that only serve to make it, and would not be made again either.
    """
    layout, remat = run.layout, run.config.remat
    if layout.pipeline is not None and layout.pipeline.alternates:  # keeps inputs alone, whatever there is room for
        return {}
    sizes: dict[str, float] = defaultdict(float)
    serving: dict[str, dict[str, None]] = defaultdict(dict)
    for kept in run.model.kept():
        again = place_of(kept, remat) is Place.nowhere and not _is_spared(kept, remat)
        if again and kept.name is not None and kept.count:
            sizes[kept.name] += bytes_of(kept, run, layout)
            if kept.needed_for is not None:
                serving[kept.needed_for][kept.name] = None
    return {name: (int(size), tuple(serving[name])) for name, size in sizes.items()}


def by_policy(run: Run) -> dict[str, KeptBytes]:
    """Return what each choice of `remat` keeps of a run, and its own lists where they are no choice's."""
    remats = {name: remat_named(name) for name in shipped_remats()}
    remats.setdefault(run.config.remat.label, run.config.remat)
    remats = {name: remat for name, remat in remats.items() if not run.changed(remat=remat).layout_problems()}
    layout = run.layout
    kept = {name: kept_bytes(run, layout, remat) for name, remat in remats.items()}
    return dict(sorted(kept.items(), key=lambda item: (-item[1].on_device, item[1].on_host)))


def bytes_of(kept: SavedActivation, run: Run, layout: Layout) -> float:
    """Return the bytes of activations on one device, in float32 or in the compute dtype.

    Of all layers, a stage has its own for the rows of all stages, which is as much as its rows of all layers.
    """
    config = run.config
    positions = config.seq if kept.positions is None else kept.positions * layout.shards("seq")
    lengths = {"batch": config.batch // layout.accumulated, "seq": min(config.seq, positions)}
    split: Sequence[tuple[str, ...]] = layout.activation(kept.tensor.axes)
    sizes = zip(kept.tensor.axes, kept.tensor.shape, split, strict=True)
    numbers = math.prod((lengths.get(axis or "", n)) / layout.parts(over) for axis, n, over in sizes)
    compute = 4 if config.precision.compute is DType.float32 else 2
    return kept.count * numbers * (4 if kept.float32 else compute)


def place_of(kept: SavedActivation, remat: RematConfig) -> Place:
    """Return where activations wait; what only serves to make something again does not where that is kept."""
    place = remat.place(kept.name, product=kept.product)
    if place is Place.nowhere and kept.always:
        return Place.device
    return Place.nowhere if _is_spared(kept, remat) else place


def _is_spared(kept: SavedActivation, remat: RematConfig) -> bool:
    return kept.needed_for is not None and remat.place(kept.needed_for) is not Place.nowhere
