"""Compares estimates with published step times of GPU clusters.

For each group of rows, reports how well estimates order the layouts, the errors of the estimates, and the regret: how
much slower the layout with the shortest estimate is than the fastest layout.

    python experiments/search/gpus.py
    python experiments/search/gpus.py --rows FILE.csv     # other rows with the columns of measured_gpus.csv
    python experiments/search/gpus.py --each              # every row too

measured_gpus.csv has the published step times and their sources: vTrain (a 175B GPT on 512 A100s, a 3.6B GPT on 64,
small GPTs on 2 to 8), Megatron-LM (weak scaling, sequence parallelism) and torchtitan (Llama 3.1). Its columns
`host_gbs` and `hbm_gbs` replace the bandwidths of network and memory in the chip's file: in vTrain's clusters, a host
has 800 Gb/s in total, and torchtitan's H100s have 2.4 TB/s. The constants for each group are fitted to the other groups
of measured_gpus.csv. The fit for H100s starts from the constants of A100s.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run, known_axes
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig
from valkyrie.models.families import gpt
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.mesh import parse_mesh
from valkyrie.parallel.partition import PartitionConfig, PipelineSchedule, resolve_rules
from valkyrie.parallel.remat import RematConfig
from valkyrie.search.estimate.efficiency import Efficiency
from valkyrie.search.estimate.fit import TimedLayouts, fit_constants
from valkyrie.search.estimate.links import host_axis_links
from valkyrie.search.estimate.work import step_work

ROWS_FILE = Path(__file__).with_name("measured_gpus.csv")
INITIAL_CONSTANTS = Efficiency(
    products=0.9,
    mixing=0.5,
    half_rate_flops=2e9,
    tile=64.0,
    hbm=0.8,
    passes=2.0,
    passes_again=1.0,
    passes_kept=0.3,
    scores_passes=6.0,
    launch_s=2.5e-4,
    unhidden_loads=0.0,
    on_chip_bytes=0.0,
    hidden_weights=0.8,
    hidden_gradients=0.0,
    hidden_activations=0.0,
    gathers=0.7,
    windowed=0.0,
    whole_batches=0.0,
    sums=0.65,
    outside=0.9,
)
"""Initial constants of a fit.

`products`, `sums` and `outside` (achieved shares of peak FLOP/s, NVLink bandwidth and InfiniBand bandwidth) are
Calculon's values for the A100 (arXiv 2305.11375).
"""
FITTED_CONSTANTS = ("products", "scores_passes", "half_rate_flops", "passes", "launch_s", "sums", "outside")
FIRST_CHIP = "a100"
"""The chip with the most rows. Its constants are the initial values for other chips."""
FITTED_FOR_OTHER_CHIPS = ("products", "mixing")
"""Constants fitted for chips other than `FIRST_CHIP`, which have too few runs to fit more.

`scores_passes` is fixed at 0, because fused attention kernels keep the scores on the chip.
"""
FULL_REMAT = RematConfig("full", [])
ATTENTION_REMAT = RematConfig("selective", ["products"])
"""Approximates Megatron-LM's selective recomputation of attention, from its scores onwards (arXiv 2205.05198).

