"""What there is to know of a programming language to judge a function in it: where it ends, how it is built and run."""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from pathlib import Path

from valkyrie.code_eval.sandbox import SandboxStep, python_inside

COMPILE_S, COMPILE_MIB = 30.0, 1536
"""Seconds and MiB that a compiler may take: a `#include` of much of the standard library on a busy core."""
COMPILERS = ("g++", "clang++", "c++")
"""The C++ compilers that are looked for, in this order."""
_MAIN = re.compile(r"\bint\s+main\s*\([^)]*\)\s*\{")
_SEEN = ("/usr", "/bin")


class JudgeLanguage(ABC):
    """A programming language that problems may be in."""

    @abstractmethod
    def end(self, completion: str) -> int | None:
        """Return where the function ends that a prompt begins and a completion continues; None where it does not."""

    @abstractmethod
    def trouble(self, prompt: str, tests: str) -> str | None:
        """Return why prompt and tests cannot be a problem; None where they can."""

    @abstractmethod
    def missing(self, isolated: bool) -> str | None:
        """Return what this machine lacks to judge programs, and what to do; None where it lacks nothing."""

    @abstractmethod
    def build(
        self, prompt: str, completion: str, tests: str, word: str, time_s: float, memory_mib: int, isolated: bool
    ) -> tuple[dict[str, str], list[SandboxStep]]:
        """Return the files of a program and its two steps: one that compiles, one that runs.

        A run whose tests come to their end well prints `word` as its last line: a program that ends itself before
        them does not.
        """


class Cpp(JudgeLanguage):
    """C++17, by the first compiler that is found: g++, clang++ or c++."""

    def end(self, completion: str) -> int | None:
        """Return the place behind the brace that closes the function."""
        return closing_brace(completion)

    def trouble(self, prompt: str, tests: str) -> str | None:
        """Return why there is no one `main`, or no open function."""
        mains = list(_MAIN.finditer(tests))
        if len(mains) != 1 or closing_brace(tests[mains[0].end() :]) is None:
            return "tests of C++ must have one `int main() {...}`, which returns 0 where all is right"
        return None if prompt.rstrip().endswith("{") else "the prompt of C++ must end with the { of its function"

    def missing(self, isolated: bool) -> str | None:
        """Return that there is no compiler."""
        if compiler(isolated) is not None:
            return None
        where = f" (in {' or '.join(_SEEN)}, which a sandbox shows)" if isolated else ""
        return f"no C++ compiler was found{where}: {', '.join(COMPILERS)}. Install one: apt install g++"

    def build(
        self, prompt: str, completion: str, tests: str, word: str, time_s: float, memory_mib: int, isolated: bool
    ) -> tuple[dict[str, str], list[SandboxStep]]:
        """Return the program, whose `main` calls that of the tests, and prints the word if that returned 0."""
        begins = next(_MAIN.finditer(tests)).end()
        ends = begins + (closing_brace(tests[begins:]) or 0) - 1
        renamed = f"#define main valkyrie_tests\n{tests[:ends]}\nreturn 0; {tests[ends:]}\n#undef main\n"
        own = f'#include <cstdio>\nint main() {{\n  int status = valkyrie_tests();\n  if (!status) std::puts("{word}");'
        source = f"{prompt}{completion}\n{renamed}{own}\n  return status;\n}}\n"
        command = (
            compiler(isolated) or COMPILERS[0],
            "-std=c++17",
            "-O1",
            "-w",
            "-pipe",
            "program.cpp",
            "-o",
            "program",
        )
        return {"program.cpp": source}, [
            SandboxStep(command, COMPILE_S, COMPILE_MIB, processes=32),
            SandboxStep(("./program",), time_s, memory_mib),
        ]


class Python(JudgeLanguage):
    """Python, by the interpreter that runs this."""

    def end(self, completion: str) -> int | None:
        """Return the beginning of the first line that is not indented."""
        found = re.search(r"^\S", completion, re.MULTILINE)
        return None if found is None else found.start()

    def trouble(self, prompt: str, tests: str) -> str | None:
        """Return that the prompt does not stand at the beginning of a line."""
        return None if prompt.endswith("\n") else "the prompt of Python must end with a line break"

    def missing(self, isolated: bool) -> str | None:
        """Return that this Python cannot be shown in a sandbox."""
        if not isolated or python_inside() is not None:
            return None
        return "this Python is installed right in the home folder, which a sandbox does not show. Use another Python"

    def build(
        self, prompt: str, completion: str, tests: str, word: str, time_s: float, memory_mib: int, isolated: bool
    ) -> tuple[dict[str, str], list[SandboxStep]]:
        """Return the function and the program; compiling is parsing the first."""
        import sys

        inside = python_inside()
        python = (sys.executable if not isolated or inside is None else inside[1], "-I", "-S", "-B")
        function = f"{prompt}{completion}\n"
        files = {"function.py": function, "program.py": f"{function}\n{tests}\nprint({word!r})\n"}
        parse = "compile(open('function.py', encoding='utf-8').read(), 'function.py', 'exec')"
        return files, [
            SandboxStep((*python, "-W", "ignore", "-c", parse), COMPILE_S, COMPILE_MIB),
            SandboxStep((*python, "-W", "ignore", "program.py"), time_s, memory_mib),
        ]


LANGUAGES: dict[str, JudgeLanguage] = {"cpp": Cpp(), "python": Python()}
"""The languages by the name that a problem gives."""


@cache
def compiler(isolated: bool = True, which: Callable[[str], str | None] = shutil.which) -> str | None:
    """Return the path of the C++ compiler; for a sandbox, of one that lies where it can see it."""
    for name in COMPILERS:
        path = which(name)
        if path is not None and (not isolated or any(map(Path(path).resolve().is_relative_to, _SEEN))):
            return path
    return None


def closing_brace(text: str) -> int | None:
    """Return the place behind the brace of C++ that closes one opened before the text; None where it stays open.

    Braces in comments, strings, characters and raw strings do not count.
    """
    depth = 1
    for token in _TOKENS.finditer(text):
        if token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
            if depth == 0:
                return token.end()
    return None


_TOKENS = re.compile(
    r"""//[^\n]*                          # a comment
    |   /\*.*?(?:\*/|\Z)
    |   R"(?P<mark>[^()\\\s]{0,16})\(.*?(?:\)(?P=mark)"|\Z)   # a raw string
    |   "(?:\\.|[^"\\\n])*["\n]?          # a string
    |   (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*['\n]?   # a character, not the ' in 1'000
    |   [{}]""",
    re.VERBOSE | re.DOTALL,
)
