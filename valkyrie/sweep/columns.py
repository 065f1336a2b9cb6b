"""All columns for tables of trials, and the columns of each table. Does not import JAX."""

from __future__ import annotations

from valkyrie.runs.columns import Column
from valkyrie.sweep.rows import Row
from valkyrie.units import GIB

_Column = Column[Row]
_ALL_COLUMNS = (
    _Column(
        "rank",
        "#",
        "count",
        lambda r: r.rank,
        "rank among trials whose speed was obtained the same way (predicted, measured or trained); ties are within "
        "measurement noise",
    ),
    _Column(
        "label", "layout", "layout", lambda r: r.label, "mesh, partition, microbatches and remat; click for details"
    ),
    _Column("sweep", "sweep", "text", lambda r: r.trial.sweep),
    _Column("name", "trial", "text", lambda r: r.trial.name),
    _Column("title", "trial", "text", lambda r: r.trial.title),
    _Column("key", "key", "text", lambda r: r.trial.key),
    _Column("stage", "stage", "text", lambda r: r.trial.stage),
    _Column("status", "status", "text", lambda r: r.trial.status.value),
    _Column("outcome", "status", "text", lambda r: r.status, "status of the trial"),
    _Column("result", "result", "text", lambda r: r.result_text, min_width=0),
    _Column("simulated", "simulated", "text", lambda r: r.speed_kind.simulated),
    _Column(
        "seen",
        "source",
        "text",
        lambda r: r.speed_kind.label,
        "where the speed comes from (predicted, measured or trained), and its target",
    ),
    _Column("target", "target", "text", lambda r: r.speed_kind.target),
    _Column("chips", "chips", "count", lambda r: r.about.chips),
    _Column("model", "model", "text", lambda r: r.work.model),
    _Column("batch", "batch", "count", lambda r: r.work.batch),
    _Column("seq", "seq", "count", lambda r: r.work.seq),
    _Column("precision", "precision", "text", lambda r: r.work.precision),
    _Column("varied", "varied", "text", lambda r: " ".join(r.work.varied_settings)),
    _Column("settings", "varied", "text", lambda r: r.settings, min_width=6),
    _Column("work", "workload", "text", lambda r: r.work.label),
    _Column("parameters", "parameters", "count", lambda r: r.trial.results.parameters),
    _Column("layout", "layout", "text", lambda r: r.layout),
    _Column("mesh", "mesh", "text", lambda r: r.about.mesh, "number of devices along each mesh axis"),
    _Column(
        "partition",
        "partition",
        "text",
        lambda r: r.about.partition,
        "which logical axes are sharded over which mesh axes",
    ),
    _Column("microbatches", "microbatches", "count", lambda r: r.about.microbatches),
    _Column("remat", "remat", "text", lambda r: r.about.remat),
    _Column(
        "alike",
        "same as",
        "text",
        lambda r: r.equivalent_partition,
        "a simpler partition that shards every array the same way",
    ),
    _Column("step_s", "step", "seconds", lambda r: r.step_s, "step time; the median if measured", "step_ms", 1e3),
    _Column(
        "predicted_step_s",
        "predicted step",
        "seconds",
        lambda r: r.prediction and r.prediction.step_s,
        "predicted step time of the same layout",
        "predicted_step_ms",
        1e3,
    ),
    _Column("predicted_mfu", "predicted MFU", "share", lambda r: r.prediction and r.prediction.step.mfu),
    _Column("p90_s", "p90", "seconds", lambda r: r.step.p90_s, "90th percentile of the step time"),
    _Column("min_s", "fastest step", "seconds", lambda r: r.step.min_s),
    _Column("tokens_per_second", "tokens/s", "speed", lambda r: r.tokens_per_second, "tokens per second on all chips"),
    _Column(
        "tokens_per_second_per_chip",
        "tokens/s/chip",
        "speed",
        lambda r: r.tokens_per_second_per_chip,
        "tokens per second, divided by the number of chips",
    ),
    _Column(
        "mfu", "MFU", "share", lambda r: r.step.mfu, "model FLOPs per second, divided by the peak FLOP/s of the chips"
    ),
    _Column(
        "peak_bytes",
        "peak memory",
        "bytes",
        lambda r: r.peak_bytes,
        "peak memory per device, or the memory needed if it does not fit",
        "hbm_gib",
        1 / GIB,
    ),
    _Column("usable_bytes", "usable memory", "bytes", lambda r: r.trial.results.memory.usable),
    _Column(
        "full",
        "of usable",
        "share",
        lambda r: _ratio(r.peak_bytes, r.trial.results.memory.usable),
        "peak memory as a share of the usable memory of a device",
    ),
    _Column(
        "sent_bytes",
        "sent",
        "sent",
        lambda r: r.sent_bytes,
        "bytes sent by each device per step",
        "comm_bytes/total",
    ),
    _Column("exposed_s", "waiting", "seconds", lambda r: r.exposed_s),
    _Column(
        "waiting",
        "waiting",
        "share",
        lambda r: _ratio(r.exposed_s, r.step_s),
        "share of the step spent waiting for communication",
    ),
    _Column(
        "goodput",
        "goodput",
        "share",
        lambda r: r.goodput and r.goodput.share,
        "share of the run's wall time, including restarts, spent on steps that were not repeated",
    ),
    _Column(
        "restarts",
        "restarts",
        "count",
        lambda r: r.goodput and r.goodput.restarts,
        "number of times that the training was restarted before it finished",
    ),
    _Column(
        "data_wait",
        "data wait",
        "share",
        lambda r: r.data_wait,
        "share of the run's step time spent waiting for data",
    ),
    _Column("loss", "loss", "loss", lambda r: r.trial.results.loss),
    _Column("eval_loss", "evaluation loss", "loss", lambda r: r.trial.results.eval_loss),
    _Column("trained_loss", "loss", "loss", lambda r: r.trial.results.loss if r.trial.stage == "train" else None),
    _Column(
        "evaluated_loss",
        "evaluation loss",
        "loss",
        lambda r: r.trial.results.eval_loss if r.trial.stage == "eval" else None,
    ),
    _Column(
        "dollars_per_million_tokens",
        "$/Mtok",
        "dollars",
        lambda r: r.dollars_per_million_tokens,
        "dollars per million tokens, at the on-demand price",
    ),
    _Column(
        "front",
        "Pareto front",
        "text",
        lambda r: "memory" if r.on_pareto_front else "",
        "no other layout with the same workload is as fast with less memory",
    ),
    _Column("wall_s", "wall time", "seconds", lambda r: r.trial.wall_s),
    _Column("reason", "reason", "text", lambda r: r.reason, "why the trial has no speed"),
    _Column("folder", "folder", "text", lambda r: None if r.folder is None else str(r.folder)),
)
COLUMNS = {column.name: column for column in _ALL_COLUMNS}