Saves the results of matrix products outside attention. Unlike Megatron-LM, recomputes all other activations too.
"""
NO_REMAT = RematConfig("none", ["all"])
SELECTIVE_REMATS = {"a100": ATTENTION_REMAT, "h100": NO_REMAT}


@dataclass(frozen=True)
class Row:
    """A published run: its line in the table, an equivalent run, and the measured seconds per step."""

    line: dict[str, str]
    run: Run
    step_s: float


def main() -> None:
    """Print the table of all groups, every row if requested (`--each`), and the fitted constants of each chip."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS_FILE)
    parser.add_argument("--each", action="store_true", help="print every row too")
    args, console = parser.parse_args(), Console(width=140, highlight=False)
    timed_groups = published_groups()
    constants = fit_by_chip(timed_groups)
    by_group = estimate_by_group(read_rows(args.rows), timed_groups, constants)
    console.print(make_table(by_group))
    if args.each:
        for pairs in by_group.values():
            for row, estimate in pairs:
                settings = " ".join(
                    f"{k}={row.line[k]}" for k in ("model", "dp", "fsdp", "tp", "pp", "vpp", "micro_bs", "remat")
                )
                console.print(
                    f"{settings}: {row.step_s:.3f} s, estimated {estimate:.3f} ({estimate / row.step_s - 1:+.1%})"
                )
    for chip, chip_constants in constants.items():
        console.print(chip, chip_constants)


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file, except those that cannot be estimated."""
    with file.open() as lines:
        return [row for line in csv.DictReader(lines) if (row := parse_row(line)) is not None]


def published_groups() -> list[TimedLayouts]:
    """Return the rows of `ROWS_FILE`, stacked by `group_rows`."""
    return [stack_rows(similar_rows) for similar_rows in group_rows(read_rows(ROWS_FILE))]


def estimate_by_group(
    rows: Sequence[Row], timed_groups: Sequence[TimedLayouts], constants: Mapping[str, Efficiency]
) -> dict[str, list[tuple[Row, float]]]:
    """Return pairs of a row and its estimated seconds per step, by group.

    Args:
        rows: The rows to estimate.
        timed_groups: Published rows (`published_groups`).
        constants: Constants by chip that are fitted to all of `timed_groups`. A group of `timed_groups` itself is
            estimated with constants that are fitted to the others.
    """
    families = {layouts.family for layouts in timed_groups}

    @cache
    def constants_without(group: str, chip: str) -> Efficiency:
        other_groups = [layouts for layouts in timed_groups if layouts.family != group]
        return fit_chip(other_groups, chip, constants)

    by_group: dict[str, list[tuple[Row, float]]] = defaultdict(list)
    for similar_rows in group_rows(rows):
        layouts = stack_rows(similar_rows)
        group, chip = layouts.family, layouts.chip.name
        chip_constants = constants_without(group, chip) if group in families else constants[chip]
        by_group[group] += zip(similar_rows, map(float, layouts.estimate(chip_constants)), strict=True)
    return by_group


def fit_by_chip(timed_groups: Sequence[TimedLayouts]) -> dict[str, Efficiency]:
    """Return the efficiency constants by chip name, fitted to known step times."""
    return {chip: fit_chip(timed_groups, chip, {}) for chip in dict.fromkeys(timed.chip.name for timed in timed_groups)}


def fit_chip(timed_groups: Sequence[TimedLayouts], chip: str, guesses: Mapping[str, Efficiency]) -> Efficiency:
    """Return the efficiency constants of a chip, fitted to known step times.

    The solver begins with the chip's constants in `guesses`, if any. They only save time.
    """
    start, names = INITIAL_CONSTANTS, FITTED_CONSTANTS
    if chip != FIRST_CHIP:
        first_constants = fit_chip(timed_groups, FIRST_CHIP, guesses)
        start, names = replace(first_constants, scores_passes=0.0), FITTED_FOR_OTHER_CHIPS
    return fit_constants([timed for timed in timed_groups if timed.chip.name == chip], start, names, guesses.get(chip))


def group_rows(rows: Sequence[Row]) -> list[list[Row]]:
    """Split rows into lists with the same group, model, batch, chip, remat and partition."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        settings = (row.line.get(name) for name in ("group", "chip_kind", "remat", "seq_par", "fsdp", "zero"))
        groups[id(row.run.model), row.run.config.batch, *settings].append(row)
    return list(groups.values())


