"""Lines of code: without docstrings, comments, blank lines and what is generated."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return the number of lines of a module's source on which there is code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            found -= {*range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    return len(found)


def code_lines_of(places: Iterable[Path]) -> int:
    """Return the number of lines of code of modules, and of all that are in folders."""
    files = [
        file
        for place in places
        for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
        if not file.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]
    return sum(code_lines(file.read_text()) for file in files)
