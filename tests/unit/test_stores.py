"""What a store promises: steps are atomic, the stream may begin again, and state stays."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mx.coordinator.marks import Marks
from mx.coordinator.proofs import Proofs
from mx.coordinator.state import CoordinatorState, open_state
from mx.coordinator.stores import encoding
from mx.coordinator.stores.draft import Draft
from mx.coordinator.stores.encoding import copied, decode, encode
from mx.coordinator.stores.kept import KeptStore
from mx.coordinator.stores.sqlite import SqliteStore
from mx.coordinator.watchers import MeantLog, Watcher, WatchLog
from mx.core.changes import Change, ChangeKind, NameMeaning, Tail
from mx.core.marks import Mark
from mx.core.memory_store import MemoryStore
from mx.core.ownership import Receipt
from mx.core.registry import RegisteredSource, Registry
from mx.core.store import CountedKind, Store
from mx.core.topology import Fact, Place
from mx.core.types import ModelKey, SourceState
from mx.errors import BindingError, CapacityError, ConfigError, UnknownModelError
from tests.support.owners import owned
from tests.support.places import nvlink_host
from tests.support.records import (
    by_digest,
    make_documents,
    make_record,
    register_source,
    registration,
)
from tests.support.stores import FollowedRegistry, new_store

DOCUMENTS = make_documents("A")
SECRET = b"s" * 16
RANKS = ("tp=0/2", "tp=1/2")


@asynccontextmanager
async def opened(store: Store) -> AsyncIterator[Store]:
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state.db")


# -- every kind ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("each_store")
class TestConformance:
    """What every kind of store promises."""

    async def test_a_refusal_is_a_result_and_what_was_written_before_it_stays(self) -> None:
        async with opened(new_store()) as store:

            def refuse() -> None:
                store.count(CountedKind.MODELS, "a", 1)
                store.append(NameMeaning("llama", "b", "main"))
                raise BindingError("bound to other weights")

            with pytest.raises(BindingError):
                await store.atomically(refuse)
            assert store.counted(CountedKind.MODELS, "a") == (1, 1) and store.latest == 1

    async def test_steps_see_what_they_write_and_others_see_it_when_it_is_kept(self) -> None:
        async with opened(new_store()) as store:
            registry = Registry(store)
            record = make_record(DOCUMENTS)
            for digest, data in by_digest(DOCUMENTS).items():
                store.put_document(digest, data)

            def steps() -> int:
                register_source(registry, 0, record, SECRET, address="a")
                state = store.name("llama")
                assert state is not None and state.bound is not None
                assert [s.record.source_id for s in store.sources()] == [record.source_id]
                assert [state.name for state in store.names()] == ["llama"]
                return store.counted(CountedKind.SOURCES, "a")[0]

            assert await store.atomically(steps) == 1
            assert store.source(record.source_id) is not None
            assert store.counted(CountedKind.SOURCES, "a") == (1, 1)
            await store.atomically(lambda: registry.deregister(0, record.source_id, SECRET))
            assert store.source(record.source_id) is None
            assert store.gone(record.source_id) is not None
            assert store.counted(CountedKind.SOURCES, "a") == (0, 0)

    async def test_many_steps_at_once_all_take_effect(self) -> None:
        async with opened(new_store()) as store:

            async def count() -> None:
                def steps() -> None:
                    store.count(CountedKind.MODELS, "a", 1)
                    store.append(
                        NameMeaning("llama", "b", str(store.counted(CountedKind.MODELS, "a")[1]))
                    )

                await store.atomically(steps)

            await asyncio.gather(*(count() for _ in range(200)))
            assert store.counted(CountedKind.MODELS, "a") == (200, 200)
            found = store.read(0)
            assert found is not None
            assert [e.revision for e in found if isinstance(e, NameMeaning)] == [
                str(n) for n in range(1, 201)
            ]

    async def test_an_epoch_begins_once(self) -> None:
        async with opened(new_store()) as store:
            first = store.epoch
            await store.begin_epoch(first, store.clock() + 5)
            second = store.epoch
            assert second != first and store.doubt_until_s > store.clock()
            await store.begin_epoch(first, 0.0)
            assert store.epoch == second
            await store.begin_epoch(second, store.clock() + 5, 1000)
            assert store.epoch != second and store.latest == 1000 and store.read(0) is None
            await store.atomically(lambda: store.append(NameMeaning("llama", "b", "main")))
            assert store.latest == 1001 and store.read(1000) == [NameMeaning("llama", "b", "main")]
            await store.catch_up()
            before = store.clock()
            await asyncio.sleep(0.01)
            assert before < store.clock() < before + 60

    async def test_steps_that_fail_otherwise_leave_nothing(self) -> None:
        store = new_store()
        if isinstance(store, MemoryStore) and not isinstance(store, KeptStore):
            pytest.skip("what is in memory only takes effect at once")
        async with opened(store):

            def break_off() -> None:
                store.append(NameMeaning("llama", "b", "main"))
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await store.atomically(break_off)
            assert store.latest == 0 and store.read(0) == []


# -- a file ----------------------------------------------------------------------------------------


async def test_what_was_bound_outlives_its_coordinator(path: str) -> None:
    """After a restart each lease gets a full period, names keep their owners, documents stay."""
    record = owned(make_record(DOCUMENTS), b"owner")
    first = open_state(f"sqlite:{path}", lease_s=5.0)
    await first.open()
    epoch = first.epoch
    await first.register(registration(record, SECRET), by_digest(DOCUMENTS))
    await first.close()
    assert os.listdir(os.path.dirname(path)) == ["state.db"]
    assert os.stat(path).st_mode & 0o777 == 0o600
    async with opened(SqliteStore(path)) as store:
        later, seen = CoordinatorState(store, lease_s=5.0, grace_s=10.0), list[Tail]()
        clock = later.now()
        later.now = lambda: clock
        later.follow(seen.append)
        assert store.epoch == epoch and seen[0].begins_again
        assert [change.record.source_id for change in seen[0].changes] == [record.source_id]
        clock += 1000
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


async def test_a_receipt_of_an_earlier_epoch_does_not_count_after_a_restart(path: str) -> None:
    """Nothing was lost since: who has the name by now keeps it."""
    others = make_documents("B")

    async def live(receipt: Receipt | None = None) -> tuple[RegisteredSource, list[bool]]:
        store = SqliteStore(path)
        state = CoordinatorState(store, lease_s=5.0, grace_s=0.2)
        await state.open()
        try:
            record = owned(make_record(others), b"alice")
            if receipt is None:
                alice = await state.register(registration(record, SECRET), by_digest(others))
                await store.begin_epoch(store.epoch, 0.0)  # long ago
                await state.event(
                    lambda registry, now: registry.deregister(now, record.source_id, SECRET)
                )
                await asyncio.sleep(0.3)
                bob = owned(make_record(DOCUMENTS), b"bob")
                given = await state.register(registration(bob, SECRET), by_digest(DOCUMENTS))
                assert not given.record.pin_only
                return alice, []
            asked = registration(record, SECRET)
            given = await state.register(asked, by_digest(others), receipt=receipt)
            models = await state.ask(Registry.models)
            return given, [each.pin_only for each in models if each.ref == record.ref]
        finally:
            await state.close()

    alice, _ = await live()
    assert alice.receipt is not None
    given, alices = await live(alice.receipt._replace(this_life=False))
    assert given.record.pin_only and alices == [True]


async def test_restarts_do_not_keep_a_source_that_is_not_heard_of(path: str) -> None:
    """One that is heard of has a full period after each."""
    alive, dead = (owned(make_record(DOCUMENTS), owner) for owner in (b"alive", b"dead"))
    state = open_state(f"sqlite:{path}", lease_s=1.0)
    await state.open()
    for each in (alive, dead):
        record = replace(each, model=ModelKey(each.source_id))
        await state.register(registration(record, SECRET), by_digest(DOCUMENTS))
    await state.close()
    seen: list[set[str]] = []
    until_s = time.monotonic() + 60
    while not seen or seen[-1] != {alive.source_id}:
        assert time.monotonic() < until_s
        state = open_state(f"sqlite:{path}", lease_s=1.0)
        await state.open()
        seen.append({each.record.source_id for each in await state.ask(Registry.sources)})
        await asyncio.sleep(0.6)
        await state.event(
            lambda registry, now: registry.heartbeat(
                now, alive.source_id, SECRET, SourceState.SERVING
            )
        )
        await state.close()
    assert len(seen) > 2 and seen[0] == {alive.source_id, dead.source_id}


async def test_what_is_kept_beside_a_commit_puts_nothing_back(path: str) -> None:
    store = SqliteStore(path)
    async with opened(store):
        commit_all, begun, goes_on = store._commit_all, threading.Event(), threading.Event()

        def slowly(draft: Draft, *others: Any) -> None:
            if draft.writes:
                begun.set()
                assert goes_on.wait(60)
            commit_all(draft, *others)

        store._commit_all = slowly  # type: ignore[assignment, method-assign]
        appending = asyncio.create_task(
            store.atomically(lambda: store.append(NameMeaning("llama", "b", "main")))
        )
        while not begun.is_set():
            await asyncio.sleep(0.001)
        beside = asyncio.create_task(store._write(Draft()))
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(appending, beside)
        assert store._db is not None
        assert store._db.execute("SELECT latest FROM state").fetchone() == (1,)


async def test_the_clock_of_a_file_stands_still_while_nothing_runs(path: str) -> None:
    async with opened(SqliteStore(path)) as store:
        await asyncio.sleep(0.05)
        ended = store.clock()
    async with opened(SqliteStore(path)) as store:
        assert 0.05 <= ended <= store.clock() < ended + 30


async def test_one_process_at_a_time_has_a_file(path: str) -> None:
    async with opened(SqliteStore(path)):
        with pytest.raises(ConfigError, match="another process uses"):
            async with opened(SqliteStore(path)):
                pass
    async with opened(SqliteStore(path)):
        pass


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()


def _newer(path: Path) -> None:
    asyncio.run(_made(path))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def _cut(path: Path) -> None:
    asyncio.run(_made(path))
    os.truncate(path, 8192)


def _other_values(path: Path) -> None:
    asyncio.run(_made(path))
    with sqlite3.connect(path) as db:
        db.execute("""INSERT INTO names VALUES ('x', '{"c":"Path","f":{}}')""")
    db.close()


async def _made(path: Path) -> None:
    async with opened(SqliteStore(str(path))):
        pass


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_bytes(b"weights, not state" * 1000), "damaged"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 9000), "damaged"),
        (_foreign, "another program"),
        (_newer, "later version"),
        (_cut, "damaged"),
        (_other_values, "not what mx writes"),
        (lambda path: path.mkdir(), "cannot be used"),
        (lambda path: (path.touch(), path.chmod(0o644)), "open to other users"),
    ],
)
def test_files_that_are_no_state_are_refused_and_left_alone(
    path: str, spoil: Callable[[Path], object], says: str
) -> None:
    file = Path(path)
    spoil(file)
    if file.is_file() and file.stat().st_mode & 0o777 == 0o644 and says != "open to other users":
        file.chmod(0o600)
    before = file.read_bytes() if file.is_file() else b""

    async def begin() -> None:
        async with opened(SqliteStore(path)):
            pass

    with pytest.raises(ConfigError, match=says):
        asyncio.run(begin())
    assert not file.is_file() or file.read_bytes() == before


async def test_a_full_disk_refuses_what_is_new_and_goes_on(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = open_state(f"sqlite:{path}", lease_s=5.0)
    await state.open()
    store = state._store
    assert isinstance(store, SqliteStore) and store._db is not None
    record = make_record(DOCUMENTS)
    await state.register(registration(record, SECRET), by_digest(DOCUMENTS))
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    many = make_documents("B", nbytes=1 << 20)
    other = make_record(many, name="other")
    for _ in range(3):
        with pytest.raises(CapacityError, match="full"):
            await state.register(registration(other, SECRET), by_digest(many))
    assert await state.ask(Registry.models)
    await state.event(
        lambda registry, now: registry.heartbeat(now, record.source_id, SECRET, SourceState.SERVING)
    )
    assert sum("state.trouble" in line for line in caplog.messages) == 1
    with pytest.raises(UnknownModelError):
        await state.ask(lambda registry: registry.resolve("other"))
    store._db.execute("PRAGMA max_page_count = 1000000")
    await state.register(registration(other, SECRET), by_digest(many))
    assert (await state.ask(lambda registry: registry.resolve("other"))).sources
    await state.close()
    async with opened(SqliteStore(path)) as again:
        assert len([*again.sources()]) == 2


async def test_where_nothing_can_be_kept_time_ends_nothing(path: str) -> None:
    state = open_state(f"sqlite:{path}", lease_s=0.1)
    await state.open()
    store = state._store
    assert isinstance(store, SqliteStore) and store._db is not None
    record = make_record(DOCUMENTS)
    await state.register(registration(record, SECRET), by_digest(DOCUMENTS))
    store._in_trouble(CapacityError("no space"))
    keep_rest = store._keep_rest

    async def fails() -> None:
        raise CapacityError("no space")

    store._keep_rest = fails  # type: ignore[method-assign]
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        assert len(await state.ask(Registry.sources)) == 1
        await asyncio.sleep(0.1)
    store._keep_rest = keep_rest  # type: ignore[method-assign]
    while await state.ask(Registry.sources):
        await asyncio.sleep(0.05)
    await state.close()


async def test_a_mark_of_a_lost_life_makes_doubt_once_and_not_after_each_start(path: str) -> None:
    async def live() -> set[str]:
        async with opened(SqliteStore(path)) as store:
            proofs, begun = Proofs(b"k" * 32, store.clock, lambda: store.epoch), store.epoch
            await Marks(store, proofs, 0.01).heed(proofs.mark(Mark("lost", 5000)))
            await asyncio.sleep(0.02)  # the doubt ends
            return {begun, store.epoch}

    assert len(await live() | await live() | await live()) == 2


# -- several coordinators, and watches -------------------------------------------------------------


@pytest.mark.usefixtures("each_store")
async def test_watches_begin_again_where_the_stream_does() -> None:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(new_store()))
        assert isinstance(store, MemoryStore)
        store._kept_entries = 1
        for digest, data in by_digest(DOCUMENTS).items():
            store.put_document(digest, data)
        await begin_again(store)


async def begin_again(store: Store) -> None:
    registry, log, names = Registry(store), WatchLog(), MeantLog()
    watcher, position = Watcher(log), None

    def look() -> tuple[bool, list[Change], list[NameMeaning]]:
        nonlocal position
        tail = store.tail(position)
        position = tail.latest
        log.push(tail.changes, begins_again=tail.begins_again)
        names.push(tail.meant, begins_again=tail.begins_again)
        changes = [each for each in watcher.take(9) if isinstance(each, Change)]
        return tail.begins_again, changes, watcher.take_meant(names)

    one, two = (make_record(DOCUMENTS, variant=each) for each in RANKS)
    assert look() == (True, [], [])
    await store.atomically(lambda: register_source(registry, 0, one, SECRET))
    begins_again, changes, meant = look()
    assert begins_again and [change.kind for change in changes] == [ChangeKind.UP]
    assert meant == [NameMeaning("llama", "tp=*/2", "main")]

    def replace_one() -> None:
        registry.deregister(0, one.source_id, SECRET)
        register_source(registry, 0, replace(two, model=ModelKey("other")), SECRET)
        registry.heartbeat(0, two.source_id, SECRET, SourceState.DRAINING)

    await store.atomically(replace_one)
    begins_again, changes, meant = look()
    assert begins_again
    assert {change.record.source_id: change.kind for change in changes} == {
        one.source_id: ChangeKind.GONE,
        two.source_id: ChangeKind.UP,
    }
    assert changes[-1].record.state is SourceState.DRAINING


# -- encoding --------------------------------------------------------------------------------------


def test_only_what_mx_keeps_is_read() -> None:
    record = make_record(DOCUMENTS)
    assert decode(encode(record)) == record
    assert decode(encode((1, "a", b"\xff", None, 1.5, {"a": {"b"}}))) == (
        1, "a", b"\xff", None, 1.5, {"a": {"b"}},
    )  # fmt: skip
    for text in (
        '{"c":"Popen","f":{}}', '{"c":"ChangeKind","f":{}}', '{"c":"Listed","f":{"x":1}}',
        '{"c":"Listed","e":1}', '{"z":[]}', '{"b":"zz"}', "[" * 100_000, "{", '{"l":1}', "\xff",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="not what mx writes"):
            decode(text)
    with pytest.raises(TypeError):
        encode(object())


def test_all_of_a_place_is_kept() -> None:
    place = replace(nvlink_host(), device="cuda", facts=(Fact("fabric", b"east".hex()),))
    assert decode(encode(place)) == place
    for field in fields(Place):
        assert getattr(place, field.name) != field.default, field.name


def test_names_that_are_written_stay() -> None:
    for name in ("Answered", "Gone", "Kept", "Listed", "Meant"):
        assert name in encoding._CLASSES


def test_a_copy_shares_nothing_that_changes() -> None:
    registry = FollowedRegistry()
    register_source(registry, 0, owned(make_record(DOCUMENTS), b"o"), SECRET)
    state = registry.store.name("llama")
    assert state is not None
    before, copy = encode(state), copied(state)
    assert encode(copy) == before
    ((_, binding),) = copy.bound.revisions["main"].variants.items()
    binding.sources["other"] = b""
    copy.bound.revisions["x"] = copy.bound.revisions["main"]
    copy.meant["x"] = "y"
    assert encode(state) == before


async def test_a_registration_whose_caller_is_cancelled_keeps_its_documents(path: str) -> None:
    """What is queued takes effect all the same, and can be registered again."""
    state = open_state(f"sqlite:{path}")
    await state.open()
    try:
        asked = registration(make_record(DOCUMENTS), SECRET)
        registering = asyncio.create_task(state.register(asked, by_digest(DOCUMENTS)))
        assert isinstance(state.store, KeptStore)
        while not state.store._queue:
            assert not registering.done()
            await asyncio.sleep(0)
        registering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await registering
        while not [*state.store.sources()]:
            await asyncio.sleep(0.01)
        assert all(state.document(digest) for digest in by_digest(DOCUMENTS))
        assert await state.missing([*by_digest(DOCUMENTS)]) == []
        await state.register(asked, {})
    finally:
        await state.close()
