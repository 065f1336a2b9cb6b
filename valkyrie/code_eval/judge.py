"""Judges completions: compiles them and runs their tests in a sandbox, several at a time, and computes pass rates."""

from __future__ import annotations

import math
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from valkyrie.code_eval.languages import LANGUAGES, secret_line
from valkyrie.code_eval.problems import DIFFICULTIES, CodingProblem, languages_of
from valkyrie.code_eval.sandbox import SandboxStep, SandboxStepResult, run_steps

COMPILE_S, COMPILE_MIB = 30.0, 1536
"""Time and memory limits of a compiler, in seconds and MiB: enough for large standard headers on a busy core."""
PASS_AT = (1, 10, 100)
"""Values of k for which pass@k is reported, if every problem has at least k samples.

pass@n is also reported, where n is the smallest number of samples of a problem."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Args:
        time_s: Time limit in seconds.
        memory_mib: Memory limit of each process, in MiB.
        isolated: Whether the program runs in a sandbox.
    """

    time_s: float = 5.0
    memory_mib: int = 512
    isolated: bool = True


@dataclass(frozen=True)
class CompletionResult:
    """The result of one completion.

    Args:
        problem: Name of the problem.
        language: `cpp` or `python`.
        difficulty: `easy`, `medium` or `hard`.
        completion: The completion up to the end of the function.
        compiled: Whether the program compiled.
        passed: Whether all tests passed.
        reason: `passed`, or why the completion did not pass.
        seconds: Run time of the tests, or of the compiler if it failed.
    """

    problem: str
    language: str
    difficulty: str
    completion: str
    compiled: bool
    passed: bool
    reason: str
    seconds: float


def truncate_completion(problem: CodingProblem, text: str) -> str:
    """Return a completion up to the end of the function, or all of it if the function does not end."""
    return text[: LANGUAGES[problem.language].function_end(text)]


def is_complete(problem: CodingProblem, text: str) -> bool:
    """Return whether a completion contains the end of the function."""
    return LANGUAGES[problem.language].function_end(text) is not None


def judge(problem: CodingProblem, text: str, limits: Limits | None = None) -> CompletionResult:
    """Compile and test a completion. Raises SandboxError if no sandbox could be created.

    A completion that passes is run again with tests that always fail, and is rejected if it passes those too. This
    catches programs that circumvent their tests, which models learn to write under reinforcement learning.
    """
    limits, completion = limits or Limits(), truncate_completion(problem, text)
    identity = (problem.name, problem.language, problem.difficulty, completion)
    if not completion.strip():
        return CompletionResult(*identity, compiled=False, passed=False, reason="the completion is empty", seconds=0.0)
    passed, step_results = _run(problem, completion, limits)
    reason = "passed" if passed else _failure_reason(step_results, limits)
    if passed and _run(problem, completion, limits, add_failing_test=True)[0]:
        passed, reason = False, "passes tests that always fail"
    return CompletionResult(*identity, step_results[0].ok, passed, reason, round(step_results[-1].seconds, 4))


def _run(
    problem: CodingProblem, completion: str, limits: Limits, *, add_failing_test: bool = False
) -> tuple[bool, list[SandboxStepResult]]:
    """Compile and run a completion with its tests, which always fail if `add_failing_test`.

    Returns whether the tests pass, and the results of the steps: compiling and, if it compiles, running.
    """
    secret = secrets.randbits(128)
    program = LANGUAGES[problem.language].build(
        problem.prompt,
        completion,
        problem.tests,
        secret=secret,
        isolated=limits.isolated,
        add_failing_test=add_failing_test,
    )
    steps = [
        SandboxStep(program.compile, COMPILE_S, COMPILE_MIB, processes=32),
        SandboxStep(program.run, limits.time_s, limits.memory_mib),
    ]
    step_results = run_steps(program.files, steps, isolated=limits.isolated)
    prints_secret = step_results[-1].output.rstrip("\n").endswith(secret_line(secret))
    return all(step.ok for step in step_results) and prints_secret, step_results


