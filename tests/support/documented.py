"""The code of docs/transports.md, for tests of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transports.md"
TRANSPORTS = {"PieceTransport", "UnixPieceTransport"}


def documented(transport: str) -> str:
    """The page's Python, in its order, without the other transport's class, and without what is a
    module of its own and names its file."""
    blocks = re.findall(
        r"^```python\n(?!# \S+\.py$)(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    page = "\n\n".join(blocks)
    lines = page.splitlines()
    for node in reversed(ast.parse(page).body):
        if isinstance(node, ast.ClassDef) and node.name in TRANSPORTS - {transport}:
            lines[node.lineno - 1 : node.end_lineno] = []
    return "\n".join(lines)


def documented_package() -> tuple[dict[str, str], str]:
    """The page's package with a fact and settings: its modules by path, and its entry points."""
    page = PAGE.read_text()
    named = r"^```python\n# (\S+\.py)\n(.*?)^```$"
    modules = dict(re.findall(named, page, re.DOTALL | re.MULTILINE))
    modules["my_package/piece.py"] = documented("PieceTransport")
    (entries,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    text = re.sub(r'\[project.entry-points."(.*)"\]', r"[\1]", entries).replace('"', "")
    return modules, text
