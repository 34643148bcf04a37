"""Transports are found by name and by entry point, and one that is broken harms no other."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx import plugins
from mx.core.topology import Place
from mx.errors import LocalError
from mx.transport import ExposeOptions, Grant, Transport, Unavailable, Viable

MODULE = """
from mx.testing.fake import FakeTransport as Good
not_callable = 7
def no_transport(): return object()
def raises(): raise OSError("libfabric.so.1: cannot open shared object file")
"""
ENTRY_POINTS = """[mx.transports]
good = a_plugin:Good
absent = a_plugin_that_is_not_there:Transport
attribute = a_plugin:Missing
number = a_plugin:not_callable
other = a_plugin:no_transport
raising = a_plugin:raises
tcp = a_plugin:Good
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "a_plugin.py").write_text(MODULE)
    info = tmp_path / "a_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("a_plugin", None)


def test_built_in_transports_are_there_without_metadata() -> None:
    found = plugins.transports()
    assert list(found)[:2] == ["shm", "tcp"]
    for name, transport in found.items():
        assert isinstance(transport, Transport)
        assert transport.name == name
    assert isinstance(found["tcp"].probe(), Viable)


@pytest.mark.usefixtures("plugin")
def test_a_plugin_is_found_and_broken_ones_say_why() -> None:
    found = plugins.transports()
    assert isinstance(found["good"].probe(), Viable)
    for name, reason in {
        "absent": "a_plugin_that_is_not_there",
        "attribute": "Missing",
        "number": "does not make",
        "other": "does not make",
        "raising": "libfabric.so.1",
    }.items():
        answer = found[name].probe()
        assert isinstance(answer, Unavailable)
        assert reason in answer.reason
        assert found[name].reach(Place(), Place()) is None
        with pytest.raises(LocalError, match=reason):
            found[name].expose([], ExposeOptions())
        with pytest.raises(LocalError, match=reason):
            found[name].open(Grant("g", b"", 0, (), "peer"))


@pytest.mark.usefixtures("plugin")
def test_a_built_in_name_is_not_taken_over() -> None:
    assert type(plugins.transports()["tcp"]).__module__ == "mx_transports.tcp"
