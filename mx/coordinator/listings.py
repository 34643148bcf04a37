"""The part of the Coordinator service that lists models, bundles and sources."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from mx import codec
from mx.coordinator.bounds import PrincipalLocks
from mx.coordinator.paging import LIST_BYTES, pages_of
from mx.coordinator.progress import PullsServicer
from mx.coordinator.view import Views
from mx.coordinator.watchers import AnyChange
from mx.core.changes import ChangeKind, PullChange
from mx.core.types import SourceRecord
from mx.wire.principals import payer_of
from mx.wire.progress import pull_to_wire
from mx.wire.v1 import coordinator_pb2 as pb


class ListingServicer(PullsServicer):
    """The calls ListModels, ListBundles and ListSources, and those of pulls. What a caller may not
    see is left out."""

    def __init__(self, views: Views) -> None:
        """
        Args:
            views: What callers may see.
        """
        super().__init__(views)
        views.state.store.share_pulls(views.board)
        self._messages = SourceMessages()
        self._turns = PrincipalLocks()

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> AsyncIterator[pb.ListModelsResponse]:
        del request
        view = self._view(context)
        sees = view.sees()
        async with self._turn(context):
            found = await view.models(sees)
        models = (
            codec.by_name(
                pb.Model,
                each,
                model=codec.key_to_wire(each.model),
                manifest=codec.ref_to_wire(each.ref),
            )
            for each in found
        )
        async for page in self._listed(models, context):
            yield pb.ListModelsResponse(models=page)

    async def ListBundles(
        self, request: pb.ListBundlesRequest, context: Any
    ) -> AsyncIterator[pb.ListBundlesResponse]:
        view = self._view(context)
        sees = view.sees(request.name)
        async with self._turn(context):
            found = await view.bundles(request.name, sees)
        bundles = (codec.by_name(pb.Bundle, each) for each in found)
        async for page in self._listed(bundles, context):
            yield pb.ListBundlesResponse(bundles=page)

    async def ListSources(
        self, request: pb.ListSourcesRequest, context: Any
    ) -> AsyncIterator[pb.ListSourcesResponse]:
        now, view = self._now(), self._view(context)
        sees, *observes = view.sees_rows(request.name, pulls=request.pulls)
        async with self._turn(context):
            # Found before others run: they are kept only while their sources are listed.
            found = await view.sources(request.name, sees)
            sources = [(self._messages.source(listed.record), listed) for listed in found]
            pulls = [pull for each in observes for pull in view.pulls(request.name, each)]
        statuses = (
            pb.SourceStatus(
                source=source,
                lease_left_s=max(0.0, listed.lease_until_s - now),
                readers=listed.readers,
                gb_per_s=listed.gb_per_s,
            )
            for source, listed in sources
        )
        async for page in self._listed(statuses, context):
            yield pb.ListSourcesResponse(sources=page, coordinator_epoch=view.epoch)
        if pulls:
            async for page in self._listed(map(pull_to_wire, pulls), context):
                yield pb.ListSourcesResponse(pulls=page)

    async def _listed(self, messages: Iterable[Any], context: Any) -> AsyncIterator[list[Any]]:
        """Yield messages in pages, and let other calls in between: first those of others."""
        pages = pages_of(messages, LIST_BYTES)
        while True:
            async with self._turn(context):
                page = next(pages, None)
            if page is None:
                return
            yield page

    @asynccontextmanager
    async def _turn(self, context: Any) -> AsyncIterator[None]:
        async with self._turns.of(payer_of(context)):
            await asyncio.sleep(0)
            yield


# -- the wire messages of sources and their changes, each made once for all answers ----------------

#: The most changes whose messages are kept: watchers read each at about the same time.
_MAX_EVENTS = 2048

_KINDS = {
    ChangeKind.UP: pb.WatchEvent.KIND_SOURCE_UP,
    ChangeKind.CHANGED: pb.WatchEvent.KIND_SOURCE_CHANGED,
    ChangeKind.LAYERS: pb.WatchEvent.KIND_LAYERS,
    ChangeKind.GONE: pb.WatchEvent.KIND_SOURCE_GONE,
}


class SourceMessages:
    """The last messages of each source. Callers only read them, and copy them into answers."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[SourceRecord, pb.Source, int]] = {}
        # By the id() of the changed record, which the entry itself keeps alive.
        self._events: OrderedDict[
            int, tuple[object, dict[tuple[ChangeKind, str], pb.WatchEvent]]
        ] = OrderedDict()

    def source(self, record: SourceRecord) -> pb.Source:
        """Return the message of a listed source; makes a new one if its record has changed."""
        return self.sized(record)[0]

    def sized(self, record: SourceRecord) -> tuple[pb.Source, int]:
        """Return the message of a listed source, and its size in bytes."""
        made = self._sources.get(record.source_id)
        if made is None or made[0] is not record:
            message = codec.source_to_wire(record)
            made = self._sources[record.source_id] = (record, message, message.ByteSize())
        return made[1:]

    def event(self, change: AnyChange) -> pb.WatchEvent:
        """Return the message that watchers get for a change."""
        record = change.record
        _, events = self._events.setdefault(id(record), (record, {}))
        key = (change.kind, change.reason)
        event = events.get(key)
        if event is None:
            event = events[key] = self._made(change)
            if len(self._events) > _MAX_EVENTS:
                self._events.popitem(last=False)
        return event

    def _made(self, change: AnyChange) -> pb.WatchEvent:
        gone, reason = change.kind is ChangeKind.GONE, change.reason
        if isinstance(change, PullChange):
            if gone:
                pull = pb.PullProgress(pull_id=change.record.pull_id)
                kind = pb.WatchEvent.KIND_PULL_GONE
                return pb.WatchEvent(kind=kind, pull=pull, reason=reason)
            return pb.WatchEvent(kind=pb.WatchEvent.KIND_PULL, pull=pull_to_wire(change.record))
        source = codec.source_to_wire(change.record) if gone else self.source(change.record)
        return pb.WatchEvent(kind=_KINDS[change.kind], source=source, reason=reason)

    def forget_all(self) -> None:
        """Drop the messages of all sources; those that are still listed are made anew."""
        self._sources.clear()

    def forget(self, source_id: str) -> None:
        """Drop the message of a source that is gone."""
        self._sources.pop(source_id, None)
