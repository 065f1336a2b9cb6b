"""Tests of `mode=search`: its request, the order of compiles, when it stops, and its answer."""

from __future__ import annotations

import errno
import fcntl
import html
import io
import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import pytest
from rich.console import Console

import valkyrie
from reported import GOLDEN_FOLDER
from valkyrie.config.arguments import abbreviate_search, expand_shorthand, parse_run
from valkyrie.config.modes import ANSWER_FILE, COMPILE_FILE
from valkyrie.config.run import Run
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.platforms.gpu import Gpu
from valkyrie.hardware.platforms.tpu import Tpu
from valkyrie.hardware.target import usable_hbm
from valkyrie.paths import DiskError
from valkyrie.problems import ProblemCode
from valkyrie.processes.ending import EXIT_INTERRUPTED, EXIT_REFUSED
from valkyrie.records import decode, encode, read_record, write_record
from valkyrie.report.search import search_page
from valkyrie.search import NO_STEP_TIME, compiling, correcting, durations, mode, progress, tuning
from valkyrie.search import budget as budget_module
from valkyrie.search import shortlist as shortlist_module
from valkyrie.search.answer import (
    compile_command,
    describe_peak,
    describe_work,
    make_answer_row,
    print_answer,
    rank_layouts,
    train_command,
)
from valkyrie.search.answer_record import MeasuredLayout, MeasureReport, RankedLayout, SearchAnswer, Stage, TriedBatch
from valkyrie.search.baselines import (
    FSDP_BASELINE,
    PAPER_RULE,
    Baseline,
    describe_other_parallelism,
    find_baselines,
    find_other_parallelism,
    format_comparison,
)
from valkyrie.search.batches import (
    add_batches,
    describe_batch_rival,
    describe_batches,
    explain_batch,
    find_same_layouts,
)
from valkyrie.search.budget import (
    describe_compile_time,
    describe_missing_compiles,
    describe_plan,
    describe_rival_budget,
)
from valkyrie.search.compile import cache as compile_cache
from valkyrie.search.compile.correction import step_interval
from valkyrie.search.compile.prediction import (
    Alternatives,
    CompiledStep,
    CompileOutcome,
    CompileStatus,
    Hint,
    HintCode,
    MemoryReport,
    read_prediction,
)
from valkyrie.search.compile.runner import CompiledRun
from valkyrie.search.compiling import CompiledLayout, CompiledLayouts, StopCause, compile_best
from valkyrie.search.correcting import CorrectedTime, EstimatedStep, correct_estimates
from valkyrie.search.estimate.rank import EstimatedLayout, Ranking, rank
from valkyrie.search.estimate.space import LayoutSpace
from valkyrie.search.estimate.times import COMPUTE_PARTS
from valkyrie.search.folder import COMMANDS_FILE, lock_folder, request_digest, save_answer
from valkyrie.search.measuring import MeasuredTrial, MeasuredTrials
from valkyrie.search.remarks import (
    collect_remarks,
    describe_choices,
    describe_costs,
    describe_intervals,
    describe_placement,
    describe_policies,
)
from valkyrie.search.request import SearchRequest, parse_request
from valkyrie.search.rivals import describe_certainty, describe_ties, may_be_better
from valkyrie.search.shortlist import Shortlist, build_shortlist, describe_chips, mesh_partition, without_torus
from valkyrie.search.tune.tuned import Attempt, TunedRun, Verdict
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.results import Outcome
from valkyrie.sweep.trial import TRIALS_FILE, Status, StepResult, Trial, TrialLog, TrialResult
from valkyrie.train.options import TO_FIT, USER, Option
from valkyrie.units import duration_text, memory_text, number_text, percent_text

TINY = ("mode=search", "target=v5e-8", "model=gpt_tiny", "precision=bf16_mixed", "batch=32")
SPACE_FIELDS = ("targets", "partitions", "remats", "microbatches", "mesh", "device_batches", "search_batch", "settings")
"""Fields of a request that its layouts depend on, besides the run."""


@cache
def make_request(*arguments: str) -> SearchRequest:
    """Return a search request for the tiny GPT."""
    return parse_request(parse_run([*TINY, *arguments]))


class FinishedSearch(NamedTuple):
    """Result of a search: exit status, content of `search.json` (empty if not written), run, and output."""

    status: int
    answer: dict[str, Any]
    run: Run
    printed: str


_spaces: dict[str, LayoutSpace] = {}
_rankings: dict[int, tuple[LayoutSpace, Ranking]] = {}
"""Rankings with their spaces, by the id of the space. The space is stored so that its id is not used again."""
_enumerate_space = SearchRequest.space


def enumerate_once(request: SearchRequest) -> LayoutSpace:
    """Return the layouts of a request. Requests that differ only in the run's name and mode share them."""
    fields = [getattr(request, name) for name in SPACE_FIELDS]
    key = repr((replace(request.run.config, name=None, mode=None), fields))
    if key not in _spaces:
        _spaces[key] = _enumerate_space(request)
    return _spaces[key]


def rank_once(run: Run, space: LayoutSpace) -> Ranking:
    """Rank the layouts of a space that `enumerate_once` has returned."""
    if id(space) not in _rankings:
        _rankings[id(space)] = space, rank(run, space)
    return _rankings[id(space)][1]


@pytest.fixture(autouse=True)
def _estimate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SearchRequest, "space", enumerate_once)
    monkeypatch.setattr(mode, "rank", rank_once)


@pytest.fixture
def search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., FinishedSearch]:
    """A function that runs a search with extra arguments in an empty folder, and returns it as `FinishedSearch`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)

    def carry_out(*arguments: str) -> FinishedSearch:
        run = parse_run([*TINY, "name=found", *arguments])
        assert run.problems() == []
        capsys.readouterr()
        status, file = run.config.mode.run(run), tmp_path / "runs" / "found" / ANSWER_FILE
        answer = json.loads(file.read_text()) if file.exists() else {}
        return FinishedSearch(status, answer, run, capsys.readouterr().out)

    return carry_out


_shortlists: dict[int, tuple[SearchRequest, Shortlist]] = {}


def make_shortlist(request: SearchRequest) -> Shortlist:
    """Return the layouts that a search may compile, with the shortest estimate first. Estimates a request once."""
    if id(request) not in _shortlists:  # the stored request keeps its id from being used again
        _shortlists[id(request)] = request, build_shortlist(rank_once(request.run, request.space()))
    return _shortlists[id(request)][1].select(lambda layout: True)


def with_compile_commands(request: SearchRequest, rows: Sequence[RankedLayout]) -> list[RankedLayout]:
    """Return rows with the commands that compile them."""
    return [replace(row, compile=compile_command(request, row)) for row in rows]


class ScaledCompiler:
    """A fake `compile_trial`. Steps take `factor` times their estimate. Partitions in `does_not_fit` do not fit."""

    def __init__(self, factor: float = 1.0, does_not_fit: Sequence[str] = ()) -> None:
        self.factor, self.does_not_fit, self.plans = factor, does_not_fit, list[TrialPlan]()
        self.steps: dict[tuple[str, ...], float] = {}

    def __call__(self, plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        self.plans.append(plan)
        fits = plan.about.partition not in self.does_not_fit
        step_s = self.factor * self.steps[tuple(plan.overrides[-len(self.key(plan)) :])]
        results = TrialResult(step=StepResult(step_s=step_s), memory=MemoryReport(peak=2**30))
        results = results if fits else TrialResult(memory=MemoryReport(needed=2**40))
        status = Status.ok if fits else Status.does_not_fit
        return plan.to_trial(Outcome(status, results=results), "2026-01-01T00:00:00+00:00", 1.0)

    def key(self, plan: TrialPlan) -> tuple[str, ...]:
        """Return the overrides that describe the layout of a plan."""
        start = next(i for i, o in enumerate(plan.overrides) if o.startswith("mode=")) + 1
        return plan.overrides[start:]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> ScaledCompiler:
    """A fake compiler that replaces `compile_trial` for a whole test."""
    replacement = ScaledCompiler()
    monkeypatch.setattr(compiling, "compile_trial", replacement)
    return replacement


def compile_shortlist(
    compiler: ScaledCompiler,
    request: SearchRequest,
    shortlist: Shortlist,
    folder: Path,
    max_compiles: int = 50,
    ranking: Ranking | None = None,
) -> CompiledLayouts:
    """Compile at most `max_compiles` layouts with the fake compiler, and return them.

    With a ranking, also compiles batches of the best layout that are not in the shortlist.
    """
    entries = [*shortlist.fitting, *shortlist.may_fit, *(ranking or ())]
    compiler.steps = {tuple(entry.candidate.overrides): entry.step_s for entry in entries}
    compiles = CompiledLayouts()
    compile_best(
        request,
        shortlist,
        lambda target: [],
        folder,
        max_compiles,
        compiles,
        lambda entry, so_far: None,
        lambda *waited: None,
        lambda best: find_same_layouts(best.estimate.candidate, ranking) if ranking else (),
    )
    return compiles


@pytest.mark.slow
def test_a_wrong_flag_of_libtpu_ends_the_search_and_keeps_its_results(
    search: Callable[..., FinishedSearch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reason = "LIBTPU_INIT_ARGS=--xla_foo=1: libtpu has no flag xla_foo. Change the variable, or unset it."

    refused = CompiledRun(
        CompileOutcome(CompileStatus.refused, reason, variable="LIBTPU_INIT_ARGS"), tmp_path, tmp_path, False, 0.0
    )
    monkeypatch.setattr("valkyrie.search.modes.compile_layout", lambda *_: refused)
    plans, compile_trial = list[TrialPlan](), compiling.compile_trial

    def compile_first(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        plans.append(plan)
        results = TrialResult(step=StepResult(step_s=1.0), memory=MemoryReport(peak=2**30))
        first = plan.to_trial(Outcome(Status.ok, results=results), "2026-01-01T00:00:00+00:00", 1.0)
        return first if len(plans) == 1 else compile_trial(plan, watch)

    monkeypatch.setattr(compiling, "compile_trial", compile_first)
    finished = search("partition=fsdp", "mesh=2x2x2")
    assert (finished.status, len(plans), finished.answer["compiled"]) == (2, 2, 1)
    assert finished.answer["why"] == reason and f"1 layout compiled: {reason}" in finished.printed
    with pytest.raises(ValueError, match=f"^{reason}"):
        valkyrie.search(finished.run, quiet=True)


def test_search_stops_when_no_other_layout_can_be_faster(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_request()
    shortlist = make_shortlist(request)
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=500)
    best = compiles.best(request)
    assert best is not None and best.step_s == pytest.approx(shortlist.fitting[0].step_s)
    assert "no other layout" in compiles.stop_reason
    assert len(compiles.layouts) < len(shortlist.fitting)


def test_layouts_that_cannot_win_or_hardly_fit_are_not_compiled_before_others(
    compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios of a real search: pipelines take three times their estimate, dp needs 8% more memory than estimated."""
    arguments = ["mode=search", "target=v4-16", "model=gpt_1b", "mesh=1x2x4", "precision=bf16"]
    request = parse_request(parse_run(arguments))
    shortlist = make_shortlist(request)
    layouts = {tuple(entry.candidate.overrides): entry for entry in [*shortlist.fitting, *shortlist.may_fit]}

    def compile_as_measured(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        entry = layouts[tuple(compiler.key(plan))]
        compiler.factor = 2.9 if entry.has_pipeline else 0.94
        trial, peak = compiler(plan, watch), int(entry.peak_bytes * (1.08 if plan.about.partition == "dp" else 1.03))
        if peak <= (usable_hbm(entry.group.target.chip) or 0):
            return replace(trial, results=replace(trial.results, memory=MemoryReport(peak=peak)))
        return replace(trial, status=Status.does_not_fit, results=TrialResult(memory=MemoryReport(needed=peak)))

    monkeypatch.setattr(compiling, "compile_trial", compile_as_measured)
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=12)
    assert {layout.trial.status for layout in compiles.layouts} == {Status.ok}
    times = [layout.step_s or 0.0 for layout in compiles.layouts]
    assert max(times) < 1.1 * min(times) and "no other layout" in compiles.stop_reason


def test_a_layout_near_the_memory_limit_waits_for_one_that_surely_fits(
    compiler: ScaledCompiler, tmp_path: Path
) -> None:
    fastest = make_shortlist(make_request()).fitting[0]
    gib = 1.01 * fastest.peak_bytes / 2**30
    request = make_request(f"target.chip.usable_hbm_gib={gib}")
    compiles = compile_shortlist(compiler, request, make_shortlist(request), tmp_path, max_compiles=1)
    assert compiles.layouts[0].estimate.peak_bytes < 0.9 * fastest.peak_bytes


def test_a_layout_that_does_not_fit_is_not_the_answer(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_request()
    shortlist = make_shortlist(request)
    fastest = shortlist.fitting[0].group.candidates.partition.name
    compiler.does_not_fit = [fastest]
    best = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=500).best(request)
    assert best is not None and best.estimate.group.candidates.partition.name != fastest


