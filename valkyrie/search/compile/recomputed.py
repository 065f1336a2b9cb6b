"""What a step computes again for its backward pass, activation by activation, and which of them to keep next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from valkyrie.config.run import Run
from valkyrie.search.compile.prediction import Hint, HintCode, Prediction, Recomputed, RematReport
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


def recomputation(run: Run, costs: Iterable[Cost]) -> RematReport:
    """Return what a run saves for its backward pass and what it recomputes, by the costs of a replay.

    An activation's seconds are those of the recomputed operations that bear its name.
    """
    kept, remat = kept_bytes(run), run.config.remat
    paths = [(set(cost.op_name.split("/")), cost.seconds) for cost in costs if AGAIN in cost.op_name]
    again = [
        Recomputed(name, size, sum((seconds for path, seconds in paths if not path.isdisjoint((name, *serving))), 0.0))
        for name, (size, serving) in made_again(run).items()
    ]
    again.sort(key=lambda entry: -entry.seconds)
    return RematReport(tuple(remat.save), tuple(remat.offload), kept.device, kept.host, tuple(again))


def keep_next(prediction: Prediction) -> list[Hint]:
    """Advise which activation to save next: the most expensive one that fits on the device, else one to offload."""
    report, memory_report, step = prediction.remat, prediction.memory, prediction.step
    if report is None or memory_report is None or memory_report.headroom is None or step is None:
        return []
    headroom = memory_report.headroom
    expensive = [entry for entry in report.again if entry.seconds >= WORTH * step.step_s]
    if not expensive:
        return []
    fitting = [entry for entry in expensive if MARGIN * entry.bytes <= headroom]
    best, key, names = (fitting[0], "save", report.save) if fitting else (expensive[0], "offload", report.offload)
    share = best.seconds / step.step_s
    spares = f"{duration(best.seconds)} ({percent(share)} of the step) of computing it again"
    change = f"remat.{key}=[{','.join((*names, best.name))}]"
    if fitting:
        room = f"about {memory(best.bytes)} more of the {memory(headroom)} that are free"
        text = f"Keep {best.name} next: {change} takes {room} and spares {spares}"
    else:
        text = (
            f"No dear activation has room on the device ({memory(headroom)} free). Offload {best.name} next: {change} "
            f"sends about {memory(best.bytes)} to the host and back, and spares {spares}"
        )
    text += ", by the replay of the operations that bear its name."
    return [Hint(HintCode.save_activation, text, share, changes=(change,))]
