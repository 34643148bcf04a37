"""Looking for sources: how long, how often, and what is done with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mx.core.connections import Connections
from mx.core.paths import Medium
from mx.core.planner import Plan, SourcePath
from mx.core.types import SourceRecord
from mx.errors import (
    BindingError,
    ConfigError,
    CoordinatorError,
    MxError,
    NoSourceError,
    NotAllowedError,
    PeerLostError,
    PeerRefusedError,
    UnknownModelError,
)
from mx.fetching import connections, resolver
from mx.fetching.connections import ConnectionPool
from mx.fetching.connector import Connector
from mx.fetching.events import EventLog
from mx.fetching.resolver import retry_until_found
from mx.fetching.transfer import Transfer
from mx.swarm.sharing import Sharing
from mx.wire.client import LocatedModel
from mx.wire.locate import Locator
from tests.support.editions import edition_log
from tests.support.planned_paths import source

A, B = source("a"), source("b")


def attempts(*outcomes: MxError | str) -> Any:
    """An attempt that has these results, one after the other."""
    left = list(outcomes)

    async def attempt() -> str:
        outcome = left.pop(0)
        if isinstance(outcome, MxError):
            raise outcome
        return outcome

    return attempt


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_S", "LONGEST_S"):
        monkeypatch.setattr(resolver, name, 0.001)
    for name in ("ORDINARY_S", "FIRST_S", "LONGEST_S"):
        monkeypatch.setattr(connections, name, 0.001)


@pytest.mark.parametrize(
    "error",
    [UnknownModelError("?"), NoSourceError("?"), PeerLostError("?"), CoordinatorError("?")],
)
async def test_an_error_that_may_pass_leads_to_another_attempt(error: MxError) -> None:
    waits: list[int] = []
    found = await retry_until_found(attempts(error, error, "there"), 60, lambda: waits.append(1))
    assert found == "there"
    assert len(waits) == 2


@pytest.mark.parametrize(
    "error",
    [NotAllowedError("?"), BindingError("?"), ConfigError("?"), PeerRefusedError("?")],
)
async def test_an_error_that_does_not_pass_is_raised_at_once(error: MxError) -> None:
    with pytest.raises(type(error)) as caught:
        await retry_until_found(attempts(error, "there"), 60, lambda: None)
    assert caught.value.message == "?"


async def test_without_waiting_there_is_one_attempt() -> None:
    with pytest.raises(NoSourceError) as caught:
        await retry_until_found(attempts(NoSourceError("?"), "there"), 0, lambda: None)
    assert caught.value.message == "?"


async def test_a_wait_in_vain_ends_with_the_last_error() -> None:
    errors = [NoSourceError("first"), *(PeerLostError("?") for _ in range(1000))]
    with pytest.raises(PeerLostError, match="waited"):
        await retry_until_found(attempts(*errors), 0.02, lambda: None)


class FakeLocator:
    """Answers with the present `sources`."""

    asks_coordinator = True

    def __init__(self) -> None:
        self.sources: Sequence[SourceRecord] | MxError = ()
        self.looked_up = self.source_count = 0
        self.superseded_by = None

    async def again(self, located: LocatedModel) -> list[SourceRecord]:
        self.looked_up += 1
        if isinstance(self.sources, MxError):
            raise self.sources
        return list(self.sources)


class FakeConnections:
    def __init__(self) -> None:
        self.idle = False
        self.unwanted: set[str] = set()
        self.added: list[str] = []

    def wants(self, key: str) -> bool:
        return key not in self.unwanted

    def add(self, paths: Sequence[SourcePath]) -> None:
        self.added += [path.source.key for path in paths]
        self.unwanted.update(path.source.key for path in paths)


class Stage:
    def __init__(self, wait_s: float) -> None:
        self.locator, self.connections = FakeLocator(), FakeConnections()
        self.reported: list[list[str]] = []
        self.waits = self.came = 0
        self.causes: list[MxError] = []
        self.pool = ConnectionPool(
            cast(Connections, self.connections),
            cast(Connector, None),
            cast(Transfer, self),
            cast(Sharing, self),
            cast(Locator, self.locator),
            cast(LocatedModel, None),
            self.plan,
            edition_log(),
            cast(EventLog, self),
            self.causes,
            wait_s=wait_s,
        )
        self.running = asyncio.create_task(self.pool.look())

    def pool_waits(self) -> bool:
        return self.pool._waits_for_new(time.monotonic())

    def met(self, sources: Sequence[SourceRecord]) -> None:
        self.reported.append([each.source_id for each in sources])

    def landed_nbytes(self) -> int:
        return self.came

    def waiting(self) -> None:
        self.waits += 1

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    def plan(self, sources: Sequence[SourceRecord]) -> Plan:
        paths = [SourcePath(each, "tcp", 1.0, False, "", Medium.NETWORK, None) for each in sources]
        return Plan(tuple(paths), (), ())

    async def until_looked_up(self, more: int) -> None:
        enough = self.locator.looked_up + more
        while self.locator.looked_up < enough:
            await asyncio.sleep(0.001)


async def test_new_sources_are_found_beside_those_in_use() -> None:
    stage = Stage(0)
    stage.locator.sources = CoordinatorError("it is gone for a while")
    await stage.until_looked_up(2)
    stage.locator.sources = [A, B]
    stage.connections.unwanted = {A.key}
    await stage.until_looked_up(3)
    await stage.close()
    assert stage.connections.added == [B.key]
    assert [A.source_id, B.source_id] in stage.reported
    assert not stage.pool_waits()
    assert stage.causes == []


async def test_the_pause_between_look_ups_grows_with_all_sources_and_has_a_bound() -> None:
    assert connections.ordinary_pause_s(1000) == 20.0
    assert connections.ordinary_pause_s((1 << 32) - 1) == 60.0
    stage = Stage(0)
    stage.locator.sources, stage.locator.source_count = [A, B], 1000
    await stage.until_looked_up(1)
    await asyncio.sleep(0.1)
    await stage.close()
    assert stage.locator.looked_up == 1


async def test_a_named_peer_is_not_looked_up_while_it_is_read_from() -> None:
    stage = Stage(60)
    stage.locator.asks_coordinator = False
    await asyncio.sleep(0.05)
    assert stage.locator.looked_up == 0
    stage.connections.idle = True
    assert stage.pool_waits()
    await stage.until_looked_up(2)
    await stage.close()


@pytest.mark.parametrize("turns", range(6))
async def test_it_ends_when_it_is_cancelled_as_a_wait_begins(turns: int) -> None:
    """Whichever turn of the loop both fall in. (Python 3.11's `wait_for` may lose the second.)"""
    stage = Stage(60)
    await asyncio.sleep(0)
    assert stage.pool_waits()
    for _ in range(turns):
        await asyncio.sleep(0)
    stage.running.cancel()
    done, _ = await asyncio.wait({stage.running}, timeout=20)
    assert done
    await stage.close()


async def test_a_wait_lasts_so_long_and_anew_after_progress() -> None:
    stage = Stage(0.5)
    stage.connections.idle = True
    assert stage.pool_waits()
    assert stage.pool_waits()
    assert stage.waits == 1
    await asyncio.sleep(0.6)
    assert not stage.pool_waits()
    assert [type(cause) for cause in stage.causes] == [NoSourceError]
    assert not stage.pool_waits()
    stage.came = 10
    assert stage.pool_waits()
    assert stage.waits == 2
    await stage.close()
