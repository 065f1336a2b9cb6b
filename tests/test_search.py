"""`mode=search`: what it is asked, in which order it compiles, when it stops, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from valkyrie.config.arguments import run_of
from valkyrie.config.run import Run
from valkyrie.config.shorthand import written_out
from valkyrie.hardware.platforms.tpu import Tpu
from valkyrie.paths import DiskError
from valkyrie.records import decode, encode, read_record
from valkyrie.runs.results import MemoryResult, StepResult, TrialResult
from valkyrie.search import NOT_COMPILED, compiling, mode, tuning
from valkyrie.search.answer import (
    MeasuredLayout,
    MeasureReport,
    RankedLayout,
    SearchAnswer,
    command_of,
    rank_layout,
    rank_layouts,
    show,
)
from valkyrie.search.compiling import CompiledLayout, Compiles, compile_best
from valkyrie.search.estimate.rank import Estimated, rank
from valkyrie.search.folder import ANSWER, save_answer
from valkyrie.search.request import SearchRequest, parse_request
from valkyrie.search.rivals import PLAIN_FSDP, RULE, Rival, format_comparison, rivals_on
from valkyrie.search.shortlist import Shortlist, chips_of, mesh_partition, on_any_torus, shortlist
from valkyrie.search.tune.tuned import Attempt, Tuned, Verdict
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.trial import Status, Trial

TINY = ("mode=search", "target=v5e-8", "model=gpt_tiny", "precision=bf16_mixed", "batch=32")


def question(*arguments: str) -> SearchRequest:
    """Return the question of a search of the tiny GPT."""
    return parse_request(run_of([*TINY, *arguments]))


def listed_of(of: SearchRequest) -> Shortlist:
    """Return the layouts that a search may compile."""
    return shortlist(rank(of.run, of.space()))


class Compiler:
    """Takes the place of `compile_trial`: every step takes `factor` of its estimate, of some partitions none fits."""

    def __init__(self, factor: float = 1.0, does_not_fit: Sequence[str] = ()) -> None:
        self.factor, self.does_not_fit, self.plans = factor, does_not_fit, list[TrialPlan]()
        self.steps: dict[tuple[str, ...], float] = {}

    def __call__(self, plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        self.plans.append(plan)
        fits = plan.about.partition not in self.does_not_fit
        step_s = self.factor * self.steps[tuple(plan.overrides[-len(self.key(plan)) :])]
        results = TrialResult(step=StepResult(step_s=step_s), memory=MemoryResult(peak=2**30))
        results = results if fits else TrialResult(memory=MemoryResult(needed=2**40))
        status = Status.ok if fits else Status.does_not_fit
        return plan.ended(status, None, "2026-01-01T00:00:00+00:00", 1.0, results)

    def key(self, plan: TrialPlan) -> tuple[str, ...]:
        """Return the overrides of the layout in a plan."""
        start = next(i for i, o in enumerate(plan.overrides) if o.startswith("mode=")) + 1
        return plan.overrides[start:]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Takes the place of compiling, in the whole test."""
    made = Compiler()
    monkeypatch.setattr(compiling, "compile_trial", made)
    return made


def compiled_by(compiler: Compiler, of: SearchRequest, listed: Shortlist, folder: Path, most: int = 50) -> Compiles:
    """Return what a search compiles where steps take what the compiler says."""
    every = [*listed.fitting, *listed.doubtful]
    compiler.steps = {tuple(one.candidate.overrides): one.step_s for one in every}
    compiles = Compiles()
    compile_best(of, listed, [], folder, most, compiles, lambda one, so_far: None)
    return compiles


def test_it_stops_when_no_other_layout_can_be_faster(compiler: Compiler, tmp_path: Path) -> None:
    of = question()
    listed = listed_of(of)
    compiles = compiled_by(compiler, of, listed, tmp_path, most=500)
    best = compiles.best(of)
    assert best is not None and best.step_s == pytest.approx(listed.fitting[0].step_s)
    assert compiles.why == "no other layout can be faster, by the errors of estimates so far"
    assert len(compiles.done) < len(listed.fitting)
    first = {(p.about.mesh, p.about.partition) for p in compiler.plans[: compiling.FIRST]}
    assert len(first) == compiling.FIRST


