"""Programming languages of the code evaluation: where a function ends, and how a program is built and run."""

from __future__ import annotations

import re
import secrets
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from valkyrie.code_eval.sandbox import sandbox_python

COMPILERS = ("g++", "clang++", "c++")
"""C++ compilers in order of preference."""
_MAIN = re.compile(r"\bint\s+main\s*\([^)]*\)\s*\{")
_SANDBOX_COMPILER_FOLDERS = ("/usr", "/bin")
"""Folders that may contain a compiler and are visible in the sandbox."""


class Program(NamedTuple):
    """A program to judge.

    Args:
        files: Text of each file, by name.
        compile: Command that compiles the program, or checks its syntax.
        run: Command that runs the program.
    """

    files: dict[str, str]
    compile: tuple[str, ...]
    run: tuple[str, ...]


class JudgeLanguage(ABC):
    """A programming language: where functions end, which problems are valid, and how to build a program."""

    @abstractmethod
    def function_end(self, completion: str) -> int | None:
        """Return the position in the completion at which the prompt's function ends, or None if it does not end."""

    @abstractmethod
    def find_error(self, prompt: str, tests: str) -> str | None:
        """Return an error message if prompt and tests do not form a valid problem, else None."""

    @abstractmethod
    def find_machine_error(self, isolated: bool) -> str | None:
        """Return an error message with a remedy if programs of this language cannot run on this machine, else None."""

    @abstractmethod
    def build(
        self, prompt: str, completion: str, tests: str, *, secret: int, isolated: bool, add_failing_test: bool = False
    ) -> Program:
        """Return the files of a program, and the commands that compile and run it.

        After all tests have passed, the program prints `secret` as its last line (`secret_line`), so a program that
        exits early does not pass. The program contains the secret only as two random numbers, which it combines by XOR
        when it prints. The completion therefore cannot read the secret from a file, argument or variable.

        Args:
            prompt: Beginning of the function.
            completion: Rest of the function.
            tests: Tests of the problem.
            secret: Random 128-bit number.
            isolated: Whether the program runs in a sandbox.
            add_failing_test: Whether to add a test that always fails, after all others.
        """


class Cpp(JudgeLanguage):
    """C++17, compiled by the first available of g++, clang++ and c++."""

    def function_end(self, completion: str) -> int | None:
        """Return the position after the brace that closes the function."""
        return closing_brace(completion)

    def find_error(self, prompt: str, tests: str) -> str | None:
        """Return None if the tests have one complete `main` and the prompt ends with `{`, else an error message."""
        mains = list(_MAIN.finditer(tests))
        if len(mains) != 1 or closing_brace(tests[mains[0].end() :]) is None:
            return "C++ tests must have one `int main() {...}` that returns 0 if all tests pass"
        return None if prompt.rstrip().endswith("{") else "a C++ prompt must end with the { of its function"

    def find_machine_error(self, isolated: bool) -> str | None:
        """Return an error message if no compiler is found, else None. See `find_compiler` for `isolated`."""
        if find_compiler(isolated) is not None:
            return None
        location = f" in {' or '.join(_SANDBOX_COMPILER_FOLDERS)}, which are visible in the sandbox" if isolated else ""
        names = ", ".join(COMPILERS)
        return f"none of the C++ compilers {names} was found{location}. Install one, for example with `apt install g++`"

    def build(
        self, prompt: str, completion: str, tests: str, *, secret: int, isolated: bool, add_failing_test: bool = False
    ) -> Program:
        """Return a program that calls the `main` of the tests. If `main` returns 0, the program prints the secret."""
        body_start = next(_MAIN.finditer(tests)).end()
        body_end = body_start + (closing_brace(tests[body_start:]) or 0) - 1
        renamed_tests = f"#define main valkyrie_tests\n{tests[:body_end]}\nreturn 0; {tests[body_end:]}\n#undef main\n"
        halves = ", ".join(f"0x{number:016x}u" for half in _xor_halves(secret) for number in divmod(half, 2**64))
        wrapper = (
            f"#include <cstdio>\nint main() {{\n  int status = valkyrie_tests(){' || true' * add_failing_test};\n"
            f"  volatile unsigned long long a[] = {{{halves}}};\n"
            '  if (!status) std::printf("%016llx%016llx\\n", a[0] ^ a[2], a[1] ^ a[3]);\n  return status;\n}\n'
        )
        source = f"{prompt}{completion}\n{renamed_tests}{wrapper}"
        options = ["-std=c++17", "-O1", "-w", "-pipe", "program.cpp", "-o", "program"]
        compile_and_remove = ("sh", "-c", '"$@" && rm -f program.cpp', "sh", find_compiler(isolated) or COMPILERS[0])
        return Program({"program.cpp": source}, (*compile_and_remove, *options), ("./program",))