def test_layouts_that_save_the_same_activations_as_one_that_does_not_fit_are_not_compiled_or_answered(
    compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("mode.compiles=9")
    shortlist = make_shortlist(request)
    first = shortlist.fitting[0]
    same_remat = {tuple(other.candidate.overrides) for other in shortlist.fitting if other.remat == first.remat}
    assert 1 < len(same_remat) < len(shortlist.fitting)

    def too_large(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        if compiler.key(plan) not in same_remat:
            return compiler(plan, watch)
        compiler.plans.append(plan)
        usable = usable_hbm(first.group.target.chip) or 0
        results = TrialResult(memory=MemoryReport(needed=1000 * usable))
        return plan.to_trial(Outcome(Status.does_not_fit, results=results), "2026-01-01", 1.0)

    monkeypatch.setattr(compiling, "compile_trial", too_large)
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=9)
    assert sum(compiler.key(plan) in same_remat for plan in compiler.plans) == 1 < len(compiler.plans)
    remaining = shortlist.select(compiles.may_fit)
    assert {tuple(row.candidate.overrides) for row in rank_layouts(request, remaining, compiles, 10)}.isdisjoint(
        same_remat
    )


@pytest.mark.slow
def test_options_that_the_compile_of_the_best_layout_has_added_are_in_its_command(
    search: Callable[..., FinishedSearch], compiler: ScaledCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.steps = {
        tuple(entry.candidate.overrides): entry.step_s for entry in make_shortlist(make_request()).fitting
    }
    monkeypatch.setattr(mode, "write_report", lambda folder: folder)
    options = ("target.chip.xla_options.xla_saves=true",)
    monkeypatch.setattr(compiling, "_read_compiled", lambda layout, trial, _: CompiledLayout(layout, trial, options))
    finished = search("mode.compiles=2")
    assert finished.answer["options"] == ["target.chip.xla_options.xla_saves=true"]
    assert finished.answer["train"].endswith(" target.chip.xla_options.xla_saves=true")


def test_options_to_fit_and_hints_are_read_from_the_record_of_a_compile(
    compiler: ScaledCompiler, tmp_path: Path
) -> None:
    request = make_request()
    layout = make_shortlist(request).fitting[0]
    compiler.steps = {tuple(layout.candidate.overrides): layout.step_s}
    trial = compiler(compiling.plan_compile(request, layout, tmp_path), lambda: None)
    assert compiling._read_compiled(layout, trial, tmp_path) == CompiledLayout(layout, trial)
    prediction, hint = read_prediction(GOLDEN_FOLDER / "compile.json"), Hint(HintCode.save_activation, "Save q.")
    options = (Option("xla_saves", "true", TO_FIT), Option("xla_other", "1", USER))
    write_record(tmp_path / COMPILE_FILE, replace(prediction, options=options, hints=(hint,)))
    compiled = compiling._read_compiled(layout, trial, tmp_path)
    assert compiled.added_options == ("target.chip.xla_options.xla_saves=true",) and compiled.hints == (hint,)


def test_remat_policies_outside_the_table_and_the_hint_of_the_compile_are_named(
    compiler: ScaledCompiler, tmp_path: Path
) -> None:
    request = make_request()
    shortlist = make_shortlist(request)
    best = shortlist.fitting[0]
    hints = (
        Hint(HintCode.memory_bound, "Use a larger batch."),
        Hint(HintCode.save_activation, "Save q.", changes=("remat.save=[q]",)),
    )
    compiler.steps = {tuple(best.candidate.overrides): best.step_s}
    trial = compiler(compiling.plan_compile(request, best, tmp_path), lambda: None)
    compiles = CompiledLayouts([CompiledLayout(best, trial, hints=hints)])
    rows = rank_layouts(request, shortlist, compiles, 10)
    assert rows[0].candidate == best.candidate
    slower_rows = [rows[0].with_step_time(1.2 * rows[0].step_s), *rows[1:]]
    policies, hint = describe_policies(request, slower_rows, shortlist, compiles)
    shown = {row.candidate.remat for row in rows if row.candidate.partition == best.candidate.partition}
    assert "save_dot_except_mlp " in policies and "save_dot_except_mlp" not in shown, "the table has three policies"
    assert not shown & {*re.findall(r"\w+", policies)}
    assert "Save q." in hint and "mode=compile" in hint and "remat.save=[q]" in hint and "larger" not in hint
    assert describe_policies(request, rows, shortlist, compiles) == [hint], "the others are 10% slower by estimate"
    assert not describe_policies(request, [replace(rows[0], stage=Stage.estimate)], shortlist, compiles)


def test_compiles_of_earlier_searches_are_found_in_their_records(
    compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("mode.compiles=0")
    shortlist, recorded = make_shortlist(request), CompiledLayouts()
    compiled_layouts = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=2).layouts
    TrialLog(tmp_path).append(entry.trial for entry in compiled_layouts)
    trials = {entry.trial.key: entry.trial for entry in compiled_layouts}
    monkeypatch.setattr(compiling, "settle", lambda plans: (trials, []))
    compiling.add_recorded_layouts(request, [*shortlist.fitting, *shortlist.may_fit], tmp_path, recorded)
    assert {entry.trial.key for entry in recorded.layouts} == {*trials}


def test_search_compiles_at_most_the_requested_number(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_request("batch=64")
    compiles = compile_shortlist(compiler, request, make_shortlist(request), tmp_path, max_compiles=2)
    assert len(compiles.layouts) == 2
    assert "mode.compiles=2" in compiles.stop_reason


def test_baselines_are_compiled_even_if_none_can_be_faster(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_request()
    ranked = rank(request.run, request.space())
    shortlist, entries = build_shortlist(ranked), list(ranked)
    slow = [entry for entry in entries if entry.fits and entry.step_s > 3 * entries[0].step_s][:2]
    compiler.steps, compiles = {tuple(entry.candidate.overrides): entry.step_s for entry in entries}, CompiledLayouts()
    compile_best(
        request,
        shortlist,
        lambda target: slow,
        tmp_path,
        500,
        compiles,
        lambda entry, so_far: None,
        lambda *waited: None,
    )
    compiled_overrides = [entry.estimate.candidate.overrides for entry in compiles.layouts]
    assert compiled_overrides[0] == shortlist.fitting[0].candidate.overrides
    assert compiled_overrides[-2:] == [entry.candidate.overrides for entry in slow]


def test_no_compile_starts_that_would_exceed_the_budget(
    compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])

    def slow(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        clock[0] += 40.0
        return compiler(plan, watch)

    monkeypatch.setattr(compiling, "compile_trial", slow)
    request = make_request("batch=64", "mode.budget=100s")
    compiles = compile_shortlist(compiler, request, make_shortlist(request), tmp_path)
    assert len(compiles.layouts) == 2
    assert "mode.budget=100s" in compiles.stop_reason


def test_the_first_compile_stops_after_twice_the_budget_and_the_answer_is_an_estimate(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch]
) -> None:
    clock = [0.0]

    def endless(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        while True:
            clock[0] += 1.0
            watch()

    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compiling, "compile_trial", endless)
    monkeypatch.setattr(durations, "earlier_compile_seconds", lambda parameters, usable: earlier_s)
    earlier_s: list[float] = []
    status, answer, _, printed = search("partition=fsdp", "remat=full", "mode.budget=1min")
    assert status == 0 and 120 <= clock[0] < 122 and answer["best"][0]["stage"] == "estimate"
    assert answer["compiled"] == 0 and "mode.budget=1min" in answer["why"]
    command = answer["warning"].partition("valkyrie-train ")[2]
    run = parse_run(expand_shorthand(shlex.split(command)))
    assert run.config.mode.budget == "4min" and "partition=fsdp" in command, "the same search with a longer budget"
    before = printed.partition("compiled: ")[0]
    assert "120 s" in before and "mode.budget=4min" in before and "mode.compiles=0" in before, "the plan is too short"
    assert 0 < printed.index(answer["warning"]) < printed.index("bound by"), "the warning is above the table"
    earlier_s.append(400.0)
    assert " mode.budget=7min" in search("partition=fsdp", "remat=full", "mode.budget=1min").answer["warning"]
    answer = search("partition=fsdp", "remat=full", "mode.compiles=0").answer
    assert answer["warning"] == "", "these estimates were requested"


@pytest.mark.slow
def test_output_to_a_file_has_a_line_every_30_seconds_and_the_number_of_compiles_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)
    monkeypatch.setattr(durations, "earlier_compile_seconds", lambda parameters, usable: [70.0])
    request, console = make_request("mode.budget=3min"), Console(width=200, file=(output := io.StringIO()))
    shown = progress.CompileProgress(request, CompiledLayouts(), console)
    shown.print_start(Path("found"))
    assert "mode.budget=3min (after 6 min if no layout has a step time by then)" in output.getvalue()
    assert "70 s: 2 would fit in mode.budget=3min" in output.getvalue() and "mode.compiles=0" not in output.getvalue()
    several = describe_plan(make_request("mode.targets=[v5e-8,v6e-8,v4-8]", "mode.budget=3min"), CompiledLayouts())
    assert "3 slices" in several[1] and "mode.budget=4min" in several[1] and "target=v5e-8" in several[1]
    layout, start = make_shortlist(request).fitting[0], len(output.getvalue().splitlines())
    for seconds in (*range(0, 100, 5), *range(0, 40, 5)):  # two compiles
        shown.show_wait(layout, float(seconds), 0.0)
    lines = output.getvalue().splitlines()[start:]
    assert [int(line.partition(": ")[2].split(" s")[0]) for line in lines] == [30, 60, 90, 30]


def test_compiles_for_another_chip_do_not_tell_how_long_one_for_v6e_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)
    v5e_bytes = usable_hbm(known_chips()["v5e"])
    monkeypatch.setattr(
        durations, "earlier_compile_seconds", lambda parameters, usable: [60.0] if usable == v5e_bytes else []
    )
    plan = describe_plan(make_request("mode.targets=[v5e-8,v6e-8]", "mode.budget=7min"), CompiledLayouts())
    usual_s = 4 * get_platform("tpu").usual_compile_s[1]
    assert "v6e" in plan[0] and str(usual_s) in plan[0]
    assert f"mode.budget={math.ceil((60 + usual_s) / 60)}min" in plan[1], "one compile on each chip"
    request = make_request("mode.targets=[v5e-8,v6e-8]", "mode.budget=7min")
    compiled = CompiledLayouts()
    compiled.layouts = [SimpleNamespace(target=request.targets[1], step_s=1.0)]  # pyright: ignore[reportAttributeAccessIssue]
    (line,) = describe_plan(request, compiled)
    assert "v5e" in line and "60 s" in line, "v6e has a compile"


def test_earlier_compiles_of_a_model_are_timed_by_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_cache, "requests_folder", lambda: tmp_path)
    assert compile_cache.earlier_compile_seconds(7, 16) == []
    step = CompiledStep("", "", 1.0, 2.0, (), MemoryReport(usable=16), 7, Alternatives(), (), (), {})
    for name, program, parameters in (("a", "one", 7), ("b", "two", 8), ("c", "one", 7)):
        outcome = CompileOutcome(CompileStatus.ok, None, replace(step, program=program, parameters=parameters))
        (tmp_path / name).mkdir()
        write_record(tmp_path / name / compile_cache.OUTCOME_FILE, outcome)
    assert compile_cache.earlier_compile_seconds(7, 16) == [3.0], "two requests of one program"
    assert compile_cache.earlier_compile_seconds(7, 80) == [], "compiles for another chip"


def test_the_next_compile_is_expected_to_take_the_median_of_those_that_are_not_from_the_cache(
    compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, seconds, expected_s = [0.0], [4.0, 89.0, 67.0, 30.0], list[float]()
    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])
    read_compiled = compiling._read_compiled
    monkeypatch.setattr(
        compiling, "_read_compiled", lambda *args: replace(read_compiled(*args), cached=len(compiler.plans) == 1)
    )
    monkeypatch.setattr(correcting, "_common_surprises", lambda *_: {})  # others would be expected to be as slow

    def timed(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        watch()
        clock[0] += seconds[len(compiler.plans)]
        compiler.factor = 1.5 ** (len(compiler.plans) + 1)  # so that others may be faster
        return compiler(plan, watch)

    monkeypatch.setattr(compiling, "compile_trial", timed)
    request, compiles = make_request("batch=64", "mode.budget=244s"), CompiledLayouts()
    shortlist = make_shortlist(request)
    compiler.steps = {tuple(entry.candidate.overrides): entry.step_s for entry in shortlist.fitting}

    def on_wait(layout: EstimatedLayout, waited_s: float, median_s: float) -> None:
        expected_s.append(median_s)

    compile_best(request, shortlist, lambda best: [], tmp_path, 50, compiles, lambda *_: None, on_wait)
    assert expected_s == [0.0, 0.0, 89.0, 78.0], "84 s were left for the last compile"
    assert [layout.cached for layout in compiles.layouts] == [True, False, False, False]
    assert "mode.budget=244s" in compiles.stop_reason
    console = Console(width=200, file=(output := io.StringIO()))
    for layout in compiles.layouts[:2]:
        progress.CompileProgress(request, compiles, console).print_result(layout, compiles)
    assert ["cache" in line for line in output.getvalue().splitlines()] == [True, False]


@pytest.mark.parametrize(("budget", "first"), [("3min", "v4-8"), pytest.param("7min", "v6e-8", marks=pytest.mark.slow)])
def test_slices_whose_compiles_do_not_fit_in_the_budget_come_last(
    compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, first: str
) -> None:
    monkeypatch.setattr(durations, "earlier_compile_seconds", lambda *_: [])
    request = make_request("mode.targets=[v6e-8,v4-8]", "batch=64", f"mode.budget={budget}")
    shortlist = make_shortlist(request)
    assert shortlist.fitting[0].candidate.target == "v6e-8", "estimated to be the fastest"
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=2)
    targets = [layout.estimate.candidate.target for layout in compiles.layouts]
    assert targets[0] == first and ("v6e-8" in targets) == (first == "v6e-8")


