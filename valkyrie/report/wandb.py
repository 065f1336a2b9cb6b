"""The W&B dashboard of sweeps: a saved view of the project's runs, and a report that compares layouts.

`templates/dashboard.yaml` lists its sections and panels. They read the runs that `valkyrie.sweep.tracking` makes.
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

EXTRA = "wandb-workspaces"
"""The extra of this package that installs the library."""

_NOTE = (
    "Every run is a layout. Speeds of runs whose config says simulated=true were taken on CPU devices that stand in "
    "for the mesh, and are not those of an accelerator. Refused layouts are runs too: their summary has the reason."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a dashboard: `--wandb ENTITY/PROJECT`, `--group SWEEP`, `--dry-run`."""
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="build the W&B dashboard of a project's sweeps")
    parser.add_argument("--group", metavar="SWEEP", help="with --wandb: show one sweep (all of the project otherwise)")
    parser.add_argument("--dry-run", action="store_true", help="with --wandb: print what would be built; needs no key")


def main_wandb(project: str, group: str | None, dry_run: bool) -> int:
    """Save the view and the report and print their addresses, or print them as JSON; return the exit status.

    Raises ValueError if the library, the project's entity or the key is missing, or if W&B refuses.
    """
    entity, _, name = project.partition("/")
    if not entity or not name or "/" in name:
        raise ValueError(
            f"--wandb={project} is not a W&B project. Write --wandb ENTITY/PROJECT, such as my-team/valkyrie."
        )
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError(f"--wandb needs the library wandb-workspaces: uv sync --extra {EXTRA} in the clone.")
    workspace, report = build_dashboard(entity, name, group)
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
        raise ValueError(f"--wandb={project}: W&B refused the dashboard ({error}).") from error
    print(f"view: {workspace.url}\nreport: {report.url}")
    return 0


def build_dashboard(entity: str, project: str, group: str | None) -> tuple[Workspace, Report]:
    """Return the saved view, with every section, and the report, with a run set for each stage; of one sweep or all."""
    import wandb_workspaces.reports.v2.interface as wr
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    from valkyrie.sweep.rows import STAGES

    sections = yaml.safe_load((files("valkyrie.report") / "templates" / "dashboard.yaml").read_text(encoding="utf-8"))
    title = f"Layouts of {group}" if group else "Layouts of all sweeps"
    which = [expr.Metric("group") == group] if group else []
    workspace = ws.Workspace(
        entity=entity,
        project=project,
        name=title,
        sections=[ws.Section(section["name"], panels=_panels(section), is_open=True) for section in sections],
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(
            filters=expr.And(*which) if which else "",
            groupby=[expr.Config("stage")],
            order=[ws.Ordering(expr.Summary("tokens_per_second_per_chip"), ascending=False)],
            pinned_columns=["summary:status", "summary:tokens_per_second_per_chip", "summary:reason"],
        ),
    )
    runsets = [
        wr.Runset(entity, project, name=words, filters=expr.And(*which, expr.Config("stage") == stage))
        for stage, words in STAGES.items()
    ]
    blocks: list[Any] = [wr.P(_NOTE)]
    for section in sections:
        blocks += [wr.H2(section["question"]), wr.PanelGrid(runsets=runsets, panels=_panels(section))]
    report = wr.Report(
        entity=entity,
        project=project,
        title=title,
        description="Which mesh and partition trains fastest, and does it fit?",
        blocks=blocks,
        width="fluid",
    )
    return workspace, report


def describe(workspace: Workspace, report: Report) -> dict[str, object]:
    """Return the dashboard as JSON values.

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
            columns = [wr.ParallelCoordinatesPlotColumn(_metric(name), label) for name, label in metrics.items()]
            panels.append(wr.ParallelCoordinatesPlot(title=panel["coordinates"], columns=columns))
    return panels


def _metric(name: str) -> Any:
    import wandb_workspaces.reports.v2.interface as wr

    section, _, key = name.rpartition(":")
    return wr.Config(key) if section == "config" else wr.SummaryMetric(key)


def _json(part: Any) -> Any:
    return json.loads(part._to_model().model_dump_json(by_alias=True, exclude_none=True))
