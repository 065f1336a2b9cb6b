"""Reads coding problems from JSON lines: prompts that begin a function, with tests. Does not import JAX."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from valkyrie.code_eval.languages import LANGUAGES

DIFFICULTIES = ("easy", "medium", "hard")
SHIPPED_SETS = ("cpp", "python")
"""The problem sets that ship with the package."""


@dataclass(frozen=True)
class CodingProblem:
    """A problem: the model completes the function that begins in `prompt`.

    Args:
        name: Unique name of the problem.
        language: `cpp` or `python`.
        difficulty: `easy`, `medium` or `hard`.
        prompt: Beginning of the function, with a comment that describes it.
        tests: Code after the completion. In C++ it has a `main` that returns 0 on success, in Python it raises on
            failure.
    """

    name: str
    language: str
    difficulty: str
    prompt: str
    tests: str


def read_problems(name: str) -> tuple[CodingProblem, ...]:
    """Return the problems in a .jsonl file. `name` is its path, or `cpp` or `python` for a set in this package.

    Raises ValueError if the file cannot be read, has no problems, or has invalid lines. The message lists up to five.
    """
    path = Path(__file__).parent / "problems" / f"{name}.jsonl" if name in SHIPPED_SETS else Path(name).expanduser()
    if not path.is_file():
        sets = ", ".join(SHIPPED_SETS)
        raise ValueError(f"code_eval.problems={name}: there is no such file. Use {sets}, or the path of a .jsonl file.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON strings may have other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"code_eval.problems={name} cannot be read as UTF-8 text ({error}).") from error
    numbered_problems = [(number, _parse_problem(line)) for number, line in enumerate(lines, 1) if line.strip()]
    errors = [
        (number, problem_or_error)
        for number, problem_or_error in numbered_problems
        if isinstance(problem_or_error, str)
    ]
    problems = tuple(problem for _, problem in numbered_problems if isinstance(problem, CodingProblem))
    numbers = {problem.name: number for number, problem in numbered_problems if isinstance(problem, CodingProblem)}
    repeated_names = [name for name, count in Counter(problem.name for problem in problems).items() if count > 1]
    errors += [(numbers[name], f"the name {name} is not unique") for name in repeated_names]
    if errors:
        errors_text = "; ".join(f"line {number}: {problem_or_error}" for number, problem_or_error in sorted(errors)[:5])
        more_text = f"; and {len(errors) - 5} more" if len(errors) > 5 else ""
        raise ValueError(f"code_eval.problems={name}: {errors_text}{more_text}.")
    if not problems:
        raise ValueError(f"code_eval.problems={name} is empty. Write one problem per line.")
    return problems


def languages_of(problems: Sequence[CodingProblem]) -> list[str]:
    """Return the languages of the problems, in the order of `LANGUAGES`."""
    return [name for name in LANGUAGES if any(problem.language == name for problem in problems)]


def _parse_problem(line: str) -> CodingProblem | str:
    """Parse a line of JSON. Returns the problem, or an error message if the line is invalid."""
    try:
        values = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    keys = [field.name for field in fields(CodingProblem)]
    if not isinstance(values, dict):
        return f"not an object with {', '.join(keys)}"
    if missing_keys := [key for key in keys if key not in values and key != "tests"]:
        return f"{', '.join(missing_keys)} {'is' if len(missing_keys) == 1 else 'are'} missing"
    invalid_keys = [key for key in keys if key in values and not isinstance(values[key], str)]
    if invalid_keys:
        return f"{', '.join(invalid_keys)} must be text"
    problem_name = str(values["name"]).strip()
    if not problem_name:
        return "name is empty"
    if not str(values.get("tests", "")).strip():
        return f"the problem {problem_name} has no tests"
    if values["language"] not in LANGUAGES:
        return f"language {values['language']} of {problem_name} is not known: use {', '.join(LANGUAGES)}"
    if values["difficulty"] not in DIFFICULTIES:
        return f"difficulty {values['difficulty']} of {problem_name} is not known: use {', '.join(DIFFICULTIES)}"
    problem = CodingProblem(**{key: values[key] for key in keys})
    error = LANGUAGES[problem.language].find_error(problem.prompt, problem.tests)
    return f"{error} ({problem_name})" if error else problem