def test_a_compile_that_ctrl_c_stops_is_named_above_the_answer(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch]
) -> None:
    clock = [0.0]

    def interrupted(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        clock[0] += 542.0
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compiling, "compile_trial", interrupted)
    monkeypatch.setattr(durations, "earlier_compile_seconds", lambda parameters, usable: [49.0, 81.0])
    status, answer, _, printed = search("partition=fsdp", "remat=full", "mode.budget=7min")
    assert status == EXIT_INTERRUPTED and answer["why"] in answer["warning"] and answer["warning"] in printed
    assert "542 s" in answer["why"] and " partition=fsdp " in answer["why"]
    run = parse_run(expand_shorthand(shlex.split(answer["warning"].partition("valkyrie-train ")[2])))
    assert run.config.mode.budget == "19min", "twice as long as the compile that was stopped"
    assert any("mode=compile" in line and "542 s" in line for line in answer["certainty"])


def test_an_interrupt_between_compiles_is_named_above_the_answer(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "_pick_next", interrupted)
    status, answer, _, printed = search("partition=fsdp", "remat=full", "mode.budget=7min")
    assert status == EXIT_INTERRUPTED and answer["why"] == "Ctrl-C or a signal" and "interrupted: Ctrl-C" in printed
    assert "no layout was compiled: Ctrl-C or a signal. Finished compiles are kept" in answer["warning"]


@pytest.mark.parametrize("target", [pytest.param("v5e-8", marks=pytest.mark.slow), "h100-8"])
def test_estimates_have_no_interval_if_compiled_steps_have_none(
    target: str, compiler: ScaledCompiler, tmp_path: Path
) -> None:
    model = "valkyrie_125m" if target == "v5e-8" else "gpt_125m"
    request = parse_request(parse_run(["mode=search", f"target={target}", f"model={model}", "batch=64"]))
    shortlist = make_shortlist(request)
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=1)
    rows = rank_layouts(request, shortlist, compiles, 10)
    assert rows[0].stage is Stage.compile and {row.interval for row in rows} == {None}
    assert "#2" in describe_ties(request, rows)[0], "it may be faster once compiled"
    assert all(low < 1 < high for low, high in (row.compiled_ratios for row in rows[1:]))
    assert len(describe_intervals(request, rows)) == len(describe_intervals(request, rows[1:])) == 1


def test_a_later_compile_stops_at_the_end_of_the_budget(
    compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])

    def wait(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        for _ in range(10 if not compiler.plans else 1000):
            clock[0] += 1.0
            watch()
        return compiler(plan, watch)

    monkeypatch.setattr(compiling, "compile_trial", wait)
    request = make_request("mode.budget=100s")
    compiles = compile_shortlist(compiler, request, make_shortlist(request), tmp_path)
    assert len(compiles.layouts) == 1 and 100 <= clock[0] < 102 and "mode.budget=100s" in compiles.stop_reason


@pytest.mark.parametrize(("first_fits", "factor"), [(True, 1), (False, 2)])
def test_the_budget_is_twice_as_long_until_a_layout_has_a_step_time(
    first_fits: bool, factor: int, compiler: ScaledCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("mode.budget=100s")
    shortlist, clock = make_shortlist(request), [0.0]
    compiler.does_not_fit = [] if first_fits else [shortlist.fitting[0].group.candidates.partition.name]
    recorded = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=1)
    assert (recorded.layouts[0].step_s is not None) == first_fits

    def endless(plan: TrialPlan, watch: Callable[[], None]) -> Trial:
        while True:
            clock[0] += 1.0
            watch()

    monkeypatch.setattr(compiling.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compiling, "compile_trial", endless)
    resumed = CompiledLayouts(recorded.layouts)
    compile_best(request, shortlist, lambda best: [], tmp_path, 50, resumed, lambda *_: None, lambda *_: None)
    assert len(resumed.layouts) == 1 and factor * 100 <= clock[0] < factor * 100 + 2
    assert ("2 times mode.budget=100s" in resumed.stop_reason) != first_fits


@pytest.mark.slow
def test_a_better_estimate_is_listed_first_if_few_layouts_were_compiled(
    compiler: ScaledCompiler, tmp_path: Path
) -> None:
    request = make_request()
    shortlist, compiler.factor = make_shortlist(request), 1.0
    slow = [
        entry
        for entry in rank(request.run, request.space())
        if entry.fits and entry.step_s > 4 * shortlist.fitting[0].step_s
    ][0]
    compiles, fast = CompiledLayouts(), shortlist.fitting[0]
    compiler.steps = {tuple(slow.candidate.overrides): slow.step_s, tuple(fast.candidate.overrides): fast.step_s}
    plan = compiling.plan_compile(request, slow, tmp_path)
    compiles.layouts.append(CompiledLayout(slow, compiler(plan, lambda: None)))
    rows = rank_layouts(request, shortlist, compiles, 10)
    assert (rows[0].stage.value, rows[0].overrides) == ("estimate", fast.candidate.overrides)
    comparison = format_comparison(Baseline(FSDP_BASELINE, slow), compiles, rows[0])
    assert "(compiled step)" in comparison and f"{slow.step_s / fast.step_s:.2f} times " in comparison
    compiler.steps[tuple(slow.candidate.overrides)] *= 3
    corrected = CompiledLayouts([CompiledLayout(slow, compiler(plan, lambda: None))])
    comparison = format_comparison(Baseline(FSDP_BASELINE, slow), corrected, rows[0])
    assert f"{3 * slow.step_s / fast.step_s:.2f} times " in comparison


def test_an_estimate_that_beats_ten_compiled_layouts_takes_the_place_of_the_slowest(
    compiler: ScaledCompiler, tmp_path: Path
) -> None:
    request = make_request()
    shortlist, compiler.factor, compiles = make_shortlist(request), 3.0, CompiledLayouts()
    fast = shortlist.fitting[0]
    uncorrected = [e for e in shortlist.fitting if e.remat != fast.remat]
    others = {mesh_partition(e): e for e in uncorrected if e.candidate.partition != fast.candidate.partition}
    for entry in [*others.values()][:10]:
        compiler.steps[tuple(entry.candidate.overrides)] = entry.step_s
        trial = compiler(compiling.plan_compile(request, entry, tmp_path), lambda: None)
        compiles.layouts.append(CompiledLayout(entry, trial))
    rows = rank_layouts(request, shortlist, compiles, 10)
    assert len(compiles.layouts) == len(rows) == 10 and rows[0].overrides == fast.candidate.overrides
    estimated = [row for row in rows if row.stage.value == "estimate"]
    compiled_s = sorted(entry.step_s for entry in compiles.layouts)
    assert rows[: len(estimated)] == estimated and all(row.high_s < compiled_s[0] for row in estimated)
    assert [row.step_s for row in rows[len(estimated) :]] == compiled_s[: 10 - len(estimated)]


def test_the_cheapest_slice_is_compiled_first_if_prices_are_known(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_request("mode.targets=[v5e-8,v6e-8]", "mode.tokens=1e9")
    shortlist = make_shortlist(request)
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=1)
    (entry,) = compiles.layouts
    cheapest = min(shortlist.fitting, key=lambda e: request.cost(e, e.step_s))
    assert entry.target.name == cheapest.group.target.name


@pytest.mark.slow
def test_every_number_of_chips_has_rows_and_the_cheapest_is_first() -> None:
    request = parse_request(
        parse_run(["mode=search", "model=gpt_125m", "batch=512", "mode.targets=[v4-8,v4-512]", "mode.tokens=1e9"])
    )
    shortlist = make_shortlist(request)
    rows = rank_layouts(request, shortlist, CompiledLayouts(), 10)
    slices = [row.overrides[0] for row in rows]
    assert slices[0] == "target=v4-8" and slices.count("target=v4-512") == slices.count("target=v4-8") == 5
    assert [row.dollars for row in rows] == sorted(row.dollars or 0.0 for row in rows)
    assert len({row.overrides[0] for row in rank_layouts(request, shortlist, CompiledLayouts(), 1)}) == 2, (
        "the best of each is listed"
    )


@pytest.mark.parametrize(
    ("factor", "first"), [pytest.param(1.05, "compile", marks=pytest.mark.slow), (2.0, "estimate")]
)
@pytest.mark.parametrize("tokens", [pytest.param((), marks=pytest.mark.slow), ("mode.tokens=1e9",)])
def test_an_estimate_is_listed_first_if_its_whole_interval_beats_the_compiled_layouts(
    factor: float, first: str, tokens: tuple[str, ...], compiler: ScaledCompiler, tmp_path: Path
) -> None:
    request = make_request("mode.targets=[v5e-8,v6e-8]", "mode.compiles=1", *tokens)
    shortlist = make_shortlist(request)
    cheapest = min(shortlist.fitting, key=lambda entry: request.cost(entry, entry.step_s))
    compiler.steps, compiler.factor = {tuple(cheapest.candidate.overrides): cheapest.step_s}, factor
    trial = compiler(compiling.plan_compile(request, cheapest, tmp_path), lambda: None)
    compiles = CompiledLayouts([CompiledLayout(cheapest, trial)])
    rows = rank_layouts(request, shortlist, compiles, 10)
    assert rows[0].stage.value == first
    ranking = rank(request.run, request.space())
    remarks = " ".join(collect_remarks(request, rows, ranking, shortlist, compiles, MeasuredTrials()))
    assert ("only estimated" in remarks and "2.0 times" in remarks) == (first == "estimate")
    assert f"#1: {8 * rows[0].tokens_per_second_per_chip:,.0f} tokens/s on 8 chips." in remarks
    assert "best layout found" not in remarks or first == "compile"
    has_compiled_row = any(row.stage is Stage.compile for row in rows)
    assert ("The interval of predicted steps for v" in remarks) == has_compiled_row, "the compiler gives none"


@pytest.mark.slow
def test_slices_without_an_interval_are_named_with_the_reason() -> None:
    request = make_request("mode.targets=[v5e-8,h100-8]")
    rows = [
        replace(row, stage=Stage.compile, low_s=row.step_s, high_s=row.step_s)
        for row in rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    ]
    lines = {line.partition(" is ")[0].rpartition(" ")[2]: line for line in describe_intervals(request, rows)}
    assert lines.keys() == {"v5e-8", "h100-8"}
    assert "this model" in lines["v5e-8"] and "this model" not in lines["h100-8"]
    known = [replace(row, low_s=0.9 * row.step_s) if row.candidate.target == "v5e-8" else row for row in rows]
    assert describe_intervals(request, known) == [lines["h100-8"]]


@pytest.mark.parametrize("price", [pytest.param("0", marks=pytest.mark.slow), "null"])
def test_layouts_are_ranked_by_step_time_if_prices_are_unknown(price: str) -> None:
    request = make_request("mode.tokens=1e9", "mode.budget_usd=5", f"target.chip.usd_per_hour={price}")
    shortlist = make_shortlist(request)
    assert not request.ranks_by_price and request.cost(shortlist.fitting[0], 2.0) == 2.0
    rows = rank_layouts(request, shortlist, CompiledLayouts(), 10)
    assert [row.step_s for row in rows] == sorted(row.step_s for row in rows)
    assert json.loads(json.dumps(encode(rows), allow_nan=False)), "a number of tokens is finite or none"
    assert [line for line in describe_costs(request, rows) if "usd_per_hour" in line and "v5e" in line] or price == "0"


@pytest.mark.slow
def test_a_layout_that_is_as_fast_on_several_tori_is_listed_once(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = parse_request(
        parse_run(["mode=search", "target=v4-512", "mode.shapes=true", "model=gpt_125m", "batch=512"])
    )
    assert len({target.topology for target in request.targets}) > 1
    shortlist = make_shortlist(request)
    best = shortlist.select_distinct(shortlist.on_chips(describe_chips(request.targets[0])), 10)
    assert len({without_torus(entry) for entry in best}) == len(best) == 10
    several = next(entry for entry in best if shortlist.equally_fast_slices(entry))
    equivalents = [e for e in shortlist.fitting if without_torus(e) == without_torus(several) and e is not several]
    assert set(shortlist.equally_fast_slices(several)) <= {e.group.target.name for e in equivalents}
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=4)
    assert len({without_torus(entry.estimate) for entry in compiles.layouts}) == 4, "another torus is no other layout"
    rows = rank_layouts(request, shortlist, compiles, 10)
    as_fast_on = {
        tuple(entry.estimate.candidate.overrides): shortlist.equally_fast_slices(entry.estimate)
        for entry in compiles.layouts
    }
    of_compiled = [row for row in rows if row.stage.value == "compile"]
    assert any(row.as_fast_on for row in of_compiled)
    assert all(row.as_fast_on == as_fast_on[tuple(row.overrides)] for row in of_compiled)
    layouts = [tuple(o for o in row.overrides if not o.startswith(("target=", "mesh.placement="))) for row in rows]
    assert len(set(layouts)) == len(layouts) == 10


def describe_baselines(*arguments: str) -> dict[str, tuple[list[str] | None, str]]:
    """Return the baselines on the last slice of a search, by name.

    Each is a pair: the overrides of target, mesh and partition, or None, and the reason if there is no such layout.
    """
    request = parse_request(parse_run(["mode=search", "model=gpt_tiny", "precision=bf16_mixed", *arguments]))
    baselines = find_baselines(request, rank(request.run, request.space()), request.targets[-1])
    return {b.name: (b.layout and b.layout.candidate.overrides[:3], b.missing_reason) for b in baselines}


def test_baselines_are_for_one_slice() -> None:
    baselines = describe_baselines(
        "target=v4-64", "model=gpt_1b", "batch=64", "partition.zero1=false", "mode.targets=[v4-8,v4-64]"
    )
    assert baselines[PAPER_RULE][0] == ["target=v4-64", "mesh=4x4x2", "partition=2d_tp"]
    assert baselines[FSDP_BASELINE][0] == ["target=v4-64", "mesh=32x1x1", "partition=fsdp"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(("target=v4-8", "batch=32", "partition=pp"), {}, marks=pytest.mark.slow),
        (("target=v5e-1", "batch=32"), {}),
        (("target=v4-8", "batch=7", "partition=fsdp"), {FSDP_BASELINE: "no legal layout"}),
        (
            ("target=v4-8", "batch=32", "target.chip.usable_hbm_gib=0.0001"),
            {PAPER_RULE: "no layout fits", FSDP_BASELINE: "no layout fits"},
        ),
        (("target=v5e-8", "batch=32"), {FSDP_BASELINE: ""}),
        pytest.param(("target=h100-8", "batch=32"), {FSDP_BASELINE: ""}, marks=pytest.mark.slow),
    ],
)
def test_an_excluded_baseline_is_omitted_and_others_have_a_reason(
    arguments: Sequence[str], expected: dict[str, str]
) -> None:
    assert {name: why for name, (_, why) in describe_baselines(*arguments).items()} == expected


