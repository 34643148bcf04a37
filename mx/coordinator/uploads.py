"""The documents of one registration as they arrive, with room taken for what has come."""

from __future__ import annotations

from mx.coordinator.state import StateStore
from mx.core.types import SourceRecord
from mx.wire.documents import Assembler
from mx.wire.v1 import common_pb2


class Upload:
    """An async context manager; the room is given back at its end, whatever that is."""

    def __init__(self, state: StateStore, record: SourceRecord) -> None:
        """Raises PeerProtocolError, CapacityError for a manifest that is too large."""
        self._state = state
        self._digests = record.ref.digests
        self._held: set[bytes] = set()
        self._reserved = 0
        refs = list(zip(record.ref.digests, record.ref.sizes, strict=True))
        self._assembler = Assembler(refs, who=record.endpoint)

    @property
    def documents(self) -> dict[bytes, bytes]:
        """Those that are complete, by digest."""
        return self._assembler.documents

    async def __aenter__(self) -> Upload:
        absent = await self._state.missing(self._digests)
        self._held = set(self._digests).difference(absent)
        return self

    async def __aexit__(self, *error: object) -> None:
        reserved, self._reserved = self._reserved, 0
        await self._state.unreserve(reserved)

    async def add(self, page: common_pb2.Page) -> None:
        """Take a page. Raises as `Assembler.add`, and CapacityError where there is no room for it.

        A document that is held need not come again, but may: it came while the sender asked.
        """
        if page.digest in self._held:
            return
        nbytes = len(page.data)
        await self._state.reserve(nbytes)
        self._reserved += nbytes
        self._assembler.add(page)
