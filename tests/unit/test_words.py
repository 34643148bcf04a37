"""Errors speak the interface that was used, and tests import only what is there to be shared."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
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
    ours = ("additions", "cli", "verbs", "demo", "testing")  # the demo runs commands
    found = [
        f"{path}:{line}: {text}"
        for package in (mx, mx_transports)
        for path in Path(str(package.__file__)).parent.rglob("*.py")
        if not {*path.relative_to(Path(str(package.__file__)).parent).with_suffix("").parts}
        & {*ours}
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


#: Words and turns of phrase that docstrings, comments and messages do without.
_AVOIDED = re.compile(
    r"\b(nobody|somebody|anybody|whoever|patiently)\b"
    r"|\broom is\b|\bwhat is in it\b|\bwhose \w+ lie\b"
    r"|\boffer(s|ed|ing)?\b",  # a source serves, lends or relays: docs/architecture.md, Words
    re.IGNORECASE,
)


def _prose(path: Path) -> list[tuple[int, str]]:
    """Return the docstrings, comments and messages of a module, without what is in backquotes."""
    source = path.read_text()
    found = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    found += [
        (number, line[line.index("# ") :])
        for number, line in enumerate(source.splitlines(), 1)
        if "# " in line
    ]
    return [(line, re.sub(r"`[^`]*`", "", text)) for line, text in found]


def _modules() -> list[Path]:
    """Return our modules, without those that protoc made."""
    return [
        path
        for package in (mx, mx_transports)
        for path in sorted(Path(str(package.__file__)).parent.rglob("*.py"))
        if "_pb2" not in path.name
    ]


def test_prose_says_who_does_what() -> None:
    found = [
        f"{path}:{line}: {hit.group(0)}"
        for path in _modules()
        for line, text in _prose(path)
        if (hit := _AVOIDED.search(text))
    ]
    assert not found, "\n".join(found)


#: Packages whose `__all__` is public.
_PUBLIC = ("mx", "mx.api", "mx.artifacts", "mx.graphs", "mx.metrics", "mx.stores")


def _public() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return the public functions and methods, by name."""
    found: dict[str, object] = {}
    for package in map(importlib.import_module, _PUBLIC):
        for name in package.__all__:
            each = getattr(package, name)
            if inspect.isclass(each):
                homes = [home for home in each.__mro__ if home.__module__.startswith("mx.")]
                found |= {
                    f"{home.__module__}.{home.__name__}.{key}": getattr(value, "__func__", value)
                    for home in homes
                    for key, value in vars(home).items()
                    if not key.startswith("_")
                }
            else:
                found[f"{package.__name__}.{name}"] = each
    nodes = []
    for name, each in found.items():
        code = inspect.unwrap(each) if callable(each) else each
        if inspect.isfunction(code) and code.__module__.startswith("mx."):
            node = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes.append((name, node))
    return nodes


def test_public_functions_say_their_arguments_what_they_return_and_raise() -> None:
    wrong = []
    for name, node in _public():
        text = ast.get_docstring(node)
        if text is None:  # it says no more than that of the class that it is inherited from
            continue
        arguments = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
        named = [each for each in arguments if each not in ("self", "cls")]
        raises = any(isinstance(each, ast.Raise) and each.exc for each in ast.walk(node))
        returns = "None" if node.returns is None else ast.unparse(node.returns)
        if "Args:" not in text and not all(f"`{each}`" in text for each in named):
            wrong.append(f"{name}: Args")
        if raises and "Raises" not in text:
            wrong.append(f"{name}: Raises")
        if returns not in ("None", "NoReturn") and not re.search(r"[Rr]eturn|[Yy]ield", text):
            wrong.append(f"{name}: Returns")
    assert not wrong, "\n".join(wrong)


#: Sizes whose names are `..._bytes`: they are public, or in JSON, on the wire or in kept states.
#: Those of all others are `nbytes` or `..._nbytes`.
_SIZES = {
    *("budget_bytes", "bytes", "bytes_done", "bytes_total", "bytes_written", "done_bytes"),
    *("element_bytes", "from_bytes", "held_bytes", "kv_bytes", "lingering_bytes", "moved_bytes"),
    *("offset_bytes", "shared_bytes", "slot_bytes"),
}


def test_sizes_are_named_alike() -> None:
    found = set()
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                name, kind = node.arg, node.annotation
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name, kind = node.target.id, node.annotation
            else:
                continue
            is_size = kind is not None and ast.unparse(kind).startswith("int")
            if is_size and re.search(r"(^|_)bytes$|^bytes_(?!per)", name):
                found.add(name)
    assert found <= _SIZES, sorted(found - _SIZES)