def test_the_best_layout_is_compared_with_kinds_of_parallelism_that_it_does_not_use() -> None:
    request = parse_request(parse_run(["mode=search", "model=moe_tiny", "target=v5e-8", "batch=32", "remat=full"]))
    ranking = rank(request.run, request.space())
    best = next(iter(ranking.for_partition("fsdp")))
    pure = next(layout for layout in ranking.for_partition("fsdp_ep") if layout.candidate.mesh == "1x1x8")
    found = find_other_parallelism(ranking, best.candidate)
    kinds = {name: layout.run(request.run).layout.degrees for name, layout in found.items()}
    assert len(found) == 4 and kinds["expert parallelism"]["EP"] > 1 < kinds["a pipeline"]["PP"]
    assert [layout.step_s for layout in found.values()] == sorted(layout.step_s for layout in found.values())
    fastest = min(found.values(), key=lambda layout: layout.step_s)
    degrees = {layout.candidate: layout.run(request.run).layout.degrees for layout in ranking}
    rivals = [
        e for e in ranking if any(n > 1 and kind not in ("DP", "FSDP") for kind, n in degrees[e.candidate].items())
    ]
    assert fastest.step_s == min(layout.step_s for layout in rivals if layout.fits)
    assert {*find_other_parallelism(ranking, pure.candidate)} == {*found} - {"expert parallelism"}
    (line,) = describe_other_parallelism(ranking, CompiledLayouts(), make_answer_row(request, best))
    texts = [(f"{e.step_s / best.step_s:.2f} times", f"(mesh={e.candidate.mesh} ") for e in found.values()]
    assert all(text in line for pair in texts for text in pair)


def test_slices_that_cannot_be_compiled_for_do_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch], compiler: ScaledCompiler
) -> None:
    arguments = ("mode.targets=[h100-8,h100-16,v5e-8]", "partition=fsdp", "remat=full", "mode.compiles=1")
    compiler.steps = {
        tuple(entry.candidate.overrides): entry.step_s for entry in make_shortlist(make_request(*arguments)).fitting
    }
    monkeypatch.setattr(mode, "write_report", lambda folder: folder)
    monkeypatch.setattr(Gpu, "compiler_install_hint", lambda self, target: f"none for {target.name}")
    status, answer, _, printed = search(*arguments)
    assert status == 0 and answer["compiled"] == 1 and compiler.plans[0].about.target == "v5e-8"
    assert "only for h100-8, h100-16:" in printed, "the reason is printed once for a platform"


@pytest.mark.slow
def test_every_kind_of_chips_whose_estimates_have_unknown_errors_is_compiled_before_others(
    compiler: ScaledCompiler, tmp_path: Path
) -> None:
    request = make_request("mode.targets=[a100-8,h100-8,b200-8]", "mode.compiles=3")
    compiler.factor = 0.8
    compiles = compile_shortlist(compiler, request, make_shortlist(request), tmp_path, max_compiles=3)
    assert {layout.target.name for layout in compiles.layouts} == {"a100-8", "h100-8", "b200-8"}
    compiler.factor = 0.5
    single = make_request("target=h100-8")
    shortlist = make_shortlist(single)
    compiles = compile_shortlist(compiler, single, shortlist, tmp_path / "single", max_compiles=1)
    partition = compiles.layouts[0].estimate.candidate.partition
    others = [e for e in shortlist.fitting if e.candidate.partition != partition and not e.has_pipeline]
    ratios = [t.step_s / e.step_s for t, e in zip(compiles.correct(others), others, strict=True)]
    assert others and max(ratios) < 0.65, "one factor for all partitions"


def test_explicit_settings_are_not_varied() -> None:
    request = make_request("partition=fsdp", "remat=dots", "microbatches=2")
    layouts = list(rank(request.run, request.space()))
    assert {entry.group.candidates.partition.name for entry in layouts} == {"fsdp"}
    assert {entry.remat.name for entry in layouts} == {"dots"}
    assert {int(entry.group.candidates.microbatches[entry.index]) for entry in layouts} == {2}


AUTO = ("mode.search_batch=true", "partition=fsdp")


@cache
def make_batch_request(*arguments: str) -> SearchRequest:
    """Return a request to search for the batch of a GPT that fits a v5e-8 only with small batches."""
    return parse_request(parse_run(["mode=search", "target=v5e-8", "model=gpt_125m", *AUTO, *arguments]))


def test_a_searched_batch_gives_the_most_tokens_per_second_that_fit() -> None:
    request = make_batch_request()
    layouts = list(rank(request.run, request.space()))
    usable = usable_hbm(request.targets[0].chip) or 0
    assert all(entry.peak_bytes <= usable for entry in layouts)
    batches = {e.batch or 0 for e in layouts if (e.candidate.mesh, e.remat.name) == ("8x1x1", "full")}
    assert {8, 16, 24, 32} < batches and all(batch and batch % 8 == 0 for batch in batches)
    larger = parse_run(["mode=search", "target=v5e-8", "model=gpt_125m", "partition=fsdp", f"batch={2 * max(batches)}"])
    ranked = rank(larger, parse_request(larger).space())
    same = [e for e in ranked if (e.candidate.mesh, e.remat.name, e.candidate.microbatches) == ("8x1x1", "full", 1)]
    assert same and all(entry.peak_bytes > usable for entry in same), "twice the largest batch does not fit"

    rows = rank_layouts(request, build_shortlist(rank(request.run, request.space())), CompiledLayouts(), 10)
    rates = [row.tokens_per_second_per_chip for row in rows]
    assert rates == sorted(rates, reverse=True), "rows are not ordered by step time"
    estimates = [entry.step_s for entry in layouts]
    assert estimates != sorted(estimates), "larger batches have longer steps"
    without_batch = [replace(row.candidate, batch=None) for row in rows]
    assert len(set(without_batch)) == len(rows), "each layout is listed with its best batch"
    for row in rows:
        candidate = replace(row.candidate, batch=None)
        best = min(entry.ranking_s for entry in layouts if replace(entry.candidate, batch=None) == candidate)
        assert row.step_s / (row.candidate.batch or 0) == best


def test_the_estimate_of_a_searched_batch_is_that_of_the_batch() -> None:
    request = make_batch_request()
    entry = next(iter(rank(request.run, request.space())))
    assert entry.batch is not None and entry.run(request.run).config.batch == entry.batch
    fixed = parse_run(["mode=search", "target=v5e-8", "model=gpt_125m", "partition=fsdp", f"batch={entry.batch}"])
    same = [e for e in rank(fixed, parse_request(fixed).space()) if e.candidate == replace(entry.candidate, batch=None)]
    assert [(e.step_s, e.peak_bytes) for e in same] == [(entry.step_s, entry.peak_bytes)]
    row = make_answer_row(request, entry)
    assert row.mfu == make_answer_row(parse_request(fixed), same[0]).mfu
    assert row.tokens_per_second_per_chip == entry.batch * fixed.config.seq / entry.step_s / 8


def test_the_command_of_a_searched_batch_names_it() -> None:
    request = make_batch_request("mode.tokens=1e9")
    row = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)[0]
    command = train_command(request, row).split()
    steps = math.ceil(1e9 / ((row.candidate.batch or 0) * request.run.config.seq))
    assert {f"batch={row.candidate.batch}", f"steps={steps}"} < set(command)
    assert not [word for word in command if word.startswith("mode.")]


def test_a_searched_batch_has_one_microbatch_without_a_pipeline() -> None:
    tiny = ("mode=search", "target=v5e-8", "model=gpt_tiny", "mode.search_batch=true")
    request = parse_request(parse_run([*tiny, "remat=full"]))
    group_counts = {
        (bool(stages > 1), int(count))
        for group in request.space().groups
        for stages, count in zip(group.candidates.stages, group.candidates.microbatches, strict=True)
    }
    assert {count for has_pipeline, count in group_counts if not has_pipeline} == {1}
    assert len({count for has_pipeline, count in group_counts if has_pipeline}) > 3
    named = parse_request(parse_run([*tiny, "microbatches=4", "partition=fsdp"]))
    assert {int(count) for group in named.space().groups for count in group.candidates.microbatches} == {4}


def test_a_list_of_device_batches_is_searched() -> None:
    fixed = make_request("mode.device_batches=[1,2]", "partition=fsdp")
    mesh_and_count = {(entry.candidate.mesh, entry.candidate.microbatches) for entry in rank(fixed.run, fixed.space())}
    assert mesh_and_count == {("8x1x1", 4), ("8x1x1", 2)}, "the batch of 32 is fixed"
    tiny = ("mode=search", "target=v5e-8", "model=gpt_tiny", "partition=fsdp", "mode.search_batch=true")
    searched = parse_request(parse_run([*tiny, "mode.device_batches=[1,2]"]))
    pairs = {(entry.candidate.batch, entry.candidate.microbatches) for entry in rank(searched.run, searched.space())}
    assert pairs == {(8, 1), (16, 1)}


