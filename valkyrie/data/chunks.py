"""Splits code after each function and class, using tree-sitter grammars (the extra `code`)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from valkyrie.problems import Problem, ProblemCode


class Chunking(Enum):
    """Content of a document: a whole text, or one function or class of C, C++ or Python."""

    whole = "whole"
    functions = "functions"


class Language(Enum):
    """Languages that can be split into functions."""

    c = "c"
    cpp = "cpp"
    python = "python"


LANGUAGE_BY_SUFFIX = {".py": Language.python, ".c": Language.c}
LANGUAGE_BY_SUFFIX |= dict.fromkeys((".h", ".cc", ".cpp", ".cxx", ".hpp"), Language.cpp)
"""Language by file suffix. A .h file may be C or C++. It is parsed as C++, whose grammar also accepts C headers."""
PROSE_SUFFIXES = (".txt", ".md")
"""Suffixes of files that are never split."""
_CONTAINER_NODES = {"module", "translation_unit", "namespace_definition", "linkage_specification", "declaration_list"}
_CONTAINER_NODES |= {"preproc_if", "preproc_ifdef", "preproc_elif", "preproc_else"}
"""Syntax nodes that are searched for functions and classes."""
_DEFINITION_NODES = {"function_definition", "decorated_definition", "class_definition"}
"""Syntax nodes that always define a function or class."""
_SPECIFIER_NODES = {"class_specifier", "struct_specifier"}
"""Syntax nodes that define a class only if they have a body."""


def chunk_problems(chunk: Chunking) -> list[Problem]:
    """Return one problem if `chunk` is `functions` and a tree-sitter package is not installed, else an empty list."""
    packages = ("tree_sitter", "tree_sitter_c", "tree_sitter_cpp", "tree_sitter_python")
    if chunk is Chunking.whole or all(map(find_spec, packages)):
        return []
    text = "data.chunk=functions needs tree-sitter. Install it with `uv sync --extra code` in the clone."
    return [Problem(ProblemCode.not_installed, "data.chunk", "functions", text)]


def split_into_chunks(text: str, language: Language) -> Iterator[str]:
    """Split source code into chunks with one function or class each. Methods stay in their class.

    A chunk begins where the previous one ends, so it includes the text before its function. The last chunk also
    includes the text after its function. A text without functions or classes is a single chunk. Blank lines at the
    start of a chunk are dropped.
    """
    from tree_sitter import Parser

    source = text.encode("utf-8", errors="replace")
    chunk_ends = [
        _chunk_end(source, chunk_end)
        for chunk_end in _definition_ends(Parser(_grammar(language)).parse(source).root_node)
    ]
    start = 0
    for chunk_end in [*chunk_ends[:-1], len(source)]:
        if chunk := source[start:chunk_end].decode("utf-8", errors="replace").lstrip("\r\n"):
            yield chunk
        start = max(start, chunk_end)


def _definition_ends(node: Any) -> Iterator[int]:
    """Yield the byte offset of the end of each function and class in a syntax node, in order."""
    for child in node.children:
        if _is_definition(child):
            yield child.end_byte
        elif child.type in _CONTAINER_NODES:
            yield from _definition_ends(child)


def _is_definition(node: Any) -> bool:
    if node.type == "template_declaration":
        return any(map(_is_definition, node.children))
    return node.type in _DEFINITION_NODES or (
        node.type in _SPECIFIER_NODES and node.child_by_field_name("body") is not None
    )


def _chunk_end(source: bytes, definition_end: int) -> int:
    """Return the byte offset at which to cut after a definition.

    This is the start of the next line if only `;`, spaces or a comment remain on the line. Otherwise, it is the next
    byte that is not `;` or a space.
    """
    line_end = source.find(b"\n", definition_end)
    line = source[definition_end : len(source) if line_end < 0 else line_end]
    code = line.lstrip(b"; \t\r")
    if not code or code.startswith((b"//", b"#")):
        return len(source) if line_end < 0 else line_end + 1
    return definition_end + len(line) - len(code)


@cache
def _grammar(language: Language) -> Any:
    from tree_sitter import Language as Grammar

    return Grammar(import_module(f"tree_sitter_{language.value}").language())
