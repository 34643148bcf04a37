"""The documents of one registration as they arrive, with space reserved for their bytes."""

from __future__ import annotations

from mx.coordinator.state import StateStore
from mx.core.types import SourceRecord
from mx.wire.documents import Assembler
from mx.wire.v1 import common_pb2


class Upload:
    """An async context manager; its end returns the reserved space in every case."""

    def __init__(self, state: StateStore, record: SourceRecord) -> None:
        """
        Args:
            state: The state that holds documents.
            record: The source that registers.

        Raises:
            PeerProtocolError: The manifest is malformed.
            CapacityError: The manifest is too large.
        """
        self._state = state
        self._digests = [digest for digest, _ in record.ref.documents]
        self._held: set[bytes] = set()
        self._reserved = 0
        self._assembler = Assembler(record.ref.documents, who=record.endpoint)

    @property
    def documents(self) -> dict[bytes, bytes]:
        """The complete documents, by digest."""
        return self._assembler.documents

    async def __aenter__(self) -> Upload:
        absent = await self._state.missing(self._digests)
        self._held = set(self._digests).difference(absent)
        return self

    async def __aexit__(self, *error: object) -> None:
        reserved, self._reserved = self._reserved, 0
        await self._state.unreserve(reserved)

    async def add(self, page: common_pb2.Page) -> None:
        """Add a page. Pages of documents that the state holds already are ignored.

        A sender may send such a document: another source may have sent it in the meantime.

        Raises:
            CapacityError: The documents would exceed the coordinator's limit.
            MxError: As `Assembler.add`.
        """
        if page.digest in self._held:
            return
        nbytes = len(page.data)
        await self._state.reserve(nbytes)
        self._reserved += nbytes
        self._assembler.add(page)
