"""What a host's cache holds, and what leaves it: least recently used first. Pure.

Each model has the bytes that were reserved for it. It *arrives* until it is ready, and is then
*held*. Models that processes use stay: to evict them would free nothing, since memory that is
mapped lives until its last reader lets go. What was evicted and is mapped all the same, because a
reader came meanwhile, *lingers*, and counts until it is gone. A model may linger several times: it
can arrive anew, and be evicted again, while readers keep the memory that it had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mx.errors import CapacityError
from mx.units import count, format_bytes

Id = TypeVar("Id", bound=Hashable)

#: The most models that a cache holds.
MOST_MODELS = 1000


@dataclass(slots=True)
class _CacheEntry:
    nbytes: int
    held: bool = False
    used_s: float = 0.0


class CacheTable(Generic[Id]):
    """The models of a cache, in the order of their last use."""

    def __init__(self, budget_bytes: int, *, most_models: int = MOST_MODELS) -> None:
        """
        Args:
            budget_bytes: What all models together may have.
            most_models: How many models there may be.
        """
        self.budget_bytes = budget_bytes
        self._most_models = most_models
        self._entries: OrderedDict[Id, _CacheEntry] = OrderedDict()
        self._lingering: dict[int, int] = {}  # memory: bytes

    @property
    def nbytes(self) -> int:
        """The bytes of all models that arrive or are held."""
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def lingering_bytes(self) -> int:
        """The bytes of models that were evicted and are still mapped."""
        return sum(self._lingering.values())

    @property
    def held(self) -> tuple[Id, ...]:
        """The models that are held, least recently used first."""
        return tuple(model for model, entry in self._entries.items() if entry.held)

    @property
    def lingering(self) -> tuple[int, ...]:
        """The memory of models that were evicted and are still mapped."""
        return tuple(self._lingering)

    def use(self, model: Id, now_s: float = 0.0) -> bool:
        """Record a use of a model at `now_s`, and return True if it is held."""
        entry = self._entries.get(model)
        if entry is None or not entry.held:
            return False
        entry.used_s = now_s
        self._entries.move_to_end(model)
        return True

    def idle_s(self, model: Id, now_s: float) -> float:
        """Return the seconds since the last use of a model that is held."""
        return max(0.0, now_s - self._entries[model].used_s)

    def reserve(self, model: Id, nbytes: int, in_use: Collection[Id]) -> tuple[Id, ...]:
        """Make room for a model that is to arrive.

        Args:
            model: The model, which neither arrives nor is held.
            nbytes: The bytes that it needs.
            in_use: The held models that processes use.

        Returns:
            The models to evict before it arrives. They count no more.

        Raises:
            CapacityError: There is no room, and why. Nothing has changed.
        """
        assert model not in self._entries
        budget = format_bytes(self.budget_bytes)
        if nbytes > self.budget_bytes:
            raise CapacityError(
                f"it has {format_bytes(nbytes)}, and the cache's memory is {budget}",
                hint="give the cache more with `cache_memory`",
            )
        for each in [held for held in self._entries if held in in_use]:
            self._entries.move_to_end(each)
        free = self.budget_bytes - self.nbytes - self.lingering_bytes
        room = self._most_models - len(self._entries)
        evicted: list[Id] = []
        for each, entry in self._entries.items():
            if free >= nbytes and room > 0:
                break
            if entry.held and each not in in_use:
                evicted.append(each)
                free += entry.nbytes
                room += 1
        if free < nbytes or room <= 0:
            raise CapacityError(
                f"it has {format_bytes(nbytes)}, of the cache's {budget} at most "
                f"{format_bytes(max(0, free))} can be freed, and "
                f"{count(len(self._entries) - len(evicted), 'model')} in it stay",
                hint="give the cache more with `cache_memory`",
            )
        for each in evicted:
            del self._entries[each]
        self._entries[model] = _CacheEntry(nbytes)
        return tuple(evicted)

    def arrived(self, model: Id, now_s: float = 0.0) -> None:
        """Mark a reserved model as held, and as used at `now_s`."""
        entry = self._entries[model]
        entry.held, entry.used_s = True, now_s
        self._entries.move_to_end(model)

    def remove(self, model: Id) -> None:
        """Remove a model that did not arrive, or whose memory was let go. Idempotent."""
        self._entries.pop(model, None)

    def linger(self, memory: int, nbytes: int) -> None:
        """Go on counting an evicted model's memory until it is `gone`: it is still mapped.

        Args:
            memory: The number of its memory file, which is another each time that a model arrives.
            nbytes: Its bytes.
        """
        self._lingering[memory] = nbytes

    def gone(self, memory: int) -> None:
        """No process maps the memory of an evicted model any more. Idempotent."""
        self._lingering.pop(memory, None)
