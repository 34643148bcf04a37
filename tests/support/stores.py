"""Stores for tests, real ones, and a registry that hands out the changes of its store."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from mx.coordinator.stores.draft import Draft
from mx.coordinator.stores.encoding import encode
from mx.coordinator.stores.kept import KeptStore
from mx.coordinator.stores.sqlite import SqliteStore
from mx.core.changes import AnswerChange, Change, Entry, NameMeaning
from mx.core.memory_store import MemoryStore
from mx.core.registry import RegisteredSource, Registry
from mx.core.store import Store
from mx.core.types import Registration, SourceRecord
from mx.redis_state.store import RedisStore
from tests.support.redis_server import patience, redis_server

_T = TypeVar("_T")

KINDS = ("memory", "sqlite", "redis")


class TimelessRedisStore(RedisStore):
    """A store for registries whose time is the test's: leases end when the test says so, while the
    keys in Redis have ended long before."""

    def _has_ended(self, source_id: str) -> bool:
        return True

    def _left_ms(self, said: Any, now: float) -> int:
        return 1

    def _named(self, draft: Draft) -> set[bytes]:
        return set()  # registries have no documents

    async def _keep_rest(self) -> None:
        pass


#: Each returns a function that makes a store: one that begins with what the last one has kept.
_makers: list[Callable[[], Callable[[], Any]]] = [lambda: lambda: MemoryStore(time.monotonic)]
_runners: list[tuple[asyncio.Runner, KeptStore, Callable[[], KeptStore]]] = []


def new_store() -> Store:
    """Return an empty store, of the kind that the test is about. It is not open."""
    store: Store = _makers[-1]()()
    return store


@contextmanager
def stores_of(kind: str, *, timeless: bool = True) -> Iterator[None]:
    """Let `new_store` return stores of a kind.

    Args:
        kind: One of `KINDS`.
        timeless: The time of leases is the test's.
    """
    with ExitStack() as stack:
        if kind == "sqlite":
            folder = Path(tempfile.mkdtemp(prefix="mx-state-"))
            stack.callback(shutil.rmtree, folder)
            numbers = iter(range(1_000_000))
            _makers.append(lambda: partial(SqliteStore, str(folder / f"{next(numbers)}.db")))
            stack.callback(_makers.pop)
        elif kind == "redis":
            if shutil.which("redis-server") is None:
                pytest.skip("redis-server is not installed")
            server = stack.enter_context(redis_server())
            stack.enter_context(patience())
            made = TimelessRedisStore if timeless else RedisStore
            _makers.append(lambda: partial(made, server.fresh_url(), lease_s=15.0, doubt_s=15.0))
            stack.callback(_makers.pop)
        stack.callback(_close_all)
        yield


def _close_all() -> None:
    while _runners:
        runner, store, again = _runners.pop()
        with runner:
            runner.run(_close(store, again))


async def _close(store: KeptStore, again: Callable[[], KeptStore]) -> None:
    """Close a store, and see that one that begins with what it has kept has all that it had."""
    await store.close()
    later = again()
    await later.open()
    try:
        parts = zip(whole(later), whole(store), strict=True)
        assert not (differing := [each for each in parts if each[0] != each[1]]), differing
    finally:
        await later.close()


def whole(store: KeptStore) -> tuple[object, ...]:
    """All that a store has to keep, as text; without leases. Sources are in order, but for those
    of one time in Redis, which have none."""
    since = getattr(store, "_listed_s", {})
    sources: list[tuple[object, dict[str, str]]] = []
    for number, listed in enumerate(store.sources()):
        source_id = listed.record.source_id
        time_s: object = since.get(source_id, number)
        if not sources or sources[-1][0] != time_s:
            sources.append((time_s, {}))
        text = encode(replace(listed, lease_until_s=0, readers=0, gb_per_s=0))
        sources[-1][1][source_id] = text
    return (
        store.epoch,
        store.doubt_until_s,
        store.latest,
        {state.name: encode(state) for state in store.names()},
        sources,
        [(kind, dict(counts)) for kind, counts in store._counts.items()],
        +store._totals,
        sorted(digest for digest, _ in store.documents()),
    )


class OverStores:
    """A state machine's base that lets it run over stores of a kind."""

    kind = "sqlite"

    def __init__(self) -> None:
        self._stores = stores_of(self.kind)
        self._stores.__enter__()
        super().__init__()

    def teardown(self) -> None:
        self._stores.__exit__(None, None, None)


class FollowedRegistry(Registry):
    """A registry whose changes are taken by kind. Without a store it has a new one. Each event is
    kept before it returns; what is in memory is then what is kept."""

    def __init__(self, store: Store | None = None, **options: Any) -> None:
        again = _makers[-1]()
        store = store or again()
        assert store is not None
        super().__init__(store, **options)
        self.store = store
        self._taken: dict[type[Entry], int] = {}
        self._runner: asyncio.Runner | None = None
        self._inside = False
        if isinstance(store, KeptStore):
            store._kept_entries = 1_000_000
            self._runner = asyncio.Runner()
            _runners.append((self._runner, store, again))
            self._runner.run(store.open())

    def _event(self, steps: Callable[[], _T]) -> _T:
        if self._runner is None or self._inside:
            return steps()

        def inside() -> _T:
            self._inside = True
            try:
                return steps()
            finally:
                self._inside = False

        found: _T = self._runner.run(self.store.atomically(inside))
        return found

    def register(self, now: float, registration: Registration, **more: Any) -> RegisteredSource:
        event = super().register
        return self._event(lambda: event(now, registration, **more))

    def heartbeat(self, *arguments: Any, **more: Any) -> SourceRecord:
        event = super().heartbeat
        return self._event(lambda: event(*arguments, **more))

    def recall(self, *arguments: Any, **more: Any) -> None:
        event = super().recall
        return self._event(lambda: event(*arguments, **more))

    def advertise(self, *arguments: Any, **more: Any) -> None:
        event = super().advertise
        return self._event(lambda: event(*arguments, **more))

    def deregister(self, *arguments: Any, **more: Any) -> None:
        event = super().deregister
        return self._event(lambda: event(*arguments, **more))

    def tick(self, now: float) -> None:
        event = super().tick
        return self._event(lambda: event(now))

    def _take(self, kind: type[Any]) -> list[Any]:
        """Return the entries of a kind since the last call for it, in order."""
        found = self.store.read(self._taken.get(kind, 0))
        assert found is not None
        self._taken[kind] = self.store.latest
        return [each for each in found if isinstance(each, kind)]

    def take_all_again(self) -> None:
        """Begin anew with the changes: the store is another one by now."""
        self._taken.clear()

    def take_changes(self) -> list[Change]:
        return self._take(Change)

    def take_meant(self) -> list[NameMeaning]:
        return self._take(NameMeaning)

    def take_answered(self) -> list[AnswerChange]:
        return self._take(AnswerChange)
