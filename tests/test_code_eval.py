"""Tests of evaluation on coding problems: reading them, cutting and judging completions, pass@k, and the mode."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from runs import ONE_DEVICE_ARGUMENTS, needs_sandbox, run_train, tiny_arguments, trained_run, training_records
from test_folder import make_run
from valkyrie.code_eval import config as config_module
from valkyrie.code_eval import languages
from valkyrie.code_eval.config import CodeEvalConfig, evaluation_problems
from valkyrie.code_eval.judge import (
    CompletionResult,
    Limits,
    is_complete,
    judge,
    judge_all,
    pass_at_k,
    summary,
    truncate_completion,
)
from valkyrie.code_eval.languages import LANGUAGES, closing_brace, find_compiler
from valkyrie.code_eval.problems import SHIPPED_SETS, CodingProblem, read_problems
from valkyrie.code_eval.sandbox import SandboxError
from valkyrie.runs.tracking import read_metrics

SOLUTIONS_FOLDER = Path(__file__).parent / "goldens"
# uv cannot install a C++ compiler. Without one, C++ problems are refused, which is tested on every machine.
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
CODE_EVAL_OVERRIDES = ("code_eval.problems=python", "code_eval.samples=2", "code_eval.tokens=6", "code_eval.batch=4")
ADD_PROBLEM = {
    "name": "add",
    "language": "python",
    "difficulty": "easy",
    "prompt": "def f():\n",
    "tests": "assert f()\n",
}


@lru_cache
def solutions(name: str) -> dict[str, str]:
    lines = (SOLUTIONS_FOLDER / f"{name}_solutions.jsonl").read_text().splitlines()
    return {values["name"]: values["completion"] for values in map(json.loads, lines)}


def test_the_packaged_problems_are_valid() -> None:
    cpp = read_problems("cpp")
    count = [sum(problem.difficulty == difficulty for problem in cpp) for difficulty in ("easy", "medium", "hard")]
    assert count == [7, 6, 4] and {problem.language for problem in cpp} == {"cpp"}
    assert len(read_problems("python")) >= 5
    for name in SHIPPED_SETS:
        assert solutions(name).keys() == {problem.name for problem in read_problems(name)}


def test_a_line_ends_only_at_a_line_break(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    problem = ADD_PROBLEM | {"prompt": "# \u2028\x85\ndef f():\n"}
    file.write_text(json.dumps(problem, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert [read_problem.prompt for read_problem in read_problems(str(file))] == [problem["prompt"]]


@needs_sandbox
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_SETS)
def test_every_problem_can_be_solved_and_a_wrong_answer_fails(name: str) -> None:
    problems = read_problems(name)
    more = {"cpp": "\nint later() { return 1; }", "python": "\ndef later():\n    return 1"}[name]
    solution_results = judge_all(
        [(problem, solutions(name)[problem.name] + more) for problem in problems], Limits(30.0)
    )
    assert solution_results is not None and [result.reason for result in solution_results] == ["passed"] * len(problems)
    empty = {"cpp": "    return {};\n}\n", "python": "    return None\n"}[name]
    wrong_results = judge_all([(problem, empty) for problem in problems], Limits(30.0)) or []
    assert all(result.compiled and not result.passed for result in wrong_results)
    assert all(re.search(r"status \d", result.reason) for result in wrong_results)


@needs_sandbox
@needs_compiler
def test_a_completion_is_judged_by_compiling_and_by_passing() -> None:
    (problem, *_) = read_problems("cpp")
    results = [judge(problem, text) for text in ("    return a + b;\n}", "return a - b; }", "return a +; }", "  \n")]
    assert [(result.compiled, result.passed) for result in results] == [
        (True, True),
        (True, False),
        *[(False,) * 2] * 2,
    ]
    assert results[1].reason.endswith("status 1")
    assert "program.cpp:3:" in results[2].reason and "error" in results[2].reason
    assert results[3].reason == "the completion is empty"
    slow = judge(problem, "    for (volatile int i = 0;; i = i + 1) {}\n}", Limits(1.0))
    assert slow.compiled and not slow.passed and " 1 s" in slow.reason


@needs_sandbox
@pytest.mark.parametrize(
    "completion",
    [
        "    import os\n    print(open('program.py').read(), flush=True)\n    os._exit(0)\n",
        "    import os, sys\n    print(sys._getframe(1).f_code.co_consts, flush=True)\n    os._exit(0)\n",
        "    import gc, os, re\n    told = re.findall('[0-9a-f]{32}', repr(gc.get_objects()))\n"
        "    print(*told[-1:], flush=True)\n    os._exit(0)\n",
        # computes the word as the program does, from the code that called it
        "    import os, sys\n    texts = [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, str)]\n"
        "    left, right = (int(text) for text in texts if text.isdigit())\n"
        "    print(f'{left ^ right:032x}', flush=True)\n    os._exit(0)\n",
    ],
)
def test_a_completion_cannot_find_the_secret_that_proves_its_tests(completion: str) -> None:
    result = judge(CodingProblem(**ADD_PROBLEM), completion, Limits(30.0))
    assert result.compiled and not result.passed


@needs_sandbox
@needs_compiler
def test_a_completion_of_cpp_cannot_read_its_source() -> None:
    prompt = "#include <cstdio>\n#include <cstdlib>\nint f() {\n"
    problem = CodingProblem("f", "cpp", "easy", prompt, "int main() { return f() == 1 ? 0 : 1; }")
    read = '  FILE *source = std::fopen("program.cpp", "r");\n  std::exit(source ? 0 : 7);\n}\n'
    result = judge(problem, read, Limits(30.0))
    assert result.compiled and not result.passed and "7" in result.reason


@needs_sandbox
def test_a_completion_with_unusual_text_fails_without_an_error() -> None:
    (problem, *_) = read_problems("python")
    for text in ("    return '\x00'", "    return '\ud800'", "    \N{PILE OF POO}", "    return (" * 300):
        assert not judge(problem, text).passed


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("return 1; }\nint g();", "\nint g();"),
        ("if (a) { b(); } }x", "x"),
        ('s = "}"; c = \'}\'; t = "\\"}"; }x', "x"),
        ("// }\n /* } */ }x", "x"),
        ('r = R"(} ")" } )"; }x', ' )"; }x'),
        ('r = R"a(} )" } )a"; }x', "x"),
        ("n = 1'000'000; }x", "x"),
        ("c = '\\''; }x", "x"),
    ],
)
def test_a_function_ends_at_its_closing_brace(text: str, rest: str) -> None:
    end = closing_brace(text)
    assert end is not None and text[end:] == rest


@pytest.mark.parametrize("text", ["return 1;", "if (a) { }", '"}', "/* }", "// }", 'R"(}'])
def test_an_unclosed_function_has_no_end(text: str) -> None:
    assert closing_brace(text) is None


def test_a_python_function_ends_with_its_indentation() -> None:
    problem = CodingProblem(**ADD_PROBLEM)
    body = "    return 1\n\n    # and\n"
    assert truncate_completion(problem, f"{body}print(2)\n    3") == body
    assert (
        truncate_completion(problem, "print(1)") == ""
        and not is_complete(problem, "    return 1\n\n")
        and is_complete(problem, "  1\nx")
    )


def test_pass_at_k_is_the_fraction_of_subsets_with_a_passing_sample() -> None:
    for samples, k in ((4, 1), (5, 2), (6, 6)):
        for passed in range(samples + 1):
            choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
            assert math.isclose(pass_at_k(samples, passed, k), sum(map(any, choices)) / len(choices))
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - math.comb(197, 100) / math.comb(200, 100))
    with pytest.raises(ValueError, match="pass@5 needs"):
        pass_at_k(4, 1, 5)


def test_rates_count_samples_and_pass_at_k_counts_problems() -> None:
    problems = [CodingProblem(name, "cpp", difficulty, "{", "") for name, difficulty in (("a", "easy"), ("b", "hard"))]
    outcomes = {"a": [(True, True), (True, False)], "b": [(False, False), (True, False)]}
    results = [
        CompletionResult(problem.name, "cpp", problem.difficulty, "", compiled, passed, "", 0.0)
        for problem in problems
        for compiled, passed in outcomes[problem.name]
    ]
    rates = {"compile_rate": 0.75, "pass_rate": 0.25, "pass_rate_easy": 0.5, "pass_rate_hard": 0.0}
    assert summary(problems, results) == {f"cpp_{k}": v for k, v in (rates | {"pass@1": 0.25, "pass@2": 0.5}).items()}


@needs_sandbox
def test_judging_stops_on_request() -> None:
    problem = CodingProblem(**ADD_PROBLEM)
    calls: list[None] = []
    assert (
        judge_all([(problem, "    return 1\n")] * 6, Limits(), 1, lambda: calls.append(None) or len(calls) > 2) is None
    )
    assert len(calls) == 6


INVALID_PROBLEMS = {
    "no tests": ({"tests": ""}, "no tests"),
    "no tests at all": ({"tests": None}, "tests must be"),
    "no prompt": ({"prompt": ...}, "prompt is missing"),
    "two keys": ({"name": ..., "language": ...}, "name, language are"),
    "language": ({"language": "rust"}, "language rust"),
    "difficulty": ({"difficulty": "x"}, "difficulty x"),
    "name": ({"name": " "}, "name is empty"),
    "prompt": ({"prompt": "def f():"}, "a line break"),
    "main": ({"language": "cpp"}, "`int main() {...}`"),
    "brace": ({"language": "cpp", "tests": "int main() { return 0; }"}, "the { of"),
}


@pytest.mark.parametrize(("change", "message"), INVALID_PROBLEMS.values(), ids=INVALID_PROBLEMS)
def test_an_invalid_problem_is_refused_with_its_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    values = {key: value for key, value in (ADD_PROBLEM | change).items() if value is not ...}
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(values) + "\n\n")
    (problem,) = evaluation_problems(CodeEvalConfig(problems=str(path)))
    assert str(problem).startswith(f"code_eval.problems={path}: line 1: ") and message in str(problem)


def test_all_invalid_lines_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join([json.dumps(ADD_PROBLEM), "{", json.dumps(ADD_PROBLEM), "[]", *["{}"] * 4]))
    with pytest.raises(ValueError) as error:
        read_problems(str(path))
    message = str(error.value)
    for phrase in ("line 2: not", "the name add", "line 4: not", "difficulty, prompt are", "2 more."):
        assert phrase in message
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"own\.jsonl is empty"):
        read_problems(str(path))


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ("code_eval_every=0", "code_eval_every=0:"),
        ("code_eval.samples=0", "code_eval.samples=0:"),
        ("code_eval.workers=0", "code_eval.workers=0:"),
        ("code_eval.temperature=-1", "code_eval.temperature=-1:"),
        ("code_eval.temperature=0", "code_eval.temperature=0: all 4"),
        ("code_eval.time_s=0", "code_eval.time_s=0:"),
        ("code_eval.memory_mib=1", "code_eval.memory_mib=1:"),
        ("code_eval_every=5 model=trm_tiny data=sudoku_4x4", "code_eval_every=5 "),
        ("code_eval_every=5 code_eval.problems=mine.jsonl", "code_eval.problems=mine.jsonl:"),
    ],
)
def test_invalid_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], change: str, start: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_train(*ONE_DEVICE_ARGUMENTS, *change.split()) == 2
    assert capfd.readouterr().err.startswith(f"valkyrie-train: {start}")
    assert not list(tmp_path.iterdir())


def refusal_message(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """Run `valkyrie-train` and return its error message. Asserts that it is refused before it loads JAX."""
    script = "import sys; from valkyrie.cli.train import main\ntry: main()\nfinally: assert 'jax' not in sys.modules"
    words = [sys.executable, "-c", script, *ONE_DEVICE_ARGUMENTS, f"runs={tmp_path / 'runs'}", *arguments]
    result = subprocess.run(words, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 2 and not (tmp_path / "runs").exists(), result.stderr
    return result.stderr


def test_a_missing_compiler_is_refused_before_jax_loads(tmp_path: Path) -> None:
    message = refusal_message(tmp_path, "code_eval_every=5", PATH=str(tmp_path))
    assert message.startswith("valkyrie-train: code_eval.problems=cpp:") and "apt install g++" in message


def test_a_missing_sandbox_is_refused_before_jax_loads_unless_it_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal_message(tmp_path, "code_eval_every=5", "code_eval.problems=python", PATH=str(tmp_path))
    assert "unshare, setpriv," in message and message.endswith(" code_eval.sandbox=false.\n")
    monkeypatch.setattr("valkyrie.code_eval.sandbox.sandbox_problem", lambda: "no namespaces")
    assert evaluation_problems(CodeEvalConfig(problems="python", sandbox=False)) == []
    assert [p.key for p in evaluation_problems(CodeEvalConfig(problems="python"))] == ["code_eval.sandbox"]


def test_a_compiler_outside_the_sandbox_counts_as_missing() -> None:
    which = {"g++": "/home/me/bin/g++", "clang++": None, "c++": None}.get
    assert languages.find_compiler.__wrapped__(True, which) is None
    assert languages.find_compiler.__wrapped__(False, which) == "/home/me/bin/g++"


def test_the_path_of_a_users_problems_is_saved_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CodeEvalConfig(problems="own.jsonl").with_absolute_path().problems == str(tmp_path / "own.jsonl")
    assert CodeEvalConfig().with_absolute_path() == CodeEvalConfig() and LANGUAGES.keys() == {"cpp", "python"}


@pytest.mark.slow
@needs_sandbox
def test_training_and_mode_write_every_completion_and_the_rates(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_train(*tiny_arguments(tmp_path, "steps=4", "code_eval_every=2", *CODE_EVAL_OVERRIDES)) == 0
    out, folder = capfd.readouterr().out, tmp_path / "run"
    rates = [r for r in read_metrics(folder / "metrics.jsonl") if "python_pass_rate" in r]
    assert [r["step"] for r in rates] == [2, 4] and all(0 <= r["python_compile_rate"] <= 1 for r in rates)
    assert "step 2: python: " in out and "step 4: python: " in out
    last = read_metrics(folder / "metrics.jsonl")[-1]["summary"]
    assert last["python_pass@2"] == rates[-1]["python_pass@2"]
    training_record = json.loads((folder / "code_eval.json").read_text())

    assert run_train("mode=code_eval", f"resume={folder}") == 0
    out = capfd.readouterr().out
    mode_record = json.loads((folder / "code_eval.json").read_text())
    names = [problem.name for problem in read_problems("python") for _ in range(2)]
    assert [completion["problem"] for completion in mode_record["completions"]] == names
    assert mode_record["step"] == 4 and mode_record["completions"] == [
        completion | {"seconds": mode_completion["seconds"]}
        for completion, mode_completion in zip(training_record["completions"], mode_record["completions"], strict=True)
    ], "the same parameters and seed write the same"
    assert "step 4: python: " in out and "every completion: " in out and "difficulty" in out


@needs_sandbox
@pytest.mark.slow
def test_code_evaluation_does_not_change_the_loss(tmp_path: Path) -> None:
    plain = training_records(trained_run())
    assert run_train(*tiny_arguments(tmp_path, "steps=6", "code_eval_every=3", *CODE_EVAL_OVERRIDES)) == 0
    evaluated = training_records(tmp_path / "run")
    assert {step: r["loss"] for step, r in evaluated.items()} == {step: r["loss"] for step, r in plain.items()}


@pytest.mark.slow
def test_a_sandbox_failure_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise SandboxError("the sandbox could not be created: no namespaces left")

    monkeypatch.setattr("valkyrie.train.code.judge_all", fail)
    monkeypatch.setattr(config_module, "evaluation_problems", lambda config: [])
    assert run_train(*tiny_arguments(tmp_path, "steps=2", "code_eval_every=1", *CODE_EVAL_OVERRIDES)) == 0
    assert "no namespaces left" in capfd.readouterr().out


def test_the_mode_needs_a_run_and_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_train("mode=code_eval", f"runs={tmp_path}") == 2
    assert "resume=latest: no run in" in capfd.readouterr().err
    folder = make_run(tmp_path, "run")
    assert run_train("mode=code_eval", f"resume={folder}", "code_eval.problems=none.jsonl") == 2
    assert "code_eval.problems=none.jsonl:" in capfd.readouterr().err
    assert not (folder / "code_eval.json").exists()
