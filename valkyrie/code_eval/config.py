"""Settings of the code evaluation, and checks whether this machine can run it. Imports no heavy packages."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from valkyrie.buckets import bucket_problems
from valkyrie.problems import Problem, ProblemCode, check_range


@dataclass
class CodeEvalConfig:
    """Settings of `mode=code_eval` and `code_eval_every`.

    Args:
        problems: `cpp` or `python` for the problems in the package, or the path of a .jsonl.
        samples: Completions per problem.
        tokens: Maximum length of a completion, in tokens.
        batch: Completions sampled at a time.
        temperature: Sampling temperature.
        top_k: Sample from the `top_k` most likely tokens (null: from all).
        time_s: Time limit for the tests of a completion, in seconds.
        memory_mib: Memory limit of each process, in MiB.
        workers: Completions judged at a time (null: one per CPU core).
        sandbox: False runs generated code as this user, with access to its files and network.
    """

    problems: str = "cpp"
    samples: int = 4
    tokens: int = 256
    batch: int = 32
    temperature: float = 0.8
    top_k: int | None = 40
    time_s: float = 5.0
    memory_mib: int = 512
    workers: int | None = None
    sandbox: bool = True

    def refusals(self, every: int | None) -> list[Problem]:
        """Return the problems of these settings, and of `every`, the value of `code_eval_every` (steps, or None)."""
        problems = check_range("code_eval_every", every, least=1, otherwise="null for none during training")
        for name in ("samples", "tokens", "batch", "top_k", "workers"):
            otherwise = "null" if name in ("top_k", "workers") else ""
            problems += check_range(f"code_eval.{name}", getattr(self, name), least=1, otherwise=otherwise)
        problems += check_range("code_eval.temperature", self.temperature, least=0)
        if self.temperature == 0 and self.samples > 1:
            text = (
                f"code_eval.temperature=0: all {self.samples} samples of a problem would be the same. "
                "Use code_eval.samples=1."
            )
            problems.append(Problem(ProblemCode.conflict, "code_eval.temperature", 0.0, text))
        problems += check_range("code_eval.time_s", self.time_s, above=0)
        problems += check_range("code_eval.memory_mib", self.memory_mib, least=16)
        return problems + bucket_problems("code_eval.problems", self.problems)

    def with_absolute_path(self) -> CodeEvalConfig:
        """Return these settings, valid in any directory: if `problems` is a path, it is made absolute."""
        is_file = self.problems.endswith(".jsonl") or "/" in self.problems
        path = os.path.abspath(os.path.expanduser(self.problems))
        return replace(self, problems=path) if is_file else self


def evaluation_problems(config: CodeEvalConfig) -> list[Problem]:
    """Return the problems that prevent an evaluation on this machine: invalid problem file, no compiler, no sandbox.

    Unless `config.sandbox` is false, starts a sandbox to test that it works.
    """
    from valkyrie.code_eval.languages import LANGUAGES
    from valkyrie.code_eval.problems import languages_of, read_problems
    from valkyrie.code_eval.sandbox import sandbox_problem

    try:
        languages = languages_of(read_problems(config.problems))
    except ValueError as error:
        return [Problem(ProblemCode.malformed, "code_eval.problems", config.problems, str(error))]
    reasons = [LANGUAGES[language].find_machine_error(config.sandbox) for language in languages]
    key, value = "code_eval.problems", config.problems
    problems = [Problem(ProblemCode.missing, key, value, f"{key}={value}: {reason}.") for reason in reasons if reason]
    if config.sandbox and not problems and (reason := sandbox_problem()):
        text = (
            f"code_eval.sandbox=true: {reason}. To run the model's programs without a sandbox, with access to "
            "your files and the network, for example in a container, use code_eval.sandbox=false."
        )
        problems.append(Problem(ProblemCode.missing, "code_eval.sandbox", True, text))
    return problems
