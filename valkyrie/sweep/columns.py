"""All columns of tables of trials, and the columns of each table. Imports no JAX."""

from __future__ import annotations

from valkyrie.runs.columns import Column
from valkyrie.sweep.rows import Row
from valkyrie.units import GIB

_C = Column[Row]
_ALL = (
    _C("rank", "#", "count", lambda r: r.rank, "rank among speeds of the same kind; equal within the noise"),
    _C("label", "layout", "layout", lambda r: r.label, "mesh, partition, microbatches and remat; opens its details"),
    _C("sweep", "sweep", "text", lambda r: r.trial.sweep),
    _C("name", "trial", "text", lambda r: r.trial.name),
    _C("title", "trial", "text", lambda r: r.trial.title),
    _C("key", "key", "text", lambda r: r.trial.key),
    _C("stage", "stage", "text", lambda r: r.trial.stage),
    _C("status", "status", "text", lambda r: r.trial.status.value),
    _C("outcome", "status", "text", lambda r: r.status, "status of the trial"),
    _C("result", "result", "text", lambda r: r.verdict, least=0),
    _C("simulated", "simulated", "text", lambda r: r.group.simulated),
    _C("seen", "speed is", "text", lambda r: r.group.label, "predicted, measured or trained, and on which target"),
    _C("target", "target", "text", lambda r: r.group.target),
    _C("chips", "chips", "count", lambda r: r.about.chips),
    _C("model", "model", "text", lambda r: r.work.model),
    _C("batch", "batch", "count", lambda r: r.work.batch),
    _C("seq", "seq", "count", lambda r: r.work.seq),
    _C("precision", "precision", "text", lambda r: r.work.precision),
    _C("varied", "varied", "text", lambda r: " ".join(r.work.varied)),
    _C("work", "work", "text", lambda r: r.work.label),
    _C("parameters", "parameters", "count", lambda r: r.trial.results.parameters),
    _C("layout", "layout", "text", lambda r: r.layout),
    _C("mesh", "mesh", "text", lambda r: r.about.mesh, "devices along each axis of the mesh"),
    _C("partition", "partition", "text", lambda r: r.about.partition, "which model dimension is split over which axis"),
    _C("microbatches", "microbatches", "count", lambda r: r.about.microbatches),
    _C("remat", "remat", "text", lambda r: r.about.remat),
    _C("alike", "same as", "text", lambda r: r.alike, "a simpler partition that splits every array the same way"),
    _C("step_s", "step", "seconds", lambda r: r.step_s, "one step; the median if measured", "step_ms", 1e3),
    _C(
        "predicted_step_s",
        "predicted step",
        "seconds",
        lambda r: r.prediction and r.prediction.step_s,
        "one step of the same layout, as predicted",
        "predicted_step_ms",
        1e3,
    ),
    _C("predicted_mfu", "predicted MFU", "share", lambda r: r.prediction and r.prediction.step.mfu),
    _C("p90_s", "p90", "seconds", lambda r: r.step.p90_s, "nine of ten steps are faster than this"),
    _C("min_s", "fastest step", "seconds", lambda r: r.step.min_s),
    _C("tokens_per_second", "tokens/s", "speed", lambda r: r.rate, "tokens a second of the whole slice"),
    _C(
        "tokens_per_second_per_chip",
        "tokens/s/chip",
        "speed",
        lambda r: r.rate_per_chip,
        "tokens a second, divided by the chips",
    ),
    _C("mfu", "MFU", "share", lambda r: r.step.mfu, "FLOPs of the model over what the chips could do at most"),
    _C(
        "peak_bytes",
        "peak memory",
        "bytes",
        lambda r: r.peak,
        "peak memory of one device in a step, or what it would need",
        "hbm_gib",
        1 / GIB,
    ),
    _C("usable_bytes", "usable memory", "bytes", lambda r: r.trial.results.memory.usable),
    _C(
        "full",
        "of usable",
        "share",
        lambda r: _ratio(r.peak, r.trial.results.memory.usable),
        "peak over usable memory of a device",
    ),
    _C(
        "sent_bytes",
        "sent",
        "sent",
        lambda r: r.sent_bytes,
        "bytes that one device sends in a step",
        "comm_bytes/total",
    ),
    _C("exposed_s", "waiting", "seconds", lambda r: r.exposed_s),
    _C(
        "waiting",
        "waiting",
        "share",
        lambda r: _ratio(r.exposed_s, r.step_s),
        "share of the step in which a device waits for communication",
    ),
    _C(
        "goodput",
        "goodput",
        "share",
        lambda r: r.goodput and r.goodput.share,
        "share of a training's wall time, restarts included, in steps that count",
    ),
    _C(
        "restarts",
        "restarts",
        "count",
        lambda r: r.goodput and r.goodput.restarts,
        "how often a training was started again before it had ended",
    ),
    _C(
        "data_wait",
        "data wait",
        "share",
        lambda r: r.data_wait,
        "share of a training's steps in which devices waited for data",
    ),
    _C("loss", "loss", "loss", lambda r: r.trial.results.loss),
    _C("trained_loss", "loss", "loss", lambda r: r.trial.results.loss if r.trial.stage == "train" else None),
    _C(
        "dollars_per_million_tokens",
        "$/Mtok",
        "dollars",
        lambda r: r.per_million,
        "dollars for a million tokens, on demand",
    ),
    _C(
        "front",
        "Pareto front",
        "text",
        lambda r: "memory" if r.front else "",
        "no other layout of the same work is as fast with less memory",
    ),
    _C("wall_s", "wall time", "seconds", lambda r: r.trial.wall_s),
    _C("reason", "reason", "text", lambda r: r.reason, "why there is no speed"),
)
COLUMNS = {column.name: column for column in _ALL}


