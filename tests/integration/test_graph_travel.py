"""CUDA graphs as sets: recorded by a command, published, and found by the pin of the weights."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mx import config
from mx.artifacts import carry, publish
from mx.artifacts.recording import record
from mx.artifacts.trust import make_key
from mx.errors import ConfigError
from mx.graphs import find
from mx.graphs import record as record_graph
from mx.graphs.merge import Package
from mx.graphs.message import decode, encode
from tests.support.commands import environment
from tests.support.graphs import small

pytestmark = pytest.mark.integration

PIN, OTHER = 64 * "1", 64 * "2"
IMAGES = (b"an image", b"another image")
#: Exports, as a program does that has captured; and compiles something besides.
CAPTURES = """
import os, sys
from pathlib import Path
from blake3 import blake3
from mx import graphs
images = {blake3(data).hexdigest(): data for data in (b"an image", b"another image")}
for name in sys.argv[2:]:
    graphs.record(graphs.Package(Path(sys.argv[1]).read_bytes(), images, {}, 64 * "1"), name)
folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
folder.mkdir()
(folder / "x.so").write_bytes(b"object")
"""


def _graph() -> bytes:
    return encode(*(replace(small(), pin=PIN, name=name) for name in ("decode.1", "decode.8")))


@pytest.fixture
def asked(
    settings: config.Settings, coordinator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> config.Settings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in environment().items():
        monkeypatch.setenv(name, text)
    return config.given(settings, coordinator=coordinator)


@pytest.fixture
def published(tmp_path: Path, asked: config.Settings) -> tuple[Path, Path]:
    """Two sets, of graphs and of caches, of one recording; and a trust file."""
    (tmp_path / "graph").write_bytes(_graph())
    command = [sys.executable, "-c", CAPTURES, str(tmp_path / "graph"), "decode.1", "decode.8"]
    assert record(tmp_path / "caches", command) == 0
    key, trust = tmp_path / "key", tmp_path / "trust.toml"
    trust.write_text(
        f"[[signer]]\nname = 'farm'\nkey = '{make_key(key)}'\nmodels = ['m']\n", encoding="utf-8"
    )
    trust.chmod(0o600)
    for name, graphs in (("graphs", True), ("caches", False)):
        out = tmp_path / f"{name}.safetensors"
        publish(tmp_path / "caches", model="m", key=key, out=out, graphs=graphs)
    return tmp_path, trust


def test_graphs_are_found_by_the_pin_of_the_weights(
    published: tuple[Path, Path], asked: config.Settings
) -> None:
    folder, trust = published
    with (
        carry.serve(folder / "graphs.safetensors", settings=asked),
        carry.serve(folder / "caches.safetensors", settings=asked),
    ):
        found = find("m", pin=PIN, trust=trust, settings=asked)
        assert set(found.graphs) == {"decode.1", "decode.8"} and found.signer == "farm"
        graph = found.graphs["decode.8"]
        assert [each.name for each in decode(graph.message)] == ["decode.1", "decode.8"]
        assert all(each.pin == PIN for each in decode(graph.message))
        assert sorted(graph.images.values()) == sorted(IMAGES)
        assert all(graph.image(digest) == data for digest, data in graph.images.items())
        # What arrived was kept in memory alone.
        left = os.listdir(folder / "cache" / "mx" / "artifacts")
        assert all(name.startswith(".lock-") for name in left)
        other = find("m", pin=OTHER, trust=trust, settings=asked)
        assert not other.graphs and f"for the weights {PIN[:16]}" in other.reasons[0]
        assert carry.find("m", settings=asked)[0].kind != carry.find("m", settings=asked)[1].kind
    nothing = find("m", pin=PIN, trust=trust, settings=asked)
    assert not nothing.graphs and "no set of the kind cuda-graph" in nothing.reasons[0]
    with pytest.raises(ConfigError, match="not a whole pin"):
        find("m", pin=PIN[:8], trust=trust, settings=asked)


def test_one_set_is_for_the_weights_of_one_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package(_graph(), {}, {}, PIN)
    with pytest.raises(ConfigError, match="nothing is being recorded"):
        record_graph(package, "decode")
    monkeypatch.setenv(config.RECORDING_VARIABLE, str(tmp_path))
    record_graph(package, "decode")
    with pytest.raises(ConfigError, match="already"):
        record_graph(package, "decode")
    with pytest.raises(ConfigError, match="no pin"):
        record_graph(replace(package, pin=""), "other")
    for name in ("", "images", "../x", "a/b", ".x", "a\n", 200 * "x"):
        with pytest.raises(ConfigError, match="can't be a graph's name"):
            record_graph(package, name)
    assert sorted(os.listdir(tmp_path / "graphs" / PIN)) == ["decode", "images"]