def test_a_compiled_batch_replaces_slower_batches_of_its_layout(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_batch_request("mode.compiles=12")
    compiles = compile_shortlist(compiler, request, make_shortlist(request), tmp_path, max_compiles=12)
    per_sequence: dict[Any, float] = {}
    for entry in compiles.layouts:
        layout = replace(entry.estimate.candidate, batch=None)
        assert entry.estimate.ranking_s < per_sequence.get(layout, math.inf), "a batch that is slower per sequence"
        per_sequence[layout] = entry.estimate.ranking_s
    best = compiles.best(request)
    assert best is not None and best.estimate.ranking_s == min(entry.estimate.ranking_s for entry in compiles.layouts)
    rows = rank_layouts(request, make_shortlist(request), compiles, 10)
    estimated = next(entry for entry in make_shortlist(request).fitting if compiles.get(entry.candidate) is None)
    times = [getattr(compiles.correct([estimated])[0], end) for end in ("low_s", "high_s")]
    ratios = [seconds / (best.step_s or 0.0) * (best.estimate.batch or 0) / (estimated.batch or 0) for seconds in times]
    assert " to ".join(f"{ratio:.2f}" for ratio in ratios) in format_comparison(
        Baseline(FSDP_BASELINE, estimated), compiles, rows[0]
    )
    slower = next(entry for entry in compiles.layouts if entry is not best)
    compared = format_comparison(Baseline(FSDP_BASELINE, slower.estimate), compiles, rows[0])
    assert f"{slower.estimate.ranking_s / best.estimate.ranking_s:.2f} times as long per token" in compared


def test_the_speed_of_each_batch_is_shown_with_the_largest_that_fits(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_batch_request("remat=full")
    ranking = rank(request.run, request.space())
    shortlist = build_shortlist(ranking)
    compiler.factor = 2.0
    compiles = compile_shortlist(compiler, request, shortlist, tmp_path, max_compiles=1)
    rows = add_batches(rank_layouts(request, shortlist, compiles, 10), ranking, compiles)
    best = next(row for row in rows if row.stage is Stage.compile)
    (own,) = [tried for tried in best.batches if tried.batch == best.candidate.batch]
    assert own.stage is Stage.compile
    assert own.tokens_per_second_per_chip == pytest.approx(best.tokens_per_second_per_chip)
    estimated_s = {e.batch: e.ranking_s for e in ranking if replace(e.candidate, batch=own.batch) == best.candidate}
    for tried in best.batches:
        if tried.fits:
            ratio = own.tokens_per_second_per_chip / tried.tokens_per_second_per_chip
            assert estimated_s[tried.batch] / estimated_s[own.batch] == pytest.approx(ratio)
    layout, trial = compiles.layouts[0].estimate, compiles.layouts[0].trial
    same = (e for e in ranking if e.batch != own.batch and replace(e.candidate, batch=own.batch) == best.candidate)
    estimated = make_answer_row(request, next(same))
    (estimated,) = add_batches([estimated], ranking, compiles)
    (other,) = [tried for tried in estimated.batches if tried.stage is Stage.compile]
    rate = request.step_tokens(layout.batch) / (trial.results.step.step_s or 0.0) / 8
    assert other.tokens_per_second_per_chip == pytest.approx(rate), "the rate of the compiled step, not of an estimate"
    larger = [e for e in ranking if replace(e.candidate, batch=own.batch) == best.candidate and e.fits]
    too_large = min((e for e in larger if (e.batch or 0) > own.batch), key=lambda e: e.batch or 0)
    assert max(e.batch or 0 for e in larger) > (too_large.batch or 0)
    refused = CompiledLayout(too_large, replace(trial, status=Status.does_not_fit))
    (limited,) = add_batches([best], ranking, CompiledLayouts([*compiles.layouts, refused]))
    assert max(tried.batch for tried in limited.batches if tried.fits) == own.batch, "larger ones do not fit either"
    assert describe_batch_rival(request, limited) == []
    largest = max(tried.batch for tried in best.batches if tried.fits)
    lines = describe_batches(rows)
    assert f"{largest:,} (" in next(line for line in lines if f"#{rows.index(best) + 1} " in line)
    assert f"batch={best.candidate.batch}" in explain_batch(best)[0]
    assert describe_batches([replace(best, batches=[])]) == explain_batch(replace(best, batches=[])) == []
    (best,) = with_compile_commands(request, [best])
    for change, count in ((0.99, 1), (0.8, 0)):
        rate = change * best.tokens_per_second_per_chip
        larger = replace(own, batch=1000, stage=Stage.estimate, tokens_per_second_per_chip=rate)
        row = replace(best, batches=[own, larger])
        assert "1,000" in explain_batch(row)[0]
        lines = [line for line in describe_certainty(request, [row, *rows[1:]], "") if "batch=1000" in line]
        assert len(lines) == count, "an estimate that is 1% lower may be wrong"
    assert describe_batch_rival(request, replace(row, batches=[own, replace(larger, stage=Stage.compile)])) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ((0.001, -0.01), "change by less than 2%"),
        ((0.001, -0.1), "fall by up to 10%"),
        ((-0.001, -0.1), "fall by up to 10%"),
        ((-0.03, -0.1), "fall by 3% to 10%"),
        ((-0.1,), "fall by 10%"),
        ((0.03, -0.1), "grow by up to 3%"),
        ((0.03,), "grow by 3%"),
    ],
)
def test_the_change_of_the_speed_with_the_batch_is_in_words(changes: Sequence[float], text: str) -> None:
    request = make_batch_request("remat=full")
    row = make_answer_row(request, make_shortlist(request).fitting[0])
    batches = [
        TriedBatch(10_000 * n, (1 + change) * row.tokens_per_second_per_chip, None, True, Stage.estimate)
        for n, change in enumerate(changes, 1)
    ]
    assert f"tokens/s {text} by estimate" in explain_batch(replace(row, batches=batches))[0]


def test_the_next_batch_is_compiled_before_other_layouts_if_it_may_be_faster(
    compiler: ScaledCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = make_batch_request()
    ranking = rank(request.run, request.space())

    def compile_batches(count: int, folder: str) -> list[CompiledLayout]:
        shortlist = build_shortlist(ranking)
        return compile_shortlist(compiler, request, shortlist, tmp_path / folder, count, ranking).layouts

    monkeypatch.setattr(shortlist_module, "BATCH_ERROR", 0.12)
    likely = compile_batches(3, "likely")
    assert [layout.estimate.batch for layout in likely] == [128, 192, 128], "once, because it is slower"
    monkeypatch.setattr(shortlist_module, "BATCH_ERROR", 0.0)
    assert [layout.estimate.batch for layout in compile_batches(2, "unlikely")] == [128, 128]
    faster = StepResult(step_s=1.01 * likely[0].estimate.step_s)  # with a larger batch
    results = replace(likely[1].trial.results, step=faster)
    compiled = CompiledLayouts([likely[0], replace(likely[1], trial=replace(likely[1].trial, results=results))])
    rows = rank_layouts(request, build_shortlist(ranking), compiled, 10)
    assert rows[0].candidate.batch == 192
    assert len({replace(row.candidate, batch=None) for row in rows}) == len(rows), "each layout has one batch"


def test_settings_that_the_search_chose_for_a_mesh_are_named() -> None:
    request = make_request("mesh=2x4x1", "partition=data_model_fsdp")
    best = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)[0]
    (line,) = describe_choices(request, best)
    chosen = line.rpartition(": ")[2]
    assert best.candidate.placement is not None and f"mesh.placement=[{','.join(best.candidate.placement)}]" in chosen
    assert "mesh=" not in chosen and "partition=data" not in chosen
    layout = next(layout for layout in make_shortlist(request).fitting if layout.candidate == best.candidate)
    run, placement = compiling.make_compile_run(request, layout), best.candidate.placement
    (line,) = describe_placement(run)
    assert f"mesh.placement=[{','.join(placement or ())}]" in line and "by estimate" in line
    assert describe_placement(run.changed(mesh=replace(run.config.mesh, placement=None))) == []
    default_batch = parse_request(parse_run([setting for setting in TINY if setting != "batch=32"]))
    (line,) = describe_choices(default_batch, best)
    assert line.startswith(f"batch={default_batch.run.config.batch} ")


@pytest.mark.slow
def test_a_mesh_in_the_command_is_the_only_one() -> None:
    named, full_request = make_request("mesh=1x4x2"), make_request()
    assert request_digest(named) != request_digest(full_request) and "mesh=1x4x2" not in named.arguments
    layouts = list(rank(named.run, named.space()))
    assert {entry.candidate.mesh for entry in layouts} == {"1x4x2"}
    step_s = {tuple(entry.candidate.overrides): entry.step_s for entry in rank(full_request.run, full_request.space())}
    known = [entry for entry in layouts if tuple(entry.candidate.overrides) in step_s]
    assert known and all(entry.step_s == step_s[tuple(entry.candidate.overrides)] for entry in known)
    baselines = find_baselines(named, rank(named.run, named.space()), named.targets[0])
    assert [baseline.name for baseline in baselines] == [FSDP_BASELINE]
    best = replace(layouts[0].candidate, partition="fsdp")
    assert find_baselines(named, rank(named.run, named.space()), named.targets[0], best) == [], "not with its own kind"
    ((idle, _),) = make_request("mesh=1x4x2", "partition=dp", "partition.activations.batch=[z]").space().refused.items()
    assert (idle.code, idle.mesh_axes, idle.mesh_sizes) == (ProblemCode.idle_mesh_axis, ("y",), (4,))


@pytest.mark.slow
def test_each_slice_is_compiled_the_fastest_first(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_request("mode.targets=[v5e-8,v5p-16,v6e-8]")
    compiles = compile_shortlist(compiler, request, make_shortlist(request), tmp_path, max_compiles=500)
    targets = [plan.about.target for plan in compiler.plans]
    assert {*targets} == {"v5e-8", "v5p-16", "v6e-8"}
    assert targets[-1] == "v5e-8" and targets.count("v5e-8") == 1, "it cannot be the fastest"
    assert "no other layout" in compiles.stop_reason


def test_a_partition_setting_applies_to_all_partitions() -> None:
    request = make_request("partition.zero1=true")
    ranking = rank(request.run, request.space())
    partitions = [group.candidates.partition for group in ranking.space.groups]
    assert len({partition.name for partition in partitions}) > 3 and all(p.zero1 for p in partitions)
    best = next(iter(ranking))
    assert "partition.zero1=true" in best.candidate.overrides and "partition.zero1=true" not in request.arguments
    assert best.run(request.run).config.partition.zero1


def test_zero1_is_tried_only_if_it_changes_the_layout() -> None:
    layouts = list(rank(make_request().run, make_request().space()))
    zero1_layouts = [entry for entry in layouts if entry.group.candidates.partition.zero1]
    assert {entry.group.candidates.partition.name for entry in zero1_layouts} >= {"dp", "1d_tp", "2d_tp", "pp"}
    for entry in zero1_layouts[:: len(zero1_layouts) // 6]:
        legal = entry.run(make_request().run).layout
        arrays = make_request().run.arrays.parameters
        moments = [legal.optimizer_axes(p.axes, p.shape) for p in arrays]
        assert moments != [legal.stored_axes(p.axes) for p in arrays], entry.candidate.overrides
    fsdp = {(p.name, p.zero1) for p in make_request("partition=fsdp").partitions}
    assert fsdp == {("fsdp", False), ("fsdp", True)}, "the second makes no layout"
    assert not [entry for entry in zero1_layouts if entry.group.candidates.partition.name == "fsdp"]


def test_an_explicit_pipeline_schedule_is_not_varied() -> None:
    request = make_request("partition.schedule=1f1b")
    piped = [entry for entry in rank(request.run, request.space()) if entry.group.candidates.stages[entry.index] > 1]
    assert piped and all("partition.schedule=1f1b" in entry.candidate.overrides for entry in piped)


def test_devices_without_a_torus_have_one_topology() -> None:
    for target in ("cpu8", "h100-8"):
        request = parse_request(
            parse_run(["mode=search", f"target={target}", "model=gpt_tiny", "batch=32", "mode.shapes=true"])
        )
        assert [slice_.name for slice_ in request.targets] == [target]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mesh=2x2x1",), "target=v5e-8 (8 v5e chips 2x4, 1 host) has 8 chips, but mesh=2x2x1 needs 4"),
        (("mesh=2x2x2", "mesh.placement=[x,y,z]"), "mesh.placement: mode=search chooses the placement"),
        (
            ("target.chip.hbm_gib=32", "mode.targets=[v5e-8,v5e-16]"),
            "target.chip.hbm_gib cannot be set",
        ),
        (("target=cpu",), "target=cpu is not a chip"),
        (
            ("target=v5e-8", "target.chip.hbm_gbs=null", "target.chip.ici_link_gbs=null"),
            "target.chip=v5e sets no hbm_gbs, ici_link_gbs",
        ),
        (("target=auto", "target.chips=64"), "target.chips=64 needs a kind of chip"),
        (("mode.tokens=1e9", "steps=50"), "steps=50 cannot be combined with tokens=1e+09"),
        (("mode.budget_usd=50", "steps=50"), "steps=50 cannot be combined with budget_usd=50"),
        (("mode.search_batch=true",), "batch= cannot be combined with batch=auto"),
        (("mode.device_batches=[2,4]", "microbatches=2"), "microbatches= cannot be combined with device_batch=[2,4]"),
        (("mode.device_batches=[]",), "device_batch=[] has no value"),
        (("mode.targets=[v5e-8,v9-8]",), "target=v9-8 is unknown"),
    ],
)
def test_invalid_requests_are_refused(arguments: Sequence[str], message: str) -> None:
    run = parse_run([*TINY, *arguments])
    assert run.problems() == [], "no mesh is asked for, so none is refused"
    with pytest.raises(ValueError) as refusal:
        parse_request(run)
    assert str(refusal.value).startswith(message) and "file: ." not in str(refusal.value)


