"""Tests of the JSON codec: round trips, unknown keys, versions, and errors that name the field."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from valkyrie.records import RecordError, decode, encode, read_record, write_record
from valkyrie.sweep.trial import TrialResult


class Colour(Enum):
    red = "red"


@dataclass(frozen=True)
class Part:
    colour: Colour
    axes: tuple[str, ...]
    seconds: float | None = None


@dataclass(frozen=True)
class Whole:
    parts: list[Part]
    schema: int = 2
    unknown: dict[str, Any] = field(default_factory=dict)


WHOLE = Whole([Part(Colour.red, ("x", "y"), 0.5)])


def test_unknown_keys_in_a_file_are_ignored(tmp_path: Path):
    path = write_record(tmp_path / "whole.json", WHOLE)
    assert read_record(Whole, path) == WHOLE
    newer = encode(WHOLE) | {"later": [1]}
    assert encode(decode(Whole, newer, "a.json")) == newer


def test_numpy_scalars_become_numbers():
    assert encode(Part(Colour.red, (), np.float64(0.25)))["seconds"] == 0.25


@pytest.mark.parametrize(
    ("plain", "field_path"),
    [
        ({"parts": [{"colour": "blue", "axes": []}]}, "$.parts[0].colour"),
        ({"parts": [{"colour": "red", "axes": [], "seconds": "1"}]}, "$.parts[0].seconds"),
        ({"parts": 3}, "$.parts"),
        ({"parts": [], "schema": 3}, ""),
        ({}, ""),
        ([], ""),
    ],
)
def test_an_error_names_the_file_and_the_field(plain: Any, field_path: str):
    with pytest.raises(RecordError) as caught:
        decode(Whole, plain, "a.json")
    assert (caught.value.source, caught.value.field) == ("a.json", field_path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"parts": [], }'])
def test_the_error_for_broken_json_names_the_file(tmp_path: Path, text: str):
    (tmp_path / "whole.json").write_text(text)
    with pytest.raises(RecordError, match="whole.json"):
        read_record(Whole, tmp_path / "whole.json")


def test_a_record_is_written_with_its_defaults() -> None:
    assert encode(decode(TrialResult, {}, "trials.jsonl")) == encode(TrialResult())
