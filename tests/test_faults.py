"""Mistakes and faults by cause, in this process where possible: the message names the file or key, without a traceback.

`test_journeys.py` has the slow ones, which need a process for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runs import SINGLE, TINY, command

MISTAKES = {
    "prompt=\udcff\udcfe": "prompt= has bytes that are not UTF-8 (ff fe)",
    f"name={'a' * 300}": "name= has 300 bytes",
    f"resume={'a' * 300}": "file name too long",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_names_its_key(argument: str, capfd: pytest.CaptureFixture[str]):
    assert command(*TINY, *SINGLE, argument, "mode=show") == 2
    text = capfd.readouterr().err
    assert MISTAKES[argument] in text and "Traceback" not in text


def test_a_folder_with_bytes_that_are_not_utf8(tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]):
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    assert command("mode=show") == 2
    assert "current folder has bytes that are not UTF-8 (e9)" in capfd.readouterr().err


def test_steps_need_jit(monkeypatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    assert command(*TINY, *SINGLE, "steps=1") == 2
    assert "JAX_DISABLE_JIT=1 is set" in capfd.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("variables", [{"PYTHONUNBUFFERED": "1"}, {"PYTHONUNBUFFERED": ""}])
def test_an_output_that_is_full(variables: dict[str, str]):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "valkyrie.cli.train", "mode=show", "model=gpt_tiny"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
    assert ended.returncode == 2 and "the output (stdout) cannot be written: no space left" in ended.stderr


def test_an_ascii_terminal_gets_question_marks():
    line = "from valkyrie.processes.interrupt import repair_std_streams as r; r(); print('a \\u00b7 b')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run([sys.executable, "-c", line], capture_output=True, env={**os.environ, **plain})
    assert ended.stdout == b"a ? b\n", ended.stderr
