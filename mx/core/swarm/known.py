"""The table of peers that a pull knows, connected or not. Pure: time is an argument.

The table is bounded and aged: a peer that was not named for long is dropped. In a full table, a
peer that only another peer has named yields to one that a coordinator or a source lists, so that a
peer that names thousands does not displace the listed ones.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from mx.core.types import SourceRecord

#: The most peers in the table.
MOST_KNOWN = 1024
#: A peer that was not named for this long is dropped.
KNOWN_S = 300.0
#: The most banned peers that are remembered: they lied, or hold another model by now.
MOST_BANNED = 4096


@dataclass(slots=True)
class _KnownSource:
    record: SourceRecord
    named_at_s: float
    listed: bool  # a coordinator lists it, or it greeted this pull; else another peer named it


class KnownPeers:
    """The peers that one pull knows, by key."""

    def __init__(self, *, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[str, _KnownSource] = {}
        self._banned: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[SourceRecord]:
        return (known.record for known in self._known.values())

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def record(self, key: str) -> SourceRecord:
        """Return the record of a known peer.

        Raises:
            KeyError: The peer is not known.
        """
        return self._known[key].record

    def name(
        self, record: SourceRecord, now_s: float, *, listed: bool, keep: Container[str] = ()
    ) -> bool:
        """Add a peer, or record that it was named again.

        Args:
            record: The peer.
            now_s: The time.
            listed: A coordinator or a source lists it, or it greeted this pull.
            keep: The keys of peers that must not be dropped for it.

        Returns:
            False if it is banned, or the table is full.
        """
        key = record.key
        if key in self._banned:
            return False
        known = self._known.get(key)
        if known is not None and known.listed and not listed:
            return True  # another peer's record does not replace a listed one
        if known is None and len(self._known) >= self._most and not self._evict(listed, keep):
            return False
        self._known[key] = _KnownSource(record, now_s, listed)
        return True

    def _evict(self, listed: bool, keep: Container[str]) -> bool:
        """Drop the peer that was named longest ago, preferably one that is not listed.

        Returns:
            False if no peer may be dropped.
        """
        candidates = [
            (known.listed, known.named_at_s, key)
            for key, known in self._known.items()
            if key not in keep and (listed or not known.listed)
        ]
        if not candidates:
            return False
        del self._known[min(candidates)[2]]
        return True

    def prune(self, now_s: float, keep: Container[str]) -> None:
        """Drop the peers that were not named for `KNOWN_S`, except those in `keep`."""
        for key in [
            key
            for key, known in self._known.items()
            if now_s - known.named_at_s > KNOWN_S and key not in keep
        ]:
            del self._known[key]

    def forget(self, key: str) -> None:
        """Drop a peer that did not answer, or refused. It is known again when it is named again."""
        self._known.pop(key, None)

    def ban(self, key: str) -> None:
        """Drop a peer for good."""
        self.forget(key)
        self._banned[key] = None
        while len(self._banned) > MOST_BANNED:
            del self._banned[next(iter(self._banned))]

    def banned(self, key: str) -> bool:
        """Return True if the peer is banned."""
        return key in self._banned
