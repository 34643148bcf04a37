"""Compile caches go from one vLLM to another, which compiles nothing then."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from mx import artifacts
from mx.artifacts.trust import make_key
from tests.support.daemon import ROOT
from tests.vllm.checkpoints import bare
from tests.vllm.hosts import Host, host, start

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]

NAME = "compiled-llama"
#: Starts an engine once, and writes what it generates.
WARM_UP = f"""
import json, sys
from pathlib import Path
from tests.vllm.host import Host, prepare
prepare()
host = Host()
made = host.start("{NAME}", enforce_eager=False, model_loader_extra_config={{"lend": False}})
Path(sys.argv[1]).write_text(json.dumps(made["generated"]))
host.stop()
"""


@pytest.fixture(scope="module")
def source(checkpoint: Path, coordinator: str) -> Iterator[None]:
    with mx.serve(checkpoint, model=NAME, coordinator=coordinator):
        yield


@pytest.fixture(scope="module")
def published(coordinator: str, place: Path, source: None) -> Iterator[tuple[str, list[Any]]]:
    """The public key of a listed set, and what the engine that was recorded has generated."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_CPU_CI_ENV": "0",
            "MX_PEER_COORDINATOR": coordinator,
            "MX_PEER_NAME_KEY": mx.config.load().name_key,
            "XDG_STATE_HOME": str(place / "state"),
            "PYTHONPATH": str(ROOT),
        }.items():
            patch.setenv(name, value)
        command = [sys.executable, "-c", WARM_UP, str(place / "made.json")]
        assert artifacts.record(place / "caches", command) == 0
    public = make_key(place / "publisher.key")
    package = place / "caches.safetensors"
    artifacts.publish(place / "caches", model=NAME, key=place / "publisher.key", out=package)
    with artifacts.serve(package, coordinator=coordinator):
        yield public, json.loads((place / "made.json").read_text())


@pytest.fixture(scope="module")
def target(coordinator: str, place: Path) -> Iterator[Host]:
    with host(
        coordinator,
        place / "target.log",
        VLLM_CPU_CI_ENV="0",
        XDG_CACHE_HOME=str(place / "cache"),
        TORCHINDUCTOR_CACHE_DIR=str(place / "own"),
    ) as found:
        yield found


def started(
    target: Host, model: Path, trust: Path, *keys: str, **options: Any
) -> tuple[str, dict[str, Any]]:
    """Start an engine from a folder without weights; return what became of the caches, too."""
    trust.write_text(
        "".join(f'[[signer]]\nname = "us"\nkey = "{key}"\nmodels = ["*"]\n' for key in keys)
    )
    trust.chmod(0o600)
    extra = {"artifacts": True, "trust": str(trust), "lend": False}
    found = start(target, model, NAME, extra=extra, **options)
    return str(target.status()["compile_caches"]), found


def objects(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.so")}


@pytest.mark.slow
def test_what_one_engine_compiled_another_uses(
    checkpoint: Path, place: Path, published: tuple[str, list[Any]], target: Host
) -> None:
    """The recorded engine had its configuration from a peer, the other has a folder. By then the
    target has refused an unknown signer and another configuration, in a line each, and started."""
    key, generated = published
    trust, model = place / "trust.toml", bare(checkpoint)

    other = make_key(place / "other.key")
    assert started(target, model, trust, other)[0] == "none"
    assert "engine.compile_caches" in target.said()
    assert not [path for path in (place / "cache" / "mx").rglob("*") if path.is_file()]

    state, _ = started(target, model, trust, key)
    assert state == "none"
    assert "its environment differs: configuration is compilation=" in target.said()

    own = objects(place / "own")
    state, made = started(target, model, trust, key, enforce_eager=False)
    assert state == "used", target.said()[-3000:]
    assert made["generated"] == generated
    recorded = objects(place / "caches")
    assert recorded and objects(place / "cache") == recorded
    assert objects(place / "own") == own


def test_the_key_of_compiled_code_has_no_path(checkpoint: Path, target: Host) -> None:
    keys = [target.do("cache_key", str(each)) for each in (checkpoint, bare(checkpoint))]
    assert keys[0] == keys[1]
    assert target.do("cache_key", str(checkpoint), max_model_len=64) != keys[0]
    plain = [
        target.do("cache_key", str(each), load_format="auto")
        for each in (checkpoint, bare(checkpoint))
    ]
    assert plain[0] != plain[1]  # or this is vLLM's own business by now