def select_columns(*names: str) -> list[Column[Row]]:
    """Return the columns with the given names."""
    return [COLUMNS[name] for name in names]


_RATES = ("tokens_per_second", "tokens_per_second_per_chip", "mfu")
TERMINAL_COLUMNS = select_columns(
    *("rank", "title", "settings", "tokens_per_second_per_chip", "tokens_per_second", "step_s", "mfu", "peak_bytes"),
    *("trained_loss", "evaluated_loss", "result"),
)
PAGE_COLUMNS = select_columns(
    *("rank", "label", "tokens_per_second_per_chip", "step_s", "seen", "outcome", "partition", "mesh", "alike"),
    *("tokens_per_second", "p90_s", "mfu", "peak_bytes", "full", "sent_bytes", "waiting", "goodput", "restarts"),
    *("data_wait", "dollars_per_million_tokens", "reason"),
)
MARKDOWN_COLUMNS = select_columns(
    *("rank", "label", "tokens_per_second_per_chip", "tokens_per_second", "step_s", "mfu", "peak_bytes", "sent_bytes"),
    *("dollars_per_million_tokens", "front"),
)
BEST_COLUMNS = select_columns(
    *("layout", "tokens_per_second_per_chip", "step_s", "seen", "work", "peak_bytes", "full"),
    "dollars_per_million_tokens",
)
CSV_COLUMNS = select_columns(
    *("sweep", "name", "key", "stage", "status", "simulated", "target", "chips", "model", "batch", "seq", "precision"),
    *("varied", "parameters", "layout", "mesh", "partition", "microbatches", "remat", "step_s", "p90_s", "min_s"),
    *(*_RATES, "peak_bytes", "usable_bytes", "sent_bytes", "exposed_s", "loss", "eval_loss", "goodput", "restarts"),
    *("data_wait", "dollars_per_million_tokens", "wall_s", "reason", "folder"),
)
"""Columns of CSV files, and the fields of `valkyrie.TrialRow`."""
WANDB_RUN_COLUMNS = select_columns(
    *("status", "reason", "stage", "wall_s", "simulated", *_RATES, "step_s", "peak_bytes", "loss", "sent_bytes"),
    *("goodput", "restarts", "data_wait", "dollars_per_million_tokens", "predicted_step_s", "predicted_mfu"),
)
"""Columns in the summary of a trial's W&B run."""
WANDB_TABLE_COLUMNS = select_columns(
    *("label", "layout", "stage", "status", *_RATES, "step_s", "peak_bytes", "sent_bytes", "simulated", "mesh"),
    *("partition", "microbatches", "remat", "model", "target", "chips", "wall_s", "reason", "name"),
    *("dollars_per_million_tokens", "predicted_step_s", "predicted_mfu"),
)
"""Columns of the table in a sweep's W&B run."""


def _ratio(part: int | float | None, whole: int | float | None) -> float | None:
    return part / whole if part is not None and whole else None
