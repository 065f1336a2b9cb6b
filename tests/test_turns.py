"""Tests of how slow tests are ordered under `--minutes`.

Files affected by changes run first, and a few time-limited runs together cover every file.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from turns import ROOT, rotate_files

FILES = sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))


def test_tests_of_changed_files_come_first():
    order = rotate_files(FILES, {"tests/test_wheel.py", "valkyrie/ops/rotary.py"}, turn=3)
    assert sorted(order) == FILES
    last = max(order.index("tests/test_wheel.py"), order.index("tests/test_rotary.py"))
    assert last < 5, "only tests of the changed module are before them"
    assert order.index("tests/test_rotary.py") < order.index("tests/test_tokenizer.py")


def test_five_runs_of_a_third_of_the_files_cover_all_files():
    for begin in range(40):
        reached = {
            file for turn in range(begin, begin + 5) for file in rotate_files(FILES, set(), turn)[: len(FILES) // 3]
        }
        assert reached == set(FILES)


@pytest.mark.slow
def test_files_that_are_not_reached_are_listed():
    arguments = ["-n=1", "-m", "slow", "--minutes", "0", "tests/test_scan.py"]
    result = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "minutes: tests/test_scan.py" in result.stdout
    assert "passed" not in result.stdout.splitlines()[-1]