def test_a_layout_that_does_not_fit_is_no_answer(compiler: Compiler, tmp_path: Path) -> None:
    of = question()
    listed = listed_of(of)
    fastest = listed.fitting[0].group.candidates.partition.name
    compiler.does_not_fit = [fastest]
    best = compiled_by(compiler, of, listed, tmp_path, most=500).best(of)
    assert best is not None and best.estimate.group.candidates.partition.name != fastest


def test_it_compiles_no_more_than_asked_for(compiler: Compiler, tmp_path: Path) -> None:
    of = question()
    compiles = compiled_by(compiler, of, listed_of(of), tmp_path, most=2)
    assert len(compiles.done) == 2
    assert compiles.why == "mode.compiles=2 layouts were compiled"


def test_rivals_are_compiled_even_where_nothing_can_be_faster(compiler: Compiler, tmp_path: Path) -> None:
    of = question()
    ranked = rank(of.run, of.space())
    listed, every = shortlist(ranked), list(ranked)
    slow = [one for one in every if one.fits and one.step_s > 3 * every[0].step_s][:2]
    compiler.steps, compiles = {tuple(one.candidate.overrides): one.step_s for one in every}, Compiles()
    compile_best(of, listed, slow, tmp_path, 500, compiles, lambda one, so_far: None)
    done = [one.estimate.candidate.overrides for one in compiles.done]
    assert done[0] == listed.fitting[0].candidate.overrides and done[1:3] == [one.candidate.overrides for one in slow]


