"""Tests that reports compare only layouts of the same workload on the same hardware.

Workloads are labelled with the settings that a sweep varies.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reported import golden_summary, make_trial, trial_from_summary, write_sweep
from test_report import FSDP, LARGE, TP, sweep_rows
from valkyrie.report import figures, specs, values, words
from valkyrie.report.page import render_page
from valkyrie.report.rank import compare, concordance, pareto_ids, peak_memory
from valkyrie.report.records import read_rows
from valkyrie.report.tables import command, details
from valkyrie.report.text import as_csv, as_markdown
from valkyrie.sweep.rows import Row, group_by_kind, pair_predictions
from valkyrie.sweep.table import sweep_table
from valkyrie.sweep.trial import Status, StepResult, Trial, TrialResult

WIDE = ["model.embed=2048", "model.mlp=5632", "model.layers=12"]
DEEP = ["model.embed=1536", "model.mlp=4096", "model.layers=24"]
WIDEST = ["model.embed=2048", "model.mlp=5632", "model.layers=24"]


def shapes(speeds: Mapping[str, Sequence[float]], **other: Any) -> list[Trial]:
    return [
        make_trial(layout, speed, overrides=["tracking=off", *overrides], **other)
        for layout, of in speeds.items()
        for overrides, speed in zip((WIDE, DEEP, WIDEST), of, strict=True)
    ]


SPEEDS = {"8x1x1-fsdp": (900.0, 800.0, 300.0), "2x4x1-2d_tp": (500.0, 850.0, 250.0)}


@pytest.fixture
def varied_rows(tmp_path: Path) -> list[Row]:
    return sweep_rows(tmp_path, *shapes(SPEEDS, peak_gib=4, price=1.2))


def test_settings_that_a_sweep_varies_label_the_work_once(varied_rows: list[Row]):
    assert [row.work.varied_settings for row in varied_rows[:3]] == [
        ("embed=2048", "layers=12"),
        ("embed=1536", "layers=24"),
        ("embed=2048", "layers=24"),
    ]
    named = values.label_rows(varied_rows)
    assert len(set(named.values())) == 6 and named[varied_rows[0].id] == "8x1x1-fsdp embed=2048 layers=12"
    assert varied_rows[0].work.label.endswith(", embed=2048 layers=12")


def test_keys_of_the_layout_the_trial_and_the_work_are_not_varied(tmp_path: Path):
    rows = sweep_rows(
        tmp_path,
        make_trial("8x1x1-fsdp", 9, overrides=["remat=full", "mode.repeats=3", "+trial.retry=true", "hydra.mode=RUN"]),
        make_trial("2x4x1-fsdp", 9, overrides=["microbatches=2", "mesh.placement=[x,y]", "target.slices=2"]),
        make_trial("2x4x1-fsdp", 9, overrides=["batch=64", "data=bytes"], batch=64),
        make_trial("2x4x1-fsdp", 9, stage="measure", overrides=["steps=7"]),
    )
    assert {row.work.varied_settings for row in rows} == {()}


def test_labels_have_the_precision_if_a_stage_has_two(tmp_path: Path):
    bf16_trial, float32_trial = (
        make_trial("8x1x1-fsdp", 9, overrides=[f"precision={name}"]) for name in ("bf16_mixed", "float32")
    )
    float32_trial = replace(float32_trial, about=replace(float32_trial.about, precision="float32"))
    ran = make_trial("8x1x1-fsdp", 9, stage="measure")
    assert list(values.label_rows(sweep_rows(tmp_path / "one", bf16_trial, ran)).values()) == ["8x1x1-fsdp"] * 2
    both = list(values.label_rows(sweep_rows(tmp_path / "two", bf16_trial, float32_trial)).values())
    assert both == ["8x1x1-fsdp bf16_mixed", "8x1x1-fsdp float32"]


def test_keys_with_equal_last_parts_are_written_in_full(tmp_path: Path):
    overrides = (["model.s5.blocks=1", "model.trm.blocks=1"], ["model.s5.blocks=2", "model.trm.blocks=1"])
    more = ["model.s5.blocks=1", "model.trm.blocks=2"]
    rows = sweep_rows(
        tmp_path,
        *(make_trial("8x1x1-fsdp", 9, overrides=overrides_of_trial) for overrides_of_trial in (*overrides, more)),
    )
    assert rows[1].work.varied_settings == ("model.s5.blocks=2", "model.trm.blocks=1")


LAYERS = "model.layers"


def test_model_settings_that_differ_between_sweeps_label_the_work(tmp_path: Path):
    """Each sweep has one model shape, so the shape only differs between the sweeps."""
    write_sweep(tmp_path / "one", [make_trial("8x1x1-dp", 900, overrides=[f"{LAYERS}=1", "name=one"])])
    write_sweep(tmp_path / "two", [make_trial("8x1x1-2d_tp", 150, overrides=[f"{LAYERS}=4", "name=two"])])
    rows = read_rows([tmp_path])
    assert [row.work.varied_settings for row in rows] == [("layers=1",), ("layers=4",)]
    text = as_markdown(rows)
    ranked = re.findall(r"\d \| (\S+ layers=\d)", text)
    assert ranked == ["8x1x1-dp layers=1", "8x1x1-2d_tp layers=4"]
    assert "as fast" not in text


def test_a_prediction_is_not_matched_to_a_measurement_of_another_model(tmp_path: Path):
    write_sweep(tmp_path / "one", [make_trial("8x1x1-dp", 900, overrides=[f"{LAYERS}=1"])])
    for n in (4, 1):
        ran = make_trial("8x1x1-dp", 9, stage="measure", target="auto", overrides=[f"{LAYERS}={n}"])
        write_sweep(tmp_path / f"ran{n}", [ran])
    apart = read_rows([tmp_path / "one", tmp_path / "ran4"])
    assert pair_predictions(apart) == []
    assert [pair.b.work.varied_settings for pair in pair_predictions(read_rows([tmp_path]))] == [("layers=1",)]


def test_a_key_that_was_not_overridden_has_its_recorded_value(tmp_path: Path):
    cases = [(["model.layers=1"], "1"), (["model.layers=4"], "4"), ([], "4"), (["model=own"], "2")]
    for i, (overrides, layers) in enumerate(cases):
        values_ = {"model.name": "valkyrie_tiny", LAYERS: layers, "optimizer.beta1": "0.9"}
        write_sweep(tmp_path / str(i), [make_trial("8x1x1-dp", 900 + i, overrides=overrides, values=values_)])
    assert [row.work.varied_settings for row in read_rows([tmp_path])] == [
        ("layers=1",),
        *[("layers=4",)] * 2,
        ("layers=2",),
    ]
    unnamed = read_rows([tmp_path / "2", tmp_path / "3"])
    assert [row.work.varied_settings for row in unnamed] == [("layers=4",), ("layers=2",)]
    write_sweep(tmp_path / "old", [make_trial("8x1x1-dp", 1)])
    assert [row.work.varied_settings for row in read_rows([tmp_path / "2", tmp_path / "old"])] == [(), ()]


def test_work_depends_only_on_what_a_step_computes(tmp_path: Path):
    write_sweep(tmp_path / "a", [make_trial("8x1x1-dp", 9, overrides=["steps=7", "seed=1", "sweep=a", "log_every=1"])])
    write_sweep(tmp_path / "b", [make_trial("8x1x1-dp", 9, overrides=["optimizer.ema_decay=0.99", "remat=full"])])
    write_sweep(tmp_path / "c", [make_trial("8x1x1-dp", 9, overrides=["seed=2", "data=bytes", "name=c"])])
    rows = read_rows([tmp_path])
    assert [row.work.varied_settings for row in rows] == [(), ("ema_decay=0.99",), ()]
    assert len(compare(rows, str(tmp_path / "a"), str(tmp_path / "c")).pairs) == 1


def test_sweeps_without_common_work_are_not_compared(tmp_path: Path):
    first = write_sweep(tmp_path / "one", [make_trial("8x1x1-dp", 900, overrides=[f"{LAYERS}=1"])])
    three = write_sweep(tmp_path / "three", [make_trial("8x1x1-dp", 300, overrides=[f"{LAYERS}=4"])])
    rows = read_rows([tmp_path])
    comparison = compare(rows, str(first), str(three))
    assert comparison.pairs == []
    assert "no common workload" in comparison.summary and f"{first}: {rows[0].work.label}" in comparison.summary
    text = as_markdown(rows, comparison)
    assert comparison.summary in text and "ratio" not in text
    assert render_page(rows, comparison).count("<th scope") == render_page(rows).count("<th scope")
    other = compare(sweep_rows(tmp_path / "more", FSDP, replace(TP, sweep="elsewhere")), "hand", "elsewhere")
    assert "no layout in common" in other.summary


def test_partitions_are_compared_only_for_the_same_model_shape(varied_rows: list[Row]):
    ((group, members),) = group_by_kind(varied_rows).items()
    lines = words.summarise_kind(group, members).reasons
    compared = [re.findall(r"layers=(\d+): (\w+)\b", line) + re.findall(r" is ([\d.]+x)", line) for line in lines]
    assert compared == [[("12", "fsdp"), "1.8x"], [("24", "2d_tp"), "1.06x"], [("24", "fsdp"), "1.2x"]]


def test_a_pareto_front_is_for_one_work(varied_rows: list[Row]):
    assert len(pareto_ids(varied_rows, peak_memory)) == 3
    assert sum(v["front"] for v in values.memory(varied_rows)) == 3
    spec = figures.figure_spec(figures.MEMORY, varied_rows)
    assert spec is not None
    (line,) = [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]
    assert line["encoding"]["detail"]["field"] == "work"


def test_agreement_counts_only_pairs_with_the_same_work(tmp_path: Path):
    batches = [
        make_trial("8x1x1-fsdp", speed / 10**ran, batch=batch, stage=stage, target=target)
        for ran, (stage, target) in enumerate([("compile", "v5e-8"), ("measure", "auto")])
        for batch, speed in ((16, 500), (64, 900))
    ]
    pairs = pair_predictions(sweep_rows(tmp_path, *batches))
    assert len(pairs) == 2 and concordance(pairs) is None


def test_trials_that_a_comparison_leaves_out_are_counted(tmp_path: Path):
    again = replace(make_trial("8x1x1-fsdp", 2000), key="again")
    before, after = write_sweep(tmp_path / "a", [again, FSDP]), write_sweep(tmp_path / "b", [FSDP])
    comparison = compare(read_rows([tmp_path]), str(before), str(after))
    assert [p.ratio for p in comparison.pairs] == [0.5] and [
        row.tokens_per_second_per_chip for row in comparison.slower_duplicates
    ] == [1000]
    assert " 1 trial is skipped, " in comparison.summary
    assert comparison.summary in as_markdown(read_rows([tmp_path]), comparison)


def test_a_comparison_describes_the_status_of_a_trial(tmp_path: Path):
    before, after = write_sweep(tmp_path / "a", [LARGE]), write_sweep(tmp_path / "b", [LARGE, FSDP])
    rows = read_rows([tmp_path])
    assert ">does not fit<" in render_page(rows, compare(rows, str(before), str(after)))


def test_price_lines_take_the_cheapest_of_each_work(tmp_path: Path):
    cheap, fast = make_trial("8x1x1-fsdp", 300, price=1.2), make_trial("2x4x1-2d_tp", 600, target="v5p-16", price=4.2)
    large = make_trial("4x2x1-dp", 900, price=1.2, batch=64)
    (line,) = words.price_lines(sweep_rows(tmp_path / "one", cheap, fast))
    assert "8x1x1-fsdp on v5e-8" in line and "1.11 dollars" in line
    rows = sweep_rows(tmp_path / "two", cheap, fast, large)
    (two,) = words.price_lines(rows)
    assert f"8x1x1-fsdp of {rows[0].work.label}" in two
    assert words.price_lines([]) == []


def test_none_is_called_cheapest_if_all_prices_are_equal(tmp_path: Path):
    rows = sweep_rows(tmp_path, FSDP, make_trial("2x4x1-2d_tp", 100, price=1.2))
    assert words.price_lines(rows) == []
    assert "0.333 dollars" in words.summarise_kind(rows[0].speed_kind, rows).sentence
    assert "Cheapest" not in render_page(rows)


def test_figures_are_drawn_only_if_they_are_informative(tmp_path: Path):
    both = [FSDP, TP, *(make_trial(layout, 9, stage="measure") for layout in ("8x1x1-fsdp", "2x4x1-2d_tp"))]
    dear = make_trial("8x1x1-fsdp", 9, target="v5p-16", price=4.2)

    def drawn(name: str, *trials: Trial) -> set[str]:
        return set(
            re.findall(r'<section class="figure" id="(pairs|price)"', render_page(sweep_rows(tmp_path / name, *trials)))
        )

    assert drawn("both", *both) == {"pairs"}
    assert drawn("priced", FSDP, TP, dear) == {"price"}
    assert drawn("predicted", FSDP, TP) == drawn("measured", *both[2:]) == set()


@pytest.mark.parametrize(
    ("target", "overrides", "label"),
    [
        ("v4-64", [], "v4-64"),
        ("v4-64", ["target.topology=2x2x8"], "v4-64 with topology 2x2x8"),
        ("v4-64", ["target.topology=4x4x4"], "v4-64 with topology 4x4x4"),
        ("v4-64", ["target.slices=2"], "v4-64 in 2 slices"),
        ("v4-256", ["target.topology=4x4x8_twisted"], "v4-256 with topology 4x4x8_twisted"),
        ("v4-4x4x8_twisted", [], "v4-4x4x8_twisted"),
        ("mine-8", [], "mine-8"),
    ],
)
def test_topologies_twists_and_slices_are_ranked_apart(tmp_path: Path, target: str, overrides: list[str], label: str):
    (row,) = sweep_rows(tmp_path, make_trial("8x1x1-fsdp", 9, target=target, overrides=overrides))
    assert row.speed_kind.target == label


def test_real_devices_of_this_machine_are_named(tmp_path: Path):
    real = trial_from_summary(
        golden_summary("measure") | {"simulated": False, "devices": "8 x NVIDIA H100"}, "measure", "hand", "real"
    )
    refused = make_trial("3x1x1-dp", None, stage="measure", target="auto", status=Status.refused, reason="no")
    predicted = replace(FSDP, about=replace(FSDP.about, layout=real.about.layout))
    rows = sweep_rows(tmp_path, real, refused, predicted)
    assert [row.speed_kind.target for row in rows[:2]] == [real.results.devices] * 2
    assert len(pair_predictions(rows)) == 1
    trained = replace(real, stage="train", results=TrialResult(simulated=False, step=real.results.step))
    assert sweep_rows(tmp_path / "old", trained)[0].speed_kind.devices.endswith("this machine")


def test_the_command_of_a_layout_starts_a_single_run(tmp_path: Path):
    overrides = ["name=mine", "runs=elsewhere", "sweep=laptop_8", "model.block_pattern=[s5,attention]"]
    (row,) = sweep_rows(tmp_path, make_trial("2x4x1-fsdp", 9, overrides=overrides))
    expected = (
        "valkyrie-train mode=compile mesh=2x4x1 partition=fsdp sweep=laptop_8 'model.block_pattern=[s5,attention]'"
    )
    assert command(row) == f"{expected} hydra.mode=RUN"


def test_the_command_of_a_layout_finds_the_users_configuration(tmp_path: Path):
    flags = ["--config-dir", "/home/me/my own", "hydra.searchpath=[file:///elsewhere]"]
    (row,) = sweep_rows(tmp_path, replace(make_trial("2x4x1-fsdp", 9), flags=flags))
    expected = "valkyrie-train --config-dir '/home/me/my own' 'hydra.searchpath=[file:///elsewhere]' mode=compile mesh="
    assert command(row).startswith(expected)
    assert " ".join(details(row)["command"]) == command(row)


def test_csv_has_the_varied_settings(varied_rows: list[Row]):
    head, first, *_ = as_csv(varied_rows).splitlines()
    column = head.split(",").index("varied")
    assert first.split(",")[column] == "embed=2048 layers=12"


def test_tables_show_the_batch_and_other_settings_in_which_trials_differ(tmp_path: Path):
    trials = [
        make_trial("8x1x1-fsdp", 9, overrides=[f"batch={batch}", f"seed={seed}"], batch=batch)
        for batch, seed in ((8, 0), (16, 0), (16, 1))
    ]
    expected = ["batch=8 seed=0", "batch=16 seed=0", "batch=16 seed=1"]
    shown = sweep_table(trials, tmp_path)
    column = next(column for column in shown.columns if column.header == "varied")
    assert sorted(map(str, column.cells)) == sorted(expected)
    rows = csv.DictReader(as_csv(sweep_rows(tmp_path, *trials)).splitlines())
    listed = {f"batch={row['batch']} {row['varied']}" for row in rows}
    assert listed == set(expected), "the CSV has a column for the batch"
    assert "varied" not in [column.header for column in sweep_table(trials[:1], tmp_path).columns]


def test_a_trial_with_an_unknown_workload_differs_in_no_setting(tmp_path: Path):
    crashed = replace(make_trial("3x1x1-dp", None, status=Status.failed, reason="no"), about=None)
    headers = [column.header for column in sweep_table([make_trial("8x1x1-fsdp", 9), crashed], tmp_path).columns]
    assert "trial" in headers and "varied" not in headers


def make_cpu_trial(layout: str, gib: float, sent: float) -> Trial:
    cpu_trial = make_trial(layout, 1, target="cpu8", peak_gib=gib, bytes_by_axes={"x": sent})
    results = replace(cpu_trial.results, step=StepResult(), parts=())
    return replace(cpu_trial, results=results, about=replace(cpu_trial.about, chip=None))


def test_a_compile_for_cpus_reports_memory_and_bytes(tmp_path: Path):
    rows = sweep_rows(tmp_path, make_cpu_trial("8x1x1-fsdp", 4, 4e6), make_cpu_trial("2x4x1-2d_tp", 2, 9e6))
    answer = words.summarise_kind(rows[0].speed_kind, rows)
    assert "2x4x1-2d_tp, 2.0 GiB" in answer.head and "8x1x1-fsdp, 4 MB" in answer.head and not answer.winner_numbers
    assert {v["label"] for v in values.sent_bytes(rows)} == {"8x1x1-fsdp", "2x4x1-2d_tp"}
    assert [(v["label"], v["peak"], v["rate"]) for v in values.memory(rows)] == [
        ("2x4x1-2d_tp", 2, None),
        ("8x1x1-fsdp", 4, None),
    ]
    spec = figures.figure_spec(figures.MEMORY, rows)
    assert spec is not None and spec["layer"][0]["mark"]["type"] == "bar"
    assert "2x4x1-2d_tp |  |" in as_markdown(rows) and 'id="memory"' in render_page(rows)


def test_compared_pairs_are_marked_as_simulated_or_measured(tmp_path: Path):
    real = make_trial("2x4x1-2d_tp", 400, stage="measure", target="v5e-8")
    real = replace(real, results=replace(real.results, simulated=False))
    simulated = make_trial("8x1x1-fsdp", 40, stage="measure", target="auto")
    points = values.pairs(sweep_rows(tmp_path, FSDP, TP, simulated, real))
    assert [v["kind"] for v in points] == ["simulated", "measured"]
    mixed, alone = specs.pairs(points), specs.pairs(points[:1])
    assert mixed["layer"][1]["encoding"]["shape"]["field"] == "kind"
    assert "layer" not in alone, "simulated steps are not compared with the line of equality"