@pytest.mark.parametrize(
    "argument", ["mode.budget_usd=-4", "mode.tokens=0", "mode.compiles=-1", "mode.tune=5", "mode.budget=soon"]
)
def test_numbers_out_of_range_are_refused(argument: str) -> None:
    assert argument.partition("=")[0] in {problem.key for problem in parse_run([*TINY, argument]).problems()}


def test_a_recursive_model_is_refused() -> None:
    request = parse_request(parse_run(["mode=search", "target=v5e-8", "model=trm_tiny", "data=sudoku", "batch=32"]))
    with pytest.raises(ValueError, match="hydra/sweeper=layouts"):
        rank(request.run, request.space())


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
        (["mode=search", "batch=auto"], ["mode=search", "mode.search_batch=true"]),
        (["mode=search", "batch=Auto"], ["mode=search", "mode.search_batch=true"]),
        (["mode=search", "device_batch=[2,4]"], ["mode=search", "mode.device_batches=[2,4]"]),
        (["device_batch=2,4"], ["device_batch=2,4"]),
    ],
)
def test_shorthand_arguments_are_expanded(typed: list[str], written: list[str]) -> None:
    assert expand_shorthand(typed) == written
    assert expand_shorthand(written) == written
    assert "mode=search" not in written or expand_shorthand(abbreviate_search(written)) == written


def test_a_key_with_and_without_its_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^budget=1min and mode\.budget=2min "):
        expand_shorthand(["mode=search", "budget=1min", "mode.budget=2min"])


def test_only_a_search_finds_a_batch() -> None:
    for arguments in (["batch=auto"], ["mode=compile", "batch=auto"]):
        with pytest.raises(ValueError, match=r"^batch=auto: .* mode=search batch=auto"):
            expand_shorthand(arguments)


def test_shorthand_of_a_chip_needs_a_number_of_chips() -> None:
    with pytest.raises(ValueError, match="target.chips=N"):
        expand_shorthand(["target.chip=v4"])


def test_a_search_can_use_only_estimates(search: Callable[..., FinishedSearch]) -> None:
    status, answer, run, printed = search("mode.compiles=0", "mode.tokens=1e9", "target.chip.spot_usd_per_hour=0.5")
    assert status == 0
    assert answer["compiled"] == 0 and len(answer["best"]) == mode.MAX_SHOWN_LAYOUTS
    assert answer["layouts"] > 1000
    steps = [row["step_s"] for row in answer["best"]]
    best = answer["best"][0]
    assert best["low_s"] < best["step_s"] == min(steps) < best["high_s"]
    assert best["hours"] > 0 and best["dollars"] == pytest.approx(8 * 1.2 * best["hours"], rel=1e-6)
    assert best["spot_dollars"] == pytest.approx(8 * 0.5 * best["hours"], rel=1e-6)
    train = train_command(parse_request(run), decode(RankedLayout, best, ANSWER_FILE))
    assert f"train it: {train}" in printed and best["train"] == train
    folder = Path(printed.partition(f"/{ANSWER_FILE}")[0].rpartition("answer: ")[2])
    commands, page = (folder / COMMANDS_FILE).read_text(), (folder / "report.html").read_text()
    for row in answer["best"]:
        assert row["compile"] in commands and row["train"] in commands and row["compile"] != row["train"]
        assert html.escape(row["compile"], quote=True).replace("&#x27;", "&#39;") in page
    assert f" steps={math.ceil(1e9 / (run.config.batch * run.config.seq))} " in train
    assert f"{FSDP_BASELINE}: " in printed and "v4 paper's rule" not in printed, "v5e has a torus of two axes"
    printed = search("mode.compiles=0", "partition=fsdp", "name=fsdp").printed
    assert "train it: " in printed and FSDP_BASELINE not in printed, "the best layout is not compared with its own kind"


def test_a_budget_in_dollars_sets_the_steps_and_has_a_range(search: Callable[..., FinishedSearch]) -> None:
    finished = search("mode.compiles=0", "mode.budget_usd=2", "partition=fsdp", "mode.targets=[v5e-8,v6e-8]")
    rows, config = finished.answer["best"], finished.run.config
    steps = math.floor(rows[0]["tokens_for_budget"] / (config.batch * config.seq))
    assert steps > 1
    assert all(f" steps={steps} " in finished.answer[key] for key in ("train", "launch"))
    *costs, limit = [line for line in finished.answer["remarks"] if "per chip-hour" in line]
    targets = [row["overrides"][0].removeprefix("target=") for row in rows]
    places = [int(line[1 : line.index(" ")]) for line in costs]
    assert places == sorted(targets.index(name) + 1 for name in ("v5e-8", "v6e-8")), "the best row of each slice"
    first, rival = (next(row for row in rows if row["overrides"][0] == f"target={name}") for name in ("v5e-8", "v6e-8"))
    usd = 1.2 * rival["usd_per_million_tokens"] / first["usd_per_million_tokens"]
    low_usd = usd * rival["low_s"] / rival["step_s"] / first["high_s"] * first["step_s"]
    assert first == rows[0] and limit.startswith("v5e ") and f"#{rows.index(rival) + 1} " in limit
    assert f"${usd:.2f} " in limit and f"${low_usd:.2f} " in limit
    for line in costs:
        row = rows[int(line[1 : line.index(" ")]) - 1]
        tokens = row["tokens_for_budget"] / 1e9
        low, high = (tokens * row["step_s"] / row[key] for key in ("high_s", "low_s"))
        assert f"{number_text(tokens)} ({number_text(low)} to {number_text(high)})" in line
    printed = search("mode.compiles=0", "mode.tokens=1e9", "target.chip.spot_usd_per_hour=0.5", "name=spot").printed
    assert known_chips()["v5e"].usd_per_hour_source in printed.partition("prices: ")[2]
    (spot,) = [line for line in printed.splitlines() if "$0.50 per chip-hour" in line]
    assert "spot" in spot and " hours " in spot


@pytest.mark.parametrize(("planned", "word"), [("mode.budget_usd=300", "fewer"), ("mode.tokens=1e9", "more")])
def test_the_hours_and_tokens_of_more_chips_of_the_same_kind_are_compared(planned: str, word: str) -> None:
    request = make_request("mode.targets=[v6e-8,v6e-16,v5e-8]", "partition=fsdp", planned)
    rows = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    first, larger, other = (next(r for r in rows if r.candidate.target == t) for t in ("v6e-8", "v6e-16", "v5e-8"))
    first = replace(first, stage=Stage.compile, compiled_ratios=(1.0, 1.0))
    larger = larger.with_step_time(0.6 * first.step_s)

    def compare(row: RankedLayout) -> str:
        (line,) = [line for line in describe_costs(request, [first, other, row]) if "instead of #1" in line]
        return line

    line = compare(replace(larger, compiled_ratios=(0.9, 1.2)))
    dearer = {low: 1.2 * low for low in (0.9, 1.0, 1.2)}
    changes = [1 / ratio - 1 if word == "fewer" else ratio - 1 for ratio in dearer.values()]
    assert line.startswith("#3 on v6e-16") and f"{percent_text(abs(changes[1]))} {word} " in line
    assert all(percent_text(abs(change)) in line for change in changes) and "order is sure" in line
    assert "order is sure" not in compare(replace(larger, compiled_ratios=(0.8, 1.2))), "it may buy more tokens"
    assert "once compiled" not in compare(replace(larger, stage=Stage.compile, compiled_ratios=(1.0, 1.0)))


def test_only_compiled_rows_have_the_share_of_what_bounds_them() -> None:
    request = make_request()
    rows = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 2)
    answer = SearchAnswer([], "", 2, {}, 0, 0, "", MeasureReport(), rows, [])
    assert all("%" in answer.describe_bottleneck(row) for row in rows)
    replayed = replace(rows[0], bottleneck=replace(rows[0].bottleneck, is_replayed=True))
    answer = replace(answer, best=[replayed, rows[1]])
    assert ["%" in answer.describe_bottleneck(row) for row in answer.best] == [True, False]


def test_the_strongest_rivals_on_the_same_chips_are_named_with_the_command_that_compiles_one() -> None:
    request = make_request()
    rows = with_compile_commands(request, rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)[:6])
    factors = (1.0, 1.01, 1.1, 1.0, 1.005, 1.0)
    rows = [row.with_step_time(factor * rows[0].step_s) for row, factor in zip(rows, factors, strict=True)]
    line, command = describe_certainty(request, rows, "about 49 to 81 s")
    assert "about 49 to 81 s" in command
    assert line.endswith(": #4, #6, #5 and 1 more.") and "As fast" not in line, "#3 may be 1% faster, but not 2%"
    assert "#1" in command and " mode=compile " in command, "an estimate is compiled before its rivals"
    slower = [row.with_step_time(1.2 * rows[0].step_s) for row in rows[1:]]
    assert [line for line in describe_certainty(request, [rows[0], *slower], "") if "mode=compile" not in line] == []
    compiled = replace(rows[0], stage=Stage.compile)
    equal, unsure = describe_ties(request, [compiled, replace(rows[1], stage=Stage.compile), *rows[2:]])
    assert "As fast" in equal and equal.endswith(": #2.") and ": #4, #6, #5." in unsure
    behind = replace(rows[2], stage=Stage.compile)
    (surer,) = describe_ties(request, [compiled, behind])
    assert behind.low_s < compiled.high_s and "than #2" in surer and "surer" in surer, "errors are shared"
    faster = replace(rows[3].with_step_time(0.5 * rows[0].step_s), batches=[])
    assert faster.high_s < rows[0].step_s
    surest = replace(rows[1].with_step_time(1.05 * rows[0].step_s), compiled_ratios=(0.97, 1.03))
    (unsure,) = describe_ties(request, [compiled, surest, rows[2].with_step_time(1.06 * rows[0].step_s)])
    assert ": #3. #2 is less likely" in unsure and "its estimate is surer" in unsure
    below, unsure = describe_ties(request, [compiled, *rows[2:3], faster, rows[1]])
    assert ": #3. " in below and ": #4. " in unsure, "the whole interval of #3 is below the time of #1"
    run = parse_run(shlex.split(unsure.partition("valkyrie-train ")[2]))
    assert run.config.mode.name == "compile" and run.problems() == []
    assert run.config.partition.name == rows[1].candidate.partition and run.config.batch == request.run.config.batch


@pytest.mark.parametrize(
    ("cause", "compiles", "limits"),
    [
        (StopCause.budget, 12, ["mode.budget=3min"]),
        (StopCause.compiles, 3, ["mode.budget=3min", "mode.compiles=6"]),
        (StopCause.finished, 12, []),
    ],
)
def test_a_search_that_is_cut_short_names_the_limits_that_would_settle_its_rivals(
    cause: StopCause, compiles: int, limits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "earlier_compile_seconds", lambda parameters, usable: [81.0, 81.0])
    request = make_request(f"mode.compiles={compiles}")
    rows = with_compile_commands(request, rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)[:6])
    best = replace(rows[0], stage=Stage.compile)
    slow = rows[3].with_step_time(1.5 * best.step_s)
    rows = [best, *(row.with_step_time(best.step_s) for row in rows[1:3]), slow, replace(rows[4], stage=Stage.compile)]
    compiled_layouts = CompiledLayouts([SimpleNamespace()] * 4, stop_cause=cause)  # pyright: ignore[reportArgumentType]
    lines = describe_rival_budget(request, rows, compiled_layouts)
    assert len(lines) == bool(limits) and all(limit in line for line in lines for limit in limits)
    if lines:
        run = parse_run(expand_shorthand(shlex.split(lines[0].partition("valkyrie-train ")[2])))
        assert "compiles #2, #3." in lines[0], "#4 is too slow, and #5 is compiled"
        (line,) = describe_rival_budget(request, [replace(best, stage=Stage.estimate), *rows[1:]], compiled_layouts)
        assert "mode.budget=5min" in line and "compiles #1, #2, #3." in line
        batches = [
            TriedBatch(batch, best.tokens_per_second_per_chip, None, True, stage)
            for batch, stage in ((0, Stage.compile), (64, Stage.estimate))
        ]
        for others, names in ((rows[1:], "compiles #1 with batch=64, #2, #3."), ([], "compiles #1 with batch=64.")):
            (line,) = describe_rival_budget(request, [replace(best, batches=batches), *others], compiled_layouts)
            assert names in line and f"mode.budget={5 if others else 2}min" in line, "this batch is compiled first"
        assert parse_request(run).mode.budget == "3min" and parse_request(run).mode.compiles in (6, 12)