def judge_all(
    pairs: Sequence[tuple[CodingProblem, str]],
    limits: Limits,
    workers: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[CompletionResult] | None:
    """Judge completions, given as (problem, text), `workers` at a time (None: one per CPU core).

    Returns the results in the order of `pairs`. Calls `should_stop` before each completion, and skips the completion if
    the call returns true. If any completion was skipped, returns None. Raises SandboxError if no sandbox could be
    created.
    """

    def judge_pair(pair: tuple[CodingProblem, str]) -> CompletionResult | None:
        return None if should_stop() else judge(*pair, limits)

    count = workers or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(count, thread_name_prefix="judge")
    try:
        results = list(pool.map(judge_pair, pairs))
    finally:
        pool.shutdown(cancel_futures=True)
    finished_results = [result for result in results if result is not None]
    return finished_results if len(finished_results) == len(results) else None


def pass_at_k(sample_count: int, pass_count: int, k: int) -> float:
    """Estimate the probability that at least one of `k` samples passes, given that `pass_count` of `sample_count` did.

    The unbiased estimator of the Codex paper (arXiv 2107.03374, equation 1): 1 - C(n-c, k) / C(n, k), where n is
    `sample_count` and c is `pass_count`. Raises ValueError unless 1 <= k <= sample_count.
    """
    if not 1 <= k <= sample_count:
        raise ValueError(f"pass@{k} needs 1 <= k <= {sample_count} samples.")
    return 1.0 - math.comb(sample_count - pass_count, k) / math.comb(sample_count, k)


def summary(problems: Sequence[CodingProblem], results: Sequence[CompletionResult]) -> dict[str, float]:
    """Return the metrics of each language: `cpp_compile_rate`, `cpp_pass_rate`, `cpp_pass_rate_easy`, `cpp_pass@1`, ...

    A rate is the share of the language's samples (of one difficulty, if it is named) that compile or pass, from 0 to 1.
    `pass@k` (see `PASS_AT`) is averaged over problems.
    """
    rates: dict[str, float] = {}
    for language in languages_of(problems):
        language_results = [result for result in results if result.language == language]
        rates[f"{language}_compile_rate"] = _share([result.compiled for result in language_results])
        rates[f"{language}_pass_rate"] = _share([result.passed for result in language_results])
        for difficulty in DIFFICULTIES:
            if passed_results := [result.passed for result in language_results if result.difficulty == difficulty]:
                rates[f"{language}_pass_rate_{difficulty}"] = _share(passed_results)
        passed_by_problem = [
            [r.passed for r in language_results if r.problem == p.name] for p in problems if p.language == language
        ]
        sample_count = min(map(len, passed_by_problem))
        for k in sorted({k for k in PASS_AT if k <= sample_count} | {sample_count}):
            rates[f"{language}_pass@{k}"] = _share(
                [pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in passed_by_problem]
            )
    return rates


def _share(values: Sequence[float | bool]) -> float:
    return sum(values) / len(values)


def _failure_reason(step_results: Sequence[SandboxStepResult], limits: Limits) -> str:
    """Return a short reason why a completion did not pass."""
    last_result = step_results[-1]
    program = "the compiler" if len(step_results) == 1 else "the program"
    if last_result.limit == "time":
        return f"{program} took longer than {COMPILE_S if len(step_results) == 1 else limits.time_s:g} s"
    if last_result.limit == "output":
        return f"{program} printed too much"
    if len(step_results) == 1:
        lines = [
            line for line in last_result.output.splitlines() if "error" in line.lower()
        ] or last_result.output.splitlines()
        return f"does not compile: {lines[0].strip()[:200] if lines else f'status {last_result.status}'}"
    if last_result.status == 0:
        return "the program exited before its tests finished"
    if last_result.status > 128:
        signal_names = {member.value: member.name for member in signal.Signals}
        number = last_result.status - 128
        return f"the program was killed by {signal_names.get(number, f'signal {number}')}"
    output_lines = last_result.output.strip().splitlines()
    return f"the tests failed with status {last_result.status}{f': {output_lines[-1][:200]}' if output_lines else ''}"
