"""Answers the calls of a host's cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from mx import codec
from mx.core.types import ModelKey
from mx.errors import CapacityError, MxError
from mx.tasks import end_tasks
from mx.wire.cache import CachedModel, CachedModelAddress, CacheStatus, WantedModel
from mx.wire.v1 import cache_pb2 as pb

_T = TypeVar("_T")

#: How often the cache reports that a model still arrives.
REPORT_S = 0.5
#: How many calls a cache answers at a time.
MOST_CALLS = 512


class CacheServicer:
    """Answers the calls of clients."""

    def __init__(
        self,
        hold: Callable[[WantedModel, list[tuple[int, int]]], Awaitable[CachedModelAddress]],
        status: Callable[[], Awaitable[CacheStatus]],
    ) -> None:
        """
        Args:
            hold: Returns where a model is, once it is held. Sets the first item of the list to the
                (bytes so far, bytes in total) meanwhile. Raises MxError: why it is not held.
            status: Returns what is held.
        """
        self._hold, self._status = hold, status
        self._calls = 0

    async def Hold(self, request: pb.HoldRequest, context: Any) -> AsyncIterator[pb.HoldEvent]:
        del context
        wanted = codec.by_name(WantedModel, request)
        key = ModelKey(
            wanted.name.partition("@")[0], wanted.revision or "main", wanted.variant or "checkpoint"
        )
        codec.check_model_key(key)
        if self._calls >= MOST_CALLS:
            raise CapacityError(f"the cache answers {MOST_CALLS} calls already, its limit")
        self._calls += 1
        progress = [(0, 0)]
        holding = asyncio.ensure_future(self._hold(wanted, progress))
        try:
            while not (await asyncio.wait((holding,), timeout=REPORT_S))[0]:
                done, total = progress[0]
                yield pb.HoldEvent(holding=pb.Holding(done_bytes=done, nbytes=total))
            yield _answer(holding)
        finally:
            self._calls -= 1
            await end_tasks(holding)

    async def Status(self, request: pb.CacheStatusRequest, context: Any) -> pb.CacheStatusResponse:
        del request, context
        status = await self._status()
        models = [_with_model(pb.CachedModel, each) for each in status.models]
        return codec.by_name(pb.CacheStatusResponse, status, models=models)


def _answer(holding: asyncio.Future[CachedModelAddress]) -> pb.HoldEvent:
    try:
        held = holding.result()
    except MxError as error:
        return pb.HoldEvent(not_held=pb.NotHeld(reason=str(error)[:1000]))
    return pb.HoldEvent(held=_with_model(pb.Held, held))


def _with_model(kind: Callable[..., _T], value: CachedModel | CachedModelAddress) -> _T:
    model, manifest = codec.key_to_wire(value.model), codec.ref_to_wire(value.ref)
    return codec.by_name(kind, value, model=model, manifest=manifest)