def test_a_stopped_compile_lengthens_only_the_budget_for_its_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "earlier_compile_seconds", lambda parameters, usable: [81.0, 81.0])
    monkeypatch.setattr(budget_module, "missing_compilers", lambda request: {})
    request = make_request("mode.targets=[v5e-8,v6e-8]")
    (best, *others) = with_compile_commands(
        request, rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    )
    rival = next(row for row in others if row.candidate.target == best.candidate.target).with_step_time(best.step_s)
    stopped_target, other_target = (
        next(t for t in request.targets if (t.name == best.candidate.target) == is_same) for is_same in (True, False)
    )
    rows = [replace(best, stage=Stage.compile), rival]
    for target, seconds, budget in ((stopped_target, 300.0, 10), (stopped_target, 20.0, 2), (other_target, 300.0, 2)):
        layouts: Any = [SimpleNamespace()]
        compiled_layouts = CompiledLayouts(layouts, "", StopCause.budget, stopped_s=seconds, stopped_target=target)
        (line,) = describe_rival_budget(request, rows, compiled_layouts)
        assert f"mode.budget={budget}min" in line, "twice as long as the compile that was stopped, or it is again"
        text = describe_compile_time(request, rival, compiled_layouts)
        assert text == ("more than 300 s" if budget == 10 else "about 81 s")
    other = next(row for row in others if row.candidate.target == other_target.name).with_step_time(best.step_s)
    layouts = [SimpleNamespace(target=stopped_target)]
    for target, budget in ((stopped_target, 8), (other_target, 20)):
        compiled_layouts = CompiledLayouts(layouts, "", StopCause.budget, stopped_s=600.0, stopped_target=target)
        warning = describe_missing_compiles(request, [rows[0], other], compiled_layouts)
        assert f"No layout on {other_target.name} " in warning and f"mode.budget={budget}min" in warning


@pytest.mark.parametrize(
    ("planned", "word"), [pytest.param((), "faster", marks=pytest.mark.slow), (("mode.tokens=1e9",), "cheaper")]
)
def test_a_rival_on_another_slice_is_named_with_the_accuracy_of_both_and_what_settles_it(
    planned: tuple[str, ...], word: str
) -> None:
    request = make_request("mode.targets=[v4-8,v6e-8]", *planned)
    rows = with_compile_commands(request, rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10))
    firsts = {row.candidate.target: replace(row, stage=Stage.compile) for row in reversed(rows)}

    def compile_row(target: str, cost: float) -> RankedLayout:
        row = firsts[target]
        row = row.with_step_time(cost * row.step_s / ((row.usd_per_million_tokens or 0) if planned else row.step_s))
        error = {"v4-8": 0.1, "v6e-8": 0.11}[target]
        return replace(row, low_s=row.step_s / (1 + error), high_s=row.step_s * (1 + error))

    unsure, accuracy, settle = describe_certainty(request, [compile_row("v6e-8", 1.0), compile_row("v4-8", 1.2)], "")
    assert "#2 on v4-8" in unsure and word in unsure and "+11%" in unsure and "+10%" in unsure
    assert " v6e: " in accuracy and "% (known from 2 " in accuracy and " v4 " in accuracy
    words = shlex.split(settle.partition("valkyrie-launch ")[2])
    assert words[0] == "target=v6e-8" and "mode=measure" in words
    limit_s = 1.2 * compile_row("v6e-8", 1.0).step_s
    assert duration_text(limit_s) in settle, "above this step time, #2 is better"
    sure, accuracy = describe_certainty(request, [compile_row("v6e-8", 1.0), compile_row("v4-8", 1.4)], "")
    assert word in sure and "v4-8" in sure and " v6e: " in accuracy, "#1 is on the chip with the largest errors"
    (sure,) = describe_certainty(request, [compile_row("v4-8", 1.0), compile_row("v6e-8", 1.4)], "")
    assert word in sure and "v6e-8" in sure
    estimates = [replace(compile_row(*row), stage=Stage.estimate) for row in (("v6e-8", 1.0), ("v4-8", 1.4))]
    assert " v6e: " in describe_certainty(request, estimates, "")[1]
    estimated = replace(compile_row("v4-8", 1.2), stage=Stage.estimate)
    *_, settle = describe_certainty(request, [compile_row("v6e-8", 1.0), estimated], "")
    assert "#2" in settle and " mode=compile " in settle and "target=v4-8" in settle
    rows, option = [compile_row("v6e-8", 1.0), replace(estimated, compile="")], "target.chip.xla_options.a=1"
    *_, settle = describe_certainty(request, rows, "", [option])
    assert "mode=measure" in settle and option in settle, "no compiler for v4 here; #1 as it was compiled"
    unknown = replace(compile_row("v4-8", 1.1), low_s=1.0, high_s=1.0)
    unknown = replace(unknown, low_s=unknown.step_s, high_s=unknown.step_s)
    unsure, *_ = describe_certainty(request, [compile_row("v6e-8", 1.0), unknown], "")
    assert "unknown" in unsure and "20%" in unsure


@pytest.mark.slow
def test_compiled_rows_on_the_same_kind_of_chip_share_their_errors() -> None:
    request = make_request("mode.targets=[v4-8,v4-16]")
    rows = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    first, second = (next(row for row in rows if row.candidate.target == target) for target in ("v4-8", "v4-16"))
    first = replace(first, stage=Stage.compile, compiled_ratios=(1.0, 1.0))
    slower = second.with_step_time(1.05 * first.step_s)
    assert slower.compiled_ratios[0] * 1.05 < 1 and may_be_better(request, first, slower), "only estimated"
    compiled = replace(slower, stage=Stage.compile, compiled_ratios=(1.0, 1.0))
    assert compiled.low_s < first.step_s and not may_be_better(request, first, compiled)
    assert may_be_better(request, replace(first, stage=Stage.measure), compiled), "a measured time has other errors"
    (line,) = describe_certainty(request, [first, compiled], "")
    assert "v4-16" in line and "same" in line and "Not sure" not in line


def test_the_interval_of_an_estimate_is_wider_than_that_of_a_compiled_step() -> None:
    request = make_request("mode.targets=[v6e-8]")
    row = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 1)[0]
    chip = request.targets[0].chip
    assert chip is not None
    interval = step_interval(row.step_s, chip, trains_dense_transformer=True)
    assert interval is not None
    assert row.low_s < min(interval.low, row.compiled_ratios[0]) * row.step_s
    assert row.high_s > max(interval.high, row.compiled_ratios[1]) * row.step_s


@pytest.mark.slow
def test_settings_are_not_broken_in_a_narrow_terminal_and_the_memory_of_every_slice_is_named() -> None:
    request = make_request("mode.targets=[v5e-8,v6e-8,v4-8]", "remat=minimal_with_context")
    rows = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    names = {"v5e-8": 2**34, "v6e-8": 2**34, "v4-8": 2**35}
    rows = [replace(row, usable=names[row.candidate.target]) for row in rows]
    answer = SearchAnswer([], "", 0, {}, 0, 0, "", MeasureReport(), rows, [], targets=[*names])
    head = describe_peak(answer)
    assert all(name in head for name in names)
    for width in (80, 100, 140):
        with (console := Console(width=width, soft_wrap=True, markup=False)).capture() as capture:
            print_answer(answer, console)
        words = capture.get().split()
        assert all(override in words for row in rows for override in row.overrides[1:]), width


def test_the_table_has_batch_and_mfu_and_is_as_wide_as_a_page() -> None:
    request = make_request("mode.targets=[v5e-8,v6e-8]", "mode.tokens=1e6", "mode.budget_usd=0.0001", "partition=fsdp")
    rows = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    plan: dict[str, Any] = {"tokens": request.tokens, "budget_usd": request.budget_usd}
    plan |= {"title": describe_work(request), "targets": [target.name for target in request.targets]}
    answer = SearchAnswer([], "", 0, {}, 0, 0, "", MeasureReport(), rows, [], **plan)
    with (console := Console(width=140, soft_wrap=True)).capture() as capture:
        print_answer(answer, console)
    lines = capture.get().splitlines()
    assert (
        lines[0].strip().startswith("gpt_tiny (640,128 parameters), batch 32")
        and f"{request.run.config.seq:,} tokens" in lines[0]
    )
    assert max(len(line.rstrip()) for line in lines[1:]) <= 140
    text = capture.get()
    assert "$0.0001" in text and "tokens for" in text and "MFU" in text and " MiB " in text and " 0.0 " not in text
    chip, fastest = request.targets[1].chip, next(row for row in rows if row.overrides[0] == "target=v6e-8")
    flops_s = request.run.model.step_flops_per_token(request.run.config.seq) * fastest.tokens_per_second_per_chip
    assert chip is not None and fastest.mfu == pytest.approx(flops_s / (chip.peak_tflops["bfloat16"] * 1e12))


def test_the_page_of_a_search_omits_unknown_numbers_and_names_every_outcome() -> None:
    request = make_request("partition=fsdp")
    (row, *_) = rank_layouts(request, make_shortlist(request), CompiledLayouts(), 10)
    outcomes = {status.value: 1 for status in Status if status is not Status.interrupted}  # only training runs have it
    why = "another compile would exceed mode.budget=3min"
    answer = SearchAnswer([], "", 90, {}, 0, 0, why, MeasureReport(), [row], [], compile_outcomes=outcomes, too_large=1)
    texts = [number.phrase for number in search_page(answer).best.winner_numbers]
    assert "MFU" in " ".join(texts) and "memory" in " ".join(texts)
    page = search_page(replace(answer, best=[replace(row, mfu=None, memory=None)]))
    texts = [number.phrase for number in page.best.winner_numbers]
    assert "MFU" not in " ".join(texts) and "memory" not in " ".join(texts)
    assert any("estimated, not compiled" in text and "mode.budget" in text for _, text in page.counts.rows)
    compiled_labels = [text for _, text in page.counts.rows if text.startswith("compiled, but")]
    assert len(compiled_labels) == 1, "only the layout that does not fit"


FAST_SEARCH = ("partition=fsdp", "remat=full", "microbatches=1", "mode.compiles=0")


def test_a_folder_with_other_files_is_refused_before_estimating(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, search: Callable[..., FinishedSearch]
) -> None:
    runs = tmp_path / "runs"
    (runs / "other").mkdir(parents=True)
    (runs / "file").touch()
    (runs / "other" / "run.yaml").touch()
    (runs / "mine").mkdir()
    (runs / "mine" / "report.html").write_text("mine")
    search(*FAST_SEARCH)
    search(*FAST_SEARCH, "mode.tokens=1e9")
    monkeypatch.setattr(mode, "rank", lambda *_: pytest.fail("estimated"))
    for arguments, message in (
        (("name=file",), "^runs/file is a file"),
        (("name=other",), "^name=other: runs/other "),
        (("name=mine",), "^name=mine: runs/mine "),
        (("batch=64",), "^name=found: runs/found/search.json .*batch=32"),
        (("runs=/proc/nope", "name=x"), "/proc/nope/x .*runs=DIR"),
    ):
        with pytest.raises((ValueError, DiskError), match=message):
            search(*FAST_SEARCH, *arguments)
    assert [path.name for path in (runs / "other").iterdir()] == ["run.yaml"]
    assert [(path.name, path.read_text()) for path in (runs / "mine").iterdir()] == [("report.html", "mine")]
    with pytest.raises(KeyError), lock_folder(runs / "new", make_request()):
        raise KeyError
    assert not (runs / "new").exists(), "an empty folder is removed"


def test_two_searches_do_not_run_in_one_folder(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch]
) -> None:
    flock = fcntl.flock

    def lock_like_nfs(file: IO[bytes], operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_like_nfs)
    with (
        lock_folder(Path("runs", "found"), make_request()),
        pytest.raises(ValueError, match=f"^runs/found .* process {os.getpid()} "),
    ):
        search(*FAST_SEARCH)
    assert search(*FAST_SEARCH).status == 0


def test_an_incomplete_line_of_trials_does_not_stop_a_search(
    tmp_path: Path, search: Callable[..., FinishedSearch]
) -> None:
    folder = tmp_path / "runs" / "found"
    folder.mkdir(parents=True)
    (folder / TRIALS_FILE).write_text('{"schema"')
    finished = search(*FAST_SEARCH)
    assert finished.status == 0 and finished.answer["best"]
    assert f"runs/found/{TRIALS_FILE}: skipped the last line" in finished.printed
    with pytest.raises(ValueError, match="^runs/found .*only estimated"):
        valkyrie.trials("runs/found")


def test_an_answer_does_not_replace_an_earlier_one_with_more_results(tmp_path: Path) -> None:
    compiled = SearchAnswer(["mode=search"], "abc", 9, {}, 0, 2, "", MeasureReport(), [], [])
    runs = [MeasuredLayout(["mesh=8x1x1"], 1.0, step_s, "ok") for step_s in (1.0, None)]
    measured = replace(compiled, measured=MeasureReport(runs))
    assert f"answer: {tmp_path / ANSWER_FILE}" in save_answer(tmp_path, compiled)
    assert f"answer: {tmp_path / ANSWER_FILE}" in save_answer(tmp_path, measured)
    assert "1 measured" in save_answer(tmp_path, compiled)[0]
    assert read_record(SearchAnswer, tmp_path / ANSWER_FILE) == measured
    assert save_answer(tmp_path, replace(measured, compiled=0))[0].startswith("answer: not saved")


