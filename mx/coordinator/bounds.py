"""Turns of principals, for what takes long."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class PrincipalLocks:
    """A lock for each principal: what takes long is done once at a time for each of them, so that
    the many calls of one don't come before the one call of another."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, principal: str) -> asyncio.Lock:
        """Return the lock of a principal."""
        return self._locks.setdefault(principal, asyncio.Lock())
