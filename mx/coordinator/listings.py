"""The part of the Coordinator service that lists models, bundles and sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from mx import codec
from mx.coordinator.bounds import PrincipalLocks
from mx.coordinator.messages import SourceMessages
from mx.coordinator.paging import LIST_BYTES, pages_of
from mx.coordinator.progress import PullsServicer
from mx.coordinator.view import Views
from mx.wire.principals import payer_of
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
        views.state.store.share_pulls(views.board, self._pulls_have_changed)
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
        sees = view.sees(request.name)
        async with self._turn(context):
            # Found before others run: they are kept only while their sources are listed.
            found = await view.sources(request.name, sees)
            sources = [(self._messages.source(listed.record), listed) for listed in found]
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
