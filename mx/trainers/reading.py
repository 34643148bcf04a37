"""Connects to all parts of a model: finds and describes them, and opens a session to each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from mx.contexts import OwnAsyncContext
from mx.core.pages import Pages, check_page
from mx.core.topology import Place
from mx.core.types import Manifest, SourceRecord
from mx.errors import ManifestError, MxError, NoSourceError, PeerProtocolError
from mx.fetching.connector import Connector
from mx.fetching.files import DocumentCollector
from mx.fetching.options import PullOptions
from mx.fetching.paths import plan_paths
from mx.fetching.reads import Connection
from mx.fetching.resolver import fetch_manifest
from mx.runtime import in_thread
from mx.tasks import end_tasks
from mx.trainers.pieces import DOCUMENT, PartDocument, PartPiece, pieces_of
from mx.transport import Transport
from mx.wire.channel import Remote, Role
from mx.wire.locate import Locator
from mx.wire.pages import fetch_pages

T = TypeVar("T")

#: The most parts of a model.
MOST_PARTS = 4096
_MOST_TICKET_BYTES = 1 << 20


class PartAddress(NamedTuple):
    """Where one part is lent, and what it is: `identity` in hexadecimal digits."""

    endpoint: str
    source_id: str
    name: str
    revision: str
    variant: str
    identity: str

    @classmethod
    def of(cls, record: SourceRecord) -> PartAddress:
        """Return that of a registered source."""
        model, identity = record.model, record.ref.identity.hex()
        return cls(record.endpoint, record.source_id, *model, identity)


class PartsTicket(NamedTuple):
    """Where all parts are, in the order of ranks, and the version of the whole model's layout."""

    layout_version: int
    parts: tuple[PartAddress, ...]

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps([self.layout_version, self.parts], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> PartsTicket:
        """Return what `encode` has made of it. Raises ValueError for anything else."""
        if len(data) > _MOST_TICKET_BYTES:
            raise ValueError("it is too long")
        try:
            version, parts = json.loads(data)
            found = tuple(PartAddress(*each) for each in parts)
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if type(version) is not int or not 0 < len(found) <= MOST_PARTS:
            raise ValueError(f"{len(found)} parts, layout version {version!r}")
        if not all(isinstance(each, str) for part in found for each in part):
            raise ValueError("an address is no text")
        return cls(version, found)


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all of these, which run at the same time. When one raises an error, the
    others are cancelled, and have ended when that goes out."""
    tasks = [asyncio.create_task(work, name="mx-part") for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await end_tasks(*tasks)


class LocatedPart(NamedTuple):
    """A part that was found: its source, what it has, and what it says of the whole."""

    record: SourceRecord
    manifest: Manifest
    document: PartDocument
    pieces: list[PartPiece | None]


class PartsReader(OwnAsyncContext):
    """The connections to all parts of one revision; on the loop. `close` it."""

    def __init__(
        self, options: PullOptions, place: Callable[[], Place], transports: Mapping[str, Transport]
    ) -> None:
        """
        Args:
            options: How they are reached; of a pull.
            place: Returns this process's place.
            transports: The transports by name.
        """
        self._options, self._place, self._transports = options, place, transports
        self._connector = Connector(options, place, transports, lambda: None)
        self.parts: list[LocatedPart] = []

    async def describe(self, addresses: Sequence[PartAddress]) -> list[LocatedPart]:
        """Ask each part what it has.

        Raises:
            ManifestError: One has other weights by now, or what they say does not fit together.
            SourceError: One does not answer.
        """
        self.parts = await gathered(map(self._describe, addresses))
        ranks = len(self.parts)
        for rank, part in enumerate(self.parts):
            if (part.document.rank, part.document.ranks) != (rank, ranks):
                raise ManifestError(f"{part.record.model} is not part {rank} of {ranks}")
        return self.parts

    async def _describe(self, address: PartAddress) -> LocatedPart:
        where = replace(
            self._options,
            name=address.name,
            revision=address.revision,
            variant=address.variant,
            coordinator=None,
            peer=address.endpoint,
        )
        async with Locator(where) as locator:
            located = await locator.locate()
            records = [each for each in located.sources if each.source_id == address.source_id]
            if located.ref.identity.hex() != address.identity or not records:
                raise NoSourceError(
                    f"{address.endpoint} has another {located.model} by now",
                    hint="start the pull again, for the new weights",
                )
            manifest = await fetch_manifest(locator, located)
            sides = [each for each in manifest.packaging.side_files if each.path == DOCUMENT]
            if len(sides) != 1:
                raise ManifestError(f"{located.model} has no {DOCUMENT}: it is no part")
            collector = DocumentCollector()
            only = manifest.packaging._replace(side_files=tuple(sides))
            await locator.write_side_files(
                replace(manifest, packaging=only), located.sources, collector.write
            )
        (data,) = collector.take().values()
        document = await in_thread(PartDocument.decode, data)
        return LocatedPart(records[0], manifest, document, pieces_of(manifest.layout))

    async def open(self) -> list[Connection]:
        """Open a session to each part, over the best of the paths that work.

        Raises:
            MxError: One can't be reached.
        """
        return await gathered(map(self._open, self.parts))

    async def _open(self, part: LocatedPart) -> Connection:
        found = plan_paths(self._options, self._place(), self._transports, [part.record])
        causes: list[MxError] = []
        for path in found.paths:
            try:
                return await self._connector.open(path, part.manifest.layout)
            except MxError as error:
                causes.append(error)
        if causes:
            raise causes[0]
        raise NoSourceError(
            f"no path leads to {part.record.model} at {part.record.endpoint}: {found.why_none()}"
        )

    async def pages(self, rank: int) -> Pages:
        """Return the digests of the blocks of a part.

        Raises:
            DigestError: They are not those of its identity.
            SourceError: It does not send them.
        """
        part, pages = self.parts[rank], Pages(self.parts[rank].manifest)
        remote = Remote(Role.SOURCE, part.record.endpoint, self._options.tls)
        found = fetch_pages(
            self._connector.channel(part.record.endpoint),
            remote,
            part.manifest.ref,
            pages.missing,
            pages.nbytes,
            stall_timeout_s=self._options.stall_timeout_s,
        )
        async for batch in found:
            for layer, page in batch:
                check_page(part.manifest, layer, page)
                pages.put(layer, page)
        if pages.missing:
            raise PeerProtocolError(f"{remote.address} sent no block digests of some layers")
        return pages

    async def close(self) -> None:
        """Close all sessions, and end their leases. Idempotent."""
        await self._connector.close()
