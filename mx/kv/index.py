"""Which blocks a pool lists, and which of its slots may be written again. Pure.

Readers mirror a pool's index, and read slots without asking. So a slot that a reader may still read
is not written: withdrawing a block gives it a *number*, each reader confirms the numbers up to
which it has heard of all withdrawals and reads none of the withdrawn, and a slot is free once all
readers have confirmed its number, or were cut off.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

R = TypeVar("R")


class KvEntry(NamedTuple):
    """A block that may be read: the slot that it is in, and the blake3 digests of its layers, one
    after the other."""

    slot: int
    digests: bytes


class KvChange(NamedTuple):
    """What a reader is told of a block: what is listed, None for no longer."""

    block: bytes
    entry: KvEntry | None


@dataclass
class _ReaderOfPool:
    """What a reader has yet to be told, by block, and what it has confirmed."""

    changes: dict[bytes, KvEntry | None]
    confirmed: int
    told: int


@dataclass
class _Leaving:
    """A slot that is not listed any more, and the number of its withdrawal."""

    number: int
    slot: int


@dataclass
class KvIndex(Generic[R]):
    """The blocks of one pool, oldest use first, and its readers. `free` has the slots that are to
    be taken from it: they may be written.

    A block is of no use without all that come before it in its prompt. So where they are used
    together the later ones count as older, and are withdrawn first."""

    listed: dict[bytes, KvEntry] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    _after: dict[bytes, bytes] = field(default_factory=dict)  # what comes before each in its prompt
    _leaving: list[_Leaving] = field(default_factory=list)
    _readers: dict[R, _ReaderOfPool] = field(default_factory=dict)
    _number: int = 0

    def publish(self, block: bytes, entry: KvEntry, after: bytes = b"") -> bool:
        """List a block, which comes after another one in its prompt. Return False if it is listed
        already, in another slot: then this slot is free."""
        if block in self.listed:
            if self.listed[block].slot != entry.slot:
                self.free.append(entry.slot)
            return False
        self.listed[block], self._after[block] = entry, after
        for reader in self._readers.values():
            reader.changes[block] = entry
        return True

    def withdraw(self, block: bytes) -> int | None:
        """List a block no more. Return its slot, which will be in `free`; None if it was not
        listed."""
        entry = self.listed.pop(block, None)
        if entry is None:
            return None
        del self._after[block]
        self._number += 1
        for reader in self._readers.values():
            # Also of one that it was not told of: the number has to reach it.
            reader.changes[block] = None
        self._leaving.append(_Leaving(self._number, entry.slot))
        self._let_go()
        return entry.slot

    def used(self, block: bytes) -> None:
        """Note that the prompt up to a block is of use: what is not is withdrawn first."""
        prompt: dict[bytes, None] = {}
        while block in self.listed and block not in prompt:
            prompt[block] = None
            block = self._after[block]
        for each in prompt:
            self.listed[each] = self.listed.pop(each)

    def oldest(self, count: int) -> list[bytes]:
        """Return up to `count` blocks that were not of use for longest."""
        return list(itertools.islice(self.listed, max(0, count)))

    def join(self, reader: R) -> None:
        """Tell a reader of all that is listed, and of each change from now on."""
        self._readers[reader] = _ReaderOfPool(dict(self.listed), self._number, self._number)

    def leave(self, reader: R) -> None:
        """Wait for a reader no more: it can't read any slot from now on. Idempotent."""
        if self._readers.pop(reader, None) is not None:
            self._let_go()

    def changes(self, reader: R, most: int) -> tuple[list[KvChange], int]:
        """Take what a reader is to be told next.

        Args:
            reader: The reader.
            most: How many changes at most.

        Returns:
            The changes, and the number that it confirms once it has heeded them.
        """
        found = self._readers[reader]
        told = [KvChange(*each) for each in itertools.islice(found.changes.items(), most)]
        for change in told:
            del found.changes[change.block]
        if not found.changes:
            found.told = self._number
        return told, found.told

    def has_changes(self, reader: R) -> bool:
        """Return True if there is something to tell a reader."""
        return bool(self._readers[reader].changes)

    def confirm(self, reader: R, number: int) -> bool:
        """Note that a reader has heard of all withdrawals up to a number, and reads none of those
        blocks. Return False if it was not told of them: it does not keep to the protocol."""
        found = self._readers[reader]
        if number > found.told:
            return False
        found.confirmed = max(found.confirmed, number)
        self._let_go()
        return True

    def waits_for(self) -> Iterator[R]:
        """Yield the readers that a slot waits for."""
        if self._leaving:
            first = self._leaving[0].number
            yield from (each for each, found in self._readers.items() if found.confirmed < first)

    @property
    def leaving(self) -> int:
        """How many slots are neither listed nor free."""
        return len(self._leaving)

    def _let_go(self) -> None:
        until = min((each.confirmed for each in self._readers.values()), default=self._number)
        while self._leaving and self._leaving[0].number <= until:
            self.free.append(self._leaving.pop(0).slot)
