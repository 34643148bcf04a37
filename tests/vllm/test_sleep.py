"""vLLM's sleep over the stand-in driver: its worker's own methods and its own allocator, in whose
pool the weights are; the extension below that allocator is a stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx
from mx.errors import MxError
from tests.support.daemon import ended, python
from tests.support.driver.build import MAJORS, environment, why_not
from tests.vllm.checkpoints import bare, write_checkpoint
from tests.vllm.hosts import (
    EngineError,
    Host,
    host,
    lending,
    start,
    wait_for,
)

_MAJOR = MAJORS[-1]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_not(_MAJOR)), reason=why_not(_MAJOR)),
]

#: Serves what it has pulled under the same key, slowly, and dies while it gives it.
_DYING_PEER = """
import os, sys, time, mx
name, variant, coordinator, files = sys.argv[1:]
pull = mx.pull(name, variant=variant, coordinator=coordinator)
source = mx.serve(pull.state_dict(), model=name, variant=variant, coordinator=coordinator,
                  files=files, max_bandwidth="2MB/s")
while not source.stats().readers:
    time.sleep(0.01)
time.sleep(1.5)  # so that some of the weights are there, and most are not
os._exit(1)
"""


@pytest.fixture(scope="module")
def wide(place: Path) -> Path:
    """A Llama of 11 MB, whose large tensors have segments of their own."""
    return write_checkpoint(
        place / "wide", seed=5, hidden_size=512, intermediate_size=1024, vocab_size=1024,
        num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hosts(coordinator: str, place: Path) -> Iterator[tuple[Host, Host]]:
    settings = {"HOST_ACCESS": True, "KERNELS": True}
    over = {
        name: value
        for name, value in environment(_MAJOR, settings).items()
        if name.startswith(("MX_STANDIN_", "LD_LIBRARY_PATH", "PYTHONPATH"))
    } | {"MX_TEST_SLEEP": "1"}
    logs = place / "a.log", place / "b.log"
    with host(coordinator, logs[0], **over) as a, host(coordinator, logs[1], **over) as b:
        yield a, b


def used_bytes(engine: Host) -> list[int]:
    """Return how much of the GPU an engine has awake, asleep at both levels, and awake again."""
    found = [engine.do("used_bytes"), engine.do("sleep", 1)]
    assert engine.do("wake")
    found += [engine.do("used_bytes"), engine.do("sleep", 2)]
    assert engine.do("wake")
    return [*found, engine.do("used_bytes")]


@pytest.mark.slow
def test_sleep_frees_what_it_frees_without_mx(hosts: tuple[Host, Host], wide: Path) -> None:
    a, b = hosts
    before = b.do("used_bytes")
    ordinary = b.do("start", str(wide), load_format="auto", gpu=True)
    without = used_bytes(b)
    awake, asleep = without[0] - before, without[1] - before
    assert asleep == 0 and awake > 10 << 20
    assert [each - before for each in without] == [awake, 0, awake, 0, awake]

    start(a, wide, "s", gpu=True)  # the processed state, which it has from disk
    assert lending(a)["lending"] == "lending", a.status()["why"]
    two = start(b, bare(wide), "s", gpu=True)
    assert lending(b)["loads"] == {"processed": 1}
    assert two["generated"] == ordinary["generated"]
    assert b.do("sleep", 1) == before
    assert b.do("wake")
    assert lending(b)["lending"] == "lending", b.status()["why"]  # listed again, as it was
    assert b.do("generate") == ordinary["generated"]
    assert used_bytes(b) == without
    assert b.status()["lending"] == "changing"  # what was discarded was not written again
    assert used_bytes(a) == without  # it has lent to another

    start(a, wide, "l", gpu=True, extra={"state": "loaded"})
    assert lending(a)["lending"] == "lending", a.status()["why"]
    start(b, bare(wide), "l", gpu=True, extra={"state": "loaded"})
    assert lending(b)["loads"] == {"loaded": 1}
    assert b.do("sleep", 1) == before
    assert b.do("wake")
    assert lending(b)["lending"] == "lending", b.status()["why"]
    assert used_bytes(b) == without


def test_waking_takes_the_weights_from_a_peer(
    hosts: tuple[Host, Host], wide: Path, coordinator: str
) -> None:
    a, b = hosts
    start(a, wide, "w", gpu=True)
    assert lending(a)["lending"] == "lending", a.status()["why"]
    one = start(b, wide, "w", gpu=True, extra={"wake": "peer"})
    status = lending(b)
    assert (status["lending"], status["loads"]) == ("lending", {"processed": 1})
    before = b.do("used_bytes")
    asleep = b.do("sleep", 2)
    assert asleep < before - (10 << 20)
    assert b.do("wake")
    assert b.status() == status  # it lends again, under the same revision
    assert b.do("look")["tensors"] == one["tensors"]
    assert b.do("generate") == one["generated"]
    assert b.do("used_bytes") == before

    # The peer is gone: the engine takes no request, and says why; nothing is listed.
    assert b.do("sleep", 2) == asleep
    a.do("stop")
    with pytest.raises(EngineError, match="not taken from a peer"):
        b.do("wake")
    withdrawn(b, "w", coordinator)
    # A peer comes that dies while it gives: as before.
    start(a, wide, "w", gpu=True)
    gone = pytest.raises(EngineError, match="not taken from a peer")
    with dying_peer(a, "w", wide, coordinator), gone:
        b.do("wake")
    withdrawn(b, "w", coordinator)
    assert b.do("look")["tensors"] != one["tensors"]
    # vLLM's own way remains.
    b.do("call", "reload_weights")
    assert b.do("wake")
    assert b.do("generate") == one["generated"]
    assert b.status()["lending"] == "lending"


def test_a_failed_load_leaves_no_memory_behind(
    hosts: tuple[Host, Host], wide: Path, coordinator: str
) -> None:
    """The peer is killed while it fills tensors in the pool: the ordinary loader's remain."""
    a, _ = hosts
    start(a, wide, "f", gpu=True)
    without = a.do("used_bytes")
    with dying_peer(a, "f", wide, coordinator):
        start(a, wide, "f", gpu=True)
    assert a.status()["loads"] == {"ordinary": 1}
    assert "processed: " in a.said()  # it had begun
    assert a.do("used_bytes") == without


