"""Coordinators over one real Redis, and what they do when it is stopped, full, empty or older."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mx.coordinator.state import CoordinatorState, open_state
from mx.core.changes import ChangeKind, Tail
from mx.core.registry import Registry
from mx.errors import BindingError, CapacityError, CoordinatorError, LocalError, MxError
from mx.redis_state import leases as redis_leases
from mx.redis_state import records as redis_records
from mx.redis_state import store as redis_module
from mx.redis_state.records import Commit, commit_of
from mx.redis_state.store import RedisStore
from tests.support.records import by_digest, make_documents, make_record, registration
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.redis_states import (
    DOCUMENTS,
    OTHERS,
    PATIENCE_S,
    SECRET,
    beat,
    end,
    ids,
    register,
    states,
    until,
)

pytestmark = [pytest.mark.integration, needs_redis]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_coordinators_see_one_state(server: RedisServer) -> None:
    async with states(server) as (here, there):
        seen: list[Tail] = []
        there.follow(seen.append)
        record = await register(here)
        await until(lambda: there._store.source(record.source_id))
        assert here.epoch == there.epoch
        assert all(there.document(digest) for digest, _ in record.documents)
        assert [c.kind for tail in seen for c in tail.changes] == [ChangeKind.UP]
        assert not seen[-1].begins_again  # the stream goes on
        await beat(here, record, readers=7)
        await until(lambda: there._store.source(record.source_id).readers == 7)  # type: ignore[union-attr]
        with pytest.raises(BindingError):
            state = await there.ask(lambda registry: registry.resolve("llama"))
            assert state.sources
            await there.register(registration(make_record(OTHERS), SECRET), by_digest(OTHERS))
        await end(there, record)
        await until(lambda: here._store.source(record.source_id) is None)
        assert here._store.gone(record.source_id) is not None


async def test_of_two_that_bind_a_name_at_once_one_has_it(server: RedisServer) -> None:
    async with states(server) as both:

        async def bind(state: CoordinatorState, number: int, documents: list[bytes]) -> bool:
            record = make_record(documents, name=f"n{number}")
            try:
                await state.register(registration(record, SECRET), by_digest(documents))
            except BindingError:
                return False
            return True

        tries = [
            bind(state, number, documents)
            for number in range(40)
            for state, documents in zip(both, (DOCUMENTS, OTHERS), strict=True)
        ]
        won = await asyncio.gather(*tries)
        assert all(a + b == 1 for a, b in zip(won[::2], won[1::2], strict=True))
        for state in both:
            await state._store.catch_up()
            models = await state.ask(Registry.models)
            assert len(models) == 40 and not any(each.pin_only for each in models)


async def test_a_lease_is_where_its_heartbeats_are(server: RedisServer) -> None:
    """A coordinator that hears no heartbeat asks Redis before it drops a source."""
    async with states(server, lease_s=2.0) as (here, there):
        there._store._hear = lambda records: None  # type: ignore[attr-defined]
        record, mute = await register(here), await register(here, "mute")
        until_s = time.monotonic() + 7.5  # more than three leases, as the first one is
        while time.monotonic() < until_s:
            await beat(here, record)
            await there.tick()
            assert record.source_id in await ids(there)
            await asyncio.sleep(0.1)
        give_up_s = time.monotonic() + PATIENCE_S
        while mute.source_id in await ids(there):
            await beat(here, record)
            assert time.monotonic() < give_up_s
            await asyncio.sleep(0.1)
        await here._store.catch_up()
        assert mute.source_id not in await ids(here)


async def test_a_stopped_redis_refuses_what_writes_and_ends_nothing(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with states(server, lease_s=1.0, answer_s=2.0) as (here, there):
        record = await register(here)
        await until(lambda: there._store.source(record.source_id))
        server.signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.raises(CoordinatorError, match="does not (answer|reach)"):
                await register(here, "other")
            assert time.monotonic() - began_s < PATIENCE_S
            await until(lambda: here._store._trouble and there._store._trouble)  # type: ignore[attr-defined]
            until_s = time.monotonic() + 4.0  # its lease would have ended
            while time.monotonic() < until_s:
                assert await ids(here) == await ids(there) == {record.source_id}
                await asyncio.sleep(0.1)
            # So that the source goes on to a coordinator that reaches Redis.
            with pytest.raises(CoordinatorError):
                await beat(here, record)
        finally:
            server.signal(signal.SIGCONT)
        await until(lambda: not here._store._trouble and not there._store._trouble)  # type: ignore[attr-defined]
        await beat(there, record)
        # What was refused may have reached Redis: the source registers again in any case.
        assert record.source_id in await ids(here)
        await register(here, "other")
        said = [line for line in caplog.messages if "state.trouble" in line]
        assert len(said) <= 2 + 2 and "state.recovered" in caplog.text


async def test_a_coordinator_that_is_cut_off_for_long_answers_no_more(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_leases, "READS_S", 1.5)
    async with states(server, 1) as (here,):
        await register(here)
        server.kill()
        give_up_s = time.monotonic() + PATIENCE_S
        with pytest.raises(CoordinatorError, match="too old"):
            while time.monotonic() < give_up_s:
                assert await ids(here)
                await asyncio.sleep(0.1)


async def test_a_full_redis_refuses_what_is_new_and_leases_go_on(server: RedisServer) -> None:
    async with states(server, lease_s=2.0) as (here, there):
        record = await register(here)
        await until(lambda: there._store.source(record.source_id))
        assert server.ask("CONFIG", "SET", "maxmemory", "1") == "+OK"
        with pytest.raises(CapacityError, match="full"):
            await register(here, "other")
        until_s = time.monotonic() + 5.0
        while time.monotonic() < until_s:
            with contextlib.suppress(CoordinatorError):  # Redis has had no processor for a second
                await beat(here, record)
            assert await ids(here) == await ids(there) == {record.source_id}
            await asyncio.sleep(0.1)
        assert server.ask("CONFIG", "SET", "maxmemory", "0") == "+OK"
        other = await register(here, "other")
        assert other.source_id in await ids(here)


async def test_a_redis_that_comes_back_empty_is_in_doubt(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with states(server) as (here, there):
        record, epoch = await register(here), here.epoch
        await until(lambda: there._store.source(record.source_id))
        there._store._beats_read = f"{1 << 60}-0"  # type: ignore[attr-defined]  # its clock was ahead
        server.kill()
        server.start()
        await until(lambda: here.epoch == there.epoch != epoch)
        assert await ids(here) == await ids(there) == set()
        for state in (here, there):
            assert state._store.doubt_until_s > state.now()
        assert "state.lost" in caplog.text
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                again = await register(here)
                break
            except MxError:
                assert time.monotonic() < give_up_s
                await asyncio.sleep(0.1)
        await until(lambda: there._store.source(again.source_id))
        assert all(there.document(digest) for digest, _ in again.documents)
        await beat(here, again, readers=7)
        await until(lambda: there._store.source(again.source_id).readers == 7)  # type: ignore[union-attr]


async def test_a_redis_that_comes_back_older_is_in_doubt(server: RedisServer) -> None:
    async with states(server) as (here, there):
        first, epoch = await register(here), here.epoch
        assert server.ask("SAVE") == "+OK"
        later = await register(there, "later")
        await until(lambda: here._store.source(later.source_id))
        server.kill()
        server.start()
        await until(lambda: here.epoch == there.epoch != epoch)
        await until(lambda: here._store.source(later.source_id) is None)
        assert await ids(here) == await ids(there) == {first.source_id}
        assert here._store.doubt_until_s == there._store.doubt_until_s > here.now()


async def test_a_coordinator_that_has_missed_commits_begins_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "_KEPT_COMMITS", 1)
    async with states(server) as (here, there):
        seen: list[Tail] = []
        there.follow(seen.append)
        async with there._store._following:  # type: ignore[attr-defined]
            for number in range(3):
                for _ in range(100):
                    record = await register(here, f"n{number}")
                    await end(here, record)
            last = await register(here, "last")
            assert server.ask("XTRIM", "{mx}:stream", "MAXLEN", "1").startswith(":")
        await until(lambda: there._store.source(last.source_id))
        assert any(tail.begins_again for tail in seen[1:])
        assert await ids(there) == await ids(here)


async def test_a_coordinator_that_cannot_read_what_a_later_release_writes_says_so(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_module, "_STUCK_S", 1.0)
    monkeypatch.setattr(redis_leases, "READS_S", 1.0)

    def later(*arguments: Any) -> Commit:
        made = commit_of(*arguments)
        writes = [
            (kind, key, text.replace('"c":"NameState"', '"c":"LaterState"'))
            for kind, key, text in made.writes
        ]
        return replace(made, writes=writes)

    async with states(server) as (here, there):
        monkeypatch.setattr(redis_module, "commit_of", later)
        record = await register(there)
        monkeypatch.setattr(redis_module, "commit_of", commit_of)
        give_up_s = time.monotonic() + PATIENCE_S
        with pytest.raises(CoordinatorError, match="too old"):
            while time.monotonic() < give_up_s:
                assert await ids(here) == set()
                await asyncio.sleep(0.1)
        with pytest.raises(CoordinatorError, match="cannot follow"):
            await register(here, "other")
        assert "cannot follow its state" in caplog.text
        await end(there, record)  # and with it what cannot be read
        await until(lambda: not here._store._trouble)  # type: ignore[attr-defined]
        await until(lambda: not here._store.source(record.source_id))
        await register(here, "other")


async def test_a_redis_that_refuses_to_write_is_not_called_full(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It becomes a replica, or has nowhere to save."""

    async def refuses(state: CoordinatorState, said: str) -> None:
        await until(lambda: said in str(state._store._trouble))  # type: ignore[attr-defined]
        with pytest.raises(CoordinatorError, match=said):
            await register(state)

    async with states(server, 1) as (here,):
        assert server.ask("REPLICAOF", "127.0.0.1", "1") == "+OK"
        await refuses(here, "is a replica")
        with pytest.raises(LocalError, match="is a replica"):
            await open_state(server.url).open()
        assert server.ask("REPLICAOF", "NO", "ONE") == "+OK"
        await register(here)
        folder = Path(server.folder)
        folder.rmdir()
        assert server.ask("CONFIG", "SET", "save", "3600 1") == "+OK"
        server.ask("BGSAVE")
        await refuses(here, "cannot save")
        folder.mkdir()
        assert server.ask("CONFIG", "SET", "save", "") == "+OK"
        await until(lambda: not here._store._trouble)  # type: ignore[attr-defined]
        assert "full" not in caplog.text