def test_no_compile_is_begun_that_would_end_after_the_budget(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])

    def slow(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        clock[0] += 40.0
        return compiler(plan, watch)

    monkeypatch.setattr(compiling, "compile_trial", slow)
    of = question("mode.budget=100s")
    compiles = compiled_by(compiler, of, listed_of(of), tmp_path)
    assert len(compiles.done) == 2
    assert compiles.why == "another compile would take longer than mode.budget=100s"


def test_the_budget_ends_even_the_first_compile_and_leaves_estimates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    def endless(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        while True:
            clock[0] += 1.0
            watch()

    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compiling, "compile_trial", endless)
    monkeypatch.setattr(Tpu, "missing_compiler", lambda self, target: None)
    status, answer, _ = search(monkeypatch, tmp_path, "partition=fsdp", "remat=full", "mode.budget=1min")
    printed = capsys.readouterr().out
    assert status == 0 and 60 <= clock[0] < 62 and answer["best"][0]["stage"] == "estimate"
    assert "0 compiled: mode.budget=1min was over before the compile of target=v5e-8 mesh=" in printed
    assert "What follows are estimates alone. Give it longer, such as mode.budget=30min" in printed


def test_where_little_was_compiled_a_better_estimate_comes_first(compiler: Compiler, tmp_path: Path) -> None:
    of = question()
    listed, compiler.factor = listed_of(of), 1.0
    slow = [one for one in rank(of.run, of.space()) if one.fits and one.step_s > 4 * listed.fitting[0].step_s][0]
    compiles, fast = Compiles(), listed.fitting[0]
    compiler.steps = {tuple(slow.candidate.overrides): slow.step_s, tuple(fast.candidate.overrides): fast.step_s}
    plan = compiling.plan_compile(of, slow, tmp_path)
    compiles.done.append(CompiledLayout(slow, compiler(plan, lambda: None)))
    rows = rank_layouts(of, listed, compiles, 10)
    assert (rows[0].stage.value, rows[0].overrides) == ("estimate", fast.candidate.overrides)
    told = format_comparison(Rival(PLAIN_FSDP, slow), compiles, rows[0])
    assert "(by estimate)" in told and f"{slow.step_s / fast.step_s:.2f} times the best by estimate" in told


def test_with_dollars_the_cheapest_slice_is_compiled_first(compiler: Compiler, tmp_path: Path) -> None:
    of = question("mode.targets=[v5e-8,v6e-8]", "mode.tokens=1e9")
    listed = listed_of(of)
    compiles = compiled_by(compiler, of, listed, tmp_path, most=1)
    (one,) = compiles.done
    cheapest = min(listed.fitting, key=lambda e: of.cost(e.group.target, e.step_s))
    assert one.target.name == cheapest.group.target.name


def test_each_number_of_chips_has_rows_and_the_cheapest_is_first() -> None:
    of = parse_request(
        run_of(["mode=search", "model=gpt_125m", "batch=512", "mode.targets=[v4-8,v4-512]", "mode.tokens=1e9"])
    )
    listed = listed_of(of)
    rows = rank_layouts(of, listed, Compiles(), 10)
    slices = [row.overrides[0] for row in rows]
    assert slices[0] == "target=v4-8" and slices.count("target=v4-512") == slices.count("target=v4-8") == 5
    assert [row.dollars for row in rows] == sorted(row.dollars or 0.0 for row in rows)
    assert len({row.overrides[0] for row in rank_layouts(of, listed, Compiles(), 1)}) == 2, "the best of each is listed"


@pytest.mark.parametrize(("factor", "first"), [(1.05, "compile"), (2.0, "estimate")])
@pytest.mark.parametrize("tokens", [(), ("mode.tokens=1e9",)])
def test_an_estimate_stands_first_where_its_whole_interval_is_better_than_what_was_compiled(
    factor: float, first: str, tokens: tuple[str, ...], compiler: Compiler, tmp_path: Path
) -> None:
    of = question("mode.targets=[v5e-8,v6e-8]", *tokens)
    listed = listed_of(of)
    cheapest = min(listed.fitting, key=lambda one: of.cost(one.group.target, one.step_s))
    compiler.steps, compiler.factor = {tuple(cheapest.candidate.overrides): cheapest.step_s}, factor
    trial = compiler(compiling.plan_compile(of, cheapest, tmp_path), lambda: None)
    rows = rank_layouts(of, listed, Compiles([CompiledLayout(cheapest, trial)]), 10)
    assert rows[0].stage.value == first


@pytest.mark.parametrize("price", ["0", "null"])
def test_without_a_price_a_layout_is_chosen_by_its_step(price: str) -> None:
    of = question("mode.tokens=1e9", "mode.budget_usd=5", f"target.chip.usd_per_hour={price}")
    assert not of.by_price and of.cost(of.targets[0], 2.0) == 2.0
    rows = rank_layouts(of, listed_of(of), Compiles(), 10)
    assert [row.step_s for row in rows] == sorted(row.step_s for row in rows)
    assert json.loads(json.dumps(encode(rows), allow_nan=False)), "a number of tokens is finite or none"


def test_a_layout_that_is_as_fast_on_several_tori_is_listed_once(compiler: Compiler, tmp_path: Path) -> None:
    of = parse_request(run_of(["mode=search", "target=v4-512", "mode.shapes=true", "model=gpt_125m", "batch=512"]))
    assert len({target.topology for target in of.targets}) > 1
    listed = listed_of(of)
    best = listed.best(chips_of(of.targets[0]), 10)
    assert len({on_any_torus(one) for one in best}) == len(best) == 10
    several = next(one for one in best if listed.as_fast_on(one))
    others = [e for e in listed.fitting if on_any_torus(e) == on_any_torus(several) and e is not several]
    assert set(listed.as_fast_on(several)) <= {e.group.target.name for e in others}
    compiles = compiled_by(compiler, of, listed, tmp_path, most=4)
    assert len({mesh_partition(one.estimate) for one in compiles.done}) == 4, "another torus is no other layout"
    rows = rank_layouts(of, listed, compiles, 10)
    made = {tuple(one.estimate.candidate.overrides): listed.as_fast_on(one.estimate) for one in compiles.done}
    of_compiled = [row for row in rows if row.stage.value == "compile"]
    assert any(row.as_fast_on for row in of_compiled)
    assert all(row.as_fast_on == made[tuple(row.overrides)] for row in of_compiled)
    layouts = [tuple(o for o in row.overrides if not o.startswith(("target=", "mesh.placement="))) for row in rows]
    assert len(set(layouts)) == len(layouts) == 10


def rivals_of(*arguments: str) -> dict[str, tuple[list[str] | None, str]]:
    """Return the meshes and partitions, or the reasons, of the rivals on the last slice of a search, by name."""
    of = parse_request(run_of(["mode=search", "model=gpt_tiny", "precision=bf16_mixed", *arguments]))
    rivals = rivals_on(of, rank(of.run, of.space()), of.targets[-1])
    return {rival.name: (rival.layout and rival.layout.candidate.overrides[:3], rival.why) for rival in rivals}


def test_rivals_are_of_one_slice() -> None:
    found = rivals_of("target=v4-64", "model=gpt_1b", "batch=64", "partition.zero1=false", "mode.targets=[v4-8,v4-64]")
    assert found[RULE][0] == ["target=v4-64", "mesh=4x4x2", "partition=2d_tp"]
    assert found[PLAIN_FSDP][0] == ["target=v4-64", "mesh=32x1x1", "partition=fsdp"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("target=v4-8", "batch=32", "partition=pp"), {}),
        (("target=v4-8", "batch=7", "partition=fsdp"), {PLAIN_FSDP: "no layout of it is legal"}),
        (
            ("target=v4-8", "batch=32", "target.chip.usable_hbm_gib=0.0001"),
            {RULE: "no layout of it fits", PLAIN_FSDP: "no layout of it fits"},
        ),
        (("target=v5e-8", "batch=32"), {PLAIN_FSDP: ""}),
        (("target=h100-8", "batch=32"), {PLAIN_FSDP: ""}),
    ],
)
def test_a_rival_that_was_not_looked_at_is_left_out_and_another_says_why(
    arguments: Sequence[str], expected: dict[str, str]
) -> None:
    assert {name: why for name, (_, why) in rivals_of(*arguments).items()} == expected