def columns(*names: str) -> list[Column[Row]]:
    """Return columns by their names."""
    return [COLUMNS[name] for name in names]


_RATES = ("tokens_per_second", "tokens_per_second_per_chip", "mfu")
TERMINAL = columns(
    *("rank", "title", "tokens_per_second_per_chip", "tokens_per_second", "step_s", "mfu", "peak_bytes"),
    *("trained_loss", "result"),
)
PAGE = columns(
    *("rank", "label", "tokens_per_second_per_chip", "step_s", "seen", "outcome", "partition", "mesh", "alike"),
    *("tokens_per_second", "p90_s", "mfu", "peak_bytes", "full", "sent_bytes", "waiting", "goodput", "restarts"),
    *("data_wait", "dollars_per_million_tokens", "reason"),
)
MARKDOWN = columns(
    *("rank", "label", "tokens_per_second_per_chip", "tokens_per_second", "step_s", "mfu", "peak_bytes", "sent_bytes"),
    *("dollars_per_million_tokens", "front"),
)
BEST = columns(
    *("layout", "tokens_per_second_per_chip", "step_s", "seen", "work", "peak_bytes", "full"),
    "dollars_per_million_tokens",
)
CSV = columns(
    *("sweep", "name", "key", "stage", "status", "simulated", "target", "chips", "model", "batch", "seq", "precision"),
    *("varied", "parameters", "layout", "mesh", "partition", "step_s", "p90_s", "min_s", *_RATES, "peak_bytes"),
    *("usable_bytes", "sent_bytes", "exposed_s", "goodput", "restarts", "data_wait", "dollars_per_million_tokens"),
    "reason",
)
WANDB_RUN = columns(
    *("status", "reason", "stage", "wall_s", "simulated", *_RATES, "step_s", "peak_bytes", "loss", "sent_bytes"),
    *("goodput", "restarts", "data_wait", "dollars_per_million_tokens", "predicted_step_s", "predicted_mfu"),
)
"""Summary of a trial's run at W&B."""
WANDB_TABLE = columns(
    *("label", "layout", "stage", "status", *_RATES, "step_s", "peak_bytes", "sent_bytes", "simulated", "mesh"),
    *("partition", "microbatches", "remat", "model", "target", "chips", "wall_s", "reason", "name"),
    *("dollars_per_million_tokens", "predicted_step_s", "predicted_mfu"),
)
"""Table of a sweep's run at W&B."""


def _ratio(part: int | float | None, whole: int | float | None) -> float | None:
    return part / whole if part is not None and whole else None
