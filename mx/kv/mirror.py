"""What a reader knows of one pool: its index, and which blocks it reads just now. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mx.errors import PeerProtocolError
from mx.kv.offers import Change, Offer

#: The most blocks of one pool that a reader knows; what a pool offers beyond them is not used.
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
    offers: dict[bytes, Offer] = field(default_factory=dict)
    #: How many blocks were offered beyond `most_blocks`.
    ignored: int = 0
    _reading: Counter[int] = field(default_factory=Counter)  # by slot
    _left: list[tuple[int, set[int]]] = field(default_factory=list)  # withdrawn and still read
    _heard: int = 0

    def hear(self, changes: Sequence[Change], number: int) -> None:
        """Take the pool's changes, and the number to confirm after them.

        Raises:
            PeerProtocolError: A block is in no slot of the pool, or has digests of another form.
        """
        left: set[int] = set()
        for block, offer in changes:
            before = self.offers.pop(block, None)
            if before is not None and self._reading[before.slot]:
                left.add(before.slot)
            if offer is None:
                continue
            if not 0 <= offer.slot < self.slots or len(offer.digests) != self.digest_nbytes:
                raise PeerProtocolError("it offers a block that its pool has no place for")
            if len(self.offers) < self.most_blocks:
                self.offers[block] = offer
            else:
                self.ignored += 1
        self._heard = max(self._heard, number)
        if left:
            self._left.append((number, left))

    def begin(self, block: bytes) -> Offer | None:
        """Return where a block is, which is read from now until `end`; None if it is not there."""
        offer = self.offers.get(block)
        if offer is not None:
            self._reading[offer.slot] += 1
        return offer

    def end(self, slot: int) -> None:
        """Note that a read that `begin` has begun has ended."""
        self._reading[slot] -= 1
        if not self._reading[slot]:
            del self._reading[slot]
            for _, left in self._left:
                left.discard(slot)
            while self._left and not self._left[0][1]:
                self._left.pop(0)

    def offers_still(self, block: bytes, offer: Offer) -> bool:
        """Return True if the pool still says that the block is there: then its bytes are to be
        right."""
        return self.offers.get(block) == offer

    @property
    def confirmed(self) -> int:
        """The number that the pool may be told: nothing that was withdrawn up to it is read."""
        return self._left[0][0] - 1 if self._left else self._heard

    @property
    def reading(self) -> int:
        """How many slots are being read."""
        return len(self._reading)