def test_slices_that_cannot_be_compiled_for_leave_the_others_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], compiler: Compiler
) -> None:
    asked_for = ("mode.targets=[h100-8,v5e-8]", "partition=fsdp", "remat=full", "mode.compiles=1")
    compiler.steps = {tuple(one.candidate.overrides): one.step_s for one in listed_of(question(*asked_for)).fitting}
    monkeypatch.setattr(Tpu, "missing_compiler", lambda self, target: None)
    monkeypatch.setattr(mode, "write_report", lambda folder: folder)
    status, answer, _ = search(monkeypatch, tmp_path, *asked_for)
    printed = capsys.readouterr().out
    assert status == 0 and answer["compiled"] == 1 and compiler.plans[0].about.target == "v5e-8"
    assert "estimates alone of h100-8: only TPU slices are compiled for without the devices" in printed


def test_what_is_named_stays_as_it_is() -> None:
    of = question("partition=fsdp", "remat=dots", "microbatches=2")
    layouts = list(rank(of.run, of.space()))
    assert {one.group.candidates.partition.name for one in layouts} == {"fsdp"}
    assert {one.remat.name for one in layouts} == {"dots"}
    assert {int(one.group.candidates.microbatches[one.number]) for one in layouts} == {2}


def test_a_setting_of_partitions_goes_for_all_of_them() -> None:
    of = question("partition.zero1=true")
    ranking = rank(of.run, of.space())
    found = [group.candidates.partition for group in ranking.space.groups]
    assert len({partition.name for partition in found}) > 3 and all(partition.zero1 for partition in found)
    best = next(iter(ranking))
    assert "partition.zero1=true" in best.candidate.overrides and "partition.zero1=true" not in of.command
    assert best.run(of.run).config.partition.zero1


def test_zero1_is_looked_at_where_it_changes_anything() -> None:
    layouts = list(rank(question().run, question().space()))
    spread = [one for one in layouts if one.group.candidates.partition.zero1]
    assert {one.group.candidates.partition.name for one in spread} >= {"dp", "1d_tp", "2d_tp", "pp"}
    for one in spread[:: len(spread) // 6]:
        layout = one.run(question().run).layout
        arrays = question().run.arrays.parameters
        moments = [layout.optimizer(p.axes, p.shape) for p in arrays]
        assert moments != [layout.stored(p.axes) for p in arrays], one.candidate.overrides
    kept = {(p.name, p.zero1) for p in question("partition=fsdp").partitions}
    assert kept == {("fsdp", False), ("fsdp", True)}, "the second makes no layout"
    assert not [one for one in spread if one.group.candidates.partition.name == "fsdp"]


def test_a_schedule_that_is_named_stays() -> None:
    of = question("partition.schedule=1f1b")
    piped = [one for one in rank(of.run, of.space()) if one.group.candidates.stages[one.number] > 1]
    assert piped and all("partition.schedule=1f1b" in one.candidate.overrides for one in piped)


def test_devices_without_a_torus_have_one_shape() -> None:
    for target in ("cpu8", "h100-8"):
        of = parse_request(
            run_of(["mode=search", f"target={target}", "model=gpt_tiny", "batch=32", "mode.shapes=true"])
        )
        assert [slice_.name for slice_ in of.targets] == [target]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("mesh=2x2x2",),
            "mesh=: mode=search looks for the mesh itself. Leave it out; mode=compile predicts one layout.",
        ),
        (
            ("target.chip.hbm_gib=32", "mode.targets=[v5e-8,v5e-16]"),
            "target.chip.hbm_gib=: which of several slices is meant? Search one at a time: target=SLICE.",
        ),
        (("target=cpu",), "target=cpu has no chip whose figures are known, so nothing can be estimated."),
        (
            ("target=auto", "target.chips=64"),
            "target.chips=64 says how many chips, and not which. Add target.chip=NAME, one of a100, h100,",
        ),
        (("mode.targets=[v5e-8,v9-8]",), "target=v9-8 is not known."),
    ],
)
def test_what_is_no_question(arguments: Sequence[str], message: str) -> None:
    run = run_of([*TINY, *arguments])
    assert run.problems() == [], "no mesh is asked for, so none is refused"
    with pytest.raises(ValueError) as refusal:
        parse_request(run)
    assert str(refusal.value).startswith(message) and "or a file: ." not in str(refusal.value)


