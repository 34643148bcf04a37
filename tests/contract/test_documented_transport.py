"""The transports that docs/transports.md builds keep the rules, and are as short as it says."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.testing.conformance import Harness, TransportSuite

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transports.md"
MODULE = "documented_piece_transport"
MOST_LINES = 80
TRANSPORTS = {"PieceTransport", "UnixPieceTransport"}


def documented(transport: str) -> str:
    """The page's Python, in its order, without the other transport's class."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    page = "\n\n".join(blocks)
    lines = page.splitlines()
    for node in reversed(ast.parse(page).body):
        if isinstance(node, ast.ClassDef) and node.name in TRANSPORTS - {transport}:
            lines[node.lineno - 1 : node.end_lineno] = []
    return "\n".join(lines)


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_it_takes_less_than_80_lines(transport: str) -> None:
    lines = [line for line in documented(transport).splitlines() if line.strip()]
    assert 40 < len(lines) < MOST_LINES


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
class TestDocumented(TransportSuite):
    @pytest.fixture
    def harness(
        self, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Harness]:
        (tmp_path / f"{MODULE}.py").write_text(documented(transport))
        monkeypatch.syspath_prepend(tmp_path)
        yield Harness(f"{MODULE}:{transport}")
        sys.modules.pop(MODULE, None)
