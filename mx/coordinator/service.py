"""The Coordinator service: requests checked by the codec, answered from the state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from mx import codec
from mx.coordinator.paging import ANSWER_BYTES, pages_of
from mx.coordinator.pulls import PullsServicer
from mx.coordinator.state import StateStore
from mx.coordinator.watchers import INTERVAL_S, Watcher
from mx.core.membership import Change, ChangeKind, Listed
from mx.errors import CapacityError, ClosedError, PeerProtocolError
from mx.wire.documents import Assembler, pages
from mx.wire.v1 import coordinator_pb2 as pb

_T = TypeVar("_T")

MAX_WATCHERS = 4096
REGISTER_TIMEOUT_S = 60.0
_MAX_RESOLVED = 256
_MAX_MISSING = 4096
#: A manifest this small is sent along with the answer to Resolve; each document is one page.
_INLINE_BYTES = 1 << 20

_EVENT_KINDS = {
    ChangeKind.UP: pb.WatchEvent.KIND_SOURCE_UP,
    ChangeKind.CHANGED: pb.WatchEvent.KIND_SOURCE_CHANGED,
    ChangeKind.LAYERS: pb.WatchEvent.KIND_LAYERS,
    ChangeKind.GONE: pb.WatchEvent.KIND_SOURCE_GONE,
}


class CoordinatorServicer(PullsServicer):
    """Give it to `mx.wire.server.listen`; `stop` ends the watches."""

    def __init__(self, state: StateStore) -> None:
        super().__init__(state.now)
        self._state = state
        self._watchers: set[Watcher] = set()
        self._stopping = False
        self._stopped = asyncio.Event()
        state.subscribe(self._on_changes)

    def stop(self) -> None:
        """End every watch and heartbeat stream, and refuse new ones."""
        self._stopping = True
        self._stopped.set()
        for watcher in self._watchers:
            watcher.woken.set()

    # -- sources --------------------------------------------------------------------------------

    async def Register(self, requests: AsyncIterator[Any], context: Any) -> pb.RegisterResponse:
        del context
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT_S):
                return await self._register(requests)
        except TimeoutError:
            raise PeerProtocolError(
                f"the registration took more than {REGISTER_TIMEOUT_S:g} s"
            ) from None

    async def _register(self, requests: AsyncIterator[Any]) -> pb.RegisterResponse:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("part") != "source":
            raise PeerProtocolError("Register: the first message carries the source")
        source = first.source
        record = codec.source_from_wire(source)
        secret = codec.secret_from_wire(source.binding_secret)
        refs = list(zip(record.ref.digests, record.ref.sizes, strict=True))
        assembler = Assembler(refs, who=record.endpoint)
        rows = codec.RowsDecoder(record.table, source.table.rows)
        absent = set(await self._state.missing(record.ref.digests))
        reserved = sum({digest: nbytes for digest, nbytes in refs if digest in absent}.values())
        await self._state.reserve(reserved)
        try:
            async for request in requests:
                match request.WhichOneof("part"):
                    case "page":
                        # One that is held need not come again, but may: it came while we asked.
                        assembler.add(request.page)
                    case "rows":
                        rows.check(request.rows)
                    case _:
                        raise PeerProtocolError("Register: pages and rows follow the source")
            rows.finish()
        finally:
            await self._state.unreserve(reserved)
        record = await self._state.register(
            record,
            assembler.documents,
            secret,
            replaces_revision=source.replaces_revision,
            row_count=source.table.rows,
        )
        return pb.RegisterResponse(
            source_id=record.source_id,
            lease_s=self._state.lease_s,
            coordinator_epoch=self._state.epoch,
            model=codec.key_to_wire(record.model),
        )

    async def Missing(self, request: pb.MissingRequest, context: Any) -> pb.MissingResponse:
        del context
        if len(request.digests) > _MAX_MISSING:
            raise PeerProtocolError(f"more than {_MAX_MISSING} digests")
        digests = [codec.digest_from_wire(digest, "digests") for digest in request.digests]
        return pb.MissingResponse(digests=await self._state.missing(digests))

    async def Heartbeat(
        self, requests: AsyncIterator[pb.HeartbeatRequest], context: Any
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        del context
        async for request in self._until_stopped(requests):
            if not 0 <= request.gb_per_s < float("inf"):
                raise PeerProtocolError("gb_per_s is no rate")
            await self._state.heartbeat(
                codec.source_id_from_wire(request.source_id),
                codec.secret_from_wire(request.binding_secret),
                codec.state_from_wire(request.state),
                request.readers,
                request.gb_per_s,
            )
            yield pb.HeartbeatResponse(
                lease_s=self._state.lease_s, coordinator_epoch=self._state.epoch
            )

    async def _until_stopped(self, requests: AsyncIterator[_T]) -> AsyncIterator[_T]:
        """gRPC complains at length of streams that it has to cut."""
        stopping = asyncio.create_task(self._stopped.wait(), name="mx-heartbeat-end")
        try:
            while True:
                reading = asyncio.ensure_future(anext(requests, None))
                await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    return
                request = reading.result()
                if request is None:
                    return
                yield request
        finally:
            stopping.cancel()

    async def Advertise(self, request: pb.AdvertiseRequest, context: Any) -> pb.AdvertiseResponse:
        del context
        source_id = codec.source_id_from_wire(request.source_id)
        secret = codec.secret_from_wire(request.binding_secret)
        held = codec.ranges_from_wire(request.held)
        listed = await self._state.source(source_id)
        codec.check_held(listed.record.table, held, rows=listed.row_count)
        await self._state.advertise(source_id, secret, request.generation, held)
        return pb.AdvertiseResponse()

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Any
    ) -> pb.DeregisterResponse:
        del context
        await self._state.deregister(
            codec.source_id_from_wire(request.source_id),
            codec.secret_from_wire(request.binding_secret),
        )
        return pb.DeregisterResponse()

    # -- questions --------------------------------------------------------------------------------

    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:
        del context
        found = await self._state.resolve(request.name, request.revision, request.variant)
        response = pb.ResolveResponse(
            model=codec.key_to_wire(found.model), manifest=codec.ref_to_wire(found.ref)
        )
        nbytes = 0
        for listed in found.sources[:_MAX_RESOLVED]:
            source = _source(listed)
            nbytes += source.ByteSize()
            if nbytes > ANSWER_BYTES and response.sources:
                break
            response.sources.append(source)
        if request.inline_documents and sum(found.ref.sizes) <= _INLINE_BYTES:
            for digest in dict.fromkeys(found.ref.digests):
                data = self._state.document(digest)
                if data is not None:
                    response.documents.extend(pages(digest, data))
        return response

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> AsyncIterator[pb.ListModelsResponse]:
        del request, context
        models = [
            pb.Model(
                model=codec.key_to_wire(model.model),
                manifest=codec.ref_to_wire(model.ref),
                nbytes=model.nbytes,
                layers=model.layers,
                sources=model.sources,
            )
            for model in await self._state.models()
        ]
        for page in pages_of(models):
            yield pb.ListModelsResponse(models=page)

    async def ListSources(
        self, request: pb.ListSourcesRequest, context: Any
    ) -> AsyncIterator[pb.ListSourcesResponse]:
        del context
        now = self._state.now()
        statuses = [
            pb.SourceStatus(
                source=_source(listed),
                lease_left_s=max(0.0, listed.lease_until_s - now),
                readers=listed.readers,
                gb_per_s=listed.gb_per_s,
            )
            for listed in await self._state.sources(request.name)
        ]
        for page in pages_of(statuses):
            yield pb.ListSourcesResponse(sources=page, coordinator_epoch=self._state.epoch)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        del context
        if len(self._watchers) >= MAX_WATCHERS:
            raise CapacityError(f"the coordinator has {MAX_WATCHERS} watchers, its limit")
        listed = await self._state.sources(request.name)
        watcher = Watcher(request.name, request.revision, [s.record for s in listed])
        # The messages are made before anything else can change what is listed.
        snapshot = [_up(s) for s in listed if watcher.wants(s.record)]
        self._watchers.add(watcher)
        try:
            for event in snapshot:
                yield event
            yield pb.WatchEvent(kind=pb.WatchEvent.KIND_SNAPSHOT_END)
            while not self._stopping:
                await watcher.woken.wait()
                for change in watcher.drain():
                    yield _event(change)
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._watchers.discard(watcher)
        raise ClosedError("the coordinator is shutting down")

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for watcher in self._watchers:
            watcher.push(changes)


def _source(listed: Listed) -> pb.Source:
    return codec.source_to_wire(listed.record, row_count=listed.row_count)


def _up(listed: Listed) -> pb.WatchEvent:
    return pb.WatchEvent(kind=pb.WatchEvent.KIND_SOURCE_UP, source=_source(listed))


def _event(change: Change) -> pb.WatchEvent:
    return pb.WatchEvent(
        kind=_EVENT_KINDS[change.kind],
        source=codec.source_to_wire(change.record, row_count=0),
        reason=change.reason,
    )