@pytest.mark.parametrize(
    "argument", ["mode.budget_usd=-4", "mode.tokens=0", "mode.compiles=-1", "mode.tune=5", "mode.budget=soon"]
)
def test_numbers_that_make_no_sense(argument: str) -> None:
    assert argument.partition("=")[0] in {problem.key for problem in run_of([*TINY, argument]).problems()}


def test_a_recursive_model_is_told_what_to_do_instead() -> None:
    of = parse_request(run_of(["mode=search", "target=v5e-8", "model=trm_tiny", "data=sudoku", "batch=32"]))
    with pytest.raises(ValueError, match="goes through its blocks again and again.*hydra/sweeper=layouts"):
        rank(of.run, of.space())


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        (["target.chip=v4", "target.chips=512"], ["target=v4-1024"]),
        (["mode=search", "target.chip=v4", "target.chips=512"], ["mode=search", "target=v4-1024", "mode.shapes=true"]),
        (["mode=search", "target=[v4-64, v5e-64]"], ["mode=search", "target=v4-64", "mode.targets=[v4-64,v5e-64]"]),
        (
            ["mode=search", "tokens=20e9", "budget_usd=5000"],
            ["mode=search", "mode.tokens=20e9", "mode.budget_usd=5000"],
        ),
        (["target.chip.hbm_gib=9", "tokens=1"], ["target.chip.hbm_gib=9", "tokens=1"]),
    ],
)
def test_abbreviations(typed: list[str], written: list[str]) -> None:
    assert written_out(typed) == written
    assert written_out(written) == written


def test_a_chip_without_a_number() -> None:
    with pytest.raises(ValueError, match=r"target.chip=v4 does not say how many: add target.chips=N"):
        written_out(["target.chip=v4"])


def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], Run]:
    """Carry out a search in an empty folder; return its exit status, search.json and run."""
    monkeypatch.chdir(tmp_path)
    run = run_of([*TINY, "name=found", *arguments])
    assert run.problems() == []
    status = run.config.mode.run(run)
    file = tmp_path / "runs" / "found" / ANSWER
    return status, json.loads(file.read_text()) if file.exists() else {}, run


def test_estimates_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer, run = search(monkeypatch, tmp_path, "mode.compiles=0", "mode.tokens=1e9")
    printed = capsys.readouterr().out
    assert status == 0
    assert answer["compiled"] == 0 and len(answer["best"]) == mode.SHOWN
    assert answer["layouts"] > 1000
    steps = [row["step_s"] for row in answer["best"]]
    best = answer["best"][0]
    assert best["low_s"] < best["step_s"] == min(steps) < best["high_s"]
    assert best["hours"] > 0 and best["dollars"] == pytest.approx(8 * 1.2 * best["hours"], rel=1e-6)
    assert f"train it: {command_of(parse_request(run), decode(RankedLayout, best, ANSWER))}" in printed
    assert "plain FSDP: " in printed and "the TPU v4 paper's rule" not in printed, "v5e has a torus of two axes"


