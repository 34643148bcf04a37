"""Who can write to Redis, and has not the coordinators' key, binds no name."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mx.coordinator.state import CoordinatorState, open_state
from mx.core.registry import Registry
from mx.core.types import SourceState
from mx.errors import ConfigError, UnknownModelError
from tests.support.commands import Run
from tests.support.owners import owned, receipt_of
from tests.support.records import by_digest, make_documents, make_record, registration
from tests.support.redis_server import RedisServer, needs_redis, patience, redis_server
from tests.support.redis_states import KEY, SECRET, register, until

redis = pytest.importorskip("redis")

pytestmark = [pytest.mark.integration, needs_redis]

HONEST, FORGED = make_documents("A"), make_documents("B")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture
def attacker(server: RedisServer) -> Iterator[Any]:
    """A client that can write everything there, and has no key."""
    with redis.Redis(port=server.port) as client:
        yield client


@asynccontextmanager
async def coordinator(
    server: RedisServer, *, key: bytes | None = KEY, required: bool = False
) -> AsyncIterator[CoordinatorState]:
    with patience():
        state = open_state(
            server.url, key=key, settings={"state_mac": "require" if required else "write"}
        )
        try:
            await state.open()
            await state.tick()
            yield state
        finally:
            await state.close()


def keys_of(attacker: Any) -> dict[str, bytes]:
    """The keys of the state by their last part."""
    found = {}
    for key in attacker.keys("*"):
        found[key.decode().rpartition("}")[2].strip(":")] = key
    return found


async def meaning(state: CoordinatorState, name: str = "llama") -> bytes:
    found = await state.ask(lambda registry: registry.resolve(name))
    return found.ref.identity


def identity(documents: list[bytes]) -> bytes:
    return make_record(documents).ref.identity


def rebind(attacker: Any) -> None:
    """Let the name stand for other weights, as a commit would write it."""
    keys = keys_of(attacker)
    for kind in ("names", "sources"):
        for field, value in attacker.hgetall(keys[kind]).items():
            text = value.decode()
            forged = text.replace(identity(HONEST).hex(), identity(FORGED).hex())
            assert forged != text
            attacker.hset(keys[kind], field, forged)


async def test_a_name_that_was_rebound_in_redis_is_not_used(
    server: RedisServer, attacker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with coordinator(server) as before:
        await register(before, documents=HONEST)
        assert await meaning(before) == identity(HONEST)
    rebind(attacker)
    caplog.set_level(logging.INFO, logger="mx.audit")
    async with coordinator(server) as state:
        with pytest.raises(UnknownModelError, match="not written by a coordinator"):
            await meaning(state)
        forged = [record for record in caplog.records if record.name == "mx.audit"]
        assert any("llama" in record.getMessage() for record in forged)
        # Its owner's source brings a receipt of the epoch before.
        record = owned(make_record(HONEST), b"o")
        answer = await state.register(
            registration(record, SECRET, keeps_pin=True),
            by_digest(HONEST),
            receipt=receipt_of(record, b"o"),
        )
        assert not answer.record.pin_only
        assert await meaning(state) == identity(HONEST)
    async with coordinator(server, required=True) as again:
        assert await meaning(again) == identity(HONEST)


async def test_an_old_value_and_a_deleted_one_show_as_well(
    server: RedisServer, attacker: Any
) -> None:
    """Each was written by a coordinator; together they are not a state that one has signed."""
    async with coordinator(server) as state:
        record = await register(state, documents=HONEST)
        await register(state, "other", documents=HONEST)
        keys = keys_of(attacker)
        old = attacker.dump(keys["names"])
        await state.event(lambda registry, now: registry.deregister(now, record.source_id, SECRET))
    attacker.restore(keys["names"], 0, old, replace=True)
    async with coordinator(server) as state:
        with pytest.raises(UnknownModelError):
            await meaning(state, "other")
        await register(state, "third", documents=HONEST)
    attacker.hdel(keys_of(attacker)["names"], "third")
    async with coordinator(server) as state:
        assert not await state.ask(Registry.models)


async def test_a_commit_that_no_coordinator_made_is_not_followed(
    server: RedisServer, attacker: Any
) -> None:
    async with coordinator(server) as state, coordinator(server) as other:
        await register(state, documents=HONEST)
        await until(lambda: other._store.name("llama"))
        stream = keys_of(attacker)["stream"]
        last, fields = attacker.xrevrange(stream, count=1)[0]
        record = fields[b"record"].replace(
            identity(HONEST).hex().encode(), identity(FORGED).hex().encode()
        )
        assert record != fields[b"record"]
        number = int(last.partition(b"-")[0]) + 1
        forged = {**fields, b"record": record, b"before": fields[b"token"], b"token": b"forged"}
        attacker.xadd(stream, forged, id=f"{number}-0")
        await until(lambda: not attacker.xrange(stream, f"{number}-0", f"{number}-0"))
        attacker.xadd(stream, forged, id="9999999-0")
        # Both go on, as if it had never been there.
        for each, name in ((state, "a"), (other, "b")):
            await register(each, name, documents=HONEST)
            for there in (state, other):
                await until(lambda there=there, name=name: there._store.name(name))  # type: ignore[misc]
                assert await meaning(there) == identity(HONEST)


async def test_what_an_older_release_keeps_is_believed_until_macs_are_required(
    server: RedisServer, attacker: Any
) -> None:
    async with coordinator(server, key=None) as older, coordinator(server) as state:
        await register(older, documents=HONEST)
        await until(lambda: state._store.name("llama"))
        await register(state, "other", documents=HONEST)
        await until(lambda: older._store.name("other"))
        await register(older, "third", documents=HONEST)
    async with coordinator(server) as state:
        assert len(await state.ask(Registry.models)) == 3
        await register(state, "fourth", documents=HONEST)
    async with coordinator(server, required=True) as state:
        assert len(await state.ask(Registry.models)) == 4
    async with coordinator(server, key=None) as older:
        await register(older, "fifth", documents=HONEST)
    async with coordinator(server, required=True) as state:
        with pytest.raises(UnknownModelError, match="not written by a coordinator"):
            await meaning(state)


async def test_coordinators_with_different_keys_do_not_share_a_state(server: RedisServer) -> None:
    async with coordinator(server) as state:
        await register(state, documents=HONEST)
        with pytest.raises(ConfigError, match="another receipt key"):
            async with coordinator(server, key=b"x" * 32):
                pass
        assert await meaning(state) == identity(HONEST)


def test_mx_coordinator_with_another_key_ends_and_says_which_setting(
    server: RedisServer, run: Run, tmp_path: Any
) -> None:
    first = ("--state", server.url, "--listen", "127.0.0.1:0", "--receipt-key")
    running = run(*first, str(tmp_path / "one"), daemon=True)
    running.until(lambda: "listens on" in running.err, "start")
    other = run(*first, str(tmp_path / "two"), daemon=True)
    assert other.wait() == 2
    assert "--receipt-key" in other.err and "Traceback" not in other.err


async def test_documents_are_what_their_digests_say(server: RedisServer, attacker: Any) -> None:
    async with coordinator(server) as state:
        record = await register(state, documents=HONEST)
    digest, _ = record.documents[0]
    key = keys_of(attacker)["documents"]
    attacker.hset(key, digest, b"other " + attacker.hget(key, digest))
    async with coordinator(server) as state:
        assert state.document(digest) is None


async def test_what_only_a_later_release_knows_is_not_read(
    server: RedisServer, attacker: Any
) -> None:
    async with coordinator(server, key=None) as state:
        record = await register(state, documents=HONEST)
    names = keys_of(attacker)["names"]
    value = json.loads(attacker.hget(names, "llama"))
    value["f"]["what_comes_next"] = 7
    attacker.hset(names, "llama", json.dumps(value))
    async with coordinator(server, key=None) as state:
        assert await meaning(state) == record.ref.identity
        beat: Callable[[Registry, float], Any] = lambda registry, now: registry.heartbeat(  # noqa: E731
            now, record.source_id, SECRET, SourceState.SERVING
        )
        await state.event(beat)
