"""Rematerialisation: which named activations are saved on the device or in host memory. Does not import JAX.

All other activations are recomputed. Each kind of block names its activations (`valkyrie.models.block`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

from valkyrie.checksums import digest
from valkyrie.paths import config_names, read_config
from valkyrie.problems import Problem, ProblemCode

if TYPE_CHECKING:
    from valkyrie.models.block import SavedActivation

ALL_ACTIVATIONS, PRODUCT_ACTIVATIONS = "all", "products"
"""Special values of `save`: every activation, or the results of all matrix products outside attention kernels."""
_MAX_LABEL_LENGTH = 40


class ActivationLocation(Enum):
    """Where an activation is stored for the backward pass: on the device, in host memory, or nowhere (recomputed)."""

    device = "device"
    host = "host"
    nowhere = "nowhere"


@dataclass
class RematConfig:
    """Activations that a block stores for its backward pass, by name. All others are recomputed.

    Args:
        save: Activations stored on the device. `all` is every one, `products` the results of all matrix products except
            those in attention kernels.
        offload: Activations stored in host memory.
    """

    name: str = "full"
    save: list[str] = field(default_factory=list)
    offload: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """A short stable name, such as `full` or `save_down+out_offload_gate`.

        `name`, unless `conf/remat` has a config of this name with other lists. In that case, the label is the name of
        the config in `conf/remat` that has the same lists as this one. If there is none, the label lists the
        activations, or is `custom_` and a hash if the list is longer than 40 characters.
        """
        lists_by_name = _shipped_lists()
        current_lists = (frozenset(self.save), frozenset(self.offload))
        if lists_by_name.get(self.name, current_lists) == current_lists:
            return self.name
        if current_lists in lists_by_name.values():
            return next(name for name, shipped_lists in lists_by_name.items() if shipped_lists == current_lists)
        words = zip(("save", "offload"), current_lists, strict=True)
        text = "_".join(f"{word}_{'+'.join(sorted(names))}" for word, names in words if names)
        return text if len(text) <= _MAX_LABEL_LENGTH else f"custom_{digest(text)[:6]}"

    @property
    def saves_everything(self) -> bool:
        """Whether all activations stay on the device: none is recomputed or offloaded."""
        return ALL_ACTIVATIONS in self.save and not self.offload

    def location(self, name: str | None, *, product: bool = False) -> ActivationLocation:
        """Return where an activation is stored.

        `name` is None for an activation without a name. `product` is whether it is the result of a matrix product
        outside attention kernels.
        """
        if name in self.offload:
            return ActivationLocation.host
        on_device = name in self.save or ALL_ACTIVATIONS in self.save or (product and PRODUCT_ACTIVATIONS in self.save)
        return ActivationLocation.device if on_device else ActivationLocation.nowhere

    def problems(self, names: Callable[[], Collection[str]]) -> list[Problem]:
        """Return problems for unknown activations, and for activations in both lists.

        Names in `conf/remat` are always legal, because they may belong to another model's blocks. `names` returns the
        model's activations, and is called only if a list has other names.
        """
        shipped_names, problems = _shipped_names(), []
        for key, special_names in (("save", (ALL_ACTIVATIONS, PRODUCT_ACTIVATIONS)), ("offload", ())):
            unshipped = [name for name in getattr(self, key) if name not in shipped_names and name not in special_names]
            model_names = names() if unshipped else ()
            if unknown := [name for name in unshipped if name not in model_names]:
                also = (
                    f", {ALL_ACTIVATIONS} (every activation) or {PRODUCT_ACTIVATIONS} (every matrix product)"
                    if special_names
                    else ""
                )
                legal = ", ".join(model_names)
                text = (
                    f"remat.{key}: the model has no activation{'s' * (len(unknown) > 1)} {', '.join(unknown)}. "
                    f"Use {legal}{also}."
                )
                problems.append(Problem(ProblemCode.unknown_name, f"remat.{key}", unknown, text))
        if duplicate_names := [name for name in dict.fromkeys(self.save) if name in self.offload]:
            text = (
                f"remat.save and remat.offload both list {', '.join(duplicate_names)}. An activation is stored either "
                "on the device or in host memory: remove it from one list."
            )
            problems.append(Problem(ProblemCode.conflict, "remat.save", duplicate_names, text))
        return problems


SAVE_EVERYTHING = RematConfig("none", [ALL_ACTIVATIONS])
"""Saves all activations; nothing is recomputed."""


def saved_location(activation: SavedActivation, remat: RematConfig) -> ActivationLocation:
    """Return where an activation is saved under a remat policy.

    An activation that is needed only to recompute a saved one is not saved. One with `never_recomputed` is saved in
    device memory if the policy does not save it.
    """
    location = remat.location(activation.name, product=activation.product)
    if location is ActivationLocation.nowhere and activation.never_recomputed:
        return ActivationLocation.device
    return ActivationLocation.nowhere if is_not_needed(activation, remat) else location


def is_not_needed(activation: SavedActivation, remat: RematConfig) -> bool:
    """Return whether an activation is needed only to recompute another one, which is saved."""
    saved_for = activation.needed_for
    return saved_for is not None and remat.location(saved_for) is not ActivationLocation.nowhere


@cache
def shipped_remat_names() -> tuple[str, ...]:
    """Return the names of the configs in `conf/remat`."""
    return tuple(config_names("remat"))


def load_remat(name: str) -> RematConfig:
    """Load `conf/remat/NAME.yaml`."""
    return read_config("remat", name, RematConfig)


@cache
def _shipped_names() -> frozenset[str]:
    """Return all activation names in the files of `conf/remat`."""
    names = (name for lists in _shipped_lists().values() for listed in lists for name in listed)
    return frozenset(names) - {ALL_ACTIVATIONS, PRODUCT_ACTIVATIONS}


@cache
def _shipped_lists() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Return a dict from the name of each config in `conf/remat` to its lists (`save`, `offload`)."""
    remats = {name: load_remat(name) for name in shipped_remat_names()}
    return {name: (frozenset(remat.save), frozenset(remat.offload)) for name, remat in remats.items()}