async def test_documents_go_in_parts(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_records, "_PAGE_BYTES", 1 << 10)
    many = make_documents("M", nbytes=1 << 16)
    async with states(server) as (here, there):
        record = await register(here, documents=many)
        await until(lambda: there._store.source(record.source_id))
        assert all(there.document(digest) for digest, _ in record.documents)


async def test_a_commit_that_is_kept_and_not_followed_leaves_nothing(server: RedisServer) -> None:
    async with states(server, 1) as (here,):
        store = here._store
        assert isinstance(store, RedisStore)
        catch_up, take = store._catch_up, store._take

        async def fails() -> None:
            raise CoordinatorError("cut off")

        store._catch_up, store._take = fails, lambda *_: None  # type: ignore[method-assign]
        with pytest.raises(CoordinatorError, match="cut off"):
            await register(here)
        assert not store._own
        store._catch_up, store._take = catch_up, take  # type: ignore[method-assign]
        await store.catch_up()
        assert len(await ids(here)) == 1


async def test_no_redis_is_said_without_the_password(server: RedisServer) -> None:
    assert server.ask("CONFIG", "SET", "requirepass", "geheim") == "+OK"
    for password in ("geheim", "falsch"):
        url = f"redis://:{password}@127.0.0.1:{server.port}/0"
        state = open_state(url)
        try:
            await state.open()
            assert password == "geheim"
        except LocalError as error:
            assert password == "falsch" and "falsch" not in str(error)
        finally:
            await state.close()