class Python(JudgeLanguage):
    """Python, run by the current interpreter."""

    def function_end(self, completion: str) -> int | None:
        """Return the position of the first line that is not indented, or None if all lines are indented."""
        unindented = re.search(r"^\S", completion, re.MULTILINE)
        return None if unindented is None else unindented.start()

    def find_error(self, prompt: str, tests: str) -> str | None:
        """Return an error message if the prompt does not end with a line break, else None."""
        return None if prompt.endswith("\n") else "a Python prompt must end with a line break"

    def find_machine_error(self, isolated: bool) -> str | None:
        """Return an error message if `isolated` and this Python cannot be mounted in a sandbox, else None."""
        if not isolated or sandbox_python() is not None:
            return None
        return (
            "the home folder, which is hidden in the sandbox, is inside the folder of this Python. Use another Python"
        )

    def build(
        self, prompt: str, completion: str, tests: str, *, secret: int, isolated: bool, add_failing_test: bool = False
    ) -> Program:
        """Return a program with the files `function.py` and `program.py`. The compile step only parses the function."""
        mounted_python = sandbox_python()
        executable = sys.executable if not isolated or mounted_python is None else mounted_python.interpreter
        python = (executable, "-I", "-S", "-B", "-W", "ignore", "-c")
        function = f"{prompt}{completion}\n"
        mask, masked = _xor_halves(secret)
        end = f'assert {"" if add_failing_test else "not "}list()\nprint(f\'{{int("{mask}") ^ int("{masked}"):032x}}\')'
        files = {"function.py": function, "program.py": f"{function}\n{tests}\n{end}\n"}
        parse = "compile(open('function.py', encoding='utf-8').read(), 'function.py', 'exec')"
        return Program(files, (*python, parse), (*python, _RUN_SCRIPT))


_RUN_SCRIPT = """
import os
with open("program.py", encoding="utf-8") as file:
    code = compile(file.read(), "program.py", "exec")
os.unlink("program.py")
exec(code, {"__name__": "__main__"})
"""
"""Python code that deletes `program.py` and then runs it, so that a completion cannot read its tests."""


def secret_line(secret: int) -> str:
    """Return the line that a program prints if its tests pass: its 128-bit secret as 32 hex digits."""
    return f"{secret:032x}"


def _xor_halves(secret: int) -> tuple[int, int]:
    """Split a 128-bit number into two random ones with `left ^ right == secret`."""
    left = secrets.randbits(128)
    return left, left ^ secret


LANGUAGES: dict[str, JudgeLanguage] = {"cpp": Cpp(), "python": Python()}
"""The languages by the name used in problems."""


@cache
def find_compiler(isolated: bool = True, which: Callable[[str], str | None] = shutil.which) -> str | None:
    """Return the path of the first compiler of `COMPILERS` on this machine, or None.

    With `isolated`, ignores compilers in folders that are not visible in the sandbox. `which` finds a program by name,
    like `shutil.which`.
    """
    for name in COMPILERS:
        path = which(name)
        if path is not None and (
            not isolated or any(map(Path(path).resolve().is_relative_to, _SANDBOX_COMPILER_FOLDERS))
        ):
            return path
    return None


def closing_brace(text: str) -> int | None:
    """Return the position after the `}` that closes the C++ block where `text` begins, or None if it stays open.

    Braces in comments, strings, raw strings and character literals do not count.
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
