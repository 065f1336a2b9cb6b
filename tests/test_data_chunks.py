"""Tests of splitting code at function ends: C, C++ and Python, from files and from shards."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from valkyrie.data.chunks import Chunking, Language, split_into_chunks
from valkyrie.data.manifest import PreparedText
from valkyrie.data.prepare import prepare
from valkyrie.data.readers import read_documents
from valkyrie.data.sources import parquet_stream, stdlib
from valkyrie.data.sources import text as text_source
from valkyrie.data.stream import DocumentPosition, Lane, open_stream
from valkyrie.problems import ProblemCode

CPP = """// License
#include <vector>
struct Later;
#ifdef FAST
namespace n {
/// Doubles.
int twice(int a) { return 2 * a; }  // as is

class Pair {
 public:
  int sum() { return a + b; }
  int a, b;
};
}  // namespace n
#endif
extern "C" {
int g(void) { return 2; }
}
template <class T> T same(T t) { return t; }
int x = 3;
"""
PYTHON = '''"""Doc."""
import os

# of one
@cache
def one():
    def inner():
        return "é"
    return inner

class Two:
    def method(self): ...

if __name__ == "__main__":
    one()
'''


def test_cpp_is_split_into_functions_and_classes_with_preceding_lines() -> None:
    chunks = [*split_into_chunks(CPP, Language.cpp)]
    assert "".join(chunks).replace("\n", "") == CPP.replace("\n", "")
    assert [chunk.splitlines()[-1] for chunk in chunks[:3]] == [
        "int twice(int a) { return 2 * a; }  // as is",
        "};",
        "int g(void) { return 2; }",
    ]
    assert chunks[0].startswith("// License\n") and chunks[1].startswith("class Pair") and len(chunks) == 4
    assert chunks[3].endswith("return t; }\nint x = 3;\n")


def test_python_is_split_into_functions_and_classes() -> None:
    first, second = split_into_chunks(PYTHON, Language.python)
    assert first.endswith('        return "é"\n    return inner\n') and second.startswith("class Two:")
    assert first + "\n" + second == PYTHON


@pytest.mark.parametrize("code", ["int x = 1;\n", "", "int f( { ] class", "\n\n  \n"])
def test_a_text_without_functions_is_not_split(code: str) -> None:
    assert "".join(split_into_chunks(code, Language.c)) == code.lstrip("\n")


def test_chunks_of_real_files_lose_no_text() -> None:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        text = path.read_text(encoding="utf-8")
        pieces = [*split_into_chunks(text, Language.python)]
        assert "".join(pieces).replace("\n", "") == text.replace("\n", "")
        defined = sum(line.startswith(("def ", "class ", "async def ")) for line in text.splitlines())
        assert len(pieces) >= min(1, defined)


def test_two_functions_on_one_line_are_split() -> None:
    assert [*split_into_chunks("int a() {} int b() {}\n", Language.c)] == ["int a() {} ", "int b() {}\n"]


def config(*paths: Path, **options: Any) -> text_source.Config:
    return text_source.Config(paths=[*map(str, paths)], chunk=Chunking.functions, **options)


def test_files_split_by_function_are_a_separate_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(CPP)
    (tmp_path / "b.py").write_text(PYTHON)
    (tmp_path / "c.md").write_text("# Title\n\nint f() { return 1; }\n")
    source = config(tmp_path, cache_dir=str(tmp_path / "cache"))
    names = [document.id.rpartition(os.sep)[2] for document in source.read_documents(source.list_files())]
    assert names == ["a.cpp#1", "a.cpp#2", "a.cpp#3", "a.cpp#4", "b.py#1", "b.py#2", "c.md"]

    def count(prepared: PreparedText) -> int:
        return sum(split.documents for split in (prepared.train, prepared.validation))

    whole = text_source.Config(paths=[str(tmp_path)], cache_dir=str(tmp_path / "cache"))
    assert count(prepare(source, "bytes")) == 7 and count(prepare(whole, "bytes")) == 3


def test_a_single_file_split_by_function_has_several_documents(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(CPP)
    source = config(tmp_path / "a.cpp", cache_dir=str(tmp_path / "cache"))
    prepared = prepare(source, "bytes")
    assert prepared.train.documents + prepared.validation.documents == 4


def test_shards_can_be_streamed_by_function(tmp_path: Path) -> None:
    for number in range(2):
        parquet.write_table(arrow.table({"text": [CPP, CPP]}), tmp_path / f"{number}.parquet")
    source = parquet_stream.Config(paths=[str(tmp_path)], chunk=Chunking.functions, language=Language.cpp, workers=0)
    data = open_stream(source, "bytes")
    lane = Lane(data.validation, source, "bytes", 0, 1, None)
    places = [place for place, _ in lane.documents(DocumentPosition(0, 0, 0))]
    assert [place.document for place in places] == [*range(8)]
    ((_, tokens),) = lane.fetch([DocumentPosition(0, 0, 5)])
    assert bytes(tokens[1:].astype("u1")).decode() == [*split_into_chunks(CPP, Language.cpp)][1]


def test_the_language_of_jsonl_and_parquet_rows_must_be_set(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": CPP}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: .*data\.language=c"):
        config(path).list_files()
    source = config(path, language=Language.cpp)
    assert len([*read_documents(source.list_files().files[0], source.read_options)]) == 4


def test_sources_without_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("valkyrie.data.chunks.find_spec", lambda name: None)
    (problem,) = stdlib.Config(chunk=Chunking.functions).problems()
    assert (problem.code, problem.key) == (ProblemCode.not_installed, "data.chunk")
