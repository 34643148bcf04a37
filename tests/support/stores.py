"""Stores for tests, and a registry that hands out the changes of its store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mx.core.changes import Answered, Change, Entry, Meant
from mx.core.memory_store import MemoryStore
from mx.core.registry import Registry
from mx.core.store import Store
from tests.support.sqlite_store import SqliteStore

STORES: dict[str, Callable[[], MemoryStore | SqliteStore]] = {
    "memory": lambda: MemoryStore(time.monotonic),
    "sqlite": SqliteStore,
}
_made: list[SqliteStore] = []
_kind = "memory"


def new_store() -> Store:
    """Return an empty store, of the kind that the test is about."""
    store = STORES[_kind]()
    if isinstance(store, SqliteStore):
        _made.append(store)
    return store


@contextmanager
def stores_of(kind: str) -> Iterator[None]:
    """Let `new_store` return stores of a kind, and close them in the end."""
    global _kind
    _kind, before = kind, _kind
    try:
        yield
    finally:
        _kind = before
        while _made:
            _made.pop().shut()


class OverSqlite:
    """A state machine's base that lets it run over SQLite."""

    def __init__(self) -> None:
        self._stores = stores_of("sqlite")
        self._stores.__enter__()
        super().__init__()

    def teardown(self) -> None:
        self._stores.__exit__(None, None, None)


class FollowedRegistry(Registry):
    """A registry whose changes are taken by kind. Without a store it has a new one."""

    def __init__(self, store: Store | None = None, **options: Any) -> None:
        store = store or new_store()
        super().__init__(store, **options)
        self.store = store
        self._taken: dict[type[Entry], int] = {}

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

    def take_meant(self) -> list[Meant]:
        return self._take(Meant)

    def take_answered(self) -> list[Answered]:
        return self._take(Answered)
