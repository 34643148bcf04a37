"""The puller's own endings: cancelled, surprised, offered too little."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from mx import discovery, plugins
from mx.core.planner import SourcePath
from mx.core.topology import Place
from mx.errors import (
    ClosedError,
    ConfigError,
    DigestError,
    IncompleteError,
    LocalError,
    MxError,
    PeerProtocolError,
    SourceChangedError,
    StaleGenerationError,
)
from mx.fetching.connector import Connector
from mx.fetching.events import EventLog
from mx.fetching.job import UNUSABLE, Job
from mx.fetching.options import PullOptions
from mx.fetching.paths import plan_paths
from mx.fetching.reads import Connection
from mx.memory.in_place import InPlace
from mx.runtime import uncut
from mx.storage.stores import DiskStore
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


def saved(path: Path, fill: float) -> DiskStore:
    save_file({"weight": torch.full((3,), fill)}, path)
    return DiskStore(path)


def ended(options: PullOptions) -> tuple[Job, EventLog]:
    async def main() -> tuple[Job, EventLog]:
        state = EventLog(0.0)
        job = Job(options, plugins.transports(), state)
        await job.run()
        return job, state

    return asyncio.run(main())


def test_an_attempt_begins_with_nothing_of_the_one_before(tmp_path: Path) -> None:
    wrong, right = saved(tmp_path / "a.safetensors", 1.0), saved(tmp_path / "b.safetensors", 2.0)
    alone, _ = ended(PullOptions("m", from_sources=False, stores=(right,)))
    assert alone.edition.manifest is not None
    name = f"m@{alone.edition.manifest.ref.identity.hex()}"
    target = {"weight": torch.zeros(3)}
    into = InPlace(lambda: target)
    job, state = ended(PullOptions(name, peer="127.0.0.1:9", stores=(wrong, right), into=into))
    assert state.report is not None and state.report.fallback == "disk"
    assert (
        job.edition.manifest is not None and job.edition.manifest.ref == alone.edition.manifest.ref
    )
    assert [path.source for path in state.report.paths] == [right.place]
    assert job.edition.pages is not None and not job.edition.pages.missing
    assert job.progress().bytes_done == job.progress().bytes_total == 12
    assert torch.equal(target["weight"], torch.full((3,), 2.0))
    assert job.kept == "" and job.edition.arena is not None
    job.edition.arena.release()
    into.release()


def test_a_failed_pull_tells_of_what_any_of_its_attempts_has_written(tmp_path: Path) -> None:
    wrong, absent = saved(tmp_path / "a.safetensors", 1.0), DiskStore(tmp_path / "absent")
    into = InPlace(lambda: {"weight": torch.zeros(3)})
    name = f"m@{'0' * 64}"
    job, state = ended(PullOptions(name, peer="127.0.0.1:9", stores=(wrong, absent), into=into))
    assert isinstance(state.error, ConfigError) and UNUSABLE in state.error.hint
    assert job.kept == UNUSABLE
    assert (job.edition.manifest, job.edition.arena, job.edition.layout) == (None, None, None)
    into.release()


@pytest.mark.parametrize(
    ("causes", "follows"),
    [
        ("updated", True),
        ("written", False),
        ("written updated", True),
        ("updated written", True),
        ("lied written updated", True),
        ("noticed", True),  # what the source says of it was not heard
        ("noticed written", False),
        ("written noticed", False),
        ("written noticed updated", True),
        ("lied", False),
        ("", False),
    ],
)
def test_a_follower_goes_on_where_any_source_was_updated(causes: str, follows: bool) -> None:
    kinds = {
        "updated": StaleGenerationError("a was updated", peer="a"),
        "written": SourceChangedError("b has changed its memory", peer="b"),
        "noticed": StaleGenerationError("b: its memory has changed", peer="b"),
        "lied": DigestError("c sent other bytes", peer="c"),
    }

    async def main() -> bool:
        job = Job(PullOptions("m", follow=True), plugins.transports(), EventLog(0.0))
        job._history.causes += [kinds[each] for each in causes.split()]
        return job._may_follow(IncompleteError("no source was left"))

    assert asyncio.run(main()) is follows


def test_sources_of_other_machines_are_reached_where_there_is_a_network() -> None:
    if not discovery.interface_addresses():
        pytest.skip("this machine has no interface but loopback")

    async def place() -> Place:
        return Job(PullOptions("m"), plugins.transports(), EventLog(0.0))._context.place.result()

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

        connector = Connector(PullOptions("m"), Place, {}, on_change)
        lease = Lease(cast(Any, _NoChannel()), record, on_change)
        path = SourcePath(record, "shm", 1.0, True, "")
        connection = Connection(path, lease, cast(Session, session))
        assert len(await connector.attach(connection, 60)) == 60
        with pytest.raises(PeerProtocolError, match="100 bytes"):
            await connector.attach(connection, 101)
        assert isinstance(lease.check(), ClosedError)

    asyncio.run(main())
    assert session.closed


def test_leases_are_asked_for_before_the_manifest_is_decoded() -> None:
    record = make_record(make_documents("a"))  # nobody listens there
    path = SourcePath(record, "tcp", 1.0, False, "")

    async def main() -> None:
        connector = Connector(PullOptions("m"), Place, {}, lambda: None)
        try:
            await connector.begin([path])
            (lease,) = connector._leases
            assert lease._call is not None
            with pytest.raises(MxError):
                await connector._begun[path]
        finally:
            await connector.close()

    asyncio.run(main())


class _NoChannel:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


def test_a_coordinator_is_asked_before_the_interfaces_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading them takes a millisecond; one that is named must be there, and is looked for."""
    may_read = threading.Event()

    def slow(options: PullOptions) -> Place:
        assert may_read.wait(60)
        return Place(boot_id="here")

    async def place_of(options: PullOptions) -> Future[Place]:
        return Job(options, {}, EventLog(0.0))._context.place

    with monkeypatch.context() as patch:
        patch.setattr("mx.fetching.job.target_place", slow)
        found = asyncio.run(place_of(PullOptions("m")))
        assert not found.done()
        may_read.set()
        assert found.result(60).boot_id == "here"
    with pytest.raises(ConfigError, match="mx-none"):
        asyncio.run(place_of(PullOptions("m", nics=("mx-none0",))))


def test_a_pull_begins_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs one then fails with its own error."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def place() -> Place:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            return Job(PullOptions("m"), {}, EventLog(0.0))._context.place.result()

    assert asyncio.run(place()).boot_id == discovery.here().boot_id
