"""The part of the Coordinator service that lists models, bundles and sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from mx import codec
from mx.coordinator.bounds import PrincipalLocks
from mx.coordinator.messages import SourceMessages
from mx.coordinator.paging import LIST_BYTES, pages_of
from mx.coordinator.progress import PullsServicer
from mx.coordinator.state import CoordinatorState
from mx.core.answers import Listed
from mx.core.registry import Registry
from mx.errors import UnknownSourceError
from mx.wire.principals import SEES, Access, payer_of
from mx.wire.v1 import coordinator_pb2 as pb


class ListingServicer(PullsServicer):
    """The calls ListModels, ListBundles and ListSources, and those of pulls. What a caller may not
    see is left out."""

    def __init__(self, state: CoordinatorState, access: Access) -> None:
        """
        Args:
            state: The state.
            access: Who may do what.
        """
        super().__init__(state.now, self._registered_from, access, state.limits)
        self._state = state
        state.store.share_pulls(self._board, self._pulls_have_changed)
        self._messages = SourceMessages()
        self._turns = PrincipalLocks()

    async def _registered_from(self, source_id: str) -> str | None:
        try:
            return (await self._source(source_id)).address
        except UnknownSourceError:
            return None

    async def _source(self, source_id: str) -> Listed:
        return await self._state.ask(lambda registry: registry.source(source_id))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> AsyncIterator[pb.ListModelsResponse]:
        del request
        sees = self._seen_by(context)
        async with self._turn(context):
            found = await self._state.ask(Registry.models)
        models = (
            pb.Model(
                model=codec.key_to_wire(model.model),
                manifest=codec.ref_to_wire(model.ref),
                nbytes=model.nbytes,
                layers=model.layers,
                sources=model.sources,
                pin_only=model.pin_only,
                restored=model.restored,
            )
            for model in found
            if sees(model.model.name)
        )
        async for page in self._listed(models, context):
            yield pb.ListModelsResponse(models=page)

    async def ListBundles(
        self, request: pb.ListBundlesRequest, context: Any
    ) -> AsyncIterator[pb.ListBundlesResponse]:
        sees = self._seen_by(context, request.name)
        async with self._turn(context):
            found = await self._state.ask(lambda registry: registry.bundles(request.name))
        bundles = (
            pb.Bundle(
                name=bundle.name,
                revision=bundle.revision,
                variant=bundle.variant,
                ranks=bundle.ranks,
                missing=bundle.missing,
                missing_count=bundle.missing_count,
                named=bundle.named,
            )
            for bundle in found
            if sees(bundle.name)
        )
        async for page in self._listed(bundles, context):
            yield pb.ListBundlesResponse(bundles=page)

    async def ListSources(
        self, request: pb.ListSourcesRequest, context: Any
    ) -> AsyncIterator[pb.ListSourcesResponse]:
        now, sees = self._state.now(), self._seen_by(context, request.name)
        async with self._turn(context):
            # Found before others run: they are kept only while their sources are listed.
            found = await self._state.ask(lambda registry: registry.sources(request.name))
            sources = [
                (self._messages.source(listed.record), listed)
                for listed in found
                if sees(listed.record.model.name)
            ]
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
            yield pb.ListSourcesResponse(sources=page, coordinator_epoch=self._state.epoch)

    def _seen_by(self, context: Any, name: str = "") -> Callable[[str], bool]:
        """Return what says which models a caller sees.

        Args:
            context: The call's servicer context.
            name: The model that it asks about; "" for all.

        Raises:
            NotAllowedError: It does not see that one, or none.
        """
        caller = self._access.require(context, SEES, name or None)
        return lambda model: self._access.allows(caller, SEES, model)

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
