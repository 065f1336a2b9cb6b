"""Tunes a layout by compiling it with other compiler options and other implementations of its model's blocks.

A greedy coordinate search: tries one change after another and keeps those that shorten the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from valkyrie.config.modes import settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform, replayed_devices
from valkyrie.hardware.target import TargetConfig
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.runs.folder import split_override
from valkyrie.search.compile.prediction import CompiledStep, CompileStatus
from valkyrie.search.compile.replayed import replay_program
from valkyrie.search.compile.runner import CompiledRun, compile_layout
from valkyrie.search.compile.summary import implementation_settings
from valkyrie.search.tune.compiler_options import CompilerOption, OptionValues, options_for
from valkyrie.search.tune.tuned import Attempt, TunedRun, Verdict, format_options
from valkyrie.train.options import CHIP, TO_FIT, TO_OVERLAP, USER, option_text
from valkyrie.trees import with_value
from valkyrie.units import gib_text

MIN_GAIN = 0.002
"""Smallest relative gain for which an option is kept. Every option is a risk: a later compiler may refuse it."""
ROUNDS = 2

_VERDICTS_WITHOUT_STEP = {CompileStatus[v.name]: v for v in (Verdict.refused, Verdict.does_not_fit, Verdict.timeout)}
_OptionsKey = frozenset[tuple[str, str | None]]


class _BudgetExceeded(Exception):
    pass


@dataclass(frozen=True)
class _Program:
    """A compiled program, its step time, and the duration of its compile and replay.

    Both are in seconds. The step time is None if the program does not compile or fit.
    """

    compiled_run: CompiledRun
    step_s: float | None
    elapsed_s: float

    @property
    def step(self) -> CompiledStep:
        step = self.compiled_run.outcome.step
        assert step is not None, "only a program that fits has a module"
        return step

    def options(self, *set_by: str) -> OptionValues:
        """Return the compiler options set by these sources, or all options if none is given."""
        return {option.name: option.value for option in self.step.options if not set_by or option.set_by in set_by}


def tune(
    run: Run,
    candidates: Sequence[CompilerOption] | None = None,
    budget_s: float | None = None,
    on_result: Callable[[TunedRun], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> TunedRun:
    """Find the compiler options and implementations with the shortest step.

    Tries the values of each option in addition to the best options so far. If any is kept, a second round tries some
    values again, and tries to remove each kept option. Programs that are in the compile cache are not compiled again,
    unless `mode.cache=false`.

    Raises ValueError if the target has no options to tune, or the baseline does not compile or does not fit.

    Args:
        run: The run to tune. Its own settings are the baseline.
        candidates: Options to try, or None to try the chip's options and then other implementations of the blocks.
            Settings in the run's command are not varied.
        budget_s: Time limit in seconds from the start, or None. At the limit, a running compile is stopped and the
            result has `finished=False`, but only `mode.time_limit_s` can stop the compile of the baseline.
        on_result: Called with all results so far after each attempt.
        progress: Called with a status line during compiles.
    """
    refuse_untunable(run.config.target)
    assert run.config.target.chip is not None
    tuner = _Tuner(run, budget_s, on_result or (lambda tuned_run: None), progress or (lambda line: None))
    tuner.start()
    try:
        tuner.try_options(options_for(run.config.target.chip) if candidates is None else candidates)
        if candidates is None:
            tuner.try_implementations(
                list_implementations(run, [split_override(argument)[0] for argument in run.arguments])
            )
    except _BudgetExceeded:
        return tuner.tuned_run
    return replace(tuner.tuned_run, finished=True)


def refuse_untunable(target: TargetConfig) -> None:
    """Raise ValueError if a target has no compiler options to tune."""
    if get_platform(target.platform).replay is None:
        kinds = " and ".join(replayed_devices())
        raise ValueError(
            f"target={target.describe()}: mode=tune predicts the effect of compiler options only for {kinds}. "
            "Use a slice such as target=v4-64."
        )


def list_implementations(run: Run, fixed_keys: Collection[str] = ()) -> list[tuple[str, Enum]]:
    """Return (key, value) pairs that choose another implementation of a block, such as `("model.s5.scan", blocked)`.

    Leaves out the keys in `fixed_keys`.
    """
    return [
        (f"model.{block}.{name}", value)
        for block, name, current in implementation_settings(run)
        if f"model.{block}.{name}" not in fixed_keys
        for value in type(current)
        if value is not current and value.value != "auto"
    ]


def with_settings(run: Run, options: Mapping[str, Any], model: Mapping[str, Enum]) -> Run:
    """Return a run with these compiler options added to its own, and these model settings."""
    target, config = run.config.target, run.config
    assert target.chip is not None
    if model:
        for key, value in model.items():
            config = with_value(config, key, value)
        run = Run(config, config.model, run.arguments)
    chip = replace(target.chip, xla_options=target.chip.xla_options | dict(options))
    return run.changed(target=replace(target, chip=chip))


@dataclass(frozen=True)
class _Move:
    """Compiler options and model settings to try in addition to the best so far.

    If the move combines several candidates, `combined_options` has the options of each. Such a move is tried only to
    find out whether any of the candidates changes the program.
    """

    options: OptionValues
    model: dict[str, Enum] = field(default_factory=dict)
    combined_options: tuple[OptionValues, ...] = ()

    @property
    def settings(self) -> OptionValues:
        return self.options | {key: value.value for key, value in self.model.items()}


class _Tuner:
    """State of the coordinate search: the best settings so far, the programs seen, and the deadline."""

    tuned_run: TunedRun

    def __init__(
        self, run: Run, budget_s: float | None, report: Callable[[TunedRun], None], progress: Callable[[str], None]
    ) -> None:
        self._run, self._report, self._progress = run, report, progress
        self._mode = settings_for(CompileMode, run.config.mode)
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._baseline_options: OptionValues = {}
        """All compiler options of the baseline, whatever their origin. Values are text, as in `Option`."""
        self._chip_options: OptionValues = {}
        """Baseline options that the chip's YAML sets."""
        self._tried: set[_OptionsKey] = {frozenset()}
        self._verdicts: dict[_OptionsKey, Verdict] = {}
        """Most recent verdict, by the options and model settings that were tried."""
        self._step_seconds: dict[str, float] = {}
        """Step time in seconds, by digest of the module."""
        self._best_model: dict[str, Enum] = {}
        """Model settings that were changed for the best program so far, by key."""
        self._best_digest = ""
        """Digest of the module of the best program so far. Empty until the baseline is compiled."""

    def start(self) -> None:
        """Compile the baseline, which is the unchanged run. Raises ValueError if it does not compile or fit."""
        program = self._compile(self._run, "baseline", has_budget=False)
        if program.step_s is None:
            does_not_fit = program.compiled_run.outcome.shortage is not None
            advice = (
                "Choose a layout that fits. To check one, use mode=compile."
                if does_not_fit
                else "Use a layout that mode=compile compiles."
            )
            raise ValueError(
                f"{self._run.layout.name} on target={self._run.config.target.describe()} has no step time to improve: "
                f"{_reason(program.compiled_run)} {advice}"
            )
        self._baseline_options, self._chip_options = program.options(), program.options(CHIP)
        first = self._judge(_Move({}), program, 1)
        step_s, user_options = program.step_s, program.options(USER)
        self.tuned_run = TunedRun(step_s, step_s, {}, (first,), set_by_user=user_options, run=self._run)
        self._set_best({}, {}, program)
        self._report(self.tuned_run)

    def try_options(self, candidates: Sequence[CompilerOption]) -> None:
        """Try all candidates that the user has not set. If any is kept, continue with a second round.

        Options that the chip's YAML sets are tried last, because these defaults were chosen with care.
        """
        user_options = self.tuned_run.set_by_user.keys()
        candidates = [candidate for candidate in candidates if user_options.isdisjoint(candidate.names)]
        candidates.sort(key=lambda candidate: candidate.name in self._chip_options)
        for round_number in range(1, ROUNDS + 1):
            before = self.tuned_run.options
            for move in self._first_round(candidates) if round_number == 1 else self._second_round(candidates):
                self._attempt(move, round_number)
            if self.tuned_run.options == before:
                break

    def try_implementations(self, alternatives: Sequence[tuple[str, Enum]]) -> None:
        """Try each alternative, a (model setting, value) pair, on top of the best settings so far.

        Adopts it if the step gets shorter by at least `MIN_GAIN`.
        """
        for key, value in alternatives:
            self._attempt(_Move({}, {key: value}), 1)

    def _first_round(self, candidates: Sequence[CompilerOption]) -> Iterator[_Move]:
        """Yield moves that try the values of each candidate.

        The second value of a switch is skipped if the first value fails or changes the program: then the second is the
        compiler's default. If the first value changes nothing, it may be the default itself. The second value is then
        tried at the end, combined with others. Candidates that are `idle` are only tried in combinations.
        """
        idle = [candidate.settings() for candidate in candidates if candidate.idle]
        untried = [options for settings in idle for options in settings[1:]]
        for candidate in (candidate for candidate in candidates if not candidate.idle):
            first, *other_values = candidate.settings()
            yield _Move(first)
            verdict = self._verdicts.get(_options_key(first))
            if verdict is None or not candidate.is_switch:
                yield from map(_Move, other_values)
            elif verdict is Verdict.same:
                untried += other_values
        yield from self._combinations([settings[0] for settings in idle])
        yield from self._combinations(untried)

    def _second_round(self, candidates: Sequence[CompilerOption]) -> Iterator[_Move]:
        """Yield a combination of all options that changed nothing in the first round, then moves for single options.

        For each option that changed the program, yields its removal if it was kept and, unless it is a switch, each of
        its values that compiled and fit. Options of which no value compiled and fit are not tried again.
        """
        idle: dict[str, OptionValues] = {}
        active: list[tuple[CompilerOption, list[OptionValues]]] = []
        for candidate in candidates:
            verdicts = [(options, self._verdicts.get(_options_key(options))) for options in candidate.settings()]
            effective_options = [options for options, verdict in verdicts if verdict in (Verdict.kept, Verdict.no_gain)]
            neutral_options = [options for options, verdict in verdicts if verdict is Verdict.same]
            if effective_options:
                active.append((candidate, [] if candidate.is_switch else [*effective_options, *neutral_options]))
            elif neutral_options:
                idle[candidate.name] = neutral_options[-1]
        yield from self._combinations(list(idle.values()))
        for candidate, settings in active:
            if kept_names := [name for name in candidate.names if name in self.tuned_run.options]:
                yield _Move({name: self._baseline_options.get(name) for name in kept_names})
            yield from map(_Move, settings)

    def _combinations(self, settings: Sequence[OptionValues]) -> Iterator[_Move]:
        """Yield all settings combined. Unless the program stays the same, bisect them to find those with an effect."""
        if len(settings) < 2:
            yield from map(_Move, settings)
            return
        combined: OptionValues = {}
        for options in settings:
            combined |= options
        yield _Move(combined, combined_options=tuple(settings))
        if self._verdicts.get(_options_key(combined)) is not Verdict.same:
            half = len(settings) // 2
            yield from self._combinations(settings[:half])
            yield from self._combinations(settings[half:])

    def _attempt(self, move: _Move, round_number: int) -> None:
        """Compile the best settings so far with `move` applied, and record the verdict for round `round_number`.

        Adopts the new settings if the step is at least `MIN_GAIN` shorter. If the move removes an option, a step that
        is not longer is enough. Never adopts several candidates at once (`combined_options`): they are tried separately
        next. Skips settings that were already tried, and model settings that are illegal for the run.
        """
        best, model = self.tuned_run, self._best_model | move.model
        options = best.options | move.options
        options = {
            name: value for name, value in options.items() if option_text(value) != self._baseline_options.get(name)
        }
        key = _options_key(options | {name: value.value for name, value in model.items()})
        run = with_settings(self._run, options, model)
        if key in self._tried or (move.model and run.problems(advise=False)):
            return
        combination_title = f"{len(move.combined_options)} options together"
        program = self._compile(
            run, combination_title if move.combined_options else ", ".join(format_options(move.settings))
        )
        self._tried.add(key)
        attempt = self._judge(move, program, round_number, removes_option=len(options) < len(best.options))
        self.tuned_run = replace(best, attempts=(*best.attempts, attempt))
        for setting in (move.settings, *(move.combined_options if attempt.verdict is Verdict.same else ())):
            self._verdicts[_options_key(setting)] = attempt.verdict
        if attempt.verdict in (Verdict.kept, Verdict.not_needed):
            self._set_best(options, model, program)
        self._report(self.tuned_run)

    def _set_best(self, options: OptionValues, model: dict[str, Enum], program: _Program) -> None:
        """Make these settings the best so far, including the options that its compile has added."""
        assert program.step_s is not None
        self._best_model, self._best_digest = model, program.step.module_sha256
        added = program.options(TO_FIT, TO_OVERLAP)
        self.tuned_run = replace(
            self.tuned_run,
            run=with_settings(self._run, options | added, model),
            step_s=program.step_s,
            options=options,
            added=added,
            model={key: str(value.value) for key, value in model.items()},
        )

    def _judge(self, move: _Move, program: _Program, round_number: int, removes_option: bool = False) -> Attempt:
        """Return the attempt with its verdict. `removes_option` is True if the move removes a kept option."""
        compiled_run, change = program.compiled_run, None
        attempt = Attempt(
            move.settings, Verdict.start, round_number, seconds=program.elapsed_s, cached=compiled_run.cached
        )
        if program.step_s is None:
            verdict = _VERDICTS_WITHOUT_STEP.get(compiled_run.status, Verdict.failed)
            return replace(attempt, verdict=verdict, reason=_reason(compiled_run))
        attempt = replace(attempt, step_s=program.step_s, peak=program.step.memory.peak)
        if not self._best_digest:
            return attempt
        change = program.step_s / self.tuned_run.step_s - 1
        if removes_option and change <= 0:
            verdict = Verdict.not_needed
        elif program.step.module_sha256 == self._best_digest:
            verdict = Verdict.same
        elif move.combined_options:
            verdict = Verdict.changed
        else:
            verdict = Verdict.kept if change <= -MIN_GAIN else Verdict.no_gain
        return replace(attempt, verdict=verdict, change=change)

    def _compile(self, run: Run, title: str, has_budget: bool = True) -> _Program:
        """Compile a run, and replay its module if it is new. Raises _BudgetExceeded at the deadline."""
        start_time, mode = time.perf_counter(), self._mode
        limit_s: float = mode.time_limit_s
        if has_budget and self._deadline is not None:
            limit_s = min(limit_s, self._deadline - time.monotonic())
        if limit_s <= 0:
            raise _BudgetExceeded
        compiled_run = compile_layout(run, limit_s, mode.cache, lambda line: self._progress(f"{title}: {line}"))
        if compiled_run.status is CompileStatus.timeout and limit_s < mode.time_limit_s:
            raise _BudgetExceeded
        step, step_s = compiled_run.outcome.step, None
        if step is not None:
            if step.module_sha256 not in self._step_seconds:
                replay, _ = replay_program(run, compiled_run)
                assert replay is not None, "modules for TPUs are scheduled, so they can be replayed"
                self._step_seconds[step.module_sha256] = replay.step_s
            step_s = self._step_seconds[step.module_sha256]
        return _Program(compiled_run, step_s, time.perf_counter() - start_time)


def _options_key(options: Mapping[str, Any]) -> _OptionsKey:
    return frozenset((name, option_text(value)) for name, value in options.items())


def _reason(compiled_run: CompiledRun) -> str:
    """Describe why a program has no step time, as a sentence."""
    shortage = compiled_run.outcome.shortage
    if shortage is not None and shortage.needed:
        return f"it needs {gib_text(shortage.needed)}, and {gib_text(shortage.usable)} are usable."
    return f"{str(compiled_run.outcome.reason).rstrip('.')}."
