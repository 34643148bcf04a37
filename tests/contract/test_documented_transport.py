"""The transports that docs/transports.md builds keep the rules, and two are as short as it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.testing.conformance import Harness, TransportSuite
from tests.support.documented import TRANSPORTS, documented, documented_package

MODULE = "documented_piece_transport"
MOST_LINES = 80


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


class TestWithAFact(TransportSuite):
    """The one with a fact and settings, of which the pack is not installed here."""

    @pytest.fixture
    def harness(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
        modules, _ = documented_package()
        for path, text in modules.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        yield Harness("my_package.fabric:FabricPieceTransport", settings={"piece_streams": 2})
        for name in [name for name in sys.modules if name.startswith("my_package")]:
            del sys.modules[name]
