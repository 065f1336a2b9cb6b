"""The W&B dashboard of sweeps: a saved view of the project's runs, and a report that compares layouts.

Both are read from the runs that `valkyrie.sweep.tracking` makes: its summary keys and its config.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import Report
    from wandb_workspaces.workspaces import Workspace

EXTRA = "wandb-workspaces"
"""The extra of this package that installs the library."""

_ACROSS = [*"swxyz", *(",".join(axes) for count in (2, 3) for axes in combinations("xyz", count))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what asks for a dashboard: `--wandb ENTITY/PROJECT`, `--group SWEEP`, `--dry-run`."""
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="build the W&B dashboard of a project's sweeps")
    parser.add_argument("--group", metavar="SWEEP", help="with --wandb: show one sweep (all of the project otherwise)")
    parser.add_argument("--dry-run", action="store_true", help="with --wandb: print what would be built; needs no key")


def main_wandb(project: str, group: str | None, dry_run: bool) -> int:
    """Save the view and the report and print where they are, or print them as JSON; return the exit status.

    ValueError says what is missing: the library, the project's entity, the key, or W&B's answer.
    """
    entity, _, name = project.partition("/")
    if not entity or not name or "/" in name:
        raise ValueError(
            f"--wandb={project} is not a W&B project. Write --wandb ENTITY/PROJECT, such as my-team/valkyrie."
        )
    _require_library()
    workspace, report = build_workspace(entity, name, group), build_report(entity, name, group)
    if dry_run:
        print(json.dumps(describe(workspace, report), indent=1))
        return 0
    import wandb
    from wandb.errors import Error

    try:
        if not wandb.login(prompt=False):
            raise ValueError(
                f"--wandb={project} needs a W&B key. Set WANDB_API_KEY (or run `wandb login`), or add --dry-run to "
                "see what would be built."
            )
        workspace.save()
        report.save()
    except (Error, OSError) as error:
        raise ValueError(f"--wandb={project}: W&B did not take the dashboard ({error}).") from error
    print(f"view: {workspace.url}\nreport: {report.url}")
    return 0


@dataclass(frozen=True)
class Section:
    """A section of the dashboard: its name in the view, the question that heads it in the report, and its panels.

    `bars` are a title and the metrics of each bar chart by layout; `scatter` a title and the metrics of both axes.
    """

    name: str
    question: str
    bars: tuple[tuple[str, tuple[str, ...]], ...] = ()
    scatter: tuple[str, str, str] | None = None
    coordinates: str | None = None


SECTIONS = (
    Section(
        "speed per layout",
        "Which layout is fastest?",
        (
            ("tokens/s/chip per layout", ("tokens_per_second_per_chip",)),
            ("tokens/s per layout", ("tokens_per_second",)),
            ("milliseconds of a step", ("step_ms",)),
            ("MFU", ("mfu",)),
            ("goodput: share of a training's wall time in steps that count", ("goodput",)),
            ("share of a training's steps in which devices wait for data", ("data_wait",)),
        ),
    ),
    Section(
        "memory against speed",
        "What does it cost in memory?",
        (("GiB of a device at the peak", ("hbm_gib",)),),
        scatter=("memory of a device (GiB) against tokens/s", "hbm_gib", "tokens_per_second"),
    ),
    Section(
        "bytes over mesh axes",
        "What is sent, and over which axes?",
        (
            ("bytes sent by a device in a step, over mesh axes", tuple(f"comm_bytes/{axes}" for axes in _ACROSS)),
            ("bytes sent by a device in a step, in all", ("comm_bytes/total",)),
        ),
    ),
    Section("mesh", "What do the axes of the mesh do to speed?", coordinates="mesh axes against speed"),
)
_NOTE = (
    "Every run is a layout. Speeds of runs whose config says simulated=true were taken on CPU devices that stand in "
    "for the mesh: they say nothing of an accelerator. Refused layouts are runs too: their summary says why."
)


