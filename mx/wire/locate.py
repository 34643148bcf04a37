"""Looks a model up: at the coordinator, or at a peer that the user named.

Neither is believed: what they answer to NAME@PIN must be what the pin names, and documents prove
themselves. Without a pin the coordinator decides which weights a name stands for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc.aio

from mx import codec
from mx.contexts import OwnAsyncContext
from mx.core.reference import check_pin, pinned_name
from mx.core.revisions import MAIN, is_main, update_number
from mx.core.types import (
    CHECKPOINT,
    AddressTable,
    Manifest,
    ManifestRef,
    ModelKey,
    Packaging,
    SourceRecord,
)
from mx.core.variant import companion_path
from mx.errors import (
    LocalError,
    ManifestError,
    MxError,
    NoSourceError,
    PeerLostError,
    PeerProtocolError,
    PeerTimeoutError,
    SourceError,
    UnknownModelError,
)
from mx.runtime import in_thread
from mx.transport import TlsFiles
from mx.wire.address import join_address, split_address
from mx.wire.channel import Remote, Role, dial
from mx.wire.client import CoordinatorClient, LocatedModel
from mx.wire.documents import WritePage, fetch, fetch_to
from mx.wire.rows import with_rows
from mx.wire.rpc import Stub
from mx.wire.status import planned_here
from mx.wire.tls import diagnosing
from mx.wire.v1 import peer_pb2

if TYPE_CHECKING:
    from mx.publickey import PublicKey


@dataclass(frozen=True)
class LocateRequest:
    """Where to look, and for what: `name` may be NAME@PIN. `peer` is asked in place of the
    coordinator, which `hold` tells that the model is going to be served. `allow_older` takes an
    older revision where the newest can't be obtained whole. With `owners` the answer has to be
    what one of these keys vouches for (`mx.fetching.owners`)."""

    name: str
    revision: str = ""
    variant: str = ""
    coordinator: str | None = None
    peer: str | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    connect_timeout_s: float = 3.0
    hold: bool = False
    allow_older: bool = False
    owners: tuple[PublicKey, ...] = ()


#: What was seen of names, by coordinator and name: a coordinator that has lost its state is told.
_seen: OrderedDict[tuple[str, str], bytes] = OrderedDict()
_MOST_SEEN = 1024


class Locator(OwnAsyncContext):
    """One pull's look-ups; on the loop. `close` it."""

    def __init__(self, where: LocateRequest) -> None:
        self.where = self._where = where
        self._client: CoordinatorClient | None = None
        #: How many sources there were when `again` was called last; what the name means by then,
        #: if that is another revision which can be obtained whole.
        self.source_count = 0
        self.superseded_by: ModelKey | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def name(self) -> str:
        return self._where.name

    @property
    def asks_coordinator(self) -> bool:
        """True if it looks models up at the coordinator, False if at a peer."""
        return self._where.peer is None

    async def locate(self) -> LocatedModel:
        """Return the model and its sources.

        Raises:
            UnknownModelError: There is no such model.
            CoordinatorError: The coordinator does not answer, or refuses.
            SourceError: The named peer does not answer, or refuses.
        """
        if self._where.peer is not None:
            return await self._describe(self._where.peer)
        check_pin_of(self._where.name)
        found = await self._coordinator().resolve(
            self._where.name,
            self._where.revision,
            self._where.variant,
            serves=self._where.hold,
            allow_older=self._where.allow_older,
            seen=_seen.get(self._at, b""),
        )
        self._note(found.seen)
        remote = self._coordinator().remote
        if not found.ref.pinned_by(self._pin):
            raise ManifestError(
                f"the coordinator at {remote.address} answers {self._where.name} with "
                f"{found.model}@{found.ref.pin.hex()}, which the pin does not name",
                hint="it is broken or lies: ask another one, or a source with `peer`",
            )
        planned_here(found.ref.layout_version, f"{found.model} is listed", remote)
        found = found._replace(sources=_same(found.sources, found.ref))
        return found._replace(newest=None, older=()) if self._pin else found

    @property
    def _pin(self) -> str:
        return self._where.name.partition("@")[2]

    @property
    def _at(self) -> tuple[str, str]:
        return self._where.coordinator or "", self._where.name.partition("@")[0]

    def _note(self, seen: bytes) -> None:
        if seen:
            _seen[self._at] = seen
            _seen.move_to_end(self._at)
            while len(_seen) > _MOST_SEEN:
                _seen.popitem(last=False)

    async def layout_version(self, key: ModelKey) -> int:
        """Return the layout version for a model that this process is about to hold. Raises as
        `CoordinatorClient.layout_version`."""
        return await self._coordinator().layout_version(key)

    async def again(self, located: LocatedModel) -> list[SourceRecord]:
        """Return the sources that hold the located weights, or parts of them, now. Raises as
        `locate`."""
        if self._where.peer is not None:
            sources = (await self._describe(self._where.peer)).sources
            self.source_count = len(sources)
        else:
            key, pin = located.model, located.ref.identity.hex()
            client = self._coordinator()
            # In all revisions: the revision's name may stand for other weights by now.
            found = await client.resolve(f"{key.name}@{pin}", "", key.variant, documents=False)
            sources = found.sources
            self.source_count = found.source_count
            if located.newest is not None:
                self.superseded_by = found.newest
        return [*_same(sources, located.ref)]

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

    async def _describe(self, address: str) -> LocatedModel:
        where = self._where
        check_pin_of(where.name)
        name, _, pin = where.name.partition("@")
        remote = Remote(Role.SOURCE, address, where.tls)
        service = peer_pb2.DESCRIPTOR.services_by_name["Peer"]
        stub = Stub(self._channel(address), service, remote)
        async with diagnosing(remote):
            response = await stub.Describe(
                peer_pb2.DescribeRequest(name=name), timeout=where.connect_timeout_s
            )
        records = [codec.source_from_wire(source) for source in response.sources]
        listed = [
            _dialable(record, address)
            for record in records
            if record.model.name == name
            and record.ref.pinned_by(pin)
            and _is_meant(record.model.revision, where.revision, pinned=bool(pin))
        ]
        wanted = ModelKey(name, where.revision or MAIN, where.variant or _variant_of(listed, pin))
        found = [record for record in listed if record.model.variant == wanted.variant]
        found.sort(key=lambda record: update_number(record.model.revision), reverse=True)
        if not found:
            held = ", ".join(str(record.model) for record in records) or "nothing of that name"
            raise UnknownModelError(
                f"{address} does not hold {wanted}" + (f"@{pin}" if pin else ""),
                hint=f"it holds {held}",
            )
        ref = found[0].ref
        planned_here(ref.layout_version, f"{address} holds {found[0].model}", remote)
        return LocatedModel(found[0].model, ref, _same(found, ref), vouch=found[0].vouch)

    async def documents(self, located: LocatedModel) -> dict[bytes, bytes]:
        """Fetch the manifest's documents: from the coordinator, else from any source.

        Returns:
            Their bytes by digest.

        Raises:
            NoSourceError, or the last error: Neither the coordinator nor a source served them.
        """
        refs = [each for each in located.ref.documents if each[0] not in located.documents]
        found = await self._from_anywhere(refs, located.sources, "description")
        return {**located.documents, **found}

    async def table(self, source: SourceRecord) -> AddressTable:
        """Return a source's table with its rows: from the coordinator, else from the source.

        Raises:
            PeerProtocolError: A row is not valid.
            NoSourceError, or the last error: Neither has served them.
        """
        refs = source.table.documents
        found = await self._from_anywhere(refs, [source], "layer-address table")
        return await in_thread(with_rows, source.table, found[refs[0][0]]) if refs else source.table

    async def _from_anywhere(
        self, refs: Sequence[tuple[bytes, int]], sources: Sequence[SourceRecord], what: str
    ) -> dict[bytes, bytes]:
        """Return documents, from the coordinator, else from the first of these sources that has
        all of them."""
        if not refs:
            return {}
        causes: list[MxError] = []
        if self._client is not None:
            try:
                return await self._client.fetch(refs)
            except MxError as error:
                causes.append(error)
        for source in sources:
            remote = Remote(Role.SOURCE, source.endpoint)
            try:
                return await fetch(self._channel(source.endpoint), refs, who=remote)
            except MxError as error:
                causes.append(error)
        raise _none_served(what, self.name, causes)

    async def write_side_files(
        self,
        manifest: Manifest,
        sources: Sequence[SourceRecord],
        write: WritePage,
        on_failure: Callable[[str, MxError], None] = lambda endpoint, error: None,
    ) -> str:
        """Pass the side files to `write` page by page: those among the manifest's documents, or
        fetched from those of `sources` with the same files, which alone hold them.

        Args:
            manifest: The manifest.
            sources: Sources of these weights. Those that hold all layers are asked first: others
                may not have fetched the files yet.
            write: Takes the pages, on a thread. It gets a document from the start again where
                another source has to send it.
            on_failure: Called with the endpoint of a source that did not send them, and why.

        Returns:
            The endpoint of the source that served them; "" if they were among the documents.

        Raises:
            NoSourceError: No source served all of them.
            LocalError: `write` raised it.
        """
        refs = list({(side.digest, side.nbytes) for side in manifest.packaging.side_files})
        if all(digest in manifest.documents for digest, _ in refs):
            await in_thread(write_side_files, manifest.packaging, manifest.documents, write)
            return ""
        causes: list[MxError] = []
        known = _with_files(sources, manifest.ref)
        for source in sorted(known, key=lambda source: not source.whole):
            remote = Remote(Role.SOURCE, source.endpoint)
            try:
                await fetch_to(self._channel(source.endpoint), refs, write, who=remote)
            except LocalError:  # of `write`: another source would not help
                raise
            except MxError as error:
                causes.append(error)
                on_failure(source.endpoint, error)
            else:
                return source.endpoint
        raise _no_files(self._where.name, sources, causes)

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


