"""Tests of tuning compiler options: which ones are kept or refused, when tuning ends, and the files it writes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from helpers import compose_run, shared_run
from machines import needs_libtpu
from outcomes import fitting_outcome
from runs import run_train
from valkyrie.config.run import Run
from valkyrie.hardware.chips import known_chips
from valkyrie.hardware.target import ChipConfig
from valkyrie.models.s5 import S5
from valkyrie.models.stack import Stack
from valkyrie.ops.choices import ScanImpl
from valkyrie.problems import ProblemCode
from valkyrie.search.compile.prediction import CompileOutcome, CompileStatus, MemoryReport
from valkyrie.search.compile.runner import CompiledRun
from valkyrie.search.tune.compiler_options import CompilerOption, all_options, options_for
from valkyrie.search.tune.mode import attempt_lines, experiment_yaml, option_gains, training_command
from valkyrie.search.tune.tune import tune
from valkyrie.search.tune.tuned import TunedRun, Verdict
from valkyrie.train.options import OPTIONS_KEY, TO_FIT, TO_OVERLAP, Option, collect_options
from valkyrie.units import parse_seconds

LAYOUT = ("model=s5_tiny", "mesh=2x2x1", "target=v4-8", "batch=8", "seq=64")
GATHERS = "xla_enable_async_all_gather"
"""An option that v4 sets by default."""
FUSE_GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
"""The first option tried on v4."""

Outcome = float | CompileOutcome


@dataclass
class OptionCompiler:
    """A fake compiler.

    `steps` maps option values to the seconds of a step, or to an outcome without a step. Programs with equal step times
    are equal. Each compile takes `compile_s` seconds of a simulated clock and is cached. `added` are options that the
    compiler adds with the origin `added_by`.
    """

    steps: Callable[[Mapping[str, str | None]], Outcome]
    compile_s: float = 10.0
    clock: float = 0.0
    compiled: list[dict[str, str | None]] = field(default_factory=list)
    replays: int = 0
    cache: set[str] = field(default_factory=set)
    added: dict[str, str] = field(default_factory=dict)
    added_by: str = TO_FIT

    def compile_layout(self, run: Run, limit_s: float, use_cache: bool, progress: Callable[[str], None]) -> CompiledRun:
        options = collect_options(run.config.target.chip, {})
        values = {option.name: option.value for option in options}
        block = run.model.used_mixers["s5"] if isinstance(run.model, Stack) else None
        if isinstance(block, S5) and block.scan is not ScanImpl.auto:
            values["scan"] = block.scan.value
        cached, outcome = use_cache and str(values) in self.cache, self.steps(values)
        if not cached:
            progress("compiling: 0 s")
            self.compiled.append(values)
            self.clock += min(self.compile_s, limit_s)
            if self.compile_s > limit_s:
                outcome = CompileOutcome(CompileStatus.timeout, f"the compile took longer than {limit_s:g} seconds")
            self.cache.add(str(values))
        if not isinstance(outcome, CompileOutcome):
            options += [Option(name, value, self.added_by) for name, value in self.added.items() if name not in values]
            peak = int(outcome * 2**20)
            outcome = fitting_outcome(module_sha256=str(outcome), peak=peak, options=tuple(options))
        return CompiledRun(outcome, Path("cache"), Path("cache"), cached, self.compile_s)

    def replay_program(self, run: Run, compiled: CompiledRun) -> tuple[Any, list[Any]]:
        self.replays += 1
        return SimpleNamespace(step_s=float(compiled.outcome.step.module_sha256)), []


@pytest.fixture
def install_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OptionCompiler]:
    """A function that replaces the compiler, replays and the clock with an `OptionCompiler`, and returns it."""

    def replace_compiler(
        steps: Callable[[Mapping[str, str | None]], Outcome], compile_s: float = 10.0
    ) -> OptionCompiler:
        compiler = OptionCompiler(steps, compile_s)
        monkeypatch.setattr("valkyrie.search.tune.tune.compile_layout", compiler.compile_layout)
        monkeypatch.setattr("valkyrie.search.tune.tune.replay_program", compiler.replay_program)
        monkeypatch.setattr("valkyrie.search.tune.tune.time.monotonic", lambda: compiler.clock)
        return compiler

    return replace_compiler


def candidate(name: str, *values: Any, **companions: Any) -> CompilerOption:
    return CompilerOption(name, values, "what it does", "where that is known from", companion_options=companions)


A, B, N = candidate("xla_a", True, False), candidate("xla_b", True, False), candidate("xla_n", 1, 2, 3)


def verdicts(tuned: TunedRun) -> list[tuple[int, dict[str, Any], str]]:
    return [(attempt.round, attempt.options, attempt.verdict.value) for attempt in tuned.attempts]


def test_each_option_is_tried_on_top_of_the_best_so_far(install_compiler: Callable[..., OptionCompiler]):
    def steps(o: Mapping[str, str | None]) -> float:
        together = 2.0 if o.get("xla_a") == "true" and o.get("xla_n") == "2" else 0.0
        return 10.0 - (o.get("xla_a") == "true") - together + 0.5 * (o.get("xla_b") == "true")

    compiler = install_compiler(steps)
    tuned = tune(compose_run(*LAYOUT), [A, B, N])
    assert tuned.options == {"xla_a": True, "xla_n": 2} and tuned.finished
    assert (tuned.start_s, tuned.step_s, tuned.gain) == (10.0, 7.0, pytest.approx(0.3))
    assert verdicts(tuned)[:7] == [
        (1, {}, "as it is"),
        (1, {"xla_a": True}, "kept"),
        (1, {"xla_b": True}, "no gain"),
        (1, {"xla_n": 1}, "same program"),
        (1, {"xla_n": 2}, "kept"),
        (1, {"xla_n": 3}, "no gain"),
        (2, {"xla_a": None}, "no gain"),
    ]
    assert [attempt.change for attempt in tuned.attempts[1:4]] == pytest.approx([-0.1, 0.5 / 9, 0.0])
    chip = tuned.run.config.target.chip
    assert chip is not None and chip.xla_options["xla_a"] is True and chip.xla_options[GATHERS] is True
    assert len({str(sorted(options.items())) for options in compiler.compiled}) == len(compiler.compiled)


def test_an_option_made_redundant_by_another_is_removed(install_compiler: Callable[..., OptionCompiler]):
    def steps(o: Mapping[str, str | None]) -> float:
        return 5.0 if o.get("xla_b") == "true" else 9.0 if o.get("xla_a") == "true" else 10.0

    install_compiler(steps)
    tuned = tune(compose_run(*LAYOUT), [A, B])
    assert tuned.options == {"xla_b": True} and tuned.step_s == 5.0
    assert (2, {"xla_a": None}, "taken back") in verdicts(tuned)
    (line,) = option_gains(tuned)
    assert line.startswith("xla_b=true: ") and "-44.4%" in line


def test_a_default_option_of_the_chip_can_be_removed(install_compiler: Callable[..., OptionCompiler]):
    install_compiler(lambda o: 8.0 if o.get(GATHERS) == "false" else 10.0)
    tuned = tune(compose_run(*LAYOUT), [candidate(GATHERS, True, False)])
    assert tuned.options == {GATHERS: False}
    assert verdicts(tuned)[1:] == [(1, {GATHERS: False}, "kept")], "what it was is known, and not compiled again"


def test_an_equal_program_is_not_replayed_again(install_compiler: Callable[..., OptionCompiler]):
    compiler = install_compiler(lambda o: 10.0 - (o.get("xla_n") == "3"))
    tuned = tune(compose_run(*LAYOUT), [A, B, N])
    assert compiler.replays == 2
    assert verdicts(tuned) == [
        (1, {}, "as it is"),
        (1, {"xla_a": True}, "same program"),
        (1, {"xla_b": True}, "same program"),
        (1, {"xla_n": 1}, "same program"),
        (1, {"xla_n": 2}, "same program"),
        (1, {"xla_n": 3}, "kept"),
        (1, {"xla_a": False, "xla_b": False}, "same program"),
    ], "the other positions of switches together, and nothing again that is known"


def test_effective_options_in_a_batch_are_found_by_bisection(install_compiler: Callable[..., OptionCompiler]):
    switches = [candidate(f"xla_{n}", True, False) for n in range(8)]
    install_compiler(lambda o: 10.0 - 2 * (o.get("xla_n") == "3") - (o.get("xla_5") == "false"))
    tuned = tune(compose_run(*LAYOUT), [*switches, N])
    assert tuned.options == {"xla_5": False, "xla_n": 3} and tuned.step_s == 7.0
    together = [(len(a.options), a.verdict.value) for a in tuned.attempts if len(a.options) > 1 and a.round == 1]
    same, other = "same program", "see below"
    assert together == [(8, other), (4, same), (4, other), (2, other), (2, same)]
    assert len([a for a in tuned.attempts if a.round == 1]) == 1 + 8 + 3 + 5 + 2


def test_options_that_are_mostly_idle_on_a_chip_are_tried_together(install_compiler: Callable[..., OptionCompiler]):
    idle = [replace(candidate(f"xla_{n}", True, False), idle=True) for n in range(3)]
    install_compiler(lambda o: 10.0 - (o.get("xla_2") == "false"))
    tuned = tune(compose_run(*LAYOUT), [*idle, N])
    assert tuned.options == {"xla_2": False}
    first_round = [
        (len(attempt.options), attempt.verdict.value) for attempt in tuned.attempts[4:] if attempt.round == 1
    ]
    same = "same program"
    assert first_round == [(3, same), (3, "see below"), (1, same), (2, "see below"), (1, same), (1, "kept")]
    v4, v6e = ([c.name for c in options_for(known_chips()[chip]) if c.idle] for chip in ("v4", "v6e"))
    assert v4 != v6e


def test_options_without_effect_are_tried_again_with_the_kept_ones(install_compiler: Callable[..., OptionCompiler]):
    def steps(o: Mapping[str, str | None]) -> float:
        return 10.0 - 2 * (o.get("xla_n") == "3") * (1 + (o.get("xla_m") == "1"))

    install_compiler(steps)
    tuned = tune(compose_run(*LAYOUT), [candidate("xla_m", 1), candidate("xla_o", 1), N])
    assert tuned.options == {"xla_m": 1, "xla_n": 3} and tuned.step_s == 6.0
    assert (2, {"xla_m": 1, "xla_o": 1}, "see below") in verdicts(tuned)
    assert (2, {"xla_m": 1}, "kept") in verdicts(tuned)


@pytest.mark.parametrize("origin", [TO_FIT, TO_OVERLAP])
def test_options_that_a_compile_has_added_are_kept_with_it(
    origin: str, install_compiler: Callable[..., OptionCompiler]
):
    def steps(o: Mapping[str, str | None]) -> float:
        return 10.0 - (o.get("xla_a") == "true")

    compiler = install_compiler(steps)
    compiler.added, compiler.added_by = {"xla_saves": "false"}, origin
    tuned = tune(compose_run(*LAYOUT), [A])
    assert (tuned.options, tuned.added) == ({"xla_a": True}, {"xla_saves": "false"})
    chip = tuned.run.config.target.chip
    assert chip is not None and chip.xla_options["xla_saves"] == "false"
    assert f"{OPTIONS_KEY}.xla_saves=false" in training_command(tuned)
    assert "      xla_saves: false\n" in experiment_yaml(tuned)
    assert "added xla_saves=false" in experiment_yaml(tuned)


def test_gains_below_the_resolution_of_the_replay_are_ignored(install_compiler: Callable[..., OptionCompiler]):
    install_compiler(lambda o: 10.0 - 0.01 * (o.get("xla_a") == "true"))
    assert tune(compose_run(*LAYOUT), [A]).options == {}


def test_options_that_only_work_together_are_set_together(install_compiler: Callable[..., OptionCompiler]):
    install_compiler(lambda o: 7.0 if {"xla_a", "xla_shape"} <= o.keys() else 10.0)
    assert tune(compose_run(*LAYOUT), [candidate("xla_a", True, xla_shape=3)]).options == {
        "xla_a": True,
        "xla_shape": 3,
    }


def test_attempts_without_a_step_are_listed_with_a_reason_and_not_repeated(
    install_compiler: Callable[..., OptionCompiler],
):
    failures = {
        "xla_a": CompileOutcome(CompileStatus.refused, "no option of this name."),
        "xla_b": CompileOutcome(
            CompileStatus.does_not_fit, "x", shortage=MemoryReport(needed=40 * 2**30, usable=30 * 2**30)
        ),
    }

    def steps(o: Mapping[str, str | None]) -> Outcome:
        return next((failures[name] for name in failures if o.get(name) == "true"), 10.0 - (o.get("xla_n") == "1"))

    install_compiler(steps)
    tuned = tune(compose_run(*LAYOUT), [candidate("xla_a", True), candidate("xla_b", True), N])
    failed = {name: a for a in tuned.attempts for name in a.options if a.step_s is None}
    assert failed["xla_a"].verdict is Verdict.refused and failed["xla_a"].reason == failures["xla_a"].reason
    reason = failed["xla_b"].reason
    assert reason is not None and "40.0 GiB" in reason and "30.0 GiB" in reason
    assert [n for n, options, _ in verdicts(tuned) if "xla_a" in options] == [1]
    assert attempt_lines(failed["xla_b"])[1].strip() == reason


def test_tuning_stops_at_its_budget_and_continues_from_the_cache(
    install_compiler: Callable[..., OptionCompiler],
):
    compiler = install_compiler(lambda o: 10.0 - 3 * (o.get("xla_a") == "true") - (o.get("xla_n") == "3"))
    reported: list[TunedRun] = []
    tuned = tune(compose_run(*LAYOUT), [A, B, N], 25.0, reported.append)
    assert not tuned.finished and tuned.options == {"xla_a": True}
    assert compiler.clock == 25.0, "what was compiling then was ended"
    assert [len(result.attempts) for result in reported] == [1, 2]
    compiler.cache -= {str(compiler.compiled[-1])}
    whole = tune(compose_run(*LAYOUT), [A, B, N], 1000.0)
    assert whole.finished and whole.options == {"xla_a": True, "xla_n": 3}
    assert [attempt.cached for attempt in whole.attempts][:3] == [True, True, False]


def test_the_baseline_compile_may_take_longer_than_the_budget(install_compiler: Callable[..., OptionCompiler]):
    install_compiler(lambda o: 10.0, compile_s=60.0)
    tuned = tune(compose_run(*LAYOUT), [A], 5.0)
    assert (len(tuned.attempts), tuned.finished, tuned.options) == (1, False, {})


def test_options_set_by_the_user_are_not_changed(install_compiler: Callable[..., OptionCompiler]):
    install_compiler(lambda o: 10.0 - (o.get("xla_a") == "true") - (o.get("xla_b") == "true"))
    tuned = tune(compose_run(*LAYOUT, f"{OPTIONS_KEY}.xla_a=false"), [A, B])
    assert tuned.set_by_user == {"xla_a": "false"} and tuned.options == {"xla_b": True}


@pytest.mark.parametrize("overrides", [(), ("model.s5.scan=kernel",)])
def test_other_implementations_are_tried_on_top_of_the_best_options(
    install_compiler: Callable[..., OptionCompiler], overrides: tuple[str, ...]
):
    times = {"associative": 6.0, "blocked": 5.0}
    compiler = install_compiler(lambda o: times.get(str(o.get("scan")), 10.0) - (o.get(FUSE_GATHERS) == "true"))
    tuned = tune(shared_run("mode=tune", *LAYOUT, *overrides))
    expected = {} if overrides else {"model.s5.scan": "blocked"}
    assert (tuned.model, tuned.options, tuned.finished) == (expected, {FUSE_GATHERS: True}, True)
    assert tuned.step_s == (9.0 if overrides else 4.0)
    if overrides:
        assert "blocked" not in [o.get("scan") for o in compiler.compiled]
        return
    assert verdicts(tuned)[-4:] == [
        (1, {"model.s5.scan": "sequential"}, "same program"),
        (1, {"model.s5.scan": "associative"}, "kept"),
        (1, {"model.s5.scan": "blocked"}, "kept"),
        (1, {"model.s5.scan": "kernel"}, "no gain"),
    ]
    assert tuned.overrides == ["model.s5.scan=blocked", f"{OPTIONS_KEY}.{FUSE_GATHERS}=true"]
    assert training_command(tuned).endswith(f"model.s5.scan=blocked {OPTIONS_KEY}.{FUSE_GATHERS}=true")
    experiment = yaml.safe_load(experiment_yaml(tuned))
    assert experiment["model"] == {"s5": {"scan": "blocked"}} and "target" in experiment
    assert [line for line in option_gains(tuned) if line.startswith("model.s5.scan=blocked: ") and "(-20.0%)" in line]


def test_added_options_are_kept_with_another_implementation(install_compiler: Callable[..., OptionCompiler]):
    compiler = install_compiler(lambda o: {"associative": 6.0, "blocked": 5.0}.get(str(o.get("scan")), 10.0))
    compiler.added = {"xla_saves": "false"}
    tuned = tune(shared_run("mode=tune", *LAYOUT))
    assert (tuned.model, tuned.added) == ({"model.s5.scan": "blocked"}, {"xla_saves": "false"})
    assert tuned.overrides == ["model.s5.scan=blocked", f"{OPTIONS_KEY}.xla_saves=false"]
    assert "added xla_saves=false" in experiment_yaml(tuned)
    assert not any("xla_saves" in values for values in compiler.compiled), "each finds out for itself whether it fits"


@pytest.mark.parametrize("target", ["cpu", "auto"])
def test_a_target_without_a_tpu_compiler_is_refused(capfd: pytest.CaptureFixture[str], target: str):
    assert run_train("mode=tune", f"target={target}", "mesh=2x2x1", "model=s5_tiny", "batch=8", "seq=16") == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"valkyrie-train: target={target}") and "target=v4-64" in err
    assert "compiling" not in out


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (
            CompileOutcome(CompileStatus.does_not_fit, shortage=MemoryReport(needed=2**35, usable=2**34)),
            "32.0 GiB, and 16.0 GiB are usable",
        ),
        (
            CompileOutcome(CompileStatus.refused, "libtpu is not installed here."),
            "not installed here.",
        ),
    ],
)
def test_a_layout_that_does_not_compile_is_refused(
    install_compiler: Callable[..., OptionCompiler], outcome: Any, reason: str
):
    install_compiler(lambda o: outcome)
    with pytest.raises(ValueError, match="mode=compile") as error:
        tune(compose_run(*LAYOUT), [A])
    assert reason in str(error.value) and "2x2x1-fsdp on target=v4-8" in str(error.value)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10min", 600), ("1.5h", 5400), ("2h", 7200)])
def test_a_budget_is_a_time_with_a_unit(text: str, seconds: float):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["90", "ten", "0s", "-3s", "5 min", "1d"])
def test_a_budget_that_is_not_a_time_is_refused(text: str):
    (problem,) = shared_run("mode=tune", *LAYOUT, f"mode.budget='{text}'").problems()
    code = ProblemCode.out_of_range if text in ("0s", "-3s") else ProblemCode.malformed
    assert (problem.code, problem.key, problem.value) == (code, "mode.budget", text)


@pytest.fixture
def tune_output(
    install_compiler: Callable[..., OptionCompiler], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, str]:
    """The run folder of a finished `mode=tune`, and its output."""
    install_compiler(lambda o: 8.0 if o.get(FUSE_GATHERS) == "true" else 10.0)
    assert run_train("mode=tune", *LAYOUT, f"runs={tmp_path}", "name=mine", "mode.budget=1h", "mode.cache=false") == 0
    return tmp_path / "mine", capsys.readouterr().out


def test_the_command_prints_every_attempt_and_the_gain_of_each_option(tune_output: tuple[Path, str]):
    folder, out = tune_output
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0].startswith("compiling") and "mode.budget=1h" in lines[0] and "mode.time_limit_s" in lines[0]
    assert lines[1].startswith("s5_tiny under 2x2x1-fsdp")
    header, baseline, attempt = (line.split() for line in lines[2:5])
    assert header == ["step", "change", "peak", "option"] and baseline[:4] == ["10.00", "s", "10.0", "MiB"]
    assert attempt == ["8.000", "s", "-20.0%", "8.0", "MiB", "kept", f"{FUSE_GATHERS}=true"]
    (summary,) = (line for line in lines if line.startswith("predicted step: "))
    assert all(words in summary for words in ("10.00 s", "8.000 s", "(-20.0%)"))
    assert [line for line in lines if line.startswith(f"{FUSE_GATHERS}=true: ") and "(-20.0%)" in line]
    assert f"options: {folder / 'tuned.yaml'}" in lines
    assert (folder / "tuned.yaml").read_text().rstrip() in out
    assert (folder / "run.yaml").is_file() and (folder / "versions.json").is_file()


def test_all_attempts_are_recorded(tune_output: tuple[Path, str]):
    record = json.loads((tune_output[0] / "tune.json").read_text())
    assert (record["start_s"], record["step_s"], record["finished"]) == (10.0, 8.0, True)
    assert record["options"] == {FUSE_GATHERS: True} and record["about"]["layout"] == "2x2x1-fsdp"
    first, second = record["attempts"][:2]
    assert (first["verdict"], first["step_s"], second["verdict"], second["step_s"]) == ("as it is", 10, "kept", 8)
    tried = {name for attempt in record["attempts"] for name in attempt["options"]}
    names = {name for candidate in options_for(known_chips()["v4"]) for name in candidate.names}
    assert tried == names | {"model.s5.scan"}


def test_tuned_yaml_is_an_experiment_with_the_training_command_on_line_one(tune_output: tuple[Path, str], command: Any):
    folder, out = tune_output
    (folder / "experiment").mkdir()
    text = (folder / "tuned.yaml").rename(folder / "experiment" / "tuned.yaml").read_text()
    typed = text.splitlines()[1].removeprefix("# valkyrie-train ")
    assert f": valkyrie-train {typed}\n" in out
    assert "name=" not in typed, "a training run has a folder of its own"
    for arguments in (shlex.split(typed), ["--config-dir", str(folder), "+experiment=tuned", *LAYOUT]):
        composed = command(*arguments)
        assert (composed.status, composed.err, composed.run.config.mode.name) == (0, "", "train")
        assert composed.run.config.target.chip.xla_options[FUSE_GATHERS] is True


@pytest.mark.parametrize(("target", "compiler"), [("v4-8", "libtpu"), ("h100-4", "jaxlib")])
def test_tuned_yaml_names_the_version_of_the_compiler_that_was_used(target: str, compiler: str):
    run = shared_run("mode=tune", "model=s5_tiny", "mesh=2x2x1", f"target={target}", "batch=8", "seq=16")
    tuned = TunedRun(start_s=10.0, step_s=10.0, options={}, attempts=(), run=run)
    assert f"with these options ({compiler} " in experiment_yaml(tuned)


def test_ctrl_c_keeps_the_best_options_so_far(
    install_compiler: Callable[..., OptionCompiler], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    calls = []

    def steps(o: Mapping[str, str | None]) -> float:
        calls.append(o)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return 8.0 if o.get(FUSE_GATHERS) == "true" else 10.0

    install_compiler(steps)
    assert run_train("mode=tune", *LAYOUT, f"runs={tmp_path}", "name=mine") == 130
    out, err = capfd.readouterr()
    assert "Interrupted." in out and err == ""
    assert f"{FUSE_GATHERS}: true" in (tmp_path / "mine" / "tuned.yaml").read_text()
    assert not json.loads((tmp_path / "mine" / "tune.json").read_text())["finished"]


def test_finding_nothing_better_is_reported(
    install_compiler: Callable[..., OptionCompiler], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    install_compiler(lambda o: 10.0)
    assert run_train("mode=tune", *LAYOUT, f"runs={tmp_path}", "name=mine") == 0
    assert "; none of" in capfd.readouterr().out
    install_compiler(lambda o: 10.0, compile_s=60.0)
    assert run_train("mode=tune", *LAYOUT, f"runs={tmp_path}", "name=short", "mode.budget=5s") == 0
    assert "; nothing else" in capfd.readouterr().out


def test_every_candidate_has_its_source_and_known_chips():
    tpus = {name for name, chip in known_chips().items() if chip.platform == "tpu"}
    for candidate in all_options():
        assert candidate.does and candidate.source and candidate.values
        assert set(candidate.chips or ()) <= tpus and candidate.platform in ("tpu", "gpu"), candidate.name
        assert all(name.startswith("xla_") for name in candidate.names)
    for chip in tpus:
        named = [candidate.name for candidate in options_for(known_chips()[chip])]
        assert len(named) == len(set(named)) > 10, chip
    gpus = known_chips()["h100"], ChipConfig("mine", platform="gpu")
    assert all({candidate.platform for candidate in options_for(gpu)} == {"gpu"} for gpu in gpus)
    shipped = {name for chip in tpus for name in known_chips()[chip].xla_options}
    assert shipped <= {name for candidate in all_options() for name in candidate.names}, "its worth is shown too"


@needs_libtpu
@pytest.mark.slow  # compiles for a TPU twice
@pytest.mark.timeout(600)
def test_candidates_are_compiled_by_the_real_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VALKYRIE_CACHE", str(tmp_path))
    candidates = [candidate(GATHERS, False), candidate("xla_no_such_option", 1)]
    tuned = tune(compose_run(*LAYOUT, "mode=tune"), candidates)
    refused, slower = tuned.attempts[1:]  # the chip's defaults come last
    assert (refused.verdict, slower.verdict) == (Verdict.refused, Verdict.no_gain)
    assert slower.change is not None and slower.change > 0.02
    assert all(a.cached for a in tune(compose_run(*LAYOUT, "mode=tune"), candidates[:1]).attempts)
