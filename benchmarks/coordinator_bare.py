"""A server of grpc.aio that answers a coordinator's calls and decides nothing: the reference.

It has no bounds, leases, versions or proofs, and believes whatever it gets. Run as a program: it
prints one line of JSON with the address that it listens on, and ends at SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from mx.core.versions import headers
from mx.wire.v1 import coordinator_pb2 as pb

LEASE_S = 5.0
_INTERVAL_S = 0.1
_OPTIONS = (
    # Else gRPC cancels calls at random while more than a thousand wait for the event loop, and
    # disconnects clients that ping each second.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
)


class Bare:
    """The calls that `coordinator_load` makes."""

    def __init__(self) -> None:
        self._sources: dict[str, list[pb.Source]] = defaultdict(list)
        self._changes: list[pb.WatchEvent] = []

    async def Missing(self, request: pb.MissingRequest, context: Any) -> pb.MissingResponse:
        context.set_trailing_metadata(headers())
        return pb.MissingResponse(nonce=os.urandom(16))

    async def Register(
        self, requests: AsyncIterator[pb.RegisterRequest], context: Any
    ) -> pb.RegisterResponse:
        context.set_trailing_metadata(headers())
        source = (await anext(requests)).source
        async for _ in requests:
            pass
        shown = pb.Source()
        shown.CopyFrom(source)
        shown.ClearField("source_secret")
        self._sources[source.model.name].append(shown)
        self._changes.append(pb.WatchEvent(kind=pb.WatchEvent.KIND_SOURCE_UP, source=shown))
        return pb.RegisterResponse(
            source_id=source.source_id, lease_s=LEASE_S, coordinator_epoch="one", model=source.model
        )

    async def Heartbeat(
        self, requests: AsyncIterator[pb.HeartbeatRequest], context: Any
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        await context.send_initial_metadata(headers())
        async for _ in requests:
            yield pb.HeartbeatResponse(lease_s=LEASE_S, coordinator_epoch="one")

    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:
        sources = self._sources.get(request.name, [])
        if not sources:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown", headers())
        context.set_trailing_metadata(headers())
        first = sources[0]
        return pb.ResolveResponse(model=first.model, manifest=first.manifest, sources=sources)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchEvent]:
        await context.send_initial_metadata(headers())
        yield pb.WatchEvent(kind=pb.WatchEvent.KIND_SNAPSHOT_END)
        seen = 0
        while True:
            while seen < len(self._changes):
                batch = self._changes[seen : seen + 64]
                seen += len(batch)
                yield pb.WatchEvent(batch=batch)
            await asyncio.sleep(_INTERVAL_S)


def _handlers(bare: Bare) -> dict[str, Any]:
    def handler(name: str, make: Any, request: Any, response: Any) -> Any:
        return make(
            getattr(bare, name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )

    one, many = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    sent, both = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    return {
        "Missing": handler("Missing", one, pb.MissingRequest, pb.MissingResponse),
        "Register": handler("Register", sent, pb.RegisterRequest, pb.RegisterResponse),
        "Heartbeat": handler("Heartbeat", both, pb.HeartbeatRequest, pb.HeartbeatResponse),
        "Resolve": handler("Resolve", one, pb.ResolveRequest, pb.ResolveResponse),
        "Watch": handler("Watch", many, pb.WatchRequest, pb.WatchEvent),
    }


async def _serve() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server(options=_OPTIONS)
    name = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
    handler = grpc.method_handlers_generic_handler(name, _handlers(Bare()))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"listen": f"127.0.0.1:{port}"}), flush=True)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve())