def make_table(by_group: dict[str, list[tuple[Row, float]]]) -> Table:
    """Return a table with a line per group: number of rows, rank correlation and errors of the estimates, and regret.

    Regret is how much slower the layout with the shortest estimate is than the fastest one. It is empty for a group
    with several models or batch sizes.
    """
    table = Table()
    for name in ("group", "rows", "Spearman", "mean error", "median error", "worst", "regret of the best estimated"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group, pairs in by_group.items():
        measured, estimates = (np.array(values) for values in zip(*((r.step_s, e) for r, e in pairs), strict=True))
        errors = np.abs(estimates / measured - 1)
        rho = spearmanr(measured, estimates).statistic if len(pairs) > 2 else float("nan")
        regret = measured[np.argmin(estimates)] / measured.min() - 1
        same_work = len({(r.line["model"], r.line["gbs_seqs"]) for r, _ in pairs}) == 1
        values = [
            f"{rho:.3f}" if len(pairs) > 2 else "",
            *(f"{100 * f(errors):.1f}%" for f in (np.mean, np.median, np.max)),
        ]
        table.add_row(group, str(len(pairs)), *values, f"{100 * regret:.1f}%" if same_work else "")
    return table


def parse_row(line: dict[str, str]) -> Row | None:
    """Return the row of a line, or None if the estimate does not support it.

    Supports fp16 and bf16 without asynchronous tensor parallelism, eager execution or context parallelism. The step
    time comes from the first of the columns `step_time_s`, `tok_per_s_per_chip` and `tflops_per_chip` that is set.
    """
    if (
        line["precision"] not in ("fp16", "bf16")
        or "async" in line["other"]
        or "eager" in line["other"]
        or int(line["cp"] or 1) > 1
    ):
        return None
    run = read_run(line)
    if line["step_time_s"]:
        seconds = float(line["step_time_s"])
    elif line["tok_per_s_per_chip"]:
        seconds = run.config.batch * run.config.seq / float(line["tok_per_s_per_chip"]) / int(line["chips"])
    else:
        seconds = _megatron_flops(line) / (float(line["tflops_per_chip"]) * 1e12 * int(line["chips"]))
    return Row(line, run, seconds)


def read_run(line: dict[str, str]) -> Run:
    """Return a run with the model and the batch of a line."""
    names = "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "seq_len", "model"
    return make_run(*(line[name] for name in names), line.get("tied", "")).changed(batch=int(line["gbs_seqs"]))


@cache
def make_run(
    layers: str, embed: str, heads: str, kv_heads: str, mlp: str, vocab: str, seq: str, name: str, tied: str = ""
) -> Run:
    """Return a run of a model with this shape, given as texts from the table.

    If `name` starts with `llama`, the model has SwiGLU, causal attention and, unless `tied` is 1, untied embeddings.
    Otherwise it has GELU, attention without a causal mask, and tied embeddings. If empty, `kv_heads` is `heads`, `mlp`
    is four times `embed`, and `vocab` is 51,200.
    """
    base, is_llama, head_dim = _base_run(), name.startswith("llama"), int(embed) // int(heads)
    assert isinstance(base.model, gpt.Config)
    attention = replace(
        base.model.attention,
        heads=int(heads),
        kv_heads=int(kv_heads or heads),
        head_dim=head_dim,
        causal=is_llama,
    )
    model = replace(
        base.model,
        layers=int(layers),
        embed=int(embed),
        mlp=int(mlp or 4 * int(embed)),
        vocab_size=int(vocab or 51200),
        attention=attention,
        feed_forward=Nonlinearity.swiglu if is_llama else Nonlinearity.gelu,
        tie_embeddings=tied == "1" or not is_llama,
    )
    return Run(replace(base.config, model=model, seq=int(seq)), model)


@cache
def _base_run() -> Run:
    """Return a run in which `make_run` replaces the model and sequence length. Composing each run takes a second."""
    return parse_run(["model=gpt_1b", "precision=bf16", "mode=show"])


def stack_rows(rows: Sequence[Row]) -> TimedLayouts:
    """Stack one list of `group_rows` as layouts. Settings that its rows share are read from the first row.

    Mesh axes are x for pipeline, y for data and z for tensor parallelism. Hosts are filled along z first.
    """
    line, chip = rows[0].line, published_chips()[rows[0].line["chip_kind"].lower()]
    for column, figure in (("host_gbs", "dcn_gbs_per_host"), ("hbm_gbs", "hbm_gbs")):
        if line.get(column):
            chip = replace(chip, **{figure: float(line[column])})
    sharded = bool(line["fsdp"])
    partition = megatron_partition(sharded, line["seq_par"] == "1", line.get("zero") == "1")
    parameters, activations, problems = resolve_rules(
        partition, parse_mesh("2x2x2"), rows[0].run.arrays.axes, known_axes()
    )
    assert not problems, problems
    sizes = {
        "x": read_column(rows, "pp"),
        "y": read_column(rows, "dp") * read_column(rows, "fsdp"),
        "z": read_column(rows, "tp"),
    }
    batch = read_column(rows, "gbs_seqs") // sizes["y"]
    # Without a pipeline, more rows at a time are never slower. With one, Megatron-LM reports that 1 was best.
    microbatch_sizes = np.array([int(row.line["micro_bs"] or (1 if row.line["pp"] != "1" else 4)) for row in rows])
    rounds = read_column(rows, "vpp").astype(float)
    layouts = Candidates(
        partition,
        parameters,
        activations,
        rows[0].run.arrays,
        sizes,
        host_axis_links(sizes, chip),
        batch // microbatch_sizes,
        rounds,
        sums_once=True,
        shares_loss=False,
        sends_parts=True,
        separate_stages=True,
    )
    remats = {"full": FULL_REMAT, "none": NO_REMAT}
    remat = remats[line["remat"]] if line["remat"] in remats else SELECTIVE_REMATS[chip.name]
    run = rows[0].run.changed(target=replace(rows[0].run.config.target, chip=chip))
    return TimedLayouts(
        step_work(run, recompute_last_matmul=True),
        layouts,
        remat,
        chip,
        np.array([row.step_s for row in rows]),
        line["group"],
    )


@cache
def published_chips() -> dict[str, ChipConfig]:
    """Return the chips of published runs by name: those of `conf/target/chip`, and two without a file there."""
    chips = known_chips()
    a100 = chips["a100"]
    small_a100 = replace(a100, hbm_gib=40, usable_hbm_gib=39.42, hbm_gbs=1555)  # NVIDIA A100 data sheet
    v100 = replace(  # NVIDIA V100 SXM2 data sheet. The six links of a device lead to four others, not to a switch.
        a100, peak_tflops={"bfloat16": 125.0}, hbm_gib=16, usable_hbm_gib=15.78, hbm_gbs=900, switch_gbs=150
    )
    return {**chips, "a100-40": small_a100, "v100": v100}


def read_column(rows: Sequence[Row], key: str) -> np.ndarray:
    """Return a column as integers, with 1 for empty cells."""
    return np.array([int(row.line[key] or 1) for row in rows])


@cache
def megatron_partition(sharded: bool, sequence_parallel: bool, zero1: bool = False) -> PartitionConfig:
    """Return Megatron-LM's partition. It shards layers over x, batch over y, and heads, MLP and vocabulary over z.

    With `sharded`, parameters are also sharded over y, along `embed` (FSDP). With `sequence_parallel`, activations
    between blocks are also sharded over z, along `embed`. The schedule of the pipeline (1F1B) affects only memory.
    """
    model_axes = {axis: ["z"] for axis in ("mlp", "heads", "kv_heads", "vocab")}
    parameter_rules = {"layers": ["x"], **model_axes} | ({"embed": ["y"]} if sharded else {})
    activation_rules = {"batch": ["y"], **model_axes} | ({"embed": ["z"]} if sequence_parallel else {})
    schedule = PipelineSchedule["1f1b"]
    return PartitionConfig("megatron", parameter_rules, activation_rules, zero1=zero1, schedule=schedule)


def _megatron_flops(line: dict[str, str]) -> float:
    """Return the FLOPs of a step in Megatron-LM's count, including recomputation (arXiv 2104.04473, equation 3)."""
    batch, seq, layers, width, vocab = (float(line[k]) for k in ("gbs_seqs", "seq_len", "n_layers", "d_model", "vocab"))
    return 96 * batch * seq * layers * width**2 * (1 + seq / (6 * width) + vocab / (16 * layers * width))


if __name__ == "__main__":
    main()
