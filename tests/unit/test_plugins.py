"""Transports are found by name and by entry point, each imported when it is needed, and one that
is broken harms no other."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx import api, config, plugins, runtime
from mx.core.topology import Place
from mx.errors import LocalError
from mx.transport import ExposeOptions, Grant, Transport, Unavailable, Viable
from tests.support.lying import held_model

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
    tcp = plugins.transports()["tcp"]
    assert isinstance(tcp, plugins.LazyTransport)
    assert type(tcp.loaded()).__module__ == "mx_transports.tcp"


@pytest.mark.usefixtures("plugin")
def test_a_plugin_is_imported_once_when_it_is_first_asked() -> None:
    good = plugins.transports()["good"]
    assert isinstance(good, plugins.LazyTransport) and good.name == "good"
    assert "a_plugin" not in sys.modules
    found: list[Transport] = []
    threads = [threading.Thread(target=lambda: found.append(good.loaded())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "a_plugin" in sys.modules
    assert len(found) == 8 and len({id(each) for each in found}) == 1


LOADED = "sorted(n for n in sys.modules if n.startswith('mx_transports'))"
LISTS = f"""
import json, sys
from mx import plugins
found = plugins.transports()
assert found["tcp"].name == "tcp" and plugins.names()[:2] == ["shm", "tcp"]
print(json.dumps({LOADED}))
"""
PULLS = f"""
import json, sys
import mx
with mx.pull("m", peer=sys.argv[1]) as pull:
    pull.wait(30)
print(json.dumps({LOADED}))
"""


def loaded_by(program: str, *arguments: str) -> set[str]:
    """The transports whose modules a program has in the end, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        check=True,
    )
    return {name.split(".")[1] for name in json.loads(done.stdout) if "." in name} - {"toolkit"}


def test_without_plugins_the_library_of_metadata_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import sys
from mx import plugins
assert plugins.names() == [*plugins.BUILT_IN], plugins.names()
assert "importlib.metadata" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    (tmp_path / "not a folder").write_bytes(b"")
    (tmp_path / "other-1.0.dist-info").mkdir()
    for name in ("", "not there", "not a folder"):
        monkeypatch.syspath_prepend(tmp_path / name)
        assert plugins.names() == [*plugins.BUILT_IN]


def test_a_plugin_in_an_archive_is_found(tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("z-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: z\nVersion: 1.0\n")
        file.writestr("z-1.0.dist-info/entry_points.txt", "[mx.transports]\narchived = a:b\n")
    # In a process of its own: the library leaves the archive open.
    code = f"import sys; sys.path.insert(0, {str(archive)!r})\n" + (
        "from mx import plugins; assert 'archived' in plugins.names(), plugins.names()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_listing_transports_imports_none() -> None:
    assert loaded_by(LISTS) == set()


@pytest.mark.integration
@pytest.mark.parametrize("offered", ["tcp", "shm"])
def test_a_pull_imports_the_transports_that_its_source_offers(offered: str) -> None:
    loop = runtime.acquire()
    try:
        options = api.source_options(config.load(environ={"HOME": "/nonexistent"}))
        only = {offered: plugins.transports()[offered]}
        server = loop.run(api.start_source(options, only))
        try:
            loop.run(server.offer(held_model("m")))
            assert loaded_by(PULLS, server.endpoint) == {offered}
        finally:
            loop.run(server.close())
    finally:
        runtime.release(loop)
