"""Explains why a program does not fit: its largest arguments and allocations, and what would make them smaller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from valkyrie.foreign_errors import Allocation
from valkyrie.search.compile.prediction import Hint, HintCode, MemoryReport
from valkyrie.units import gib, percent

if TYPE_CHECKING:
    import jax

MIN_SHARE = 0.01
"""Arguments below this share of the usable memory are neither listed nor worth sharding."""
_MAX_ARGUMENTS, _MAX_LISTED = 3, 8
"""Numbers of arguments that a hint names, and that are listed."""


@dataclass(frozen=True)
class Argument:
    """An argument of a program.

    Args:
        name: Its name with its position in a tree: `params['w']`.
        shape: Dtype and dimensions, as XLA prints them.
        bytes: Bytes on one device.
        replicated_over: Sizes of the mesh axes over which it is replicated, by name.
    """

    name: str
    shape: str
    bytes: int
    replicated_over: dict[str, int]

    @property
    def savable(self) -> int:
        """Bytes on one device that sharding over `replicated_over` saves."""
        return self.bytes - self.bytes // math.prod(self.replicated_over.values())


def list_arguments(lowered: jax.stages.Lowered) -> list[Argument]:
    """Return the arguments of a program with known shardings, the largest on a device first."""
    import jax

    values: dict[str, Any] = getattr(getattr(lowered, "_lowering", None), "compile_args", {})
    info = getattr(values.get("all_args_info"), "debug_info", None)  # JAX has no public way to read names and shardings
    names, kept = getattr(info, "arg_names", None) or (), sorted(values.get("kept_var_idx") or ())
    shown = [names[i] if i < len(names) and names[i] else f"argument {i}" for i in kept]
    arguments = []
    for name, aval, sharding in zip(
        shown, values.get("global_in_avals", ()), values.get("in_shardings", ()), strict=False
    ):
        if not isinstance(sharding, jax.sharding.NamedSharding) or not hasattr(aval, "dtype"):
            continue
        used = {axis for entry in sharding.spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
        replicated = {str(axis): size for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used}
        size = math.prod(sharding.shard_shape(aval.shape)) * aval.dtype.itemsize
        arguments.append(Argument(name, f"{aval.dtype}[{','.join(map(str, aval.shape))}]", size, replicated))
    return sorted(arguments, key=lambda argument: -argument.bytes)


def explain_shortage(memory: MemoryReport, arguments: Sequence[Argument]) -> tuple[MemoryReport, list[Hint]]:
    """Add the largest arguments to a memory report, unless XLA listed allocations. Also returns what would help."""
    smallest = MIN_SHARE * (memory.usable or 0)
    if not memory.largest:
        largest = [Allocation(each.bytes, f"argument {each.name} {each.shape}") for each in arguments]
        memory = replace(memory, largest=tuple(entry for entry in largest if entry.bytes > smallest)[:_MAX_LISTED])
    if memory.needed is None or not memory.usable:
        return memory, []
    texts, missing = [], memory.needed - memory.usable
    large = sorted(arguments, key=lambda each: -each.savable)
    large = [each for each in large if each.savable > smallest][:_MAX_ARGUMENTS]
    if large:
        named = ", ".join(
            f"{each.name} ({gib(each.bytes)}, replicated over {' and '.join(each.replicated_over)})" for each in large
        )
        saved = sum(each.savable for each in large)
        verdict = "enough to fit" if saved >= missing else f"{percent(saved / missing)} of what is missing"
        texts.append(f"shard {named}: saves up to {gib(saved)} on a device, {verdict}.")
    temporary = memory.needed - sum(each.bytes for each in arguments)
    if arguments and temporary > missing / 2:
        texts.append(
            f"about {gib(temporary)} are results and temporaries, such as activations: use jax.checkpoint around "
            "layers, a smaller batch, or a mesh that shards the batch over more devices."
        )
    return memory, [Hint(HintCode.shortage, text) for text in texts]
