"""Tests of the package's import layers (listed in pyproject.toml) and of file and function length."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "valkyrie").rglob("*.py"))
LONG = {"fit": 90}
"""Functions that may be longer than 80 lines, because they read best from top to bottom, and their limits in lines."""


def test_layers_import_only_lower_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert status == 0, capsys.readouterr().out


def line_count(node: ast.FunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_and_functions_are_short_enough_to_read():
    assert len(FILES) > 40
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                inner = [child for child in node.body if isinstance(child, ast.ClassDef)]  # a module built on demand
                length = line_count(node) - sum(map(line_count, inner))
                assert length <= LONG.get(node.name, 80), f"{path}:{node.lineno} {node.name} has {length} lines"