def write_side_files(
    packaging: Packaging, documents: Mapping[bytes, bytes], write: WritePage
) -> None:
    """Pass the side files, which are among these documents, to `write`. Blocks."""
    for digest in {side.digest for side in packaging.side_files}:
        write(digest, 0, documents[digest])


def _none_served(what: str, name: str, causes: Sequence[MxError]) -> MxError:
    if causes and not isinstance(causes[-1], SourceError | UnknownModelError):
        return causes[-1]
    said = f"no source served the {what} of {name}: "
    why = "; ".join(map(_named, causes)) or "none is registered"
    if causes and all(isinstance(each, PeerLostError | PeerTimeoutError) for each in causes):
        said, why = f"no source of {name} answers: ", "; ".join(each.message for each in causes)
    return NoSourceError(said + why, hint="mx sources shows who is registered")


def _named(cause: MxError) -> str:
    """Return what an error says, after its peer if it does not name that."""
    said, peer = str(cause), getattr(cause, "peer", "")
    return f"{peer}: {said}" if peer not in said else said


def _no_files(name: str, sources: Sequence[SourceRecord], causes: Sequence[MxError]) -> MxError:
    if causes or not sources:
        return _none_served("side files", name, causes)
    ref = next((source.ref for source in sources if source.ref.packaging), None)
    hint = "wait for a source that has them, or pull the weights without `out`"
    if ref is not None:
        hint = f"{pinned_name(sources[0].model, ref)} has other ones"
    return NoSourceError(f"no source of {name} that is listed now has its files", hint=hint)


