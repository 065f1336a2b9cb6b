"""What is said of a compiled layout: numbers that add up, and hints that follow from them."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers import compose_run
from valkyrie.compiled.collectives import CollectiveUse
from valkyrie.config.run import Run
from valkyrie.machine.replay import Cost, Replay
from valkyrie.search.compile.alternatives import other_partitions
from valkyrie.search.compile.hints import hints
from valkyrie.search.compile.runner import Compiled
from valkyrie.search.compile.show import how_far, show
from valkyrie.search.compile.summary import short_cause, short_source, summarise
from valkyrie.search.compile.trust import published, unseen_ratio
from valkyrie.train.options import CHIP, YOU, Option

MEMORY = {
    "parameters": 300,
    "optimizer": 600,
    "gradients": 300,
    "temporary": 4140,
    "code": 80,
    "peak": 5100,
    "host": 70,
}
OUTCOME = {
    "status": "ok",
    "lower_s": 1.0,
    "compile_s": 2.0,
    "memory": MEMORY,
    "parameters": 75,
    "larger": [],
    "placement": ["x=4 on torus b", "mesh.placement=[x,y,z]"],
}


@pytest.fixture(scope="module")
def run() -> Run:
    return compose_run("model=gpt_1b", "mesh=4x4x2", "partition=2d_tp", "target=v4-64", "batch=64")


def use(axes: tuple[str, ...], sent: float, exposed: float) -> CollectiveUse:
    return CollectiveUse(
        "all-reduce", axes, ("b",), "jit(step)/while/body/a/dot", "/x/valkyrie/models/s5.py:9", 24.0, sent, {"b": sent},
        2 * exposed, exposed,
    )  # fmt: skip


def replay(uses: list[CollectiveUse], step: float = 1.0) -> Replay:
    exposed: dict[str, float] = {}
    for entry in uses:
        key = f"exposed {','.join(entry.mesh_axes)}"
        exposed[key] = exposed.get(key, 0.0) + entry.exposed_s
    rest = step - sum(exposed.values())
    costs = [Cost("matmul", f"op{i}", "a.py:1", 1.0, rest / 20) for i in range(20)]
    sending = 2 * (step - rest)
    return Replay(step, {"matmul": rest, **exposed}, 1e13, sending, uses, costs, [], ["a kernel was guessed"])


def summary(run: Run, tmp_path: Path, result: Replay | None, outcome: dict[str, Any] = OUTCOME) -> dict[str, Any]:
    compiled = Compiled(outcome, tmp_path, False, 3.0)
    found = summarise(run, compiled, result, result.collectives if result else [])
    return json.loads(json.dumps(found))


def test_memory_adds_up_to_the_peak(run: Run, tmp_path: Path):
    memory = summary(run, tmp_path, None)["memory"]
    assert (memory["peak"], memory["code"], memory["host"]) == (5100, 80, 70)
    assert memory["reserved"] == int(32 * 2**30) - memory["usable"]
    assert sum(memory["split"].values()) == memory["peak"]
    assert memory["headroom"] == memory["usable"] - memory["peak"]


def test_speed_follows_from_the_seconds_of_a_step(run: Run, tmp_path: Path):
    step = summary(run, tmp_path, replay([], step=2.0))["step"]
    tokens = 64 * 2048
    assert step["tokens_per_second"] == tokens / 2
    assert step["tokens_per_second_per_chip"] == tokens / 2 / 32
    flops = 3 * run.model.flops_per_token(2048) * tokens
    assert step["mfu"] == pytest.approx(flops / (2.0 * 32 * 275e12))
    assert step["tokens_per_dollar"]["on_demand"] == pytest.approx(tokens / 2 * 3600 / (32 * 3.22))
    assert step["mfu_denominator"] == "275 TFLOP/s of a v4 chip (bfloat16)"


def test_a_prediction_carries_the_interval_of_published_runs(run: Run, tmp_path: Path):
    interval = summary(run, tmp_path, replay([], step=2.0))["step"]["interval"]
    on_v4 = [unseen_ratio(published(), row) or 0.0 for row in published() if row.chip == "v4"]
    assert (interval["rows"], interval["chip"]) == (len(on_v4), "v4")
    assert (interval["low_s"], interval["high_s"]) == pytest.approx((2 * min(on_v4), 2 * max(on_v4)))
    known = {
        "low_s": 0.42,
        "high_s": 0.5,
        "low": 0.98,
        "high": 1.16,
        "rows": 6,
        "models": 3,
        "chip": "v4",
    }
    said = (
        "420.0 ms to 500.0 ms: 6 published runs of 3 models on v4, predicted by other recipes, took -2% to +16% of it"
    )
    assert how_far(known) == said
    assert "models on chips with several recipes, for want of some on this one, predicted" in how_far(
        known | {"chip": None}
    )
    assert "no measured run" in how_far(None)


def test_what_is_sent_adds_up_however_it_is_counted(run: Run, tmp_path: Path):
    sent = summary(run, tmp_path, replay([use(("x",), 7.0, 0.1), use(("x", "y"), 5.0, 0.0)]))["communication"]
    assert sent["bytes"] == 12
    assert sent["bytes_by_mesh_axes"] == {"x": 7, "x,y": 5}
    assert sent["bytes_by_torus_axis"] == {"b": 12}
    assert [cause["bytes"] for cause in sent["causes"]] == [7, 5]


def test_hints_follow_from_the_numbers(run: Run, tmp_path: Path):
    unnamed = replace(use(("y",), 3.0, 0.11), op_name="", source="")
    found = summary(run, tmp_path, replay([use(("y",), 7.0, 0.3), unnamed]))
    said = hints(found)
    assert said[0] == (
        "Waiting for communication over y is 41% of the step, 30% for its largest cause, all-reduce for a/dot "
        "(models/s5.py:9). y is MP2(embed)."
    )
    assert not any("over y" in hint for hint in hints(summary(run, tmp_path, replay([use(("y",), 7.0, 0.01)]))))
    other = summary(run, tmp_path, replay([], step=0.5)) | {"about": {**found["about"], "layout": "4x4x2-1d_tp"}}
    faster = "4x4x2-1d_tp, compiled before for the same work, is 2.00x as fast: 500 ms a step."
    assert faster in hints(found, [other])
    assert faster not in hints(other, [found])


def test_waiting_names_a_partition_that_removes_it_fits_and_sends_less(run: Run, tmp_path: Path):
    known = other_partitions(run)
    assert {entry["partition"] for entry in known} >= {"dp", "fsdp", "1d_tp"}
    waiting = replay([use(("y",), 6e10, 0.5), use(("x",), 2e10, 0.2)])
    found = summary(run, tmp_path, waiting, OUTCOME | {"partitions": known})
    over_y, over_x, *_ = hints(found)
    assert "y is MP2(embed). Instead, partition=dp splits the batch over y and sends about" in over_y
    assert "a step, not 80 GB; it needs about" in over_y and "GiB of 30.8 GiB; partition=fsdp" in over_y
    assert "partition=" not in over_x, "one partition is named once"
    found["memory"]["usable"] = 8 * 2**30
    assert "partition=fsdp" in hints(found)[0] and "partition=dp" not in hints(found)[0]
    tried = summary(run, tmp_path, replay([], step=0.5))
    tried["about"] |= {"partition": "fsdp", "layout": "4x4x2-fsdp"}
    assert "partition=fsdp" not in hints(found, [tried])[0], "what came of it is known"
    found["memory"]["usable"] = 2**30
    assert "partition=" not in "".join(hints(found))


def test_partitions_that_send_no_less_are_not_named(tmp_path: Path):
    fsdp = compose_run("model=gpt_1b", "mesh=4x4x2", "partition=fsdp", "target=v4-64", "batch=64")
    waiting = replay([use(("x", "y", "z"), 9e9, 0.5)])
    found = summary(fsdp, tmp_path, waiting, OUTCOME | {"partitions": other_partitions(fsdp)})
    assert "Instead" not in "".join(hints(found))


def test_hints_about_copies_and_narrow_products(run: Run, tmp_path: Path):
    found = summary(run, tmp_path, replay([])) | {"seconds": {"matmul": 0.6, "copies": 0.4}}
    assert "Waiting for copies between memories is 40% of the step" in hints(found)[0] and "host" not in hints(found)[0]
    offloads = found | {"about": {**found["about"], "remat": "offload"}, "remat": {"host": {"query": 1}, "again": []}}
    offloads["step"] = {**found["step"], "executed_flops": 2e13, "model_flops": 1e13}
    assert not any("recomputation" in hint for hint in hints(offloads)), "an offload is not blamed for it"
    larger = [{"change": "remat=none", "needs": 99 * 2**30}, {"change": "remat=dots", "needs": 2**30}]
    assert "remat=dots keeps them on the chip: about 1.0 GiB of" in hints(offloads | {"larger": larger})[0]
    assert "remat=full" not in hints(offloads | {"larger": [{"change": "remat=full", "needs": 1}]})[0]
    slow = found | {"seconds": {"matmul": 1.0}, "step": {**found["step"], "product_rate": 0.3}}
    assert "Splitting weights over fewer devices" in hints(slow)[0]
    whole = slow | {"about": {**slow["about"], "degrees": {"MP1": 1, "MP2": 1}}}
    assert "no axis splits weights" in hints(whole)[0]


def test_what_is_said_where_no_part_is_large(run: Run, tmp_path: Path):
    found = summary(run, tmp_path, replay([use(("y",), 7.0, 0.1)]))
    found["step"]["product_rate"] = 0.77
    assert hints(found) == [
        "Matrix products and kernels are 90% of the step at 77% of peak; the largest other part is waiting for "
        "communication over y, 10%."
    ]
    found["seconds"] = {"matmul": found["step"]["step_s"]}
    assert hints(found) == ["Matrix products and kernels are 100% of the step at 77% of peak."]


def test_sums_of_gradients_that_are_waited_for_name_the_dtype(tmp_path: Path):
    asked = ("model=gpt_1b", "mesh=4x4x2", "partition=fsdp", "target=v4-64", "batch=64", "precision=bf16_mixed")
    waited = replay([use(("x", "y", "z"), 7.0, 0.29)])
    said = hints(summary(compose_run(*asked), tmp_path, waited))[1]
    assert said.startswith("Waiting for sums over data axes, gradients foremost, is 29% of the step; gradients are")
    assert "precision.reduction=bfloat16 sends half the bytes" in said
    narrow = summary(compose_run(*asked, "precision.reduction=bfloat16"), tmp_path, waited)
    assert not any("precision.reduction" in hint for hint in hints(narrow))
    gathers = replay([replace(use(("x", "y", "z"), 7.0, 0.29), kind="all-gather")])
    assert not any("precision.reduction" in hint for hint in hints(summary(compose_run(*asked), tmp_path, gathers)))


def test_communication_that_is_all_waited_for_is_0_percent_hidden(run: Run, tmp_path: Path):
    found = summary(run, tmp_path, replay([use(("y",), 7e9, 0.41)]))
    found["communication"]["sending_s"] = found["communication"]["exposed_s"] * (1 - 1e-9)
    assert "\n0% of the time in which anything is sent is hidden behind compute" in printed(found)


def test_the_report_says_which_options_stand_and_who_set_them(run: Run, tmp_path: Path):
    options = [Option("xla_a", "true", CHIP), Option("xla_b", "7", YOU), Option("xla_c", None, YOU)]
    found = summary(run, tmp_path, replay([]), OUTCOME | {"options": [asdict(option) for option in options]})
    assert "compiler options: xla_a=true (chip default) · xla_b=7, xla_c removed (you)" in printed(found)


def test_the_verdict_of_a_layout_that_does_not_fit(run: Run, tmp_path: Path):
    gib = 2**30
    largest = [{"bytes": 12 * gib, "shape": "bf16[24,64]", "op_name": "jit(step)/while/body/f/dot"}]
    savings = [{"change": "remat=full", "saves": 9 * gib}]
    outcome = {"status": "does_not_fit", "reason": "", "needed": int(37.9 * gib), "usable": int(30.8 * gib)}
    found = summary(run, tmp_path, None, outcome | {"largest": largest, "savings": savings})
    assert (
        "does not fit: needs 37.9 GiB of 30.8 GiB usable; largest: bf16[24,64] 12.0 GiB (f/dot); "
        "try: remat=full (about -9.0 GiB)"
    ) in printed(found)


def test_the_report_says_every_part(run: Run, tmp_path: Path):
    found = summary(run, tmp_path, replay([use(("y",), 7e9, 0.41)]))
    wait = {"seconds": 0.41, "calls": 2, "category": "exposed y", "op_name": "f/dot", "source": None}
    said = printed(found | {"hints": ["do [tpu] this"], "costs": [*found["costs"][:9], wait]})
    assert "waiting over y" in said and "exposed" not in said
    for part in (
        "gpt_1b under 4x4x2-2d_tp-remat_full on v4-64 (32 v4 chips",
        "placement: x=4 on torus b",
        "placement: mesh.placement=[x,y,z]",
        "fits: 0.0 GiB of",
        "predicted step: 1.000 s, 131,072 tokens/s, 4,096 tokens/s/chip, MFU",
        "waiting for communication over y",
        "sent by mesh axes: y 7 GB",
        "50% of the time in which anything is sent is hidden",
        "the 10 slowest operations",
        "assumed: a kernel was guessed",
        "hint: do [tpu] this",
    ):
        assert part in said, part


def test_names_are_short_but_tell_apart():
    assert short_cause("jit(step)/while/body/checkpoint/a/b/c/d") == "b/c/d"
    assert short_cause(None) == "unnamed"
    assert short_source("/home/x/valkyrie/models/s5.py:94") == "models/s5.py:94"


def printed(found: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200, soft_wrap=True)
    show(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
