"""The documents of one registration as they arrive, with space reserved for their bytes."""

from __future__ import annotations

from collections.abc import Callable

from mx.coordinator.decoding import ManifestDecoder
from mx.coordinator.state import CoordinatorState, not_sent
from mx.core.types import SourceRecord
from mx.errors import ManifestError
from mx.runtime import in_thread
from mx.wire.documents import Assembler
from mx.wire.rows import check_rows
from mx.wire.v1 import common_pb2


class Upload:
    """An async context manager; its end returns the reserved space in every case."""

    def __init__(
        self,
        state: CoordinatorState,
        record: SourceRecord,
        address: str,
        known: Callable[[str], bool] | None = None,
    ) -> None:
        """
        Args:
            state: The state that holds documents.
            record: The source that registers.
            address: Where it registers from.
            known: Says of which models it need not send the documents that the state holds; None:
                of all.

        Raises:
            PeerProtocolError: The manifest is malformed.
            CapacityError: The manifest is too large.
        """
        self._state = state
        self._record = record
        self._address = address
        self._known = known
        self._digests = [digest for digest, _ in record.documents]
        self._held: set[bytes] = set()
        self._reserved = 0
        self._assembler = Assembler(record.documents, who=record.endpoint)

    @property
    def documents(self) -> dict[bytes, bytes]:
        """The complete documents, by digest."""
        return self._assembler.documents

    async def __aenter__(self) -> Upload:
        absent = await self._state.missing(self._digests, self._address, self._known)
        self._held = set(self._digests).difference(absent)
        return self

    async def __aexit__(self, *error: object) -> None:
        reserved, self._reserved = self._reserved, 0
        await self._state.unreserve(reserved, self._address)

    async def add(self, page: common_pb2.Page) -> None:
        """Add a page. Pages of documents that the state holds already are ignored.

        A sender may send such a document: another source may have sent it in the meantime.

        Raises:
            CapacityError: The documents would exceed the coordinator's limit, or that of the
                address.
            MxError: As `Assembler.add`.
        """
        if page.digest in self._held:
            return
        nbytes = len(page.data)
        await self._state.reserve(nbytes, self._address)
        self._reserved += nbytes
        self._assembler.add(page)

    async def finish(self, decoded: ManifestDecoder) -> None:
        """Decode the manifest, and check the rows of the table.

        Raises:
            ManifestError: It can't be decoded; then nothing of it is held.
            PeerProtocolError: The rows are wrong, or a document was not sent; the same.
        """
        documents = dict(self.documents)
        for digest in self._digests:
            data = documents.get(digest)
            if data is None and digest in self._held:
                data = self._state.document(digest)
            if data is None:
                raise not_sent(digest)
            documents[digest] = data
        try:
            await decoded.check(self._record.ref, documents, self._address)
        except ManifestError as error:
            raise ManifestError(
                f"the manifest can't be decoded: {error.message}", hint=error.hint
            ) from error
        table = self._record.table
        for digest, _ in table.documents:
            await in_thread(check_rows, table, documents[digest])
