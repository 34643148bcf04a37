"""Documents: blobs addressed by their blake3, sent in pages and verified by the receiver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from blake3 import blake3

from mx.errors import (
    CapacityError,
    DigestError,
    PeerProtocolError,
    PeerTimeoutError,
    UnknownModelError,
)
from mx.runtime import in_thread, uncut
from mx.units import KIB, MIB, format_bytes
from mx.wire.channel import Remote, Role, translating
from mx.wire.rpc import Stub
from mx.wire.v1 import common_pb2 as pb

DOCUMENT_DIGEST_BYTES = 32
PAGE_BYTES = MIB
#: The most bytes of a document in one request: with what is around them, less than
#: `mx.core.budget.REQUEST_BYTES`.
PIECE_BYTES = 64 * KIB
MAX_DOCUMENT_BYTES = 256 * MIB
_MAX_DIGESTS = 4096
#: The most digests in one request.
_ASKED_DIGESTS = 1024
_TIMEOUT_S = 30.0
#: The least rate of documents that are handed on page by page,
_LEAST_BYTES_PER_S = MIB
#: and how long a page of them may take, beside the weights on a narrow link too.
PAGE_TIMEOUT_S = 10.0

#: Takes a document's bytes in order: (digest, offset, data). Offset 0 begins the document again.
WritePage = Callable[[bytes, int, bytes], None]


@dataclass(slots=True)
class _Partial:
    """The received part of a document; `data` is empty if the bytes go to `write`."""

    nbytes: int = 0
    hasher: blake3 = field(default_factory=blake3)
    data: bytearray = field(default_factory=bytearray)


def pages(digest: bytes, data: bytes, page_nbytes: int = PAGE_BYTES) -> Iterator[pb.Page]:
    """Yield `data` in pages of at most so many bytes; an empty document is one empty page."""
    for offset in range(0, max(1, len(data)), page_nbytes):
        yield pb.Page(
            digest=digest,
            offset=offset,
            nbytes=len(data),
            data=data[offset : offset + page_nbytes],
        )


class Assembler:
    """Puts the pages of expected documents together and verifies them.

    Pages of one document come in order, documents in any order and interleaved.
    """

    def __init__(
        self, refs: Sequence[tuple[bytes, int]], *, who: str, write: WritePage | None = None
    ) -> None:
        """
        Args:
            refs: The expected documents: (digest, nbytes) of each.
            who: The sender's name in errors.
            write: Takes the bytes as they arrive, instead of memory. They are verified once their
                digest is no longer `missing`.

        Raises:
            PeerProtocolError: `refs` is malformed.
            CapacityError: A document is too large.
        """
        self._who = who
        self._write = write
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
                raise PeerProtocolError("one document is announced with two sizes", peer=who)
        self._partial: dict[bytes, _Partial] = {}
        self._done: dict[bytes, bytes] = {}

    @property
    def documents(self) -> dict[bytes, bytes]:
        """The complete documents, by digest; empty bytes for those that went to `write`."""
        return self._done

    @property
    def missing(self) -> list[bytes]:
        """The digests of the documents that are not complete."""
        return [digest for digest in self._wanted if digest not in self._done]

    def add(self, page: pb.Page) -> None:
        """Add a page.

        Raises:
            PeerProtocolError: The page leaves a gap, overlaps, or is not expected.
            DigestError: The document is complete and does not match its digest.
        """
        digest, name = page.digest, f"document {page.digest[:8].hex()}"
        nbytes = self._wanted.get(digest)
        if nbytes is None:
            raise PeerProtocolError(f"{name} was not requested", peer=self._who)
        if digest in self._done:
            raise PeerProtocolError(f"{name} was sent twice", peer=self._who)
        partial = self._partial.setdefault(digest, _Partial())
        if page.nbytes != nbytes:
            raise PeerProtocolError(
                f"{name} has {page.nbytes} bytes where {nbytes} were announced", peer=self._who
            )
        if page.offset != partial.nbytes:
            raise PeerProtocolError(
                f"{name}: a page at {page.offset}, expected {partial.nbytes}", peer=self._who
            )
        if len(page.data) > PAGE_BYTES or (not page.data and nbytes):
            raise PeerProtocolError(f"{name}: a page of {len(page.data)} bytes", peer=self._who)
        if page.offset + len(page.data) > nbytes:
            raise PeerProtocolError(f"{name} is longer than announced", peer=self._who)
        partial.hasher.update(page.data)
        if self._write is None:
            partial.data += page.data
        else:
            self._write(digest, partial.nbytes, page.data)
        partial.nbytes += len(page.data)
        if partial.nbytes == nbytes:
            del self._partial[digest]
            if partial.hasher.digest() != digest:
                raise DigestError(
                    f"{name} from {self._who} does not match its digest",
                    peer=self._who,
                    hint="try another source",
                )
            self._done[digest] = bytes(partial.data)


class DocumentsServicer:
    """The Documents service."""

    def __init__(
        self, lookups: Callable[[Any, Sequence[bytes]], Callable[[bytes], bytes | None]]
    ) -> None:
        """
        Args:
            lookups: Returns, for a call's servicer context and the digests that it asks for, what
                returns a document by its digest, or None: also for one that the caller may not
                have. They run on the event loop and must not block. The reply keeps the bytes
                alive.
        """
        self._lookups = lookups

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.Page]:
        if len(request.digests) > _MAX_DIGESTS:
            raise PeerProtocolError(f"more than {_MAX_DIGESTS} documents in one request")
        lookup = self._lookups(context, request.digests)
        for digest in request.digests:
            data = lookup(digest)
            if data is None:
                raise UnknownModelError(f"document {digest[:8].hex()} is not held here")
            for page in pages(digest, data):
                yield page


async def fetch(
    channel: grpc.aio.Channel,
    refs: Sequence[tuple[bytes, int]],
    *,
    who: Remote | str,
    timeout_s: float = _TIMEOUT_S,
) -> dict[bytes, bytes]:
    """Fetch documents into memory, never more than their announced sizes.

    Args:
        channel: A channel to a process that serves documents.
        refs: The documents: (digest, nbytes) of each.
        who: The process at the channel's other end; a string is the address of a source.
        timeout_s: The deadline of each request.

    Returns:
        All documents by digest, verified.

    Raises:
        UnknownModelError: The peer lacks a document.
        PeerProtocolError: The peer sends pages that were not requested, or too few.
        DigestError: A document does not match its digest.
        MxError: As `translate`, if the RPC fails.
    """
    remote = Remote(Role.SOURCE, who) if isinstance(who, str) else who
    assembler = Assembler(refs, who=remote.address)
    async with aclosing(_pages(channel, assembler.missing, remote, timeout_s)) as found:
        async for page in found:
            assembler.add(page)
    _require_all(assembler, remote)
    return assembler.documents


async def fetch_to(
    channel: grpc.aio.Channel,
    refs: Sequence[tuple[bytes, int]],
    write: WritePage,
    *,
    who: Remote,
) -> None:
    """Fetch documents as `fetch` does, but hand their bytes to `write`.

    Args:
        channel: A channel to a process that serves documents.
        refs: The documents: (digest, nbytes) of each.
        write: Takes the pages, on a thread. They are verified only when this function returns.
        who: The process at the channel's other end.

    Raises:
        PeerTimeoutError: No page came for `PAGE_TIMEOUT_S`.
        MxError: As `fetch`, and as `write`.
    """
    assembler = Assembler(refs, who=who.address, write=write)
    timeout_s = _TIMEOUT_S + sum(nbytes for _, nbytes in refs) / _LEAST_BYTES_PER_S
    async with aclosing(_pages(channel, assembler.missing, who, timeout_s)) as found:
        while (page := await _next(found, who)) is not None:
            # Uncut: a write that goes on after this call would write into what comes next.
            await uncut(in_thread(assembler.add, page))
    _require_all(assembler, who)


async def _next(pages: AsyncIterator[pb.Page], who: Remote) -> pb.Page | None:
    """Return the next page, None at the end. Raises PeerTimeoutError."""
    try:
        async with asyncio.timeout(PAGE_TIMEOUT_S):
            return await anext(pages, None)
    except TimeoutError:
        raise PeerTimeoutError(
            f"{who.address} sent nothing of a document for {PAGE_TIMEOUT_S:g} s", peer=who.address
        ) from None


async def _pages(
    channel: grpc.aio.Channel, digests: Sequence[bytes], remote: Remote, timeout_s: float
) -> AsyncGenerator[pb.Page, None]:
    stub = Stub(channel, pb.DESCRIPTOR.services_by_name["Documents"], remote)
    for first in range(0, len(digests), _ASKED_DIGESTS):
        request = pb.FetchRequest(digests=digests[first : first + _ASKED_DIGESTS])
        stream = stub.Fetch(request, timeout=timeout_s)
        try:
            with translating(remote):
                async for page in stream:
                    yield page
        finally:
            stream.cancel()


def _require_all(assembler: Assembler, remote: Remote) -> None:
    if assembler.missing:
        raise PeerProtocolError("the peer did not send all documents", peer=remote.address)
