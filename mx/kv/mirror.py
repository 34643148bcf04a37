"""What a reader knows of one pool: its index, and which blocks it reads just now. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mx.errors import PeerProtocolError
from mx.kv.index import KvChange, KvEntry

#: The most blocks of one pool that a reader knows; what a pool lists beyond them is not used.
MOST_BLOCKS = 1 << 18


@dataclass
class KvMirror:
    """The index of one pool as its reader has it.

    `slots` and `digest_nbytes` are what the pool has said of itself: a block's slot is below
    `slots`, and its digests have this size.
    """

    slots: int
    digest_nbytes: int
    most_blocks: int = MOST_BLOCKS
    entries: dict[bytes, KvEntry] = field(default_factory=dict)
    #: How many blocks were listed beyond `most_blocks`.
    ignored: int = 0
    _reading: Counter[int] = field(default_factory=Counter)  # by slot
    #: The withdrawn slots that are still read, each with the number from before its withdrawal.
    _left: dict[int, int] = field(default_factory=dict)
    _heard: int = 0

    def hear(self, changes: Sequence[KvChange], number: int) -> None:
        """Take the pool's changes, and the number to confirm after them.

        Raises:
            PeerProtocolError: A block is in no slot of the pool, or has digests of another form; or
                the number is smaller than the one before.
        """
        if number < self._heard:
            raise PeerProtocolError("the numbers of its KV index go back")
        for block, entry in changes:
            before = self.entries.pop(block, None)
            if before is not None and self._reading[before.slot]:
                self._left.setdefault(before.slot, self._heard)
            if entry is None:
                continue
            if not 0 <= entry.slot < self.slots or len(entry.digests) != self.digest_nbytes:
                raise PeerProtocolError("it lists a block that its pool has no place for")
            if len(self.entries) < self.most_blocks:
                self.entries[block] = entry
            else:
                self.ignored += 1
        self._heard = number

    def begin(self, block: bytes) -> KvEntry | None:
        """Return where a block is, which is read from now until `end`; None if it is not there."""
        entry = self.entries.get(block)
        if entry is not None:
            self._reading[entry.slot] += 1
        return entry

    def end(self, slot: int) -> None:
        """Note that a read that `begin` has begun has ended."""
        self._reading[slot] -= 1
        if not self._reading[slot]:
            del self._reading[slot]
            self._left.pop(slot, None)

    def lists_still(self, block: bytes, entry: KvEntry) -> bool:
        """Return True if the pool still says that the block is there: then its bytes are to be
        right."""
        return self.entries.get(block) == entry

    @property
    def confirmed(self) -> int:
        """The number that the pool may be told: nothing that was withdrawn up to it is read."""
        return next(iter(self._left.values()), self._heard)  # they do not go back

    @property
    def reading(self) -> int:
        """How many slots are being read."""
        return len(self._reading)
