"""Builds the W&B dashboard of sweeps: a saved view of the project's runs, and a report that compares layouts.

`templates/dashboard.yaml` lists the sections and panels. They show the runs that `valkyrie.sweep.tracking` creates.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import Report
    from wandb_workspaces.workspaces import Workspace

WANDB_EXTRA = "wandb-workspaces"
"""The extra of this package that installs `wandb-workspaces`."""

_NOTE = (
    "Each run is a layout. Speeds of runs with simulated=true in their config were measured on CPU devices that "
    "simulate the mesh, so they do not apply to accelerators. Refused layouts are runs too; their summary has the "
    "reason."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a dashboard: `--wandb ENTITY/PROJECT`, `--group SWEEP`, `--dry-run`."""
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="build the W&B dashboard of a project's sweeps")
    parser.add_argument("--group", metavar="SWEEP", help="with --wandb: show only this sweep; default: all")
    parser.add_argument("--dry-run", action="store_true", help="with --wandb: only print the dashboard; needs no key")


def main_wandb(project: str, group: str | None, dry_run: bool) -> int:
    """Save the view and the report and print their addresses. Returns the exit status.

    With `dry_run`, prints the dashboard as JSON instead. Raises ValueError if the library, the entity or the API key is
    missing, or if W&B rejects the dashboard.
    """
    entity, _, name = project.partition("/")
    if not entity or not name or "/" in name:
        raise ValueError(
            f"--wandb={project} is not a W&B project. Use --wandb ENTITY/PROJECT, such as my-team/valkyrie."
        )
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError(
            f"--wandb needs the package wandb-workspaces. In your clone, run: uv sync --extra {WANDB_EXTRA}"
        )
    workspace, report = build_dashboard(entity, name, group)
    if dry_run:
        print(json.dumps(dashboard_json(workspace, report), indent=1))
        return 0
    import wandb
    from wandb.errors import Error

    try:
        if not wandb.login(prompt=False):
            raise ValueError(
                f"--wandb={project} needs a W&B API key. Set WANDB_API_KEY, run `wandb login`, or add --dry-run to "
                "only print the dashboard."
            )
        workspace.save()
        report.save()
    except (Error, OSError) as error:
        raise ValueError(
            f"--wandb={project}: the dashboard could not be saved to W&B ({error}). Check the name, your access and "
            "your connection, or add --dry-run to only print the dashboard."
        ) from error
    print(f"view: {workspace.url}\nreport: {report.url}")
    return 0


def build_dashboard(entity: str, project: str, group: str | None) -> tuple[Workspace, Report]:
    """Return a saved view and a report for one sweep, or for all if `group` is None.

    Both have all sections of `dashboard.yaml`. The report has a run set for each stage.
    """
    import wandb_workspaces.reports.v2.interface as wr
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    from valkyrie.sweep.rows import STAGE_ADJECTIVES

    sections = yaml.safe_load((files("valkyrie.report") / "templates" / "dashboard.yaml").read_text(encoding="utf-8"))
    title = f"Layouts of {group}" if group else "Layouts of all sweeps"
    group_filters = [expr.Metric("group") == group] if group else []
    workspace = ws.Workspace(
        entity=entity,
        project=project,
        name=title,
        sections=[ws.Section(section["name"], panels=_panels(section), is_open=True) for section in sections],
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=expr.And(*group_filters) if group_filters else "",
            groupby=[expr.Config("stage")],
            order=[ws.Ordering(expr.Summary("tokens_per_second_per_chip"), ascending=False)],
            pinned_columns=["summary:status", "summary:tokens_per_second_per_chip", "summary:reason"],
        ),
    )
    runsets = [
        wr.Runset(entity, project, name=stage_label, filters=expr.And(*group_filters, expr.Config("stage") == stage))
        for stage, stage_label in STAGE_ADJECTIVES.items()
    ]
    blocks: list[Any] = [wr.P(_NOTE)]
    for section in sections:
        blocks += [wr.H2(section["question"]), wr.PanelGrid(runsets=runsets, panels=_panels(section))]
    report = wr.Report(
        entity=entity,
        project=project,
        title=title,
        description="Which mesh and partition train fastest, and do they fit?",
        blocks=blocks,
        width="fluid",
    )
    return workspace, report


def dashboard_json(workspace: Workspace, report: Report) -> dict[str, object]:
    """Return the dashboard as JSON values.

    Run sets have only their name, filters and project. W&B's own format also has the id of the project, and reading
    that id needs an API key.
    """
    from wandb_workspaces.reports.v2.interface import PanelGrid

    blocks = []
    for block in report.blocks:
        if isinstance(block, PanelGrid):
            runsets = [{"name": r.name, "filters": str(r.filters), "project": r.project} for r in block.runsets]
            blocks.append({"type": "panel-grid", "runSets": runsets, "panels": [_to_json(p) for p in block.panels]})
        else:
            blocks.append(_to_json(block))
    report_fields = {"entity": report.entity, "project": report.project, "title": report.title}
    return {
        "workspace": _to_json(workspace),
        "report": {**report_fields, "description": report.description, "blocks": blocks},
    }


def _panels(section: Mapping[str, Any]) -> list[Any]:
    import wandb_workspaces.reports.v2.interface as wr

    panels: list[Any] = []
    for panel in section["panels"]:
        metrics = panel["metrics"]
        if "bars" in panel:
            by_layout = {"groupby": wr.Config("layout"), "groupby_aggfunc": "median", "max_bars_to_show": 100}
            panels.append(wr.BarPlot(title=panel["bars"], metrics=metrics, **by_layout))
        elif "scatter" in panel:
            x, y = map(wr.SummaryMetric, metrics)
            panels.append(wr.ScatterPlot(title=panel["scatter"], x=x, y=y))
        else:
            columns = [wr.ParallelCoordinatesPlotColumn(_parse_metric(name), label) for name, label in metrics.items()]
            panels.append(wr.ParallelCoordinatesPlot(title=panel["coordinates"], columns=columns))
    return panels


def _parse_metric(name: str) -> Any:
    import wandb_workspaces.reports.v2.interface as wr

    section, _, key = name.rpartition(":")
    return wr.Config(key) if section == "config" else wr.SummaryMetric(key)


def _to_json(wandb_object: Any) -> Any:
    return json.loads(wandb_object._to_model().model_dump_json(by_alias=True, exclude_none=True))