def build_workspace(entity: str, project: str, group: str | None) -> Workspace:
    """Return the saved view, with every section."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    return ws.Workspace(
        entity=entity,
        project=project,
        name=_title(group),
        sections=[ws.Section(section.name, panels=_panels(section), is_open=True) for section in SECTIONS],
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=expr.And(expr.Metric("group") == group) if group else "",
            groupby=[expr.Config("stage")],
            order=[ws.Ordering(expr.Summary("tokens_per_second_per_chip"), ascending=False)],
            pinned_columns=["summary:status", "summary:tokens_per_second_per_chip", "summary:reason"],
        ),
    )


def build_report(entity: str, project: str, group: str | None) -> Report:
    """Return the report that compares tokens/s per layout, with a run set for every stage."""
    import wandb_workspaces.reports.v2.interface as wr
    from wandb_workspaces import expr

    from valkyrie.sweep.rows import STAGES

    which = [expr.Metric("group") == group] if group else []
    runsets = [
        wr.Runset(entity, project, name=words, filters=expr.And(*which, expr.Config("stage") == stage))
        for stage, words in STAGES.items()
    ]
    grids = [(section.question, wr.PanelGrid(runsets=runsets, panels=_panels(section))) for section in SECTIONS]
    return wr.Report(
        entity=entity,
        project=project,
        title=_title(group),
        description="Which mesh and partition trains fastest, and does it fit?",
        blocks=[wr.P(_NOTE), *(block for question, grid in grids for block in (wr.H2(question), grid))],
        width="fluid",
    )


def describe(workspace: Workspace, report: Report) -> dict[str, Any]:
    """Return what would be saved, as JSON values.

    The view is the request itself. Run sets of the report are shown as requested: W&B gives them the id of
    the project, which takes a key.
    """
    from wandb_workspaces.reports.v2.interface import PanelGrid

    blocks = []
    for block in report.blocks:
        if isinstance(block, PanelGrid):
            runsets = [{"name": r.name, "filters": str(r.filters), "project": r.project} for r in block.runsets]
            blocks.append({"type": "panel-grid", "runSets": runsets, "panels": [_json(p) for p in block.panels]})
        else:
            blocks.append(_json(block))
    about = {"entity": report.entity, "project": report.project, "title": report.title}
    return {"workspace": _json(workspace), "report": {**about, "description": report.description, "blocks": blocks}}


def _panels(section: Section) -> list[Any]:
    import wandb_workspaces.reports.v2.interface as wr

    panels: list[Any] = []
    if section.scatter is not None:
        title, x, y = section.scatter
        panels.append(wr.ScatterPlot(title=title, x=wr.SummaryMetric(x), y=wr.SummaryMetric(y)))
    for title, metrics in section.bars:
        by_layout = {"groupby": wr.Config("layout"), "groupby_aggfunc": "median", "max_bars_to_show": 100}
        panels.append(wr.BarPlot(title=title, metrics=[*metrics], **by_layout))
    if section.coordinates is not None:
        coordinates = [
            *((wr.Config(f"axes.{axis}"), axis) for axis in "xyz"),  # a run that lacks a column is not drawn at all
            (wr.Config("partition.name"), "partition"),
            (wr.Config("microbatches"), "microbatches"),
            (wr.SummaryMetric("hbm_gib"), "GiB of a device"),
            (wr.SummaryMetric("tokens_per_second_per_chip"), "tokens/s/chip"),
        ]
        columns = [wr.ParallelCoordinatesPlotColumn(metric, name) for metric, name in coordinates]
        panels.append(wr.ParallelCoordinatesPlot(title=section.coordinates, columns=columns))
    return panels


def _title(group: str | None) -> str:
    return f"Layouts of {group}" if group else "Layouts of all sweeps"


def _json(thing: Any) -> Any:
    return json.loads(thing._to_model().model_dump_json(by_alias=True, exclude_none=True))


def _require_library() -> None:
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError(f"--wandb needs the library wandb-workspaces: uv sync --extra {EXTRA} in the clone.")