@pytest.mark.slow
def test_the_answer_if_no_layout_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = parse_run(["mode=search", "target=v5e-4", "model=llama_7b", "batch=64", "precision=bf16_mixed"])
    assert run.config.mode.run(run) != 0
    output = capsys.readouterr().out
    assert "nothing fits" in output and "target=v5e-16." in output
    assert not [*(tmp_path / "runs").iterdir()], "an empty folder is removed with its lock file"
    both = ["mode=search", "mode.targets=[v5e-4,v4-8]", "model=llama_7b", "batch=64", "precision=bf16_mixed"]
    request = parse_request(
        parse_run([*both, "mode.targets=[v5e-4,v4-8]", "target.slices=1", "partition=fsdp", "remat=full"])
    )
    text = mode._describe_no_fit(make_shortlist(request), request, CompiledLayouts(), request.space())
    assert [line.partition(":")[0] for line in text.splitlines()] == ["v5e", "v4"]
    assert text.splitlines()[0].endswith("target=v5e-16.") and "target=v4-" in text.splitlines()[1]
    monkeypatch.setattr(mode, "build_shortlist", lambda ranked: Shortlist([], [], []))
    text = mode._suggest_chips(request, "v5e")
    assert "256 chips (target=v5e-256)" in text and text.endswith(" model or batch.")
    text = mode._suggest_chips(make_request("batch=1"), "v5e")
    assert "256 chips (target=v5e-256)" in text and text.endswith(" model.")
    for largest in (["mode.targets=[v5e-256]"], ["mode.targets=[v5e-128]", "target.slices=2"]):
        request = parse_request(parse_run([*both, *largest, "partition=fsdp", "remat=full"]))
        text = mode._suggest_chips(request, "v5e")
        assert "v5e has more chips" in text and "target=" not in text and text.endswith(" model or batch.")


def test_a_searched_batch_uses_95_percent_of_the_memory() -> None:
    layout = make_shortlist(make_batch_request("partition=fsdp", "remat=full")).smallest[0]
    gib = layout.peak_bytes / 0.97 / 2**30
    request = make_batch_request("partition=fsdp", "remat=full", f"target.chip.usable_hbm_gib={gib}")
    shortlist = make_shortlist(request)
    assert not shortlist.fitting
    text = mode._describe_no_fit(shortlist, request, CompiledLayouts(), request.space())
    assert f"batch=auto uses at most {memory_text(0.95 * gib * 2**30)} (" in text


@pytest.mark.slow
def test_there_is_no_answer_if_no_layout_should_fit_and_none_was_compiled(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch]
) -> None:
    shortlist = make_shortlist(make_request())
    unsure = Shortlist([], shortlist.fitting[:3], shortlist.smallest)
    monkeypatch.setattr(mode, "build_shortlist", lambda ranked: unsure)
    status, answer, _, printed = search("mode.compiles=0")
    assert status == NO_STEP_TIME and not answer and "3 uncompiled" in printed

    def refuse(request: SearchRequest, *arguments: Any) -> None:
        compiled_layouts = next(value for value in arguments if isinstance(value, CompiledLayouts))
        compiled_layouts.stop(StopCause.refused, "LIBTPU_INIT_ARGS=--wrong")

    monkeypatch.setattr(mode, "compile_best", refuse)
    status, answer, _, printed = search()
    assert status == EXIT_REFUSED and not answer and printed.splitlines()[-1] == "LIBTPU_INIT_ARGS=--wrong"


def test_the_answer_if_no_layout_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch]
) -> None:
    def fail_all(request: SearchRequest, shortlist: Shortlist, *arguments: Any) -> None:
        trial = Trial("", "", "", "measure", Status.failed, "the TPU is in use", [], None, "", 1.0)
        measured_trials = next(value for value in arguments if isinstance(value, MeasuredTrials))
        measured_trials.trials += [MeasuredTrial(layout, layout.step_s, trial) for layout in shortlist.fitting]

    monkeypatch.setattr(mode, "can_measure", lambda request: True)
    monkeypatch.setattr(mode, "measure_best", fail_all)
    status, answer, _, printed = search(*FAST_SEARCH)
    assert status == NO_STEP_TIME and not answer
    assert printed.endswith(": the TPU is in use\n") and "no compiled layout fits" not in printed


def test_a_note_says_that_int8_is_estimated_as_bfloat16(search: Callable[..., FinishedSearch]) -> None:
    assert "in int8" not in search(*FAST_SEARCH).printed
    printed = search(*FAST_SEARCH, "precision=int8", "name=narrow").printed
    assert "precision=int8: " in printed and "bfloat16" in printed


def test_the_answer_if_no_layout_is_legal(search: Callable[..., FinishedSearch]) -> None:
    circular = ("partition=pp", "partition.schedule=circular", "partition.rounds=2", "microbatches=1")
    for arguments, words in (
        (("batch=1", "partition=fsdp"), ("batch=1: no layout is legal, because no mesh divides both",)),
        (("partition=fsdp", "microbatches=32"), ("batch=32 microbatches=32: no layout is legal",)),
        (("target.slices=100000",), ("because the batch has fewer sequences than there are slices (100,000)",)),
        ((*circular, "model.layers=16"), ("too few microbatches", "no layout is legal")),
    ):
        status, answer, _, printed = search(*arguments)
        assert status != 0 and not answer
        assert all(word in printed for word in words)
        assert "reasons are above" not in printed or " refused: " in printed
    assert "no mesh divides" not in printed, "the microbatches are wrong, not the batch"
    text = mode._describe_no_legal_layout(make_batch_request("microbatches=3"), LayoutSpace([], Counter(), 0))
    assert "Remove microbatches= from" in text, "only settings of the command"


def test_ctrl_c_before_the_first_result_prints_the_best_by_estimate(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch]
) -> None:
    def interrupted(*_: Any) -> Trial:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "compile_trial", interrupted)
    status, answer, _, printed = search()
    assert status == 130 and len(answer["best"]) == mode.MAX_SHOWN_LAYOUTS and "by estimate, none compiled:" in printed


@pytest.mark.slow
def test_compiler_options_tuned_for_a_slower_layout_are_not_used(
    monkeypatch: pytest.MonkeyPatch, search: Callable[..., FinishedSearch], compiler: ScaledCompiler
) -> None:
    compiler.steps = {
        tuple(entry.candidate.overrides): entry.step_s for entry in make_shortlist(make_request()).fitting
    }
    monkeypatch.setattr(mode, "tune_best", lambda question, best, budget_s, console: (0, [f"xla_flag={budget_s:g}"]))
    monkeypatch.setattr(mode, "write_report", lambda folder: folder)
    first = search("mode.tune=5min", "mode.compiles=2")
    assert first.answer["options"] == ["xla_flag=300"] and "tuned options" not in first.printed
    monkeypatch.setattr(mode, "rank_measured_layouts", lambda question, rows, measures, compiles: rows[::-1])
    second = search("mode.tune=5min", "mode.compiles=2")
    assert second.answer["options"] == []
    assert "tuned options (xla_flag=300)" in second.printed


def test_the_second_compile_is_of_another_partition(compiler: ScaledCompiler, tmp_path: Path) -> None:
    request = make_request("batch=64")
    found = compile_shortlist(compiler, request, make_shortlist(request), tmp_path, max_compiles=2)
    assert len({layout.estimate.candidate.partition for layout in found.layouts}) == 2


def make_step(
    partition: str = "fsdp",
    mesh: str = "8x1x1",
    has_pipeline: bool = False,
    chip: str = "v5e",
    mixing: float = 0.2,
    devices: int = 8,
) -> EstimatedStep:
    """Return an estimated step that takes about a second on 8 chips."""
    parts = dict.fromkeys((*COMPUTE_PARTS, "weights"), 0.05) | {"products": 0.5, "mixing": mixing}
    parts = {name: seconds * 8 / devices for name, seconds in parts.items()}
    return EstimatedStep(chip, devices, partition, f"{mesh} {partition}", has_pipeline, sum(parts.values()), parts)


def test_compiled_layouts_correct_similar_ones_and_narrow_their_intervals() -> None:
    compiled = [(make_step(), 1.05 * make_step().step_s)]
    steps = {
        "remat": make_step(mixing=0.25),
        "work": make_step("dp"),
        "partition": make_step(mesh="4x2x1", mixing=0.5),
        "none": make_step("2d_tp", "2x4x1", mixing=0.5),
        "chips": make_step(chip="v4"),
        "slice": make_step(mesh="16x1x1", devices=16),
    }
    times = dict(zip(steps, correct_estimates([*steps.values()], compiled), strict=True))
    ratios = {name: times[name].step_s / steps[name].step_s for name in steps}
    assert 1.05 > ratios["remat"] > ratios["partition"] > 1.0 and 1.05 > ratios["work"] > ratios["partition"]
    assert ratios["none"] == pytest.approx(1.0, abs=1e-3) and ratios["chips"] == 1.0
    assert ratios["remat"] > ratios["slice"] > ratios["partition"]
    widths = {name: time.high_s / time.low_s for name, time in times.items()}
    assert widths["remat"] < widths["partition"] < widths["none"] == pytest.approx(widths["chips"], rel=1e-3)


def test_the_first_compiled_pipeline_corrects_all_pipelines_and_nothing_else() -> None:
    compiled = [(make_step("pp", "1x2x4", has_pipeline=True), 3.0 * make_step().step_s)]
    other, plain = make_step("pp_fsdp", "4x1x2", has_pipeline=True, mixing=0.3), make_step(mixing=0.3)
    (before,), (after,) = correct_estimates([other], []), correct_estimates([other], compiled)
    assert before.step_s == other.step_s and after.step_s > 2.5 * other.step_s
    assert after.high_s / after.low_s < before.high_s / before.low_s
    (unchanged,) = correct_estimates([plain], compiled)
    assert unchanged.step_s == pytest.approx(plain.step_s, rel=0.01)


def test_a_partition_that_is_unexpectedly_slow_is_slow_on_every_mesh() -> None:
    compiled = [(make_step("sp"), 3.0 * make_step().step_s)]
    same, other = correct_estimates([make_step("sp", "4x2x1", mixing=0.4), make_step(mixing=0.4)], compiled)
    assert same.step_s > 2.5 * make_step(mixing=0.4).step_s and other.step_s < 1.2 * make_step(mixing=0.4).step_s


def test_if_all_compiled_partitions_are_unexpectedly_slow_others_are_corrected_too() -> None:
    compiled = [(make_step(name), slowdown * make_step().step_s) for name, slowdown in (("dp", 2.0), ("fsdp", 1.9))]
    other, elsewhere = make_step("sp", "4x2x1", mixing=0.4), make_step("sp", "4x2x1", chip="v4")
    corrected, unchanged = correct_estimates([other, elsewhere], compiled)
    assert 1.7 < corrected.step_s / other.step_s < 2.1 and corrected.low_s > 1.4 * other.step_s
    assert unchanged.step_s == elsewhere.step_s
    mixed = [compiled[0], (make_step("fsdp"), 0.8 * make_step().step_s)]
    (corrected,) = correct_estimates([other], mixed)
    assert 0.8 < corrected.step_s / other.step_s < 1.2, "they have nothing in common"


def test_the_chance_of_a_corrected_time_agrees_with_its_quantiles() -> None:
    time = CorrectedTime(1.0, 0.9, 1.3)
    chances = [time.chance_below(seconds) for seconds in (0.9, 1.0, 1.3)]
    assert chances == pytest.approx([0.05, 0.5, 0.95], abs=1e-3)


def test_the_command_of_the_best_layout_has_its_compiler_options(
    compiler: ScaledCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = make_request("mode.tune=5min")
    best = compile_shortlist(compiler, request, make_shortlist(request), tmp_path, max_compiles=1).layouts[0]
    calls = list[Any]()

    def tuned(run: Run, candidates: Any, budget_s: float | None, on_result: Any) -> TunedRun:
        calls.append((run.layout, budget_s))
        attempt = Attempt({"xla_flag": True}, Verdict.kept, 1, 0.9, 2**30, -0.1)
        result = TunedRun(1.0, 0.9, {"xla_flag": True}, (attempt,), finished=True, run=run)
        on_result(result)
        return result

    monkeypatch.setattr(tuning, "tune", tuned)
    status, options = tuning.tune_best(request, best, 300.0, Console(quiet=True))
    assert (status, options) == (0, ["target.chip.xla_options.xla_flag=true"])
    assert calls == [(best.estimate.run(request.run).layout, 300.0)]
    row = make_answer_row(request, best.estimate)
    assert train_command(request, row, options).endswith("target.chip.xla_options.xla_flag=true")