def test_the_table_has_batch_and_mfu_and_is_as_wide_as_a_page() -> None:
    of = question("mode.targets=[v5e-8,v6e-8]", "mode.tokens=1e6", "mode.budget_usd=0.0001", "partition=fsdp")
    rows = rank_layouts(of, listed_of(of), Compiles(), 10)
    with (console := Console(width=140, soft_wrap=True)).capture() as capture:
        show(of, rows, console)
    lines = capture.get().splitlines()
    assert lines[0].strip() == f"gpt_tiny, batch 32 x {of.run.config.seq:,} tokens, bf16_mixed"
    assert max(len(line.rstrip()) for line in lines) <= 140
    text = capture.get()
    assert "$0.0001" in text and "tokens for" in text and "MFU" in text and " MiB " in text and " 0.0 " not in text
    chip, fastest = of.targets[1].chip, next(row for row in rows if row.overrides[0] == "target=v6e-8")
    flops_s = of.run.model.step_flops_per_token(of.run.config.seq) * fastest.tokens_per_second_per_chip
    assert chip is not None and fastest.mfu == pytest.approx(flops_s / (chip.peak_tflops["bfloat16"] * 1e12))


FEW = ("partition=fsdp", "remat=full", "microbatches=1", "mode.compiles=0")


def test_a_folder_of_something_else_is_refused_before_anything_is_estimated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    (runs / "other").mkdir(parents=True)
    (runs / "file").touch()
    (runs / "other" / "run.yaml").touch()
    search(monkeypatch, tmp_path, *FEW)
    search(monkeypatch, tmp_path, *FEW, "mode.tokens=1e9")
    monkeypatch.setattr(mode, "rank", lambda *_: pytest.fail("estimated"))
    for arguments, message in (
        (("name=file",), "^name=file: runs/file is a file. Use another name=.$"),
        (("name=other",), "^name=other: runs/other is the run folder of another command"),
        (("batch=64",), "^name=found: runs/found/search.json answers another search, mode=search .*batch=32"),
        (("runs=/proc/nope", "name=x"), "/proc/nope/x cannot be written .*Write elsewhere with runs=DIR.$"),
    ):
        with pytest.raises((ValueError, DiskError), match=message):
            search(monkeypatch, tmp_path, *FEW, *arguments)


def test_an_earlier_answer_that_knows_more_stays(tmp_path: Path) -> None:
    compiled = SearchAnswer(["mode=search"], "abc", 9, {}, 0, 2, "", MeasureReport(), [], [])
    runs = [MeasuredLayout(["mesh=8x1x1"], 1.0, step_s, "ok") for step_s in (1.0, None)]
    measured = replace(compiled, measured=MeasureReport(runs))
    assert save_answer(tmp_path, compiled) == f"answer: {tmp_path / ANSWER}"
    assert save_answer(tmp_path, measured) == f"answer: {tmp_path / ANSWER}"
    assert "with 1 measured, and this one has none" in save_answer(tmp_path, compiled)
    assert read_record(SearchAnswer, tmp_path / ANSWER) == measured
    assert save_answer(tmp_path, replace(measured, compiled=0)).startswith("answer: not kept")


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(["mode=search", "target=v5e-4", "model=llama_7b", "batch=64", "precision=bf16_mixed"])
    assert run.config.mode.run(run) != 0
    printed = capsys.readouterr().out
    assert "nothing fits: the smallest layout needs" in printed
    assert "16 chips would do: target=v5e-16." in printed
    both = ["mode=search", "mode.targets=[v5e-4,v4-8]", "model=llama_7b", "batch=64", "precision=bf16_mixed"]
    of = parse_request(run_of([*both, "mode.targets=[v5e-4,v4-8]", "target.slices=1", "partition=fsdp", "remat=full"]))
    text = mode._nothing_fits(listed_of(of), of, Compiles(), of.space())
    assert [line.partition(":")[0] for line in text.splitlines()] == ["v5e", "v4"]
    assert text.splitlines()[0].endswith("target=v5e-16.") and "would do: target=v4-" in text.splitlines()[1]


def test_where_none_should_fit_and_none_was_compiled_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = listed_of(question())
    doubtful = Shortlist([], listed.fitting[:3], listed.smallest)
    monkeypatch.setattr(mode, "shortlist", lambda ranked: doubtful)
    status, answer, _ = search(monkeypatch, tmp_path, "mode.compiles=0")
    assert status == NOT_COMPILED and not answer
    assert "3 may fit by the errors of estimates, and were not compiled." in capsys.readouterr().out


