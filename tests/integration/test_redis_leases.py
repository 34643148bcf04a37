"""How long leases last over a real Redis: coordinators begin again, and its clock is set."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest

from mx.coordinator.state import CoordinatorState, open_state
from mx.errors import CoordinatorError
from tests.support.held_link import held_link
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.redis_states import PATIENCE_S, beat, ids, register, states, until

pytestmark = [pytest.mark.integration, needs_redis]

#: As if the clock of Redis had been set, at once: what it sees of the last exchange, and of leases.
_SET = """
redis.call('HINCRBY', '{mx}:meta', 'reached', -ARGV[1])
for _, id in ipairs(redis.call('HKEYS', '{mx}:sources')) do
  local left = redis.call('PTTL', '{mx}:lease:' .. id) - ARGV[1]
  if left > 0 then redis.call('PEXPIRE', '{mx}:lease:' .. id, left)
  else redis.call('DEL', '{mx}:lease:' .. id) end
end
for _, id in ipairs(redis.call('HKEYS', '{mx}:spared')) do
  redis.call('HINCRBY', '{mx}:spared', id, -ARGV[1])
end
"""
JUMP_S = 3600.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def set_clock(server: RedisServer, by_s: float) -> None:
    server.ask("EVAL", _SET, "0", str(int(by_s * 1000)))


async def tick_until(state: CoordinatorState, source_id: str) -> None:
    """Let time pass until a source is no longer listed."""
    give_up_s = time.monotonic() + PATIENCE_S
    while source_id in await ids(state):
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.05)


async def test_a_clock_that_is_set_ahead_and_back_ends_nothing_early_or_late(
    server: RedisServer,
) -> None:
    async with states(server, lease_s=3.0) as (here, there):
        record = await register(here)
        await there._store.catch_up()
        before_s = here.now()
        set_clock(server, JUMP_S)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            await beat(here, record)
            assert record.source_id in await ids(there)
            await asyncio.sleep(0.05)
        later = open_state(server.url, lease_s=3.0)
        await later.open()
        try:
            for state in (here, there, later):
                assert before_s < state.now() < before_s + JUMP_S / 2
        finally:
            await later.close()
        set_clock(server, -JUMP_S)
        await tick_until(there, record.source_id)  # nothing was heard of it since


async def test_a_clock_that_was_set_while_nothing_ran_goes_on(server: RedisServer) -> None:
    async with states(server, 1) as (here,):
        before_s = here.now()
    set_clock(server, -JUMP_S)
    async with states(server, 1) as (here,):
        assert before_s <= here.now() < before_s + JUMP_S


@pytest.mark.parametrize(
    "others", [0, pytest.param(1, marks=pytest.mark.long)], ids=["alone", "beside another"]
)
async def test_a_coordinator_that_begins_again_and_again_keeps_no_dead_source(
    server: RedisServer, others: int
) -> None:
    async with states(server, 1 + others, lease_s=0.5) as running:
        record = await register(running[-1])
        if not others:
            await running[0].close()
        give_up_s, listed = time.monotonic() + PATIENCE_S, True
        while listed:
            assert time.monotonic() < give_up_s
            async with states(server, 1, lease_s=0.5) as (here,):
                until_s = time.monotonic() + 0.7
                while listed and time.monotonic() < until_s:
                    listed = record.source_id in await ids(here)
                    await asyncio.sleep(0.05)
            await asyncio.sleep(1.2)


async def test_a_source_that_outlives_an_outage_of_all_coordinators_stays(
    server: RedisServer,
) -> None:
    async with states(server, 1, lease_s=1.5) as (here,):
        record = await register(here)
        await beat(here, record)
    for _ in range(2):
        await until(lambda: server.ask("EXISTS", f"{{mx}}:lease:{record.source_id}") == ":0")
        async with states(server, 1, lease_s=1.5) as (here,):
            await asyncio.sleep(0.5)
            await beat(here, record)  # it was not dropped
    async with states(server, 1, lease_s=1.5) as (here,):
        await tick_until(here, record.source_id)


@pytest.mark.parametrize("silent_s", [3.5, 8.0], ids=["a late exchange", "missing exchanges"])
async def test_a_coordinator_that_comes_back_does_not_shorten_leases(
    server: RedisServer, silent_s: float
) -> None:
    """It holds heartbeats that are older than what others have heard since."""
    own = states(server, 1, lease_s=4.0, answer_s=1.0)
    async with held_link(server.port) as link, own as (there,):
        here = open_state(f"redis://127.0.0.1:{link.port}/0", lease_s=4.0)
        await here.open()
        try:
            record = await register(here)
            await there._store.catch_up()
            await beat(here, record)
            link.hold()
            with contextlib.suppress(CoordinatorError):
                await beat(here, record)
            until_s = time.monotonic() + silent_s
            while time.monotonic() < until_s:
                with contextlib.suppress(CoordinatorError):  # Redis has had no processor
                    await beat(there, record)
                await asyncio.sleep(0.1)
            link.let_go()
            until_s = time.monotonic() + 3.0
            while time.monotonic() < until_s:
                with contextlib.suppress(CoordinatorError):
                    await beat(there, record)
                left_ms = int(server.ask("PTTL", f"{{mx}}:lease:{record.source_id}")[1:])
                assert left_ms > 500, "shortened"
                assert record.source_id in await ids(there)
                await asyncio.sleep(0.1)
            await until(lambda: not here._store._trouble)  # type: ignore[attr-defined]
            assert record.source_id in await ids(here)
            await beat(here, record)
        finally:
            await here.close()