@contextlib.contextmanager
def dying_peer(first: Host, name: str, files: Path, coordinator: str) -> Iterator[None]:
    """Have a peer take an engine's weights, and the engine end; the peer dies while it gives."""
    variant = lending(first)["variant"]  # it may know by now of what checkpoint it is made
    with ended(python(_DYING_PEER, name, variant, coordinator, str(files))) as peer:
        wait_for(lambda: len(mx.list_sources(name, coordinator=coordinator)) == 2)
        first.do("stop")
        yield
        assert peer.wait(60) == 1


def withdrawn(engine: Host, name: str, coordinator: str) -> None:
    """Check that an engine serves nobody, and that its status says why."""
    status = engine.status()
    assert status["lending"] == "withdrawn", status
    assert "has not taken what sleep has discarded from a peer" in status["why"]
    wait_for(lambda: not mx.list_sources(name, coordinator=coordinator))  # a killed peer's lease
    assert engine.do("is_sleeping") and "engine.not_woken" in engine.said()


def test_sleep_while_a_pull_reads(hosts: tuple[Host, Host], wide: Path, coordinator: str) -> None:
    """No reader touches memory that is unmapped, and none gets a wrong byte."""
    a, _ = hosts
    start(a, wide, "p", gpu=True, extra={"max_bandwidth": "2MB/s"})
    variant = lending(a)["variant"]
    options: dict[str, Any] = {"variant": variant, "coordinator": coordinator, "wait_s": 0}
    with mx.pull("p", transport="tcp", **options) as pull:
        wait_for(lambda: any(s.readers for s in mx.list_sources("p", coordinator=coordinator)))
        a.do("sleep", 2)
        with pytest.raises(MxError):
            pull.wait(60)
    assert a.do("wake")  # its process lives
