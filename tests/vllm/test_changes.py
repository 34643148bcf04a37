"""Weights that are written past vLLM's own updates: they are given to no reader any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mx
from tests.vllm.checkpoints import write_checkpoint
from tests.vllm.hosts import Host, host, lending, start, wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.integration]

WRITES = "tests.vllm.extension.Writes"


@pytest.fixture(scope="module")
def engine(coordinator: str, place: Path) -> Iterator[Host]:
    with host(coordinator, place / "changes.log") as found:
        yield found


def test_what_an_extension_writes_is_withdrawn_until_it_is_told(
    engine: Host, checkpoint: Path, coordinator: str, place: Path
) -> None:
    newer = write_checkpoint(place / "written", seed=7)
    file = str(newer / "model.safetensors")
    start(engine, checkpoint, "w", extra={"state": "processed"}, worker_extension_cls=WRITES)
    assert lending(engine)["lending"] == "lending"

    engine.do("call", "write_weights", file)  # as RL frameworks do
    status = engine.status()
    assert status["lending"] == "withdrawn" and "load_weights" in status["why"]
    assert not mx.list_sources("w", coordinator=coordinator)
    assert "engine.withdrawn" in engine.said()
    engine.do("call", "sleep", 1)
    engine.do("call", "wake_up")
    assert engine.status()["lending"] == "withdrawn", "sleep lends nothing that was half written"

    engine.do("call", "write_weights", file, True)
    status = engine.status()
    assert (status["lending"], status["revision"], status["why"]) == ("lending", "main.2", "")

    engine.do("call", "scale", "model.layers.1.input_layernorm.weight")
    wait_for(lambda: not mx.list_sources("w", coordinator=coordinator))  # nothing was called
    status = engine.status()
    assert status["lending"] == "withdrawn"
    assert "model.layers.1.input_layernorm.weight was written to" in status["why"]

    engine.do("call", "write_weights", file, True)
    assert engine.status()["lending"] == "lending"
    engine.do("call", "reset_weights")
    status = engine.status()
    assert status["lending"] == "withdrawn" and "reset_weights" in status["why"]


def test_what_was_lent_before_processing_ends(
    engine: Host, checkpoint: Path, coordinator: str
) -> None:
    start(engine, checkpoint, "copy", worker_extension_cls=WRITES)
    assert lending(engine)["lending"] == "lending"
    engine.do("call", "scale", "model.layers.1.input_layernorm.weight")
    wait_for(lambda: not mx.list_sources("copy", coordinator=coordinator))
    status = engine.status()
    assert status["lending"] == "withdrawn"
    assert "model.layers.1.input_layernorm.weight was written to" in status["why"]
