"""Looks a model up: at the coordinator, or at a peer that the user named."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import grpc.aio

from mx import codec
from mx.core.bindings import MAIN, is_main, update_number
from mx.core.types import Manifest, ManifestRef, ModelKey, SourceRecord
from mx.errors import (
    LocalError,
    MxError,
    NoSourceError,
    PeerProtocolError,
    SourceError,
    UnknownModelError,
)
from mx.runtime import in_thread
from mx.transport import TlsFiles
from mx.wire.address import join_address, split_address
from mx.wire.channel import Remote, Role, dial
from mx.wire.client import CoordinatorClient
from mx.wire.documents import WritePage, fetch, fetch_to
from mx.wire.pages import fetch_pages
from mx.wire.rpc import Stub
from mx.wire.tls import diagnosing
from mx.wire.v1 import peer_pb2


class Where(Protocol):
    """The part of a pull's options that says where to look."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def coordinator(self) -> str | None: ...
    @property
    def peer(self) -> str | None: ...
    @property
    def tls(self) -> TlsFiles | None: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def connect_timeout_s(self) -> float: ...


@dataclass(frozen=True)
class Located:
    """A model that was found. All `sources` hold the manifest of `ref`, or parts of it; `inlined`
    are those of its documents that came with the answer, by digest."""

    key: ModelKey
    ref: ManifestRef
    sources: tuple[SourceRecord, ...]
    inlined: Mapping[bytes, bytes] = field(default_factory=dict)


class Locator:
    """One pull's look-ups; on the loop. `close` it."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._client: CoordinatorClient | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def name(self) -> str:
        return self._where.name

    @property
    def asks_coordinator(self) -> bool:
        """True if it looks models up at the coordinator, False if at a peer."""
        return self._where.peer is None

    async def locate(self) -> Located:
        """Return the model and its sources.

        Raises:
            UnknownModelError: There is no such model.
            CoordinatorError: The coordinator does not answer, or refuses.
            SourceError: The named peer does not answer, or refuses.
        """
        if self._where.peer is not None:
            return await self._describe(self._where.peer)
        found = await self._coordinator().resolve(
            self._where.name, self._where.revision, self._where.variant
        )
        return Located(found.model, found.ref, tuple(found.sources), found.documents)

    async def again(self, located: Located) -> list[SourceRecord]:
        """Return the sources that hold the located weights, or parts of them, now. Raises as
        `locate`."""
        if self._where.peer is not None:
            sources = (await self._describe(self._where.peer)).sources
        else:
            key, pin = located.key, located.ref.identity.hex()
            client = self._coordinator()
            # In all revisions: the revision's name may stand for other weights by now.
            found = await client.resolve(f"{key.name}@{pin}", "", key.variant, documents=False)
            sources = tuple(found.sources)
        return [source for source in sources if _same(source.ref, located.ref)]

    def _coordinator(self) -> CoordinatorClient:
        assert self._where.coordinator is not None
        if self._client is None:
            self._client = CoordinatorClient(
                self._where.coordinator,
                tls=self._where.tls,
                insecure=self._where.insecure,
                timeout_s=self._where.connect_timeout_s,
            )
        return self._client

    async def _describe(self, address: str) -> Located:
        where = self._where
        name, _, pin = where.name.partition("@")
        remote = Remote(Role.SOURCE, address, where.tls)
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        stub = Stub(self._channel(address), service, remote)
        async with diagnosing(remote):
            response = await stub.Describe(
                peer_pb2.DescribeRequest(name=name), timeout=where.connect_timeout_s
            )
        wanted = ModelKey(name, where.revision or MAIN, where.variant)
        records = [codec.source_from_wire(source) for source in response.sources]
        found = [
            _dialable(record, address)
            for record in records
            if (record.model.name, record.model.variant) == (name, where.variant)
            and record.ref.identity.hex().startswith(pin.lower())
            and _is_meant(record.model.revision, where.revision, pinned=bool(pin))
        ]
        found.sort(key=lambda record: update_number(record.model.revision), reverse=True)
        if not found:
            held = ", ".join(str(record.model) for record in records) or "nothing of that name"
            raise UnknownModelError(
                f"{address} does not hold {wanted}" + (f"@{pin}" if pin else ""),
                hint=f"it holds {held}",
            )
        return Located(found[0].model, found[0].ref, tuple(found[:1]))

    async def documents(self, located: Located) -> dict[bytes, bytes]:
        """Fetch the manifest's four documents: from the coordinator, else from any source.

        Returns:
            Their bytes by digest.

        Raises:
            NoSourceError, or the last error: Neither the coordinator nor a source gave them.
        """
        sizes = dict(located.ref.documents)
        refs = [(digest, size) for digest, size in sizes.items() if digest not in located.inlined]
        if not refs:
            return dict(located.inlined)
        causes: list[MxError] = []
        if self._client is not None:
            try:
                return {**located.inlined, **await self._client.fetch(refs)}
            except MxError as error:
                causes.append(error)
        found = await self._from_sources(refs, located, causes)
        return {**located.inlined, **found}

    async def side_files(self, manifest: Manifest, located: Located) -> dict[bytes, bytes]:
        """Fetch the side files, which only sources hold, into memory.

        Returns:
            Their bytes by digest.

        Raises:
            NoSourceError: No source gave all of them.
        """
        refs = list({(side.digest, side.nbytes) for side in manifest.packaging.side_files})
        return await self._from_sources(refs, located, []) if refs else {}

    async def _from_sources(
        self, refs: Sequence[tuple[bytes, int]], located: Located, causes: list[MxError]
    ) -> dict[bytes, bytes]:
        for source in located.sources:
            remote = Remote(Role.SOURCE, source.endpoint)
            try:
                return await fetch(self._channel(source.endpoint), refs, who=remote)
            except MxError as error:
                causes.append(error)
        raise _none_gave("description", located.key.name, causes)

    async def write_side_files(
        self, manifest: Manifest, sources: Sequence[SourceRecord], write: WritePage
    ) -> None:
        """Pass the side files to `write` page by page: those among the manifest's documents, or
        fetched from `sources`, which alone hold them.

        Raises:
            NoSourceError: No source gave all of them.
            LocalError: `write` raised it.
        """
        refs = list({(side.digest, side.nbytes) for side in manifest.packaging.side_files})
        if all(digest in manifest.documents for digest, _ in refs):
            return await in_thread(write_side_files, manifest, write)
        causes: list[MxError] = []
        for source in sources:
            remote = Remote(Role.SOURCE, source.endpoint)
            try:
                return await fetch_to(self._channel(source.endpoint), refs, write, who=remote)
            except LocalError:  # of `write`: another source would not help
                raise
            except MxError as error:
                causes.append(error)
        raise _none_gave("side files", self._where.name, causes)

    def pages(
        self,
        source: SourceRecord,
        layers: Sequence[int],
        nbytes_of: Callable[[int], int],
        *,
        stall_timeout_s: float,
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Ask a source for pages; see `fetch_pages`."""
        return fetch_pages(
            self._channel(source.endpoint),
            Remote(Role.SOURCE, source.endpoint),
            source.ref,
            layers,
            nbytes_of,
            stall_timeout_s=stall_timeout_s,
        )

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = dial(
                address, tls=self._where.tls, insecure=self._where.insecure
            )
        return self._channels[address]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()
        if self._client is not None:
            await self._client.close()
            self._client = None


