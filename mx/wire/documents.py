"""Documents: blobs addressed by their blake3, sent in pages, believed only when they match."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc.aio

from mx.core.digest import document_digest
from mx.errors import CapacityError, DigestError, PeerProtocolError, UnknownModelError
from mx.units import MIB, format_bytes
from mx.wire.channel import Remote, Role, translating
from mx.wire.rpc import Stub
from mx.wire.v1 import common_pb2 as pb

DOCUMENT_DIGEST_BYTES = 32
PAGE_BYTES = MIB
MAX_DOCUMENT_BYTES = 256 * MIB
_MAX_DIGESTS = 4096


def pages(digest: bytes, data: bytes) -> Iterator[pb.Page]:
    """`data` cut into pages of at most 1 MiB; an empty document is one empty page."""
    for offset in range(0, max(1, len(data)), PAGE_BYTES):
        yield pb.Page(
            digest=digest,
            offset=offset,
            nbytes=len(data),
            data=data[offset : offset + PAGE_BYTES],
        )


class Assembler:
    """Puts pages together. Takes only the documents of `refs`, in memory as they arrive.

    `refs` are (digest, nbytes). Pages of one document come in order, documents in any order and
    interleaved. `who` names the sender in errors.
    """

    def __init__(self, refs: Sequence[tuple[bytes, int]], *, who: str) -> None:
        self._who = who
        self._wanted: dict[bytes, int] = {}
        for digest, nbytes in refs:
            if len(digest) != DOCUMENT_DIGEST_BYTES:
                raise PeerProtocolError(f"a document digest of {len(digest)} bytes", peer=who)
            if nbytes > MAX_DOCUMENT_BYTES:
                raise CapacityError(
                    f"a document of {format_bytes(nbytes)} is larger than the limit of "
                    f"{format_bytes(MAX_DOCUMENT_BYTES)}"
                )
            if self._wanted.setdefault(digest, nbytes) != nbytes:
                raise PeerProtocolError("one document under two sizes", peer=who)
        self._partial: dict[bytes, bytearray] = {}
        self._done: dict[bytes, bytes] = {}

    @property
    def documents(self) -> dict[bytes, bytes]:
        """The complete ones, by digest."""
        return self._done

    @property
    def missing(self) -> list[bytes]:
        """Digests that have not come, or not wholly."""
        return [digest for digest in self._wanted if digest not in self._done]

    def add(self, page: pb.Page) -> None:
        """Raises PeerProtocolError for gaps, overlaps and excess, DigestError for wrong bytes."""
        digest, name = page.digest, f"document {page.digest[:8].hex()}"
        nbytes = self._wanted.get(digest)
        if nbytes is None:
            raise PeerProtocolError(f"{name} was not asked for", peer=self._who)
        if digest in self._done:
            raise PeerProtocolError(f"{name} came twice", peer=self._who)
        partial = self._partial.setdefault(digest, bytearray())
        if page.nbytes != nbytes:
            raise PeerProtocolError(
                f"{name} has {page.nbytes} bytes where {nbytes} were announced", peer=self._who
            )
        if page.offset != len(partial):
            raise PeerProtocolError(
                f"{name}: a page at {page.offset}, expected {len(partial)}", peer=self._who
            )
        if len(page.data) > PAGE_BYTES or (not page.data and nbytes):
            raise PeerProtocolError(f"{name}: a page of {len(page.data)} bytes", peer=self._who)
        if page.offset + len(page.data) > nbytes:
            raise PeerProtocolError(f"{name} is longer than announced", peer=self._who)
        partial += page.data
        if len(partial) == nbytes:
            data = bytes(self._partial.pop(digest))
            if document_digest(data) != digest:
                raise DigestError(
                    f"{name} does not match its digest", peer=self._who, hint="try another source"
                )
            self._done[digest] = data


class DocumentsServicer:
    """The Documents service over `lookup`, which is called in the event loop and must not block.

    It returns a document's bytes (immutable, kept alive by the reply) or None.
    """

    def __init__(self, lookup: Callable[[bytes], bytes | None]) -> None:
        self._lookup = lookup

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.Page]:
        del context
        if len(request.digests) > _MAX_DIGESTS:
            raise PeerProtocolError(f"more than {_MAX_DIGESTS} documents in one request")
        for digest in request.digests:
            data = self._lookup(digest)
            if data is None:
                raise UnknownModelError(f"document {digest[:8].hex()} is not held here")
            for page in pages(digest, data):
                yield page


async def fetch(
    channel: grpc.aio.Channel,
    refs: Sequence[tuple[bytes, int]],
    *,
    who: Remote | str,
    timeout_s: float = 30.0,
) -> dict[bytes, bytes]:
    """Fetch documents, given as (digest, nbytes), from whoever is at the channel's other end.

    Returns all of them by digest, verified. Never holds more than the announced sizes. Raises
    what `translate` makes of a failed RPC, UnknownModelError where the peer lacks one,
    PeerProtocolError or DigestError (both naming the peer) for a peer that lies.
    """
    remote = Remote(Role.SOURCE, who) if isinstance(who, str) else who
    peer = remote.address
    assembler = Assembler(refs, who=peer)
    digests = assembler.missing
    stub = Stub(channel, pb.DESCRIPTOR.services_by_name["Documents"], remote)
    for first in range(0, len(digests), _MAX_DIGESTS):
        request = pb.FetchRequest(digests=digests[first : first + _MAX_DIGESTS])
        stream = stub.Fetch(request, timeout=timeout_s)
        try:
            with translating(remote):
                async for page in stream:
                    assembler.add(page)
        finally:
            stream.cancel()
    if assembler.missing:
        raise PeerProtocolError("the peer ended before all documents came", peer=peer)
    return assembler.documents
