"""The Kv service of a process: finds the pool that a reader asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from mx.core.policy import Right
from mx.errors import PeerProtocolError, PeerRefusedError
from mx.source.requests import first_message
from mx.wire.server import Service
from mx.wire.v1 import kv_pb2 as pb

if TYPE_CHECKING:
    from mx.kv.pool import KvPool
    from mx.source.server import SourceServer

#: The pools of this process that are open, by the name of their model; on the loop.
pools: dict[str, KvPool] = {}


class KvServicer:
    """Answers at each address of a process, for all of its pools."""

    def __init__(self, server: SourceServer) -> None:
        self._server = server

    async def Open(self, request_iterator: AsyncIterator[pb.KvRequest], context: Any) -> None:
        """Give a reader a lease on a pool, and the pool's index, until the stream ends."""
        first = await first_message(request_iterator)
        if first is None or first.WhichOneof("request") != "hello":
            raise PeerProtocolError("the first message of a KV stream must be a hello")
        pool = pools.get(first.hello.name)
        if pool is None:
            raise PeerRefusedError("this process has no KV blocks of that model")
        access = self._server.access
        if access is None:
            await pool.answer(first.hello, request_iterator, context, "")
            return
        name = first.hello.name
        with access.standing(context, (Right.PULL,), name, kv=True) as caller:
            await pool.answer(first.hello, request_iterator, context, caller.name)


def service(server: SourceServer) -> Service:
    """Return the service, for `mx.packs.Pack.services`."""

    def on_call(context: Any, _: object) -> None:
        if server.access is not None:
            server.access.require(context, (Right.PULL,), granted=False)

    return Service(pb.DESCRIPTOR.services_by_name["Kv"], KvServicer(server), on_call)