def write_side_files(manifest: Manifest, write: WritePage) -> None:
    """Pass the side files, which are among the manifest's documents, to `write`. Blocks."""
    for digest in {side.digest for side in manifest.packaging.side_files}:
        write(digest, 0, manifest.documents[digest])


def _none_gave(what: str, name: str, causes: Sequence[MxError]) -> MxError:
    if causes and not isinstance(causes[-1], SourceError | UnknownModelError):
        return causes[-1]
    return NoSourceError(
        f"no source gave the {what} of {name}: "
        + ("; ".join(str(cause) for cause in causes) or "none is registered"),
        hint="mx sources shows who is registered",
    )


def _same(one: ManifestRef, other: ManifestRef) -> bool:
    """Return True if both describe the same bytes, in the same places and chunks. Their files and
    metadata may differ."""
    return (one.content, one.chunk_nbytes) == (other.content, other.chunk_nbytes) or (
        other.identity,
        other.layout,
        other.chunk_nbytes, 0
    )


def _is_meant(revision: str, wanted: str, *, pinned: bool) -> bool:
    """Return True if a model of this revision is wanted, by `mx.core.bindings.Bindings.find`."""
    return revision == wanted or (not wanted and (pinned or is_main(revision)))


def _dialable(record: SourceRecord, address: str) -> SourceRecord:
    """Return the record with the address that answered: a source behind another name, or behind
    address translation, does not know the address at which readers reach it."""
    host, port = split_address(address)
    if not port:
        raise PeerProtocolError(f"{address} has no port", peer=address)
    return replace(record, endpoint=join_address(host, port))
