"""Stores for tests, and a registry that hands out the changes of its store."""

from __future__ import annotations

from typing import Any

from mx.core.changes import Answered, Change, Entry, Meant
from mx.core.memory_store import MemoryStore
from mx.core.registry import Registry
from mx.core.store import Store


class FollowedRegistry(Registry):
    """A registry whose changes are taken by kind. Without a store it has a new one in memory."""

    def __init__(self, store: Store | None = None, **options: Any) -> None:
        store = store or MemoryStore()
        super().__init__(store, **options)
        self.store = store
        self._taken: dict[type[Entry], int] = {}

    def _take(self, kind: type[Any]) -> list[Any]:
        """Return the entries of a kind since the last call for it, in order."""
        found = self.store.read(self._taken.get(kind, 0))
        assert found is not None
        self._taken[kind] = self.store.latest
        return [each for each in found if isinstance(each, kind)]

    def take_changes(self) -> list[Change]:
        return self._take(Change)

    def take_meant(self) -> list[Meant]:
        return self._take(Meant)

    def take_answered(self) -> list[Answered]:
        return self._take(Answered)
