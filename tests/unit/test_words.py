"""Errors speak the interface that was used, and tests import only what is there to be shared."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mx
import mx_transports
from mx.cli.words import in_flags
from tests.support.daemon import ROOT


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("`wait_s` waits longer", "--wait waits longer"),
        ("name one with `peer=HOST:PORT`", "name one with --from peer=HOST:PORT"),
        ("give `path`", "give --from disk"),
        ("`verify=x` is not understood", "--verify x is not understood"),
        ("say `insecure=True`", "say --insecure"),
        ("copy with `attach=False`", "copy with --no-attach"),
        ("`listen=10.0.0.1:0`", "--listen 10.0.0.1:0"),
        ("`tls_cert`, `tls_key` and `tls_ca`", "--tls-cert, --tls-key and --tls-ca"),
        ("`into` is read-only", "`into` is read-only"),
        ("`close()` it", "`close()` it"),
    ],
)
def test_arguments_become_flags(said: str, typed: str) -> None:
    assert in_flags(said) == typed


def _messages(path: Path) -> list[tuple[int, str]]:
    """Every text in a module but for its docstrings."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # a docstring is an expression that is nothing but a text
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]


def test_the_library_names_no_flags() -> None:
    ours = ("cli", "demo", "testing")  # the demo runs commands
    found = [
        f"{path}:{line}: {text}"
        for package in (mx, mx_transports)
        for path in Path(str(package.__file__)).parent.rglob("*.py")
        if not set(path.relative_to(Path(str(package.__file__)).parent).parts) & set(ours)
        for line, text in _messages(path)
        if re.search(r"(?<![\w-])--[a-z]", text) and "--gpus" not in text
    ]
    assert not found, "\n".join(found)


def _imports(path: Path) -> list[tuple[int, str]]:
    """Return the lines and names of what a module imports."""
    return [
        (node.lineno, f"{getattr(node, 'module', None) or ''}.{alias.name}")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]


def test_what_tests_share_is_in_no_test_module_and_no_conftest() -> None:
    found = [
        f"{path}:{line}: {name}"
        for folder in ("tests", "benchmarks", "mx", "transports", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in _imports(path)
        if re.search(r"\.(conftest|test_\w+)(\.|$)", name)
    ]
    assert not found, "\n".join(found)
