"""What a store promises: steps are atomic, the stream may begin again, and state stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mx.coordinator.state import State
from mx.coordinator.watchers import MeantLog, Watcher, WatchLog
from mx.core.changes import Change, ChangeKind, Meant, Tail
from mx.core.memory_store import MemoryStore
from mx.core.name_state import NameState
from mx.core.registry import Registry
from mx.core.store import Kind, Store
from mx.core.types import ModelKey, SourceState
from mx.errors import BindingError, UnknownModelError
from tests.support.owners import owned
from tests.support.records import (
    by_digest,
    make_documents,
    make_record,
    register_source,
    registration,
)
from tests.support.sqlite_store import SqliteStore, shutting

DOCUMENTS = make_documents("A")
SECRET = b"s" * 16
RANKS = ("tp=0/2", "tp=1/2")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state")


@pytest.fixture
def store(path: str) -> Iterator[SqliteStore]:
    with shutting(SqliteStore(path)) as made:
        yield made


async def test_steps_that_have_read_what_has_changed_run_again(store: SqliteStore) -> None:
    """Compare and set: of two coordinators that bind a name at once, the second sees the first."""
    registry, runs = Registry(store), list[int]()

    def bind_late() -> None:
        runs.append(store.latest)
        store.count(Kind.MODELS, "a", 1)
        if len(runs) > 1:
            raise BindingError("bound to other weights")
        read = NameState("llama")  # nothing was bound
        register_source(registry, 0, make_record(DOCUMENTS), SECRET)  # what the other one does
        store.decide(read)

    with pytest.raises(BindingError):
        await store.atomically(bind_late)
    # Nothing is left of the first run, and a refusal is no failure.
    assert runs == [0, 0] and store.counted(Kind.MODELS, "a") == (1, 1)
    assert store.name("llama") is None and not store.sources()


async def test_two_coordinators_over_one_store_see_one_list(path: str, store: SqliteStore) -> None:
    with shutting(SqliteStore(path)) as second:
        here, there = State(store), State(second)
        record = owned(make_record(DOCUMENTS), b"owner")
        await here.register(registration(record, SECRET), by_digest(DOCUMENTS))
        found = await there.ask(lambda registry: registry.resolve("llama"))
        assert [s.record.source_id for s in found.sources] == [record.source_id]
        others = make_documents("B")
        with pytest.raises(BindingError):
            await there.register(registration(make_record(others), SECRET), by_digest(others))
        await there.event(lambda registry, now: registry.deregister(now, record.source_id, SECRET))
        with pytest.raises(UnknownModelError):
            await here.ask(lambda registry: registry.resolve("llama"))


async def test_what_was_bound_outlives_its_coordinator(path: str) -> None:
    """After a restart each lease gets a full period, names keep their owners, documents stay."""
    record = owned(make_record(DOCUMENTS), b"owner")
    with shutting(SqliteStore(path)) as store:
        first, epoch = State(store, lease_s=5.0), store.epoch
        await first.register(registration(record, SECRET), by_digest(DOCUMENTS))
    with shutting(SqliteStore(path)) as store:
        later, seen = State(store, lease_s=5.0, grace_s=10.0), list[Tail]()
        clock = later.now() + 1000
        later.now = lambda: clock
        later.follow(seen.append)
        assert store.epoch == epoch and seen[0].begins_again
        assert [change.record.source_id for change in seen[0].changes] == [record.source_id]
        (listed,) = await later.ask(Registry.sources)
        assert listed.lease_until_s == clock + 15.0
        assert all(later.document(digest) for digest, _ in record.ref.documents)
        stranger = registration(owned(make_record(DOCUMENTS), b"stranger"), SECRET, replaces="main")
        with pytest.raises(BindingError, match="another name key"):
            await later.register(stranger, {})
        clock += 15.0  # it was not renewed
        assert await later.ask(Registry.sources) == []
        assert later.document(record.ref.identity) is not None
        clock += 10.0  # the binding ends, and then nothing holds its documents
        assert await later.ask(Registry.models) == []
        clock += 10.0
        await later.tick()
        assert later.document(record.ref.identity) is None


@pytest.mark.parametrize("made", [lambda: MemoryStore(time.monotonic, kept_entries=1), SqliteStore])
async def test_watches_begin_again_where_the_stream_does(made: Callable[[], Store]) -> None:
    with ExitStack() as closing_it:
        store = made()
        if isinstance(store, SqliteStore):
            closing_it.callback(store.shut)
        await begin_again(store)


async def begin_again(store: Store) -> None:
    registry, log, names = Registry(store), WatchLog(), MeantLog()
    watcher, position = Watcher(log), None

    def look() -> tuple[bool, list[Change], list[Meant]]:
        nonlocal position
        tail = store.tail(position)
        position = tail.latest
        log.push(tail.changes, begins_again=tail.begins_again)
        names.push(tail.meant, begins_again=tail.begins_again)
        return tail.begins_again, watcher.take(9), watcher.take_meant(names)

    one, two = (make_record(DOCUMENTS, variant=each) for each in RANKS)
    assert look() == (True, [], [])
    await store.atomically(lambda: register_source(registry, 0, one, SECRET))
    assert position is not None
    if isinstance(store, SqliteStore):
        store.forget_entries()
    begins_again, changes, meant = look()
    assert begins_again and [change.kind for change in changes] == [ChangeKind.UP]
    assert meant == [Meant("llama", "tp=*/2", "main")]

    def replace_one() -> None:
        registry.deregister(0, one.source_id, SECRET)
        register_source(registry, 0, replace(two, model=ModelKey("other")), SECRET)
        registry.heartbeat(0, two.source_id, SECRET, SourceState.DRAINING)

    await store.atomically(replace_one)
    if isinstance(store, SqliteStore):
        store.forget_entries()
    begins_again, changes, meant = look()
    assert begins_again
    assert {change.record.source_id: change.kind for change in changes} == {
        one.source_id: ChangeKind.GONE,
        two.source_id: ChangeKind.UP,
    }
    assert changes[-1].record.state is SourceState.DRAINING
    await store.atomically(lambda: registry.deregister(0, two.source_id, SECRET))
    begins_again, changes, meant = look()
    assert not begins_again and [change.kind for change in changes] == [ChangeKind.GONE]
