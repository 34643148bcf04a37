"""The puller's own endings: cancelled, surprised, offered too little."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from mx import discovery, plugins
from mx.core.planner import SourcePath
from mx.core.topology import Place
from mx.errors import ClosedError, LocalError, MxError, PeerProtocolError
from mx.runtime import uncut
from mx.storage.stores import DiskStore
from mx.target.connector import Connector
from mx.target.events import EventLog
from mx.target.job import Job
from mx.target.options import PullOptions
from mx.target.paths import plan_paths
from mx.target.reads import Connection
from mx.transport import Session
from mx.wire.lease import Lease
from tests.support.records import make_documents, make_record


def test_work_that_is_uncut_ends_before_its_cancelled_caller() -> None:
    ended: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        ended.append("work")
        raise KeyError("not the caller's concern any more")

    async def caller() -> None:
        try:
            await uncut(work())
        finally:
            ended.append("caller")

    async def main() -> None:
        task = asyncio.create_task(caller())
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == ["work", "caller"]


class Surprising:
    """Memory that is not what the options say."""

    @property
    def nbytes(self) -> int:
        raise KeyError("unforeseen")


def outcome(options: PullOptions) -> MxError:
    async def main() -> MxError:
        state = EventLog(0.0)
        await Job(options, plugins.transports(), state).run()
        assert state.error is not None
        return state.error

    return asyncio.run(main())


def test_whatever_is_raised_ends_the_pull(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    into = cast(memoryview, Surprising())
    error = outcome(PullOptions("m", from_sources=False, stores=(DiskStore(path),), into=into))
    assert isinstance(error, LocalError)
    assert isinstance(error.__cause__, KeyError)


def test_a_pull_that_is_cancelled_is_closed(tmp_path: Path) -> None:
    async def main() -> MxError | None:
        state = EventLog(0.0)
        task = asyncio.create_task(
            Job(PullOptions("m", peer="127.0.0.1:9"), plugins.transports(), state).run()
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return state.error

    assert isinstance(asyncio.run(main()), ClosedError)


def test_sources_of_other_machines_are_reached_where_there_is_a_network() -> None:
    if not discovery.interface_addresses():
        pytest.skip("this machine has no interface but loopback")

    async def place() -> Place:
        return Job(PullOptions("m"), plugins.transports(), EventLog(0.0))._place

    elsewhere = Place(boot_id="another", addresses=("10.1.2.3",))
    far = replace(make_record(make_documents("a")), place=elsewhere)
    paths = plan_paths(PullOptions("m"), asyncio.run(place()), plugins.transports(), [far])
    assert [path.transport for path in paths.paths] == ["tcp"]


class Small:
    depth = 1
    closed = False

    def attach(self, region: int) -> memoryview:
        return memoryview(bytearray(100))

    def close(self) -> None:
        self.closed = True


def test_attached_memory_that_is_too_small_is_the_sources_error() -> None:
    record = make_record(make_documents("a"))
    session = Small()

    async def main() -> None:
        def on_change() -> None:
            raise AssertionError("the lease was lost")

        connector = Connector(PullOptions("m"), Place(), {}, on_change)
        lease = Lease(cast(Any, _NoChannel()), record, on_change)
        path = SourcePath(record, "shm", 1.0, True, "")
        connection = Connection(path, lease, cast(Session, session))
        assert len(await connector.attach(connection, 60)) == 60
        with pytest.raises(PeerProtocolError, match="100 bytes"):
            await connector.attach(connection, 101)
        assert isinstance(lease.check(), ClosedError)

    asyncio.run(main())
    assert session.closed


class _NoChannel:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None
