"""Speed and memory of the best layouts at each batch, for a search that varies the batch (`batch=auto`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from valkyrie.report.words import EQUAL_RATIO
from valkyrie.search.answer import compile_command
from valkyrie.search.answer_record import RankedLayout, Stage, TriedBatch
from valkyrie.search.compiling import CompiledLayouts
from valkyrie.search.estimate.rank import EstimatedLayout, Ranking
from valkyrie.search.estimate.space import Candidate
from valkyrie.search.request import SearchRequest
from valkyrie.search.shortlist import BATCH_ERROR, find_batch_rival
from valkyrie.sweep.trial import Status
from valkyrie.units import memory_text, percent_text

MAX_PRINTED = 7
"""Maximum number of batches that are printed for a layout."""


def add_batches(
    rows: Iterable[RankedLayout], ranking: Ranking, compiled_layouts: CompiledLayouts
) -> list[RankedLayout]:
    """Return the rows with `RankedLayout.batches` set, or as they are if the search does not vary the batch."""
    return [
        row if row.candidate.batch is None else replace(row, batches=_find_batches(row, ranking, compiled_layouts))
        for row in rows
    ]


def _find_batches(row: RankedLayout, ranking: Ranking, compiled_layouts: CompiledLayouts) -> list[TriedBatch]:
    """Return all batches of a row's layout, the smallest first.

    Batches that were not compiled have their estimated rates, scaled so that the estimate at the row's batch agrees
    with the row. They do not fit if a smaller batch was compiled and does not fit.
    """
    layouts = {layout.batch: layout for layout in find_same_layouts(row.candidate, ranking)}
    if row.candidate.batch not in layouts:
        return []
    row_layout = layouts[row.candidate.batch]
    row_compiled = compiled_layouts.get(row.candidate)
    # Of a measured row, the compiled step, so that its ratio of measured to compiled time corrects the other batches.
    row_s = row_layout.per_sequence((row_compiled and row_compiled.step_s) or row.step_s)
    batches, exceeds_memory = [], False
    for batch, layout in sorted(layouts.items(), key=lambda pair: pair[0] or 0):
        compiled = compiled_layouts.get(layout.candidate)
        ratio, memory, fits, stage = (
            row_layout.ranking_s / layout.ranking_s,
            layout.peak_bytes,
            layout.fits and not exceeds_memory,
            Stage.estimate,
        )
        if batch == row.candidate.batch:
            memory, fits, stage = row.memory, True, row.stage
        elif compiled is not None:
            memory, fits, stage = compiled.peak, compiled.step_s is not None, Stage.compile
            exceeds_memory = exceeds_memory or compiled.trial.status is Status.does_not_fit
            if compiled.step_s is not None:
                ratio = row_s / layout.per_sequence(compiled.step_s)
        batches.append(TriedBatch(batch or 0, ratio * row.tokens_per_second_per_chip, memory, fits, stage))
    return batches


def find_same_layouts(candidate: Candidate, ranking: Ranking) -> Iterable[EstimatedLayout]:
    """Yield the layouts of a ranking that differ from a candidate only in the batch."""
    layout = replace(candidate, batch=None)
    for e in ranking.for_partition(candidate.partition).for_target(candidate.target).estimates:
        partition = e.group.candidates.partition
        variant = (partition.schedule, partition.rounds, partition.zero1, e.remat.name)
        if variant != (candidate.schedule, candidate.rounds, candidate.zero1, candidate.remat):
            continue
        for i, mesh in enumerate(e.group.meshes):
            if mesh.name == candidate.mesh and replace(e.group.candidate(i, e.remat), batch=None) == layout:
                yield EstimatedLayout(e.group, i, e.remat, e.times, e.memory)


def describe_batches(rows: Sequence[RankedLayout]) -> list[str]:
    """Return a line for each row with its tokens/s/chip by batch and the largest batch that fits by estimate.

    Returns an empty list if the search does not vary the batch.
    """
    lines = [f"  #{place}  {_format_rates(row)}" for place, row in enumerate(rows, start=1) if row.batches]
    head = "tokens/s/chip by batch that fits by estimate. Those without a source are estimates, corrected like the row:"
    return [head, *lines] if lines else []


def _format_rates(row: RankedLayout) -> str:
    fitting = [tried for tried in row.batches if tried.fits]
    shown = fitting if len(fitting) <= MAX_PRINTED else _sample(fitting, row.candidate.batch or 0)
    texts = []
    for tried in shown:
        source = "" if tried.stage is Stage.estimate else f" ({tried.stage.adjective})"
        texts.append(f"{tried.batch:,}: {tried.tokens_per_second_per_chip:,.0f}{source}")
    largest = fitting[-1]
    memory = "" if largest.memory is None else f" ({memory_text(largest.memory)})"
    return f"{' · '.join(texts)}; largest that fits: {largest.batch:,}{memory}"


def _sample(fitting: Sequence[TriedBatch], batch: int) -> list[TriedBatch]:
    """Return at most `MAX_PRINTED` batches: this one, those next to it, the smallest, the largest, and some between."""
    index = next(i for i, tried in enumerate(fitting) if tried.batch == batch)
    last = len(fitting) - 1
    chosen = {0, last, index, max(index - 1, 0), min(index + 1, last)}
    for i in ((index + last) // 2, index // 2):
        chosen.add(i)
    return [fitting[i] for i in sorted(chosen)]


def explain_batch(row: RankedLayout) -> list[str]:
    """Return a sentence on the batch of the best layout: how tokens/s change from it to larger batches that fit.

    Returns an empty list if the search does not vary the batch.
    """
    if not row.batches:
        return []
    larger = [tried for tried in row.batches if tried.fits and tried.batch > (row.candidate.batch or 0)]
    head = f"#1 has batch={row.candidate.batch}"
    if not larger:
        return [f"{head}, the largest that fits."]
    changes = [tried.tokens_per_second_per_chip / row.tokens_per_second_per_chip - 1 for tried in larger]
    most, least, tolerance = max(changes), min(changes), EQUAL_RATIO - 1
    up_to = "up to " if len(changes) > 1 else ""
    if most >= tolerance:
        change = f"grow by {up_to}{percent_text(most)}"
    elif least > -tolerance:
        change = f"change by less than {percent_text(tolerance)}"
    elif most > -tolerance:
        change = f"fall by {up_to}{percent_text(-least)}"
    else:
        change = f"fall by {' to '.join(dict.fromkeys((percent_text(-most), percent_text(-least))))}"
    by_estimate = " by estimate" if all(tried.stage is Stage.estimate for tried in larger) else ""
    by_estimate += f" (the ratio of two batches may be off by {percent_text(BATCH_ERROR)})" if by_estimate else ""
    return [f"{head}: from {row.candidate.batch:,} to {larger[-1].batch:,} sequences, tokens/s {change}{by_estimate}."]


def describe_batch_rival(request: SearchRequest, row: RankedLayout) -> list[str]:
    """Return a sentence with the next larger batch of the best layout if it may be faster, and the command to compile.

    Returns an empty list if this batch was compiled, and if the search does not vary the batch.
    """
    if (rival := find_uncompiled_batch(row)) is None:
        return []
    text = f"#1 may be faster with batch={rival.batch}: {rival.tokens_per_second_per_chip:,.0f} tokens/s/chip by "
    text += f"estimate, which may be off by {percent_text(BATCH_ERROR)}. "
    text += f"Before you decide, compile #1 with batch={rival.batch} too"
    layout = replace(row, overrides=replace(row.candidate, batch=rival.batch).overrides)
    return [f"{text}: {compile_command(request, layout)}" if row.compile else f"{text}."]


def find_uncompiled_batch(row: RankedLayout) -> TriedBatch | None:
    """Return the next larger batch of a row, or None if it was compiled, does not fit or is no rival of the row's."""
    rates = {tried.batch: tried.tokens_per_second_per_chip for tried in row.batches if tried.fits}
    batch = find_batch_rival(row.candidate.batch or 0, rates)
    return next((tried for tried in row.batches if tried.batch == batch and tried.stage is Stage.estimate), None)