def test_narrow_products_are_said_to_be_estimated_as_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("partition=fsdp", "remat=full", "microbatches=1", "mode.compiles=0")
    search(monkeypatch, tmp_path, *few)
    assert "as if they were" not in capsys.readouterr().out
    search(monkeypatch, tmp_path, *few, "precision=int8", "name=narrow")
    assert "precision=int8: estimates take products in int8 as if they were in bfloat16" in capsys.readouterr().out


def test_no_layout_is_legal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, answer, _ = search(monkeypatch, tmp_path, "batch=1", "partition=fsdp")
    assert status != 0 and not answer
    assert "no layout is legal: batch=1" in capsys.readouterr().out
    assert search(monkeypatch, tmp_path, "partition=fsdp", "microbatches=32")[0] != 0
    assert "no layout is legal: batch=32 with microbatches=32 or an axis" in capsys.readouterr().out
    circular = ("partition=pp", "partition.schedule=circular", "partition.rounds=2", "microbatches=1")
    assert search(monkeypatch, tmp_path, *circular, "model.layers=16")[0] != 0
    printed = capsys.readouterr().out
    assert "refused: partition=pp: too few microbatches" in printed
    assert "no layout is legal. The reasons are above" in printed and "is divided by none" not in printed


def test_ctrl_c_prints_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], compiler: Compiler
) -> None:
    def interrupted(*_: Any) -> Trial:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "compile_trial", interrupted)
    monkeypatch.setattr(Tpu, "missing_compiler", lambda self, target: None)
    status, answer, _ = search(monkeypatch, tmp_path)
    assert status == 130
    assert len(answer["best"]) == mode.SHOWN
    assert "interrupted; the best so far:" in capsys.readouterr().out


def test_options_of_a_layout_that_another_is_faster_than_are_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], compiler: Compiler
) -> None:
    compiler.steps = {tuple(one.candidate.overrides): one.step_s for one in listed_of(question()).fitting}
    monkeypatch.setattr(Tpu, "missing_compiler", lambda self, target: None)
    monkeypatch.setattr(mode, "tune_best", lambda question, best, budget_s, console: (0, [f"xla_flag={budget_s:g}"]))
    monkeypatch.setattr(mode, "write_report", lambda folder: folder)
    assert search(monkeypatch, tmp_path, "mode.tune=5min", "mode.compiles=2")[1]["options"] == ["xla_flag=300"]
    assert "another layout is faster" not in capsys.readouterr().out
    monkeypatch.setattr(mode, "rank_measured", lambda question, rows, measures: rows[::-1])
    assert search(monkeypatch, tmp_path, "mode.tune=5min", "mode.compiles=2")[1]["options"] == []
    assert "left out, for another layout is faster: xla_flag=300. mode=tune tries" in capsys.readouterr().out


def test_a_compiled_layout_tells_what_its_estimate_was_worth(compiler: Compiler, tmp_path: Path) -> None:
    of = question()
    listed = listed_of(of)
    compiler.factor = 2.0
    compiles = compiled_by(compiler, of, listed, tmp_path, most=3)
    done: CompiledLayout = compiles.done[0]
    one: Estimated = done.estimate
    assert compiles.ratio(mesh_partition(one)) == pytest.approx(2.0)


def test_compiler_options_of_the_best_stand_in_the_command(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of = question("mode.tune=5min")
    best = compiled_by(compiler, of, listed_of(of), tmp_path, most=1).done[0]
    asked_of = list[Any]()

    def tuned(run: Run, candidates: Any, budget_s: float | None, on_result: Any) -> Tuned:
        asked_of.append((run.layout, budget_s))
        attempt = Attempt({"xla_flag": True}, Verdict.kept, 1, 0.9, 2**30, -0.1)
        found = Tuned(1.0, 0.9, {"xla_flag": True}, (attempt,), finished=True, run=run)
        on_result(found)
        return found

    monkeypatch.setattr(tuning, "tune", tuned)
    status, options = tuning.tune_best(of, best, 300.0, Console(quiet=True))
    assert (status, options) == (0, ["target.chip.xla_options.xla_flag=true"])
    assert asked_of == [(best.estimate.run(of.run).layout, 300.0)]
    row = rank_layout(of, best.estimate)
    assert command_of(of, row, options).endswith("target.chip.xla_options.xla_flag=true")
