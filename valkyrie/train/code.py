"""Code evaluation: the model completes functions, and the leader compiles them and runs their tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from valkyrie.code_eval.judge import CompletionResult, Limits, is_complete, judge_all, summary
from valkyrie.code_eval.problems import DIFFICULTIES, CodingProblem, languages_of, read_problems
from valkyrie.code_eval.sandbox import SandboxError
from valkyrie.config.modes import CODE_EVAL_FILE
from valkyrie.data.tokenizer import Tokenizer
from valkyrie.paths import DiskError, write_atomic
from valkyrie.records import encode
from valkyrie.train.generate import Completer
from valkyrie.train.program import StepProgram


class CodeEvaluation:
    """Samples completions of coding problems, judges them, and writes them with their results to a folder."""

    def __init__(self, program: StepProgram, tokenizer: Tokenizer) -> None:
        mesh, self.config, self._program = program.mesh, program.run.config.code_eval, program
        assert isinstance(mesh, Mesh)
        self.problems = read_problems(self.config.problems)
        self._device = program.sampling_device
        replicated = NamedSharding(mesh, PartitionSpec())
        self._complete = Completer(
            program.builder,
            tokenizer,
            temperature=self.config.temperature,
            top_k=self.config.top_k,
            replicate=lambda x: x if self._device is not None else jax.lax.with_sharding_constraint(x, replicated),
        )
        self.results: list[CompletionResult] = []
        """Results of the most recent evaluation, one per completion, grouped by problem."""

    def __call__(
        self, parameters: Any, step: int, folder: Path, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[dict[str, float], str]:
        """Evaluate the parameters and write every completion to `code_eval.json` in `folder`.

        `should_stop` can end the sampling of a single process. With several processes, it can only end the tests, on
        the leader.

        Returns the metrics (see `judge.summary`) and a one-line description. The metrics are empty if `should_stop`
        ended the evaluation or the sandbox failed, and always on workers.
        """
        if self._device is not None:
            parameters = jax.device_put(parameters, self._device)
        started_at, problems = time.monotonic(), [p for p in self.problems for _ in range(self.config.samples)]
        texts = self._complete(
            parameters,
            [problem.prompt for problem in problems],
            tokens=self.config.tokens,
            batch=min(self.config.batch, len(problems)),
            seed=self._program.run.config.seed,
            is_complete=lambda number, text: is_complete(problems[number], text),
            should_stop=should_stop if jax.process_count() == 1 else lambda: False,  # the processes sample together
        )
        rates, line = {}, ""
        if jax.process_index() == 0:
            rates, line = self._judge(problems, texts, step, folder, started_at, should_stop)
        if jax.process_count() > 1:  # otherwise the others wait in the next step, where the watchdog would end them
            sync_global_devices("code evaluation")
        return rates, line

    def _judge(
        self,
        problems: list[CodingProblem],
        texts: list[str] | None,
        step: int,
        folder: Path,
        started_at: float,
        should_stop: Callable[[], bool],
    ) -> tuple[dict[str, float], str]:
        """Judge the completions `texts` (None if sampling was stopped) and write the results to `folder`.

        Returns the metrics and a one-line description. `started_at` is the `time.monotonic` at which sampling began.
        """
        sampled_at, config = time.monotonic(), self.config
        limits = Limits(config.time_s, config.memory_mib, config.sandbox)
        try:
            pairs = None if texts is None else list(zip(problems, texts, strict=True))
            results = None if pairs is None else judge_all(pairs, limits, config.workers, should_stop)
        except SandboxError as error:
            return {}, f"step {step}: code was not judged: {error}"
        if results is None:
            return {}, f"step {step}: code was not judged because the training is stopping"
        self.results = results
        durations = {"sampling_s": sampled_at - started_at, "judging_s": time.monotonic() - sampled_at}
        rates = summary(self.problems, self.results)
        write_error = self._write(folder, step, rates, durations)
        return rates, f"step {step}: {describe(rates)}{write_error}"

    def _write(self, folder: Path, step: int, rates: dict[str, float], durations: dict[str, float]) -> str:
        """Write `code_eval.json`. If that fails, returns the error message in parentheses, else an empty string."""
        settings = {key: getattr(self.config, key) for key in ("problems", "samples", "tokens", "temperature", "top_k")}
        values = {"step": step, **settings, **durations, "rates": rates, "completions": encode(self.results)}
        try:
            write_atomic(folder / CODE_EVAL_FILE, json.dumps(values, indent=1) + "\n")
        except DiskError as error:
            return f" ({error})"
        return ""


def describe(rates: dict[str, float]) -> str:
    """Format metrics from `judge.summary`: `cpp: 12.0% of completions compile, 0.0% pass their tests, pass@1 0.0%`."""
    parts = []
    for language in [key.removesuffix("_compile_rate") for key in rates if key.endswith("_compile_rate")]:
        pass_rates = [f"pass@{k} {100 * rates[f'{language}_pass@{k}']:.1f}%" for k in _sample_counts(rates, language)]
        compile_rate, pass_rate = rates[f"{language}_compile_rate"], rates[f"{language}_pass_rate"]
        shares = f"{100 * compile_rate:.1f}% of completions compile, {100 * pass_rate:.1f}% pass their tests"
        parts.append(f"{language}: {shares}, {', '.join(pass_rates)}")
    return "; ".join(parts)


def results_table(results: Sequence[CompletionResult], evaluation: CodeEvaluation) -> Table:
    """Return a table of how many completions compile and pass, with a row for each language and difficulty."""
    table = Table()
    for column in ("language", "difficulty", "problems", "samples", "compile", "pass", "problems solved"):
        table.add_column(column, justify="left" if column in ("language", "difficulty") else "right")
    for language in languages_of(evaluation.problems):
        for difficulty in DIFFICULTIES:
            group_results = [r for r in results if (r.language, r.difficulty) == (language, difficulty)]
            if not group_results:
                continue
            compiled_count, passed_count = sum(r.compiled for r in group_results), sum(r.passed for r in group_results)
            problems, solved_problems = (
                {r.problem for r in group_results},
                {r.problem for r in group_results if r.passed},
            )
            counts = (len(problems), len(group_results), compiled_count, passed_count, len(solved_problems))
            table.add_row(language, difficulty, *map(str, counts))
    return table


def _sample_counts(rates: dict[str, float], language: str) -> list[int]:
    return sorted(int(key.rpartition("@")[2]) for key in rates if key.startswith(f"{language}_pass@"))
