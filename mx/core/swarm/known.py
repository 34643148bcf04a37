"""Which peers a pull knows of, beside those that it talks to. Pure: time is an argument.

The table is bounded and aged: peers that nobody has named for long are dropped, and when it is
full one that was only told of by another peer makes place for one that a coordinator, or a source,
lists, so that a peer that names thousands keeps none of the real ones out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from mx.core.types import SourceRecord

#: Peers that are known at most.
MOST_KNOWN = 1024
#: One that was not named for so long is dropped.
KNOWN_S = 300.0
#: Peers that lied, or hold something else by now, that are remembered.
MOST_BANNED = 4096


@dataclass(slots=True)
class _Known:
    record: SourceRecord
    named_at_s: float
    listed: bool  # by a coordinator, or it greeted by itself; else another peer told of it


class KnownPeers:
    """One pull's, by source id."""

    def __init__(self, *, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[str, _Known] = {}
        self._banned: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[SourceRecord]:
        return (known.record for known in self._known.values())

    def __contains__(self, source_id: str) -> bool:
        return source_id in self._known

    def record(self, source_id: str) -> SourceRecord:
        """Raises KeyError."""
        return self._known[source_id].record

    def name(
        self, record: SourceRecord, now_s: float, *, listed: bool, keep: Container[str] = ()
    ) -> bool:
        """Learn of a peer, or that it is still there. Those in `keep` are not dropped for it.

        Returns:
            False if it is banned, or there is no place for it.
        """
        source_id = record.source_id
        if source_id in self._banned:
            return False
        known = self._known.get(source_id)
        if known is not None and known.listed and not listed:
            return True  # a record at second hand does not replace one at first hand
        if known is None and len(self._known) >= self._most and not self._make_place(listed, keep):
            return False
        self._known[source_id] = _Known(record, now_s, listed)
        return True

    def _make_place(self, listed: bool, keep: Container[str]) -> bool:
        """Drop the one named longest ago, at second hand if there is such."""
        able = [
            (known.listed, known.named_at_s, source_id)
            for source_id, known in self._known.items()
            if source_id not in keep and (listed or not known.listed)
        ]
        if not able:
            return False
        del self._known[min(able)[2]]
        return True

    def prune(self, now_s: float, keep: Container[str]) -> None:
        """Drop those that were not named for long, but for those in `keep`."""
        for source_id in [
            source_id
            for source_id, known in self._known.items()
            if now_s - known.named_at_s > KNOWN_S and source_id not in keep
        ]:
            del self._known[source_id]

    def forget(self, source_id: str) -> None:
        """It did not answer, or refused: it is known again when it is named again."""
        self._known.pop(source_id, None)

    def ban(self, source_id: str) -> None:
        """Never know it again."""
        self.forget(source_id)
        self._banned[source_id] = None
        while len(self._banned) > MOST_BANNED:
            del self._banned[next(iter(self._banned))]

    def banned(self, source_id: str) -> bool:
        return source_id in self._banned
