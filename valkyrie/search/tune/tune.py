"""Tries compiler options of a layout, and other implementations of its model's blocks, by compile alone.

One after another; those that shorten its step are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from valkyrie.config.modes import settings_for
from valkyrie.config.run import Run
from valkyrie.hardware.platforms import platform_of
from valkyrie.hardware.target import TargetConfig
from valkyrie.modes.compile import Config as CompileMode
from valkyrie.runs.folder import key_value
from valkyrie.search.compile.prediction import CompiledStep, CompileStatus
from valkyrie.search.compile.replayed import replayed
from valkyrie.search.compile.runner import Compiled, compile_layout
from valkyrie.search.compile.summary import implementation_settings
from valkyrie.search.tune.compiler_options import CompilerOption, options_for
from valkyrie.search.tune.tuned import Attempt, Options, Tuned, Verdict, assignments
from valkyrie.train.options import CHIP, TO_FIT, YOU, option_text
from valkyrie.trees import with_value
from valkyrie.units import gib

LEAST_GAIN = 0.002
"""The share of the step that an option must save to be kept: each is one more that a later compiler may refuse."""
ROUNDS = 2

_WITHOUT_STEP = {CompileStatus[v.name]: v for v in (Verdict.refused, Verdict.does_not_fit, Verdict.timeout)}
_Texts = frozenset[tuple[str, str | None]]


@dataclass(frozen=True)
class Implementation:
    """Another choice of how a kind of block is computed: key `model.s5.scan` with value `blocked`."""

    key: str
    value: Enum

    def __str__(self) -> str:
        return f"{self.key}={self.value.value}"

    def apply(self, run: Run) -> Run:
        """Return a run with this setting."""
        config = with_value(run.config, self.key, self.value)
        return Run(config, config.model, run.arguments)


def implementations(run: Run, fixed: Collection[str] = ()) -> list[Implementation]:
    """Return the other implementations of every block of a run, except for the keys in `fixed`."""
    return [
        Implementation(f"model.{block}.{name}", value)
        for block, name, current in implementation_settings(run)
        if f"model.{block}.{name}" not in fixed
        for value in type(current)
        if value is not current and value.value != "auto"
    ]


@dataclass(frozen=True)
class _Look:
    """What one program came to; `digest` names its optimised module, `peak` counts bytes of a device."""

    compiled: Compiled
    step_s: float | None
    seconds: float

    @property
    def digest(self) -> str:
        return self._step.module_sha256

    @property
    def peak(self) -> int:
        return self._step.memory.peak or 0

    @property
    def chosen(self) -> dict[str, str | None]:
        """All options of the program, as the compiler reads them."""
        return {option.name: option.value for option in self._step.options}

    def options(self, set_by: str) -> Options:
        """The options that somebody set, as the compiler reads them."""
        return {option.name: option.value for option in self._step.options if option.set_by == set_by}

    @property
    def _step(self) -> CompiledStep:
        step = self.compiled.outcome.step
        assert step is not None, "only a program that fits has a module"
        return step


def tune(
    run: Run,
    candidates: Sequence[CompilerOption] | None = None,
    budget_s: float | None = None,
    on_result: Callable[[Tuned], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Tuned:
    """Return the options, of `candidates` (by default those known for its chip), with which a run's step is shortest.

    One option after another, each value of it on top of the best so far; a second round where the first kept any, in
    which a kept option may go again. Without `candidates` other implementations of the model's blocks are tried at the
    end, but for those that the run's command names. After `budget_s` seconds no more is tried, and what is compiling is
    ended; the layout as it is has `mode.time_limit_s` alone. `on_result` is called with all that is known after each
    attempt, `progress` with a line while one is compiled. ValueError where there is nothing to tune, or the layout as
    it is does not compile. Equal programs are compiled once, also of an earlier call (`mode.cache`).
    """
    if reason := not_tunable(run.config.target):
        raise ValueError(reason)
    tuner = _Tuner(run, budget_s, on_result or (lambda tuned: None), progress or (lambda line: None))
    tuner.start()
    assert run.config.target.chip is not None
    done = tuner.try_all(options_for(run.config.target.chip.name) if candidates is None else candidates)
    if done and candidates is None:
        done = tuner.try_implementations(implementations(run, [key_value(argument)[0] for argument in run.arguments]))
    return replace(tuner.tuned, finished=done)


def not_tunable(target: TargetConfig) -> str | None:
    """Return why a target has no compiler options to tune; None where it has."""
    if platform_of(target.platform).replay is not None:
        return None
    return (
        f"mode=tune predicts what compiler options are worth on a slice of TPUs, and target={target.describe()} is "
        "none. Use a slice such as target=v4-64."
    )


def with_options(run: Run, options: Mapping[str, Any]) -> Run:
    """Return a run with these compiler options beside its own."""
    target = run.config.target
    assert target.chip is not None
    chip = replace(target.chip, xla_options=target.chip.xla_options | dict(options))
    return run.changed(target=replace(target, chip=chip))


@dataclass(frozen=True)
class _Move:
    """Options to set on top of the best; `of`: the settings that they are, where these are only looked through."""

    options: Options
    of: tuple[Options, ...] = ()


class _Tuner:
    """The search by coordinates: the best options so far, the programs seen, and the time left."""

    tuned: Tuned

    def __init__(
        self, run: Run, budget_s: float | None, report: Callable[[Tuned], None], progress: Callable[[str], None]
    ) -> None:
        self._run, self._report, self._progress = run, report, progress
        self._mode = settings_for(CompileMode, run.config.mode)
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._at_start: dict[str, str | None] = {}
        """The options of the layout as it is, as the compiler reads them."""
        self._defaults: Options = {}
        """Those of them that the chip's YAML sets."""
        self._tried: set[_Texts] = {frozenset()}
        self._effects: dict[_Texts, Verdict] = {}
        """What became of each setting when it was last tried."""
        self._steps: dict[str, float] = {}
        """Seconds of a step by the digest of its module."""
        self._digest = ""
        """The module of the best so far."""

    def start(self) -> None:
        """Compile the layout as it is; ValueError where that has no step."""
        look = self._look(self._run, self._mode.time_limit_s, "as it is")
        if look.step_s is None:
            raise ValueError(
                f"{self._run.layout.name} on target={self._run.config.target.describe()} has no step to shorten: "
                f"{_why(look.compiled)} Begin with a layout that mode=compile compiles."
            )
        self._at_start = look.chosen
        first = Attempt({}, Verdict.start, 1, look.step_s, look.peak, None, None, look.seconds, look.compiled.cached)
        self._digest, self._defaults, to_fit = look.digest, look.options(CHIP), look.options(TO_FIT)
        run = with_options(self._run, to_fit)
        self.tuned = Tuned(run, look.step_s, look.step_s, {}, (first,), to_fit, look.options(YOU))
        self._report(self.tuned)

    def try_all(self, candidates: Sequence[CompilerOption]) -> bool:
        """Go through the candidates; once more where that kept any. False: it ended early, for the time is over.

        The chip's defaults come last: they are there for a reason.
        """
        theirs = self.tuned.set_by_user.keys()
        candidates = [candidate for candidate in candidates if theirs.isdisjoint(candidate.names)]
        candidates.sort(key=lambda candidate: candidate.name in self._defaults)
        for number in range(1, ROUNDS + 1):
            before = self.tuned.options
            for move in self._first_round(candidates) if number == 1 else self._again(candidates):
                if not self._attempt(move, number):
                    return False
            if self.tuned.options == before:
                break
        return True

    def try_implementations(self, others: Sequence[Implementation]) -> bool:
        """Compile each with the best options, and keep what is shorter; False where the time is over before the end."""
        chosen: dict[str, Implementation] = {}
        for other in others:
            left_s, tried = self._left_s(), chosen | {other.key: other}
            if left_s <= 0:
                return False
            run = self._run
            for implementation in tried.values():
                run = implementation.apply(run)
            if run.problems(advise=False):
                continue
            look = self._look(with_options(run, self.tuned.options), left_s, str(other))
            if self._timed_out(look, left_s):
                return False
            attempt = self._judged(_Move({other.key: other.value.value}), look, 1, fewer=False)
            self.tuned = replace(self.tuned, attempts=(*self.tuned.attempts, attempt))
            if attempt.verdict is Verdict.kept:
                chosen = tried
                model = {key: str(implementation.value.value) for key, implementation in chosen.items()}
                self._keep(run, look, self.tuned.options)
                self.tuned = replace(self.tuned, model=model)
            self._report(self.tuned)
        return True

    def _keep(self, run: Run, look: _Look, options: Options) -> None:
        """Take a run with these options for the best, and beside them what its program needs to fit."""
        assert look.step_s is not None
        self._digest, to_fit = look.digest, look.options(TO_FIT)
        best = with_options(run, options | to_fit)
        self.tuned = replace(self.tuned, run=best, step_s=look.step_s, options=options, to_fit=to_fit)

    def _left_s(self) -> float:
        """Return how long a compile may take: no longer than `mode.time_limit_s`, and than the budget has left."""
        limit_s = self._mode.time_limit_s
        return limit_s if self._deadline is None else min(limit_s, self._deadline - time.monotonic())

    def _timed_out(self, look: _Look, left_s: float) -> bool:
        """Return whether a compile ended with the budget, and not for its own time limit."""
        return look.compiled.status is CompileStatus.timeout and left_s < self._mode.time_limit_s

    def _first_round(self, candidates: Sequence[CompilerOption]) -> Iterator[_Move]:
        """Yield each value of each candidate. A switch has two: where one changes the program, the other is as now.

        Where it changes nothing, it may be what the compiler does unasked: the other positions come last, together, as
        do all values of what is mostly idle on the chip.
        """
        idle = [candidate.settings() for candidate in candidates if candidate.idle]
        others = [options for settings in idle for options in settings[1:]]
        for candidate in (candidate for candidate in candidates if not candidate.idle):
            first, *rest = candidate.settings()
            yield _Move(first)
            effect = self._effects.get(_texts(first))
            if effect is None or not candidate.is_switch:
                yield from map(_Move, rest)
            elif effect is Verdict.same:
                others += rest
        yield from self._together([settings[0] for settings in idle])
        yield from self._together(others)

    def _again(self, candidates: Sequence[CompilerOption]) -> Iterator[_Move]:
        """Yield what a second round tries: what changed nothing, together; each kept option taken back; the others."""
        idle: dict[str, Options] = {}
        active: list[tuple[CompilerOption, list[Options]]] = []
        for candidate in candidates:
            effects = [(options, self._effects.get(_texts(options))) for options in candidate.settings()]
            changed = [options for options, effect in effects if effect in (Verdict.kept, Verdict.no_gain)]
            same = [options for options, effect in effects if effect is Verdict.same]
            if changed:
                active.append((candidate, [] if candidate.is_switch else [*changed, *same]))
            elif same:
                idle[candidate.name] = same[-1]
        yield from self._together(list(idle.values()))
        for candidate, settings in active:
            if kept := [name for name in candidate.names if name in self.tuned.options]:
                yield _Move({name: self._at_start.get(name) for name in kept})
            yield from map(_Move, settings)

    def _together(self, settings: Sequence[Options]) -> Iterator[_Move]:
        """Yield what finds the settings that change the program: all at once and, where that changes it, its halves."""
        if len(settings) < 2:
            yield from map(_Move, settings)
            return
        whole: Options = {}
        for options in settings:
            whole |= options
        yield _Move(whole, of=tuple(settings))
        if self._effects.get(_texts(whole)) is not Verdict.same:
            half = len(settings) // 2
            yield from self._together(settings[:half])
            yield from self._together(settings[half:])

    def _attempt(self, move: _Move, number: int) -> bool:
        """Compile the best so far with a move on top, and keep it where that is shorter; False: no time is left."""
        best, options = self.tuned, move.options
        chosen = {name: v for name, v in (best.options | options).items() if option_text(v) != self._at_start.get(name)}
        if _texts(chosen) in self._tried:
            return True
        left_s = self._left_s()
        if left_s <= 0:
            return False
        what = f"{len(move.of)} options together" if move.of else ", ".join(assignments(options))
        look = self._look(with_options(self._run, chosen), left_s, what)
        if self._timed_out(look, left_s):
            return False
        self._tried.add(_texts(chosen))
        attempt = self._judged(move, look, number, fewer=len(chosen) < len(best.options))
        self.tuned = replace(best, attempts=(*best.attempts, attempt))
        for setting in (options, *(move.of if attempt.verdict is Verdict.same else ())):
            self._effects[_texts(setting)] = attempt.verdict
        if attempt.verdict in (Verdict.kept, Verdict.not_needed):
            self._keep(self._run, look, chosen)
        self._report(self.tuned)
        return True

    def _judged(self, move: _Move, look: _Look, number: int, *, fewer: bool) -> Attempt:
        """Return the attempt with its verdict. `fewer`: it takes back an option that was kept."""
        options, seconds, cached = move.options, look.seconds, look.compiled.cached
        if look.step_s is None:
            verdict = _WITHOUT_STEP.get(look.compiled.status, Verdict.failed)
            return Attempt(options, verdict, number, reason=_why(look.compiled), seconds=seconds, cached=cached)
        change = look.step_s / self.tuned.step_s - 1
        if fewer and change <= 0:
            verdict = Verdict.not_needed
        elif look.digest == self._digest:
            verdict = Verdict.same
        elif move.of:
            verdict = Verdict.changed
        else:
            verdict = Verdict.kept if change <= -LEAST_GAIN else Verdict.no_gain
        return Attempt(options, verdict, number, look.step_s, look.peak, change, None, seconds, cached)

    def _look(self, run: Run, limit_s: float, what: str) -> _Look:
        """Compile a run; its schedule is replayed where no equal module was before."""
        began = time.perf_counter()
        compiled = compile_layout(run, limit_s, self._mode.cache, lambda line: self._progress(f"{what}: {line}"))
        step, step_s = compiled.outcome.step, None
        if step is not None:
            digest = step.module_sha256
            if digest not in self._steps:
                replay, _ = replayed(run, compiled)
                assert replay is not None, "a TPU's compiler leaves a schedule"
                self._steps[digest] = replay.step_s
            step_s = self._steps[digest]
        return _Look(compiled, step_s, time.perf_counter() - began)


def _texts(options: Mapping[str, Any]) -> _Texts:
    return frozenset((name, option_text(value)) for name, value in options.items())


def _why(compiled: Compiled) -> str:
    """Return why a program has no step, as a sentence."""
    short = compiled.outcome.shortage
    if short is not None and short.needed:
        return f"it does not fit, it needs {gib(short.needed)} of {gib(short.usable)} usable."
    return f"{str(compiled.outcome.reason).rstrip('.')}."
