"""The transport that docs/transports.md builds keeps the rules, and is as short as it says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.testing.conformance import Harness, TransportSuite

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transports.md"
MODULE = "documented_piece_transport"
MOST_LINES = 80


def documented() -> str:
    """The page's Python, in its order."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return "\n\n".join(blocks)


def test_it_takes_less_than_80_lines() -> None:
    lines = [line for line in documented().splitlines() if line.strip()]
    assert 40 < len(lines) < MOST_LINES


class TestDocumented(TransportSuite):
    @pytest.fixture
    def harness(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
        (tmp_path / f"{MODULE}.py").write_text(documented())
        monkeypatch.syspath_prepend(tmp_path)
        yield Harness(f"{MODULE}:PieceTransport")
        sys.modules.pop(MODULE, None)
