"""What a step computes again for its backward pass, activation by activation, and which of them to keep next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from valkyrie.config.run import Run
from valkyrie.train.kept import kept_bytes, made_again
from valkyrie.units import duration, memory, percent

if TYPE_CHECKING:
    from valkyrie.machine.replay import Cost

AGAIN = "rematted_computation"
"""How JAX names what `jax.checkpoint` computes again, in the names of operations."""
WORTH = 0.01
"""The share of a step from which keeping an activation is advised."""
MARGIN = 1.2
"""How many times the estimated bytes must be free."""


def recomputation(run: Run, costs: Iterable[Cost]) -> dict[str, Any]:
    """Return what a run keeps for its backward pass, and what the rest takes to make again.

    Keys: `save` and `offload`, the lists of its `remat`; `device` and `host`, the bytes of one device that are kept by
    activation; `again`, a list of {"name", "bytes" that keeping it takes, "seconds" of the step that this spares}, by
    the replay's costs of the operations that bear its name.
    """
    kept, remat = kept_bytes(run), run.config.remat
    paths = [(set(cost.op_name.split("/")), cost.seconds) for cost in costs if AGAIN in cost.op_name]
    again = [
        {
            "name": name,
            "bytes": size,
            "seconds": sum(seconds for path, seconds in paths if not path.isdisjoint((name, *serving))),
        }
        for name, (size, serving) in made_again(run).items()
    ]
    again.sort(key=lambda entry: -entry["seconds"])
    return {"save": remat.save, "offload": remat.offload, "device": kept.device, "host": kept.host, "again": again}


def keep_next(summary: dict[str, Any]) -> list[str]:
    """Return which activation to keep next: the dearest to make again that the device has room for, else the host."""
    found, headroom = summary.get("remat"), summary["memory"]["headroom"]
    step = summary["step"]["step_s"]
    dear = [entry for entry in found["again"] if entry["seconds"] >= WORTH * step] if found else []
    if not found or not dear or headroom is None:
        return []
    fitting = [entry for entry in dear if MARGIN * entry["bytes"] <= headroom]
    best, key = (fitting[0], "save") if fitting else (dear[0], "offload")
    name, names = best["name"], [*found[key], best["name"]]
    spares = f"{duration(best['seconds'])} ({percent(best['seconds'] / step)} of the step) of computing it again"
    change = f"remat.{key}=[{','.join(names)}]"
    if key == "save":
        room = f"about {memory(best['bytes'])} more of the {memory(headroom)} that are free"
        text = f"Keep {name} next: {change} takes {room} and spares {spares}"
    else:
        text = (
            f"No dear activation has room on the device ({memory(headroom)} free). Offload {name} next: {change} sends "
            f"about {memory(best['bytes'])} to the host and back, and spares {spares}"
        )
    return [f"{text}, by the replay of the operations that bear its name."]
