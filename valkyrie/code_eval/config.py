"""Configuration of the code evaluation. It imports little, so that it is checked before anything else loads."""

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
        samples: completions per problem.
        tokens: maximum length of a completion, in tokens.
        batch: completions sampled at a time.
        temperature: sampling temperature.
        top_k: sample from the `top_k` most likely tokens (null: from all).
        time_s: time limit for the tests of a completion, in seconds.
        memory_mib: memory limit of each process, in MiB.
        workers: completions judged at a time (null: one per CPU core).
        sandbox: false runs generated code as this user, with access to its files and network.
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
        """Return every problem with these settings and with `code_eval_every`."""
        problems = check_range("code_eval_every", every, least=1, otherwise="null for none during training")
        for name in ("samples", "tokens", "batch", "top_k", "workers"):
            otherwise = "null" if name in ("top_k", "workers") else ""
            problems += check_range(f"code_eval.{name}", getattr(self, name), least=1, otherwise=otherwise)
        problems += check_range("code_eval.temperature", self.temperature, least=0)
        if self.temperature == 0 and self.samples > 1:
            text = f"code_eval.temperature=0: all {self.samples} samples would be the same. Use code_eval.samples=1."
            problems.append(Problem(ProblemCode.conflict, "code_eval.temperature", 0.0, text))
        problems += check_range("code_eval.time_s", self.time_s, above=0)
        problems += check_range("code_eval.memory_mib", self.memory_mib, least=16)
        return problems + bucket_problems("code_eval.problems", self.problems)

    def anywhere(self) -> CodeEvalConfig:
        """Return this configuration with an absolute path, which means the same in every directory."""
        is_file = self.problems.endswith(".jsonl") or "/" in self.problems
        path = os.path.abspath(os.path.expanduser(self.problems))
        return replace(self, problems=path) if is_file else self


def judge_problems(config: CodeEvalConfig) -> list[Problem]:
    """Return why this machine cannot judge code: malformed problems, no compiler or no sandbox. Starts a program."""
    from valkyrie.code_eval.languages import LANGUAGES
    from valkyrie.code_eval.problems import languages_of, read_problems
    from valkyrie.code_eval.sandbox import sandbox_problem

    try:
        languages = languages_of(read_problems(config.problems))
    except ValueError as error:
        return [Problem(ProblemCode.malformed, "code_eval.problems", config.problems, str(error))]
    missing = [LANGUAGES[language].missing(config.sandbox) for language in languages]
    key, value = "code_eval.problems", config.problems
    problems = [Problem(ProblemCode.missing, key, value, f"{key}={value}: {why}.") for why in missing if why]
    if config.sandbox and not problems and (why := sandbox_problem()):
        text = (
            f"code_eval.sandbox=true: there is no sandbox here to run the model's programs in ({why}). If they may "
            "read your files and use the network, such as in a separate container, use code_eval.sandbox=false."
        )
        problems.append(Problem(ProblemCode.missing, "code_eval.sandbox", True, text))
    return problems
