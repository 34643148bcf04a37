"""What proves that a state in Redis was written by coordinators alone.

A process that can write to Redis could otherwise bind names. Each commit carries two MACs by the
coordinators' receipt key: one over how far the state has come and a sum of all that is kept, with
which a coordinator begins, and one over the commit itself, with which the others follow. So a
forged value, an old one that was valid once, and one that was deleted show alike: the state is not
the one that was signed. The sum (of keyed hashes, one for each value, modulo 2**256: Bellare and
Micciancio, "A New Paradigm for Collision-Free Hashing", AdHash) is never in Redis. Pure.

A release before this one signs nothing. What it has committed is believed unless MACs are required.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blake3 import blake3

from mx.redis_state.records import Write

_CONTEXT = "mx 2026 coordinator version 1: MACs of a state in Redis"
_MODULUS = 1 << 256


@dataclass(frozen=True, slots=True)
class Head:
    """How far a state has come, in the texts that Redis has."""

    epoch: str
    doubt: str
    number: int
    token: str
    latest: int


class StateMac:
    """The MACs of one coordinator, and the sum of what it knows to be kept."""

    def __init__(self, receipt_key: bytes, *, required: bool) -> None:
        """
        Args:
            receipt_key: The key that the coordinators share.
            required: Whether commits without MACs are refused.
        """
        self._key = blake3(receipt_key, derive_key_context=_CONTEXT).digest()
        self.required = required
        self._hashes: dict[str, int] = {}
        self._total = 0

    @property
    def check(self) -> str:
        """A text by which coordinators see that they have the same key."""
        return self._mac("key")

    def load(self, hashes: Mapping[str, Mapping[bytes, bytes]]) -> None:
        """Begin with all that is kept, by kind and key."""
        self._hashes = {
            (field := f"{kind}:{key.decode()}"): self._hash(field, value)
            for kind, values in hashes.items()
            for key, value in values.items()
        }
        self._total = sum(self._hashes.values()) % _MODULUS

    def take(self, writes: Iterable[Write]) -> None:
        """Take up what a commit has written."""
        for kind, key, value in writes:
            field = f"{kind}:{key}"
            self._total -= self._hashes.pop(field, 0)
            if value:
                self._hashes[field] = self._hash(field, value.encode())
                self._total += self._hashes[field]
        self._total %= _MODULUS

    def of_state(self, head: Head) -> str:
        """Return the MAC of the state that this coordinator knows."""
        return self._of_head("state", head, self._total)

    def of_nothing(self, head: Head) -> str:
        """Return the MAC of a state in which nothing is kept yet."""
        return self._of_head("state", head, 0)

    def of_commit(self, head: Head, before: str, record: str, writes: Iterable[Write]) -> list[str]:
        """Return the MACs of a commit: of the state after it, and of the commit.

        Args:
            head: How far the state has come with it.
            before: The token of the commit before.
            record: What the commit says.
            writes: What it writes.
        """
        total = self._total
        last = {f"{kind}:{key}": value for kind, key, value in writes}
        for field, value in last.items():
            total -= self._hashes.get(field, 0)
            total += self._hash(field, value.encode()) if value else 0
        total %= _MODULUS
        state = self._of_head("state", head, total)
        return [state, self._of_head("commit", head, total, before, record)]

    def _of_head(self, kind: str, head: Head, total: int, *more: str) -> str:
        how_far = (head.epoch, head.doubt, str(head.number), head.token, str(head.latest))
        return self._mac(kind, *how_far, f"{total:x}", *more)

    def _hash(self, field: str, value: bytes) -> int:
        data = len(field).to_bytes(8, "big") + field.encode() + value
        return int.from_bytes(blake3(data, key=self._key).digest(), "big")

    def _mac(self, *texts: str) -> str:
        return blake3(json.dumps(texts).encode(), key=self._key).hexdigest()


def equal(said: bytes | None, mac: str) -> bool:
    """Return True if what Redis has is this MAC."""
    return said is not None and hmac.compare_digest(said, mac.encode())
