"""`mx plan` says where each source has the bytes, as the tables at the coordinator say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx import api, config, runtime
from mx.api import tables
from mx.coordinator.daemon import Coordinator
from mx.coordinator.state import CoordinatorState
from tests.integration.lending import lender
from tests.support.commands import Run, serve

pytestmark = pytest.mark.integration


def plan_json(run: Run, name: str, coordinator: str) -> dict[str, Any]:
    command = run("plan", name, "--coordinator", coordinator, "--json")
    assert command.wait() == 0
    return command.json()


def test_memory_is_shown_by_source_device_and_layer(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    served = json.loads(serve(run, checkpoint, "small", coordinator).out)
    found = plan_json(run, "small", coordinator)
    (arena,) = found["sources"]
    assert (arena["source"], arena["scattered"], arena["error"]) == (served["endpoint"], False, "")
    (region,) = arena["regions"]
    assert (region["device"], region["nbytes"], region["rows"]) == ("cpu", found["bytes"], 0)
    assert len(arena["layers"]) == found["layers"]
    with lender(coordinator) as lent:
        found = plan_json(run, "m", coordinator)
        (memory,) = found["sources"]
        assert memory["scattered"] and memory["devices"] == ["cpu"]
        (listed,) = api.list_tables("m", coordinator=coordinator)
        assert sum(each["rows"] for each in memory["regions"]) == len(listed.tensors) > 1
        by_layer: dict[str, int] = {}
        for tensor in listed.tensors:
            by_layer[tensor.layer] = by_layer.get(tensor.layer, 0) + tensor.nbytes
        assert {each["layer"]: each["nbytes"] for each in memory["layers"]} == by_layer
        assert sum(each["nbytes"] for each in memory["regions"]) == found["bytes"]
        assert all(path["devices"] == ["cpu"] for path in found["paths"])
        plain = run("plan", "m", "--coordinator", coordinator)
        assert plain.wait() == 0
        line = next(each for each in plain.out.splitlines() if "scattered" in each)
        assert line.split()[1:4] == ["scattered", "cpu", str(len(memory["regions"]))]
        assert lent.process.poll() is None


def forgetful(state: CoordinatorState) -> Callable[[bytes], bytes | None]:
    """Return a lookup of documents that has none of the rows of listed sources."""
    document = state.document
    rows = set[bytes]()
    state.follow(lambda tail: rows.update(c.record.table.rows_digest for c in tail.changes))
    return lambda digest: None if digest in rows else document(digest)


def test_what_can_not_be_read_is_said_and_the_plan_stands(
    monkeypatch: pytest.MonkeyPatch, settings: config.Settings
) -> None:
    """The coordinator has dropped the rows and their source is gone; or they are too many."""
    held = runtime.acquire()
    state = CoordinatorState()
    monkeypatch.setattr(state, "document", forgetful(state))
    coordinator = Coordinator(state=state)
    address = runtime.run(lambda: coordinator.start("127.0.0.1:0"))
    try:
        with lender(address) as lent:
            (memory,) = api.plan("m", coordinator=address, settings=settings).memories
            assert memory.layers and not memory.error  # the source gives them
            with monkeypatch.context() as few:
                few.setattr(tables, "_MOST_BYTES", 100)
                (memory,) = api.plan("m", coordinator=address, settings=settings).memories
            assert "rows would be more than are read" in memory.error and not memory.regions
            lent.process.kill()
            lent.process.wait()
            planned = api.plan("m", coordinator=address, settings=settings)
            (memory,) = planned.memories
            assert memory.error and not memory.layers and memory.devices == ("cpu",)
            assert planned.plan.chosen
    finally:
        runtime.run(coordinator.stop)
        runtime.release(held)
