"""Trials for tests of the report: a real `compile.json` or `measure.json` with some numbers replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from valkyrie.axes import parse_axes
from valkyrie.compiled.communication import AxesBytes, CollectiveTime, CollectiveTrace, Communication
from valkyrie.parts import StepPart, parse_category
from valkyrie.records import decode
from valkyrie.runs.folder import key_values
from valkyrie.runs.layout_record import LayoutRecord, with_hardware
from valkyrie.search.compile.prediction import MemoryReport
from valkyrie.sweep.trial import Status, Trial, TrialLog, TrialResult, upgrade_record

GOLDEN_FOLDER = Path(__file__).parent / "goldens" / "report"
"""Records of a tiny model: `compile.json` and `timeline.json` for v5e-8, `measure.json` on eight simulated devices."""


def trial_from_summary(summary: dict[str, Any], stage: str, sweep: str, name: str) -> Trial:
    """Return a trial with the results in `summary`, which a stage (`compile` or `measure`) wrote."""
    record = decode(LayoutRecord, summary["about"], stage)
    upgraded = upgrade_record({"results": summary | {"hints": [_text(hint) for hint in summary.get("hints", [])]}})
    results = decode(TrialResult, upgraded["results"], stage)
    if results.communication is not None:  # `trials.jsonl` omits them
        results = replace(results, communication=replace(results.communication, collectives=()))
    return Trial(
        key=f"{stage}:{name}",
        name=name,
        sweep=sweep,
        stage=stage,
        status=Status(summary["status"]),
        reason=summary.get("reason"),
        overrides=[f"mode={stage}", f"mesh={record.mesh}", f"partition={record.partition}"],
        about=with_hardware(record, {}),
        started="2026-01-01T00:00:00+00:00",
        wall_s=9.5,
        folder=name,
        results=results,
    )


def _text(hint: str | dict[str, Any]) -> str:
    return hint if isinstance(hint, str) else hint["text"]


def golden_summary(stage: str) -> dict[str, Any]:
    """Return the golden summary of a stage: the `compile.json` or `measure.json` of a real run."""
    return json.loads((GOLDEN_FOLDER / f"{stage}.json").read_text())


def make_trial(
    layout: str,
    tokens_per_second_per_chip: float | None,
    *,
    stage: str = "compile",
    sweep: str = "hand",
    target: str | None = None,
    peak_gib: float | None = None,
    part_shares: dict[str, float] | None = None,
    bytes_by_axes: dict[str, float] | None = None,
    collective_shares: dict[str, float] | None = None,
    degrees: dict[str, int] | None = None,
    status: Status = Status.ok,
    reason: str | None = None,
    price: float | None = None,
    batch: int | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
    sharding: str | None = None,
    p90_ratio: float = 1.02,
    min_ratio: float = 0.99,
    **step_fields: float,
) -> Trial:
    """Return a trial of a layout on 8 chips.

    The target, batch, degrees and results are those of the golden summary of the stage, unless other values are given.

    Args:
        layout: Mesh and partition, such as `2x4x1-fsdp`.
        tokens_per_second_per_chip: Tokens/s/chip, or None for a trial without results.
        peak_gib: Peak memory of a device with 16 GiB, or the memory that it needs if there are no results.
        part_shares: Parts of the step by category, such as `exposed x`, as fractions of the step time.
        bytes_by_axes: Bytes sent per step, by mesh axes.
        collective_shares: Traced all-reduces by mesh axes, as fractions of the step time.
        degrees: Product of the sizes of the mesh axes with each kind of role, such as `DP`.
        price: Price of a chip in USD per hour.
        overrides: Overrides in addition to mode, mesh and partition.
        values: Recorded settings by key (`Trial.values`).
        p90_ratio: 90th percentile of a measured step time, as a multiple of the median.
        min_ratio: Minimum of a measured step time, as a multiple of the median.
        step_fields: Other fields of `StepResult`.
    """
    mesh, _, partition = layout.partition("-")
    template = trial_from_summary(golden_summary(stage), stage, sweep, layout)
    assert template.about is not None
    record = replace(template.about, layout=layout, mesh=mesh, partition=partition)
    record = replace(record, degrees=degrees or record.degrees, sharding=sharding, batch=batch or record.batch)
    if target:
        record = with_hardware(replace(record, target=target, hardware=None), key_values(overrides))
        record = replace(record, described=target if record.hardware is None else record.hardware.described)
    key = ":".join([stage, str(target), layout, str(batch), *overrides])
    template = replace(template, key=key, about=record, status=status, reason=reason)
    template = replace(template, overrides=[*template.overrides, *overrides], values=dict(values or {}))
    if tokens_per_second_per_chip is None:
        memory = MemoryReport() if peak_gib is None else MemoryReport(needed=int(peak_gib * 2**30), usable=16 * 2**30)
        return replace(template, folder=None, results=TrialResult(memory=memory))
    results, rate = template.results, 8.0 * tokens_per_second_per_chip
    step_s = (record.batch or 0) * (record.seq or 0) / rate
    speed = replace(
        results.step,
        step_s=step_s,
        tokens_per_second=rate,
        tokens_per_second_per_chip=float(tokens_per_second_per_chip),
        **step_fields,
    )
    if stage == "measure":
        speed = replace(speed, p90_s=p90_ratio * step_s, min_s=min_ratio * step_s)
    if price is not None:
        speed = replace(speed, tokens_per_dollar={"on_demand": rate * 3600 / (8 * price)})
    results, communication = replace(results, step=speed), results.communication or Communication()
    if part_shares is not None:
        categories = ((parse_category(name), share) for name, share in part_shares.items())
        results = replace(results, parts=tuple(StepPart(*part, share * step_s) for part, share in categories if part))
    if bytes_by_axes is not None:
        communication = replace(
            communication, bytes_by_mesh_axes=tuple(AxesBytes(parse_axes(axes), n) for axes, n in bytes_by_axes.items())
        )
    if collective_shares is not None:
        times = [CollectiveTime("all-reduce", parse_axes(a), share * step_s) for a, share in collective_shares.items()]
        results = replace(results, trace=CollectiveTrace(tuple(times), step_s=step_s))
    if peak_gib is not None:
        results = replace(results, memory=replace(results.memory, peak=int(peak_gib * 2**30), usable=16 * 2**30))
    return replace(template, results=replace(results, communication=communication))


def write_sweep(folder: Path, trials: Sequence[Trial], *, timeline_count: int = 0) -> Path:
    """Write a sweep's folder. The first `timeline_count` trials get the files of a real compile."""
    TrialLog(folder).append(trials)
    for trial in trials[:timeline_count]:
        run_folder = folder / (trial.folder or trial.name)
        run_folder.mkdir(parents=True, exist_ok=True)
        for name in ("compile.json", "timeline.json"):
            shutil.copy(GOLDEN_FOLDER / name, run_folder / name)
    return folder