def _with_files(sources: Sequence[SourceRecord], ref: ManifestRef) -> list[SourceRecord]:
    return [source for source in sources if source.ref.packaging == ref.packaging]


def _same(sources: Iterable[SourceRecord], ref: ManifestRef) -> tuple[SourceRecord, ...]:
    """Return those sources that hold these weights."""
    found = []
    for source in sources:
        if source.ref.same_weights(ref):
            found.append(source)
    return tuple(found)


def check_pin_of(name: str) -> None:
    """Raise ConfigError if `name` is NAME@PIN with a malformed pin."""
    _, at, pin = name.partition("@")
    if at:
        check_pin(pin)


def _is_meant(revision: str, wanted: str, *, pinned: bool) -> bool:
    """Return True if a model of this revision is wanted, by `mx.core.bindings.Bindings.find`."""
    return revision == wanted or (not wanted and (pinned or is_main(revision)))


def _variant_of(records: Sequence[SourceRecord], pin: str) -> str:
    """Return the variant that a name alone means at a peer, as `mx.core.meanings.meaning`: a
    companion only by its pin."""
    variants = {record.model.variant for record in records}
    if not pin:
        variants = {variant for variant in variants if not companion_path(variant)}
    return variants.pop() if len(variants) == 1 else CHECKPOINT


def _dialable(record: SourceRecord, address: str) -> SourceRecord:
    """Return the record with the address that answered: a source behind another name, or behind
    address translation, does not know the address at which readers reach it."""
    host, port = split_address(address)
    if not port:
        raise PeerProtocolError(f"{address} has no port", peer=address)
    return replace(record, endpoint=join_address(host, port))
